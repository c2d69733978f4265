"""Converts JSON schemas (JSON Schema 2020-12) to regular expressions.

A pattern matches a subset of the texts that the schema allows: properties are in the order of the
schema, and no other properties are added. ``oneOf`` is treated as ``anyOf``. An unsupported keyword
raises an error with the path of the keyword in the schema.
"""

from __future__ import annotations

import importlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any

DEPTH = 3
"""Maximum depth to which a recursive reference is expanded."""

_ANY_DEPTH = 2
_MOST_PARTS = 1 << 14
_LONGEST = 1 << 17
_UNSAFE = r'"\\\x00-\x1F'
_CHARACTER = r'([^"\\\x00-\x1F\x7F-\x9F]|\\["\\/bfnrt])'
_STRING = f'"{_CHARACTER}*"'
_INTEGER = "(-)?(0|[1-9][0-9]*)"
_NUMBER = rf"({_INTEGER})(\.[0-9]+)?([eE][+-][0-9]+)?"
_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_NAME = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_TIME = "(2[0-3]|[01][0-9]):[0-5][0-9]:[0-5][0-9]"
_DATE = (
    "[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])"
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

_NOTES = frozenset({
    "$schema", "$id", "$comment", "$defs", "$anchor", "definitions", "title", "description",
    "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "discriminator",
    "contentMediaType", "contentEncoding",
})  # fmt: skip
_OF_TYPE = {
    "object": ["properties", "required", "additionalProperties", "minProperties", "maxProperties"],
    "array": ["items", "prefixItems", "minItems", "maxItems"],
    "string": ["minLength", "maxLength", "pattern", "format"],
    "integer": ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"],
    "boolean": [],
    "null": [],
}
_OF_TYPE["number"] = _OF_TYPE["integer"]
_BOUNDS = {"minimum": max, "maximum": min, "exclusiveMinimum": max, "exclusiveMaximum": min,
           "minItems": max, "maxItems": min, "minLength": max, "maxLength": min,
           "minProperties": max, "maxProperties": min}  # fmt: skip


def regex_of_schema(schema: Mapping[str, Any] | bool, *, depth: int = DEPTH) -> str:
    """Returns a regular expression for the texts that a JSON schema allows.

    Args:
      schema: the schema.
      depth: maximum depth to which a recursive reference is expanded.

    Raises:
      ValueError: the schema has an unsupported keyword or value, or allows no text.
    """
    try:
        pattern = _Schema(schema, depth).value(schema, "#")
    except RecursionError:
        raise ValueError("the schema cannot be used: it is nested too deeply") from None
    if pattern is None:
        raise ValueError(f"the schema cannot be used: at #: no value matches within {depth} levels")
    return pattern


def regex_of_objects() -> str:
    """Returns a regular expression for JSON objects nested up to two levels deep."""
    text = r'"([^"\\\x00-\x1F]|\\["\\/bfnrt])*"'
    plain = rf"(?:{text}|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?|true|false|null)"
    value = rf"(?:{plain}|\[(?:{plain}(?:, ?{plain})*)?\]|{_object(text, plain)})"
    return _object(text, value)


def _object(name: str, value: str) -> str:
    pair = rf"{name}: ?{value}"
    return rf"\{{(?:{pair}(?:, ?{pair})*)?\}}"


def _refused(where: str, why: str) -> ValueError:
    return ValueError(f"the schema cannot be used: at {where}: {why}"[:300])


class _Schema:
    """Converts the parts of a schema to patterns. The pattern is None if a part matches no text
    within the maximum depth.
    """

    def __init__(self, root: Any, depth: int):
        self._root, self._depth = root, depth
        self._followed: list[str] = []
        self._visited = 0

    def value(self, schema: Any, where: str) -> str | None:
        self._visited += 1
        found = self._value(schema, where)
        if self._visited > _MOST_PARTS or len(found or "") > _LONGEST:
            raise _refused(where, "its expansion is too large; use fewer references")
        return found

    def _value(self, schema: Any, where: str) -> str | None:
        if schema is False:
            return None
        if schema is True or schema == {}:
            return _inner(_ANY_DEPTH + 1)
        if not isinstance(schema, Mapping):
            raise _refused(where, f"{json.dumps(schema)[:60]} is not a schema")
        if "$ref" in schema:
            return self._referred(schema, where)
        if "allOf" in schema:
            parts = [{k: v for k, v in schema.items() if k != "allOf"}]
            parts += [
                self._resolved(part, f"{where}/allOf") for part in _listed(schema, "allOf", where)
            ]
            return self.value(_joined(parts, where), where)
        for name in ("anyOf", "oneOf"):
            if name in schema:
                rest = {k: v for k, v in schema.items() if k != name and k not in _NOTES}
                parts = [
                    self.value(_joined([rest, part], f"{where}/{name}/{place}"),
                               f"{where}/{name}/{place}")
                    for place, part in enumerate(_listed(schema, name, where))
                ]  # fmt: skip
                return _either(parts)
        if "const" in schema or "enum" in schema:
            return self._constant(schema, where)
        kinds = schema.get("type", self._guessed(schema))
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if not isinstance(kinds, Sequence) or not kinds:
            raise _refused(where, f"type={json.dumps(kinds)[:60]} names no types")
        for kind in kinds:
            if not isinstance(kind, str) or kind not in _OF_TYPE:
                raise _refused(
                    where, f"type {kind!r} is not supported; use one of {sorted(_OF_TYPE)}"
                )
        known = {name for kind in kinds for name in _OF_TYPE[kind]} | _NOTES | {"type"}
        for name in schema:
            if name not in known and not str(name).startswith("x-"):
                raise _refused(where, f"{name!r} is not supported; remove it")
        return _either([self._typed(kind, schema, where) for kind in kinds])

    def _guessed(self, schema: Mapping[str, Any]) -> list[str]:
        """Returns the types of a schema without ``type``: the types that its keywords imply, or all
        types.
        """
        found = [
            kind
            for kind, names in _OF_TYPE.items()
            if kind != "integer" and set(names) & set(schema)
        ]
        return found or [kind for kind in _OF_TYPE if kind != "integer"]

    def _typed(self, kind: str, schema: Mapping[str, Any], where: str) -> str | None:
        if kind == "boolean":
            return "(true|false)"
        if kind == "null":
            return "null"
        if kind == "string":
            return self._string(schema, where)
        if kind == "array":
            return self._array(schema, where)
        if kind == "object":
            return self._object(schema, where)
        return _number(schema, where, is_whole=kind == "integer")

    def _referred(self, schema: Mapping[str, Any], where: str) -> str | None:
        name = schema["$ref"]
        rest = {k: v for k, v in schema.items() if k != "$ref" and k not in _NOTES}
        if self._followed.count(name) > self._depth:
            return None
        target = self._target(name, where)
        self._followed.append(name)
        try:
            return self.value(_joined([rest, target], where) if rest else target, where)
        finally:
            self._followed.pop()

    def _resolved(self, schema: Any, where: str) -> Any:
        """Resolves the references of a schema in a conjunction."""
        for _ in range(_MOST_LINKS):
            if not isinstance(schema, Mapping) or "$ref" not in schema:
                return schema
            rest = {k: v for k, v in schema.items() if k != "$ref"}
            schema = _joined([rest, self._target(schema["$ref"], where)], where)
        raise _refused(where, "references do not resolve to a schema")

    def _target(self, name: Any, where: str) -> Any:
        if not isinstance(name, str) or not re.match("#(/|$)", name):
            raise _refused(where, f"$ref {name!r} is not in this schema; inline it")
        found = self._root
        for part in name[1:].split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(part) if isinstance(found, list) else part]
            except (KeyError, IndexError, ValueError, TypeError):
                raise _refused(where, f"$ref {name!r} does not exist") from None
        return found

    def _constant(self, schema: Mapping[str, Any], where: str) -> str | None:
        values = [schema["const"]] if "const" in schema else _listed(schema, "enum", where)
        if "const" in schema and "enum" in schema:
            values = [value for value in values if value in _listed(schema, "enum", where)]
        for name in schema:
            if name not in {"const", "enum", "type"} | _NOTES:
                raise _refused(where, f"{name!r} next to constants is not supported; remove it")
        if "type" in schema:
            values = [value for value in values if _is_of(value, _kinds(schema["type"]))]
        return _either([_literal(value) for value in values])

    def _string(self, schema: Mapping[str, Any], where: str) -> str | None:
        low, high = _range(schema, "minLength", "maxLength", where)
        form, pattern = schema.get("format"), schema.get("pattern")
        if form is not None and (not isinstance(form, str) or form not in _FORMATS):
            raise _refused(
                where, f"format {form!r} is not supported; use one of {sorted(_FORMATS)}"
            )
        if (form is not None) + (pattern is not None) + bool(low or high is not None) > 1:
            raise _refused(where, "pattern, format and lengths cannot be combined; keep one")
        if form is not None:
            return f'"{_FORMATS[form]}"'
        if pattern is not None:
            return f'"({_in_string(pattern, where)})"'
        if high is not None and low > high:
            return None
        return f'"{_CHARACTER}{_times(low, high)}"'

    def _array(self, schema: Mapping[str, Any], where: str) -> str | None:
        low, high = _range(schema, "minItems", "maxItems", where)
        if high is not None and low > high:
            return None
        listed = _listed(schema, "prefixItems", where) if "prefixItems" in schema else []
        first = [
            self.value(one, f"{where}/prefixItems/{place}") for place, one in enumerate(listed)
        ]
        if first:
            if "items" in schema and schema["items"] is not False and low > len(first):
                raise _refused(where, "items after prefixItems are not supported; remove them")
            if low > len(first) or None in first:
                return None
            if high is not None and high < len(first):
                first = first[:high]
            return rf"\[[ ]?{'[ ]?,[ ]?'.join(map(str, first))}[ ]?\]"
        item = self.value(schema["items"], f"{where}/items") if "items" in schema else None
        if "items" not in schema:
            item = _inner(_ANY_DEPTH)
        return _listing(item, low, high)

    def _object(self, schema: Mapping[str, Any], where: str) -> str | None:
        low, high = _range(schema, "minProperties", "maxProperties", where)
        named = schema.get("properties", {})
        if not isinstance(named, Mapping):
            raise _refused(f"{where}/properties", "must be an object")
        needed = _listed(schema, "required", where) if "required" in schema else []
        if not all(isinstance(name, str) for name in needed):
            raise _refused(f"{where}/required", "must be a list of names")
        others = schema.get("additionalProperties", True)
        if "properties" not in schema and not needed:
            value = (
                _inner(_ANY_DEPTH)
                if others is True
                else self.value(others, f"{where}/additionalProperties")
            )
            if low > 1:
                raise _refused(
                    where, f"minProperties={low} is not supported without properties; add them"
                )
            return _members(value, low, high)
        named = dict(named) | {name: others for name in needed if name not in named}
        pairs: list[tuple[str, bool]] = []
        for name, part in named.items():
            value = self.value(part, f"{where}/properties/{name}")
            if value is None and name in needed:
                return None
            if value is not None:
                pairs.append((f"[ ]?{_literal(name)}[ ]?:[ ]?{_grouped(value)}", name in needed))
        fewest = sum(is_needed for _, is_needed in pairs)
        most = len(pairs)
        if high is not None and fewest == high:
            pairs = [pair for pair in pairs if pair[1]]
        elif low > fewest or (high is not None and high < most):
            if low > most or (high is not None and fewest > high):
                return None
            if low == most:
                pairs = [(pair, True) for pair, _ in pairs]
            else:
                raise _refused(
                    where,
                    "minProperties or maxProperties restrict optional properties; remove them",
                )
        return _sequence(pairs)


_MOST_LINKS = 32


def _inner(depth: int) -> str:
    """Returns a pattern for JSON values nested up to a limited depth."""
    plain = [_STRING, _NUMBER, "(true|false)", "null"]
    if depth > 0:
        plain += [_listing(_inner(depth - 1), 0, None), _members(_inner(depth - 1), 0, None)]
    return f"({'|'.join(plain)})"


def _listing(item: str | None, low: int, high: int | None) -> str:
    """Returns a pattern for arrays with `low` to `high` items."""
    if item is None or high == 0:
        return r"\[[ ]?\]" if low == 0 else "[^\\s\\S]"
    rest = f"(,[ ]?{_grouped(item)}){_times(max(low - 1, 0), None if high is None else high - 1)}"
    return rf"\[[ ]?({_grouped(item)}{rest}){'' if low else '?'}[ ]?\]"


def _members(value: str | None, low: int, high: int | None) -> str:
    """Returns a pattern for objects with `low` to `high` members with arbitrary names."""
    if value is None or high == 0:
        return r"\{[ ]?\}"
    pair = f"{_STRING}[ ]?:[ ]?{_grouped(value)}"
    rest = f"([ ]?,[ ]?{pair}){_times(max(low - 1, 0), None if high is None else high - 1)}"
    return rf"\{{[ ]?({pair}{rest}){'' if low else '?'}[ ]?\}}"


def _sequence(pairs: Sequence[tuple[str, bool]]) -> str:
    """Returns a pattern for objects with the given pairs in this order. Optional pairs may be
    missing.
    """
    rests = [""]
    for pair, is_needed in reversed(pairs):
        rests.append(f"([ ]?,{pair}){'' if is_needed else '?'}{rests[-1]}")
    rests.reverse()
    heads = []
    for place, (pair, is_needed) in enumerate(pairs):
        heads.append(pair + rests[place + 1])
        if is_needed:
            return rf"\{{({'|'.join(heads)})[ ]?\}}"
    return rf"\{{({'|'.join(heads)})?[ ]?\}}"


def _either(parts: Iterable[str | None]) -> str | None:
    found = list(dict.fromkeys(part for part in parts if part is not None))
    return None if not found else found[0] if len(found) == 1 else f"({'|'.join(found)})"


def _grouped(pattern: str) -> str:
    return f"({pattern})" if "|" in pattern else pattern


def _times(low: int, high: int | None) -> str:
    return "*" if low == 0 and high is None else f"{{{low},{'' if high is None else high}}}"


def _listed(schema: Mapping[str, Any], name: str, where: str) -> list[Any]:
    value = schema[name]
    if not isinstance(value, list):
        raise _refused(f"{where}/{name}", "must be a list")
    return value


def _range(schema: Mapping[str, Any], low: str, high: str, where: str) -> tuple[int, int | None]:
    for name in (low, high):
        value = schema.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise _refused(where, f"{name}={json.dumps(value)[:40]} must be a non-negative integer")
    return schema.get(low, 0), schema.get(high)


def _joined(parts: Sequence[Any], where: str) -> Any:
    """Returns the conjunction of several schemas as one schema."""
    made: dict[str, Any] = {}
    for part in parts:
        if part is False:
            return False
        if part is not True and not isinstance(part, Mapping):
            raise _refused(where, f"{json.dumps(part)[:60]} is not a schema")
        for name, value in {} if part is True else part.items():
            if name in _NOTES:
                continue
            if name not in made or made[name] == value:
                made[name] = value
            elif name in _BOUNDS and all(_is_number(one) for one in (made[name], value)):
                made[name] = _BOUNDS[name](made[name], value)
            elif name == "required" and isinstance(value, list) and isinstance(made[name], list):
                made[name] = made[name] + [one for one in value if one not in made[name]]
            elif name == "properties" and all(isinstance(x, Mapping) for x in (value, made[name])):
                both = {
                    k: {"allOf": [made[name][k], v]}
                    for k, v in dict(value).items()
                    if k in made[name]
                }
                made[name] = made[name] | value | both
            elif name == "enum" and isinstance(value, list) and isinstance(made[name], list):
                made[name] = [one for one in made[name] if one in value]
            elif name == "type":
                kinds = _kinds(value)
                left = [k for k in _kinds(made[name]) if k in kinds]
                left += ["integer"] * (
                    "integer" not in left and {"integer", "number"} <= {*kinds, *_kinds(made[name])}
                )
                if not left:
                    return False
                made[name] = left
            else:
                raise _refused(where, f"several {name!r} for one value are not supported; use one")
    return made


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _kinds(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _is_of(value: Any, kinds: Sequence[Any]) -> bool:
    if isinstance(value, bool):
        return "boolean" in kinds
    names = {str: ("string",), type(None): ("null",), list: ("array",), dict: ("object",),
             int: ("integer", "number"), float: ("number",)}  # fmt: skip
    return any(name in kinds for name in names[type(value)])


def _literal(value: Any) -> str:
    """Returns a pattern for one JSON value. Spaces around commas and colons are allowed."""
    if isinstance(value, Mapping):
        pairs = [f"[ ]?{_literal(name)}[ ]?:[ ]?{_literal(one)}" for name, one in value.items()]
        return rf"\{{{'[ ]?,'.join(pairs)}[ ]?\}}"
    if isinstance(value, list):
        return rf"\[[ ]?{'[ ]?,[ ]?'.join(map(_literal, value))}[ ]?\]"
    return re.sub(r"([\\.^$*+?{}\[\]|()])", r"\\\1", json.dumps(value, ensure_ascii=False))


def _number(schema: Mapping[str, Any], where: str, *, is_whole: bool) -> str | None:
    """Returns a pattern for numbers within the bounds of a schema. Bounded numbers have no
    exponent.
    """
    bounds: dict[str, Decimal] = {}
    for name in _OF_TYPE["number"]:
        value = schema.get(name)
        if value is None:
            continue
        if not _is_number(value):
            raise _refused(where, f"{name}={json.dumps(value)[:40]} must be a number")
        bounds[name] = Decimal(str(value))
    if bounds.pop("multipleOf", Decimal(1)) != 1 or ("multipleOf" in schema and not is_whole):
        raise _refused(where, "multipleOf is not supported; remove it")
    if not bounds:
        return _INTEGER if is_whole else _NUMBER
    low = max(
        ((v, n.startswith("ex")) for n, v in bounds.items() if n.lower().endswith("minimum")),
        default=None,
    )
    highs = [(v, n.startswith("ex")) for n, v in bounds.items() if n.lower().endswith("maximum")]
    high = min(highs, key=lambda pair: (pair[0], not pair[1]), default=None)
    above = _magnitudes(low, high, is_whole)
    below = _magnitudes(_negated(high), _negated(low), is_whole)
    return _either([above, below and f"-({below})"])


_Bound = tuple[Decimal, bool] | None


def _negated(bound: _Bound) -> _Bound:
    return None if bound is None else (-bound[0], bound[1])


def _magnitudes(low: _Bound, high: _Bound, is_whole: bool) -> str | None:
    """Returns a pattern for the non-negative numbers between two bounds. Each bound is a number and
    a flag that excludes the number itself.
    """
    if low is None or low[0] < 0:
        low = Decimal(0), False
    if high is not None and (high[0] < low[0] or (high[0] == low[0] and (low[1] or high[1]))):
        return None
    first, after = _split(low[0])
    if is_whole:
        first += bool(after) or low[1]
        last = None
        if high is not None:
            whole, rest = _split(high[0])
            last = whole - (not rest and high[1])
            if last < first:
                return None
        return _between(first, last)
    # A fraction may be missing if 0 satisfies its bound.
    many = r"(\.[0-9]+)?"
    bottom = rf"\.{_up(after, low[1])}" if after or low[1] else many
    if high is None:
        return _either([_with(first, bottom), f"{_between(first + 1, None)}{many}"])
    last, rest = _split(high[0])
    below = _down(rest, high[1])
    top = None if below is None else rf"(\.(0+|{below}))?" if rest else r"(\.0+)?"
    if first == last:
        # Both bounds have the same integer part, so only their fractions are compared.
        return _with(first, _within(after, low[1], rest, high[1]))
    middle = f"({_between(first + 1, last - 1)}){many}" if last - first > 1 else None
    return _either([_with(first, bottom), middle, _with(last, top)])


def _split(value: Decimal) -> tuple[int, str]:
    whole, _, rest = f"{value:f}".partition(".")
    return int(whole), rest.rstrip("0")


def _with(whole: int, fraction: str | None) -> str | None:
    return None if fraction is None else f"{whole}{fraction}"


def _up(digits: str, is_excluded: bool) -> str:
    """Returns a pattern for fractional digits at or above `digits`; above if `is_excluded`."""
    if not digits:
        return "[0-9]*[1-9][0-9]*" if is_excluded else "[0-9]*"
    first = int(digits[0])
    more = [f"[{first + 1}-9][0-9]*"] if first < 9 else []
    return f"({'|'.join([digits[0] + _up(digits[1:], is_excluded), *more])})"


def _down(digits: str, is_excluded: bool) -> str | None:
    """Returns a pattern for fractional digits at or below `digits`; below if `is_excluded`."""
    if not digits:
        return None if is_excluded else "0+"
    first, rest = int(digits[0]), digits[1:]
    found = [f"[0-{first - 1}][0-9]*"] if first else []
    equal = _down(rest, is_excluded)
    if rest or not is_excluded:
        found.append(digits[0] if equal is None else f"{digits[0]}({equal})?")
    return f"({'|'.join(found)})" if found else None


def _within(low: str, no_low: bool, high: str, no_high: bool) -> str | None:
    """Returns a pattern for a decimal point and fractional digits between two bounds."""
    size = max(len(low), len(high))
    shared = 0
    low, high = low.ljust(size, "0"), high.ljust(size, "0")
    while shared < size and low[shared] == high[shared]:
        shared += 1
    head = low[:shared]
    if shared == size:
        return rf"\.{head}0*" if head else r"(\.0+)?"
    below, over = int(low[shared]), int(high[shared])
    parts = [f"{below}{_up(low[shared + 1 :].rstrip('0'), no_low)}"]
    if over - below > 1:
        parts.append(f"[{below + 1}-{over - 1}][0-9]*")
    rest = high[shared + 1 :].rstrip("0")
    equal = _down(rest, no_high)
    if rest or not no_high:
        parts.append(f"{over}" if equal is None else f"{over}({equal})?")
    found = rf"\.{head}({'|'.join(parts)})"
    return rf"({found})?" if not low.strip("0") and not no_low else found


def _between(low: int, high: int | None) -> str:
    """Returns a pattern for integers from `low` (at least 0) to `high`, without leading zeros."""
    if high is None:
        if low <= 1:
            return "[1-9][0-9]*" if low else "(0|[1-9][0-9]*)"
        size = len(str(low))
        return f"({_same_size(str(low), '9' * size)}|[1-9][0-9]{{{size},}})"
    parts = []
    while len(str(low)) < len(str(high)):
        edge = "9" * len(str(low))
        parts.append(_same_size(str(low), edge))
        low = int(edge) + 1
    parts.append(_same_size(str(low), str(high)))
    return f"({'|'.join(parts)})"


def _same_size(low: str, high: str) -> str:
    """Returns a pattern for digit strings from `low` to `high`, which have the same length."""
    if low == high:
        return low
    size = len(low)
    if low[0] == high[0]:
        return low[0] + _grouped(_same_size(low[1:], high[1:]))
    if size == 1:
        return f"[{low}-{high}]"
    first, last, parts = int(low[0]), int(high[0]), []
    if low[1:].strip("0"):
        parts.append(low[0] + _grouped(_same_size(low[1:], "9" * (size - 1))))
        first += 1
    is_full = not high[1:].strip("9")
    if not is_full:
        last -= 1
    if first <= last:
        digits = f"[{first}-{last}]" if first < last else str(first)
        parts.append(f"{digits}[0-9]{{{size - 1}}}")
    if not is_full:
        parts.append(high[0] + _grouped(_same_size("0" * (size - 1), high[1:])))
    return "|".join(parts)


def _in_string(pattern: Any, where: str) -> str:
    """Converts a pattern to match the JSON-escaped text inside quotes."""
    if not isinstance(pattern, str):
        raise _refused(where, "pattern must be a string")
    parser: Any = importlib.import_module("re._parser")
    kept: list[str] = []

    def keep(found: re.Match[str]) -> str:
        kept.append(found[0])
        return chr(_PRIVATE + len(kept) - 1)

    try:
        parsed = parser.parse(re.sub(r"\\[pP]\{[^}]*\}", keep, pattern))
    except (re.error, OverflowError) as error:
        raise _refused(where, f"pattern {pattern[:60]!r}: {error}") from None
    items = without_anchors(parsed, is_first=True, is_last=True)
    return _Printed(kept, where).items(items)


def without_anchors(items: Any, *, is_first: bool, is_last: bool) -> list[tuple[Any, Any]]:
    """Removes the anchors at the start and the end of a parsed pattern and returns its items."""
    items = list(items)
    while is_first and items and str(items[0][1]) in ("AT_BEGINNING", "AT_BEGINNING_STRING"):
        items.pop(0)
    while is_last and items and str(items[-1][1]) in ("AT_END", "AT_END_STRING"):
        items.pop()
    made = []
    for place, (op, given) in enumerate(items):
        ends = {
            "is_first": is_first and place == 0, "is_last": is_last and place == len(items) - 1
        }  # fmt: skip
        if str(op) == "SUBPATTERN":
            given = (*given[:3], without_anchors(given[3], **ends))
        elif str(op) == "BRANCH":
            given = (given[0], [without_anchors(one, **ends) for one in given[1]])
        made.append((op, given))
    return made


_PRIVATE = 0x10F000


class _Printed:
    """Converts parsed patterns to text. Character sets exclude characters that JSON escapes."""

    def __init__(self, kept: list[str], where: str):
        self._kept, self._where = kept, where

    def items(self, items: Iterable[tuple[Any, Any]]) -> str:
        return "".join(self._item(str(op), given) for op, given in items)

    def _item(self, op: str, given: Any) -> str:
        if op == "LITERAL":
            return self._literal(given)
        if op == "NOT_LITERAL":
            return f"[^{_code(given)}{_UNSAFE}]"
        if op == "ANY":
            return f"[^{_UNSAFE}]"
        if op == "IN":
            return self._set([(str(kind), value) for kind, value in given])
        if op == "SUBPATTERN":
            if given[1] or given[2]:
                raise _refused(self._where, "flags in a pattern are not supported")
            return f"({self.items(given[3])})"
        if op == "BRANCH":
            return f"({'|'.join(self.items(one) for one in given[1])})"
        if op in ("MAX_REPEAT", "MIN_REPEAT"):
            low, high, items = given
            return f"({self.items(items)}){_times(low, None if str(high) == 'MAXREPEAT' else high)}"
        raise _refused(self._where, f"{op} in a pattern is not supported")

    def _literal(self, code: int) -> str:
        if 0 <= code - _PRIVATE < len(self._kept):
            kept = self._kept[code - _PRIVATE]
            other = kept[0] + kept[1].swapcase() + kept[2:]
            return f"[^{other}{_UNSAFE}]"
        text = json.dumps(chr(code), ensure_ascii=False)[1:-1]
        return "".join(_code(ord(one)) for one in text)

    def _set(self, parts: list[tuple[str, Any]]) -> str:
        if parts[0][0] == "NEGATE":
            return f"[^{''.join(map(self._member, parts[1:]))}{_UNSAFE}]"
        found = []
        for kind, value in parts:
            if kind == "LITERAL":
                found.append(self._literal(value))
            elif kind == "CATEGORY" and "NOT" in str(value):
                member = self._member((kind, value)).lower()
                found.append(f"[^{member}{_UNSAFE}]")
            elif kind == "CATEGORY":
                member = self._member((kind, value))
                # Match only whitespace that a JSON string can contain without an escape.
                found.append(r"[^\S\x00-\x1F]" if member == r"\s" else member)
            else:
                found.append(self._between(*value))
        return f"({'|'.join(found)})" if len(found) > 1 else found[0]

    def _between(self, low: int, high: int) -> str:
        """Returns a pattern for a range of characters. Quotes and backslashes are matched in
        escaped form.
        """
        found, low = [], max(low, 0x20)
        for code in (0x22, 0x5C):
            if low <= code <= high:
                found += [f"[{_code(low)}-{_code(code - 1)}]"] if low < code else []
                found.append(self._literal(code))
                low = code + 1
        found += [f"[{_code(low)}-{_code(high)}]"] if low <= high else []
        return f"({'|'.join(found)})" if found else "[^\\s\\S]"

    def _member(self, part: tuple[str, Any]) -> str:
        kind, value = part
        if kind == "LITERAL":
            if 0 <= value - _PRIVATE < len(self._kept):
                return self._kept[value - _PRIVATE]
            return _code(value)
        if kind == "RANGE":
            return f"{_code(value[0])}-{_code(value[1])}"
        name = str(value).removeprefix("CATEGORY_")
        letter = {"DIGIT": "d", "SPACE": "s", "WORD": "w"}[name.removeprefix("NOT_")]
        return f"\\{letter.upper() if name.startswith('NOT_') else letter}"


def _code(code: int) -> str:
    """Returns a pattern for one character, escaped if it has a special meaning."""
    one = chr(code)
    return one if one.isalnum() or one in " _" or code > 0x9F else f"\\x{code:02x}"
