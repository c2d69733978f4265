"""Types shared by the subpackages: the network as functions, and the status of a row.

Legend of shapes, used as suffixes of names and in docstrings:

=====  ==========================================================
``B``  rows of the batch
``L``  positions of the canvas
``V``  vocabulary
``D``  width of the model
``H``  attention heads (``G`` key/value heads, ``K`` size of one head)
``N``  gathered positions, which may belong to any rows; or a subset of the rows
``W``  positions of a window; each row has its own window
=====  ==========================================================
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

T = TypeVar("T")
Params = Any
"""A plain nested dict of parameter arrays."""


LAYERS = "layers"
"""Logical name of the axis that numbers the layers of a stack."""


@dataclass(frozen=True)
class Axes:
    """The meaning of a parameter, which a layer declares where it creates the parameter.

    Attributes:
      names: logical name of each axis, a key of `dlm_jax.distributed.partitions.AXIS_RULES`,
        ``layers`` or None; or no names, for a parameter that every device has whole.
      is_matrix: whether the parameter is a matrix ``[..., fan_in, fan_out]`` or a stack of
        matrices, to which Muon and weight decay apply.
    """

    names: tuple[str | None, ...] = ()
    is_matrix: bool = False


class Window(NamedTuple):
    """For each row, the run of positions that the trunk computes; all fields are int32 ``[N]``.

    Attributes:
      place_N: first position of the run; the whole run lies on the canvas.
      begin_N: first position whose keys and values come from the window.
      end_N: position after the last position whose keys and values come from the window. All other
          keys and values come from the cache, even inside the window.
    """

    place_N: jax.Array
    begin_N: jax.Array
    end_N: jax.Array


@dataclass(frozen=True)
class CachedTrunk:
    """The trunk for decoding with cached keys and values (`dlm_jax.sampling.kv_cache`).

    The cache of the rows (*kept*) and the update that a call returns (a *piece*) are opaque
    pytrees; the first axis of every leaf is the row axis. If the cache is up to date, hidden
    vectors equal those of `Network.trunk` to float tolerance.

    Attributes:
      block_length: number of positions per block, counted from the start of the row; a position
          attends to its own block and all earlier blocks. A value of 1 means a causal model; with
          0, every position attends to all others.
      init: ``(params, num_rows, num_positions) -> kept``, an empty cache.
      whole: ``(params, tokens_NL, length_N) -> (hidden_NLD, piece)``: the trunk on whole rows.
      window: ``(params, kept, row_N, tokens_NL, length_N, window, size=W) -> (hidden_NWD, piece)``:
        the trunk at the ``W`` positions of a `Window`, for the rows ``row_N`` of `kept`, or for all
        rows in order if ``row_N`` is None. If rows are sharded over devices, so is ``row_N``, and
        each shard indexes the rows of the same shard of `kept`. Positions outside the row, and
        blocks that may not be attended to, are masked. With ``num_seen=n``, cached positions from n
        on are also masked, for all windows.
      store: ``(kept, piece, row_N, place_N) -> kept``, with a piece written to the rows ``row_N``
        (None means all rows in order) from the positions ``place_N`` on. Duplicate rows have
        identical pieces. Each device calls this function for its own rows.
      canvas: ``(params, kept, tokens_BL, length_B, window, signal_BWD, size=W) -> hidden_BWD``: the
          trunk at canvases that begin at ``window.begin_N``, after cached texts, as in
          `Network.behind`. In a model with canvases, `whole` and `window` compute texts, and
          canvases are not cached. None for other models.
      ready: ``(params) -> params`` in the layout that the other functions read, called once before
        the steps of the loop; idempotent. None means no conversion.
    """

    block_length: int
    init: Callable[[Params, int, int], Any]
    whole: Callable[..., tuple[jax.Array, Any]]
    window: Callable[..., tuple[jax.Array, Any]]
    store: Callable[..., Any]
    ready: Callable[[Params], Params] | None = None
    canvas: Callable[..., jax.Array] | None = None


class Inside(NamedTuple):
    """A model's intermediate results between tokens and logits.

    Attributes:
      hidden_BELD: the input of the first block, followed by the output of each of the ``E - 1``
          blocks, before the final norm.
      attention_BEHLL: float32 attention weights of each block and head, from a query position (axis
          3) to the key positions (axis 4). The weights of a query sum to 1 and are 0 at masked
          positions. In this array, ``E`` is smaller by one.
      final_BLD: the output of `Network.trunk`, to float tolerance.
    """

    hidden_BELD: jax.Array
    attention_BEHLL: jax.Array
    final_BLD: jax.Array


@dataclass(frozen=True)
class Network:
    """A language model as pure functions over a plain dict of parameters.

    Training and sampling use a model only through this record; any functions with these signatures
    work. The record is hashable, so it can be a static argument of ``jax.jit``. Create it once and
    reuse it, because a record with different function objects compiles again.

    Attributes:
      init: ``(key) -> params``.
      trunk: ``(params, tokens_BL, length_B, cache) -> (hidden_BLD, cache)``. Positions at or beyond
        ``length_B`` are PAD and masked in attention; the trunk's output at these positions is
        undefined but finite. ``hidden`` is the input of the LM head (after the final norm), aligned
        with the position that it predicts. ``L`` is a multiple of 64 in sampling and can exceed the
      length of training rows. ``cache`` is opaque; pass ``None`` to get ``None``.
      embed: ``(params, ids) -> vectors``, with an axis ``D`` appended to the shape of ``ids``.
      readout: ``(params, hidden_ND) -> logits_NV``, float32.
      vocab_size: ``V``, the number of logits.
      heads: the functions of the other heads by name, without ``_head``. Each file in
        `dlm_jax.heads` documents the functions of its head, which rules and losses read.
      logits_of: ``(params, hidden_ND, ids_NK) -> logits_NK``, float32: some columns of `readout`,
          which saves a second readout for edits. If None, the whole readout is computed.
      cached: the trunk for decoding with a cache; None if caches are not supported.
      beside_clean: ``(params, shown_BL, clean_BL, length_B) -> hidden_BLD``: the trunk of a
        block-causal model for every block of `shown_BL` given the clean tokens of earlier blocks,
        with all blocks in one call, for training and likelihood. An argument ``block_length=n``
        selects another block length. None for other models.
      inside: ``(params, tokens_BL, length_B) -> Inside``, the trunk's intermediate results; None if
          not available.
      behind: ``(params, tokens_BL, length_B, start_B, signal_BLD=None) -> hidden_BLD``: the trunk
          for a text followed by a canvas that starts at ``start_B``. The text is causal; the canvas
        attends to the text and itself. ``signal_BLD`` is the output of `signal` for the previous
        step's logits at each position of the canvas, or None for zeros, as in the first step.
        `behind` is None for a network without canvases; with canvases, `trunk` treats the whole row
        as a canvas.
      signal: ``(params, logits_NV) -> vectors_ND``: the self-conditioning signal, the mean
        embedding under the softmax of the logits. None if the network has no signal.
      canvas_length: number of positions in a canvas; 0 for a network without canvases.
      axes: ``(params) -> tree``, given arrays or shapes: a tree like `params` with the `Axes` of
          each parameter, which sharding, weight decay and Muon read. Parameters under
          the top-level names that the tree omits, or all if None, are judged by rank
          (`dlm_jax.distributed.partitions.axes_of`).
      predicts_first: False for a causal network that predicts each token from the tokens before it
        and nothing else. The trunk's output at the first position of a row is then undefined, and
        the first token is given.
    """

    init: Callable[[jax.Array], Params]
    trunk: Callable[..., tuple[jax.Array, Any]]
    embed: Callable[[Params, jax.Array], jax.Array]
    readout: Callable[[Params, jax.Array], jax.Array]
    vocab_size: int
    heads: Mapping[str, Any] = field(default_factory=dict, hash=False)
    logits_of: Callable[[Params, jax.Array, jax.Array], jax.Array] | None = None
    cached: CachedTrunk | None = None
    beside_clean: Callable[..., jax.Array] | None = None
    inside: Callable[..., Inside] | None = None
    behind: Callable[..., jax.Array] | None = None
    signal: Callable[[Params, jax.Array], jax.Array] | None = None
    canvas_length: int = 0
    axes: Callable[[Params], Params] | None = None
    predicts_first: bool = True

    def __post_init__(self) -> None:
        if (self.behind is None) != (self.canvas_length < 1):
            raise ValueError(
                f"Network.canvas_length={self.canvas_length} is not supported with "
                f"{'no ' if self.behind is None else ''}Network.behind; pass both or none"
            )
        if self.signal is not None and self.behind is None:
            raise ValueError(
                "Network.signal has no effect without Network.behind, which reads it; pass both "
                "or none"
            )

    @property
    def block_length(self) -> int:
        """Number of positions per block in a block-causal model; 0 for other models."""
        found = 0 if self.cached is None else self.cached.block_length
        return found if found > 1 else 0


class Canvas(NamedTuple):
    """The arrays of the rows that are denoised.

    Attributes:
      tokens_BL: int32; MASK at holes, PAD from the row's length on.
      length_B: int32, number of live positions in each row; 0 for an idle slot.
      frozen_BL: True at given tokens, which are never overwritten, and beyond the length.
    """

    tokens_BL: jax.Array
    length_B: jax.Array
    frozen_BL: jax.Array


class Status(IntEnum):
    """The status of a row, including errors, because compiled code cannot raise exceptions.

    ``RUNNING``: steps and holes remain. ``DONE``: no holes are left. ``STEP_LIMIT``: holes remain,
    but no steps. ``CANVAS_FULL``: no holes are left, but edits exceeded the capacity, so edits or
    tokens at the end were dropped. ``NON_FINITE``: the row stopped at logits with NaN or infinity.

    The remaining two are set outside the loop: ``CANCELLED`` after a cancellation, ``FAILED`` after
    an error in a host sampler or in the program.
    """

    RUNNING = 0
    DONE = 1
    STEP_LIMIT = 2
    CANVAS_FULL = 3
    NON_FINITE = 4
    CANCELLED = 5
    FAILED = 6


def live_positions(length_B: jax.Array, num_positions: int) -> jax.Array:
    """True at live positions, ``[B, L]``."""
    return jnp.arange(num_positions)[None, :] < length_B[:, None]


def first_eos(tokens: Any, is_given: Any, eos_ids: Collection[int]) -> Any:
    """Index ``[...]`` of the first EOS that no given token follows, where a text ends; ``L`` if
    there is none.

    Args:
      tokens: int ``[..., L]``, a NumPy or JAX array.
      is_given: True at given tokens, but not beyond the length of a row.
      eos_ids: ids that end a text.
    """
    size, ids = tokens.shape[-1], np.array([*eos_ids], np.int32)
    place = np.arange(size).reshape(*[1] * (tokens.ndim - 1), size)
    after_given = (is_given * (place + 1)).max(-1, keepdims=True, initial=0)
    is_eos = (tokens[..., None] == ids.reshape(*[1] * tokens.ndim, ids.size)).any(-1)
    return size - ((is_eos & (place >= after_given)) * (size - place)).max(-1, initial=0)


def left_of(x: jax.Array, first: int | bool = 0) -> jax.Array:
    """The value to the left of each position, ``[..., L]``; `first` at the first position."""
    return jnp.pad(x[..., :-1], [*[(0, 0)] * (x.ndim - 1), (1, 0)], constant_values=first)


def right_of(x: jax.Array, last: int | bool = 0) -> jax.Array:
    """The value to the right of each position, ``[..., L]``; `last` at the last position."""
    return jnp.pad(x[..., 1:], [*[(0, 0)] * (x.ndim - 1), (0, 1)], constant_values=last)


def returned(
    value: T, by: Any, method: str, axes: str, shape: tuple[int | None, ...], of: Any
) -> T:
    """Returns `value` after checking its shape and dtype.

    Args:
      value: the result of the method.
      by: the rule or network that defines the method, or its name.
      method: name of the method.
      axes: letters of the axes, for the message.
      shape: expected size of each axis; None allows any size.
      of: expected dtype, or ``float`` for any floating dtype.

    Raises:
      ValueError: the shape or dtype differs. The message names the rule and the method.
    """
    made: Any = value
    fits = isinstance(made, jax.Array | np.ndarray) and made.ndim == len(shape)
    fits = fits and all(want in (None, is_) for want, is_ in zip(shape, made.shape, strict=True))
    if not fits or not jnp.issubdtype(made.dtype, jnp.floating if of is float else of):
        kind = "floats" if of is float else jnp.dtype(of).name
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        name = by if isinstance(by, str) else type(by).__name__
        raise ValueError(
            f"{name}.{method} returned {_spelled(value)}; return {kind} [{axes}], here [{sizes}]"
        )
    return value


def _spelled(value: Any) -> str:
    if isinstance(value, jax.Array) or hasattr(value, "dtype"):
        return f"{value.dtype.name} [{', '.join(map(str, value.shape))}]"
    return f"a {type(value).__name__}"
