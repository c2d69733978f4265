"""Draws docs/denoising.svg: two texts of the shipped model with the same number of forwards.

    python -m benchmarks.denoising_picture [--out docs/denoising.svg]

The upper text is drawn in parallel: the tokens of a step are independent. The sampler head fills
the lower text in waves. Both use the same seed and the same number of forwards.
"""

from __future__ import annotations

import argparse
import sys
from html import escape
from pathlib import Path
from typing import Any

import dlm_jax
from dlm_jax.cli.common import start_jax

PANELS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("parallel: tokens of a step are drawn independently", {"fill": "parallel", "order": "random"}),
    ("wavefront: each token is drawn beside its neighbours", {}),
)
SETTINGS: dict[str, Any] = {"steps": 8, "gen_length": 60, "seed": 3}
CHARACTER, LINE, MARGIN = 9.05, 22, 20
SECONDS, PAUSE = 0.7, 4.0
"""Duration of one step, and of the finished text, in seconds."""
STYLE = """
svg { background: #ffffff }
text { font: 15px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #1f2328 }
.title { font-weight: 600; fill: #3949ab }
.hole { fill: #d0d7de }
"""


def _pieces(texts: dlm_jax.Texts, model: dlm_jax.Model) -> list[tuple[str, int]]:
    """The text of each new token and the step that wrote it."""
    tokens, committed = texts.tokens[0], texts.committed[0]
    end = int(texts.lengths[0])
    found, before = [], ""
    for stop in range(1, end + 1):
        text = model.tokenizer.decode(tokens[:stop])
        found.append((text[len(before) :], int(committed[stop - 1])))
        before = text
    return found


def _panel(title: str, pieces: list[tuple[str, int]], top: float) -> tuple[list[str], float, float]:
    """The marks of one text, the vertical position below it, and its width."""
    marks = [f'<text class="title" x="{MARGIN}" y="{top}">{escape(title)}</text>']
    column, y, widest = 0, top + LINE * 1.3, len(title)
    for text, step in pieces:
        shown = text.replace("\n", "")
        width = max(len(shown), 1)
        ends_lines = text.count("\n")
        starts_with_end = text.startswith("\n") and bool(shown)
        if starts_with_end:
            column, y, ends_lines = 0, y + LINE * ends_lines, 0
        x = MARGIN + column * CHARACTER
        marks.append(f'<rect class="hole h{step}" x="{x:.1f}" y="{y - 14:.1f}" '
                     f'width="{width * CHARACTER - 1.5:.1f}" height="18" rx="3"/>')  # fmt: skip
        word = shown.strip()
        if word:
            begin = x + (len(shown) - len(shown.lstrip())) * CHARACTER
            place = f'x="{begin:.1f}" y="{y:.1f}" textLength="{len(word) * CHARACTER:.1f}"'
            marks.append(f'<text class="t{step}" {place}>{escape(word)}</text>')
        column += len(shown)
        widest = max(widest, column + 1)
        if ends_lines:
            column, y = 0, y + LINE * ends_lines
    return marks, y + LINE * 2, MARGIN * 2 + widest * CHARACTER


def _animation(steps: int) -> str:
    """CSS rules that repeatedly show each token and hide its hole from the token's step on."""
    total = steps * SECONDS + PAUSE
    lines = []
    for step in range(steps):
        at = 100 * (step + 1) * SECONDS / total
        lines += [
            f"@keyframes t{step} {{ 0%, {at - 0.01:.2f}% {{ opacity: 0 }} "
            f"{at:.2f}%, 100% {{ opacity: 1 }} }}",
            f"@keyframes h{step} {{ 0%, {at - 0.01:.2f}% {{ opacity: 1 }} "
            f"{at:.2f}%, 100% {{ opacity: 0 }} }}",
            f".t{step} {{ animation: t{step} {total:.1f}s infinite }}",
            f".h{step} {{ opacity: 0; animation: h{step} {total:.1f}s infinite }}",
        ]
    still = "@media (prefers-reduced-motion: reduce) { text, .hole { animation: none !important } }"
    return "\n".join([*lines, still])


def draw(panels: list[tuple[str, list[tuple[str, int]]]], steps: int) -> str:
    """The picture as SVG, with one panel per title."""
    marks, top, width = [], MARGIN + 10.0, 0.0
    for title, pieces in panels:
        new, top, wide = _panel(title, pieces, top)
        marks += new
        width = max(width, wide)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {top - LINE:.0f}" '
        f'width="{width:.0f}" height="{top - LINE:.0f}">'
    )
    return "\n".join([head, f"<style>{STYLE}{_animation(steps)}</style>", *marks, "</svg>", ""])


def main() -> int:
    """Writes the picture and prints both texts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/denoising.svg"))
    args = parser.parse_args()
    start_jax()
    model = dlm_jax.load()
    panels = []
    for title, settings in PANELS:
        texts = dlm_jax.generate(model, **SETTINGS, **settings)
        forwards = int(texts.forwards[0])
        panels.append((f"{title} ({forwards} forwards)", _pieces(texts, model)))
        print(f"{title}, {forwards} forwards\n{texts.texts[0]}\n", flush=True)
    args.out.write_text(draw(panels, SETTINGS["steps"]), encoding="utf-8")
    print(f"{args.out}: {args.out.stat().st_size} bytes", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
