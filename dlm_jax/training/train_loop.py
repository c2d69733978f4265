"""The training loop: steps, and periodic actions between them."""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from statistics import median
from typing import Any, Literal

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils
from tqdm import tqdm

import dlm_jax.config as configs
from dlm_jax.config import Config, Trait
from dlm_jax.data import train_batches
from dlm_jax.diffusion.likelihood import num_scored
from dlm_jax.diffusion.objectives import Batch
from dlm_jax.distributed.mesh import CHIPS, require_working_room
from dlm_jax.distributed.partitions import batch_sharding, replicated_by_default, share_of_batch
from dlm_jax.heads import Head, Stage
from dlm_jax.progress import Progress, waiting
from dlm_jax.randomness import key_of
from dlm_jax.store import Checkpoints
from dlm_jax.training.metrics import STEPS, Journal
from dlm_jax.training.optimisers import parameter_groups
from dlm_jax.training.plan import model_flops
from dlm_jax.training.run import Run, held_out_rows, prepare
from dlm_jax.training.tasks import (
    MakeHead,
    MakeNetwork,
    MakeObjective,
    MakeOptimizer,
    bound_line,
    bound_of,
)
from dlm_jax.training.train_step import (
    Metrics,
    TrainState,
    abstract_batch,
    compile_eval_step,
    make_train_step,
)
from dlm_jax.types import Network, Params

# Maximum number of steps in flight. Two steps keep the device busy and let a run stop quickly.
_MAX_AHEAD = 2

ShowSample = Callable[[Run, TrainState, int], None]
"""``(run, state, step)``: shows samples from the model."""

Callback = Callable[[Run, TrainState, dict[str, Any]], None]
"""``(run, state, record)``: called with a record of the metrics.

``record["kind"]`` is ``train`` or ``evaluation``, and ``record["step"]`` is the number of steps
taken. The next step overwrites the arrays of the state, so copy the arrays that you want to keep.
"""


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


def say(line: str) -> None:
    """Prints a line to standard error, above the progress bar, on the first process only."""
    if jax.process_index() == 0:
        tqdm.write(line, file=sys.stderr)


def train(
    config: Config | str | PathLike[str],
    *,
    network: Network | MakeNetwork | None = None,
    objective: MakeObjective | None = None,
    heads: Sequence[Head | MakeHead] = (),
    optimizer: optax.GradientTransformation | MakeOptimizer | None = None,
    schedule: optax.Schedule | None = None,
    callbacks: Sequence[Callback] = (),
    show_sample: ShowSample | None = None,
    report: Callable[[str], None] = say,
) -> Outcome:
    """Trains the model of `config` up to the last step. Calling the function again resumes the run.

    The run writes checkpoints, ``metrics.jsonl`` and ``loss.png`` to ``train.out_dir``. Custom
    networks, objectives, heads, optimizers and schedules must be passed again to resume;
    checkpoints store only their names.

    Args:
      config: a `Config`, or the path of a TOML file.
      network: custom model that replaces the Transformer of ``[model]``: a `Network`, or a function
        of the `ModelConfig` with the ``vocab_size`` of the corpus. On several devices, each has the
        whole of a parameter whose path no rule of `dlm_jax.distributed.partitions.RULES` matches.
      objective: custom objective that replaces those of ``[objective]``: a function of the `Setup`
        (resolved config, tokenizer, mesh) that returns ``(batch, key) -> Example``, a
        `NetworkObjective`, which runs the network itself, or a `Mixture` of several objectives.
      heads: custom heads in addition to those of the config: `Head` records, or functions of the
        `Setup` that create them.
      optimizer: optax transformation that replaces the optimizer, the clipping and the schedule of
        ``[optim]``, or a function of the `Setup` that creates one. Heads with an optimiser group
        keep their own optimiser, and the custom optimizer receives `optax.MaskedNode` for the
        parameters of these heads. The labels of `optax.partition` should be a function of the
        parameters.
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
    """
    if not isinstance(config, Config):
        config = configs.load(str(config))
    run = prepare(
        config,
        network=network,
        objective=objective,
        heads=heads,
        optimizer=optimizer,
        schedule=schedule,
        report=report,
    )
    with run.checkpoints:
        describe(run, report)
        return run_loop(run, show_sample=show_sample, callbacks=callbacks)


def describe(run: Run, report: Callable[[str], None] = say) -> None:
    corpus, mesh = run.corpus, dict(run.mesh.shape)
    report(
        f"{corpus.name}: {corpus.num_train_tokens:,} training tokens, "
        f"{corpus.num_val_tokens:,} held out, vocabulary {corpus.tokenizer.vocab_size}"
    )
    kind = run.mesh.devices.flat[0].platform
    parts = parameters_by_part(run.state.params)
    report(
        f"model of {sum(parts.values()):,} parameters on {kind}, mesh {mesh}: "
        + ", ".join(f"{name} {size:,}" for name, size in parts.items())
    )
    report(groups_line(run))
    if line := replicated_by_default(run.state.params, run.mesh):
        report(line)
    for section, values in configs.differing(run.config).items():
        # The values that the tokenizer determines have been reported above.
        told = configs.keys(Trait.FOUND)
        shown = [f"{k}={_shown(v)}" for k, v in values.items() if f"{section}.{k}" not in told]
        if shown:
            report(f"not default: [{section}] {' '.join(shown)}")
    steps = run.config.train.steps
    if run.first_step == steps:
        report(f"{run.out_dir} has already completed all {steps} steps; nothing to train")
    elif run.first_step:
        report(f"continuing {run.out_dir} from step {run.first_step} of {steps}")
        here, there = run.meta["program"], run.saved.get("program", {})
        report(f"program: {_program(here)}")
        if there and there != here:
            report(f"step {run.first_step} was saved by another program: {_program(there)}")


def groups_line(run: Run) -> str:
    """The number of parameters that each optimiser updates, and matrices judged by their shapes."""
    task = run.task
    counts = parameter_groups(
        run.config,
        task.heads,
        run.state.params,
        matrices=task.matrices,
        is_own=task.own_optimizer is not None,
    )
    groups = ", ".join(
        f"{name} {size:,} in {arrays} arrays" for name, (arrays, size) in sorted(counts.items())
    )
    if run.network.is_matrix is not None or task.own_optimizer is not None:
        return f"optimisers: {groups}"
    named = ", ".join(sorted(task.matrices)) or "none"
    return f"optimisers: {groups}; matrices by shape, without Network.is_matrix: {named}"


def parameters_by_part(params: Params) -> dict[str, int]:
    """Number of parameters in each part of the model, such as ``blocks/mlp``, summed over all
    blocks.
    """
    sizes: dict[str, int] = {}
    for path, leaf in jax.tree.leaves_with_path(params):
        names = [str(getattr(key, "key", key)) for key in path]
        part = "/".join(names[:2] if names[0].endswith("blocks") else names[:1])
        sizes[part] = sizes.get(part, 0) + leaf.size
    return sizes


def _program(facts: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


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
    num_steps = run.config.train.steps
    if run.first_step >= num_steps:
        return Outcome("finished", run.first_step, run.saved.get("bound"), run.state, run)
    reason: Literal["finished", "interrupted", "non_finite"] = "finished"
    signal_number = 0
    made = _Loop(run, profile, callbacks)
    with stop_on_signals(run.checkpoints) as stop, contextlib.closing(made) as loop:
        try:
            while loop.step < num_steps:
                loop.take_step()
                loop.do_what_is_due(is_last=loop.step == num_steps, show_sample=show_sample)
                # Save after the periodic actions of this step, so that a resumed run misses none.
                signal_number = stop.at(loop.step) if loop.step < num_steps else 0
                if signal_number:
                    where = f"after step {loop.step}"
                    say(f"stopping {where} and saving; a second Ctrl-C exits immediately")
                    loop.checkpoint()
                    reason = "interrupted"
                    break
        except _NonFiniteError:
            reason, signal_number = "non_finite", 0
        run.checkpoints.wait()
        run.best.wait()
        loop.draw()
    return Outcome(reason, loop.step, loop.bound, loop.state, run, signal_number)


class _NonFiniteError(Exception):
    pass


class _Loop:
    def __init__(
        self,
        run: Run,
        profile: tuple[int, int] | None = None,
        callbacks: Sequence[Callback] = (),
    ):
        config = run.config
        self._run = run
        self._callbacks = callbacks
        self._stage = Stage(())
        self._train = config.train
        self._clock = run.clock
        self.state = run.state
        self.step = run.first_step
        self.bound: float | None = run.saved.get("bound")
        # Metrics of the steps since the last record, which are saved in checkpoints.
        self._unlogged: list[dict[str, float]] = list(run.saved.get("unlogged", []))
        self._ahead: list[Metrics] = []
        self._rows = batch_sharding(run.mesh, self._train.batch_size)
        self._share, self._shares = share_of_batch(self._rows, self._train.batch_size)
        self._eval_step = compile_eval_step(
            run.task.measure,
            run.state.params,
            mesh=run.mesh,
            batch_size=self._train.batch_size,
            compiler_options=config.mesh.compiler_options,
        )
        self._clock.charge("other")
        self._compile_train_step()
        self._clock.charge("compile")
        self._meter = Meter(run, self._shares)
        self._batches = train_batches(
            run.corpus.train_rows,
            seq_len=config.data.seq_len,
            batch_size=self._train.batch_size,
            seed=self._train.seed,
            process_index=self._share,
            process_count=self._shares,
            start_step=run.first_step,
            took=self._meter.read,
        )
        self._journal = Journal(
            run.out_dir, configs.to_dict(config), run.meta["run"], step=self.step, report=say
        )
        self._profile = Profile(profile, run.out_dir / "profile")
        self._idle = 0.0
        self._is_rate_told = False
        self._bar = Progress(
            "train",
            self._train.steps,
            "step",
            done=self.step,
            idle=lambda: self._idle,
            is_shown=jax.process_index() == 0,
        )
        if run.local is not None:
            # The run repeats the later steps.
            run.local.remove_from(self.step + 1)
        self._clock.resume(run.saved, self._journal.last)
        self._clock.charge("other")
        self._first, self._since = self.step, time.perf_counter()

    def _compile_train_step(self) -> None:
        """Compiles the training step for the stage of the next step."""
        run = self._run
        self._stage = run.task.stage(self.step)
        step = make_train_step(
            run.task.loss(self._stage),
            run.task.optimizer(self._stage),
            self.state,
            mesh=run.mesh,
            batch_size=self._train.batch_size,
            accumulate=self._train.accumulate,
            ema_decay=run.config.optim.ema_decay,
            compiler_options=run.config.mesh.compiler_options,
        )
        start = time.perf_counter()
        # The step is compiled ahead of time, so that the training rate excludes compilation.
        with waiting("compiling the training step", is_shown=jax.process_index() == 0):
            batch = abstract_batch(run.config, self._rows)
            self._train_step = step.lower(self.state, batch, run.noise_key).compile()
        require_working_room(
            self._train_step,
            run.mesh.devices.flat,
            "a training step",
            "lower train.batch_size, or raise train.accumulate",
        )
        what = f" of {self._stage}" if any(not one.joins_main for one in run.task.heads) else ""
        say(f"training step{what} compiled in {time.perf_counter() - start:.1f} s")

    def close(self) -> None:
        self._bar.close()
        self._profile.stop()
        self._journal.close()
        self._batches.close()

    def draw(self) -> None:
        """Plots the losses of the run in ``loss.png``."""
        self._journal.draw()

    def take_step(self) -> None:
        """Dispatches one step, and waits only if too many steps are in flight."""
        self._profile.before(self.step + 1)
        with self._meter.waiting_for("input"):
            local = next(self._batches)
        batch = Batch(*(self._place(local[name]) for name in ("tokens", "length", "given")))
        if self._run.task.stage(self.step) != self._stage:
            with self._off_the_clock("compile"):
                self._compile_train_step()
        self.state, metrics = self._train_step(self.state, batch, self._run.noise_key)
        self.step += 1
        self._ahead.append(metrics)
        if len(self._ahead) > _MAX_AHEAD:
            with self._meter.waiting_for("device"):
                jax.block_until_ready(self._ahead[-1 - _MAX_AHEAD])
        self._bar.update()
        self._profile.after(self.step, self._settle, say)
        if self.step == self._run.first_step + 1:
            self._settle()
            self._clock.charge(STEPS)
            say(self._clock.first_step())

    def do_what_is_due(self, *, is_last: bool, show_sample: ShowSample | None) -> None:

        def is_due(every: int) -> bool:
            return is_last or (every > 0 and self.step % every == 0)

        if is_due(self._train.log_every):
            self.log()
        if is_due(self._train.eval_every):
            self.evaluate()
        if show_sample is not None and is_due(self._train.sample_every) and not is_last:
            with self._off_the_clock("sample"):
                show_sample(self._run, self.state, self.step)
        # The last step is saved only in the shared place, so that a restart cannot miss that save.
        is_local_due = is_due(self._train.local_checkpoint_every) and not is_last
        if self._run.local is not None and is_local_due:
            with self._off_the_clock("checkpoint"):
                self._run.best.wait()
                self._run.local.save(self.step, self.state, self._meta())
        if is_due(self._train.checkpoint_every):
            self.checkpoint()

    def log(self) -> None:
        """Records the mean of each metric over the steps since the last record that have it."""
        self._settle()
        seconds = time.perf_counter() - self._since
        clock = self._meter.figures(self.step - self._first, seconds)
        self._first, self._since = self.step, time.perf_counter()
        names = dict.fromkeys(name for figures in self._unlogged for name in figures)
        means = {
            name: float(np.mean([figures[name] for figures in self._unlogged if name in figures]))
            for name in names
        }
        self._unlogged = []
        rates = self._run.task.learning_rates(self._stage, self.step - 1)
        self._record("train", means | rates | clock)
        if not self._is_rate_told:
            self._is_rate_told = True
            say(self._meter.rates(clock))
        note = f"loss {means['loss']:.3f}, {clock['tokens_per_second']:,.0f} tokens/s"
        self._bar.update(0, note=note)

    def _record(self, kind: str, figures: dict[str, Any]) -> None:
        self._clock.charge(STEPS if kind == "train" else kind)
        figures = figures | self._clock.figures()
        self._journal.write(kind=kind, step=self.step, **figures)
        for callback in self._callbacks:
            callback(self._run, self.state, {"kind": kind, "step": self.step} | figures)

    def _settle(self) -> None:
        """Waits for the steps in flight and raises an error if a metric of a step is not finite."""
        first = self.step - len(self._ahead) + 1
        with self._meter.waiting_for("device"):
            fetched, self._ahead = jax.device_get(self._ahead), []
        for step, metrics in enumerate(fetched, first):
            if not np.isfinite(list(metrics.values())).all():
                names = sorted(metrics, key=lambda name: (name != "loss", name))
                figures = ", ".join(f"{name} {metrics[name]}" for name in names)
                say(
                    f"step {step} is not finite: {figures}; training stopped, and the last "
                    f"checkpoint before it is kept; lower the learning rate or optim.clip"
                )
                raise _NonFiniteError
            self._unlogged.append({name: float(x) for name, x in metrics.items()})

    def evaluate(self) -> None:
        """Records an evaluation on held-out text. All evaluations use the same windows and
        noise.
        """
        with self._off_the_clock("evaluation"):
            params, part = self.state.best_params, (self._share, self._shares)
            figures = bound_of(
                *held_out(self._run, self._eval_step, params, part=part, place=self._place)
            )
            self.bound = figures["bound"]
            self._record("evaluation", figures)
            is_best = self._keep_best(self.bound)
        best = ", the best so far" if is_best else ""
        say(f"step {self.step}: held-out {bound_line(figures)}{best}")

    def _keep_best(self, figure: float) -> bool:
        """Saves the model if this evaluation is the best so far, and returns whether it is."""
        # Only one save runs at a time, because processes synchronise within a save.
        self._run.checkpoints.wait()
        meta = self._run.meta | {"step": self.step, "bound": self.bound}
        return self._run.best.offer(self.step, figure, self.state.best_params, meta)

    def checkpoint(self) -> None:
        """Saves the state unless a step since the last check was not finite."""
        with self._off_the_clock("checkpoint"):
            self._run.best.wait()
            self._run.checkpoints.save(self.step, self.state, self._meta())

    def _meta(self) -> dict[str, Any]:
        """The metadata of a checkpoint."""
        return (
            self._run.meta
            | self._clock.figures()
            | {"step": self.step, "bound": self.bound, "unlogged": list(self._unlogged)}
        )

    def _place(self, local: np.ndarray) -> jax.Array:
        """The global array whose rows on this process are `local`."""
        return jax.make_array_from_process_local_data(self._rows, local)

    @contextlib.contextmanager
    def _off_the_clock(self, part: str) -> Iterator[None]:
        """Excludes the context, which is a `part` of the wall time, from the training rate."""
        self._settle()
        self._clock.charge(STEPS)
        start = time.perf_counter()
        yield
        self._clock.charge(part)
        spent = time.perf_counter() - start
        self._since += spent
        self._idle += spent


def held_out(
    run: Run,
    eval_step: Callable[..., Any],
    params: Params,
    *,
    part: tuple[int, int],
    place: Callable[[np.ndarray], jax.Array],
) -> tuple[np.ndarray, np.ndarray]:
    """The bound of each window in nats, and the number of free tokens in each window.

    `eval_step` is the compiled `Task.measure`. `part` is the index of this process's part of the
    batch, and the number of parts. `place` creates the global array from the rows of this process.
    """
    batch_size, (share, shares) = run.config.train.batch_size, part
    windows = held_out_rows(run.config, run.corpus)
    mine = batch_size // shares
    parts = []
    for first in range(0, len(windows["length"]), batch_size):
        rows = slice(first + share * mine, first + (share + 1) * mine)
        batch = Batch(*(place(windows[name][rows]) for name in ("tokens", "length", "given")))
        number_B = place(np.arange(rows.start, rows.stop, dtype=np.int32))
        parts.append(eval_step(params, batch, number_B, key_of(0)))
    free_N = num_scored(run.network, windows)
    columns = jax.tree.map(lambda *cut: np.concatenate(cut), *jax.device_get(parts))
    return columns, free_N


class StopRequest:
    """A request by a signal to stop the run."""

    def __init__(self) -> None:
        self._signal_number = 0

    def at(self, step: int) -> int:
        """The signal that stops the run after `step`, or 0. The result is the same on every
        process.

        With several processes, each process must call this method once after every step.
        """
        if jax.process_count() == 1:
            return self._signal_number
        return signal.SIGTERM if multihost_utils.reached_preemption_sync_point(step) else 0

    def _note(self, number: int) -> None:
        self._signal_number = number


@contextlib.contextmanager
def stop_on_signals(checkpoints: Checkpoints) -> Iterator[StopRequest]:
    """Converts the first Ctrl-C, SIGTERM or SIGHUP (closed terminal) to a stop request.

    A second Ctrl-C or SIGTERM prints the unsaved steps to standard error and then has its default
    effect. A second SIGHUP has no effect, because terminals often send two when they close. If
    SIGHUP was already ignored, for example by ``nohup``, it remains ignored.

    With several processes, the preemption service of JAX handles SIGTERM and chooses the same step
    on all processes. Other signals are forwarded to the service as SIGTERM. Outside the main thread
    this context manager has no effect, because Python delivers signals only to the main thread.
    """
    stop = StopRequest()
    hears_signals = threading.current_thread() is threading.main_thread()
    is_alone = jax.process_count() == 1
    watched = [signal.SIGINT, signal.SIGHUP] if hears_signals else []
    watched += [signal.SIGTERM] if hears_signals and is_alone else []
    previous = {int(number): signal.getsignal(number) for number in watched}
    if previous.get(signal.SIGHUP) is signal.SIG_IGN:
        del previous[signal.SIGHUP]
    seen: set[int] = set()

    def request(number: int, _: Any) -> None:
        # The handler uses only `os.write`, because the signal may have interrupted a print.
        if number not in seen:
            seen.add(number)
            stop._note(number)
            if not is_alone:
                os.kill(os.getpid(), signal.SIGTERM)
        elif number != signal.SIGHUP:
            with contextlib.suppress(OSError):
                os.write(2, f"\n{_lost(checkpoints)}\n".encode())
            signal.signal(number, previous[number])
            signal.raise_signal(number)

    try:
        for number in previous:
            signal.signal(number, request)
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _lost(checkpoints: Checkpoints) -> str:
    steps = checkpoints.steps()
    after = f"steps after {steps[-1]} are lost" if steps else "nothing was saved"
    return f"stopped immediately: {after}; the same command resumes from there"


def parse_span(text: str) -> tuple[int, int]:
    """Parses the first and last step in ``FIRST:LAST``, both counted from 1 as in the metrics.

    Raises:
      ValueError: invalid span.
    """
    first, colon, last = text.partition(":")
    if not (colon and first.isascii() and first.isdigit() and last.isascii() and last.isdigit()):
        raise ValueError(f"--profile {text!r} is not FIRST:LAST; write two steps, such as 10:13")
    span = int(first[:12]), int(last[:12])
    if not 1 <= span[0] <= span[1]:
        raise ValueError(
            f"--profile {text!r}: steps start at 1, and the last must not precede the first"
        )
    return span


class Profile:
    """Profiles a span of steps on the devices of this process into a directory.

    Args:
      span: first and last step, counted from 1; None disables the trace.
      directory: output directory, created when the trace starts.
    """

    def __init__(self, span: tuple[int, int] | None, directory: Path):
        self._span, self._directory, self._is_on = span, directory, False

    def before(self, step: int) -> None:
        if self._span is not None and not self._is_on and self._span[0] <= step <= self._span[1]:
            jax.profiler.start_trace(str(self._directory))
            self._is_on = True

    def after(self, step: int, settle: Callable[[], None], report: Callable[[str], None]) -> None:
        """Ends the trace after the last step and reports the path of the trace. `settle` waits for
        the steps in flight.
        """
        if self._span is None or not self._is_on or step < self._span[1]:
            return
        settle()
        self.stop()
        report(f"step {step}: the trace is in {self._directory}")

    def stop(self) -> None:
        if self._is_on:
            jax.profiler.stop_trace()
            self._is_on = False


# Latest batches whose median time is the rate of the pipeline, and bytes of a token in a batch.
_READS, _BYTES = 100, 4

# Dense bfloat16 FLOP/s of one GPU, from the data sheets of the vendor.
_GPUS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2.25e15}


def peak_flops(device: Any) -> float | None:
    """The peak bfloat16 FLOP/s of a device; None if unknown, for example for a CPU."""
    if device.device_kind in CHIPS:
        return CHIPS[device.device_kind].flops
    return next((peak for name, peak in _GPUS.items() if name in device.device_kind), None)


class Meter:
    """Measures the timing of a run, whose batch is read in `shares` parts, between records."""

    def __init__(self, run: Run, shares: int = 1):
        config, devices = run.config, list(run.mesh.devices.flat)
        self._tokens = config.train.batch_size * config.data.seq_len
        self._own_tokens = self._tokens / shares
        self._reads = collections.deque[float](maxlen=_READS)
        self._flops = model_flops(
            run.state.params,
            config.model,
            num_rows=config.train.batch_size,
            num_positions=config.data.seq_len,
        )
        peak = peak_flops(devices[0])
        self._peak = None if peak is None else peak * len(devices)
        self._spent = {"input": 0.0, "device": 0.0}

    @contextlib.contextmanager
    def waiting_for(self, what: str) -> Iterator[None]:
        """Counts the time spent in the context as time waiting for `what`: ``input`` or
        ``device``.
        """
        start = time.perf_counter()
        yield
        self._spent[what] += time.perf_counter() - start

    def read(self, seconds: float) -> None:
        """Adds the time that the pipeline took for one batch of this process."""
        self._reads.append(seconds)

    def rates(self, figures: dict[str, float]) -> str:
        """A line with the data rate that the steps of `figures` need, and that of the pipeline."""
        busy = figures["step_seconds"] - figures["input_seconds"]
        needs = self._own_tokens / max(busy, 1e-9)
        reads = figures["pipeline_tokens_per_second"]
        return (
            f"data per host: a step needs {needs:,.0f} tokens/s ({needs * _BYTES / 1e6:.2f} MB/s), "
            f"the pipeline delivers {reads:,.0f} ({reads * _BYTES / 1e6:.2f} MB/s)"
        )

    def figures(self, steps: int, seconds: float) -> dict[str, float]:
        """Metrics of the steps since the last call.

        `seconds` is the total time of these steps; the times in the result are per step.

        ``step_seconds`` is the sum of ``input_seconds`` (waiting for rows), ``device_seconds``
        (waiting for the devices while the host is idle) and ``host_seconds`` (everything else).
        ``pipeline_tokens_per_second`` is the rate at which this host could read its rows.
        ``flop_utilisation`` is model FLOP/s (see `model_flops`) divided by the peak FLOP/s of the
        devices, if the peak is known. ``device_memory_bytes`` is the peak memory use of the fullest
        device of this process, if the backend reports it.
        """
        spent, self._spent = self._spent, dict.fromkeys(self._spent, 0.0)
        found = {
            "tokens_per_second": steps * self._tokens / seconds,
            "step_seconds": seconds / steps,
            "input_seconds": spent["input"] / steps,
            "device_seconds": spent["device"] / steps,
            "host_seconds": max(0.0, seconds - sum(spent.values())) / steps,
            "pipeline_tokens_per_second": self._own_tokens / max(median(list(self._reads)), 1e-9),
        }
        if self._peak is not None:
            found["flop_utilisation"] = steps * self._flops / seconds / self._peak
        in_use = [_peak_memory(device) for device in jax.local_devices()]
        if any(in_use):
            found["device_memory_bytes"] = float(max(in_use))
        return found


def _peak_memory(device: Any) -> int:
    stats = device.memory_stats() or {}
    return int(stats.get("peak_bytes_in_use", stats.get("bytes_in_use", 0)))
