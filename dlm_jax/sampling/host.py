"""Rows whose tokens a Python function chooses, one step at a time beside rows that do not.

`seeds/backend_sampling.md`, "Mixed backend and cpu sampling": the chain runs on the device for all
rows; of a row that names a host sampler only the candidates that survive it come to the host, and
what the other rows draw never leaves the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dlm_jax.sampling import draw as drawing
from dlm_jax.sampling.loop import Look, Program, State, look, write
from dlm_jax.sampling.readback import ReadBack, read_back
from dlm_jax.sampling.transforms.chain import Chain
from dlm_jax.sampling.transforms.protocol import At
from dlm_jax.types import Params

_PLACES = 64


class Candidates(NamedTuple):
    """What the device part of the chain left for one position, most likely first.

    Attributes:
      row: place of the row in the batch.
      index: place of the position in the canvas.
      step: step of the row, from 0.
      tokens: int32, the row's live canvas when the step began, MASK at holes.
      ids: int32 ``[n]`` candidates.
      logits: float32 ``[n]``, after the chain.
      logprobs: float32 ``[n]``, of each among all survivors, in nats.
      num_survivors: how many there were; more than ``n`` when some are not shown.
    """

    row: int
    index: int
    step: int
    tokens: np.ndarray
    ids: np.ndarray
    logits: np.ndarray
    logprobs: np.ndarray
    num_survivors: int


class Written(NamedTuple):
    """A committed position as read back: its candidates, and which token was written.

    ``probability`` is that of the token after the whole chain.
    """

    candidates: Candidates
    token: int
    probability: float


HostSampler = Callable[[Candidates], int]
"""Chooses one of ``candidates.ids``."""


class _Survivors(NamedTuple):
    read: ReadBack
    logprobs_PK: jax.Array


class HostLoop:
    """The loop of a program in single steps, with host samplers and read-back for some rows.

    Samplers belong to a call of `step`, not to the loop: they can be attached, replaced and removed
    between any two. Two programs are compiled, one up to the proposal and one from it on, and two
    small ones for the rows that are looked at; other rows cost what they cost in `Advance`.
    """

    def __init__(
        self,
        program: Program,
        *,
        max_candidates: int = 64,
        compiler_options: Mapping[str, Any] | None = None,
    ):
        if max_candidates < 1:
            raise ValueError(f"max_candidates={max_candidates} must be at least 1")
        if program.rows is not None:
            raise ValueError("host samplers need the rows on one device; use params of one device")
        self.program = program
        size = min(max_candidates, program.network.vocab_size)
        jit = functools.partial(
            jax.jit, compiler_options=dict(compiler_options) if compiler_options else None
        )
        self._look = jit(functools.partial(look, program))
        self._write = jit(write, donate_argnums=0)
        self._survivors = jit(functools.partial(_survivors, program, size=size))
        self._choose = jit(functools.partial(_choose, program), donate_argnums=1)

    def step(
        self,
        params: Params,
        state: State,
        samplers: Mapping[int, HostSampler],
        *,
        read_back: Collection[int] = (),
    ) -> tuple[State, list[Written]]:
        """The state one step later (do not use the old one again), and what was read back.

        Args:
          params: of the program's network.
          state: on one device.
          samplers: host sampler of each row that has one.
          read_back: rows whose commits are returned.

        Raises:
          ValueError: a sampler chose an id that is no candidate.
        """
        seen = self._look(params, state)
        wanted = sorted(set(samplers) | set(read_back))
        found: list[tuple[Candidates, int, float]] = []
        if wanted:
            seen, found = self._ask(params, state, seen, samplers, wanted)
        state = self._write(state, seen)
        if not read_back:
            return state, []
        rows = jnp.asarray(sorted(read_back), jnp.int32)
        committed = dict(zip(sorted(read_back), np.asarray(state.committed_BL[rows]), strict=True))
        return state, [
            Written(candidates, token, probability)
            for candidates, token, probability in found
            if candidates.row in committed
            and committed[candidates.row][candidates.index] == candidates.step
        ]

    def _ask(
        self,
        params: Params,
        state: State,
        seen: Look,
        samplers: Mapping[int, HostSampler],
        wanted: list[int],
    ) -> tuple[Look, list[tuple[Candidates, int, float]]]:
        """The look with the host samplers' choices in it; and all candidates of `wanted` rows."""
        rows = jnp.asarray(wanted, jnp.int32)
        is_open, tokens, lengths, steps = jax.device_get(
            (
                seen.is_open_BL[rows],
                state.canvas.tokens_BL[rows],
                state.canvas.length_B[rows],
                state.step_B[rows],
            )
        )
        num_positions = seen.is_open_BL.shape[1]
        places = [
            (number, index) for number, row in enumerate(is_open) for index in np.flatnonzero(row)
        ]
        found = []
        for first in range(0, len(places), _PLACES):
            part = places[first : first + _PLACES]
            flat = np.zeros(_PLACES, np.int32)
            flat[: len(part)] = [wanted[number] * num_positions + index for number, index in part]
            is_real = np.arange(_PLACES) < len(part)
            left = jax.device_get(self._survivors(params, state, seen, flat, is_real))
            read = left.read
            ids = read.token_N.copy()
            # A place that only fills the chunk may hold a token of probability 0.
            logprobs = np.log(np.maximum(read.probability_N, np.finfo(np.float32).tiny))
            for place, (number, index) in enumerate(part):
                row = wanted[number]
                size = min(int(read.num_candidates_N[place]), read.top_ids_NK.shape[1])
                candidates = Candidates(
                    row=row,
                    index=int(index),
                    step=int(steps[number]),
                    tokens=tokens[number][: lengths[number]],
                    ids=read.top_ids_NK[place, :size],
                    logits=read.top_logits_NK[place, :size],
                    logprobs=left.logprobs_PK[place, :size],
                    num_survivors=int(read.num_candidates_N[place]),
                )
                if row in samplers:
                    chosen = _chosen(samplers[row], candidates)
                    ids[place], logprobs[place] = (
                        candidates.ids[chosen],
                        candidates.logprobs[chosen],
                    )
                found.append((candidates, int(ids[place]), float(np.exp(logprobs[place]))))
            is_hosted = is_real & np.array(
                [wanted[number] in samplers for number, _ in part] + [False] * (_PLACES - len(part))
            )
            if is_hosted.any():
                seen = self._choose(params, seen, state.rule, flat, is_hosted, ids, logprobs)
        return seen, found


def _chosen(sampler: HostSampler, candidates: Candidates) -> int:
    """Place among the candidates of the id that `sampler` chose."""
    token = sampler(candidates)
    (places,) = np.nonzero(candidates.ids == token)
    if not places.size:
        raise ValueError(
            f"row {candidates.row}: the host sampler chose {token!r} at position "
            f"{candidates.index}, which is none of its {len(candidates.ids)} candidates; choose "
            "one of candidates.ids"
        )
    return int(places[0])


def _at(seen: Look, places_P: jax.Array, is_real_P: jax.Array) -> At:
    num_positions = seen.is_open_BL.shape[1]
    row_P, index_P = places_P // num_positions, places_P % num_positions
    key_P = jax.vmap(jax.random.fold_in)(seen.draw_key_B[row_P], index_P)
    return At(row_N=row_P, index_N=index_P, key_N=key_P, is_real_N=is_real_P)


def _hidden(seen: Look, places_P: jax.Array) -> jax.Array:
    return seen.hidden_BLD.reshape(-1, seen.hidden_BLD.shape[-1])[places_P]


def _survivors(
    program: Program,
    params: Params,
    state: State,
    seen: Look,
    places_P: jax.Array,
    is_real_P: jax.Array,
    *,
    size: int,
) -> _Survivors:
    """The `size` largest logits after the chain at each place, and what the device drew there."""
    at = _at(seen, places_P, is_real_P)
    clean_PV = program.network.readout(params, _hidden(seen, places_P))
    prepared = state.chain.prepare(state.chain_state, seen.context)
    final_PV = state.chain.apply(prepared, clean_PV, at)
    drawn_P = seen.proposal.tokens_BL.reshape(-1)[places_P]
    read = read_back(final_PV, drawn_P, size=size)
    total_P1 = jax.nn.logsumexp(final_PV, axis=1, keepdims=True)
    return _Survivors(read, read.top_logits_NK - total_P1)


def _choose(
    program: Program,
    params: Params,
    seen: Look,
    rule: Any,
    places_P: jax.Array,
    is_hosted_P: jax.Array,
    ids_P: jax.Array,
    final_logprob_P: jax.Array,
) -> Look:
    """The look with other tokens proposed at the hosted places, scored like the device's own."""
    clean_PV = program.network.readout(params, _hidden(seen, places_P))
    logprob_P = drawing.log_prob(clean_PV, ids_P)
    target_P = jnp.where(is_hosted_P, places_P, seen.is_open_BL.size)

    def put(old_BL: jax.Array, new_P: jax.Array) -> jax.Array:
        flat = old_BL.reshape(-1).at[target_P].set(new_P.astype(old_BL.dtype), mode="drop")
        return flat.reshape(old_BL.shape)

    old = seen.proposal
    proposal = old._replace(
        tokens_BL=put(old.tokens_BL, ids_P),
        logprob_BL=put(old.logprob_BL, logprob_P),
        final_logprob_BL=put(old.final_logprob_BL, final_logprob_P),
        confidence_BL=put(old.confidence_BL, rule.measure(clean_PV, logprob_P)),
    )
    return seen._replace(proposal=proposal)


def describe(chain: Chain, sampler: HostSampler | None) -> str:
    """Which part of a row's chain runs where, one line a part."""
    lines = [f"{name}: device" for name in dict.fromkeys(chain.names)]
    if sampler is None:
        return "\n".join([*lines, "draw: device"])
    name = getattr(sampler, "__name__", type(sampler).__name__)
    return "\n".join([*lines, f"choice among the survivors: host ({name})"])
