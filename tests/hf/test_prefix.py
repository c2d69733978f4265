"""A row of text begins with what its tokenizer puts before a text; ids are used unchanged."""

import json

import numpy as np
import published_cases as cases
import pytest
import tokenizers

import dlm_jax
from dlm_jax.data import load_corpus, prefix_of
from dlm_jax.hf import ChatTemplate
from dlm_jax.inference.request import make_requests
from dlm_jax.inference.scoring import score_rows

BOS = cases.START
GREEDY = {"temperature": 0.0, "gen_length": 4, "steps": 4, "block_length": 0}


def _write(path, family, *, begins="<|start|>"):
    """A model whose tokenizer puts BOS before a text and <|end|> behind it."""
    directory = cases.write(path, family)
    backend = tokenizers.Tokenizer.from_str(cases.tokenizer_json())
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{begins} $A <|end|>", special_tokens=[("<|start|>", BOS), ("<|end|>", cases.END)]
    )
    backend.save(str(directory / "tokenizer.json"))
    for file in ("config.json", "generation_config.json"):
        cases.edit(directory / file, bos_token_id=BOS)
    return directory


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return dlm_jax.load(_write(tmp_path_factory.mktemp("prefix") / "model", "llada"))


def _ids(text):
    return [BOS, *map(cases.LETTERS.index, text)]


def test_a_tokenizer_puts_before_a_text_what_its_post_processor_says(model):
    backend = tokenizers.Tokenizer.from_str(model.tokenizer.content)
    assert [*prefix_of(model.tokenizer), *model.tokenizer.encode("hi")] == backend.encode("hi").ids[
        :-1
    ]
    assert prefix_of(cases.bpe_tokenizer()) == ()
    bpe = cases.bpe_tokenizer(puts_bos=True)
    assert prefix_of(bpe) == (bpe.bos_id,) and prefix_of(bpe, bpe.bos_id) == ()


def _given(model, prompt):
    (request,) = make_requests(model, prompt, GREEDY)
    tokens = request.tokens.tolist()
    return tokens[: len(tokens) - tokens[::-1].index(cases.MASK)], request.is_draft


def test_prompts_begin_with_the_prefix_and_ids_do_not(model):
    holes = [cases.MASK] * 4
    assert _given(model, "hi")[0] == [*_ids("hi"), *holes]
    assert _given(model, "")[0] == [BOS, *holes]
    assert _given(model, {"template": "a<hole:2>b"})[0] == [*_ids("a"), *holes[:2]]
    assert _given(model, {"tokens": [1, 2]})[0] == [1, 2, *holes]
    refining = {"remask": "scheduled", "schedule": "all"}
    tokens, is_draft = _given(model, {"prompt": "a", "draft": "b"} | refining)
    assert tokens == [*_ids("ab"), *holes] and np.flatnonzero(is_draft).tolist() == [2]
    result = dlm_jax.generate(model, ["hi"], **GREEDY)
    assert result.tokens[0][:3].tolist() == _ids("hi") and result.texts[0].startswith("hi")


def test_scores_are_those_of_rows_with_the_prefix(model):
    text = "the cat sat on the mat. " * 4
    found = dlm_jax.score(model, [text], num_draws=2)
    ids = np.array(_ids(text)[1:])
    size = model.max_length - 1
    parts = [ids[:size], ids[size:]]
    tokens = np.full((2, model.max_length), cases.EOS)
    for row, part in enumerate(parts):
        tokens[row, : 1 + len(part)] = [BOS, *part]
    rows = {"tokens": tokens, "length": np.array([1 + len(part) for part in parts]),
            "given": np.array([1, 1])}  # fmt: skip
    costs = score_rows(model, rows, num_draws=2)
    np.testing.assert_allclose(found.nats[0], costs.nats_B.sum(), rtol=1e-5)
    assert found.tokens.tolist() == [len(ids)]


def test_rows_of_documents_begin_with_the_prefix(model, tmp_path):
    lines = [{"prompt": "a", "response": "b"}, {"text": "abcdefghij"}, {"text": "z"}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    corpus = load_corpus(
        tmp_path / "in.jsonl", tokenizer=model.tokenizer, seq_len=6, layout="documents",
        cache_dir=tmp_path / "cache", held_out=0.3,
    )  # fmt: skip
    rows = corpus.train_rows.rows(range(3))
    texts = ("ab", "abcde", "fghij")
    for tokens, text in zip(rows["tokens"].tolist(), texts, strict=True):
        assert tokens[: 1 + len(text)] == _ids(text)
    assert rows["given"].tolist() == [2, 1, 1]


def test_rows_of_a_causal_model_begin_with_one_prefix(tmp_path):
    causal = dlm_jax.load(_write(tmp_path / "model", "qwen2"))
    assert causal.start_id is None and causal.prefix_ids == (BOS,)
    assert ChatTemplate("{{ bos_token }}", causal.tokenizer).ids([]).tolist() == [BOS]
