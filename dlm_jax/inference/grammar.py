"""Converts grammars in GBNF, the EBNF notation of llama.cpp, to regular expressions.

A rule that refers to itself only at its end or only at its beginning is converted to a loop. Other
recursion is expanded to a limited depth, so texts with deeper nesting do not match.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from dlm_jax.inference.budget import Budget

DEPTH = 3
"""Maximum depth to which a recursive rule is expanded."""

_RULE = re.compile(r"([A-Za-z][\w-]*)[ \t]*::=")
_BEGIN = re.compile(rf"(?:\s|#[^\n]*\n)*{_RULE.pattern}")
_TOKEN = re.compile(
    r"""(?P<space>(?:[ \t\r]|\#[^\n]*)+)|(?P<line>\n)|(?P<rule>[A-Za-z][\w-]*[ \t]*::=)
    |(?P<name>[A-Za-z][\w-]*)|(?P<text>"(?:[^"\\\n]|\\.)*")|(?P<set>\[(?:[^\]\\\n]|\\.)*\])
    |(?P<times>[*+?]|\{\d+(?:,\d*)?\})|(?P<sign>[()|.])""",
    re.VERBOSE,
)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}


class _Part(NamedTuple):
    """A part of a rule.

    Attributes:
      kind: ``any`` (one of the parts), ``all`` (all parts in order), ``text``, ``name``, or
        ``times``.
      text: a regular expression, the name of a rule, or the number of repetitions.
      parts: nested parts.
      line: line number in the grammar.
    """

    kind: str
    text: str = ""
    parts: tuple[_Part, ...] = ()
    line: int = 0


def is_grammar(text: str) -> bool:
    """Returns whether a text begins with a rule ``name ::= ...``, possibly after comments."""
    return _BEGIN.match(text) is not None


def regex_of_grammar(
    grammar: str, *, depth: int = DEPTH, longest: int = 1 << 15, work: Budget | None = None
) -> str:
    """Returns a regular expression for the texts that the rule ``root`` of a grammar matches.

    Args:
      grammar: rules ``name ::= ...``. Rules can contain ``"text"``, ``[sets]``, ``.``, names of
        rules, groups, ``|``, ``*``, ``+``, ``?`` and ``{m,n}``.
      depth: maximum depth to which a recursive rule is expanded.
      longest: maximum length of the expression in characters.
      work: limit on the work.

    Raises:
      ValueError: the grammar is invalid, lacks a rule, or exceeds a limit; the message contains the
        line number or the rule.
    """
    try:
        rules = _Parser(grammar).rules()
        if "root" not in rules:
            raise ValueError("the grammar has no rule 'root'; add it")
        found = _Written(rules, depth, longest, work or Budget()).rule("root", 0)
    except RecursionError:
        raise ValueError("the grammar is nested too deeply") from None
    if found is None:
        raise ValueError(f"the grammar has no text with a nesting depth of at most {depth}")
    return found


class _Parser:
    """Parses the rules of a grammar."""

    def __init__(self, grammar: str):
        self._tokens: list[tuple[str, str, int]] = []
        place, line = 0, 1
        while place < len(grammar):
            found = _TOKEN.match(grammar, place)
            if found is None:
                told = grammar[place : place + 20].split("\n")[0]
                raise ValueError(f"line {line} of the grammar cannot be parsed at {told!r}")
            if found.lastgroup != "space":
                self._tokens.append((str(found.lastgroup), found[0], line))
            line += found[0].count("\n")
            place = found.end()
        self._place = 0

    def rules(self) -> dict[str, _Part]:
        made: dict[str, _Part] = {}
        while self._skipped_lines():
            kind, text, line = self._tokens[self._place]
            if kind != "rule":
                raise ValueError(f"line {line} of the grammar does not begin a rule: {text!r}")
            self._place += 1
            name = text.removesuffix("::=").strip()
            if name in made:
                raise ValueError(f"line {line} of the grammar defines {name!r} again")
            self._skipped_lines()
            made[name] = self._choice(is_inside=False)
        return made

    def _skipped_lines(self) -> bool:
        while self._place < len(self._tokens) and self._tokens[self._place][0] == "line":
            self._place += 1
        return self._place < len(self._tokens)

    def _sees(self, sign: str, *, is_inside: bool) -> bool:
        """Returns whether the next token is this sign, possibly on a later line."""
        place = self._place
        if not self._skipped_lines():
            self._place = place
            return False
        if self._tokens[self._place][1] == sign and self._tokens[self._place][0] == "sign":
            return True
        if not is_inside:
            self._place = place
        return False

    def _choice(self, *, is_inside: bool) -> _Part:
        ways = [self._series(is_inside=is_inside)]
        while self._sees("|", is_inside=is_inside):
            self._place += 1
            self._skipped_lines()
            ways.append(self._series(is_inside=is_inside))
        return _Part("any", parts=tuple(ways))

    def _series(self, *, is_inside: bool) -> _Part:
        parts: list[_Part] = []
        while self._place < len(self._tokens):
            kind, text, line = self._tokens[self._place]
            if kind == "line":
                if not is_inside:
                    break
                self._place += 1
                continue
            if kind == "rule" or text in ("|", ")") and kind == "sign":
                break
            self._place += 1
            if kind == "times":
                if not parts:
                    raise ValueError(f"line {line} of the grammar has nothing to repeat: {text!r}")
                parts.append(_Part("times", text, (parts.pop(),), line))
            elif kind == "sign" and text == "(":
                parts.append(self._choice(is_inside=True))
                if not self._sees(")", is_inside=True):
                    raise ValueError(
                        f"line {line} of the grammar opens a group that is never closed"
                    )
                self._place += 1
            else:
                parts.append(
                    _Part("name" if kind == "name" else "text", _regex(kind, text), (), line)
                )
        return _Part("all", parts=tuple(parts))


def _regex(kind: str, text: str) -> str:
    if kind == "name":
        return text
    if kind == "set":
        # ``[`` is the only character in a set that `re` interprets differently.
        return "[" + text[1:-1].replace("[", "\\[") + "]"
    if kind == "sign":
        return "(.|\\n)"

    def plain(found: re.Match[str]) -> str:
        code = found[1]
        return _ESCAPES.get(code, chr(int(code[1:], 16)) if len(code) > 1 else code)

    written = re.sub(r"\\(x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|.)", plain, text[1:-1])
    return re.escape(written)


class _Written:
    """Expands rules into regular expressions. The expression is None if a rule matches no text
    within the maximum depth.
    """

    def __init__(self, rules: dict[str, _Part], depth: int, longest: int, work: Budget):
        self._rules, self._depth, self._longest, self._work = rules, depth, longest, work
        self._entered: list[str] = []
        self._visited = 0

    def rule(self, name: str, line: int) -> str | None:
        if name not in self._rules:
            raise ValueError(
                f"line {line} of the grammar refers to {name!r}, which is not one of its rules"
            )
        if self._entered.count(name) > self._depth:
            return None
        self._entered.append(name)
        try:
            loop = self._loop(name)
            return self._of(self._rules[name] if loop is None else loop)
        finally:
            self._entered.pop()

    def _loop(self, name: str) -> _Part | None:
        """Rewrites a rule as a loop if all its recursive calls are at the same end of its
        alternatives.
        """
        ways = self._rules[name].parts
        base = [way for way in ways if not _calls(way, name)]
        again = [way for way in ways if _calls(way, name)]
        for is_last in (True, False):
            inner = [way.parts[:-1] if is_last else way.parts[1:] for way in again]
            if again and base and all(
                (way.parts[-1] if is_last else way.parts[0]).text == name
                and (way.parts[-1] if is_last else way.parts[0]).kind == "name"
                and not any(_calls(part, name) for part in rest)
                for way, rest in zip(again, inner, strict=True)
            ):  # fmt: skip
                body = _Part("any", parts=tuple(_Part("all", parts=rest) for rest in inner))
                loop, end = _Part("times", "*", (body,)), _Part("any", parts=tuple(base))
                return _Part("all", parts=(loop, end) if is_last else (end, loop))
        return None

    def _of(self, part: _Part) -> str | None:
        self._visited += 1
        self._work.spend(8)
        found = self._expression(part)
        self._check_size(len(found or ""))
        return found

    def _check_size(self, size: int) -> None:
        self._work.spend_elements(size)
        if self._visited > self._longest or size > self._longest:
            name = self._entered[-1]
            raise ValueError(
                f"rule {name!r} of the grammar expands to more than {self._longest} characters or "
                f"parts; reduce its nesting"
            )

    def _expression(self, part: _Part) -> str | None:
        if part.kind == "text":
            return part.text
        if part.kind == "name":
            return self.rule(part.text, part.line)
        if part.kind == "times":
            inner = self._of(part.parts[0])
            if inner is None:
                return "" if part.text in "*?" or re.match(r"\{0+[,}]", part.text) else None
            return f"(?:{inner}){part.text}"
        made, size = [], 0
        for one in part.parts:
            made.append(self._of(one))
            size += len(made[-1] or "")
            self._check_size(size)
        if part.kind == "all":
            return None if None in made else "".join(map(str, made))
        ways = [way for way in made if way is not None]
        return ways[0] if len(ways) == 1 else f"(?:{'|'.join(ways)})" if ways else None


def _calls(part: _Part, name: str) -> bool:
    return (part.kind == "name" and part.text == name) or any(_calls(p, name) for p in part.parts)
