"""What the sections of a config are made of: fields with a help text, and one-line refusals.

Settings of one request: what a checkpoint recommends, a request asks for, a flag says.

Nothing is declared here: every field of `SampleConfig` follows from the rules of
`dlm_jax.sampling`, each of which declares its own settings.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from dlm_jax.sampling.row import RowParams
from dlm_jax.sampling.rules import BUILT_IN, RuleTable
from dlm_jax.sampling.transforms.transform import is_greedy
from dlm_jax.settings import nearest

MOST_INT = 2**31 - 1
MOST_FLOAT = 3.0e38
"""Beyond these, a number does not fit the 32 bits that compiled programs have for it."""

# Sizes are bounded before anything of that size is made.
_MOST = {
    "model": {
        "depth": 2**12, "width": 2**17, "heads": 2**12, "kv_heads": 2**12, "mlp_width": 2**20,
        "vocab_size": 2**22, "sampler_context": 2**6, "sampler_width": 2**20,
    },
    "data": {"seq_len": 2**20},
    "objective": {"span_count": 2**16, "schedule_power": 100},
    "train": {"batch_size": 2**20, "accumulate": 2**20, "seed": 2**32 - 1},
    "mesh": dict.fromkeys(("data", "fsdp", "tensor", "expert", "context"), 2**20),
}  # fmt: skip


def field(default: Any, doc: str) -> Any:
    """A dataclass field with a default; `doc` is the help of its flag."""
    return dataclasses.field(default=default, metadata={"help": doc})


def require(condition: bool, message: str) -> None:
    """Raises ValueError with `message` unless `condition` holds."""
    if not condition:
        raise ValueError(message)


def require_fit(section: str, config: Any) -> None:
    """Raises ValueError for a number of a section that is too large, infinite or NaN.

    Args:
      section: its name.
      config: a dataclass; fields that are no numbers are passed over.
    """
    most = _MOST.get(section, {})
    for made in dataclasses.fields(config):
        value = getattr(config, made.name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        limit = most.get(made.name, MOST_INT if isinstance(value, int) else MOST_FLOAT)
        shown = f"{value:.6g}" if isinstance(value, float) else str(value)[:40]
        require(
            -limit <= value <= limit,  # NaN fails every comparison
            f"{section}.{made.name}={shown} is not a number up to {limit:.10g}; use a smaller one",
        )


@dataclasses.dataclass(frozen=True)
class Architecture:
    """Settings of the Transformer that published models differ in; the defaults are neutral."""

    head_size: int = field(0, "size of one attention head; 0: width / heads")
    rotary_share: float = field(
        1.0, "part of each head, its first numbers, that RoPE turns, in (0, 1]"
    )
    logit_alignment: Literal["same", "shifted"] = field(
        "same",
        "where the prediction of a position stands: same, in the Transformer's output there; or "
        "shifted, in the output of the position before it (the first position keeps its own)",
    )
    experts: int = field(0, "experts of a mixture in place of the MLP; 0: a plain MLP")
    experts_per_token: int = field(0, "experts that each token is sent to")
    expert_width: int = field(0, "inner size of one expert (swiglu)")
    shared_width: int = field(0, "inner size of the expert that every token passes; 0: none")
    dense_layers: int = field(0, "first blocks that have a plain MLP instead of experts")
    router_score: Literal["softmax", "sigmoid"] = field(
        "softmax", "score of an expert for a token: softmax over all experts, or sigmoid of each"
    )
    router_groups: int = field(1, "groups of experts, of which router_groups_kept are chosen first")
    router_groups_kept: int = field(1, "groups that a token's experts come from")
    router_bias: Literal["none", "choice", "weight"] = field(
        "none",
        "a bias of each expert on its score: none; choice, for choosing alone; or weight, also in "
        "the weight of what the expert says",
    )
    router_normalised: bool = field(False, "the weights of a token's experts are made to sum to 1")
    router_scale: float = field(1.0, "factor on the weights of a token's experts")

    lora_rank: int = field(
        0, "rank of adapters, which then train in place of the model; 0: none (docs/training.md)"
    )
    lora_alpha: float = field(16.0, "adapters are scaled by lora_alpha / lora_rank")
    lora_targets: tuple[str, ...] = field(
        ("query", "value"),
        "matrices of the blocks that have adapters: query, key, value, out, gate, up, down",
    )

    def size_of_head(self, width: int, heads: int) -> int:
        """Numbers in one head of queries, keys or values."""
        return self.head_size or width // heads

    def rotary_size(self, width: int, heads: int) -> int:
        """Numbers of a head that RoPE turns."""
        return int(self.size_of_head(width, heads) * self.rotary_share)

    def check_architecture(self, *, width: int, heads: int, depth: int, activation: str) -> None:
        """Raises ValueError for settings that contradict each other or the model's."""
        require(self.head_size >= 0, f"model.head_size={self.head_size} must be at least 0")
        if self.head_size == 0:
            require(
                width % heads == 0 and (width // heads) % 2 == 0,
                f"model.width={width} is not an even multiple of model.heads={heads}; "
                f"use a width of {2 * heads * max(1, round(width / (2 * heads)))}",
            )
        require(
            self.head_size % 2 == 0,
            f"model.head_size={self.head_size} is odd; use {self.head_size + 1}",
        )
        require(
            0 < self.rotary_share <= 1, f"model.rotary_share={self.rotary_share} is not in (0, 1]"
        )
        rotary = self.rotary_size(width, heads)
        require(
            rotary >= 2 and rotary % 2 == 0,
            f"model.rotary_share={self.rotary_share} turns {rotary} numbers of a head, which is no "
            "even number; use 1.0 or 0.5",
        )
        for name in ("experts", "experts_per_token", "expert_width", "shared_width",
                     "dense_layers"):  # fmt: skip
            value = getattr(self, name)
            require(value >= 0, f"model.{name}={value} must be at least 0")
        require(self.lora_rank >= 0, f"model.lora_rank={self.lora_rank} must be at least 0")
        require(self.lora_alpha > 0, f"model.lora_alpha={self.lora_alpha} must be > 0")
        require(len(self.lora_targets) > 0, "model.lora_targets is empty; use query,value, say")
        if self.experts:
            self._check_experts(depth, activation)
            return
        neutral = {f.name: f.default for f in dataclasses.fields(Architecture)}
        for name in neutral:
            is_of_experts = name.startswith(("expert", "shared", "dense", "router"))
            require(
                not is_of_experts or getattr(self, name) == neutral[name],
                f"model.{name}={getattr(self, name)!r} means nothing with model.experts=0; use "
                f"{neutral[name]!r}",
            )

    def _check_experts(self, depth: int, activation: str) -> None:
        require(
            activation == "swiglu",
            f"model.activation={activation!r} is not that of experts; use 'swiglu'",
        )
        require(
            1 <= self.experts_per_token <= self.experts,
            f"model.experts_per_token={self.experts_per_token} is not in [1, {self.experts}], "
            "the number of model.experts",
        )
        require(
            self.expert_width >= 1, f"model.expert_width={self.expert_width} must be at least 1"
        )
        require(
            self.dense_layers < depth,
            f"model.dense_layers={self.dense_layers} leaves no block of model.depth={depth} with "
            "experts; lower it, or use model.experts=0",
        )
        require(
            self.router_groups >= 1 and self.experts % self.router_groups == 0,
            f"model.router_groups={self.router_groups} does not divide model.experts="
            f"{self.experts}; use 1",
        )
        within = self.experts // self.router_groups
        require(
            1 <= self.router_groups_kept <= self.router_groups
            and self.router_groups_kept * within >= self.experts_per_token,
            f"model.router_groups_kept={self.router_groups_kept} of {self.router_groups} groups of "
            f"{within} experts do not hold model.experts_per_token={self.experts_per_token}",
        )
        require(
            self.router_groups == 1 or within >= 2,
            f"model.router_groups={self.router_groups} leaves one expert a group; use fewer",
        )


@dataclasses.dataclass(frozen=True)
class HeadsConfig:
    """Training of the sampler head, the critic and one's own heads."""

    start_sampler_iteration: int = field(0, "steps before the sampler head begins to train")
    start_critic_iteration: int = field(0, "steps before the critic begins to train")
    end_critic_iteration: int = field(
        0, "step at which the critic's loss has its full weight; up to its start: from the start on"
    )
    critic_alpha: float = field(0.5, "full weight of the critic's loss, >= 0")
    critic_masked_only: bool = field(
        False, "the critic judges filled holes alone, not the text around them"
    )
    sampler_reveal: float = field(
        0.0, "chance that the sampler head sees the token of a neighbour that is a hole, in [0, 1]"
    )
    train_main: bool = field(
        True, "false: the model itself stays as train.init_from has it, and its heads learn alone"
    )
    learning_rate: float = field(3e-3, "peak learning rate of the heads (AdamW)")
    weight_decay: float = field(0.0, "decoupled weight decay of the heads' matrices")
    warmup_steps: int = field(50, "steps of linear warm-up, counted from each head's own start")
    clip: float = field(1.0, "gradient norm of a head above which its gradient is scaled down")

    def __post_init__(self) -> None:
        require_fit("heads", self)
        for name in (
            "start_sampler_iteration", "start_critic_iteration", "end_critic_iteration",
            "critic_alpha", "weight_decay", "warmup_steps",
        ):  # fmt: skip
            value = getattr(self, name)
            require(value >= 0, f"heads.{name}={value} must be at least 0")
        for name in ("learning_rate", "clip"):
            value = getattr(self, name)
            require(value > 0, f"heads.{name}={value} must be > 0")
        require(
            0 <= self.sampler_reveal <= 1,
            f"heads.sampler_reveal={self.sampler_reveal} is not in [0, 1]; use 0.5",
        )


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """How devices are arranged: the product of the axes is the number of devices."""

    data: int = field(-1, "devices that split the batch; -1: all that the other axes leave")
    fsdp: int = field(
        0,
        "devices that also split parameters and optimiser state; 0: as few as leave three quarters "
        "of an accelerator's memory free",
    )
    tensor: int = field(1, "devices that split the matrices of one layer")
    expert: int = field(1, "devices that split experts, and the batch where there are none")
    context: int = field(1, "devices that split the positions of a row, for very long rows")

    def __post_init__(self) -> None:
        require_fit("mesh", self)
        require(
            self.data == -1 or self.data >= 1, f"mesh.data={self.data} must be -1 or at least 1"
        )
        require(self.fsdp >= 0, f"mesh.fsdp={self.fsdp} must be at least 0")
        for name in ("tensor", "expert", "context"):
            value = getattr(self, name)
            require(value >= 1, f"mesh.{name}={value} must be at least 1")


PATTERNS = ("random", "sticky", "span")
MISPRINTS = (
    "missing", "wrong", "stray", "transposed", "missing_pair", "wrong_pair", "stray_pair"
)  # fmt: skip
USUAL_MISPRINTS = MISPRINTS[:3]


@dataclasses.dataclass(frozen=True)
class ObjectiveConfig:
    """What a bidirectional model is trained for; a causal one predicts the next token instead."""

    schedule: Literal["linear", "cosine", "polynomial"] = field(
        "linear", "noise schedule of the ELBO: linear, cosine or polynomial"
    )
    schedule_power: float = field(2.0, "polynomial schedule: the share hidden at time t is t^power")
    normaliser: Literal["tokens", "rows", "masked"] = field(
        "tokens",
        "what the ELBO's weighted sum is divided by: tokens (all that are not given), rows (first "
        "each row by its own tokens, then by the rows) or masked (the tokens that are hidden)",
    )
    time_weight: bool = field(
        True, "hidden tokens are weighted as the ELBO weights their time; false: all alike"
    )
    denoising_share: float = field(
        0.0, "share of each batch's rows, and of the loss, that is denoising instead of the ELBO"
    )
    patterns: tuple[str, ...] = field(
        PATTERNS, "denoising: what selects the positions to restore, one a row"
    )
    max_ratio: float = field(
        1.0, "denoising: random and sticky select a share that is uniform up to this one"
    )
    sticky_alone: float = field(0.03, "sticky: chance of a position without selected neighbour")
    sticky_beside: float = field(0.3, "sticky: chance of a position beside a selected one")
    span_count: int = field(3, "span: spans of a row")
    mask_share: float = field(0.8, "denoising: share of the selected positions that show MASK")
    random_share: float = field(0.1, "denoising: share that shows a random token; the rest its own")
    identity_targets: bool = field(
        False, "denoising: ask for every position, not only for the selected ones"
    )
    proofreading_share: float = field(
        0.0,
        "share of each batch's rows, and of the loss, that is misprinted: tokens missing, "
        "stray or wrong",
    )
    misprint_ratio: float = field(
        0.1, "proofreading: a row's share of misprints is uniform up to this one"
    )
    misprint_kinds: tuple[str, ...] = field(
        USUAL_MISPRINTS,
        "proofreading: what happens to a misprinted token, each as often as it is named; missing, "
        "wrong or stray, transposed with the next one, or the same to two: missing_pair, "
        "wrong_pair, stray_pair",
    )
    misprint_masked_rows: float = field(
        0.5, "proofreading: share of its rows that show MASK besides"
    )
    random_length_share: float = field(
        0.0, "share of the batches that are cut to a random length; 0.01 is usual"
    )

    def __post_init__(self) -> None:
        require_fit("objective", self)
        require(
            self.schedule_power > 0,
            f"objective.schedule_power={self.schedule_power} must be > 0; use 2.0",
        )
        for name in (
            "denoising_share", "mask_share", "random_share", "random_length_share",
            "proofreading_share", "misprint_masked_rows",
        ):  # fmt: skip
            value = getattr(self, name)
            require(0 <= value <= 1, f"objective.{name}={value} is not in [0, 1]")
        for name in ("max_ratio", "sticky_beside", "misprint_ratio"):
            value = getattr(self, name)
            require(0 < value <= 1, f"objective.{name}={value} is not in (0, 1]")
        require(
            1e-3 <= self.sticky_alone <= 1,
            f"objective.sticky_alone={self.sticky_alone} is not in [0.001, 1]; use 0.03",
        )
        require(
            self.mask_share + self.random_share <= 1 + 1e-6,
            f"objective.mask_share={self.mask_share} and objective.random_share="
            f"{self.random_share} add up to more than 1; lower one",
        )
        require(
            self.denoising_share + self.proofreading_share <= 1 + 1e-6,
            f"objective.denoising_share={self.denoising_share} and objective.proofreading_share="
            f"{self.proofreading_share} add up to more than 1; lower one",
        )
        require(self.span_count >= 1, f"objective.span_count={self.span_count} must be at least 1")
        _check_names("patterns", self.patterns, PATTERNS)
        _check_names("misprint_kinds", tuple(dict.fromkeys(self.misprint_kinds)), MISPRINTS)


def _check_names(field_name: str, given: tuple[str, ...], known: tuple[str, ...]) -> None:
    """Refuses names that are unknown, none, or given twice."""
    for name in set(given) - set(known):
        (near,) = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
        raise ValueError(
            f"objective.{field_name} has {name!r}, which is not one of {', '.join(known)}; "
            f"did you mean {near!r}?"
        )
    require(
        len(given) > 0 and len(set(given)) == len(given),
        f"objective.{field_name}={given} names none or one twice; name each once",
    )


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """The optimiser and its learning-rate schedule."""

    name: Literal["muon", "adamw"] = field(
        "muon", "muon (Adam for embeddings and norms) or adamw for everything"
    )
    learning_rate: float = field(0.02, "peak learning rate (muon's matrices, or all of adamw)")
    adam_learning_rate: float = field(3e-3, "muon: peak learning rate of what Adam trains")
    final_ratio: float = field(0.0, "last learning rate of the cosine, as a fraction of the peak")
    warmup_steps: int = field(50, "steps of linear warm-up from 0")
    weight_decay: float = field(0.0, "decoupled weight decay of matrices")
    b1: float = field(0.9, "Adam's decay of the mean")
    b2: float = field(0.95, "Adam's decay of the mean square")
    muon_momentum: float = field(0.95, "muon's momentum")
    clip: float = field(1.0, "global gradient norm above which gradients are scaled down")
    ema_decay: float = field(
        0.0, "decay of a moving average of the parameters, which is then what is sampled; 0: none"
    )

    def __post_init__(self) -> None:
        require_fit("optim", self)
        for name in ("learning_rate", "adam_learning_rate", "clip"):
            value = getattr(self, name)
            require(value > 0, f"optim.{name}={value} must be > 0")
        for name in ("b1", "b2", "muon_momentum", "ema_decay"):
            value = getattr(self, name)
            require(0 <= value < 1, f"optim.{name}={value} must be in [0, 1)")
        require(0 <= self.final_ratio <= 1, f"optim.final_ratio={self.final_ratio} not in [0, 1]")
        require(self.warmup_steps >= 0, f"optim.warmup_steps={self.warmup_steps} must be >= 0")
        require(self.weight_decay >= 0, f"optim.weight_decay={self.weight_decay} must be >= 0")


TRACKERS = ("tensorboard", "wandb")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The training run: how long, how often it logs, evaluates and saves, and where it writes."""

    out_dir: str = field("runs/default", "where checkpoints, metrics and plots are written")
    init_from: str = field(
        "",
        "run, weights file or model that ships, whose parameters the model begins with; empty: "
        "fresh ones",
    )
    steps: int = field(1000, "optimiser steps")
    batch_size: int = field(32, "rows of one step, over all devices and processes")
    accumulate: int = field(
        1, "parts of a batch that run one after the other, to save memory; the result is the same"
    )
    seed: int = field(0, "of the parameters, the data order and the noise")
    log_every: int = field(10, "steps between two lines of metrics")
    eval_every: int = field(250, "steps between evaluations on held-out text; 0: only at the end")
    eval_windows: int = field(256, "held-out windows of one evaluation, at most")
    sample_every: int = field(0, "steps between samples shown while training; 0: only at the end")
    trackers: tuple[str, ...] = field(
        (),
        "what else shows the metrics: tensorboard (event files in out_dir) and wandb; each needs "
        "the extra of its name",
    )
    checkpoint_dir: str = field(
        "", "where checkpoints go, a directory or a URL (gs://, s3://); empty: out_dir/checkpoints"
    )
    checkpoint_every: int = field(250, "steps between checkpoints; 0: only at the end")
    keep_checkpoints: int = field(2, "newest checkpoints to keep")

    def __post_init__(self) -> None:
        require_fit("train", self)
        for name in (
            "steps", "batch_size", "accumulate", "log_every", "eval_windows", "keep_checkpoints"
        ):  # fmt: skip
            value = getattr(self, name)
            require(value >= 1, f"train.{name}={value} must be at least 1")
        require(
            self.batch_size % self.accumulate == 0,
            f"train.accumulate={self.accumulate} does not divide train.batch_size="
            f"{self.batch_size}; use a divisor",
        )
        for name in ("seed", "eval_every", "sample_every", "checkpoint_every"):
            value = getattr(self, name)
            require(value >= 0, f"train.{name}={value} must be at least 0")
        for name in self.trackers:
            near = difflib.get_close_matches(name, TRACKERS, n=1, cutoff=0.0)
            require(
                name in TRACKERS,
                f"train.trackers={name!r} is unknown; did you mean {''.join(near)!r}?",
            )
        require(self.out_dir != "", "train.out_dir is empty; name a directory")


INIT = "init"
"""The ``data.tokenizer`` that is the tokenizer of ``train.init_from``."""


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What is trained on, and how text becomes tokens."""

    source: tuple[str, ...] = field(
        ("python-reference",),
        "UTF-8 or JSONL files or globs, or python-reference (the language reference inside "
        "CPython), python-source (its standard library) or tinyshakespeare; or sharded corpora, "
        "directories or URLs (gs://, s3://)",
    )
    weights: tuple[float, ...] = field(
        (), "sharded corpora: share of rows of each; empty: as many as they have tokens"
    )
    tokenizer: str = field(
        "character",
        "character: those of the corpus; byte: the 256 of UTF-8; bpe:N: trained on the corpus; "
        "init: that of train.init_from; corpus: that of shards; or the path of a tokenizer.json",
    )
    new_characters: Literal["add", "refuse"] = field(
        "add",
        "tokenizer=init: characters of the corpus that a character model lacks are added, with "
        "fresh embeddings, and reported (add), or refused",
    )
    layout: Literal["windows", "documents"] = field(
        "windows", "rows are windows of the packed text, or documents"
    )
    tail: Literal["eos", "pad"] = field(
        "eos", "documents: what fills a row; eos is trained, so that a model learns where to stop"
    )
    seq_len: int = field(128, "tokens of one training row (L)")
    held_out: float = field(0.05, "fraction of the corpus kept for evaluation")
    cache_dir: str = field("", "where token files are kept; empty: $DLM_JAX_CACHE or ~/.cache")

    def __post_init__(self) -> None:
        require_fit("data", self)
        require(
            len(self.source) > 0, "data.source is empty; name a file, a glob or python-reference"
        )
        require(self.seq_len >= 2, f"data.seq_len={self.seq_len} must be at least 2")
        require(0 < self.held_out < 1, f"data.held_out={self.held_out} must be between 0 and 1")


class RowSettings:
    """Checked settings of one row under a table of rules; every default is neutral.

    Attributes:
      table: the rules that they are the settings of.
      defaults: by name, as they are kept.
    """

    table: ClassVar[RuleTable] = BUILT_IN
    defaults: ClassVar[Mapping[str, Any]] = {}

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Any]]

        def __init__(self, **settings: Any): ...

        def __getattr__(self, name: str) -> Any: ...

    def __post_init__(self) -> None:
        values = vars(self)
        for name, setting in self.table.settings.items():
            # Most are the default itself, which has been checked.
            if values[name] is not self.defaults[name]:
                object.__setattr__(self, name, setting.checked(values[name]))
        for rule in (RowParams, *self.table.checks(self)):
            rule.check(self)

    @property
    def is_greedy(self) -> bool:
        """Whether the row takes the argmax at every step."""
        return is_greedy(self)

    @property
    def inserts(self) -> bool:
        """Whether the row may gain tokens."""
        return self.table.edit[self.edit_scoring].inserts(self)

    @property
    def remasks(self) -> bool:
        """Whether anything is ever remasked."""
        return self.remask != "none" and self.table.remask[self.remask].is_used(self)

    @property
    def edits(self) -> bool:
        """Whether the row's length may change."""
        return self.table.named("edit", self) is not None

    @property
    def renoises(self) -> bool:
        """Whether anything is ever overwritten before a forward."""
        return self.table.named("renoise", self) is not None

    @property
    def refines(self) -> bool:
        """Whether tokens that are there may change, as those of a draft should."""
        return self.remasks or self.resample or self.edits or self.renoises


@functools.lru_cache(maxsize=64)
def settings_of(table: RuleTable) -> type[RowSettings]:
    """The settings of rows under a table: a frozen dataclass, one field for each setting.

    Raises:
      ValueError: the default of a setting is no value of it.
    """
    defaults = {name: s.checked(s.default) for name, s in table.settings.items()}
    fields = [
        (name, s.annotation, dataclasses.field(default=defaults[name], metadata={"help": s.help}))
        for name, s in table.settings.items()
    ]
    namespace = {
        "table": table,
        "defaults": defaults,
        "__doc__": "Recommended sampling settings: stored in checkpoints, defaults of requests.",
    }
    return dataclasses.make_dataclass(
        "SampleConfig", fields, bases=(RowSettings,), namespace=namespace, frozen=True, kw_only=True
    )


if TYPE_CHECKING:

    class SampleConfig(RowSettings):
        """Recommended sampling settings: stored in checkpoints, defaults of requests."""

else:
    SampleConfig = settings_of(BUILT_IN)


PRESETS: Mapping[str, Mapping[str, Any]] = {
    # The loop of variable-length edits: edit, re-noise, forward, write every token that was not
    # given. Re-noise is a schedule of its own, off unless given: renoise_start=0.1, say.
    "variable_length": {
        "edit": True, "edit_scoring": "uncertainty", "edit_token": "space",
        "edit_schedule": "cosine", "insert_ratio_start": 0.04, "insert_ratio_end": 0.0,
        "delete_ratio_start": 0.04, "delete_ratio_end": 0.0, "insert_margin": 0.0,
        "delete_margin": 0.02, "delete_lambda": 0.3, "cooldown_distance": 1, "overflow": "trim",
        "length_target_mode": "none", "resample": True, "order": "random", "schedule": "all",
        "fill": "parallel", "remask": "none", "block_length": 0, "cache": "none",
    },
}  # fmt: skip
"""Settings by name that go with every model: keywords of `dlm_jax.generate`, ``--preset NAME``."""


def resolve(*layers: Mapping[str, Any] | None, table: RuleTable = BUILT_IN) -> SampleConfig:
    """Settings from layers of names and values, later ones winning; `None` is an empty layer.

    Pass what a checkpoint recommends first and what the user gave explicitly last: a given value
    wins also where it equals the built-in default, and a name that is absent overrides nothing.

    Raises:
      ValueError: an unknown name, with the nearest known one; or a value out of range.
    """
    known = tuple(table.settings)
    merged: dict[str, Any] = {}
    for layer in layers:
        for name, value in (layer or {}).items():
            if name not in table.settings:
                raise ValueError(
                    f"{name}={value!r} is not a sampling setting; {nearest(name, known, value)}"
                )
            merged[name] = value
    return settings_of(table)(**merged)  # type: ignore[return-value]


@dataclasses.dataclass(frozen=True)
class ModelConfig(Architecture):
    """Shape of the Transformer, from small GPT-like to LLaMA-like, and which heads it has."""

    mode: Literal["language_model", "sequence_scorer"] = field(
        "language_model",
        "language_model; or sequence_scorer: predicts which share of a text is corrupted",
    )
    depth: int = field(6, "number of Transformer blocks")
    width: int = field(128, "size of the hidden vectors (D)")
    heads: int = field(4, "attention heads; width must be a multiple of it")
    kv_heads: int = field(0, "key/value heads shared by groups of heads; 0: as many as heads")
    mlp_width: int = field(0, "inner size of the MLP; 0: 4 * width (swiglu: 8/3, rounded to 8)")
    activation: Literal["relu2", "gelu", "swiglu"] = field(
        "relu2", "MLP non-linearity: relu2 (squared ReLU), gelu (tanh form) or swiglu"
    )
    norm: Literal["rms", "layer"] = field("rms", "normalisation: rms (RMSNorm) or layer")
    norm_epsilon: float = field(1e-5, "added to the mean square or variance in a norm")
    qk_norm: bool = field(True, "RMSNorm of queries and keys over the head, before RoPE")
    qkv_bias: bool = field(False, "biases on the query, key and value projections")
    rope_theta: float = field(10000.0, "base of the rotary position frequencies")
    tied_head: bool = field(True, "the LM head is the transposed embedding table")
    attention_type: Literal["bidirectional", "causal", "block_causal"] = field(
        "bidirectional",
        "bidirectional; causal: an autoregressive model, each position from those to its left; or "
        "block_causal: a position sees its own block and those before it",
    )
    block_length: int = field(
        0, "block_causal: positions of a block, from the begin of the row on, at least 2"
    )
    vocab_size: int = field(0, "number of logits; 0: the tokenizer's vocabulary")
    start_id: int = field(
        -1, "causal: id that the model reads before the first token; -1: the tokenizer's MASK"
    )
    compute_dtype: Literal["float32", "bfloat16"] = field(
        "float32",
        "dtype of activations; parameters, norms and softmax stay float32; float16 has "
        "too small a range for gradients without scaled losses",
    )
    remat: Literal["none", "block", "attention", "dots", "offload"] = field(
        "none",
        "what the backward pass computes again to save memory: none; block (everything), "
        "attention (all but what attention returns), dots (all but matrix products) or offload "
        "(everything, and the inputs of blocks lie in the host's memory)",
    )
    add_sampler_head: bool = field(
        False, "a head that sees a hole's neighbours, for coherent parallel filling"
    )
    sampler_context: int = field(1, "neighbours that the sampler head sees on each side")
    sampler_width: int = field(0, "inner size of the sampler head's MLP; 0: width")
    sampler_residual: bool = field(
        False, "the sampler head adds to the hidden vector, and begins as the LM head"
    )
    add_critic_head: bool = field(False, "a head that predicts which tokens of a text are wrong")

    def __post_init__(self) -> None:
        shown = f"model.remat={self.remat!r} is not a name"
        require(isinstance(self.remat, str), f"{shown}; use 'block' or 'none'")
        require_fit("model", self)
        for name in ("depth", "width", "heads"):
            value = getattr(self, name)
            require(value >= 1, f"model.{name}={value} must be at least 1")
        for name in ("kv_heads", "mlp_width", "vocab_size", "sampler_width"):
            value = getattr(self, name)
            require(value >= 0, f"model.{name}={value} must be at least 0")
        require(
            -1 <= self.start_id < (self.vocab_size or math.inf),
            f"model.start_id={self.start_id} is outside the vocabulary; use -1",
        )
        self.check_architecture(
            width=self.width, heads=self.heads, depth=self.depth, activation=self.activation
        )
        require(
            self.kv_heads == 0 or self.heads % self.kv_heads == 0,
            f"model.kv_heads={self.kv_heads} does not divide model.heads={self.heads}; "
            f"use 0 or a divisor of {self.heads}",
        )
        is_block_causal = self.attention_type == "block_causal"
        require(
            self.block_length >= 2 if is_block_causal else self.block_length == 0,
            f"model.block_length={self.block_length} does not go with model.attention_type="
            f"{self.attention_type!r}; use {'at least 2' if is_block_causal else 0}",
        )
        require(
            self.logit_alignment == "same" or self.attention_type != "causal",
            "model.logit_alignment='shifted' does not go with model.attention_type='causal', whose "
            "outputs are aligned by what it reads; use 'same'",
        )
        self._check_heads()
        require(self.norm_epsilon > 0, f"model.norm_epsilon={self.norm_epsilon} must be > 0")
        require(self.rope_theta > 0, f"model.rope_theta={self.rope_theta} must be > 0")

    @property
    def inner_width(self) -> int:
        """Inner size of an MLP."""
        is_gated = self.activation == "swiglu"
        return self.mlp_width or (8 * -(-self.width // 3) if is_gated else 4 * self.width)

    def _check_heads(self) -> None:
        """Raises ValueError for heads that this kind of model cannot have."""
        require(
            self.sampler_context >= 1,
            f"model.sampler_context={self.sampler_context} must be at least 1",
        )
        for name in ("add_sampler_head", "add_critic_head"):
            require(
                not getattr(self, name) or self.mode == "language_model",
                f"model.{name}=True needs model.mode='language_model', and it is {self.mode!r}; "
                "change one of them",
            )
            require(
                not getattr(self, name) or self.attention_type == "bidirectional",
                f"model.{name}=True needs model.attention_type='bidirectional', and it is "
                f"{self.attention_type!r}; change one of them",
            )
        require(
            self.mode == "language_model" or self.attention_type == "bidirectional",
            "model.mode='sequence_scorer' needs model.attention_type='bidirectional'",
        )


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything a run needs; every default constructs."""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    objective: ObjectiveConfig = dataclasses.field(default_factory=ObjectiveConfig)
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    heads: HeadsConfig = dataclasses.field(default_factory=HeadsConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    sample: SampleConfig = dataclasses.field(default_factory=SampleConfig)

    def __post_init__(self) -> None:
        require(
            self.optim.warmup_steps < self.train.steps or self.train.steps == 1,
            f"optim.warmup_steps={self.optim.warmup_steps} leaves nothing of "
            f"train.steps={self.train.steps}; lower it",
        )
        require(
            self.sample.gen_length <= self.data.seq_len,
            f"sample.gen_length={self.sample.gen_length} does not fit the canvas of "
            f"data.seq_len={self.data.seq_len}; lower it, or use 0 to fill the canvas",
        )
        share, rows = self.objective.denoising_share, self.train.batch_size
        require(
            share in (0, 1) or 1 <= round(share * rows) < rows,
            f"objective.denoising_share={share} of train.batch_size={rows} rows leaves an "
            "objective without rows; raise train.batch_size",
        )
        require(
            self.data.tokenizer != INIT or self.train.init_from != "",
            "data.tokenizer='init' is that of train.init_from, which is empty; name a model there",
        )
        require(
            self.heads.train_main or self.train.init_from != "",
            "heads.train_main=False keeps the model as it is, and it is fresh; name the one to "
            "keep in train.init_from",
        )
        require(
            self.model.lora_rank == 0 or (self.heads.train_main and self.train.init_from != ""),
            f"model.lora_rank={self.model.lora_rank} trains adapters of a model that is there; "
            "name it in train.init_from, with heads.train_main=true",
        )
        require(
            self.model.attention_type != "causal" or self.sample.order == "left_to_right",
            f"model.attention_type='causal' cannot fill sample.order={self.sample.order!r}; "
            "use left_to_right",
        )
        require(
            self.model.attention_type != "block_causal"
            or self.model.block_length % (self.sample.block_length or 1) == 0,
            f"sample.block_length={self.sample.block_length} is not the model.block_length="
            f"{self.model.block_length} that the model is trained with, nor a part of it; use 0 "
            "for the same",
        )
        require(
            self.model.attention_type != "block_causal" or self.objective.proofreading_share == 0,
            f"objective.proofreading_share={self.objective.proofreading_share} moves tokens out of "
            "their blocks, which model.attention_type='block_causal' cannot; use 0",
        )
