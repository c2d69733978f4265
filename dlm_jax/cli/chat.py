"""What the command line does with a published model: its loops by name, and turns of a chat."""

from __future__ import annotations

import argparse
from typing import Any

import dlm_jax


def turn_ids(model: dlm_jax.Model, text: str) -> list[int]:
    """Ids of a conversation of one user's turn, up to where the answer begins.

    Raises:
      ValueError: the model has no chat template, or it refuses the text.
    """
    if model.chat is None:
        raise ValueError(
            "--chat: the model has no chat_template (in tokenizer_config.json, or as "
            "chat_template.jinja); write the turns yourself and leave --chat out"
        )
    return model.chat.ids([{"role": "user", "content": text}]).tolist()


def answers(model: dlm_jax.Model, result: dlm_jax.Texts, start: int) -> list[str]:
    """What stands behind the first `start` tokens of each row, as text."""
    rows = zip(result.tokens, result.lengths, strict=True)
    return [model.tokenizer.decode(tokens[start:length]) for tokens, length in rows]


def asked(model: dlm_jax.Model, args: argparse.Namespace) -> dict[str, Any]:
    """What the flags ask for, as a prompt of `dlm_jax.generate`."""
    if args.chat:
        return {"tokens": turn_ids(model, args.prompt)}
    texts = {name: getattr(args, name) for name in ("prompt", "template", "draft")}
    return {name: text for name, text in texts.items() if text is not None}
