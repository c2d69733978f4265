"""JSON schemas: every text is valid by `jsonschema`, and the rest is refused by place."""

import decimal
import json
import random
import re
import time
from typing import Any

import numpy as np
import pytest
from byte_automata import accepts, after

from dlm_jax.structured.json_schema import regex_of_schema
from dlm_jax.structured.regex import compile_regex

jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")

NULL = {"type": "null"}
LAUGHS: dict[str, Any] = {
    str(place): {"anyOf": 2 * [{"$ref": f"#/$defs/{place + 1}"}]} for place in range(25)
}
LAUGHS["25"] = NULL
NODE = {"type": "object", "properties": {"n": {"$ref": "#/$defs/a"}}}
ALPHABET = [chr(code) for code in range(1, 127)] + list("éß٣²\x85\xa0\u2028\u3000\ufeff😀")
NAMES = ["a", "b", "c", 'q"', "d e"]
CONSTANTS = [0, 1, True, False, None, 1.0, 1.5, -2, "", "a", 'x"\n', [1], [True], {"a": 1}, {}]
LARGE = [10**400, -(10**400), 2**53 + 1, 1e300, -1e300, 5e-324, 0.1 + 0.2, 10**19, 1e-7]


def _number(rng: random.Random) -> Any:
    some = [rng.randint(-30, 30), round(rng.uniform(-30, 30), rng.randint(1, 3)), rng.choice(LARGE)]
    return rng.choice(some)


def _schema(rng: random.Random, depth: int = 2) -> Any:
    plain = ["number", "string", "constants", "types", "free"]
    kind = rng.choice(plain + ["object", "object", "array", "union", "ref"] * (depth > 0))
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
            some(**lengths), {"format": rng.choice(["date", "ipv4", "uuid", "email"])},
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
            items=inner[0], minItems=rng.randint(0, 2), maxItems=rng.choice([1, 3, 200]),
        )  # fmt: skip
    if kind == "union":
        return {"anyOf": inner} if rng.random() < 0.8 else {"allOf": inner[:1]}
    if kind == "ref":
        return {"$ref": "#/$defs/node"} | some(title="a")
    named = dict(zip(rng.sample(NAMES, 3), inner, strict=True))
    return {"type": "object"} | some(
        properties=named, required=rng.sample(NAMES, 2),
        additionalProperties=rng.choice([False, True, {}, inner[0]]),
    )  # fmt: skip


def _words(automaton: Any, rng: random.Random, number: int) -> list[str]:
    """Texts of random walks that end soon after a final state."""
    is_final_S = automaton.is_final_S
    next_SA = np.array(
        [[after(automaton, c, s) for c in ALPHABET] for s in range(len(is_final_S))], np.int32
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


@pytest.mark.parametrize("bound", [5, 0, -3, 0.5, 999.5, 10**15 - 9, 123456.789])
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
        inside = [bound + step * n for n in (1, 2, 0.5)] if abs(bound) < 10**9 else [bound + step]
        for value in inside if step else [bound]:
            assert re.fullmatch(pattern, str(value)), (schema, value)


@pytest.mark.parametrize("seed", range(3))
def test_numbers_are_those_within_the_bounds(seed):
    rng = random.Random(seed)
    for is_whole in (True, False) * 8:
        low, high = sorted(round(rng.uniform(-30, 130), rng.randint(0, 2)) for _ in range(2))
        if is_whole:
            low, high = int(low), int(high) + 1
        schema = {rng.choice(["minimum", "exclusiveMinimum"]): low, "type": "number"}
        schema |= {rng.choice(["maximum", "exclusiveMaximum"]): high + 1}
        schema["type"] = "integer" if is_whole else "number"
        pattern, validator = regex_of_schema(schema), jsonschema.Draft202012Validator(schema)
        hundredths = range(-4000, 14000, 100 if is_whole else 7)
        edges = [round(100 * edge) + step for edge in (low, high + 1) for step in (-1, 0, 1)]
        for value in [*hundredths, *([] if is_whole else edges)]:
            text = str(value // 100) if is_whole else f"{value / 100:.2f}"
            if text != "-0.00":
                allowed = validator.is_valid(json.loads(text))
                assert (re.fullmatch(pattern, text) is not None) == allowed, (schema, text)


def test_recursion_ends_at_the_depth():
    pattern = regex_of_schema({"$ref": "#/$defs/a", "$defs": {"a": NODE}})
    assert re.fullmatch(pattern, '{"n": {"n": {"n": {}}}}')
    assert not re.fullmatch(pattern, '{"n": {"n": {"n": {"n": {}}}}}')


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"properties": {f"name_{n}": {"type": "string"} for n in range(40)}},
         '{"name_3": "a", "name_31": ""}'),
        ({"type": "string", "maxLength": 10_000}, f'"{"a" * 400}"'),
        ({"type": "array", "maxItems": 200, "items": {"type": "integer"}}, str([7] * 200)),
        ({"type": "array", "maxItems": 200, "items": {"properties": {
            f"name_{n}": {"type": ["string", "number"]} for n in range(20)}}},
         '[{"name_3": "a"}, {}, {}]'),
        ({"type": "object", "additionalProperties": {}}, '{"a": [1, "b"], "c": {"d": null}}'),
        ({"properties": {f"name_{n}": {"type": "object"} for n in range(10)}},
         '{"name_3": {"a": [1], "b": {}}}'),
        ({"type": "number", "minimum": -1.7e308, "maximum": 1.7e308}, "-1.5"),
        ({"type": "array", "uniqueItems": False}, "[1, 1]"),
    ],
)  # fmt: skip
def test_ordinary_schemas_have_automata(schema, text):
    assert accepts(compile_regex(regex_of_schema(schema), most_states=16_000), text)
    assert re.fullmatch(regex_of_schema(schema), text)


@pytest.mark.parametrize("number", [300, 40_000])
def test_many_names_take_time_that_grows_with_their_number(number):
    names = [f"name_{n}" for n in range(number)]
    start = time.process_time()
    objects = {"properties": dict.fromkeys(names, NULL)}
    for schema in (objects, objects | {"required": names}, {"enum": names}):
        if number > 10_000:
            with pytest.raises(ValueError, match="its expansion is too large"):
                regex_of_schema(schema)
        else:
            assert "name_299" in regex_of_schema(schema)
    assert time.process_time() - start < 10


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": 3}, {"type": "number"}, {"type": ["null", "boolean"]},
        {"type": "string", "minLength": 2}, {"type": "string"},
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["int64", "double", "password", "file-path"])
def test_a_format_that_json_schema_does_not_define_has_no_effect(schema, name):
    assert regex_of_schema(schema | {"format": name}) == regex_of_schema(schema)


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"properties": {"a": {"not": {}}}}, "at #/properties/a: 'not' is not supported"),
        ({"items": {"type": "string", "format": "iri"}}, "at #/items: format 'iri'"),
        ({"anyOf": [NULL, {"pattern": "a"}]}, "at #/anyOf/1: 'pattern' is .*; use format or enum"),
        ({"format": "date", "maxLength": 9}, "at #: a format and lengths cannot be combined"),
        ({"$ref": "#/$defs/x"}, "'#/\\$defs/x' does not exist"),
        ({"$ref": "http://x"}, "is not in this schema"),
        ({"type": "array", "uniqueItems": True}, "'uniqueItems' is not supported"),
        ({"type": "integer", "multipleOf": 5}, "'multipleOf' is not supported"),
        ({"type": "integer", "minimum": "5"}, "minimum=5 must be a number"),
        ({"type": "integer", "minimum": 5, "maximum": 4}, "no value matches"),
        ({"type": "array", "minItems": 3, "maxItems": 1}, "no value matches"),
        ({"type": "text"}, "type 'text' is not supported"),
        ({"allOf": [{"minLength": 1}, {"maxLength": 2}]}, "several parts"),
        ({"$ref": "#/$defs/a", "$defs": {"a": NODE | {"required": ["n"]}}}, "within 3 levels"),
        ({"$ref": "#/$defs/0", "$defs": LAUGHS}, "its expansion is too large"),
        ({"type": "string", "format": {}}, "at #: format {}"),
        ({"type": "object", "required": [1]}, "at #: properties and required must have names"),
        ({"prefixItems": [{}]}, "'prefixItems' is not supported"),
        ({"properties": 5}, "at #: a keyword is malformed"),
        ({"anyOf": [5]}, "at #/anyOf/0: 5 is not a schema"),
        ({"minimum": True}, "minimum=True must be a number"),
        ({"minimum": 10**400}, "minimum=1000.* has more than 15 digits"),
        ({"minLength": 10**400}, "minLength=1000.* is too large; use 4000"),
        ({"minLength": 1.5}, "must be a non-negative integer"),
        ({"maxItems": -(10**400)}, "must be a non-negative integer"),
        ({"const": float("nan")}, "at #: a keyword is malformed .*JSON"),
        ({"oneOf": [NULL]}, "'oneOf' is not supported; use anyOf"),
        ({"const": True, "enum": [1]}, "beside .* is not supported"),
        ({"anyOf": [{}], "type": "object"}, "'type' beside anyOf is not supported"),
        ({"$ref": "#", "required": ["a"]}, "'required' beside \\$ref is not supported"),
        ({"properties": {"a": {"$id": "b"}}}, "'\\$id' is not supported"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_is_refused_by_place(schema, told):
    with pytest.raises(ValueError, match=told):
        regex_of_schema(schema)
