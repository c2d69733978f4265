"""The page at /, in a real browser: it shows a text being denoised."""

import time

import browser
import pytest
from serving_cases import serving


@pytest.fixture
def page(tmp_path):
    path = browser.find()
    if path is None:
        pytest.skip(f"no browser here: none of {', '.join(browser.NAMES)} is on the PATH")
    with serving() as running, browser.Browser(path, tmp_path / "profile") as opened:
        opened.open(f"{running.url}/")
        yield opened


def _until(opened, script):
    until = time.monotonic() + 60
    while not opened.run(script):
        assert time.monotonic() < until, opened.run("document.body.innerText")
        time.sleep(0.02)


def test_it_shows_a_text_being_denoised_and_what_is_refused(page):
    page.run("find('prompt').value = 'A '; find('tokens').value = 12; find('steps').value = 12")
    page.run("window.seen = []; new MutationObserver(() => seen.push(find('canvas').textContent))"
             ".observe(find('canvas'), {childList: true})")  # fmt: skip
    page.run("find('start').click()")
    _until(page, "find('state').textContent.startsWith('done')")
    seen = page.run("seen")
    holes = [text.count("\u2591") for text in seen]
    assert seen[-1].startswith("A ") and holes[-1] == 0
    assert max(holes) >= 10 and sorted(set(holes), reverse=True) == list(dict.fromkeys(holes))
    page.run("find('temperature').value = -1; find('start').click()")
    _until(page, "find('state').textContent.includes('temperature')")
    assert not [error for error in page.errors if "400" not in error]
