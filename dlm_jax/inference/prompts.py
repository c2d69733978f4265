"""What a request gives of a text, as the canvas that is then denoised.

Given tokens are frozen, MASK marks the holes, and a draft's tokens may be rewritten.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from dlm_jax.data import Tokenizer

HOLE = re.compile(r"<hole(?::(-?\d+))?>")
"""The marker of a gap in a template: ``<hole:12>`` is 12 tokens, ``<hole>`` is ``gen_length``."""

_TYPO = re.compile(r"<\s*hole\b", re.IGNORECASE)

KEYS = ("prompt", "template", "tokens", "infill", "draft")


class Given(NamedTuple):
    """A canvas before the first step.

    Attributes:
      tokens: int32 ``[n]``, MASK at holes.
      is_draft: True at tokens that stand there to be refined; None is nowhere.
    """

    tokens: np.ndarray
    is_draft: np.ndarray | None


def make_canvas(
    tokenizer: Tokenizer, asked: Mapping[str, Any], *, gen_length: int, room: int
) -> Given:
    """The canvas of a request.

    Args:
      tokenizer: text to ids.
      asked: one of ``prompt`` (text that the generated tokens follow), ``template`` (text with
        `HOLE` markers) or ``tokens`` (ids); with ``infill`` true, MASK among the tokens is a hole
        and nothing follows them. ``draft`` is text behind the prompt, to be refined.
      gen_length: new tokens behind the prompt; 0 is as many as there is room for, or none behind a
        draft. The length of a gap whose marker has no number.
      room: tokens the row may hold.

    Raises:
      ValueError: it does not fit, has no hole, holds MASK without ``infill``, or is of the wrong
        kind; one line with the remedy.
    """
    kinds = [name for name in ("prompt", "template", "tokens") if asked.get(name) is not None]
    if len(kinds) > 1:
        raise ValueError(f"{' and '.join(kinds)} exclude each other; give one of them")
    infill = asked.get("infill", False)
    if not isinstance(infill, bool):
        raise ValueError(f"infill={infill!r} is not a bool; use True or False")
    if infill and kinds != ["tokens"]:
        raise ValueError("infill means nothing without tokens; give tokens, or a template")
    draft = asked.get("draft")
    if draft is not None and (infill or kinds == ["template"]):
        raise ValueError("draft stands behind a prompt; it goes with neither template nor infill")
    if kinds == ["template"]:
        text = _text("template", asked["template"])
        given = _template(tokenizer, text, gen_length, room)
        return _check_room(Given(given, None), room, "template")
    if infill:
        given = _ids(tokenizer, asked["tokens"])
        if not (given == tokenizer.mask_id).any():
            raise ValueError(
                f"infill=True, and none of the tokens is MASK ({tokenizer.mask_id}); put it where "
                "a token is wanted"
            )
        return _check_room(Given(given, None), room, "tokens")
    if kinds == ["tokens"]:
        given = _ids(tokenizer, asked["tokens"])
        if (given == tokenizer.mask_id).any():
            raise ValueError(
                f"tokens hold MASK ({tokenizer.mask_id}); set infill=True to have it filled, or "
                "leave it out"
            )
    else:
        prompt = asked.get("prompt")
        given = tokenizer.encode("" if prompt is None else _text("prompt", prompt))
    if draft is not None:
        return _with_draft(tokenizer, given, _text("draft", draft), gen_length, room)
    return Given(_continued(tokenizer, given, gen_length, room), None)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name}={value!r} is not a text; put it in quotes")
    return value


def _ids(tokenizer: Tokenizer, tokens: Any) -> np.ndarray:
    try:
        ids = np.asarray(tokens)
        is_fine = ids.ndim == 1 and ids.size > 0 and np.issubdtype(ids.dtype, np.integer)
    except ValueError:
        is_fine = False
    if not is_fine:
        raise ValueError("tokens must be a list of ids that is not empty")
    beyond = ids[(ids < 0) | (ids >= tokenizer.vocab_size)]
    if beyond.size:
        raise ValueError(
            f"tokens name id {beyond[0]}, outside the vocabulary of {tokenizer.vocab_size}; use 0 "
            f"to {tokenizer.vocab_size - 1}"
        )
    return ids.astype(np.int32)


def _template(tokenizer: Tokenizer, text: str, gen_length: int, room: int) -> np.ndarray:
    for marker in _TYPO.finditer(text):
        if not HOLE.match(text, marker.start()):
            near = text[marker.start() : marker.start() + 12]
            raise ValueError(f"template: {near!r} is no gap; write <hole:8>, or <hole>")
    parts, end = [], 0
    for marker in HOLE.finditer(text):
        length = gen_length if marker[1] is None else int(marker[1])
        if length < 1:
            remedy = "write <hole:8>, say" if marker[1] else "set gen_length, or write <hole:8>"
            raise ValueError(f"template: {marker[0]} is a gap of {length} tokens; {remedy}")
        if length > room:
            raise ValueError(
                f"template: {marker[0]} exceeds the canvas of {room}; shorten it or raise "
                "max_length"
            )
        parts += [tokenizer.encode(text[end : marker.start()]), _holes(tokenizer, length)]
        end = marker.end()
    if not parts:
        raise ValueError("template has no <hole>; write <hole:8> where 8 tokens are wanted")
    return np.concatenate([*parts, tokenizer.encode(text[end:])])


def _holes(tokenizer: Tokenizer, length: int) -> np.ndarray:
    return np.full(length, tokenizer.mask_id, np.int32)


def _check_room(given: Given, room: int, what: str) -> Given:
    if given.tokens.size > room:
        raise ValueError(
            f"{what} of {given.tokens.size} tokens with its holes exceeds the canvas of {room}; "
            "shorten it or raise max_length"
        )
    return given


def _continued(
    tokenizer: Tokenizer, given: np.ndarray, gen_length: int, max_length: int
) -> np.ndarray:
    """Ids of the prompt, then MASK at every token to generate."""
    room = max_length - given.size
    if room < 1:
        raise ValueError(
            f"prompt of {given.size} tokens leaves no room on the canvas of {max_length}; "
            f"shorten it or raise max_length above {given.size}"
        )
    if gen_length > room:
        raise ValueError(
            f"gen_length={gen_length} and a prompt of {given.size} tokens exceed the canvas of "
            f"{max_length}; use gen_length={room} at most or raise max_length"
        )
    return np.concatenate([given, _holes(tokenizer, gen_length or room)])


def _with_draft(
    tokenizer: Tokenizer, given: np.ndarray, text: str, gen_length: int, room: int
) -> Given:
    """Ids of the prompt, those of the draft, and as many holes as asked for."""
    draft = tokenizer.encode(text)
    if not draft.size:
        raise ValueError("draft is empty; give text to refine, or leave it out")
    tokens = np.concatenate([given, draft, _holes(tokenizer, min(gen_length, room + 1))])
    is_draft = np.zeros(tokens.size, bool)
    is_draft[given.size : given.size + draft.size] = True
    return _check_room(Given(tokens, is_draft), room, "prompt and draft")
