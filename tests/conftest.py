"""Settings under which every test runs: strict JAX, eight simulated devices, one compile cache.

Programs are compiled without the optimisations of the machine code, which takes a third of the
time. ``DLM_JAX_TEST_COMPILER=full`` compiles as a user does; ``.ci/run`` does so for the laws that
hold bit for bit.
"""

from __future__ import annotations

import gc
import itertools
import os
import signal
from pathlib import Path

# Before JAX is imported, and for the programs that tests start: what one process has compiled the
# others read. XLA logs an error for every CPU program that it reads, about a preference of the
# compiler that it takes for a feature of the machine.
_CACHE = Path(__file__).parent.parent / ".pytest_cache" / "jax"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Where a compiler for TPUs is installed, JAX would look for one first.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_debug_key_reuse", True)

# They decide how the machine code of an operation is made, not which operations there are.
_QUICK = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
)


def pytest_xdist_auto_num_workers() -> int:
    """One more worker than cores, because tests also wait for other processes and threads."""
    return (os.cpu_count() or 1) + 1


def pytest_unconfigure() -> None:
    """What tests have left need not be looked through at the end: it takes a minute."""
    jax.clear_caches()
    gc.collect()
    gc.freeze()


def pytest_configure() -> None:
    """XLA reads its flags when the first array is made, so this is early enough."""
    # What runs in the background may be told to ignore Ctrl-C, and so would what tests start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    asked = os.environ.get("DLM_JAX_TEST_COMPILER", "quick")
    if asked not in ("full", "quick"):
        raise pytest.UsageError(f"DLM_JAX_TEST_COMPILER is 'full' or 'quick', not {asked!r}")
    if asked == "quick":
        # Worker processes of pytest-xdist inherit what the main process has set.
        flags = os.environ.get("XLA_FLAGS", "")
        if _QUICK not in flags:
            os.environ["XLA_FLAGS"] = f"{flags} {_QUICK}".strip()


_tests = itertools.count(1)
_MAPS = Path("/proc/self/maps")


@pytest.fixture(autouse=True)
def _programs_are_let_go():
    """A process may have 65530 memory mappings, of which every program takes a hundred.

    XLA ends the process where there are no more.
    """
    yield
    if next(_tests) % 10 == 0 and _MAPS.exists() and _MAPS.read_bytes().count(b"\n") > 30_000:
        jax.clear_caches()
