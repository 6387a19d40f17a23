"""Drives a headless Chromium by the DevTools protocol: opens pages, clicks, types, takes pictures.

Needs a `chromium` (or Chrome) on PATH and the package websockets, nothing else.
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from websockets.sync.client import ClientConnection, connect

DEADLINE_SECONDS = 120.0
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_KEY_CODES = {"Escape": 27, "Enter": 13, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Tab": 9}

# It asks the network for nothing of its own, and works in a container.
_QUIET = (
    *("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-gpu", "--disable-dev-shm-usage"),
)


def find_chromium() -> str | None:
    """Return the path of an installed Chromium or Chrome, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of a browser.

    errors: uncaught exceptions, failed requests and violations of the page's content policy.
    """

    def __init__(self, connection: ClientConnection) -> None:
        self._socket = connection
        self._next = 0
        self.errors: list[str] = []
        self.requests: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result. Raises: RuntimeError."""
        self._next += 1
        self._socket.send(json.dumps({"id": self._next, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(timeout=DEADLINE_SECONDS))
            if message.get("id") == self._next:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message["result"]
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        parameters = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                details = parameters["exceptionDetails"]
                self.errors.append(details.get("exception", {}).get("description") or details["text"])
            case "Log.entryAdded" if parameters["entry"]["level"] == "error":
                self.errors.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")
            case "Network.requestWillBeSent":
                self.requests.append(parameters["request"]["url"])

    def open(self, url: str) -> None:
        """Open an address, and wait until it is loaded. Forgets earlier errors and requests."""
        self.call("Page.navigate", url="about:blank")
        self.wait("location.href === 'about:blank'")
        self.errors.clear()
        self.requests.clear()
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page. Promises are awaited."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            details = result["exceptionDetails"]
            raise AssertionError(f"{script}: {details.get('exception', {}).get('description', details['text'])}")
        return result["result"].get("value")

    def wait(self, script: str) -> Any:
        """Wait until an expression is true, and return its value. Raises: AssertionError."""
        end = time.monotonic() + DEADLINE_SECONDS
        # An element has no JSON; what is not there yet may be an error.
        attempt = (
            f"(() => {{ try {{ const v = {script}; return v instanceof Node || v; }} catch {{ return null; }} }})()"
        )
        while not (value := self.run(attempt)):
            if time.monotonic() > end:
                raise AssertionError(f"not true after {DEADLINE_SECONDS:.0f} s: {script}; errors: {self.errors}")
            time.sleep(0.03)
        return value

    def text(self, selector: str) -> str:
        """Return the visible text of the first element that matches."""
        return self.wait(
            f"document.querySelector({selector!r}) && (document.querySelector({selector!r}).innerText || ' ')"
        )

    def click(self, selector: str) -> None:
        """Click with the mouse in the middle of an element, once it is on the page."""
        x, y = self._middle(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def hover(self, selector: str) -> None:
        """Move the mouse to an element."""
        x, y = self._middle(selector)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def _middle(self, selector: str) -> tuple[float, float]:
        box = self.wait(
            f"(() => {{ const e = document.querySelector({selector!r}); if (!e) return null; "
            "e.scrollIntoView({block: 'nearest'}); const r = e.getClientRects()[0]; "
            "return r && r.width ? [r.x + r.width / 2, r.y + r.height / 2] : null; })()"
        )
        return box[0], box[1]

    def type(self, text: str) -> None:
        """Type text where the focus is."""
        self.call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """Press a key: "j", "/", "Escape", "ArrowLeft"."""
        code = _KEY_CODES.get(key, ord(key[0].upper()))
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def look(self, *, width: int, height: int, dark: bool = False, is_phone: bool = False, scale: float = 1) -> None:
        """Set the size of the window in CSS pixels, and the preferred colours."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=is_phone
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Emulation.setTouchEmulationEnabled", enabled=is_phone)

    def screenshot(self, path: Path) -> None:
        """Write a picture of the window as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def open_browser(chromium: str) -> Iterator[Browser]:
    """Start a headless Chromium, and yield its page."""
    with tempfile.TemporaryDirectory(prefix="trigon-chromium-", ignore_cleanup_errors=True) as profile:
        options = ["--headless=new", "--no-sandbox", "--hide-scrollbars", "--remote-debugging-port=0", *_QUIET]
        process = subprocess.Popen(
            [chromium, *options, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            address = _page_address(Path(profile) / "DevToolsActivePort", process)
            with connect(address, max_size=None) as connection:
                yield Browser(connection)
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _page_address(file: Path, process: subprocess.Popen[bytes]) -> str:
    end = time.monotonic() + DEADLINE_SECONDS
    while not (file.is_file() and (content := file.read_text().split("\n")) and len(content) > 1):
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"{process.args[0]} did not start: exit status {process.poll()}")
        time.sleep(0.02)
    with urlopen(f"http://127.0.0.1:{content[0]}/json/list", timeout=DEADLINE_SECONDS) as answer:
        pages = json.load(answer)
    return next(page["webSocketDebuggerUrl"] for page in pages if page["type"] == "page")
