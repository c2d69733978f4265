"""Chat templates, which convert a conversation to the text format of a model.

Templates are Jinja programs in a model's directory. They run in Jinja's immutable sandbox, without
access to Python attributes, files or modules, and in a separate process (`sandbox`) with limits on
time, memory and output.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dlm_jax.data import HubTokenizer, Tokenizer

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


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template and its tokenizer."""

    source: str
    tokenizer: HubTokenizer

    def text(
        self, messages: Messages, /, *, begins_answer: bool = True, continues: bool = False,
        **more: Any,
    ) -> str:  # fmt: skip
        """The conversation as text, up to the start of the model's answer.

        Args:
          messages: turns, each with ``role`` and ``content``.
          begins_answer: whether to append the header of the answer.
          continues: whether the answer continues the last turn, so that the text ends with the
            content of this turn (Hugging Face's ``continue_final_message``).
          **more: additional template variables, such as ``enable_thinking``.
        """
        for place, message in enumerate(messages):
            if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
                raise ValueError(
                    f"messages[{place}]={message!r} lacks role or content; provide both"
                )
        values = {"messages": [dict(message) for message in messages],
                  "add_generation_prompt": begins_answer} | self.specials() | more  # fmt: skip
        try:
            written = _SANDBOX.render(self.source, values)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"chat_template rejects the messages ({error})") from None
        content = messages[-1]["content"] if messages else ""
        return _upto(written, content) if continues else written

    def ids(self, messages: Messages, /, **options: Any) -> np.ndarray:
        """The token ids of `text` with the same arguments, int32 ``[n]``."""
        return self.tokenizer.encode_marked(self.text(messages, **options))

    def specials(self) -> dict[str, str]:
        """The texts of BOS, EOS, PAD and MASK for the template; '' for a missing token."""
        tokenizer = self.tokenizer
        names = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id,
                 "pad_token": tokenizer.pad_id, "mask_token": tokenizer.mask_id}  # fmt: skip
        return {name: "" if id_ is None else tokenizer.token(id_) for name, id_ in names.items()}


@dataclass(frozen=True)
class TextTemplate(ChatTemplate):
    """A chat template that writes plain text without special tokens, for any tokenizer."""

    tokenizer: HubTokenizer = field(init=False, repr=False, compare=False)
    text_tokenizer: Tokenizer = field(kw_only=True)

    def ids(self, messages: Messages, /, **options: Any) -> np.ndarray:
        return self.text_tokenizer.encode(self.text(messages, **options))

    def specials(self) -> dict[str, str]:
        return dict.fromkeys(_SPECIALS, "")


def _upto(written: str, content: str) -> str:
    """A conversation up to the end of the last turn's content.

    Leading and trailing spaces of the content remain unless the template strips them.
    """
    core = content.strip()
    place = written.rfind(core) if core else -1
    if place < 0:
        raise ValueError(
            "the chat template omits the content of the last message; remove that message"
        )
    begun = content.lstrip()
    kept = begun if written.startswith(begun, place) else core
    return written[: place + len(kept)]


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

    def render(self, source: str, values: Mapping[str, Any] | None) -> str:
        """The rendered text. If `values` is None, only compiles the template and returns ''."""
        line = json.dumps({"source": source, "values": values})
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._stop()
                self._process = subprocess.Popen(
                    [sys.executable, "-P", str(_PROGRAM)], text=True, encoding="ascii",
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )  # fmt: skip
                self._answer(self._process, "", _SECONDS_TO_START)
            answer = self._answer(self._process, f"{line}\n", _SECONDS)
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer["text"]

    def _answer(self, process: subprocess.Popen[str], line: str, seconds: float) -> dict[str, str]:
        """Sends a line and returns the answer; raises ValueError on a timeout or crash."""
        assert process.stdin is not None and process.stdout is not None
        is_late = threading.Event()

        def kill() -> None:
            is_late.set()
            process.kill()

        timer = threading.Timer(seconds, kill)
        timer.daemon = True
        timer.start()
        try:
            process.stdin.write(line)
            process.stdin.flush()
            return json.loads(process.stdout.readline())
        except (OSError, ValueError):
            self._stop()
            reason = f"it takes longer than {seconds:g} s" if is_late.is_set() else "it crashes"
            raise ValueError(reason) from None
        except BaseException:
            # Otherwise, the next line could receive the unread answer of this line.
            self._stop()
            raise
        finally:
            timer.cancel()

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with contextlib.suppress(OSError):
                process.communicate()


_SANDBOX = _Sandbox()
