"""Step times of forward processes, and repairs by models trained with them.

    python benchmarks/processes.py steps --rounds 7
    python benchmarks/processes.py repairs --runs uniform=RUN masked=RUN --text FILE

``steps``: a training step (loss and gradient) and a sampling step of `uniform` and `mixed`,
compared with `masked` in alternating runs with equally many open positions. ``repairs``: the share
of planted errors, which are uniformly random tokens, that a model repairs. Uniform and mixed models
use their reverse steps from a low time; a masked model rewrites every token (``resample``).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import numpy as np

import dlm_jax
from benchmarks.generation_pair import make_model
from benchmarks.step_overhead import POSITIONS, ROWS, first_state, times
from dlm_jax.config import Config, ObjectiveConfig
from dlm_jax.data import noise_ids, text_ids
from dlm_jax.diffusion.losses import hidden_of
from dlm_jax.diffusion.mixing import mixture_of
from dlm_jax.diffusion.objectives import Batch
from dlm_jax.diffusion.processes import PROCESSES
from dlm_jax.distributed import compiler
from dlm_jax.distributed.local_rows import split_rows
from dlm_jax.inference.model import Model
from dlm_jax.sampling.loop import Advance

STEPS = 4


def trained_for(model: Model, process: str) -> Model:
    """The model with a config of this process."""
    return dataclasses.replace(model, config=Config(objective=ObjectiveConfig(process=process)))


def training(model: Model, process: str) -> Callable[[], Any]:
    """A loss and its gradient."""
    tokenizer, network = model.tokenizer, model.network
    mixture = mixture_of(
        ObjectiveConfig(process=process), mask_id=tokenizer.mask_id,
        random_ids=text_ids(tokenizer), noise_ids=noise_ids(tokenizer),
    )  # fmt: skip
    batch = Batch(
        jnp.zeros((ROWS, POSITIONS), jnp.int32), jnp.full(ROWS, POSITIONS), jnp.zeros(ROWS, int)
    )

    def loss(params: Any, key: jax.Array) -> jax.Array:
        example, hidden_BLD = mixture.example(batch, key), None
        if mixture.reads_trunk:
            hidden_BLD = hidden_of(
                network, params, example.shown_BL, batch.tokens_BL, batch.length_B
            )
        found = mixture.losses(network, params, example, hidden_BLD, mask_id=tokenizer.mask_id)
        return found["elbo"].sum / found["elbo"].weight

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


def repairs(runs: dict[str, str], text: str, share: float, number: int, seed: int) -> None:
    """Prints the shares of repaired errors and of changed true tokens."""
    print("| model | settings | errors | put right | true tokens changed |")
    print("| - | - | - | - | - |")
    for name, path in runs.items():
        model = dlm_jax.load(path)
        rng = np.random.default_rng(seed)
        length = model.max_length
        ids = model.tokenizer.encode(Path(text).read_text(encoding="utf-8"))[-number * length :]
        true_NL = ids[: len(ids) // length * length].reshape(-1, length)
        is_hit_NL = rng.random(true_NL.shape) < share
        is_hit_NL[:, 0] = False
        other_NL = rng.choice(text_ids(model.tokenizer), true_NL.shape)
        shown_NL = np.where(is_hit_NL, other_NL, true_NL)
        is_wrong_NL = shown_NL != true_NL
        settings: dict[str, Any] = {"posterior_start": 2 * share, "steps": 16}
        if model.process.is_masked:
            settings = {"resample": True, "schedule": "all", "steps": 1, "fill": "parallel"}
        prompts = [
            {"tokens": row[:1].tolist(), "draft": model.tokenizer.decode(row[1:])}
            for row in shown_NL
        ]
        made = dlm_jax.generate(
            model,
            prompts,
            seed=seed,
            temperature=1.0,
            ignore_eos=True,
            max_length=length,
            **settings,
        )
        found_NL = np.array([model.tokenizer.encode(text) for text in made.texts])
        right = (found_NL == true_NL)[is_wrong_NL].mean()
        changed = (found_NL != true_NL)[~is_wrong_NL].mean()
        told = ", ".join(f"{key}={value}" for key, value in settings.items())
        print(
            f"| {name} | {told} | {is_wrong_NL.sum()} | {right:.1%} | {changed:.1%} |", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("steps", "repairs"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sizes", nargs="+", default=["1m"])
    parser.add_argument("--vocab-sizes", nargs="+", type=int, default=[128])
    parser.add_argument("--runs", nargs="+", default=[], help="NAME=DIRECTORY of each model")
    parser.add_argument("--text", default="")
    parser.add_argument("--share", type=float, default=0.05)
    parser.add_argument("--number", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.what == "steps":
        steps(args.sizes, args.vocab_sizes, args.rounds)
    else:
        runs = dict(run.split("=", 1) for run in args.runs)
        repairs(runs, args.text, args.share, args.number, args.seed)


if __name__ == "__main__":
    main()
