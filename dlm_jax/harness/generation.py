"""Texts behind contexts until a stop, each in a row that ends there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from dlm_jax.harness.pairs import Pair, encoded
from dlm_jax.inference.engine import Engine
from dlm_jax.inference.model import Model
from dlm_jax.inference.reader import Reader
from dlm_jax.inference.request import Request, make_requests
from dlm_jax.inference.waiting import Ticket

_LENGTH = 256
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names of a length, of which the first that is given counts, as lm-evaluation-harness has it."""

_READ = ("do_sample", "until", *_LENGTHS, "temperature")

_WITHOUT_COUNTERPART = frozenset((
    "assistant_early_exit", "bad_words_ids", "best_of", "bos_token_id", "cache_implementation",
    "constraints", "diversity_penalty", "early_stopping", "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty", "eos_token_id", "epsilon_cutoff", "eta_cutoff",
    "exponential_decay_length_penalty", "force_words_ids", "forced_bos_token_id",
    "forced_eos_token_id", "include_stop_str_in_output", "length_penalty", "max_time", "min_length",
    "min_new_tokens", "min_tokens", "n", "no_repeat_ngram_size", "num_beam_groups", "num_beams",
    "num_return_sequences", "output_attentions", "output_hidden_states", "output_logits",
    "output_scores", "pad_token_id", "penalty_alpha", "prompt_lookup_num_tokens",
    "remove_invalid_values", "renormalize_logits", "return_dict_in_generate", "sequence_bias",
    "skip_special_tokens", "spaces_between_special_tokens", "suppress_tokens", "synced_gpus",
    "top_h", "use_beam_search", "use_cache",
))  # fmt: skip
"""Generation arguments of other models that no row of this library has; a setting is none."""

_NEUTRAL = (None, False, 0, 1, "")


class Asked(NamedTuple):
    """A text that is asked for.

    Attributes:
      context: that it follows.
      until: texts that end it, which it does not hold.
      length: new tokens at most; None: as many as lm-evaluation-harness has, 256.
      settings: of the row.
      is_chat: whether names of specials in the context stand for them.
      unread: generation arguments of other models that would change the text of those.
    """

    context: str
    until: tuple[str, ...]
    length: int | None
    settings: Mapping[str, Any]
    is_chat: bool = False
    unread: Mapping[str, Any] = MappingProxyType({})


def asked_of(context: str, given: Mapping[str, Any], *, is_chat: bool = False) -> Asked:
    """What a request of lm-evaluation-harness asks for.

    ``do_sample`` false, which is the default, means temperature 0; every setting may stand beside
    it by its name.

    Raises:
      ValueError: ``until`` is neither a text nor texts, ``do_sample`` no bool, or a length no
        integer of at least 0.
    """
    until = given.get("until") or ()
    until = (until,) if isinstance(until, str) else until
    is_list = isinstance(until, list | tuple)
    if not is_list or not all(isinstance(text, str) for text in until):
        raise ValueError(f"until={until!r} is not a list of texts; use ['\\n']")
    given = {name: value for name, value in given.items() if value is not None}
    does_sample = given.get("do_sample", False)
    if not isinstance(does_sample, bool):
        raise ValueError(f"do_sample={does_sample!r} is not a bool; use True or False")
    lengths = {name: given[name] for name in _LENGTHS if name in given}
    for name, length in lengths.items():
        if type(length) is not int or length < 0:
            raise ValueError(f"{name}={length!r} is not an integer of at least 0; use {_LENGTH}")
    without = {name: given[name] for name in given if name in _WITHOUT_COUNTERPART}
    settings = {n: value for n, value in given.items() if n not in (*_READ, *without)}
    if not does_sample:
        settings["temperature"] = 0.0
    elif "temperature" in given:
        settings["temperature"] = given["temperature"]
    unread = {name: value for name, value in without.items() if value not in _NEUTRAL}
    length = next(iter(lengths.values()), None)
    return Asked(context, tuple(filter(None, until)), length, settings, is_chat, unread)


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
    found = {place: "" for place, one in enumerate(asked) if one.length == 0}
    requests = {
        place: _request(model, one, common, seed, place)
        for place, one in enumerate(asked) if place not in found
    }  # fmt: skip
    coming = iter(requests.items())
    running: dict[Ticket, tuple[int, Reader]] = {}
    with Engine(model, sizes=(slots,), max_waiting=None) as engine:
        while len(found) < len(asked):
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
    return [found[place] for place in range(len(asked))]


def _request(
    model: Model, asked: Asked, common: Mapping[str, Any], seed: int, place: int
) -> Request:
    try:
        context = encoded(model, asked.context, is_chat=asked.is_chat).astype(np.int32)
        length = min(_LENGTH if asked.length is None else asked.length, model.max_length - 1)
        context = context[max(0, context.size - (model.max_length - length)) :]
        words = Pair(context, 0).seed(seed, asked.until, length, sorted(asked.settings.items()))
        own = {"seed": int(words[0]), "gen_length": length, **asked.settings}
        content: dict[str, Any] = {"tokens": context} if context.size else {"prompt": ""}
        (request,) = make_requests(model, content | own, common)
    except ValueError as error:
        raise ValueError(f"request {place}: {error}") from None
    return request
