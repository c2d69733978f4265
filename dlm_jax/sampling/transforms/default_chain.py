"""Sampling from logits with per-row settings, as one function."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.typing import ArrayLike

from dlm_jax.sampling.transforms.bias import LogitBias
from dlm_jax.sampling.transforms.chain import Chain, chain
from dlm_jax.sampling.transforms.mirostat import Mirostat
from dlm_jax.sampling.transforms.penalties import Dry, Penalties
from dlm_jax.sampling.transforms.temperature import TEMPERATURE_END, Temperature
from dlm_jax.sampling.transforms.transform import At, Context, LogitTransform, has_memory
from dlm_jax.sampling.transforms.truncate import MinP, TopK, TopNSigma, TopP, TypicalP, Xtc
from dlm_jax.settings import UNSET, SettingError, nearest

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
