"""JSON schemas as patterns: every text is allowed, and what cannot be kept is refused by place."""

import json
import random
import re
from typing import Any

import outlines_core
import pytest

from benchmarks import schemas
from benchmarks.structure_masks import SCHEMA
from dlm_jax.inference.json_schema import regex_of_schema
from dlm_jax.inference.structure import characters

NULL = {"type": "null"}
PARTS = {"a": {"type": "integer"}, "b": {"type": "string"}, "c": NULL}
LAUGHS: dict[str, Any] = {
    str(place): {"anyOf": 2 * [{"$ref": f"#/$defs/{place + 1}"}]} for place in range(25)
}
LAUGHS["25"] = NULL
NODE = {"type": "object", "properties": {"n": {"$ref": "#/$defs/a"}}}


def test_random_texts_of_random_schemas_are_allowed():
    rng = random.Random(3)
    accepted = 0
    for kind, given in schemas.made_of(60, seed=7):
        try:
            assert not schemas.checked(kind, given, rng, 10), given
        except ValueError:
            continue
        accepted += 1
    assert accepted > 45


def _is_same(one, other):
    """Whether two automata accept the same texts, by walking both."""
    seen, todo = {}, [(one.start, other.start)]
    while todo:
        x, y = todo.pop()
        if x in seen:
            continue
        seen[x] = y
        if one.is_final_S[x] != other.is_final_S[y]:
            return False
        kinds = {(one.class_of[c], other.class_of[c]) for c in schemas.ALPHABET}
        todo += [(int(one.next_SK[x, k]), int(other.next_SK[y, m])) for k, m in kinds]
    return True


@pytest.mark.parametrize(
    "schema",
    [
        SCHEMA, {"type": "array"}, {"type": "number"}, {"type": ["integer", "null"]},
        {"type": "object", "properties": PARTS}, {"enum": ["é\n.", 1.5, None, {"a": [1]}]},
        {"type": "object", "properties": PARTS, "required": ["b"]},
        {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
        {"type": "array", "prefixItems": [{"type": "integer"}, NULL]},
        {"type": "string", "minLength": 2, "maxLength": 3}, {"type": "string", "format": "uuid"},
        {"type": "string", "pattern": "^[a-z]+$"}, {"$ref": "#/$defs/a", "$defs": {"a": NODE}},
        {"type": "object", "minProperties": 1, "additionalProperties": NULL},
        {"anyOf": [{"type": "object", "properties": {"a": NULL}, "required": ["a"]}, NULL]},
    ],
)  # fmt: skip
def test_texts_are_those_of_outlines(schema):
    other = outlines_core.json_schema.build_regex_from_schema(json.dumps(schema))
    found, known = (
        characters(pattern, schemas.ALPHABET, most_states=4000)
        for pattern in (regex_of_schema(schema), other)
    )
    assert _is_same(found, known)


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
        pattern = regex_of_schema(schema)
        hundredths = range(-4000, 14000, 100 if is_whole else 7)
        edges = [round(100 * edge) + step for edge in (low, high + 1) for step in (-1, 0, 1)]
        for value in [*hundredths, *([] if is_whole else edges)]:
            text = str(value // 100) if is_whole else f"{value / 100:.2f}"
            if text != "-0.00":
                allowed = schemas.allows(schema, json.loads(text), schema)
                assert (re.fullmatch(pattern, text) is not None) == allowed, (schema, text)


def test_recursion_ends_at_the_depth():
    pattern = regex_of_schema({"$ref": "#/$defs/a", "$defs": {"a": NODE}}, depth=1)
    assert re.fullmatch(pattern, '{"n": {"n": {}}}'.replace(': {"n": {}}', ": {}"))
    assert not re.fullmatch(pattern, '{"n": {"n": {}}}')


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"properties": {"a": {"not": {}}}}, "at #/properties/a: 'not' is not supported"),
        ({"items": {"type": "string", "format": "iri"}}, "at #/items: format 'iri'"),
        ({"anyOf": [NULL, {"type": "string", "pattern": "(?=a)"}]}, "at #/anyOf/1: ASSERT"),
        ({"type": "string", "pattern": "("}, "at #: pattern '\\('"),
        ({"$ref": "#/$defs/x"}, "'#/\\$defs/x' does not exist"),
        ({"$ref": "http://x"}, "is not in this schema"),
        ({"type": "array", "uniqueItems": True}, "'uniqueItems' is not supported"),
        ({"type": "integer", "multipleOf": 5}, "multipleOf is not supported"),
        ({"type": "integer", "minimum": "5"}, "minimum=\"5\" must be a number"),
        ({"type": "integer", "minimum": 5, "maximum": 4}, "no value matches"),
        ({"type": "text"}, "type 'text' is not supported"),
        ({"allOf": [{"pattern": "a"}, {"pattern": "b"}]}, "several 'pattern'"),
        ({"$ref": "#/$defs/a", "$defs": {"a": NODE | {"required": ["n"]}}}, "within 3 levels"),
        ({"type": "object", "minProperties": 2}, "minProperties=2 is not supported"),
        ({"$ref": "#/$defs/0", "$defs": LAUGHS}, "its expansion is too large"),
        ({"type": "string", "format": {}}, "at #: format {}"),
        ({"type": "object", "required": [1]}, "at #/required: must be a list of names"),
        ({"prefixItems": 5}, "at #/prefixItems: must be a list"),
        ({"anyOf": [5]}, "at #/anyOf/0: 5 is not a schema"),
        ({"maximum": float("inf")}, "must be a number"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_is_refused_by_place(schema, told):
    with pytest.raises(ValueError, match=told):
        regex_of_schema(schema)
