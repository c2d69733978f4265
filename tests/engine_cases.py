"""Requests for the tests of the engine, and a plain Python model of what it does with them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import toy_model

from dlm_jax.config import SamplingParams
from dlm_jax.inference.engine import Engine
from dlm_jax.inference.request import Request, make_requests
from dlm_jax.inference.results import Row
from dlm_jax.types import Status

# A token a step, so that a request takes as many steps as it asks for tokens.
MODEL = dataclasses.replace(
    toy_model.MODEL,
    sample=SamplingParams(order="left_to_right", chain=("temperature",), ignore_eos=True),
)
SLOTS = 2
CHAINS = (("temperature",), ("temperature", "min_p"))
"""They tell two kinds of requests apart."""


@functools.cache
def request(number: int) -> Request:
    """One of many requests of two kinds, which differ in prompt, length, seed and temperature."""
    steps = 1 + (number * 7) % 11
    settings = {"gen_length": steps, "steps": steps, "chain": CHAINS[number % 2]}
    settings |= {"temperature": 0.5 + number % 3}
    (made,) = make_requests(MODEL, "The cat"[: number % 8], settings, first=number)
    return made


@functools.cache
def alone(number: int) -> Row:
    """What becomes of a request that has an engine for itself."""
    with Engine(MODEL, sizes=(SLOTS,)) as engine:
        (row,) = engine.run([request(number)])
    return row


@dataclasses.dataclass
class Plain:
    """A request in the model: how many steps it wants, and how many it has taken."""

    number: int
    kind: int
    wants: int
    taken: int = 0


class PlainEngine:
    """The engine as its documentation tells it, in lists: no device, no compiler, no tokens.

    Kinds are served in turn. In a turn free slots take waiting requests in order; all rows take
    steps until enough are taken or, while others wait, until one has ended.
    """

    def __init__(self, num_slots: int):
        self.waiting: dict[int, list[Plain]] = {}
        self.running: dict[int, list[Plain]] = {}
        self.order: list[int] = []
        self.called_off: list[int] = []
        self.num_slots, self.count = num_slots, 0

    def submit(self, wants: int, kind: int) -> int:
        one = Plain(self.count, kind, wants)
        waiting = self.waiting.setdefault(kind, [])
        running = self.running.setdefault(kind, [])
        # A kind whose requests were all cancelled before they ran is a new kind.
        if kind in self.order and not running and all(map(self.is_off, waiting)):
            self.order.remove(kind)
        if kind not in self.order:
            self.order.append(kind)
        waiting.append(one)
        self.count += 1
        return one.number

    def live(self) -> list[int]:
        rows = [*self.waiting.values(), *self.running.values()]
        return sorted(one.number for some in rows for one in some if not self.is_off(one))

    def is_off(self, one: Plain) -> bool:
        return one.number in self.called_off

    def cancel(self, number: int) -> None:
        self.called_off.append(number)

    def step(self, num_steps: int) -> dict[int, tuple[Status, int]]:
        """How the requests that come out now have ended, and after how many steps."""
        out = {}
        for place in (self.waiting, self.running):
            for kind, some in place.items():
                out |= {o.number: (Status.CANCELLED, o.taken) for o in some if self.is_off(o)}
                place[kind] = [one for one in some if not self.is_off(one)]
        self.called_off = []
        self._rest()
        if not self.order:
            return out
        kind = self.order.pop(0)
        self.order.append(kind)
        self._fill(kind)
        for _ in range(num_steps):
            rows = self.running[kind]
            ended = [one for one in rows if one.taken == one.wants]
            if len(ended) == len(rows) or (ended and self.waiting[kind]):
                break
            for one in rows:
                one.taken = min(one.taken + 1, one.wants)
        for one in [one for one in self.running[kind] if one.taken == one.wants]:
            out[one.number] = Status.DONE, one.taken
            self.running[kind].remove(one)
        self._rest()
        return out

    def _fill(self, kind: int) -> None:
        for one in self.waiting[kind][: self.num_slots - len(self.running[kind])]:
            self.waiting[kind].remove(one)
            self.running[kind].append(one)

    def _rest(self) -> None:
        self.order = [kind for kind in self.order if self.waiting[kind] or self.running[kind]]


def same_row(ours: Row, theirs: Row, fields: Sequence[str] = ("tokens", "committed")) -> bool:
    """Whether two rows have come out the same, bit for bit."""
    return ours.status == theirs.status and all(
        getattr(ours, name).tobytes() == getattr(theirs, name).tobytes()
        for name in (*fields, "logprobs")
    )
