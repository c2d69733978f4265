"""Step times of forward processes, and repairs by models trained with them.

    python benchmarks/processes.py steps --rounds 7
    python benchmarks/processes.py laws
    python benchmarks/processes.py train --out runs/processes
    python benchmarks/processes.py repairs --out runs/processes

``steps``: a training step (loss and gradient) and a sampling step of `uniform` and `mixed`,
compared with `masked` in alternating runs with equally many open positions. ``laws``: the distance
between texts and their joint distribution, by enumeration. ``train`` and
``repairs``: the shares of planted errors, which are uniformly random tokens, that models of the
same size and training repair, and of true tokens that they change. Uniform and mixed models use
the steps of their process from a low time; a masked model rewrites every token (``resample``).
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import functools
import itertools
import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(1, str(Path(__file__).parent.parent / "tests"))

import jax
import jax.numpy as jnp
import numpy as np
from oracles.processes import Enumerated

import dlm_jax
from benchmarks.generation_pair import make_model
from benchmarks.step_overhead import POSITIONS, ROWS, first_state, times
from dlm_jax.config import Config, MeshConfig, ObjectiveConfig
from dlm_jax.data import Setup, join_documents, read_documents, split_text, text_ids
from dlm_jax.diffusion.objectives import Batch
from dlm_jax.diffusion.processes import PROCESSES
from dlm_jax.distributed import compiler
from dlm_jax.distributed.partitions import make_mesh, split_rows
from dlm_jax.heads import MAIN, Stage
from dlm_jax.inference.model import Model
from dlm_jax.sampling.loop import Advance
from dlm_jax.training.tasks import make_mixture
from dlm_jax.training.train_step import StageLoss

STEPS = 4
RESULTS = Path(__file__).parent / "results"


def trained_for(model: Model, process: str) -> Model:
    """The model with a config of this process."""
    return dataclasses.replace(model, config=Config(objective=ObjectiveConfig(process=process)))


def training(model: Model, process: str) -> Callable[[], Any]:
    """A loss and its gradient."""
    tokenizer, network = model.tokenizer, model.network
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    mixture = make_mixture(
        Setup(Config(objective=ObjectiveConfig(process=process)), tokenizer, mesh)
    )
    stage_loss = StageLoss(network, mixture, (), Stage((MAIN,)), tokenizer.mask_id)
    batch = Batch(
        jnp.zeros((ROWS, POSITIONS), jnp.int32), jnp.full(ROWS, POSITIONS), jnp.zeros(ROWS, int)
    )

    def loss(params: Any, key: jax.Array) -> jax.Array:
        return stage_loss(params, mixture.draw(batch, key), jnp.int32(0))[0]

    step = jax.jit(jax.value_and_grad(loss), compiler_options=compiler.options("train"))
    return functools.partial(step, model.params, jax.random.key(0))


def sampling(model: Model, process: str) -> Callable[[], Callable[[], Any]]:
    """Returns a function that prepares sampling steps with all positions open."""
    model = trained_for(model, process)
    order = {"order": "random", "resample": True, "schedule": "all"} if process == "masked" else {}
    settings = {"gen_length": POSITIONS, "steps": STEPS, "ignore_eos": True, "fill": "parallel"}
    params, state = first_state(model, **settings, **order)
    advance = Advance(
        model.program(rows=split_rows(model.params)),
        compiler_options=compiler.options("sample"),
    )

    def prepare() -> Callable[[], Any]:
        fresh = jax.block_until_ready(jax.tree.map(lambda leaf: leaf.copy(), state))
        return lambda: advance(params, fresh, STEPS)

    return prepare


def steps(sizes: list[str], vocab_sizes: list[int], rounds: int) -> None:
    """Prints the table for 8 rows of 256 positions."""
    print("| size | V | process | training step ms | of masked | sampling step ms | of masked |")
    print("| - | - | - | - | - | - | - |")
    for size in sizes:
        for vocab_size in vocab_sizes:
            model = make_model(size, vocab_size, POSITIONS)
            learn = [training(model, name) for name in PROCESSES]
            write = [sampling(model, name) for name in PROCESSES]
            learn_RP = 1e3 * times(rounds, *(lambda fn=fn: fn for fn in learn))
            write_RP = 1e3 * times(rounds, *write) / STEPS
            for place, name in enumerate(PROCESSES):
                shown = []
                for ms_RP in (learn_RP, write_RP):
                    ratio = np.median(ms_RP[:, place] / ms_RP[:, 0])
                    shown.append(f"{np.median(ms_RP[:, place]):.1f} | {ratio:.2f}")
                print(f"| {size} | {vocab_size} | {name} | {' | '.join(shown)} |", flush=True)


JOINT: dict[tuple[int, ...], float] = {
    (0, 0, 0): 0.3,
    (0, 1, 1): 0.2,
    (1, 0, 1): 0.25,
    (1, 1, 0): 0.15,
    (1, 1, 1): 0.1,
}
"""A law of texts of three letters, but for 0.01 of each of the eight, and divided by the sum."""


def laws(steps: tuple[int, ...]) -> None:
    """Prints the total variation distances of a network that knows every conditional law."""
    table = np.zeros((27, 3, 3))
    table[..., 2] = -np.inf
    print("| process | steps | distance |")
    print("| --- | --- | --- |")
    for name in PROCESSES:
        chain = Enumerated(table, name, 2, (0, 1))
        joint = np.array([JOINT.get(x, 0) + 0.01 if max(x) < 2 else 0 for x in chain.states])
        joint /= joint.sum()
        for number in steps:
            now = chain.start()
            for v, to in itertools.pairwise(np.linspace(1.0, 0.0, number + 1)):
                now = chain.knowing(joint, v).step(now, v, to)
            far = 0.5 * np.abs(now - joint).sum()
            print(f"| {name} | {number} | {far:.4f} |", flush=True)


TRAINED = (
    "--config", "configs/quickstart.toml", "--data.source", "tinyshakespeare",
    "--model.width", "96", "--model.heads", "3", "--data.seq_len", "64",
    "--train.batch_size", "16", "--train.eval_every", "500", "--train.sample_every", "100000",
    "--train.checkpoint_every", "250",
)  # fmt: skip
"""The models of the repairs: the quickstart's, smaller, on another text."""


def train(out: Path, num_steps: int) -> None:
    """Trains a model of each process for the same number of steps, and notes its CPU seconds.

    A run that was stopped goes on, and one that has ended stays.
    """
    for process in PROCESSES:
        run = out / process
        noted = run / "cpu_seconds.json"
        before = json.loads(noted.read_text()) if noted.exists() else []
        started = resource.getrusage(resource.RUSAGE_CHILDREN)
        options = ("--objective.process", process, "--train.steps", str(num_steps))
        command = [sys.executable, "train.py", *TRAINED, *options, "--train.out_dir", str(run)]
        subprocess.run(command, check=True)
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent = ended.ru_utime + ended.ru_stime - started.ru_utime - started.ru_stime
        noted.write_text(json.dumps([*before, spent]))


FORWARDS = 16
TEMPERATURES = (1.0, 0.5, 0.0)


def arms(process: str) -> list[dict[str, Any]]:
    """The settings that are compared for a model: 16 forwards each, or one that rewrites all."""
    if process == "masked":
        return [
            {"resample": True, "schedule": "all", "steps": steps, "temperature": temperature}
            for steps in (1, FORWARDS)
            for temperature in TEMPERATURES
        ]
    return [
        {"posterior_start": start, "steps": FORWARDS, "temperature": temperature}
        for start in (0.05, 0.1, 0.2, 0.4)
        for temperature in TEMPERATURES
    ]  # fmt: skip


class Counts(NamedTuple):
    """Tokens of one pass over a text.

    Attributes:
      tokens: all that may change.
      errors: those that were planted.
      right: planted errors that became the true token.
      changed: true tokens that became others.
    """

    tokens: int
    errors: int
    right: int
    changed: int

    @property
    def wrong(self) -> int:
        """Wrong tokens that are left."""
        return self.errors - self.right + self.changed


def repaired(
    model: Model,
    text: str,
    settings: dict[str, Any],
    share: float,
    number: int,
    seed: int,
    batch_size: int = 64,
) -> Counts:
    """What becomes of the last windows of a text with random tokens at that share of positions."""
    rng, length = np.random.default_rng(seed), model.max_length
    ids = np.asarray(model.tokenizer.encode(text))[-number * length :]
    true_NL = ids[: len(ids) // length * length].reshape(-1, length)
    is_hit_NL = rng.random(true_NL.shape) < share
    is_hit_NL[:, 0] = False
    other_NL = rng.choice(text_ids(model.tokenizer), true_NL.shape)
    shown_NL = np.where(is_hit_NL, other_NL, true_NL)
    is_wrong_NL = shown_NL != true_NL
    prompts = [
        {"tokens": row[:1].tolist(), "draft": model.tokenizer.decode(row[1:])} for row in shown_NL
    ]
    order: dict[str, Any] = {"order": "random" if model.process.is_masked else "posterior"}
    made = dlm_jax.generate(
        model, prompts, seed=seed, ignore_eos=True, max_length=length, fill="parallel",
        batch_size=batch_size, **(order | settings),
    )  # fmt: skip
    found_NL = np.array([model.tokenizer.encode(text) for text in made.texts])
    return Counts(
        true_NL[:, 1:].size,
        int(is_wrong_NL.sum()),
        int((found_NL == true_NL)[is_wrong_NL].sum()),
        int((found_NL != true_NL)[~is_wrong_NL].sum()),
    )


def told(settings: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in settings.items())


def repairs(names: list[str], out: Path, path: Path, share: float, number: int, seeds: int) -> None:
    """Measures every arm on the first half of the held-out text, and on the second half the arms
    with the fewest wrong tokens left and with the most repairs. Measured lines are kept.
    """
    fields = ("part", "model", "settings", "seed", *Counts._fields)
    done: dict[tuple[str, ...], Counts] = {}
    if path.exists():
        with path.open() as file:
            for row in csv.DictReader(file):
                key = tuple(row[name] for name in fields[:4])
                done[key] = Counts(*(int(row[name]) for name in Counts._fields))
    models = {name: dlm_jax.load(out / name) for name in names}
    config = next(iter(models.values())).config
    assert config is not None, "a run has a config"
    data = config.data
    held_out = split_text(join_documents(read_documents(data.source)), data.held_out)[1]
    texts = {"tune": held_out[: len(held_out) // 2], "test": held_out[len(held_out) // 2 :]}

    def measured(part: str, name: str, settings: dict[str, Any], seed: int) -> Counts:
        key = part, name, told(settings), str(seed)
        if key not in done:
            done[key] = repaired(models[name], texts[part], settings, share, number, seed)
            is_new = not path.exists()
            with path.open("a", newline="") as file:
                lines = csv.writer(file, lineterminator="\n")
                lines.writerows([fields] * is_new + [(*key, *done[key])])
        return done[key]

    print("| model | chosen by | settings | repaired % | true tokens changed % | wrong % after |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in models:
        tuned = [(measured("tune", name, arm, 0), arm) for arm in arms(name)]
        for reason, rank in (("fewest wrong", lambda x: x[0].wrong), ("most repaired", _most)):
            arm = min(tuned, key=rank)[1]
            runs = np.array([measured("test", name, arm, 1 + seed) for seed in range(seeds)], float)
            total, errors, right, changed = runs.T
            shown = []
            for part, whole in ((right, errors), (changed, total - errors),
                                (errors - right + changed, total)):  # fmt: skip
                percent = 100 * part / whole
                shown.append(f"{percent.mean():.1f} ± {np.ptp(percent) / 2:.1f}")
            print(f"| {name} | {reason} | {told(arm)} | {' | '.join(shown)} |", flush=True)


def _most(tuned: tuple[Counts, dict[str, Any]]) -> int:
    return -tuned[0].right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("steps", "laws", "train", "repairs"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sizes", nargs="+", default=["1m"])
    parser.add_argument("--vocab-sizes", nargs="+", type=int, default=[128])
    parser.add_argument("--out", type=Path, default=Path("runs/processes"))
    parser.add_argument("--models", nargs="+", choices=list(PROCESSES), default=list(PROCESSES))
    parser.add_argument("--num-steps", type=int, default=1500, help="training steps of each model")
    parser.add_argument("--csv", type=Path, default=RESULTS / "process_repairs.csv")
    parser.add_argument("--share", type=float, default=0.05)
    parser.add_argument("--number", type=int, default=128, help="windows")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    if args.what == "steps":
        steps(args.sizes, args.vocab_sizes, args.rounds)
    elif args.what == "laws":
        laws((2, 4, 8))
    elif args.what == "train":
        train(args.out, args.num_steps)
    else:
        repairs(args.models, args.out, args.csv, args.share, args.number, args.seeds)


if __name__ == "__main__":
    main()
