"""Log-probabilities over HTTP: of prompts, of one distribution, and at their texts' offsets."""

import dataclasses
import json

import numpy as np
import pytest
import tokenizers
import toy
import toy_model
from serving_cases import MODEL, post, serving
from tokenizers import decoders, models, normalizers, pre_tokenizers

from dlm_jax.data import ByteTokenizer, CharacterTokenizer, HubTokenizer, SubwordTokenizer
from dlm_jax.data.tokenizers import train_json
from dlm_jax.hf import TextTemplate
from dlm_jax.inference.scoring import score
from dlm_jax.model.transformer import build
from dlm_jax.serving.answer import _TextEnd

PROMPTS = ["The cat sat.", "Tca .hrntsTe"]


@pytest.fixture(scope="module")
def running():
    with serving() as server:
        yield server


def _choices(running, path="/v1/completions", **asked):
    made = post(running, path, {"prompt": "The ", "max_tokens": 5, "seed": 3, "steps": 5} | asked)
    assert made.status_code == 200, made.text
    return made.json()["choices"]


def _events(running, **asked):
    body = {"prompt": "The ", "max_tokens": 5, "seed": 3, "steps": 5, "stream": True} | asked
    lines = post(running, "/v1/completions", body).text.splitlines()
    return [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]


def _harness_score(choice, context):
    """What lm-evaluation-harness reads of a choice: the sum behind a context and whether greedy."""
    told = choice["logprobs"]
    own, tops = told["token_logprobs"][context:-1], told["top_logprobs"][context:-1]
    return sum(own), all(p == max(top.values()) for p, top in zip(own, tops, strict=True))


def _reference(model, text, start):
    """The log-probabilities of the tokens from `start` on, each from a canvas of its own."""
    ids = model.tokenizer.encode(text)
    found = []
    for place in range(start, ids.size):
        canvas = np.full((1, 64), model.tokenizer.pad_id, np.int32)
        canvas[0, : ids.size] = ids
        canvas[0, place : ids.size] = model.tokenizer.mask_id
        length = np.array([ids.size], np.int32)
        logits = np.array(toy.logits(model.network, model.params, canvas, length), np.float64)
        row = np.delete(logits[0, place], model.tokenizer.mask_id)
        before = ids[place] - (ids[place] > model.tokenizer.mask_id)
        found.append(row[before] - np.logaddexp.reduce(row))
    return found


@pytest.mark.parametrize("as_ids", [False, True])
def test_an_echo_has_the_probability_of_each_token_given_those_before_it(running, as_ids):
    prompts = [MODEL.tokenizer.encode(text).tolist() for text in PROMPTS] if as_ids else PROMPTS
    choices = _choices(running, prompt=prompts, max_tokens=1, echo=True, logprobs=1, n=1,
                       temperature=0)  # fmt: skip
    for choice, prompt in zip(choices, PROMPTS, strict=True):
        told = choice["logprobs"]["token_logprobs"]
        assert len(told) == len(prompt) + 1
        np.testing.assert_allclose(told[4:-1], _reference(MODEL, prompt, 4), atol=1e-4)
        likelihood, _ = _harness_score(choice, 4)
        assert likelihood == pytest.approx(sum(_reference(MODEL, prompt, 4)), abs=1e-3)
    sense, nonsense = (_harness_score(choice, 4)[0] for choice in choices)
    assert abs(sense - nonsense) > 0.1


def test_the_token_of_greedy_decoding_is_told_to_be_the_most_likely_one(running):
    (made,) = _choices(running, prompt="The ", max_tokens=1, temperature=0, logprobs=1)
    token = made["text"]
    assert len(token) == 1
    for last in MODEL.tokenizer.characters:
        (choice,) = _choices(running, prompt=f"The {last}", max_tokens=1, echo=True, logprobs=2)
        p = choice["logprobs"]["token_logprobs"][4]
        top = choice["logprobs"]["top_logprobs"][4]
        assert top[last] == p and len(top) in (2, 3)
        assert (p == max(top.values())) == (last == token)
        # Both canvases are the prompt and one hole.
        told = made["logprobs"]["token_logprobs"][0]
        assert last != token or p == pytest.approx(told, abs=0.2)


def test_the_echo_of_a_causal_model_has_the_exact_likelihood():
    tokenizer = MODEL.tokenizer
    network = build(
        toy.config(
            vocab_size=tokenizer.vocab_size, attention_type="causal", start_id=tokenizer.mask_id
        )
    )
    model = dataclasses.replace(
        MODEL, network=network, params=toy.random_params(network), is_causal=True
    )
    with serving(model) as server:
        choices = _choices(server, prompt=PROMPTS, max_tokens=1, echo=True, logprobs=1)
    sums = [sum(choice["logprobs"]["token_logprobs"][:12]) for choice in choices]
    np.testing.assert_allclose(sums, -score(model, PROMPTS).nats, rtol=1e-5)


def test_the_first_token_of_an_echo_has_no_value_if_nothing_predicts_it():
    network = build(
        toy.config(
            vocab_size=MODEL.tokenizer.vocab_size, attention_type="causal",
            logit_alignment="shifted",
        )
    )  # fmt: skip
    params = toy.random_params(network)
    model = dataclasses.replace(MODEL, network=network, params=params, is_causal=True)
    with serving(model) as server:
        choices = _choices(server, prompt=PROMPTS, max_tokens=1, echo=True, logprobs=1)
    for choice, nats in zip(choices, score(model, PROMPTS).nats, strict=True):
        first, *rest = choice["logprobs"]["token_logprobs"][:12]
        assert first is None and choice["logprobs"]["top_logprobs"][0] is None
        assert sum(rest) == pytest.approx(-nats, rel=1e-5)


@pytest.mark.parametrize("more", [{}, {"echo": True}, {"prompt": "", "echo": True}])
@pytest.mark.parametrize("stream", [False, True])
def test_each_token_stands_at_its_offset(running, more, stream):
    more = {"logprobs": 1, "order": "left_to_right", "block_length": 2, "steps": 6} | more
    more |= {"ignore_eos": True, "max_tokens": 6}
    choices = _events(running, **more) if stream else _choices(running, **more)
    assert not stream or len(choices) > 2
    text = "".join(choice["text"] for choice in choices)
    told = [
        (token, offset)
        for choice in choices
        for token, offset in zip(
            choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True
        )
    ]
    assert "".join(token for token, _ in told) == text
    for token, offset in told:
        assert text[offset : offset + len(token)] == token
    assert [offset for _, offset in told][:5] == [0, 1, 2, 3, 4]


def test_the_tokens_of_one_character_share_an_offset():
    tokenizer, text = ByteTokenizer(), "a\u00e9\u20acb"
    end, offsets = _TextEnd(tokenizer, 10), []
    for id_ in tokenizer.encode(text).tolist():
        offsets.append(end.size)
        end.add(id_)
    assert offsets == [10, 11, 11, 12, 12, 12, 13]


TEXT = "a caf\u00e9 is \u20ac 3 \U0001f600 <0xE2>\n"


def _hub(vocab, decoder, splitter=None, normalizer=None, **settings):
    made = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], **settings))
    made.add_special_tokens(["<|mask|>", "<|eos|>"])
    made.decoder = decoder
    if splitter:
        made.pre_tokenizer = splitter
    if normalizer:
        made.normalizer = normalizer
    return HubTokenizer(made.to_str(), len(vocab), len(vocab) + 1, len(vocab) + 1)


def _byte_level():
    vocab = {name: id_ for id_, name in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    return _hub(vocab, decoders.ByteLevel(), pre_tokenizers.ByteLevel(add_prefix_space=False))


def _byte_fallback():
    names = [*(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"acfis3<0xE2>"]
    decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    vocab = {name: id_ for id_, name in enumerate(dict.fromkeys(names))}
    spaces = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    return _hub(vocab, decoder, normalizer=spaces, byte_fallback=True, fuse_unk=True)


@pytest.mark.parametrize(
    "make",
    [ByteTokenizer, _byte_level, _byte_fallback, lambda: CharacterTokenizer.of(TEXT),
     lambda: SubwordTokenizer(train_json("a caf\u00e9 \u20ac \u20ac 3 " * 9, 270))],
    ids=["byte", "byte_level", "byte_fallback", "character", "subword"],
)  # fmt: skip
def test_the_bytes_of_tokens_join_to_the_text(make):
    tokenizer = make()
    end, joined, texts = _TextEnd(tokenizer), b"", ""
    ids = tokenizer.encode(TEXT).tolist()
    for id_ in [*ids, tokenizer.eos_id]:
        text, data = end.piece(id_)
        end.add(id_)
        joined, texts = joined + data, texts + text
    assert tokenizer.decode(ids) == TEXT
    assert joined == TEXT.encode() and end.size == len(TEXT)
    assert [part for part in texts if part.isascii()] == [part for part in TEXT if part.isascii()]


def test_a_chat_tells_the_own_bytes_of_each_part_of_a_character():
    tokenizer = ByteTokenizer()
    network = build(toy.config(vocab_size=tokenizer.vocab_size))
    template = TextTemplate("{{ messages[0].content }}", text_tokenizer=tokenizer)
    model = dataclasses.replace(
        MODEL, network=network, params=toy.random_params(network), tokenizer=tokenizer,
        chat=template,
    )  # fmt: skip
    likely = {str(byte): 100.0 for byte in "\u00e9".encode()}
    said = [{"role": "user", "content": "a"}]
    asked = {"messages": said, "logprobs": True, "top_logprobs": 3, "logit_bias": likely}
    with serving(model) as server:
        (choice,) = _choices(
            server, "/v1/chat/completions", prompt=None, steps=None, max_tokens=12, **asked
        )
    told = choice["logprobs"]["content"]
    joined = b"".join(bytes(one["bytes"]) for one in told)
    assert set(joined) <= set("\u00e9".encode()) and len(joined) == len(told) > 0
    assert joined.decode(errors="replace") == choice["message"]["content"]
    assert all(len(top["bytes"]) <= 1 for one in told for top in one["top_logprobs"])


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.5])
def test_asking_for_alternatives_changes_no_text_and_no_value(running, temperature):
    asked = {"temperature": temperature, "top_k": 4, "max_tokens": 8, "steps": 8}
    plain, alone, both = (
        _choices(running, **asked, **more)[0] for more in ({}, {"logprobs": 0}, {"logprobs": 3})
    )
    assert plain["text"] == alone["text"] == both["text"]
    own = both["logprobs"]["token_logprobs"]
    np.testing.assert_allclose(own, alone["logprobs"]["token_logprobs"], atol=1e-4)
    for token, p, top in zip(
        both["logprobs"]["tokens"], own, both["logprobs"]["top_logprobs"], strict=True
    ):
        assert top[token] == p
        # The most likely token is one of the three.
        assert temperature > 0 or len(top) == 3


def test_a_chat_tells_a_token_as_its_alternatives_do(running):
    said = [{"role": "user", "content": "The "}]
    asked = {"messages": said, "logprobs": True, "top_logprobs": 4, "top_k": 4, "temperature": 0.5}
    (choice,) = _choices(running, "/v1/chat/completions", prompt=None, **asked)
    for told in choice["logprobs"]["content"]:
        assert told["logprob"] in [top["logprob"] for top in told["top_logprobs"]]
        values = [top["logprob"] for top in told["top_logprobs"]]
        assert values == sorted(values, reverse=True)


def test_the_fill_of_a_model_is_kept_or_alternatives_are_refused():
    network = build(toy.config(vocab_size=MODEL.tokenizer.vocab_size, add_sampler_head=True))
    model = dataclasses.replace(toy_model.MODEL, network=network, params=toy.random_params(network))
    with serving(model) as server:
        asked = {"prompt": "The ", "max_tokens": 8, "steps": 2, "seed": 3}
        plain = post(server, "/v1/completions", asked).json()["choices"][0]["text"]
        alone = post(server, "/v1/completions", asked | {"logprobs": 0}).json()["choices"][0]
        assert alone["text"] == plain and len(alone["logprobs"]["tokens"]) >= len(plain)
        for name in ("logprobs", "read_back"):
            made = post(server, "/v1/completions", asked | {name: 2})
            if made.status_code == 200:
                assert made.json()["choices"][0]["text"] == plain
            else:
                error = made.json()["error"]
                assert made.status_code == 400 and error["param"] == name
                assert "fill" in error["message"]
