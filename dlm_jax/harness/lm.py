"""``lm_eval --model dlm_jax``: a model of this library as lm-evaluation-harness calls it.

Likelihoods of diffusion models are bounds, each the mean over a stated number of draws of masks
that are seeded by the request; those of causal models are exact. Every result is the same bit for
bit whatever the batch size, and in whatever order requests come.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from dlm_jax.harness.generation import asked_of, texts
from dlm_jax.harness.likelihood import ROWS, Likelihoods
from dlm_jax.harness.pairs import pair_of, windows_of
from dlm_jax.inference.model import Model, load
from dlm_jax.inference.request import settings_of_call

T = TypeVar("T")


class Instance(Protocol):
    """A request of lm-evaluation-harness."""

    @property
    def args(self) -> tuple[Any, ...]:
        """What is asked."""
        ...


def _of_request(place: int, read: Callable[..., T], *arguments: Any, **more: Any) -> T:
    """What `read` makes of a request, whose place its error names."""
    try:
        return read(*arguments, **more)
    except ValueError as error:
        raise ValueError(f"request {place}: {error}") from None


def __getattr__(name: str) -> Any:
    if name == "DlmJax":
        return model_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def model_class() -> type:
    """`Evaluated` as a model class of lm-evaluation-harness, which must be installed."""
    base = importlib.import_module("lm_eval.api.model").LM
    return type("DlmJax", (Evaluated, base), {"__doc__": Evaluated.__doc__})


class Evaluated:
    """A model of dlm_jax with the methods that lm-evaluation-harness calls.

    Args:
      checkpoint: as of `dlm_jax.load`; the model that ships if not given.
      draws: masks of each likelihood.
      batch_size: rows that run at once, up to 32; "auto" is 32. It changes no result.
      seed: of masks and texts.
      dtype: as of `dlm_jax.load`.
      preset: name of a loop that comes with the model.
      model: a loaded model, in place of `checkpoint`.
      max_batch_size: not read.
      device: not read: JAX chooses it.
      **settings: of generated texts, by name (docs/settings.md).

    Raises:
      ValueError: an argument is unknown or out of range.
    """

    def __init__(
        self,
        checkpoint: str | None = None,
        *,
        draws: int = 32,
        batch_size: int | str = "auto",
        seed: int = 0,
        dtype: str | None = None,
        preset: str | None = None,
        model: Model | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        **settings: Any,
    ):
        super().__init__()
        del max_batch_size, device
        self.model = load(checkpoint, dtype=dtype) if model is None else model
        self._batch_size = ROWS if str(batch_size).startswith("auto") else int(batch_size)
        self._seed, self._is_chat = int(seed), False
        self._settings = (self.model.preset(preset) if preset else {}) | settings
        settings_of_call(self.model, self._settings)
        self._likelihoods = Likelihoods(
            self.model, num_draws=int(draws), batch_size=self._batch_size, seed=self._seed
        )

    def loglikelihood(self, requests: Sequence[Instance]) -> list[tuple[float, bool]]:
        """Of each continuation behind its context, and whether the model would write it."""
        pairs = [pair_of(self.model, *request.args, is_chat=self._is_chat) for request in requests]
        nats = self._likelihoods.nats(pairs)
        found = list(zip((-nats).tolist(), self._likelihoods.are_greedy(pairs), strict=True))
        self._keep("loglikelihood", requests, found)
        return found

    def loglikelihood_rolling(self, requests: Sequence[Instance]) -> list[float]:
        """Of whole texts, in windows of the model's canvas, each token scored once."""
        windows = [windows_of(self.model, request.args[0]) for request in requests]
        nats = self._likelihoods.nats([pair for some in windows for pair in some])
        found, place = [], 0
        for some in windows:
            found.append(-float(nats[place : place + len(some)].sum()))
            place += len(some)
        self._keep("loglikelihood_rolling", requests, found)
        return found

    def generate_until(self, requests: Sequence[Instance]) -> list[str]:
        """Texts behind their contexts, each in a row that ends at the first of its stops."""
        asked = [
            _of_request(place, asked_of, *request.args, is_chat=self._is_chat)
            for place, request in enumerate(requests)
        ]
        for name, value in {n: v for one in asked for n, v in one.unread.items()}.items():
            told = f"{name}={value!r} means nothing to a diffusion model; it is not read"
            print(told, file=sys.stderr)
        found = texts(
            self.model, asked, common=self._settings, slots=ROWS, batch_size=self._batch_size,
            seed=self._seed,
        )  # fmt: skip
        self._keep("generate_until", requests, found)
        return found

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A conversation as text.

        Raises:
          ValueError: the model has no chat template.
        """
        self._is_chat = True
        return self._chat.text(chat_history, begins_answer=add_generation_prompt)

    @property
    def tokenizer_name(self) -> str:
        """What tells its tokenizer from others."""
        told = json.dumps(self.model.tokenizer.to_json(), sort_keys=True).encode()
        return f"dlm_jax-{hashlib.sha256(told).hexdigest()[:16]}"

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Its chat template; empty if it is not to be applied."""
        return self._chat.source if chat_template else ""

    def get_model_info(self) -> Mapping[str, Any]:
        """What results tell of the model."""
        return {"model_max_length": self.model.max_length, "model_family": self.model.family}

    def _keep(self, kind: str, requests: Sequence[Instance], found: Sequence[Any]) -> None:
        """Tells the harness's cache, if there is one."""
        hook = getattr(self, "cache_hook", None)
        for request, one in zip(requests, found, strict=True):
            if hook is not None:
                hook.add_partial(kind, request.args, one)

    @property
    def _chat(self) -> Any:
        if self.model.chat is None:
            raise ValueError("the model has no chat template; leave --apply_chat_template out")
        return self.model.chat
