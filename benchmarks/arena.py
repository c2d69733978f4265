"""Error and number of forwards of every decoder on sources with a known joint distribution.

    python -m benchmarks.arena run [--quick]
    python -m benchmarks.arena table
    python -m benchmarks.arena claims
    python -m benchmarks.arena picture

The network of each source is exact: it gives the conditional distribution of each position given
the visible tokens, so every error in the samples is caused by the decoder. On a canvas that matches
no text of the source, the network uses the texts that differ in the fewest visible tokens. At a
visible token, the network gives the conditional distribution given the other tokens.

All decoders have eight settings and draw at temperature 1. A frontier consists of the settings that
are best at their number of forwards on a separate seed; results are reported for the other seeds.
A stopped run continues from the end of the CSV.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import markov
from dlm_jax.cli.common import start_jax
from dlm_jax.contrib import decoders
from dlm_jax.diffusion.corruption import LINEAR
from dlm_jax.diffusion.likelihood import half_width
from dlm_jax.sampling.loop import Advance, start
from dlm_jax.sampling.params import params_of
from dlm_jax.sampling.positions import chunk_size
from dlm_jax.sampling.program import Program
from dlm_jax.sampling.row import RowParams
from dlm_jax.sampling.rules import ModelFacts, with_rules
from dlm_jax.types import Network, Params

RESULTS = "benchmarks/results/arena.csv"
PICTURE = "docs/arena.png"
SEEDS, TUNING_SEED = (0, 1, 2), 1_000
TEXTS, QUICK_TEXTS = 1024, 256
"""Number of texts per setting and seed, generated in parts of `QUICK_TEXTS`."""
HEAD_TIMES = 16
"""Factor for the number of texts with the sampler head, whose distances are below the noise of
other decoders."""
LONGEST, LARGEST, MOST = 8, 8, 256
MASK, PAD, VOCAB = LARGEST, LARGEST + 1, LARGEST + 2
LIMIT = 3 * LONGEST
"""Steps of decoders that choose the number of commits per step."""
BUDGETS, SLACK = (2, 3, 4), 0.05
TABLE = with_rules(decoders)
SamplingParams = params_of(TABLE)
MISS = -18.0
"""Log-weight of a text for each visible token that differs."""

Settings = dict[str, Any]
Law = dict[tuple[int, ...], float]


def _chain(
    length: int, first: Law, following: Callable[[tuple[int, ...]], tuple[float, ...]]
) -> Law:
    """All texts of this length; the distribution of each token depends on the preceding tokens."""
    law = dict(first)
    while len(next(iter(law))) < length:
        law = {
            (*text, token): share * part
            for text, share in law.items()
            for token, part in enumerate(following(text))
        }
    return law


def _even(texts: Any) -> Law:
    """The uniform distribution over the texts."""
    found = [tuple(text) for text in texts]
    return dict.fromkeys(found, 1.0 / len(found))


def _second_order() -> Law:
    parts = (0.8, 0.15, 0.05)
    first = {pair: 1.0 / 9 for pair in itertools.product(range(3), repeat=2)}
    return _chain(5, first, lambda text: tuple(
        parts[(token - text[-1] - text[-2]) % 3] for token in range(3)
    ))  # fmt: skip


def _hidden() -> Law:
    """A hidden Markov chain with two persistent states and three tokens."""
    start, stay, says = np.array((0.5, 0.5)), 0.9, np.array(((0.7, 0.25, 0.05), (0.05, 0.25, 0.7)))
    move_HH = np.array(((stay, 1 - stay), (1 - stay, stay)))
    law: Law = {}
    for text in itertools.product(range(3), repeat=5):
        weight_H = start * says[:, text[0]]
        for token in text[1:]:
            weight_H = (weight_H @ move_HH) * says[:, token]
        law[text] = float(weight_H.sum())
    return law


def _sums() -> Law:
    """``a + b = c`` for two-digit numbers in base 4."""

    def digits(number: int, count: int) -> tuple[int, ...]:
        return tuple(number // 4**place % 4 for place in reversed(range(count)))

    return _even((*digits(a, 2), *digits(b, 2), *digits(a + b, 3))
                 for a, b in itertools.product(range(16), repeat=2))  # fmt: skip


def _replaced() -> Iterator[tuple[int, ...]]:
    """Three items, the index of one item, and the items with that item replaced."""
    for items in itertools.product(range(3), repeat=3):
        for place in range(3):
            yield *items, 3 + place, *items[:place], 6, *items[place + 1 :]


def _balanced() -> Iterator[tuple[int, ...]]:
    """Balanced brackets of two kinds: 0 and 2 open, 1 and 3 close."""
    for text in itertools.product(range(4), repeat=8):
        stack: list[int] = []
        for token in text:
            if token % 2 == 0:
                stack.append(token)
            elif not stack or stack.pop() != token - 1:
                break
        else:
            if not stack:
                yield text


@functools.cache
def sources() -> dict[str, Law]:
    """The probability of each text, by name of the source."""
    first = {(token,): share for token, share in enumerate(markov.START)}
    return {
        "markov": _chain(markov.LENGTH, first, lambda text: markov.STEP[text[-1]]),
        "markov2": _second_order(),
        "hmm": _hidden(),
        "copy": _even((*half, *half) for half in itertools.product(range(4), repeat=3)),
        "shuffle": _even(itertools.permutations(range(5))),
        "replace": _even(_replaced()),
        "addition": _sums(),
        "brackets": _even(_balanced()),
    }


STRUCTURED = ("copy", "shuffle", "replace", "addition", "brackets")
"""Sources for which most texts are invalid."""


def parameters(law: Law) -> Params:
    """The texts of a source as parameters of `network`, in shapes shared by all sources."""
    texts_SL = np.full((MOST, LONGEST), PAD)
    share_S = np.zeros(MOST)
    for number, (text, share) in enumerate(law.items()):
        texts_SL[number, : len(text)] = text
        share_S[number] = share
    is_token_SLV = texts_SL[..., None] == np.arange(VOCAB)
    with np.errstate(divide="ignore"):
        logs_S = np.log(share_S)
    return {
        "is_token": jnp.asarray(is_token_SLV.reshape(MOST, -1), jnp.float32),
        "log_share": jnp.asarray(logs_S, jnp.float32),
    }


@functools.cache
def network() -> Network:
    """The exact network of any source; a hidden vector contains the log-probabilities."""

    def trunk(
        params: Params, tokens_BL: jax.Array, length_B: jax.Array, cache: None
    ) -> tuple[jax.Array, None]:
        is_told_BL1 = (tokens_BL < MASK)[..., None]
        told_BLV = jax.nn.one_hot(tokens_BL, VOCAB) * is_told_BL1
        told_BP = told_BLV.reshape(tokens_BL.shape[0], -1)
        fits_BS = told_BP @ params["is_token"].T
        misses_BS = jnp.sum(is_told_BL1, axis=1) - fits_BS
        weight_BS = MISS * misses_BS + params["log_share"][None]
        weight_BS = jnp.exp(weight_BS - jnp.max(weight_BS, axis=1, keepdims=True))
        log_BLV = jnp.log((weight_BS @ params["is_token"]).reshape(told_BLV.shape))
        # A token is not evidence for its own position.
        return log_BLV - MISS * (is_told_BL1 & (told_BLV == 0)), None

    def readout(params: Params, hidden_ND: jax.Array) -> jax.Array:
        return jnp.where(jnp.arange(VOCAB)[None] < MASK, hidden_ND, -jnp.inf)

    return Network(
        init=lambda key: parameters(sources()["markov"]),
        trunk=trunk,
        embed=lambda params, ids: jax.nn.one_hot(ids, VOCAB),
        readout=readout,
        vocab_size=VOCAB,
    )


def _grid(settings: Settings, **values: Any) -> list[Settings]:
    """Settings with all combinations of the values."""
    cases = itertools.product(*values.values())
    return [settings | dict(zip(values, case, strict=True)) for case in cases]


def _pairs(settings: Settings, names: tuple[str, str], *pairs: tuple[float, float]):
    return [settings | dict(zip(names, pair, strict=True)) for pair in pairs]


_ONE: Settings = {"fill": "parallel", "confidence": "max", "steps": LIMIT}
_STEPS = (8, 1, 2, 3, 4, 5, 6, 7)
_CUTS = (0.9, 0.99, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
DECODERS: dict[str, list[Settings]] = {
    **{
        order: _grid(_ONE | {"order": order}, steps=_STEPS)
        for order in ("low_confidence", "random", "left_to_right", "entropy", "margin")
    },
    "ancestral": _grid(_ONE | {"order": "ancestral"}, steps=(8, 2, 3, 4, 6, 12, 16, 24)),
    "remdm": _grid(
        _ONE | {"order": "ancestral", "remask": "remdm_cap"},
        steps=(8, 4, 16, 24), remask_eta=(0.1, 0.4),
    ),
    "threshold": _grid(_ONE | {"order": "threshold"}, threshold=_CUTS),
    "factor": _grid(
        _ONE | {"order": "factor"}, factor=(0.75, 0.5, 1.0, 1.2, 1.4, 1.6, 1.8, 2.0)
    ),
    "entropy_bound": _grid(
        _ONE | {"order": "entropy_bound"}, entropy_bound=(0.1, 0.0, 0.3, 0.6, 1.0, 1.5, 2.0, 4.0)
    ),
    "joint_threshold": _grid(_ONE | {"order": "joint_threshold"}, threshold=_CUTS),
    "frechet": _grid(
        _ONE | {"order": "frechet"}, frechet_margin=(0.25, 0.0, -0.1, -0.2, -0.3, -0.5, -0.7, -0.9)
    ),
    "local_leap": _pairs(
        _ONE | {"order": "local_leap"}, ("threshold", "leap_threshold"),
        (0.9, 0.75), (0.8, 0.6), (0.7, 0.5), (0.6, 0.4), (0.5, 0.3), (0.9, 0.5), (0.9, 0.3),
        (0.5, 0.1),
    ),
    "hierarchical": _grid(
        _ONE | {"order": "hierarchical"}, threshold=(0.9, 0.5), hierarchy_floor=(0.0, 0.3, 0.5, 0.7)
    ),
    "dilated": _grid(_ONE | {"order": "dilated"}, dilated_base=(2, 3, 4, 8), block_length=(0, 4)),
    "position_aware": _grid(
        _ONE | {"order": "position_aware"}, steps=(8, 2, 3, 4), position_decay=(0.25, 1.0)
    ),
    "prophet": _grid(
        _ONE | {"order": "prophet", "steps": LONGEST},
        prophet_gap=(7.5, 15.0, 5.0, 3.0, 2.0, 1.0, 0.5, 0.25),
    ),
    "klass": _pairs(
        _ONE | {"order": "klass", "klass_steps": 2}, ("threshold", "klass_divergence"),
        (0.9, 0.01), (0.9, 0.1), (0.6, 0.01), (0.6, 0.1),
    ) + _pairs(
        _ONE | {"order": "klass", "klass_steps": 1}, ("threshold", "klass_divergence"),
        (0.9, 0.1), (0.6, 0.1), (0.4, 0.3), (0.3, 1.0),
    ),
    "credit": _grid(
        _ONE | {"order": "credit"}, threshold=(0.9, 0.7, 0.5, 0.4), credit_weight=(0.7, 2.0)
    ),
    "slow_fast": _grid(
        _ONE | {"order": "slow_fast"}, threshold=(0.9, 0.7, 0.5, 0.4), slow_threshold=(0.3, 0.6)
    ),
    "wino": _grid(
        _ONE | {"order": "threshold", "remask": "wino"},
        threshold=(0.6, 0.5, 0.4, 0.3), verify_threshold=(0.9, 0.3),
    ),
}  # fmt: skip
"""Eight settings of each decoder; the first are those of its authors."""

HEAD: dict[str, list[Settings]] = {
    "waves": _grid(
        {"fill": "wavefront", "sampler_one_sided": True},
        order=("random", "random_filled"), steps=(1, 2, 3, 4),
    )
}  # fmt: skip
"""The sampler head of `benchmarks/markov.py`, which is exact for two neighbours."""


class Setup(NamedTuple):
    """A network for a source.

    Attributes:
      advance: the sampling loop.
      params: its parameters.
      length: positions of a text.
      canvas: positions of the canvas.
      mask_id: the id of MASK.
      facts: properties of the model for the rules.
      pad_id: the id of PAD.
      token_of: token of the source for each id of the network; None if they are equal.
      ending: the id of EOS, which is given after the text; None if the text ends the canvas.
    """

    advance: Advance
    params: Params
    length: int
    canvas: int
    mask_id: int
    facts: ModelFacts
    pad_id: int = PAD
    token_of: np.ndarray | None = None
    ending: int | None = None


@functools.cache
def advance_of(net: Network, mask_id: int, pad_id: int, banned_ids: tuple[int, ...]) -> Advance:
    """The loop of a network, which is compiled once for all sources."""
    return Advance(Program(
        network=net, mask_id=mask_id, chunk=chunk_size(net.vocab_size),
        banned_ids=banned_ids, pad_id=pad_id,
    ))  # fmt: skip


_head_network = functools.cache(markov.network)


def setup_of(source: str, decoder: str) -> Setup:
    """The exact network of a source, or the network with a sampler head."""
    if decoder in HEAD:
        net, mask_id, banned = _head_network(), markov.MASK, (markov.MASK,)
        params, canvas, pad_id = net.init(jax.random.key(0)), markov.LENGTH, markov.MASK
    else:
        net, mask_id, banned, canvas, pad_id = network(), MASK, (MASK, PAD), LONGEST, PAD
        params = parameters(sources()[source])
    facts = ModelFacts(
        vocab_size=net.vocab_size,
        banned_ids=banned,
        noise=LINEAR,
        heads=("sampler",) if decoder in HEAD else (),
    )
    length = len(next(iter(sources()[source])))
    advance = advance_of(net, mask_id, pad_id, (mask_id, pad_id))
    return Setup(advance, params, length, canvas, mask_id, facts)


class Written(NamedTuple):
    """Texts ``[N, L]``, with the forwards and filled positions of each ``[N]``."""

    texts: np.ndarray
    forwards: np.ndarray
    filled: np.ndarray


def write(setup: Setup, grid: list[Settings], number: int, seed: int) -> Written:
    """Writes `number` texts with each of the settings."""
    samples = [SamplingParams(chain=("temperature",), **settings) for settings in grid]
    kinds: dict[Any, list[int]] = {}
    for index, sample in enumerate(samples):
        kinds.setdefault(TABLE.static(sample), []).append(index)
    found: list[Any] = [None] * len(grid)
    for indices in kinds.values():
        which = np.repeat(np.arange(len(indices)), QUICK_TEXTS)
        ones = [samples[i] for i in indices]
        packed = RowParams.pack(ones, setup.facts), TABLE.pack(ones, setup.facts)
        row, rules = jax.tree.map(lambda x, which=which: x[which], packed)
        tokens_L = np.where(np.arange(setup.canvas) < setup.length, setup.mask_id, setup.pad_id)
        length = setup.length
        if setup.ending is not None:
            tokens_L[length] = setup.ending
            length += 1
        tokens_BL = jnp.asarray(np.tile(tokens_L, (which.size, 1)), jnp.int32)
        parts = []
        for first in range(seed * 2**20, seed * 2**20 + number, QUICK_TEXTS):
            seed_B = np.tile(np.arange(first, first + QUICK_TEXTS, dtype=np.uint32), len(indices))
            state = start(
                tokens_BL, jnp.full(which.size, length),
                dataclasses.replace(row, seed_B=jnp.asarray(seed_B)), rules, mask_id=setup.mask_id,
            )  # fmt: skip
            state = setup.advance(setup.params, state, LIMIT)
            tokens_BL_now = np.asarray(state.canvas.tokens_BL)[:, : setup.length]
            if setup.token_of is not None:
                tokens_BL_now = setup.token_of[tokens_BL_now]
            counters = state.counters
            arrays = tokens_BL_now, np.asarray(counters.forwards), np.asarray(counters.filled)
            parts.append([x.reshape(len(indices), QUICK_TEXTS, *x.shape[1:]) for x in arrays])
        together = [np.concatenate(x, axis=1) for x in zip(*parts, strict=True)]
        for place, index in enumerate(indices):
            found[index] = [x[place] for x in together]
    return Written(*(np.stack(x) for x in zip(*found, strict=True)))


def total_variation(texts_NL: np.ndarray, law: Law) -> tuple[float, float, float]:
    """Total variation between the texts and the source, share of valid texts, entropy in nats."""
    unique, counts = np.unique(texts_NL, axis=0, return_counts=True)
    shares = {
        tuple(map(int, text)): n / len(texts_NL) for text, n in zip(unique, counts, strict=True)
    }
    distance = sum(abs(shares.get(text, 0.0) - share) for text, share in law.items())
    valid = sum(share for text, share in shares.items() if text in law)
    entropy = -sum(share * math.log(share) for share in shares.values())
    return 0.5 * (distance + 1.0 - valid), valid, entropy


def noise(law: Law, number: int) -> float:
    """The mean total variation of `number` texts that are drawn from the source."""
    share_S = np.array(list(law.values()))
    drawn = np.random.default_rng(0).multinomial(number, share_S / share_S.sum(), size=50)
    return float((0.5 * np.abs(drawn / number - share_S).sum(axis=1)).mean())


FIELDS = ("source", "decoder", "setting", "seed", "texts", "forwards", "filled", "total_variation",
          "noise", "valid", "entropy")  # fmt: skip


def name_of(settings: Settings, grid: list[Settings]) -> str:
    """The name of a setting among the settings of its decoder."""
    varied = [name for name in settings if len({str(one.get(name)) for one in grid}) > 1]
    return " ".join(f"{name}={settings[name]}" for name in varied)


def measured(
    source: str, decoder: str, number: int, setup: Setup, grid: list[Settings]
) -> Iterator[dict[str, Any]]:
    """Yields one line per setting and seed, and one for the three test seeds together."""
    law = sources()[source]
    by_seed = {seed: write(setup, grid, number, seed) for seed in (TUNING_SEED, *SEEDS)}
    together = Written(*(
        np.concatenate(parts, axis=1) for parts in zip(*(by_seed[s] for s in SEEDS), strict=True)
    ))  # fmt: skip
    for seed, written in {**by_seed, "all": together}.items():
        level = noise(law, written.texts.shape[1])
        for settings, texts, forwards, filled in zip(grid, *written, strict=True):
            distance, valid, entropy = total_variation(texts, law)
            yield {
                "source": source, "decoder": decoder, "setting": name_of(settings, grid),
                "seed": "tuning" if seed == TUNING_SEED else seed, "texts": len(texts),
                "forwards": f"{forwards.mean():.4f}", "filled": f"{filled.mean():.3f}",
                "total_variation": f"{distance:.4f}", "noise": f"{level:.4f}",
                "valid": f"{valid:.4f}", "entropy": f"{entropy:.4f}",
            }  # fmt: skip


def run(path: str, number: int) -> None:
    """Measures the cases that are missing in the CSV."""
    lines = read(path) if Path(path).exists() else []
    done = {(line["source"], line["decoder"]) for line in lines}
    cases = [(source, decoder) for decoder in DECODERS for source in sources()]
    cases += [("markov", decoder) for decoder in HEAD]
    for source, decoder in cases:
        if (source, decoder) in done:
            continue
        times = HEAD_TIMES if decoder in HEAD else 1
        setup, grid = setup_of(source, decoder), (DECODERS | HEAD)[decoder]
        append(path, list(measured(source, decoder, number * times, setup, grid)))


def append(path: str, found: list[dict[str, Any]]) -> None:
    """Appends the lines of a decoder on a source, and prints the smallest distance."""
    is_new = not Path(path).exists()
    with Path(path).open("a", encoding="utf-8", newline="") as file:
        writer: csv.DictWriter[str] = csv.DictWriter(file, FIELDS)
        if is_new:
            writer.writeheader()
        writer.writerows(found)
    best = min(float(line["total_variation"]) for line in found if line["seed"] == "all")
    source, decoder = found[0]["source"], found[0]["decoder"]
    print(f"{source} {decoder}: best total variation {best:.4f}", flush=True)


def read(path: str) -> list[dict[str, str]]:
    """The lines of the CSV."""
    with Path(path).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def chosen(
    lines: list[dict[str, str]], source: str, decoder: str, budget: float
) -> list[dict[str, str]]:
    """The lines of the best setting within the budget of forwards on the tuning seed."""
    own = [line for line in lines if (line["source"], line["decoder"]) == (source, decoder)]
    fits = [
        (float(line["total_variation"]), line["setting"])
        for line in own
        if line["seed"] == "tuning" and float(line["forwards"]) <= budget + SLACK
    ]
    return [line for line in own if fits and line["setting"] == min(fits)[1]]


def excess(line: dict[str, str]) -> float:
    """Total variation in excess of that of equally many texts of the source."""
    return float(line["total_variation"]) - float(line["noise"])


def interval(values: list[float]) -> float:
    """Half of the 95% interval of the mean over the three seeds."""
    return half_width(statistics.stdev(values) / len(values) ** 0.5, len(values))


def table(lines: list[dict[str, str]]) -> None:
    """Prints the means over all sources of each decoder within each budget, as Markdown."""
    rows(lines, list(DECODERS))
    for decoder in HEAD:
        found = [chosen(lines, "markov", decoder, budget) for budget in BUDGETS]
        cells = [_mean([own], excess) if own else "-" for own in found]
        rivals = [
            min((_all(own, excess) for name in DECODERS
                 if (own := chosen(lines, "markov", name, budget))), default=math.nan)
            for budget in BUDGETS
        ]  # fmt: skip
        print(f"| `{decoder}`, markov alone | {' | '.join(cells)} | - |")
        print(f"| best other, markov alone | {' | '.join(f'{x:.3f}' for x in rivals)} | - |")


def rows(lines: list[dict[str, str]], decoders: list[str]) -> None:
    """Prints the rows of decoders that ran on all sources."""
    print("| decoder | " + " | ".join(f"{budget} forwards" for budget in BUDGETS) + " | valid |")
    print("| --- " * (len(BUDGETS) + 2) + "|")
    for decoder in decoders:
        cells, valid = [], ""
        for budget in BUDGETS:
            found = [chosen(lines, source, decoder, budget) for source in sources()]
            if not all(found):
                cells.append("-")
                continue
            cells.append(_mean(found, excess))
            if budget == BUDGETS[1]:
                names = [x for x, source in zip(found, sources(), strict=True)
                         if source in STRUCTURED]  # fmt: skip
                valid = _mean(names, lambda line: float(line["valid"]))
        print(f"| `{decoder}` | {' | '.join(cells)} | {valid or '-'} |")


def _all(own: list[dict[str, str]], value: Callable[[dict[str, str]], float]) -> float:
    """A value over all three seeds."""
    return next(value(line) for line in own if line["seed"] == "all")


def _mean(found: list[list[dict[str, str]]], value: Callable[[dict[str, str]], float]) -> str:
    """The mean over sources and seeds, with the interval over seeds."""
    mean = statistics.mean(_all(own, value) for own in found)
    by_seed = [
        statistics.mean(value(line) for own in found for line in own if line["seed"] == str(seed))
        for seed in SEEDS
    ]
    return f"{mean:.3f} ± {interval(by_seed):.3f}"


class Claim(NamedTuple):
    """The claim of a decoder relative to another decoder.

    Attributes:
      decoder: the decoder, with the settings of its authors.
      settings: those.
      rival: the other decoder.
      rival_settings: its settings.
      is_faster: whether the claim is fewer forwards at equal validity; otherwise, higher validity.
    """

    decoder: str
    settings: Settings
    rival: str
    rival_settings: Settings
    is_faster: bool = True


CLAIMS = (
    Claim("entropy_bound", {"entropy_bound": 0.1}, "low_confidence", {"steps": 8}),
    Claim("klass", {"threshold": 0.9, "klass_divergence": 0.01, "klass_steps": 2},
          "low_confidence", {"steps": 8}),
    Claim("prophet", {"prophet_gap": 7.5}, "low_confidence", {"steps": 8}),
    Claim("slow_fast", {"threshold": 0.9, "slow_threshold": 0.3}, "low_confidence", {"steps": 8}),
    Claim("wino", {"threshold": 0.6, "verify_threshold": 0.9}, "low_confidence", {"steps": 8}),
    Claim("wino", {"threshold": 0.6, "verify_threshold": 0.9}, "threshold", {"threshold": 0.6},
          is_faster=False),
    Claim("credit", {"threshold": 0.9, "credit_weight": 0.7}, "threshold", {"threshold": 0.9}),
    Claim("local_leap", {"threshold": 0.9, "leap_threshold": 0.75}, "threshold",
          {"threshold": 0.9}),
    Claim("hierarchical", {"threshold": 0.9, "hierarchy_floor": 0.0}, "threshold",
          {"threshold": 0.9}),
    Claim("frechet", {"frechet_margin": 0.25}, "factor", {"factor": 0.75}),
    Claim("dilated", {"dilated_base": 2, "block_length": 0}, "low_confidence", {"steps": 3},
          is_faster=False),
    Claim("position_aware", {"steps": 3, "position_decay": 0.25}, "low_confidence", {"steps": 3},
          is_faster=False),
)  # fmt: skip
EQUAL = 0.02
"""Shares of valid texts that differ by at most this count as equal."""


def verdict(claim: Claim, more_forwards: float, more_valid: float) -> str:
    """The result of a claim."""
    if claim.is_faster:
        if more_forwards >= -0.005:
            return "not fewer forwards"
        is_equal = more_valid >= -EQUAL
        return "fewer forwards, as valid" if is_equal else "fewer forwards, less valid"
    return "more valid" if more_valid > EQUAL else "not more valid"


def claims(lines: list[dict[str, str]]) -> None:
    """Prints the claim and the result of each decoder over the structured sources, as Markdown."""
    print("| decoder | beside | forwards | valid | found |")
    print("| --- " * 5 + "|")
    for claim in CLAIMS:
        ours, theirs = (
            _of_settings(lines, *which)
            for which in ((claim.decoder, claim.settings), (claim.rival, claim.rival_settings))
        )
        change = {}
        for column in ("forwards", "valid"):
            mean, rival = (statistics.mean(float(line[column]) for line in found)
                           for found in (ours, theirs))  # fmt: skip
            change[column] = f"{rival:.2f} to {mean:.2f}", mean - rival
        said = verdict(claim, change["forwards"][1], change["valid"][1])
        beside = " ".join(f"{k}={v}" for k, v in claim.rival_settings.items())
        print(f"| `{claim.decoder}` | `{claim.rival}` {beside} | {change['forwards'][0]} | "
              f"{change['valid'][0]} | {said} |")  # fmt: skip


def _of_settings(
    lines: list[dict[str, str]], decoder: str, settings: Settings
) -> list[dict[str, str]]:
    """The test lines of a decoder's setting for the structured sources."""
    grid = DECODERS[decoder]
    (full,) = [one for one in grid if settings.items() <= one.items()]
    name = name_of(full, grid)
    return [
        line
        for line in lines
        if (line["decoder"], line["setting"]) == (decoder, name)
        and line["source"] in STRUCTURED
        and line["seed"] == "all"
    ]


def frontier(
    lines: list[dict[str, str]], source: str, decoder: str
) -> list[tuple[float, float, float]]:
    """Forwards, total variation and interval of the Pareto-optimal settings on the tuning seed."""
    own = [line for line in lines if (line["source"], line["decoder"]) == (source, decoder)]
    tried = [
        (float(line["forwards"]), float(line["total_variation"]), line["setting"])
        for line in own
        if line["seed"] == "tuning"
    ]
    kept, best = [], math.inf
    for _, distance, setting in sorted(tried):
        if distance < best - 1e-9:
            kept.append(setting)
            best = distance
    points = []
    for setting in kept:
        mine = [line for line in own if line["setting"] == setting]
        by_seed = [excess(line) for line in mine if line["seed"] in map(str, SEEDS)]
        forwards = _all(mine, lambda line: float(line["forwards"]))
        points.append((forwards, _all(mine, excess), interval(by_seed)))
    return sorted(points)


def picture(lines: list[dict[str, str]], path: str) -> None:
    """Draws the frontiers of all decoders, with one panel per source."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [*DECODERS, *HEAD]
    colors = plt.get_cmap("tab20")
    figure, panels = plt.subplots(2, 4, figsize=(13, 6.2), sharex=True, sharey=True)
    for panel, source in zip(panels.flat, sources(), strict=True):
        for number, decoder in enumerate(names):
            points = frontier(lines, source, decoder)
            if not points:
                continue
            x, y, width = zip(*points, strict=True)
            panel.errorbar(
                x, y, width, label=decoder, color=colors(number % 20), linewidth=1, markersize=3,
                marker="osv^"[number // 6], elinewidth=0.6,
            )  # fmt: skip
        panel.set_title(source, fontsize=9)
        panel.grid(alpha=0.3)
        panel.set_xlim(0.8, LONGEST + 0.4)
    for panel in panels[1]:
        panel.set_xlabel("forwards")
    for panel in panels[:, 0]:
        panel.set_ylabel("total variation above noise")
    handles, labels = panels.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="center right", fontsize=8)
    figure.tight_layout(rect=(0, 0, 0.87, 1))
    figure.savefig(path, dpi=80)


def main() -> None:
    """Runs a part of the study."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["run", "table", "claims", "picture"])
    parser.add_argument("--csv", default=RESULTS)
    parser.add_argument("--picture", default=PICTURE)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_TEXTS} texts of each line")
    args = parser.parse_args()
    if args.part == "run":
        start_jax()
        run(args.csv, QUICK_TEXTS if args.quick else TEXTS)
        return
    lines = read(args.csv)
    if args.part == "picture":
        picture(lines, args.picture)
    else:
        {"table": table, "claims": claims}[args.part](lines)


if __name__ == "__main__":
    main()
