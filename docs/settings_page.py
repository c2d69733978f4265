"""Prints docs/settings.md: every setting of a request, as declared by its rule.

``python docs/settings_page.py > docs/settings.md``
"""

from __future__ import annotations

import typing
from collections.abc import Iterable

from dlm_jax.sampling.program import RowParams
from dlm_jax.sampling.rules import BUILT_IN, GEN_LENGTH
from dlm_jax.settings import ABOVE_ZERO, FINITE, INT_LIMIT, Setting

_HEAD = """# Settings

Every setting of a request is also a keyword of `dlm_jax.generate`, a flag of `sample.py` (with
dashes for underscores), a field of `SamplingParams`, and a recommendation in a config's `[sample]`.
Those under "Presets" reproduce other programs or serve studies: presets, configs and keywords set
them; flags and requests do not.
`python docs/settings_page.py` prints this page from the declarations of the rules.
"""
_KINDS = {
    "transforms": "Logit transforms", "fill": "Fill", "commit": "Commit rules",
    "remask": "Remask rules", "edit": "Edit rules",
    "cache": "Caches",
}  # fmt: skip
_PRESETS = "Presets"
_LISTED = {str: "names", int: "ids", float: "numbers"}


def page() -> str:
    shown: set[str] = set()
    parts = [_HEAD]
    for title, settings in _sections():
        rest = [s for s in settings if s.name not in shown and s.is_preset == (title == _PRESETS)]
        new = list({s.name: s for s in rest}.values())
        shown |= {s.name for s in new}
        if new:
            rows = "\n".join(map(_row, new))
            parts.append(f"## {title}\n\n| setting | default | values | effect |\n"
                         f"| --- | --- | --- | --- |\n{rows}\n")  # fmt: skip
    return "\n".join(parts)


def _sections() -> Iterable[tuple[str, Iterable[Setting]]]:
    known = BUILT_IN.settings
    yield (
        "The row",
        [s for s in known.values() if s in (GEN_LENGTH, *RowParams.settings())],
    )
    yield "Which rules", [known[n] for n in ("order", "fill", "remask", "edit", "edit_scoring",
                                             "cache", "chain", "ignore_eos",
                                             "structure")]  # fmt: skip
    for kind, title in _KINDS.items():
        entries = getattr(BUILT_IN, kind).values()
        classes = [cls for e in entries for cls in (e if isinstance(e, tuple) else (e,))]
        yield title, [s for cls in classes for s in cls.settings()]
    yield "Re-noise", [s for s in known.values() if s.name.startswith("renoise")]
    yield _PRESETS, [s for s in known.values() if s.is_preset]


def _row(setting: Setting) -> str:
    default = ",".join(setting.default) if setting.name == "chain" else setting.default
    return f"| `{setting.name}` | `{default}` | {_values(setting)} | {setting.help} |"


def _values(setting: Setting) -> str:
    if setting.choices is not None:
        return ", ".join(f"`{name}`" for name in setting.choices)
    if setting.is_list:
        is_plain = typing.get_origin(setting.annotation) is tuple
        return _LISTED[typing.get_args(setting.annotation)[0]] if is_plain else "`id: number`"
    if setting.kind is str:
        return "text"
    if setting.kind is bool:
        return "`true`, `false`"
    low = "(0" if setting.low == ABOVE_ZERO else f"[{setting.low:.10g}"
    limit = INT_LIMIT if setting.kind is int else FINITE
    low = "any number" if setting.low <= -limit else low
    if setting.high >= limit:
        return low if low == "any number" else f"{low}, ...)"
    return f"{low}, {setting.high:.10g}]"


def main() -> int:
    print(page(), end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
