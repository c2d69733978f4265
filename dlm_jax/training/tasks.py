"""The task of a run as pure functions: its network, losses, optimiser and evaluation."""

from __future__ import annotations

import dataclasses
import functools
import math
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any, TypedDict, Unpack, cast

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
from dlm_jax.heads import HEADS, MAIN, Head
from dlm_jax.model.transformer import build
from dlm_jax.objectives.corruption import SCHEDULES
from dlm_jax.objectives.forward_process import (
    Process,
    canvas_denoising,
    noise_process,
    process_elbo,
)
from dlm_jax.objectives.likelihood import ratio_and_error
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
from dlm_jax.settings import nearest, require
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


class Parts(TypedDict, total=False):
    """The custom parts of a run; see `dlm_jax.training.train`."""

    network: Network | Callable[[ModelConfig], Network] | None
    objective: Callable[[Config, Tokenizer], Any] | None
    heads: Mapping[str, Head | Callable[[Config, Tokenizer], Head]] | None
    optimizer: optax.GradientTransformation | None
    schedule: optax.Schedule | None


def check_parts(parts: Mapping[str, Any]) -> None:
    """Raises TypeError if a custom part has an unknown name, or if heads are of the wrong type."""
    for name in parts:
        if name not in Parts.__annotations__:
            advice = nearest(name, list(Parts.__annotations__))
            raise TypeError(f"{name} is not a part of a run; {advice}")
    heads = parts.get("heads")
    if heads is not None and not isinstance(heads, Mapping):
        raise TypeError(f"heads is a {type(heads).__name__}; pass a dict, {{'NAME_head': head}}")
    for name, head in (heads or {}).items():
        if not isinstance(head, Head) and not callable(head):
            raise TypeError(f"head {name} is a {type(head).__name__}; pass a Head, or its function")


_SALT = 0x68656164


@dataclass(frozen=True, kw_only=True)
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
    corpus: Corpus
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
                weight_S = jax.vmap(lambda step, of=head: jnp.float32(of.weight_at(step)))(steps)
            trains_S = (np.asarray(weight_S) != 0) & (steps >= head.start)
            firsts[name] = int(trains_S.argmax()) if trains_S.any() else math.inf
        return firsts

    @property
    def last_stage(self) -> Stage:
        """The stage in which all heads train."""
        return self.stage(self.config.train.steps)

    def split(self, params: Params, stage: Stage) -> tuple[Params, Params]:
        """The trained and the frozen parameters, each keyed by top-level name."""
        trained = {n: params[n] for n in params if group_of(n, self.groups) in stage}
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
        waiting = {metric_of(name) for name in self.heads if name not in heads}
        seen = {key: one for key, one in network.heads.items() if key not in waiting}
        for name, head in heads.items():
            own, hidden = params, hidden_BLD
            if not head.trains_trunk:
                own, hidden = jax.lax.stop_gradient((params, hidden_BLD))
                own = own | {name: params[name]}
            given = drawn._replace(noise=drawn.noise[name], hidden_BLD=hidden)
            losses[name] = _pair(head.loss(replace(network, heads=seen), own, given), name)
            mean = means[metric_of(name)] = _mean(losses[name], name)
            total = total + head.weight_at(step) * mean
        figures = [pair for loss in losses.values() for pair in loss.figures.items()]
        names = ["loss", "grad_norm", "param_norm", *means, *(name for name, _ in figures)]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"{twice!r} names two metrics; rename the figure or the head")
        return total, {name: _mean(Loss(*figure), name) for name, figure in figures} | means

    @functools.cached_property
    def groups(self) -> dict[str, Group]:
        """The optimiser groups: the model, and each head."""
        return make_groups(
            self.config,
            self.heads,
            axes_of(self.network),
            main=self.main_optimizer,
            schedule=self.schedule,
        )

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
        return optimizer_of_stage(self.groups, self.last_stage if stage is None else stage)

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
        for rows in self.rows(start_step):
            yield Batch(*(jnp.asarray(rows[name]) for name in ("tokens", "length", "given")))

    def rows(
        self, start_step: int, share: int = 0, shares: int = 1
    ) -> Generator[dict[str, np.ndarray], None, None]:
        """An infinite iterator over the rows of a process, which reads one of `shares` equal parts
        of each batch. It prefetches, and is closed after use.
        """
        return train_batches(
            self.corpus.train_rows,
            seq_len=self.config.data.seq_len,
            batch_size=self.config.train.batch_size,
            seed=self.config.train.seed,
            process_index=share,
            process_count=shares,
            start_step=start_step,
        )

    def held_out(self) -> dict[str, np.ndarray]:
        """The held-out rows of an evaluation: ``tokens`` int32 ``[N, L]``, ``length`` and ``given``
        ``[N]``. N is a multiple of the batch size, and the last rows may be empty.
        """
        return validation_windows(
            self.corpus.val_rows,
            seq_len=self.config.data.seq_len,
            pad_id=self.tokenizer.pad_id,
            max_windows=self.config.train.eval_windows,
            multiple_of=self.config.train.batch_size,
        )

    def facts(self) -> dict[str, Any]:
        """What a saved model says about itself: config, tokenizer and corpus."""
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


def metric_of(name: str) -> str:
    """The name of the loss of a head in metrics, and of its functions in `Network.heads`."""
    return name.removesuffix("_head")


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
    **parts: Unpack[Parts],
) -> Task:
    """The task of a resolved config. See `dlm_jax.training.train` for the custom parts.

    Raises:
      ValueError: parts do not fit each other, two have the same name, or nothing trains.
      TypeError: a part is unknown, or heads are of the wrong type.
    """
    check_parts(parts)
    network = parts.get("network") or build
    network = network if isinstance(network, Network) else network(config.model)
    pack, share = config.data.pack, config.objective.proofreading_share
    if pack > 1:
        why = "requires a network with full or causal attention (Network.packs)"
        require(network.packs, "data.pack", pack, why, "use 1", "model.attention_type")
        why = f"is not supported with objective.proofreading_share={share}, which lengthens texts"
        require(not share, "data.pack", pack, why, "use 1", "objective.proofreading_share")
    # The objectives of the model.
    make_own = parts.get("objective")
    if make_own is None:
        objectives = make_objectives(config, tokenizer)
    else:
        given = make_own(config, tokenizer)
        given = given if isinstance(given, Mapping) else {"objective": given}
        objectives = {n: o if isinstance(o, Objective) else Objective(o) for n, o in given.items()}
        shares = {name: one.share for name, one in objectives.items()}
        if abs(sum(shares.values()) - 1) > 1e-3:
            raise ValueError(f"the shares of the objectives are {shares}; let them add up to 1")
    # The heads of the config, then those of the caller.
    made, heads = dict[str, Head](), parts.get("heads") or {}
    banned_ids = (*tokenizer.banned_ids, tokenizer.pad_id)
    for name in config.model.added_heads:
        if name not in network.heads:
            raise ValueError(f"model.add_{name}_head=True requires a network with a {name} head")
        make = HEADS[name].make_head
        made[f"{name}_head"] = make(config, mask_id=tokenizer.mask_id, banned_ids=banned_ids)
    names = [*objectives, *made, *heads]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"two objectives or heads have the same name: {twice}; rename one")
    for name, head in heads.items():
        if not name.endswith("_head") or "/" in name:
            raise ValueError(f"the name of head {name!r} does not end in '_head'; rename it")
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
        config=config,
        tokenizer=tokenizer,
        mesh=mesh,
        network=network,
        objectives=objectives,
        heads=made,
        corpus=cast(Corpus, corpus),
        main_optimizer=parts.get("optimizer"),
        schedule=parts.get("schedule"),
    )


_OF_MASKED: dict[str, Any] = {
    "denoising_share": 0,
    "proofreading_share": 0,
    "time_weight": True,
    "normaliser": "tokens",
}
"""Settings of ``[objective]`` that only masked diffusion has, with the values that do nothing."""


def make_objectives(config: Config, tokenizer: Tokenizer) -> dict[str, Objective]:
    """The objectives of the config, or next-token prediction for a causal model.

    Objectives whose share is 0 are omitted.

    Raises:
      ValueError: the rows per batch of an objective are rounded to 0, or the objective does not fit
        the model.
    """
    objective, model, mask_id = config.objective, config.model, tokenizer.mask_id
    process, kind = process_of(config, tokenizer), model.attention_type
    if process.is_masked:
        why, remedy = "has no sampler for models with canvases", "use uniform"
        is_usable, other = kind != "canvas", "model.attention_type"
        require(is_usable, "objective.process", process.name, why, remedy, other)
    else:
        why = f"requires objective.process='masked', not {process.name!r}"
        for key, value in _OF_MASKED.items():
            given = getattr(objective, key)
            require(given == value, f"objective.{key}", given, why, f"use {value!r}")
        why = "is not supported with model.attention_type='causal'"
        require(kind != "causal", "objective.process", process.name, why, "use 'masked'")
    if kind == "causal":
        return {"next_token": Objective(lambda batch, key: next_token(batch, model.predicts_first))}
    schedule = SCHEDULES[objective.schedule](objective.schedule_power)
    if kind == "canvas":
        of_canvas = canvas_denoising(
            process,
            schedule=schedule,
            canvas_length=model.block_length,
            text_weight=objective.text_weight,
            conditioned_share=objective.conditioned_share,
        )
        return {"denoising": of_canvas}
    if not process.is_masked:
        of_process = process_elbo(process, schedule=schedule, block_length=model.block_length)
        return {"elbo": of_process}
    of_elbo = functools.partial(
        elbo,
        schedule=schedule,
        mask_id=mask_id,
        block_length=model.block_length,
        over=objective.normaliser,
        is_weighted=objective.time_weight,
    )
    of_denoising = functools.partial(
        denoising, settings=objective, mask_id=mask_id, random_ids=text_ids(tokenizer)
    )
    of_proofreading = functools.partial(
        proofreading,
        max_ratio=objective.misprint_ratio,
        mask_id=mask_id,
        kinds=objective.misprint_kinds,
        masked_rows=objective.misprint_masked_rows,
    )
    rest = 1.0 - objective.denoising_share - objective.proofreading_share
    mixture = {
        "elbo": Objective(of_elbo, share=rest),
        "denoising": Objective(of_denoising, share=objective.denoising_share),
        "proofreading": Objective(of_proofreading, share=objective.proofreading_share),
    }
    mixture = {name: one for name, one in mixture.items() if one.share > 1e-6}
    num_rows = config.train.batch_size
    counts = np.bincount(owners(mixture, num_rows), minlength=len(mixture))
    for (name, one), count in zip(mixture.items(), counts, strict=True):
        if not count:
            what = f"objective.{name}_share=" if name != "elbo" else "the ELBO's share "
            raise ValueError(
                f"{what}{one.share} is less than one of train.batch_size={num_rows} rows, so it "
                f"would never be trained; raise the share to {1 / num_rows:.4g}, or "
                f"train.batch_size to {math.ceil(1 / one.share)}"
            )
    return mixture


def process_of(config: Config, tokenizer: Tokenizer) -> Process:
    """The forward process of a config over the vocabulary of a tokenizer."""
    ids = {"mask_id": tokenizer.mask_id, "noise_ids": noise_ids(tokenizer)}
    return noise_process(config.objective, **ids)


def bound_of(nats_N: np.ndarray, free_N: np.ndarray) -> dict[str, float]:
    """The metrics of an evaluation of N rows, given their numbers of free positions."""
    mean, error = ratio_and_error(nats_N.astype(np.float64), free_N)
    windows = int((free_N > 0).sum())
    # The error cannot be estimated from a single window, and JSON cannot represent NaN.
    known = {"standard_error": error} if windows > 1 else {}
    return {"bound": mean, **known, "windows": windows}
