"""Settings under which every test runs: strict JAX, eight simulated devices, one compile cache."""

from __future__ import annotations

import os
from pathlib import Path

# Before JAX is imported, and for the programs that tests start: what one process has compiled the
# others read. XLA logs an error for every CPU program that it reads, about a preference of the
# compiler that it takes for a feature of the machine.
_CACHE = Path(__file__).parent.parent / ".pytest_cache" / "jax"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_debug_key_reuse", True)
