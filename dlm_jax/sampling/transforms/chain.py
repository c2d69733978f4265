"""The chain of logit transforms, which runs only transforms that at least one row uses.

The chain is compiled with static shapes that do not depend on which rows are active, and every row
has its own settings.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from dlm_jax.pytree import pytree
from dlm_jax.randomness import salted
from dlm_jax.sampling import draw as drawing
from dlm_jax.sampling import vocab
from dlm_jax.sampling.positions import returned
from dlm_jax.sampling.transforms import resident
from dlm_jax.sampling.transforms.transform import (
    At,
    Context,
    LogitTransform,
    function_transform,
    is_wanted,
)
from dlm_jax.sampling.transforms.truncate import MAX_CANDIDATES


def any_wanted(transforms: Iterable[Any], at: At) -> Array:
    """True if `is_wanted` is True for any of the transforms."""
    wanted = [is_wanted(t, at) for t in transforms]
    return functools.reduce(jnp.logical_or, wanted, jnp.zeros((), bool))


def candidates(logits_NV: Array, divisor_N: Array | None = None) -> tuple[Array, Array]:
    """The largest logits, after division by the divisor if there is one, and their ids."""
    return vocab.largest(logits_NV, min(MAX_CANDIDATES, logits_NV.shape[1]), divisor_N)


def no_candidates(logits_NV: Array) -> tuple[Array, Array]:
    """Empty candidates with the same shapes as in `candidates`."""
    shape = (logits_NV.shape[0], min(MAX_CANDIDATES, logits_NV.shape[1]))
    return jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.int32)


def applied(transform: Any, prepared: Any, logits_NV: Array, at: At) -> Array:
    """The logits after one transform."""
    made_NV = transform.apply(prepared, logits_NV, at)
    return returned(made_NV, transform, "apply", "N, V", logits_NV.shape, jnp.float32)


def run_all(
    steps: list[tuple[Any, Any]], logits_NV: Array, at: At, *, is_drawn: bool = False
) -> Array:
    """The logits after all transforms that any row of the chunk uses.

    If they are only drawn from, not differentiated, TPUs run transforms in a kernel.
    """
    if not steps:
        return logits_NV
    in_kernel = is_drawn and resident.runs_here(logits_NV.shape[1])
    groups = resident.groups(steps) if in_kernel else [[step] for step in steps]
    wanted = [any_wanted([t for t, _ in group], at) for group in groups]

    def after(group, x_NV):
        ((t, prepared), *_) = group
        if in_kernel and resident.has_kernel(t):
            return resident.run(group, x_NV, at)
        return applied(t, prepared, x_NV, at)

    def run(x_NV):
        for is_due, group in zip(wanted, groups, strict=True):
            x_NV = jax.lax.cond(is_due, lambda x, group=group: after(group, x), lambda x: x, x_NV)
        return x_NV

    return jax.lax.cond(functools.reduce(jnp.logical_or, wanted), run, lambda x: x, logits_NV)


_FEW_SALT = 0x666577


@pytree
class Chain:
    """A sequence of transforms, which is itself a `LogitTransform`.

    A transform runs if the chunk has a real position in an active row. One `lax.cond` makes this
    choice for the whole batch (under `vmap`, both branches would run). Rows in which a top-k keeps
    at most `MAX_CANDIDATES` finish the chain on only those candidates if the following transforms
    ignore ids. This depends only on the parameters of the row, so the result of a row is bitwise
    independent of other rows.
    """

    transforms: tuple[Any, ...]
    names: tuple[str, ...] = dataclasses.field(default=(), metadata={"static": True})

    def init(self, num_rows: int) -> tuple[Any, ...]:
        """State of each transform."""
        return tuple(t.init(num_rows) for t in self.transforms)

    def at_progress(self, progress_B: Array) -> Chain:
        """The chain for a step; `progress_B` is the fraction of steps taken, in [0, 1]."""
        return replace(self, transforms=tuple(t.at_progress(progress_B) for t in self.transforms))

    def prepare(self, state: tuple[Any, ...], context: Context) -> tuple[Any, ...]:
        """The prepared values of each transform for a step."""
        return tuple(t.prepare(s, context) for t, s in zip(self.transforms, state, strict=True))

    def update(
        self, state: tuple[Any, ...], is_committed_BL: Array, proposal: Any
    ) -> tuple[Any, ...]:
        """State of each transform after the commits of a step."""
        return tuple(
            t.update(s, is_committed_BL, proposal)
            for t, s in zip(self.transforms, state, strict=True)
        )

    def is_active(self) -> Array:
        """True `[B]` where any transform is active."""
        return functools.reduce(jnp.logical_or, (t.is_active() for t in self.transforms))

    def forbids(self, ids_N: Array, row_N: Array) -> Array:
        """True `[N]` where a transform forbids the id for the row."""
        is_forbidden_N = jnp.zeros(row_N.shape, bool)
        for no_N in (t.forbids(ids_N, row_N) for t in self.transforms):
            if no_N is not None:
                is_forbidden_N |= no_N
        return is_forbidden_N

    def banned(self, num_rows: int, vocab_size: int) -> Array:
        """True `[B, V]` where `forbids` is True."""
        is_banned_BV = jnp.zeros((num_rows, vocab_size), bool)
        for no_BV in (t.banned(vocab_size) for t in self.transforms):
            if no_BV is not None:
                is_banned_BV |= no_BV
        return is_banned_BV

    def is_greedy(self, at: At) -> Array:
        """True `[N]` where the row's temperature is 0."""
        greedy_N = jnp.zeros(at.row_N.shape, bool)
        for greedy_B in (t.makes_greedy() for t in self.transforms):
            if greedy_B is not None:
                greedy_N |= greedy_B[at.row_N]
        return greedy_N

    def apply(self, prepared: tuple[Any, ...], logits_NV: Array, at: At) -> Array:
        """Logits `[N, V]`, float32, after every transform."""
        logits_NV = logits_NV.astype(jnp.float32)
        steps = list(zip(self.transforms, prepared, strict=True))
        cut = self.where_few()
        if cut is None:
            return run_all(steps, logits_NV, at)
        logits_NV = run_all(steps[:cut], logits_NV, at)
        is_few_N = self._is_few(cut, logits_NV.shape[1], at)
        few_NK, ids_NK = jax.lax.cond(is_few_N.any(), candidates, no_candidates, logits_NV)
        few_NK = self._finish(cut, steps, few_NK, at._replace(is_real_N=is_few_N))
        rest = at._replace(is_real_N=at.is_real_N & ~is_few_N)
        logits_NV = run_all(steps[cut:], logits_NV, rest)

        def put_back(x_NV):
            rows_N1 = jnp.arange(x_NV.shape[0])[:, None]
            only_NV = jnp.full_like(x_NV, -jnp.inf).at[rows_N1, ids_NK].set(few_NK)
            return jnp.where(is_few_N[:, None], only_NV, x_NV)

        return jax.lax.cond(is_few_N.any(), put_back, lambda x: x, logits_NV)

    def draw(
        self,
        prepared: tuple[Any, ...],
        logits_NV: Array,
        at: At,
        *,
        method: str = "inverse_cdf",
        is_scored: Array | bool | None = None,
    ) -> tuple[Array, Array]:
        """Ids `[N]` (int32), and their log-probabilities `[N]` in nats after the whole chain.

        Greedy rows take the argmax, and other rows sample. The log-probabilities are 0 unless
        `is_scored`; None means that they are needed if a row in the chunk has a feedback
        controller, which reads them.
        """
        if is_scored is None:
            is_scored = any_wanted([t for t in self.transforms if t.reads_final_logprob], at)
        logits_NV = logits_NV.astype(jnp.float32)
        steps = list(zip(self.transforms, prepared, strict=True))
        noise = few_noise = drawing.noise(at.key_N, method=method)
        if method == "gumbel":
            few_noise = salted(at.key_N, _FEW_SALT)
        zeros_N = jnp.zeros(at.row_N.shape, jnp.float32)
        none = jnp.zeros(at.row_N.shape, jnp.int32), zeros_N
        cut, is_greedy_N = self.where_few(), self.is_greedy(at)
        is_few_N = jnp.zeros(at.row_N.shape, bool)
        if cut is not None:
            is_few_N = self._is_few(cut, logits_NV.shape[1], at)
        rest = at._replace(is_real_N=at.is_real_N & ~is_few_N)
        takes_best_N = is_greedy_N | is_few_N
        found = [(i, t.divisor()) for i, t in enumerate(self.transforms)]
        divisors = [(i, divisor_B[at.row_N]) for i, divisor_B in found if divisor_B is not None]
        divisor_N = divisors[0][1] if divisors else zeros_N + 1.0
        few_divisor_N = divisor_N if divisors and cut is not None and divisors[0][0] < cut else None

        # Drawn tokens and their scores in rows with many candidates, and the candidates of all
        # other rows. Both ways give the same bits. The functions in conditionals are new in each
        # call, because JAX caches the trace of a branch for the lifetime of its function.
        def in_place(x_NV: Array) -> tuple[Array, Array, Array, Array]:
            ids_N = jax.lax.cond(
                rest.is_real_N.any(),
                lambda x: drawing.choose_with(x, noise, takes_best_N, divisor_N, method=method),
                lambda x: none[0],
                x_NV,
            )
            few = jax.lax.cond(
                is_few_N.any(), lambda x: candidates(x, few_divisor_N), no_candidates, x_NV
            )
            return ids_N, zeros_N, *few

        def in_copy(x_NV: Array) -> tuple[Array, Array, Array, Array]:
            # This creates a new array, because XLA would otherwise copy the logits before the
            # branch. The logits in the padding are distinct, because ties need additional passes.
            unlike_1V = -jnp.arange(x_NV.shape[1], dtype=jnp.float32)[None]
            x_NV = jnp.where(at.is_real_N[:, None], x_NV, unlike_1V)
            x_NV = run_all(steps[:cut], x_NV, at, is_drawn=True)
            few = jax.lax.cond(is_few_N.any(), candidates, no_candidates, x_NV)

            def draw(x_NV: Array) -> tuple[Array, Array]:
                later = [] if cut is None else steps[cut:]
                x_NV = run_all(later, x_NV, rest, is_drawn=True)
                needs_sums = ~takes_best_N.all() & (method == "inverse_cdf") | is_scored
                unknown = zeros_N + 1.0, vocab.columns(x_NV, 1.0)
                sums = jax.lax.cond(
                    needs_sums, lambda x: vocab.exp_columns(x), lambda x: unknown, x_NV
                )
                ids_N = drawing.choose_with(
                    x_NV, noise, takes_best_N, method=method, weight_NC=sums[1]
                )
                return ids_N, jnp.where(is_scored, drawing.log_prob(x_NV, ids_N, sums), 0.0)

            return *jax.lax.cond(rest.is_real_N.any(), draw, lambda x: none, x_NV), *few

        if len(divisors) > 1:
            token_N, score_N, few_NK, ids_NK = in_copy(logits_NV)
        else:
            first, later = (
                [t for t in part if t.divisor() is None]
                for part in (self.transforms[:cut], self.transforms[cut:])
            )
            is_changed = any_wanted(first, at) | any_wanted(later, rest)
            is_changed |= rest.is_real_N.any() & is_scored
            token_N, score_N, few_NK, ids_NK = jax.lax.cond(
                is_changed, in_copy, in_place, logits_NV
            )
        if cut is None:
            return token_N, score_N

        def from_few(noise: Array) -> tuple[Array, Array]:
            final_NK = self._finish(cut, steps, few_NK, at._replace(is_real_N=is_few_N))
            place_N = drawing.draw_with(final_NK, noise, method=method)
            of_few_N = jnp.take_along_axis(ids_NK, place_N[:, None], axis=1)[:, 0]
            return of_few_N, jnp.where(is_scored, drawing.log_prob(final_NK, place_N), 0.0)

        of_few = jax.lax.cond(is_few_N.any(), from_few, lambda noise: none, few_noise)
        return jnp.where(is_few_N, of_few[0], token_N), jnp.where(is_few_N, of_few[1], score_N)

    def _is_few(self, cut: int, vocab_size: int, at: At) -> Array:
        """True `[N]` for real positions that continue with few candidates.

        Greedy rows and rows with a feedback controller later in the chain are excluded.
        """
        top_k_N = self.transforms[cut].count()[at.row_N]
        is_few_N = (top_k_N > 0) & (top_k_N <= min(MAX_CANDIDATES, vocab_size))
        for t in self.transforms[cut + 1 :]:
            if t.reads_final_logprob:
                is_few_N &= ~t.is_active()[at.row_N]
        return is_few_N & ~self.is_greedy(at) & at.is_real_N

    def _finish(self, cut: int, steps: list[tuple[Any, Any]], few_NK: Array, at: At) -> Array:
        """Final logits of the candidates in descending order, at positions with few candidates."""
        rank_1K = jnp.arange(few_NK.shape[1], dtype=jnp.int32)[None]
        top_k_N = self.transforms[cut].count()[at.row_N]
        few_NK = jnp.where(rank_1K < top_k_N[:, None], few_NK, -jnp.inf)
        later = [step for step in steps[cut + 1 :] if not step[0].reads_final_logprob]
        return run_all(later, few_NK, at)

    def where_few(self) -> int | None:
        """Index of the first top-k after which no transform reads ids."""
        for place, t in enumerate(self.transforms):
            if t.count() is not None and all(
                later.ignores_ids for later in self.transforms[place + 1 :]
            ):
                return place
        return None


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
