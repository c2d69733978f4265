"""Types shared by the subpackages: the network as functions, and how a row ended.

Shape legend, used as suffixes of names and in docstrings everywhere:

=====  ==========================================================
``B``  rows of the batch
``L``  positions of the canvas
``V``  vocabulary
``D``  width of the model
``H``  attention heads (``G`` key/value heads, ``K`` size of one head)
``N``  gathered positions, which may belong to any rows; or some of the rows
``W``  positions of a window, which is placed in each row
=====  ==========================================================
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Params = Any
"""A plain nested dict of parameter arrays."""


class Window(NamedTuple):
    """A run of positions that the trunk computes in each row, int32 ``[N]`` each.

    Attributes:
      place_N: its first position; it lies on the canvas as a whole.
      begin_N: the first position whose keys and values are those of the window.
      end_N: the end of these positions. All other keys and values are the cached ones, even inside
        the window.
    """

    place_N: jax.Array
    begin_N: jax.Array
    end_N: jax.Array


@dataclass(frozen=True)
class CachedTrunk:
    """The trunk for decoding with cached keys and values (`dlm_jax.sampling.cache`).

    The cache of the rows (*kept*) and the update from a call (a *piece*) are opaque pytrees; the
    first axis of every leaf is that of the rows. Hidden vectors are those that `Network.trunk`
    returns, to float tolerance, if the cache is up to date.

    Attributes:
      block_length: positions of a block, from the start of the row; a position sees its block and
        all earlier ones. 1 is a causal model. 0: every position sees all others.
      init: ``(params, num_rows, num_positions) -> kept``, of nothing.
      whole: ``(params, tokens_NL, length_N) -> (hidden_NLD, piece)``: the trunk of whole rows.
      window: ``(params, kept, row_N, tokens_NL, length_N, window, size=W) -> (hidden_NWD, piece)``:
        the trunk at the ``W`` positions of a `Window` of the rows ``row_N`` of `kept`, or of all of
        them in order with None. Where the rows are split over devices, so is ``row_N``, and each
        part of it numbers rows of that part of `kept`. A position outside the row, or of a block
        that is not seen, is invisible. With ``num_seen=n``, none of the kept positions from n on is
        visible either, wherever the windows are.
      store: ``(kept, piece, row_N, place_N) -> kept`` with a piece put at its rows (None: all in
        order) and first positions. Duplicate rows have equal pieces. Each device calls it for its
        own rows.
      beside_clean: ``(params, shown_BL, clean_BL, length_B) -> hidden_BLD``: the output for every
        block of `shown_BL` after the clean tokens of earlier blocks, all blocks in one call, for
        training and likelihood; in other blocks with ``block_length=n``. None where
        ``block_length`` is below 2.
      ready: ``(params) -> params`` in the layout of the other functions, called once before the
        steps of the loop; idempotent. None: no conversion.
    """

    block_length: int
    init: Callable[[Params, int, int], Any]
    whole: Callable[..., tuple[jax.Array, Any]]
    window: Callable[..., tuple[jax.Array, Any]]
    store: Callable[..., Any]
    beside_clean: Callable[..., jax.Array] | None = None
    ready: Callable[[Params], Params] | None = None


class Inside(NamedTuple):
    """What a model computes on the way from tokens to logits.

    Attributes:
      hidden_BELD: what enters the first block, and what leaves each of the ``E - 1`` blocks, before
        the final norm.
      attention_BEHLL: float32 weights of each block, for each head ``H`` from a position (axis 3)
        to those it sees (axis 4): they add up to 1, and are 0 where it sees nothing. ``E`` is one
        less here.
      final_BLD: what `Network.trunk` returns, to float tolerance.
    """

    hidden_BELD: jax.Array
    attention_BEHLL: jax.Array
    final_BLD: jax.Array


@dataclass(frozen=True)
class Network:
    """A language model as pure functions over a plain dict of parameters.

    Training and sampling use a model through this record alone; any functions with these
    signatures work. It is hashable, so it can be a static argument of ``jax.jit``: build it
    once and keep it, because two records of different function objects compile twice.

    Attributes:
      init: ``(key) -> params``.
      trunk: ``(params, tokens_BL, length_B, cache) -> (hidden_BLD, cache)``. Positions at or beyond
        ``length_B`` are PAD and invisible to attention; what the trunk returns there is undefined
        but finite. ``hidden`` is the input of the LM head (after the final norm), aligned with the
        position it predicts. ``cache`` is opaque; pass ``None`` and expect ``None``.
      embed: ``(params, ids) -> vectors``, one ``D`` vector appended to the shape of ``ids``.
      readout: ``(params, hidden_ND) -> logits_NV``, float32.
      vocab_size: ``V``, the number of logits.
      sampler_readout: ``(params, left_NCD, hidden_ND, right_NCD) -> logits_NV``, float32: the
        sampler head. ``left`` and ``right`` are the embeddings of the ``C`` positions on that side,
        nearest first, and zero vectors where there is no neighbour. None without such a head.
      sampler_context: ``C``; 0 without a sampler head.
      sampler_sides: ``(params, vectors_VD) -> (left_VCH, right_VCH)``, the contribution of each
        vector to the sampler head's first layer as a neighbour, and
      sampler_from_sides: ``(params, sides_NH, hidden_ND) -> logits_NV``, the rest of the head, from
        the summed contributions of the neighbours. They save most of its work if few tokens serve
        many positions; None: only `sampler_readout` is used.
      critic: ``(params, hidden_ND) -> logit_N``, float32: the logit that the token at a position is
        wrong, from the hidden vectors of the filled canvas. None without a critic head.
      logits_of: ``(params, hidden_ND, ids_NK) -> logits_NK``, float32: columns of `readout`. They
        save edits a second readout; None: the readout is computed.
      scorer: ``(params, hidden_BLD, length_B) -> logit_B``, float32: the logit of the share of
        corrupted tokens. None except for a sequence scorer.
      cached: the trunk for decoding with a cache; None: there is no cache.
      inside: ``(params, tokens_BL, length_B) -> Inside``, as the trunk computes it; None: the
        network does not show it.
      behind: ``(params, tokens_BL, length_B, start_B, signal_BLD=None) -> hidden_BLD``: the trunk
        of a text and a canvas behind it, which begins at ``start_B``. The text is read causally;
        the canvas sees the text and itself. The signal is what `signal` gives for the logits of the
        step before at each position of the canvas; None: zeros, as in a first step. None for a
        network without canvases; with them, `trunk` takes a whole row as canvas.
      signal: ``(params, logits_NV) -> vectors_ND``: the self-conditioning signal, the mean
        embedding under the softmax of the logits. None: the network takes no signal.
    """

    init: Callable[[jax.Array], Params]
    trunk: Callable[..., tuple[jax.Array, Any]]
    embed: Callable[[Params, jax.Array], jax.Array]
    readout: Callable[[Params, jax.Array], jax.Array]
    vocab_size: int
    sampler_readout: Callable[..., jax.Array] | None = None
    sampler_context: int = 0
    sampler_sides: Callable[[Params, jax.Array], tuple[jax.Array, jax.Array]] | None = None
    sampler_from_sides: Callable[..., jax.Array] | None = None
    critic: Callable[[Params, jax.Array], jax.Array] | None = None
    logits_of: Callable[[Params, jax.Array, jax.Array], jax.Array] | None = None
    scorer: Callable[..., jax.Array] | None = None
    cached: CachedTrunk | None = None
    inside: Callable[..., Inside] | None = None
    behind: Callable[..., jax.Array] | None = None
    signal: Callable[[Params, jax.Array], jax.Array] | None = None

    @property
    def block_length(self) -> int:
        """Positions of a block of a block-causal model; 0 for any other."""
        found = 0 if self.cached is None else self.cached.block_length
        return found if found > 1 else 0


class Canvas(NamedTuple):
    """The arrays being denoised.

    Attributes:
      tokens_BL: int32; MASK at holes, PAD from the row's length on.
      length_B: int32, live positions of each row; 0 for an idle slot.
      frozen_BL: True at given tokens, which are never written, and beyond the length.
    """

    tokens_BL: jax.Array
    length_B: jax.Array
    frozen_BL: jax.Array


class Status(IntEnum):
    """The status of a row. Compiled code does not raise; errors are reported here.

    ``RUNNING`` has steps and holes left. ``DONE`` has no holes left. ``STEP_LIMIT`` ran out of
    steps with holes left. ``CANVAS_FULL`` is done as well, but edits exceeded its capacity: they
    were dropped, or tokens at the end were. ``NON_FINITE`` stopped at logits with NaN or infinity.

    The last two come from outside the loop: ``CANCELLED`` was cancelled, and ``FAILED`` had an
      error in a host sampler or in its program.
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
