"""Chat templates: a conversation as the text that an instruction-tuned model was trained on.

Templates are Jinja programs that come with a model. They run in Jinja's immutable sandbox, which
reaches no attribute of Python, no file and no module.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jinja2
import numpy as np
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dlm_jax.data import HubTokenizer, Tokenizer

Messages = Sequence[Mapping[str, str]]
"""Turns of a conversation: ``{"role": "user", "content": "..."}``."""


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template with the tokenizer whose specials it writes.

    Attributes:
      source: the Jinja program.
      tokenizer: of its model.
    """

    source: str
    tokenizer: HubTokenizer

    def text(self, messages: Messages, *, begins_answer: bool = True, **more: Any) -> str:
        """The conversation as text, up to where the model's answer begins.

        Args:
          messages: turns, each with ``role`` and ``content``.
          begins_answer: whether the header of the answer is written behind them.
          **more: further variables of the template, such as ``enable_thinking``.

        Raises:
          ValueError: a turn lacks a field, or the template refuses them or is broken.
        """
        for place, message in enumerate(messages):
            if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
                raise ValueError(f"messages[{place}]={message!r} lacks role or content; give both")
        try:
            return _compiled(self.source).render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=begins_answer, **(self.specials() | more),
            )  # fmt: skip
        # A template may fail as any program does.
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(f"chat_template refuses the messages ({reason})") from None

    def ids(self, messages: Messages, *, begins_answer: bool = True, **more: Any) -> np.ndarray:
        """The ids of `text`, int32 ``[n]``."""
        written = self.text(messages, begins_answer=begins_answer, **more)
        return self.tokenizer.encode_marked(written)

    def specials(self) -> dict[str, str]:
        """What the template may write for BOS, EOS, PAD and MASK; empty where there is none."""
        tokenizer = self.tokenizer
        names = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id,
                 "pad_token": tokenizer.pad_id, "mask_token": tokenizer.mask_id}  # fmt: skip
        return {name: "" if id_ is None else tokenizer.token(id_) for name, id_ in names.items()}


@dataclass(frozen=True)
class TextTemplate(ChatTemplate):
    """A chat template that writes plain text, without specials, for any tokenizer.

    Attributes:
      text_tokenizer: which reads it.
    """

    tokenizer: HubTokenizer = field(init=False, repr=False, compare=False)
    text_tokenizer: Tokenizer = field(kw_only=True)

    def ids(self, messages: Messages, *, begins_answer: bool = True, **more: Any) -> np.ndarray:
        """The ids of `text`, int32 ``[n]``."""
        return self.text_tokenizer.encode(self.text(messages, begins_answer=begins_answer, **more))

    def specials(self) -> dict[str, str]:
        """Nothing."""
        return dict.fromkeys(("bos_token", "eos_token", "pad_token", "mask_token"), "")


def check_template(source: str, where: str) -> None:
    """Raises ValueError for a template that is no Jinja program."""
    try:
        _compiled(source)
    except jinja2.TemplateError as error:
        raise ValueError(f"{where}: chat_template is broken ({error})") from None


def _compiled(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(
        value, ensure_ascii=False, indent=indent
    )

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.globals["raise_exception"] = refuse
    return environment.from_string(source)
