r"""JSON schemas (JSON Schema 2020-12) as regular expressions.

Every text of an expression is valid under its schema, but not every valid text matches: properties
are in the order of the schema, and no other properties are written. If the expression for a schema
is too large for an automaton, large maximum counts and the nesting of free values are reduced. What
cannot be kept raises an error with the path of the keyword in the schema.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from dlm_jax.structured.regex import LONGEST, num_characters, parsed

_DEPTH = 3
"""Maximum depth to which a recursive reference is expanded."""

_SIZES = (
    (4000, 2), (1000, 2), (400, 2), (250, 2), (120, 2), (60, 2), (60, 1), (30, 1), (30, 0), (15, 0),
    (7, 0), (3, 0), (1, 0),
)  # fmt: skip
"""Largest maximum count and nesting of free values; the first pair with a small expression is
used."""
_MOST_CHARACTERS = 4200
_MOST_PARTS = 1 << 14
_DIGITS = 15  # of decimal numbers that floats tell apart
_FRACTION = 6  # digits of the fraction of a bounded number
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
    *("$schema", "$comment", "$defs", "$anchor", "definitions", "title", "description"),
    *("default", "examples", "example", "deprecated", "readOnly", "writeOnly", "discriminator"),
    *("contentMediaType", "contentEncoding"),
}
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_OF_TYPE = {
    "object": ("properties", "required", "additionalProperties"),
    "array": ("items", "minItems", "maxItems"),
    "string": ("minLength", "maxLength", "format"),
    "integer": (*_LOWER, *_UPPER),
    "number": (*_LOWER, *_UPPER),
    "boolean": (),
    "null": (),
}
_KINDS = {bool: "boolean", str: "string", list: "array", type(None): "null", dict: "object"}
_ALONE = {"$ref": (), "allOf": (), "anyOf": (), "const": ("type",), "enum": ("type",)}
"""Keywords that describe a value on their own, and the keywords that are allowed beside them."""
_REMEDIES = {"oneOf": "use anyOf", "pattern": "use format or enum"}


def regex_of_schema(schema: Mapping[str, Any] | bool) -> str:
    """Returns a regular expression for texts that a JSON schema allows. Recursive references are
    expanded to three levels.

    Raises:
      ValueError: the schema has an unsupported keyword or value, or allows no text.
    """
    pattern = ""
    for most, any_depth in _SIZES:
        try:
            written = _SchemaWriter(schema, most, any_depth).value(schema, "#")
        except RecursionError:
            raise _refused("#", "it is nested too deeply") from None
        if written is None:
            raise _refused("#", f"no value matches within {_DEPTH} levels")
        pattern = written
        if len(pattern) <= LONGEST and num_characters(parsed(pattern)) <= _MOST_CHARACTERS:
            break
    if len(pattern) > LONGEST:
        raise _refused("#", "its expansion is too large; use fewer references")
    return pattern


class _Refusal(ValueError):
    """A part of a schema cannot be kept."""


def _refused(where: str, why: str) -> _Refusal:
    return _Refusal(f"the schema cannot be used: at {where}: {why}"[:300])


class _SchemaWriter:
    """Writes expressions for the parts of a schema; None for a part that matches no text within the
    maximum depth. Maximum counts above `most` become `most`, and free values are nested up to
    `any_depth` levels.
    """

    def __init__(self, root: Any, most: int, any_depth: int):
        self._root, self._most, self._any_depth = root, most, any_depth
        self._references: list[str] = []
        self._num_parts = 0

    def value(self, schema: Any, where: str) -> str | None:
        try:
            return self._value(schema, where)
        except (_Refusal, RecursionError):
            raise
        except Exception as error:
            raise _refused(where, f"a keyword is malformed ({error!r})") from None

    def _value(self, schema: Any, where: str) -> str | None:
        if isinstance(schema, bool) or schema == {}:
            return None if schema is False else _free(self._any_depth + 1)
        if not isinstance(schema, Mapping):
            raise _refused(where, f"{str(schema)[:60]} is not a schema")
        self._num_parts += 1 + len(schema.get("enum", ()))
        if self._num_parts > _MOST_PARTS:
            raise _refused(where, "its expansion is too large; use fewer references")
        notes = _NOTES | ({"$id"} if schema is self._root else set())
        names = [name for name in schema if name not in notes and not name.startswith("x-")]
        for alone in set(_ALONE).intersection(names):
            for name in set(names).difference([alone], _ALONE[alone]):
                raise _refused(where, f"{name!r} beside {alone} is not supported; remove it")
        if "$ref" in schema:
            name = schema["$ref"]
            if self._references.count(name) > _DEPTH:
                return None
            self._references.append(name)
            pattern = self.value(self._target(name, where), where)
            self._references.pop()
            return pattern
        if "allOf" in schema:
            if len(schema["allOf"]) != 1:
                raise _refused(where, "allOf with several parts is not supported; merge them")
            return self.value(schema["allOf"][0], f"{where}/allOf/0")
        if "anyOf" in schema:
            parts = enumerate(schema["anyOf"])
            return _either(self.value(part, f"{where}/anyOf/{n}") for n, part in parts)
        kinds = schema.get("type", list(_OF_TYPE))
        kinds = list(kinds) if isinstance(kinds, list) else [kinds]
        if "const" in schema or "enum" in schema:
            return _either(map(_literal, _constants(schema, kinds, where)))
        if "type" not in schema:  # those that the keywords imply, or all
            kinds.remove("integer")
            kinds = [kind for kind in kinds if set(_OF_TYPE[kind]).intersection(names)] or kinds
        for kind in kinds:
            if kind not in _OF_TYPE:
                raise _refused(where, f"type {kind!r} is not supported; use one of {[*_OF_TYPE]}")
        known = {"type", "format"}.union(*(_OF_TYPE[kind] for kind in kinds))
        for name in names:
            if name not in known and not (name == "uniqueItems" and schema[name] is False):
                remedy = _REMEDIES.get(name, "remove it")
                raise _refused(where, f"{name!r} is not supported; {remedy}")
        writers = {
            "object": self._object,
            "array": self._array,
            "string": self._string,
            "integer": lambda *_: _number(schema, where, 0),
            "number": lambda *_: _number(schema, where, _FRACTION),
            "boolean": lambda *_: "(true|false)",
            "null": lambda *_: "null",
        }
        return _either([writers[kind](schema, where) for kind in kinds])

    def _target(self, name: Any, where: str) -> Any:
        if not isinstance(name, str) or not re.match("#(/|$)", name):
            raise _refused(where, f"$ref {name!r} is not in this schema; inline it")
        target = self._root
        for part in name[1:].split("/")[1:]:
            part = unquote(part).replace("~1", "/").replace("~0", "~")
            if not isinstance(target, Mapping) or part not in target:
                raise _refused(where, f"$ref {name!r} does not exist")
            target = target[part]
        return target

    def _string(self, schema: Mapping[str, Any], where: str) -> str | None:
        low, high = self._counts(schema, "Length", where)
        name = schema.get("format", "")
        if not isinstance(name, str) or name in _OTHER_FORMATS:
            raise _refused(where, f"format {name!r} is not supported; use one of {list(_FORMATS)}")
        if name in _FORMATS:
            if low or high is not None:
                raise _refused(where, "a format and lengths cannot be combined; keep one")
            return f'"({_FORMATS[name]})"'
        return f'"{_CHARACTER}{_times(low, high)}"' if high is None or low <= high else None

    def _counts(self, schema: Mapping[str, Any], name: str, where: str) -> tuple[int, int | None]:
        for key in (f"min{name}", f"max{name}"):
            value = schema.get(key, 0)
            if not _is_number(value) or value < 0 or value != int(value):
                raise _refused(where, f"{key}={str(value)[:60]} must be a non-negative integer")
        low, high = int(schema.get(f"min{name}", 0)), schema.get(f"max{name}")
        if low > _SIZES[0][0]:
            raise _refused(where, f"min{name}={str(low)[:60]} is too large; use {_SIZES[0][0]}")
        return low, None if high is None else min(int(high), max(low, self._most))

    def _array(self, schema: Mapping[str, Any], where: str) -> str | None:
        low, high = self._counts(schema, "Items", where)
        if high is not None and high < low:
            return None
        is_free = "items" not in schema
        item = _free(self._any_depth) if is_free else self.value(schema["items"], f"{where}/items")
        return _repeated(r"\[", item, ",[ ]?", r"\]", low, high)

    def _object(self, schema: Mapping[str, Any], where: str) -> str | None:
        named = dict(schema.get("properties", {}))
        required = dict.fromkeys(schema.get("required", ()))
        if not all(isinstance(name, str) for name in named | required):
            raise _refused(where, "properties and required must have names")
        others = schema.get("additionalProperties", True)
        if "properties" not in schema and not required:
            value = self.value(others, f"{where}/additionalProperties")
            if others is True or others == {}:
                value = _free(max(self._any_depth - 1, 0))
            pair = None if value is None else f"{_STRING}[ ]?:[ ]?{_grouped(value)}"
            return _repeated(r"\{", pair, "[ ]?,[ ]?", r"\}", 0, None)
        parts, comma = [], ""
        for name in named | required:
            value = self.value(named.get(name, others), f"{where}/properties/{name}")
            if value is None and name in required:
                return None
            if value is not None:
                pair = f"{comma}[ ]?{_literal(name)}[ ]?:[ ]?{_grouped(value)}"
                parts.append(pair if name in required else f"({pair})?")
                # Behind a required property there is always a comma.
                is_behind = name in required or comma == "[ ]?,"
                comma = "[ ]?," if is_behind else _unless_first(r"\{", "[ ]?,", "")
        return rf"\{{{''.join(parts)}[ ]?\}}"


def _constants(schema: Mapping[str, Any], kinds: Iterable[Any], where: str) -> list[Any]:
    """The values of ``const`` or ``enum`` that have one of the types."""
    values = schema.get("enum", [schema.get("const")])
    if json.loads(json.dumps(values, allow_nan=False)) != values:
        raise _refused(where, f"the constants {str(values)[:60]} are not JSON; remove them")
    return [
        value
        for value in values
        if _KINDS.get(type(value), "number") in kinds
        or ("integer" in kinds and _is_number(value) and value == int(value))
    ]


def _is_number(value: Any) -> bool:
    return type(value) is int or (type(value) is float and math.isfinite(value))


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


def _number(schema: Mapping[str, Any], where: str, fraction: int) -> str | None:
    """An expression for numbers within the bounds of a schema.

    Bounded numbers have no exponent, and at most 15 digits, because readers round longer ones to
    floats, which can reach or cross a bound.
    """
    bounds = {name: schema[name] for name in (*_LOWER, *_UPPER) if name in schema}
    for name, value in bounds.items():
        if not _is_number(value):
            raise _refused(where, f"{name}={str(value)[:60]} must be a number")
        if abs(value) >= 10**_DIGITS and (value > 0) == (name in _LOWER):
            raise _refused(where, f"{name}={str(value)[:30]} has more than 15 digits; lower it")
    if not bounds:
        return _NUMBER if fraction else _INTEGER
    parts: list[str] = []
    for size in range(fraction, -1, -1):
        # Numbers with `size` digits of a fraction are integers, in units of the last digit.
        low, high = 1 - 10**_DIGITS, 10**_DIGITS - 1
        for name, value in bounds.items():
            bound, is_out = Decimal(str(value)).scaleb(size), name.startswith("ex")
            if name in _LOWER:
                low = max(low, math.floor(bound) + 1 if is_out else math.ceil(bound))
            else:
                high = min(high, math.ceil(bound) - 1 if is_out else math.floor(bound))
        parts += _decimals(max(low, 0), high, size)
        parts += [f"-{part}" for part in _decimals(max(-high, 1), -low, size)]
    return _either(parts)


def _decimals(low: int, high: int, size: int) -> list[str]:
    """Expressions for numbers from `low`, >= 0, to `high`, in units of ``10^-size``. Each covers
    a run of numbers that differ in one digit and in all digits behind it.
    """
    parts = []
    while low <= high:
        width = max(len(str(low)), size + 1)
        if low == 10 ** (width - 1) and width > size + 1 and high >= 10 * low - 1:
            # All numbers of this width, and of greater widths.
            most = len(str(high + 1)) - 1
            digits, low = f"[1-9][0-9]{_times(width - size - 1, most - size - 1)}", 10**most
            parts.append(digits + (rf"\.[0-9]{{{size}}}" if size else ""))
            continue
        free, unit = 0, 1  # the digits behind the one that differs
        while free < width - 1 and low % (10 * unit) == 0 and low + 10 * unit - 1 <= high:
            free, unit = free + 1, 10 * unit
        digit = low // unit % 10
        last = min(9, digit + (high - low + 1) // unit - 1)
        begin = str(low // unit).zfill(width - free)[:-1]
        digits = [*begin, f"[{digit}-{last}]", *["[0-9]"] * free]
        if size:
            digits.insert(len(digits) - size, r"\.")
        parts.append("".join(digits))
        low += (last - digit + 1) * unit
    return parts
