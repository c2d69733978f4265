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
    # A text is told to be done before its stream has ended, and until then no other begins.
    _until(page, "!find('start').disabled")
    values = "; ".join(f"find({name!r}).value = {value!r}" for name, value in fields.items())
    page.run(f"{values}; find('start').click()")


def test_it_shows_a_text_being_denoised_and_what_is_refused(opened):
    with opened() as (running, page):
        page.run(
            "window.seen = []; new MutationObserver(() => seen.push(find('canvas').textContent))"
            ".observe(find('canvas'), {childList: true})"
        )
        _start(page, prompt="A ", tokens=12, steps=12)
        _until(page, "find('state').textContent.startsWith('done')")
        seen = page.run("seen")
        holes = [text.count("\u2591") for text in seen]
        assert seen[-1].startswith("A ") and holes[-1] == 0
        assert max(holes) >= 10 and sorted(set(holes), reverse=True) == list(dict.fromkeys(holes))
        # What a field cannot hold is not sent.
        _start(page, temperature=-1)
        assert page.run("document.querySelector(':invalid:not(form)').id") == "temperature"
        assert page.run("find('state').textContent").startswith("done")
        # What the server refuses is told by its message.
        _start(page, temperature=1, steps=100_000)
        _until(page, "find('state').textContent.includes('steps=100000')")
        assert not [error for error in page.errors if "400" not in error]
        assert {url.split("/")[2] for url in page.requests if url.startswith("http")} == {
            running.url.split("/")[2]
        }


def test_it_asks_with_a_key_and_stops_a_row_whose_slot_is_free_then(opened):
    endless = {"order": "threshold", "threshold": 1.0, "resample": True}
    with opened(key="secret", defaults=endless) as (running, page):
        _start(page, prompt="A ", tokens=24, steps=4000)
        _until(page, "find('state').textContent.includes('key')")
        _start(page, key="secret")
        _until(page, "find('state').textContent.startsWith('step ')")
        assert running.engine.report().running == 1
        page.run("find('stop').click()")
        _until(page, "find('state').textContent === 'stopped'")
        assert running.idle()
        assert running.engine.report().work.steps < 4000
        assert not page.run("find('start').disabled")
