"""The single-step loop for host samplers and read-back.

The chain of logit transforms runs on the device for all rows. For a row with a host sampler (a
Python function), only the candidates after the chain are copied to the host. The draws of other
rows stay on the device. For each position, read-back returns the sampled token, its probability,
the number of candidates that remain after the chain, and the most likely of these candidates with
their logits.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import regex
from jax import Array
from jax.sharding import NamedSharding

from dlm_jax import devices
from dlm_jax.distributed.partitions import num_shares, split_rows
from dlm_jax.inference.candidates import Candidates, HostSampler, Written, called, chosen
from dlm_jax.sampling import draw, vocab
from dlm_jax.sampling.commit import CommitRule, DrawnTokens, Proposal
from dlm_jax.sampling.edits.edit_rule import places as all_places
from dlm_jax.sampling.mask_step import StepProposal, commit_step, propose_step, step_chain
from dlm_jax.sampling.positions import put
from dlm_jax.sampling.program import Program
from dlm_jax.sampling.propose.fill import FillInput
from dlm_jax.sampling.state import State, gather_state
from dlm_jax.sampling.transforms.transform import At
from dlm_jax.settings import SettingError
from dlm_jax.types import Params


class ReadBack(NamedTuple):
    """The draws of N positions.

    Attributes:
      token_N: int32 ids.
      probability_N: probability of the token under the softmax of the final logits.
      num_candidates_N: int32, number of finite logits. If it exceeds K, the `top_*` arrays contain
        only the K largest.
      top_ids_NK: int32, the K largest candidates, largest first; padded with V.
      top_logits_NK: logits of these candidates, padded with -inf.
    """

    token_N: Array
    probability_N: Array
    num_candidates_N: Array
    top_ids_NK: Array
    top_logits_NK: Array


def read_back(final_logits_NV: Array, token_N: Array, *, size: int) -> ReadBack:
    """Returns the `ReadBack` of tokens drawn from `final_logits_NV`, with `size` (static)
    candidates.
    """
    logits_NV = final_logits_NV.astype(jnp.float32)
    V = logits_NV.shape[1]
    top_NK, ids_NK = vocab.largest(logits_NV, min(size, V))
    count_N, _ = vocab.count_and_entropy(logits_NV)
    return ReadBack(
        token_N=token_N,
        probability_N=jnp.exp(draw.log_prob(logits_NV, token_N)),
        num_candidates_N=count_N.astype(jnp.int32),
        top_ids_NK=jnp.where(top_NK > -jnp.inf, ids_NK, V).astype(jnp.int32),
        top_logits_NK=top_NK,
    )


_Place = tuple[int, int, dict[str, Any]]
"""A position that the host reads: slot, index, and the fields of `Candidates` for the whole row."""


def _open_places(
    state: State, inputs: StepProposal, slots: Sequence[int], names: Sequence[int], *, mask_id: int
) -> list[_Place]:
    """Returns every open position in the rows in `slots` whose logits are finite."""
    canvas, rows = state.canvas, list(slots)
    # Indexing on the device would compile for each number of slots.
    is_open, is_finite, tokens, is_frozen, lengths, steps = (
        array[rows]
        for array in jax.device_get(
            (
                inputs.is_open_BL,
                inputs.filled.is_finite_B,
                canvas.tokens_BL,
                canvas.frozen_BL,
                canvas.length_B,
                state.step_B,
            )
        )
    )
    is_open, is_hole = is_open & is_finite[:, None], (tokens == mask_id) & ~is_frozen
    found: list[_Place] = []
    for number, slot in enumerate(slots):
        row = {
            "row": names[slot],
            "step": int(steps[number]),
            "tokens": tokens[number][: lengths[number]],
            "is_hole": is_hole[number][: lengths[number]],
            "first": int(np.argmin(is_frozen[number])),
        }
        found += [(slot, int(index), row) for index in np.flatnonzero(is_open[number])]
    return found


_PLACES = 64
_HOST_SALT = 0x686F7374


class HostLoop:
    """Runs a program step by step, with host samplers and read-back for some rows.

    Samplers are arguments of `step` and can change between steps. Two programs are compiled for the
    parts of a step before and after the host's choices, and two small programs for the rows that
    the host reads. Rows that the host does not read take as long as in `Advance`. ``compiled``
    lists the compiled shapes, and ``program`` is the static part of all programs.
    """

    def __init__(self, program: Program, *, compiler_options: Mapping[str, Any] | None = None):
        if program.rows is not None:
            raise ValueError(
                "program.rows splits the rows, but the host needs whole rows; use None"
            )
        self.compiled: list[str] = []
        self.has_run = False
        self.program = program
        jit = functools.partial(
            jax.jit, compiler_options=dict(compiler_options) if compiler_options else None
        )
        self._look = jit(self._look_once, static_argnames="split")
        self._write = jit(functools.partial(commit_step, program), donate_argnums=1)
        self._survivors = jit(functools.partial(_survivors, program), static_argnames="size")
        self._choose = jit(functools.partial(_choose, program), donate_argnums=1)

    def _look_once(
        self, params: Params, state: State, split: NamedSharding | None
    ) -> tuple[State, StepProposal]:
        # This code runs only while JAX traces a new program.
        rows, positions = state.canvas.tokens_BL.shape
        self.compiled.append(f"rows={rows} canvas={positions} host")
        if state.edits is not None:
            edits = state.edits._replace(origin_BL=all_places(state.edits.origin_BL))
            state = state._replace(edits=edits)
        # The trunk splits the rows of a cache over the devices, and groups of rows must match.
        program = dataclasses.replace(self.program, rows=split)
        return propose_step(program, params, state)

    def working_bytes(self, params: Params, state: State) -> int:
        """Returns the bytes of temporary memory in the first half of a step, without its arguments.
        The call compiles this half.
        """
        with devices.exact(split_rows(params)):
            split = _split_of(params, state)
            plan: Any = self._look.lower(params, state, split=split).compile().memory_analysis()
        return int(plan.temp_size_in_bytes)

    def step(
        self,
        params: Params,
        state: State,
        samplers: Mapping[int, HostSampler],
        *,
        read_back: Collection[int] = (),
        max_candidates: int = 64,
        names: Sequence[int] | None = None,
        failed: dict[int, Exception] | None = None,
    ) -> tuple[State, list[Written]]:
        """Returns the state after one step and the read-back records. The old state is donated.

        Args:
          params: parameters of the program's network.
          state: the state, on one device or replicated.
          samplers: host samplers by row. The `reset` method of a sampler, if defined, is called
            before the first step of its row. The `accept` method, if defined, is called after a
            step for each committed token.
          read_back: rows whose commits are returned, row by row and from left to right. Positions
            refer to the canvas before the edits of the step.
          max_candidates: maximum number of candidates per position that are copied to the host.
          names: number of each row for host samplers and errors; None uses the slot index.
          failed: receives the exceptions of failed samplers by row. A row with a failed sampler
            ends without a commit in this step (at the next step if `accept` failed), and other rows
            continue. If None, the exception propagates.
        """
        if max_candidates < 1:
            raise SettingError("max_candidates", max_candidates, "must be at least 1")
        named = range(state.step_B.shape[0]) if names is None else names
        self._reset(state, samplers, named, failed)
        state, inputs = _call(self._look, params, state, split=_split_of(params, state))
        found: list[tuple[int, Written]] = []
        if samplers or read_back:
            wanted = sorted(set(samplers) | set(read_back))
            places = _open_places(state, inputs, wanted, named, mask_id=self.program.mask_id)
            for first in range(0, len(places), _PLACES):
                part = places[first : first + _PLACES]
                inputs, written = self._ask(
                    params, state, inputs, part, samplers, max_candidates, failed
                )
                found += written
        if failed:
            inputs = _without(inputs, failed)
        state, is_committed_BL = _call(self._write, params, state, inputs)
        self.has_run = True
        follow = _hooks(samplers, "accept")
        asked = sorted({*read_back, *follow})
        if not asked:
            return state, []
        is_committed_BL = np.asarray(is_committed_BL)[asked]
        is_committed = dict(zip(asked, is_committed_BL, strict=True))
        commits = [
            (slot, written)
            for slot, written in found
            if slot in is_committed and is_committed[slot][written.candidates.index]
        ]
        for slot, written in commits:
            if slot in follow:
                accept = functools.partial(follow[slot], written)
                _call_hook(accept, slot, named[slot], "accept", failed)
        return state, [written for slot, written in commits if slot in set(read_back)]

    def _reset(
        self,
        state: State,
        samplers: Mapping[int, HostSampler],
        names: Sequence[int],
        failed: dict[int, Exception] | None,
    ) -> None:
        kept = _hooks(samplers, "reset")
        if not kept:
            return
        is_first_B = np.asarray((state.step_B == 0) & state.is_stepping_B)
        for slot in sorted(kept):
            if is_first_B[slot]:
                reset = functools.partial(kept[slot], names[slot])
                _call_hook(reset, slot, names[slot], "reset", failed)

    def _ask(
        self,
        params: Params,
        state: State,
        inputs: StepProposal,
        places: Sequence[_Place],
        samplers: Mapping[int, HostSampler],
        max_candidates: int,
        failed: dict[int, Exception] | None,
    ) -> tuple[StepProposal, list[tuple[int, Written]]]:
        """Returns the inputs with the host samplers' choices at `places`, and the read-back
        records.
        """
        size = min(max_candidates, self.program.network.vocab_size)
        flat, num_positions = np.zeros(_PLACES, np.int32), inputs.is_open_BL.shape[1]
        flat[: len(places)] = [slot * num_positions + index for slot, index, _ in places]
        is_real, is_hosted = np.arange(_PLACES) < len(places), np.zeros(_PLACES, bool)
        read, logprobs_PK, clean_PK, is_greedy, uniform = jax.device_get(
            _call(self._survivors, params, state, inputs, flat, is_real, size=size)
        )
        ids = read.token_N.copy()
        # At padding positions of the chunk, the token can have probability 0.
        logprobs = np.log(np.maximum(read.probability_N, np.finfo(np.float32).tiny))
        found = []
        for number, (slot, index, row) in enumerate(places):
            if failed is not None and slot in failed:
                continue
            num_survivors = int(read.num_candidates_N[number])
            candidates = Candidates(
                index=index,
                ids=read.top_ids_NK[number, :num_survivors],
                logits=read.top_logits_NK[number, :num_survivors],
                logprobs=logprobs_PK[number, :num_survivors],
                clean_logprobs=clean_PK[number, :num_survivors],
                num_survivors=num_survivors,
                is_greedy=bool(is_greedy[number]),
                uniform=float(uniform[number]),
                **row,
            )
            if (sampler := samplers.get(slot)) is not None:
                try:
                    place_of = chosen(sampler, candidates)
                except Exception as error:
                    if failed is None:
                        raise
                    failed[slot] = error
                    continue
                ids[number] = candidates.ids[place_of]
                logprobs[number] = candidates.logprobs[place_of]
                is_hosted[number] = True
            probability = float(np.exp(logprobs[number]))
            found.append((slot, Written(candidates, int(ids[number]), probability, index)))
        if is_hosted.any():
            inputs = _call(self._choose, params, inputs, state, flat, is_hosted, ids, logprobs)
        return inputs, found


def _split_of(params: Params, state: State) -> NamedSharding | None:
    """The split of the rows over the devices of the parameters; None if they do not divide it."""
    split = split_rows(params)
    return None if state.canvas.tokens_BL.shape[0] % num_shares(split) else split


def _call(compiled: Callable[..., Any], params: Params, *rest: Any, **static: Any) -> Any:
    """``compiled(params, ...)``, traced for the devices of the parameters."""
    with devices.exact(split_rows(params)):
        return compiled(params, *rest, **static)


def _hooks(samplers: Mapping[int, HostSampler], name: str) -> dict[int, Callable[..., None]]:
    found = {slot: getattr(sampler, name, None) for slot, sampler in samplers.items()}
    return {slot: hook for slot, hook in found.items() if hook is not None}


def _call_hook(
    hook: Callable[[], None], slot: int, name: int, what: str, failed: dict[int, Exception] | None
) -> None:
    """Calls a hook of a row's host sampler, unless the row has failed."""
    if failed is not None and slot in failed:
        return
    try:
        called(hook, f"row {name}: `{what}` of the host sampler failed")
    except ValueError as error:
        if failed is None:
            raise
        failed[slot] = error


def _without(inputs: StepProposal, slots: Collection[int]) -> StepProposal:
    """Removes the commits of the given rows. The rows end like rows without finite logits."""
    is_finite_B = inputs.filled.is_finite_B.at[jnp.asarray(sorted(slots))].set(False)
    return inputs._replace(filled=inputs.filled._replace(is_finite_B=is_finite_B))


def _at(inputs: StepProposal, places_P: jax.Array, is_real_P: jax.Array) -> At:
    num_positions = inputs.is_open_BL.shape[1]
    row_P, index_P = places_P // num_positions, places_P % num_positions
    key_P = jax.vmap(jax.random.fold_in)(inputs.draw_key_B[row_P], index_P)
    return At(row_N=row_P, index_N=index_P, key_N=key_P, is_real_N=is_real_P)


def _survivors(
    program: Program,
    params: Params,
    state: State,
    inputs: StepProposal,
    places_P: jax.Array,
    is_real_P: jax.Array,
    *,
    size: int,
) -> tuple[ReadBack, jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns for each position the token that the device drew and the `size` largest logits after
    the chain, their log-probabilities ``[P, K]`` after the chain and under the clean logits,
    whether the row is greedy, and a uniform number.

    The logits are those that the token was drawn from.
    """
    at = _at(inputs, places_P, is_real_P)
    drawable_PV, is_grown_P = _drawable(program, params, state, inputs, places_P)
    at = at._replace(is_grown_N=None if is_grown_P is None else is_grown_P & is_real_P)
    chain = step_chain(state)
    prepared = chain.prepare(state.chain_state, inputs.context)
    final_PV = chain.apply(prepared, drawable_PV, at)
    drawn_P = inputs.filled.proposal.tokens_BL.reshape(-1)[places_P]
    read = read_back(final_PV, drawn_P, size=size)
    max_P, rest_P = vocab.max_and_rest(final_PV)
    logprob_PK = (read.top_logits_NK - max_P[:, None]) - jnp.log1p(rest_P)[:, None]
    host_key_P = jax.vmap(lambda key: jax.random.fold_in(key, _HOST_SALT))(at.key_N)
    uniform_P = jax.vmap(jax.random.uniform)(host_key_P)
    clean_PV = drawable_PV.astype(jnp.float32)
    clean_PK = jnp.take_along_axis(clean_PV, read.top_ids_NK, axis=1, mode="clip")
    clean_PK -= jax.nn.logsumexp(clean_PV, axis=1, keepdims=True)
    return read, logprob_PK, clean_PK, chain.is_greedy(at), uniform_P


def _drawable(
    program: Program, params: Params, state: State, inputs: StepProposal, places_P: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the logits before the chain that the candidates were drawn from, and True where the
    sampler head computed them; None if the LM head computed all.
    """
    filled, canvas = inputs.filled, inputs.context
    if filled.level_BL is None:
        return inputs.output.logits(program.network, params, places_P), None
    fill = FillInput(
        network=program.network,
        params=params,
        output=inputs.output,
        chunk=min(program.chunk, inputs.output.num_vectors),
        tokens_BL=canvas.tokens_BL,
        length_B=canvas.length_B,
        is_open_BL=inputs.is_open_BL,
        is_seen_BL=canvas.is_visible_BL,
        chain=state.rules.chain,
        prepared=(),
        key_B=inputs.draw_key_B,
    )
    tokens_BL = jnp.where(inputs.is_open_BL, filled.proposal.tokens_BL, -1)
    read = state.rules.fill.logits(fill, tokens_BL, filled.level_BL)
    return read(places_P, jnp.ones(places_P.shape, bool))


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
    clean_PV = inputs.output.logits(program.network, params, places_P)
    logprob_P = draw.log_prob(clean_PV, ids_P)
    old, rule = inputs.filled.proposal, state.rules.commit
    assert isinstance(rule, CommitRule), "the request was checked"
    at, chain = _at(inputs, places_P, is_hosted_P), step_chain(state)
    drawn = DrawnTokens(
        ids_N=ids_P,
        row_N=at.row_N,
        logprob_N=logprob_P,
        filter_logits=lambda: chain.apply(
            chain.prepare(state.chain_state, inputs.context), clean_PV, at
        ),
    )
    state_P = gather_state(rule, state.rule_state, places_P, inputs.is_open_BL.shape[1])
    score_P, _ = rule.score(state_P, clean_PV, drawn)
    new = Proposal(ids_P, logprob_P, final_logprob_P, score_P)
    new = jax.tree.map(lambda x, y: y.astype(x.dtype), old, new)
    proposal = put(old, places_P, is_hosted_P, new)
    return inputs._replace(filled=inputs.filled._replace(proposal=proposal))


PATIENCE = 10.0
"""Time limit in seconds for matching the candidates of one position."""


def matching(pattern: str, decode: Callable[[Any], str]) -> HostSampler:
    """Returns a host sampler that constrains a row to full matches of `pattern`.

    At each position, a candidate is allowed if the text up to and including it is a prefix of a
    match. `Candidates.choose` selects one of the allowed candidates according to the temperature
    and seed of the row. At the last position, and for any id without text, such as EOS, the text
    must be a full match. The sampler does not look ahead, so it raises an error if the pattern
    needs more or fewer tokens than remain in the row. Given tokens at the start of the row are not
    part of the text.

    A row with such a sampler needs ``order="left_to_right"`` and one step for every new token. If a
    token decodes to part of a character, the incomplete character is decoded as U+FFFD.

    Args:
      pattern: regular expression for the module `regex`, which accepts the syntax of `re`.
      decode: a function that maps ids to text, like `Tokenizer.decode`.

    For some patterns, such as ``(a|a)*[bc]``, the matching time doubles with every character. It is
    limited to `PATIENCE` seconds per position.
    """
    try:
        compiled = regex.compile(pattern)
    except regex.error as error:
        raise SettingError("pattern", pattern, f"is not a regular expression: {error}") from None

    def choose(candidates: Candidates) -> int:
        _check_order(candidates)
        written = candidates.tokens[candidates.first : candidates.index]
        before = decode(written)
        is_last = not candidates.is_hole[candidates.index + 1 :].any()
        end = time.monotonic() + PATIENCE

        def fits(token: int) -> bool:
            text = decode(np.append(written, token))
            is_whole = is_last or text == before
            left = max(end - time.monotonic(), 1e-3)
            return compiled.fullmatch(text, partial=not is_whole, timeout=left) is not None

        try:
            return candidates.choose([fits(token) for token in candidates.ids])
        except TimeoutError:
            raise ValueError(
                f"row {candidates.row}: pattern={pattern!r} takes more than {PATIENCE:g} s at "
                f"position {candidates.index}; avoid nested repeats"
            ) from None

    choose.__name__ = f"matching {pattern!r}"
    return choose


def _check_order(candidates: Candidates) -> None:
    holes = np.flatnonzero(candidates.is_hole[: candidates.index])
    if holes.size:
        raise ValueError(
            f"row {candidates.row}: position {candidates.index} has a hole on its left at "
            f"{holes[0]}; use order='left_to_right' and as many steps as new tokens"
        )
