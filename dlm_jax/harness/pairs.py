"""What is to be scored, as ids: a text behind a context, or the windows of a whole text."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np

from dlm_jax.data import HubTokenizer
from dlm_jax.inference.model import Model


class Pair(NamedTuple):
    """A row of tokens of which the last are scored.

    Attributes:
      ids: int32 ``[n]``.
      given: how many of them are given; below n.
    """

    ids: np.ndarray
    given: int

    def seed(self, seed: int, *more: object) -> np.ndarray:
        """Four words of randomness that depend on the request and `seed` alone, uint32 ``[4]``."""
        told = f"{seed} {self.given} {more}".encode() + self.ids.astype("<i4").tobytes()
        return np.frombuffer(hashlib.sha256(told).digest()[:16], "<u4")


def pair_of(model: Model, context: str, continuation: str, *, is_chat: bool = False) -> Pair:
    """A continuation behind its context, of which as much is kept as the canvas holds.

    Spaces at the end of the context belong to the continuation, as lm-evaluation-harness has it.

    Args:
      model: whose tokenizer reads them.
      context: not scored.
      continuation: scored.
      is_chat: whether the names of specials stand for them in the context, as templates write them.

    Raises:
      ValueError: the continuation is empty, exceeds the canvas, or cannot be encoded.
    """
    encode = model.tokenizer.encode
    if is_chat:
        # What follows a template's header stands alone.
        return _fitted(model, encoded(model, context, is_chat=True), encode(continuation))
    kept = context.rstrip()
    continuation = context[len(kept) :] + continuation
    given = encode(kept)
    whole = encode(kept + continuation)
    rest = whole[given.size :]
    if not np.array_equal(whole[: given.size], given) or not rest.size:
        rest = encode(continuation)
    return _fitted(model, given, rest)


def encoded(model: Model, context: str, *, is_chat: bool) -> np.ndarray:
    """Ids of a context; in a chat the names of specials stand for them."""
    if is_chat and isinstance(model.tokenizer, HubTokenizer):
        return model.tokenizer.encode_marked(context)
    return model.tokenizer.encode(context)


def _fitted(model: Model, given: np.ndarray, rest: np.ndarray) -> Pair:
    if not rest.size:
        raise ValueError("the continuation has no token; give some text")
    if rest.size > model.max_length:
        raise ValueError(
            f"continuation of {rest.size} tokens exceeds the model's canvas of {model.max_length}; "
            "use loglikelihood_rolling for whole texts"
        )
    room = model.max_length - rest.size
    given = given[max(0, given.size - room) :]
    return Pair(np.concatenate([given, rest]).astype(np.int32), int(given.size))


def windows_of(model: Model, text: str) -> list[Pair]:
    """A whole text in windows that score each token once; the last has all the context it can.

    Raises:
      ValueError: the text is empty or cannot be encoded.
    """
    ids = model.tokenizer.encode(text).astype(np.int32)
    if not ids.size:
        raise ValueError("the text is empty; give one to score")
    size = model.max_length
    found = [Pair(ids[first : first + size], 0) for first in range(0, ids.size, size)]
    rest = ids.size % size
    if rest and len(found) > 1:
        found[-1] = Pair(ids[-size:], size - rest)
    return found
