"""What is run for a request, and what a request may ask for at most: records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dlm_jax.inference.request import Request

Kind = Literal["completion", "chat", "infill"]


@dataclass(frozen=True)
class Limits:
    """What a request may ask for at most.

    Attributes:
      rows: of one request, over all its prompts.
      waiting: rows that may wait for a slot.
      body: bytes of a request.
      seconds: that a request may take, with its waiting.
      steps: of a row.
    """

    rows: int = 128
    waiting: int = 1024
    body: int = 1 << 20
    seconds: float = 600.0
    steps: int = 4096


@dataclass(frozen=True)
class Plan:
    """What is to be run for a request, and how it is to be told.

    Attributes:
      kind: of endpoint.
      requests: one for each choice, those of a prompt side by side.
      stops: texts that end an answer.
      is_stream: whether it comes in events.
      has_usage: whether a stream ends with the usage.
      is_diffusing: whether a stream shows the canvas.
      echoes: what each choice begins with.
      rivals: of each token to tell of; None: tokens are not told of at all.
      per_prompt: choices of each prompt.
      seed: of the first row.
      read_back: candidates of each position to tell of, with their logits; 0: none.
    """

    kind: Kind
    requests: tuple[Request, ...]
    stops: tuple[str, ...] = ()
    is_stream: bool = False
    has_usage: bool = False
    is_diffusing: bool = False
    echoes: tuple[str, ...] = ()
    rivals: int | None = None
    per_prompt: int = 1
    seed: int = 0
    read_back: int = 0
