"""Measures the constrained fill: its distribution, its matches, the time of a step and an answer.

    python -m benchmarks.constrained law
    python -m benchmarks.constrained valid
    python -m benchmarks.constrained step
    python -m benchmarks.constrained answer

`law` compares sample counts of a model of independent positions with their exact distribution,
enumerated in float64 independently of the loop. `valid` counts the samples of random requests that
match. `step` and `answer` alternate with the unconstrained step and with one token per step.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import re
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dlm_jax
from benchmarks.structure_masks import SCHEMA
from dlm_jax.cli.common import start_jax
from dlm_jax.config import ModelConfig, SampleConfig
from dlm_jax.data import CharacterTokenizer
from dlm_jax.inference.engine import Engine
from dlm_jax.inference.model import Model
from dlm_jax.inference.request import make_requests
from dlm_jax.inference.structure import Structures, regex_of_objects, regex_of_schema
from dlm_jax.model.transformer import build
from dlm_jax.sampling.loop import Advance, make_advance
from dlm_jax.sampling.program import Program
from dlm_jax.sampling.row import RowParams
from dlm_jax.sampling.rules import BUILT_IN, ModelFacts
from dlm_jax.sampling.state import start
from dlm_jax.types import Network, Params

LETTERS = CharacterTokenizer.of("abc")
MASK, EOS = LETTERS.mask_id, LETTERS.eos_id
KNOWN = Structures(LETTERS, LETTERS.vocab_size, (EOS,), LETTERS.banned_ids)
ROWS = 1_000
"""Texts of one call."""


def independent(length: int) -> Network:
    """A model whose parameters are the logits of each position, ``{"logits": [L, V]}``."""

    def trunk(
        params: Params, tokens_BL: jax.Array, length_B: jax.Array, cache: None
    ) -> tuple[jax.Array, None]:
        return jnp.broadcast_to(jnp.eye(length)[None], (*tokens_BL.shape, length)), None

    return Network(
        init=lambda key: {"logits": jnp.zeros((length, LETTERS.vocab_size))},
        trunk=trunk,
        embed=lambda params, ids: jax.nn.one_hot(ids, length),
        readout=lambda params, hidden_ND: hidden_ND @ params["logits"],
        vocab_size=LETTERS.vocab_size,
    )


@functools.cache
def advance(length: int) -> Advance:
    """The loop around the model of so many positions."""
    return make_advance(Program(
        network=independent(length), mask_id=MASK, chunk=4096, banned_ids=LETTERS.banned_ids,
        eos_ids=(EOS,), pad_id=LETTERS.pad_id,
    ))  # fmt: skip


def ids_of(canvas: str) -> list[int]:
    """The ids of a canvas, where ``_`` is a hole and ``$`` EOS."""
    special = {"_": MASK, "$": EOS}
    return [special[c] if c in special else int(LETTERS.encode(c)[0]) for c in canvas]


def draws(
    pattern: str, canvas: str, logits_LV: np.ndarray, number: int, *, seed: int = 0,
    rows: int = ROWS, **settings: Any,
) -> np.ndarray:  # fmt: skip
    """At least `number` canvases as the loop fills them, ``[N, L]``; no pattern: in parallel."""
    fill = "constrained" if pattern else "parallel"
    asked = {"chain": ("temperature", "top_k"), "fill": fill, "order": "random_filled"}
    sample = SampleConfig(**asked | settings)
    if pattern:
        sample = dataclasses.replace(sample, structure=KNOWN.automaton(pattern))
    facts = ModelFacts(LETTERS.vocab_size, LETTERS.banned_ids, (EOS,))
    one = SimpleNamespace(**vars(sample), seed=0, capacity=0)
    packed = RowParams.pack([one], facts), BUILT_IN.pack([sample], facts)
    row, rules = jax.tree.map(lambda x: jnp.broadcast_to(x, (rows, *x.shape[1:])), packed)
    tokens_L = jnp.array(ids_of(canvas), jnp.int32)
    params = {"logits": jnp.asarray(logits_LV, jnp.float32)}
    found = []
    for first in range(seed, seed + number, rows):
        state = start(
            jnp.broadcast_to(tokens_L, (rows, tokens_L.size)), jnp.full(rows, tokens_L.size),
            dataclasses.replace(row, seed_B=jnp.arange(first, first + rows, dtype=jnp.uint32)),
            rules, mask_id=MASK,
        )  # fmt: skip
        found.append(advance(tokens_L.size)(params, state, sample.steps).canvas.tokens_BL)
    return np.concatenate(found)


def law(
    pattern: str, canvas: str, logits_LV: np.ndarray, *, temperature: float = 1.0
) -> dict[tuple[int, ...], float]:
    """The probability of each match, by trying all fillings of the holes."""
    ids = np.array(ids_of(canvas))
    (holes,) = np.nonzero(ids == MASK)
    letters = [*range(len(LETTERS.characters)), EOS]
    scaled_LV = np.asarray(logits_LV, np.float64) / temperature
    weights = {}
    for filling in itertools.product(letters, repeat=holes.size):
        ids[holes] = filling
        if is_match(pattern, ids[holes[0] :]):
            weights[tuple(ids.tolist())] = scaled_LV[holes, filling].sum()
    most = max(weights.values())
    total = sum(np.exp(weight - most) for weight in weights.values())
    return {text: np.exp(weight - most) / total for text, weight in weights.items()}


def is_match(pattern: str, ids: np.ndarray) -> bool:
    """Whether ids are a match of the pattern followed only by EOS."""
    text = "".join("$" if id_ == EOS else LETTERS.characters[id_] for id_ in ids.tolist())
    text = text.rstrip("$")
    return "$" not in text and re.fullmatch(pattern, text) is not None


def p_value(drawn_NL: np.ndarray, law: dict[tuple[int, ...], float]) -> float:
    """The chi-square p-value of the counts under the distribution.

    Texts with an expected count below 10 are pooled. 0 for a text outside the support.
    """
    texts, counts = np.unique(drawn_NL, axis=0, return_counts=True)
    found = {tuple(text): count for text, count in zip(texts.tolist(), counts, strict=True)}
    if not found.keys() <= law.keys():
        return 0.0
    expected = np.array(list(law.values())) * len(drawn_NL)
    observed = np.array([found.get(text, 0) for text in law], float)
    is_rare = expected < 10
    cells = [(o, e) for o, e in zip(observed[~is_rare], expected[~is_rare], strict=True)]
    cells += [(observed[is_rare].sum(), max(expected[is_rare].sum(), 1e-9))] * int(is_rare.any())
    distance = sum((o - e) ** 2 / e for o, e in cells)
    return float(jax.scipy.special.gammaincc((len(cells) - 1) / 2, distance / 2))


CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "one step": (r"(ab|ba)*c?", "a______", {"steps": 1}),
    "three steps": (r"(ab|ba)*c?", "a______", {"steps": 3}),
    "six steps": (r"a*b+(a|c)*", "b____c_", {"steps": 6}),
    "given between": (r"[ab]+c[^b]*", "b__c_a_", {"steps": 2, "temperature": 0.7}),
}
"""Patterns, canvases and settings whose texts are counted."""


def logits_of(case: str) -> np.ndarray:
    """Logits of a case; some ids have less than 1e-30 of the probability."""
    rng = np.random.default_rng(sum(map(ord, case)))
    logits_LV = rng.normal(size=(7, LETTERS.vocab_size)) * 1.5
    logits_LV[1, :2] -= 75
    logits_LV[3] += rng.choice([0, -90], LETTERS.vocab_size)
    return logits_LV.astype(np.float32)


def count_laws(number: int) -> None:
    """Prints a line for each case."""
    print("| case | pattern | canvas | texts | matches there are | p |")
    print("| --- " * 6 + "|")
    for case, (pattern, canvas, settings) in CASES.items():
        logits_LV = logits_of(case)
        shown = pattern.replace("|", "\\|")
        drawn_NL = draws(pattern, canvas, logits_LV, number, rows=10_000, **settings)
        expected = law(pattern, canvas, logits_LV, temperature=settings.get("temperature", 1.0))
        print(
            f"| {case} | `{shown}` | `{canvas}` | {len(drawn_NL)} | {len(expected)} | "
            f"{p_value(drawn_NL, expected):.3f} |", flush=True,
        )  # fmt: skip


def time_steps(slots: int, rounds: int, sizes: list[int], steps: int = 4) -> None:
    """Prints the time of a step that finds candidates for all holes, with structure and without."""
    print("| vocabulary | states x classes | parallel ms | constrained ms | ratio |")
    print("| --- " * 5 + "|")
    for size in sizes:
        model = of_size(size)
        pattern = regex_of_schema(SCHEMA)
        states, classes = model.structures.automaton(pattern).next_SC.shape
        times: dict[str, list[float]] = {"": [], pattern: []}
        fills = 1 + (rounds + 1) * steps // 120
        engines = {held: _engine(model, held, slots, fills, steps) for held in times}
        for _ in range(rounds):
            for held, engine in engines.items():
                began = time.perf_counter()
                engine.step(steps)
                times[held].append((time.perf_counter() - began) / steps)
        plain, with_it = (statistics.median(some) for some in times.values())
        print(
            f"| {model.network.vocab_size} | {states} x {classes} | {plain * 1e3:.1f} | "
            f"{with_it * 1e3:.1f} | {with_it / plain:.3f} |", flush=True,
        )  # fmt: skip


def of_size(size: int) -> Model:
    """A random model of the shape of the shipped one; other characters fill its vocabulary."""
    letters = [chr(code) for code in range(32, 127)]
    letters += [chr(0x4E00 + place) for place in range(size - len(letters) - 4)]
    tokenizer = CharacterTokenizer.of("".join(letters))
    shape = ModelConfig(depth=4, width=160, heads=5, vocab_size=tokenizer.vocab_size)
    network = build(shape)
    sample = SampleConfig(chain=("temperature",), order="random_filled", steps=120)
    params = jax.jit(network.init)(jax.random.key(0))
    return Model(network, params, tokenizer, max_length=128, sample=sample)


def _engine(model: Model, held: str, slots: int, fills: int, steps: int) -> Engine:
    """An engine whose slots are full and whose program is compiled."""
    engine = Engine(model, sizes=(slots,), canvases=(128,), max_waiting=None)
    asked: dict[str, Any] = {"gen_length": 120, "steps": 120, "temperature": 1.0}
    asked |= {"structure": held, "fill": "constrained"} if held else {"fill": "parallel"}
    for seed in range(slots * fills):
        (request,) = make_requests(model, "", asked | {"seed": seed})
        engine.submit(request)
    engine.step(steps)
    return engine


JSON = CharacterTokenizer.of('abcxyzKV0123456789{}[]":,.- \n')
PATTERNS = [
    r"[abc]{2,5}x(y|zz)*", r"[0-9]{3}-[0-9]{2}", r"(a|b)*c", r"([a-c]+, ?)*[xyz]+\.",
    regex_of_objects(),
]  # fmt: skip
ORDERS: list[dict[str, Any]] = [
    {"order": "random_filled"},
    {"order": "random"},
    {"order": "left_to_right", "block_length": 7},
    {"order": "low_confidence"},
    {"order": "threshold", "block_length": 7},
    {"order": "random_filled", "schedule": "all", "remask": "scheduled"},
]


def count_valid(number: int) -> None:
    """Prints how many texts of random requests match, order by order."""
    network = build(ModelConfig(depth=1, width=32, heads=2, vocab_size=JSON.vocab_size))
    sample = SampleConfig(chain=("temperature", "top_k", "top_p"))
    params = jax.tree.map(lambda x: 4 * x, jax.jit(network.init)(jax.random.key(0)))
    model = Model(network, params, JSON, max_length=64, sample=sample)
    schemas = [regex_of_schema({"type": "object", "required": ["a", "b"], "properties": {
        "a": {"type": "integer"}, "b": {"enum": ["x", "yz"]}}})]  # fmt: skip
    rng = np.random.default_rng(0)
    print("| order | requests | match | JSON | forwards |")
    print("| --- " * 5 + "|")
    for order in ORDERS:
        prompts = [
            {
                "prompt": "ab", "seed": row, "structure": (PATTERNS + schemas)[row % 6],
                "steps": int(rng.integers(7 if "block_length" in order else 1, 65)),
                "temperature": float(rng.choice([0.0, 0.3, 1.0, 3.0])),
                "top_k": int(rng.choice([0, 1, 5])), "top_p": float(rng.choice([1.0, 0.5])),
            }
            for row in range(number // len(ORDERS))
        ]  # fmt: skip
        made = dlm_jax.generate(
            model, prompts, gen_length=44, fill="constrained", batch_size=256, **order
        )
        texts = [
            (one["structure"], text[2:]) for one, text in zip(prompts, made.texts, strict=True)
        ]
        matches = sum(re.fullmatch(*pair) is not None for pair in texts)
        objects = [text for pattern, text in texts if pattern in (PATTERNS[-1], *schemas)]
        parsed = sum(isinstance(_parsed(text), dict) for text in objects)
        print(
            f"| {', '.join(map(str, order.values()))} | {len(texts)} | {matches} | "
            f"{parsed} of {len(objects)} | {np.mean(made.forwards):.1f} |", flush=True,
        )  # fmt: skip


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def time_answers(rounds: int) -> None:
    """Prints the time of a JSON answer of the shipped model, and that of one token per step."""
    model, pattern = dlm_jax.load(), regex_of_schema(SCHEMA)
    common = {"structure": pattern, "ignore_eos": False, "gen_length": 64, "temperature": 0.8}
    arms: dict[str, dict[str, Any]] = {
        "a token a step": {"order": "left_to_right", "steps": 64},
        **{
            f"constrained, {steps} steps": {
                "fill": "constrained", "order": "random_filled", "steps": steps
            }
            for steps in (4, 8, 16)
        },
    }  # fmt: skip
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    forwards: dict[str, list[float]] = {name: [] for name in arms}
    valid = dict.fromkeys(arms, 0)
    for seed in range(-1, rounds):
        for name, settings in arms.items():
            began = time.perf_counter()
            made = dlm_jax.generate(model, ["JSON: "], **common | settings, seed=seed + 1)
            if seed < 0:
                continue  # compiles
            seconds[name].append(time.perf_counter() - began)
            forwards[name].append(float(made.forwards[0]))
            answer = _parsed(made.texts[0].removeprefix("JSON: "))
            valid[name] += isinstance(answer, dict) and set(answer) == set(SCHEMA["properties"])
    print("| answer | ms | forwards | valid |")
    print("| --- " * 4 + "|")
    for name in arms:
        print(
            f"| {name} | {statistics.median(seconds[name]) * 1e3:.1f} | "
            f"{statistics.mean(forwards[name]):.1f} | {valid[name]} of {rounds} |", flush=True,
        )  # fmt: skip


def main() -> None:
    """Runs what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["law", "valid", "step", "answer"])
    parser.add_argument("--texts", type=int, default=200_000)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2048, 50257])
    args = parser.parse_args()
    start_jax()
    runs: dict[str, Callable[[], None]] = {
        "law": lambda: count_laws(args.texts),
        "valid": lambda: count_valid(args.requests),
        "answer": lambda: time_answers(args.rounds),
        "step": lambda: time_steps(args.slots, args.rounds, args.sizes),
    }
    runs[args.what]()


if __name__ == "__main__":
    main()
