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
    def load(name, sharpness=3):
        folder = tmp_path_factory.mktemp(name) / "model"
        config, made = cases.CONFIGS[name], cases.tensors(name, cases.CONFIGS[name])
        cases.write(folder, name)
        head = "model.transformer.ff_out.weight" if name == "llada" else "lm_head.weight"
        # Sure predictions, of which none is an id that is never written.
        made[head] *= sharpness
        made[head][cases.MASK] = made[head][cases.NUM_TOKENS :] = 0
        cases.write_weights(folder, made, 2)
        return dlm_jax.load(folder), Oracle(config, made)

    return load


def _softmax(x):
    x = np.exp(x - x.max(axis=-1, keepdims=True))
    return x / x.sum(axis=-1, keepdims=True)


def _llada(oracle, prompt, *, gen_length, steps, block_length, banned=()):
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


def _seen(length, block):
    at = np.arange(length) // block
    return at[:, None] >= at[None]


def _fast_dllm(oracle, prompt, *, gen_length, block, part, threshold):
    """generate of Fast-dLLM v2 at temperature 0 (Wu et al. 2025, section 3.3)."""
    x = np.concatenate([prompt, np.full(gen_length, cases.MASK)])
    for begin in range(len(prompt) // part * part, len(x), part):
        end = begin + part
        while (x[begin:end] == cases.MASK).any():
            upto = end + -end % block
            # What follows the part is all MASK, up to the end of its block.
            canvas = np.concatenate([x[:end], np.full(upto - end, cases.MASK)])
            logits = oracle.logits(canvas, may_see=_seen(upto, block))
            if begin % block == 0 and x[begin] == cases.MASK:
                x[begin] = logits[begin - 1].argmax()
                continue
            probs = _softmax(logits[np.maximum(np.arange(upto) - 1, 0)])[begin:end]
            is_hole = x[begin:end] == cases.MASK
            sure = np.where(is_hole, probs.max(axis=1), -np.inf)
            chosen = is_hole & (sure > threshold)
            chosen[sure.argmax()] = True
            x[begin:end] = np.where(chosen, probs.argmax(axis=1), x[begin:end])
    return x


def _llada21(oracle, prompt, *, gen_length, block, threshold, rewrite, patience):
    """generate of LLaDA2.1 at temperature 0: a block is rewritten until nothing changes."""
    x = np.concatenate([prompt, np.full(gen_length, cases.MASK)])
    num_rewritten = 0
    for begin in range(len(prompt) // block * block, len(x), block):
        at, settled = slice(begin, begin + block), 0
        is_given = np.arange(begin, begin + block) < len(prompt)
        while True:
            is_hole = x[at] == cases.MASK
            settled += not is_hole.any()
            if settled > patience:
                break
            logits = oracle.logits(x[: at.stop], may_see=_seen(at.stop, block))[at]
            best, sure = logits.argmax(axis=1), _softmax(logits).max(axis=1)
            chosen = is_hole & (sure > threshold)
            if is_hole.any() and not chosen.any():
                chosen[np.where(is_hole, sure, -np.inf).argmax()] = True
            replaced = ~is_hole & ~is_given & (sure > rewrite) & (best != x[at])
            num_rewritten += replaced.sum()
            x[at] = np.where(chosen | replaced, best, x[at])
            if not is_hole.any() and not replaced.any():
                break
        if np.isin(x[len(prompt) : at.stop], (cases.EOS, cases.END)).any():
            break
    return x, num_rewritten


def _compare(model, wanted, *, block=0, batches=(4,), **settings):
    for batch in batches:
        texts = [
            {"prompt": text, "gen_length": 16 + -(len(text) + 16) % max(block, 1)}
            if block else text for text in PROMPTS
        ]  # fmt: skip
        result = dlm_jax.generate(model, texts, batch_size=batch, **settings)
        for row, text in enumerate(PROMPTS):
            own = result.tokens[row, : result.lengths[row]]
            theirs = wanted(model.tokenizer.encode(text))
            ends = np.flatnonzero(np.isin(theirs, model.eos_ids))
            theirs = theirs[: ends[0] + 1] if ends.size else theirs
            np.testing.assert_array_equal(own, theirs)


def test_llada_writes_what_its_own_loop_writes(models):
    model, oracle = models("llada")
    common = {"gen_length": 24, "steps": 12, "block_length": 8}
    _compare(
        model, lambda p: _llada(oracle, p, **common), **common,
        order="low_confidence", temperature=0.0, batches=(4,),
    )  # fmt: skip


def _sureness(logits, best, order):
    """What an order ranks positions by, higher first, without rounding near probability 1."""
    if order != "low_confidence":
        best = logits.argmax(axis=1)
    chosen = logits[np.arange(len(logits)), best][:, None]
    weights = np.exp(logits - chosen)
    rest = np.where(np.arange(logits.shape[1]) == best[:, None], 0.0, weights).sum(axis=1)
    if order == "low_confidence":
        return -np.log(rest)
    shares = weights / (1.0 + rest)[:, None]
    if order == "margin":
        return -np.log(rest / (1.0 + rest) + np.sort(shares, axis=1)[:, -2])
    return -(shares * (np.log1p(rest)[:, None] - (logits - chosen))).sum(axis=1)


def _guided_llada(oracle, prompt, *, gen_length, steps, scale, order, banned):
    """The step in which LLaDA's generate.py writes each position, with guidance, and the text."""
    x = np.concatenate([prompt, np.full(gen_length, cases.MASK)])
    step_of = np.full(len(x), -1)
    for step in range(steps):
        bare = np.where(np.arange(len(x)) < len(prompt), cases.MASK, x)
        bare_logits = oracle.logits(bare)
        logits = bare_logits + (scale + 1) * (oracle.logits(x) - bare_logits)
        allowed = logits.copy()
        allowed[:, banned] = -np.inf
        best = allowed.argmax(axis=1)
        sure = np.where(x == cases.MASK, _sureness(logits, best, order), -np.inf)
        count = gen_length // steps + (step < gen_length % steps)
        chosen = np.argsort(-sure, kind="stable")[:count]
        x[chosen], step_of[chosen] = best[chosen], step
    return step_of, x


@pytest.mark.parametrize(
    "order", ["low_confidence", "entropy", pytest.param("margin", marks=pytest.mark.slow)]
)
def test_no_guided_row_leaves_the_published_order(models, order):
    model, oracle = models("llada", 8)
    rng = np.random.default_rng(0)
    prompts = ["".join(rng.choice(list("abcdefghij klmnopqrst."), 6)) for _ in range(40)]
    common = {"gen_length": 12, "steps": 6}
    result = dlm_jax.generate(
        model, prompts, batch_size=40, **common, block_length=0, order=order, temperature=0.0,
        guidance=2.0, ignore_eos=True,
    )  # fmt: skip
    leaving = []
    for row, text in enumerate(prompts):
        step_of, tokens = _guided_llada(
            oracle, model.tokenizer.encode(text), **common, scale=2, order=order,
            banned=[cases.EOS, cases.END],
        )  # fmt: skip
        own = result.committed[row, : len(tokens)], result.tokens[row, : len(tokens)]
        if not np.array_equal(own, (step_of, tokens)):
            leaving.append(row)
    assert leaving == []
    assert np.mean(result.logprobs[result.committed >= 0] > -1e-5) > 0.1


@pytest.mark.parametrize("top_p", [pytest.param(1.0, marks=pytest.mark.slow), 0.7])
def test_dream_writes_what_its_own_loop_writes(models, top_p):
    model, oracle = models("dream")
    common = {"gen_length": 20, "steps": 13}
    _compare(
        model, lambda p: _dream(oracle, p, **common, top_p=top_p), **common, top_p=top_p,
        block_length=0, order="entropy", temperature=0.0, schedule="timesteps",
        confidence_of="filtered",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("threshold", "cache"), [(0.9, "exact"), pytest.param(0.3, "none", marks=pytest.mark.slow)]
)
def test_fast_dllm_v2_writes_what_its_own_loop_writes(models, threshold, cache):
    model, oracle = models("fast_dllm")
    _compare(
        model,
        lambda p: _fast_dllm(
            oracle, p, gen_length=16 + -(len(p) + 16) % 8, block=8, part=4, threshold=threshold
        ),
        block=8, block_length=4, steps=48, order="threshold", threshold=threshold,
        threshold_above=True, threshold_alone=8, temperature=0.0, cache=cache,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("patience", "cache"), [(0, "none"), pytest.param(2, "exact", marks=pytest.mark.slow)]
)
def test_llada21_writes_and_rewrites_what_its_own_loop_does(models, patience, cache):
    model, oracle = models("llada2")
    rewritten = []

    def wanted(prompt):
        found, number = _llada21(
            oracle, prompt, gen_length=16 + -(len(prompt) + 16) % 32, block=32, threshold=0.6,
            rewrite=0.35, patience=patience,
        )  # fmt: skip
        rewritten.append(number)
        return found

    _compare(
        model, wanted, block=32, steps=200, order="joint_threshold", threshold=0.6,
        threshold_above=True, rewrite_threshold=0.35, rewrite_steps=patience, temperature=0.0,
        cache=cache,
    )  # fmt: skip
    assert sum(rewritten) > 0
