"""Constant, scheduled and entropy-dependent temperature."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dlm_jax.sampling import vocab
from dlm_jax.sampling.transforms.transform import At, Change, Pointwise, is_greedy
from dlm_jax.sampling.vocab import Logits
from dlm_jax.settings import ABOVE_ZERO, Setting, SettingError, per_row, rule


def _temperature(setting: Setting) -> Setting:
    """The setting, which also rejects positive values below 1e-6 and negative values except -1."""

    def parse(value: Any) -> float:
        value = setting.checked(value)
        if 0 < value < 1e-6:
            raise SettingError(
                setting.name, value, "is too small for float32", "use 0.0 for greedy"
            )
        if -1 < value < 0:
            raise SettingError(
                setting.name, value, "is negative", "use -1 for the same temperature at every step"
            )
        return value

    return dataclasses.replace(setting, parse=parse)


TEMPERATURE = _temperature(
    Setting(
        "temperature",
        1.0,
        "temperature of the draw: 0 takes the most likely token, otherwise in [1e-6, 1e6]; 1 is "
        "neutral; applies to all steps unless temperature_end is also given",
        low=0.0,
        high=1e6,
        remedy="use 0.0 for greedy or 1.0 to disable it",
        resets=("temperature_end",),
        aliases=("temp",),
    )
)
TEMPERATURE_END = _temperature(
    Setting(
        "temperature_end",
        -1.0,
        "temperature of the last step (or of step n with n holes, if earlier), reached linearly; "
        "-1 keeps the temperature constant",
        low=-1.0,
        high=1e6,
        remedy="use -1 for the same temperature at every step",
    )
)


class Moving(Pointwise):
    """A temperature that moves from step to step. 0 makes a row greedy."""

    temperature_B: Array
    last_B: Array | None

    @classmethod
    def columns(cls, rows: Sequence[Any], facts: Any) -> Any:
        """The transform with the temperatures of each row at the first and last step."""
        packed = super().columns(rows, facts)
        is_constant_B = packed.last_B < 0
        return replace(packed, last_B=np.where(is_constant_B, packed.temperature_B, packed.last_B))

    def at_progress(self, progress_B: Array) -> Any:
        """The transform with the temperature of a step, `T + (last - T) s / (S - 1)`."""
        if self.last_B is None:
            return self
        moved_B = (self.last_B - self.temperature_B) * progress_B
        return replace(self, temperature_B=self.temperature_B + moved_B)  # type: ignore[type-var]


@rule
class Temperature(Moving):
    """`x / T`. T = 1 is neutral; T = 0 makes the row greedy and leaves its logits unchanged."""

    temperature_B: Array = per_row(TEMPERATURE)
    last_B: Array | None = per_row(TEMPERATURE_END, default=None)

    @classmethod
    def yields(cls, row: Any) -> bool:
        return _is_dynamic(row)

    def is_active(self) -> Array:
        return (self.temperature_B != 0) & (self.temperature_B != 1)

    def divisor(self) -> Array:
        """The divisor `[B]` of each row's logits."""
        return jnp.where(self.is_active(), self.temperature_B, 1.0)

    def given(self, prepared: Any, logits_NV: Array, at: At) -> Array:
        # Computed outside of kernels, so that all forms of a draw use the same number.
        return vocab.reciprocal(self.divisor()[at.row_N])

    def change(self, given: Array, logits_NV: Logits, at: At) -> Change:
        return lambda block, ids: vocab.times(block, given[:, None])


@rule
class DynamicTemperature(Moving):
    """Divides the logits by T', which depends on the entropy of the candidates.

    `T' = lo + (hi - lo) * (H / ln n)**e` with `lo = max(0, T - delta)`, `hi = T + delta`, where H
    is the entropy in nats of the n candidates. A position with one candidate is unchanged. If
    T' = 0, only the best candidate is kept. T = 0 makes the row greedy; delta = 0 is plain
    temperature. Source: llama.cpp, ``temp_ext``.
    """

    name = "dynatemp"
    temperature_B: Array = per_row(TEMPERATURE)
    delta_B: Array = per_row(
        Setting(
            "dynatemp_range",
            0.0,
            "half-width of the dynamic temperature range, >= 0; 0 is plain temperature",
            low=0.0,
            high=1e6,
            remedy="use 0.0 to disable it",
        )
    )
    exponent_B: Array = per_row(
        Setting(
            "dynatemp_exponent",
            1.0,
            "dynamic temperature: exponent of the relative entropy, > 0",
            low=ABOVE_ZERO,
            high=1e6,
            remedy="use 1.0",
            activates=False,
            aliases=("dynatemp_exp",),
        )
    )
    last_B: Array | None = per_row(TEMPERATURE_END, default=None)

    @classmethod
    def yields(cls, row: Any) -> bool:
        return not _is_dynamic(row)

    def is_active(self) -> Array:
        return (self.temperature_B != 0) & ((self.temperature_B != 1) | (self.delta_B != 0))

    def change(self, given: Any, logits_NV: Logits, at: At) -> Change:
        count_N, entropy_N = vocab.count_and_entropy(logits_NV)
        temperature_N, delta_N = self.temperature_B[at.row_N], self.delta_B[at.row_N]
        low_N = jnp.maximum(temperature_N - delta_N, 0.0)
        relative_N = entropy_N / jnp.log(jnp.maximum(count_N, 2.0))
        power_N = jnp.clip(relative_N, 0.0, 1.0) ** self.exponent_B[at.row_N]
        divisor_N = low_N + (temperature_N + delta_N - low_N) * power_N
        divisor_N = jnp.where(delta_N == 0, temperature_N, divisor_N)
        is_on_N = self.is_active()[at.row_N] & ((count_N > 1) | (delta_N == 0))
        divisor_N = jnp.where(is_on_N, divisor_N, 1.0)
        is_cold_N = divisor_N < 1e-6
        best_N = jax.lax.cond(
            is_cold_N.any(),
            lambda: vocab.argmax(logits_NV, vocab.TOLERANCE),
            lambda: jnp.zeros(is_cold_N.shape, jnp.int32),
        )
        scale_N = vocab.reciprocal(jnp.where(is_cold_N, 1.0, divisor_N), logits_NV)

        def scale(block, ids):
            is_dropped_NC = is_cold_N[:, None] & (ids != best_N[:, None])
            scaled_NC = jnp.where(is_dropped_NC, -jnp.inf, vocab.times(block, scale_N[:, None]))
            return jnp.where(is_on_N[:, None], scaled_NC, block)

        return scale


def _is_dynamic(row: Any) -> bool:
    return row.dynatemp_range > 0 and not is_greedy(row)
