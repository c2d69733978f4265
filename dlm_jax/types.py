"""Types shared by the subpackages: the network as functions, and the status of a row.

Legend of shapes, used as suffixes of names and in docstrings:

=====  ==========================================================
``B``  rows of the batch
``L``  positions of the canvas
``V``  vocabulary
``T``  texts of a packed row, which stand one after another
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

    ``names`` are the logical names of the axes, keys of the table
    `dlm_jax.distributed.partitions.AXIS_RULES`, ``layers`` or None; none for a parameter that every
    device has whole. Muon and weight decay apply if ``is_matrix``: to ``[..., fan_in, fan_out]``.
    """

    names: tuple[str | None, ...] = ()
    is_matrix: bool = False


class Window(NamedTuple):
    """For each row, the run of positions that the trunk computes; all fields are int32 ``[N]``.

    Keys and values of the positions from ``begin_N`` to before ``end_N`` come from the window, and
    all others from the cache, even inside the window.
    """

    place_N: jax.Array  # first position of the run; the whole run lies on the canvas
    begin_N: jax.Array
    end_N: jax.Array


@dataclass(frozen=True)
class CachedTrunk:
    """The trunk for decoding with cached keys and values (`dlm_jax.sampling.kv_cache`).

    The cache and the update that a call returns are opaque pytrees, whose leaves have the axis of
    rows first. Given a cache that is up to date, hidden vectors equal those of `Network.trunk` to
    float tolerance.

    Attributes:
      block_length: number of positions per block, counted from the start of the row; a position
        attends to its own block and all earlier blocks. 1 is a causal model; with 0, every position
        attends to all others.
      init: ``(params, num_rows, num_positions) -> cache``, an empty cache.
      whole: ``(params, tokens_NL, length_N) -> (hidden_NLD, update)``: the trunk on whole rows.
      window: ``(params, cache, row_N, tokens_NL, length_N, window, size=W) -> (hidden_NWD,
        update)``: the trunk at the ``W`` positions of a `Window`, for the rows ``row_N`` of the
        cache, or for all rows in order if ``row_N`` is None. If rows are sharded over devices, each
        shard of ``row_N`` indexes the rows of the same shard of the cache. With ``num_seen=n``,
        cached positions from n on are masked.
      store: ``(cache, update, row_N, place_N) -> cache``, with an update written to the rows
        ``row_N`` (None: all rows in order) from the positions ``place_N`` on. Duplicate rows have
        identical updates. Each device calls this function for its own rows.
      canvas: ``(params, cache, tokens_BL, length_B, window, signal_BWD, size=W) -> hidden_BWD``:
        the trunk at canvases that begin at ``window.begin_N``, after cached texts, as in
        `Network.behind`, whose texts `whole` and `window` compute. None for other models.
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

    Any functions with these signatures work. The record is a static argument of ``jax.jit``: create
    it once, because a record with other function objects compiles again.

    Attributes:
      init: ``(key) -> params``.
      trunk: ``(params, tokens_BL, length_B, cache) -> (hidden_BLD, cache)``. Positions at or beyond
        ``length_B`` are PAD and masked in attention; the trunk's output at these positions is
        undefined but finite. With lengths ``[B, T]``, each text of a row is computed as if it stood
        alone (`packs`). ``hidden`` is the input of the LM head (after the final norm), aligned
        with the position that it predicts. ``L`` is a multiple of 64 in sampling and can exceed the
        length of training rows. ``cache`` is opaque; pass ``None`` to get ``None``.
      embed: ``(params, ids) -> vectors``, with an axis ``D`` appended to the shape of ``ids``.
      readout: ``(params, hidden_ND) -> logits_NV``, float32.
      vocab_size: ``V``, the number of logits.
      heads: the functions of the other heads by name, without ``_head``. Each file in
        `dlm_jax.heads` documents the functions of its head, which rules and losses read.
      logits_of: ``(params, hidden_ND, ids_NK) -> logits_NK``, float32: some columns of `readout`,
        which saves edits a second readout; or None.
      cached: the trunk for decoding with a cache; None if caches are not supported.
      beside_clean: ``(params, shown_BL, clean_BL, length_B, block_length=n) -> hidden_BLD``: the
        trunk of a block-causal model for every block of `shown_BL` given the clean tokens of
        earlier blocks, by default of the model's length. None for other models.
      inside: ``(params, tokens_BL, length_B) -> Inside``, the trunk's intermediate results; None if
          not available.
      behind: ``(params, tokens_BL, length_B, start_B, signal_BLD=None) -> hidden_BLD``: the trunk
        for a causal text followed by a canvas that starts at ``start_B`` and attends to the text
        and itself. ``signal_BLD`` is the output of `signal` for the previous step's logits at each
        position of the canvas, or None for zeros, as in the first step. None for a network without
        canvases; with canvases, `trunk` treats the whole row as a canvas.
      signal: ``(params, logits_NV) -> vectors_ND``: the self-conditioning signal, the mean
        embedding under the softmax of the logits. None if the network has no signal.
      canvas_length: number of positions in a canvas; 0 for a network without canvases.
      axes: ``(params) -> tree``, given arrays or shapes: a tree like `params` with the `Axes` of
        each parameter, which sharding, weight decay and Muon read. Parameters under the top-level
        names that the tree omits, or all if None, are judged by rank
        (`dlm_jax.distributed.partitions.axes_of`).
      predicts_first: False for a causal network that predicts each token from the tokens before it
        and nothing else, so that the first token of a row must be given.
      packs: whether `trunk` takes the lengths of the texts of packed rows, ``[B, T]``.
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
    packs: bool = False

    @property
    def block_length(self) -> int:
        """Number of positions per block in a block-causal model; 0 for other models."""
        length = 0 if self.cached is None else self.cached.block_length
        return length if length > 1 else 0


class Canvas(NamedTuple):
    """The arrays of the rows that are denoised."""

    tokens_BL: jax.Array  # int32; MASK at holes, PAD from the row's length on
    length_B: jax.Array  # int32, number of live positions in each row; 0 for an idle slot
    frozen_BL: jax.Array  # given tokens, which are never overwritten, and beyond the length


class Status(IntEnum):
    """The status of a row, including errors, because compiled code cannot raise exceptions."""

    RUNNING = 0
    DONE = 1  # no holes are left
    STEP_LIMIT = 2  # holes remain, but no steps
    CANVAS_FULL = 3  # done, but edits or tokens at the end were dropped for lack of capacity
    NON_FINITE = 4  # stopped at logits with NaN or infinity
    CANCELLED = 5  # this and the next are set outside the loop
    FAILED = 6  # an error in a host sampler or in the program


def live_positions(length: jax.Array, num_positions: int) -> jax.Array:
    """True at live positions, ``[B, L]``, for lengths of rows, ``[B]``, or of texts, ``[B, T]``."""
    length_B = length if length.ndim == 1 else length.sum(axis=1)
    return jnp.arange(num_positions)[None, :] < length_B[:, None]


def text_starts(length_BT: jax.Array, num_positions: int) -> jax.Array:
    """The index at which the text of each position begins, ``[B, L]``; behind the last text, the
    index where it ends.
    """
    end_BT1 = jnp.cumsum(length_BT, axis=1)[:, :, None]
    return jnp.max(jnp.where(jnp.arange(num_positions)[None, None] >= end_BT1, end_BT1, 0), axis=1)


def unpacked(x_BL: jax.Array, length_BT: jax.Array) -> jax.Array:
    """Each text of packed rows in a row of its own, followed by zeros, ``[B * T, L]``."""
    start_BT, num_positions = jnp.cumsum(length_BT, axis=1) - length_BT, x_BL.shape[1]
    place_11L = jnp.arange(num_positions)[None, None]
    is_live_BTL = place_11L < length_BT[:, :, None]
    index_BTL = jnp.where(is_live_BTL, start_BT[:, :, None] + place_11L, num_positions)
    return _at(x_BL, index_BTL).reshape(-1, num_positions)


def packed(x_PL: jax.Array, length_BT: jax.Array) -> jax.Array:
    """The inverse of `unpacked`: ``[B, L, ...]`` for ``[B * T, L, ...]``, with zeros at the end."""
    num_positions, end_BT1 = x_PL.shape[1], jnp.cumsum(length_BT, axis=1)[:, :, None]
    place_1L = jnp.arange(num_positions)[None]
    # Behind the last text, the number of the text and the index are outside.
    text_BL = jnp.sum(place_1L[None] >= end_BT1, axis=1)
    index_BL = text_BL * num_positions + place_1L - text_starts(length_BT, num_positions)
    return _at(x_PL.reshape(len(length_BT), -1, *x_PL.shape[2:]), index_BL)


def _at(x_BL: jax.Array, index: jax.Array) -> jax.Array:
    """The values of each row at its indices, 0 outside."""
    return jax.vmap(lambda x, at: x.at[at].get(mode="fill", fill_value=0))(x_BL, index)


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
    """Returns the result of a method of a rule or network, or of a named one, after checking its
    shape (None allows any size) and its dtype (``float`` allows any floating dtype).

    Raises:
      ValueError: the shape or dtype differs. The message names the rule, the method and the axes.
    """
    array: Any = value
    is_array = hasattr(array, "dtype")
    fits = is_array and len(array.shape) == len(shape)
    fits = fits and all(size in (None, n) for size, n in zip(shape, array.shape, strict=True))
    if not fits or not jnp.issubdtype(array.dtype, jnp.floating if of is float else of):
        name = by if isinstance(by, str) else type(by).__name__
        found = f"{array.dtype} {list(array.shape)}" if is_array else f"a {type(value).__name__}"
        kind = "floats" if of is float else jnp.dtype(of).name
        here = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name}.{method} returned {found}; return {kind} [{axes}], here [{here}]")
    return value
