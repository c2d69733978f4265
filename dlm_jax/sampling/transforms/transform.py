"""Logit transforms and their context."""

from __future__ import annotations

import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from dlm_jax.settings import UNSET, Rule, Setting, SettingError, per_row, rule
from dlm_jax.types import returned


class At(NamedTuple):
    """The N positions of a chunk of logits.

    Attributes:
      row_N: int32, row of each position, in [0, B).
      index_N: int32, index of each position on the canvas, in [0, L).
      key_N: typed random key of each position.
      is_real_N: False for the padding of a chunk, which does not activate transforms.
    """

    row_N: Array
    index_N: Array
    key_N: Array
    is_real_N: Array


class Context(NamedTuple):
    """The visible canvas at the start of a step.

    Attributes:
      tokens_BL: int32 canvas.
      order_BL: int32, the step that committed each token; -1 for given tokens. Ties are ordered by
          position.
      is_visible_BL: True where a token is visible: live, not a hole, and not written by an edit or
        re-noise.
      length_B: int32, number of live positions in each row.
    """

    tokens_BL: Array
    order_BL: Array
    is_visible_BL: Array
    length_B: Array


class LogitTransform(Rule, ABC):
    """A function of the logits of N positions, with parameters in `[B]` leaves of a pytree.

    A disabled row's logits are returned bitwise unchanged. In enabled rows, `-inf` stays `-inf`,
    and at least one candidate per position remains. Inputs are float32 without NaN or +inf.

    Only `apply` is required. A transform that defines `update` has a memory, whose state before the
    first step is that of `init`. Without `update`, `init` runs before every step, and its state,
    made from the visible canvas, lasts for this step.
    """

    def init(self, context: Context) -> Any:
        """State with an entry per row, such as a table of counts; by default `()`."""
        return ()

    @abstractmethod
    def apply(self, state: Any, logits_NV: Array, at: At) -> Array:
        """The logits `[N, V]` after this transform; called once per chunk of a step."""

    def update(self, state: Any, is_committed_BL: Array, proposal: Any) -> Any:
        """State after the commits of a step. `proposal.final_logprob_BL` are the log-probabilities
        of the tokens after the chain; they are computed for transforms that define `update`.
        """
        return state


def has_memory(transform: Any) -> bool:
    """True if a transform, or its class, reads the log-probabilities of committed tokens."""
    cls = transform if isinstance(transform, type) else type(transform)
    return cls.update is not LogitTransform.update


def refuse_memory(row: Any, why: str) -> None:
    """Raises SettingError for a transform with a memory that a row uses."""
    for used in row.table.chained(row):
        if has_memory(used) and used.is_used(row):
            name = next((s.name for s in used.settings() if s.activates), used.name)
            remedy = f"leave {name} at its default"
            raise SettingError(name, getattr(row, name, UNSET), why, remedy)


_NUMBERS = itertools.count(1)


@functools.lru_cache(maxsize=64)
def _function_class(function: Callable[..., Any]) -> type[LogitTransform]:
    own = getattr(function, "__name__", "")
    # Not its own name, which may be that of a setting. A lambda and a functools.partial have none.
    name = f"function_{own if own.isidentifier() else next(_NUMBERS)}"

    class Function(LogitTransform):
        is_on_B: Array = per_row(Setting(name, False, "a function of the logits"))

        def apply(self, state: Any, logits_NV: Array, at: At) -> Array:
            new_NV = returned(
                function(logits_NV), own or name, "apply", "N, V", logits_NV.shape, jnp.float32
            )
            is_changed_NV = self.is_on_B[at.row_N][:, None] & (logits_NV > -jnp.inf)
            return jnp.where(is_changed_NV, new_NV, logits_NV)

    Function.name = name
    return rule(Function)


def function_transform(function: Callable[..., Any]) -> LogitTransform:
    """A transform for all rows that applies a function of the logits ``[N, V]``. Banned ids keep
    the logit `-inf`.
    """
    return _function_class(function)(True)  # type: ignore[call-arg]


class Pointwise(LogitTransform):
    """A transform that reads ids only to break ties, and only the logits of its position.

    It can therefore run on the few candidates that a top-k leaves. If it defines `change` in place
    of `apply`, it can also run in a kernel (`dlm_jax.sampling.transforms.resident`).
    """

    def apply(self, state: Any, logits_NV: Array, at: At) -> Array:
        return self.gather(at).change(logits_NV, at.is_real_N)

    def gather(self, at: At) -> Any:
        """The transform with the parameters of each position in place of those of each row."""

        def of_positions(x_B: Any) -> Array:
            return x_B[at.row_N] if jnp.ndim(x_B) else jnp.full(at.row_N.shape, x_B)

        return jax.tree.map(of_positions, self)

    def change(self, logits_NV: Any, is_real_N: Array) -> Any:
        """The logits after the result of `gather`. Only functions of `dlm_jax.sampling.vocab` get
        the logits, which may be `Resident` in a kernel.
        """
        raise NotImplementedError

    @classmethod
    def yields(cls, row: Any) -> bool:
        """True if another setting of the row replaces this transform and makes it neutral."""
        return False

    @classmethod
    def columns(cls, rows: Sequence[Any], facts: Any) -> Any:
        """The transform with the settings of each row; neutral in rows where it `yields`."""
        off = SimpleNamespace(**{setting.name: setting.default for setting in cls.settings()})
        return super().columns([off if cls.yields(row) else row for row in rows], facts)


def is_greedy(row: Any) -> bool:
    """True if a row with these settings takes the argmax at every step."""
    return row.temperature == 0 and row.temperature_end in (0, -1)


def is_steered(row: Any) -> bool:
    """True if Mirostat replaces the truncations in a row with these settings."""
    return row.mirostat > 0 and not is_greedy(row)
