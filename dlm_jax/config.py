"""The config of a run: typed sections, read from TOML files, checkpoints and flags.

Each setting is a field of its section, made with `setting`. A config file has one table per section
(``[model]``, ``[data]``, ...), and flags are dotted names (``--train.steps 100``). A boolean
setting has two flags that need no value, such as ``--model.qkv_bias`` and ``--no-model.qkv_bias``.
Unknown keys and invalid values raise an error that names the key, the value and the remedy. Checks
that need more than the config are in the rooms that read it.

The keys of ``[sample]`` are generated from the rules of `dlm_jax.sampling`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import operator
import tomllib
import types
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import msgspec

from dlm_jax.sampling.params import SamplingParams, layered, params_of, resolve  # noqa: F401
from dlm_jax.settings import (
    ABOVE_ZERO,
    BELOW_ONE,
    Setting,
    SettingError,
    check_values,
    closest,
    renamed,
)

Natural = Annotated[int, {"low": 0}]
Positive = Annotated[int, {"low": 1}]
Count = Annotated[int, {"low": 1, "high": 2**20}]
NonNegative = Annotated[float, {"low": 0}]
AboveZero = Annotated[float, {"low": ABOVE_ZERO}]
Share = Annotated[float, {"low": 0, "high": 1}]
ShareAboveZero = Annotated[float, {"low": ABOVE_ZERO, "high": 1}]
ShareBelowOne = Annotated[float, {"low": 0, "high": BELOW_ONE}]
Texts = tuple[str, ...]


def setting(default: Any, help: str, **limits: Any) -> Any:
    """A field of a section. `limits` are attributes of its `Setting` besides those of its type."""
    if "choices" in limits:
        limits["choices"] = {name: name for name in limits["choices"]}
    metadata = {"setting": Setting("", default, help, **limits)}
    return dataclasses.field(default=default, metadata=metadata)


class Section:
    """A section of a config, whose values are validated on construction. ``declared`` has its
    settings by key.
    """

    declared: ClassVar[Mapping[str, Setting]] = {}

    def __init_subclass__(cls, name: str, fixed: Collection[str] | None = None):
        # A resumed run may change settings that are not `fixed`; by default, all of them are.
        hints, declared = typing.get_type_hints(cls, include_extras=True), {}
        for key, field in vars(cls).items():
            if isinstance(field, dataclasses.Field):
                limits = {"name": f"{name}.{key}"} | getattr(hints[key], "__metadata__", ({},))[0]
                if fixed is not None:
                    limits["is_free"] = key not in fixed
                if typing.get_origin(hints[key]) is tuple:
                    limits |= {"hint": hints[key], "parse": tuple}
                declared[key] = dataclasses.replace(field.metadata["setting"], **limits)
        cls.declared = declared

    def __post_init__(self) -> None:
        check_values(self, self.declared)
        for key, problem in self.problems():
            raise _error(self.declared[key].name, getattr(self, key), problem)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Keys of values that contradict others, each with ``why; remedy``."""
        yield from ()


def _error(name: str, value: Any, problem: str) -> SettingError:
    why, _, remedy = problem.partition("; ")
    return SettingError(name, value, why, remedy)


def _unknown(names: Sequence[str], known: Sequence[str]) -> Iterator[str]:
    """``why; remedy`` for each name in a list that is not a known one."""
    for name in names:
        if name not in known:
            near, listed = closest(str(name), known), ", ".join(known)
            yield f"has {name!r}, which is not one of {listed}; did you mean {near!r}?"


@dataclass(frozen=True)
class HeadsConfig(Section, name="heads"):
    """Training of heads: the settings of each built-in head, and those that all heads share."""

    start_sampler_iteration: Natural = setting(0, "steps before the sampler head starts to train")
    sampler_reveal: Share = setting(
        0.7,
        "probability that the sampler head receives the true token of an adjacent hole, in [0, 1]; "
        "with 0 the head has no use in sampling",
        remedy="use 0.7",
    )
    start_critic_iteration: Natural = setting(0, "steps before the critic starts to train")
    end_critic_iteration: Natural = setting(
        0, "step of the full weight of the critic's loss; not after the start: full at once"
    )
    critic_alpha: NonNegative = setting(0.5, "full weight of the critic's loss, >= 0")
    critic_masked_only: bool = setting(False, "train the critic only on filled holes")
    train_main: bool = setting(
        True, "train the model; false: only heads are trained, on the model of train.init_from"
    )
    learning_rate: AboveZero = setting(3e-3, "peak learning rate for the heads (AdamW)")
    weight_decay: NonNegative = setting(0.0, "decoupled weight decay of the heads' matrices")
    warmup_steps: Natural = setting(50, "steps of linear warm-up from the start of each head")
    clip: AboveZero = setting(
        1.0, "gradient norm of a head above which its gradient is scaled down"
    )


@dataclass(frozen=True)
class OptimConfig(Section, name="optim"):
    """The optimiser and its learning-rate schedule."""

    name: str = setting(
        "muon",
        "muon (with Adam for embeddings and norms), or adamw for all parameters",
        choices=("muon", "adamw"),
    )
    learning_rate: AboveZero = setting(
        0.02, "peak learning rate for the matrices (muon) or for all parameters (adamw)"
    )
    adam_learning_rate: AboveZero = setting(
        3e-3, "with muon: peak learning rate for the parameters that Adam trains"
    )
    final_ratio: Share = setting(
        0.0, "final learning rate of the cosine schedule, as a fraction of the peak"
    )
    warmup_steps: Natural = setting(50, "number of steps of linear warm-up from 0")
    weight_decay: NonNegative = setting(0.0, "decoupled weight decay of matrices")
    b1: ShareBelowOne = setting(0.9, "decay rate of Adam's mean of gradients")
    b2: ShareBelowOne = setting(0.95, "decay rate of Adam's mean of squared gradients")
    clip: AboveZero = setting(1.0, "global gradient norm above which gradients are scaled down")
    ema_decay: ShareBelowOne = setting(
        0.0, "decay of a moving average of the parameters, used for sampling; 0: none"
    )


TRACKERS = ("tensorboard", "wandb")


@dataclass(frozen=True)
class TrainConfig(Section, name="train", fixed=("batch_size", "accumulate", "seed")):
    """The training run: steps, output paths, and intervals of logs, evaluations and checkpoints."""

    out_dir: str = setting("runs/default", "directory of checkpoints and metrics")
    init_from: str = setting(
        "",
        "run, weights file, published directory, Hub id or shipped model with the initial "
        "parameters; empty: random parameters",
    )
    ignore_config: Texts = setting(
        (), "unread config fields of the published init_from, as in --ignore-config"
    )
    steps: Positive = setting(1000, "optimiser steps")  # upwards
    batch_size: Count = setting(32, "number of rows per step, over all devices and processes")
    accumulate: Count = setting(
        1, "microbatches per step, which run in turn; the result is the same"
    )
    seed: Natural = setting(
        0, "random seed of the parameters, the data order and the noise", high=2**32 - 1
    )
    log_every: Positive = setting(10, "steps between two lines of metrics")
    eval_every: Natural = setting(
        250, "steps between evaluations on held-out text; 0: only at the end"
    )
    eval_windows: Positive = setting(256, "maximum number of held-out windows per evaluation")
    sample_every: Natural = setting(0, "steps between samples during training; 0: only at the end")
    trackers: Texts = setting(
        (),
        "additional metric trackers: tensorboard (event files in out_dir) and wandb; each "
        "requires the extra of the same name",
    )
    checkpoint_dir: str = setting("", "directory or URL (gs://) of checkpoints; empty: in out_dir")
    checkpoint_every: Natural = setting(250, "steps between checkpoints; 0: only at the end")
    keep_checkpoints: Positive = setting(2, "number of newest checkpoints to keep")

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.batch_size % self.accumulate:
            yield "accumulate", f"does not divide train.batch_size={self.batch_size}; use a divisor"
        if not self.out_dir:
            yield "out_dir", "is empty; name a directory"
        for problem in _unknown(self.trackers, TRACKERS):
            yield "trackers", problem
        if len(set(self.trackers)) < len(self.trackers):
            yield "trackers", "has duplicates; name each once"


INIT = "init"
"""The value of ``data.tokenizer`` that selects the tokenizer of ``train.init_from``."""


@dataclass(frozen=True)
class DataConfig(Section, name="data"):
    """Training text and its tokenizer."""

    source: Texts = setting(
        ("python-reference",),
        "UTF-8 or JSONL files or globs, or python-reference (the language reference inside "
        "CPython), python-source (its standard library) or tinyshakespeare; or sharded corpora, "
        "directories or URLs (gs://, s3://)",
        is_free=True,
    )
    weights: tuple[float, ...] = setting(
        (), "fraction of rows from each sharded corpus; empty: proportional to its size in tokens"
    )
    tokenizer: str = setting(
        "character",
        "character: characters of the corpus; byte: the 256 bytes; bpe:N: trained on the corpus; "
        "init: from train.init_from; corpus: from shards; or the path of a tokenizer.json",
    )
    layout: str = setting(
        "windows",
        "a row is a window of the packed text, or a document",
        choices=("windows", "documents"),
    )
    tail: str = setting(
        "eos",
        "documents: padding of a row; eos is a training target, so that the model learns to stop",
        choices=("eos", "pad"),
    )
    seq_len: int = setting(128, "number of tokens per training row (L)", low=2, high=2**20)
    pack: Positive = setting(
        1, "documents: most texts in a row, each trained as if it stood alone", high=2**10
    )
    held_out: float = setting(
        0.05, "fraction of the corpus held out for evaluation", low=ABOVE_ZERO, high=BELOW_ONE
    )
    cache_dir: str = setting(
        "", "directory of encoded texts; empty: $DLM_JAX_CACHE or ~/.cache", is_free=True
    )

    def problems(self) -> Iterator[tuple[str, str]]:
        if not self.source:
            yield "source", "is empty; pass a file, a glob or python-reference"
        if self.pack > 1 and (self.layout, self.tail) != ("documents", "pad"):
            why = "requires rows of documents that end with one EOS"
            yield "pack", f"{why}; set data.layout='documents' and data.tail='pad'"


KINDS_OF_SCALING = {
    "linear": ("factor",),
    "llama3": ("factor", "original", "low", "high"),
    "yarn": ("factor", "original", "low", "high", "scale"),
}
"""The kinds of scaling of rotary frequencies, with their numbers."""


class RopeScaling(NamedTuple):
    """A scaling of rotary frequencies, for rows that are longer than those of the training.

    Attributes:
      kind: ``linear``, ``llama3`` (Llama 3.1) or ``yarn`` (Peng et al. 2023).
      factor: divisor of the low frequencies; with ``linear``, of all frequencies.
      original: row length of the training. A pair makes ``original * frequency / 2 pi`` turns over
        such a row.
      low: number of turns up to which a frequency is divided by `factor`.
      high: number of turns from which a frequency is unchanged. In between, ``llama3``
        interpolates in the number of turns, and ``yarn`` in the index of the pair.
      scale: factor of queries and keys after the rotation.
    """

    kind: str
    factor: float
    original: float = 1.0
    low: float = 1.0
    high: float = 2.0
    scale: float = 1.0

    def __str__(self) -> str:
        numbers = (f"{name}={getattr(self, name)!r}" for name in KINDS_OF_SCALING[self.kind])
        return f"{self.kind}:{','.join(numbers)}"


def read_scaling(text: Any) -> RopeScaling | None:
    """The scaling of a text such as ``llama3:factor=8,original=8192,low=1,high=4``; None for ''."""
    if text == "":
        return None
    kind, _, rest = str(text).partition(":")
    pairs = [pair.partition("=") for pair in rest.split(",")]
    if [name for name, _, _ in pairs] == list(KINDS_OF_SCALING.get(kind, ())):
        try:
            scaling = RopeScaling(kind, **{name: float(value) for name, _, value in pairs})
        except ValueError:
            scaling = RopeScaling(kind, 0.0)
        if all(0 < value < math.inf for value in scaling[1:]) and scaling.low < scaling.high:
            return scaling
    known = " or ".join(
        f"{kind}:{','.join(f'{name}=NUMBER' for name in names)}"
        for kind, names in KINDS_OF_SCALING.items()
    )
    why = "is not a scaling of positive numbers with low < high"
    raise SettingError("model.rope_scaling", text, why, f"write {known}")


REMATS = ("none", "block")
"""Values of ``model.remat`` besides names joined by ``+``."""

NAMED = ("attention", "query", "key", "value", "middle", "gate", "up")
"""Values inside a block that ``model.remat`` may name."""


@dataclass(frozen=True)
class ModelConfig(Section, name="model"):
    """The Transformer, from GPT-like to LLaMA-like, and its heads."""

    head_size: Natural = setting(0, "size of one attention head; 0: width / heads")
    rotary_share: ShareAboveZero = setting(
        1.0, "fraction of each head that RoPE rotates, from its start, in (0, 1]"
    )
    logit_alignment: str = setting(
        "same",
        "output that predicts the token at a position: same (the output at this position) or "
        "shifted (the output at the previous position; the first position uses its own, and has no "
        "prediction in a causal model, which then has no start_id)",
        choices=("same", "shifted"),
    )
    experts: Natural = setting(0, "number of experts that replace the MLP; 0: a plain MLP")
    experts_per_token: Natural = setting(0, "experts per token")
    expert_width: Natural = setting(0, "inner size of one expert (swiglu)")
    shared_width: Natural = setting(
        0, "inner size of the shared expert, which every token uses; 0: no shared expert"
    )
    dense_layers: Natural = setting(
        0, "number of blocks at the start that have a plain MLP instead of experts"
    )
    router_score: str = setting(
        "softmax",
        "score of an expert for a token: softmax over all experts, or sigmoid of each score",
        choices=("softmax", "sigmoid"),
    )
    router_groups: Positive = setting(
        1, "groups of experts; router_groups_kept of them are selected first"
    )
    router_groups_kept: Positive = setting(
        1, "number of groups from which the experts of a token are selected"
    )
    router_bias: str = setting(
        "none",
        "bias on the score of each expert: none, choice (only for the selection) or weight (also "
        "for the output weight)",
        choices=("none", "choice", "weight"),
    )
    router_normalised: bool = setting(
        False, "normalise the weights of a token's experts to sum to 1"
    )
    router_scale: AboveZero = setting(
        1.0, "factor that multiplies the weights of a token's experts"
    )

    lora_rank: Natural = setting(
        0, "rank of LoRA adapters, which train instead of the model; 0: none (docs/training.md)"
    )
    lora_alpha: AboveZero = setting(16.0, "adapters are scaled by lora_alpha / lora_rank")
    lora_targets: Texts = setting(
        ("query", "value"),
        "block matrices that have adapters: query, key, value, out, gate, up, down; mask: the "
        "embedding of the last id, which is added if a causal model without MASK is converted",
    )

    depth: Positive = setting(6, "number of Transformer blocks", high=2**12)
    width: Positive = setting(128, "size of the hidden vectors (D)", high=2**17)
    heads: Positive = setting(4, "number of attention heads, a divisor of width", high=2**12)
    kv_heads: Natural = setting(
        0, "number of key/value heads, a divisor of heads; 0: same as heads"
    )
    mlp_width: Natural = setting(
        0, "inner size of the MLP; 0: 4 * width (gated: 8/3 * width, in steps of 8)", high=2**20
    )
    activation: str = setting(
        "relu2",
        "MLP non-linearity: relu2 (squared ReLU), gelu (tanh form), swiglu, or geglu (gated GELU)",
        choices=("relu2", "gelu", "swiglu", "geglu"),
    )
    norm_epsilon: AboveZero = setting(1e-5, "epsilon added to the mean square in RMSNorm")
    qk_norm: bool = setting(True, "RMSNorm of queries and keys in each head, before RoPE")
    qkv_bias: bool = setting(False, "biases on the query, key and value projections")
    rope_theta: AboveZero = setting(10000.0, "base of the rotary position frequencies")
    rope_scaling: str = setting(
        "",
        "scaling of the rotary frequencies: linear:factor=F, "
        "llama3:factor=F,original=LENGTH,low=TURNS,high=TURNS or "
        "yarn:factor=F,original=LENGTH,low=TURNS,high=TURNS,scale=S; empty: none",
        parse=lambda text: str(read_scaling(text) or ""),
    )
    tied_head: bool = setting(True, "the LM head is the transposed embedding table")
    attention_type: str = setting(
        "bidirectional",
        "bidirectional, causal (an autoregressive model), block_causal (a position attends to its "
        "own and earlier blocks) or canvas (DiffusionGemma: a causal text, followed by a canvas "
        "that attends to the text and itself)",
        choices=("bidirectional", "causal", "block_causal", "canvas"),
    )
    block_length: Natural = setting(
        0,
        "block_causal: number of positions per block, from the start of the row; canvas: number of "
        "positions per canvas; at least 2",
    )
    attention_window: Natural = setting(
        0, "canvas: attention window over the text in sliding layers, at least 1"
    )
    full_every: Natural = setting(
        0,
        "canvas: every n-th layer attends to all positions (full layer), and the other layers "
        "attend within attention_window; at least 2",
    )
    full_head_size: Natural = setting(0, "head_size of the full layers; 0: same as head_size")
    full_kv_heads: Natural = setting(0, "kv_heads of the full layers; 0: same as kv_heads")
    full_rope_theta: NonNegative = setting(
        0.0, "rope_theta of the full layers; 0: same as rope_theta"
    )
    full_rotary_share: ShareAboveZero = setting(
        1.0, "fraction of the rotary pairs that full layers rotate, highest frequencies first"
    )
    logit_cap: NonNegative = setting(
        0.0, "logits are capped as cap * tanh(logits / cap); 0: no cap"
    )
    vocab_size: Natural = setting(
        0, "number of logits; 0: size of the tokenizer's vocabulary", high=2**22
    )
    start_id: int = setting(
        -1, "causal: id before the first token; -1: the tokenizer's MASK", low=-1
    )
    compute_dtype: str = setting(
        "float32",
        "dtype of activations; parameters, norms and softmax remain float32; the range of float16 "
        "is too small for gradients without loss scaling",
        choices=("float32", "bfloat16"),
        remedy="use 'bfloat16'; the range of float16 is too small for activations and gradients",
    )
    remat: str = setting(
        "none",
        "values that the backward pass recomputes to save memory: none, block (everything), "
        "or all except the names "
        f"joined by +: {', '.join(NAMED)}",
        is_free=True,
    )

    add_sampler_head: bool = setting(
        False, "add a head that uses the neighbours of a hole, for coherent parallel filling"
    )
    sampler_context: Positive = setting(
        1, "number of neighbours on each side that the sampler head uses", high=2**6
    )
    sampler_residual: bool = setting(
        False, "add the sampler head's output, initially zero, to the hidden vector"
    )
    add_critic_head: bool = setting(
        False, "add a head that predicts which tokens of a text are wrong"
    )

    @property
    def added_heads(self) -> tuple[str, ...]:
        """The names of the built-in heads that the model has (`dlm_jax.heads.HEADS`)."""
        return tuple(n for n in ("sampler", "critic") if getattr(self, f"add_{n}_head"))

    @property
    def size_of_head(self) -> int:
        return self.head_size or self.width // self.heads

    @property
    def has_start(self) -> bool:
        """Whether the input of the network is ``start_id`` and all tokens except the last."""
        return self.attention_type == "causal" and self.logit_alignment == "same"

    @property
    def predicts_first(self) -> bool:
        """Whether the network predicts the first token of a row (`Network.predicts_first`)."""
        return self.attention_type != "causal" or self.has_start

    @property
    def rotary_size(self) -> int:
        return int(self.size_of_head * self.rotary_share)

    @property
    def is_gated(self) -> bool:
        return self.activation in ("swiglu", "geglu")

    @property
    def layers(self) -> dict[str, tuple[int, ...]]:
        """The layer indices of each stack of blocks, in the order of the stack's parameters."""
        first, every = self.dense_layers, self.full_every
        full = tuple(range(every - 1, self.depth, every)) if every else ()
        rest = tuple(at for at in range(first, self.depth) if at not in full)
        return {"dense_blocks": tuple(range(first)), "blocks": rest, "full_blocks": full}

    @property
    def inner_width(self) -> int:
        gated = 8 * -(-self.width // 3)
        return self.mlp_width or (gated if self.is_gated else 4 * self.width)

    def problems(self) -> Iterator[tuple[str, str]]:
        heads, kind, every = self.heads, self.attention_type, self.full_every
        if self.vocab_size and self.start_id >= self.vocab_size:
            yield "start_id", f"is not below model.vocab_size={self.vocab_size}; use -1"
        if not self.lora_targets:
            yield "lora_targets", "is empty; use query,value"
        names = self.remat.split("+")
        if self.remat not in REMATS and (set(names) - set(NAMED) or len(set(names)) < len(names)):
            known = f"{', '.join(REMATS)} nor some of {', '.join(NAMED)} joined by +"
            yield "remat", f"is neither one of {known}; use attention"
        if not self.head_size and self.width % (2 * heads):
            yield "width", f"is not an even multiple of model.heads={heads}; change one of them"
        for key in ("head_size", "full_head_size"):
            if getattr(self, key) % 2:
                yield key, f"is odd; use {getattr(self, key) + 1}"
        for key in ("kv_heads", "full_kv_heads"):
            if heads % (getattr(self, key) or 1):
                yield key, f"does not divide model.heads={heads}; use 0 or a divisor of {heads}"
        if (size := self.rotary_size) < 2 or size % 2:
            why = f"rotates {size} of {self.size_of_head} dimensions of a head, not an even number"
            yield "rotary_share", f"{why} from 2; use 1.0 or 0.5"
        is_in_blocks, length = kind in ("block_causal", "canvas"), self.block_length
        if length < 2 if is_in_blocks else length:
            remedy = "use at least 2" if is_in_blocks else "use 0"
            yield "block_length", f"is not supported with model.attention_type={kind!r}; {remedy}"
        for key, kinds in _ATTENTION_OF.items():
            if getattr(self, key) and kind not in kinds:
                why = f"requires model.attention_type={' or '.join(map(repr, kinds))}, not {kind!r}"
                yield key, f"{why}; change one of them"
        if kind == "canvas" and not self.attention_window:
            yield "attention_window", "must be at least 1"
        if kind == "canvas" and (every < 2 or self.depth % every):
            why = f"does not divide model.depth={self.depth} into groups of at least 2 layers"
            yield "full_every", why
        if self.experts:
            yield from self._problems_of_experts()

    def _problems_of_experts(self) -> Iterator[tuple[str, str]]:
        per_token, groups = self.experts_per_token, self.router_groups
        within, kept = self.experts // groups, self.router_groups_kept
        if not self.is_gated:
            yield "activation", "is not supported with model.experts; use 'swiglu'"
        if not 1 <= per_token <= self.experts:
            yield "experts_per_token", f"is not in [1, {self.experts}], the number of model.experts"
        if self.expert_width < 1:
            yield "expert_width", "must be at least 1"
        if self.dense_layers >= self.depth:
            why = f"leaves no block of model.depth={self.depth} with experts; lower it"
            yield "dense_layers", why
        if self.experts % groups or (groups > 1 and within < 2):
            why = f"does not divide model.experts={self.experts} into groups of at least 2; use 1"
            yield "router_groups", why
        if kept > groups or kept * within < per_token:
            why = (
                f"must be at most {groups}, and its groups of {within} experts must have at least "
            )
            yield "router_groups_kept", f"{why}model.experts_per_token={per_token} experts"


_ATTENTION_OF = {
    "attention_window": ("canvas",),
    "full_every": ("canvas",),
    "dense_layers": ("bidirectional", "causal", "block_causal"),
    "add_sampler_head": ("bidirectional", "block_causal"),
    "add_critic_head": ("bidirectional",),
}
"""Keys of ``[model]`` that require some values of ``model.attention_type``."""


PATTERNS = ("random", "sticky", "span")
MISPRINTS = ("missing", "wrong", "stray", "transposed", "missing_pair", "wrong_pair", "stray_pair")


@dataclass(frozen=True)
class ObjectiveConfig(Section, name="objective"):
    """Settings of the objectives of bidirectional models. Causal models predict the next token."""

    process: str = setting(
        "masked",
        "noise of the ELBO: masked (MASK), uniform (a uniformly random token) or mixed (MASK at "
        "the end and uniformly random tokens in between)",
        choices=("masked", "uniform", "mixed"),
    )
    schedule: str = setting(
        "linear",
        "noise schedule of the ELBO: linear, cosine or polynomial",
        choices=("linear", "cosine", "polynomial"),
    )
    schedule_power: AboveZero = setting(
        2.0, "polynomial schedule: the share hidden at time t is t^power", high=100
    )
    normaliser: str = setting(
        "tokens",
        "divisor of the ELBO's weighted sum: tokens (all tokens that are not given), rows (mean "
        "over rows of the mean over tokens) or masked (hidden tokens)",
        choices=("tokens", "rows", "masked"),
    )
    time_weight: bool = setting(
        True, "weight hidden tokens by time as in the ELBO; false: equal weights"
    )
    denoising_share: Share = setting(
        0.0, "share of each batch's rows, and of the loss, for denoising instead of the ELBO"
    )
    patterns: Texts = setting(
        PATTERNS, "denoising: pattern that selects the positions to restore, one per row"
    )
    span_count: Positive = setting(3, "span: number of spans per row", high=2**16)
    mask_share: Share = setting(0.8, "denoising: share of the selected positions that show MASK")
    random_share: Share = setting(
        0.1, "denoising: share of the selected tokens that show a random token, not their own"
    )
    identity_targets: bool = setting(
        False, "denoising: predict every position, not only the selected ones"
    )
    proofreading_share: Share = setting(
        0.0, "share of rows and loss for proofreading (correcting missing, stray or wrong tokens)"
    )
    misprint_ratio: ShareAboveZero = setting(
        0.1, "proofreading: the share of misprints in a row is drawn uniformly up to this maximum"
    )
    misprint_kinds: Texts = setting(
        MISPRINTS[:3],
        "proofreading: kinds of misprints: missing, wrong, stray, transposed (with the next "
        "token), and missing_pair, wrong_pair, stray_pair (two tokens); repeat a name to make it "
        "more frequent",
    )
    misprint_masked_rows: Share = setting(
        0.5, "proofreading: share of its rows that also contain MASK"
    )
    text_weight: NonNegative = setting(
        1.0, "models with canvases: weight of the next-token loss on the text", high=100
    )
    conditioned_share: Share = setting(
        0.5, "models with canvases: share of rows with self-conditioning"
    )
    random_length_share: Share = setting(
        0.0, "share of batches that are cut to a random length; 0.01 is usual"
    )

    def problems(self) -> Iterator[tuple[str, str]]:
        for key, known in (("patterns", PATTERNS), ("misprint_kinds", MISPRINTS)):
            for problem in _unknown(getattr(self, key), known):
                yield key, problem
            if not getattr(self, key):
                yield key, "is empty; name one"
        if len(set(self.patterns)) < len(self.patterns):
            yield "patterns", "has duplicates; name each once"
        pairs = ("mask_share", "random_share"), ("denoising_share", "proofreading_share")
        for one, other in pairs:
            if getattr(self, one) + (second := getattr(self, other)) > 1 + 1e-6:
                yield one, f"and objective.{other}={second} add up to more than 1; lower one"


WITHOUT_DEFAULTS = "none"
"""The entry of ``mesh.compiler_options`` that disables the default options."""


@dataclass(frozen=True)
class MeshConfig(Section, name="mesh", fixed=()):
    """The arrangement of devices; the product of the axes is the number of devices."""

    data: int = setting(
        -1, "devices across which the batch is split; -1: all remaining ones", low=-1, high=2**20
    )
    fsdp: Natural = setting(
        0,
        "devices across which the batch, parameters and optimiser state are split; 0: as few as "
        "leave three quarters of an accelerator's memory free",
        high=2**20,
    )
    tensor: Count = setting(1, "devices across which the matrices of one layer are split")
    expert: Count = setting(
        1, "devices across which experts are split, and the batch in other layers"
    )
    context: Count = setting(
        1, "devices across which the positions of a row are split, for very long rows"
    )
    compiler_options: Texts = setting(
        (),
        "compiler options, each name=value, added to or replacing the defaults of the devices "
        "(dlm_jax/distributed/compiler.py); none: no defaults",
    )

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.data == 0:
            yield "data", "must be -1 or at least 1"
        for text in self.compiler_options:
            name, equals, _ = text.partition("=")
            if text != WITHOUT_DEFAULTS and not (name and equals):
                advice = "write xla_tpu_scoped_vmem_limit_kib=65536, for example, or none"
                yield "compiler_options", f"has {text!r}, which is not name=value; {advice}"


@dataclass(frozen=True)
class Config:
    """The config of a run; the defaults are valid."""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    objective: ObjectiveConfig = dataclasses.field(default_factory=ObjectiveConfig)
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    heads: HeadsConfig = dataclasses.field(default_factory=HeadsConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    sample: SamplingParams = dataclasses.field(default_factory=SamplingParams)

    def __post_init__(self) -> None:
        for key, problem in self.problems():
            raise _error(key, operator.attrgetter(key)(self), problem)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Keys of values that contradict others, each with ``why; remedy``."""
        model, train, sample, length = self.model, self.train, self.sample, self.data.seq_len
        is_fresh = not train.init_from
        if self.optim.warmup_steps >= train.steps > 1:
            yield "optim.warmup_steps", f"is not less than train.steps={train.steps}; lower it"
        if sample.gen_length > length:
            why = f"does not fit the canvas of data.seq_len={length}"
            yield "sample.gen_length", f"{why}; lower it, or use 0 to fill the canvas"
        if is_fresh:
            problem = "requires train.init_from, which is empty; name a model"
            if self.data.tokenizer == INIT:
                yield "data.tokenizer", problem
            if train.ignore_config:
                yield "train.ignore_config", problem
        if is_fresh and not self.heads.train_main:
            why = "freezes an untrained model"
            yield "heads.train_main", f"{why}; name a trained model in train.init_from"
        if model.lora_rank and (is_fresh or not self.heads.train_main):
            advice = "name it in train.init_from, with heads.train_main=true"
            yield "model.lora_rank", f"trains adapters of an existing model; {advice}"
        if model.attention_type == "causal" and sample.order != "left_to_right":
            why = f"does not support sample.order={sample.order!r}"
            yield "model.attention_type", f"{why}; use left_to_right"
        if model.attention_type == "block_causal":
            if model.block_length % (sample.block_length or 1):
                why = f"is neither model.block_length={model.block_length} nor a divisor of it"
                yield "sample.block_length", f"{why}; use 0 for the same value"
            if self.objective.proofreading_share:
                why = "moves tokens between blocks of model.attention_type='block_causal'"
                yield "objective.proofreading_share", f"{why}; use 0"


SECTIONS: dict[str, Any] = {one.name: one.default_factory for one in dataclasses.fields(Config)}
"""The sections of a config, by name."""

SETTINGS: dict[str, Setting] = {
    f"{name}.{key}": one for name, cls in SECTIONS.items() for key, one in cls.declared.items()
}
"""All settings of a config, by dotted key."""

FREE = frozenset(key for key, one in SETTINGS.items() if one.is_free or key.startswith("sample."))
"""The dotted keys of the settings that a resumed run may change."""


def flat(nested: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The values of nested sections by dotted key."""
    return {f"{s}.{name}": value for s, values in nested.items() for name, value in values.items()}


def to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """The config as nested JSON values; `from_dict` is the inverse."""
    return msgspec.to_builtins(config)


def from_dict(raw: Mapping[str, Any], *, where: str, saved_by: str = "") -> Config:
    """Config from nested JSON values; `where` names their source in errors.

    Raises:
      ValueError: sections or keys are unknown (the message suggests the nearest match, or, for a
        model `saved_by` a version, names all of them), or a value has the wrong type or is out of
        range.
    """
    sections = [name for name in raw if name not in SECTIONS]
    known = {name: values for name, values in raw.items() if name in SECTIONS}
    for name, values in known.items():
        if not isinstance(values, Mapping):
            remedy = f"write [{name}] above its keys"
            raise ValueError(f"{where}: {name}={values!r} is not a section; {remedy}")
    values = flat(known)
    keys = [key for key in values if key not in SETTINGS]
    if saved_by and (sections or keys):
        unknown = ", ".join(map(repr, [f"[{name}]" for name in sections] + keys))
        raise ValueError(
            f"{where}: unknown {unknown}, saved by dlm_jax {saved_by}; use that version, or remove "
            "them from the saved config (docs/training.md)"
        )
    for name in sections:
        _check_known(name, SECTIONS, f"{where}: unknown section")
    for key in keys:
        _check_known(key, SETTINGS, f"{where}: unknown key")
    try:
        return _replace(Config(), {k: _typed(v, SETTINGS[k], k) for k, v in values.items()})
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _replace(config: Config, values: Mapping[str, Any]) -> Config:
    """The config with other values of some dotted keys."""
    changes: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        changes.setdefault(section, {})[name] = value
    sections = {s: dataclasses.replace(getattr(config, s), **v) for s, v in changes.items()}
    return dataclasses.replace(config, **sections)


def from_saved(meta: Mapping[str, Any], *, where: str) -> Config:
    """Config of a saved model, from its metadata; `where` names the model in errors."""
    program = meta.get("program") or {}
    version = program.get("version of dlm_jax", "of another version")
    return from_dict(meta["config"], where=where, saved_by=version)


def load(path: str | Path | None, overrides: Mapping[str, str] | None = None) -> Config:
    """The config from a TOML file (or the defaults), with some keys overridden by flag values.

    Args:
      path: path of the file, or the name of a shipped config, such as ``quickstart``.
      overrides: values of flags as text, by dotted key.

    Raises:
      ValueError: the file does not exist, or `from_dict` or `override` fails.
    """
    config = Config()
    if path is not None:
        file = _find(path)
        config = from_dict(_read_toml(file), where=str(file))
    return override(config, overrides or {})


def override(config: Config, overrides: Mapping[str, str]) -> Config:
    """The config, with the values of some dotted keys replaced by flags.

    Raises:
      ValueError: a key is unknown, a text is invalid, or values contradict each other. The message
        names the flag.
    """
    try:
        for key in overrides:
            _check_known(key, SETTINGS, "unknown flag")
        given = {
            key: _from_text(text, SETTINGS[key], f"--{key}") for key, text in overrides.items()
        }
        resets = {
            f"{key.partition('.')[0]}.{other}"
            for key, value in given.items()
            for other in SETTINGS[key].resets_of(value)
        }
        return _replace(config, {key: SETTINGS[key].default for key in resets} | given)
    except ValueError as error:
        raise ValueError(f"command line: {error}") from None


def sample_settings(
    texts: Mapping[str, str], kind: type[SamplingParams] = SamplingParams
) -> dict[str, Any]:
    """Parses the texts of sampling settings; the keys are field names of `kind`.

    Raises:
      ValueError: a name is unknown, or a text is not a value of the setting's type.
    """
    values = {}
    for name, text in texts.items():
        _check_known(name, kind.declared, "command line: unknown setting")
        flag = "--" + name.replace("_", "-")
        values[name] = _from_text(text, kind.declared[name], flag)
    return values


def _from_text(text: str, one: Setting, flag: str) -> Any:
    """The value of a flag, whose text is a list (``a,b``), pairs (``12:-5,30:2``) or a scalar."""
    given, hint = text, one.annotation
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is tuple:
        given = [item.strip() for item in text.split(",") if item.strip()]
    if isinstance(hint, types.UnionType):
        given = [item.split(":") for item in given]
    return _typed(given, one, flag, strict=False)


def _typed(value: Any, one: Setting, shown: str, *, strict: bool = True) -> Any:
    """The value converted to the type of the setting, without a range check."""
    hint = one.annotation
    try:
        return msgspec.convert(value, hint, strict=strict)
    except msgspec.ValidationError:
        pass
    if one.choices is not None:
        try:
            return one.checked(value)
        except SettingError as error:
            raise ValueError(error.line(shown)) from None
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
    if typing.get_origin(hint) is tuple:
        kind = names[typing.get_args(hint)[0]].split()[1]
        names[hint] = f"a list of {kind}s (on the command line: separated by commas)"
    pairs = "pairs of an id and a number (on the command line: 12:-5,30:2)"
    raise ValueError(f"{shown}={value!r} is not {names.get(hint, pairs)}")


def _check_known(name: str, known: Collection[str], unknown: str) -> None:
    """Raises ValueError, which begins with `unknown`, with where the name went, or the nearest."""
    if name not in known:
        advice = renamed(name, SamplingParams.declared, known)
        advice = advice or f"did you mean {closest(name, known)!r}?"
        raise ValueError(f"{unknown} {name!r}; {advice}")


def shipped() -> dict[str, Path]:
    """The configs that the package contains, by name."""
    folder = Path(__file__).parent / "shipped" / "configs"
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def _find(path: str | Path) -> Path:
    """The config file at `path`, or the shipped config of that name."""
    if Path(path).exists() and not Path(path).is_dir():
        return Path(path)
    known = shipped()
    if str(path) in known:
        return known[str(path)]
    raise ValueError(
        f"config file {path} does not exist, and no shipped config has this name; did you mean "
        f"{closest(str(path), known)!r}?"
    )


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"config file {path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # TOML and UTF-8 errors are ValueErrors
        raise ValueError(f"config file {path} is not valid TOML: {error}") from None


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds one flag with help per key, grouped by section."""
    for section, cls in SECTIONS.items():
        group = parser.add_argument_group(section, (cls.__doc__ or "").strip())
        for name, one in cls.declared.items():
            if not one.is_preset:
                default = ",".join(one.default) if one.is_list else one.default
                _add(group, f"{section}.{name}", one, name, f" (default: {default!r})")


def add_sample_flags(
    parser: argparse.ArgumentParser, kind: type[SamplingParams] = SamplingParams
) -> None:
    """Adds one flag per field of `kind`, without a default and with dashes for underscores."""
    group = parser.add_argument_group(
        "sampling", "Defaults are the recommendations of the checkpoint."
    )
    for name, one in kind.table.request_settings.items():
        _add(group, name.replace("_", "-"), one, name.split("_")[-1])


def _add(group: Any, name: str, one: Setting, metavar: str, default: str = "") -> None:
    """Adds one flag, and its negation if the setting is boolean. Flag values remain strings."""
    options: dict[str, Any] = {"default": argparse.SUPPRESS, "metavar": metavar.upper()}
    options["help"] = f"{one.help}{default}".replace("%", "%%")
    if one.annotation is not bool:
        group.add_argument(f"--{name}", **options)
        return
    group.add_argument(f"--{name}", nargs="?", const="true", **options)
    group.add_argument(
        f"--no-{name}",
        dest=name.replace("-", "_"),
        action="store_const",
        const="false",
        default=argparse.SUPPRESS,
        help=f"the opposite of --{name}",
    )


def parse_flags(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None
) -> tuple[argparse.Namespace, dict[str, str]]:
    """The parsed flags, and the texts of the flags that are config keys.

    Raises:
      ValueError: a flag is unknown; the message suggests the nearest match.
    """
    args, unknown = parser.parse_known_args(argv)
    flags = [option for action in parser._actions for option in action.option_strings]
    for name in unknown[:1]:
        _check_known(name.partition("=")[0], flags, "command line: unknown argument")
    return args, {name: value for name, value in vars(args).items() if name in SETTINGS}


def differing(config: Config) -> dict[str, dict[str, Any]]:
    """The changed values, by section and key; sections without changes are omitted."""
    defaults = to_dict(Config())
    changes = {
        section: {key: value for key, value in values.items() if value != defaults[section][key]}
        for section, values in to_dict(config).items()
    }
    return {section: values for section, values in changes.items() if values}


def to_toml(config: Config, *, header: str = "") -> str:
    """The config as TOML after a comment `header`; comments show the defaults of changed values."""
    lines, defaults = [f"# {line}".rstrip() for line in header.splitlines()], to_dict(Config())
    for section, values in to_dict(config).items():
        lines += ["", f"[{section}]"] if lines else [f"[{section}]"]
        for key, value in values.items():
            default = defaults[section][key]
            note = "" if value == default else f"  # default: {_value(default)}"
            lines.append(f"{key} = {_value(value)}{note}")
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, str):
        # A TOML basic string is a JSON string, except that DEL must be escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value)
