"""Settings under which every test runs: strict JAX, eight simulated devices."""

from __future__ import annotations

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_debug_key_reuse", True)
