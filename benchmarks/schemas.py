"""Counts the random schemas and expressions that become patterns, and checks their texts.

    python -m benchmarks.schemas

Texts are random walks over the automaton of a pattern. `allows` is a validator of JSON Schema for
the keywords of `random_schema`; expressions are checked by `re` and `regex`.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import regex

from dlm_jax.structured.json_schema import regex_of_schema
from dlm_jax.structured.regex import ByteAutomaton, compile_regex

ALPHABET = [chr(code) for code in (10, *range(32, 127))] + list("éЖ中ß")
NAMES = ["name", "age", "tags", "next", "kind", "a b"]
MOST_STATES = 4094


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """A random realistic schema; some have constraints that no regular expression can express."""
    kinds = ["integer", "number", "string", "boolean", "null", "enum", "const"]
    kinds += ["object", "array", "union", "ref", "all", "typed"] * (depth > 0)
    kind = rng.choice(kinds)
    if kind in ("integer", "number"):
        low = rng.randint(-20, 200)
        low, high = low, low + rng.randint(0, 300)
        if kind == "number":
            low, high = round(low + rng.random(), 2), round(high + 1 + rng.random(), 2)
        made: dict[str, Any] = {"type": kind}
        if rng.random() < 0.6:
            made[rng.choice(["minimum", "exclusiveMinimum"])] = low
        if rng.random() < 0.6:
            made[rng.choice(["maximum", "exclusiveMaximum"])] = high + 2
        if rng.random() < 0.05:
            made["multipleOf"] = 5
        return made
    if kind == "string":
        return {"type": "string"} | rng.choice([
            {}, {"minLength": 2}, {"minLength": 1, "maxLength": 5}, {"format": "date"},
            {"format": "date-time"}, {"format": "email"}, {"format": "uuid"}, {"format": "ipv4"},
            {"pattern": "^[A-Z][a-z]{2,5}$"}, {"pattern": r"^\p{Lu}\p{Ll}+$"},
            {"pattern": r"^[^a]\S.$"}, {"pattern": r"^(red|green)-\d+$"}, {"format": "iri"},
            {"pattern": r"^(?!x)y"},
        ])  # fmt: skip
    if kind in ("boolean", "null"):
        return {"type": kind}
    if kind == "enum":
        return {"enum": rng.sample(["red", "blue", 3, None, True, 'x"y', 1.5], 3)}
    if kind == "const":
        return {"const": rng.choice(["on", {"a": [1, 2]}, 7])}
    if kind == "array":
        some: dict[str, Any] = {"type": "array", "items": random_schema(rng, depth - 1)}
        extra = [{}, {"minItems": 1}, {"maxItems": 3}, {"minItems": 2, "maxItems": 4}]
        return some | rng.choice([*extra, *extra, {"uniqueItems": True}])
    if kind == "union":
        return {"anyOf": [random_schema(rng, depth - 1) for _ in range(2)]}
    if kind == "typed":
        return {"type": rng.sample(["string", "integer", "null", "boolean"], 2)}
    if kind == "all":
        return {"allOf": [{"type": "integer", "minimum": 5}, {"maximum": rng.randint(5, 90)}]}
    if kind == "ref":
        inner = {"type": "object", "required": ["v"], "properties": {
            "v": random_schema(rng, 0), "next": {"$ref": "#/$defs/node"}}}  # fmt: skip
        return {"$ref": "#/$defs/node", "$defs": {"node": inner}}
    names = rng.sample(NAMES, rng.randint(1, 4))
    parts = {name: random_schema(rng, depth - 1) for name in names}
    needed = [name for name in names if rng.random() < 0.5]
    return {"type": "object", "properties": parts, "required": needed} | rng.choice(
        [{}, {"additionalProperties": False}, {"title": "Record"}]
    )


def lifted(schema: Any, found: dict[str, Any]) -> Any:
    """The schema with all definitions in one place, under other names."""
    if isinstance(schema, list):
        return [lifted(part, found) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if "$defs" in schema:
        name = f"node{len(found)}"
        found[name] = None
        text = json.dumps(schema["$defs"]["node"]).replace("#/$defs/node", f"#/$defs/{name}")
        found[name] = json.loads(text)
        return {"$ref": f"#/$defs/{name}"}
    return {name: lifted(part, found) for name, part in schema.items()}


def random_expression(rng: random.Random, depth: int = 3) -> str:
    """A random expression; some have constructs that `re` or the automaton does not support."""
    if depth == 0 or rng.random() < 0.2:
        return rng.choice(["a", "[a-f]", r"\d", ".", r"[^x]", r"\w", "b", r"\p{Lu}", r"[\p{Nd}_]"])
    way = rng.randrange(8)
    inner = [random_expression(rng, depth - 1) for _ in range(2)]
    ways = [
        "".join(inner), f"({inner[0]}|{inner[1]})", f"({inner[0]})*", f"(?:{inner[0]})+",
        f"({inner[0]}){{1,3}}", f"^{inner[0]}$" if depth == 3 else inner[0],
        f"({inner[0]})?{inner[1]}", rng.choice(
            [f"(?={inner[0]})a", rf"({inner[0]})\1", *["".join(inner)] * 2]
        ),
    ]  # fmt: skip
    return ways[way]


def words(
    automaton: ByteAutomaton, rng: random.Random, number: int, alphabet: Sequence[str] = ALPHABET
) -> list[str]:
    """Texts of random walks that end soon after a final state."""
    is_final_S = automaton.is_final_S
    next_SA = np.array(
        [[automaton.after(c, s) for c in alphabet] for s in range(len(is_final_S))], np.int32
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
            text, state = text + alphabet[kind], int(next_SA[state, kind])
        made.append(text)
    return made


def allows(schema: Any, value: Any, root: Any) -> bool:
    """Whether a schema of `random_schema` allows a value."""
    if "$ref" in schema:
        return allows(root["$defs"][schema["$ref"].rsplit("/", 1)[1]], value, root)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    kinds: dict[str, Callable[[], bool]] = {
        "integer": lambda: is_number and float(value).is_integer(), "number": lambda: is_number,
        "string": lambda: isinstance(value, str), "boolean": lambda: isinstance(value, bool),
        "null": lambda: value is None, "object": lambda: isinstance(value, dict),
        "array": lambda: isinstance(value, list),
    }  # fmt: skip
    names = schema.get("type", [])
    names = [names] if isinstance(names, str) else names
    fits = not names or any(kinds[name]() for name in names)
    fits &= "enum" not in schema or any(value == one for one in schema["enum"])
    fits &= "const" not in schema or value == schema["const"]
    fits &= "anyOf" not in schema or any(allows(one, value, root) for one in schema["anyOf"])
    fits &= all(allows(one, value, root) for one in schema.get("allOf", []))
    if is_number:
        fits &= schema.get("minimum", value) <= value <= schema.get("maximum", value)
        fits &= "exclusiveMinimum" not in schema or value > schema["exclusiveMinimum"]
        fits &= "exclusiveMaximum" not in schema or value < schema["exclusiveMaximum"]
    if isinstance(value, str):
        fits &= schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 10**9)
        fits &= "pattern" not in schema or regex.search(schema["pattern"], value) is not None
    if isinstance(value, list):
        fits &= schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", 10**9)
        fits &= all(allows(schema["items"], one, root) for one in value if "items" in schema)
    if isinstance(value, dict):
        parts = schema.get("properties", {})
        fits &= set(schema.get("required", [])) <= set(value)
        fits &= all(allows(parts[name], one, root) for name, one in value.items() if name in parts)
        fits &= schema.get("additionalProperties") is not False or set(value) <= set(parts)
    return fits


def made_of(number: int, seed: int = 0) -> list[tuple[str, Any]]:
    """Pairs of a kind and a text or schema; most are schemas."""
    rng = random.Random(seed)
    found: list[tuple[str, Any]] = []
    for place in range(number):
        if place % 7 < 5:
            nodes: dict[str, Any] = {}
            schema = lifted(random_schema(rng), nodes)
            found.append(("schema", schema | ({"$defs": nodes} if nodes else {})))
        else:
            found.append(("expression", random_expression(rng)))
    return found


def checked(kind: str, given: Any, rng: random.Random, number: int) -> list[str]:
    """Random texts of the automaton that the schema or expression does not allow.

    Raises:
      ValueError: the input is refused.
    """
    pattern = regex_of_schema(given) if kind == "schema" else given
    texts = words(compile_regex(pattern, most_states=MOST_STATES), rng, number)

    def fits(text: str) -> bool:
        if kind == "schema":
            try:
                return allows(given, json.loads(text), given)
            except ValueError:
                return False
        return regex.fullmatch(given, text) is not None

    return [text for text in texts if not fits(text)]


def main() -> None:
    """Prints the counts, and the reasons for refusals."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=350)
    parser.add_argument("--texts", type=int, default=20)
    args = parser.parse_args()
    rng = random.Random(1)
    counts: Counter[tuple[str, str]] = Counter()
    for kind, given in made_of(args.number):
        try:
            wrong = checked(kind, given, rng, args.texts)
        except ValueError as error:
            counts[kind, "refused"] += 1
            print(f"refused: {str(error)[:120]}", flush=True)
            continue
        counts[kind, "accepted"] += 1
        counts[kind, "texts"] += args.texts
        counts[kind, "not allowed"] += len(wrong)
        for text in wrong[:1]:
            print(f"not allowed by {given}: {text!r}")
    print("| kind | accepted | refused | texts | not allowed |")
    print("| --- " * 5 + "|")
    for kind in ("schema", "expression"):
        cells = [counts[kind, name] for name in ("accepted", "refused", "texts", "not allowed")]
        print(f"| {kind} | {' | '.join(map(str, cells))} |")


if __name__ == "__main__":
    main()
