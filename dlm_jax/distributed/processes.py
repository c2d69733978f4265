"""Agreement between the processes of a run, and their common end."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


def on_first_process(decide: Callable[[], Any]) -> Any:
    """Runs ``decide`` on process 0 and returns its result, or raises its error, on every process.

    Every process must call this function at the same point. The call returns after process 0 has
    run ``decide``. The result is pickled. An error in process 0 is raised as `ValueError` in the
    other processes.
    """
    if jax.process_count() == 1:
        return decide()
    value, failure = None, None
    if jax.process_index() == 0:
        try:
            value = decide()
        except Exception as error:
            failure = error
    value, message = gathered((value, None if failure is None else str(failure)))[0]
    if failure is not None:
        raise failure
    if message is not None:
        raise ValueError(message)
    return value


def totals(counts: np.ndarray, share: tuple[int, int]) -> np.ndarray:
    """The sum of integer counts over the parts of all processes, on every process.

    Every process must call this function at the same point.
    """
    if jax.process_count() == 1:
        return counts
    own = np.concatenate([[share[0]], counts]).astype(np.int32)
    by_share = {int(one[0]): one[1:] for one in multihost_utils.process_allgather(own)}
    return np.sum(list(by_share.values()), axis=0)


def gathered(value: Any) -> list[Any]:
    """The values of all processes, in process order, on every process.

    Every process must call this function at the same point. Values are pickled, so all processes
    must run the same program.
    """
    if jax.process_count() == 1:
        return [value]
    own = np.frombuffer(pickle.dumps(value), np.uint8)
    sizes = np.asarray(multihost_utils.process_allgather(np.int32(own.size))).reshape(-1)
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: own.size] = own
    parts = np.asarray(multihost_utils.process_allgather(padded))
    return [pickle.loads(part[:size].tobytes()) for part, size in zip(parts, sizes, strict=True)]


def check_same_everywhere(facts: dict[str, Any]) -> None:
    """Raises ValueError on every process if any value differs between processes.

    Every process must call this function at the same point.
    """
    first, *others = gathered(json.loads(json.dumps(facts)))
    for process, other in enumerate(others, 1):
        for name in sorted(first | other):
            if other.get(name) != first.get(name):
                raise ValueError(
                    f"process {process} has a different {name} than process 0 "
                    f"({other.get(name)!r}, not {first.get(name)!r}); start every process with the "
                    "same config and program"
                )


HEARTBEAT_SECONDS = 30
"""Seconds without a heartbeat after which JAX ends the processes of a run that lost another one."""

# The exit code of an error without a known cause.
_UNKNOWN = 70


def run_together(
    work: Callable[[], int],
    code_of: Callable[[BaseException], int],
    tell: Callable[[BaseException], Any],
) -> int:
    """Runs ``work`` on every process of a run, and returns the largest of their exit codes.

    A process that fails ends with its own code, without JAX's shutdown barrier, which would wait
    for the others. JAX then ends the others with SIGABRT, as those of a lost process. With a single
    process, this is ``work()``.

    Args:
      work: returns an exit code, or raises SystemExit or another error.
      code_of: the exit code of an error; 70 if the cause is unknown.
      tell: prints an error.
    """
    # A program that plans for other devices must not start those of this process.
    if not jax.distributed.is_initialized() or jax.process_count() == 1:
        return work()
    try:
        return max(gathered(work()))
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        code = code_of(error)
        if code == _UNKNOWN:
            # If a lost process is the cause, JAX ends this process during the sleep.
            time.sleep(HEARTBEAT_SECONDS + 10)
        tell(error)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    # The coordination service ends with process 0, so processes that fail together end before it.
    time.sleep(3 if jax.process_index() == 0 else 0)
    os._exit(code)
