"""A training run resolved at the door: everything that can be refused is refused here."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import optax
from jax.sharding import Mesh

import dlm_jax.config as configs
from dlm_jax.checkpoint import Checkpoints
from dlm_jax.config import Config
from dlm_jax.data import Corpus, load_corpus
from dlm_jax.diffusion import scoring
from dlm_jax.diffusion.objectives import Mixture
from dlm_jax.metrics import read_records
from dlm_jax.model.transformer import build
from dlm_jax.processes import on_first_process
from dlm_jax.sharding import batch_sharding, make_mesh, share_of_batch
from dlm_jax.training.begin import begin_with
from dlm_jax.training.objective import make_mixture
from dlm_jax.training.optim import make_grouped_optimizer, make_optimizer
from dlm_jax.training.scorer import ScorerLoss
from dlm_jax.training.stages import Stage, StagedLoss, stage_at
from dlm_jax.training.step import (
    StepLoss,
    TrainState,
    abstract_state,
    compile_eval_step,
    init_state,
    make_eval_step,
)
from dlm_jax.types import Network

_MAY_CHANGE = (
    "data.source",
    "data.cache_dir",
    "train.out_dir",
    "train.init_from",
    "train.log_every",
    "train.eval_every",
    "train.eval_windows",
    "train.sample_every",
    "train.checkpoint_every",
    "train.keep_checkpoints",
    "model.remat",
    "mesh.",
    "sample.",
)


@dataclasses.dataclass(frozen=True)
class Run:
    """A run ready to go: the resolved config and what was made from it.

    ``state`` is fresh, or the newest checkpoint's, and ``saved`` the JSON beside it (empty if
    fresh). ``noise_key`` is what the noise of every step is folded from.
    """

    config: Config
    corpus: Corpus
    network: Network
    mixture: Mixture
    mesh: Mesh
    state: TrainState
    saved: dict[str, Any]
    first_step: int
    noise_key: jax.Array
    checkpoints: Checkpoints

    @property
    def out_dir(self) -> Path:
        """Where the run writes."""
        return Path(self.config.train.out_dir)

    @property
    def has_heads(self) -> bool:
        """Whether the model has a sampler head or a critic."""
        return self.config.model.add_sampler_head or self.config.model.add_critic_head

    @property
    def is_scorer(self) -> bool:
        """Whether the model is a sequence scorer, which writes no text."""
        return self.network.scorer is not None

    def stage(self, step: int) -> Stage:
        """What trains at a step, from 0."""
        return stage_at(step, self.config.model, self.config.heads)

    def optimizer(self, stage: Stage) -> optax.GradientTransformation:
        """The optimiser of a stage; its state is that of every other stage."""
        return _optimizer(self.config, stage)

    def loss(self, stage: Stage) -> StepLoss:
        """The loss of a stage."""
        if self.is_scorer:
            share = self.config.objective.random_length_share
            return ScorerLoss(self.network, self._corrupter(), share)
        tokenizer = self.corpus.tokenizer
        return StagedLoss(
            network=self.network,
            mixture=self.mixture,
            stage=stage,
            heads=self.config.heads,
            mask_id=tokenizer.mask_id,
            banned_ids=(*tokenizer.banned_ids, tokenizer.pad_id),
            mesh=self.mesh,
        )

    def eval_step(self) -> Callable[..., Any]:
        """Compiled ``(params, batch, key)`` -> figures of held-out text, by row.

        The nats of each row, or its `scoring.Errors` if the model is a scorer.
        """
        where: dict[str, Any] = {"mesh": self.mesh, "batch_size": self.config.train.batch_size}
        params = self.state.params
        if self.is_scorer:
            measure = functools.partial(scoring.errors, self.network, how=self._corrupter())
            return compile_eval_step(measure, params, **where)
        return make_eval_step(
            self.network,
            params,
            mask_id=self.corpus.tokenizer.mask_id,
            is_causal=self.config.model.attention_type == "causal",
            **where,
        )

    def _corrupter(self) -> scoring.Corrupter:
        tokenizer = self.corpus.tokenizer
        return scoring.make_corrupter(
            self.config.objective, vocab_size=tokenizer.vocab_size,
            never=(*tokenizer.banned_ids, tokenizer.mask_id, tokenizer.pad_id, tokenizer.eos_id),
        )  # fmt: skip

    def meta(self) -> dict[str, Any]:
        """What a checkpoint says of itself: resolved config and tokenizer."""
        return {
            "config": configs.to_dict(self.config),
            "tokenizer": self.corpus.tokenizer.to_json(),
            "corpus": {"name": self.corpus.name, "sha256": self.corpus.sha256},
        }


def prepare(config: Config, *, report: Callable[[str], None]) -> Run:
    """The run that `config` asks for, continued where its directory holds checkpoints.

    Args:
      config: as loaded; ``model.vocab_size`` 0 becomes the tokenizer's.
      report: takes one line of text, such as that a damaged checkpoint was passed over.

    Raises:
      ValueError: bad data, a batch or mesh that does not fit the devices, a directory that holds
        another run or something else.
    """
    mesh = make_mesh(config.mesh)
    share_of_batch(batch_sharding(mesh, config.train.batch_size), config.train.batch_size)
    _check_parts(config, mesh)
    out_dir = Path(config.train.out_dir)
    _check_writable(out_dir)
    corpus = load_corpus(
        config.data.source,
        tokenizer=config.data.tokenizer,
        seq_len=config.data.seq_len,
        held_out=config.data.held_out,
        cache_dir=config.data.cache_dir or None,
        layout=config.data.layout,
        tail=config.data.tail,
    )
    config = _with_vocabulary(config, corpus)
    network = build(config.model)
    mixture = make_mixture(config.objective, config.model, corpus.tokenizer)
    optimizer = _optimizer(config, stage_at(0, config.model, config.heads))
    has_ema = config.optim.ema_decay > 0
    init_key, noise_key = jax.random.split(jax.random.key(config.train.seed))
    with contextlib.ExitStack() as undo:
        checkpoints = Checkpoints(out_dir / "checkpoints", keep=config.train.keep_checkpoints)
        undo.callback(checkpoints.close)
        if on_first_process(checkpoints.steps):
            _check_same_run(config, corpus, checkpoints.read_meta(report=report))
            _, state, saved = checkpoints.restore(
                abstract_state(network, optimizer, mesh, has_ema=has_ema), report=report
            )
        else:
            state = init_state(network, optimizer, init_key, mesh=mesh, has_ema=has_ema)
            state = begin_with(
                config.train.init_from, state, corpus.tokenizer, model=config.model, report=report
            )
            saved = {}
        read_records(out_dir / "metrics.jsonl")
        _make_directory(out_dir)
        undo.pop_all()
    return Run(
        config=config,
        corpus=corpus,
        network=network,
        mixture=mixture,
        mesh=mesh,
        state=state,
        saved=saved,
        first_step=int(state.step),
        noise_key=noise_key,
        checkpoints=checkpoints,
    )


def _optimizer(config: Config, stage: Stage) -> optax.GradientTransformation:
    num_steps = config.train.steps
    if not (config.model.add_sampler_head or config.model.add_critic_head):
        return make_optimizer(config.optim, num_steps=num_steps)
    return make_grouped_optimizer(config.optim, config.heads, stage, num_steps=num_steps)


def _check_parts(config: Config, mesh: Mesh) -> None:
    """Refuses parts of a batch that do not divide evenly over the devices."""
    part = config.train.batch_size // config.train.accumulate
    try:
        batch_sharding(mesh, part)
    except ValueError:
        raise ValueError(
            f"train.accumulate={config.train.accumulate} leaves parts of {part} rows, which the "
            "devices that split the batch do not divide; lower it"
        ) from None


def _check_writable(out_dir: Path) -> None:
    """Refuses a directory that could not be written, without making it yet."""
    nearest = next(path for path in (out_dir, *out_dir.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise ValueError(
            f"train.out_dir={out_dir} cannot be a directory, because {nearest} is a file; "
            "name another one"
        )
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ValueError(f"train.out_dir={out_dir} is not writable; name another directory")


def _make_directory(out_dir: Path) -> None:
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"train.out_dir={out_dir} cannot be made ({error.strerror}); name another directory"
        ) from None


def _with_vocabulary(config: Config, corpus: Corpus) -> Config:
    needed = corpus.tokenizer.vocab_size
    size = config.model.vocab_size or needed
    if size < needed:
        raise ValueError(
            f"model.vocab_size={size} is smaller than the tokenizer's {needed}; use 0 or {needed}"
        )
    start = config.model.start_id
    if config.model.attention_type == "causal" and start < 0:
        start = corpus.tokenizer.mask_id
    model = dataclasses.replace(config.model, vocab_size=size, start_id=start)
    return dataclasses.replace(config, model=model)


def _check_same_run(config: Config, corpus: Corpus, saved: dict[str, Any]) -> None:
    """Refuses to continue a run whose result would be neither the old one's nor the new one's."""
    elsewhere = "use another train.out_dir, or delete this one"
    if saved["corpus"]["sha256"] != corpus.sha256:
        raise ValueError(
            f"train.out_dir={config.train.out_dir} holds a run on another text than "
            f"{corpus.name}; {elsewhere}"
        )
    # Through JSON, which has lists alone.
    here = _flat(json.loads(json.dumps(configs.to_dict(config))))
    there = _flat(saved["config"])
    differing = [
        key for key in there if not key.startswith(_MAY_CHANGE) and here.get(key) != there[key]
    ]
    if differing:
        # The vocabulary follows from the tokenizer, so that is the one to name.
        key = min(differing, key=lambda key: key == "model.vocab_size")
        raise ValueError(
            f"train.out_dir={config.train.out_dir} holds a run with {key}={there[key]!r}, and "
            f"this one has {here.get(key)!r}; {elsewhere}"
        )
    # A tokenizer that was read from a file may have changed there.
    if saved["tokenizer"] != corpus.tokenizer.to_json():
        raise ValueError(
            f"train.out_dir={config.train.out_dir} holds a run with another tokenizer; {elsewhere}"
        )


def _flat(config: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        f"{section}.{name}": value
        for section, values in config.items()
        for name, value in values.items()
    }
