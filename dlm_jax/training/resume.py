"""How a run continues: its identity, its directories, its checkpoints and its best model."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dlm_jax.config as configs
from dlm_jax.config import FREE, Config
from dlm_jax.data import from_json
from dlm_jax.distributed.processes import on_first_process
from dlm_jax.heads.critic import READS
from dlm_jax.hf import KEPT
from dlm_jax.randomness import settings
from dlm_jax.store import Checkpoints, load_meta
from dlm_jax.store.files import Damaged, DirectoryLock, is_remote, program_facts, write_whole
from dlm_jax.training.metrics import METRICS, read_records
from dlm_jax.training.tasks import Task
from dlm_jax.training.train_step import TrainState, abstract_state
from dlm_jax.types import Params

CONFIG = "config.toml"
"""Name of the config file of a run."""
FOLDER = "best"
"""Name of the checkpoint directory of the best model, in ``train.checkpoint_dir`` if set and
otherwise in ``train.out_dir``. The directory contains one checkpoint."""

LOCAL = frozenset({"data.source", "data.cache_dir"})
"""Settings that may differ between the processes of a run."""

Report = Callable[[str], None]


def facts_of(config: Config) -> dict[str, Any]:
    """Values that all processes of a run must share: the program, the config without local paths,
    the version of JAX, and its settings.
    """
    flat = configs.flat(configs.to_dict(config))
    facts = {key: value for key, value in flat.items() if key not in LOCAL}
    return program_facts() | facts | {"version of jax": jax.__version__} | settings()


def part_name(kind: str, part: Any) -> Any:
    """The name of a custom part of a run, by which a resumed run knows it; of heads, a list.

    An optimizer or a schedule is a closure, whose numbers and inner functions are a digest in its
    name.
    """
    if kind == "heads":
        return list(part)
    part = part.update if isinstance(part, optax.GradientTransformation) else part
    name = getattr(part, "__qualname__", type(part).__name__)
    if kind not in ("optimizer", "schedule"):
        return name
    digest = hashlib.sha256(json.dumps(_contents(part)).encode()).hexdigest()[:8]
    return f"{name.removesuffix('.<locals>.update_fn')} {digest}"


def _contents(value: Any, above: tuple[int, ...] = ()) -> Any:
    """The numbers and names in a function, its closure and its defaults, as nested lists."""
    if id(value) in above:
        return "recursion"
    above = (*above, id(value))
    if isinstance(value, functools.partial):
        value = value.func, value.args, value.keywords
    if isinstance(value, Mapping):
        return [[str(key), _contents(one, above)] for key, one in value.items()]
    if isinstance(value, tuple | list):
        return [_contents(one, above) for one in value]
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        array = np.asarray(value)
        return [str(array.dtype), array.shape, hashlib.sha256(array.tobytes()).hexdigest()]
    if value is None or isinstance(value, bool | int | float | complex | str):
        return repr(value)
    name = getattr(value, "__qualname__", type(value).__qualname__)
    if not inspect.isfunction(value):
        return name
    inside: list[Any] = [value.__defaults__, value.__kwdefaults__]
    for cell in value.__closure__ or ():
        with contextlib.suppress(ValueError):  # a variable without a value
            inside.append(cell.cell_contents)
    return [name, _contents(inside, above)]


def config_of_run(out_dir: Path) -> Config:
    """The config of the run in `out_dir` at its last save, for resuming the run.

    The checkpoints are in `out_dir` or in ``train.checkpoint_dir`` of its ``config.toml``.

    Raises:
      ValueError: no usable checkpoint exists.
    """
    started = out_dir / CONFIG
    try:
        place = configs.load(str(started)).train.checkpoint_dir
    except ValueError:
        place = ""
    try:
        meta = load_meta(place or out_dir, report=lambda line: None)
    except ValueError as error:
        advice = f"; restart it with --config {started}" if started.is_file() else ""
        raise ValueError(f"--resume {out_dir}: {error}{advice}") from None
    config = configs.from_saved(meta, where=f"--resume {out_dir}")
    train = dataclasses.replace(config.train, out_dir=str(out_dir))
    # Values determined by the text are not part of the config.
    tokenizer, model = from_json(meta["tokenizer"]), config.model
    if model.vocab_size == tokenizer.vocab_size:
        model = dataclasses.replace(model, vocab_size=0)
    if model.start_id == tokenizer.mask_id:
        model = dataclasses.replace(model, start_id=-1)
    return dataclasses.replace(config, train=train, model=model)


_HEADER = (
    "The settings of this run.\n"
    "To resume: python train.py --resume DIRECTORY\n"
    "To train the same model from scratch: python train.py --config THIS_FILE --train.out_dir "
    "ELSEWHERE"
)


def write_config(config: Config, out_dir: Path) -> None:
    """Writes ``config.toml``, for users and ``--config``, unless it is unchanged.

    Resumed runs instead read the config from the checkpoints, which have checksums.
    """
    content, path = configs.to_toml(config, header=_HEADER).encode(), out_dir / CONFIG
    if not path.is_file() or path.read_bytes() != content:
        write_whole(path, content)


def _has_config(config: Config, out_dir: Path) -> bool:
    """Whether the directory has this config, except for keys that a resumed run may change."""
    try:
        saved = configs.load(str(out_dir / CONFIG))
    except ValueError:
        return False
    here, there = (configs.flat(configs.to_dict(one)) for one in (config, saved))
    # A run without checkpoints would read these again.
    once = {"data.source", "train.init_from", "train.ignore_config"}
    return all(here[key] == there[key] for key in here if key not in FREE - once)


def check_same_run(meta: dict[str, Any], saved: dict[str, Any]) -> None:
    """Raises ValueError if settings or data would change the result of a resumed run.

    Both arguments are metadata, see `Run`: of this run, and of the checkpoints in the directory.
    """
    where = f"train.out_dir={meta['config']['train']['out_dir']}"
    configs.from_saved(saved, where=f"the run in {where}")
    for is_same, what, remedy in _comparisons(json.loads(json.dumps(meta)), saved):
        if not is_same:
            raise ValueError(
                f"{where} has a run {what}; {remedy} to resume it, or use another train.out_dir"
            )


def _comparisons(meta: dict[str, Any], saved: dict[str, Any]) -> Iterator[tuple[bool, str, str]]:
    """Whether two runs agree, how the saved one differs if not, and the remedy."""
    what = f"that was trained on a different text from {meta['corpus']['name']}"
    is_same = saved["corpus"]["sha256"] == meta["corpus"]["sha256"]
    yield is_same, what, "set data.source to the text of the other run"
    before, now = (one["randomness"]["version of jax"] for one in (saved, meta))
    what = f"that used jax {before}, which draws different random numbers from jax {now}"
    is_same = saved["randomness"]["draws"] == meta["randomness"]["draws"]
    yield is_same, what, f"use jax {before}"
    here, there = configs.flat(meta["config"]), configs.flat(saved["config"])
    steps, most = here["train.steps"], there["train.steps"]
    what = f"with train.steps={most}, but this run has {steps}"
    yield steps >= most, what, f"raise train.steps to {most} or more"
    # The critic may be trained on rows that were filled with the recommended settings.
    reads = READS if here["model.add_critic_head"] else ()
    fixed = (set(there) - FREE) | {f"sample.{key}" for key in reads}
    # The tokenizer determines the vocabulary size, so the error names the tokenizer.
    for key in sorted(fixed, key=lambda key: (key == "model.vocab_size", key)):
        what = f"with {key}={there[key]!r}, but this run has {here.get(key)!r}"
        yield here.get(key) == there[key], what, f"set {key}={there[key]!r}"
    # If the tokenizer file has changed, the tokenizers differ although the configs are equal.
    is_same = saved["tokenizer"] == meta["tokenizer"]
    yield is_same, "with a different tokenizer", "use that tokenizer"
    is_same = saved.get("chat_template") in (None, meta.get("chat_template"))
    yield is_same, "with a different chat template", "use that template"
    for part in saved["own"] | meta["own"]:
        before, now = saved["own"].get(part), meta["own"].get(part)
        yield before == now, f"whose {part} is {before}, but here it is {now}", "pass the same"


def check_metrics(asked: Config, identity: str, *, is_new: bool) -> None:
    """Raises ValueError if the run would continue or discard the metrics of another run.

    A run without checkpoints restarts and discards its metrics if the config is the same.

    Args:
      asked: config of the run, without values that depend on the data.
      identity: identity of the run.
      is_new: whether the run has no checkpoints.
    """
    out_dir = Path(asked.train.out_dir)
    others = {record.get("run", "") for record in read_records(out_dir / METRICS)} - {identity}
    if others and not (is_new and _has_config(asked, out_dir)):
        raise ValueError(
            f"{out_dir / METRICS} contains metrics of run {min(others) or 'unnamed'}, which has "
            f"{'another config' if is_new else 'other checkpoints'}; move it elsewhere, or use "
            "another train.out_dir"
        )


def restore_run(
    task: Task, meta: dict[str, Any], checkpoints: Checkpoints, report: Report
) -> tuple[TrainState, dict[str, Any]]:
    """The newest usable state and metadata of the existing run, whose identity is copied to `meta`.

    If the arrays of a checkpoint are damaged, the next older one is used.
    """
    _, state, saved = checkpoints.restore(
        abstract_state(task), check=lambda saved: check_same_run(meta, saved), report=report
    )
    meta |= {name: saved[name] for name in ("run", *KEPT) if name in saved}
    before, after = saved["config"]["train"]["steps"], task.config.train.steps
    if before != after:
        report(
            f"train.steps increases from {before} to {after}, to which the learning rate now "
            "decays; the result differs from that of a run which had these steps from the start"
        )
    return state, saved


class Best:
    """Saves the parameters with the best evaluation in `checkpoints`, which keep one.

    A resumed run keeps its best model if the evaluations use the same windows. If the run resumes
    from a step before the best evaluation, it repeats the same steps. A new run removes the best
    model of a run that has the same config and no checkpoints. Every process of a run creates one
    instance and calls the same methods in the same order. For `meta` see `Run`.

    Raises:
      ValueError: the checkpoint is that of another run.
    """

    def __init__(
        self, checkpoints: Checkpoints, config: Config, meta: dict[str, Any], *, is_new: bool
    ):
        self._checkpoints, self._is_stale = checkpoints, False
        self._measured_on = [config.train.eval_windows, config.train.batch_size]
        self.figure: float | None = None
        if not on_first_process(checkpoints.steps):
            return
        try:
            there = checkpoints.read_meta(report=lambda line: None)
        except ValueError as error:
            # The next evaluation replaces a damaged model, but not one of another version.
            is_damaged = isinstance(error, Damaged)
            if on_first_process(lambda: is_damaged):
                return
            raise ValueError(f"{error}; or move {checkpoints.directory} elsewhere") from None
        if there.get("run") != meta["run"]:
            try:
                if not is_new:
                    raise ValueError("a run with checkpoints has its own best model")
                check_same_run(meta, there)
            except ValueError:
                raise ValueError(
                    f"{checkpoints.directory} has the best model of another run; move the "
                    "directory elsewhere, or use another train.out_dir"
                ) from None
            self._is_stale = True
        elif there["best"]["measured_on"] == self._measured_on:
            self.figure = there["best"]["figure"]

    def begin(self) -> None:
        """Removes the best model of an earlier run that has the same config and no checkpoints."""
        if self._is_stale:
            self._checkpoints.remove_from(0)
            self._is_stale = False

    def offer(self, step: int, figure: float, params: Params, meta: dict[str, Any]) -> bool:
        """Starts a save of the evaluated parameters and `meta` if `figure` at this step is the
        lowest so far, and returns whether it is the lowest. Non-finite values are never the best.
        """
        if not math.isfinite(figure) or (self.figure is not None and figure >= self.figure):
            return False
        self._checkpoints.remove_from(step)
        best = {"best": {"figure": figure, "measured_on": self._measured_on}}
        self._checkpoints.save(step, {"params": params}, meta | best)
        self.figure = figure
        return True

    def wait(self) -> None:
        self._checkpoints.wait()


def acquire(lock: DirectoryLock, places: dict[str, Path], *, create: bool) -> None:
    """Locks the existing local directories, or creates and locks all, against other runs."""
    for setting, path in places.items():
        if create:
            make_directory(setting, path)
        if not is_remote(path) and path.is_dir():
            lock.lock(path, setting)


def make_directory(setting: str, directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"{setting}={directory} cannot be created ({error.strerror or error}); choose another "
            f"directory"
        ) from None
