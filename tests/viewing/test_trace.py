"""The page that plays a generation, in a real browser: it shows what `changes` says."""

from __future__ import annotations

import json
import re

import browser
import numpy as np
import pytest
from viewing_cases import BYTES, decode, frame, random_row

from dlm_jax.viewing.frames import Frame, Kind, changes
from dlm_jax.viewing.trace import write_trace

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
    assert [token["place"] for token in shown["tokens"]] == list(range(after.tokens.size))
    for place, token in enumerate(shown["tokens"]):
        assert token["kind"] == Kind(int(seen.kinds[place])).name.lower()
        assert token["is_hole"] == after.is_hole[place]
        is_rated = not after.is_hole[place] and seen.kinds[place] != Kind.GIVEN
        wanted = np.exp(after.logprobs[place]) if is_rated else 0
        assert float(token["p"] or 0) == pytest.approx(wanted, abs=0.006)


def test_every_step_of_every_row_shows_what_changed(fresh_page):
    for number, frames in enumerate(ROWS):
        fresh_page.run(f"($('row').value={number}, $('row').dispatchEvent(new Event('change')))")
        # Forwards, then a jump back: a step must not depend on the way to it.
        for index in [*range(len(frames)), len(frames) // 2]:
            slide(fresh_page, index)
            expect(fresh_page, frames[index - 1] if index else None, frames[index])


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
