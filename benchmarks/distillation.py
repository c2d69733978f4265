"""Distillation to fewer forwards, on a source with a known distribution and on Shakespeare.

    python -m benchmarks.distillation markov
    python -m benchmarks.distillation texts --judge runs/shakespeare_judge --students NAME=RUN ...

`markov` trains a table of conditional distributions for every canvas, which is exact initially,
with each objective. It prints the total variation between the chain and the samples of 4, 8 and 16
ancestral steps, before and after training, and with the chain's exact sampler head. `texts` prints
the bits per character under the judge of each model at 4, 8 and 16 forwards, and of the shipped
model with and without its sampler head.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dlm_jax
from benchmarks import markov
from benchmarks.quality import distinct_share, judged_bits
from dlm_jax.cli.common import start_jax
from dlm_jax.contrib.distillation import Distillation, certainty, sdtt
from dlm_jax.diffusion.corruption import LINEAR
from dlm_jax.diffusion.losses import cross_entropy
from dlm_jax.diffusion.objectives import Batch, elbo
from dlm_jax.types import Network, Params

BUDGETS = (4, 8, 16)
L, V, MASK = markov.LENGTH, markov.MASK + 1, markov.MASK
ROWS, STEPS, RATE = 512, 600, 0.01
SEEDS = (0, 1, 2)
NUM_SAMPLES, CHARACTERS = 32, 256


def _code(tokens: Any) -> Any:
    """The index of a canvas ``[..., L]``."""
    return sum(tokens[..., place] * V**place for place in range(L))


def _table() -> Params:
    """Logits of the chain's conditional distributions for every canvas, ``[V^L, L, V]``."""
    canvases_CL = np.stack([np.arange(V**L) // V**place % V for place in range(L)], axis=1)
    network = markov.network()
    params = network.init(jax.random.key(0))
    hidden_CLD, _ = network.trunk(params, jnp.asarray(canvases_CL), jnp.full(V**L, L), None)
    logits_PV = network.readout(params, hidden_CLD.reshape(V**L * L, -1))
    return {"table": jnp.maximum(logits_PV, -30.0).reshape(V**L, L, V)}


NETWORK = Network(
    init=lambda key: _table(),
    trunk=lambda params, tokens_BL, length_B, cache: (params["table"][_code(tokens_BL)], None),
    embed=lambda params, ids: jax.nn.one_hot(ids, V),
    readout=lambda params, hidden_NV: hidden_NV,
    vocab_size=V,
)


def total_variation(params: Params, steps: int) -> float:
    """Total variation between the chain and the table's texts after `steps` ancestral steps."""
    logits_CLV = np.asarray(params["table"], np.float64)[:, :, :MASK]
    p_CLV = np.exp(logits_CLV - logits_CLV.max(2, keepdims=True))
    p_CLV /= p_CLV.sum(2, keepdims=True)
    texts_TL = np.stack(np.unravel_index(np.arange(MASK**L), (MASK,) * L), axis=1)
    law_T = np.zeros(MASK**L)
    for blocks, weight in markov.ancestral(steps):
        shown_TL, share_T = np.full_like(texts_TL, MASK), np.full(MASK**L, weight)
        for block in map(list, blocks):
            code_T = _code(shown_TL)
            for place in block:
                share_T *= p_CLV[code_T, place, texts_TL[:, place]]
            shown_TL[:, block] = texts_TL[:, block]
        law_T += share_T
    return markov.total_variation(law_T, markov.joint().reshape(-1))


def _trained(objective: Any) -> Params:
    """The table after training with an objective; the initial table is the teacher."""
    teacher, optimizer = _table(), optax.adam(optax.cosine_decay_schedule(RATE, STEPS))

    @jax.jit
    def step(params: Params, state: Any, tokens_BL: jax.Array, key: jax.Array) -> Any:
        batch = Batch(tokens_BL, jnp.full(ROWS, L), jnp.zeros(ROWS, jnp.int32))
        if isinstance(objective, Distillation):
            noise = objective.teach(NETWORK, teacher, objective.draw(batch, key))

            def loss(params: Params) -> jax.Array:
                found = objective.loss(NETWORK, params, noise)
                return found.sum / found.weight

        else:
            drawn = objective(batch, key)

            def loss(params: Params) -> jax.Array:
                hidden_BLV = params["table"][_code(drawn.shown_BL)]
                nats_BL = cross_entropy(NETWORK, params, hidden_BLV, tokens_BL, mask_id=MASK)
                return jnp.sum(drawn.weight_BL * nats_BL) / drawn.total

        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    rng = np.random.default_rng(0)
    texts_TL = np.stack(np.unravel_index(np.arange(MASK**L), (MASK,) * L), axis=1)
    params, state = teacher, optimizer.init(teacher)
    for number in range(STEPS):
        drawn_B = rng.choice(MASK**L, ROWS, p=markov.joint().reshape(-1))
        tokens_BL = jnp.asarray(texts_TL[drawn_B], jnp.int32)
        params, state = step(params, state, tokens_BL, jax.random.key(number))
    return params


def chain_table() -> Iterator[str]:
    """The first table."""
    make = {"mask_id": MASK, "banned_ids": ()}
    forced = functools.partial(certainty, teacher_steps=L, weight=2.0, temperature=0.5, **make)
    objectives: dict[str, Any] = {
        "ELBO, as long": functools.partial(elbo, schedule=LINEAR, mask_id=MASK),
        "SDTT, 4 steps of 2": sdtt(steps=4, teacher_steps=2, **make),
        "SDTT, 4 steps of 4": sdtt(steps=4, teacher_steps=4, **make),
        "certainty, sampled": forced(teacher_temperature=1.0),
        "certainty, greedy": forced(teacher_temperature=0.0),
    }
    yield "| model | " + " | ".join(f"{steps} forwards" for steps in BUDGETS) + " |"
    yield "| --- " * (1 + len(BUDGETS)) + "|"

    def line(name: str, found: list[float]) -> str:
        return f"| {name} | " + " | ".join(f"{value:.4f}" for value in found) + " |"

    yield line("exact, before", [total_variation(_table(), steps) for steps in BUDGETS])
    joint = markov.joint()
    for name, fill in (("exact sampler head", markov.Fill()),):
        laws = [markov.text_law(fill, markov.ancestral(steps)) for steps in BUDGETS]
        yield line(name, [markov.total_variation(law, joint) for law in laws])
    for name, objective in objectives.items():
        params = _trained(objective)
        yield line(name, [total_variation(params, steps) for steps in BUDGETS])


def texts_table(students: dict[str, str], judge: str) -> Iterator[str]:
    """The second table: mean and standard deviation over the seeds."""
    judge_model = dlm_jax.load(judge)
    yield "| model | forwards | judged bits per character | distinct 4-grams |"
    yield "| --- | --- | --- | --- |"
    for name, run in students.items():
        model = dlm_jax.load(run)
        fills = ["wavefront"] if name.startswith("head") else ["parallel"]
        if run == "shakespeare":
            fills = ["parallel", "wavefront"]
        for fill in fills:
            for steps in BUDGETS:
                bits, distinct = [], []
                for seed in SEEDS:
                    made = dlm_jax.generate(
                        model, num_samples=NUM_SAMPLES, batch_size=NUM_SAMPLES, seed=1000 * seed,
                        steps=steps, fill=fill, order="random", temperature=1.0,
                        temperature_end=0.1, min_p=0.002, remask="none",
                        sampler_even_odd=fill == "wavefront",
                    )  # fmt: skip
                    texts = [text[:CHARACTERS] for text in made.texts]
                    bits.append(judged_bits(judge_model, texts)[0])
                    distinct.append(distinct_share(texts, 4))
                yield (
                    f"| {name}, {fill} | {steps} | {statistics.mean(bits):.3f} ± "
                    f"{statistics.stdev(bits):.3f} | {statistics.mean(distinct):.3f} |"
                )


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("markov", "texts"))
    parser.add_argument("--judge", default="runs/shakespeare_judge")
    parser.add_argument("--students", nargs="*", default=[], metavar="NAME=RUN")
    args = parser.parse_args()
    start_jax()
    students = {"shipped": "shakespeare"} | dict(one.split("=", 1) for one in args.students)
    lines = chain_table() if args.what == "markov" else texts_table(students, args.judge)
    for line in lines:
        print(line, flush=True)


if __name__ == "__main__":
    main()
