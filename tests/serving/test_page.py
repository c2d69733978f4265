"""The page at /, in a real browser: it shows a text being denoised."""

import contextlib
import time

import browser
import pytest
from serving_cases import serving

# Programs are compiled meanwhile.
_SECONDS = 240


@pytest.fixture
def opened(tmp_path):
    path = browser.find()
    if path is None:
        pytest.skip(f"no browser here: none of {', '.join(browser.NAMES)} is on the PATH")

    @contextlib.contextmanager
    def opening(**options):
        page = browser.Browser(path, tmp_path / "profile", timeout=_SECONDS)
        with serving(**options) as running, page:
            page.open(f"{running.url}/")
            yield running, page

    return opening


def _until(page, script):
    until = time.monotonic() + _SECONDS / 2
    while not page.run(script):
        assert time.monotonic() < until, page.run("document.body.innerText")
        time.sleep(0.02)


def _start(page, **fields):
    _until(page, "running === null")
    values = "; ".join(f"find({name!r}).value = {value!r}" for name, value in fields.items())
    page.run(f"{values}; find('start').click()")


def _frame(page, at):
    """What the slider shows at a place: the text, and the number of holes and marked letters."""
    page.run(f"find('step').value = {at}; find('step').dispatchEvent(new Event('input'))")
    return page.run(
        "[find('canvas').textContent, document.querySelectorAll('#canvas .hole').length,"
        " [...document.querySelectorAll('#canvas .new')].map((one) => one.textContent).join('')]"
    )


def test_it_shows_a_text_being_denoised_and_what_is_refused(opened):
    with opened() as (running, page):
        page.run(
            "window.seen = []; new MutationObserver(() => seen.push(find('canvas').textContent))"
            ".observe(find('canvas'), {childList: true})"
        )
        _start(page, prompt="A ", tokens=12, steps=12)
        _until(page, "find('state').textContent.startsWith('Done')")
        seen = page.run("seen")
        holes = [text.count("\u2591") for text in seen]
        assert seen[-1].startswith("A ") and holes[-1] == 0
        assert holes[0] == 12 and sorted(set(holes), reverse=True) == list(dict.fromkeys(holes))
        # What a field cannot hold is not sent.
        _start(page, temperature=-1)
        assert page.run("document.querySelector(':invalid:not(form)').id") == "temperature"
        assert page.run("find('state').textContent").startswith("Done")
        # What the server refuses is told by its message.
        _start(page, temperature=1, steps=100_000)
        _until(page, "find('error').textContent.includes('steps=100000')")
        assert page.run("find('state').textContent") == "Not started; below: the previous run"
        _start(page, steps=12, more="[1]")
        _until(page, "find('error').textContent.includes('JSON object')")
        _start(page, more='{"order": "sideways"}')
        _until(page, "find('error').textContent.includes('order=')")
        assert not [error for error in page.errors if "400" not in error]
        assert {url.split("/")[2] for url in page.requests if url.startswith("http")} == {
            running.url.split("/")[2]
        }


def test_ctrl_enter_starts_and_neither_the_focus_nor_the_canvas_moves(opened):
    with opened() as (_, page):
        place = "JSON.stringify(find('canvas').getBoundingClientRect())"
        page.run(
            "window.places = new Set(); new MutationObserver(() => places.add(" + place + "))"
            ".observe(find('canvas'), {childList: true}); find('prompt').value = 'A ';"
            "find('tokens').value = 24; find('prompt').focus()"
        )
        before = page.run(place)
        page.press("Enter", modifiers=2)
        _until(page, "find('state').textContent.startsWith('Done')")
        assert page.run("document.activeElement.id") == "prompt"
        assert page.run("[...places]") == [before] == [page.run(place)]
        assert page.run("find('prompt').value") == "A "
        # The button that starts keeps it as well, while it does nothing.
        page.run("find('start').focus(); find('start').click(); find('start').click()")
        assert page.run("[document.activeElement.id, find('start').ariaDisabled]") == [
            "start", "true",
        ]  # fmt: skip
        _until(page, "running === null")
        assert page.run("document.activeElement.id") == "start" and page.errors == []


def test_the_slider_shows_each_step_again(opened):
    with opened() as (_, page):
        _start(page, prompt="A ", tokens=12, steps=12, more='{"ignore_eos": true}')
        _until(page, "find('state').textContent.startsWith('Done')")
        last = page.run("Number(find('step').max)")
        frames = [_frame(page, at) for at in range(last + 1)]
        assert last >= 4 and page.run("frames.length") == last + 1
        assert frames[0] == ["A " + 12 * "\u2591", 12, ""]
        for before, now in zip(frames, frames[1:], strict=False):
            # Of one token a letter: what was a hole before and is none now is what is marked.
            pairs = zip(before[0], now[0], strict=True)
            assert "".join(new for old, new in pairs if old != new) == now[2] != ""
            assert now[1] == now[0].count("\u2591") == before[1] - len(now[2])
        # The arrow keys move it, and a new text is followed to its end.
        page.run("find('step').focus()")
        page.press("ArrowLeft")
        assert page.run("find('canvas').textContent") == frames[-2][0]
        assert page.run("find('state').textContent").startswith("Step ")
        _start(page, seed=5, ending="A", more="")
        _until(page, "find('state').textContent.startsWith('Done')")
        assert _frame(page, 0) == ["A " + 12 * "\u2591" + "A", 12, ""]


def test_it_begins_with_what_the_server_tells_of_itself(opened):
    with opened(defaults={"temperature": 0.25}) as (_, page):
        _until(page, "find('model').textContent === 'toy'")
        assert page.run("find('temperature').value") == "0.25"
        assert page.run("Number(find('tokens').value) <= Number(find('tokens').max)")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_holes_look_like_holes_by_day_and_night(opened, scheme):
    with opened() as (_, page):
        media = [{"name": "prefers-color-scheme", "value": scheme}]
        page.call("Emulation.setEmulatedMedia", features=media)
        _start(page, prompt="A ", tokens=12, steps=12)
        _until(page, "find('state').textContent.startsWith('Done')")
        _frame(page, 1)
        # Boxes without a letter in them, of one size, beside letters that are no boxes.
        looks = page.run(
            "[...document.querySelectorAll('#canvas .hole')].map((one) => {"
            " const style = getComputedStyle(one);"
            " return [one.offsetWidth, one.offsetHeight, style.color, style.display]; })"
        )
        assert len(looks) > 2 and len({tuple(one) for one in looks}) == 1
        width, height, color, display = looks[0]
        assert width > 6 and height > 10 and color == "rgba(0, 0, 0, 0)" and "block" in display
        paper, ink = page.run(
            "[getComputedStyle(document.body).color, getComputedStyle(find('prompt')).color]"
        )
        assert paper == ink == ("rgb(255, 255, 255)" if scheme == "dark" else "rgb(0, 0, 0)")


def test_it_asks_with_a_key_and_stops_a_row_whose_slot_is_free_then(opened):
    endless = {"order": "threshold", "threshold": 1.0, "resample": True}
    with opened(key="secret", defaults=endless) as (running, page):
        _start(page, prompt="A ", tokens=24, steps=4000)
        _until(page, "find('error').textContent.includes('key')")
        assert page.run("find('rest').open")
        _start(page, key="secret")
        _until(page, "find('state').textContent.startsWith('Step ') && frames.length > 1")
        assert running.engine.report().running == 1
        page.run("find('stop').click()")
        _until(page, "find('state').textContent === 'Stopped'")
        assert running.idle()
        assert running.engine.report().steps < 4000
        assert page.run("running === null && find('stop').ariaDisabled") == "true"
