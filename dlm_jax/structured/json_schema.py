r"""JSON schemas (JSON Schema 2020-12) as regular expressions.

Every text of an expression is valid under its schema, but not every valid text matches: properties
are in the order of the schema, and no other properties are written. If the expression for a schema
is too large for an automaton, large maximum counts and the nesting of free values are reduced. What
cannot be kept raises an error with the path of the keyword in the schema.
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

from dlm_jax.structured.regex import (
    CLASSES,
    Tree,
    parsed,
    ranges_of,
    sre,  # pyright: ignore[reportAttributeAccessIssue]
    unsupported,
)

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
_LONGEST = 1 << 15
_LARGEST = 10**20
_DIGITS = 15  # of decimal numbers that floats tell apart
_FRACTION = 6  # digits of the fraction of a bounded number
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
_OF_TYPE = {
    "object": ["properties", "required", "additionalProperties", "minProperties", "maxProperties"],
    "array": ["items", "prefixItems", "minItems", "maxItems"],
    "string": ["minLength", "maxLength", "pattern", "format"],
    "integer": ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"],
    "number": ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"],
    "boolean": [],
    "null": [],
}
_KINDS = {bool: "boolean", str: "string", list: "array", type(None): "null", dict: "object"}


def regex_of_schema(schema: Mapping[str, Any] | bool, *, depth: int = DEPTH) -> str:
    """Returns a regular expression for texts that a JSON schema allows.

    Args:
      schema: the schema.
      depth: maximum depth to which a recursive reference is expanded.

    Raises:
      ValueError: the schema has an unsupported keyword or value, or allows no text.
    """
    pattern: str | None = None
    for most, any_depth in _SIZES:
        try:
            pattern = _SchemaWriter(schema, depth, most, any_depth).value(schema, "#")
        except _TooLong as error:
            if (most, any_depth) == _SIZES[-1]:
                raise _refused("#", str(error)) from None
            continue
        except RecursionError:
            raise _refused("#", "it is nested too deeply") from None
        if pattern is None:
            raise _refused("#", f"no value matches within {depth} levels")
        if _positions(parsed(pattern)) <= _MOST_POSITIONS:
            break
    assert pattern is not None
    return pattern


def _positions(tree: Tree) -> int:
    """An estimate of the states of an automaton, without separators."""
    total = 0
    for op, argument in tree:
        if op in CLASSES:
            # A character outside ASCII has states between its bytes.
            total += 8 if ranges_of(op, argument)[0] else 1
        elif op is sre.BRANCH and argument[1][0] and argument[1][0][0][0] is not sre.ASSERT:
            total += sum(map(_positions, argument[1]))
        elif op is sre.SUBPATTERN:
            total += _positions(argument[3])
        elif op is sre.MAX_REPEAT:
            low, high, inner = argument
            total += _positions(inner) * max(1, low, 0 if high is sre.MAXREPEAT else high)
    return total


class _TooLong(Exception):
    """Raised for a pattern that smaller maximum counts may shorten."""


def _refused(where: str, why: str) -> ValueError:
    return ValueError(f"the schema cannot be used: at {where}: {why}"[:300])


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
        try:
            pattern = self._value(schema, where)
        except (AttributeError, IndexError, KeyError, OverflowError, TypeError) as error:
            raise _refused(where, f"a keyword is malformed ({error!r})") from None
        if len(pattern or "") > _LONGEST:
            raise _TooLong("its expansion is too large; use fewer references")
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
            raise _refused(where, f"{str(schema)[:60]} is not a schema")
        if "$id" in schema and schema is not self._root:
            raise _refused(where, "'$id' below the root is not supported; remove it")
        if "$ref" in schema:
            name = schema["$ref"]
            if self._followed.count(name) > self._depth:
                return None
            self._followed.append(name)
            pattern = self.value(
                _both(_without(schema, "$ref"), self._target(name, where), where), where
            )
            self._followed.pop()
            return pattern
        if "allOf" in schema:
            joined: Any = _without(schema, "allOf")
            for part in schema["allOf"]:
                self._visit(where)
                joined = _both(joined, self._resolve(part, where), where)
            return self.value(joined, where)
        for name in ("anyOf", "oneOf"):
            if name in schema:
                rest = _without(schema, name)
                parts = [self._resolve(part, where) if rest else part for part in schema[name]]
                if name == "oneOf":
                    for one, other in itertools.combinations(range(len(parts)), 2):
                        self._visit(where)
                        if not self._excludes(parts[one], parts[other], where):
                            raise _refused(
                                where,
                                f"oneOf/{one} and oneOf/{other} may both match a value; use anyOf, "
                                "or give them other types, constants, or constants of a required "
                                "property",
                            )
                return _either(
                    self.value(_both(rest, part, where) if rest else part, f"{where}/{name}/{n}")
                    for n, part in enumerate(parts)
                )
        if "const" in schema or "enum" in schema:
            for name in schema:
                if name not in {"const", "enum", "type"} | _NOTES:
                    raise _refused(where, f"{name!r} beside constants is not supported; remove it")
            values = _constants(schema, where)
            self._visit(where, len(values))
            return _either(map(_literal, values))
        kinds = _kinds(schema)
        for kind in kinds:
            if kind not in _OF_TYPE:
                raise _refused(where, f"type {kind!r} is not supported; use one of {[*_OF_TYPE]}")
        known = {name for kind in kinds for name in _OF_TYPE[kind]} | _NOTES | {"type", "format"}
        for name in schema:
            is_neutral = name == "uniqueItems" and schema[name] is False
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
        for _ in range(32):
            if not isinstance(schema, Mapping) or "$ref" not in schema:
                return schema
            schema = _both(_without(schema, "$ref"), self._target(schema["$ref"], where), where)
        raise _refused(where, "references do not resolve to a schema")

    def _excludes(self, one: Any, other: Any, where: str, levels: int = 8) -> bool:
        """Returns whether no value is valid under both schemas; False if unknown."""
        one, other = self._resolve(one, where), self._resolve(other, where)
        if not isinstance(one, Mapping) or not isinstance(other, Mapping) or not levels:
            return one is False or other is False
        are_plain = not {"anyOf", "oneOf", "allOf"} & {*one, *other}
        are_constants = [bool({"const", "enum"} & {*schema}) for schema in (one, other)]
        if are_plain and all(are_constants):
            keys = [set(map(_key, _constants(schema, where))) for schema in (one, other)]
            return not keys[0] & keys[1]
        kinds = [
            {_kind_of(value) for value in _constants(schema, where)}
            if is_constant
            else {"number" if kind == "integer" else kind for kind in _types(schema)}
            for schema, is_constant in zip((one, other), are_constants, strict=True)
        ]
        if not kinds[0] & kinds[1]:
            return True
        if kinds[0] & kinds[1] != {"object"}:
            return False
        named = [schema.get("properties", {}) for schema in (one, other)]
        return any(
            name in named[0]
            and name in named[1]
            and self._excludes(named[0][name], named[1][name], where, levels - 1)
            for name in {*one.get("required", ())} & {*other.get("required", ())}
        )

    def _string(self, schema: Mapping[str, Any], where: str) -> str | None:
        low, high = _counts(schema, "Length", where)
        form, pattern = schema.get("format"), schema.get("pattern")
        if form is not None and (not isinstance(form, str) or form in _OTHER_FORMATS):
            raise _refused(where, f"format {form!r} is not supported; use one of {list(_FORMATS)}")
        form = _FORMATS.get(form or "")
        if (form is not None) + (pattern is not None) + bool(low or high is not None) > 1:
            raise _refused(where, "pattern, format and lengths cannot be combined; keep one")
        if form is not None:
            return f'"{form}"'
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
        listed = list(schema.get("prefixItems", ()))
        if listed:
            first = [self.value(one, f"{where}/prefixItems/{n}") for n, one in enumerate(listed)]
            if low > len(first) and schema.get("items") is not False:
                raise _refused(where, "minItems above prefixItems is not supported; lower it")
            if low > len(first) or None in first:
                return None
            first = first[: len(first) if high is None else high]
            return rf"\[[ ]?{'[ ]?,[ ]?'.join(map(str, first))}[ ]?\]"
        is_free = "items" not in schema
        item = _free(self._any_depth) if is_free else self.value(schema["items"], f"{where}/items")
        return _repeated(r"\[", item, ",[ ]?", r"\]", low, self._reduced(low, high))

    def _object(self, schema: Mapping[str, Any], where: str) -> str | None:
        low, high = _counts(schema, "Properties", where)
        named, required = (
            dict(schema.get("properties", {})),
            dict.fromkeys(schema.get("required", ())),
        )
        if not all(isinstance(name, str) for name in named | required):
            raise _refused(where, "properties and required must have names")
        others = schema.get("additionalProperties", True)
        if isinstance(others, Mapping) and not set(others) - _NOTES:
            others = True
        if "properties" not in schema and not required:
            if low > 1:
                raise _refused(where, f"minProperties={low} is not supported without properties")
            value = (
                _free(max(self._any_depth - 1, 0))
                if others is True
                else self.value(others, f"{where}/additionalProperties")
            )
            if high is not None and low > high:
                return None
            pair = None if value is None else f"{_STRING}[ ]?:[ ]?{_grouped(value)}"
            return _repeated(r"\{", pair, "[ ]?,[ ]?", r"\}", low, self._reduced(low, high))
        pairs: list[tuple[str, bool]] = []
        for name in named | required:
            value = self.value(named.get(name, others), f"{where}/properties/{name}")
            if value is None and name in required:
                return None
            if value is not None:
                pairs.append((f"[ ]?{_literal(name)}[ ]?:[ ]?{_grouped(value)}", name in required))
        if low > max(len(required), 1) or (high is not None and high < len(pairs)):
            raise _refused(
                where, "minProperties or maxProperties restrict optional properties; remove them"
            )
        return _in_order(pairs, is_empty_allowed=low == 0) if pairs or not low else None


def _both(one: Any, other: Any, where: str) -> Any:
    """Returns the conjunction of two schemas as one schema."""
    if one is False or other is False:
        return False
    for part in (one, other):
        if part is not True and not isinstance(part, Mapping):
            raise _refused(where, f"{str(part)[:60]} is not a schema")
    one, other = ({} if part is True else _without(part) for part in (one, other))
    joined = one | other
    for name in one.keys() & other.keys():
        a, b = one[name], other[name]
        if name == "required":
            joined[name] = [*dict.fromkeys([*a, *b])]
        elif name == "properties":
            joined[name] = {
                key: {"allOf": [a[key], b[key]]} if key in a and key in b else value
                for key, value in (a | b).items()
            }
        elif name == "allOf":
            joined[name] = [*a, *b]
        elif name == "type":
            kinds, allowed = _types(one), _types(other)
            joined[name] = [kind for kind in kinds if kind in allowed]
            numbers = {"integer", "number"}
            if numbers & {*kinds} and numbers & {*allowed} and "integer" in (*kinds, *allowed):
                joined[name] = [*dict.fromkeys([*joined[name], "integer"])]
            if not joined[name]:
                return False
        elif a != b or repr(a) != repr(b):
            raise _refused(where, f"several {name!r} for one value are not supported")
    # `additionalProperties` and `items` concern what their own schema does not name.
    for name, own in (("additionalProperties", "properties"), ("items", "prefixItems")):
        if (
            joined.get(name, True) is not True
            and one.get(own) != other.get(own)
            and (own in (one if name not in one else other) or name in one.keys() & other.keys())
        ):
            raise _refused(where, f"{name!r} beside other {own!r} is not supported; merge them")
    return joined


def _without(schema: Mapping[str, Any], name: str = "") -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key != name and key not in _NOTES}


def _types(schema: Mapping[str, Any]) -> list[Any]:
    """The types that a schema allows by its keyword ``type``."""
    kinds = schema.get("type", list(_OF_TYPE))
    return list(kinds) if isinstance(kinds, list) else [kinds]


def _kinds(schema: Mapping[str, Any]) -> list[Any]:
    """The types of a schema: those that its keywords imply, or all types, if it names none."""
    if "type" in schema:
        return _types(schema)
    plain = [kind for kind in _OF_TYPE if kind != "integer"]
    return [kind for kind in plain if set(_OF_TYPE[kind]) & set(schema)] or plain


def _constants(schema: Mapping[str, Any], where: str) -> list[Any]:
    """The values of ``const`` or ``enum`` that have one of the types."""
    if "const" in schema and "enum" in schema:
        raise _refused(where, "const beside enum is not supported; remove one")
    values = [schema["const"]] if "const" in schema else list(schema["enum"])
    for value in values:
        try:
            is_json = json.loads(json.dumps(value, allow_nan=False)) == value
        except (TypeError, ValueError):
            is_json = False
        if not is_json:
            raise _refused(where, f"the constant {str(value)[:60]} is not JSON; remove it")
    kinds = _types(schema)
    return [
        value
        for value in values
        if _kind_of(value) in kinds
        or ("integer" in kinds and _is_number(value) and value == int(value))
    ]


def _kind_of(value: Any) -> str:
    return _KINDS.get(type(value), "number")


def _key(value: Any) -> Any:
    """A key that is equal for JSON values that JSON Schema takes for equal."""
    if isinstance(value, Mapping):
        return "object", frozenset((name, _key(one)) for name, one in value.items())
    if isinstance(value, list):
        return "array", tuple(map(_key, value))
    return isinstance(value, bool), value


def _is_number(value: Any) -> bool:
    return type(value) is int or (type(value) is float and math.isfinite(value))


def _counts(schema: Mapping[str, Any], name: str, where: str) -> tuple[int, int | None]:
    for key in (f"min{name}", f"max{name}"):
        value = schema.get(key, 0)
        if not _is_number(value) or value < 0 or value != int(value):
            raise _refused(where, f"{key}={str(value)[:60]} must be a non-negative integer")
    low, high = int(schema.get(f"min{name}", 0)), schema.get(f"max{name}")
    if low > _SIZES[0][0]:
        raise _refused(where, f"min{name}={str(low)[:60]} is too large; use {_SIZES[0][0]}")
    return low, None if high is None else int(high)


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

    Bounded numbers have no exponent, a short fraction, and at most 15 digits if they have a
    fraction, because readers round fractions to floats, which can reach or cross a bound.
    """
    if schema.get("multipleOf", 1) != 1 or ("multipleOf" in schema and not is_whole):
        raise _refused(where, "multipleOf is not supported; remove it")
    lows: list[tuple[Decimal, bool]] = []
    highs: list[tuple[Decimal, bool]] = []
    digits = 1
    for name in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        if name not in schema:
            continue
        value: Any = schema[name]
        if not _is_number(value):
            raise _refused(where, f"{name}={str(value)[:60]} must be a number")
        is_low = name.lower().endswith("minimum")
        if abs(value) > _LARGEST and (value > 0) == is_low:
            raise _refused(where, f"{name}={str(value)[:30]} has more than 20 digits; lower it")
        bound = Decimal(str(max(-_LARGEST, min(value, _LARGEST))))
        if abs(value) < _LARGEST:
            digits = max(digits, len(str(abs(int(bound)))))
        (lows if is_low else highs).append((bound, name.startswith("ex")))
    if not lows and not highs:
        return _INTEGER if is_whole else _NUMBER
    low = max(lows, default=None)
    high = max(((-bound, is_out) for bound, is_out in highs), default=None)
    parts: list[str | None] = []
    for size in range(0 if is_whole else max(0, min(_FRACTION, _DIGITS - digits)), -1, -1):
        # Numbers with `size` digits of a fraction are integers, in units of the last digit.
        first, last = _first_unit(low, size), _first_unit(high, size)
        parts.append(_magnitudes(first, None if last is None else -last, size))
        negative = _magnitudes(last, None if first is None else -first, size, least=1)
        parts.append(negative and f"-({negative})")
    return _either(parts)


def _first_unit(bound: tuple[Decimal, bool] | None, size: int) -> int | None:
    """The least multiple of ``10^-size`` at or, if it is excluded, above a bound."""
    if bound is None:
        return None
    scaled = bound[0].scaleb(size)
    return math.ceil(scaled) + (bound[1] and scaled == math.ceil(scaled))


def _magnitudes(low: int | None, high: int | None, size: int, least: int = 0) -> str | None:
    """An expression for numbers from `low` to `high`, and from `least`, in units of ``10^-size``,
    with `size` digits of a fraction.
    """
    low = max(least, least if low is None else low)
    if high is not None and high < low:
        return None
    sizes = [max(len(str(n)), size + 1) for n in (low, low if high is None else high)]
    parts: list[str | None] = []
    for length in range(sizes[0], sizes[1] + 1):
        first = low if length == sizes[0] else 10 ** (length - 1)
        last = 10**length - 1 if high is None or length < sizes[1] else high
        texts = [str(n).zfill(length) for n in (first, last)]
        if size:
            texts = [f"{text[:-size]}.{text[-size:]}" for text in texts]
        parts.append(_between(*texts))
    if high is None:
        fraction = rf"\.[0-9]{{{size}}}" if size else ""
        parts.append(f"[1-9][0-9]{{{sizes[0] - size},}}{fraction}")
    return _either(parts)


def _between(low: str, high: str) -> str:
    """An expression for decimals of one form between two texts."""
    if not low:
        return ""
    (a, *_), (b, *_), below, above = low, high, low[1:], high[1:]
    if a == b:
        return (r"\." if a == "." else a) + _between(below, above)
    zeros, nines = re.sub("[0-9]", "0", below), re.sub("[0-9]", "9", above)
    any_rest = re.sub("[0-9]+", lambda run: f"[0-9]{{{len(run[0])}}}", below).replace(".", r"\.")
    begin, end, parts = int(a), int(b), []
    if below != zeros:
        parts.append(a + _between(below, nines))
        begin += 1
    if above != nines:
        parts.append(b + _between(zeros, above))
        end -= 1
    if begin <= end:
        parts.append(f"[{begin}-{end}]{any_rest}")
    return str(_either(parts))


# What both Python and ECMA-262 match, and what one of them matches.
_MEMBERS = {"d": "0-9", "w": "0-9A-Za-z_", "s": " "}
_NOT_MEMBERS = {"d": r"\d", "w": r"\w", "s": r"\s\ufeff"}


def _in_string(pattern: str, where: str) -> str:
    r"""The expression for the JSON text, between quotes, of strings that match a pattern.

    Classes of characters match what both Python and ECMA-262 match: ``\d`` and ``\w`` are ASCII.
    """
    shown = f"pattern {pattern[:60]!r}"
    for different in re.finditer(r"\\([AZaU])|\\.|(\(\?P<|\{,\d*\}|\[\^?\])", pattern):
        if different[1] or different[2]:
            raise _refused(where, f"{shown}: {different[0]!r} differs in Python and ECMA-262")
    try:
        return _json_of(parsed(pattern))
    except ValueError as error:
        raise _refused(where, f"{shown}: {error}") from None


def _json_of(tree: Tree) -> str:
    parts = []
    for op, argument in tree:
        if op is sre.LITERAL:
            codes = json.dumps(chr(argument), ensure_ascii=False)[1:-1]
            parts.append(f"({''.join(map(_code, codes))})")
        elif op is sre.ANY:
            parts.append(rf"[^{_UNSAFE}\u2028\u2029]")
        elif op in CLASSES:
            parts.append(_set(*ranges_of(op, argument)))
        elif op is sre.BRANCH:
            parts.append(f"({'|'.join(map(_json_of, argument[1]))})")
        elif op is sre.SUBPATTERN and not argument[1] and not argument[2]:
            parts.append(f"({_json_of(argument[3])})")
        elif op in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            low, high, inner = argument
            parts.append(
                f"({_json_of(inner)}){_times(low, None if high is sre.MAXREPEAT else high)}"
            )
        else:
            raise unsupported(op)
    return "".join(parts)


def _code(one: str) -> str:
    return one if one.isalnum() or one in " _" or one > "\x9f" else f"\\x{ord(one):02x}"


def _set(is_not: bool, items: Sequence[Any]) -> str:
    """An expression for a set of characters that JSON writes as they are."""
    if not is_not and items[0] in (r"\D", r"\W", r"\S") and len(items) == 1:
        is_not, items = True, [items[0].lower()]
    parts = []
    for item in items:
        if isinstance(item, str):
            if item.isupper():
                raise ValueError(f"{item!r} in a set is not supported; write it otherwise")
            parts.append((_NOT_MEMBERS if is_not else _MEMBERS)[item[1]])
            continue
        low, high = item
        if not is_not and (low < 0x20 or any(low <= code <= high for code in b'"\\')):
            raise ValueError("a set has characters that JSON escapes; write them as alternatives")
        parts.append(f"{_code(chr(low))}-{_code(chr(high))}")
    return f"[^{''.join(parts)}{_UNSAFE}]" if is_not else f"[{''.join(parts)}]"
