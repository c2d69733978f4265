"""The training loop: steps, evaluation, samples, metrics, checkpoints, and a clean way out."""

from __future__ import annotations

import contextlib
import functools
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import grain
import jax
import numpy as np
from jax.experimental import multihost_utils
from tqdm import tqdm

from dlm_jax.data import train_batches, validation_windows
from dlm_jax.diffusion.corruption import LinearSchedule
from dlm_jax.diffusion.losses import elbo
from dlm_jax.metrics import MetricsLog, plot_losses, read_records
from dlm_jax.sharding import batch_sharding
from dlm_jax.training.run import Run
from dlm_jax.training.step import Metrics, TrainState, make_eval_step, make_train_step


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    ``reason`` is ``finished``, ``interrupted`` (by `signal_number`; saved, and the same command
    continues) or ``non_finite`` (a loss or gradient was NaN or infinite; nothing was saved after
    the last good checkpoint). ``bound`` is the last evaluation in nats per token, or None.
    """

    reason: Literal["finished", "interrupted", "non_finite"]
    step: int
    bound: float | None
    state: TrainState
    signal_number: int = 0


class _NonFiniteError(Exception):
    pass


def train(run: Run, *, show_sample: Callable[[TrainState, int], None]) -> Outcome:
    """Trains `run` to its last step, or until a signal or a non-finite loss stops it.

    Args:
      run: from `prepare`.
      show_sample: called with the state and step every ``train.sample_every`` steps; in a run of
        several processes, by all of them.
    """
    with _stop_signals() as stop, contextlib.closing(_Loop(run)) as loop:
        try:
            for step in range(run.first_step, run.config.train.steps):
                loop.take_step()
                done = step + 1
                is_last = done == run.config.train.steps
                signal_number = stop.requested_at(done)
                if signal_number and not is_last:
                    loop.checkpoint()
                    return Outcome("interrupted", done, loop.bound, loop.state, signal_number)
                loop.look_up(done, is_last=is_last, show_sample=show_sample)
        except _NonFiniteError:
            return Outcome("non_finite", loop.step, loop.bound, loop.state)
        return Outcome("finished", loop.step, loop.bound, loop.state)


class _Loop:
    """State of the loop on this host: batches in, metrics out."""

    def __init__(self, run: Run):
        config = run.config
        self._run = run
        self._train = config.train
        self.state = run.state
        self.step = run.first_step
        self.bound = self._last_bound()
        self._rows = batch_sharding(run.mesh, self._train.batch_size)
        self._batches = train_batches(
            run.corpus.train_path,
            seq_len=config.data.seq_len,
            batch_size=self._train.batch_size,
            seed=self._train.seed,
            process_index=jax.process_index(),
            process_count=jax.process_count(),
            start_step=run.first_step,
        )
        loss = functools.partial(
            elbo, run.network, mask_id=run.corpus.tokenizer.mask_id, schedule=LinearSchedule()
        )
        sizes: dict[str, Any] = {"mesh": run.mesh, "batch_size": self._train.batch_size}
        self._train_step = make_train_step(loss, run.optimizer, run.state, **sizes)
        self._eval_step = make_eval_step(
            run.network, run.state, mask_id=run.corpus.tokenizer.mask_id, **sizes
        )
        self._pending: list[Metrics] = []
        self._since = time.perf_counter()
        self._is_first = jax.process_index() == 0
        self._log = (
            MetricsLog(run.out_dir / "metrics.jsonl", step=self.step) if self._is_first else None
        )
        self._bar = tqdm(
            total=self._train.steps,
            initial=self.step,
            desc="train",
            unit="step",
            disable=not self._is_first,
            mininterval=0.5 if sys.stderr.isatty() else 10.0,
            dynamic_ncols=True,
        )

    def close(self) -> None:
        """Ends the bar, the log and the reading ahead, and waits for the checkpoint being saved."""
        self._bar.close()
        if self._log is not None:
            self._log.close()
        self._batches.close()
        self._run.checkpoints.wait()

    def take_step(self) -> None:
        batch = next(self._batches)
        tokens_BL, length_B = self._globally(batch["tokens"]), self._globally(batch["length"])
        self.state, metrics = self._train_step(self.state, tokens_BL, length_B, self._run.noise_key)
        self.step += 1
        self._pending.append(metrics)
        self._bar.update()

    def look_up(
        self, done: int, *, is_last: bool, show_sample: Callable[[TrainState, int], None]
    ) -> None:
        """Does what is due after step `done`: log, evaluate, show a sample, checkpoint."""

        def is_due(every: int) -> bool:
            return is_last or (every > 0 and done % every == 0)

        if is_due(self._train.log_every):
            self.log()
        if is_due(self._train.eval_every):
            self.evaluate()
        if not is_last and self._train.sample_every and done % self._train.sample_every == 0:
            with self._off_the_clock():
                show_sample(self.state, done)
        if is_due(self._train.checkpoint_every):
            self.checkpoint()

    def log(self) -> None:
        """Fetches the metrics of the steps since the last call, checks and records their mean."""
        if not self._pending:
            return
        count = len(self._pending)
        losses, norms = np.asarray(jax.device_get(self._pending), np.float64).T
        self._pending = []
        seconds = time.perf_counter() - self._since
        self._since = time.perf_counter()
        rate = count * self._train.batch_size * self._run.config.data.seq_len / seconds
        is_finite = np.isfinite(losses) & np.isfinite(norms)
        if not is_finite.all():
            first_bad = self.step - count + 1 + int(np.argmin(is_finite))
            index = int(np.argmin(is_finite))
            tqdm.write(
                f"step {first_bad}: loss {losses[index]}, gradient norm {norms[index]}; stopping, "
                "the last checkpoint is kept; lower the learning rate or the clip",
                file=sys.stderr,
            )
            raise _NonFiniteError
        if self._log is not None:
            self._log.write(
                kind="train",
                step=self.step,
                loss=float(losses.mean()),
                grad_norm=float(norms.mean()),
                tokens_per_second=rate,
            )
        self._bar.set_postfix_str(f"loss {losses.mean():.3f}, {rate:,.0f} tokens/s")

    def evaluate(self) -> None:
        """Records the bound on held-out text, over the same windows and masks every time."""
        self.log()
        with self._off_the_clock():
            batch_size = self._train.batch_size
            windows = validation_windows(
                self._run.corpus.val_path,
                seq_len=self._run.config.data.seq_len,
                pad_id=self._run.corpus.tokenizer.pad_id,
                max_windows=self._train.eval_windows,
                multiple_of=batch_size,
            )
            tokens, length = windows["tokens"], windows["length"]
            nats = []
            for first in range(0, len(length), batch_size):
                rows = slice(first, first + batch_size)
                mine = self._my_rows(rows)
                nats.append(
                    self._eval_step(
                        self.state.params,
                        self._globally(tokens[mine]),
                        self._globally(length[mine]),
                        jax.random.fold_in(jax.random.key(0), first),
                    )
                )
            per_row = np.concatenate(jax.device_get(nats)).astype(np.float64)
            is_row = length > 0
            self.bound = float(per_row.sum() / length.sum())
            # The ratio's standard error, rows taken as independent.
            spread = per_row[is_row] - self.bound * length[is_row]
            error = math.sqrt(float((spread**2).sum())) / float(length.sum())
        if self._log is not None:
            self._log.write(
                kind="evaluation",
                step=self.step,
                bound=self.bound,
                standard_error=error,
                windows=int(is_row.sum()),
            )
            plot_losses(
                read_records(self._run.out_dir / "metrics.jsonl"), self._run.out_dir / "loss.png"
            )
            tqdm.write(
                f"step {self.step}: held-out bound {self.bound:.4f} +- {error:.4f} nats/token",
                file=sys.stderr,
            )

    def checkpoint(self) -> None:
        """Saves the state, unless a step since the last look was not finite."""
        self.log()
        with self._off_the_clock():
            meta = self._run.meta() | {"bound": self.bound}
            self._run.checkpoints.save(self.step, self.state, meta)

    def _last_bound(self) -> float | None:
        records = read_records(self._run.out_dir / "metrics.jsonl")
        bounds = [
            record["bound"]
            for record in records
            if record["kind"] == "evaluation" and record["step"] <= self.step
        ]
        return bounds[-1] if bounds else None

    def _my_rows(self, rows: slice) -> slice:
        size = (rows.stop - rows.start) // jax.process_count()
        first = rows.start + jax.process_index() * size
        return slice(first, first + size)

    def _globally(self, local: np.ndarray) -> jax.Array:
        return jax.make_array_from_process_local_data(self._rows, local)

    @contextlib.contextmanager
    def _off_the_clock(self) -> Iterator[None]:
        """Keeps the time spent inside out of the training rate."""
        start = time.perf_counter()
        yield
        self._since += time.perf_counter() - start


class _Stop:
    """Whether a signal asked to stop, agreed on by all processes."""

    def __init__(self) -> None:
        self.signal_number = 0

    def requested_at(self, step: int) -> int:
        """The signal to stop for after `step`, or 0; the same answer on every process."""
        if jax.process_count() == 1:
            return self.signal_number
        return signal.SIGTERM if multihost_utils.reached_preemption_sync_point(step) else 0


@contextlib.contextmanager
def _stop_signals() -> Iterator[_Stop]:
    """Turns the first Ctrl-C or SIGTERM into a request; a second one acts as usual.

    With several processes it is JAX's own preemption service that listens, to SIGTERM alone, and
    agrees with the others on a step.
    """
    stop = _Stop()
    watched = [signal.SIGINT, signal.SIGTERM] if jax.process_count() == 1 else []
    previous = {number: signal.getsignal(number) for number in watched}

    def request(number: int, _: Any) -> None:
        stop.signal_number = number
        tqdm.write("stopping after this step and saving ...", file=sys.stderr)
        signal.signal(number, previous[number])

    try:
        for number in watched:
            signal.signal(number, request)
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
