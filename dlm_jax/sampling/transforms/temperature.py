"""Constant, scheduled and entropy-dependent temperature."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dlm_jax.sampling import vocab
from dlm_jax.sampling.transforms.transform import Pointwise
from dlm_jax.sampling.vocab import Logits
from dlm_jax.settings import ABOVE_ZERO, Setting, per_row, require, rule


def _temperature(setting: Setting) -> Setting:
    """The setting, which also rejects numbers that are too small for float32."""

    def parse(value: Any) -> float:
        value = setting.checked(value)
        require(value in (0, -1) or value >= 1e-6, setting.name, value, "is below 1e-6", remedy)
        return value

    remedy = setting.remedy
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


@rule
class Temperature(Pointwise):
    """`x / T`. T = 1 is neutral; T = 0 makes the row greedy and leaves its logits unchanged.

    T moves linearly from step to step, if a last temperature is given. In rows with a range delta,
    the divisor depends on the entropy: `T' = lo + (hi - lo) * (H / ln n)**e` with `lo = max(0, T -
    delta)`, `hi = T + delta`, where H is the entropy in nats of the n candidates. A position with
    one candidate is then unchanged. If T' = 0, only the best candidate is kept. Source: llama.cpp,
    ``temp_ext``.
    """

    temperature_B: Array = per_row(TEMPERATURE)
    end_B: Array | None = per_row(TEMPERATURE_END, default=None)
    range_B: Array = per_row(
        Setting("dynatemp_range", 0.0, "half-width of dynamic temperatures; 0: off", 0.0, 1e6)
    )
    exponent_B: Array = per_row(
        Setting(
            "dynatemp_exponent",
            1.0,
            "dynamic temperature: exponent of the relative entropy",
            low=ABOVE_ZERO,
            high=1e6,
            activates=False,
            aliases=("dynatemp_exp",),
        )
    )

    @classmethod
    def columns(cls, rows: Sequence[Any], facts: Any) -> Temperature:
        """The transform with the temperatures of each row at the first and last step."""
        packed = super().columns(rows, facts)
        end_B = np.where(packed.end_B < 0, packed.temperature_B, packed.end_B)
        return dataclasses.replace(packed, end_B=end_B)

    def at_progress(self, progress_B: Array) -> Temperature:
        """The transform with the temperature of a step, `T + (last - T) s / (S - 1)`."""
        if self.end_B is None:
            return self
        moved_B = (self.end_B - self.temperature_B) * progress_B
        return dataclasses.replace(self, temperature_B=self.temperature_B + moved_B)

    def is_active(self) -> Array:
        return (self.temperature_B != 0) & ((self.temperature_B != 1) | (self.range_B != 0))

    def change(self, logits_NV: Logits, is_real_N: Array) -> Logits:
        is_dynamic_N = (self.temperature_B != 0) & (self.range_B != 0)
        divisor_N = jnp.where(is_dynamic_N | ~self.is_active(), 1.0, self.temperature_B)
        num_logits = logits_NV.shape[1]

        def dynamic() -> tuple[Array, Array]:
            """Divisors, and the id of the best candidate of positions that keep only it."""
            count_N, entropy_N = vocab.count_and_entropy(logits_NV)
            relative_N = entropy_N / jnp.log(jnp.maximum(count_N, 2.0))
            power_N = jnp.clip(relative_N, 0.0, 1.0) ** self.exponent_B
            low_N = jnp.maximum(self.temperature_B - self.range_B, 0.0)
            high_N = self.temperature_B + self.range_B
            own_N = jnp.where(count_N > 1, low_N + (high_N - low_N) * power_N, 1.0)
            own_N = jnp.where(is_dynamic_N, own_N, divisor_N)
            is_cold_N = own_N < 1e-6
            best_N = vocab.argmax(logits_NV)
            return jnp.where(is_cold_N, 1.0, own_N), jnp.where(is_cold_N, best_N, num_logits)

        all_N = jnp.full(divisor_N.shape, num_logits, jnp.int32)
        is_any = (is_dynamic_N & is_real_N).any()
        divisor_N, only_N = jax.lax.cond(is_any, dynamic, lambda: (divisor_N, all_N))
        scale_N1, only_N1 = vocab.inverse(divisor_N, logits_NV)[:, None], only_N[:, None]

        def scale(block: Array, ids: Array) -> Array:
            is_kept = (only_N1 == num_logits) | (ids == only_N1)
            return jnp.where(is_kept, vocab.times(block, scale_N1), -jnp.inf)

        return vocab.change(logits_NV, scale)
