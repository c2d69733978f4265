"""Settings refuse what they cannot be, and no rule is ever taken for another."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import itertools
import math
import pkgutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_model

import dlm_jax
from dlm_jax.sampling.commit import CommitRule, Threshold
from dlm_jax.sampling.remask import RemaskRule
from dlm_jax.sampling.rules import BUILT_IN
from dlm_jax.sampling.transforms import LogitTransform, Temperature
from dlm_jax.settings import ABOVE_ZERO, INT_LIMIT, Rule, Setting, per_row, rule, static


def _registered() -> list[type]:
    """Every class of the package that `pytree` or `rule` made."""
    found = {}
    for module in pkgutil.walk_packages(dlm_jax.__path__, "dlm_jax."):
        if not module.name.endswith("__main__"):
            for cls in vars(importlib.import_module(module.name)).values():
                if inspect.isclass(cls) and vars(cls).get("identity") is cls:
                    found[cls] = None
    return list(found)


def _made(cls: type) -> Any:
    """One of them whose leaves, and all that is compiled in, are those of any other."""
    fields = [f for f in dataclasses.fields(cls) if f.name != "identity"]
    return cls(**{f.name: None if f.metadata.get("static") else 1.0 for f in fields})


# Identity


def test_no_two_classes_make_trees_of_the_same_structure():
    classes = _registered()
    assert len(classes) > 30
    trees = {cls: jax.tree.structure(_made(cls)) for cls in classes}
    arities = [tree.num_leaves for tree in trees.values()]
    assert max(map(arities.count, arities)) > 3, "some could be taken for each other"
    for a, b in itertools.combinations(classes, 2):
        assert trees[a] != trees[b], (a, b)
    for cls, tree in trees.items():
        assert tree == jax.tree.structure(_made(cls)), "one that is made again is the same"


# What a setting may be

KINDS = {
    "whole": Setting("whole", 3, "", low=1, high=9),
    "many": Setting("many", 3, ""),
    "real": Setting("real", 0.5, "", low=0.0, high=1.0),
    "above": Setting("above", 0.5, "", low=ABOVE_ZERO, high=2.0, remedy="use 1.0 for none"),
    "flag": Setting("flag", False, ""),
    "text": Setting("text", "a", ""),
    "choice": Setting("choice", "linear", "", choices={"linear": 1, "cosine": 2}),
    "parsed": Setting("parsed", (), "", parse=lambda value: tuple(int(x) for x in value)),
}


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("whole", 0, "whole=0 is outside [1, 9]; use 3, say"),
        ("whole", 2.0, "whole=2.0 is not an integer; use 3, say"),
        ("whole", True, "whole=True is not an integer; use 3, say"),
        ("whole", math.nan, "whole=nan is not an integer; use 3, say"),
        ("whole", [2], "whole=[2] is not an integer; use 3, say"),
        ("many", 2**31, "many=2147483648 is outside [-2147483647, 2147483647]; use 3, say"),
        ("real", -0.1, "real=-0.1 is outside [0, 1]; use 0.5, say"),
        ("real", 1.5, "real=1.5 is outside [0, 1]; use 0.5, say"),
        ("real", math.nan, "real=nan is outside [0, 1]; use 0.5, say"),
        ("real", True, "real=True is not a number; use 0.5, say"),
        ("real", "0.5", "real='0.5' is not a number; use 0.5, say"),
        ("above", 0.0, "above=0.0 is outside (0, 2]; use 1.0 for none"),
        ("above", 2.5, "above=2.5 is outside (0, 2]; use 1.0 for none"),
        ("flag", 1, "flag=1 is not a bool; use False, say"),
        ("flag", "no", "flag='no' is not a bool; use False, say"),
        ("text", 1, "text=1 is not a str; use 'a', say"),
        ("choice", "cosin", "choice='cosin' is not one of linear, cosine; did you mean 'cosine'?"),
        ("choice", 1, "choice=1 is not one of linear, cosine; did you mean 'linear'?"),
    ],
)
def test_a_value_of_another_type_or_out_of_range_is_refused_in_one_line(name, value, line):
    with pytest.raises(ValueError) as error:
        KINDS[name].checked(value)
    assert str(error.value) == line


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("whole", 1), ("whole", 9), ("whole", np.int64(4)), ("many", INT_LIMIT),
        ("many", -INT_LIMIT), ("real", 0.0), ("real", 1), ("real", np.float32(0.25)),
        ("above", ABOVE_ZERO), ("flag", True), ("text", ""), ("choice", "cosine"),
    ],
)  # fmt: skip
def test_a_value_within_its_range_is_kept(name, value):
    kept = KINDS[name].checked(value)
    assert kept == value
    if name in ("whole", "many"):
        assert type(kept) is int


def test_the_settings_of_a_request_fit_on_a_page():
    assert len(BUILT_IN.request_settings) <= 70


def test_a_choice_stands_for_its_value_and_is_named_by_it():
    choice = KINDS["choice"]
    assert (choice.resolved("cosine"), choice.named(2)) == (2, "cosine")
    assert (choice.resolved(7), choice.named(7)) == (7, 7)
    assert choice.column(["cosine", "linear"]).tolist() == [1, 0]
    assert KINDS["real"].column([0.5]).dtype == np.float32
    assert (KINDS["real"].resolved(0.3), KINDS["real"].named(0.3)) == (0.3, 0.3)
    measure = Setting("measure", "one", "", choices={"one": math.exp})
    assert measure.checked(math.exp) == "one"
    assert measure.checked(math.log) is math.log


# Rules of one's own


def _refused(line: str, **settings: Any) -> None:
    """Fails unless the call is refused before anything is compiled, in this line."""
    with pytest.raises(ValueError) as error:
        dlm_jax.generate(toy_model.MODEL, ["The "], gen_length=2, steps=2, **settings)
    assert str(error.value) == line


COUNT = Setting("own_count", 1, "holes that a step fills, >= 1", low=1)


@rule
class Leftmost(CommitRule):
    """The row's `count` leftmost holes."""

    count_B: jax.Array = per_row(COUNT)

    def select(self, state, context, proposal):
        rank_BL = jnp.cumsum(context.is_hole_BL, axis=1)
        return context.is_hole_BL & (rank_BL <= self.count_B[:, None]), state


KIND = (
    "has no kind; decorate it with dlm_jax.rule and subclass one of LogitTransform, CommitRule or "
    "NoiseRule, FillRule, RemaskRule, EditRule, KVCache"
)


def test_a_rule_of_the_wrong_kind_is_refused():
    @rule
    class Kindless(Rule):
        share_B: jax.Array = per_row(COUNT)

    class Plain:
        pass

    _refused(f"rule Kindless {KIND}", rules=[Kindless])
    _refused(
        f"rules has {Plain!r}, which is not a rule; pass modules, or classes decorated by "
        "dlm_jax.rule", rules=[Plain],
    )  # fmt: skip
    _refused(
        "rules is the class Leftmost; pass a list of classes or a module with classes",
        rules=Leftmost,
    )
    _refused("commit is a Temperature, which is not a CommitRule or NoiseRule object",
             commit=Temperature(0.5))  # fmt: skip
    _refused(
        "commit is the class Leftmost, which is not a CommitRule or NoiseRule object",
        commit=Leftmost,
    )
    _refused(
        "transforms has ... behind a rule; put it first, as in [..., f]",
        transforms=[Temperature(0.5), ...],
    )
    _refused("transforms is a Temperature; pass a list, such as [..., f]",
             transforms=Temperature(0.5))  # fmt: skip
    _refused(
        "transforms is a Threshold, which is not a LogitTransform object",
        transforms=[Threshold(0.5)],
    )
    _refused("remask is a Leftmost, which is not a RemaskRule object", remask=Leftmost(2))
    _refused("commit and order both select a rule; pass only one",
             commit=Threshold(0.5), order="random")  # fmt: skip


@pytest.mark.parametrize(
    ("base", "method"),
    [(LogitTransform, "apply"), (CommitRule, "select"), (RemaskRule, "select"),
     (dlm_jax.NoiseRule, "update"), (dlm_jax.FillRule, "propose"), (dlm_jax.EditRule, "select")],
)  # fmt: skip
def test_a_rule_without_what_its_kind_requires_is_refused(base, method):
    @rule
    class Lacking(base):
        count_B: jax.Array = per_row(COUNT)

    line = f"rule Lacking lacks {method}(), which {base.__name__} requires"
    _refused(line, rules=[Lacking])


def test_a_rule_whose_name_is_taken_is_refused():
    @rule
    class Another(Leftmost):
        name = "threshold"

    _refused("rule Another has the name 'threshold', which is already taken", rules=[Another])

    @rule
    class Copy(Leftmost):
        name = "leftmost"

    _refused("rule Copy has the name 'leftmost', which is already taken", rules=[Leftmost, Copy])
    assert (Leftmost.name, Copy.name) == ("leftmost", "leftmost")


@pytest.mark.parametrize("name", ["own_count", "threshold", "steps", "order"])
def test_a_setting_that_two_declare_differently_is_refused(name):
    @rule
    class Other(RemaskRule):
        share_B: jax.Array = per_row(Setting(name, 1, "something else"))

        def select(self, state, context):
            return context.is_fresh_BL, state

    _refused(
        f"setting {name!r} is declared twice with different definitions; share one Setting, or "
        "rename one", rules=[Leftmost, Other],
    )  # fmt: skip


def test_settings_of_ones_own_rules_are_checked_like_any():
    _refused("own_count=0 is outside [1, 2147483647]; use 1, say", rules=[Leftmost],
             order="leftmost", own_count=0)  # fmt: skip
    _refused("own_cuont=2 is not a sampling setting; did you mean 'own_count'?",
             rules=[Leftmost], own_cuont=2)  # fmt: skip
    with pytest.raises(ValueError, match="^own_count=2 is not a sampling setting; "):
        dlm_jax.generate(toy_model.MODEL, ["The "], own_count=2)
    _refused(f"order='leftmost' is not one of {', '.join(BUILT_IN.commit)}; "
             "did you mean 'left_to_right'?", order="leftmost")  # fmt: skip


def test_what_is_static_is_named_by_its_setting():
    mode = Setting("own_mode", "few", "", choices={"few": 1, "many": 3})

    @rule
    class ByMode(CommitRule):
        count: int = static(mode)
        count_B: jax.Array = per_row(COUNT)

        def select(self, state, context, proposal):
            return context.is_hole_BL, state

    assert ByMode().count == 1
    assert ByMode(3, 2).as_settings() == {"own_mode": "many", "own_count": 2}
    assert [s.name for s in ByMode.settings()] == ["own_mode", "own_count"]
