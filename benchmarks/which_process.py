"""Compares models of the three noise processes that trained for the same processor time.

    python benchmarks/which_process.py costs
    python benchmarks/which_process.py train --out runs/which
    python benchmarks/which_process.py measure --out runs/which
    python benchmarks/which_process.py table --picture benchmarks/results/which_process.png

``costs``: the processor time of a training step of each model compared with `masked`, in
alternating steps. ``train``: every model with three seeds, for numbers of steps that cost the same,
and a causal judge. ``measure``: the bound, the texts at each number of forwards and the repairs;
temperatures are selected on texts of the first model with another seed of sampling, and repair
settings on the first half of the held-out text. Existing measurements and finished runs are kept.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import numpy as np

import dlm_jax
import dlm_jax.config as configs
from benchmarks.processes import Counts, repaired
from benchmarks.quality import distinct_share, judged_bits
from dlm_jax.cli.common import start_jax
from dlm_jax.config import Config
from dlm_jax.data import join_documents, read_documents, split_text
from dlm_jax.data.pipeline import train_batches
from dlm_jax.diffusion.objectives import Batch
from dlm_jax.diffusion.processes import PROCESSES
from dlm_jax.inference.model import Model
from dlm_jax.training import prepare
from dlm_jax.training.train_step import make_train_step

Flags = dict[str, str]

RESULTS = Path(__file__).parent / "results" / "which_process.jsonl"
QUIET: Flags = {
    "train.eval_every": "0", "train.sample_every": "0", "train.checkpoint_every": "200",
    "train.keep_checkpoints": "1", "train.eval_windows": "64",
}  # fmt: skip
PLAIN: Flags = {
    "data.seq_len": "128", "objective.denoising_share": "0", "objective.random_length_share": "0",
    "optim.ema_decay": "0",
}  # fmt: skip
SIZES: dict[str, tuple[str, Flags]] = {
    "small": ("configs/quickstart.toml", {}),
    "large": ("configs/shakespeare.toml", PLAIN),
}
STEPS = {"small": 800, "large": 1000}
"""Training steps of the masked models."""
MODELS: dict[str, Flags] = {
    "masked": {},
    "uniform": {"objective.process": "uniform"},
    "mixed": {"objective.process": "mixed"},
    "critic": {"model.add_critic_head": "true"},
    "proofreader": {"objective.proofreading_share": "0.5", "objective.misprint_kinds": "wrong"},
}
COSTS = {"masked": 1.0, "uniform": 1.0, "mixed": 1.0, "critic": 1.208, "proofreader": 1.008}
"""Cost of a training step; the critic trains in the last third of its steps (``costs``)."""
SEEDS = (0, 1, 2)
JUDGE: Flags = {
    "data.seq_len": "128", "optim.ema_decay": "0", "train.steps": "600", "train.eval_every": "300",
    "train.eval_windows": "128", "train.checkpoint_every": "200",
}  # fmt: skip

BUDGETS = (4, 8, 16, 32, 64, 128)
LONGEST_TUNED = 64
TEMPERATURES = (1.0, 0.9, 0.8, 0.7, 0.6)
NUM_TEXTS, NUM_WINDOWS, NUM_DRAWS = 16, 64, 4
SHARE, FORWARDS = 0.05, 16
TUNING_SEED = 70_000


class Sampler(NamedTuple):
    """A model, and its sampling settings for a number of forwards."""

    model: str
    settings: Callable[[int], dict[str, Any]]


SAMPLERS: dict[str, Sampler] = {
    "masked": Sampler("masked", lambda n: {"order": "random", "steps": n}),
    "masked, ReMDM": Sampler("masked", lambda n: {
        "order": "ancestral", "remask": "remdm_cap", "remask_eta": 0.02, "steps": n,
    }),
    # The critic has a forward of its own between two steps.
    "masked, critic": Sampler("critic", lambda n: {
        "order": "random", "schedule": "all", "remask": "scheduled", "remask_by": "critic",
        "remask_start": 0.95, "remask_end": 0.05, "remask_randomness": 0.5, "steps": n // 2 + 1,
    }),
    "uniform": Sampler("uniform", lambda n: {"order": "posterior", "steps": n}),
    "mixed": Sampler("mixed", lambda n: {"order": "posterior", "steps": n}),
}  # fmt: skip


def _rewrites() -> Iterator[dict[str, Any]]:
    """Settings that replace tokens by likelier ones, without holes."""
    for steps in (1, FORWARDS // 4):
        for threshold in (0.0, 0.3, 0.5, 0.7, 0.9, 0.98):
            yield {"order": "threshold", "resample": True, "threshold": threshold, "steps": steps,
                   "temperature": 0.0}  # fmt: skip


def _remasks(by: str, limits: tuple[float, ...]) -> Iterator[dict[str, Any]]:
    """Settings that fill the tokens anew whose wrongness exceeds 1 - limit."""
    for steps in (2, FORWARDS if by == "confidence" else FORWARDS // 2):
        for limit in limits:
            yield {"order": "random", "schedule": "all", "remask": "scheduled_threshold",
                   "remask_by": by, "remask_start": limit, "remask_end": limit, "steps": steps,
                   "temperature": 0.0}  # fmt: skip


def _reverse() -> Iterator[dict[str, Any]]:
    for start in (0.05, 0.1):
        for temperature in (1.0, 0.5):
            yield {"order": "posterior", "posterior_start": start, "steps": FORWARDS,
                   "temperature": temperature}  # fmt: skip


REPAIRS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "masked, rewriting": ("masked", list(_rewrites())),
    "masked, remasking": ("masked", list(_remasks("confidence", (0.01, 0.03, 0.1)))),
    "masked, critic": ("critic", list(_remasks("critic", (0.3, 0.5, 0.7)))),
    "proofreader, rewriting": ("proofreader", list(_rewrites())),
    "uniform": ("uniform", list(_reverse())),
    "mixed": ("mixed", list(_reverse())),
}


def config_of(size: str, name: str, seed: int, source: str, out: Path) -> tuple[str, Flags]:
    """The config file of a run, and its flags."""
    file, common = SIZES[size]
    steps = round(STEPS[size] / COSTS[name])
    flags = common | QUIET | MODELS[name] | {
        "data.source": source, "train.seed": str(seed), "train.steps": str(steps),
        "train.out_dir": str(out / f"{size}_{name}_{seed}"),
    }  # fmt: skip
    if name == "critic":
        flags["heads.start_critic_iteration"] = str(2 * steps // 3)
    return file, flags


def train(out: Path, source: str, sizes: list[str], names: list[str]) -> None:
    """Trains all models, and the judge. Stopped runs are resumed."""
    judge = JUDGE | {"data.source": source, "train.out_dir": str(out / "judge")}
    runs = [("configs/shakespeare_judge.toml", judge)]
    runs += [config_of(size, name, seed, source, out)
             for size in sizes for seed in SEEDS for name in names]  # fmt: skip
    for file, flags in runs:
        pairs = [part for key, value in flags.items() for part in (f"--{key}", value)]
        command = [sys.executable, "train.py", "--config", file, *pairs]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _stepper(config: Config) -> Callable[[], None]:
    """Takes training steps of the last stage of a run."""
    run = prepare(config, report=lambda line: None)
    stage = run.task.stage(config.train.steps - 1)
    step = make_train_step(
        run.task.loss(stage), run.task.optimizer(stage), run.state, mesh=run.mesh,
        batch_size=config.train.batch_size, ema_decay=config.optim.ema_decay,
        compiler_options=config.mesh.compiler_options,
    )  # fmt: skip
    batches = train_batches(
        run.corpus.train_rows,
        seq_len=config.data.seq_len,
        batch_size=config.train.batch_size,
        seed=0,
        process_index=0,
        process_count=1,
        start_step=0,
    )
    carried = [run.state]

    def take() -> None:
        rows = next(batches)
        batch = Batch(*(jnp.asarray(rows[name]) for name in ("tokens", "length", "given")))
        carried[0], metrics = step(carried[0], batch, run.noise_key)
        jax.block_until_ready(metrics)

    take()
    return take


def costs(source: str, sizes: list[str], rounds: int) -> None:
    """Prints the processor time of a training step of each model."""
    print("| size | model | CPU ms per step | of masked |")
    print("| - | - | - | - |")
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            steps = {}
            for name in MODELS:
                file, flags = config_of(size, name, 0, source, Path(folder))
                steps[name] = _stepper(configs.load(file, flags))
        spent: dict[str, list[float]] = {name: [] for name in MODELS}
        for _ in range(rounds):
            for name, take in steps.items():
                start = time.process_time()
                for _ in range(4):
                    take()
                spent[name].append((time.process_time() - start) / 4)
        base = np.array(spent["masked"])
        for name, seconds in spent.items():
            ratio = np.median(np.array(seconds) / base)
            ms = 1e3 * statistics.median(seconds)
            print(f"| {size} | {name} | {ms:.1f} | {ratio:.3f} |", flush=True)


def entropy(ids: Any) -> float:
    """Bits of the distribution of the tokens."""
    counts = np.array(list(Counter(np.asarray(ids).tolist()).values()))
    share = counts / counts.sum()
    return float(-(share * np.log2(share)).sum())


class Study:
    """The models of a folder, the two parts of the held-out text, and the measurements."""

    def __init__(self, out: Path, source: str, path: Path):
        self._out, self._path = out, path
        self._models: dict[str, Model] = {}
        self._kept = dict(read(path))
        held_out = split_text(join_documents(read_documents((source,))), 0.05)[1]
        self.texts = {
            "tune": held_out[: len(held_out) // 2],
            "test": held_out[len(held_out) // 2 :],
        }

    @functools.cached_property
    def judge(self) -> Model:
        return dlm_jax.load(self._out / "judge")

    def model(self, size: str, name: str, seed: int) -> Model:
        run = f"{size}_{name}_{seed}"
        if run not in self._models:
            self._models[run] = dlm_jax.load(self._out / run)
        return self._models[run]

    def seeds(self, size: str, name: str) -> list[int]:
        """The seeds of the runs of a model that have ended; none without the first, for tuning."""
        ended = []
        for seed in SEEDS:
            metrics = self._out / f"{size}_{name}_{seed}" / "metrics.jsonl"
            if metrics.exists() and '"kind": "evaluation"' in metrics.read_text():
                ended.append(seed)
        return ended if SEEDS[0] in ended else []

    def kept(self, key: tuple[Any, ...], measure: Callable[[], dict[str, float]]) -> Any:
        """The measurement of a key, made once."""
        if key not in self._kept:
            self._kept[key] = measure()
            with self._path.open("a") as file:
                file.write(json.dumps({"key": key, "figures": self._kept[key]}) + "\n")
            print(*key, self._kept[key], flush=True)
        return self._kept[key]

    def bound(self, size: str, name: str, seed: int) -> None:
        def measure() -> dict[str, float]:
            model = self.model(size, name, seed)
            nats, error = dlm_jax.score(
                model, windows(self.texts["test"], model), num_draws=NUM_DRAWS
            ).nats_per_token
            return {"nats": nats, "error": error}

        self.kept(("bound", size, name, seed), measure)

    def text(self, part: str, size: str, name: str, seed: int, budget: int, heat: float) -> Any:
        """Figures of texts of one model, with a constant temperature."""
        sampler = SAMPLERS[name]

        def measure() -> dict[str, float]:
            made = dlm_jax.generate(
                self.model(size, sampler.model, seed), num_samples=NUM_TEXTS,
                seed=TUNING_SEED if part == "tune" else 1000 * (seed + 1), batch_size=NUM_TEXTS,
                fill="parallel", ignore_eos=True, temperature=heat, temperature_end=-1,
                **sampler.settings(budget),
            )  # fmt: skip
            return {
                "forwards": float(made.forwards.mean()),
                "bits": judged_bits(self.judge, list(made.texts))[0],
                "entropy": entropy(made.tokens[made.committed >= 0]),
                "distinct": distinct_share(list(made.texts), 4),
            }

        return self.kept((part, size, name, seed, budget, heat), measure)

    def heat(self, size: str, name: str, budget: int) -> float:
        """The temperature of `equal_entropy`."""
        budget = min(budget, LONGEST_TUNED)
        return equal_entropy(name, {
            one: {
                heat: self.text("tune", size, one, 0, budget, heat)["entropy"]
                for heat in TEMPERATURES
            }
            for one in {name, *PROCESSES}
        })  # fmt: skip

    def repair(
        self, part: str, size: str, name: str, seed: int, settings: dict[str, Any]
    ) -> Counts:
        def measure() -> dict[str, float]:
            model = self.model(size, REPAIRS[name][0], seed)
            number, own = (NUM_WINDOWS // 2, 0) if part == "tune" else (NUM_WINDOWS, 1 + seed)
            return repaired(
                model, self.texts[part], settings, SHARE, number, own, batch_size=NUM_TEXTS
            )._asdict()

        key = (f"repair {part}", size, name, seed, json.dumps(settings))
        return Counts(**self.kept(key, measure))

    def repairs(self, size: str, name: str) -> dict[str, dict[str, Any]]:
        """The `selected` settings on the first half of the held-out text."""
        return selected(
            [(self.repair("tune", size, name, 0, arm), arm) for arm in REPAIRS[name][1]]
        )


def equal_entropy(name: str, entropies: dict[str, dict[float, float]]) -> float:
    """The temperature of a sampler whose entropy is closest to that of all processes: the largest
    entropy of the least diverse process.

    Args:
      name: the sampler.
      entropies: the entropy by sampler and temperature.
    """
    common = min(max(entropies[process].values()) for process in PROCESSES)
    own = entropies[name]
    return min(own, key=lambda heat: abs(own[heat] - common))


def selected(tuned: list[tuple[Counts, Any]]) -> dict[str, Any]:
    """The settings with the fewest wrong tokens, and those with the most repairs."""
    return {
        "fewest wrong": min(tuned, key=lambda x: x[0].wrong)[1],
        "most repaired": max(tuned, key=lambda x: x[0].right)[1],
    }


def windows(text: str, model: Model) -> list[str]:
    """The whole windows of a text."""
    length = model.max_length
    return [text[i : i + length] for i in range(0, len(text) - length + 1, length)]


def read(path: Path) -> Iterator[tuple[tuple[Any, ...], dict[str, float]]]:
    """The measurements of a file."""
    for line in path.read_text().splitlines() if path.exists() else ():
        record = json.loads(line)
        yield tuple(record["key"]), record["figures"]


def bounds(study: Study, size: str) -> None:
    for name in MODELS:
        for seed in study.seeds(size, name):
            study.bound(size, name, seed)


def repairs(study: Study, size: str) -> None:
    for name, (model, _) in REPAIRS.items():
        for seed in study.seeds(size, model):
            for arm in study.repairs(size, name).values():
                study.repair("test", size, name, seed, arm)


def texts(study: Study, size: str) -> None:
    for budget in BUDGETS:
        for name, sampler in SAMPLERS.items():
            for seed in study.seeds(size, sampler.model):
                for heat in {study.heat(size, name, budget), *([1.0] * (name in PROCESSES))}:
                    study.text("test", size, name, seed, budget, heat)


PARTS = {"bounds": bounds, "repairs": repairs, "texts": texts}


COLORS = {
    "masked": "C0", "masked, rewriting": "C0", "masked, ReMDM": "C1", "masked, remasking": "C1",
    "masked, critic": "C2", "uniform": "C3", "mixed": "C4", "proofreader, rewriting": "C5",
}  # fmt: skip
Kept = dict[tuple[Any, ...], dict[str, float]]


def _of(kept: Kept, *start: Any) -> dict[tuple[Any, ...], dict[str, float]]:
    """The measurements whose keys begin with `start`, by the rest of the key."""
    return {
        key[len(start) :]: figures for key, figures in kept.items() if key[: len(start)] == start
    }


def _shown(values: list[float], digits: int) -> str:
    """The mean, and the standard deviation of several seeds."""
    mean = f"{statistics.mean(values):.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def _counts(figures: dict[str, float]) -> Counts:
    return Counts(**{name: int(value) for name, value in figures.items()})


def _arms(kept: Kept, size: str, name: str) -> dict[str, list[Counts]]:
    """The test counts of a row of `REPAIRS` for each seed, by the reason for its settings."""
    test = _of(kept, "repair test", size, name)
    if not test:
        return {}
    tuned = [(_counts(x), key[1]) for key, x in _of(kept, "repair tune", size, name).items()]
    return {
        reason: [_counts(x) for (_, other), x in test.items() if other == arm]
        for reason, arm in selected(tuned).items()
    }


def _percents(counts: Counts) -> tuple[float, float, float]:
    """Repaired errors, changed true tokens, and wrong tokens afterwards relative to the planted
    errors, in percent.
    """
    true = counts.tokens - counts.errors
    return (100 * counts.right / counts.errors, 100 * counts.changed / true,
            100 * counts.wrong / counts.errors)  # fmt: skip


def _curves(kept: Kept, size: str, name: str) -> dict[str, dict[int, list[dict[str, float]]]]:
    """The figures of each seed at a temperature of 1 and at equal entropy, by forwards."""
    found: dict[str, dict[int, list[dict[str, float]]]] = {"equal entropy": {}, "1": {}}
    for (_, budget, heat), figures in _of(kept, "test", size, name).items():
        entropies: dict[str, dict[float, float]] = {}
        for one in {name, *PROCESSES}:
            for (_, own_budget, own), x in _of(kept, "tune", size, one).items():
                if own_budget == min(budget, LONGEST_TUNED):
                    entropies.setdefault(one, {})[own] = x["entropy"]
        at = {"equal entropy": equal_entropy(name, entropies), "1": 1.0 if name in PROCESSES else 0}
        for label in [label for label, own in at.items() if own == heat]:
            found[label].setdefault(budget, []).append(figures)
    return {label: dict(sorted(curve.items())) for label, curve in found.items()}


def tables(kept: Kept, sizes: list[str]) -> None:
    """Prints the bounds, the texts and the repairs."""
    print("| size | model | seeds | steps | bound, nats per character |\n" + "| --- " * 5 + "|")
    for size in sizes:
        for name in MODELS:
            own = [x["nats"] for x in _of(kept, "bound", size, name).values()]
            if own:
                steps = round(STEPS[size] / COSTS[name])
                print(f"| {size} | {name} | {len(own)} | {steps} | {_shown(own, 3)} |")
    budgets = " | ".join(map(str, BUDGETS))
    print(f"\n| size | sampler | temperature | seeds | figure | {budgets} |")
    print("| --- " * (5 + len(BUDGETS)) + "|")
    for size in sizes:
        for name in SAMPLERS:
            for label, curve in _curves(kept, size, name).items():
                seeds = max(map(len, curve.values()), default=0)
                for key in ("bits", "entropy") if seeds else ():
                    shown = " | ".join(
                        _shown([x[key] for x in curve[budget]], 2) if budget in curve else ""
                        for budget in BUDGETS
                    )
                    print(f"| {size} | {name} | {label} | {seeds} | {key} | {shown} |")
    print("\n| size | repairs | seeds | selected by | repaired % | true tokens changed % | "
          "wrong after, % of planted |")  # fmt: skip
    print("| --- " * 7 + "|")
    for size in sizes:
        for name in REPAIRS:
            for reason, runs in _arms(kept, size, name).items():
                percents = zip(*map(_percents, runs), strict=True)
                shown = " | ".join(_shown(list(values), 1) for values in percents)
                print(f"| {size} | {name} | {len(runs)} | {reason} | {shown} |")


def draw(kept: Kept, sizes: list[str], path: str) -> None:
    """Draws bits and entropy over forwards, and repairs over changed true tokens."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, grid = plt.subplots(
        len(sizes), 3, figsize=(17, 4.2 * len(sizes)), layout="constrained", squeeze=False
    )
    for axes, size in zip(grid, sizes, strict=True):
        for axis, key, label in (
            (axes[0], "bits", "judged bits per character"),
            (axes[1], "entropy", "entropy of the characters, bits"),
        ):
            for name in SAMPLERS:
                for style, (kind, curve) in zip(
                    ("o-", "o:"), _curves(kept, size, name).items(), strict=True
                ):
                    points = [(statistics.mean(x["forwards"] for x in runs),
                               statistics.mean(x[key] for x in runs))
                              for runs in curve.values()]  # fmt: skip
                    if points:
                        axis.plot(
                            *zip(*points, strict=True), style, color=COLORS[name], markersize=4,
                            label=name if kind == "equal entropy" else f"{name}, temperature 1",
                        )  # fmt: skip
            axis.set_xscale("log", base=2)
            axis.set_xlabel("forwards per text")
            axis.set_ylabel(label)
        for name in REPAIRS:
            arms = _arms(kept, size, name)
            runs = [_percents(counts) for arm in arms.values() for counts in arm]
            if runs:
                repaired_N, changed_N, _ = zip(*runs, strict=True)
                axes[2].plot(changed_N, repaired_N, "o", color=COLORS[name], label=name)
        axes[2].set_xlabel("true characters changed, %")
        axes[2].set_ylabel("planted errors repaired, %")
        for axis in axes[1:]:
            axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
        for axis in axes:
            axis.set_title(f"{size} models")
            axis.grid(alpha=0.3)
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("costs", "train", "measure", "table"))
    parser.add_argument("--out", type=Path, default=Path("runs/which"))
    parser.add_argument("--source", default="tinyshakespeare", help="the text")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE")
    parser.add_argument("--rounds", type=int, default=20, help="costs: rounds of four steps")
    parser.add_argument("--picture", metavar="FILE")
    args = parser.parse_args()
    start_jax()
    if args.what == "costs":
        costs(args.source, args.sizes, args.rounds)
    elif args.what == "train":
        train(args.out, args.source, args.sizes, args.models)
    elif args.what == "measure":
        study = Study(args.out, args.source, args.results)
        for size in args.sizes:
            for part in args.parts:
                PARTS[part](study, size)
    else:
        kept = dict(read(args.results))
        tables(kept, args.sizes)
        if args.picture:
            draw(kept, args.sizes, args.picture)


if __name__ == "__main__":
    main()
