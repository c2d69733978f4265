"""What a logit transform is, and what it may know of the positions it works on."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

from jax import Array


class At(NamedTuple):
    """Where the N positions of a chunk of logits stand.

    Attributes:
      row_N: int32 row of each position, in [0, B).
      index_N: int32 place in the canvas, in [0, L).
      key_N: typed key of each position, for its own draw.
      is_real_N: False for the padding of a chunk: it keeps no transform running.
    """

    row_N: Array
    index_N: Array
    key_N: Array
    is_real_N: Array


class Context(NamedTuple):
    """What can be seen of the canvas when a step begins.

    Attributes:
      tokens_BL: int32 canvas.
      order_BL: int32, the step that committed each token; given tokens come first (-1), ties go by
        position.
      is_visible_BL: True where a token can be seen: live, no hole, and not put there by an edit or
        by re-noise, which is no more than a place to write.
      length_B: int32 live positions of each row.
    """

    tokens_BL: Array
    order_BL: Array
    is_visible_BL: Array
    length_B: Array


@runtime_checkable
class LogitTransform(Protocol):
    """A function of the logits of N positions, whose parameters are `[B]` leaves of a pytree.

    A disabled row gets its logits back bit for bit, `-inf` stays `-inf`, and at least one
    candidate of each position survives. Logits arrive as float32 without NaN or +inf.
    """

    def init(self, num_rows: int) -> Any:
        """State before the first step; `()` when there is none."""
        ...

    def at_progress(self, progress_B: Array) -> Any:
        """The transform of a step; `progress_B` is the share of a row's steps taken, in [0, 1]."""
        ...

    def prepare(self, state: Any, context: Context) -> Any:
        """What the step needs once per row, such as a table of counts."""
        ...

    def apply(self, prepared: Any, logits_NV: Array, at: At) -> Array:
        """The logits `[N, V]` after this transform; called once per chunk of a step."""
        ...

    def update(self, state: Any, is_committed_BL: Array, proposal: Any) -> Any:
        """State after a step's commit; `proposal.final_logprob_BL` says how likely each was."""
        ...

    def is_active(self) -> Array:
        """True `[B]` for the rows that ask for this transform."""
        ...


class Stateless:
    """The parts of `LogitTransform` that a transform without state or context leaves empty."""

    reads_final_logprob = False
    """Whether its `update` reads `proposal.final_logprob_BL`."""

    ignores_ids = True
    """Whether it treats equal logits alike but for ties, so that it may run on candidates."""

    def init(self, num_rows: int) -> Any:
        """No state."""
        return ()

    def at_progress(self, progress_B: Array) -> Any:
        """The same at every step."""
        return self

    def prepare(self, state: Any, context: Context) -> Any:
        """Nothing to prepare."""
        return ()

    def update(self, state: Any, is_committed_BL: Array, proposal: Any) -> Any:
        """The state, unchanged."""
        return state
