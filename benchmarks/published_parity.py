"""Compares published models with the reference code: hidden states, logits, generated ids.

The reference classes write tiny random weights (`save_pretrained`), and `dlm_jax.load` reads them.
Both programs run in float32. The reference classes also read the output of `dlm_jax.export`:

    python -m benchmarks.published_parity --family llada --code DIR --loop FILE

The families are those of `cases`. Formulas replace the CUDA kernels of SDAR. ``DIR`` has the
project's modeling files (``modeling_llada.py`` and its configuration); ``FILE`` is the program with
the loop if it is a separate file (LLaDA's and SDAR's ``generate.py``). These files are code of
other projects, which this program runs; they are not part of this package. The program requires the
extra ``bench`` and the version of transformers for which the code was written. SDAR's mixture of
experts is Qwen3's mixture in transformers with SDAR's masks, and runs in SDAR's loop.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.machinery
import importlib.util
import json
import sys
import tempfile
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import safetensors.torch
import tokenizers
import torch
import transformers
from tokenizers import models, pre_tokenizers

import dlm_jax

VOCAB = 160
MASK, EOS, EOT = VOCAB - 1, VOCAB - 2, VOCAB - 3
PROMPTS = (5, 12, 9, 17, 3, 8, 21, 14)


@dataclass(frozen=True)
class Case:
    """One family's reference.

    Attributes:
      module: name of the modeling file.
      config: name of the config class.
      model: name of the model class.
      fields: fields of tiny random configs.
      hidden: ``(model, ids, length) -> [L, D]``, the input of the LM head.
      generate: ``(reference, ids, settings) -> ids`` of the whole row.
      settings: settings of `dlm_jax.generate` for the same loop.
      loops: changes of the settings, one mapping per run.
      is_shifted: whether the logits of a position predict the next position.
      make: makes the reference from its module, class and config.
      attention: attention implementation of the reference.
      mask: ``(block, length) -> mask``, an argument of its forward; None for no mask.
      prompts: lengths of the prompts.
      says: additional fields of config.json.
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
    make: Callable[..., Any] = lambda module, name, config: getattr(module, name)(config)
    attention: str = "sdpa"
    mask: Callable[[int, int], torch.Tensor] | None = None
    prompts: tuple[int, ...] = PROMPTS
    says: dict[str, Any] = field(default_factory=dict)


def blocks_seen(block: int, length: int) -> torch.Tensor:
    """True where a position of a block-causal model attends to another, ``[1, 1, L, L]``."""
    at = torch.arange(length) // block
    return (at[:, None] >= at[None])[None, None]


def blocks_added(block: int, length: int) -> torch.Tensor:
    """The bias of the attention scores, ``[1, 1, L, L]``."""
    return torch.where(blocks_seen(block, length), 0.0, -torch.inf)


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
    """Sets random weights that distinguish tokens and never write MASK."""
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
    """Writes a tokenizer with one word per id."""
    words = {f"t{i}": i for i in range(VOCAB)}
    made = tokenizers.Tokenizer(models.WordLevel(words, unk_token="t0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(directory / "tokenizer.json"))
    ids = {"mask_token_id": MASK, "eos_token_id": EOS, "pad_token_id": EOS, "bos_token_id": None}
    (directory / "generation_config.json").write_text(json.dumps(ids))


def relative(found: Any, wanted: torch.Tensor) -> float:
    """Largest difference divided by the largest value."""
    want = wanted.detach().numpy()
    return float(np.abs(np.asarray(found) - want).max() / np.abs(want).max())


def compare_states(
    case: Case, reference: Any, model: dlm_jax.Model, seed: int
) -> tuple[float, float]:
    """Relative errors of hidden states and logits over odd lengths, padded in one batch."""
    rng = np.random.default_rng(seed)
    lengths = np.array([23, 7, 1, 16])
    tokens = rng.integers(0, VOCAB, (4, 23)).astype(np.int32)
    hidden_BLD, _ = model.network.trunk(model.params, tokens, lengths, None)
    block = model.network.block_length
    worst = [0.0, 0.0]
    for row, length in enumerate(lengths.tolist()):
        ids = torch.tensor(tokens[row : row + 1, :length].astype(np.int64))
        with torch.no_grad():
            given = {} if case.mask is None else {"attention_mask": case.mask(block, length)}
            wanted = case.hidden(reference, ids, **given)[0]
            logits = reference(ids, **given).logits[0]
        if case.is_shifted:
            order = np.maximum(np.arange(length) - 1, 0)
            wanted, logits = wanted[order], logits[order]
        own = hidden_BLD[row, :length]
        worst[0] = max(worst[0], relative(own, wanted))
        worst[1] = max(worst[1], relative(model.network.readout(model.params, own), logits))
    return worst[0], worst[1]


def read_back(case: Case, module: Any, reference: Any, model: dlm_jax.Model) -> None:
    """Exports the model, and reads it with the config and model classes of the reference.

    Raises:
      ValueError: tensors are missing, surplus or different, or the logits are not bitwise equal.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        dlm_jax.export(model, out, max_shard_bytes=60_000)
        config = getattr(module, case.config).from_pretrained(out)
        config._attn_implementation = case.attention
        again = case.make(module, case.model, config).eval().float()
        stored = {}
        for file in sorted(out.glob("*.safetensors")):
            stored |= safetensors.torch.load_file(file)
        again.load_state_dict(stored, strict=True)
    wanted = reference.state_dict()
    other = [name for name in stored if not torch.equal(stored[name], wanted[name])]
    ids = torch.arange(16)[None]
    given = {} if case.mask is None else {
        "attention_mask": case.mask(model.network.block_length, 16)
    }  # fmt: skip
    with torch.no_grad():
        is_same = torch.equal(again(ids, **given).logits, reference(ids, **given).logits)
    if other or not is_same:
        raise ValueError(f"what was exported is another model: {other[:3] or 'its logits differ'}")


def compare_ids(
    case: Case, reference: Any, model: dlm_jax.Model, changes: dict[str, Any], seed: int
) -> tuple[int, dict[str, int]]:
    """Number of generated tokens, and of differing tokens at batch 1, 8 and among other rows."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, VOCAB - 3, n) for n in case.prompts]
    settings = case.settings | changes
    wanted = [case.generate(reference, prompt, settings) for prompt in prompts]
    ours = {k: v for k, v in settings.items() if not k.startswith("_")}

    def upto_eos(ids: list[int], start: int) -> list[int]:
        ends = [i for i, id_ in enumerate(ids) if i >= start and id_ in model.eos_ids]
        return ids[: ends[0] + 1] if ends else ids

    wanted = [upto_eos(row, n) for row, n in zip(wanted, case.prompts, strict=True)]
    rows: list[dict[str, Any]] = [{"tokens": prompt.tolist()} for prompt in prompts]
    if "_block" in settings:
        for row in rows:
            row["gen_length"] = aligned(settings, len(row["tokens"]))
            first, end = len(row["tokens"]) // settings["_block"], len(row["tokens"])
            num_blocks = (end + row["gen_length"]) // settings["_block"] - first
            row["steps"] = num_blocks * settings.get("_steps", settings["_block"])
    stranger = [
        {
            "tokens": rng.integers(0, VOCAB - 3, 11).tolist(),
            "temperature": 1.3,
            "seed": 9,
            "steps": 96,
        }
    ]
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
    return sum(len(w) - n for w, n in zip(wanted, case.prompts, strict=True)), differ


def last_of(name: str) -> Callable[..., torch.Tensor]:
    """A function ``(model, ids) -> input`` that records the input of the module with this name."""

    def run(model: Any, ids: torch.Tensor, **given: Any) -> torch.Tensor:
        seen = []
        hook = model.get_submodule(name).register_forward_pre_hook(
            lambda module, inputs: seen.append(inputs[0])
        )
        model(ids, **given)
        hook.remove()
        return seen[0]

    return run


def stand_ins(package_name: str) -> None:
    """Installs plain formulas in place of the CUDA kernels that SDAR's modeling file imports."""

    def rms_norm_fn(x: torch.Tensor, weight: torch.Tensor, bias: Any = None, **given: Any) -> Any:
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + given["eps"])
        return weight * (x.float() * scale).to(x.dtype)

    def flash_attn_func(q: Any, k: Any, v: Any, *, causal: bool, softmax_scale: float) -> Any:
        y = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=causal,
            scale=softmax_scale, enable_gqa=True,
        )  # fmt: skip
        return y.transpose(1, 2)

    names = ("flash_attn", "flash_attn.ops", "flash_attn.ops.triton",
             "flash_attn.ops.triton.layer_norm", "flash_attn.bert_padding",
             f"{package_name}.fused_linear_diffusion_cross_entropy")  # fmt: skip
    for name in names:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(sys.modules["flash_attn"])["flash_attn_func"] = flash_attn_func
    vars(sys.modules["flash_attn"])["flash_attn_varlen_func"] = flash_attn_func
    for name in ("index_first_axis", "pad_input", "unpad_input"):
        vars(sys.modules["flash_attn.bert_padding"])[name] = None
    vars(sys.modules["flash_attn.ops.triton.layer_norm"])["rms_norm_fn"] = rms_norm_fn
    vars(sys.modules[names[-1]])["FusedLinearDiffusionCrossEntropyLoss"] = object
    if not hasattr(transformers.utils, "LossKwargs"):

        class LossKwargs(TypedDict, total=False):
            """Additional loss arguments of newer versions."""

        setattr(transformers.utils, "LossKwargs", LossKwargs)  # noqa: B010


def llada_loop(loop: Any) -> Callable[..., list[int]]:
    """LLaDA's ``generate`` with the settings of this library."""

    def generate(reference: Any, prompt: np.ndarray, settings: dict[str, Any]) -> list[int]:
        found = loop.generate(
            reference, torch.tensor(prompt[None].astype(np.int64)), steps=settings["steps"],
            gen_length=settings["gen_length"], block_length=settings["block_length"],
            temperature=0.0, mask_id=MASK,
        )  # fmt: skip
        return found[0].tolist()

    return generate


def llada_on_cpu(module: Any, name: str, config: Any) -> Any:
    """A LLaDA on the CPU, regardless of its modeling file."""
    inner = module.create_model_config_from_pretrained_config(config)
    inner.init_device = "cpu"
    return getattr(module, name)(config, model=module.LLaDAModel(inner, init_params=False))


def dream_with_settings(module: Any, name: str, config: Any) -> Any:
    """A Dream with a generation config, as returned by its ``from_pretrained``."""
    made = getattr(module, name)(config)
    ids = {"mask_token_id": MASK, "eos_token_id": EOS, "pad_token_id": EOS, "bos_token_id": EOS}
    made.generation_config = sys.modules[
        f"{module.__package__}.generation_utils"
    ].DreamGenerationConfig(**ids)
    return made


def dream_loop(reference: Any, prompt: np.ndarray, settings: dict[str, Any]) -> list[int]:
    """Dream's ``diffusion_generate`` with the settings of this library."""
    alg = {"entropy": "entropy", "margin": "topk_margin", "low_confidence": "maskgit_plus"}
    found = reference.diffusion_generate(
        torch.tensor(prompt[None].astype(np.int64)),
        generation_config=reference.generation_config, max_new_tokens=settings["gen_length"],
        steps=settings["steps"], temperature=0.0, top_p=settings.get("top_p"),
        alg=alg[settings["order"]], mask_token_id=MASK, eos_token_id=EOS, pad_token_id=EOS,
    )  # fmt: skip
    return found[0].tolist()


def aligned(settings: dict[str, Any], num_given: int) -> int:
    """Number of new tokens, rounded up so that the row ends at a block boundary."""
    block = settings["_block"]
    return settings["gen_length"] + -(num_given + settings["gen_length"]) % block


def sdar_loop(loop: Any) -> Callable[..., list[int]]:
    """SDAR's ``block_diffusion_generate`` with the settings of this library.

    SDAR has no temperature 0, so a replaced draw returns the likeliest tokens with their
    probabilities. SDAR's draw with ``top_k=1`` would return a probability of 1 for all tokens.
    """
    draw = getattr(loop, "sample_with_temperature_topk_topp", None)

    def likeliest(logits: torch.Tensor, **given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        confidence, tokens = torch.softmax(logits, dim=-1).max(dim=-1)
        return tokens, confidence

    def generate(reference: Any, prompt: np.ndarray, settings: dict[str, Any]) -> list[int]:
        is_dynamic = settings["order"] == "threshold"
        loop.sample_with_temperature_topk_topp = draw if settings["temperature"] else likeliest
        found = loop.block_diffusion_generate(
            reference, {"input_ids": torch.tensor(prompt[None].astype(np.int64))}, MASK,
            gen_length=aligned(settings, len(prompt)), block_length=settings["_block"],
            denoising_steps=settings["_block"], temperature=1.0, top_k=settings.get("top_k", 0),
            remasking_strategy=f"low_confidence_{'dynamic' if is_dynamic else 'static'}",
            confidence_threshold=settings.get("threshold", 0.85), stopping_criteria_idx=[EOS],
        )  # fmt: skip
        return found[0].tolist()

    return generate


def llada2_loop(reference: Any, prompt: np.ndarray, settings: dict[str, Any]) -> list[int]:
    """LLaDA2.0's ``generate`` with the settings of this library."""
    return with_float_mask(reference, prompt, settings, steps=settings["_block"])


def llada21_loop(reference: Any, prompt: np.ndarray, settings: dict[str, Any]) -> list[int]:
    """LLaDA2.1's ``generate`` with the settings of this library."""
    return with_float_mask(
        reference, prompt, settings, editing_threshold=settings["rewrite_threshold"],
        max_post_steps=settings["rewrite_steps"], eos_early_stop=True,
    )  # fmt: skip


def with_float_mask(
    reference: Any, prompt: np.ndarray, settings: dict[str, Any], **more: Any
) -> list[int]:
    """``generate`` of LLaDA2.0 or 2.1 in float32; its bfloat16 mask is converted."""
    forward = type(reference).forward

    def widened(ids: torch.Tensor, attention_mask: torch.Tensor, **given: Any) -> Any:
        return forward(reference, ids, attention_mask=attention_mask.float(), **given)

    reference.forward = widened
    found = reference.generate(
        torch.tensor(prompt[None].astype(np.int64)), temperature=0.0,
        block_length=settings["_block"], gen_length=aligned(settings, len(prompt)),
        threshold=settings["threshold"], eos_id=EOS, mask_id=MASK, **more,
    )  # fmt: skip
    del reference.forward
    return [*prompt.tolist(), *found[0].tolist()]


def fast_dllm_loop(reference: Any, prompt: np.ndarray, settings: dict[str, Any]) -> list[int]:
    """Fast-dLLM v2's ``generate`` with our settings, without the token after the last block."""
    length = len(prompt) + aligned(settings, len(prompt))
    found, *_ = reference.generate(
        torch.tensor(prompt[None].astype(np.int64)), mask_id=MASK, stop_token=EOS, temperature=0,
        max_new_tokens=length - len(prompt) // settings["_block"] * settings["_block"],
        threshold=settings["threshold"], small_block_size=settings["block_length"],
        block_size=settings["_block"],
    )  # fmt: skip
    return found[0, :length].tolist()


def fast_dllm(module: Any, name: str, config: Any) -> Any:
    """A Fast-dLLM v2 with a named attention implementation."""
    config._attn_implementation = "sdpa"
    return getattr(module, name)(config)


def qwen3_moe(module: Any, name: str, config: Any) -> Any:
    """Qwen3's mixture of experts with the call signature of SDAR's loop, which has ``store_kv``."""
    made = getattr(module, name)(config)
    forward = type(made).forward

    def called(ids: torch.Tensor, attention_mask: Any = None, **given: Any) -> Any:
        keeps, cache = given.pop("store_kv", True), given.get("past_key_values")
        length = 0 if cache is None else cache.get_seq_length()
        if attention_mask is not None:
            seen = attention_mask.bool()
            attention_mask = seen[:, None] if seen.ndim == 3 else seen
        found = forward(made, ids, attention_mask=attention_mask, **given)
        if cache is not None and not keeps:
            cache.crop(length)
        return found

    made.forward = called
    return made


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


_SDAR = {
    "hidden_size": 32, "head_dim": 16, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB, "block_size": 4,
    "max_position_embeddings": 128, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
    "mask_token_id": MASK, "pad_token_id": EOS, "eos_token_id": EOS, "fuse_cross_entropy": False,
    "tie_word_embeddings": False,
}  # fmt: skip
_LLADA2 = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "use_qkv_bias": False,
    "use_bias": False, "num_experts": 16, "num_shared_experts": 1, "num_experts_per_tok": 4,
    "n_group": 4, "topk_group": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
    "partial_rotary_factor": 0.5, "rope_theta": 600000.0, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 160, "pad_token_id": EOS, "eos_token_id": EOS, "use_cache": False,
}  # fmt: skip


_FAST_DLLM = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCAB, "bd_size": 32, "max_position_embeddings": 256,
    "rope_theta": 1e6, "rms_norm_eps": 1e-6, "mask_token_id": MASK, "pad_token_id": EOS,
    "eos_token_id": EOS, "tie_word_embeddings": False,
}  # fmt: skip
_QWEN3_MOE = {
    "hidden_size": 32, "head_dim": 16, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB, "num_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "max_position_embeddings": 128,
    "rope_theta": 1e6, "rms_norm_eps": 1e-6, "pad_token_id": EOS, "eos_token_id": EOS,
    "tie_word_embeddings": False,
}  # fmt: skip


def cases(loop: Any) -> dict[str, Case]:
    """The families by name; `loop` is the module with the loop."""
    quota = {"gen_length": 48, "steps": 24, "block_length": 16, "order": "low_confidence"}
    fast = quota | {"steps": 48, "temperature": 0.0}
    dream = {"gen_length": 48, "steps": 24, "order": "entropy", "schedule": "timesteps",
             "confidence_of": "clean", "temperature": 0.0}  # fmt: skip
    sdar = {"gen_length": 48, "_block": 4, "temperature": 0.0, "order": "threshold",
            "threshold": 0.85, "threshold_above": True, "stop_at_eos": True}  # fmt: skip
    llada2 = sdar | {"_block": 32, "threshold": 0.95}
    llada21 = llada2 | {"order": "joint_threshold", "rewrite_threshold": 0.9, "rewrite_steps": 16,
                        "_steps": 48}  # fmt: skip
    v2 = sdar | {"_block": 32, "block_length": 8, "threshold": 0.9, "threshold_alone": 32}
    return {
        "fast_dllm": Case(
            "modeling", "Fast_dLLM_QwenConfig", "Fast_dLLM_QwenForCausalLM",
            (_FAST_DLLM, _FAST_DLLM | {"num_hidden_layers": 3, "num_key_value_heads": 1}),
            last_of("lm_head"), fast_dllm_loop, v2,
            ({}, {"threshold": 0.4}, {"cache": "exact"}),
            is_shifted=True, make=fast_dllm, prompts=(5, 12, 40, 64, 33, 8, 70, 31),
        ),
        "sdar_moe": Case(
            "modeling_qwen3_moe", "Qwen3MoeConfig", "Qwen3MoeForCausalLM",
            (_QWEN3_MOE, _QWEN3_MOE | {"num_hidden_layers": 3, "num_experts_per_tok": 3}),
            last_of("lm_head"), sdar_loop(loop), sdar,
            ({}, {"threshold": 0.5}, {"cache": "exact"}),
            make=qwen3_moe, mask=blocks_seen,
            says={"architectures": ["SDARMoeForCausalLM"], "model_type": "sdar_moe",
                  "block_size": 4},
        ),
        "llada2.1": Case(
            "modeling_llada21_moe", "LLaDA2MoeConfig", "LLaDA2MoeModelLM",
            (_LLADA2, _LLADA2 | {"num_hidden_layers": 4}),
            last_of("lm_head"), llada21_loop, llada21,
            ({}, {"threshold": 0.5, "rewrite_threshold": 0.3},
             {"threshold": 0.3, "rewrite_threshold": 0.2, "cache": "exact"}),
            mask=blocks_added,
        ),
        "sdar": Case(
            "modeling_sdar", "SDARConfig", "SDARForCausalLM",
            (_SDAR, _SDAR | {"num_hidden_layers": 3, "num_key_value_heads": 1}),
            last_of("lm_head"), sdar_loop(loop), sdar,
            ({}, {"threshold": 0.5}, {"order": "low_confidence"}, {"cache": "exact"},
             {"temperature": 1.0, "top_k": 1, "confidence_of": "filtered"}),
            mask=blocks_seen, attention="eager",
        ),
        "llada2": Case(
            "modeling_llada2_moe", "LLaDA2MoeConfig", "LLaDA2MoeModelLM",
            (_LLADA2, _LLADA2 | {"first_k_dense_replace": 2, "num_shared_experts": 2}),
            last_of("lm_head"), llada2_loop, llada2,
            ({}, {"threshold": 0.3}, {"cache": "exact"}),
            mask=blocks_added,
        ),
        "llada": Case(
            "modeling_llada", "LLaDAConfig", "LLaDAModelLM",
            (_LLADA, _LLADA | {"n_layers": 3, "n_kv_heads": 2},
             _LLADA | {"n_heads": 2, "n_kv_heads": 1}),
            last_of("model.transformer.ff_out"),
            llada_loop(loop), fast, ({}, {"steps": 12}, {"block_length": 48, "steps": 20}),
            attention="eager", make=llada_on_cpu,
        ),
        "dream": Case(
            "modeling_dream", "DreamConfig", "DreamModel",
            (_DREAM, _DREAM | {"num_hidden_layers": 3, "num_key_value_heads": 1},
             _DREAM | {"num_attention_heads": 2, "num_key_value_heads": 2}),
            last_of("lm_head"), dream_loop, dream,
            ({}, {"order": "margin"}, {"order": "low_confidence", "steps": 48}),
            is_shifted=True, make=dream_with_settings,
        ),
        "llada_moe": Case(
            "modeling_lladamoe", "LLaDAMoEConfig", "LLaDAMoEModelLM",
            (_MOE, _MOE | {"moe_layer_freq": [0, 1], "qk_layernorm": False,
                           "num_experts_per_tok": 3, "num_key_value_heads": 2}),
            last_of("lm_head"), llada_loop(loop), fast,
            ({}, {"steps": 12}),
        ),
    }  # fmt: skip


def varied(fields: dict[str, Any], seed: int) -> dict[str, Any]:
    """A random config of the family, with different depths, widths, heads, groups and experts."""
    rng = np.random.default_rng(seed)

    def one(*among: int) -> int:
        return int(rng.choice(among))

    heads, size, layers = one(2, 4, 6), one(4, 8, 16), one(1, 2, 3, 4, 5)
    groups = one(*(n for n in (1, 2, 3, 4, 6) if heads % n == 0))
    plain = one(*range(min(2, layers)))  # the first layers have no experts
    changes = {
        "n_heads": heads, "num_attention_heads": heads, "n_kv_heads": groups,
        "num_key_value_heads": groups, "n_layers": layers, "num_hidden_layers": layers,
        "moe_layer_freq": [0] * plain + [1] * (layers - plain), "head_dim": size,
        "mlp_hidden_size": one(24, 40, 56), "intermediate_size": one(24, 40, 56),
        "dense_intermediate_size": one(24, 40, 56), "moe_intermediate_size": one(8, 12, 24),
        "expert_intermediate_size": one(8, 12, 24), "num_experts_per_tok": one(1, 2, 3, 4),
        "qk_layernorm": bool(one(0, 1)), "first_k_dense_replace": plain,
        "num_shared_experts": one(1, 2), "norm_topk_prob": bool(one(0, 1)),
        "rms_norm_eps": float(rng.choice([1e-6, 1e-5])), "rope_theta": float(one(10000, 500000)),
        "hidden_size": one(24, 32, 48) if "head_dim" in fields else heads * size,
        "d_model": heads * size,
    }  # fmt: skip
    if "dense_intermediate_size" in fields:
        changes["norm_topk_prob"] = False  # required by LLaDA-MoE's code
    return fields | {name: value for name, value in changes.items() if name in fields}


def main() -> None:
    """Prints one row per config and loop."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--family", required=True)
    parser.add_argument("--code", required=True, type=Path, metavar="DIR")
    parser.add_argument("--loop", type=Path, metavar="FILE")
    parser.add_argument("--random", type=int, default=0, metavar="N",
                        help="compare only states and exports of N random configs")  # fmt: skip
    args = parser.parse_args()
    package(args.code, "reference_code")
    if args.family == "sdar_moe":
        sys.modules["reference_code.modeling_qwen3_moe"] = importlib.import_module(
            "transformers.models.qwen3_moe"
        )
    if args.family == "fast_dllm":
        # Imported by the reference but used only in training.
        sys.modules["einops"] = types.ModuleType("einops")
        vars(sys.modules["einops"]).update(rearrange=None, repeat=None)
    if args.family == "sdar":
        stand_ins("reference_code")
    loop = None if args.loop is None else program(args.loop, "reference_loop")
    case = cases(loop)[args.family]
    module = importlib.import_module(f"reference_code.{case.module}")
    print(f"| {args.family}: config | hidden | logits | tokens | differ at 1 | 8 | strangers |")
    total = 0
    drawn = [varied(case.fields[0], seed) for seed in range(args.random)]
    for number, fields in enumerate(drawn or case.fields):
        config = getattr(module, case.config)(**fields)
        config._attn_implementation = case.attention
        reference = case.make(module, case.model, config).eval().float()
        spread(reference, number)
        with tempfile.TemporaryDirectory() as folder:
            config.architectures = [case.model]
            reference.save_pretrained(folder)
            write_tokenizer(Path(folder))
            written = Path(folder) / "config.json"
            written.write_text(json.dumps(json.loads(written.read_text()) | case.says))
            model = dlm_jax.load(folder)
        hidden, logits = compare_states(case, reference, model, number)
        read_back(case, module, reference, model)
        if args.random:
            print(f"| {number} | {hidden:.1e} | {logits:.1e} | | | | |", flush=True)
            continue
        for changes in case.loops if number == 0 else case.loops[:1]:
            num, differ = compare_ids(case, reference, model, changes, number)
            total += num
            told = ", ".join(f"{k}={v}" for k, v in changes.items()) or "default"
            print(
                f"| {number}, {told} | {hidden:.1e} | {logits:.1e} | {num} | "
                f"{' | '.join(str(differ[k]) for k in ('1', '8', 'strangers'))} |",
                flush=True,
            )
    count = len(drawn or case.fields)
    print(f"{total} generated tokens; {count} models exported and read back as they were")


if __name__ == "__main__":
    main()
