"""Every text of a schema's pattern is valid by another program, `jsonschema`."""

import decimal
import json
import random
import re
from typing import Any

import numpy as np
import pytest

from dlm_jax.structured.json_schema import regex_of_schema
from dlm_jax.structured.regex import compile_regex

jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")

# Characters that Python and ECMA-262 classify differently are among them.
ALPHABET = [chr(code) for code in range(1, 127)] + list("éß٣²\x85\xa0\u2028\u3000\ufeff😀")
NAMES = ["a", "b", "c", 'q"', "d e"]
CONSTANTS = [0, 1, True, False, None, 1.0, 1.5, -2, "", "a", 'x"\n', [1], [True], {"a": 1}, {}]
LARGE = [10**400, -(10**400), 2**53 + 1, 1e300, -1e300, 5e-324, 0.1 + 0.2, 10**19, 1e-7]
PATTERNS = [r"^\d+$", r"^\w{1,3}$", r"^[^\d]\s\S.$", "a|b", r"^[\W\d]+$", r"^[^\D][^\W]$", "x*?"]


def _number(rng: random.Random) -> Any:
    some = [rng.randint(-30, 30), round(rng.uniform(-30, 30), rng.randint(1, 3)), rng.choice(LARGE)]
    return rng.choice(some)


def _schema(rng: random.Random, depth: int = 2) -> Any:
    plain = ["number", "string", "constants", "types", "free"]
    kind = rng.choice(plain + ["object", "object", "array", "union", "all", "ref"] * (depth > 0))
    inner = [_schema(rng, depth - 1) for _ in range(3)] if depth else []

    def some(**keywords: Any) -> dict[str, Any]:
        return {name: value for name, value in keywords.items() if rng.random() < 0.4}

    if kind == "number":
        bounds = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
        return {"type": rng.choice(["integer", "number"])} | some(
            **{name: _number(rng) for name in bounds}
        )
    if kind == "string":
        lengths = {"minLength": rng.randint(0, 2), "maxLength": rng.choice([1, 3, 10_000])}
        return {"type": "string"} | rng.choice([
            some(**lengths), {"pattern": rng.choice(PATTERNS)},
            {"format": rng.choice(["date", "ipv4", "uuid", "email"])},
        ])  # fmt: skip
    if kind == "constants":
        return rng.choice([
            {"const": rng.choice(CONSTANTS)}, {"enum": rng.sample(CONSTANTS, 4)},
            {"enum": rng.sample(CONSTANTS, 5), "type": rng.choice(["integer", "object", "number"])},
        ])  # fmt: skip
    if kind == "types":
        return {"type": rng.sample(["string", "integer", "null", "boolean", "number"], 2)}
    if kind == "free":
        return rng.choice([True, {}, {"type": "object"}, {"type": "array"}, False])
    if kind == "array":
        return {"type": "array"} | some(
            items=inner[0], prefixItems=inner[1:], minItems=rng.randint(0, 2),
            maxItems=rng.choice([1, 3, 200]),
        )  # fmt: skip
    if kind == "union":
        return {rng.choice(["anyOf", "oneOf"]): inner} | some(type=["object", "string", "integer"])
    if kind == "all":
        return {"allOf": inner[:2]} | some(properties={"a": inner[2]}, additionalProperties=False)
    if kind == "ref":
        return {"$ref": "#/$defs/node"} | some(required=["a"])
    named = dict(zip(rng.sample(NAMES, 3), inner, strict=True))
    return {"type": "object"} | some(
        properties=named, required=rng.sample(NAMES, 2), minProperties=rng.randint(0, 3),
        maxProperties=rng.randint(0, 4),
        additionalProperties=rng.choice([False, True, {}, inner[0]]),
    )  # fmt: skip


def _words(automaton: Any, rng: random.Random, number: int) -> list[str]:
    """Texts of random walks that end soon after a final state."""
    is_final_S = automaton.is_final_S
    next_SA = np.array(
        [[automaton.after(c, s) for c in ALPHABET] for s in range(len(is_final_S))], np.int32
    )
    few_S = np.where(is_final_S, 0, np.iinfo(np.int32).max - 1)
    for _ in range(len(few_S)):
        better_S = np.minimum(few_S, few_S[next_SA].min(1) + 1)
        if (better_S == few_S).all():
            break
        few_S = better_S
    made = []
    for _ in range(number):
        state, text = automaton.start, ""
        while not (is_final_S[state] and (rng.random() < 0.3 or not next_SA[state].any())):
            kinds = np.flatnonzero(next_SA[state])
            if len(text) > 30:
                shorter = kinds[few_S[next_SA[state, kinds]] < few_S[state]]
                kinds = shorter if shorter.size else kinds
                if is_final_S[state]:
                    break
            kind = rng.choice(kinds.tolist())
            text, state = text + ALPHABET[kind], int(next_SA[state, kind])
        made.append(text)
    return made


def _broken(schema: Any, rng: random.Random, number: int) -> list[str]:
    """Texts of the pattern that are not valid."""
    automaton = compile_regex(regex_of_schema(schema), most_states=1 << 14)
    validator = jsonschema.Draft202012Validator(schema)
    return [
        text for text in _words(automaton, rng, number)
        if not validator.is_valid(json.loads(text))
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("seed", "number"), [(0, 40), pytest.param(1, 200, marks=pytest.mark.slow)]
)
def test_every_text_of_a_random_schema_is_valid(seed, number):
    rng = random.Random(seed)
    accepted, refusals = 0, []
    for _ in range(number):
        node = {
            "type": "object",
            "properties": {"a": _schema(rng, 0), "b": {"$ref": "#/$defs/node"}},
        }
        schema = _schema(rng)
        if isinstance(schema, dict):
            schema["$defs"] = {"node": node}
        try:
            broken = _broken(schema, rng, 12)
        except ValueError as error:
            refusals.append(str(error))
            continue
        assert not broken, json.dumps(schema)
        accepted += 1
    assert accepted > number // 3
    told = ("the schema cannot be used: at #", "the pattern has more than")
    assert all(one.startswith(told) for one in refusals)


def test_every_text_is_valid_where_keywords_of_several_schemas_meet():
    closed = {"properties": {"a": {"type": "integer"}}, "additionalProperties": False}
    part = {"properties": {"a": {"type": "integer"}}}
    rng = random.Random(0)
    for schema in (
        {"type": "object", "allOf": [part, {"properties": {"b": {}, "a": {"minimum": 5}}}]},
        {"type": "object", **part, "anyOf": [{"properties": {"b": {}}}, {"required": ["a"]}]},
        {"type": "object", **closed, "anyOf": [{"required": ["a"]}, {"maxProperties": 2}]},
        {"type": "array", "allOf": [{"minItems": 1}, {"items": {"type": "integer"}}]},
        {"type": "number", "exclusiveMinimum": 5, "exclusiveMaximum": 6},
        {"type": "number", "minimum": 2**53 + 1},
        {"allOf": [{"enum": [1, "a"]}, {"type": "string"}]},
        {"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 1},
        {"oneOf": [{"type": "string"}, {"type": "null"}, {"type": "array", "items": closed}]},
        {"oneOf": [{"type": "object", "properties": {"a": {"const": n}}, "required": ["a"]}
                   for n in range(3)]},
    ):  # fmt: skip
        assert not _broken(schema, rng, 60), schema


@pytest.mark.parametrize("bound", [5, 0, -3, 0.5, 999.5, 2**53 + 1, 123456.789])
def test_a_fraction_that_a_float_rounds_to_an_excluded_bound_does_not_match(bound):
    for name, step in (("exclusiveMinimum", 1), ("exclusiveMaximum", -1), ("minimum", 0)):
        schema = {"type": "number", name: bound}
        pattern = regex_of_schema(schema)
        whole, _, rest = str(bound).partition(".")
        for size in range(30):
            near = decimal.Decimal(f"{whole}.{rest or 0}{'0' * size}")
            with decimal.localcontext(prec=60):
                near += step * decimal.Decimal(1).scaleb(near.as_tuple().exponent)
            if re.fullmatch(pattern, str(near)):
                jsonschema.validate(json.loads(str(near)), schema)
        inside = [bound + step * n for n in (1, 2, 0.5)] if abs(bound) < 2**53 else [bound + step]
        for value in inside if step else [bound]:
            assert re.fullmatch(pattern, str(value)), (schema, value)
