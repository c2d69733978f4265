"""The chain of logit transforms, which runs only transforms that at least one row uses.

The chain is compiled with static shapes that do not depend on which rows are active, and every row
has its own settings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.typing import ArrayLike

from dlm_jax.sampling import vocab
from dlm_jax.sampling.transforms import resident
from dlm_jax.sampling.transforms.mirostat import Mirostat
from dlm_jax.sampling.transforms.penalties import Dry, LogitBias, Penalties
from dlm_jax.sampling.transforms.temperature import TEMPERATURE_END, Temperature
from dlm_jax.sampling.transforms.transform import (
    At,
    Context,
    LogitTransform,
    Pointwise,
    function_transform,
    has_memory,
)
from dlm_jax.sampling.transforms.truncate import (
    MAX_CANDIDATES,
    MinP,
    TopK,
    TopNSigma,
    TopP,
    TypicalP,
    Xtc,
)
from dlm_jax.settings import UNSET, SettingError, nearest, pytree
from dlm_jax.types import returned

TRANSFORMS: Mapping[str, type[LogitTransform]] = {
    "bias": LogitBias,
    "penalties": Penalties,
    "dry": Dry,
    "temperature": Temperature,
    "top_n_sigma": TopNSigma,
    "top_k": TopK,
    "typical_p": TypicalP,
    "top_p": TopP,
    "min_p": MinP,
    "xtc": Xtc,
    "mirostat": Mirostat,
}
"""Transforms, keyed by their names in a chain, in the order of the default chain."""

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
        """The memory after the commits of a step."""
        pairs = zip(self.transforms, memory, strict=True)
        return tuple(t.update(one, is_committed_BL, proposal) for t, one in pairs)

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


def chain(*transforms: LogitTransform | Chain | Callable[[Array], Array]) -> Chain:
    """Combines transforms, and functions ``logits -> logits``, in the given order."""
    flat: list[Any] = []
    for t in transforms:
        if callable(t) and not isinstance(t, LogitTransform):
            t = function_transform(t)
        flat.extend(t.transforms if isinstance(t, Chain) else [t])
    return Chain(tuple(flat))


def sample_logits(
    logits: Array,
    params: Mapping[str, ArrayLike] | Chain,
    key: Array,
    *,
    previous: ArrayLike | None = None,
    is_scored: Array | bool = True,
) -> tuple[Array, Array]:
    """Token ids, int32 ``[N]``, drawn after the chain of each row, and their log-probabilities.

    The log-probabilities (float32 ``[N]``) are in nats under the distribution after the chain. A
    row with temperature 0 takes the most likely token of what its penalties and truncations leave.
    The token of a row depends only on its own logits, settings and key. The softmax is computed in
    float32. If all logits of a row are -inf, its id is 0. The function can be jitted and vmapped;
    settings are traced, so other values do not compile again.

    Args:
      logits: ``[N, V]``, any float dtype, without NaN and +inf; or ``[V]`` for one row, whose
        results have no axis.
      params: settings of the chain by name, such as ``temperature``, ``top_k``, ``top_p``,
        ``min_p`` or ``repetition_penalty``, each with one value for all rows or ``[N]``. The order
        is that of the default chain (`TRANSFORMS`). A disabled value (`temperature` 1, `top_k` 0,
        `top_p` 1, ...) leaves the logits bitwise unchanged. Or a `chain` of transforms and
        functions in any order, whose settings also have one value or ``[N]``.
      key: typed keys ``[N]``, one per row, each used once; or one key for one row.
      previous: int ``[N, P]``, the tokens that penalties and DRY read, oldest first, padded with -1
        at the end; None if there are none.
      is_scored: False returns zeros in place of log-probabilities, which saves a pass over the
        vocabulary.

    Raises:
      ValueError: a setting is unknown, or a concrete value is out of range. Traced values are not
        checked. Mirostat, the biases of ids and DRY's breakers need a `chain`.

    Source: per-row sampler, section 4. Other than there, ``temperature`` 1 is the neutral value,
    top-p drops a token if the mass before it equals p, and padding is never penalised.
    """
    if logits.ndim == 1:
        previous = None if previous is None else jnp.asarray(previous)[None]
        ids_1, logprob_1 = sample_logits(
            logits[None], params, key[None], previous=previous, is_scored=is_scored
        )
        return ids_1[0], logprob_1[0]
    num_rows, vocab_size = logits.shape
    if key.shape != (num_rows,):
        remedy = f"pass one key per row, for example jax.random.split(key, {num_rows})"
        raise ValueError(f"key has shape {key.shape}; {remedy}")
    full = chain_of(params, num_rows, vocab_size)
    previous_NP = jnp.asarray(-1 if previous is None else previous, jnp.int32)
    previous_NP = jnp.broadcast_to(previous_NP, (num_rows, *(previous_NP.shape[1:] or (1,))))
    is_token_NP = previous_NP >= 0
    length_N = is_token_NP.sum(1, dtype=jnp.int32)
    order_NP = jnp.broadcast_to(jnp.arange(previous_NP.shape[1]), previous_NP.shape)
    context = Context(jnp.maximum(previous_NP, 0), order_NP, is_token_NP, length_N)
    at = At(jnp.arange(num_rows, dtype=jnp.int32), length_N, key, jnp.ones(num_rows, bool))
    return full.draw(full.init(context), logits, at, is_scored=is_scored)


def chain_of(params: Mapping[str, ArrayLike] | Chain, num_rows: int, vocab_size: int) -> Chain:
    """The chain for the `params` of `sample_logits`: the default chain, without the transforms that
    none of the settings concerns.
    """
    if isinstance(params, Chain):
        return jax.tree.map(
            lambda x: jnp.broadcast_to(x, (num_rows,)) if jnp.ndim(x) == 0 else x, params
        )
    classes = [cls for cls in TRANSFORMS.values() if not has_memory(cls)]
    known = {s.name: s for cls in classes for s in cls.settings() if not s.is_list}
    known.pop(TEMPERATURE_END.name)  # it depends on the step
    for name, value in params.items():
        if name not in known:
            why = "is not a setting of sample_logits"
            raise SettingError(name, UNSET, why, nearest(name, tuple(known)))
        if not isinstance(value, Tracer):
            for number in np.unique(np.asarray(value)):
                known[name].checked(number.item())
        if jnp.shape(value) not in ((), (num_rows,)):
            remedy = f"pass one value or {num_rows}"
            raise SettingError(name, UNSET, f"has shape {jnp.shape(value)}", remedy)
    transforms: list[LogitTransform] = []
    for cls in classes:
        if not any(s.activates and s.name in params for s in cls.settings()):
            continue
        fields: dict[str, Any] = {}
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]
            setting = field.metadata.get("setting")
            if setting is None:
                fields[field.name] = vocab_size
            elif field.default is not None or setting.name in params:
                default = jnp.asarray(field.metadata["column"]([setting.default] * num_rows))
                value = params.get(setting.name, default)
                fields[field.name] = jnp.broadcast_to(jnp.asarray(value), default.shape).astype(
                    default.dtype
                )
        transforms.append(cls(**fields))
    return chain(*transforms)
