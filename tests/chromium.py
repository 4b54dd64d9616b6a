"""A headless Chromium for tests of pages, driven through its debugging pipe with the standard library alone.

    with Page.open(path, width=400) as page:
        page.evaluate("document.title")

`CHROMIUM` is None where there is none; Debian's package is `chromium`.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_OPTIONS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
]


class Page:
    """A page of a local file. `errors` are exceptions, error messages of the console, and refused resources;
    `requests` the addresses it asked for."""

    def __init__(self, send: int, receive: int):
        self._send, self._receive = send, receive
        self._buffer, self._number, self._session = b"", 0, None
        self.errors: list[str] = []
        self.requests: list[str] = []

    @classmethod
    @contextmanager
    def open(cls, path: Path, *, width: int = 1200, height: int = 900, dark: bool = False, script: bool = True):
        """The page in a browser of its own, which ends with the `with`."""
        ours, theirs = os.pipe(), os.pipe()
        # The browser reads from its descriptor 3 and writes to 4, which a shell can put there
        command = f'exec "$0" "$@" 3<&{ours[0]} 4>&{theirs[1]}'
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
            browser = subprocess.Popen(
                ["bash", "-c", command, CHROMIUM, *_OPTIONS, f"--user-data-dir={profile}"],
                pass_fds=(ours[0], theirs[1]),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            os.close(ours[0])
            os.close(theirs[1])
            try:
                page = cls(ours[1], theirs[0])
                page._load(path.resolve().as_uri(), width, height, dark, script)
                yield page
            finally:
                os.close(ours[1])  # the browser leaves when its pipe ends
                os.close(theirs[0])
                try:
                    browser.wait(10)
                except subprocess.TimeoutExpired:
                    browser.kill()
                    browser.wait()

    def _load(self, url: str, width: int, height: int, dark: bool, script: bool) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Emulation.setScriptExecutionDisabled", value=not script)
        self.call("Page.navigate", url=url)
        self._read_until(lambda message: message.get("method") == "Page.loadEventFired")

    def call(self, method: str, **params):
        """One command of the DevTools protocol; returns its result."""
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        answer = self._read_until(lambda message: message.get("id") == number)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def _read_until(self, is_wanted, seconds: float = 60):
        end = time.monotonic() + seconds
        while True:
            while b"\0" in self._buffer:
                line, _, self._buffer = self._buffer.partition(b"\0")
                message = json.loads(line)
                self._note(message)
                if is_wanted(message):
                    return message
            if not select.select([self._receive], [], [], max(end - time.monotonic(), 0))[0]:
                raise TimeoutError("Chromium did not answer")
            if not (read := os.read(self._receive, 1 << 16)):
                raise RuntimeError("Chromium ended")
            self._buffer += read

    def _note(self, message) -> None:
        method, params = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.errors.append(json.dumps(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def evaluate(self, expression: str):
        """The value of a JavaScript expression, which must be JSON. Raises `RuntimeError` when it throws."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def centre(self, selector: str) -> tuple[float, float]:
        """Where an element is on the screen, scrolled to it."""
        box = f"document.querySelector({json.dumps(selector)})"
        self.evaluate(f"{box}.scrollIntoView({{block: 'center'}})")
        self.frame()  # the scroll event comes with a frame
        return tuple(
            self.evaluate(f"(b => [b.x + b.width / 2, b.y + b.height / 2])({box}.getClientRects()[0])"),
        )

    def frame(self) -> None:
        """Let the page draw twice."""
        drawn = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
        self.call("Runtime.evaluate", expression=drawn, awaitPromise=True)

    def hover(self, selector: str) -> None:
        x, y = self.centre(selector)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector: str) -> None:
        x, y = self.centre(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        self.frame()

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)
        self.frame()

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))
