"""Compares DiffusionGemma's loop with `generate` of transformers, with the same noise.

    python -m benchmarks parity --only diffusion_gemma

The class of transformers writes tiny random weights, `dlm_jax.load` reads them, and both programs
generate in float32. The random tokens and draws of the reference are replaced by those of this
library's rows; at temperature 0, the reference takes the likeliest token. The logit of ids that are
never written is -inf.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
import torch
import transformers
from tokenizers import models, pre_tokenizers
from transformers.models import diffusion_gemma
from transformers.models.diffusion_gemma import generation_diffusion_gemma as theirs

import dlm_jax
from benchmarks.report import Table
from dlm_jax.randomness import key_of
from dlm_jax.sampling import vocab
from dlm_jax.sampling.remask import RENOISE_SALT

VOCAB = 160
MASK, EOS, EOT = VOCAB - 1, VOCAB - 2, VOCAB - 3
CANVAS = 16
PROMPTS = (5, 12, 9, 17, 3, 8, 21, 14)
LOOPS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "temperature_end": -1.0},
    {"temperature": 0.0, "temperature_end": -1.0, "cache": "none"},
    {"temperature": 0.0, "temperature_end": -1.0, "entropy_bound": 6.0, "renoise_stop": 1.5},
    {},
    {"entropy_bound": 4.0, "renoise_stop": 1.0},
)
"""Changes of the preset. The default temperature falls from 0.8 to 0.4."""
FIELDS: tuple[dict[str, Any], ...] = (
    {},
    {"hidden_size": 32, "num_attention_heads": 2, "sliding_window": 9, "num_experts": 4},
)
"""Changes of the config of each tiny model."""


def write_tokenizer(directory: Path) -> None:
    """Writes a tokenizer with one word per id."""
    words = {f"t{i}": i for i in range(VOCAB)}
    made = tokenizers.Tokenizer(models.WordLevel(words, unk_token="t0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(directory / "tokenizer.json"))
    ids = {"mask_token_id": MASK, "eos_token_id": EOS, "pad_token_id": EOS, "bos_token_id": None}
    (directory / "generation_config.json").write_text(json.dumps(ids))


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


def tiny(fields: dict[str, Any], seed: int) -> Any:
    """A reference with random weights that distinguish tokens."""
    text = {
        "vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 6,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16,
        "num_global_key_value_heads": 1, "max_position_embeddings": 128, "sliding_window": 6,
        "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 12,
        "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2,
        "pad_token_id": EOS, "eos_token_id": EOS, "bos_token_id": EOT,
    }  # fmt: skip
    vision = {
        "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
        "num_key_value_heads": 1, "head_dim": 8, "global_head_dim": 8, "patch_size": 2,
        "position_embedding_size": 4,
    }  # fmt: skip
    said: dict[str, Any] = {"text_config": text | fields, "vision_config": vision}
    said |= {"canvas_length": CANVAS, "mask_token_id": MASK}
    config = diffusion_gemma.DiffusionGemmaConfig(**said)
    config._attn_implementation = "eager"
    reference = diffusion_gemma.DiffusionGemmaForBlockDiffusion(config).eval().float()
    spread(reference, seed)
    return reference


def spread(reference: Any, seed: int, *, sharpness: float = 2.5, conditioning: float = 0.1) -> None:
    """Random weights: scales and norms near 1, and logits with standard deviation `sharpness`.

    With self-conditioning of 1, a random network multiplies rounding errors by 4 to 8 per step, so
    two exact programs write different tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in (*reference.named_parameters(), *reference.named_buffers()):
            random = torch.randn(value.shape, generator=generator)
            if "embed_scale" in name or not value.is_floating_point() or "inv_freq" in name:
                continue
            if "norm" in name or "scal" in name.rsplit(".", 1)[-1]:
                value.copy_(1 + 0.1 * random)
            elif value.ndim > 1:
                by = sharpness if "embed_tokens" in name else 1.0
                by = conditioning if "self_conditioning.down" in name else by
                value.copy_(by * random * value.shape[-1] ** -0.5)


def compare(args: argparse.Namespace, canvases: int = 3) -> None:
    """Prints one row per model and loop."""
    table = Table(args, "config", "settings", "tokens", "differ at 1", "differ at 8")
    for number, fields in enumerate(FIELDS[: 1 if args.quick else None]):
        reference = tiny(fields, number)
        with tempfile.TemporaryDirectory() as folder:
            reference.save_pretrained(folder)
            write_tokenizer(Path(folder))
            model = dlm_jax.load(folder)
        rng = np.random.default_rng(number)
        prompts = [rng.integers(0, VOCAB - 3, n).tolist() for n in PROMPTS]
        for changes in LOOPS[:1] if args.quick else LOOPS if number == 0 else LOOPS[:4:3]:
            settings = {**model.preset("diffusion_gemma"), "gen_length": canvases * CANVAS}
            settings |= {"steps": canvases * 12, **changes}
            num, differ = num_different(reference, model, prompts, settings, (1, 8))
            shown = ", ".join(f"{k}={v}" for k, v in changes.items()) or "default"
            table.add(number, shown, num, *differ)
