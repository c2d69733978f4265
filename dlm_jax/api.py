"""The library's front door: load a trained model and generate texts with it."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

import dlm_jax.config as configs
from dlm_jax import checkpoint
from dlm_jax.config import Config, SampleConfig
from dlm_jax.data import Tokenizer, from_json
from dlm_jax.model import cpu
from dlm_jax.model.transformer import build
from dlm_jax.sampling.commit import ORDERS, QUOTAS
from dlm_jax.sampling.generate import Generation, Request
from dlm_jax.sampling.generate import generate as generate_tokens
from dlm_jax.sampling.loop import Advance, Program, make_advance
from dlm_jax.sampling.propose import chunk_size
from dlm_jax.types import Network, Params


@dataclasses.dataclass(frozen=True)
class Model:
    """A network with its parameters, its tokenizer, and the sampling settings it recommends.

    Make one of your own functions to sample from any network; see the example in the README.

    Attributes:
      network: the model as pure functions.
      params: their parameters.
      tokenizer: text to ids and back.
      sample: settings used where a call gives none.
      max_length: tokens of the longest canvas it was trained on.
    """

    network: Network
    params: Params
    tokenizer: Tokenizer
    max_length: int
    sample: SampleConfig = SampleConfig()

    def advance(self) -> Advance:
        """The compiled denoising loop of this model's network, made once."""
        program = Program(
            network=self.network,
            mask_id=self.tokenizer.mask_id,
            chunk=chunk_size(self.network.vocab_size),
        )
        options = cpu.compiler_options(is_training=False)
        return make_advance(program, compiler_options=tuple(sorted(options.items())))


@dataclasses.dataclass(frozen=True)
class Texts(Generation):
    """A `Generation` with its rows decoded: ``texts[i]`` is the prompt and what continues it."""

    texts: tuple[str, ...]


def load(path: str | os.PathLike[str], *, report: Callable[[str], None] | None = None) -> Model:
    """The model of a run: its directory, or the directory of its checkpoints.

    Args:
      path: what ``train.out_dir`` was.
      report: takes one line if a damaged checkpoint was passed over.

    Raises:
      ValueError: nothing usable is there; the line says what and the remedy.
    """

    def abstract_params(meta: dict[str, Any]) -> Params:
        model = _config_of(meta).model
        return jax.eval_shape(build(model).init, jax.random.key(0))

    params, meta = checkpoint.load_params(path, abstract_params, report=report)
    config = _config_of(meta)
    return Model(
        network=build(config.model),
        params=params,
        tokenizer=from_json(meta["tokenizer"]),
        max_length=config.data.seq_len,
        sample=config.sample,
    )


def _config_of(meta: dict[str, Any]) -> Config:
    return configs.from_dict(meta["config"], where="checkpoint")


def generate(
    model: Model,
    prompts: Sequence[str] = ("",),
    *,
    num_samples: int = 1,
    gen_length: int | None = None,
    max_length: int | None = None,
    steps: int | None = None,
    temperature: float | None = None,
    order: str | None = None,
    schedule: str | None = None,
    seed: int = 0,
    batch_size: int = 64,
    on_commits: Callable[[int], Any] | None = None,
) -> Texts:
    """Texts that continue each prompt `num_samples` times; None takes what the model recommends.

    Sample ``i`` in the order of the result has the seed ``seed + i`` and can be made again alone.

    Args:
      model: from `load`, or your own `Model`.
      prompts: given texts, kept as they are.
      num_samples: rows of each prompt, next to each other in the result.
      gen_length: new tokens; 0 fills the canvas up to `max_length`.
      max_length: tokens a row may hold with its prompt; the model's own if not given.
      steps: denoising steps of a row, at least 1.
      temperature: of the draw, at least 0; 0 takes the most likely token.
      order: what is committed first, ``low_confidence`` or ``random``.
      schedule: how commits spread over the steps, ``linear`` or ``cosine``.
      seed: of the first row.
      batch_size: rows that run at once.
      on_commits: told how many tokens were written since the last call.

    Raises:
      ValueError: an argument is out of range, or a prompt does not fit or cannot be encoded.
    """
    asked = {
        "gen_length": gen_length,
        "steps": steps,
        "temperature": temperature,
        "order": order,
        "schedule": schedule,
    }
    given = {name: value for name, value in asked.items() if value is not None}
    settings = dataclasses.replace(model.sample, **given)
    if num_samples < 1:
        raise ValueError(f"num_samples={num_samples} must be at least 1")
    canvases = [
        _canvas(model, prompt, settings.gen_length, max_length or model.max_length)
        for prompt in prompts
        for _ in range(num_samples)
    ]
    requests = [
        Request(tokens=canvas, steps=settings.steps, seed=seed + index)
        for index, canvas in enumerate(canvases)
    ]
    import jax.numpy as jnp

    from dlm_jax.sampling.transforms.chain import chain
    from dlm_jax.sampling.transforms.shape import LogitBias, Temperature
    def pack(slots):
        k = len(tokenizer.banned_ids)
        return chain(LogitBias(jnp.tile(jnp.array(tokenizer.banned_ids)[None], (slots, 1)), jnp.full((slots, k), -jnp.inf)), Temperature(jnp.full(slots, settings.temperature)))
    tokenizer = model.tokenizer
    result = generate_tokens(
        model.advance(),
        model.params,
        requests,
        make_chain=lambda indices, slots: pack(slots),
        rule=ORDERS[settings.order](QUOTAS[settings.schedule]),
        mask_id=tokenizer.mask_id,
        pad_id=tokenizer.pad_id,
        batch_size=batch_size,
        on_commits=on_commits,
    )
    texts = tuple(
        tokenizer.decode(row[:length])
        for row, length in zip(result.tokens, result.lengths, strict=True)
    )
    return Texts(**vars(result), texts=texts)


def _canvas(model: Model, prompt: str, gen_length: int, max_length: int) -> np.ndarray:
    """Ids of the prompt, then MASK at every token to generate."""
    given = model.tokenizer.encode(prompt)
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
    holes = np.full(gen_length or room, model.tokenizer.mask_id, np.int32)
    return np.concatenate([given, holes])
