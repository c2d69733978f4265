"""Published models against the code of their own projects: hidden states, logits, generated ids.

Random tiny weights are written by the reference's own classes (`save_pretrained`), read by
`dlm_jax.load`, and run side by side in float32:

    python -m benchmarks.published_parity --family llada --code DIR --loop FILE

``DIR`` holds the project's modeling files (``modeling_llada.py`` and its configuration), ``FILE``
the program with its loop where that is not among them (LLaDA's and SDAR's ``generate.py``). Neither
is part of this package: they are code of other projects, which this program runs. Needs the extra
``bench`` and the version of transformers that the code was written for.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
import tempfile
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from tokenizers import models, pre_tokenizers

import dlm_jax

VOCAB = 160
MASK, EOS, EOT = VOCAB - 1, VOCAB - 2, VOCAB - 3
PROMPTS = (5, 12, 9, 17, 3, 8, 21, 14)


@dataclass(frozen=True)
class Case:
    """One family's reference.

    Attributes:
      module: of the modeling file.
      config: name of its config class.
      model: name of its model class.
      fields: of tiny random configs, a few.
      hidden: ``(model, ids, length) -> [L, D]``, the input of its LM head.
      generate: ``(reference, ids, settings) -> ids`` of the whole row.
      settings: of `dlm_jax.generate` that are the same loop.
      loops: ways to run that loop: what changes in the settings.
    """

    module: str
    config: str
    model: str
    fields: tuple[dict[str, Any], ...]
    hidden: Callable[..., torch.Tensor]
    generate: Callable[..., list[int]]
    settings: dict[str, Any]
    loops: tuple[dict[str, Any], ...]
    is_shifted: bool = False


def package(folder: Path, name: str) -> Any:
    """Modules of a folder under one name, without running its ``__init__.py``."""
    made = types.ModuleType(name)
    made.__path__ = [str(folder)]
    sys.modules[name] = made
    return made


def program(file: Path, name: str) -> Any:
    """The module in a file."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def spread(model: torch.nn.Module, seed: int) -> None:
    """Random weights that tell tokens apart, and never write MASK."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            if not value.is_floating_point() or "inv_freq" in name:
                continue
            draw = torch.randn(value.shape, generator=generator)
            if value.ndim == 1 and "norm" in name or "ln_f" in name:
                value.copy_(1 + 0.1 * draw)
            elif value.ndim == 1:
                value.copy_(0.1 * draw)
            else:
                is_head = "lm_head" in name or name.endswith("transformer.ff_out.weight")
                value.copy_(draw * (2.5 if is_head else 1.0) * value.shape[-1] ** -0.5)
                if is_head:
                    value[MASK] = 0.0


def write_tokenizer(directory: Path) -> None:
    """A tokenizer of one word for each id."""
    words = {f"t{i}": i for i in range(VOCAB)}
    made = tokenizers.Tokenizer(models.WordLevel(words, unk_token="t0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(directory / "tokenizer.json"))
    ids = {"mask_token_id": MASK, "eos_token_id": EOS, "pad_token_id": EOS, "bos_token_id": None}
    (directory / "generation_config.json").write_text(json.dumps(ids))


def relative(found: Any, wanted: torch.Tensor) -> float:
    """Largest difference over the largest value."""
    want = wanted.detach().numpy()
    return float(np.abs(np.asarray(found) - want).max() / np.abs(want).max())


def compare_states(
    case: Case, reference: Any, model: dlm_jax.Model, seed: int
) -> tuple[float, float]:
    """Relative errors of hidden states and logits over odd lengths, padded here in one batch."""
    rng = np.random.default_rng(seed)
    lengths = np.array([23, 7, 1, 16])
    tokens = rng.integers(0, VOCAB, (4, 23)).astype(np.int32)
    hidden_BLD, _ = model.network.trunk(model.params, tokens, lengths, None)
    worst = [0.0, 0.0]
    for row, length in enumerate(lengths):
        ids = torch.tensor(tokens[None, :length].astype(np.int64))
        with torch.no_grad():
            wanted = case.hidden(reference, ids)[0]
            logits = reference(ids).logits[0]
        if case.is_shifted:
            order = np.maximum(np.arange(length) - 1, 0)
            wanted, logits = wanted[order], logits[order]
        own = hidden_BLD[row, :length]
        worst[0] = max(worst[0], relative(own, wanted))
        worst[1] = max(worst[1], relative(model.network.readout(model.params, own), logits))
    return worst[0], worst[1]


def compare_ids(
    case: Case, reference: Any, model: dlm_jax.Model, changes: dict[str, Any], seed: int
) -> tuple[int, dict[str, int]]:
    """Tokens generated, and how many differ at batch 1, 8 and among strangers."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, VOCAB - 3, n) for n in PROMPTS]
    settings = case.settings | changes
    wanted = [case.generate(reference, prompt, settings) for prompt in prompts]
    ours = {k: v for k, v in settings.items() if not k.startswith("_")}

    def upto_eos(ids: list[int], start: int) -> list[int]:
        ends = [i for i, id_ in enumerate(ids) if i >= start and id_ in model.eos_ids]
        return ids[: ends[0] + 1] if ends else ids

    wanted = [upto_eos(row, n) for row, n in zip(wanted, PROMPTS, strict=True)]
    rows = [{"tokens": prompt.tolist()} for prompt in prompts]
    stranger = [{"tokens": rng.integers(0, VOCAB - 3, 11).tolist(), "temperature": 1.3, "seed": 9}]
    batches = {
        "1": [dlm_jax.generate(model, [row], batch_size=1, **ours) for row in rows],
        "8": [dlm_jax.generate(model, rows, batch_size=8, **ours)],
        "strangers": [dlm_jax.generate(model, stranger * 3 + rows[::-1], batch_size=4, **ours)],
    }
    differ = {}
    for name, results in batches.items():
        found = [
            result.tokens[i, : result.lengths[i]].tolist()
            for result in results for i in range(len(result.lengths))
        ]  # fmt: skip
        found = found[3:][::-1] if name == "strangers" else found
        differ[name] = sum(
            sum(a != b for a, b in zip(own, theirs, strict=False)) + abs(len(own) - len(theirs))
            for own, theirs in zip(found, wanted, strict=True)
        )
    return sum(len(w) - n for w, n in zip(wanted, PROMPTS, strict=True)), differ


def last_input(model: Any, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """What the module of that name is given when the model runs."""

    def run(ids: torch.Tensor) -> torch.Tensor:
        seen = []
        hook = model.get_submodule(name).register_forward_pre_hook(
            lambda module, given: seen.append(given[0])
        )
        model(ids)
        hook.remove()
        return seen[0]

    return run


def llada_loop(loop: Any) -> Callable[..., list[int]]:
    """LLaDA's ``generate`` with our settings."""

    def generate(reference: Any, prompt: np.ndarray, settings: dict[str, Any]) -> list[int]:
        found = loop.generate(
            reference, torch.tensor(prompt[None].astype(np.int64)), steps=settings["steps"],
            gen_length=settings["gen_length"], block_length=settings["block_length"],
            temperature=0.0, mask_id=MASK,
        )  # fmt: skip
        return found[0].tolist()

    return generate


def dream_loop(reference: Any, prompt: np.ndarray, settings: dict[str, Any]) -> list[int]:
    """Dream's ``diffusion_generate`` with our settings."""
    alg = {"entropy": "entropy", "margin": "topk_margin", "low_confidence": "maskgit_plus"}
    found = reference.diffusion_generate(
        torch.tensor(prompt[None].astype(np.int64)), max_new_tokens=settings["gen_length"],
        steps=settings["steps"], temperature=0.0, top_p=settings.get("top_p"),
        alg=alg[settings["order"]], mask_token_id=MASK, eos_token_id=EOS, pad_token_id=EOS,
    )  # fmt: skip
    return found[0].tolist()


_LLADA = {
    "d_model": 32, "n_heads": 4, "n_kv_heads": 4, "n_layers": 2, "mlp_hidden_size": 48,
    "vocab_size": VOCAB, "embedding_size": VOCAB, "max_sequence_length": 128, "rope": True,
    "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "block_type": "llama", "activation_type": "silu",
    "layer_norm_type": "rms", "weight_tying": False, "include_bias": False, "alibi": False,
    "include_qkv_bias": False, "attention_dropout": 0.0, "residual_dropout": 0.0,
    "embedding_dropout": 0.0, "mask_token_id": MASK, "eos_token_id": EOS, "pad_token_id": EOS,
    "rope_full_precision": True, "flash_attention": False, "init_device": "cpu",
    "bias_for_layer_norm": False, "attention_layer_norm": False, "scale_logits": False,
    "input_emb_norm": False,
}  # fmt: skip
_DREAM = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 128,
    "rope_theta": 1e6, "rms_norm_eps": 1e-6, "mask_token_id": MASK, "pad_token_id": EOS,
    "eos_token_id": EOS,
}  # fmt: skip
_MOE = {
    "vocab_size": VOCAB, "hidden_size": 32, "dense_intermediate_size": 48,
    "expert_intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 128, "rope_theta": 50000.0,
    "partial_rotary_factor": 1, "num_experts": 8, "num_experts_per_tok": 2, "qk_layernorm": True,
    "moe_layer_freq": [1, 1], "moe_router_score_function": "softmax",
    "shared_expert_intermediate_size": None, "moe_router_enable_expert_bias": False,
    "norm_topk_prob": False, "pad_token_id": EOS, "eos_token_id": EOS,
}  # fmt: skip


def cases(loop: Any) -> dict[str, Case]:
    """The families by name; `loop` is the module of a program with the loop."""
    quota = {"gen_length": 48, "steps": 24, "block_length": 16, "order": "low_confidence"}
    fast = quota | {"steps": 48, "temperature": 0.0}
    dream = {"gen_length": 48, "steps": 24, "order": "entropy", "schedule": "timesteps",
             "confidence_of": "filtered", "temperature": 0.0}  # fmt: skip
    return {
        "llada": Case(
            "modeling_llada", "LLaDAConfig", "LLaDAModelLM",
            (_LLADA, _LLADA | {"n_layers": 3, "n_kv_heads": 2},
             _LLADA | {"n_heads": 2, "n_kv_heads": 1}),
            lambda model, ids: last_input(model, "model.transformer.ff_out")(ids),
            llada_loop(loop), fast, ({}, {"steps": 12}, {"block_length": 48, "steps": 20}),
        ),
        "dream": Case(
            "modeling_dream", "DreamConfig", "DreamModel",
            (_DREAM, _DREAM | {"num_hidden_layers": 3, "num_key_value_heads": 1},
             _DREAM | {"num_attention_heads": 2, "num_key_value_heads": 2}),
            lambda model, ids: last_input(model, "lm_head")(ids), dream_loop, dream,
            ({}, {"order": "margin"}, {"order": "low_confidence", "steps": 48}, {"top_p": 0.8}),
            is_shifted=True,
        ),
        "llada_moe": Case(
            "modeling_lladamoe", "LLaDAMoEConfig", "LLaDAMoEModelLM",
            (_MOE, _MOE | {"moe_layer_freq": [0, 1], "qk_layernorm": False,
                           "num_experts_per_tok": 3}),
            lambda model, ids: last_input(model, "lm_head")(ids), llada_loop(loop), fast,
            ({}, {"steps": 12}),
        ),
    }  # fmt: skip


def main() -> None:
    """Prints a row for every config and loop."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", required=True)
    parser.add_argument("--code", required=True, type=Path, metavar="DIR")
    parser.add_argument("--loop", type=Path, metavar="FILE")
    args = parser.parse_args()
    package(args.code, "reference_code")
    loop = None if args.loop is None else program(args.loop, "reference_loop")
    case = cases(loop)[args.family]
    module = importlib.import_module(f"reference_code.{case.module}")
    print(f"| {args.family}: config | hidden | logits | tokens | differ at 1 | 8 | strangers |")
    total = 0
    for number, fields in enumerate(case.fields):
        config = getattr(module, case.config)(**fields)
        config._attn_implementation = "sdpa"
        reference = getattr(module, case.model)(config).eval().float()
        spread(reference, number)
        with tempfile.TemporaryDirectory() as folder:
            config.architectures = [case.model]
            reference.save_pretrained(folder)
            write_tokenizer(Path(folder))
            model = dlm_jax.load(folder)
        hidden, logits = compare_states(case, reference, model, number)
        for changes in case.loops:
            num, differ = compare_ids(case, reference, model, changes, number)
            total += num
            told = ", ".join(f"{k}={v}" for k, v in changes.items()) or "default"
            print(
                f"| {number}, {told} | {hidden:.1e} | {logits:.1e} | {num} | "
                f"{' | '.join(str(differ[k]) for k in ('1', '8', 'strangers'))} |",
                flush=True,
            )
    print(f"{total} generated tokens")


if __name__ == "__main__":
    main()
