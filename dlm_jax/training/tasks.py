"""The task of a run as pure functions: its network, losses, optimiser and evaluation."""

from __future__ import annotations

import dataclasses
import functools
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

import dlm_jax.config as configs
from dlm_jax import devices
from dlm_jax.config import Config, ModelConfig
from dlm_jax.data import (
    Corpus,
    Tokenizer,
    noise_ids,
    text_ids,
    train_batches,
    validation_windows,
)
from dlm_jax.distributed.partitions import axes_of
from dlm_jax.heads import HEADS, MAIN, Head, metric_of, weight_at
from dlm_jax.model.transformer import build
from dlm_jax.objectives.canvas_denoising import canvas_denoising
from dlm_jax.objectives.corruption import SCHEDULES
from dlm_jax.objectives.forward_process import Process, noise_process, process_elbo
from dlm_jax.objectives.likelihood import costs, half_width, plus_minus, ratio_and_error
from dlm_jax.objectives.losses import Loss, cross_entropy, hidden_of
from dlm_jax.objectives.objective import (
    Batch,
    Drawn,
    Objective,
    denoising,
    draw_all,
    elbo,
    next_token,
    owners,
    proofreading,
)
from dlm_jax.settings import SettingError, require
from dlm_jax.store import save_weights
from dlm_jax.training.init_from import load_initial_params
from dlm_jax.training.optimisers import (
    Group,
    Stage,
    group_of,
    make_groups,
    optimizer_of_stage,
)
from dlm_jax.types import Network, Params, returned

MakeNetwork = Callable[[ModelConfig], Network]
MakeObjective = Callable[[Config, Tokenizer], Any]
MakeHead = Callable[[Config, Tokenizer], Head]

_SALT = 0x68656164


@dataclass(frozen=True)
class Task:
    """The training of a config as pure functions, also for a custom loop.

    Attributes:
      config: resolved config, with ``model.vocab_size``.
      tokenizer: tokenizer of the corpus.
      mesh: devices over which the rows of a batch are sharded.
      network: the model. Its `init` creates the parameters of all heads.
      objectives: objectives of the model itself, by name.
      heads: heads by name, in the order in which their losses are added.
      corpus: the text; None for a plan.
      main_optimizer: custom optimiser of the main group; None uses ``[optim]``.
      schedule: maps a step (counted from 0) to a factor that scales the learning rates of
        ``[optim]``. None uses the warm-up and cosine decay.
    """

    config: Config
    tokenizer: Tokenizer
    mesh: Mesh
    network: Network
    objectives: Mapping[str, Objective]
    heads: Mapping[str, Head] = dataclasses.field(default_factory=dict)
    corpus: Corpus | None = None
    main_optimizer: optax.GradientTransformation | None = None
    schedule: optax.Schedule | None = None

    def stage(self, step: int) -> Stage:
        """The groups that train at a step (counted from 0): ``main`` and names of heads."""
        main = (MAIN,) if self.config.heads.train_main else ()
        return (*main, *(name for name, first in self.first_steps.items() if step >= first))

    @functools.cached_property
    def first_steps(self) -> dict[str, float]:
        """The first step at which each head trains; infinite if it does not."""
        steps, firsts = np.arange(self.config.train.steps + 1), {}
        for name, head in self.heads.items():
            with jax.ensure_compile_time_eval():
                weight_S = jax.vmap(lambda step, of=head: jnp.float32(weight_at(of, step)))(steps)
            trains_S = (np.asarray(weight_S) != 0) & (steps >= head.start)
            firsts[name] = int(trains_S.argmax()) if trains_S.any() else math.inf
        return firsts

    @property
    def last_stage(self) -> Stage:
        """The stage in which all heads train."""
        return self.stage(self.config.train.steps)

    def split(self, params: Params, stage: Stage) -> tuple[Params, Params]:
        """The trained and the frozen parameters, each keyed by top-level name."""
        adapts = self.config.model.lora_rank > 0
        groups = {name: group_of(name, self.heads, adapts=adapts) for name in params}
        trained = {name: params[name] for name in params if groups[name] in stage}
        return trained, {name: tree for name, tree in params.items() if name not in trained}

    def draw(self, batch: Batch, key: jax.Array, step: jax.Array, stage: Stage) -> Drawn:
        """The batch with the noise of a step, which depends only on the key of the run and the
        step.

        Each head has separate noise, so that the noise of the model does not depend on the heads.
        Each text of a packed row has the noise of a row of its own.
        """
        rows = batch.unpacked()
        is_cut = self.config.model.attention_type != "causal"
        cut = self.config.objective.random_length_share if is_cut else 0.0
        drawn = draw_all(self.objectives, rows, jax.random.fold_in(key, step), cut=cut)
        noise = dict(drawn.noise)
        salted = jax.random.fold_in(jax.random.fold_in(key, _SALT), step)
        for name, head in self.heads.items():
            if name in stage:
                noise[name] = head.draw(drawn, jax.random.fold_in(salted, _stream(name)))
        drawn = drawn._replace(noise=noise)
        return drawn if rows is batch else drawn.packed(len(batch.length_B))

    def losses(
        self, trained: Params, frozen: Params, drawn: Drawn, step: jax.Array, stage: Stage
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The total loss, and the loss and the figures of each objective and head, for a batch or a
        part of it.

        The unit of the loss is nats per token if the objectives and heads use this unit.
        """
        network, params, batch = self.network, frozen | trained, drawn.batch
        heads = {name: head for name, head in self.heads.items() if name in stage}
        objectives = self.objectives if MAIN in stage else {}
        shares_trunk = any(one.loss is None for one in objectives.values())
        hidden_BLD: Any = None
        nll_BL: Any = None
        # 1. One pass of the trunk, for all objectives without a loss and all heads.
        if shares_trunk or heads:
            hidden_BLD = hidden_of(network, params, drawn.shown_BL, batch.tokens_BL, batch.length_B)
            # Without this barrier, the heads would be fused into the trunk, so that the trunk would
            # round differently from a trunk without heads.
            hidden_BLD = jax.lax.optimization_barrier(hidden_BLD)
        if shares_trunk:
            nll_BL = cross_entropy(
                network,
                params,
                hidden_BLD,
                batch.tokens_BL,
                mask_id=self.tokenizer.mask_id,
                is_read_BL=drawn.is_supervised_BL(),
            )
        # 2. The objectives of the model.
        losses: dict[str, Loss] = {}
        for name, objective in objectives.items():
            noise = drawn.noise[name]
            if objective.loss is not None:
                losses[name] = _pair(objective.loss(network, params, noise), name)
            else:
                weight_BL, weight = noise
                # Positions that are not predicted may contain MASK, whose cost is infinite.
                weighted_BL = jnp.where(weight_BL > 0, weight_BL * nll_BL, 0.0)
                losses[name] = Loss(jnp.sum(weighted_BL), weight)
        means = {name: _mean(loss, name) for name, loss in losses.items()}
        total = sum((objectives[name].share * means[name] for name in means), jnp.zeros(()))
        # 3. The heads. Those that do not train yet are not there for the others.
        waiting = set(map(metric_of, self.heads)) - set(map(metric_of, heads))
        seen = {key: one for key, one in network.heads.items() if key not in waiting}
        for name, head in heads.items():
            own, hidden = params, hidden_BLD
            if not head.trains_trunk:
                own, hidden = jax.lax.stop_gradient((params, hidden_BLD))
                own = own | {name: params[name]}
            given = drawn._replace(noise=drawn.noise[name], hidden_BLD=hidden)
            losses[name] = _pair(head.loss(replace(network, heads=seen), own, given), name)
            mean = means[metric_of(name)] = _mean(losses[name], name)
            total = total + weight_at(head, step) * mean
        figures = [pair for loss in losses.values() for pair in loss.figures.items()]
        names = ["loss", "grad_norm", "param_norm", *means, *(name for name, _ in figures)]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"{twice!r} names two metrics; rename the figure or the head")
        return total, {name: _mean(Loss(*figure), name) for name, figure in figures} | means

    def measure(
        self, params: Params, batch: Batch, number_B: jax.Array, key: jax.Array
    ) -> jax.Array:
        """The likelihood bound of the held-out rows with indices `number_B`, nats ``[B]``.

        A causal model has an exact likelihood instead of a bound.
        """
        return costs(
            self.network,
            params,
            batch,
            number_B,
            key,
            is_causal=self.config.model.attention_type == "causal",
            mask_id=self.tokenizer.mask_id,
            eos_id=self.tokenizer.eos_id,
            process=process_of(self.config, self.tokenizer),
        ).nats_B

    @functools.cached_property
    def groups(self) -> dict[str, Group]:
        """The optimiser groups: the model, and each head."""
        axes, given = (
            axes_of(self.network),
            {"main": self.main_optimizer, "schedule": self.schedule},
        )
        return make_groups(self.config, self.heads, axes, **given)

    def learning_rates(self, stage: Stage, step: int) -> dict[str, float]:
        """The learning rates of a step (counted from 0), for its metrics."""
        return {
            name: float(np.asarray(rate(step - self.first_steps.get(group, 0))))
            for group, (rates, _) in self.groups.items()
            if group in stage
            for name, rate in rates.items()
        }

    def optimizer(self, stage: Stage | None = None) -> optax.GradientTransformation:
        """The optimiser of a stage, by default the last. Its state has the same structure in all
        stages.
        """
        stage = self.last_stage if stage is None else stage
        return optimizer_of_stage(self.groups, stage, adapts=self.config.model.lora_rank > 0)

    def init(self, key: jax.Array) -> Params:
        """Fresh parameters of the model and its heads."""
        return self.network.init(key)

    def start(self, key: jax.Array, report: Callable[[str], None] = lambda line: None) -> Params:
        """The parameters with which a run starts: those of ``train.init_from`` with fresh heads, or
        fresh ones.
        """
        return load_initial_params(self.config, self.init(key), self.tokenizer, report=report)

    def loss(
        self, params: Params, batch: Batch, key: jax.Array, step: jax.typing.ArrayLike = 0
    ) -> jax.Array:
        """The loss of a training step of all heads, a float32 scalar in nats per token.

        Args:
          params: parameters, as returned by `init`.
          batch: rows, as yielded by `batches`.
          key: key for all noise of the run, from ``jax.random.key``.
          step: step counted from 0, which determines the noise and the weights of ramped losses.
        """
        now, stage = jnp.asarray(step, jnp.int32), self.last_stage
        with devices.used(self.mesh):
            drawn = self.draw(batch, key, now, stage)
            return self.losses(*self.split(params, stage), drawn, now, stage)[0]

    def gradient(
        self, params: Params, batch: Batch, key: jax.Array, step: jax.typing.ArrayLike = 0
    ) -> tuple[jax.Array, Params]:
        """`loss` and its gradient with respect to `params`, which is zero for parameters that are
        never trained.
        """
        trained, frozen = self.split(params, self.last_stage)
        loss, grads = jax.value_and_grad(
            lambda trained: self.loss(frozen | trained, batch, key, step)
        )(trained)
        return loss, jax.tree.map(jnp.zeros_like, params) | grads

    def batches(self, start_step: int = 0) -> Iterator[Batch]:
        """An infinite iterator over the batches of the run that starts at `start_step`."""
        assert self.corpus is not None, "a task from `problem` has a corpus"
        train = self.config.train
        for rows in train_batches(
            self.corpus.train_rows,
            seq_len=self.config.data.seq_len,
            batch_size=train.batch_size,
            seed=train.seed,
            start_step=start_step,
        ):
            yield Batch(*(jnp.asarray(rows[name]) for name in ("tokens", "length", "given")))

    def held_out(self) -> dict[str, np.ndarray]:
        """The held-out rows of an evaluation: ``tokens`` int32 ``[N, L]``, ``length`` and ``given``
        ``[N]``. N is a multiple of the batch size, and the last rows may be empty.
        """
        assert self.corpus is not None, "a task from `problem` has a corpus"
        return validation_windows(
            self.corpus.val_rows,
            seq_len=self.config.data.seq_len,
            pad_id=self.tokenizer.pad_id,
            max_windows=self.config.train.eval_windows,
            multiple_of=self.config.train.batch_size,
        )

    def facts(self) -> dict[str, Any]:
        """What a saved model says about itself: config, tokenizer and corpus."""
        assert self.corpus is not None, "a task from `problem` has a corpus"
        return {
            "config": configs.to_dict(self.config),
            "tokenizer": self.tokenizer.to_json(),
            "corpus": {"name": self.corpus.name, "sha256": self.corpus.sha256},
        }

    def save(self, params: Params, path: str | PathLike[str]) -> None:
        """Writes a weights file, which `dlm_jax.load` and ``train.init_from`` accept."""
        save_weights(path, params, self.facts())


def _stream(name: str) -> int:
    """The index of the noise of a head."""
    names = [f"{one}_head" for one in HEADS]
    return names.index(name) if name in names else zlib.crc32(name.encode())


def _pair(loss: Any, name: str) -> Loss:
    if not isinstance(loss, tuple) or not 2 <= len(loss) <= 3:
        kind = type(loss).__name__
        raise ValueError(f"{name}.loss returned a {kind}; return (sum, weight) or a Loss")
    return Loss(*loss)


def _mean(loss: Loss, name: str) -> jax.Array:
    returned(loss.sum, name, "loss(...).sum", "", (), float)
    returned(loss.weight, name, "loss(...).weight", "", (), float)
    has_weight = loss.weight != 0
    return jnp.where(has_weight, loss.sum / jnp.where(has_weight, loss.weight, 1.0), 0.0)


def make_task(
    config: Config,
    tokenizer: Tokenizer,
    mesh: Mesh,
    *,
    corpus: Corpus | None = None,
    network: Network | MakeNetwork | None = None,
    objective: MakeObjective | None = None,
    heads: Mapping[str, Head | MakeHead] | None = None,
    optimizer: optax.GradientTransformation | None = None,
    schedule: optax.Schedule | None = None,
) -> Task:
    """The task of a resolved config. See `dlm_jax.training.train` for the custom parts.

    Raises:
      ValueError: parts do not fit each other, two have the same name, or nothing trains.
    """
    if not isinstance(network, Network):
        network = (network or build)(config.model)
    pack, share = config.data.pack, config.objective.proofreading_share
    if pack > 1:
        why = "requires a network with full or causal attention (Network.packs)"
        require(network.packs, "data.pack", pack, why, "use 1", "model.attention_type")
        why = f"is not supported with objective.proofreading_share={share}, which lengthens texts"
        require(not share, "data.pack", pack, why, "use 1", "objective.proofreading_share")
    banned_ids = (*tokenizer.banned_ids, tokenizer.pad_id)
    is_named = heads is None or isinstance(heads, Mapping)
    if not is_named:
        raise TypeError(f"heads is a {type(heads).__name__}; pass a dict, {{'NAME_head': head}}")
    made, heads = dict[str, Head](), heads or {}
    for name in config.model.added_heads:
        if name not in network.heads:
            raise ValueError(f"model.add_{name}_head=True requires a network with a {name} head")
        make = HEADS[name].make_head
        made[f"{name}_head"] = make(config, mask_id=tokenizer.mask_id, banned_ids=banned_ids)
    for name in heads:
        if not name.endswith("_head") or "/" in name:
            raise ValueError(f"the name of head {name!r} does not end in '_head'; rename it")
    objectives = make_objectives(config, tokenizer) if objective is None else {}
    if objective is not None:
        given = objective(config, tokenizer)
        given = given if isinstance(given, Mapping) else {"objective": given}
        objectives = {n: o if isinstance(o, Objective) else Objective(o) for n, o in given.items()}
        shares = {name: one.share for name, one in objectives.items()}
        if abs(sum(shares.values()) - 1) > 1e-3:
            raise ValueError(f"the shares of the objectives are {shares}; let them add up to 1")
    names = [*objectives, *made, *heads]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"two objectives or heads have the same name: {twice}; rename one")
    for name, head in heads.items():
        is_usable = isinstance(head, Head) or callable(head)
        if not is_usable:
            raise TypeError(f"head {name} is a {type(head).__name__}; pass a Head, or its function")
        made[name] = head if isinstance(head, Head) else head(config, tokenizer)
    if not config.heads.train_main and not made:
        switches = " or ".join(f"model.add_{name}_head" for name in HEADS)
        raise ValueError(f"heads.train_main=False leaves nothing to train; set {switches}")
    inits = {name: head.init for name, head in made.items() if head.init is not None}
    if inits:
        init_model = network.init

        def init(key: jax.Array) -> Params:
            own = {n: make(jax.random.fold_in(key, _stream(n))) for n, make in inits.items()}
            return init_model(key) | own

        network = replace(network, init=init)
    return Task(
        config,
        tokenizer,
        mesh,
        network,
        objectives,
        made,
        corpus=corpus,
        main_optimizer=optimizer,
        schedule=schedule,
    )


def make_objectives(config: Config, tokenizer: Tokenizer) -> dict[str, Objective]:
    """The objectives of the config, or next-token prediction for a causal model.

    Objectives whose share is 0 are omitted.

    Raises:
      ValueError: the rows per batch of an objective are rounded to 0, or the objective does not fit
        the model.
    """
    objective, model, mask_id = config.objective, config.model, tokenizer.mask_id
    check_process(config)
    process = process_of(config, tokenizer)
    if model.attention_type == "causal":
        predicts_first = model.predicts_first
        return {"next_token": Objective(lambda batch, key: next_token(batch, predicts_first))}
    schedule = SCHEDULES[objective.schedule](objective.schedule_power)
    if not process.is_masked:
        if model.attention_type != "canvas":
            elbo_of = process_elbo(process, schedule=schedule, block_length=model.block_length)
            return {"elbo": elbo_of}
        own = canvas_denoising(
            process,
            schedule=schedule,
            canvas_length=model.block_length,
            text_weight=objective.text_weight,
            conditioned_share=objective.conditioned_share,
        )
        return {"denoising": own}
    shares = {"denoising": objective.denoising_share, "proofreading": objective.proofreading_share}
    draws: dict[str, Any] = {
        "elbo": functools.partial(
            elbo,
            schedule=schedule,
            mask_id=mask_id,
            block_length=model.block_length,
            over=objective.normaliser,
            is_weighted=objective.time_weight,
        ),
        "denoising": functools.partial(
            denoising, settings=objective, mask_id=mask_id, random_ids=text_ids(tokenizer)
        ),
        "proofreading": functools.partial(
            proofreading,
            max_ratio=objective.misprint_ratio,
            mask_id=mask_id,
            kinds=objective.misprint_kinds,
            masked_rows=objective.misprint_masked_rows,
        ),
    }
    shares = {"elbo": 1.0 - shares["denoising"] - shares["proofreading"]} | shares
    made = {n: Objective(draws[n], share=s) for n, s in shares.items() if s > 1e-6}
    num_rows = config.train.batch_size
    counts = np.bincount(owners(made, num_rows), minlength=len(made))
    for name, count in zip(made, counts, strict=True):
        share = made[name].share
        what = f"objective.{name}_share={share}" if name != "elbo" else f"the ELBO's share {share}"
        if not count:
            raise ValueError(
                f"{what} is less than one of train.batch_size={num_rows} rows, so it would never "
                f"be trained; raise the share to {1 / num_rows:.4g}, or train.batch_size to "
                f"{math.ceil(1 / share)}"
            )
    return made


def process_of(config: Config, tokenizer: Tokenizer) -> Process:
    """The forward process of a config over the vocabulary of a tokenizer."""
    ids = {"mask_id": tokenizer.mask_id, "noise_ids": noise_ids(tokenizer)}
    return noise_process(config.objective, **ids)


def check_process(config: Config) -> None:
    """Raises SettingError if the forward process does not fit other settings."""
    objective, name = config.objective, config.objective.process
    if noise_process(objective).is_masked:
        if config.model.attention_type == "canvas":
            raise SettingError(
                "objective.process",
                name,
                "has no sampler for models with canvases",
                "use uniform",
                "model.attention_type",
            )
        return
    for key, value in {
        "denoising_share": 0,
        "proofreading_share": 0,
        "time_weight": True,
        "normaliser": "tokens",
    }.items():
        given, why = getattr(objective, key), f"requires objective.process='masked', not {name!r}"
        require(given == value, f"objective.{key}", given, why, f"use {value!r}")
    is_causal = config.model.attention_type == "causal"
    why = "is not supported with model.attention_type='causal'"
    require(not is_causal, "objective.process", name, why, "use 'masked'")


def bound_of(nats_N: np.ndarray, free_N: np.ndarray) -> dict[str, float]:
    """The metrics of an evaluation of N rows, given their numbers of free positions."""
    mean, error = ratio_and_error(nats_N.astype(np.float64), free_N)
    windows = int((free_N > 0).sum())
    # The error cannot be estimated from a single window, and JSON cannot represent NaN.
    return (
        {"bound": mean} | ({"standard_error": error} if windows > 1 else {}) | {"windows": windows}
    )


def bound_line(figures: dict[str, float]) -> str:
    half = half_width(figures.get("standard_error", math.nan), int(figures["windows"]))
    return f"bound {figures['bound']:.4f}{plus_minus(half)} nats/token"
