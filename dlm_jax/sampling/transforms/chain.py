"""The one driver of logit transforms: a chain that runs only what some row asks for.

`seeds/backend_sampling.md`: the whole chain lives in the compiled graph on constant shapes,
whichever rows are active, and every row has its own settings.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from dlm_jax.sampling import draw as drawing
from dlm_jax.sampling import vocab
from dlm_jax.sampling.transforms.protocol import At, Context

MAX_CANDIDATES = 64
"""Rows whose top-k is at most this go on with their candidates alone, not the vocabulary."""

_FEW_SALT = 0x666577


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["transforms"], meta_fields=["names"]
)
@dataclass(frozen=True)
class Chain:
    """Transforms in order, driven as one; itself a `LogitTransform`.

    A transform runs when an active row has a real position in the chunk, by one `lax.cond` on the
    batch (under `vmap` both sides would run). Rows that keep at most `MAX_CANDIDATES` at a top-k
    finish the chain on those candidates alone if what follows ignores ids. Which way a row goes
    depends on its own parameters only, so neighbours cannot change a bit of its result.
    """

    transforms: tuple[Any, ...]
    names: tuple[str, ...] = ()

    def init(self, num_rows: int) -> tuple[Any, ...]:
        """State of each transform."""
        return tuple(t.init(num_rows) for t in self.transforms)

    def prepare(self, state: tuple[Any, ...], context: Context) -> tuple[Any, ...]:
        """What each transform prepares for a step."""
        return tuple(t.prepare(s, context) for t, s in zip(self.transforms, state, strict=True))

    def update(
        self, state: tuple[Any, ...], is_committed_BL: Array, proposal: Any
    ) -> tuple[Any, ...]:
        """State of each transform after a commit."""
        return tuple(
            t.update(s, is_committed_BL, proposal)
            for t, s in zip(self.transforms, state, strict=True)
        )

    def is_active(self) -> Array:
        """True `[B]` where any transform is active."""
        return functools.reduce(jnp.logical_or, (t.is_active() for t in self.transforms))

    def is_greedy(self, at: At) -> Array:
        """True `[N]` where the row's temperature is 0."""
        greedy_N = jnp.zeros(at.row_N.shape, bool)
        for t in self.transforms:
            if hasattr(t, "is_greedy"):
                greedy_N |= t.is_greedy()[at.row_N]
        return greedy_N

    def apply(self, prepared: tuple[Any, ...], logits_NV: Array, at: At) -> Array:
        """Logits `[N, V]`, float32, after every transform."""
        logits_NV = logits_NV.astype(jnp.float32)
        steps = list(zip(self.transforms, prepared, strict=True))
        cut = self._where_few()
        if cut is None:
            return _run_all(steps, logits_NV, at)
        logits_NV = _run_all(steps[:cut], logits_NV, at)
        few_NK, ids_NK, is_few_N = self._few(cut, steps, logits_NV, at)
        rest = at._replace(is_real_N=at.is_real_N & ~is_few_N)
        logits_NV = _run_all(steps[cut:], logits_NV, rest)

        def put_back(x_NV):
            rows_N1 = jnp.arange(x_NV.shape[0])[:, None]
            only_NV = jnp.full_like(x_NV, -jnp.inf).at[rows_N1, ids_NK].set(few_NK)
            return jnp.where(is_few_N[:, None], only_NV, x_NV)

        return jax.lax.cond(is_few_N.any(), put_back, lambda x: x, logits_NV)

    def draw(
        self, prepared: tuple[Any, ...], logits_NV: Array, at: At, *, method: str = "inverse_cdf"
    ) -> Array:
        """Ids `[N]` (int32) alone; see `draw_and_score`."""
        return self.draw_and_score(prepared, logits_NV, at, method=method)[0]

    def draw_and_score(
        self, prepared: tuple[Any, ...], logits_NV: Array, at: At, *, method: str = "inverse_cdf"
    ) -> tuple[Array, Array]:
        """Ids `[N]` (int32), and the log-probability `[N]` they were drawn with, where wanted.

        The argmax of greedy rows, a draw from the rest. Where no transform runs but plain
        temperature, the draw divides as it goes, with the same result bit for bit and no copy of
        the logits. The log-probability (nats, after the whole chain) is 0 unless the chunk holds a
        row whose feedback controller reads it.

        Args:
          prepared: what `prepare` gave for this step.
          logits_NV: clean logits of any float type.
          at: where the positions stand; the draw consumes their keys.
          method: see `dlm_jax.sampling.draw.draw`.
        """
        logits_NV = logits_NV.astype(jnp.float32)
        steps = list(zip(self.transforms, prepared, strict=True))
        is_greedy_N = self.is_greedy(at)
        noise = few_noise = drawing.noise(at.key_N, method=method)
        if method == "gumbel":
            few_noise = jax.vmap(lambda key: jax.random.fold_in(key, _FEW_SALT))(at.key_N)

        def in_full(x_NV, noise, few_noise):
            # a new array: XLA would otherwise copy the logits before it knows which branch runs
            x_NV = jnp.where(at.is_real_N[:, None], x_NV, 0.0)
            return self._draw_in_full(
                steps, x_NV, at, noise, few_noise, is_greedy_N=is_greedy_N, method=method
            )

        divisors = [t for t in self.transforms if hasattr(t, "divisor")]
        if len(divisors) > 1:
            return in_full(logits_NV, noise, few_noise)
        divisor_N = divisors[0].divisor()[at.row_N] if divisors else jnp.ones(at.row_N.shape)

        def divided(x_NV, noise, few_noise):
            ids_N = drawing.choose_with(x_NV, noise, is_greedy_N, divisor_N, method=method)
            return ids_N, jnp.zeros(ids_N.shape, jnp.float32)

        others = [_is_wanted(t, at) for t in self.transforms if not hasattr(t, "divisor")]
        is_wanted = functools.reduce(jnp.logical_or, others, jnp.zeros((), bool))
        return jax.lax.cond(is_wanted, in_full, divided, logits_NV, noise, few_noise)

    def _draw_in_full(
        self,
        steps: list[tuple[Any, Any]],
        logits_NV: Array,
        at: At,
        noise: Array,
        few_noise: Array,
        *,
        is_greedy_N: Array,
        method: str,
    ) -> tuple[Array, Array]:
        """Ids after every transform; rows with few candidates never touch the vocabulary again."""
        readers = [
            _is_wanted(t, at) for t in self.transforms if getattr(t, "reads_final_logprob", False)
        ]
        is_read = functools.reduce(jnp.logical_or, readers, jnp.zeros((), bool))
        zeros_N = jnp.zeros(at.row_N.shape, jnp.float32)

        def scored(x_NV, ids_N):
            score = jax.lax.cond(is_read, drawing.log_prob, lambda x, ids: zeros_N, x_NV, ids_N)
            return ids_N, score

        cut = self._where_few()
        if cut is None:
            logits_NV = _run_all(steps, logits_NV, at)
            return scored(
                logits_NV, drawing.choose_with(logits_NV, noise, is_greedy_N, method=method)
            )
        logits_NV = _run_all(steps[:cut], logits_NV, at)
        few_NK, ids_NK, is_few_N = self._few(cut, steps, logits_NV, at)
        rest = at._replace(is_real_N=at.is_real_N & ~is_few_N)

        def from_few(noise):
            place_N = drawing.choose_with(few_NK, noise, is_greedy_N, method=method)
            return jnp.take_along_axis(ids_NK, place_N[:, None], axis=1)[:, 0]

        def from_all(x_NV, noise):
            x_NV = _run_all(steps[cut:], x_NV, rest)
            # A steered row has its truncations replaced, so it never is among those with few.
            return scored(
                x_NV, drawing.choose_with(x_NV, noise, is_greedy_N | is_few_N, method=method)
            )

        none_N = jnp.zeros(is_few_N.shape, jnp.int32)
        of_few_N = jax.lax.cond(is_few_N.any(), from_few, lambda noise: none_N, few_noise)
        of_all_N, score_N = jax.lax.cond(
            rest.is_real_N.any(), from_all, lambda x, noise: (none_N, zeros_N), logits_NV, noise
        )
        return jnp.where(is_few_N, of_few_N, of_all_N), score_N

    def _few(
        self, cut: int, steps: list[tuple[Any, Any]], logits_NV: Array, at: At
    ) -> tuple[Array, Array, Array]:
        """Final logits and ids of the candidates of the rows that keep few, and which those are."""
        size = min(MAX_CANDIDATES, logits_NV.shape[1])
        top_k_N = self.transforms[cut].count()[at.row_N]
        is_few_N = (top_k_N > 0) & (top_k_N <= size) & ~self.is_greedy(at) & at.is_real_N
        shape = (logits_NV.shape[0], size)
        few_NK, ids_NK = jax.lax.cond(
            is_few_N.any(),
            lambda x: vocab.largest(x, size),
            lambda x: (jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.int32)),
            logits_NV,
        )
        rank_1K = jnp.arange(size, dtype=jnp.int32)[None]
        few_NK = jnp.where(rank_1K < top_k_N[:, None], few_NK, -jnp.inf)
        few_NK = _run_all(steps[cut + 1 :], few_NK, at._replace(is_real_N=is_few_N))
        return few_NK, ids_NK, is_few_N

    def _where_few(self) -> int | None:
        """Place of the first top-k after which no transform looks at ids."""
        for place, t in enumerate(self.transforms):
            if hasattr(t, "count") and all(
                later.ignores_ids for later in self.transforms[place + 1 :]
            ):
                return place
        return None


def _is_wanted(transform: Any, at: At) -> Array:
    return (transform.is_active()[at.row_N] & at.is_real_N).any()


def _run_all(steps: list[tuple[Any, Any]], logits_NV: Array, at: At) -> Array:
    if not steps:
        return logits_NV
    wanted = [_is_wanted(t, at) for t, _ in steps]

    def run(x_NV):
        for is_wanted, (t, prepared) in zip(wanted, steps, strict=True):
            x_NV = jax.lax.cond(
                is_wanted,
                lambda x, t=t, prepared=prepared: t.apply(prepared, x, at),
                lambda x: x,
                x_NV,
            )
        return x_NV

    any_wanted = functools.reduce(jnp.logical_or, wanted)
    return jax.lax.cond(any_wanted, run, lambda x: x, logits_NV)


def chain(*transforms: Any, names: tuple[str, ...] = ()) -> Chain:
    """The transforms as one, in the given order."""
    flat: list[Any] = []
    for t in transforms:
        flat.extend(t.transforms if isinstance(t, Chain) else [t])
    return replace(Chain(tuple(flat)), names=tuple(names))
