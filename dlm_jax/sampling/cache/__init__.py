"""Cache rules: what a step computes of each row, beside the keys and values that are kept."""

from collections.abc import Mapping

from dlm_jax.sampling.cache.approximate import Dual, Prefix
from dlm_jax.sampling.cache.cache_policy import CacheContext, CachePlan, CacheRule, CacheState
from dlm_jax.sampling.cache.exact import Exact

CACHE_RULES: Mapping[str, type[CacheRule]] = {rule.name: rule for rule in (Exact, Prefix, Dual)}
"""Cache rules by the setting ``cache``, beside ``none``."""

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
