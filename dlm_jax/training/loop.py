"""The training loop: steps, evaluation, samples, metrics, checkpoints, and a clean way out."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np
from tqdm import tqdm

from dlm_jax.data import train_batches
from dlm_jax.diffusion.objectives import Batch
from dlm_jax.distributed.memory import require_working_room
from dlm_jax.distributed.sharding import batch_sharding, share_of_batch
from dlm_jax.progress import Progress
from dlm_jax.training.evaluation import held_out
from dlm_jax.training.journal import Journal
from dlm_jax.training.meter import Meter
from dlm_jax.training.optim import learning_rates
from dlm_jax.training.profiling import Profile
from dlm_jax.training.run import Run
from dlm_jax.training.step import Metrics, StepConfig, TrainState, make_train_step
from dlm_jax.training.stop import StopRequest, stop_on_signals
from dlm_jax.types import Params

# Steps that may wait on the device: enough to keep it busy, few enough to stop soon on request.
_MAX_AHEAD = 2

ShowSample = Callable[[Run, TrainState, int], None]
"""``(run, state, step)``: shows what the model writes by then."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    ``run`` is what was trained and ``params`` what came out: ``dlm_jax.Model(run.network, params,
    run.corpus.tokenizer, max_length=run.config.data.seq_len)`` samples from it.
    ``reason`` is ``finished``, ``interrupted`` (by `signal_number`; saved, and the same command
    continues) or ``non_finite`` (a loss, gradient or parameter was NaN or infinite; nothing was
    saved after the last good checkpoint). ``bound`` is the last evaluation in nats per token; None
    without one, and for a sequence scorer.
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


class _NonFiniteError(Exception):
    pass


def say(line: str) -> None:
    """Prints a line on standard error, above the progress bar; on the first process alone."""
    if jax.process_index() == 0:
        tqdm.write(line, file=sys.stderr)


def run_loop(
    run: Run, *, show_sample: ShowSample | None = None, profile: tuple[int, int] | None = None
) -> Outcome:
    """Trains `run` to its last step, or until a signal or a non-finite figure stops it.

    What it saved is complete on disk when it returns. A run that has taken all its steps is
    returned as it is.

    Args:
      run: from `prepare`.
      show_sample: called every ``train.sample_every`` steps, in a run of several processes by all
        of them.
      profile: the first and the last step, from 1, of a trace in ``profile/`` of the run.
    """
    if run.first_step >= run.config.train.steps:
        return Outcome("finished", run.first_step, run.saved.get("bound"), run.state, run)
    with stop_on_signals(run.checkpoints) as stop, contextlib.closing(_Loop(run, profile)) as loop:
        outcome = _take_steps(loop, stop, run.config.train.steps, show_sample)
        run.checkpoints.wait()
        loop.wait_for_best()
    return outcome


def _take_steps(
    loop: _Loop, stop: StopRequest, num_steps: int, show_sample: ShowSample | None
) -> Outcome:
    try:
        while loop.step < num_steps:
            loop.take_step()
            loop.do_what_is_due(is_last=loop.step == num_steps, show_sample=show_sample)
            # Only now, so that what was due at this step is not lost on resuming.
            signal_number = stop.at(loop.step)
            if signal_number and loop.step < num_steps:
                say(f"stopping after step {loop.step} and saving; a second Ctrl-C would not wait")
                loop.checkpoint()
                return loop.outcome("interrupted", signal_number)
    except _NonFiniteError:
        return loop.outcome("non_finite")
    return loop.outcome("finished")


class _Loop:
    """State of the loop on this host: batches in, metrics out."""

    def __init__(self, run: Run, profile: tuple[int, int] | None = None):
        config = run.config
        self._run = run
        self._train = config.train
        self.state = run.state
        self.step = run.first_step
        self.bound: float | None = run.saved.get("bound")
        # Figures of the steps since the last line of metrics; a checkpoint carries them over.
        self._unlogged: list[dict[str, float]] = list(run.saved.get("unlogged", []))
        self._ahead: list[Metrics] = []
        self._rows = batch_sharding(run.mesh, self._train.batch_size)
        self._share, self._shares = share_of_batch(self._rows, self._train.batch_size)
        self._eval_step = run.eval_step()
        self._compile_train_step()
        self._batches = train_batches(
            run.corpus.train_rows,
            seq_len=config.data.seq_len,
            batch_size=self._train.batch_size,
            seed=self._train.seed,
            process_index=self._share,
            process_count=self._shares,
            start_step=run.first_step,
        )
        self._journal = Journal(run, step=self.step, report=say)
        self._meter = Meter(run)
        self._profile = Profile(profile, run.out_dir / "profile")
        self._best = run.best
        self._idle = 0.0
        self._bar = Progress(
            "train", self._train.steps, "step", done=self.step, idle=lambda: self._idle,
            is_shown=jax.process_index() == 0,
        )  # fmt: skip
        self._since = time.perf_counter()

    def _compile_train_step(self) -> None:
        """Compiles the step of the stage that the next step belongs to."""
        run = self._run
        config = StepConfig(
            batch_size=self._train.batch_size,
            accumulate=self._train.accumulate,
            ema_decay=run.config.optim.ema_decay,
        )
        self._stage = run.stage(self.step)
        loss, optimizer = run.task.loss(self._stage), run.optimizer(self._stage)
        step = make_train_step(loss, optimizer, self.state, mesh=run.mesh, config=config)
        rows, seq_len = self._train.batch_size, run.config.data.seq_len
        columns: list[Any] = [
            jax.ShapeDtypeStruct(shape, np.int32, sharding=self._rows)
            for shape in ((rows, seq_len), (rows,), (rows,))
        ]
        start = time.perf_counter()
        # Ahead of time, so that neither the rate nor the time left counts the compiler.
        self._train_step = step.lower(self.state, Batch(*columns), run.noise_key).compile()
        require_working_room(self._train_step, run.mesh.devices.flat, "a training step",
                             "lower train.batch_size, or raise train.accumulate")  # fmt: skip
        what = f" of {self._stage}" if any(not one.joins_main for one in run.task.heads) else ""
        say(f"training step{what} compiled in {time.perf_counter() - start:.1f} s")

    def close(self) -> None:
        """Ends the bar, the log and the reading ahead."""
        self._bar.close()
        self._profile.stop()
        self._journal.close()
        self._batches.close()

    def wait_for_best(self) -> None:
        """Nothing, once the best model is complete on disk."""
        self._best.wait()

    def take_step(self) -> None:
        """Dispatches one step; waits only for one that lies too far back."""
        if self._run.stage(self.step) != self._stage:
            with self._off_the_clock():
                self._compile_train_step()
        self._profile.before(self.step + 1)
        with self._meter.waiting_for("input"):
            local = next(self._batches)
        batch = self._batch(local)
        self.state, metrics = self._train_step(self.state, batch, self._run.noise_key)
        self.step += 1
        self._ahead.append(metrics)
        if len(self._ahead) > _MAX_AHEAD:
            with self._meter.waiting_for("device"):
                jax.block_until_ready(self._ahead[-1 - _MAX_AHEAD])
        self._bar.update()
        self._profile.after(self.step, self._settle, say)

    def outcome(
        self, reason: Literal["finished", "interrupted", "non_finite"], signal_number: int = 0
    ) -> Outcome:
        """How the run ends here."""
        return Outcome(reason, self.step, self.bound, self.state, self._run, signal_number)

    def do_what_is_due(self, *, is_last: bool, show_sample: ShowSample | None) -> None:
        """Logs, evaluates, shows a sample and checkpoints, as far as due after this step."""

        def is_due(every: int) -> bool:
            return is_last or (every > 0 and self.step % every == 0)

        if is_due(self._train.log_every):
            self.log()
        if is_due(self._train.eval_every):
            self.evaluate()
        if show_sample is not None and is_due(self._train.sample_every) and not is_last:
            with self._off_the_clock():
                show_sample(self._run, self.state, self.step)
        if is_due(self._train.checkpoint_every):
            self.checkpoint()

    def log(self) -> None:
        """Records the mean of the metrics since the last line."""
        self._settle()
        seconds = time.perf_counter() - self._since
        clock, self._since = self._meter.figures(seconds), time.perf_counter()
        means = {
            name: float(np.mean([figures[name] for figures in self._unlogged]))
            for name in self._unlogged[0]
        }
        self._unlogged = []
        rates = learning_rates(self._run.config, self._run.task.heads, self._stage, self.step - 1)
        self._journal.write(kind="train", step=self.step, **means, **rates, **clock)
        note = f"loss {means['loss']:.3f}, {clock['tokens_per_second']:,.0f} tokens/s"
        self._bar.update(0, note=note)

    def _settle(self) -> None:
        """Waits for the steps under way; raises if one of them was not finite."""
        first = self.step - len(self._ahead) + 1
        with self._meter.waiting_for("device"):
            fetched, self._ahead = jax.device_get(self._ahead), []
        for step, metrics in enumerate(fetched, first):
            if not np.isfinite(list(metrics.values())).all():
                names = sorted(metrics, key=lambda name: (name != "loss", name))
                figures = ", ".join(f"{name} {metrics[name]}" for name in names)
                say(
                    f"step {step} is not finite: {figures}; stopped, and the last checkpoint "
                    "before it is kept; lower the learning rate or optim.clip"
                )
                raise _NonFiniteError
            self._unlogged.append({name: float(x) for name, x in metrics.items()})

    def evaluate(self) -> None:
        """Records how it does on held-out text, over the same windows and noise every time."""
        task = self._run.task
        with self._off_the_clock():
            params, part = self.state.best_params, (self._share, self._shares)
            measured = held_out(self._run, self._eval_step, params, part=part, place=self._batch)
            figures, line = task.summarize(*measured)
            self.bound = figures.get("bound")
            self._journal.write(kind="evaluation", step=self.step, **figures)
            self._journal.draw()
            is_best = self._keep_best(figures[task.figure])
        say(f"step {self.step}: held-out {line}{', the best so far' if is_best else ''}")

    def _keep_best(self, figure: float) -> bool:
        """Whether this evaluation is the best so far; the model is then kept."""
        # One save at a time: several processes must not meet in two of them at once.
        self._run.checkpoints.wait()
        meta = self._run.meta() | {"step": self.step, "bound": self.bound}
        return self._best.offer(self.step, figure, self.state.best_params, meta)

    def checkpoint(self) -> None:
        """Saves the state, unless a step since the last look was not finite."""
        with self._off_the_clock():
            self._best.wait()
            meta = self._run.meta() | {
                "step": self.step, "bound": self.bound, "unlogged": list(self._unlogged)
            }  # fmt: skip
            self._run.checkpoints.save(self.step, self.state, meta)

    def _batch(self, local: dict[str, np.ndarray]) -> Batch:
        """The global batch of which this process has these rows."""
        place = jax.make_array_from_process_local_data
        return Batch(*(place(self._rows, local[name]) for name in ("tokens", "length", "given")))

    @contextlib.contextmanager
    def _off_the_clock(self) -> Iterator[None]:
        """Keeps the time spent inside out of the training rate."""
        self._settle()
        start = time.perf_counter()
        yield
        spent = time.perf_counter() - start
        self._since += spent
        self._idle += spent
