"""Changes of the logits of some ids: biases, and penalties on tokens that already occur in the row,
by count and by repeated runs (DRY).

Both penalties are recomputed from the context of each step, so remasked tokens are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dlm_jax.sampling.transforms.transform import At, Context, LogitTransform
from dlm_jax.settings import INT_LIMIT, Setting, SettingError, fact, per_row, require, rule

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


def _ids(value: Any) -> tuple[int, ...]:
    is_list = hasattr(value, "__iter__") and not isinstance(value, str)
    require(is_list, "dry_breakers", value, "is not a list of ids", "use [3, 4]")
    return tuple(check_id("dry_breakers", token) for token in value)


DRY_BREAKERS = Setting(
    "dry_breakers",
    (),
    "ids that a repetition cannot contain",
    parse=_ids,
    activates=False,
    hint=tuple[int, ...],
)


@rule
class Penalties(LogitTransform):
    """Repetition, frequency and presence penalties over the newest `last_n` visible tokens.

    The logit x of a token among them becomes `x > 0 ? x/r : x*r`, and then `x -= count*f + c`. A
    `last_n` of -1, the default, means the whole row, prompt and generated tokens, as in
    transformers; 0 disables the penalties. r = 1, f = 0 and c = 0 are neutral. The newest tokens
    are those committed last.
    """

    repetition_B: Array = per_row(
        Setting(
            "repetition_penalty",
            1.0,
            "divisor (factor, if negative) of the logits of seen tokens; 1 disables it",
            low=1e-6,
            high=1e6,
            aliases=("repeat_penalty",),
        )
    )
    frequency_B: Array = per_row(
        Setting("frequency_penalty", 0.0, "number subtracted from a token's logit per occurrence")
    )
    presence_B: Array = per_row(
        Setting("presence_penalty", 0.0, "number subtracted from the logit of every seen token")
    )
    last_n_B: Array = per_row(
        Setting(
            "penalty_last_n",
            -1,
            "number of newest tokens that penalties count; -1: the whole row, 0: none",
            low=-1,
            activates=False,
            aliases=("repeat_last_n",),
        )
    )
    vocab_size: int = fact("vocab_size")

    def is_active(self) -> Array:
        is_set_B = (self.repetition_B != 1) | (self.frequency_B != 0) | (self.presence_B != 0)
        return is_set_B & (self.last_n_B != 0)

    def init(self, context: Context) -> Array:
        """Number of occurrences of each id among the newest `last_n_B` tokens, float32 `[B, V]`."""
        B = context.tokens_BL.shape[0]

        def nothing():
            return jnp.zeros((B, self.vocab_size), jnp.float32)

        def count():
            is_counted_BL = _is_newest(context, self.last_n_B) & self.is_active()[:, None]
            rows_B1 = jnp.arange(B)[:, None]
            seen_BL = is_counted_BL.astype(jnp.float32)
            return nothing().at[rows_B1, context.tokens_BL].add(seen_BL, mode="drop")

        # The empty table is created inside the branch. As an operand, it would be written and then
        # copied.
        return jax.lax.cond(self.is_active().any(), count, nothing)

    def apply(self, state: Array, logits_NV: Array, at: At) -> Array:
        count_NV = state[at.row_N]
        repetition_N1 = self.repetition_B[at.row_N][:, None]
        scaled_NV = jnp.where(logits_NV > 0, logits_NV / repetition_N1, logits_NV * repetition_N1)
        shift_NV = count_NV * self.frequency_B[at.row_N][:, None]
        shift_NV += self.presence_B[at.row_N][:, None]
        largest = float(jnp.finfo(jnp.float32).max)
        penalised_NV = jnp.clip(scaled_NV - shift_NV, -largest, largest)
        # -inf stays -inf for positive and negative penalties
        is_touched_NV = (count_NV > 0) & (logits_NV > -jnp.inf)
        return jnp.where(is_touched_NV, penalised_NV, logits_NV)


@rule
class Dry(LogitTransform):
    """Penalises tokens that would extend a repetition ("don't repeat yourself").

    DRY searches the run of visible tokens that ends directly before the position. For each
    candidate t, let L be the length of the longest suffix of the run that contains no breaker and
    also occurs earlier in the run, followed by t. If `L >= allowed_length`, then `x[t] -=
    multiplier * base**(L - allowed_length)`. Breakers are not penalised. A multiplier of 0 disables
    the penalty. `breakers_BK` is padded with -1.
    """

    multiplier_B: Array = per_row(
        Setting("dry_multiplier", 0.0, "weight of the penalty on repetitions", low=0.0)
    )
    base_B: Array = per_row(
        Setting("dry_base", 1.75, "DRY: growth per repeated token", 1.0, 1e6, activates=False)
    )
    allowed_length_B: Array = per_row(
        Setting("dry_allowed_length", 2, "DRY: longest free repetition", 1, activates=False)
    )
    breakers_BK: Array = per_row(DRY_BREAKERS, column=lambda rows: padded(rows, -1, np.int32))

    def init(self, context: Context) -> tuple[Array, ...]:
        """The tokens of each row, True where a token is visible, and True at breakers."""
        is_breaker_BL = (context.tokens_BL[:, :, None] == self.breakers_BK[:, None, :]).any(-1)
        return context.tokens_BL, context.is_visible_BL, is_breaker_BL

    def apply(self, state: tuple[Array, ...], logits_NV: Array, at: At) -> Array:
        tokens_NL, is_visible_NL, is_breaker_NL = (x_BL[at.row_N] for x_BL in state)
        N, L = tokens_NL.shape
        place_1L = jnp.arange(L, dtype=jnp.int32)[None]
        index_N1 = at.index_N[:, None].astype(jnp.int32)
        is_active_N1 = self.is_active()[at.row_N][:, None]
        # The run of visible tokens that ends directly before the position.
        is_gap_NL = ~is_visible_NL & (place_1L < index_N1)
        start_N1 = jnp.where(is_gap_NL, place_1L + 1, 0).max(-1, keepdims=True)
        is_run_NL = (place_1L >= start_N1) & (place_1L < index_N1)
        is_run_NL &= is_active_N1 & at.is_real_N[:, None]

        def grow(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            depth, is_alive_NL, length_NL = carry
            # The token at this depth of the suffix is compared with the token at the same distance
            # before each position.
            suffix_N1 = index_N1 - 1 - depth
            clipped_N1 = jnp.clip(suffix_N1, 0, L - 1)
            token_N1 = jnp.take_along_axis(tokens_NL, clipped_N1, axis=1)
            stops_N1 = jnp.take_along_axis(is_breaker_NL, clipped_N1, axis=1)
            earlier_NL = jnp.roll(tokens_NL, depth + 1, axis=1)
            is_alive_NL &= (place_1L - 1 - depth >= start_N1) & (suffix_N1 >= start_N1)
            is_alive_NL &= (earlier_NL == token_N1) & ~stops_N1
            return depth + 1, is_alive_NL, length_NL + is_alive_NL

        # The length of the match that ends before each position of the run; 0 outside the run and
        # at breakers.
        start = (jnp.int32(0), is_run_NL & ~is_breaker_NL, jnp.zeros((N, L), jnp.int32))
        _, _, length_NL = jax.lax.while_loop(lambda c: c[1].any(), grow, start)

        allowed_N1 = self.allowed_length_B[at.row_N][:, None]
        exponent_NL = (length_NL - allowed_N1).astype(jnp.float32)
        log_base_N1 = jnp.log(self.base_B[at.row_N])[:, None]
        # clamped to the range of float32, as in llama.cpp
        power_NL = jnp.exp(jnp.minimum(exponent_NL * log_base_N1, 88.0))
        penalty_NL = jnp.minimum(self.multiplier_B[at.row_N][:, None] * power_NL, 3.0e38)
        is_hit_NL = (length_NL >= allowed_N1) & is_active_N1
        rows_N1 = jnp.arange(N)[:, None]
        ids_NL = jnp.where(is_hit_NL, tokens_NL, logits_NV.shape[1])
        x_NL = logits_NV.at[rows_N1, ids_NL].get(mode="fill", fill_value=-jnp.inf)
        smallest = float(jnp.finfo(jnp.float32).min)
        lowered_NL = jnp.where(x_NL > -jnp.inf, jnp.maximum(x_NL - penalty_NL, smallest), -jnp.inf)
        # The longest match of a token has the largest penalty, so the minimum logit is taken.
        return logits_NV.at[rows_N1, ids_NL].min(lowered_NL, mode="drop")


def _is_newest(context: Context, last_n_B: Array) -> Array:
    """True `[B, L]` at the newest `last_n_B` visible tokens, or at all visible tokens if it is
    negative.
    """
    B, L = context.tokens_BL.shape
    place_BL = jnp.broadcast_to(jnp.arange(L, dtype=jnp.int32), (B, L))
    order_BL = jnp.where(context.is_visible_BL, context.order_BL.astype(jnp.int32), -(2**31))
    _, sorted_BL = jax.lax.sort((order_BL, place_BL), dimension=1, num_keys=2)
    rows_B1 = jnp.arange(B)[:, None]
    age_BL = jnp.zeros((B, L), jnp.int32).at[rows_B1, sorted_BL].set(L - 1 - place_BL)
    return context.is_visible_BL & ((last_n_B < 0)[:, None] | (age_BL < last_n_B[:, None]))
