"""The library's front door: load a trained model and generate texts with it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

import dlm_jax.config as configs
from dlm_jax import checkpoint
from dlm_jax.config import Config, SampleConfig, resolve
from dlm_jax.data import Tokenizer, from_json
from dlm_jax.model import cpu
from dlm_jax.model.transformer import build
from dlm_jax.sampling.advance import Advance, make_advance
from dlm_jax.sampling.commit import ORDERS, QUOTAS
from dlm_jax.sampling.generate import Generation, Request, merge, split_rows
from dlm_jax.sampling.generate import generate as generate_tokens
from dlm_jax.sampling.loop import Program
from dlm_jax.sampling.params import pack
from dlm_jax.sampling.propose import chunk_size
from dlm_jax.sampling.transforms import Chain
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
            rows=split_rows(self.params),
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
    prompts: Sequence[str | Mapping[str, Any]] = ("",),
    *,
    num_samples: int = 1,
    seed: int = 0,
    max_length: int | None = None,
    batch_size: int = 64,
    on_commits: Callable[[int], Any] | None = None,
    **settings: Any,
) -> Texts:
    """Texts that continue each prompt `num_samples` times.

    Sample ``i`` in the order of the result has the seed ``seed + i`` and can be made again alone.

    Args:
      model: from `load`, or your own `Model`.
      prompts: given texts, kept as they are; or mappings with ``prompt`` and any setting of that
        prompt alone, ``seed`` (of its first sample) and ``max_length`` included.
      num_samples: rows of each prompt, next to each other in the result.
      seed: of the first row.
      max_length: tokens a row may hold with its prompt; the model's own if not given.
      batch_size: rows that run at once.
      on_commits: told how many tokens were written since the last call.
      **settings: fields of `SampleConfig` for all rows (``temperature=0.7``, ``top_k=40``,
        ``steps=64``, ``order="low_confidence"``, ...). What a mapping gives counts first, then
        these, then what the model recommends.

    Raises:
      ValueError: a setting is unknown or out of range, or a prompt does not fit or cannot be
        encoded; the line names the prompt if there are several.
    """
    if num_samples < 1:
        raise ValueError(f"num_samples={num_samples} must be at least 1")
    common = {"seed": seed, "max_length": max_length} | settings
    rows = []
    for index, prompt in enumerate(prompts):
        try:
            rows.extend(_rows(model, prompt, common, index * num_samples, num_samples))
        except ValueError as error:
            where = f"prompt {index}: " if len(prompts) > 1 else ""
            raise ValueError(f"{where}{error}") from None
    if not rows:
        raise ValueError("there is nothing to generate; give at least one prompt")
    result = _generate_rows(model, rows, batch_size=batch_size, on_commits=on_commits)
    texts = tuple(
        model.tokenizer.decode(row[:length])
        for row, length in zip(result.tokens, result.lengths, strict=True)
    )
    return Texts(**vars(result), texts=texts)


class _Row(NamedTuple):
    """One row to generate: its canvas, and everything asked of it."""

    request: Request
    sample: SampleConfig


def _rows(
    model: Model,
    prompt: str | Mapping[str, Any],
    common: Mapping[str, Any],
    first: int,
    num_samples: int,
) -> list[_Row]:
    """The rows of one prompt; `first` is added to the seed unless the prompt has its own."""
    own = {"prompt": prompt} if isinstance(prompt, str) else dict(prompt)
    asked = {**common, **own}
    text = asked.pop("prompt", "")
    seed = asked.pop("seed") + (0 if "seed" in own else first)
    max_length = asked.pop("max_length")
    if max_length is not None and max_length < 1:
        raise ValueError(f"max_length={max_length} must be at least 1")
    sample = resolve(vars(model.sample), asked, kind=SampleConfig)
    room = model.max_length if max_length is None else max_length
    canvas = _canvas(model, text, sample.gen_length, room)
    return [
        _Row(Request(tokens=canvas, steps=sample.steps, seed=seed + index), sample)
        for index in range(num_samples)
    ]


def _generate_rows(
    model: Model,
    rows: Sequence[_Row],
    *,
    batch_size: int,
    on_commits: Callable[[int], Any] | None,
) -> Generation:
    """All rows, in their order; those that agree in what is compiled in run together."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for index, row in enumerate(rows):
        static = (row.sample.order, row.sample.schedule, row.sample.chain)
        groups.setdefault(static, []).append(index)
    tokenizer = model.tokenizer
    parts = []
    for (order, schedule, names), members in groups.items():
        settings = [rows[index].sample for index in members]

        def make_chain(
            indices: Sequence[int],
            slots: int,
            settings: list[SampleConfig] = settings,
            names: tuple[str, ...] = names,
        ) -> Chain:
            used = [settings[index] for index in indices]
            return pack(
                used + [used[-1]] * (slots - len(used)),
                vocab_size=model.network.vocab_size,
                banned_ids=tokenizer.banned_ids,
                eos_ids=(tokenizer.eos_id,),
                chain=names,
            )

        part = generate_tokens(
            model.advance(),
            model.params,
            [rows[index].request for index in members],
            make_chain=make_chain,
            rule=ORDERS[order](QUOTAS[schedule]),
            mask_id=tokenizer.mask_id,
            pad_id=tokenizer.pad_id,
            batch_size=batch_size,
            on_commits=on_commits,
        )
        parts.append((members, part))
    return merge(parts, pad_id=tokenizer.pad_id)


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
