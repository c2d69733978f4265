"""DiffusionGemma's loop by `generate` of transformers, with the noise of this library.

The random tokens and draws of the reference are replaced by those of this library's rows; at
temperature 0, the reference takes the likeliest token. The logit of ids that are never written is
-inf.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from transformers.models.diffusion_gemma import generation_diffusion_gemma as theirs

import dlm_jax
from dlm_jax.randomness import key_of
from dlm_jax.sampling import vocab
from dlm_jax.sampling.remask import RENOISE_SALT


class Noise:
    """The random tokens and the draws of one row of `dlm_jax.generate`."""

    def __init__(self, seed: int, allowed: np.ndarray, num_positions: int):
        self._key, self._allowed, self._num = key_of(seed), allowed, num_positions

    def begin(self) -> np.ndarray:
        """The tokens of all canvases before the first step, ``[L]``."""
        return self._tokens(jax.random.fold_in(jax.random.fold_in(self._key, 0), RENOISE_SALT))

    def renewed(self, step: int) -> np.ndarray:
        """The new noise of a step, ``[L]``."""
        return self._tokens(jax.random.fold_in(self._key, step))

    def drawn(self, step: int, begin: int, logits_LV: np.ndarray) -> np.ndarray:
        """The draws of a step for the positions from `begin` on."""
        key = jax.random.split(jax.random.fold_in(self._key, step), 3)[0]
        places = np.arange(begin, begin + len(logits_LV))
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, places)
        return np.asarray(vocab.draw(jnp.asarray(logits_LV), keys))

    def _tokens(self, key: jax.Array) -> np.ndarray:
        rule_key = jax.random.split(key, 3)[1]
        drawn = jax.random.uniform(jax.random.fold_in(rule_key, RENOISE_SALT), (self._num,))
        place = np.floor(np.asarray(drawn) * np.float32(len(self._allowed))).astype(int)
        return self._allowed[place]


class _Banned:
    """A logits processor that sets the logits of ids that are never written to -inf."""

    def __init__(self, ids: Sequence[int]):
        self._ids = list(ids)

    def __call__(self, input_ids: Any, scores: torch.Tensor, cur_step: Any) -> torch.Tensor:
        scores = scores.clone()
        scores[..., self._ids] = -torch.inf
        return scores


@contextlib.contextmanager
def _with_noise(reference: Any, noise: Noise, begin: int, *, is_greedy: bool) -> Iterator[None]:
    """Replaces the random functions of the reference for one row."""
    size, state = reference.config.canvas_length, {"step": 0, "canvas": -1, "begun": False}
    inner = type(reference)._denoising_step

    def at() -> slice:
        first = begin + state["canvas"] * size
        return slice(first, first + size)

    def canvas(self: Any, batch_size: int, device: Any) -> torch.Tensor:
        if state["begun"]:
            return torch.tensor(noise.renewed(state["step"])[at()].astype(np.int64))[None]
        state["canvas"] += 1
        return torch.tensor(noise.begin()[at()].astype(np.int64))[None]

    def multinomial(probs: torch.Tensor, num_samples: int) -> torch.Tensor:
        with np.errstate(divide="ignore"):
            logits = np.log(probs.numpy())
        if is_greedy:
            return torch.tensor(logits.argmax(axis=1))[:, None]
        ids = noise.drawn(state["step"], at().start, logits)
        return torch.tensor(ids.astype(np.int64))[:, None]

    def step(self: Any, **given: Any) -> Any:
        state["begun"] = True
        found = inner(self, **given)
        state["step"], state["begun"] = state["step"] + 1, False
        return found

    with (
        mock.patch.object(theirs.EntropyBoundSampler, "initialize_canvas", canvas),
        mock.patch.object(torch, "multinomial", multinomial),
        mock.patch.object(torch.compiler, "cudagraph_mark_step_begin"),
        mock.patch.object(type(reference), "_denoising_step", step),
    ):
        yield


def reference_ids(
    reference: Any, model: dlm_jax.Model, prompt: Sequence[int], seed: int, settings: dict[str, Any]
) -> list[int]:
    """The prompt and the ids that the reference generates for one row, up to the first EOS."""
    num_canvases = -(-settings["gen_length"] // model.network.canvas_length)
    eos, steps = set(model.eos_ids), settings["steps"] // num_canvases
    banned = (set(model.banned_ids) - eos) | {model.tokenizer.mask_id}
    never = banned | ({model.tokenizer.pad_id} - eos)
    allowed = np.array([i for i in range(model.network.vocab_size) if i not in never])
    positions = len(prompt) + num_canvases * model.network.canvas_length
    first, last = settings["temperature"], settings["temperature_end"]
    t_min, t_max = (last * steps - first) / (steps - 1), first
    if is_greedy := first == 0:
        t_min, t_max = 1 - 1e-9, 1.0  # the likeliest token of the unscaled logits
    noise = Noise(seed, allowed, positions)
    with _with_noise(reference, noise, len(prompt), is_greedy=is_greedy):
        found = reference.generate(
            torch.tensor(np.asarray(prompt, np.int64)[None]), max_new_tokens=settings["gen_length"],
            max_denoising_steps=steps, confidence_threshold=float(settings["renoise_stop"]),
            sampler_config=theirs.EntropyBoundSamplerConfig(float(settings["entropy_bound"])),
            t_min=t_min, t_max=t_max, eos_token_id=list(model.eos_ids), pad_token_id=None,
            logits_processor=transformers.LogitsProcessorList([_Banned(sorted(banned))]),
        )  # fmt: skip
    ids = found.sequences[0].tolist()
    ends = [i for i, id_ in enumerate(ids) if i >= len(prompt) and id_ in eos]
    return ids[: ends[0] + 1] if ends else ids


def num_different(
    reference: Any,
    model: dlm_jax.Model,
    prompts: Sequence[Sequence[int]],
    settings: dict[str, Any],
    batch_sizes: Sequence[int],
) -> tuple[int, list[int]]:
    """Number of tokens of the reference, and of differing tokens of this library per batch size."""
    wanted = [
        reference_ids(reference, model, prompt, seed, settings)
        for seed, prompt in enumerate(prompts)
    ]
    rows = [{"tokens": list(prompt), "seed": seed} for seed, prompt in enumerate(prompts)]
    differ = []
    for size in batch_sizes:
        result = dlm_jax.generate(model, rows, batch_size=size, **settings)
        found = [result.tokens[i, : result.lengths[i]].tolist() for i in range(len(rows))]
        differ.append(
            sum(
                sum(a != b for a, b in zip(own, other, strict=False)) + abs(len(own) - len(other))
                for own, other in zip(found, wanted, strict=True)
            )
        )
    return sum(len(ids) - len(p) for ids, p in zip(wanted, prompts, strict=True)), differ
