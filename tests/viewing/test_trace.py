"""The page that plays a generation, in a real browser: it shows what `changes` says."""

from __future__ import annotations

import json
import re

import browser
import numpy as np
import pytest
from viewing_cases import BYTES, decode, frame, random_row

from dlm_jax.viewing.frames import Frame, Kind, Pieces, changes
from dlm_jax.viewing.trace import trace_data, write_trace

TITLE = "</title><script>throw 1</script> & {{data}} \ud800"
ROWS = [
    random_row(0, seed=1),
    random_row(5, seed=2),
    [frame("", row=7)],
    [frame("AB", row=8), frame("CAB", row=8, step=1, origin=[-1, 0, 1])],
    [frame("ab", row=9), frame("aB", row=9, step=1, committed=[-1, -1], logprobs=[0, 0])],
]
# What the page shows: for every token its class and its probability, and the deleted places.
SHOWN = """({
  row: document.getElementById("row").selectedOptions[0].text,
  step: document.getElementById("step").textContent + document.getElementById("steps").textContent,
  holes: document.getElementById("holes").textContent,
  status: document.getElementById("status").textContent,
  counts: [...document.querySelectorAll("#legend .n")].map((n) => Number(n.textContent)),
  text: document.getElementById("canvas").textContent,
  tokens: [...document.querySelectorAll("#canvas .tok")].map((span) => ({
    place: Number(span.dataset.place), kind: span.classList[1],
    is_hole: span.classList.contains("hole"), p: span.style.getPropertyValue("--p") })),
  deleted: [...document.querySelectorAll("#canvas .gone")].map((s) => Number(s.dataset.place)),
})"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = browser.find()
    if path is None:
        pytest.skip(f"no browser here: none of {', '.join(browser.NAMES)} is on the PATH")
    folder = tmp_path_factory.mktemp("trace")
    write_trace(folder / "out.html", ROWS, decode, title=TITLE)
    with browser.Browser(path, folder / "profile") as opened:
        opened.url = (folder / "out.html").as_uri()
        opened.open(opened.url)
        yield opened
        assert opened.errors == []
        assert opened.requests == [opened.url]


@pytest.fixture
def fresh_page(page):
    """The page on its first row and first step, with nothing playing."""
    page.run("(pause(), $('row').value = 0, view.index = 0, choose(0), $('canvas').focus())")
    return page


def slide(page, index: int) -> None:
    page.run(
        f"(s => {{ s.value = {index}; s.dispatchEvent(new Event('input')); }})"
        "(document.getElementById('slider'))"
    )


def expect(page, before: Frame | None, after: Frame) -> None:
    """Asserts that the page shows `after`, and how it came from `before`."""
    shown, seen = page.run(SHOWN), changes(before, after)
    assert shown["row"] == str(after.row)
    assert shown["step"] == f"{after.step}" + (f"/{after.steps}" if after.steps else "")
    assert shown["holes"] == str(int(after.is_hole.sum()))
    assert shown["status"] == after.status
    assert shown["deleted"] == seen.deleted.tolist()
    assert shown["counts"] == [*(seen.count(kind) for kind in Kind), len(seen.deleted)]
    pieces = list(Pieces(decode).split(after.tokens, after.is_hole))
    assert len(shown["tokens"]) == len(pieces)
    for token, piece in zip(shown["tokens"], pieces, strict=True):
        kinds = seen.kinds[piece.start : piece.stop]
        assert token["place"] == piece.start
        assert token["kind"] == Kind(int(kinds.max())).name.lower()
        assert token["is_hole"] == after.is_hole[piece.start]
        is_rated = not after.is_hole[piece.start] and kinds.max() != Kind.GIVEN
        wanted = np.exp(after.logprobs[piece.start]) if is_rated else 0
        assert float(token["p"] or 0) == pytest.approx(wanted, abs=0.006)


def test_every_step_of_every_row_shows_what_changed(fresh_page):
    for number, frames in enumerate(ROWS):
        fresh_page.run(f"($('row').value={number}, $('row').dispatchEvent(new Event('change')))")
        # Forwards, then a jump back: a step must not depend on the way to it.
        for index in [*range(len(frames)), len(frames) // 2]:
            slide(fresh_page, index)
            expect(fresh_page, frames[index - 1] if index else None, frames[index])


def test_the_text_of_the_page_is_the_text_of_the_canvas(fresh_page):
    frames = ROWS[0]
    slide(fresh_page, len(frames) - 1)
    text = fresh_page.run(
        "[...document.querySelectorAll('#canvas .tok')].map(s => [...s.childNodes]"
        ".filter(n => n.nodeType === 3).map(n => n.data).join('')).join('')"
    )
    last = frames[-1]
    wanted = "".join(p.text for p in Pieces(decode).split(last.tokens, last.is_hole))
    assert text == wanted.replace("\t", "")
    assert "⏎" in fresh_page.run("document.getElementById('canvas').textContent")


def test_keys_and_buttons_step_and_play(fresh_page):
    def index() -> int:
        return fresh_page.run("view.index")

    last = len(ROWS[0]) - 1
    keys = [("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("End", last),
            ("ArrowRight", last), ("Home", 0), ("ArrowLeft", 0)]  # fmt: skip
    for key, wanted in keys:
        fresh_page.press(key)
        assert index() == wanted
    # With the slider in focus a key must not count twice: by the browser and by the page.
    fresh_page.run("$('slider').focus()")
    fresh_page.press("ArrowRight")
    assert index() == 1
    for button, wanted in [("next", 2), ("last", last), ("first", 0), ("next", 1), ("back", 0)]:
        fresh_page.run(f"$('{button}').click()")
        assert index() == wanted
    fresh_page.run("$('speed').value = 30")
    fresh_page.press(" ")
    assert fresh_page.run("$('play').getAttribute('aria-label')") == "Pause"
    ended = "new Promise(done => setInterval(() => view.timer === null && done(true), 20))"
    assert fresh_page.run(ended)
    assert index() == last
    assert fresh_page.run("$('play').getAttribute('aria-label')") == "Play"


def test_a_token_is_told_in_words_by_pointer_and_by_key(fresh_page):
    slide(fresh_page, 6)
    after = ROWS[0][6]
    place = int(np.flatnonzero(after.committed >= 0)[-1])
    fresh_page.run(f"pick({place - 1}, false)")
    fresh_page.press("ArrowRight", modifiers=8)
    tip = fresh_page.run("$('tip').hidden ? '' : $('tip').textContent")
    percent = 100 * np.exp(after.logprobs[place])
    told = float(re.search(r"probability ([\d.]+) %", tip)[1])
    assert told == pytest.approx(percent, abs=0.6)
    assert f"position {place} · token {after.tokens[place]}" in tip
    assert tip.endswith(f"step {after.committed[place]}")
    fresh_page.run("document.querySelector('#canvas .tok').dispatchEvent("
        "new PointerEvent('pointerover', {bubbles: true}))")  # fmt: skip
    assert "given" in fresh_page.run("$('tip').textContent")


def test_nothing_around_the_text_moves_while_it_plays(fresh_page):
    # Large letters, so that lines come and go.
    fresh_page.run("($('canvas').style.fontSize = '40px', keepHeight())")
    boxes = set()
    assert len({frame.status for frame in ROWS[0]}) > 1
    for index in range(len(ROWS[0])):
        slide(fresh_page, index)
        boxes.add(
            fresh_page.run(
                "JSON.stringify(['#row', '#play', '#slider', '#step', '#holes', '#legend',"
                "'#canvas', '.help'].map(name => document.querySelector(name)"
                ".getBoundingClientRect()).map(b => [b.x, b.y].map(Math.round)))"
            )
        )
    fresh_page.run("($('canvas').style.fontSize = '', keepHeight())")
    assert len(boxes) == 1


def test_text_does_not_reflow_while_holes_fill(fresh_page):
    """Only commits: every token stands where its hole stood."""
    length = 60
    rng = np.random.default_rng(0)
    tokens = rng.choice([0, 1, 2, 12], length)
    order = rng.permutation(length)
    none = np.zeros(length, bool)
    row = []
    for step in range(5):
        is_hole = none.copy()
        is_hole[order[step * 15 :]] = True
        state = np.where(is_hole, 0, tokens), none, is_hole
        row.append(Frame(0, step, *state, np.where(is_hole, -1, 0), np.zeros(length)))
    data = json.dumps(trace_data([row], Pieces(decode))["rows"][0]["frames"])
    places = fresh_page.run(
        f"unfold({data}).map((frame, i, all) => {{ render(frame, all[i - 1]);"
        "return [...document.querySelectorAll('#canvas .tok')].map(s => s.getClientRects()[0])"
        ".map(b => [Math.round(b.x), Math.round(b.y + b.height / 2)].join()).join(' ') })"
    )
    assert len(set(places)) == 1


def test_controls_have_names_and_both_colour_schemes_are_readable(fresh_page):
    nameless = fresh_page.run(
        "[...document.querySelectorAll('button, input, select, #canvas')].filter(e =>"
        "!e.getAttribute('aria-label') && !e.closest('label')).map(e => e.outerHTML)"
    )
    assert nameless == []
    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        fresh_page.call("Emulation.setEmulatedMedia", features=features)
        for name, least in {"--ink": 7, "--soft": 4.5}.items():
            for ground in ("--paper", "--sheet"):
                assert contrast(fresh_page, name, ground) >= least
        for name in ("--fresh", "--rewritten", "--remasked", "--inserted", "--deleted"):
            assert contrast(fresh_page, name, "--sheet") >= 3
        assert contrast(fresh_page, "--ink", "--unsure") >= 3.5
    fresh_page.call("Emulation.setEmulatedMedia", features=[])


def contrast(page, name: str, ground: str) -> float:
    """Contrast ratio of two colours of the page, as WCAG 2 defines it."""

    def luminance(variable: str) -> float:
        text = page.run(
            f"getComputedStyle(document.documentElement).getPropertyValue('{variable}')"
        )
        values = np.array([int(text.strip()[i : i + 2], 16) for i in (1, 3, 5)]) / 255
        linear = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
        return float(linear @ [0.2126, 0.7152, 0.0722])

    high, low = sorted([luminance(name), luminance(ground)], reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_no_token_and_no_title_can_leave_its_place_in_the_page(tmp_path):
    write_trace(tmp_path / "out.html", ROWS, decode, title=TITLE)
    text = (tmp_path / "out.html").read_text("utf-8")
    assert text.count("<script") == 2
    assert text.count("</script>") == 2
    assert "\u2028" not in text
    inside = re.search(r'id="data">(.*?)</script>', text, re.S)[1]
    assert set(json.loads(inside)["pieces"].values()) >= {"</script>", "\u2028", "<", "\n"}
    assert "</title><script>throw" not in text
    assert not re.search(r"https?://", text)


def test_a_page_of_64_rows_is_small(tmp_path):
    """64 rows of 512 positions in 256 steps: some megabytes, not one number for each of them."""
    length, steps, rows = 512, 256, 4
    rng = np.random.default_rng(0)
    none = np.zeros(length, bool)

    def row(number: int) -> list[Frame]:
        tokens, logprobs = rng.integers(0, len(BYTES), length), -rng.exponential(1, length)
        when = rng.permutation(length) * steps // length
        out = []
        for step in range(steps + 1):
            is_hole = when >= step
            out.append(Frame(number, step, tokens, none, is_hole, np.where(is_hole, -1, when),
                np.where(is_hole, 0, logprobs)))  # fmt: skip
        return out

    size = write_trace(tmp_path / "a.html", [row(i) for i in range(rows)], decode, title="")
    empty = write_trace(tmp_path / "b.html", [[frame("A")]], decode, title="")
    assert (size - empty) / rows * 64 < 3_000_000


def test_a_failed_page_leaves_the_old_one_and_no_part(tmp_path):
    path = tmp_path / "out.html"
    write_trace(path, ROWS, decode, title="old")
    old = path.read_bytes()
    for rows, told in [([], "no rows"), ([[]], "row 0 of the trace has no frames")]:
        with pytest.raises(ValueError, match=told):
            write_trace(path, rows, decode, title="new")
    with pytest.raises(ValueError, match="are out of order"):
        write_trace(path, [ROWS[0][::-1]], decode, title="new")
    assert path.read_bytes() == old
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.html"]


def test_a_log_probability_that_is_no_number_is_shown_as_nothing(tmp_path):
    odd = frame("AAA", logprobs=[-np.inf, np.nan, 1e-6])
    (told,) = trace_data([[odd]], Pieces(decode))["rows"][0]["frames"]
    assert told["l"] == [2000, 2000, 0]
