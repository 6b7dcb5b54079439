"""A headless Chromium driven over a socket with the DevTools protocol, with nothing to install.

Chromium reads commands from file descriptor 3 and writes answers and events to 4, each a JSON text
that ends with a NUL. Both are the same socket here.
"""

import base64
import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((found for name in NAMES if (found := shutil.which(name))), None)
OPTIONS = (
    "--headless",
    "--remote-debugging-pipe",
    "--no-sandbox",
    "--no-first-run",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--disable-sync",
    "--hide-scrollbars",
)
# Gives the socket the two numbers that Chromium expects, then becomes Chromium.
START = """
import os, sys
for number in (3, 4):
    os.dup2(int(sys.argv[1]), number)
os.execv(sys.argv[2], sys.argv[2:])
"""


class Chromium:
    """One browser with one tab.

    `problems` collects what went wrong on the pages: errors, warnings, and requests for anything
    but the page itself.
    """

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM is not None
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(60)
        command = [sys.executable, "-c", START, str(theirs.fileno()), CHROMIUM, *OPTIONS]
        self._process = subprocess.Popen(
            [*command, f"--user-data-dir={folder}", "about:blank"],
            pass_fds=[theirs.fileno()],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        theirs.close()
        self._unread = b""
        self._number = 0
        self._session: str | None = None
        self._events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.problems: list[str] = []

    def close(self) -> None:
        """End the browser."""
        self._session = None
        self.call("Browser.close")
        self._process.wait(timeout=20)
        self._socket.close()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol and its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._socket.sendall(json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._number:
            self._events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def open(self, page: Path, fragment: str = "") -> None:
        """Load a page and wait until it stands."""
        self._events, self.problems = [], []
        self.call("Page.navigate", url="about:blank")  # a new fragment alone would not load again
        self.call("Page.navigate", url=page.as_uri() + fragment)
        self.evaluate(
            "new Promise((done) => document.readyState === 'complete' ? done() : "
            "addEventListener('load', () => done()))"
        )

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression on the page."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"], indent=1))
        self._collect_problems()
        return answer["result"].get("value")

    def press(self, key: str, code: int, text: str = "") -> None:
        """Press a key as a person would."""
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, text=text
            )

    def emulate(
        self, width: int = 1400, height: int = 900, scheme: str = "light", media: str = "screen"
    ) -> None:
        """Set the size of the window, the system's colour scheme, and screen or print."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", media=media, features=[feature])

    def screenshot(self, file: Path) -> None:
        """What is to be seen, as PNG."""
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            received = self._socket.recv(1 << 20)
            if not received:
                raise RuntimeError("Chromium ended")
            self._unread += received
        message, _, self._unread = self._unread.partition(b"\0")
        return json.loads(message)

    def _collect_problems(self) -> None:
        for event in self._events:
            params = event.get("params", {})
            match event.get("method"):
                case "Runtime.exceptionThrown" | "Runtime.consoleAPICalled" | "Log.entryAdded":
                    self.problems.append(json.dumps(params))
                case "Page.javascriptDialogOpening":
                    self.problems.append(json.dumps(params))
                case "Network.requestWillBeSent":
                    url = params["request"]["url"]
                    if not url.startswith(("file:", "data:", "about:")):
                        self.problems.append(url)
        self._events = []
