"""Settings of the logit transforms for one request, validated before anything is traced.

Sentinels are those of `seeds/per_row_sampler.md` 4.4; ranges are stated at each field.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import numbers
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from dlm_jax.config.fields import field

DEFAULT_CHAIN: tuple[str, ...] = (
    "bias",
    "penalties",
    "dry",
    "temperature",
    "top_n_sigma",
    "top_k",
    "typical_p",
    "top_p",
    "min_p",
    "xtc",
    "mirostat",
)
"""Order of `seeds/per_row_sampler.md` 4.2, with the samplers it does not know in their places."""

_INT_LIMIT = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Settings of one request, validated; every default is neutral."""

    temperature: float = field(
        1.0, "of the draw: 0 takes the likeliest token, otherwise in [1e-6, 1e6]; 1 is neutral"
    )
    temperature_end: float = field(
        -1.0,
        "temperature of the last step (that of as many as there are holes, if fewer), "
        "approached evenly; -1: the same at every step",
    )
    dynatemp_range: float = field(
        0.0, "half-width of dynamic temperature, >= 0; 0 is plain temperature"
    )
    dynatemp_exponent: float = field(1.0, "dynamic temperature: power of the relative entropy, > 0")
    top_k: int = field(0, "candidates to keep; <= 0 is off")
    top_p: float = field(1.0, "nucleus mass in (0, 1]; 1 is off")
    min_p: float = field(0.0, "fraction of the best probability in [0, 1]; 0 is off")
    typical_p: float = field(1.0, "typical mass in (0, 1]; 1 is off")
    top_n_sigma: float = field(0.0, "deviations below the best logit; <= 0 is off")
    xtc_probability: float = field(
        0.0, "chance that XTC drops all but the least likely choice, in [0, 1]"
    )
    xtc_threshold: float = field(
        0.1, "probability that makes a token a choice for XTC; above 0.5 is off"
    )
    repetition_penalty: float = field(
        1.0, "divides (or multiplies, if negative) the logits of seen tokens, > 0; 1 is off"
    )
    frequency_penalty: float = field(0.0, "taken off a logit per occurrence; 0 is off")
    presence_penalty: float = field(0.0, "taken off the logit of a seen token; 0 is off")
    penalty_last_n: int = field(
        64, "newest tokens the penalties look at; -1 is the whole row and 0 is off"
    )
    dry_multiplier: float = field(0.0, "weight of the penalty on repeated runs, >= 0; 0 is off")
    dry_base: float = field(1.75, "growth of that penalty with the length of the run, >= 1")
    dry_allowed_length: int = field(2, "repeated tokens that go unpunished, >= 1")
    dry_last_n: int = field(-1, "newest tokens DRY looks at; -1 is the whole run and 0 is off")
    dry_breakers: tuple[int, ...] = field((), "ids no repetition may cross")
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = field(
        (), "id and bias, as a mapping or pairs (12:-5,30:2); duplicates add, -inf bans"
    )
    mirostat: int = field(0, "0 is off, 1 or 2 is the version; it replaces the truncations and XTC")
    mirostat_tau: float = field(5.0, "target surprise in bits, >= 0")
    mirostat_eta: float = field(0.1, "learning rate, >= 0")
    min_keep: int = field(1, "candidates that every truncation keeps, in [1, 64]")
    ignore_eos: bool = field(False, "bans every id that ends a generation")

    def __post_init__(self) -> None:
        bias = self.logit_bias
        pairs = tuple(bias.items()) if isinstance(bias, Mapping) else tuple(map(tuple, bias))
        object.__setattr__(self, "logit_bias", pairs)
        object.__setattr__(self, "dry_breakers", tuple(self.dry_breakers))
        for name in _INTEGERS:
            _check_integer(name, getattr(self, name))
        for name, (low, high, remedy) in _RANGES.items():
            _check_range(name, getattr(self, name), low, high, remedy)
        for name in ("temperature", "temperature_end"):
            if 0 < getattr(self, name) < 1e-6:
                raise ValueError(
                    f"{name}={getattr(self, name)} is too small for float32; use 0.0 for greedy"
                )
        if -1 < self.temperature_end < 0:
            raise ValueError(
                f"temperature_end={self.temperature_end} is negative; use -1 for the same "
                "temperature at every step"
            )
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos={self.ignore_eos!r} is not a bool; use True or False")
        for token in self.dry_breakers:
            _check_integer("dry_breakers", token, low=0)
        for pair in pairs:
            _check_bias(pair)

    @property
    def is_greedy(self) -> bool:
        """Whether the row takes the argmax at every step."""
        return self.temperature == 0 and self.temperature_end in (0, -1)

    @property
    def bias_pairs(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as pairs of id and bias."""
        return tuple(self.logit_bias)  # type: ignore[arg-type]


_ABOVE_ZERO = math.nextafter(0.0, 1.0)
_FINITE = 3.0e38

_RANGES: dict[str, tuple[float, float, str]] = {
    "temperature": (0.0, 1e6, "use 0.0 for greedy or 1.0 for none"),
    "temperature_end": (-1.0, 1e6, "use -1 for the same temperature at every step"),
    "dynatemp_range": (0.0, 1e6, "use 0.0 to turn it off"),
    "dynatemp_exponent": (_ABOVE_ZERO, 1e6, "use 1.0"),
    "top_p": (_ABOVE_ZERO, 1.0, "use 1.0 to turn it off"),
    "min_p": (0.0, 1.0, "use 0.0 to turn it off"),
    "typical_p": (_ABOVE_ZERO, 1.0, "use 1.0 to turn it off"),
    "top_n_sigma": (-_FINITE, _FINITE, "use 0.0 to turn it off"),
    "xtc_probability": (0.0, 1.0, "use 0.0 to turn it off"),
    "xtc_threshold": (_ABOVE_ZERO, 1.0, "use a value above 0.5 to turn it off"),
    "repetition_penalty": (1e-6, 1e6, "use 1.0 to turn it off"),
    "frequency_penalty": (-_FINITE, _FINITE, "use 0.0 to turn it off"),
    "presence_penalty": (-_FINITE, _FINITE, "use 0.0 to turn it off"),
    "penalty_last_n": (-1, _INT_LIMIT, "use -1 for the whole row or 0 to turn it off"),
    "dry_multiplier": (0.0, _FINITE, "use 0.0 to turn it off"),
    "dry_base": (1.0, 1e6, "use 1.75"),
    "dry_allowed_length": (1, _INT_LIMIT, "use 2"),
    "dry_last_n": (-1, _INT_LIMIT, "use -1 for the whole run or 0 to turn it off"),
    "mirostat": (0, 2, "use 0 (off), 1 or 2"),
    "mirostat_tau": (0.0, 1e6, "use 5.0"),
    "mirostat_eta": (0.0, 1e6, "use 0.1"),
    "min_keep": (1, 64, "use 1"),
}

_INTEGERS = (
    "top_k",
    "penalty_last_n",
    "dry_allowed_length",
    "dry_last_n",
    "mirostat",
    "min_keep",
)

Settings = TypeVar("Settings", bound=SamplingParams)


def resolve(*layers: Mapping[str, Any] | None, kind: type[Settings] = SamplingParams) -> Settings:
    """Settings from layers of names and values, later ones winning; `None` is an empty layer.

    Pass what a checkpoint recommends first and what the user gave explicitly last: a given value
    wins also where it equals the built-in default, and a name that is absent overrides nothing.

    Raises:
      ValueError: an unknown name, with the nearest known one; or a value out of range.
    """
    known = tuple(f.name for f in dataclasses.fields(kind))
    merged: dict[str, Any] = {}
    for layer in layers:
        for name, value in (layer or {}).items():
            if name not in known:
                raise ValueError(
                    f"{name}={value!r} is not a sampling setting; {nearest(name, known)}"
                )
            merged[name] = value
    return kind(**merged)


def check_chain(names: Sequence[str]) -> None:
    """Raises ValueError if a name is unknown (with the nearest one) or stands there twice."""
    for name in names:
        if name not in DEFAULT_CHAIN:
            raise ValueError(f"chain has unknown name {name!r}; {nearest(name, DEFAULT_CHAIN)}")
        if list(names).count(name) > 1:
            raise ValueError(f"chain has {name!r} {list(names).count(name)} times; name it once")


def nearest(name: str, known: Sequence[str]) -> str:
    """Advice for a misspelt name."""
    close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"use one of {', '.join(known)}"


def _check_integer(name: str, value: Any, low: int = -_INT_LIMIT) -> None:
    is_integer = not isinstance(value, bool) and hasattr(value, "__index__")
    if not is_integer or not low <= int(value) <= _INT_LIMIT:
        raise ValueError(f"{name}={value!r} is not an integer of 32 bits >= {low}; use one")


def _check_range(name: str, value: Any, low: float, high: float, remedy: str) -> None:
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise ValueError(f"{name}={value!r} is not a number; {remedy}")
    # NaN fails every comparison, so it is refused here too
    if not low <= typing.cast(float, value) <= high:
        bound = "(0" if low == _ABOVE_ZERO else f"[{low:g}"
        raise ValueError(f"{name}={value!r} is outside {bound}, {high:g}]; {remedy}")


def _check_bias(pair: Any) -> None:
    if len(pair) != 2:
        raise ValueError(f"logit_bias={pair!r} is not a pair; use (id, bias)")
    token, bias = pair
    _check_integer("logit_bias", token, low=0)
    is_number = isinstance(bias, numbers.Real) and not isinstance(bias, bool)
    if not is_number or not (bias == -math.inf or abs(typing.cast(float, bias)) <= 1e9):
        raise ValueError(
            f"logit_bias={bias!r} of id {token} is neither -inf nor within 1e9; use -inf to ban"
        )
