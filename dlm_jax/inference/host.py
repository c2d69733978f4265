"""Host samplers and read-back: the chain runs on the device, and candidates come to the host."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from dlm_jax import devices
from dlm_jax.distributed.partitions import num_shares, split_rows
from dlm_jax.sampling import vocab
from dlm_jax.sampling.commit import Proposal
from dlm_jax.sampling.edits.edit_rule import places as all_places
from dlm_jax.sampling.mask_step import StepProposal, commit_step, fill_input, propose_step
from dlm_jax.sampling.positions import put
from dlm_jax.sampling.program import Program
from dlm_jax.sampling.propose import FillInput
from dlm_jax.sampling.state import State
from dlm_jax.types import Params

_PLACES = 64
_HOST_SALT = 0x686F7374


class Candidates(NamedTuple):
    """Candidates at one position after the device part of the chain, most likely first.

    They come from the head that drew the token: the sampler head in waves, and otherwise the LM
    head.

    Attributes:
      row: index of the row in the result, or in the batch of a custom loop.
      index: position on the canvas.
      step: index of the step of this row, starting at 0.
      tokens: int32, live canvas of the row at the start of the step; MASK at holes.
      ids: int32 ``[n]``, ids of the candidates.
      logits: float32 ``[n]``, after the chain.
      logprobs: float32 ``[n]``, log-probability of each candidate in nats, normalised over all
        remaining candidates.
      clean_logprobs: float32 ``[n]``, log-probability of each candidate in nats under the clean
        logits, as in ``Texts.logprobs``.
      num_survivors: number of remaining candidates; more than ``n`` if the list is truncated.
      is_greedy: whether the temperature of the row is 0.
      uniform: uniform random number in [0, 1), which depends on the seed of the row, the position
        and the step.
    """

    row: int
    index: int
    step: int
    tokens: np.ndarray
    ids: np.ndarray
    logits: np.ndarray
    logprobs: np.ndarray
    clean_logprobs: np.ndarray
    num_survivors: int
    is_greedy: bool
    uniform: float

    def choose(self, is_allowed: Sequence[bool] | np.ndarray) -> int:
        """Returns one of the allowed ids: the most likely one for a greedy row, otherwise a random
        one, drawn with `uniform` in proportion to the probabilities.
        """
        (places,) = np.nonzero(np.asarray(is_allowed, bool))
        if not places.size:
            raise ValueError(
                f"row {self.row}: none of the {self.ids.size} candidates is allowed at position "
                f"{self.index}, of {self.num_survivors} that survived; allow more, truncate less, "
                f"or raise max_candidates"
            )
        if self.is_greedy:
            return int(self.ids[places[0]])
        logprobs = self.logprobs[places].astype(np.float64)
        upto = np.cumsum(np.exp(logprobs - logprobs[0]))
        return int(self.ids[places[np.searchsorted(upto, self.uniform * upto[-1], side="right")]])


class Written(NamedTuple):
    """A committed token and its candidates.

    Attributes:
      candidates: the candidates at the position.
      token: id of the token that was written.
      probability: probability of the token after the whole chain, under the distribution that the
        token was drawn from.
      place: position of the token in the returned row, which can differ from ``candidates.index``
        after edits; -1 for a deleted token.
    """

    candidates: Candidates
    token: int
    probability: float
    place: int


def moved(records: Iterable[Written], origin: np.ndarray) -> list[Written]:
    """Updates the positions of the records after edits. `origin` contains the previous index of
    each position, or -1 for a new position.
    """
    places = {int(before): place for place, before in enumerate(origin) if before >= 0}
    return [record._replace(place=places.get(record.place, -1)) for record in records]


HostSampler = Callable[[Candidates], int]
"""A function that returns one of ``candidates.ids``."""


def chosen(sampler: HostSampler, candidates: Candidates) -> int:
    """Calls `sampler` and returns the index of its choice within the candidates. Any exception of
    the sampler becomes a ValueError.
    """
    where, at = f"row {candidates.row}: the host sampler", f"at position {candidates.index}"
    try:
        token = sampler(candidates)
    except ValueError:
        raise
    except (Exception, SystemExit) as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(f"{where} failed {at}: {why}") from error
    try:
        is_id = not isinstance(token, bool) and operator.index(token) is not None
    except TypeError:
        is_id = False
    (places,) = np.nonzero(candidates.ids == int(token)) if is_id else ([],)
    if not len(places):
        raise ValueError(
            f"{where} chose {shown(token)} {at}, which is not one of its {len(candidates.ids)} "
            f"candidates; return one of candidates.ids"
        )
    return int(places[0])


def shown(value: object) -> str:
    """Formats a user value for an error message: a number or a string, or the type of others."""
    is_plain = value is None or isinstance(value, str | int | float | np.integer)
    return repr(value)[:60] if is_plain else f"a {type(value).__name__}"


class HostLoop:
    """Runs a program step by step, with host samplers and read-back for some rows.

    Samplers are arguments of `step` and can change between steps. Rows that the host does not read
    take as long as in `Advance`.
    """

    def __init__(self, program: Program, *, compiler_options: Mapping[str, Any] | None = None):
        self.has_run, self.program = False, program
        jit = functools.partial(jax.jit, compiler_options=dict(compiler_options or {}) or None)

        def propose(
            params: Params, state: State, split: NamedSharding | None
        ) -> tuple[State, StepProposal]:
            if state.edits is not None:
                origin_BL = all_places(state.edits.origin_BL)
                state = state._replace(edits=state.edits._replace(origin_BL=origin_BL))
            # The trunk splits the rows of a cache over the devices, and groups of rows must match.
            return propose_step(dataclasses.replace(program, rows=split), params, state)

        self._propose = jit(propose, static_argnames="split")
        self._commit = jit(functools.partial(commit_step, program), donate_argnums=1)
        self._read = jit(functools.partial(_read, program), static_argnames="size")
        self._choose = jit(functools.partial(_choose, program), donate_argnums=1)

    def step(
        self,
        params: Params,
        state: State,
        samplers: Mapping[int, HostSampler],
        *,
        read_back: Collection[int] = (),
        max_candidates: int = 64,
        names: Mapping[int, int] | None = None,
        failed: dict[int, Exception] | None = None,
    ) -> tuple[State, list[Written]]:
        """Returns the state after one step and the read-back records. The old state is donated.

        Args:
          params: parameters of the program's network.
          state: the state, on one device or replicated.
          samplers: host samplers by row.
          read_back: rows whose commits are returned, row by row and from left to right. Positions
            refer to the canvas before the edits of the step.
          max_candidates: maximum number of candidates per position that are copied to the host.
          names: number of each row for host samplers and errors; None uses the slot index.
          failed: receives the exceptions of failed samplers by row. A row with a failed sampler
            ends without a commit in this step, and other rows continue. If None, the exception
            propagates.
        """
        shares = split_rows(params)
        num_rows, num_positions = state.canvas.tokens_BL.shape
        split = None if num_rows % num_shares(shares) else shares
        errors: dict[int, Exception] = {}
        records: list[tuple[int, Written]] = []

        def call(compiled: Callable[..., Any], *rest: Any, **options: Any) -> Any:
            with devices.exact(shares):
                return compiled(params, *rest, **options)

        state, proposed = call(self._propose, state, split=split)

        # The open positions of the rows that the host reads, and fields of their candidates.
        places: list[tuple[int, int]] = []
        rows: dict[int, dict[str, Any]] = {}
        if slots := sorted({*samplers, *read_back}):
            is_open, is_finite, canvas, step_B = jax.device_get(
                (proposed.is_open_BL, proposed.filled.is_finite_B, state.canvas, state.step_B)
            )
            for slot in slots:
                length = canvas.length_B[slot]
                rows[slot] = {
                    "row": slot if names is None else names[slot],
                    "step": int(step_B[slot]),
                    "tokens": canvas.tokens_BL[slot, :length].copy(),
                }
                indices = np.flatnonzero(is_open[slot] & is_finite[slot]).tolist()
                places += [(slot, index) for index in indices]

        # The candidates, and the choices of the samplers.
        size = min(max_candidates, self.program.network.vocab_size)
        for first in range(0, len(places), _PLACES):
            part = places[first : first + _PLACES]
            flat, is_hosted = np.zeros(_PLACES, np.int32), np.zeros(_PLACES, bool)
            flat[: len(part)] = [slot * num_positions + index for slot, index in part]
            is_real = np.arange(_PLACES) < len(part)
            tokens, probability, fields = jax.device_get(
                call(self._read, state, proposed, flat, is_real, size=size)
            )
            ids = tokens.copy()
            # At padding positions of the chunk, the token can have probability 0.
            logprobs = np.log(np.maximum(probability, np.finfo(np.float32).tiny))
            for number, (slot, index) in enumerate(part):
                if slot in errors:
                    continue
                n = int(fields["num_survivors"][number])
                own = {
                    name: x[number, :n] if x.ndim > 1 else x[number].item()
                    for name, x in fields.items()
                }
                candidates = Candidates(index=index, **own, **rows[slot])
                if slot in samplers:
                    try:
                        place = chosen(samplers[slot], candidates)
                    except ValueError as error:
                        if failed is None:
                            raise
                        errors[slot] = failed[slot] = error
                        continue
                    ids[number], is_hosted[number] = candidates.ids[place], True
                    logprobs[number] = candidates.logprobs[place]
                chance = float(np.exp(logprobs[number]))
                records.append((slot, Written(candidates, int(ids[number]), chance, index)))
            if is_hosted.any():
                choices = flat, is_hosted, ids, logprobs
                proposed = call(self._choose, proposed, state, *choices)

        # A row whose sampler failed ends like a row without finite logits.
        if errors:
            is_finite_B = proposed.filled.is_finite_B.at[jnp.array(sorted(errors))].set(False)
            filled = proposed.filled._replace(is_finite_B=is_finite_B)
            proposed = proposed._replace(filled=filled)
        state, is_committed_BL = call(self._commit, state, proposed)
        self.has_run = True
        if not records:
            return state, []
        is_committed_BL = np.asarray(is_committed_BL)
        return state, [
            written
            for slot, written in records
            if slot in read_back and is_committed_BL[slot, written.candidates.index]
        ]


def _fill(program: Program, params: Params, state: State, inputs: StepProposal) -> FillInput:
    """The input of the fill that drew the candidates."""
    seen, is_open_BL = inputs.context, inputs.is_open_BL
    return fill_input(program, params, state, inputs.output, seen, is_open_BL, seen.is_visible_BL)


def _read(
    program: Program,
    params: Params,
    state: State,
    inputs: StepProposal,
    places_P: jax.Array,
    is_real_P: jax.Array,
    *,
    size: int,
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """Returns the token that the device drew at each position, its probability, and the fields of
    `Candidates` by name: ``[P]``, or the largest logits after the chain ``[P, K]``, padded with
    -inf.
    """
    filled, fill = inputs.filled, _fill(program, params, state, inputs)
    at = fill.at(places_P, is_real_P)
    tokens_BL = jnp.where(inputs.is_open_BL, filled.proposal.tokens_BL, -1)
    level_BL = jnp.zeros_like(tokens_BL) if filled.level_BL is None else filled.level_BL
    read = state.rules.fill.logits(fill, tokens_BL, level_BL)
    drawable_PV = read(places_P, jnp.ones(places_P.shape, bool))
    final_PV = fill.chain.apply(fill.chain_state, drawable_PV, at).astype(jnp.float32)
    tokens_P = filled.proposal.tokens_BL.reshape(-1)[places_P]
    probability_P = jnp.exp(vocab.log_prob(final_PV, tokens_P))
    count_P, _ = vocab.count_and_entropy(final_PV)
    top_PK, ids_PK = vocab.largest(final_PV, size)
    ids_PK = jnp.where(top_PK > -jnp.inf, ids_PK, final_PV.shape[1]).astype(jnp.int32)
    max_P, rest_P = vocab.max_and_rest(final_PV)
    clean_PV = drawable_PV.astype(jnp.float32)
    clean_PK = jnp.take_along_axis(clean_PV, ids_PK, axis=1, mode="clip")
    host_key_P = jax.vmap(lambda key: jax.random.fold_in(key, _HOST_SALT))(at.key_N)
    fields = {
        "ids": ids_PK,
        "logits": top_PK,
        "logprobs": (top_PK - max_P[:, None]) - jnp.log1p(rest_P)[:, None],
        "clean_logprobs": clean_PK - jax.nn.logsumexp(clean_PV, axis=1, keepdims=True),
        "num_survivors": count_P.astype(jnp.int32),
        "is_greedy": fill.chain.is_greedy(at),
        "uniform": jax.vmap(jax.random.uniform)(host_key_P),
    }
    return tokens_P, probability_P, fields


def _choose(
    program: Program,
    params: Params,
    inputs: StepProposal,
    state: State,
    places_P: jax.Array,
    is_hosted_P: jax.Array,
    ids_P: jax.Array,
    final_logprob_P: jax.Array,
) -> StepProposal:
    """Returns the inputs with proposals from the host, scored like device proposals."""
    fill, old = _fill(program, params, state, inputs), inputs.filled.proposal
    at, clean_PV = fill.at(places_P, is_hosted_P), fill.logits(places_P)
    logprob_P, score_P, _ = fill.score_ids(clean_PV, ids_P, at)
    new = Proposal(ids_P, logprob_P, final_logprob_P, score_P)
    new = jax.tree.map(lambda x, y: y.astype(x.dtype), old, new)
    proposal = put(old, places_P, is_hosted_P, new)
    return inputs._replace(filled=inputs.filled._replace(proposal=proposal))
