"""Texts behind contexts until a stop, each in a row that ends there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dlm_jax.harness.pairs import Pair, encoded
from dlm_jax.inference.engine import Engine
from dlm_jax.inference.model import Model
from dlm_jax.inference.reader import Reader
from dlm_jax.inference.request import Request, make_requests
from dlm_jax.inference.waiting import Ticket

_LENGTH = 256
_UNREAD = ("do_sample", "until", "max_gen_toks", "max_tokens", "temperature")


class Asked(NamedTuple):
    """A text that is asked for.

    Attributes:
      context: that it follows.
      until: texts that end it, which it does not hold.
      length: new tokens at most; None: as many as lm-evaluation-harness has, 256.
      settings: of the row.
      is_chat: whether names of specials in the context stand for them.
    """

    context: str
    until: tuple[str, ...]
    length: int | None
    settings: Mapping[str, Any]
    is_chat: bool = False


def asked_of(context: str, given: Mapping[str, Any], *, is_chat: bool = False) -> Asked:
    """What a request of lm-evaluation-harness asks for.

    ``do_sample`` false, which is the default, means temperature 0; every setting may stand beside
    it by its name.

    Raises:
      ValueError: ``until`` is neither a text nor texts.
    """
    until = given.get("until") or ()
    until = (until,) if isinstance(until, str) else tuple(until)
    if not all(isinstance(text, str) for text in until):
        raise ValueError(f"until={until!r} is not a list of texts; use ['\\n']")
    lengths = [given[name] for name in ("max_gen_toks", "max_tokens") if given.get(name)]
    settings = {name: value for name, value in given.items() if name not in _UNREAD}
    if given.get("do_sample", False):
        settings |= {k: given[k] for k in ("temperature",) if given.get(k) is not None}
    else:
        settings["temperature"] = 0.0
    return Asked(context, tuple(filter(None, until)), next(iter(lengths), None), settings, is_chat)


def texts(
    model: Model,
    asked: Sequence[Asked],
    *,
    common: Mapping[str, Any],
    slots: int,
    batch_size: int,
    seed: int,
) -> list[str]:
    """The texts, the same in any order and with any batch size.

    Args:
      model: that writes them.
      asked: what is asked for.
      common: settings that count where a request gives none.
      slots: rows of the program.
      batch_size: rows that run at once, `slots` at most.
      seed: of all; each request adds its own.

    Raises:
      ValueError: a setting is unknown or out of range; the line names the request.
    """  # fmt: skip
    requests = [_request(model, one, common, seed, place) for place, one in enumerate(asked)]
    found: dict[int, str] = {}
    coming = iter(enumerate(requests))
    running: dict[Ticket, tuple[int, Reader]] = {}
    with Engine(model, sizes=(slots,), max_waiting=None) as engine:
        while len(found) < len(requests):
            while len(running) < min(batch_size, slots):
                place, request = next(coming, (-1, None))
                if request is None:
                    break
                ticket = engine.submit(request, is_watched=True)
                running[ticket] = place, Reader(model, request, asked[place].until)
            step = engine.step(2)
            for ticket, row in (step.progress | step.finished).items():
                if ticket not in running:
                    continue
                place, reader = running[ticket]
                if row.error is not None:
                    raise row.error
                pieces = reader.pieces(row)
                if pieces and pieces[-1].is_last:
                    found[place] = reader.whole(row)[0]
                    del running[ticket]
                    if ticket not in step.finished:
                        engine.cancel(ticket)
    return [found[place] for place in range(len(requests))]


def _request(
    model: Model, asked: Asked, common: Mapping[str, Any], seed: int, place: int
) -> Request:
    try:
        context = encoded(model, asked.context, is_chat=asked.is_chat).astype(np.int32)
        length = min(asked.length or _LENGTH, model.max_length - 1)
        context = context[max(0, context.size - (model.max_length - length)) :]
        words = Pair(context, 0).seed(seed, asked.until, length, sorted(asked.settings.items()))
        own = {"seed": int(words[0]), "gen_length": length, **asked.settings}
        content: dict[str, Any] = {"tokens": context} if context.size else {"prompt": ""}
        (request,) = make_requests(model, content | own, common)
    except ValueError as error:
        raise ValueError(f"request {place}: {error}") from None
    return request
