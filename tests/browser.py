"""A headless Chromium, driven over its DevTools protocol: what a page asks for, says on its console, and looks like."""

from __future__ import annotations

import base64
import itertools
import json
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import websocket

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
    "--remote-debugging-port=0", "--remote-allow-origins=*", "--force-device-scale-factor=1",
)  # fmt: skip
WAIT = 120.0
"""Seconds for one answer of the browser."""
PATIENCE = 60.0
"""Seconds for what a page does by itself."""
KEYS = {
    "Tab": (9, ""), "Enter": (13, "\r"), "Space": (32, " "), "Delete": (46, ""), "End": (35, ""),
    "ArrowDown": (40, ""), "ArrowUp": (38, ""),
}  # fmt: skip
"""Key -> its code and the character that it writes."""


class Tab:
    """One page. Everything that it asks of a network or says on its console is kept."""

    def __init__(self, socket: websocket.WebSocket) -> None:
        self._socket, self._numbers = socket, itertools.count(1)
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session: str | None = None
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.requests: list[str] = []
        self.said: list[str] = []
        self._loaded = False
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def open(self, path: Path | str) -> None:
        """Load a file or an address, until its load event."""
        self._loaded = False
        self._call("Page.navigate", url=path if isinstance(path, str) else path.as_uri())
        while not self._loaded:
            self._take()

    def click(self, selector: str) -> None:
        """Click the middle of an element with the mouse."""
        it = f"document.querySelector({json.dumps(selector)})"
        self.ask(f"{it}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        self.pause()  # another scroll may still go on
        box = self.ask(f"(box => [box.x + box.width / 2, box.y + box.height / 2])({it}.getBoundingClientRect())")
        for kind in ("mousePressed", "mouseReleased"):
            self._call(
                "Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", buttons=1, clickCount=1
            )  # fmt: skip

    def press(self, key: str, times: int = 1, *, shift: bool = False) -> None:
        """Press and release a key: Tab, Enter, Space, ArrowDown, End, or one character."""
        code, text = KEYS.get(key, (ord(key.upper()), key) if len(key) == 1 else (0, ""))
        for _ in range(times):
            for kind in ("keyDown" if text else "rawKeyDown", "keyUp"):
                more = {"text": text} if text and kind == "keyDown" else {}
                self._call(
                    "Input.dispatchKeyEvent", type=kind, key=" " if key == "Space" else key, code=key,
                    windowsVirtualKeyCode=code, modifiers=8 if shift else 0, **more,
                )  # fmt: skip

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self._call("Input.insertText", text=text)

    def fill(self, selector: str, text: str) -> None:
        """Replace the text of a field."""
        focused = f"const it = document.querySelector({json.dumps(selector)}); it.focus({{preventScroll: true}});"
        self.ask(f"(() => {{ {focused} it.select(); }})()")
        self._call("Input.insertText", text=text) if text else self.press("Delete")

    def until(self, expression: str, seconds: float = PATIENCE) -> None:
        """Wait until a JavaScript expression is true; it may name what is not there yet."""
        deadline = time.monotonic() + seconds
        while True:
            with suppress(AssertionError):  # the page is being exchanged for another
                if self.ask(f"Boolean({expression})"):
                    return
            assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {expression}\n{self.text()[:3000]}"
            self.pause()

    def pause(self) -> None:
        """Let the page go on for a moment; events of the browser are taken meanwhile."""
        with suppress(AssertionError):  # the page is gone for another, and its promises with it
            self._call("Runtime.evaluate", expression="new Promise(r => setTimeout(r, 50))", awaitPromise=True)

    def text(self) -> str:
        """What is to be read on the page."""
        return str(self.ask("document.body ? document.body.innerText : ''"))

    def address(self) -> str:
        return str(self.ask("location.href"))

    def run(self, script: str) -> None:
        """Run a script in the page, past its Content-Security-Policy as a debugger's console does."""
        answer = self._call("Runtime.evaluate", expression=script)
        assert "exceptionDetails" not in answer, answer

    def wait_for(self, expression: str) -> Any:
        """Value of a promise in the page, as JSON."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def cookies(self) -> list[dict[str, Any]]:
        """Every cookie of the browser, those that no script sees among them."""
        found: list[dict[str, Any]] = self._call("Network.getAllCookies")["cookies"]
        return found

    def forget(self) -> None:
        """Remove all cookies, and what was asked and said until now."""
        self._call("Network.clearBrowserCookies")
        self.requests.clear()
        self.said.clear()

    def look(self, *, width: int = 1180, height: int = 900, dark: bool = False, media: str = "screen") -> None:
        """Choose the window, the colour scheme and the medium."""
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", media=media, features=[scheme])

    def ask(self, expression: str) -> Any:
        """Value of a JavaScript expression in the page, as JSON."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def picture(self, path: Path, *, whole: bool = True) -> None:
        """The whole page, or its window, as PNG."""
        answer = self._call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))

    def paper(self, path: Path) -> None:
        """The page as PDF, as a printer would have it."""
        path.write_bytes(base64.b64decode(self._call("Page.printToPDF", printBackground=False)["data"]))

    def _call(self, method: str, **parameters: Any) -> Any:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if getattr(self, "_session", None):
            message["sessionId"] = self._session
        self._socket.send(json.dumps(message))
        while True:
            answer = self._take()
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def _take(self) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(self._socket.recv())
        parameters = message.get("params", {})
        match message.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(parameters["request"]["url"])
            case "Runtime.consoleAPICalled":
                self.said.append(f"console: {parameters['args']}")
            case "Runtime.exceptionThrown":
                self.said.append(f"exception: {parameters['exceptionDetails']}")
            case "Log.entryAdded":
                self.said.append(f"{parameters['entry']['level']}: {parameters['entry']['text']}")
            case "Page.loadEventFired":
                self._loaded = True
        return message


@contextmanager
def chromium(*flags: str) -> Iterator[Tab]:
    """A tab in a browser with a profile of its own, which ends with the block.

    Args:
        flags: of the browser, beside the usual ones.
    """
    binary = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
        subprocess.Popen(
            [binary, *FLAGS, *flags, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        ) as process,
    ):  # fmt: skip
        try:
            assert process.stderr is not None
            address = next(
                (m[1] for line in process.stderr if (m := re.search(r"listening on (ws://\S+)", line))), None
            )
            assert address, "Chromium did not start"
            socket = websocket.create_connection(address, timeout=WAIT)
            try:
                yield Tab(socket)
            finally:
                socket.close()
        finally:
            process.kill()
