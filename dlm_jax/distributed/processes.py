"""Agreement between the processes of one run."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


def on_first_process(decide: Callable[[], Any]) -> Any:
    """What ``decide`` gave on process 0, on every process; what it raised, raised on every one.

    Every process must call it at the same point; none returns before process 0 has decided. The
    result must be JSON. An error arrives on the other processes as `ValueError`.
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
    text = json.dumps(outcome).encode()
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    padded = np.frombuffer(text.ljust(size)[:size], dtype=np.uint8)
    outcome = json.loads(np.asarray(multihost_utils.broadcast_one_to_all(padded)).tobytes())
    if failure is not None:
        raise failure
    if "error" in outcome:
        raise ValueError(outcome["error"])
    return outcome["value"]


def totals(counts: np.ndarray, share: tuple[int, int]) -> np.ndarray:
    """The sum of integers over the shares of all processes, the same on each of them.

    Every process must call it at the same point.

    Args:
      counts: int ``[n]``, of the share that this process has.
      share: which it is, and of how many; several processes may have the same.
    """
    if jax.process_count() == 1:
        return counts
    own = np.concatenate([[share[0]], counts]).astype(np.int32)
    by_share = {int(one[0]): one[1:] for one in multihost_utils.process_allgather(own)}
    return np.sum(list(by_share.values()), axis=0)


def gathered(value: Any) -> list[Any]:
    """What each process gave, on every process; in the order of the processes.

    Every process must call it at the same point. The values are pickled: use it between the
    processes of one program only.
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
    """Refuses, on every process, what differs between processes.

    Every process must call it at the same point.

    Args:
      facts: JSON by name.

    Raises:
      ValueError: a process has another value than process 0; the line names both and the fact.
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
                f"process {process} has another {difference}; "
                "start every process with the same config and program"
            )
