"""JSON schemas as patterns: every text is allowed, and what cannot be kept is refused by place."""

import json
import random
import re
from typing import Any

import pytest

from dlm_jax.structured.json_schema import regex_of_schema
from dlm_jax.structured.regex import compile_regex

jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")

NULL = {"type": "null"}
PARTS = {"a": {"type": "integer"}, "b": {"type": "string"}, "c": NULL}
LAUGHS: dict[str, Any] = {
    str(place): {"anyOf": 2 * [{"$ref": f"#/$defs/{place + 1}"}]} for place in range(25)
}
LAUGHS["25"] = NULL
CLOSED = {"properties": {"a": {}}, "additionalProperties": False}
NODE = {"type": "object", "properties": {"n": {"$ref": "#/$defs/a"}}}


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
    pattern = regex_of_schema({"$ref": "#/$defs/a", "$defs": {"a": NODE}}, depth=1)
    assert re.fullmatch(pattern, '{"n": {"n": {}}}'.replace(': {"n": {}}', ": {}"))
    assert not re.fullmatch(pattern, '{"n": {"n": {}}}')


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"properties": {f"name_{n}": {"type": "string"} for n in range(40)}},
         '{"name_3": "a", "name_31": ""}'),
        ({"type": "string", "maxLength": 10_000}, f'"{"a" * 400}"'),
        ({"type": "string", "maxLength": 10**400}, f'"{"a" * 400}"'),
        ({"type": "array", "maxItems": 200, "items": {"type": "integer"}}, str([7] * 200)),
        ({"type": "array", "maxItems": 200, "items": {"properties": {
            f"name_{n}": {"type": ["string", "number"]} for n in range(20)}}},
         '[{"name_3": "a"}, {}, {}]'),
        ({"type": "object", "additionalProperties": {}}, '{"a": [1, "b"], "c": {"d": null}}'),
        ({"properties": {f"name_{n}": {"type": "object"} for n in range(10)}},
         '{"name_3": {"a": [1], "b": {}}}'),
        ({"type": "number", "minimum": -1.7e308, "maximum": 1.7e308}, "-1.5"),
        ({"type": "integer", "minimum": 0, "maximum": 2**63 - 1}, "9223372036854775807"),
        ({"type": "integer", "maximum": 10**400}, "1" * 20),
        ({"type": "array", "uniqueItems": False}, "[1, 1]"),
    ],
)  # fmt: skip
def test_ordinary_schemas_have_automata(schema, text):
    assert compile_regex(regex_of_schema(schema), most_states=16_000).accepts(text)
    assert re.fullmatch(regex_of_schema(schema), text)


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"properties": {"a": {"not": {}}}}, "at #/properties/a: 'not' is not supported"),
        ({"items": {"type": "string", "format": "iri"}}, "at #/items: format 'iri'"),
        ({"anyOf": [NULL, {"type": "string", "pattern": "(?=a)"}]}, "at #/anyOf/1: pattern"),
        ({"type": "string", "pattern": "("}, "at #: pattern '\\('"),
        ({"$ref": "#/$defs/x"}, "'#/\\$defs/x' does not exist"),
        ({"$ref": "http://x"}, "is not in this schema"),
        ({"type": "array", "uniqueItems": True}, "'uniqueItems' is not supported"),
        ({"type": "integer", "multipleOf": 5}, "multipleOf is not supported"),
        ({"type": "integer", "minimum": "5"}, "minimum=5 must be a number"),
        ({"type": "integer", "minimum": 5, "maximum": 4}, "no value matches"),
        ({"type": "text"}, "type 'text' is not supported"),
        ({"allOf": [{"pattern": "a"}, {"pattern": "b"}]}, "several 'pattern'"),
        ({"$ref": "#/$defs/a", "$defs": {"a": NODE | {"required": ["n"]}}}, "within 3 levels"),
        ({"type": "object", "minProperties": 2}, "minProperties=2 is not supported"),
        ({"$ref": "#/$defs/0", "$defs": LAUGHS}, "its expansion is too large"),
        ({"type": "string", "format": {}}, "at #: format {}"),
        ({"type": "object", "required": [1]}, "at #: properties and required must have names"),
        ({"prefixItems": 5}, "at #: a keyword is malformed"),
        ({"anyOf": [5]}, "at #/anyOf/0: 5 is not a schema"),
        ({"maximum": float("inf")}, "must be a number"),
        ({"minimum": True}, "minimum=True must be a number"),
        ({"minimum": 10**400}, "minimum=1000.* has more than 20 digits"),
        ({"minLength": 10**400}, "minLength=1000.* is too large; use 4000"),
        ({"maxItems": -(10**400)}, "must be a non-negative integer"),
        ({"const": float("nan")}, "the constant nan is not JSON"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf/0 and oneOf/1 may both"),
        ({"allOf": [CLOSED, {"required": ["b"]}]}, "no value matches"),
        ({"allOf": [{"const": 1}, {"const": True}]}, "several 'const' for one value"),
        ({"const": True, "enum": [1]}, "const beside enum is not supported"),
        ({"allOf": [CLOSED, {"properties": {"b": {}}}]}, "'additionalProperties' beside other"),
        ({"type": "array", "items": {}, "allOf": [{"prefixItems": [{}]}]}, "'items' beside other"),
        ({"minProperties": 1, "additionalProperties": False}, "no value matches"),
        ({"properties": {"a": {"$id": "b"}}}, "'\\$id' below the root"),
        ({"pattern": "(?i)a"}, "flags are not supported"),
        ({"pattern": "a{,3}"}, "'{,3}' differs in"),
        ({"pattern": "[]a]"}, "differs in Python and ECMA-262"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_is_refused_by_place(schema, told):
    with pytest.raises(ValueError, match=told):
        regex_of_schema(schema)
