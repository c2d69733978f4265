"""Candidates at a position for a host sampler, and read-back records of commits.

The chain runs on the device, and the caller receives the remaining candidates with their logits.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np


class Candidates(NamedTuple):
    """Candidates at one position after the device part of the chain, most likely first.

    They come from the head that drew the token: the sampler head in waves, and otherwise the LM
    head.

    Attributes:
      row: index of the row in the result, or in the batch of a custom loop.
      index: position on the canvas.
      step: index of the step of this row, starting at 0.
      tokens: int32, live canvas of the row at the start of the step; MASK at holes.
      is_hole: True at the holes of `tokens`.
      first: position of the first token that is not given.
      ids: int32 ``[n]``, ids of the candidates.
      logits: float32 ``[n]``, after the chain.
      logprobs: float32 ``[n]``, log-probability of each candidate in nats, normalised over all
        remaining candidates.
      clean_logprobs: float32 ``[n]``, log-probability of each candidate in nats under the clean
        logits, as in ``Texts.logprobs``.
      num_survivors: number of remaining candidates; more than ``n`` if the list is truncated.
      is_greedy: whether the temperature of the row is 0.
      uniform: uniform random number in [0, 1), which depends on the seed of the row, the position
        and the step.
    """

    row: int
    index: int
    step: int
    tokens: np.ndarray
    is_hole: np.ndarray
    first: int
    ids: np.ndarray
    logits: np.ndarray
    logprobs: np.ndarray
    clean_logprobs: np.ndarray
    num_survivors: int
    is_greedy: bool
    uniform: float

    def choose(self, is_allowed: Sequence[bool] | np.ndarray) -> int:
        """Returns one of the allowed ids: the most likely one for a greedy row, otherwise a random
        one.

        The random id is drawn with `uniform` in proportion to the probabilities. The same seed
        therefore produces the same row, independently of other rows.
        """
        (places,) = np.nonzero(np.asarray(is_allowed, bool))
        if not places.size:
            shown = f"none of the {self.ids.size} candidates is allowed"
            remedy = "allow more, or truncate less"
            if self.num_survivors > self.ids.size:
                shown += f", of {self.num_survivors} that survived"
                remedy = f"raise max_candidates above {self.ids.size}"
            raise ValueError(f"row {self.row}: {shown} at position {self.index}; {remedy}")
        if self.is_greedy:
            return int(self.ids[places[0]])
        logprobs = self.logprobs[places].astype(np.float64)
        upto = np.cumsum(np.exp(logprobs - logprobs[0]))
        return int(self.ids[places[np.searchsorted(upto, self.uniform * upto[-1], side="right")]])


class Written(NamedTuple):
    """A committed token and its candidates.

    Attributes:
      candidates: the candidates at the position.
      token: id of the token that was written.
      probability: probability of the token after the whole chain, under the distribution that the
        token was drawn from.
      place: position of the token in the returned row, which can differ from ``candidates.index``
        after edits; -1 for a deleted token.
    """

    candidates: Candidates
    token: int
    probability: float
    place: int

    def to_json(self, size: int) -> dict[str, Any]:
        """Returns a JSON object with the `size` most likely candidates. The keys are step, index,
        place, token, probability, num_survivors, ids and logits, as in this class and `Candidates`.
        """
        seen = self.candidates
        return {
            "step": seen.step,
            "index": seen.index,
            "place": self.place,
            "token": self.token,
            # The shortest decimal numbers with the same float32 values.
            "probability": float(str(np.float32(self.probability))),
            "num_survivors": seen.num_survivors,
            "ids": seen.ids[:size].tolist(),
            "logits": [float(str(logit)) for logit in seen.logits[:size].astype(np.float32)],
        }


def moved(records: Iterable[Written], origin: np.ndarray) -> list[Written]:
    """Updates the positions of the records after edits. `origin` contains the previous index of
    each position, or -1 for a new position.
    """
    places = {int(before): place for place, before in enumerate(origin) if before >= 0}
    return [record._replace(place=places.get(record.place, -1)) for record in records]


HostSampler = Callable[[Candidates], int]
"""A function that returns one of ``candidates.ids``. It can have two methods.

``accept(written)`` is called with the `Written` of each token committed in a row with this sampler,
from left to right. Remasking and edits can remove the token later; ``candidates.tokens`` is the
current canvas. ``reset(row)`` is called before the first step of a row; `row` is the index of the
row, as in `Candidates`.
"""


def chosen(sampler: HostSampler, candidates: Candidates) -> int:
    """Calls `sampler` and returns the index of its choice within the candidates."""
    where = f"row {candidates.row}: the host sampler"
    at = f"at position {candidates.index}"
    token = called(functools.partial(sampler, candidates), f"{where} failed {at}")
    try:
        is_id = not isinstance(token, bool) and operator.index(token) is not None
    except TypeError:
        is_id = False
    (places,) = np.nonzero(candidates.ids == int(token)) if is_id else ([],)
    if not len(places):
        raise ValueError(
            f"{where} chose {shown(token)} {at}, which is not one of its {len(candidates.ids)} "
            f"candidates; return one of candidates.ids"
        )
    return int(places[0])


def called(fn: Callable[[], Any], failure: str) -> Any:
    """Calls the user function `fn` and converts its exceptions to ValueErrors."""
    try:
        return fn()
    except (Exception, SystemExit) as error:  # any exception of a user function
        if isinstance(error, ValueError):
            raise
        why = " ".join(str(error).split())
        raise ValueError(f"{failure}: {type(error).__name__}: {why}") from error


def shown(value: object) -> str:
    """Formats a user value for an error message. Numbers and strings are shown, and other values
    are replaced by their type.
    """
    is_plain = value is None or isinstance(value, str | int | float | np.integer)
    return repr(value)[:60] if is_plain else f"a {type(value).__name__}"
