"""The training of a config as pure functions, for custom loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dlm_jax.config as configs
from dlm_jax import devices
from dlm_jax.config import Config
from dlm_jax.data import Corpus, Setup, train_batches
from dlm_jax.heads import Head
from dlm_jax.objectives.objective import Batch
from dlm_jax.store import save_weights
from dlm_jax.training.init_from import load_initial_params
from dlm_jax.training.tasks import MakeHead, MakeNetwork, MakeObjective, Task
from dlm_jax.training.trainer import held_out_rows, prepare_task
from dlm_jax.types import Network, Params


@dataclass(frozen=True)
class Problem:
    """The training of a config as pure functions, for a custom loop.

    All heads are trained, and only `save` writes a file.
    """

    corpus: Corpus
    task: Task

    @property
    def setup(self) -> Setup:
        return self.task.setup

    @property
    def network(self) -> Network:
        return self.task.network

    def init(self, key: jax.Array) -> Params:
        """Fresh parameters of the model and its heads."""
        return self.network.init(key)

    def start(self, key: jax.Array, report: Callable[[str], None] = lambda line: None) -> Params:
        """The parameters with which a run starts: those of ``train.init_from`` with fresh heads, or
        fresh ones.
        """
        setup = self.setup
        return load_initial_params(setup.config, self.init(key), setup.tokenizer, report=report)

    def optimizer(self) -> optax.GradientTransformation:
        """The optimiser of ``[optim]`` and ``[heads]`` for ``train.steps`` steps."""
        return self.task.optimizer(self.task.stage(self.setup.config.train.steps))

    def loss(
        self, params: Params, batch: Batch, key: jax.Array, step: jax.typing.ArrayLike = 0
    ) -> jax.Array:
        """The loss of a training step, a float32 scalar in nats per token.

        Args:
          params: parameters, as returned by `init`.
          batch: rows, as yielded by `batches`.
          key: key for all noise of the run, from ``jax.random.key``.
          step: step counted from 0, which determines the noise and the weights of ramped losses.
        """
        compute, trained = self._loss_of_trained(params, batch, key, step)
        return compute(trained)

    def gradient(
        self, params: Params, batch: Batch, key: jax.Array, step: jax.typing.ArrayLike = 0
    ) -> tuple[jax.Array, Params]:
        """`loss` and its gradient with respect to `params`, which is zero for parameters that are
        never trained.
        """
        compute, trained = self._loss_of_trained(params, batch, key, step)
        loss, grads = jax.value_and_grad(compute)(trained)
        return loss, jax.tree.map(jnp.zeros_like, params) | grads

    def batches(self, start_step: int = 0) -> Iterator[Batch]:
        """An infinite iterator over the batches of the run that starts at `start_step`."""
        train = self.setup.config.train
        for rows in train_batches(
            self.corpus.train_rows,
            seq_len=self.setup.config.data.seq_len,
            batch_size=train.batch_size,
            seed=train.seed,
            start_step=start_step,
        ):
            yield Batch(*(jnp.asarray(rows[name]) for name in ("tokens", "length", "given")))

    def held_out(self) -> dict[str, np.ndarray]:
        """The held-out rows of an evaluation: ``tokens`` int32 ``[N, L]``, ``length`` and ``given``
        ``[N]``. N is a multiple of the batch size, and the last rows may be empty.
        """
        return held_out_rows(self.setup.config, self.corpus)

    def save(self, params: Params, path: str | PathLike[str]) -> None:
        """Writes a weights file, which `dlm_jax.load` and ``train.init_from`` accept."""
        meta = {
            "config": configs.to_dict(self.setup.config),
            "tokenizer": self.corpus.tokenizer.to_json(),
            "corpus": {"name": self.corpus.name, "sha256": self.corpus.sha256},
        }
        save_weights(path, params, meta)

    def _loss_of_trained(
        self, params: Params, batch: Batch, key: jax.Array, step: jax.typing.ArrayLike
    ) -> tuple[Callable[[Params], jax.Array], Params]:
        """The loss as a function of the trained parameters, and these parameters."""
        step_loss = self.task.loss(self.task.stage(self.setup.config.train.steps))
        trained, frozen = step_loss.split(params)
        now = jnp.asarray(step, jnp.int32)

        def compute(trained: Params) -> jax.Array:
            with devices.used(self.setup.mesh):
                return step_loss(frozen | trained, step_loss.draw(batch, key, now), now)[0]

        return compute, trained


def problem(
    config: Config | str | PathLike[str],
    *,
    network: Network | MakeNetwork | None = None,
    objective: MakeObjective | None = None,
    heads: Sequence[Head | MakeHead] = (),
    report: Callable[[str], None] = lambda line: None,
) -> Problem:
    """The training of a config, for a custom loop. Arguments and errors are as for `train`."""
    config = config if isinstance(config, Config) else configs.load(str(config))
    parts: dict[str, Any] = {"network": network, "objective": objective, "heads": heads}
    parts = {kind: part for kind, part in parts.items() if part}
    task, corpus = prepare_task(config, report=report, **parts)
    return Problem(corpus, task)
