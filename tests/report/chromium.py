"""A headless Chromium driven over its DevTools pipe, with nothing but the standard library."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_browser() -> str:
    """Return the path of a Chromium.

    Raises:
        FileNotFoundError: there is none.
    """
    for name in NAMES:
        if path := shutil.which(name):
            return path
    raise FileNotFoundError(
        f"these tests look at pages in Chromium and found none of {', '.join(NAMES)}; install it "
        "(Debian, Ubuntu: apt-get install chromium), or leave these tests out with -m 'not slow'"
    )


class Browser:
    """One page of a browser.

    Commands go to the browser's file descriptor 3 and answers come from its 4, each ended by a zero byte:
    https://chromedevtools.github.io/devtools-protocol/.
    """

    def __init__(self) -> None:
        binary = find_browser()
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        commands_out, self._commands = os.pipe()
        self._answers, answers_in = os.pipe()
        words = [binary, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"]
        words += ["--disable-dev-shm-usage", f"--user-data-dir={self._profile.name}", "--remote-debugging-pipe"]
        # The shell puts our pipes where Chromium looks for them.
        shell = ["bash", "-c", f'exec "$@" 3<&{commands_out} 4>&{answers_in}', "chromium", *words, "about:blank"]
        self._process = subprocess.Popen(
            shell, pass_fds=(commands_out, answers_in), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(commands_out)
        os.close(answers_in)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        """What the page reported: exceptions, console messages, requests."""
        [target] = [t for t in self.send("Target.getTargets")["targetInfos"] if t["type"] == "page"]
        self._session = self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the browser."""
        self._process.terminate()
        self._process.wait(20)
        os.close(self._commands)
        os.close(self._answers)
        self._profile.cleanup()

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result; what arrives meanwhile goes to `events`."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._commands, data) :]
        while True:
            answer = self._receive(60)
            if answer.get("id") != self._number:
                self.events.append(answer)
                continue
            assert "error" not in answer, f"{method}: {answer.get('error')}"
            return answer["result"]

    def _receive(self, seconds: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], seconds)
            chunk = os.read(self._answers, 1 << 20) if ready else b""
            assert chunk, "the browser does not answer" if not ready else "the browser has gone"
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)

    def open(self, page: Path, *, width: int = 1280, height: int = 800, dark: bool = False, tab: str = "") -> None:
        """Load a local page and wait until it is drawn."""
        self.resize(width, height)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.send("Emulation.setEmulatedMedia", features=scheme)
        self.send("Page.navigate", url="about:blank")  # a change of the hash alone would not load the page again
        self.events.clear()
        self.send("Page.navigate", url=page.resolve().as_uri() + (f"#{tab}" if tab else ""))
        self.wait_for("document.readyState === 'complete'")
        self.settle()

    def resize(self, width: int, height: int) -> None:
        """Make the window so many CSS pixels large."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def settle(self) -> None:
        """Wait for two frames, so that observers have run and what they drew is on the screen."""
        self.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; a promise is waited for."""
        result = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, f"{expression}: {result['exceptionDetails']}"
        return result["result"].get("value")

    def wait_for(self, expression: str, seconds: float = 30) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while not self.evaluate(expression):
            assert time.monotonic() < end, f"never became true: {expression}"
            time.sleep(0.02)

    def texts(self, selector: str) -> list[str]:
        """Return the text of every element that a CSS selector finds."""
        return self.evaluate(f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => e.textContent)")

    def click(self, selector: str) -> None:
        """Press the mouse in the middle of the first element that a selector finds, after scrolling to it."""
        self.evaluate(f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'center'}})")
        self.settle()
        self.mouse(*self.middle(selector), "mousePressed", "mouseReleased")

    def middle(self, selector: str) -> tuple[float, float]:
        """Return the middle of an element in CSS pixels of the window."""
        box = self.evaluate(f"document.querySelector({json.dumps(selector)}).getBoundingClientRect().toJSON()")
        return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2

    def mouse(self, x: float, y: float, *kinds: str) -> None:
        """Send mouse events at a place; none given means a move."""
        for kind in kinds or ("mouseMoved",):
            button = "none" if kind == "mouseMoved" else "left"
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, clickCount=1)
        self.settle()

    def key(self, key: str) -> None:
        """Press and release a key."""
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key)
        self.settle()

    def type(self, selector: str, text: str) -> None:
        """Replace what stands in an input."""
        place = json.dumps(selector)
        self.evaluate(f"document.querySelector({place}).focus(), document.querySelector({place}).select()")
        self.send("Input.insertText", text=text)

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Write the window, or the whole page, as PNG."""
        data = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def complaints(self) -> list[str]:
        """Return the exceptions, errors and warnings of the page since it was opened."""
        self.evaluate("1")  # what was sent before this answer has then arrived
        found = []
        for event in self.events:
            if event["method"] == "Runtime.exceptionThrown":
                found.append(event["params"]["exceptionDetails"].get("exception", {}).get("description", "exception"))
            if event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] in ("error", "warning"):
                found.append(event["params"]["entry"]["text"])
            if event["method"] == "Runtime.consoleAPICalled":
                found.append(f"console.{event['params']['type']}")
        return found

    def requests(self) -> list[str]:
        """Return the addresses that the page asked for since it was opened."""
        self.evaluate("1")
        return [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]
