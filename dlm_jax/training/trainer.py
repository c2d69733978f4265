"""The trainer: from a config to a trained model.

`train` is `prepare`, which makes the mesh, the data and the state of a run, and `run_loop`, which
takes its steps and calls a hook every n steps.

- A resumed run equals an uninterrupted one, bit for bit: step s reads batch s and draws noise s,
  and metrics without a record are saved with the state.
- Nothing is written before config, data and directories have been checked, and a directory belongs
  to one run at a time.
- All processes decide alike, at the same step.
- A signal stops a run after a step and its hooks, and the state is saved.
- A value that is not finite stops a run, and the last good checkpoint stays.
"""

from __future__ import annotations

import contextlib
import functools
import math
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Unpack

import jax
import numpy as np

import dlm_jax.config as configs
from dlm_jax import progress
from dlm_jax.config import Config
from dlm_jax.data import Corpus
from dlm_jax.distributed import compiler
from dlm_jax.distributed.mesh import require_room
from dlm_jax.distributed.partitions import batch_sharding, make_mesh, share_of_batch, undeclared
from dlm_jax.distributed.processes import check_same_everywhere, on_first_process
from dlm_jax.hf import KEPT
from dlm_jax.objectives.likelihood import half_width, num_scored, plus_minus
from dlm_jax.objectives.objective import Batch
from dlm_jax.progress import Progress, waiting
from dlm_jax.randomness import check_settings, fingerprint, key_of
from dlm_jax.store import Checkpoints
from dlm_jax.store.files import DirectoryLock, check_bucket, located, own_source, program_facts
from dlm_jax.training.init_from import (
    BEST,
    check_identity,
    check_same_run,
    checkpoints_of,
    facts_of,
    has_config,
    kept_of,
    load_data,
    load_initial_params,
    part_name,
    windows_of,
    write_config,
)
from dlm_jax.training.metrics import METRICS, TRACKERS, MetricsLog, check_trackers, peak_flops
from dlm_jax.training.plan import (
    bytes_per_device,
    check_model_fits,
    mesh_config,
    model_flops,
    state_bytes,
)
from dlm_jax.training.signals import stop_on_signals
from dlm_jax.training.tasks import Parts, Task, bound_of, check_parts, make_task
from dlm_jax.training.train_step import (
    Metrics,
    TrainState,
    abstract_state,
    check_adds_up,
    init_state,
    lower_step,
    make_eval_step,
)
from dlm_jax.types import Network, Params

# Maximum number of steps in flight. Two steps keep the device busy and let a run stop quickly.
_MAX_AHEAD = 2


@dataclass(frozen=True, kw_only=True)
class Run:
    """A prepared run: the resolved config and the objects created from it.

    ``state`` is fresh or from the newest checkpoint, and ``saved`` contains the JSON metadata of
    that checkpoint (empty if fresh). ``meta`` is saved with every state. It contains a random
    identity of the run (which is also stored in the best model and the metrics), the names of
    custom parts (network, objective and heads), the sources of randomness, the version and source
    code of the program, and what the run keeps of a published model (`read_kept`). The noise of all
    steps is derived from ``noise_key``. ``best`` has the model with the lowest bound, which was
    ``lowest_bound`` (infinite if unknown) when the run was prepared.
    """

    task: Task
    meta: dict[str, Any]
    state: TrainState
    saved: dict[str, Any]
    noise_key: jax.Array
    checkpoints: Checkpoints
    best: Checkpoints
    lowest_bound: float

    @property
    def config(self) -> Config:
        return self.task.config

    @property
    def network(self) -> Network:
        return self.task.network

    @property
    def corpus(self) -> Corpus:
        return self.task.corpus

    @property
    def out_dir(self) -> Path:
        return Path(self.config.train.out_dir)

    @functools.cached_property
    def first_step(self) -> int:
        """Number of steps taken before this start."""
        return int(self.state.step)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run.

    ``run`` is the run, and ``params`` are its trained parameters. To sample from the trained model,
    use ``dlm_jax.Model(run.network, params, run.corpus.tokenizer,
    max_length=run.config.data.seq_len)``. ``reason`` is ``finished``, ``interrupted`` (by
    `signal_number`; the state was saved, and the same command resumes the run) or ``non_finite`` (a
    loss, gradient or parameter was NaN or infinite; nothing was saved after the last good
    checkpoint). ``bound`` is the result of the last evaluation in nats per token, or None without
    an evaluation.
    """

    reason: Literal["finished", "interrupted", "non_finite"]
    step: int
    bound: float | None
    state: TrainState
    run: Run
    signal_number: int = 0

    @property
    def params(self) -> Params:
        """The trained parameters, or their moving average if there is one."""
        return self.state.best_params


ShowSample = Callable[[Run, TrainState, int], None]
"""``(run, state, step)``: shows samples from the model."""

Callback = Callable[[Run, TrainState, dict[str, Any]], None]
"""``(run, state, record)``: called with a record of the metrics.

``record["kind"]`` is ``train`` or ``evaluation``, and ``record["step"]`` is the number of steps
taken. The next step overwrites the arrays of the state, so copy the arrays that you want to keep.
"""


def say(line: str) -> None:
    """Prints a line to standard error, above the progress bar, on the first process only."""
    if jax.process_index() == 0:
        progress.say(line)


def train(
    config: Config | str | PathLike[str],
    *,
    callbacks: Sequence[Callback] = (),
    show_sample: ShowSample | None = None,
    report: Callable[[str], None] = say,
    **parts: Unpack[Parts],
) -> Outcome:
    """Trains the model of `config` up to the last step. Calling the function again resumes the run.

    The run writes checkpoints and ``metrics.jsonl`` to ``train.out_dir``. Custom networks,
    objectives, heads, optimizers and schedules must be passed again to resume; checkpoints store
    only their names.

    Args:
      config: a `Config`, or the path of a TOML file.
      network: custom model that replaces the Transformer of ``[model]``: a `Network`, or a function
        of the `ModelConfig` with the ``vocab_size`` of the corpus. `Network.axes` declares its
        matrices and how they are split; others are judged by rank, and each device has them whole.
      objective: custom objective that replaces those of ``[objective]``: a function of the resolved
        config and the tokenizer that returns an `Objective`, its ``draw`` alone, or a dict of
        several, by name, whose shares add up to 1.
      heads: custom heads by name, in addition to those of the config: `Head` records, or functions
        of the resolved config and the tokenizer that create them.
      optimizer: optax transformation that replaces the optimizer, the clipping and the schedule of
        ``[optim]``. Heads keep their own optimiser, and the custom optimizer receives
        `optax.MaskedNode` for their parameters. The labels of `optax.partition` should be a
        function of the parameters.
      schedule: ``step -> factor``, with steps counted from 0. The factor scales the learning rates
        of ``[optim]`` and replaces the warm-up and cosine decay. If `optimizer` is given, the
        factor scales the updates of that optimizer.
      callbacks: called with the run, the state and a record of the metrics every
        ``train.log_every`` steps and after every evaluation, on all processes.
      show_sample: called with the run, the state and the step every ``train.sample_every`` steps.
      report: called with one-line messages.

    Returns:
      The outcome of the run, with its trained parameters.

    Raises:
      ValueError: arguments are incompatible. The message names these arguments and the remedy.
      TypeError: a part is unknown, or heads are of the wrong type.
    """
    config = config if isinstance(config, Config) else configs.load(str(config))
    run = prepare(config, report=report, **parts)
    with run.checkpoints:
        describe(run, report)
        return run_loop(run, show_sample=show_sample, callbacks=callbacks)


def problem(
    config: Config | str | PathLike[str],
    *,
    report: Callable[[str], None] = lambda line: None,
    **parts: Unpack[Parts],
) -> Task:
    """The training of a config as pure functions, for a custom loop. Only `Task.save` writes a
    file.

    `parts` are the custom network, objective and heads; they and the errors are as for `train`.
    """
    check_parts(parts)
    config = config if isinstance(config, Config) else configs.load(str(config))
    # Processes agree before they read data. The data determines the vocabulary, so the size of the
    # model, and so the default of mesh.fsdp.
    check_same_everywhere(facts_of(config))
    check_settings()
    train, checkpoints = config.train, checkpoints_of(config)
    mesh = make_mesh(mesh_config(config.mesh, jax.devices()))
    compiler.options("train", mesh, config.mesh.compiler_options)
    share_of_batch(batch_sharding(mesh, train.batch_size, train.accumulate), train.batch_size)
    check_trackers(train.trackers)
    on_first_process(lambda: check_bucket("train.checkpoint_dir", checkpoints))
    config, corpus = load_data(config, report=report)
    check_same_everywhere({"data.source": corpus.sha256})
    task = make_task(config, corpus.tokenizer, mesh, corpus=corpus, **parts)
    if parts.get("network") is None:
        devices = list(mesh.devices.flat)
        mesh = make_mesh(mesh_config(config.mesh, devices, lambda: state_bytes(task)))
        check_model_fits(config.model, config.data.seq_len, mesh)
        task = replace(task, mesh=mesh)
    return task


def prepare(config: Config, *, report: Callable[[str], None], **parts: Unpack[Parts]) -> Run:
    """Prepares the run of `config`. Resumes if the directory contains checkpoints.

    `parts` are the custom parts, see `train`. A ``model.vocab_size`` of 0 is replaced by the
    vocabulary size of the tokenizer.

    Raises:
      ValueError: the data is invalid, the batch or mesh does not fit the devices, or the directory
        contains another run or other files.
    """
    # 1. Config, mesh and data.
    given = config
    task = problem(config, report=report, **parts)
    config, train = task.config, task.config.train

    # 2. What the checkpoints say about the run.
    own: dict[str, Any] = {kind: part for kind, part in parts.items() if part not in (None, {})}
    names = {kind: part_name(kind, part) for kind, part in own.items()}
    own |= {name: getattr(head, "loss", head) for name, head in own.pop("heads", {}).items()}
    check_same_everywhere({f"source code of {name}": own_source(p) for name, p in own.items()})
    meta = {"run": "", **task.facts(), "own": names}
    meta |= {"randomness": fingerprint(), "program": program_facts()}
    if task.corpus.chat_template:
        meta["chat_template"] = task.corpus.chat_template

    # 3. The directories.
    out_dir, lock = Path(train.out_dir), DirectoryLock()
    checkpoints = Checkpoints(checkpoints_of(config), keep=train.keep_checkpoints)
    checkpoints.when_closed.callback(lock.release)
    with contextlib.ExitStack() as undo:
        undo.callback(checkpoints.close)
        best = Checkpoints(located(train.checkpoint_dir or out_dir) / BEST, keep=1)
        checkpoints.when_closed.callback(best.close, together=False)
        places = {"train.out_dir": out_dir, "train.checkpoint_dir": checkpoints.directory}
        on_first_process(lambda: lock.lock_all(places))
        is_new = not on_first_process(lambda: checkpoints.steps(complete=False))

        # 4. The state: fresh, with the parameters of train.init_from, or from a checkpoint.
        target = abstract_state(task)
        init_key, noise_key = jax.random.split(key_of(train.seed))
        if is_new:
            meta["run"] = on_first_process(lambda: secrets.token_hex(8))
            meta |= kept_of(config, report=report)
            require_room(
                bytes_per_device(target),
                task.mesh.devices.flat,
                "the training state",
                "use a smaller [model], or split it over more devices with mesh.fsdp",
            )
            state, saved = init_state(task, init_key), {}
            if train.init_from:
                params = load_initial_params(config, state.params, task.tokenizer, report=report)
                state = state.start_from(params)
        else:
            _, state, saved = checkpoints.restore(
                target, check=lambda saved: check_same_run(meta, saved), report=report
            )
            meta |= {name: saved[name] for name in ("run", *KEPT) if name in saved}
            before = saved["config"]["train"]["steps"]
            if before != train.steps:
                report(
                    f"train.steps increases from {before} to {train.steps}, to which the learning "
                    "rate now decays; the result differs from that of a run which had these steps "
                    "from the start"
                )

        if train.accumulate > 1 and any(map(parts.get, ("network", "objective", "heads"))):
            check_adds_up(task, state.params)

        # 5. Nothing is written before everything has been checked.
        starts_again = is_new and on_first_process(lambda: has_config(given, out_dir))
        lowest = check_identity(best, config, meta, starts_again=starts_again)
        if int(state.step) < train.steps:
            on_first_process(lambda: lock.lock_all(places, create=True))
            if is_new and on_first_process(checkpoints.steps):
                raise ValueError(
                    f"train.checkpoint_dir={checkpoints.directory} contains checkpoints of a run "
                    "that started at the same time; restart"
                )
            if starts_again:
                best.remove_from(0)
            on_first_process(lambda: write_config(given, out_dir))
        undo.pop_all()
    return Run(
        task=task,
        meta=meta,
        state=state,
        saved=saved,
        noise_key=noise_key,
        checkpoints=checkpoints,
        best=best,
        lowest_bound=lowest,
    )


def run_loop(
    run: Run,
    *,
    show_sample: ShowSample | None = None,
    profile: tuple[int, int] | None = None,
    callbacks: Sequence[Callback] = (),
) -> Outcome:
    """Trains `run` until its last step, a signal or a non-finite value.

    All saves are complete on disk when the function returns. A finished run is not changed.

    Args:
      run: from `prepare`.
      show_sample: called every ``train.sample_every`` steps, on all processes.
      profile: first and last step (counted from 1) of a profiler trace, which is written to
        ``profile/`` in the directory of the run.
      callbacks: see `train`.
    """
    config = run.config.train
    if run.first_step >= config.steps:
        return Outcome("finished", run.first_step, run.saved.get("bound"), run.state, run)
    trainer = Trainer(run, callbacks=callbacks)

    def sample() -> None:
        if show_sample is not None:
            with trainer.off_the_clock():
                show_sample(run, trainer.state, trainer.step)

    # What happens every n steps (0: never), and whether it also happens after the last step.
    hooks: list[tuple[Callable[[], None], int, bool]] = [
        (trainer.log, config.log_every, True),
        (trainer.evaluate, config.eval_every, True),
        (sample, config.sample_every, False),
        (trainer.save, config.checkpoint_every, True),
    ]
    first, last = profile or (0, 0)
    first = max(first, run.first_step + 1)
    reason: Literal["finished", "interrupted", "non_finite"] = "finished"
    signal_number = 0
    with stop_on_signals() as stop, contextlib.closing(trainer), contextlib.ExitStack() as trace:
        try:
            while trainer.step < config.steps:
                if trainer.step + 1 == first <= last:
                    jax.profiler.start_trace(str(run.out_dir / "profile"))
                    trace.callback(jax.profiler.stop_trace)
                trainer.take_step()
                if trainer.step == last:
                    trainer.settle()
                    trace.close()
                    say(f"step {last}: the trace is in {run.out_dir / 'profile'}")
                is_last = trainer.step == config.steps
                for hook, every, at_end in hooks:
                    if at_end if is_last else every > 0 and trainer.step % every == 0:
                        hook()
                # Save after the hooks of this step, so that a resumed run misses none.
                signal_number = 0 if is_last else stop.at(trainer.step)
                if signal_number:
                    where = f"after step {trainer.step}"
                    say(f"stopping {where} and saving; a second Ctrl-C exits immediately")
                    trainer.save()
                    reason = "interrupted"
                    break
        except NonFiniteError:
            reason, signal_number = "non_finite", 0
        run.checkpoints.wait()
        run.best.wait()
    return Outcome(reason, trainer.step, trainer.bound, trainer.state, run, signal_number)


class NonFiniteError(Exception):
    """A metric of a step is NaN or infinite."""


class Trainer:
    """Takes the steps of a run, and does what happens between them.

    ``state`` is the state after ``step`` steps, and ``bound`` is the result of the last evaluation.
    """

    def __init__(self, run: Run, *, callbacks: Sequence[Callback] = ()):
        train, is_first = run.config.train, jax.process_index() == 0
        self.run, self.state, self.step = run, run.state, run.first_step
        self.bound: float | None = run.saved.get("bound")
        self._lowest = run.lowest_bound
        self._callbacks = callbacks
        # Metrics of the steps since the last record, which are saved in checkpoints.
        self._unlogged: list[dict[str, float]] = list(run.saved.get("unlogged", []))
        self._ahead: list[Metrics] = []
        self._rows = batch_sharding(run.task.mesh, train.batch_size)
        self._share, self._shares = share_of_batch(self._rows, train.batch_size)
        self._eval_step = make_eval_step(run.task, run.state.params)
        self._compile_train_step()
        self._batches = run.task.rows(run.first_step, self._share, self._shares)
        self._log: MetricsLog | None = None
        if is_first:
            facts = run.out_dir, run.meta["config"], run.meta["run"], self.step
            trackers = {
                name: functools.partial(TRACKERS[name][1], *facts) for name in train.trackers
            }
            path = run.out_dir / METRICS
            self._log = MetricsLog(path, step=self.step, trackers=trackers, report=say)
        # Seconds outside of steps, those of steps that waited for rows, and the first step without
        # a record and its time.
        self._idle, self._waited = 0.0, 0.0
        self._since = self.step, time.perf_counter()
        self._bar = Progress(
            "train",
            train.steps,
            "step",
            done=self.step,
            idle=lambda: self._idle,
            is_shown=is_first,
        )

    def take_step(self) -> None:
        """Dispatches one step, and waits only if too many steps are in flight."""
        start = time.perf_counter()
        rows = next(self._batches)
        self._waited += time.perf_counter() - start
        if self.run.task.stage(self.step) != self._stage:
            with self.off_the_clock():
                self._compile_train_step()
        self.state, metrics = self._train_step(self.state, self._place(rows), self.run.noise_key)
        self.step += 1
        self._ahead.append(metrics)
        if len(self._ahead) > _MAX_AHEAD:
            jax.block_until_ready(self._ahead[-1 - _MAX_AHEAD])
        self._bar.update()

    def log(self) -> None:
        """Records the mean of each metric over the steps since the last record that have it, the
        learning rates, and the rates of these steps, without the time outside of steps.

        ``input_seconds`` per step are those of ``step_seconds`` that waited for rows.
        ``flop_utilisation`` is model FLOP/s divided by the peak FLOP/s of the devices, if the peak
        is known. ``device_memory_bytes`` is the peak memory use of the fullest device of this
        process, if the backend reports it.
        """
        self.settle()
        names = dict.fromkeys(name for figures in self._unlogged for name in figures)
        figures = {
            name: float(np.mean([figures[name] for figures in self._unlogged if name in figures]))
            for name in names
        }
        self._unlogged = []
        run, config = self.run, self.run.config
        figures |= run.task.learning_rates(self._stage, self.step - 1)
        size = {"num_rows": config.train.batch_size, "num_positions": config.data.seq_len}
        first, since = self._since
        self._since = self.step, time.perf_counter() - self._idle
        steps, seconds = self.step - first, max(self._since[1] - since, 1e-9)
        tokens_per_second = steps * math.prod(size.values()) / seconds
        figures |= {
            "tokens_per_second": tokens_per_second,
            "step_seconds": seconds / steps,
            "input_seconds": self._waited / steps,
        }
        self._waited = 0.0
        if peak := peak_flops(run.task.mesh.devices.flat[0]):
            flops = model_flops(run.state.params, config.model, **size)
            figures["flop_utilisation"] = steps * flops / seconds / (peak * run.task.mesh.size)
        stats = [device.memory_stats() or {} for device in jax.local_devices()]
        if in_use := max(one.get("peak_bytes_in_use", 0) for one in stats):
            figures["device_memory_bytes"] = float(in_use)
        self._record("train", figures)
        note = f"loss {figures['loss']:.3f}, {tokens_per_second:,.0f} tokens/s"
        self._bar.update(0, note=note)

    def evaluate(self) -> None:
        """Records an evaluation on held-out text, and saves the model if it is the best so far. All
        evaluations use the same windows and noise.
        """
        run = self.run
        with self.off_the_clock():
            figures = bound_of(*self.held_out())
            bound = self.bound = figures["bound"]
            self._record("evaluation", figures)
            if is_best := bound < self._lowest:
                self._lowest = bound
                # Only one save runs at a time, because processes synchronise within a save.
                run.checkpoints.wait()
                run.best.remove_from(self.step)
                facts = {"figure": bound, "measured_on": windows_of(run.config)}
                meta = run.meta | {"step": self.step, "bound": bound, "best": facts}
                run.best.save(self.step, {"params": self.state.best_params}, meta)
        half = half_width(figures.get("standard_error", math.nan), int(figures["windows"]))
        best = ", the best so far" if is_best else ""
        say(f"step {self.step}: held-out bound {bound:.4f}{plus_minus(half)} nats/token{best}")

    def held_out(self) -> tuple[np.ndarray, np.ndarray]:
        """The bound of each held-out window in nats, and its number of free tokens."""
        windows = self.run.task.held_out()
        size = self.run.config.train.batch_size
        part = size // self._shares
        nats = []
        for first in range(self._share * part, len(windows["length"]), size):
            batch = self._place({name: x[first : first + part] for name, x in windows.items()})
            number_B = self._place_rows(np.arange(first, first + part, dtype=np.int32))
            nats.append(self._eval_step(self.state.best_params, batch, number_B, key_of(0)))
        free_N = num_scored(self.run.network, windows)
        return np.concatenate(jax.device_get(nats)), free_N

    def save(self) -> None:
        """Saves the state unless a step since the last check was not finite."""
        with self.off_the_clock():
            self.run.best.wait()
            meta = {"step": self.step, "bound": self.bound, "unlogged": list(self._unlogged)}
            self.run.checkpoints.save(self.step, self.state, self.run.meta | meta)

    def close(self) -> None:
        self._bar.close()
        if self._log is not None:
            self._log.close()
        self._batches.close()

    def _compile_train_step(self) -> None:
        """Compiles the training step for the stage of the next step."""
        task = self.run.task
        self._stage = task.stage(self.step)
        start = time.perf_counter()
        # The step is compiled ahead of time, so that the training rate excludes compilation.
        with waiting("compiling the training step", is_shown=jax.process_index() == 0):
            self._train_step = lower_step(task, self._stage, self.state).compile()
        what = f" of {' + '.join(self._stage)}" if task.heads else ""
        say(f"training step{what} compiled in {time.perf_counter() - start:.1f} s")

    def _place(self, rows: dict[str, np.ndarray]) -> Batch:
        """The global batch with the given rows of this process."""
        return Batch(*(self._place_rows(rows[name]) for name in ("tokens", "length", "given")))

    def _place_rows(self, rows: np.ndarray) -> jax.Array:
        return jax.make_array_from_process_local_data(self._rows, rows)

    def _record(self, kind: str, figures: dict[str, Any]) -> None:
        record = {"kind": kind, "step": self.step, **figures}
        if self._log is not None:
            self._log.write(**record, time=round(time.time(), 3), run=self.run.meta["run"])
        for callback in self._callbacks:
            callback(self.run, self.state, record)

    def settle(self) -> None:
        """Waits for the steps in flight and raises an error if a metric of a step is not finite."""
        first = self.step - len(self._ahead) + 1
        fetched, self._ahead = jax.device_get(self._ahead), []
        for step, metrics in enumerate(fetched, first):
            if not np.isfinite(list(metrics.values())).all():
                names = sorted(metrics, key=lambda name: (name != "loss", name))
                figures = ", ".join(f"{name} {metrics[name]}" for name in names)
                say(
                    f"step {step} is not finite: {figures}; training stopped, and the last "
                    f"checkpoint before it is kept; lower the learning rate or optim.clip"
                )
                raise NonFiniteError
            self._unlogged.append({name: float(x) for name, x in metrics.items()})

    @contextlib.contextmanager
    def off_the_clock(self) -> Iterator[None]:
        """A context after the steps in flight, whose time is not that of steps."""
        self.settle()
        start = time.perf_counter()
        yield
        self._idle += time.perf_counter() - start


def describe(run: Run, report: Callable[[str], None] = say) -> None:
    """Reports the data, the model and the config of a run, and where it continues."""
    corpus, mesh, params = run.corpus, run.task.mesh, run.state.params
    report(
        f"{corpus.name}: {corpus.num_train_tokens:,} training tokens, "
        f"{corpus.num_val_tokens:,} held out, vocabulary {corpus.tokenizer.vocab_size}"
    )
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    platform = mesh.devices.flat[0].platform
    report(f"model of {size:,} parameters on {platform}, mesh {dict(mesh.shape)}")
    if own := run.meta["own"]:
        names = (
            f"{kind} {', '.join(name) if isinstance(name, list) else name}"
            for kind, name in own.items()
        )
        report(f"custom: {'; '.join(names)}")
    if line := undeclared(run.network, params, mesh.size):
        report(line)
    for section, values in configs.differing(run.config).items():
        shown = (f"{key}={value}" for key, value in values.items())
        report(f"not default: [{section}] {' '.join(shown)}")
    steps = run.config.train.steps
    if run.first_step == steps:
        report(f"{run.out_dir} has already completed all {steps} steps; nothing to train")
    elif run.first_step:
        report(f"continuing {run.out_dir} from step {run.first_step} of {steps}")
