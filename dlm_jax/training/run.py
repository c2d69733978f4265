"""A training run resolved from its config: everything that can be refused is refused here."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import optax
from jax.sharding import Mesh

import dlm_jax.config as configs
from dlm_jax.checkpoint import Checkpoints
from dlm_jax.checkpoint.files import complete_steps
from dlm_jax.config import Config, ModelConfig
from dlm_jax.data import Corpus
from dlm_jax.distributed.memory import require_room
from dlm_jax.distributed.processes import check_same_everywhere, on_first_process
from dlm_jax.distributed.sharding import batch_sharding, make_mesh, share_of_batch
from dlm_jax.metrics import METRICS, check_metrics
from dlm_jax.model.transformer import build
from dlm_jax.randomness import check_settings, fingerprint, key_of
from dlm_jax.storage import check_bucket, is_remote
from dlm_jax.training.begin import begin_with
from dlm_jax.training.best import Best
from dlm_jax.training.checks import (
    check_model_fits,
    check_parts,
    check_same_run,
    check_writable,
    facts_of,
    growth,
    make_directory,
)
from dlm_jax.training.files import checkpoints_of, write_config
from dlm_jax.training.heads import MAIN, Head, Setup, with_own_parameters
from dlm_jax.training.lock import DirectoryLock
from dlm_jax.training.optim import make_grouped_optimizer
from dlm_jax.training.placing import mesh_config
from dlm_jax.training.resolved import load_resolved
from dlm_jax.training.stages import Stage, stage_at
from dlm_jax.training.step import (
    TrainState,
    abstract_state,
    check_adds_up,
    compile_eval_step,
    init_state,
)
from dlm_jax.training.tasks import TASKS, MakeHead, MakeObjective, Task, make_heads
from dlm_jax.training.trackers import check_trackers
from dlm_jax.types import Network

MakeNetwork = Callable[[ModelConfig], Network]


@dataclasses.dataclass(frozen=True)
class Run:
    """A run ready to go: the resolved config and what was made from it.

    ``state`` is fresh, or the newest checkpoint's, and ``saved`` the JSON beside it (empty if
    fresh). ``identity`` is drawn when a run begins; its checkpoints, best model and metrics carry
    it (empty for a run whose checkpoints have none). ``own`` names what is not the config's:
    its network, objective and heads. ``noise_key`` is what the noise of every step is folded from.
    """

    setup: Setup
    corpus: Corpus
    task: Task
    own: dict[str, Any]
    identity: str
    state: TrainState
    saved: dict[str, Any]
    first_step: int
    noise_key: jax.Array
    checkpoints: Checkpoints
    best: Best

    @property
    def config(self) -> Config:
        """The resolved config."""
        return self.setup.config

    @property
    def network(self) -> Network:
        """The model."""
        return self.task.network

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The devices."""
        return self.setup.mesh

    @property
    def out_dir(self) -> Path:
        """Where the run writes."""
        return Path(self.config.train.out_dir)

    def stage(self, step: int) -> Stage:
        """What trains at a step, from 0."""
        return stage_of(self.config, self.task, step)

    def optimizer(self, stage: Stage) -> optax.GradientTransformation:
        """The optimiser of a stage; its state is that of every other stage."""
        return optimizer_of(self.config, self.task, stage)

    def eval_step(self) -> Callable[..., Any]:
        """Compiled `Task.measure`."""
        return compile_eval_step(
            self.task.measure,
            self.state.params,
            mesh=self.mesh,
            batch_size=self.config.train.batch_size,
        )

    def meta(self) -> dict[str, Any]:
        """What is saved beside the state."""
        return _meta(self.config, self.corpus, self.own, self.identity)


def prepare(
    config: Config,
    *,
    network: Network | MakeNetwork | None = None,
    objective: MakeObjective | None = None,
    heads: Sequence[Head | MakeHead] = (),
    report: Callable[[str], None],
) -> Run:
    """The run that `config` asks for, continued where its directory holds checkpoints.

    Args:
      config: as loaded; ``model.vocab_size`` 0 becomes the tokenizer's.
      network: instead of the Transformer of the config, see `dlm_jax.training.train`.
      objective: instead of the config's, see there.
      heads: beside the config's, see there.
      report: takes one line of text, such as that a damaged checkpoint was passed over.

    Raises:
      ValueError: bad data, a batch or mesh that does not fit the devices, a directory that holds
        another run or something else.
    """
    mesh = _checked_mesh(config)
    out_dir, where = Path(config.train.out_dir), checkpoints_of(config)
    asked = config
    config, corpus = load_resolved(config, report=report)
    check_same_everywhere({"data.source": corpus.sha256})
    if network is None:
        check_model_fits(config, mesh)
        mesh = make_mesh(mesh_config(config, list(mesh.devices.flat)))
    setup = Setup(config, corpus.tokenizer, mesh)
    task = make_task(setup, network, objective, heads)
    own = _names_of(network, objective, heads)
    init_key, noise_key = jax.random.split(key_of(config.train.seed))
    lock = DirectoryLock()
    with contextlib.ExitStack() as undo:
        keep = config.train.keep_checkpoints
        checkpoints = Checkpoints(where, keep=keep, check=lock.check)
        undo.callback(checkpoints.close)
        checkpoints.when_closed.callback(lock.release)
        places = {"train.out_dir": out_dir, "train.checkpoint_dir": checkpoints.directory}
        if on_first_process(lambda: _acquire_those_there(lock, places) or checkpoints.steps()):
            theirs = checkpoints.read_meta(report=report)
            identity = theirs.get("run", "")
            meta = _meta(config, corpus, own, identity)
            check_same_run(meta, theirs)
            found, state, saved = checkpoints.restore(_abstract_state(setup, task), report=report)
            if line := growth(config, saved, found):
                report(line)
        else:
            identity = on_first_process(lambda: secrets.token_hex(8))
            meta = _meta(config, corpus, own, identity)
            _check_memory(_abstract_state(setup, task), setup)
            state, saved = _fresh_state(setup, task, init_key, report=report), {}
        if config.train.accumulate > 1 and (objective is not None or heads):
            _check_adds_up(setup, task, state)
        best = Best(config, meta, is_new=not saved, check=lock.check)
        checkpoints.when_closed.callback(best.close)
        on_first_process(lambda: check_metrics(out_dir / METRICS, identity, is_new=not saved))
        make_directory(out_dir)
        step = int(state.step)
        if step < config.train.steps:
            on_first_process(lambda: _acquire(lock, places, is_new=not saved))
            on_first_process(lambda: write_config(asked, out_dir))
        undo.pop_all()
    return Run(setup, corpus, task, own, identity, state, saved, step, noise_key, checkpoints, best)


def _checked_mesh(config: Config) -> Mesh:
    """The mesh of a config, once all of it is checked that needs no data."""
    check_same_everywhere(facts_of(config))
    check_settings()
    mesh = make_mesh(config.mesh)
    share_of_batch(batch_sharding(mesh, config.train.batch_size), config.train.batch_size)
    check_parts(config, mesh)
    check_writable(Path(config.train.out_dir))
    check_trackers(config.train.trackers)
    where = checkpoints_of(config)
    on_first_process(lambda: check_bucket("train.checkpoint_dir", where))
    return mesh


def _acquire_those_there(lock: DirectoryLock, places: dict[str, Path]) -> None:
    """Locks the local directories that are there, so that what is read of them stays."""
    for setting, path in places.items():
        if not is_remote(path) and path.is_dir():
            lock.acquire(path, setting)


def _acquire(lock: DirectoryLock, places: dict[str, Path], *, is_new: bool) -> None:
    """Makes and locks the directories; refuses a run that another one has begun meanwhile."""
    for setting, path in places.items():
        path.mkdir(parents=True, exist_ok=True)
        lock.acquire(path, setting)
    path = places["train.checkpoint_dir"]
    if is_new and complete_steps(path):
        raise ValueError(f"{path} was trained in meanwhile; start again")


def _check_memory(state: TrainState, setup: Setup) -> None:
    """Raises MemoryError for a state that is larger than what the devices have left."""
    shares = [
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(state)
    ]
    require_room(
        sum(shares), setup.mesh.devices.flat, "the state of the training",
        "make [model] smaller, or split it over more devices with mesh.fsdp",
    )  # fmt: skip


def _check_adds_up(setup: Setup, task: Task, state: TrainState) -> None:
    """Refuses own losses that cannot be computed in parts, of any stage of the run."""
    groups = dict.fromkeys((MAIN, *(head.group for head in task.heads)))
    if not setup.config.heads.train_main:
        del groups[MAIN]
    stage = Stage(tuple(groups), setup.config.model.lora_rank > 0)
    check_adds_up(
        task.loss(stage), state.params, mesh=setup.mesh, seq_len=setup.config.data.seq_len,
        token_ids=setup.text_ids,
    )  # fmt: skip


def make_task(
    setup: Setup,
    network: Network | MakeNetwork | None,
    objective: MakeObjective | None,
    heads: Sequence[Head | MakeHead],
) -> Task:
    """What a run trains; for the arguments see `prepare`."""
    if not isinstance(network, Network):
        network = (network or build)(setup.config.model)
    records = make_heads(setup, heads)
    network = with_own_parameters(network, records)
    return TASKS[setup.config.model.mode](setup, network, objective, records)


def _names_of(network: Any, objective: Any, heads: Sequence[Any]) -> dict[str, Any]:
    """Names, for checkpoints, of what is not the config's."""

    def name(made: Any) -> str:
        return getattr(made, "name", None) or getattr(made, "__qualname__", type(made).__name__)

    own = {"network": network and name(network), "objective": objective and name(objective)}
    return {part: found for part, found in own.items() if found} | (
        {"heads": [name(head) for head in heads]} if heads else {}
    )


def stage_of(config: Config, task: Task, step: int) -> Stage:
    """What trains at a step, from 0."""
    adapts = config.model.lora_rank > 0
    return stage_at(step, task.heads, train_main=config.heads.train_main, adapts=adapts)


def optimizer_of(config: Config, task: Task, stage: Stage) -> optax.GradientTransformation:
    """The optimiser of a stage; its state is that of every other stage."""
    return make_grouped_optimizer(
        config.optim, config.heads, task.heads, stage, num_steps=config.train.steps
    )


def _abstract_state(setup: Setup, task: Task) -> TrainState:
    optimizer = optimizer_of(setup.config, task, stage_of(setup.config, task, 0))
    has_ema = setup.config.optim.ema_decay > 0
    return abstract_state(task.network, optimizer, setup.mesh, has_ema=has_ema)


def _fresh_state(
    setup: Setup, task: Task, key: jax.Array, *, report: Callable[[str], None]
) -> TrainState:
    config = setup.config
    optimizer = optimizer_of(config, task, stage_of(config, task, 0))
    has_ema = config.optim.ema_decay > 0
    state = init_state(task.network, optimizer, key, mesh=setup.mesh, has_ema=has_ema)
    source = config.train.init_from
    return begin_with(source, state, setup.tokenizer, model=config.model, report=report)


def _meta(config: Config, corpus: Corpus, own: dict[str, Any], identity: str) -> dict[str, Any]:
    """What is saved beside the state: what the run is, and what its randomness depends on."""
    return {
        "run": identity,
        "config": configs.to_dict(config),
        "tokenizer": corpus.tokenizer.to_json(),
        "corpus": {"name": corpus.name, "sha256": corpus.sha256},
        "own": own,
        "randomness": fingerprint(),
    }
