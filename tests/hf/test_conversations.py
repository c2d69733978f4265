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
MARKED = {
    "chatml": (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}<|im_start|>assistant\n"
        "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
        "{% else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
        "{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "llama3": (
        "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + "
        "'<|end_header_id|>\n\n' }}{% if m['role'] == 'assistant' %}{% generation %}"
        "{{ m['content'] | trim + '<|eot_id|>' }}{% endgeneration %}{% else %}"
        "{{ m['content'] | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
}
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


@pytest.mark.parametrize("name", MARKED)
def test_marked_tokens_are_those_of_the_mask_of_transformers(name):
    theirs, source = _theirs(BPE), MARKED[name]
    found = theirs.apply_chat_template(
        TALK, chat_template=source, return_dict=True, return_assistant_tokens_mask=True
    )
    mask = np.array(found["assistant_masks"])
    ends = np.flatnonzero(np.diff([0, *mask, 0])).reshape(-1, 2)
    chat = ChatTemplate(source, BPE)
    ours = list(chat.turns(TALK))
    for (start, end), (given, turn), place in zip(ends, ours, _places(TALK), strict=True):
        assert given.tolist() == found["input_ids"][:start] == chat.ids(TALK[:place]).tolist()
        assert turn.tolist() == found["input_ids"][start:end]


def test_a_mark_around_the_header_of_an_answer_leaves_it_to_the_chat():
    header = "<|im_start|>assistant\n"
    inside = MARKED["chatml"].replace(f"{header}{{% generation %}}", f"{{% generation %}}{header}")
    assert inside != MARKED["chatml"]
    for one, two in zip(
        ChatTemplate(inside, BPE).turns(TALK), ChatTemplate(MARKED["chatml"], BPE).turns(TALK),
        strict=True,
    ):  # fmt: skip
        np.testing.assert_array_equal(one[0], two[0])
        np.testing.assert_array_equal(one[1], two[1])


def test_a_turn_without_a_mark_is_not_trained():
    source = MARKED["chatml"].replace("== 'assistant' %}", "== 'assistant' and loop.last %}")
    turns = list(ChatTemplate(source, BPE).turns([*TALK[:3], *TALK[1:3]]))
    assert len(turns) == 2  # each conversation ends with the turn that its row trains
    source = MARKED["chatml"].replace("== 'assistant'", "== 'assistant' and loop.index0 != 2")
    (turn,) = ChatTemplate(source, BPE).turns(TALK)
    np.testing.assert_array_equal(turn[0], ChatTemplate(source, BPE).ids(TALK[:4]))


LAST = "{% if loop.last %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}"
REFUSED = {
    "<|im_start|>{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<think>{% endif %}": "writes other tokens before this answer",
    "{% for m in messages %}{{ m.content }}{% endfor %}": "writes other tokens before this answer",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}.{% generation %}!"
    "{% endgeneration %}{% endfor %}": "marks this answer in several parts",
    f"{{% for m in messages %}}{LAST}{{{{ m.content }}}}{{% endif %}}{{% endfor %}}":
        ".* marks it from within a token",
}  # fmt: skip


@pytest.mark.parametrize("source", REFUSED)
def test_a_template_whose_turns_are_not_those_of_a_chat_is_refused(source):
    assert BPE.encode("user").size < BPE.encode("us").size + BPE.encode("er").size
    turns = [{"role": "user", "content": "us"}, {"role": "assistant", "content": "er"}]
    with pytest.raises(ValueError, match=f"^message 2: the chat template {REFUSED[source]}.*; "):
        list(ChatTemplate(source, BPE).turns(turns))


FORMS = [
    ({"prompt": "hi there", "completion": "yes."}, "hi there", "yes."),
    ({"instruction": "sort", "output": "a b"}, "sort", "a b"),
    ({"instruction": "sort", "input": "b a", "output": "a b"}, "sort\n\nb a", "a b"),
    ({"instruction": "sort", "input": "", "output": "a b"}, "sort", "a b"),
]


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
    lines = [form for form, *_ in FORMS] + [{"messages": TALK}] * 2
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
    assert len(rows["given"]) == len(FORMS) + 2
    end = model.tokenizer.id_of("<|im_end|>")
    for (_, asked, answer), tokens, given, length in zip(
        FORMS, rows["tokens"], rows["given"], rows["length"], strict=False
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
        (next(iter(REFUSED)), "message 3: the chat template writes other tokens"),
    ):
        with pytest.raises(ValueError, match=f"f.jsonl line 1: {reason}"):
            load_corpus(str(path), layout="documents", chat=ChatTemplate(source, BPE), **options)
