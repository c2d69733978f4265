"""Log-probabilities over HTTP: of one distribution, with the bytes of each token."""

import dataclasses

import numpy as np
import pytest
import tokenizers
import toy
import toy_model
from serving_cases import MODEL, choices_of, complete, post, refusal_of, serving
from tokenizers import decoders, models, normalizers, pre_tokenizers

from dlm_jax.data import ByteTokenizer, CharacterTokenizer, HubTokenizer, SubwordTokenizer
from dlm_jax.data.tokenizers import train_json
from dlm_jax.model.transformer import build
from dlm_jax.serving.answer import _TextEnd
from dlm_jax.serving.protocol import Completion, Options, Planner


def _choices(running, path="/v1/completions", **asked):
    asked = {"prompt": "The ", "max_tokens": 5, "seed": 3, "steps": 5} | asked
    return choices_of(post(running, path, asked))


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
    assert joined == TEXT.encode()
    assert [part for part in texts if part.isascii()] == [part for part in TEXT if part.isascii()]


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


def test_alternatives_change_no_setting_of_a_model_that_fills_in_waves():
    network = build(toy.config(vocab_size=MODEL.tokenizer.vocab_size, add_sampler_head=True))
    planner = Planner(dataclasses.replace(MODEL, network=network), Options("toy"))
    plain, *others = (
        planner.answer(Completion(prompt="The ", logprobs=count)).requests[0].sample
        for count in (None, 0, 2)
    )
    assert plain.fill == "wavefront" and all(vars(one) == vars(plain) for one in others)


def test_the_fill_of_a_model_is_kept_or_alternatives_are_refused():
    network = build(toy.config(vocab_size=MODEL.tokenizer.vocab_size, add_sampler_head=True))
    model = dataclasses.replace(toy_model.MODEL, network=network, params=toy.random_params(network))
    with serving(model) as server:
        asked = {"prompt": "The ", "max_tokens": 8, "steps": 2, "seed": 3}
        plain = complete(server, asked)
        (alone,) = choices_of(post(server, "/v1/completions", asked | {"logprobs": 0}))
        assert alone["text"] == plain and len(alone["logprobs"]["tokens"]) >= len(plain)
        made = post(server, "/v1/completions", asked | {"logprobs": 2})
        if made.status_code == 200:
            assert choices_of(made)[0]["text"] == plain
        else:
            error = refusal_of(made)
            assert error["param"] == "logprobs" and "fill" in error["message"]
