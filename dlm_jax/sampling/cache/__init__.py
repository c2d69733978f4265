"""Cache rules, which select the positions that a step computes and those read from a cache."""

from collections.abc import Mapping

from dlm_jax.sampling.cache.approximate import Dual, Prefix
from dlm_jax.sampling.cache.cache_policy import CacheContext, CachePlan, CacheRule, CacheState
from dlm_jax.sampling.cache.exact import Exact

CACHE_RULES: Mapping[str, type[CacheRule]] = {rule.name: rule for rule in (Exact, Prefix, Dual)}
"""Cache rules, keyed by the value of ``cache``. The value ``none`` selects no rule."""

__all__ = [
    "CACHE_RULES",
    "CacheContext",
    "CachePlan",
    "CacheRule",
    "CacheState",
    "Dual",
    "Exact",
    "Prefix",
]
