"""Trains a masked diffusion language model: ``python train.py --config configs/quickstart.toml``.

Every field of the config is a flag (``--train.steps 100``). The files of a run are in
``train.out_dir``: checkpoints, the best model, ``config.toml``, ``metrics.jsonl`` and ``loss.png``.
The same command resumes the run, and so does ``--resume runs/quickstart``. Samples are printed to
standard output, and all other output to standard error. ``loss.png`` is drawn at the end of a run;
``--plot RUN`` draws it at any time.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

import dlm_jax.config as configs
from dlm_jax import __version__
from dlm_jax.cli.common import (
    Parser,
    add_host_flags,
    join_hosts,
    refuse_lone_host_flags,
    start_jax,
)
from dlm_jax.cli.ends import End, code_of, emit, end_of, program, refusals, say_error
from dlm_jax.cli.programs import take_start
from dlm_jax.config import Config
from dlm_jax.data import DamagedShard
from dlm_jax.distributed.mesh import topology_devices
from dlm_jax.distributed.partitions import make_mesh
from dlm_jax.distributed.processes import run_together
from dlm_jax.inference.generate import generate
from dlm_jax.inference.model import Model, untrained_heads
from dlm_jax.model.kernels import cpu
from dlm_jax.randomness import check_settings
from dlm_jax.rl import RewardError
from dlm_jax.settings import SettingError
from dlm_jax.training import Outcome, Run, describe, prepare, run_loop, say
from dlm_jax.training.checks import CONFIG, check_model_fits, check_parts
from dlm_jax.training.metrics import (
    DOWN,
    METRICS,
    PICTURE,
    WallClock,
    plot_run,
    read_records,
    wall_of,
)
from dlm_jax.training.plan import Plan, lines, plan, planned_task
from dlm_jax.training.run import config_of_run, load_resolved, mesh_config, state_bytes
from dlm_jax.training.tasks import figure_of
from dlm_jax.training.train_loop import parse_span
from dlm_jax.training.train_step import TrainState


def dry_run(config: Config, topology: str) -> Plan:
    """The plan for a run on the available devices, or on the devices of a topology.

    If ``model.vocab_size`` is set, the corpus is not read.
    """
    check_settings()
    if config.rl.reward:
        raise SettingError(
            "rl.reward",
            config.rl.reward,
            "cannot be planned with --dry-run, because there are no samples",
            "leave one out",
        )
    devices = topology_devices(topology) if topology else None
    tokenizer = None
    if config.model.vocab_size == 0:
        config, corpus = load_resolved(config, report=say)
        tokenizer = corpus.tokenizer
    elif config.model.has_start and config.model.start_id < 0:
        model = dataclasses.replace(config.model, start_id=config.model.vocab_size - 1)
        config = dataclasses.replace(config, model=model)
    devices = jax.devices() if devices is None else devices

    def num_bytes() -> float:
        return state_bytes(planned_task(config, make_mesh(config.mesh, devices), tokenizer))

    mesh = make_mesh(mesh_config(config, devices, num_bytes), devices)
    check_parts(config, mesh)
    check_model_fits(config, mesh)
    return plan(config, mesh, tokenizer)


NUM_SAMPLES = 3

Point = dict[str, str]
"""Texts of the settings of one run, by dotted key."""

_PLACES = ("out_dir", "checkpoint_dir")


@program
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="train.py", description=__doc__)
    add = parser.add_argument
    config_help = f"TOML file, or the name of a shipped config: {', '.join(configs.shipped())}"
    add("--config", metavar="FILE", help=config_help)
    add("--resume", metavar="RUN", help="resume the run in this directory")
    add("--print-config", action="store_true", help="print the config as TOML and exit")
    add("--profile", metavar="FIRST:LAST", help="write a profile of these steps, such as 10:13")
    sweep_help = (
        "train every combination of these values one after the other, each in its own directory in "
        "train.out_dir, and print a table; the same command resumes"
    )
    add("--sweep", nargs="+", metavar="KEY=VALUES", help=sweep_help)
    add("--version", action="version", version=f"dlm_jax {__version__}")
    plot_help = f"draw {PICTURE} of the run in this directory, which may still train, and exit"
    add("--plot", metavar="RUN", help=plot_help)
    dry_help = "compile the training step and print its cost; nothing is run or written"
    add("--dry-run", action="store_true", help=dry_help)
    place_help = "with --dry-run: TPU topology to compile for, such as v5e:4x4 or v5p:8x8x8"
    add("--topology", metavar="NAME", default="", help=place_help)
    add_host_flags(parser)
    configs.add_flags(parser)
    with refusals():
        args, overrides = configs.parse_flags(parser, argv)
        refuse_lone_host_flags(args)
        clock = WallClock(take_start())
        clock.charge("import")
        join_hosts(args)
    return run_together(lambda: _main(args, overrides, clock), code_of, end_of)


def _main(args: argparse.Namespace, overrides: dict[str, str], clock: WallClock) -> int:
    with refusals():
        if args.plot is not None:
            _plot(Path(args.plot))
            return End.DONE
        asked = _runs(args, overrides)
        config = asked[0][1]
        if args.print_config:
            _emit_once(configs.to_toml(config).removesuffix("\n"), args)
            return End.DONE
        if args.dry_run:
            _emit_once("\n".join(lines(dry_run(config, args.topology))), args)
            return End.DONE
        if args.topology:
            raise ValueError("command line: --topology has no effect without --dry-run; add it")
        profile = None if args.profile is None else parse_span(args.profile)
        start_jax()
    return _sweep(asked, profile, clock) if args.sweep else finish(_train(config, profile, clock))


def _plot(out_dir: Path) -> None:
    if not read_records(out_dir / METRICS):
        raise ValueError(f"--plot {out_dir} has no {METRICS}; pass the directory of a run")
    plot_run(out_dir, *figure_of(configs.load(str(out_dir / CONFIG))))
    say(f"wrote {out_dir / PICTURE}")


def _emit_once(text: str, args: argparse.Namespace) -> None:
    """Prints the text to standard output, on the first process only."""
    if not args.distributed or jax.process_index() == 0:
        emit(text)


def _sweep(
    asked: Sequence[tuple[Point, Config]], profile: tuple[int, int] | None, clock: WallClock
) -> int:
    """Trains the runs in turn, prints the table, and returns the exit code."""
    rows, code = [], End.DONE
    for number, (point, config) in enumerate(asked, 1):
        settings = " ".join(f"{key}={value}" for key, value in point.items())
        say(f"--- run {number} of {len(asked)}: {settings}")
        outcome = _train(config, profile, clock)
        if outcome.reason == "interrupted":
            return finish(outcome)
        code = End.NOT_FINITE if outcome.reason == "non_finite" else code
        if jax.process_index() == 0:
            rows.append(_row(point, outcome))
        # The arrays of a run must be freed before the next run allocates its own.
        del outcome
        gc.collect()
        clock = WallClock()
    if rows:
        emit(_table(rows))
    return code


def _train(config: Config, profile: tuple[int, int] | None, clock: WallClock) -> Outcome:
    with refusals():
        cpu.keep_freed_memory()
        run = prepare(config, report=say, clock=clock)
    with run.checkpoints:
        describe(run)
        try:
            return run_loop(run, show_sample=show_sample, profile=profile)
        except (DamagedShard, RewardError) as error:
            # Raised, because a process that returns waits for the others.
            say_error(error)
            raise SystemExit(End.REFUSED) from None


def _runs(args: argparse.Namespace, overrides: dict[str, str]) -> list[tuple[Point, Config]]:
    """The runs of a sweep, or the only run, with its settings and config."""
    if args.sweep is None:
        return [({}, _config(args, overrides))]
    for flag in ("resume", "print_config", "dry_run"):
        if getattr(args, flag):
            name = f"--{flag.replace('_', '-')}"
            raise ValueError(f"command line: {name} and --sweep cannot be combined; use one")
    return runs(args.sweep, overrides, lambda point: _config(args, overrides | point))


def grid(settings: Sequence[str]) -> list[Point]:
    """All combinations of ``KEY=VALUE,VALUE`` texts; the last key varies fastest.

    Raises:
      ValueError: a text has another form, or a key or value occurs twice.
    """
    axes: dict[str, list[str]] = {}
    for text in settings:
        key, _, values = text.partition("=")
        axis, where = values.split(","), f"command line: --sweep {text}"
        if not all((key, *axis)):
            raise ValueError(f"{where} is not KEY=VALUE,VALUE; write train.seed=0,1, say")
        if key in axes or len(set(axis)) < len(axis):
            raise ValueError(f"{where} repeats a key or a value; give each once")
        if key in [f"train.{place}" for place in _PLACES]:
            raise ValueError(f"{where}: every run has its own {key}; remove it")
        axes[key] = axis
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def runs(
    settings: Sequence[str], overrides: Mapping[str, str], load: Callable[[Point], Config]
) -> list[tuple[Point, Config]]:
    """The points of the grid and their configs, each with its own directories, named by the point.

    `settings` are the arguments of ``--sweep``, `overrides` the texts of the other flags. `load`
    returns the config with some settings replaced.

    Raises:
      ValueError: a setting is invalid or also given as a flag, or two runs have one directory.
    """
    found = []
    for point in grid(settings):
        if both := sorted(point.keys() & overrides.keys()):
            raise ValueError(
                f"command line: --{both[0]} and --sweep {both[0]} both set it; use one"
            )
        config = load(point)
        name = re.sub(r"[^\w.,=+-]", "_", ",".join(f"{k}={v}" for k, v in point.items()))
        places = {place: getattr(config.train, place) for place in _PLACES}
        own = {place: f"{path.rstrip('/')}/{name}" for place, path in places.items() if path}
        found.append(
            (point, dataclasses.replace(config, train=dataclasses.replace(config.train, **own)))
        )
    if len({config.train.out_dir for _, config in found}) < len(found):
        raise ValueError("command line: --sweep has values that name one directory; change them")
    return found


def _config(args: argparse.Namespace, overrides: dict[str, str]) -> Config:
    if args.resume is None:
        return configs.load(args.config, overrides)
    if args.config is not None:
        raise ValueError("--resume and --config cannot be combined; a run has its own config")
    if "train.out_dir" in overrides:
        raise ValueError("--train.out_dir has no effect with --resume, which sets it; remove it")
    return configs.override(config_of_run(Path(args.resume)), overrides)


def _row(point: Point, outcome: Outcome) -> dict[str, str]:
    """The row of a run: its settings, steps, last evaluation, and seconds without those down."""
    figure, records = outcome.run.task.figure, read_records(outcome.run.out_dir / METRICS)
    last: dict[str, Any] = records[-1] if records else {}
    wall = wall_of(last)
    is_known = outcome.reason == "finished" and figure in last
    shown = f"{last[figure]:.4f}" if is_known else outcome.reason
    seconds = sum(wall.values()) - wall.get(DOWN, 0.0)
    return point | {"steps": str(outcome.step), figure: shown, "seconds": f"{seconds:.1f}"}


def _table(rows: Sequence[dict[str, str]]) -> str:
    """The rows as a Markdown table with aligned columns."""
    names = list(dict.fromkeys(name for one in rows for name in one))
    lines = [names, ["---"] * len(names), *([one.get(name, "") for name in names] for one in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [[c.ljust(w) for c, w in zip(line, widths, strict=True)] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)


def show_sample(run: Run, state: TrainState, step: int) -> None:
    """Prints one sample to standard error during training, unless the model writes no text."""
    if not run.task.writes_text:
        return
    for text in _texts(run, state, num_samples=1, seed=run.config.train.seed):
        say(f"--- sample at step {step}\n{text}\n---")


def _texts(run: Run, state: TrainState, *, num_samples: int, seed: int = 0) -> tuple[str, ...]:
    """Texts from the current model, in the first process; empty in all other processes.

    All processes must call this function, because each samples its part of the rows with its shard
    of the parameters. If sampling fails, the reason is printed and no text is returned, because a
    failed sample must not end the run.
    """
    try:
        model = Model(
            network=run.network,
            params=state.best_params,
            tokenizer=run.corpus.tokenizer,
            max_length=run.config.data.seq_len,
            sample=run.config.sample,
            untrained=untrained_heads(run.config, int(state.step)),
            compiler_options=run.config.mesh.compiler_options,
        )
        texts = generate(model, num_samples=num_samples, seed=seed).texts
    except (ValueError, MemoryError, jax.errors.JaxRuntimeError) as error:
        say(f"warning: sampling failed: {' '.join(str(error).split())[:200]}")
        return ()
    return texts if jax.process_index() == 0 else ()


def finish(outcome: Outcome) -> int:
    """Reports how the run ended, prints samples, and returns the exit code."""
    run = outcome.run
    if outcome.reason == "non_finite":
        return End.NOT_FINITE
    if outcome.reason == "interrupted":
        say(f"interrupted: saved at step {outcome.step}; the same command resumes the run")
        return 128 + outcome.signal_number
    picture = f" and {PICTURE}" if (run.out_dir / PICTURE).exists() else ""
    place = run.config.train.checkpoint_dir
    own = f"{METRICS}{picture}" if place else f"checkpoints, {METRICS}{picture}"
    say(f"finished: {run.out_dir} holds {own}" + (f"; {place} holds checkpoints" if place else ""))
    say(run.task.next_command.format(path=place or run.out_dir))
    is_writer = run.task.writes_text
    texts = _texts(run, outcome.state, num_samples=NUM_SAMPLES) if is_writer else ()
    if texts:
        emit("\n---\n".join(texts))
    return End.DONE


if __name__ == "__main__":
    raise SystemExit(main())
