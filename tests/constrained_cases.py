"""A model of independent positions, its matches by enumeration, and canvases of the loop.

The distributions are computed in float64, independently of the loop.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dlm_jax.data import CharacterTokenizer
from dlm_jax.sampling.loop import Advance, start
from dlm_jax.sampling.params import params_of
from dlm_jax.sampling.program import Program, RowParams
from dlm_jax.sampling.propose import SamplerReadout
from dlm_jax.sampling.rules import BUILT_IN, ModelFacts, RuleTable, with_rules
from dlm_jax.structured import Structures
from dlm_jax.types import Network, Params

LETTERS = CharacterTokenizer.of("abc")
MASK, EOS = LETTERS.mask_id, LETTERS.eos_id
KNOWN = Structures(LETTERS, LETTERS.vocab_size, (EOS,), LETTERS.banned_ids)
TEXT_IDS = [*range(len(LETTERS.characters)), EOS]
ROWS = 1_000
"""Texts of one call."""


def independent(length: int, *, has_head: bool = False) -> Network:
    """A model whose parameters are the logits of each position, ``{"logits": [L, V]}``.

    A sampler head has separate logits and adds the contribution of each neighbour: ``{"head":
    [L, V], "left": [V, V], "right": [V, V]}``.
    """

    def trunk(
        params: Params, tokens_BL: jax.Array, length_B: jax.Array, cache: None
    ) -> tuple[jax.Array, None]:
        return jnp.broadcast_to(jnp.eye(length)[None], (*tokens_BL.shape, length)), None

    def beside(
        params: Params, left_NCD: jax.Array, hidden_ND: jax.Array, right_NCD: jax.Array
    ) -> jax.Array:
        sides_NV = left_NCD[:, 0] @ params["left"] + right_NCD[:, 0] @ params["right"]
        return hidden_ND @ params["head"] + sides_NV

    return Network(
        init=lambda key: {"logits": jnp.zeros((length, LETTERS.vocab_size))},
        trunk=trunk,
        embed=lambda params, ids: jax.nn.one_hot(ids, LETTERS.vocab_size),
        readout=lambda params, hidden_ND: hidden_ND @ params["logits"],
        vocab_size=LETTERS.vocab_size,
        heads={"sampler": SamplerReadout(beside)} if has_head else {},
    )


@functools.cache
def advance(length: int, *, has_head: bool = False) -> Advance:
    """The loop for the model with `length` positions."""
    return Advance(Program(
        network=independent(length, has_head=has_head), mask_id=MASK, chunk=4096,
        banned_ids=LETTERS.banned_ids, eos_ids=(EOS,), pad_id=LETTERS.pad_id,
    ))  # fmt: skip


def ids_of(canvas: str) -> list[int]:
    """The ids of a canvas, where ``_`` is a hole and ``$`` EOS."""
    special = {"_": MASK, "$": EOS}
    return [special[c] if c in special else int(LETTERS.encode(c)[0]) for c in canvas]


def _waves() -> RuleTable:
    """The rules with ``constrained_waves``."""
    from dlm_jax.contrib.constrained_waves import ConstrainedWaves

    return with_rules((ConstrainedWaves,))


def draws(
    pattern: str, canvas: str, logits_LV: np.ndarray, number: int, *, seed: int = 0,
    rows: int = ROWS, head: dict[str, np.ndarray] | None = None, **settings: Any,
) -> np.ndarray:  # fmt: skip
    """At least `number` canvases filled by the loop, ``[N, L]``; in parallel without a pattern.

    With the parameters of a head, the fill is in waves.
    """
    fill = "constrained" if pattern else "parallel"
    table = BUILT_IN
    if head is not None:
        fill, table = ("constrained_waves", _waves()) if pattern else ("wavefront", BUILT_IN)
    asked = {"chain": ("temperature", "top_k"), "fill": fill, "order": "random_filled"}
    sample = params_of(table)(**asked | settings)
    if pattern:
        sample = dataclasses.replace(sample, structure=KNOWN.automaton(pattern))
    facts = ModelFacts(vocab_size=LETTERS.vocab_size, banned_ids=LETTERS.banned_ids, eos_ids=(EOS,))
    packed = RowParams.pack([sample], facts), table.pack([sample], facts)
    row, rules = jax.tree.map(lambda x: jnp.broadcast_to(x, (rows, *x.shape[1:])), packed)
    row = dataclasses.replace(row, stops_at_eos_B=jnp.zeros(rows, bool))
    tokens_L = jnp.array(ids_of(canvas), jnp.int32)
    params = jax.tree.map(jnp.float32, {"logits": logits_LV} | (head or {}))
    loop = advance(tokens_L.size, has_head=head is not None)
    found = []
    for first in range(seed, seed + number, rows):
        state = start(
            jnp.broadcast_to(tokens_L, (rows, tokens_L.size)), jnp.full(rows, tokens_L.size),
            dataclasses.replace(row, seed_B=jnp.arange(first, first + rows, dtype=jnp.uint32)),
            rules, mask_id=MASK,
        )  # fmt: skip
        found.append(loop(params, state, sample.steps).canvas.tokens_BL)
    return np.concatenate(found)


def law(
    pattern: str, canvas: str, logits_LV: np.ndarray, *, temperature: float = 1.0
) -> dict[tuple[int, ...], float]:
    """The probability of each match, by enumeration of all fillings of the holes."""
    (holes,) = np.nonzero(np.array(ids_of(canvas)) == MASK)
    scaled_LV = np.asarray(logits_LV, np.float64) / temperature
    weights = {
        text: scaled_LV[holes, np.array(text)[holes]].sum() for text in matches(pattern, canvas)
    }
    most = max(weights.values())
    total = sum(np.exp(weight - most) for weight in weights.values())
    return {text: np.exp(weight - most) / total for text, weight in weights.items()}


def matches(pattern: str, canvas: str) -> list[tuple[int, ...]]:
    """The fillings of a canvas that match the pattern."""
    ids = np.array(ids_of(canvas))
    (holes,) = np.nonzero(ids == MASK)
    found = []
    for filling in itertools.product(TEXT_IDS, repeat=holes.size):
        ids[holes] = filling
        if is_match(pattern, ids[holes[0] :]):
            found.append(tuple(ids.tolist()))
    return found


def waves_law(
    pattern: str, canvas: str, logits_LV: np.ndarray, head: dict[str, np.ndarray], *,
    temperature: float = 1.0, sampler_temperature: float = 1.0,
) -> dict[tuple[int, ...], float]:  # fmt: skip
    """The probability of each match after one step of ``constrained_waves``; 0 or 1 if greedy.

    Tokens are drawn from left to right. The weight of a token is the head's probability times the
    sum of the trunk's probabilities of all completions; a greedy row maximises both.
    """
    given = ids_of(canvas)
    (holes,) = np.nonzero(np.array(given) == MASK)
    is_greedy, heat = temperature == 0, temperature or 1.0
    logits_LV = np.asarray(logits_LV, np.float64) / heat
    rest: dict[tuple[int, ...], float] = {}
    found = matches(pattern, canvas)
    for text in found:
        for count in range(holes.size + 1):
            known = tuple(text[at] for at in holes[:count])
            weight = math.exp(sum(logits_LV[at, text[at]] for at in holes[count:]))
            old = rest.get(known, 0.0)
            rest[known] = max(old, weight) if is_greedy else old + weight

    def chance(text: tuple[int, ...], count: int) -> float:
        """The probability of the token in a hole given the preceding tokens."""
        at = holes[count]
        shown = [text[i] if i < at else id_ for i, id_ in enumerate(given)]
        left = shown[at - 1] if at else MASK
        right = shown[at + 1] if at + 1 < len(shown) else MASK
        own_V = logits_LV[at]
        if (left, right) != (MASK, MASK):
            sides = head["left"][left] * (left != MASK) + head["right"][right] * (right != MASK)
            own_V = (head["head"][at] + sides) / sampler_temperature / heat
        known = tuple(text[i] for i in holes[:count])
        weights = [math.exp(own_V[y]) * rest.get((*known, y), 0.0) for y in TEXT_IDS]
        mine = weights[TEXT_IDS.index(text[at])]
        return float(mine == max(weights)) if is_greedy else mine / sum(weights)

    return {text: math.prod(chance(text, count) for count in range(holes.size)) for text in found}


def is_match(pattern: str, ids: np.ndarray) -> bool:
    """Whether the ids are a match of the pattern followed only by EOS."""
    text = "".join("$" if id_ == EOS else LETTERS.characters[id_] for id_ in ids.tolist())
    text = text.rstrip("$")
    return "$" not in text and re.fullmatch(pattern, text) is not None


def p_value(drawn_NL: np.ndarray, law: dict[tuple[int, ...], float]) -> float:
    """The chi-square p-value of the counts under the distribution.

    Texts with an expected count below 10 are pooled. The value is 0 if a text is outside the
    support.
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
"""Patterns, canvases and settings of the counted texts."""


WAVES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "from the left": (r"(ab|ba)*c?", "a______", {}),
    "without a neighbour": (r"a*b+(a|c)*", "___b___", {}),
    "between": (r"[ab]+c[^b]*", "b__c_a_", {"temperature": 0.7, "sampler_temperature": 1.3}),
}
"""Patterns, canvases and settings for one step of ``constrained_waves``."""


def head_of(case: str) -> dict[str, np.ndarray]:
    """Random parameters of a sampler head for a case, inconsistent with the case's logits."""
    rng = np.random.default_rng(len(case))
    size = LETTERS.vocab_size
    shapes = {"head": (7, size), "left": (size, size), "right": (size, size)}
    return {name: 1.5 * rng.normal(size=shape) for name, shape in shapes.items()}


def logits_of(case: str) -> np.ndarray:
    """Logits of a case; some ids have probabilities below 1e-30."""
    rng = np.random.default_rng(sum(map(ord, case)))
    logits_LV = rng.normal(size=(7, LETTERS.vocab_size)) * 1.5
    logits_LV[1, :2] -= 75
    logits_LV[3] += rng.choice([0, -90], LETTERS.vocab_size)
    return logits_LV.astype(np.float32)
