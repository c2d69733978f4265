"""Reads GGUF files of llama.cpp: config, tokenizer, chat template and weights from one file.

Weights are dequantised while they are loaded. Metadata that may change the computation and is not
implemented is refused by name. The package `gguf` (the extra ``gguf``) reads the file.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from dlm_jax.config import RopeScaling
from dlm_jax.data.tokenizers import bpe_json, qwen_split
from dlm_jax.hf import llada, qwen
from dlm_jax.hf.family import FileFields
from dlm_jax.hf.tensors import TensorLocation
from dlm_jax.model.layers import rotary_multipliers
from dlm_jax.settings import SettingError
from dlm_jax.store.files import said

SUFFIX = ".gguf"

ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", True),
    "llada": ("LLaDAModelLM", True),
    "qwen2": ("Qwen2ForCausalLM", False),
    "qwen3": ("Qwen3ForCausalLM", False),
    "dream": ("DreamModel", False),
}
"""Architectures, with their names in config.json, and whether llama.cpp stores the two halves of a
rotated head alternately."""

_IDLE = {
    "vocab_size",
    "attention.causal",
    "rope.dimension_count",
    "rope.scaling.finetuned",
    "tensor_data_layout",
}

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLADA = (
    r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
# The patterns of llama.cpp, by tokenizer.ggml.pre. Each pattern splits the pieces of the previous
# one.
_PATTERNS = {
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "qwen2": (qwen_split(1),),
    "deepseek-r1-qwen": (qwen_split(1),),
    "llama-bpe": (qwen_split(3),),
    "llada-moe": (_LLADA,),
}

# Types of tokens in tokenizer.ggml.token_type.
_CONTROL, _ADDED, _UNUSED = 3, 4, 5

TENSORS = {
    "embedding": "token_embd.weight",
    "norm/scale": "output_norm.weight",
    "head/kernel": "output.weight",
    "blocks/attention_norm/scale": "blk.{i}.attn_norm.weight",
    "blocks/attention/query/kernel": "blk.{i}.attn_q.weight",
    "blocks/attention/key/kernel": "blk.{i}.attn_k.weight",
    "blocks/attention/value/kernel": "blk.{i}.attn_v.weight",
    "blocks/attention/query/bias": "blk.{i}.attn_q.bias",
    "blocks/attention/key/bias": "blk.{i}.attn_k.bias",
    "blocks/attention/value/bias": "blk.{i}.attn_v.bias",
    "blocks/attention/query_norm/scale": "blk.{i}.attn_q_norm.weight",
    "blocks/attention/key_norm/scale": "blk.{i}.attn_k_norm.weight",
    "blocks/attention/out/kernel": "blk.{i}.attn_output.weight",
    "blocks/mlp_norm/scale": "blk.{i}.ffn_norm.weight",
    "blocks/mlp/gate/kernel": "blk.{i}.ffn_gate.weight",
    "blocks/mlp/up/kernel": "blk.{i}.ffn_up.weight",
    "blocks/mlp/down/kernel": "blk.{i}.ffn_down.weight",
}
"""The tensor of each parameter, as in `Family.tensors`."""


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path is that of a GGUF file, by its suffix."""
    return os.fspath(path).lower().endswith(SUFFIX) and not Path(path).is_dir()


class GgufFile:
    """The content of a GGUF file, in terms of a published directory.

    Attributes:
      tokenizer: the text of an equivalent tokenizer.json.
      template: the chat template, or None.
      entries: the tensors; `start` is unused.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            import gguf
        except ImportError:
            raise SettingError(
                "checkpoint",
                str(path),
                "requires the package gguf",
                "install it: pip install 'dlm_jax[gguf]'",
            ) from None
        try:
            reader = gguf.GGUFReader(path)
            values = {name: field.contents() for name, field in reader.fields.items()}
            self._tensors = {tensor.name: tensor for tensor in reader.tensors}
            self._dequantize: Any = gguf.quants.dequantize
        # The package raises errors of NumPy for a damaged file.
        except Exception as error:
            raise ValueError(
                f"{path} is not a readable GGUF file ({said(error)}); download it again"
            ) from None
        self.entries: dict[str, TensorLocation] = {}
        for name, tensor in self._tensors.items():
            halves = {"F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
            dtype = halves.get(tensor.tensor_type.name, np.dtype(np.float32))
            shape = tuple(int(size) for size in tensor.shape[::-1])
            self.entries[name] = TensorLocation(path, dtype, 0, shape)
        fields = FileFields({name: v for name, v in values.items() if v is not None}, str(path))
        fields.must(**{"split.count": (0, 1)})
        name = fields.take("general.architecture", str)
        if name not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise fields.refuse("general.architecture", name, f"is not read; only {known} are")
        self._fields_of_config = self._config(fields, name)
        self.tokenizer = _tokenizer_json(fields)
        self.template = fields.take("tokenizer.chat_template", str, "") or None

    def read_config(self, ignore: Collection[str] = ()) -> dict[str, Any]:
        """The fields of an equivalent config.json, with the ids of special tokens.

        Raises ValueError for metadata of the architecture that is not read and may have an effect,
        except for the keys in `ignore`.
        """
        fields = self._fields
        fields.finish(_IDLE | {key.removeprefix(fields.within) for key in ignore})
        return self._fields_of_config

    def read(self, name: str) -> np.ndarray:
        """The dequantised tensor, in the dtype of its entry."""
        tensor, location = self._tensors[name], self.entries[name]
        if location.dtype != np.float32:
            values = np.asarray(tensor.data).view(location.dtype)
        else:
            try:
                values = self._dequantize(tensor.data, tensor.tensor_type)
            except NotImplementedError:
                raise ValueError(
                    f"{self.path}: the tensor {name!r} has the type {tensor.tensor_type.name}, "
                    "which is not read; quantise the model to Q8_0"
                ) from None
        values = values.reshape(location.shape)
        heads = self._halves.get(name.rpartition(".")[0].rpartition(".")[2], 0)
        if not heads:
            return values
        parts = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
        return np.ascontiguousarray(parts.swapaxes(1, 2).reshape(values.shape))

    def _config(self, fields: FileFields, name: str) -> dict[str, Any]:
        (architecture, is_alternating), within = ARCHITECTURES[name], f"{name}."
        inner = {k[len(within) :]: v for k, v in fields.values.items() if k.startswith(within)}
        self._fields = arch = FileFields(inner, str(self.path), within)
        width, heads = arch.take("embedding_length", int), arch.take("attention.head_count", int)
        groups = arch.take("attention.head_count_kv", int, heads)
        size = arch.take("attention.key_length", int, width // max(heads, 1))
        arch.must(**{"attention.value_length": size})
        turned = arch.take("rope.dimension_count", int, size)
        if turned != size:
            raise arch.refuse("rope.dimension_count", turned, f"is not implemented; only {size} is")
        self._halves = {"attn_q": heads, "attn_k": groups} if is_alternating else {}
        longest, theta = arch.take("context_length", int), arch.take("rope.freq_base", float, 1e4)
        scaling = _scaling(arch) or self._llama3(size, theta)
        if name == "llada" and (scaling or size * heads != width):
            raise arch.refuse("rope.scaling", scaling, "is not implemented")
        if TENSORS["embedding"] not in self.entries:
            raise ValueError(f"{self.path} lacks the tensor 'token_embd.weight'; download it again")
        families = (*llada.FAMILIES, *qwen.FAMILIES)
        (family,) = (one for one in families if architecture in one.architectures)
        settings = {
            "depth": arch.take("block_count", int),
            "heads": heads,
            "head_size": size,
            "kv_heads": groups,
            "mlp_width": arch.take("feed_forward_length", int),
            # llama.cpp stores these numbers in float32.
            "norm_epsilon": _decimal(arch.take("attention.layer_norm_rms_epsilon", float)),
            "qkv_bias": "blk.0.attn_q.bias" in self.entries,
            "rope_theta": _decimal(theta),
            "tied_head": TENSORS["head/kernel"] not in self.entries,
            "vocab_size": self.entries[TENSORS["embedding"]].shape[0],
            "width": width,
        }
        config = {field: settings[setting] for field, (setting, *_) in family.fields.items()}
        config |= {"architectures": [architecture], "rope_theta": settings["rope_theta"]}
        config |= {"rope_scaling": scaling} if scaling else {}
        return config | {family.max_length: longest} | _special_ids(fields)

    def _llama3(self, size: int, theta: float) -> dict[str, Any] | None:
        """The scaling of Llama 3.1, of which a file keeps the divisor of each frequency."""
        if self.entries.pop("rope_freqs.weight", None) is None:
            return None
        divisors_K = np.asarray(self._tensors["rope_freqs.weight"].data, np.float64)
        scaling = RopeScaling("llama3", float(divisors_K.max()), 8192.0, low=1.0, high=4.0)
        expected_K = rotary_multipliers(scaling, size, theta)
        is_same = divisors_K.shape == expected_K.shape
        if not is_same or not np.allclose(1 / divisors_K, expected_K, 1e-4):
            raise ValueError(
                f"{self.path}: the tensor 'rope_freqs.weight' is not the scaling of Llama 3.1, "
                "which is the only one that is read"
            )
        return qwen.scaling_fields(scaling)


@functools.lru_cache(maxsize=1)
def _opened(path: Path, time: int) -> GgufFile:
    del time
    return GgufFile(path)


def opened(path: Path) -> GgufFile:
    """The content of a file. The last file is cached, because parsing takes seconds."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist; check the path")
    return _opened(path, path.stat().st_mtime_ns)


def _decimal(value: float) -> float:
    return float(f"{value:.7g}")


def _scaling(fields: FileFields) -> dict[str, Any] | None:
    """The ``rope_scaling`` of config.json for the fields ``rope.scaling``."""
    kind = fields.take("rope.scaling.type", str, "none")
    names = {
        "factor": "factor",
        "original_max_position_embeddings": "original_context_length",
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
    }
    numbers = {ours: fields.take(f"rope.scaling.{name}", float, 0) for ours, name in names.items()}
    known = {name: value for name, value in numbers.items() if value}
    return None if kind == "none" else {"rope_type": kind} | known


def _special_ids(fields: FileFields) -> dict[str, Any]:
    """The ids of special tokens, by their fields in config.json; -1 for a missing token."""
    bos, pad, mask, *ends = (
        fields.take(f"tokenizer.ggml.{name}_token_id", int, -1)
        for name in ("bos", "padding", "mask", "eos", "eot")
    )
    eos = list(dict.fromkeys(id_ for id_ in ends if id_ >= 0)) or None
    return {"bos_token_id": bos, "pad_token_id": pad, "mask_token_id": mask, "eos_token_id": eos}


def _tokenizer_json(fields: FileFields) -> str:
    """The tokenizer.json of the fields ``tokenizer.ggml``, a byte-level BPE."""
    kind = fields.take("tokenizer.ggml.model", str)
    pre = fields.take("tokenizer.ggml.pre", str, "default")
    for name, value, known in (("model", kind, ("gpt2",)), ("pre", pre, _PATTERNS)):
        if value not in known:
            reason = f"is not read; only {', '.join(known)} are"
            raise fields.refuse(f"tokenizer.ggml.{name}", value, reason)
    tokens = fields.take("tokenizer.ggml.tokens", list)
    kinds = fields.take("tokenizer.ggml.token_type", list, [1] * len(tokens))
    is_llama = pre == "llama-bpe"
    bos_id = fields.values.get("tokenizer.ggml.bos_token_id", -1)
    begins = fields.take("tokenizer.ggml.add_bos_token", bool, is_llama)
    return bpe_json(
        {token: id_ for id_, token in enumerate(tokens) if kinds[id_] != _UNUSED},
        fields.take("tokenizer.ggml.merges", list),
        {
            id_: (token, kinds[id_] == _CONTROL)
            for id_, token in enumerate(tokens)
            if kinds[id_] in (_CONTROL, _ADDED)
        },
        _PATTERNS[pre],
        # The tokenizer.json of Qwen composes characters first, though llama.cpp does not.
        composes="qwen" in pre,
        ignore_merges=is_llama,
        bos=(tokens[bos_id], bos_id) if begins and 0 <= bos_id < len(tokens) else None,
    )
