"""Training on conversations: rows hold what a chat sends and what the template writes after it."""

from __future__ import annotations

import argparse
import json

import numpy as np
import published_cases as cases
import pytest
import tokenizers

import dlm_jax
from dlm_jax.cli import sample
from dlm_jax.data import load_corpus
from dlm_jax.hf import ChatTemplate
from dlm_jax.inference.request import make_requests

BPE = cases.bpe_tokenizer()
TALK = [
    {"role": "system", "content": "be the end"},
    {"role": "user", "content": "the turn?"},
    {"role": "assistant", "content": "of the\n\nend "},
    {"role": "user", "content": " user"},
    {"role": "assistant", "content": "assistant\n"},
]
ENDS = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "gemma": "<end_of_turn>"}


def _theirs(tokenizer):
    """The tokenizer of transformers for the same file."""
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(tokenizer.content),
        bos_token="<bos>", eos_token="<|endoftext|>",
    )  # fmt: skip


def _places(messages):
    return [place for place, turn in enumerate(messages) if turn["role"] == "assistant"]


@pytest.mark.parametrize("name", cases.CHATS)
def test_a_turn_is_what_transformers_writes_for_it_after_what_a_chat_sends(name):
    theirs, source = _theirs(BPE), cases.CHATS[name]
    ours = list(ChatTemplate(source, BPE).turns(TALK))
    assert len(ours) == 2
    for place, (given, turn) in zip(_places(TALK), ours, strict=True):
        sent = theirs.apply_chat_template(
            TALK[:place], chat_template=source, add_generation_prompt=True, return_dict=False
        )
        whole = theirs.apply_chat_template(
            TALK[: place + 1], chat_template=source, return_dict=False
        )
        end = len(whole) - whole[::-1].index(theirs.convert_tokens_to_ids(ENDS[name]))
        assert theirs.decode(whole[end:]).strip() == ""
        assert given.tolist() == sent
        assert [*given, *turn] == whole[:end]


def test_marks_of_answers_change_nothing():
    plain = cases.CHATS["chatml"]
    content = "m['content']"
    marked = plain.replace(
        f"+ {content} +", f"}}}}{{% generation %}}{{{{ {content} }}}}{{% endgeneration %}}{{{{"
    )
    assert marked != plain
    for one, two in zip(
        ChatTemplate(marked, BPE).turns(TALK), ChatTemplate(plain, BPE).turns(TALK), strict=True
    ):
        np.testing.assert_array_equal(one[0], two[0])
        np.testing.assert_array_equal(one[1], two[1])


REFUSED = (
    "<|im_start|>{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<think>{% endif %}",
    "{% for m in messages %}{{ m.content }}{% endfor %}",
)


@pytest.mark.parametrize("source", REFUSED)
def test_a_template_whose_turns_are_not_those_of_a_chat_is_refused(source):
    assert BPE.encode("user").size < BPE.encode("us").size + BPE.encode("er").size
    turns = [{"role": "user", "content": "us"}, {"role": "assistant", "content": "er"}]
    with pytest.raises(
        ValueError, match="^message 2: the chat template writes other tokens before this answer.*; "
    ):
        list(ChatTemplate(source, BPE).turns(turns))


ASKED = [("hi there", "yes."), ("sort", "a b"), ("sort\n\nb a", "a b"), ("sort", "a b")]


def _talk(asked, answer):
    turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    return {"messages": turns}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    folder = tmp_path_factory.mktemp("talks")
    made = cases.write(folder / "model", "dream")
    (made / "tokenizer.json").write_text(BPE.content)
    said = {"mask_token_id": BPE.mask_id, "pad_token_id": BPE.pad_id, "eos_token_id": BPE.eos_id}
    cases.edit(made / "generation_config.json", **said)
    cases.edit(made / "config.json", vocab_size=BPE.vocab_size, **said)
    config = cases.CONFIGS["dream"] | {"vocab_size": BPE.vocab_size}
    for file in made.glob("*.safetensors*"):
        file.unlink()
    cases.write_weights(made, cases.tensors("dream", config), 1)
    cases.edit(made / "tokenizer_config.json", chat_template=cases.CHATS["chatml"])
    lines = [_talk(*one) for one in ASKED] + [{"messages": TALK}] * 2
    (folder / "talks.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def _rows(corpus, part="train"):
    rows = corpus.train_rows if part == "train" else corpus.val_rows
    return rows.rows(np.arange(len(rows)))


@pytest.mark.parametrize("tail", ["eos", "pad"])
def test_the_given_part_of_a_row_is_what_sample_and_generate_send(directory, tmp_path, tail):
    model = dlm_jax.load(directory / "model")
    corpus = load_corpus(
        str(directory / "talks.jsonl"), tokenizer=model.tokenizer, seq_len=96, layout="documents",
        held_out=0.2, tail=tail, chat=model.chat, cache_dir=tmp_path,
    )  # fmt: skip
    rows = _rows(corpus)
    assert len(rows["given"]) == len(ASKED) + 2
    end = model.tokenizer.id_of("<|im_end|>")
    for (asked, answer), tokens, given, length in zip(
        ASKED, rows["tokens"], rows["given"], rows["length"], strict=False
    ):
        args = argparse.Namespace(chat=True, prompt=asked)
        (request,) = make_requests(model, sample._prompt_of(model, args), {"gen_length": 4})
        assert tokens[:given].tolist() == request.tokens[:given].tolist()
        assert (request.tokens[given:] == BPE.mask_id).all()
        target = [*model.tokenizer.encode(answer), end, BPE.eos_id]
        assert tokens[given : given + len(target)].tolist() == target
        assert (tokens[given + len(target) :] == BPE.pad_id).all()
        assert length == (96 if tail == "eos" else given + len(target))
    # A turn is not seen by the turns before it: later messages are not in its row.
    turns = model.chat.turns(TALK)
    for (given, turn), tokens, count in zip(
        turns, rows["tokens"][-2:], rows["given"][-2:], strict=True
    ):
        assert tokens[: count + turn.size + 1].tolist() == [*given, *turn, BPE.eos_id]
    # Whole conversations are held out.
    assert len(_rows(corpus, "val")["given"]) == 2


def test_eos_is_written_once_if_the_turn_ends_with_it(directory, tmp_path):
    source = cases.CHATS["chatml"].replace("<|im_end|>", "<|endoftext|>")
    chat = ChatTemplate(source, BPE)
    corpus = load_corpus(
        str(directory / "talks.jsonl"), tokenizer=BPE, seq_len=96, layout="documents",
        tail="pad", chat=chat, cache_dir=tmp_path,
    )  # fmt: skip
    rows = _rows(corpus)
    first, last = rows["given"][0], rows["length"][0]
    assert rows["tokens"][0, first:last].tolist() == [*BPE.encode("yes."), BPE.eos_id]


def test_conversations_need_a_template_and_rows_of_documents(tmp_path):
    path = tmp_path / "f.jsonl"
    path.write_text(f"{json.dumps({'messages': TALK})}\n" * 3)
    options = {"tokenizer": BPE, "seq_len": 96, "cache_dir": tmp_path}
    with pytest.raises(ValueError, match="f.jsonl line 1 is a conversation, but .*; set train.in"):
        load_corpus(str(path), layout="documents", **options)
    chat = ChatTemplate(cases.CHATS["chatml"], BPE)
    with pytest.raises(ValueError, match="f.jsonl line 1 is a conversation, .*; use data.layout="):
        load_corpus(str(path), chat=chat, **options)
    for source, reason in (
        ("{{ raise_exception('no system turn') }}", "chat_template rejects .*no system turn"),
        (REFUSED[0], "message 3: the chat template writes other tokens"),
    ):
        with pytest.raises(ValueError, match=f"f.jsonl line 1: {reason}"):
            load_corpus(str(path), layout="documents", chat=ChatTemplate(source, BPE), **options)
