"""The wavefront's reference on canvases worked out by hand.

A picture has one letter per position: `v` visible, `o` open, `x` neither.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from . import wavefront
from .wavefront import Filled, Rule

V = 5
EMBED_VD = np.eye(V)
BANNED = (4,)


def fill(picture: str, rule: Rule, *, token: int = 0, sure: str = "", log=None) -> Filled:
    """The row filled greedily; digits of `sure` say how sure the main head is, of token 1.

    The sampler head counts: one logit per token, 2 for each left neighbour that is it and 3 for
    each right one. `log` gets what is drawn from.
    """
    hidden_LD = np.zeros((len(picture), V))
    for i, digit in enumerate(sure):
        hidden_LD[i, 1] = int(digit)

    def greedy(index, logits_V):
        if log is not None:
            log.append((index, logits_V))
        allowed = [t for t in range(V) if t not in rule.banned]
        return max(allowed, key=lambda t: logits_V[t])

    return wavefront.fill(
        [token if letter == "v" else 4 for letter in picture],
        [letter == "o" for letter in picture],
        [letter == "v" for letter in picture],
        hidden_LD,
        embed_VD=EMBED_VD,
        head=lambda hidden_D: hidden_D,
        sampler_head=lambda left_CD, _, right_CD: 2 * left_CD.sum(0) + 3 * right_CD.sum(0),
        draw=greedy,
        measure=lambda logits_V, logprob: logits_V.max() + logprob,
        rule=rule,
    )


PLAIN = Rule(banned=BANNED)


@pytest.mark.parametrize(
    ("picture", "passes"),
    [
        ("vooooo", [[1], [2], [3], [4], [5]]),
        ("vooov", [[1, 3], [2]]),
        ("voov", [[1, 2]]),
        ("vovov", [[1, 3]]),
        ("oovoo", [[1, 3], [0, 4]]),
        ("vooxv", [[1], [2]]),
        ("vvxx", []),
        ("", []),
    ],
)
def test_waves_run_from_the_visible_tokens(picture, passes):
    done = fill(picture, PLAIN)
    assert done.passes == passes
    assert done.num_waves == len(passes)
    assert done.seeds == [] and done.gap == math.inf


def test_sub_waves_are_even_then_odd_canvas_positions_of_one_wave():
    done = fill("voov", Rule(is_alternating=True))
    assert (done.passes, done.num_waves) == ([[2], [1]], 1)
    done = fill("oooovoooo", Rule(is_alternating=True))
    assert (done.passes, done.num_waves) == ([[3, 5], [2, 6], [1, 7], [0, 8]], 4)
    done = fill("xvoooov", Rule(is_alternating=True))
    assert (done.passes, done.num_waves) == ([[2], [5], [4], [3]], 2)


def test_islands_that_nothing_visible_touches_get_the_surest_positions_as_seeds():
    # Two of the five unreached (0.4 * 5); the island at 7 gets one of its own, the last grows.
    rule = Rule(ratio=0.4, banned=BANNED)
    done = fill("oooxxxxooxvoo", rule, sure="231xxxx11x099".replace("x", "0"))
    assert done.seeds == [0, 1, 7]
    assert done.passes == [[0, 1, 7], [2, 8, 11], [12]]
    p = [math.exp(s) / (math.exp(s) + 3) for s in (1, 2, 3)]
    assert math.isclose(done.gap, 0), "7 and 8 are equally sure"
    assert math.isclose(done.logprob[1], math.log(math.exp(3) / (math.exp(3) + 4)))
    assert math.isclose(wavefront.certainty(np.array([0, 3.0, 0, 0, 9]), BANNED), p[2])
    assert math.isclose(fill("ooo", PLAIN, sure="231").gap, p[2] - p[1])


def test_spread_seeds_are_the_surest_of_equal_windows():
    assert wavefront.strata(range(7), 3) == [[0, 1, 2], [3, 4], [5, 6]]
    assert wavefront.strata([4, 5, 9], 3) == [[4], [5], [9]]
    rule = Rule(ratio=0.5, is_spread=True)
    assert fill("oooooo", rule, sure="798011").seeds == [1, 2, 4]
    # Windows cross islands; one that has no seed then gets its surest.
    assert fill("ooxoxo", Rule(ratio=0.5, is_spread=True), sure="120304").seeds == [1, 3, 5]


def test_open_position_is_not_visible_whatever_it_holds():
    keep = {"embed_VD": EMBED_VD, "head": lambda h: h, "draw": lambda i, x: 1, "rule": PLAIN}
    done = wavefront.fill(
        [3, 3], [True, True], [True, True], np.zeros((2, V)),
        sampler_head=lambda left, h, right: left[0] + right[0], measure=lambda x, p: p, **keep,
    )  # fmt: skip
    assert (done.canvas, done.passes) == ([1, 1], [[0], [1]])
