from __future__ import annotations

import os
import signal
import threading
import types

import jax
import numpy as np
import pytest
import tiny_run

import dlm_jax.config as configs
from dlm_jax.training import trainer
from dlm_jax.training.signals import stop_on_signals
from dlm_jax.training.trainer import Trainer, prepare


def _before_steps(act, patch: pytest.MonkeyPatch) -> None:
    take_step = Trainer.take_step
    patch.setattr(Trainer, "take_step", lambda loop: (act(loop), take_step(loop))[1])


def _saved_steps(out_dir) -> list[str]:
    return sorted(path.name for path in (out_dir / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out_dir = tmp_path_factory.mktemp("loop") / "run"
    before = set(threading.enumerate())
    outcome = tiny_run.run(
        out_dir, train__log_every=5, train__eval_every=8, train__checkpoint_every=0
    )
    left = [thread for thread in set(threading.enumerate()) - before if not thread.daemon]
    for thread in left:  # one that is on its way out keeps nothing alive
        thread.join(20)
    return out_dir, outcome, {thread.name for thread in left if thread.is_alive()}


def test_the_held_out_bound_falls_below_that_of_guessing_evenly(finished):
    out_dir, outcome, _ = finished
    bounds = [line["bound"] for line in tiny_run.records(out_dir) if line["kind"] == "evaluation"]
    assert bounds == sorted(bounds, reverse=True)
    assert outcome.bound == bounds[-1] < np.log(len(set(tiny_run.TEXT))) - 0.1


def test_metrics_have_a_line_at_every_step_that_is_due_and_one_at_the_end(finished):
    lines = tiny_run.records(finished[0])
    assert [(line["kind"], line["step"]) for line in lines] == [
        ("train", 5), ("evaluation", 8), ("train", 10), ("train", 15), ("evaluation", 16),
        ("train", 20), ("train", 24), ("evaluation", 24),
    ]  # fmt: skip
    for line in lines:
        names = {name for name in line if not name.startswith("grad_norm_")}
        figures = {"loss", "grad_norm", "param_norm", *tiny_run.RATES}
        if line["kind"] == "evaluation":
            figures = {"bound", "standard_error", "windows"}
        assert figures | {"kind", "step"} == names
        assert all(np.isfinite(line[name]) for name in figures)


def test_no_thread_that_would_keep_the_program_alive_is_left(finished):
    assert finished[2] == set()


@pytest.mark.slow
def test_compiling_evaluating_and_showing_samples_do_not_count_as_training_time(tmp_path):
    clock = [0.0]

    def wait(seconds):
        clock[0] += seconds

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            trainer, "time", types.SimpleNamespace(time=lambda: 0.0, perf_counter=lambda: clock[0])
        )
        _before_steps(lambda loop: wait(1.0), patch)
        for name in ("_compile_train_step", "held_out"):
            usual = getattr(Trainer, name)

            def slow(*args, original=usual, **named):
                wait(1000.0)
                return original(*args, **named)

            patch.setattr(Trainer, name, slow)
        tiny_run.run(tmp_path, train__log_every=8, train__eval_every=2, train__sample_every=2,
                     show_sample=lambda run, state, step: wait(1000.0))  # fmt: skip
    lines = tiny_run.read_records(tmp_path / "metrics.jsonl")
    rates = [line["tokens_per_second"] for line in lines if line["kind"] == "train"]
    assert rates == [8 * 16] * 3


@pytest.fixture
def prepared(tmp_path):
    """A loop before its first step, with room for more rows than the held-out text fills."""
    with tiny_run.on_devices(1):
        run = prepare(configs.load(None, tiny_run.flags(tmp_path)), report=print)
    with run.checkpoints:
        loop = Trainer(run)
        yield loop
        loop.close()


def test_rows_that_fill_the_last_batch_do_not_count(prepared):
    nats_N, length_N = prepared.held_out()
    assert len(nats_N) == len(length_N) == 8
    assert (length_N > 0).sum() == 4
    assert (nats_N[length_N == 0] == 0).all()
    assert (nats_N[length_N > 0] > 0).all()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_after_the_step_and_stops(tmp_path, number, capsys):
    def act(loop):
        if loop.step == 4:
            os.kill(os.getpid(), number)

    handler = signal.getsignal(number)
    with pytest.MonkeyPatch.context() as patch:
        _before_steps(act, patch)
        outcome = tiny_run.run(tmp_path)
    assert (outcome.reason, outcome.step, outcome.signal_number) == ("interrupted", 5, number)
    assert _saved_steps(tmp_path) == ["step_00000004", "step_00000005"]
    assert signal.getsignal(number) is handler
    assert "stopping after step 5 and saving" in capsys.readouterr().err


@pytest.fixture
def usual_interrupt():
    """Programs that were started in the background inherit that this signal is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_second_signal_acts_as_usual(usual_interrupt):
    with stop_on_signals() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.at(1) == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGHUP])
def test_a_closed_terminal_asks_once_and_never_ends_a_run_that_saves(first):
    tiny_run.needs(signal.SIGHUP)
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    with stop_on_signals() as stop:
        for number in (first, signal.SIGHUP, signal.SIGHUP):
            os.kill(os.getpid(), number)
        assert stop.at(1) in (first, signal.SIGHUP)
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP)] == handlers


def test_training_outside_the_main_thread_leaves_signals_alone():
    seen = []

    def inside():
        with stop_on_signals() as stop:
            seen.append(stop.at(1))

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert seen == [0]


def _spoil(loop: Trainer) -> None:
    # Only what the step computes can turn non-finite, so spoil what it starts from.
    if loop.step == 6:
        params = jax.tree.map(lambda leaf: leaf * np.nan, loop.state.params)
        loop.state = loop.state._replace(params=params)


@pytest.mark.slow
def test_a_loss_that_is_not_finite_stops_the_run_and_nothing_is_saved_after_it(tmp_path, capsys):
    with pytest.MonkeyPatch.context() as patch:
        _before_steps(_spoil, patch)
        outcome = tiny_run.run(tmp_path, train__log_every=100, train__checkpoint_every=2)
    assert outcome.reason == "non_finite"
    assert _saved_steps(tmp_path) == ["step_00000004", "step_00000006"]
    (line,) = [line for line in capsys.readouterr().err.split("\n") if "not finite" in line]
    assert "step 7 is not finite: loss nan" in line
    assert "lower the learning rate" in line
    assert all(np.isfinite(record.get("loss", 0)) for record in tiny_run.records(tmp_path))
