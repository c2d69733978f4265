"""Logit bias: adds a number to the logits of chosen ids; -inf bans them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from dlm_jax.sampling.transforms.transform import At, LogitTransform
from dlm_jax.settings import INT_LIMIT, Setting, SettingError, per_row, rule

_SMALLEST_BUCKET = 8


def padded(rows: Sequence[Sequence[Any]], fill: float, dtype: Any) -> np.ndarray:
    """Stacks rows and pads them to a power of two, which limits the number of compiled widths."""
    longest = max(_SMALLEST_BUCKET, max(map(len, rows)))
    table = np.full((len(rows), 1 << (longest - 1).bit_length()), fill, dtype)
    for row, values in enumerate(rows):
        table[row, : len(values)] = values
    return table


def check_id(name: str, value: Any) -> int:
    """The id as an integer; raises SettingError unless it is valid."""
    is_integer = not isinstance(value, bool) and hasattr(value, "__index__")
    if not is_integer or not 0 <= int(value) <= INT_LIMIT:
        raise SettingError(name, value, "is not a non-negative 32-bit integer", "use one")
    return int(value)


def _pairs(bias: Any) -> tuple[tuple[int, float], ...]:
    """The pairs in a mapping or in a sequence of pairs. Keys of JSON objects are strings."""
    try:
        items = bias.items() if isinstance(bias, Mapping) else bias
        pairs = [(token, float(value)) for token, value in items]
    except (TypeError, ValueError, OverflowError):
        why = "is not a mapping from ids to numbers"
        raise SettingError("logit_bias", bias, why, "use {12: -5.0}") from None
    checked = []
    for token, value in pairs:
        is_text = isinstance(token, str) and token.isdecimal()
        checked.append((check_id("logit_bias", int(token) if is_text else token), value))
        if not (value == -math.inf or -1e9 <= value <= 1e9):
            why = f"of id {token} is neither -inf nor within 1e9"
            raise SettingError("logit_bias", value, why, "use -inf to ban")
    return tuple(checked)


LOGIT_BIAS = Setting(
    "logit_bias",
    (),
    "numbers added to the logits of ids, such as 12:-5,30:2; -inf bans an id",
    parse=_pairs,
    hint=Mapping[int, float] | tuple[tuple[int, float], ...],
)


@rule
class LogitBias(LogitTransform):
    """Adds a bias to chosen ids: `x[id] += bias`.

    The biases of duplicate ids are summed, and -inf bans an id.

    Attributes:
      ids_BK: int32 ids of each row, padded with ids >= V, which are dropped.
      bias_BK: float32 biases.
    """

    ids_BK: Array = per_row(LOGIT_BIAS)
    bias_BK: Array = per_row(LOGIT_BIAS)

    @classmethod
    def is_used(cls, row: Any) -> bool:
        return any(bias != -math.inf for _, bias in row.logit_bias)

    @classmethod
    def columns(cls, rows: Sequence[Any], facts: Any) -> LogitBias:
        """The transform with the finite biases of each row."""
        finite = [[pair for pair in row.logit_bias if pair[1] != -math.inf] for row in rows]
        return cls.of_pairs(finite, facts.vocab_size)

    def as_settings(self) -> dict[str, Any]:
        """The biases as a setting, from a mapping or from arrays of one row."""
        if isinstance(self.ids_BK, Mapping):
            return {"logit_bias": self.ids_BK}
        ids, values = (np.asarray(x).reshape(-1).tolist() for x in (self.ids_BK, self.bias_BK))
        return {"logit_bias": tuple(zip(ids, values, strict=True))}

    @classmethod
    def of_pairs(cls, pairs: Sequence[Sequence[tuple[int, float]]], vocab_size: int) -> LogitBias:
        """The transform with the given (id, bias) pairs of each row."""
        ids = [[token for token, _ in row] for row in pairs]
        values = [[bias for _, bias in row] for row in pairs]
        columns: Any = padded(ids, vocab_size, np.int32), padded(values, 0.0, np.float32)
        return cls(*columns)

    def is_active(self) -> Array:
        return (self.bias_BK != 0).any(-1)

    def apply(self, state: Any, logits_NV: Array, at: At) -> Array:
        rows_N1 = jnp.arange(logits_NV.shape[0])[:, None]
        bias_NK = self.bias_BK[at.row_N]
        # entries with bias 0 are dropped, because adding 0.0 would turn -0.0 into 0.0
        ids_NK = jnp.where(bias_NK != 0, self.ids_BK[at.row_N], logits_NV.shape[1])
        return logits_NV.at[rows_N1, ids_NK].add(bias_NK, mode="drop")
