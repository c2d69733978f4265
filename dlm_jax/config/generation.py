"""Settings of one generation: what a checkpoint recommends, a request asks for, a flag says."""

from __future__ import annotations

import dataclasses
import difflib
import typing
import warnings
from typing import Literal

from dlm_jax.config.fields import field, require
from dlm_jax.config.sampling import DEFAULT_CHAIN, SamplingParams, check_chain

Order = Literal[
    "low_confidence", "random", "left_to_right", "entropy", "margin", "threshold", "factor",
    "entropy_bound", "ancestral",
]  # fmt: skip
Schedule = Literal["linear", "cosine", "all"]
Confidence = Literal["sampled", "max"]
Remask = Literal[
    "none", "scheduled", "scheduled_threshold", "remdm_cap", "remdm_rescale", "remdm_conf"
]
RemaskBy = Literal["confidence", "critic"]
Fill = Literal["parallel", "wavefront"]
Draw = Literal["inverse_cdf", "gumbel"]
EditSchedule = Literal["linear", "cosine"]
EditScoring = Literal["uncertainty", "lead"]
EditToken = Literal["space", "mask"]
Overflow = Literal["trim", "refuse"]
LengthTargetMode = Literal["none", "to_max_new"]
RenoiseToken = Literal["space", "mask", "random"]
ORDERS: tuple[str, ...] = typing.get_args(Order)
SCHEDULES: tuple[str, ...] = typing.get_args(Schedule)
CONFIDENCES: tuple[str, ...] = typing.get_args(Confidence)
REMASKS: tuple[str, ...] = typing.get_args(Remask)
REMASK_BYS: tuple[str, ...] = typing.get_args(RemaskBy)
FILLS: tuple[str, ...] = typing.get_args(Fill)
DRAWS: tuple[str, ...] = typing.get_args(Draw)
EDIT_SCHEDULES: tuple[str, ...] = typing.get_args(EditSchedule)
EDIT_SCORINGS: tuple[str, ...] = typing.get_args(EditScoring)
EDIT_TOKENS: tuple[str, ...] = typing.get_args(EditToken)
OVERFLOWS: tuple[str, ...] = typing.get_args(Overflow)
LENGTH_TARGET_MODES: tuple[str, ...] = typing.get_args(LengthTargetMode)
RENOISE_TOKENS: tuple[str, ...] = typing.get_args(RenoiseToken)

_NAMES_OF_PARAMS = {spec.name for spec in dataclasses.fields(SamplingParams)}
_CHOICES: dict[str, tuple[str, ...]] = {
    "order": ORDERS,
    "schedule": SCHEDULES,
    "confidence": CONFIDENCES,
    "remask": REMASKS,
    "remask_by": REMASK_BYS,
    "fill": FILLS,
    "draw": DRAWS,
    "edit_schedule": EDIT_SCHEDULES,
    "edit_scoring": EDIT_SCORINGS,
    "edit_token": EDIT_TOKENS,
    "overflow": OVERFLOWS,
    "length_target_mode": LENGTH_TARGET_MODES,
    "renoise": RENOISE_TOKENS,
    "renoise_schedule": EDIT_SCHEDULES,
}
_SHARES = (
    "threshold", "remask_start", "remask_end", "remask_randomness", "remask_eta",
    "insert_ratio_start", "insert_ratio_end", "delete_ratio_start", "delete_ratio_end",
    "renoise_start", "renoise_end",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleConfig(SamplingParams):
    """Recommended sampling settings: stored in the checkpoint, the defaults of ``sample.py``."""

    gen_length: int = field(0, "new tokens of one sample; 0: as many as the canvas has room for")
    steps: int = field(128, "denoising steps of one sample")
    order: Order = field(
        "random",
        "which holes a step commits. A quota: low_confidence (the surest), entropy, margin, "
        "random, left_to_right. As many as are sure enough: threshold, factor, entropy_bound. As "
        "the noise process does: ancestral",
    )
    schedule: Schedule = field(
        "linear",
        "how a quota is spread over the steps: linear, cosine, or all (every hole at every step)",
    )
    confidence: Confidence = field(
        "sampled", "probability of the token that was drawn (sampled), or the largest (max)"
    )
    threshold: float = field(0.9, "order=threshold: confidence that commits, in [0, 1]")
    factor: float = field(
        1.0, "order=factor: n holes commit together if each is as sure as 1 - factor / (n + 1)"
    )
    entropy_bound: float = field(
        0.1, "order=entropy_bound: nats of entropy that may be committed blind, >= 0"
    )
    block_length: int = field(
        0, "tokens of a block, which is finished before the next begins; 0: all in one"
    )
    stop_at_eos: bool = field(False, "a row is done when a finished block holds EOS")
    guidance: float = field(
        0.0, "classifier-free guidance towards what was given, >= 0; costs a forward unless 0"
    )
    remask: Remask = field(
        "none",
        "what becomes a hole again after a step: none; scheduled (a share of the most doubtful), "
        "scheduled_threshold (all above a doubt); remdm_cap, remdm_rescale, remdm_conf",
    )
    remask_by: RemaskBy = field(
        "confidence",
        "scheduled: what doubts a token: its own probability when it was drawn (confidence), or "
        "the critic head on the filled text (critic), which costs a forward",
    )
    remask_start: float = field(0.95, "scheduled: where the remasked share begins, in [0, 1]")
    remask_end: float = field(0.05, "scheduled: share remasked before the last step, in [0, 1]")
    remask_randomness: float = field(
        0.0, "scheduled: weight of chance beside doubt, in [0, 1]; 1 is chance alone"
    )
    remask_eta: float = field(
        0.1, "remdm: strength, in [0, 1]; for remdm_conf anything but 0 is the same"
    )
    fill: Fill = field(
        "parallel",
        "how a step's candidates are drawn: each blind to the others (parallel), or in waves by "
        "the sampler head, which sees its neighbours (wavefront)",
    )
    sampler_min_neighbors_ratio: float = field(
        0.01, "wavefront: share of the holes without filled neighbour that begin, in (0, 1]"
    )
    sampler_spread_seeds: bool = field(
        False, "wavefront: the holes that begin are spread evenly over the row"
    )
    sampler_even_odd: bool = field(
        False, "wavefront: odd positions of a wave wait for the even ones"
    )
    sampler_temperature: float = field(
        1.0, "wavefront: divides the sampler head's logits, before the chain"
    )
    resample: bool = field(
        False, "every token that was not given is open at every step, as if it were a hole"
    )
    edit: bool = field(False, "insert and delete tokens between the steps; lengths change")
    edit_schedule: EditSchedule = field(
        "cosine", "edit: how the ratios go from start to end over the steps: linear or cosine"
    )
    insert_ratio_start: float = field(
        0.04, "edit: insertions per token that was not given, before the first step, in [0, 1]"
    )
    insert_ratio_end: float = field(0.0, "edit: the same before the last step")
    delete_ratio_start: float = field(0.04, "edit: deletions, likewise")
    delete_ratio_end: float = field(0.0, "edit: the same before the last step")
    edit_scoring: EditScoring = field(
        "uncertainty",
        "edit: what speaks for an insertion: uncertainty (of the tokens beside the gap), or lead "
        "(of the likeliest token over the one behind the gap), for models trained to proofread",
    )
    insert_margin: float = field(0.0, "edit: what the score of a gap must exceed, >= 0")
    delete_margin: float = field(
        0.02, "edit: what the probability of the next token in a token's place must be ahead, >= 0"
    )
    delete_lambda: float = field(0.3, "edit: weight of that lead one position on, >= 0")
    cooldown_distance: int = field(
        1, "edit: how far from the last step's edits nothing is edited; 0 is off"
    )
    edit_token: EditToken = field(
        "space", "edit: what is inserted: the space, or mask, a hole that is then filled"
    )
    overflow: Overflow = field(
        "trim", "edit: insertions beyond max_length push out the tail (trim), or stop (refuse)"
    )
    length_target_mode: LengthTargetMode = field(
        "none", "edit: to_max_new nudges the length towards max_new_tokens"
    )
    max_new_tokens: int = field(
        0, "to_max_new: tokens that were not given; 0: as many as there are at first"
    )
    renoise: RenoiseToken = field(
        "space", "re-noise: what is written over tokens before a forward: space, mask or random"
    )
    renoise_start: float = field(0.0, "re-noise: share written over before the first step")
    renoise_end: float = field(0.0, "re-noise: share written over before the last step")
    renoise_schedule: EditSchedule = field("cosine", "re-noise: linear or cosine in between")
    chain: tuple[str, ...] = field(DEFAULT_CHAIN, "logit transforms, in the order they run")
    draw: Draw = field(
        "inverse_cdf", "how a token is drawn: inverse_cdf (the faster) or gumbel (as others do)"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "chain", tuple(self.chain))
        self._check_kinds()
        require(self.gen_length >= 0, f"gen_length={self.gen_length} must be at least 0")
        require(self.steps >= 1, f"steps={self.steps} must be at least 1")
        for name in ("gen_length", "steps", "block_length"):
            value = getattr(self, name)
            require(value < 2**31, f"{name}={value} does not fit into 32 bits; use less")
        require(
            not (self.stop_at_eos and self.ignore_eos),
            "stop_at_eos means nothing with ignore_eos, which bans EOS; set ignore_eos to false",
        )
        require(self.block_length >= 0, f"block_length={self.block_length} must be at least 0")
        for name in ("cooldown_distance", "max_new_tokens"):
            value = getattr(self, name)
            require(0 <= value < 2**20, f"{name}={value} is outside [0, 2**20); use 0 or more")
        for name in _SHARES:
            value = getattr(self, name)
            require(0 <= value <= 1, f"{name}={value} is outside [0, 1]; use 0.5, say")
        for name in ("sampler_min_neighbors_ratio", "sampler_temperature"):
            value, most = getattr(self, name), 1 if name.endswith("ratio") else 1e6
            require(0 < value <= most, f"{name}={value} is outside (0, {most:g}]; use 0.5, say")
        for name in (
            "factor",
            "entropy_bound",
            "guidance",
            "insert_margin",
            "delete_margin",
            "delete_lambda",
        ):
            value = getattr(self, name)
            require(0 <= value <= 1e6, f"{name}={value} is outside [0, 1e6]; use 0 or more")
        for name, known in _CHOICES.items():
            value = getattr(self, name)
            (near,) = difflib.get_close_matches(str(value), known, n=1, cutoff=0.0)
            require(
                value in known,
                f"{name}={value!r} is not one of {', '.join(known)}; did you mean {near!r}?",
            )
        check_chain(self.chain)
        self._check_rewriting()
        for name, does in (("insert", self.inserts), ("delete", self.deletes)):
            margin = getattr(self, f"{name}_margin")
            if does and margin >= 1:
                warnings.warn(
                    f"{name}_margin={margin} lets nothing be {name.removesuffix('e')}ed: "
                    "probabilities differ by 1 at most; use 0.02",
                    stacklevel=3,
                )

    @property
    def inserts(self) -> bool:
        """Whether a row may gain tokens."""
        ratios = max(self.insert_ratio_start, self.insert_ratio_end)
        return self.edit and (ratios > 0 or self.length_target_mode != "none")

    @property
    def deletes(self) -> bool:
        """Whether a row may lose tokens."""
        ratios = max(self.delete_ratio_start, self.delete_ratio_end)
        return self.edit and (ratios > 0 or self.length_target_mode != "none")

    @property
    def edits(self) -> bool:
        """Whether a row's length may change."""
        return self.inserts or self.deletes

    @property
    def renoises(self) -> bool:
        """Whether anything is ever written over before a forward."""
        return max(self.renoise_start, self.renoise_end) > 0

    @property
    def refines(self) -> bool:
        """Whether tokens that are there may change, as those of a draft should."""
        return self.remasks or self.resample or self.edits or self.renoises

    @property
    def remasks(self) -> bool:
        """Whether anything is ever remasked."""
        if self.remask.startswith("remdm"):
            return self.remask_eta > 0
        return self.remask != "none" and max(self.remask_start, self.remask_end) > 0

    def _check_rewriting(self) -> None:
        """Raises ValueError for tokens that are put there and never rewritten, or at random."""
        is_quota = self.order in ("low_confidence", "entropy", "margin", "random", "left_to_right")
        require(
            not (self.resample and is_quota and self.schedule != "all"),
            f"resample has no use for a quota of order={self.order!r}; use schedule='all', or "
            "order='threshold'",
        )
        if self.resample or self.remasks:
            return
        require(
            not (self.inserts and self.edit_token == "space"),
            "edit inserts spaces that nothing rewrites; use edit_token='mask', or resample=True",
        )
        require(
            not self.renoises or self.renoise == "mask",
            f"re-noise leaves {self.renoise} tokens that nothing rewrites; use renoise='mask', or "
            "resample=True",
        )

    def _check_kinds(self) -> None:
        """Raises ValueError for a setting of this class that is not of its type."""
        for spec in dataclasses.fields(SampleConfig):
            value, kind = getattr(self, spec.name), type(spec.default)
            if spec.name in _NAMES_OF_PARAMS or kind is tuple:
                continue
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            is_fine = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
            is_fine |= kind is int and hasattr(value, "__index__") and not isinstance(value, bool)
            require(
                is_fine or (kind is float and is_number),
                f"{spec.name}={value!r} is not of type {kind.__name__}; use {spec.default!r}, say",
            )
