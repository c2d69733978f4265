"""A headless browser, driven over a pipe with the DevTools protocol; no driver, no port."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
# The browser reads commands from descriptor 3 and writes answers to 4.
_START = """
import os, sys
ends = [os.dup(int(end)) for end in sys.argv[1:3]]
for end, place in zip(ends, (3, 4)):
    os.dup2(end, place)
    os.set_inheritable(place, True)  # dup2 leaves this out where end is place already
os.execv(sys.argv[3], sys.argv[3:])
"""


def find() -> str | None:
    """Path of an installed browser that speaks the protocol, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page in a browser of its own, which ends with the `with` block.

    `errors` collects what the page wrote to its console as warning or error, and what it threw;
    `requests` the addresses it asked for.
    """

    def __init__(self, path: str, profile: Path, *, timeout: float = 60):
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        ends = (theirs_in, theirs_out)
        flags = "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run"
        flags += " --disable-background-networking --disable-extensions --remote-debugging-pipe"
        command = [sys.executable, "-IS", "-c", _START, *map(str, ends), path, *flags.split()]
        self._process = subprocess.Popen(
            [*command, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=ends, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        for end in ends:
            os.close(end)
        self._until = time.monotonic() + timeout
        self._unread = b""
        self._number = 0
        self._session: str | None = None
        self.errors: list[str] = []
        self.requests: list[str] = []

    def __enter__(self):
        try:
            targets = self.call("Target.getTargets")["targetInfos"]
            page = next(target["targetId"] for target in targets if target["type"] == "page")
            attached = self.call("Target.attachToTarget", targetId=page, flatten=True)
            self._session = attached["sessionId"]
            for domain in ("Page", "Runtime", "Network", "Log"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._out)
        os.close(self._in)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The answer to one command of the protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self._note(answer)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            assert time.monotonic() < self._until, "the browser does not answer"
            chunk = os.read(self._in, 1 << 16)
            assert chunk, "the browser has ended"
            self._unread += chunk
        first, self._unread = self._unread.split(b"\0", 1)
        return json.loads(first)

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.errors.append(json.dumps(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def open(self, url: str) -> None:
        """Loads a page and waits until it has."""
        self.call("Page.navigate", url=url)
        while self.run("document.readyState + ' ' + location.href") != f"complete {url}":
            time.sleep(0.02)

    def run(self, script: str) -> Any:
        """Value of a JavaScript expression in the page; a promise is awaited."""
        done = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )  # fmt: skip
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def press(self, key: str, *, modifiers: int = 0) -> None:
        """Presses and lets go a key, by its name in `KeyboardEvent.key`; modifier 2 is Ctrl, 8 is
        shift.
        """
        code = {"ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "End": 35, " ": 32, "Tab": 9,
                "Enter": 13}[key]  # fmt: skip
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key.strip() or "Space",
                windowsVirtualKeyCode=code, modifiers=modifiers)  # fmt: skip
