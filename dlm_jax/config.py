"""Configuration of a run: frozen dataclasses that validate themselves, from TOML and flags.

A config file holds one table per section (``[model]``, ``[data]``, ...); the same names with a dot
are command-line flags (``--train.steps 100``). Unknown keys and ill-typed values are refused with
one line that names the key, the value and the remedy.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec


def _field(default: Any, doc: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": doc})


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape of the Transformer, from small GPT-like to LLaMA-like."""

    depth: int = _field(6, "number of Transformer blocks")
    width: int = _field(128, "size of the hidden vectors (D)")
    heads: int = _field(4, "attention heads; width must be a multiple of it")
    kv_heads: int = _field(0, "key/value heads shared by groups of heads; 0: as many as heads")
    mlp_width: int = _field(0, "inner size of the MLP; 0: 4 * width (swiglu: 8/3, rounded to 8)")
    activation: Literal["relu2", "gelu", "swiglu"] = _field(
        "relu2", "MLP non-linearity: relu2 (squared ReLU), gelu (tanh form) or swiglu"
    )
    norm: Literal["rms", "layer"] = _field("rms", "normalisation: rms (RMSNorm) or layer")
    norm_epsilon: float = _field(1e-5, "added to the mean square or variance in a norm")
    qk_norm: bool = _field(True, "RMSNorm of queries and keys over the head, before RoPE")
    qkv_bias: bool = _field(False, "biases on the query, key and value projections")
    rope_theta: float = _field(10000.0, "base of the rotary position frequencies")
    tied_head: bool = _field(True, "the LM head is the transposed embedding table")
    attention_type: Literal["bidirectional", "causal"] = _field(
        "bidirectional", "which positions attend: bidirectional or causal"
    )
    vocab_size: int = _field(0, "number of logits; 0: the tokenizer's vocabulary")
    compute_dtype: Literal["float32", "bfloat16"] = _field(
        "float32", "dtype of activations; parameters, norms and softmax stay float32"
    )
    remat: bool = _field(False, "recompute activations in the backward pass to save memory")

    def __post_init__(self) -> None:
        for name in ("depth", "width", "heads"):
            value = getattr(self, name)
            _require(value >= 1, f"model.{name}={value} must be at least 1")
        for name in ("kv_heads", "mlp_width", "vocab_size"):
            value = getattr(self, name)
            _require(value >= 0, f"model.{name}={value} must be at least 0")
        _require(
            self.width % self.heads == 0 and (self.width // self.heads) % 2 == 0,
            f"model.width={self.width} is not an even multiple of model.heads={self.heads}; "
            f"use a width of {2 * self.heads * max(1, round(self.width / (2 * self.heads)))}",
        )
        _require(
            self.kv_heads == 0 or self.heads % self.kv_heads == 0,
            f"model.kv_heads={self.kv_heads} does not divide model.heads={self.heads}; "
            f"use 0 or a divisor of {self.heads}",
        )
        _require(self.norm_epsilon > 0, f"model.norm_epsilon={self.norm_epsilon} must be > 0")
        _require(self.rope_theta > 0, f"model.rope_theta={self.rope_theta} must be > 0")


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What is trained on, and how text becomes tokens."""

    source: tuple[str, ...] = _field(
        ("python-reference",),
        "UTF-8 files or globs, or python-reference: the language reference inside CPython",
    )
    tokenizer: Literal["character", "byte"] = _field(
        "character", "character: the characters of the corpus; byte: the 256 bytes of UTF-8"
    )
    seq_len: int = _field(128, "tokens of one training window (L)")
    held_out: float = _field(0.05, "fraction of the corpus kept for evaluation")
    cache_dir: str = _field("", "where token files are kept; empty: $DLM_JAX_CACHE or ~/.cache")

    def __post_init__(self) -> None:
        _require(
            len(self.source) > 0, "data.source is empty; name a file, a glob or python-reference"
        )
        _require(self.seq_len >= 2, f"data.seq_len={self.seq_len} must be at least 2")
        _require(0 < self.held_out < 1, f"data.held_out={self.held_out} must be between 0 and 1")


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """The optimiser and its learning-rate schedule."""

    name: Literal["muon", "adamw"] = _field(
        "muon", "muon (Adam for embeddings and norms) or adamw for everything"
    )
    learning_rate: float = _field(0.02, "peak learning rate (muon's matrices, or all of adamw)")
    adam_learning_rate: float = _field(3e-3, "muon: peak learning rate of what Adam trains")
    final_ratio: float = _field(0.0, "last learning rate of the cosine, as a fraction of the peak")
    warmup_steps: int = _field(50, "steps of linear warm-up from 0")
    weight_decay: float = _field(0.0, "decoupled weight decay of matrices")
    b1: float = _field(0.9, "Adam's decay of the mean")
    b2: float = _field(0.95, "Adam's decay of the mean square")
    muon_momentum: float = _field(0.95, "muon's momentum")
    clip: float = _field(1.0, "global gradient norm above which gradients are scaled down")

    def __post_init__(self) -> None:
        for name in ("learning_rate", "adam_learning_rate", "clip"):
            value = getattr(self, name)
            _require(value > 0, f"optim.{name}={value} must be > 0")
        for name in ("b1", "b2", "muon_momentum"):
            value = getattr(self, name)
            _require(0 <= value < 1, f"optim.{name}={value} must be in [0, 1)")
        _require(0 <= self.final_ratio <= 1, f"optim.final_ratio={self.final_ratio} not in [0, 1]")
        _require(self.warmup_steps >= 0, f"optim.warmup_steps={self.warmup_steps} must be >= 0")
        _require(self.weight_decay >= 0, f"optim.weight_decay={self.weight_decay} must be >= 0")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The training run: how long, how often it looks up, and where it writes."""

    out_dir: str = _field("runs/default", "where checkpoints, metrics and plots are written")
    steps: int = _field(1000, "optimiser steps")
    batch_size: int = _field(32, "rows of one step, over all devices and processes")
    seed: int = _field(0, "of the parameters, the data order and the noise")
    log_every: int = _field(10, "steps between two lines of metrics")
    eval_every: int = _field(250, "steps between evaluations on held-out text; 0: only at the end")
    eval_windows: int = _field(256, "held-out windows of one evaluation, at most")
    sample_every: int = _field(0, "steps between samples shown while training; 0: only at the end")
    checkpoint_every: int = _field(250, "steps between checkpoints; 0: only at the end")
    keep_checkpoints: int = _field(2, "newest checkpoints to keep")

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "log_every", "eval_windows", "keep_checkpoints"):
            value = getattr(self, name)
            _require(value >= 1, f"train.{name}={value} must be at least 1")
        for name in ("seed", "eval_every", "sample_every", "checkpoint_every"):
            value = getattr(self, name)
            _require(value >= 0, f"train.{name}={value} must be at least 0")
        _require(self.out_dir != "", "train.out_dir is empty; name a directory")


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """How devices are arranged: the product of the axes is the number of devices."""

    data: int = _field(-1, "devices that split the batch; -1: all that the other axes leave")
    fsdp: int = _field(1, "devices that also split parameters and optimiser state")
    tensor: int = _field(1, "devices that split the matrices of one layer")

    def __post_init__(self) -> None:
        _require(
            self.data == -1 or self.data >= 1, f"mesh.data={self.data} must be -1 or at least 1"
        )
        for name in ("fsdp", "tensor"):
            value = getattr(self, name)
            _require(value >= 1, f"mesh.{name}={value} must be at least 1")


Order = Literal["low_confidence", "random"]
Schedule = Literal["linear", "cosine"]
ORDERS: tuple[str, ...] = typing.get_args(Order)
SCHEDULES: tuple[str, ...] = typing.get_args(Schedule)


@dataclasses.dataclass(frozen=True)
class SampleConfig:
    """Recommended sampling settings: stored in the checkpoint, the defaults of ``sample.py``."""

    gen_length: int = _field(0, "new tokens of one sample; 0: as many as the canvas has room for")
    steps: int = _field(128, "denoising steps of one sample")
    temperature: float = _field(1.0, "of the draw; 0: the most likely token")
    order: Order = _field(
        "random", "which proposals are committed first: low_confidence (the surest) or random"
    )
    schedule: Schedule = _field(
        "linear", "how the number of commits is spread over the steps: linear or cosine"
    )

    def __post_init__(self) -> None:
        _require(self.gen_length >= 0, f"gen_length={self.gen_length} must be at least 0")
        _require(self.steps >= 1, f"steps={self.steps} must be at least 1")
        _require(self.order in ORDERS, f"order={self.order!r} is not one of {', '.join(ORDERS)}")
        _require(
            self.schedule in SCHEDULES,
            f"schedule={self.schedule!r} is not one of {', '.join(SCHEDULES)}",
        )
        _require(
            self.temperature >= 0,
            f"temperature={self.temperature} is negative; use 0 for greedy",
        )


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything a run needs; every default constructs."""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    sample: SampleConfig = dataclasses.field(default_factory=SampleConfig)

    def __post_init__(self) -> None:
        _require(
            self.optim.warmup_steps < self.train.steps or self.train.steps == 1,
            f"optim.warmup_steps={self.optim.warmup_steps} leaves nothing of "
            f"train.steps={self.train.steps}; lower it",
        )


def sections() -> dict[str, type]:
    """Config sections by name, in their order."""
    return dict(typing.get_type_hints(Config))


def key_types() -> dict[str, Any]:
    """Type of every key, by its dotted name."""
    return {
        f"{section}.{name}": hint
        for section, cls in sections().items()
        for name, hint in typing.get_type_hints(cls).items()
    }


def to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """The config as nested plain values, fit for JSON; `from_dict` is its inverse."""
    return msgspec.to_builtins(config)


def from_dict(raw: Mapping[str, Any], *, where: str) -> Config:
    """Config from nested plain values; `where` names their origin in errors.

    Raises:
      ValueError: an unknown section or key (with the nearest match), a value of the wrong type,
        or one out of range.
    """
    flat = {}
    for section, values in raw.items():
        _check_known(section, sections(), where=where, what="section")
        _require(
            isinstance(values, Mapping),
            f"{where}: {section}={values!r} is not a section; write [{section}] above its keys",
        )
        flat |= {f"{section}.{name}": value for name, value in values.items()}
    return _build(flat, where=dict.fromkeys(flat, where), strict=True)


def load(path: str | Path | None, overrides: Mapping[str, str] | None = None) -> Config:
    """Config from a TOML file (or the defaults), with dotted keys overridden by flag texts."""
    flat: dict[str, Any] = {}
    where: dict[str, str] = {}
    if path is not None:
        config = from_dict(_read_toml(Path(path)), where=str(path))
        flat = {
            f"{section}.{name}": value
            for section, values in to_dict(config).items()
            for name, value in values.items()
        }
        where = dict.fromkeys(flat, str(path))
    for key, text in (overrides or {}).items():
        _check_known(key, key_types(), where="command line", what="flag")
        flat[key] = text.split(",") if _is_tuple(key_types()[key]) else text
        where[key] = "command line"
    return _build(flat, where=where, strict=False)


def _build(flat: Mapping[str, Any], *, where: Mapping[str, str], strict: bool) -> Config:
    hints = key_types()
    nested: dict[str, dict[str, Any]] = {name: {} for name in sections()}
    for key, value in flat.items():
        _check_known(key, hints, where=where[key], what="key")
        section, name = key.split(".", 1)
        try:
            lenient = not strict and isinstance(value, str | list)
            nested[section][name] = msgspec.convert(value, hints[key], strict=not lenient)
        except msgspec.ValidationError:
            raise ValueError(
                f"{where[key]}: {key}={value!r} is not {_describe(hints[key])}"
            ) from None
    origin = next(iter(dict.fromkeys(where.values())), "defaults")
    try:
        return Config(**{name: cls(**nested[name]) for name, cls in sections().items()})
    except ValueError as error:
        raise ValueError(f"{origin}: {error}") from None


def _check_known(name: str, known: Mapping[str, Any], *, where: str, what: str) -> None:
    if name in known:
        return
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    raise ValueError(f"{where}: unknown {what} {name!r}; did you mean {near[0]!r}?")


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"config file {path} does not exist; see configs/ for examples") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, IsADirectoryError) as error:
        raise ValueError(f"config file {path} is not valid TOML: {error}") from None


def _is_tuple(hint: Any) -> bool:
    return typing.get_origin(hint) is tuple


def _describe(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, typing.get_args(hint)))
    if _is_tuple(hint):
        return "a list of texts (on the command line: separated by commas)"
    if isinstance(hint, types.UnionType):
        return " or ".join(_describe(part) for part in typing.get_args(hint))
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    return names[hint]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds one flag per key, grouped by section, whose help tells what the key means."""
    for section, cls in sections().items():
        group = parser.add_argument_group(section, (cls.__doc__ or "").strip())
        for field in dataclasses.fields(cls):
            default = field.default
            shown = ",".join(default) if isinstance(default, tuple) else default
            group.add_argument(
                f"--{section}.{field.name}",
                metavar=field.name.upper(),
                default=argparse.SUPPRESS,
                help=f"{field.metadata['help']} (default: {shown!r})".replace("%", "%%"),
            )


def parse_flags(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None
) -> tuple[argparse.Namespace, dict[str, str]]:
    """The parsed flags, and the texts of those that are config keys.

    Raises:
      ValueError: an unknown flag, with the nearest match.
    """
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        flags = [option for action in parser._actions for option in action.option_strings]
        name = unknown[0].split("=", 1)[0]
        near = difflib.get_close_matches(name, flags, n=1, cutoff=0.0)
        raise ValueError(f"command line: unknown argument {name!r}; did you mean {near[0]!r}?")
    keys = key_types()
    return args, {name: value for name, value in vars(args).items() if name in keys}
