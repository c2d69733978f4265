"""Agreement between the processes of a run, and detection of lost processes.

Every process sends a heartbeat, so that no host waits for a lost host, and all processes end with
the same exit code, so that a scheduler never restarts one of them alone.

Collectives block forever if a host is lost. Every process therefore writes an increasing number to
JAX's coordination service. Process 0 reads the numbers of all processes, and the other processes
read the number of process 0. A process that fails, or that detects a lost process, writes the
verdict: an exit code (`EXIT_LOST` for a lost process) and a reason. The first verdict is final, and
every process that reads it prints one line and exits with its code. If process 0 is lost, the
coordination service is lost too, and jaxlib ends the other processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import sys
import threading
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
"""Exit code of the processes that end because another process was lost (temporary failure)."""

PATIENCE = 25.0
"""Seconds without a heartbeat after which a process is considered lost."""

_INTERVAL = 1.0
_DONE = "done"
_ALIVE, _VERDICT = "dlm_jax/alive", "dlm_jax/verdict"


class ProcessWatch:
    """Monitors the other processes in a thread that `start` starts.

    `client` is JAX's client of the coordination service.
    """

    def __init__(self, client: Any):
        self._client = client
        self._me, self._count = jax.process_index(), jax.process_count()
        self._sign = ""
        self._seen: dict[int, tuple[str, float]] = {}
        # Held while this process ends, so that only one of its threads ends it.
        self._ending = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def done(self, code: int) -> int:
        """Reports that this process ended normally with `code`, and waits for the others.

        Returns the code with which all processes end: the largest of their codes.
        """
        self._sign = f"{_DONE} {code}"
        while True:
            self._say()
            with contextlib.suppress(Exception):
                signs = dict(self._client.key_value_dir_get(_ALIVE)).values()
                codes = [int(sign.split()[1]) for sign in signs if sign.startswith(_DONE)]
                if len(codes) == self._count:
                    break
            time.sleep(_INTERVAL / 10)
        self._ending.acquire()
        # The thread ends first: an interpreter that ends while it calls the service aborts.
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(PATIENCE)
        return max(codes)

    def left(self, code: int) -> int:
        """Reports that this process failed with `code`.

        Returns the code with which all processes end, once the others have read it.
        """
        self._ending.acquire()
        verdict = self._decide(f"{code} process {self._me} ended with code {code}")
        self._wait_for_readers()
        return int(verdict.split()[0])

    def _say(self) -> None:
        sign = self._sign or str(time.monotonic_ns())
        with contextlib.suppress(Exception):
            self._client.key_value_set(f"{_ALIVE}/{self._me}", sign, allow_overwrite=True)

    def _read(self, key: str) -> str:
        """The value of a key; empty if there is none, or if the service is lost."""
        with contextlib.suppress(Exception):
            return self._client.key_value_try_get(key)
        return ""

    def _decide(self, verdict: str) -> str:
        """Writes the verdict unless there is one; returns the verdict of all processes."""
        with contextlib.suppress(Exception):  # raised if there is one
            self._client.key_value_set(_VERDICT, verdict, allow_overwrite=False)
        return self._read(_VERDICT) or verdict

    def _watch(self) -> None:
        while not self._stopped.is_set():
            self._say()
            verdict = self._verdict()
            if verdict and self._ending.acquire(blocking=False):
                self._end(verdict)
            self._stopped.wait(_INTERVAL)

    def _verdict(self) -> str:
        """The verdict of all processes, which may be that another process is lost, or empty."""
        if verdict := self._read(_VERDICT):
            return verdict
        others, signs = [0], {f"{_ALIVE}/0": self._read(f"{_ALIVE}/0")}
        if self._me == 0:
            others = range(1, self._count)
            with contextlib.suppress(Exception):
                signs = dict(self._client.key_value_dir_get(_ALIVE))
        now = time.monotonic()
        for process in others:
            sign = signs.get(f"{_ALIVE}/{process}", "")
            before, since = self._seen.setdefault(process, (sign, now))
            if sign != before:
                self._seen[process] = (sign, now)
            elif not sign.startswith(_DONE) and now - since > PATIENCE:
                reason = f"process {process} sent no heartbeat for {PATIENCE:.0f} s"
                return self._decide(f"{EXIT_LOST} {reason}")
        return ""

    def _end(self, verdict: str) -> None:
        code, _, reason = verdict.partition(" ")
        remedy = ": the same command resumes" if int(code) == EXIT_LOST else ""
        sys.stderr.write(
            f"error: {reason}; process {self._me} of {self._count} also ends{remedy}\n"
        )
        sys.stderr.flush()
        self._wait_for_readers()
        os._exit(int(code))

    def _wait_for_readers(self) -> None:
        # The service ends with process 0, so the other processes must read the verdict first.
        time.sleep((5 if self._me == 0 else 3) * _INTERVAL)


def _client() -> Any:
    """JAX's client of the coordination service, which has no public name; None if not found."""
    try:
        from jax._src import distributed

        return distributed.global_state.client
    except (ImportError, AttributeError):
        return None


def run_together(
    work: Callable[[], int],
    code_of: Callable[[BaseException], int],
    tell: Callable[[BaseException], Any],
) -> int:
    """Runs ``work`` on every process of a run, and returns its exit code, equal on all processes.

    If a process of the run is lost or fails, all processes end with one code instead of waiting: a
    process that fails, with its own; if it is lost, the others with `EXIT_LOST`. A failed process
    ends without JAX's shutdown barrier, which would wait for the other processes. With a single
    process, this is ``work()``.

    Args:
      work: returns an exit code, or raises SystemExit or another error.
      code_of: the exit code of an error; 70 if the cause is unknown.
      tell: prints an error.
    """
    # A program that plans for other devices must not start those of this process.
    if not jax.distributed.is_initialized() or jax.process_count() == 1:
        return work()
    if (client := _client()) is None:
        sys.stderr.write(
            f"warning: jax {jax.__version__} hides its coordination service, so this process waits "
            "for lost processes; use another version\n"
        )
        return work()
    watch = ProcessWatch(client)
    watch.start()
    try:
        code, failed = work(), False
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        failed = code != 0
    except BaseException as error:
        code, failed = code_of(error), True
        if code == _UNKNOWN:
            # If another process is the cause, the watch ends this process during the sleep.
            time.sleep(PATIENCE + 10 * _INTERVAL)
        tell(error)
    if not failed:
        return watch.done(code)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(watch.left(code))


_UNKNOWN = 70
