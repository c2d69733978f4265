"""Chat templates, which convert a conversation to the text format of a model.

Templates are Jinja programs in a model's directory. They run in Jinja's immutable sandbox, without
access to Python attributes, files or modules, and in a separate process (`sandbox`) with limits on
time, memory and output.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import Any

import numpy as np

from dlm_jax.data import HubTokenizer, Tokenizer
from dlm_jax.data.tokenizers import pattern_of

_PROGRAM = Path(__file__).with_name("sandbox.py")
_SECONDS = 10.0
_SECONDS_TO_START = 60.0

_SPECIALS = ("bos_token", "eos_token", "pad_token", "mask_token")

RESERVED = frozenset(
    ("messages", "add_generation_prompt", "begins_answer", "continues", *_SPECIALS)
)
"""Template variables that `ChatTemplate` sets, and arguments of `ChatTemplate.text`."""

Messages = Sequence[Mapping[str, Any]]
"""Turns of a conversation: ``{"role": "user", "content": "..."}``, plus template-specific keys."""

MARK = "\ufdd0"
"""A character that no text has; it marks the ends of ``{% generation %}``."""

_MARK = re.compile(r"\{%[-+]?\s*generation\b")

# Placeholders of digits, which templates copy unchanged. The digit 1 occurs only at the start, so
# that a placeholder after digits is found at its place.
_QUOTE, _END = "17483296", "19638527"


def _quote(number: int) -> str:
    """A placeholder, which differs for each number."""
    return _QUOTE + f"{number:05o}".translate({ord("0"): "8", ord("1"): "9"})


_Encode = Callable[[str], np.ndarray]
"""Maps a rendered text, or its beginning, to its ids."""


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template and its tokenizer.

    Attributes:
      source: the Jinja template.
      tokenizer: tokenizer of the conversations.
      problem: why the template cannot be used; empty if it can.
    """

    source: str
    tokenizer: HubTokenizer
    problem: str = field(default="", kw_only=True)

    def text(
        self,
        messages: Messages,
        /,
        *,
        begins_answer: bool = True,
        continues: bool = False,
        **more: Any,
    ) -> str:
        """The conversation as text, up to the start of the model's answer.

        Args:
          messages: turns, each with ``role`` and ``content``.
          begins_answer: whether to append the header of the answer.
          continues: whether the answer continues the last turn, so that the text ends with the
            content of this turn (Hugging Face's ``continue_final_message``).
          **more: additional template variables, such as ``enable_thinking``.
        """
        given = _variables(messages, more)
        return self._write(given, begins_answer, continues, time.time())

    def ids(
        self,
        messages: Messages,
        /,
        *,
        begins_answer: bool = True,
        continues: bool = False,
        **more: Any,
    ) -> np.ndarray:
        """The token ids of `text` with the same arguments, int32 ``[n]``.

        Only the template writes special tokens: in `messages` and `more`, the names of special
        tokens and of the template's markers are encoded as characters. In the model's own turns,
        markers other than those around a turn are tokens.
        """
        given = _variables(messages, more)
        text, encode, _ = self._rendered(given, begins_answer, continues, time.time())
        return encode(text)

    def turns(self, messages: Messages, /) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Training examples: for each turn of the assistant, the ids before it and its ids, int32.

        The ids before a turn are those of `ids` with the messages before it, which a chat sends.
        The turn ends with the last special token that the template writes in it, such as
        ``<|im_end|>``; a line break after it is not part of the turn, because a generation ends
        there.

        If the template marks its answers with ``{% generation %}``, only marked tokens belong to a
        turn, and turns without a mark are left out.

        Raises:
          ValueError: the template marks no answers, and the ids with a turn do not begin with the
            ids before it; or an answer is marked in several parts, or from within a token.
        """
        for place, message in enumerate(messages):
            if message["role"] == "assistant":
                where = f"message {place + 1}"
                turn = self._turn(messages[:place], messages[: place + 1], where)
                if turn is not None:
                    yield turn

    def _turn(
        self, before: Messages, messages: Messages, where: str
    ) -> tuple[np.ndarray, np.ndarray] | None:
        now = time.time()
        prompt, encode, _ = self._rendered(_variables(before, {}), True, False, now)
        given = encode(prompt)
        written, encode, values = self._rendered(_variables(messages, {}), False, False, now)
        if not _MARK.search(self.source):
            whole = encode(written)
            if not _begins_with(whole, given):
                raise ValueError(
                    f"{where}: the chat template writes other tokens before this answer than a "
                    "chat sends; mark the answer in the template with {% generation %} and "
                    "{% endgeneration %}"
                )
            return given, self._end_of_turn(whole[given.size :])
        parts = self._write(values, False, False, now, marks=True).split(MARK)
        if "".join(parts) != written or len(parts) % 2 == 0:
            raise ValueError(
                "the chat template reads its own {% generation %} marks; put them around "
                "what it writes"
            )
        places = [0, *itertools.accumulate(map(len, parts))]
        others = len(os.path.commonprefix([prompt, written]))
        spans = zip(places[1:-1:2], places[2:-1:2], strict=True)
        spans = [span for span in spans if span[1] > others]
        if not spans:
            return None
        if any(one[1] != two[0] for one, two in itertools.pairwise(spans)):
            raise ValueError(
                f"{where}: the chat template marks this answer in several parts; put it between "
                "one {% generation %} and one {% endgeneration %}"
            )
        whole, marked = encode(written[: spans[-1][1]]), encode(written[: spans[0][0]])
        if not _begins_with(whole, marked):
            raise ValueError(
                f"{where}: the chat template marks this answer from within a token; put "
                "{% generation %} behind a special token or a line break"
            )
        # A mark can begin before the header of the answer, which a chat sends.
        if given.size < marked.size or not _begins_with(whole, given):
            given = marked
        return given, self._end_of_turn(whole[given.size :])

    def _end_of_turn(self, ids: np.ndarray) -> np.ndarray:
        """The ids up to the last special token, if only spaces follow it."""
        special = {*self.tokenizer.textless_ids, *map(self.tokenizer.id_of, self._names)}
        last = max((i for i, id_ in enumerate(ids.tolist()) if id_ in special), default=-1)
        rest = ids[last + 1 :]
        return ids if last < 0 or self.tokenizer.decode(rest).strip() else ids[: last + 1]

    def _rendered(
        self, given: dict[str, Any], begins_answer: bool, continues: bool, now: float
    ) -> tuple[str, _Encode, dict[str, Any]]:
        """The text with placeholders for names of special tokens in the messages, the function
        that encodes it, and the template's variables with the placeholders.
        """
        text = self._write(given, begins_answer, continues, now)
        # A template can read markers in a turn, such as those around a tool's result. Then they are
        # its own, except those around the turn.
        for names in (self._markers, self._names):
            quoted, quotes = self._quoted(given, names)
            if not quotes:
                return text, self.tokenizer.encode_marked, given
            # The template is rendered again with placeholders for these names, so that the names in
            # the result are its own.
            written = self._write(quoted, begins_answer, continues, now)
            plain = written
            for placeholder, name in quotes.items():
                plain = plain.replace(placeholder, name)
            if plain == text:
                encode = self.tokenizer.encode_quoted
                return written, functools.partial(encode, names=names, quotes=quotes), quoted
        read = ", ".join(sorted(quotes.values()))
        raise ValueError(
            f"the chat template reads {read} in the messages, which cannot be encoded as text "
            "then; remove them from the messages"
        )

    def _quoted(
        self, given: dict[str, Any], names: frozenset[str]
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """The variables with placeholders for `names`, and the name of each placeholder.

        The model itself writes markers within its turns, so in these only those around a turn have
        placeholders.
        """
        quotes: dict[str, str] = {}

        def change(value: Any, names: frozenset[str]) -> Any:
            """The value with placeholders in all its strings, including keys."""
            if isinstance(value, str):
                return pattern_of(names).sub(
                    lambda name: quotes.setdefault(name[0], _quote(len(quotes))), value
                )
            if isinstance(value, Mapping):
                return {change(key, names): change(one, names) for key, one in value.items()}
            if isinstance(value, list | tuple):
                return [change(one, names) for one in value]
            return value

        try:
            turns = [
                change(turn, self._names if turn["role"] == "assistant" else names)
                for turn in given["messages"]
            ]
            quoted = change(given | {"messages": None}, names) | {"messages": turns}
        except RecursionError:
            raise ValueError("the messages are nested too deeply") from None
        return quoted, {placeholder: name for name, placeholder in quotes.items()}

    def specials(self) -> dict[str, str]:
        """The texts of BOS, EOS, PAD and MASK for the template; '' for a missing token."""
        tokenizer = self.tokenizer
        names = {
            "bos_token": tokenizer.bos_id,
            "eos_token": tokenizer.eos_id,
            "pad_token": tokenizer.pad_id,
            "mask_token": tokenizer.mask_id,
        }
        return {name: "" if id_ is None else tokenizer.token(id_) for name, id_ in names.items()}

    @functools.cached_property
    def _names(self) -> frozenset[str]:
        """Names of tokens that no turn can contain: special tokens, and markers around a turn,
        which some files do not declare special.
        """
        return self.tokenizer.special_names | self.tokenizer.markers_in(self._probe("user"))

    @functools.cached_property
    def _markers(self) -> frozenset[str]:
        """Names of tokens that only the template and the model can write: `_names`, and markers
        that the template writes elsewhere, such as those of other roles.
        """
        texts = [self.source, self._probe("user", "assistant", "user", begins_answer=True)]
        texts.append(self._probe("system", "user", begins_answer=True))
        return self._names | self.tokenizer.markers_in("\n".join(texts))

    def _probe(self, *roles: str, begins_answer: bool = False) -> str:
        """A conversation of these roles as text; empty if the template rejects it."""
        with contextlib.suppress(ValueError):
            probe = _variables([{"role": role, "content": "a"} for role in roles], {})
            return self._write(probe, begins_answer, continues=False, now=0.0)
        return ""

    def _write(
        self,
        given: dict[str, Any],
        begins_answer: bool,
        continues: bool,
        now: float,
        *,
        marks: bool = False,
    ) -> str:
        def render(more: dict[str, Any]) -> str:
            values = {"add_generation_prompt": begins_answer} | self.specials() | given | more
            try:
                return _SANDBOX.render(self.source, values, now, marks)
            except (TypeError, ValueError, RecursionError) as error:
                raise ValueError(f"chat_template rejects the messages ({error})") from None

        if self.problem:
            raise ValueError(self.problem)
        text = render({})
        if not continues:
            return text

        def around(content: str) -> tuple[str, str]:
            """The conversation before and after the placeholder at the end of the last content."""
            last = given["messages"][-1] | {"content": content}
            written = render({"messages": [*given["messages"][:-1], last]})
            before, is_there, after = written.rpartition(_END)
            if not is_there:
                raise ValueError(
                    "the chat template omits the content of the last message; remove that message"
                )
            return before, after

        content = given["messages"][-1]["content"] if given["messages"] else None
        if not isinstance(content, str):
            raise ValueError("the last message has no text to continue; add one")
        core = content.rstrip()
        spaces = content[len(core) :]
        before, after = around(f"{core}{_END}{spaces}")
        if spaces:
            # The spaces that the template keeps are those that it would not write without them.
            rest = around(f"{core}{_END}")[1]
            before += after.removesuffix(rest) if after.endswith(rest) else ""
        if core and not text.startswith(before):
            raise ValueError(
                "the chat template changes the content of the last message, so it cannot be "
                "continued; begin a new turn"
            )
        return before


@dataclass(frozen=True)
class TextTemplate(ChatTemplate):
    """A chat template that writes plain text without special tokens, for any tokenizer."""

    tokenizer: HubTokenizer = field(init=False, repr=False, compare=False)
    text_tokenizer: Tokenizer = field(kw_only=True)

    def ids(self, messages: Messages, /, **options: Any) -> np.ndarray:
        return self.text_tokenizer.encode(self.text(messages, **options))

    def specials(self) -> dict[str, str]:
        return dict.fromkeys(_SPECIALS, "")


def _begins_with(ids: np.ndarray, start: np.ndarray) -> bool:
    return np.array_equal(ids[: start.size], start)


def _variables(messages: Messages, more: Mapping[str, Any]) -> dict[str, Any]:
    """The variables of a template that depend on a conversation."""
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise ValueError(f"messages[{place}]={message!r} lacks role or content; provide both")
    known = {"messages": [dict(message) for message in messages], "tools": None, "documents": None}
    return known | dict(more)


def saved_chat(meta: Mapping[str, Any], tokenizer: Tokenizer) -> ChatTemplate | None:
    """The chat template in the metadata of a checkpoint or a weights file, or None."""
    source = meta.get("chat_template")
    if not isinstance(source, str) or not isinstance(tokenizer, HubTokenizer):
        return None
    return ChatTemplate(source, tokenizer)


def check_template(source: str, where: str) -> None:
    try:
        _SANDBOX.render(source, None)
    except ValueError as error:
        raise ValueError(f"{where}: chat_template is broken ({error})") from None


class _Sandbox:
    """The process that renders templates, started on first use and restarted if it has ended.

    Rendering is thread-safe; requests are processed one at a time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        atexit.register(self._stop)

    def render(
        self, source: str, values: Mapping[str, Any] | None, now: float = 0.0, marks: bool = False
    ) -> str:
        """The rendered text. If `values` is None, only compiles the template and returns ''.

        `now` is the time that the template reads, in seconds. With `marks`, `MARK` stands at the
        ends of each ``{% generation %}``.
        """
        request = {"source": source, "values": values, "now": now, "mark": MARK if marks else ""}
        line = json.dumps(request)
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._stop()
                self._process = subprocess.Popen(
                    [sys.executable, "-P", str(_PROGRAM)],
                    text=True,
                    encoding="ascii",
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
                self._answer(self._process, "", _SECONDS_TO_START)
            answer = self._answer(self._process, f"{line}\n", _SECONDS)
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer["text"]

    def _answer(self, process: subprocess.Popen[str], line: str, seconds: float) -> dict[str, str]:
        """Sends a line and returns the answer; raises ValueError on a timeout or crash."""
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
            if not connection.wait([process.stdout.fileno()], seconds):
                raise TimeoutError
            return json.loads(process.stdout.readline())
        except BaseException as error:
            # Otherwise, the next line could receive the unread answer of this line.
            self._stop()
            if isinstance(error, TimeoutError):
                raise ValueError(f"it takes longer than {seconds:g} s") from None
            if isinstance(error, OSError | ValueError):
                raise ValueError("it crashes") from None
            raise

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with contextlib.suppress(OSError):
                process.communicate()


_SANDBOX = _Sandbox()
