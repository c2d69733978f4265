"""The chain of logit transforms, which runs only transforms that at least one row uses.

The chain is compiled with static shapes that do not depend on which rows are active, and every row
has its own settings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from dlm_jax.sampling import vocab
from dlm_jax.sampling.transforms import resident
from dlm_jax.sampling.transforms.bias import LogitBias
from dlm_jax.sampling.transforms.temperature import Temperature
from dlm_jax.sampling.transforms.transform import (
    At,
    Context,
    LogitTransform,
    Pointwise,
    function_transform,
    has_memory,
)
from dlm_jax.sampling.transforms.truncate import MAX_CANDIDATES, TopK
from dlm_jax.settings import pytree
from dlm_jax.types import returned

_Steps = list[tuple[Any, Any]]


def any_active(transforms: Iterable[Any], at: At) -> Array:
    """True if the chunk has a real position in a row where one of the transforms is active."""
    is_any = jnp.zeros((), bool)
    for t in transforms:
        is_any |= (t.is_active()[at.row_N] & at.is_real_N).any()
    return is_any


def run_all(steps: _Steps, logits_NV: Array, at: At) -> Array:
    """The logits after all transforms that any row of the chunk uses."""
    if not steps:
        return logits_NV
    in_kernel = resident.runs_here(logits_NV.shape[1])
    groups: list[_Steps] = []
    for step in steps:
        is_joined = in_kernel and groups and _has_change(step[0]) and _has_change(groups[-1][0][0])
        groups[-1].append(step) if is_joined else groups.append([step])

    def run(x_NV: Array) -> Array:
        for group in groups:

            def apply(x_NV: Array, group: _Steps = group) -> Array:
                t, state = group[0]
                if _has_change(t):
                    gathered = [t.gather(at) for t, _ in group]
                    return resident.change_all(gathered, at.is_real_N, x_NV)
                new_NV = t.apply(state, x_NV, at)
                return returned(new_NV, t, "apply", "N, V", x_NV.shape, jnp.float32)

            is_any = any_active([t for t, _ in group], at)
            x_NV = jax.lax.cond(is_any, apply, lambda x: x, x_NV)
        return x_NV

    return jax.lax.cond(any_active([t for t, _ in steps], at), run, lambda x: x, logits_NV)


def _has_change(transform: Any) -> bool:
    """True if the transform can run in a kernel."""
    return isinstance(transform, Pointwise) and type(transform).apply is Pointwise.apply


@pytree
class Chain:
    """A sequence of transforms.

    A transform runs if the chunk has a real position in an active row. One `lax.cond` makes this
    choice for the whole batch (under `vmap`, both branches would run). Rows in which a top-k keeps
    at most `MAX_CANDIDATES` finish the chain on only those candidates if the following transforms
    ignore ids. This depends only on the parameters of the row, so the result of a row is bitwise
    independent of other rows.
    """

    transforms: tuple[Any, ...]
    names: tuple[str, ...] = dataclasses.field(default=(), metadata={"static": True})

    def at_progress(self, progress_B: Array) -> Chain:
        """The chain for a step; `progress_B` is the fraction of steps taken, in [0, 1]."""
        moved = (
            t.at_progress(progress_B) if isinstance(t, Temperature) else t for t in self.transforms
        )
        return replace(self, transforms=tuple(moved))

    def start(self, context: Context) -> tuple[Any, ...]:
        """The memory before the first step: the state of each transform that has one, else `()`."""
        return tuple(t.init(context) if has_memory(t) else () for t in self.transforms)

    def init(self, context: Context, memory: tuple[Any, ...] | None = None) -> tuple[Any, ...]:
        """State of each transform for a step; a `memory` of None is that before the first step."""
        kept = self.start(context) if memory is None else memory
        pairs = zip(self.transforms, kept, strict=True)
        return tuple(one if has_memory(t) else t.init(context) for t, one in pairs)

    def update(
        self, memory: tuple[Any, ...], is_committed_BL: Array, proposal: Any
    ) -> tuple[Any, ...]:
        """The memory after the commits of a step; a `ValueError` that names the transform if it has
        another form than that before.
        """
        pairs = zip(self.transforms, memory, strict=True)
        after = tuple(t.update(one, is_committed_BL, proposal) for t, one in pairs)
        for t, old, new in zip(self.transforms, memory, after, strict=True):
            if jax.tree.structure(old) != jax.tree.structure(new) or any(
                (jnp.shape(x), jnp.result_type(x)) != (jnp.shape(y), jnp.result_type(y))
                for x, y in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
            ):
                raise ValueError(
                    f"{type(t).__name__}.update returned another state than init; return arrays of "
                    "the same structure, shapes and dtypes"
                )
        return after

    def banned(self, num_rows: int, vocab_size: int) -> Array:
        """True `[B, V]` where a bias of -inf bans the id for the row."""
        is_banned_BV = jnp.zeros((num_rows, vocab_size), bool)
        rows_B1 = jnp.arange(num_rows)[:, None]
        for t in self.transforms:
            if isinstance(t, LogitBias):
                is_ban_BK = t.bias_BK == -jnp.inf
                is_banned_BV = is_banned_BV.at[rows_B1, t.ids_BK].max(is_ban_BK, mode="drop")
        return is_banned_BV

    def is_greedy(self, at: At) -> Array:
        """True `[N]` where the row's temperature is 0."""
        is_greedy_N = jnp.zeros(at.row_N.shape, bool)
        for t in self.transforms:
            if isinstance(t, Temperature):
                is_greedy_N |= (t.temperature_B == 0)[at.row_N]
        return is_greedy_N

    def apply(self, state: tuple[Any, ...], logits_NV: Array, at: At) -> Array:
        """Logits `[N, V]`, float32, after every transform."""
        logits_NV = logits_NV.astype(jnp.float32)
        steps = list(zip(self.transforms, state, strict=True))
        cut, is_few_N = self._few(logits_NV.shape[1], at)
        logits_NV = run_all(steps[:cut], logits_NV, at)
        if cut == len(steps):
            return logits_NV
        few_NK, ids_NK = _candidates(is_few_N, logits_NV)
        few_NK = self._finish(cut, steps, few_NK, at._replace(is_real_N=is_few_N))
        rest = at._replace(is_real_N=at.is_real_N & ~is_few_N)
        logits_NV = run_all(steps[cut:], logits_NV, rest)

        def put_back(x_NV: Array) -> Array:
            rows_N1 = jnp.arange(x_NV.shape[0])[:, None]
            only_NV = jnp.full_like(x_NV, -jnp.inf).at[rows_N1, ids_NK].set(few_NK)
            return jnp.where(is_few_N[:, None], only_NV, x_NV)

        return jax.lax.cond(is_few_N.any(), put_back, lambda x: x, logits_NV)

    def draw(
        self,
        state: tuple[Any, ...],
        logits_NV: Array,
        at: At,
        *,
        is_scored: Array | bool | None = None,
    ) -> tuple[Array, Array]:
        """Ids `[N]` (int32), and their log-probabilities `[N]` in nats after the whole chain.

        Greedy rows take the argmax, and other rows sample. The log-probabilities are 0 unless
        `is_scored`; None means that they are needed if a row in the chunk has a feedback
        controller, which reads them. They are NaN or -inf where the chain leaves no finite logit or
        makes one NaN.
        """
        if is_scored is None:
            is_scored = any_active([t for t in self.transforms if has_memory(t)], at)
        logits_NV = logits_NV.astype(jnp.float32)
        steps = list(zip(self.transforms, state, strict=True))
        noise = vocab.noise(at.key_N)
        zeros_N = jnp.zeros(at.row_N.shape, jnp.float32)
        none = jnp.zeros(at.row_N.shape, jnp.int32), zeros_N
        cut, is_few_N = self._few(logits_NV.shape[1], at)
        rest = at._replace(is_real_N=at.is_real_N & ~is_few_N)
        takes_best_N = self.is_greedy(at) | is_few_N

        def score(x_NK: Array, place_N: Array, sums: tuple[Array, Array] | None = None) -> Array:
            chosen_N = jnp.take_along_axis(x_NK, place_N[:, None], axis=1)[:, 0]
            unscored_N = jnp.where(jnp.isfinite(chosen_N), 0.0, jnp.nan)
            return jnp.where(is_scored, vocab.log_prob(x_NK, place_N, sums), unscored_N)

        # This creates a new array, because XLA would otherwise copy the logits before a branch that
        # changes them. The logits in the padding are distinct, because ties need additional passes.
        # The functions in conditionals are new in each call, because JAX caches the trace of a
        # branch for the lifetime of its function.
        unlike_1V = -jnp.arange(logits_NV.shape[1], dtype=jnp.float32)[None]
        logits_NV = jnp.where(at.is_real_N[:, None], logits_NV, unlike_1V)
        logits_NV = run_all(steps[:cut], logits_NV, at)
        few_NK, ids_NK = _candidates(is_few_N, logits_NV)

        def from_many(x_NV: Array) -> tuple[Array, Array]:
            x_NV = run_all(steps[cut:], x_NV, rest)
            needs_sums = ~takes_best_N.all() | is_scored
            unknown = zeros_N + 1.0, jnp.ones((len(zeros_N), vocab.width_of(x_NV.shape[1])))
            sums = jax.lax.cond(needs_sums, lambda x: vocab.exp_columns(x), lambda x: unknown, x_NV)
            ids_N = vocab.choose_with(x_NV, noise, takes_best_N, weight_NC=sums[1])
            return ids_N, score(x_NV, ids_N, sums)

        token_N, score_N = jax.lax.cond(rest.is_real_N.any(), from_many, lambda x: none, logits_NV)
        if cut == len(steps):
            return token_N, score_N

        def from_few(noise: Array) -> tuple[Array, Array]:
            final_NK = self._finish(cut, steps, few_NK, at._replace(is_real_N=is_few_N))
            place_N = vocab.draw_with(final_NK, noise)
            of_few_N = jnp.take_along_axis(ids_NK, place_N[:, None], axis=1)[:, 0]
            return of_few_N, score(final_NK, place_N)

        of_few = jax.lax.cond(is_few_N.any(), from_few, lambda noise: none, noise)
        return jnp.where(is_few_N, of_few[0], token_N), jnp.where(is_few_N, of_few[1], score_N)

    def _few(self, num_logits: int, at: At) -> tuple[int, Array]:
        """Index of the first top-k after which no transform reads ids (the number of transforms if
        there is none), and True `[N]` for the real positions that continue with its candidates.

        Greedy rows and rows with a memory later in the chain are excluded.
        """
        for place, t in enumerate(self.transforms):
            later = self.transforms[place + 1 :]
            if isinstance(t, TopK) and all(isinstance(t, Pointwise) for t in later):
                top_k_N = t.count()[at.row_N]
                is_few_N = (top_k_N > 0) & (top_k_N <= min(MAX_CANDIDATES, num_logits))
                for t in filter(has_memory, later):
                    is_few_N &= ~t.is_active()[at.row_N]
                return place, is_few_N & ~self.is_greedy(at) & at.is_real_N
        return len(self.transforms), jnp.zeros(at.row_N.shape, bool)

    def _finish(self, cut: int, steps: _Steps, few_NK: Array, at: At) -> Array:
        """Final logits of the candidates in descending order, at positions with few candidates."""
        rank_1K = jnp.arange(few_NK.shape[1], dtype=jnp.int32)[None]
        top_k_N = self.transforms[cut].count()[at.row_N]
        few_NK = jnp.where(rank_1K < top_k_N[:, None], few_NK, -jnp.inf)
        return run_all([step for step in steps[cut + 1 :] if not has_memory(step[0])], few_NK, at)


def _candidates(is_few_N: Array, logits_NV: Array) -> tuple[Array, Array]:
    """The largest logits and their ids, if any position has few candidates."""
    N, V = logits_NV.shape
    size = min(MAX_CANDIDATES, V)
    none = jnp.zeros((N, size), jnp.float32), jnp.zeros((N, size), jnp.int32)
    return jax.lax.cond(is_few_N.any(), lambda x: vocab.largest(x, size), lambda x: none, logits_NV)


def chain(
    *transforms: LogitTransform | Chain | Callable[[Array], Array], names: tuple[str, ...] = ()
) -> Chain:
    """Combines transforms, and functions ``logits -> logits``, in the given order."""
    flat: list[Any] = []
    for t in transforms:
        if callable(t) and not isinstance(t, LogitTransform):
            t = function_transform(t)
        flat.extend(t.transforms if isinstance(t, Chain) else [t])
    return replace(Chain(tuple(flat)), names=tuple(names))
