"""The library's front door: texts from a model, each prompt with settings of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dlm_jax.config import SampleConfig, resolve
from dlm_jax.models import Model
from dlm_jax.sampling.candidates import HostSampler
from dlm_jax.sampling.commit import ORDERS, QUOTAS
from dlm_jax.sampling.generate import Generation, Request, cut_at_eos, merge
from dlm_jax.sampling.generate import generate as generate_tokens
from dlm_jax.sampling.host import describe
from dlm_jax.sampling.params import pack
from dlm_jax.sampling.transforms import Chain


@dataclasses.dataclass(frozen=True)
class Texts(Generation):
    """A `Generation` with its rows decoded: ``texts[i]`` is the prompt and what continues it.

    Rows end with the first EOS that they generated, which stands for no text.
    """

    texts: tuple[str, ...]


def generate(
    model: Model,
    prompts: Sequence[str | Mapping[str, Any]] = ("",),
    *,
    num_samples: int = 1,
    seed: int = 0,
    max_length: int | None = None,
    batch_size: int = 64,
    host_sampler: HostSampler | None = None,
    read_back: bool = False,
    max_candidates: int = 64,
    on_commits: Callable[[int], Any] | None = None,
    **settings: Any,
) -> Texts:
    """Texts that continue each prompt `num_samples` times.

    Sample ``i`` in the order of the result has the seed ``seed + i`` and can be made again alone.

    Args:
      model: from `load`, or your own `Model`.
      prompts: given texts, kept as they are; or mappings with ``prompt`` and any setting of that
        prompt alone, ``seed`` (of its first sample), ``max_length``, ``host_sampler`` and
        ``read_back`` included.
      num_samples: rows of each prompt, next to each other in the result.
      seed: of the first row.
      max_length: tokens a row may hold with its prompt; the model's own if not given.
      batch_size: rows that run at once.
      host_sampler: Python function that chooses the tokens of all rows, each out of the
        `dlm_jax.sampling.candidates.Candidates` that the row's chain leaves.
      read_back: whether ``Texts.read_back`` tells of every token its probability and rivals.
      max_candidates: how many of a position's candidates host samplers and read-back see at most.
      on_commits: told how many tokens were written since the last call.
      **settings: fields of `SampleConfig` for all rows (``temperature=0.7``, ``top_k=40``,
        ``steps=64``, ``order="low_confidence"``, ...). What a mapping gives counts first, then
        these, then what the model recommends.

    Raises:
      ValueError: a setting is unknown or out of range, or a prompt does not fit or cannot be
        encoded; the line names the prompt if there are several. Or a host sampler chose what is
        no candidate; the line names row and position.
    """
    for name, value in (("num_samples", num_samples), ("max_candidates", max_candidates)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r} must be at least 1, a whole number")
    common = {"seed": seed, "max_length": max_length} | settings
    common |= {"host_sampler": host_sampler, "read_back": read_back}
    rows = []
    for index, prompt in enumerate(prompts):
        try:
            rows.extend(_rows(model, prompt, common, index * num_samples, num_samples))
        except ValueError as error:
            where = f"prompt {index}: " if len(prompts) > 1 else ""
            raise ValueError(f"{where}{error}") from None
    if not rows:
        raise ValueError("there is nothing to generate; give at least one prompt")
    result = _generate_rows(
        model,
        rows,
        batch_size=batch_size,
        max_candidates=max_candidates,
        on_commits=on_commits,
    )
    result = cut_at_eos(result, eos_id=model.tokenizer.eos_id, pad_id=model.tokenizer.pad_id)
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
    host = {name: asked.pop(name) for name in ("host_sampler", "read_back")}
    max_length = asked.pop("max_length")
    if max_length is not None and max_length < 1:
        raise ValueError(f"max_length={max_length} must be at least 1")
    sample = resolve(vars(model.sample), asked, kind=SampleConfig)
    room = model.max_length if max_length is None else max_length
    canvas = _canvas(model, text, sample.gen_length, room)
    return [
        _Row(Request(tokens=canvas, steps=sample.steps, seed=seed + index, **host), sample)
        for index in range(num_samples)
    ]


class _Static(NamedTuple):
    """What is compiled in: rows that agree in it run together."""

    order: str
    schedule: str
    chain: tuple[str, ...]
    draw: str
    needs_host: bool


def _generate_rows(
    model: Model,
    rows: Sequence[_Row],
    *,
    batch_size: int,
    max_candidates: int,
    on_commits: Callable[[int], Any] | None,
) -> Generation:
    """All rows, in their order; those that agree in what is compiled in run together."""
    groups: dict[_Static, list[int]] = {}
    for index, (request, sample) in enumerate(rows):
        static = _Static(
            sample.order, sample.schedule, sample.chain, sample.draw, request.needs_host
        )
        groups.setdefault(static, []).append(index)
    tokenizer = model.tokenizer
    parts = []
    for static, members in groups.items():
        samples = [rows[index].sample for index in members]

        def make_chain(
            indices: Sequence[int], slots: int, samples: list[SampleConfig] = samples
        ) -> Chain:
            used = [samples[index] for index in indices]
            return _chain(model, used + [used[-1]] * (slots - len(used)))

        part = generate_tokens(
            (model.host_loop if static.needs_host else model.advance)(draw=static.draw),
            model.params,
            [rows[index].request for index in members],
            make_chain=make_chain,
            rule=ORDERS[static.order](QUOTAS[static.schedule]),
            mask_id=tokenizer.mask_id,
            pad_id=tokenizer.pad_id,
            batch_size=batch_size,
            max_candidates=max_candidates,
            names=members,
            on_commits=on_commits,
        )
        parts.append((members, part))
    return merge(parts, pad_id=tokenizer.pad_id)


def _chain(model: Model, samples: Sequence[SampleConfig]) -> Chain:
    """The chain of rows that name the same transforms."""
    vocab_size = model.network.vocab_size
    return pack(
        samples,
        vocab_size=vocab_size,
        # Published models have more logits than tokens.
        banned_ids=(*model.tokenizer.banned_ids, *range(model.tokenizer.vocab_size, vocab_size)),
        eos_ids=(model.tokenizer.eos_id,),
        chain=samples[0].chain,
    )


def chain_report(model: Model, *, host_sampler: HostSampler | None = None, **settings: Any) -> str:
    """Which part of the chain of a row with these settings runs where, one line a part.

    Args:
      model: whose recommended settings count where none is given.
      host_sampler: the row's, if it has one.
      **settings: as for `generate`.

    Raises:
      ValueError: a setting is unknown or out of range.
    """
    sample = resolve(vars(model.sample), settings, kind=SampleConfig)
    return describe(_chain(model, [sample]), host_sampler)


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
