"""The loops of published programs, written out in NumPy, give the same ids as their settings."""

from __future__ import annotations

import functools

import numpy as np
import published_cases as cases
import pytest
from oracles.published import Oracle

import dlm_jax

PROMPTS = ("ab", "the cat sat on", "zero, one.", "q")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    @functools.cache
    def load(name):
        folder = tmp_path_factory.mktemp(name) / "model"
        config, made = cases.CONFIGS[name], cases.tensors(name, cases.CONFIGS[name])
        cases.write(folder, name)
        head = "model.transformer.ff_out.weight" if name == "llada" else "lm_head.weight"
        # Sure predictions, of which none is an id that is never written.
        made[head] *= 3
        made[head][cases.MASK] = made[head][cases.NUM_TOKENS :] = 0
        cases.write_weights(folder, made, 2)
        return dlm_jax.load(folder), Oracle(config, made)

    return load


def _softmax(x):
    x = np.exp(x - x.max(axis=-1, keepdims=True))
    return x / x.sum(axis=-1, keepdims=True)


def _llada(oracle, prompt, *, gen_length, steps, block_length, without=(), banned=()):
    """LLaDA's generate.py at temperature 0 (Nie et al. 2025, algorithm 5 and appendix B.4)."""
    x = np.concatenate([prompt, np.full(gen_length, cases.MASK)])
    num_blocks = gen_length // block_length
    for block in range(num_blocks):
        end = len(prompt) + (block + 1) * block_length
        holes = int((x[end - block_length : end] == cases.MASK).sum())
        each = steps // num_blocks
        for step in range(each):
            logits = oracle.logits(x)
            logits[:, list(banned)] = -np.inf
            best = logits.argmax(axis=1)
            logits[:, list(without)] = -np.inf
            sure = _softmax(logits)[np.arange(len(x)), best]
            sure[(x != cases.MASK) | (np.arange(len(x)) >= end)] = -np.inf
            count = holes // each + (step < holes % each)
            chosen = np.argsort(-sure, kind="stable")[:count]
            x[chosen] = best[chosen]
    return x


def _dream(oracle, prompt, *, gen_length, steps, top_p=1.0):
    """Dream's diffusion_generate, order ``entropy``, temperature 0 (Ye et al. 2025)."""
    x = np.concatenate([prompt, np.full(gen_length, cases.MASK)])
    never = [cases.MASK, *range(cases.NUM_TOKENS, cases.VOCAB)]
    times = np.linspace(1, 1e-3, steps + 1)
    for step in range(steps):
        logits = oracle.logits(x)
        logits = logits[np.maximum(np.arange(len(x)) - 1, 0)]
        logits[:, never] = -np.inf  # bans come before all transforms
        probs = _softmax(logits)
        order = np.argsort(-probs, axis=1)
        before = np.cumsum(np.take_along_axis(probs, order, 1), axis=1)
        is_out = np.pad(before, ((0, 0), (1, 0)))[:, :-1] > top_p
        for place in range(len(x)):
            probs[place, order[place][is_out[place]]] = 0
        probs /= probs.sum(axis=1, keepdims=True)
        sure = (probs * np.log(probs + 1e-10)).sum(axis=1)
        sure[x != cases.MASK] = -np.inf
        holes = int((x == cases.MASK).sum())
        count = int(holes * (1 - times[step + 1] / times[step])) if step < steps - 1 else holes
        chosen = np.argsort(-sure, kind="stable")[:count]
        x[chosen] = probs[chosen].argmax(axis=1)
    return x


def _compare(model, wanted, **settings):
    for batch in (1, 4):
        result = dlm_jax.generate(model, list(PROMPTS), batch_size=batch, **settings)
        for row, text in enumerate(PROMPTS):
            own = result.tokens[row, : result.lengths[row]]
            theirs = wanted(model.tokenizer.encode(text))
            ends = np.flatnonzero(np.isin(theirs, model.eos_ids))
            theirs = theirs[: ends[0] + 1] if ends.size else theirs
            np.testing.assert_array_equal(own, theirs)


@pytest.mark.parametrize("switch", [(), (cases.EOS, cases.END), (1, 4, 20)])
def test_llada_writes_what_its_own_loop_writes(models, switch):
    model, oracle = models("llada")
    common = {"gen_length": 24, "steps": 12, "block_length": 8}
    _compare(
        model, lambda p: _llada(oracle, p, **common, without=switch), **common,
        order="low_confidence", temperature=0.0, confidence_without=switch,
    )  # fmt: skip


@pytest.mark.parametrize("top_p", [1.0, 0.7])
def test_dream_writes_what_its_own_loop_writes(models, top_p):
    model, oracle = models("dream")
    common = {"gen_length": 20, "steps": 13}
    _compare(
        model, lambda p: _dream(oracle, p, **common, top_p=top_p), **common, top_p=top_p,
        block_length=0, order="entropy", temperature=0.0, schedule="timesteps",
        confidence_of="filtered",
    )  # fmt: skip


def test_what_a_family_recommends_is_a_preset_of_its_own(models):
    for name in ("llada", "dream"):
        model, _ = models(name)
        first = next(iter(model.presets.values()))
        fits = {k: v for k, v in first.items() if k not in ("gen_length", "steps")}
        assert {k: getattr(model.sample, k) for k in fits} == fits
        for settings in model.presets.values():
            shorter = dict(settings) | {"gen_length": 4, "steps": 4, "block_length": 0}
            assert dlm_jax.generate(model, ["ab"], **shorter).lengths[0] <= 6
