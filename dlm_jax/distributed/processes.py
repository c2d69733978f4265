"""Agreement between the processes of a run, and detection of lost processes.

Every process sends a heartbeat, so that no host waits for a lost host.

Collectives block forever if a host is lost. Every process therefore writes an increasing number to
JAX's coordination service. Process 0 reads the numbers of all processes. The other processes read
only the number and the decision of process 0. A process that detects a lost or failed process
prints one line and exits with `EXIT_LOST`, so that the scheduler restarts the job. If process 0 is
lost, the coordination service is lost too, and jaxlib ends the other processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax._src import distributed
from jax.experimental import multihost_utils


def on_first_process(decide: Callable[[], Any]) -> Any:
    """Runs ``decide`` on process 0 and returns its result, or raises its error, on every process.

    Every process must call this function at the same point. The call returns after process 0 has
    run ``decide``. The result is pickled. An error in process 0 is raised as `ValueError` in the
    other processes.
    """
    if jax.process_count() == 1:
        return decide()
    outcome: dict[str, Any] = {}
    failure: Exception | None = None
    if jax.process_index() == 0:
        try:
            outcome = {"value": decide()}
        except Exception as error:
            outcome, failure = {"error": str(error)}, error
    outcome = gathered(outcome)[0]
    if failure is not None:
        raise failure
    if "error" in outcome:
        raise ValueError(outcome["error"])
    return outcome["value"]


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
    if jax.process_count() == 1:
        return
    mine = json.loads(json.dumps(facts))
    first: dict[str, Any] = on_first_process(lambda: mine)
    differing = sorted(name for name in first if mine.get(name) != first[name])
    found = ""
    if differing:
        name = differing[0]
        found = f"{name} than process 0 ({mine.get(name)!r}, not {first[name]!r})"
    elif mine.keys() - first.keys():
        found = "version than process 0"
    for process, difference in enumerate(gathered(found)):
        if difference:
            raise ValueError(
                f"process {process} has a different {difference}; "
                "start every process with the same config and program"
            )


EXIT_LOST = 75
"""Exit code of a process that ends because another process was lost (temporary failure)."""

PATIENCE = 25.0
"""Seconds without a heartbeat after which a process is considered lost."""

_INTERVAL = 1.0
_DONE = "done"
_LEFT = "left"
_ALIVE, _VERDICT = "dlm_jax/alive", "dlm_jax/verdict"


class ProcessWatch:
    """Monitors the other processes in a thread that `start` starts."""

    def __init__(self, client: Any):
        self._client = client
        self._me, self._count = jax.process_index(), jax.process_count()
        self._state = ""
        self._seen: dict[int, tuple[str, float]] = {}
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def done(self) -> None:
        """Reports to the other processes that this process ended normally."""
        self._leave(_DONE)

    def left(self, code: int) -> None:
        """Reports the failure of this process; returns once all processes have read the report."""
        self._leave(f"{_LEFT} {code}")
        if self._me == 0:
            self._tell(f"process 0 ended with code {code}")
        time.sleep(3 * _INTERVAL)

    def _leave(self, state: str) -> None:
        self._state = state
        with contextlib.suppress(Exception):
            self._say()

    def _say(self) -> None:
        sign = self._state or str(time.monotonic_ns())
        self._client.key_value_set(f"{_ALIVE}/{self._me}", sign, allow_overwrite=True)

    def _tell(self, verdict: str) -> None:
        with contextlib.suppress(Exception):
            self._client.key_value_set(_VERDICT, verdict, allow_overwrite=True)

    def _watch(self) -> None:
        while not self._state:
            # The service fails only if process 0 is lost, in which case jaxlib ends this process.
            with contextlib.suppress(Exception):
                self._say()
                verdict = self._found() if self._me == 0 else self._heard()
                if verdict and not self._state:
                    self._end(verdict)
            time.sleep(_INTERVAL)

    def _found(self) -> str:
        """The message of process 0 about a lost process; empty if no process is lost."""
        signs = dict(self._client.key_value_dir_get(_ALIVE))
        for process in range(1, self._count):
            reason = self._judged(process, signs.get(f"{_ALIVE}/{process}", ""))
            if reason:
                return reason
        return ""

    def _heard(self) -> str:
        """The decision of process 0, or a message that process 0 is lost."""
        with contextlib.suppress(Exception):
            return self._client.key_value_try_get(_VERDICT)
        sign = ""
        with contextlib.suppress(Exception):
            sign = self._client.key_value_try_get(f"{_ALIVE}/0")
        return self._judged(0, sign)

    def _judged(self, process: int, sign: str) -> str:
        """The reason why a process with this heartbeat is lost; empty if the process is alive."""
        if sign == _DONE:
            return ""
        if sign.startswith(_LEFT):
            return f"process {process} ended with code {sign.split()[1]}"
        now = time.monotonic()
        before, since = self._seen.setdefault(process, (sign, now))
        if sign != before:
            self._seen[process] = (sign, now)
        elif now - since > PATIENCE:
            return f"process {process} sent no heartbeat for {PATIENCE:.0f} s"
        return ""

    def _end(self, verdict: str) -> None:
        sys.stderr.write(
            f"error: {verdict}; process {self._me} of {self._count} also ends: the same command "
            f"resumes from the last checkpoint\n"
        )
        sys.stderr.flush()
        if self._me == 0:
            # The service ends with this process, so the other processes must read the verdict
            # first.
            self._tell(verdict)
            time.sleep(5 * _INTERVAL)
        os._exit(EXIT_LOST)


@contextlib.contextmanager
def together(end_of: Callable[[Exception], int]) -> Iterator[None]:
    """A context that ends this process if another process of the run is lost, instead of waiting.

    An exception that leaves the context ends the process without JAX's shutdown barrier, which
    would wait for the other processes. If a lost process caused the exception, the exit code is
    `EXIT_LOST`. A run with a single process is not affected.
    """
    if jax.process_count() == 1:
        yield
        return
    watch = ProcessWatch(distributed.global_state.client)
    watch.start()
    try:
        yield
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except Exception as error:
        # If a lost process is the cause, the watch detects this during the sleep and ends this
        # process.
        time.sleep(PATIENCE + 10 * _INTERVAL)
        code = end_of(error)
    else:
        watch.done()
        return
    sys.stdout.flush()
    sys.stderr.flush()
    watch.left(code)
    os._exit(code)
