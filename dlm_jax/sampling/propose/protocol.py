"""What a fill is: it finds a candidate for every open position of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dlm_jax.devices import platform
from dlm_jax.sampling import vocab
from dlm_jax.sampling.commit.protocol import Proposal
from dlm_jax.sampling.draw import argmax, log_prob
from dlm_jax.sampling.output import TrunkOutput
from dlm_jax.sampling.transforms.chain import Chain
from dlm_jax.sampling.transforms.protocol import At
from dlm_jax.settings import Rule
from dlm_jax.types import Network, Params

_CPU_LOGITS = 2**18
_ACCELERATOR_LOGITS = 2**24


def chunk_size(vocab_size: int) -> int:
    """Positions per readout: as many as keep the logits in a CPU's cache, or fill an accelerator.

    64 on CPU and 256 elsewhere at least.
    """
    if platform() == "cpu":
        return max(64, _CPU_LOGITS // vocab_size)
    return max(256, _ACCELERATOR_LOGITS // vocab_size)


class Wanted(NamedTuple):
    """Where a fill must find what, ``[B, L]``.

    Attributes:
      is_open_BL: True where a candidate is wanted; nothing that stands there is seen.
      is_seen_BL: True at tokens that neighbours are drawn beside.
      tokens_BL: int32 canvas.
      length_B: int32 positions of each row.
      is_scored_BL: True where ``total_BL`` is wanted, beside the positions that the writer scores
        as they stand; None: nowhere.
      keeps_best: whether ``best_BL`` is, too; static.
      preference_BL: uint32, which of positions that tie come first, see
        `dlm_jax.sampling.commit.protocol.preferences`.
    """

    is_open_BL: jax.Array
    is_seen_BL: jax.Array
    tokens_BL: jax.Array
    length_B: jax.Array
    is_scored_BL: jax.Array | None = None
    keeps_best: bool = False
    preference_BL: jax.Array | None = None


class Reader(NamedTuple):
    """What a fill may ask of the network.

    Attributes:
      network: the model as pure functions.
      params: its parameters.
      output: what the trunk returned in this step.
      chunk: positions of one readout; static.
    """

    network: Network
    params: Params
    output: TrunkOutput
    chunk: int

    def logits(self, places_N: jax.Array) -> jax.Array:
        """Clean logits ``[N, V]`` of the LM head at places ``row * L + index``."""
        return self.output.logits(self.network, self.params, places_N)


class Filled(NamedTuple):
    """Candidates for the open positions, and how they were found.

    Attributes:
      proposal: the candidates.
      is_finite_B: False for a row with a position whose clean logits hold a NaN or +inf, or are all
        -inf.
      waves_B: int32, waves of the sampler head's fill; 0 for a parallel one.
      bootstrapped_B: int32, positions of it that the LM head drew, as nothing near was filled.
      total_BL: float32, the LM head's log-normaliser where it was read; None if not wanted.
      best_BL: int32, its likeliest id there, of others than the one that is scored there; -1 where
        that is banned; likewise.
    """

    proposal: Proposal
    is_finite_B: jax.Array
    waves_B: jax.Array
    bootstrapped_B: jax.Array
    total_BL: jax.Array | None = None
    best_BL: jax.Array | None = None


class FillRule(Rule):
    """Finds a candidate for every open position of a step; only `propose` is required."""

    required: ClassVar[tuple[str, ...]] = ("propose",)

    allows_host: ClassVar[bool] = False
    """Whether host samplers and read-back may look between the candidates and the commit."""

    forwards: ClassVar[int] = 0
    """Forwards of the trunk that a step asks for beside its own."""

    @classmethod
    def check_canvas(cls, row: Any, facts: Any, is_open: np.ndarray) -> None:
        """Raises ValueError for a canvas that does not go with the fill; True where it is open."""

    def propose(self, reader: Reader, writer: CandidateWriter, wanted: Wanted) -> Filled:
        """The candidates; the proposal means nothing where nothing is wanted."""
        raise NotImplementedError


def gather(is_wanted_BL: jax.Array, chunk: int) -> tuple[jax.Array, jax.Array]:
    """Flat places of the wanted positions in order, padded to whole chunks; and their number."""
    total = is_wanted_BL.size
    chunk = min(chunk, total)
    (flat,) = jnp.nonzero(is_wanted_BL.reshape(-1), size=total, fill_value=0)
    flat = jnp.pad(flat, (0, -total % chunk)).astype(jnp.int32)
    return flat, jnp.sum(is_wanted_BL)


class Drawn(NamedTuple):
    """Candidates as they are found: those of `Proposal`, flat over rows and positions.

    ``is_finite_B`` is False for rows with a position whose clean logits cannot be drawn from;
    ``total_P`` and ``best_P`` are the LM head's log-normaliser and likeliest other id, or None.
    """

    tokens_P: jax.Array
    logprob_P: jax.Array
    final_logprob_P: jax.Array
    confidence_P: jax.Array
    is_finite_B: jax.Array
    total_P: jax.Array | None
    best_P: jax.Array | None

    def filled(
        self, shape: tuple[int, ...], waves_B: jax.Array, bootstrapped_B: jax.Array
    ) -> Filled:
        """Row by row."""
        return Filled(
            Proposal(*(array.reshape(shape) for array in self[:4])),
            self.is_finite_B,
            waves_B,
            bootstrapped_B,
            *(None if array is None else array.reshape(shape) for array in self[5:]),
        )


def no_candidates(
    shape: tuple[int, ...], *, keeps_total: bool = False, keeps_best: bool = False
) -> Drawn:
    """What is known before the first chunk of a ``[B, L]`` canvas."""
    size = shape[0] * shape[1]
    zeros_P = jnp.zeros(size, jnp.float32)
    return Drawn(
        jnp.zeros(size, jnp.int32), zeros_P, zeros_P, zeros_P, jnp.ones(shape[0], jnp.bool_),
        zeros_P if keeps_total else None,
        jnp.zeros(size, jnp.int32) if keeps_best else None,
    )  # fmt: skip


@dataclass(frozen=True)
class CandidateWriter:
    """Draws candidates from clean logits and puts them where they belong.

    Attributes:
      chain: logit transforms between the clean logits and the draw.
      prepared: what the chain prepared for this step.
      key_B: this step's key of each row; a position draws with it and its place in the canvas.
      own_BL: tokens to score instead of drawing; -1 elsewhere. None: nowhere.
      num_positions: ``L``.
      measure: confidence from clean logits and the candidate's log-probability.
      method: how a token is drawn.
      banned_ids: ids that are never the best; nor are those that the row bans.
      weighed: `CommitRule.weighed`; None: confidence is read from the clean logits.
    """

    chain: Chain
    prepared: Any
    key_B: jax.Array
    own_BL: jax.Array | None
    num_positions: int
    measure: Callable[[jax.Array, jax.Array], jax.Array]
    method: str
    banned_ids: tuple[int, ...] = ()
    weighed: Callable[[jax.Array, Callable[[], jax.Array]], jax.Array | None] | None = None

    def write(
        self,
        drawn: Drawn,
        places_N: jax.Array,
        is_real_N: jax.Array,
        clean_NV: jax.Array,
        drawable_NV: jax.Array | None = None,
    ) -> Drawn:
        """`drawn` with candidates at the places ``row * L + index`` that are real.

        They are drawn from `drawable_NV` through the chain and scored under the clean logits. None
        says that these are the LM head's, and drawn from.
        """
        row_N, index_N = places_N // self.num_positions, places_N % self.num_positions
        key_N = jax.vmap(jax.random.fold_in)(self.key_B[row_N], index_N)
        own_N = None if self.own_BL is None else self.own_BL.reshape(-1)[places_N]
        is_drawn_N = is_real_N if own_N is None else is_real_N & (own_N < 0)
        is_grown_N = None if drawable_NV is None else is_drawn_N
        at = At(row_N, index_N, key_N, is_drawn_N, is_grown_N)
        ids_N, final_N = self.chain.draw_and_score(
            self.prepared, clean_NV if drawable_NV is None else drawable_NV, at, method=self.method
        )
        if own_N is not None:
            ids_N = jnp.where(own_N >= 0, own_N, ids_N)
        logprob_N = log_prob(clean_NV, ids_N)
        target_N = jnp.where(is_real_N, places_N, drawn.tokens_P.size)

        def put(old_P: jax.Array, new_N: jax.Array) -> jax.Array:
            return old_P.at[target_N].set(new_N, mode="drop")

        is_fine_N = jnp.isfinite(logprob_N) | ~is_real_N
        total_P, best_P = drawn.total_P, drawn.best_P
        if total_P is not None and drawable_NV is None:
            # The sums are those of `log_prob`, and are made once.
            max_N, weight_NC = vocab.exp_columns(clean_NV.astype(jnp.float32))
            total_N = max_N + jnp.log(weight_NC.sum(-1))
            total_P = put(total_P, total_N)
            if best_P is not None:
                other_NV = clean_NV
                if own_N is not None:
                    ids_1V = jnp.arange(clean_NV.shape[1])[None]
                    other_NV = jnp.where(ids_1V == own_N[:, None], -jnp.inf, clean_NV)
                best_N = argmax(other_NV)
                banned_1K = jnp.array(self.banned_ids, jnp.int32)[None]
                is_banned_N = jnp.any(best_N[:, None] == banned_1K, axis=1)
                is_banned_N |= self.chain.forbids(best_N, row_N)
                best_P = put(best_P, jnp.where(is_banned_N, -1, best_N))
            # What stands there may be impossible; what is drawn may not.
            is_fine_N |= ~is_drawn_N & jnp.isfinite(total_N)
        return Drawn(
            put(drawn.tokens_P, ids_N),
            put(drawn.logprob_P, logprob_N),
            put(drawn.final_logprob_P, final_N),
            put(drawn.confidence_P, self._confidence(clean_NV, drawable_NV, ids_N, logprob_N, at)),
            drawn.is_finite_B.at[row_N].min(is_fine_N),
            total_P,
            best_P,
        )

    def _confidence(
        self,
        clean_NV: jax.Array,
        drawable_NV: jax.Array | None,
        ids_N: jax.Array,
        logprob_N: jax.Array,
        at: At,
    ) -> jax.Array:
        """What `measure` says of the candidates, of the logits that the commit rule weighs."""

        def filtered() -> jax.Array:
            drawable = clean_NV if drawable_NV is None else drawable_NV
            return self.chain.apply(self.prepared, drawable, at)

        weighed_NV = None if self.weighed is None else self.weighed(clean_NV, filtered)
        if weighed_NV is None:
            return self.measure(clean_NV, logprob_N)
        return self.measure(weighed_NV, log_prob(weighed_NV, ids_N))
