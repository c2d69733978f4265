r"""Converts JSON schemas (JSON Schema 2020-12) to regular expressions.

A pattern matches a subset of the texts that the schema allows: properties are in the order of the
schema, and no other properties are added. If the expression for a schema is too large for an
automaton, large maximum counts and the nesting of free values are reduced until it is not. What
cannot be kept raises an error with the path of the keyword in the schema.

Character classes in ``pattern`` match what both Python and ECMA-262 match: ``\d`` and ``\w`` are
ASCII.
"""

from __future__ import annotations

import importlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from dlm_jax.inference.budget import Budget

DEPTH = 3
"""Maximum depth to which a recursive reference is expanded."""

_ANY_DEPTH = 2
_SIZES = (
    (4000, _ANY_DEPTH), (1000, _ANY_DEPTH), (500, _ANY_DEPTH), (250, _ANY_DEPTH), (120, _ANY_DEPTH),
    (60, _ANY_DEPTH), (60, 1), (30, 1), (30, 0), (15, 0), (7, 0), (3, 0), (1, 0),
)  # fmt: skip
"""Largest maximum count and nesting of free values; the first pair with a small pattern is used."""

_MOST_POSITIONS = 4000
_MOST_PARTS = 1 << 14
_LONGEST = 1 << 15
_LARGEST = 10**20
_DIGITS = 15  # of decimal numbers that floats tell apart
_UNSAFE = r'"\\\x00-\x1F'
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

_OTHER_FORMATS = frozenset({
    "idn-email", "idn-hostname", "iri", "iri-reference", "json-pointer", "regex",
    "relative-json-pointer", "uri-reference", "uri-template",
})  # fmt: skip
"""Formats of JSON Schema that are not supported. Others, such as ``password``, have no effect."""

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
    work = Budget()
    try:
        for most, any_depth in _SIZES:
            try:
                pattern = _Schema(schema, depth, most, any_depth, work).value(schema, "#")
            except _TooLong:
                if (most, any_depth) == _SIZES[-1]:
                    raise
                continue
            if pattern is None:
                raise _refused("#", f"no value matches within {depth} levels")
            work.spend(16 * len(pattern))
            if _positions(_parsed(re.sub(r"\\[pP]\{[^}]*\}", "x", pattern))) <= _MOST_POSITIONS:
                break
    except RecursionError:
        raise ValueError("the schema cannot be used: it is nested too deeply") from None
    return pattern


def _parsed(pattern: str) -> Any:
    parser: Any = importlib.import_module("re._parser")
    return parser.parse(pattern)


def _positions(items: Any) -> int:
    """The number of characters in a parsed pattern after its repeats are expanded."""
    count = 0
    for op, given in items:
        kind = str(op)
        if kind == "SUBPATTERN":
            count += _positions(given[3])
        elif kind == "BRANCH":
            count += sum(map(_positions, given[1]))
        elif kind == "MAX_REPEAT":
            low, high, inner = given
            count += (max(low, 1) if str(high) == "MAXREPEAT" else high) * _positions(inner)
        elif kind not in ("ASSERT", "ASSERT_NOT"):
            count += 1
    return count


class _TooLong(ValueError):
    """Raised for a pattern that is too long, which smaller maximum counts do not shorten."""


def _refused(where: str, why: str) -> ValueError:
    return ValueError(f"the schema cannot be used: at {where}: {why}"[:300])


def _shown(value: Any) -> str:
    """The beginning of a value as JSON, for a message."""
    try:
        return json.dumps(value)[:60]
    except (TypeError, ValueError):  # also an integer of more digits than Python writes
        return f"a value of type {type(value).__name__}"


class _Schema:
    """Converts the parts of a schema to patterns. The pattern is None if a part matches no text
    within the maximum depth. Maximum counts above `most` become `most`, and free values are nested
    up to `any_depth` levels.
    """

    def __init__(self, root: Any, depth: int, most: int, any_depth: int, work: Budget):
        self._root, self._depth, self._most, self._any_depth = root, depth, most, any_depth
        self._work = work
        self._followed: list[str] = []
        self._visited = 0

    def value(self, schema: Any, where: str) -> str | None:
        self._visited += 1
        self._work.spend(64)
        found = self._value(schema, where)
        self._work.spend_elements(len(found or ""))
        if self._visited > _MOST_PARTS or len(found or "") > _LONGEST:
            told = _refused(where, "its expansion is too large; use fewer references")
            raise _TooLong(str(told)) if self._visited <= _MOST_PARTS else told
        return found

    def _value(self, schema: Any, where: str) -> str | None:
        if schema is False:
            return None
        if schema is True or schema == {}:
            return _inner(self._any_depth + 1)
        if not isinstance(schema, Mapping):
            raise _refused(where, f"{_shown(schema)} is not a schema")
        if "$id" in schema and schema is not self._root:
            raise _refused(where, "'$id' below the root is not supported; remove it")
        if "$ref" in schema:
            return self._referred(schema, where)
        if "allOf" in schema:
            parts = [{k: v for k, v in schema.items() if k != "allOf" and k not in _NOTES}]
            parts += [
                self._resolved(part, f"{where}/allOf") for part in _listed(schema, "allOf", where)
            ]
            return self.value(self._joined(parts, where), where)
        for name in ("anyOf", "oneOf"):
            if name in schema:
                rest = {k: v for k, v in schema.items() if k != name and k not in _NOTES}
                parts = [
                    self._joined([rest, part], f"{where}/{name}/{place}")
                    for place, part in enumerate(_listed(schema, name, where))
                ]
                if name == "oneOf":
                    self._check_exclusive(parts, where)
                return _either(
                    [self.value(one, f"{where}/{name}/{n}") for n, one in enumerate(parts)]
                )
        if "const" in schema or "enum" in schema:
            return self._constant(schema, where)
        kinds = schema.get("type", self._guessed(schema))
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if not isinstance(kinds, Sequence) or not kinds:
            raise _refused(where, f"type={_shown(kinds)} names no types")
        for kind in kinds:
            if not isinstance(kind, str) or kind not in _OF_TYPE:
                raise _refused(
                    where, f"type {kind!r} is not supported; use one of {sorted(_OF_TYPE)}"
                )
        known = {name for kind in kinds for name in _OF_TYPE[kind]} | _NOTES | {"type"}
        for name in schema:
            is_neutral = (name == "uniqueItems" and schema[name] is False) or (
                name == "format" and isinstance(schema[name], str)  # concerns strings alone
            )
            if name not in known and not is_neutral and not str(name).startswith("x-"):
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
            return self.value(self._joined([rest, target], where) if rest else target, where)
        finally:
            self._followed.pop()

    def _resolved(self, schema: Any, where: str) -> Any:
        """Resolves the references of a schema in a conjunction."""
        for _ in range(_MOST_LINKS):
            if not isinstance(schema, Mapping) or "$ref" not in schema:
                return schema
            rest = {k: v for k, v in schema.items() if k != "$ref" and k not in _NOTES}
            schema = self._joined([rest, self._target(schema["$ref"], where)], where)
        raise _refused(where, "references do not resolve to a schema")

    def _target(self, name: Any, where: str) -> Any:
        if not isinstance(name, str) or not re.match("#(/|$)", name):
            raise _refused(where, f"$ref {name!r} is not in this schema; inline it")
        found = self._root
        for part in name[1:].split("/")[1:]:
            part = unquote(part).replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(part) if isinstance(found, list) else part]
            except (KeyError, IndexError, ValueError, TypeError):
                raise _refused(where, f"$ref {name!r} does not exist") from None
        return found

    def _constant(self, schema: Mapping[str, Any], where: str) -> str | None:
        values = self._constants(schema, where)
        for name in schema:
            if name not in {"const", "enum", "type"} | _NOTES:
                raise _refused(where, f"{name!r} next to constants is not supported; remove it")
        if "type" in schema:
            values = [value for value in values if _is_of(value, _kinds(schema["type"]))]
        return _either([_literal(value) for value in values])

    def _constants(self, schema: Mapping[str, Any], where: str) -> list[Any]:
        """The values that ``const`` and ``enum`` both allow."""
        listed = _listed(schema, "enum", where) if "enum" in schema else [schema["const"]]
        for value in (*listed, *([schema["const"]] if "const" in schema else [])):
            _check_json(value, where)
        if "const" in schema:
            return [one for one in listed if _key(one) == _key(schema["const"])]
        return listed

    def _string(self, schema: Mapping[str, Any], where: str) -> str | None:
        low, high = _range(schema, "minLength", "maxLength", where)
        form, pattern = schema.get("format"), schema.get("pattern")
        if isinstance(form, str) and form not in _FORMATS and form not in _OTHER_FORMATS:
            form = None
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
        return f'"{_CHARACTER}{_times(low, self._reduced(low, high))}"'

    def _reduced(self, low: int, high: int | None) -> int | None:
        return None if high is None else min(high, max(low, self._most))

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
            item = _inner(self._any_depth)
        return _listing(item, low, self._reduced(low, high))

    def _object(self, schema: Mapping[str, Any], where: str) -> str | None:
        low, high = _range(schema, "minProperties", "maxProperties", where)
        named = schema.get("properties", {})
        if high is not None and low > high:
            return None
        if not isinstance(named, Mapping) or not all(isinstance(name, str) for name in named):
            raise _refused(f"{where}/properties", "must be an object")
        needed = _listed(schema, "required", where) if "required" in schema else []
        if not all(isinstance(name, str) for name in needed):
            raise _refused(f"{where}/required", "must be a list of names")
        others = schema.get("additionalProperties", True)
        if isinstance(others, Mapping) and not set(others) - _NOTES:
            others = True
        if "properties" not in schema and not needed:
            value = (
                _inner(max(self._any_depth - 1, 0))
                if others is True
                else self.value(others, f"{where}/additionalProperties")
            )
            if low > 1:
                raise _refused(
                    where, f"minProperties={low} is not supported without properties; add them"
                )
            return _members(value, low, self._reduced(low, high))
        named = dict(named) | {name: others for name in needed if name not in named}
        needed = set(needed)
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
            elif low != 1 or (high is not None and high < most):
                raise _refused(
                    where,
                    "minProperties or maxProperties restrict optional properties; remove them",
                )
        return _sequence(pairs, is_empty_allowed=low == 0)

    def _joined(self, parts: Sequence[Any], where: str) -> Any:
        """Returns the conjunction of several schemas as one schema."""
        made: Any = {}
        for part in parts:
            made = self._both(made, part, where)
        return made

    def _both(self, one: Any, other: Any, where: str) -> Any:
        """Returns the conjunction of two schemas as one schema."""
        if one is False or other is False:
            return False
        schemas = []
        for part in (one, other):
            if part is not True and not isinstance(part, Mapping):
                raise _refused(where, f"{_shown(part)} is not a schema")
            if "$id" in ({} if part is True else part) and part is not self._root:
                raise _refused(where, "'$id' below the root is not supported; remove it")
            schemas.append(
                {} if part is True else {k: v for k, v in part.items() if k not in _NOTES}
            )
        one, other = schemas
        self._work.spend(16 * (1 + len(one) + len(other)))
        if not one or not other:
            return one or other
        made = one | other
        for name in one.keys() & other.keys():
            known, value = one[name], other[name]
            if name in _BOUNDS and _is_number(known) and _is_number(value):
                made[name] = _BOUNDS[name](known, value)
            elif name == "required":
                names = [*_listed(one, name, where), *_listed(other, name, where)]
                self._work.spend(len(names))
                if not all(isinstance(one, str) for one in names):
                    raise _refused(f"{where}/required", "must be a list of names")
                made[name] = list(dict.fromkeys(names))
            elif name == "allOf":
                made[name] = [*_listed(one, name, where), *_listed(other, name, where)]
            elif name == "enum" and isinstance(value, list) and isinstance(known, list):
                self._work.spend(8 * (len(known) + len(value)))
                for constant in known + value:
                    _check_json(constant, where)
                allowed = {_key(constant) for constant in value}
                made[name] = [constant for constant in known if _key(constant) in allowed]
            elif name == "const":
                for constant in (known, value):
                    _check_json(constant, where)
                if _key(known) != _key(value):
                    return False
            elif name == "type":
                kinds = {str(kind) for kind in _kinds(known)}, {str(k) for k in _kinds(value)}
                left = [kind for kind in _kinds(known) if kind in kinds[1]]
                left += ["integer"] * (
                    "integer" not in left and {"integer", "number"} <= kinds[0] | kinds[1]
                )
                if not left:
                    return False
                made[name] = left
            elif name in ("properties", "additionalProperties", "items", "prefixItems"):
                pass  # they depend on each other; see below
            elif not _is_same(known, value):
                raise _refused(where, f"several {name!r} for one value are not supported; use one")
        # `additionalProperties` concerns the properties that its own schema does not name.
        if "properties" in made:
            parts = [_mapping(schema, "properties", where) for schema in (one, other)]
            self._work.spend(4 * (len(parts[0]) + len(parts[1])))
            made["properties"] = {
                name: _conjunction(_of_name(one, name), _of_name(other, name))
                for name in {**parts[0], **parts[1]}
            }
        if "prefixItems" in made:
            for schema in (one, other):
                _listed({"prefixItems": []} | schema, "prefixItems", where)
            made["prefixItems"] = [
                _conjunction(_of_place(one, place), _of_place(other, place))
                for place in range(max(len(s.get("prefixItems", [])) for s in (one, other)))
            ]
        for name in ("additionalProperties", "items"):
            if name in made:
                made[name] = _conjunction(one.get(name, True), other.get(name, True))
        return made

    def _check_exclusive(self, parts: Sequence[Any], where: str) -> None:
        """Raises ValueError if a text of one part may also be valid under another part."""
        for first, one in enumerate(parts):
            for second, other in enumerate(parts):
                if first != second and not self._excludes(one, other, where, _MOST_LINKS):
                    raise _refused(
                        where,
                        f"oneOf/{min(first, second)} and oneOf/{max(first, second)} may both match "
                        f"a value; use anyOf, or give them different constants or types",
                    )

    def _excludes(self, one: Any, other: Any, where: str, links: int) -> bool:
        """Returns whether no text that is written for one schema is valid under another; False if
        unknown.
        """
        if links < 0:
            return False
        return all(
            self._excludes_case(x, y, where, links - 1)
            for x in self._cases(one, where, links)
            for y in self._cases(other, where, links)
        )

    def _cases(self, schema: Any, where: str, links: int) -> list[Mapping[str, Any]]:
        """Returns alternatives without references and unions whose union is the schema, or a schema
        that allows everything if there are too many references.
        """
        self._work.spend(16)
        if schema is False:
            return []
        if links < 0 or not isinstance(schema, Mapping):
            return [{}]
        if "$ref" in schema or "allOf" in schema:
            rest = {k: v for k, v in schema.items() if k not in {"$ref", "allOf"} | _NOTES}
            parts = [rest, *(_listed(schema, "allOf", where) if "allOf" in schema else [])]
            parts += [self._target(schema["$ref"], where)] if "$ref" in schema else []
            joined = self._joined([self._resolved(part, where) for part in parts], where)
            return self._cases(joined, where, links - 1)
        for name in ("anyOf", "oneOf"):
            if name in schema:
                rest = {k: v for k, v in schema.items() if k != name and k not in _NOTES}
                return [
                    case
                    for part in _listed(schema, name, where)
                    for case in self._cases(self._joined([rest, part], where), where, links - 1)
                ]
        return [schema]

    def _excludes_case(
        self, one: Mapping[str, Any], other: Mapping[str, Any], where: str, links: int
    ) -> bool:
        """`_excludes` for schemas without references and unions."""
        self._work.spend(64)
        if "const" in one or "enum" in one:
            return all(self._is_invalid(v, other, where) for v in self._constants(one, where))
        if "const" in other or "enum" in other:
            return all(self._is_invalid(v, one, where) for v in self._constants(other, where))
        kinds = _kinds(one.get("type", self._guessed(one)))
        allowed = _kinds(other.get("type", list(_OF_TYPE)))
        numeric = {"integer", "number"}
        some = {str(kind) for kind in allowed}
        some |= numeric if some & numeric else set()
        shared = [kind for kind in map(str, kinds) if kind in some]
        return all(self._excludes_kind(kind, one, other, where, links) for kind in shared)

    def _excludes_kind(
        self, kind: str, one: Mapping[str, Any], other: Mapping[str, Any], where: str, links: int
    ) -> bool:
        if kind in ("integer", "number"):
            return _is_apart(one, other, "imum") or _is_apart(other, one, "imum")
        if kind == "string":
            return _is_apart(one, other, "Length") or _is_apart(other, one, "Length")
        if kind == "array":
            return _is_apart(one, other, "Items") or _is_apart(other, one, "Items")
        if kind != "object":
            return False
        known, named = one.get("properties"), other.get("properties", {})
        needed, others_need = one.get("required", []), other.get("required", [])
        if not all(isinstance(x, Mapping) for x in (known or {}, named)):
            return False
        if not all(isinstance(x, list) for x in (needed, others_need)):
            return False
        self._work.spend(4 * (len(needed) + len(others_need)))
        # Texts contain only named properties.
        if known is not None or needed:
            written = {*map(str, known or {}), *map(str, needed)}
            if any(str(name) not in written for name in others_need):
                return True
        return any(
            self._excludes(_of_name(one, str(name)), _of_name(other, str(name)), where, links)
            for name in needed
        )

    def _is_invalid(self, value: Any, schema: Mapping[str, Any], where: str) -> bool:
        """Returns whether a value is not valid under a schema without references and unions; False
        if unknown.
        """
        self._work.spend(16)
        if "type" in schema and not _is_of(value, _kinds(schema["type"])):
            return True
        if "const" in schema or "enum" in schema:
            allowed = self._constants(schema, where)
            self._work.spend(len(allowed))
            return all(_key(value) != _key(one) for one in allowed)
        if not isinstance(value, Mapping):
            size = len(value) if isinstance(value, str | list) else value
            name = {str: "Length", list: "Items"}.get(type(value), "imum")
            bounds = {f"min{name}": size, f"max{name}": size}
            return _is_number(size) and (
                _is_apart(bounds, schema, name) or _is_apart(schema, bounds, name)
            )
        needed = schema.get("required", [])
        if isinstance(needed, list) and any(name not in value for name in needed):
            return True
        return any(
            all(self._is_invalid(one, case, where)
                for case in self._cases(_of_name(schema, name), where, _MOST_LINKS))
            for name, one in value.items()
        )  # fmt: skip


_MOST_LINKS = 32


def _is_apart(one: Mapping[str, Any], other: Mapping[str, Any], name: str) -> bool:
    """Returns whether the maximum of one schema is below the minimum of another. `name` is the end
    of the keywords.
    """
    high: Any = one.get(f"max{name}")
    low: Any = other.get(f"min{name}")
    high = one.get("exclusiveMaximum") if high is None and name == "imum" else high
    low = other.get("exclusiveMinimum") if low is None and name == "imum" else low
    return _is_number(high) and _is_number(low) and high < low


def _mapping(schema: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    value = schema.get(name, {})
    if not isinstance(value, Mapping):
        raise _refused(f"{where}/{name}", "must be an object")
    return value


def _of_name(schema: Mapping[str, Any], name: str) -> Any:
    """The schema of the property with this name."""
    named = schema.get("properties", {})
    return (
        named[name]
        if isinstance(named, Mapping) and name in named
        else schema.get("additionalProperties", True)
    )


def _of_place(schema: Mapping[str, Any], place: int) -> Any:
    """The schema of the item at this place."""
    listed = schema.get("prefixItems", [])
    return listed[place] if place < len(listed) else schema.get("items", True)


def _conjunction(one: Any, other: Any) -> Any:
    if one is False or other is False:
        return False
    if one is True or one == {}:
        return other
    if other is True or other == {} or _is_same(one, other):
        return one
    return {"allOf": [one, other]}


def _is_same(one: Any, other: Any) -> bool:
    """Whether two keywords have the same value; 1 and True differ."""
    return one is other or (one == other and _shown_whole(one) == _shown_whole(other))


def _shown_whole(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=repr)


def _check_json(value: Any, where: str) -> None:
    """Raises ValueError if a constant cannot be written as JSON."""
    if isinstance(value, list):
        for one in value:
            _check_json(one, where)
    elif isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        for one in value.values():
            _check_json(one, where)
    elif not (value is None or isinstance(value, str | bool) or _is_number(value)):
        raise _refused(where, f"the constant {_shown(value)} is not JSON; remove it")


def _key(value: Any) -> Any:
    """A key that is equal for JSON values that JSON Schema takes for equal."""
    if isinstance(value, Mapping):
        return "object", frozenset((name, _key(one)) for name, one in value.items())
    if isinstance(value, list):
        return "array", tuple(map(_key, value))
    return isinstance(value, bool), value


def _inner(depth: int) -> str:
    """Returns a pattern for JSON values nested up to a limited depth."""
    plain = [_STRING, _NUMBER, "(true|false)", "null"]
    if depth > 0:
        inner = _inner(depth - 1)
        plain += [str(_listing(inner, 0, None)), str(_members(inner, 0, None))]
    return f"({'|'.join(plain)})"


def _listing(item: str | None, low: int, high: int | None) -> str | None:
    """Returns a pattern for arrays with `low` to `high` items."""
    if item is None or high == 0:
        return r"\[[ ]?\]" if low == 0 else None
    items = rf"((?:(?<=\[)|(?<!\[),)[ ]?{_grouped(item)}){_times(max(low, 1), high)}[ ]?"
    return rf"\[{items}\]" if low else rf"\[({items}|[ ]?[ ]?)\]"


_COMMA = r"(?:(?<=\{)|(?<!\{)[ ]?,)"
"""A comma before a property, unless it is the first one behind the brace."""


def _members(value: str | None, low: int, high: int | None) -> str | None:
    """Returns a pattern for objects with `low` to `high` members with arbitrary names."""
    if value is None or high == 0:
        return r"\{[ ]?\}" if low == 0 else None
    pair = f"[ ]?{_STRING}[ ]?:[ ]?{_grouped(value)}"
    members = f"({_COMMA}{pair}){_times(max(low, 1), high)}[ ]?"
    return rf"\{{{members}\}}" if low else rf"\{{({members}|[ ]?[ ]?)\}}"


def _sequence(pairs: Sequence[tuple[str, bool]], *, is_empty_allowed: bool) -> str:
    """Returns a pattern for objects with the given pairs in this order. Optional pairs may be
    missing.
    """
    made, comma = "", ""
    for pair, is_needed in pairs:
        made += f"{comma}{pair}" if is_needed else f"({comma}{pair})?"
        comma = "[ ]?," if is_needed or comma == "[ ]?," else _COMMA
    some = "" if is_empty_allowed else r"(?<!\{)"
    return rf"\{{{made}{some}[ ]?\}}"


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
        if not _is_number(value) or value < 0 or value != int(value):
            raise _refused(where, f"{name}={_shown(value)} must be a non-negative integer")
    if schema.get(low, 0) > _SIZES[0][0]:
        raise _refused(where, f"{low}={_shown(schema[low])} is too large; use at most "
                              f"{_SIZES[0][0]}")  # fmt: skip
    return int(schema.get(low, 0)), int(schema[high]) if high in schema else None


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, int) or math.isfinite(value)


def _kinds(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _is_of(value: Any, kinds: Sequence[Any]) -> bool:
    if isinstance(value, bool):
        return "boolean" in kinds
    if _is_number(value):
        return "number" in kinds or ("integer" in kinds and value == int(value))
    kind = {str: "string", list: "array", type(None): "null"}.get(type(value), "object")
    return kind in kinds


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

    Readers round a fraction to a float, which can reach or cross a bound. Numbers with a fraction
    therefore have at most 15 digits unless the bounds are inclusive and floats themselves.
    """
    bounds: dict[str, Decimal] = {}
    is_exact = True
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
        if abs(value) > _LARGEST:
            is_lower = name.lower().endswith("minimum")
            if (value > 0) == is_lower:
                raise _refused(where, f"{name}={_shown(value)} is too large; use a number of at "
                                      f"most 20 digits")  # fmt: skip
            value = -_LARGEST if is_lower else _LARGEST
        bounds[name] = Decimal(str(value))
        is_exact = is_exact and value == float(value) and not name.startswith("ex")
    if not bounds:
        return _INTEGER if is_whole else _NUMBER
    size = None
    splits = [_split(abs(value)) for value in bounds.values()]
    if not is_whole and not (is_exact and max(len(rest) for _, rest in splits) <= _DIGITS):
        size = _DIGITS - max(len(str(whole)) for whole, _ in splits)
        is_whole = size <= 0
    low = max(
        ((v, n.startswith("ex")) for n, v in bounds.items() if n.lower().endswith("minimum")),
        default=None,
    )
    highs = [(v, n.startswith("ex")) for n, v in bounds.items() if n.lower().endswith("maximum")]
    high = min(highs, key=lambda pair: (pair[0], not pair[1]), default=None)
    above = _magnitudes(low, high, is_whole, size)
    below = _magnitudes(_negated(high), _negated(low), is_whole, size)
    return _either([above, below and f"-({below})"])


_Bound = tuple[Decimal, bool] | None


def _negated(bound: _Bound) -> _Bound:
    return None if bound is None else (-bound[0], bound[1])


def _magnitudes(low: _Bound, high: _Bound, is_whole: bool, size: int | None) -> str | None:
    """Returns a pattern for the non-negative numbers between two bounds with at most `size` digits
    of a fraction. Each bound is a number and a flag that excludes the number itself.
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
    no_low = low[1]
    if size is not None and len(after) > size:
        after, no_low = after[:size].rstrip("0"), True
    # A fraction may be missing if 0 satisfies its bound.
    many = rf"(\.{_digits(1, size)})?"
    bottom = many
    if after or no_low:
        above = _up(after, no_low, size)
        bottom = None if above is None else rf"\.{above}"
    if high is None:
        return _either([_with(first, bottom), f"{_between(first + 1, None)}{many}"])
    last, rest = _split(high[0])
    no_high = high[1]
    if size is not None and len(rest) > size:
        rest, no_high = rest[:size].rstrip("0"), False
    if first == last:
        # Both bounds have the same integer part, so only their fractions are compared.
        if after == rest and (no_low or no_high):
            return None
        return _with(first, _within(after, no_low, rest, no_high, size))
    if not rest and no_high:
        top = None
    elif not rest:
        top = rf"(\.0{_count(1, size)})?"
    else:
        below = _down(rest, no_high, size)
        top = rf"(\.(0{_count(1, size)}|{below}))?"
    middle = f"({_between(first + 1, last - 1)}){many}" if last - first > 1 else None
    return _either([_with(first, bottom), middle, _with(last, top)])


def _split(value: Decimal) -> tuple[int, str]:
    whole, _, rest = f"{value:f}".partition(".")
    return int(whole), rest.rstrip("0")


def _with(whole: int, fraction: str | None) -> str | None:
    return None if fraction is None else f"{whole}{fraction}"


def _count(low: int, high: int | None) -> str:
    if high is None:
        return "+" if low else "*"
    return f"{{{low},{high}}}"


def _digits(low: int, high: int | None) -> str:
    """Returns a pattern for `low` to `high` digits."""
    return "" if high == 0 else f"[0-9]{_count(low, high)}"


def _less(size: int | None) -> int | None:
    return None if size is None else size - 1


def _up(digits: str, is_excluded: bool, size: int | None) -> str | None:
    """Returns a pattern for at most `size` fractional digits at or above `digits`; above if
    `is_excluded`.
    """
    if not digits and not is_excluded:
        return _digits(0, size)
    if size == 0:
        return None
    if not digits and size is None:
        return "[0-9]*[1-9][0-9]*"
    first = int(digits[:1] or "0")
    more = [f"[{first + 1}-9]{_digits(0, _less(size))}"] if first < 9 else []
    equal = _up(digits[1:], is_excluded, _less(size))
    equals = [] if equal is None else [f"{first}{equal}"]
    return f"({'|'.join([*equals, *more])})" if equals or more else None


def _down(digits: str, is_excluded: bool, size: int | None) -> str | None:
    """Returns a pattern for 1 to `size` fractional digits at or below `digits`; below if
    `is_excluded`.
    """
    if size == 0:
        return None
    if not digits:
        return None if is_excluded else f"0{_count(1, size)}"
    first, rest = int(digits[0]), digits[1:]
    found = [f"[0-{first - 1}]{_digits(0, _less(size))}"] if first else []
    equal = _down(rest, is_excluded, _less(size))
    if rest or not is_excluded:
        found.append(digits[0] if equal is None else f"{digits[0]}({equal})?")
    return f"({'|'.join(found)})" if found else None


def _within(
    low: str, no_low: bool, high: str, no_high: bool, size: int | None
) -> str | None:  # fmt: skip
    """Returns a pattern for a decimal point and at most `size` fractional digits between two
    bounds.
    """
    width = max(len(low), len(high))
    shared = 0
    low, high = low.ljust(width, "0"), high.ljust(width, "0")
    while shared < width and low[shared] == high[shared]:
        shared += 1
    head = low[:shared]
    left = None if size is None else size - shared
    if shared == width:
        return rf"\.{head}{'' if left == 0 else f'0{_count(0, left)}'}" if head else (
            rf"(\.0{_count(1, size)})?"
        )  # fmt: skip
    below, over = int(low[shared]), int(high[shared])
    parts = []
    above = _up(low[shared + 1 :].rstrip("0"), no_low, _less(left))
    if above is not None:
        parts.append(f"{below}{above}")
    if over - below > 1:
        parts.append(f"[{below + 1}-{over - 1}]{_digits(0, _less(left))}")
    rest = high[shared + 1 :].rstrip("0")
    equal = _down(rest, no_high, _less(left))
    if rest or not no_high:
        parts.append(f"{over}" if equal is None else f"{over}({equal})?")
    if not parts:
        return None
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
    kept: list[str] = []

    def keep(found: re.Match[str]) -> str:
        kept.append(found[0])
        return chr(_PRIVATE + len(kept) - 1)

    for found in _DIFFERENT.finditer(pattern):
        if found[1] is not None:
            raise _refused(where, f"pattern {pattern[:60]!r}: {found[1]!r} differs in Python and "
                                  f"ECMA-262; write it otherwise")  # fmt: skip
    try:
        parsed = _parsed(re.sub(r"\\[pP]\{[^}]*\}", keep, pattern))
    except (re.error, OverflowError) as error:
        raise _refused(where, f"pattern {pattern[:60]!r}: {error}") from None
    if parsed.state.flags & ~re.UNICODE:
        raise _refused(where, "flags in a pattern are not supported; remove them")
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
_DIFFERENT = re.compile(r"\\.|\[(?!\^?\])(?:\\.|[^\]\\])*\]|(\[\^?\]|\{,[0-9]*\})", re.DOTALL)
"""In its group, an item that Python and ECMA-262 interpret differently."""

_SPACES = r" \xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
# What both Python and ECMA-262 match.
_MEMBERS = {"DIGIT": "0-9", "WORD": "0-9A-Za-z_", "SPACE": _SPACES}
# What Python or ECMA-262 matches.
_NOT_MEMBERS = {
    "DIGIT": r"\d", "WORD": r"\w", "SPACE": r"\s\ufeff",
    "NOT_DIGIT": r"\x00-/:-\U0010ffff", "NOT_WORD": r"\x00-/:-@\[-\^`{-\U0010ffff",
    "NOT_SPACE": r"\x00-\x1f!-\x9f\xa1-\u167f\u1681-\u1fff\u200b-\u2027\u202a-\u202e"
                 r"\u2030-\u205e\u2060-\u2fff\u3001-\U0010ffff",
}  # fmt: skip


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
            return rf"[^{_UNSAFE}\u2028\u2029]"
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
            elif kind == "CATEGORY":
                name = str(value).removeprefix("CATEGORY_")
                if name.startswith("NOT_"):
                    found.append(f"[^{_NOT_MEMBERS[name.removeprefix('NOT_')]}{_UNSAFE}]")
                else:
                    found.append(f"[{_MEMBERS[name]}]")
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
        return _NOT_MEMBERS[str(value).removeprefix("CATEGORY_")]


def _code(code: int) -> str:
    """Returns a pattern for one character, escaped if it has a special meaning."""
    one = chr(code)
    return one if one.isalnum() or one in " _" or code > 0x9F else f"\\x{code:02x}"
