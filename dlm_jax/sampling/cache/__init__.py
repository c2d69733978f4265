"""Cache rules: which positions of each row a step computes, and which are read from a cache."""

from collections.abc import Mapping

from dlm_jax.sampling.cache.approximate import Dual, Prefix
from dlm_jax.sampling.cache.cache_policy import CacheContext, CachePlan, CacheRule, CacheState
from dlm_jax.sampling.cache.exact import Exact

CACHE_RULES: Mapping[str, type[CacheRule]] = {rule.name: rule for rule in (Exact, Prefix, Dual)}
"""Cache rules by the setting ``cache``, in addition to ``none``."""

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
