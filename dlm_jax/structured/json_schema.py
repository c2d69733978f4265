r"""JSON schemas (JSON Schema 2020-12) as regular expressions.

Every text of an expression is valid under its schema, but not every valid text matches: properties
are in the order of the schema, and no other properties are written. If the expression for a schema
is too large for an automaton, large maximum counts and the nesting of free values are reduced. What
cannot be kept raises an error with the path of the keyword in the schema.

Character classes in ``pattern`` match what both Python and ECMA-262 match: ``\d`` and ``\w`` are
ASCII.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from dlm_jax.structured.regex import Token, code_of, items_of, tokens_of

DEPTH = 3
"""Maximum depth to which a recursive reference is expanded."""

_SIZES = (
    (4000, 2), (1000, 2), (400, 2), (250, 2), (120, 2), (60, 2), (60, 1), (30, 1), (30, 0), (15, 0),
    (7, 0), (3, 0), (1, 0),
)  # fmt: skip
"""Largest maximum count and nesting of free values; the first pair with a small expression is
used."""
_MOST_POSITIONS = 4200
_MOST_PARTS = 1 << 14
_MOST_LINKS = 32
_LONGEST = 1 << 15
_LARGEST = 10**20
_DIGITS = 15  # of decimal numbers that floats tell apart
_UNSAFE = r'"\\\x00-\x1f'
_CHARACTER = r'([^"\\\x00-\x1F\x7F-\x9F]|\\["\\/bfnrt])'
_STRING = f'"{_CHARACTER}*"'
_INTEGER = "(-)?(0|[1-9][0-9]*)"
_NUMBER = rf"({_INTEGER})(\.[0-9]+)?([eE][+-][0-9]+)?"
_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_NAME = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_TIME = "(2[0-3]|[01][0-9]):[0-5][0-9]:[0-5][0-9]"
_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_DATE = (
    f"{_YEAR}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])"
    "|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_ZONE = "(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_FORMATS = {
    "date": _DATE,
    "time": rf"{_TIME}(\.[0-9]+)?{_ZONE}",
    "date-time": rf"{_DATE}T{_TIME}(\.[0-9]+)?{_ZONE}",
    "duration": r"P([0-9]+D(T[0-9]+H)?|[0-9]+W|T([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M|[0-9]+S))",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "email": rf"[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@{_NAME}(\.{_NAME})+",
    "hostname": rf"{_NAME}(\.{_NAME})*",
    "ipv4": rf"{_OCTET}(\.{_OCTET}){{3}}",
    "ipv6": "([0-9a-f]{1,4}:){7}[0-9a-f]{1,4}",
    "uri": rf"https?://{_NAME}(\.{_NAME})*(:[0-9]{{1,4}})?(/[A-Za-z0-9._~-]*)*(\?[A-Za-z0-9=&_-]*)?",
}
_OTHER_FORMATS = {
    *("idn-email", "idn-hostname", "iri", "iri-reference", "json-pointer", "regex"),
    *("relative-json-pointer", "uri-reference", "uri-template"),
}
"""Formats of JSON Schema that are not supported. Others, such as ``password``, have no effect."""
_NOTES = {
    *("$schema", "$id", "$comment", "$defs", "$anchor", "definitions", "title", "description"),
    *("default", "examples", "example", "deprecated", "readOnly", "writeOnly", "discriminator"),
    *("contentMediaType", "contentEncoding"),
}
_JOINED = ("properties", "additionalProperties", "items", "prefixItems")
_OF_TYPE = {
    "object": ["properties", "required", "additionalProperties", "minProperties", "maxProperties"],
    "array": ["items", "prefixItems", "minItems", "maxItems"],
    "string": ["minLength", "maxLength", "pattern", "format"],
    "integer": ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"],
    "number": ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"],
    "boolean": [],
    "null": [],
}


def regex_of_schema(schema: Mapping[str, Any] | bool, *, depth: int = DEPTH) -> str:
    """Returns a regular expression for texts that a JSON schema allows.

    Args:
      schema: the schema.
      depth: maximum depth to which a recursive reference is expanded.

    Raises:
      ValueError: the schema has an unsupported keyword or value, or allows no text.
    """
    try:
        for most, any_depth in _SIZES:
            is_last = (most, any_depth) == _SIZES[-1]
            try:
                pattern = _SchemaWriter(schema, depth, most, any_depth).value(schema, "#")
            except _TooLong:
                if is_last:
                    raise
                continue
            if pattern is None:
                raise _refused("#", f"no value matches within {depth} levels")
            if is_last or _positions(pattern) <= _MOST_POSITIONS:
                return pattern
    except RecursionError:
        raise _refused("#", "it is nested too deeply") from None
    raise AssertionError


def _positions(pattern: str) -> int:
    """An estimate of the states of an automaton, without the separators in groups ``(?:..)``."""
    totals, is_counted, last = [0], [True], 0
    for kind, text, _ in tokens_of(pattern):
        if kind == "open":
            totals.append(0)
            is_counted.append(text == "(")
        elif kind == "close":
            last = totals.pop() * is_counted.pop()
            totals[-1] += last
        elif kind == "times":
            numbers = [int(number) for number in re.findall(r"\d+", text)]
            totals[-1] += last * (max(numbers, default=1) - 1)
        elif kind not in ("or", "behind"):
            # A character outside ASCII has states between its bytes.
            last = 8 if kind == "any" or text.startswith("[^") else 1
            totals[-1] += last
    return totals[0]


class _TooLong(ValueError):
    """Raised for a pattern that smaller maximum counts may shorten."""


def _refused(where: str, why: str) -> ValueError:
    return ValueError(f"the schema cannot be used: at {where}: {why}"[:300])


def _shown(value: Any) -> str:
    """The beginning of a value as JSON, for a message."""
    try:
        return json.dumps(value)[:60]
    except (TypeError, ValueError):  # also an integer of more digits than Python writes
        return f"a value of type {type(value).__name__}"


class _SchemaWriter:
    """Writes expressions for the parts of a schema; None for a part that matches no text within the
    maximum depth. Maximum counts above `most` become `most`, and free values are nested up to
    `any_depth` levels.
    """

    def __init__(self, root: Any, depth: int, most: int, any_depth: int):
        self._root, self._depth, self._most, self._any_depth = root, depth, most, any_depth
        self._followed: list[str] = []
        self._visited = 0

    def value(self, schema: Any, where: str) -> str | None:
        self._visit(where)
        pattern = self._value(schema, where)
        if len(pattern or "") > _LONGEST:
            raise _TooLong(str(_refused(where, "its expansion is too large; use fewer references")))
        return pattern

    def _visit(self, where: str, parts: int = 1) -> None:
        self._visited += parts
        if self._visited > _MOST_PARTS:
            raise _refused(where, "its expansion is too large; use fewer references")

    def _value(self, schema: Any, where: str) -> str | None:
        if schema is False:
            return None
        if schema is True or schema == {}:
            return _free(self._any_depth + 1)
        if not isinstance(schema, Mapping):
            raise _refused(where, f"{_shown(schema)} is not a schema")
        if "$id" in schema and schema is not self._root:
            raise _refused(where, "'$id' below the root is not supported; remove it")
        if "$ref" in schema:
            name = schema["$ref"]
            if self._followed.count(name) > self._depth:
                return None
            self._followed.append(name)
            target = self._target(name, where)
            pattern = self.value(self._both(_without(schema, "$ref"), target, where), where)
            self._followed.pop()
            return pattern
        if "allOf" in schema:
            joined: Any = _without(schema, "allOf")
            for part in _list_of(schema, "allOf", where):
                joined = self._both(joined, self._resolve(part, where), where)
            return self.value(joined, where)
        for name in ("anyOf", "oneOf"):
            if name in schema:
                rest = _without(schema, name)
                parts = [
                    self._both(rest, self._resolve(part, f"{where}/{name}"), f"{where}/{name}/{n}")
                    if rest
                    else part
                    for n, part in enumerate(_list_of(schema, name, where))
                ]
                if name == "oneOf":
                    for one, other in itertools.combinations(range(len(parts)), 2):
                        if not self._excludes(parts[one], parts[other], where, _MOST_LINKS):
                            raise _refused(
                                where,
                                f"oneOf/{one} and oneOf/{other} may both match a value; use anyOf, "
                                "or give them other types, constants, or constants of a required "
                                "property",
                            )
                return _either(
                    [self.value(one, f"{where}/{name}/{n}") for n, one in enumerate(parts)]
                )
        if "const" in schema or "enum" in schema:
            for name in schema:
                if name not in {"const", "enum", "type"} | _NOTES:
                    raise _refused(where, f"{name!r} beside constants is not supported; remove it")
            values = _constants(schema, where)
            self._visit(where, len(values))
            return _either(map(_literal, values))
        kinds = _kinds(schema)
        for kind in kinds or [kinds]:
            if not isinstance(kind, str) or kind not in _OF_TYPE:
                raise _refused(
                    where, f"type {kind!r} is not supported; use one of {list(_OF_TYPE)}"
                )
        known = {name for kind in kinds for name in _OF_TYPE[kind]} | _NOTES | {"type"}
        for name in schema:
            is_neutral = (name == "uniqueItems" and schema[name] is False) or (
                name == "format" and isinstance(schema[name], str)  # concerns strings alone
            )
            if name not in known and not is_neutral and not str(name).startswith("x-"):
                raise _refused(where, f"{name!r} is not supported; remove it")
        writers = {
            "boolean": lambda: "(true|false)",
            "null": lambda: "null",
            "string": lambda: self._string(schema, where),
            "array": lambda: self._array(schema, where),
            "object": lambda: self._object(schema, where),
            "integer": lambda: _number(schema, where, is_whole=True),
            "number": lambda: _number(schema, where, is_whole=False),
        }
        return _either([writers[kind]() for kind in kinds])

    def _target(self, name: Any, where: str) -> Any:
        if not isinstance(name, str) or not re.match("#(/|$)", name):
            raise _refused(where, f"$ref {name!r} is not in this schema; inline it")
        target = self._root
        for part in name[1:].split("/")[1:]:
            part = unquote(part).replace("~1", "/").replace("~0", "~")
            try:
                target = target[int(part) if isinstance(target, list) else part]
            except (KeyError, IndexError, ValueError, TypeError):
                raise _refused(where, f"$ref {name!r} does not exist") from None
        return target

    def _resolve(self, schema: Any, where: str) -> Any:
        """The schema without references at its top."""
        for _ in range(_MOST_LINKS):
            if not isinstance(schema, Mapping) or "$ref" not in schema:
                return schema
            target = self._target(schema["$ref"], where)
            schema = self._both(_without(schema, "$ref"), target, where)
        raise _refused(where, "references do not resolve to a schema")

    def _string(self, schema: Mapping[str, Any], where: str) -> str | None:
        low, high = _counts(schema, "Length", where)
        form, pattern = schema.get("format"), schema.get("pattern")
        if isinstance(form, str) and form not in _FORMATS and form not in _OTHER_FORMATS:
            form = None
        if form is not None and (not isinstance(form, str) or form not in _FORMATS):
            raise _refused(where, f"format {form!r} is not supported; use one of {list(_FORMATS)}")
        if (form is not None) + (pattern is not None) + bool(low or high is not None) > 1:
            raise _refused(where, "pattern, format and lengths cannot be combined; keep one")
        if form is not None:
            return f'"{_FORMATS[form]}"'
        if pattern is not None:
            return f'"({_in_string(pattern, where)})"'
        if high is not None and low > high:
            return None
        return f'"{_CHARACTER}{_times(low, self._reduced(low, high))}"'

    def _reduced(self, low: int, high: int | None) -> int | None:
        return None if high is None else min(high, max(low, self._most))

    def _array(self, schema: Mapping[str, Any], where: str) -> str | None:
        low, high = _counts(schema, "Items", where)
        if high is not None and low > high:
            return None
        listed = _list_of(schema, "prefixItems", where) if "prefixItems" in schema else []
        first = [self.value(one, f"{where}/prefixItems/{n}") for n, one in enumerate(listed)]
        if first:
            if "items" in schema and schema["items"] is not False and low > len(first):
                raise _refused(where, "items after prefixItems are not supported; remove them")
            if low > len(first) or None in first:
                return None
            first = first[: len(first) if high is None else high]
            return rf"\[[ ]?{'[ ]?,[ ]?'.join(map(str, first))}[ ]?\]"
        is_free = "items" not in schema
        item = _free(self._any_depth) if is_free else self.value(schema["items"], f"{where}/items")
        return _repeated(r"\[", item, ",[ ]?", r"\]", low, self._reduced(low, high))

    def _object(self, schema: Mapping[str, Any], where: str) -> str | None:
        low, high = _counts(schema, "Properties", where)
        if high is not None and low > high:
            return None
        named = _properties(schema, where)
        required = _required(schema, where)
        others = schema.get("additionalProperties", True)
        if isinstance(others, Mapping) and not set(others) - _NOTES:
            others = True
        if "properties" not in schema and not required:
            if low > 1:
                raise _refused(
                    where, f"minProperties={low} is not supported without properties; add them"
                )
            is_free = others is True
            value = (
                _free(max(self._any_depth - 1, 0))
                if is_free
                else self.value(others, f"{where}/additionalProperties")
            )
            pair = None if value is None else f"{_STRING}[ ]?:[ ]?{_grouped(value)}"
            return _repeated(r"\{", pair, "[ ]?,[ ]?", r"\}", low, self._reduced(low, high))
        pairs: list[tuple[str, bool]] = []
        for name in named | required:
            part = named.get(name, others)
            value = self.value(part, f"{where}/properties/{name}")
            if value is None and name in required:
                return None
            if value is not None:
                pairs.append((f"[ ]?{_literal(name)}[ ]?:[ ]?{_grouped(value)}", name in required))
        fewest, most = len(required), len(pairs)
        if low > most or (high is not None and fewest > high):
            return None
        if high == fewest:
            pairs = [pair for pair in pairs if pair[1]]
        elif low == most:
            pairs = [(pair, True) for pair, _ in pairs]
        elif low > max(fewest, 1) or (high is not None and high < most):
            raise _refused(
                where, "minProperties or maxProperties restrict optional properties; remove them"
            )
        return _in_order(pairs, is_empty_allowed=low == 0)

    def _both(self, one: Any, other: Any, where: str) -> Any:
        """Returns the conjunction of two schemas as one schema."""
        self._visit(where)
        if one is False or other is False:
            return False
        for part in (one, other):
            if part is not True and not isinstance(part, Mapping):
                raise _refused(where, f"{_shown(part)} is not a schema")
            if part is not True and "$id" in part and part is not self._root:
                raise _refused(where, "'$id' below the root is not supported; remove it")
        one, other = ({} if part is True else _without(part) for part in (one, other))
        if not one or not other:
            return one or other
        joined = one | other
        for name in one.keys() & other.keys():
            a, b = one[name], other[name]
            if name[:3] in ("min", "max", "exc") and _is_number(a) and _is_number(b):
                joined[name] = (
                    max(a, b)
                    if name.lower().endswith("minimum") or (name.startswith("min"))
                    else min(a, b)
                )
            elif name == "required":
                joined[name] = [*(_required(one, where) | _required(other, where))]
            elif name == "allOf":
                joined[name] = [*_list_of(one, name, where), *_list_of(other, name, where)]
            elif name in ("enum", "const"):
                allowed = set(map(_key, _constants({name: b}, where)))
                values = [v for v in _constants({name: a}, where) if _key(v) in allowed]
                if not values:
                    return False
                joined[name] = values if name == "enum" else values[0]
            elif name == "type":
                kinds, allowed = _kinds(one), _kinds(other)
                both = [kind for kind in kinds if kind in allowed]
                is_integer = "integer" in [*kinds, *allowed] and "number" in [*kinds, *allowed]
                joined[name] = both + ["integer"] * (is_integer and "integer" not in both)
                if not joined[name]:
                    return False
            elif name not in _JOINED and not _is_same(a, b):
                raise _refused(where, f"several {name!r} for one value are not supported")
        # `additionalProperties` concerns the properties that its own schema does not name.
        if "properties" in joined:
            joined["properties"] = {
                name: _conjunction(_of_name(one, name), _of_name(other, name))
                for name in {**_properties(one, where), **_properties(other, where)}
            }
        if "prefixItems" in joined:
            listed = [_list_of({"prefixItems": []} | s, "prefixItems", where) for s in (one, other)]
            joined["prefixItems"] = [
                _conjunction(
                    *(
                        parts[n] if n < len(parts) else schema.get("items", True)
                        for parts, schema in zip(listed, (one, other), strict=True)
                    )
                )
                for n in range(max(map(len, listed)))
            ]
        for name in ("additionalProperties", "items"):
            if name in joined:
                joined[name] = _conjunction(one.get(name, True), other.get(name, True))
        return joined

    def _excludes(self, one: Any, other: Any, where: str, links: int) -> bool:
        """Returns whether no value is valid under both schemas; False if unknown."""
        self._visit(where)
        one, other = self._resolve(one, where), self._resolve(other, where)
        if one is False or other is False:
            return True
        if not isinstance(one, Mapping) or not isinstance(other, Mapping) or not links:
            return False
        for schema, rest in ((one, other), (other, one)):
            for name in ("anyOf", "oneOf"):
                if name in schema:
                    cases = _list_of(schema, name, where)
                    if all(self._excludes(case, rest, where, links - 1) for case in cases):
                        return True
        kinds, others = (_types(schema, where) for schema in (one, other))
        if not kinds & others:
            return True
        if all("const" in s or "enum" in s for s in (one, other)):
            keys = [set(map(_key, _constants(schema, where))) for schema in (one, other)]
            return not keys[0] & keys[1]
        if kinds & others != {"object"}:
            return False
        needed = [_required(schema, where).keys() for schema in (one, other)]
        named = [_properties(schema, where) for schema in (one, other)]
        if not {"anyOf", "oneOf", "allOf", "const", "enum"} & {*one, *other}:
            # Only these names are written.
            written = [needed[n] | named[n].keys() for n in range(2)]
            if all(written) and needed[0] - written[1] and needed[1] - written[0]:
                return True
        return any(
            name in named[0]
            and name in named[1]
            and self._excludes(named[0][name], named[1][name], where, links - 1)
            for name in needed[0] & needed[1]
        )


def _without(schema: Mapping[str, Any], name: str = "") -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key != name and key not in _NOTES}


def _kinds(schema: Mapping[str, Any]) -> list[Any]:
    """The types of a schema: those that its keywords imply, or all types, if it names none."""
    if "type" in schema:
        kinds = schema["type"]
        return kinds if isinstance(kinds, list) else [kinds]
    plain = [kind for kind in _OF_TYPE if kind != "integer"]
    return [kind for kind in plain if set(_OF_TYPE[kind]) & set(schema)] or plain


def _types(schema: Mapping[str, Any], where: str) -> set[str]:
    """The types of the values that a schema allows; integers are numbers."""
    if "const" in schema or "enum" in schema:
        kinds = [_kind_of(value) for value in _constants(schema, where)]
    else:
        kinds = schema.get("type", list(_OF_TYPE))
        kinds = kinds if isinstance(kinds, list) else [kinds]
    return {"number" if kind == "integer" else str(kind) for kind in kinds}


def _constants(schema: Mapping[str, Any], where: str) -> list[Any]:
    """The values of the schema's types that ``const`` and ``enum`` both allow."""
    values = _list_of(schema, "enum", where) if "enum" in schema else [schema["const"]]
    for value in [*values, schema.get("const")]:
        _check_json(value, where)
    if "const" in schema:
        values = [value for value in values if _key(value) == _key(schema["const"])]
    if "type" in schema:
        kinds = _kinds(schema)
        values = [
            value
            for value in values
            if _kind_of(value) in kinds
            or (_is_number(value) and "integer" in kinds and value == int(value))
        ]
    return values


def _kind_of(value: Any) -> str:
    kinds = {bool: "boolean", str: "string", list: "array", type(None): "null"}
    kinds |= {int: "number", float: "number"}
    return kinds.get(type(value), "object")


def _list_of(schema: Mapping[str, Any], name: str, where: str) -> list[Any]:
    if not isinstance(schema[name], list):
        raise _refused(f"{where}/{name}", "must be a list")
    return schema[name]


def _properties(schema: Mapping[str, Any], where: str) -> dict[str, Any]:
    named = schema.get("properties", {})
    if not isinstance(named, Mapping) or not all(isinstance(name, str) for name in named):
        raise _refused(f"{where}/properties", "must be an object")
    return dict(named)


def _required(schema: Mapping[str, Any], where: str) -> dict[str, None]:
    """The names of the required properties, in order."""
    names = _list_of(schema, "required", where) if "required" in schema else []
    if not all(isinstance(name, str) for name in names):
        raise _refused(f"{where}/required", "must be a list of names")
    return dict.fromkeys(names)


def _of_name(schema: Mapping[str, Any], name: str) -> Any:
    return schema.get("properties", {}).get(name, schema.get("additionalProperties", True))


def _conjunction(one: Any, other: Any) -> Any:
    if one is False or other is False:
        return False
    if one is True or one == {}:
        return other
    return one if other is True or other == {} or _is_same(one, other) else {"allOf": [one, other]}


def _is_same(one: Any, other: Any) -> bool:
    """Whether two keywords have the same value; 1 and True differ."""
    return one is other or (one == other and repr(one) == repr(other))


def _check_json(value: Any, where: str) -> None:
    """Raises ValueError if a constant cannot be written as JSON."""
    try:
        is_json = json.loads(json.dumps(value, allow_nan=False)) == value
    except (TypeError, ValueError):
        is_json = False
    if not is_json:
        raise _refused(where, f"the constant {_shown(value)} is not JSON; remove it")


def _key(value: Any) -> Any:
    """A key that is equal for JSON values that JSON Schema takes for equal."""
    if isinstance(value, Mapping):
        return "object", frozenset((name, _key(one)) for name, one in value.items())
    if isinstance(value, list):
        return "array", tuple(map(_key, value))
    return isinstance(value, bool), value


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, int) or math.isfinite(value)


def _counts(schema: Mapping[str, Any], name: str, where: str) -> tuple[int, int | None]:
    for key in (f"min{name}", f"max{name}"):
        value = schema.get(key, 0)
        if not _is_number(value) or value < 0 or value != int(value):
            raise _refused(where, f"{key}={_shown(value)} must be a non-negative integer")
    low, high = schema.get(f"min{name}", 0), schema.get(f"max{name}")
    if low > _SIZES[0][0]:
        raise _refused(where, f"min{name}={_shown(low)} is too large; use at most {_SIZES[0][0]}")
    return int(low), None if high is None else int(high)


def _literal(value: Any) -> str:
    """An expression for one JSON value. Spaces around commas and colons are allowed."""
    if isinstance(value, Mapping):
        pairs = [f"[ ]?{_literal(name)}[ ]?:[ ]?{_literal(one)}" for name, one in value.items()]
        return rf"\{{{'[ ]?,'.join(pairs)}[ ]?\}}"
    if isinstance(value, list):
        return rf"\[[ ]?{'[ ]?,[ ]?'.join(map(_literal, value))}[ ]?\]"
    return re.sub(r"([\\.^$*+?{}\[\]|()])", r"\\\1", json.dumps(value, ensure_ascii=False))


def _free(depth: int) -> str:
    """An expression for JSON values nested up to a limited depth."""
    parts: list[str | None] = [_STRING, _NUMBER, "(true|false)", "null"]
    if depth > 0:
        inner = _free(depth - 1)
        parts.append(_repeated(r"\[", inner, ",[ ]?", r"\]", 0, None))
        parts.append(_repeated(r"\{", f"{_STRING}[ ]?:[ ]?{inner}", "[ ]?,[ ]?", r"\}", 0, None))
    return str(_either(parts))


def _repeated(
    begin: str, item: str | None, comma: str, end: str, low: int, high: int | None
) -> str | None:
    """An expression for `low` to `high` items between brackets."""
    if item is None or high == 0:
        return None if low else f"{begin}[ ]?{end}"
    items = f"({_unless_first(begin, comma, '[ ]?')}{_grouped(item)}){_times(max(low, 1), high)}"
    return f"{begin}{items if low else f'({items}|[ ]?)'}[ ]?{end}"


def _in_order(pairs: Sequence[tuple[str, bool]], *, is_empty_allowed: bool) -> str:
    """An expression for objects with these pairs in order; True beside a pair that must be
    present.
    """
    parts, comma = [], ""
    for pair, is_required in pairs:
        parts.append(f"{comma}{pair}" if is_required else f"({comma}{pair})?")
        is_behind_pair = is_required or comma == "[ ]?,"
        comma = "[ ]?," if is_behind_pair else _unless_first(r"\{", "[ ]?,", "")
    some = "" if is_empty_allowed else r"(?<!\{)"
    return rf"\{{{''.join(parts)}{some}[ ]?\}}"


def _unless_first(begin: str, comma: str, first: str) -> str:
    """An expression for `first` right behind the opening bracket, and for `comma` elsewhere."""
    return f"(?:(?<={begin}){first}|(?<!{begin}){comma})"


def _either(parts: Iterable[str | None]) -> str | None:
    some = list(dict.fromkeys(part for part in parts if part is not None))
    return None if not some else some[0] if len(some) == 1 else f"({'|'.join(some)})"


def _grouped(pattern: str) -> str:
    return f"({pattern})" if "|" in pattern else pattern


def _times(low: int, high: int | None) -> str:
    return "*" if low == 0 and high is None else f"{{{low},{'' if high is None else high}}}"


def _number(schema: Mapping[str, Any], where: str, *, is_whole: bool) -> str | None:
    """An expression for numbers within the bounds of a schema.

    Bounded numbers have no exponent, and at most 15 digits if they have a fraction, because readers
    round fractions to floats, which can reach or cross a bound.
    """
    lows, highs, digits = [], [], 1
    for name in _OF_TYPE["number"]:
        if name not in schema:
            continue
        value: Any = schema[name]
        if not _is_number(value):
            raise _refused(where, f"{name}={_shown(value)} must be a number")
        if name == "multipleOf":
            if value != 1 or not is_whole:
                raise _refused(where, "multipleOf is not supported; remove it")
            continue
        is_low = name.lower().endswith("minimum")
        if abs(value) > _LARGEST:
            if (value > 0) == is_low:
                raise _refused(
                    where, f"{name}={_shown(value)} is too large; use a number of at most 20 digits"
                )
            value = -_LARGEST if is_low else _LARGEST
        else:
            digits = max(digits, len(str(int(abs(value)))))
        (lows if is_low else highs).append((Decimal(str(value)) + 0, name.startswith("ex")))
    if not lows and not highs:
        return _INTEGER if is_whole else _NUMBER
    low, no_low = max(lows, default=(None, False))
    high, no_high = min(highs, key=lambda bound: (bound[0], not bound[1]), default=(None, False))
    size = 0 if is_whole else max(0, _DIGITS - digits)
    above = _magnitudes(low, no_low, high, no_high, size)
    below = _magnitudes(
        None if high is None else -high, no_high, None if low is None else -low, no_low, size
    )
    return _either([above, below and f"-({below})"])


def _magnitudes(
    low: Decimal | None, no_low: bool, high: Decimal | None, no_high: bool, size: int
) -> str | None:
    """An expression for numbers without a sign between two bounds, with at most `size` digits of a
    fraction. True beside a bound that is excluded.
    """
    if low is None or low < 0:
        low, no_low = Decimal(0), False
    if high is not None and (high < low or (high == low and (no_low or no_high))):
        return None
    whole, _, rest = f"{low:f}".partition(".")
    # Of a bound with more digits, all numbers of `size` digits are above or below the first ones.
    no_low |= bool(rest[size:].strip("0"))
    digits, length = whole + rest[:size], len(whole)
    if high is None:
        parts = _digits(digits, None, no_low, False, length, size)
        longer = f"[1-9][0-9]{{{length},}}{_digits(None, None, False, False, 0, size)}"
        return _either([parts, longer])
    whole, _, rest = f"{high:f}".partition(".")
    no_high &= not rest[size:].strip("0")
    top, longest = whole + rest[:size], len(whole)
    if length == longest:
        return _digits(digits, top, no_low, no_high, length, size)
    parts = [_digits(digits, None, no_low, False, length, size)]
    if longest - length > 1:
        middle = f"[1-9][0-9]{{{length},{longest - 2}}}"
        parts.append(f"{middle}{_digits(None, None, False, False, 0, size)}")
    least = "1" + "0" * (longest - 1)
    parts.append(_digits(least, top, False, no_high, longest, size))
    return _either(parts)


def _digits(
    low: str | None, high: str | None, no_low: bool, no_high: bool, whole: int, size: int
) -> str | None:
    """An expression for `whole` digits of an integer and up to `size` of a fraction, between two
    texts of digits. A bound of None holds already, and digits behind the end of a bound are zeros.
    After the point, `whole` is negative.
    """
    if low is not None and not no_low and not low.strip("0") and whole <= 0:
        low = None
    if low is None and high is None:
        if whole < 0:
            return f"[0-9]{{0,{size}}}" if size else ""
        fraction = rf"(\.[0-9]{{1,{size}}})?" if size else ""
        return (f"[0-9]{{{whole}}}" if whole else "") + fraction
    is_end = low is None and not (no_high and high is not None and not high.strip("0"))
    if whole <= 0 and not size:
        return "" if is_end else None
    first = 0 if low is None else int(low[:1] or 0)
    last = 9 if high is None else int(high[:1] or 0)
    below, above = (None if bound is None else bound[1:] for bound in (low, high))
    cases: list[tuple[int, int, str | None, str | None]] = [(first, last, below, above)]
    if first < last:
        begin, end = first + (low is not None), last - (high is not None)
        cases = [(begin, end, None, None)] if begin <= end else []
        cases += [] if low is None else [(first, first, below, None)]
        cases += [] if high is None else [(last, last, None, above)]
    parts = []
    for begin, end, below, above in cases:
        rest = _digits(below, above, no_low, no_high, max(whole - 1, -1), size - (whole <= 0))
        if rest is not None:
            parts.append((str(begin) if begin == end else f"[{begin}-{end}]") + rest)
    if not parts:
        return "" if is_end and whole <= 0 else None
    pattern = f"({'|'.join(parts)})" if len(parts) > 1 or whole <= 0 else parts[0]
    if whole == 0:
        pattern = rf"(\.{pattern})"
    return f"{pattern}?" if is_end and whole <= 0 else pattern


# What both Python and ECMA-262 match.
_MEMBERS = {
    "d": "0-9",
    "w": "0-9A-Za-z_",
    "s": r" \xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000",
}
# What Python or ECMA-262 matches.
_NOT_MEMBERS = {
    "d": r"\d",
    "w": r"\w",
    "s": r"\s\ufeff",
    "D": r"\x00-/:-\U0010ffff",
    "W": r"\x00-/:-@\[-\^`{-\U0010ffff",
    "S": r"\x00-\x1f!-\x9f\xa1-\u167f\u1681-\u1fff\u200b-\u2027\u202a-\u202e\u2030-\u205e"
    r"\u2060-\u2fff\u3001-\U0010ffff",
}


def _in_string(pattern: Any, where: str) -> str:
    """The expression for the JSON text, between quotes, of strings that match a pattern."""
    if not isinstance(pattern, str):
        raise _refused(where, "pattern must be a string")
    shown = f"pattern {pattern[:60]!r}"
    for different in re.finditer(r"\\([AZaU])|\\.|(\(\?P<|\{,\d*\}|\[\^?\])", pattern):
        if different[1] or different[2]:
            raise _refused(
                where,
                f"{shown}: {different[0]!r} differs in Python and ECMA-262; write it otherwise",
            )
    parts = []
    try:
        for token in tokens_of(pattern):
            kind, text, _ = token
            if kind in ("char", "escape"):
                code = code_of(token)
                parts.append(_class(token) if code is None else _character(code))
            elif kind == "set":
                parts.append(_set(token))
            elif kind == "any":
                parts.append(rf"[^{_UNSAFE}\u2028\u2029]")
            elif kind == "times":
                parts.append(text.removesuffix("?") if len(text) > 1 else text)
            else:
                parts.append("(" if kind == "open" else text)
    except ValueError as error:
        raise _refused(where, f"{shown}: {error}") from None
    return "".join(parts)


def _character(code: int) -> str:
    """An expression for one character as JSON writes it."""
    text = json.dumps(chr(code), ensure_ascii=False)[1:-1]
    codes = "".join(_code(ord(one)) for one in text)
    return f"({codes})" if len(text) > 1 else codes


def _code(code: int) -> str:
    one = chr(code)
    return one if one.isalnum() or one in " _" or code > 0x9F else f"\\x{code:02x}"


def _class(escape: Token) -> str:
    name = escape.text[1]
    if name in _MEMBERS:
        return f"[{_MEMBERS[name]}]"
    other = _NOT_MEMBERS.get(name.lower()) or f"\\{name.swapcase()}{escape.text[2:]}"
    return f"[^{other}{_UNSAFE}]"


def _set(token: Token) -> str:
    is_not, items = items_of(token)
    if is_not:
        inner = [
            _NOT_MEMBERS.get(item.text[1], item.text)
            if isinstance(item, Token)
            else f"{_code(item[0])}-{_code(item[1])}"
            for item in items
        ]
        return f"[^{''.join(inner)}{_UNSAFE}]"
    parts = []
    for item in items:
        if isinstance(item, Token):
            parts.append(_class(item))
            continue
        low, high = max(item[0], 0x20), item[1]
        if item[0] == item[1]:
            parts.append(_character(item[0]))
            continue
        # Quotes and backslashes are matched as JSON writes them.
        for code in (0x22, 0x5C):
            if low <= code <= high:
                parts += [f"[{_code(low)}-{_code(code - 1)}]"] if low < code else []
                parts.append(_character(code))
                low = code + 1
        parts += [f"[{_code(low)}-{_code(high)}]"] if low <= high else []
    if not parts:
        raise ValueError(f"{token.text!r} matches only characters that strings escape")
    return f"({'|'.join(parts)})"
