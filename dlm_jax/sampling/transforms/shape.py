"""Transforms that rescale or shift logits: bias, temperature, dynamic temperature."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from dlm_jax.sampling import vocab
from dlm_jax.sampling.transforms.protocol import At, Stateless


@functools.partial(jax.tree_util.register_dataclass, data_fields=["ids_BK", "bias_BK"],
                   meta_fields=[])  # fmt: skip
@dataclass(frozen=True)
class LogitBias(Stateless):
    """Adds a bias to chosen ids: `x[id] += bias`; duplicates add, and -inf bans.

    Attributes:
      ids_BK: int32 ids of each row, padded with ids >= V, which are dropped.
      bias_BK: float32 biases.
    """

    ids_BK: Array
    bias_BK: Array
    ignores_ids = False

    def is_active(self) -> Array:
        """True where a row has a bias other than 0."""
        return (self.bias_BK != 0).any(-1)

    def apply(self, prepared: Any, logits_NV: Array, at: At) -> Array:
        """Logits with the row's biases added."""
        rows_N1 = jnp.arange(logits_NV.shape[0])[:, None]
        bias_NK = self.bias_BK[at.row_N]
        # an entry of bias 0 is dropped: adding 0.0 would turn -0.0 into 0.0
        ids_NK = jnp.where(bias_NK != 0, self.ids_BK[at.row_N], logits_NV.shape[1])
        return logits_NV.at[rows_N1, ids_NK].add(bias_NK, mode="drop")


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["temperature_B", "last_B"], meta_fields=[]
)
@dataclass(frozen=True)
class Temperature(Stateless):
    """`x / T`. T = 1 is neutral; T = 0 makes the row greedy and leaves its logits alone.

    Attributes:
      temperature_B: float32 T, of the first step where `last_B` is another.
      last_B: float32 T of the row's last step, approached evenly; None is the same all along.
    """

    temperature_B: Array
    last_B: Array | None = None

    def at_progress(self, progress_B: Array) -> Temperature:
        """The temperature of a step, `T + (last - T) s / (S - 1)`."""
        return replace(self, temperature_B=_between(self.temperature_B, self.last_B, progress_B))

    def is_active(self) -> Array:
        """True where T is neither 0 nor 1."""
        return (self.temperature_B != 0) & (self.temperature_B != 1)

    def is_greedy(self) -> Array:
        """True where T is 0."""
        return self.temperature_B == 0

    def divisor(self) -> Array:
        """What each row's logits are divided by, 1 where they are left alone."""
        return jnp.where(self.is_active(), self.temperature_B, 1.0)

    def apply(self, prepared: Any, logits_NV: Array, at: At) -> Array:
        """Logits divided by the row's temperature."""
        return vocab.divide(logits_NV, self.divisor()[at.row_N])


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["temperature_B", "delta_B", "exponent_B", "last_B"],
    meta_fields=[],
)
@dataclass(frozen=True)
class DynamicTemperature(Stateless):
    """`x / T'`, where T' follows the entropy of the candidates.

    `T' = lo + (hi - lo) * (H / ln n)**e` with `lo = max(0, T - delta)`, `hi = T + delta`, H the
    entropy in nats over the n candidates. A position with one candidate is left alone; T' = 0
    leaves the best candidate only. T = 0 makes the row greedy; delta = 0 is plain temperature.
    Source: `notes/samplers.md`, after llama.cpp.
    """

    temperature_B: Array
    delta_B: Array
    exponent_B: Array
    last_B: Array | None = None

    def at_progress(self, progress_B: Array) -> DynamicTemperature:
        """The transform of a step, whose T goes to `last_B` as that of `Temperature` does."""
        return replace(self, temperature_B=_between(self.temperature_B, self.last_B, progress_B))

    def is_active(self) -> Array:
        """True unless the row is greedy or both T = 1 and delta = 0."""
        return (self.temperature_B != 0) & ((self.temperature_B != 1) | (self.delta_B != 0))

    def is_greedy(self) -> Array:
        """True where T is 0."""
        return self.temperature_B == 0

    def apply(self, prepared: Any, logits_NV: Array, at: At) -> Array:
        """Logits divided by the position's own temperature."""
        count_N, entropy_N = vocab.count_and_entropy(logits_NV)
        temperature_N, delta_N = self.temperature_B[at.row_N], self.delta_B[at.row_N]
        low_N = jnp.maximum(temperature_N - delta_N, 0.0)
        relative_N = entropy_N / jnp.log(jnp.maximum(count_N, 2.0))
        power_N = jnp.clip(relative_N, 0.0, 1.0) ** self.exponent_B[at.row_N]
        divisor_N = low_N + (temperature_N + delta_N - low_N) * power_N
        divisor_N = jnp.where(delta_N == 0, temperature_N, divisor_N)
        is_on_N = self.is_active()[at.row_N] & ((count_N > 1) | (delta_N == 0))
        divisor_N = jnp.where(is_on_N, divisor_N, 1.0)
        best_N = vocab.argmax(logits_NV)
        is_cold_N1 = (divisor_N < 1e-6)[:, None]
        is_best_NV = jnp.arange(logits_NV.shape[1])[None] == best_N[:, None]
        scaled_NV = vocab.divide(logits_NV, jnp.where(divisor_N < 1e-6, 1.0, divisor_N))
        scaled_NV = jnp.where(is_cold_N1 & ~is_best_NV, -jnp.inf, scaled_NV)
        return jnp.where(is_on_N[:, None], scaled_NV, logits_NV)


def _between(first_B: Array, last_B: Array | None, progress_B: Array) -> Array:
    return first_B if last_B is None else first_B + (last_B - first_B) * progress_B
