"""A headless Chromium for tests, spoken to over two pipes in its DevTools protocol; nothing beyond it is needed."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
DEADLINE_S = 60.0


class Page:
    """One page of a browser, and what happened on it.

    Args:
        send: Writes to the browser.
        receive: Reads from it.
    """

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive = send, receive
        self._held = b""
        self._numbers = itertools.count(1)
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """Return the result of a command."""
        number = next(self._numbers)
        session = {"sessionId": self._session} if self._session else {}
        message = {"id": number, "method": method, "params": parameters, **session}
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _message(self) -> dict[str, Any]:
        until = time.monotonic() + DEADLINE_S
        while b"\0" not in self._held:
            left = until - time.monotonic()
            assert left > 0 and select.select([self._receive], [], [], left)[0], f"silent for {DEADLINE_S} s"
            data = os.read(self._receive, 1 << 20)
            assert data, "the browser has gone"
            self._held += data
        text, _, self._held = self._held.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if "method" in message:
            self.events.append(message)
        return message

    def open(self, path: Path, width: int = 1200, height: int = 900, *, dark: bool = False) -> None:
        """Load a file and wait until it has run."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        answer = self.call("Page.navigate", url=path.resolve().as_uri())
        assert "errorText" not in answer, answer
        while not self.named("Page.loadEventFired"):
            self._message()

    def named(self, method: str) -> list[dict[str, Any]]:
        """Return the parameters of the events of a kind since the page was opened."""
        return [event["params"] for event in self.events if event["method"] == method]

    def value(self, expression: str) -> Any:
        """Return what a JavaScript expression gives."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def complaints(self) -> list[str]:
        """Return the errors and warnings that the page has led to."""
        thrown = [event["exceptionDetails"]["text"] for event in self.named("Runtime.exceptionThrown")]
        logged = [event["entry"]["text"] for event in self.named("Log.entryAdded")]
        said = [json.dumps(event["args"]) for event in self.named("Runtime.consoleAPICalled")]
        return thrown + logged + said

    def requested(self) -> list[str]:
        """Return the addresses that the page has asked for."""
        return [event["request"]["url"] for event in self.named("Network.requestWillBeSent")]

    def move_to(self, selector: str) -> None:
        """Scroll to the first element of a selector and put the pointer on its middle."""
        box = self.value(
            f"(() => {{const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView({{block: 'center'}});"
            "return new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => {"
            "const b = e.getBoundingClientRect(); done([b.x + b.width / 2, b.y + b.height / 2])})))})()"
        )
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])

    def screenshot(self, selector: str = "html") -> bytes:
        """Return the picture of an element as PNG."""
        x, y, width, height = self.value(
            f"(() => {{const b = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
            "return [b.x + scrollX, b.y + scrollY, b.width, b.height]})()"
        )
        clip = {"x": x, "y": y, "width": width, "height": height, "scale": 1}
        answer = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        return base64.b64decode(answer["data"])


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """Start Chromium with an empty profile in the folder ``profile``, and end it."""
    assert CHROMIUM is not None
    to_browser, from_us = os.pipe()
    to_us, from_browser = os.pipe()
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # it refuses root otherwise
    quiet = ["--disable-gpu", "--no-first-run", "--disable-extensions", "--disable-background-networking"]
    command = [CHROMIUM, "--headless=new", "--remote-debugging-pipe", f"--user-data-dir={profile}", *quiet, *sandbox]
    command += ["--disable-dev-shm-usage", "about:blank"]
    # The protocol is spoken on descriptors 3 and 4 of the browser; from 10 up, neither lies in the other's way.
    theirs = [fcntl.fcntl(each, fcntl.F_DUPFD, 10) for each in (to_browser, from_browser)]
    moved = "import os, sys; a, b, *c = sys.argv[1:]; os.dup2(int(a), 3); os.dup2(int(b), 4); os.execv(c[0], c)"
    process = subprocess.Popen(
        [sys.executable, "-c", moved, *map(str, theirs), *command],
        pass_fds=theirs,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    for each in (to_browser, from_browser, *theirs):
        os.close(each)
    try:
        page = Page(from_us, to_us)
        yield page
    finally:
        with contextlib.suppress(OSError):
            os.write(from_us, json.dumps({"id": 0, "method": "Browser.close"}).encode() + b"\0")
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
        os.close(from_us)
        os.close(to_us)
