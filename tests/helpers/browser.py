"""A headless Chromium, driven over its DevTools protocol: enough to press keys, ask the page and
take pictures.
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, Self

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-component-update",
    "--disable-background-networking",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--mute-audio",
    "--remote-debugging-port=0",
)
_KEYS = {
    "Enter": (13, "\r"),
    "Escape": (27, ""),
    "ArrowDown": (40, ""),
    "ArrowUp": (38, ""),
    "Delete": (46, ""),
    "Backspace": (8, ""),
    "Tab": (9, ""),
    "Home": (36, ""),
    "End": (35, ""),
}


def program() -> str | None:
    """Path of an installed Chromium, None without one."""
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


class Browser:
    """One tab. `problems` holds what its console, its network and its security policy complained
    of.
    """

    def __init__(self, profile: Path, size: tuple[int, int] = (1280, 900)) -> None:
        from websockets.sync.client import connect

        found = program()
        assert found is not None
        window = f"--window-size={size[0]},{size[1]}"
        self._process = subprocess.Popen(
            [found, *FLAGS, window, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._next = 0
        self.problems = list[str]()
        self.asked = list[str]()
        try:
            port, path = self._address(profile / "DevToolsActivePort")
            self._socket = connect(
                f"ws://127.0.0.1:{port}{path}", max_size=None, proxy=None, compression=None
            )
            self._session = ""
            tab = self.call("Target.getTargets")["targetInfos"]
            target = next(one["targetId"] for one in tab if one["type"] == "page")
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
                "sessionId"
            ]
        except BaseException:
            self._process.kill()
            raise
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._session = ""
            self.call("Browser.close")
            self._process.wait(10)
        except (OSError, TimeoutError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait(10)
        self._socket.close()

    def _address(self, file: Path) -> tuple[str, str]:
        end = time.monotonic() + 60
        while time.monotonic() < end and self._process.poll() is None:
            lines = file.read_text().split() if file.exists() else []
            if len(lines) == 2:
                return lines[0], lines[1]
            time.sleep(0.05)
        raise TimeoutError("Chromium did not start")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A DevTools command and its answer."""
        self._next += 1
        message = {"id": self._next, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._socket.send(json.dumps(message))
        while True:
            answer = json.loads(self._socket.recv(timeout=60))
            if answer.get("id") == self._next:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self._note(answer.get("method"), answer.get("params", {}))

    def _note(self, event: str | None, what: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(what["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and what["type"] in ("error", "assert"):
            self.problems.append(json.dumps(what["args"]))
        elif event == "Log.entryAdded" and what["entry"]["level"] == "error":
            self.problems.append(f"{what['entry']['text']} {what['entry'].get('url', '')}")
        elif event == "Network.requestWillBeSent":
            self.asked.append(what["request"]["url"])

    def open(self, address: str) -> None:
        """Go there and wait until the page says that it is ready."""
        self.call("Page.navigate", url=address)
        self.until(
            "document.readyState === 'complete' && 'ready' in document.documentElement.dataset"
        )

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression, promises awaited."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, expression: str, seconds: float = 60) -> None:
        """Waits until the expression is true."""
        end = time.monotonic() + seconds
        while not self.ask(f"!!({expression})"):
            if time.monotonic() > end:
                raise AssertionError(
                    f"never true: {expression}\n{self.ask('document.body.innerText')}\n"
                    f"{self.problems}"
                )
            time.sleep(0.02)

    def type(self, text: str) -> None:
        """Characters, one key press each, into what has the focus."""
        for letter in text:
            self.call("Input.dispatchKeyEvent", type="keyDown", text=letter, key=letter)
            self.call("Input.dispatchKeyEvent", type="keyUp", key=letter)

    def press(self, *keys: str) -> None:
        """Keys by name: Enter, Escape, ArrowDown, ..."""
        for key in keys:
            code, text = _KEYS[key]
            shared = {"key": key, "code": key, "windowsVirtualKeyCode": code}
            self.call(
                "Input.dispatchKeyEvent",
                type="keyDown" if text else "rawKeyDown",
                text=text,
                **shared,
            )
            self.call("Input.dispatchKeyEvent", type="keyUp", **shared)

    def click(self, selector: str) -> None:
        """The middle of the first element that matches, with the mouse."""
        where = self.ask(
            f"(() => {{const e = document.querySelector({json.dumps(selector)}); "
            f"e.scrollIntoView({{block: 'center'}});"
            " const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height "
            "/ 2]})()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call(
                "Input.dispatchMouseEvent",
                type=kind,
                x=where[0],
                y=where[1],
                button="left",
                clickCount=1,
            )

    def look(
        self, width: int = 1280, height: int = 900, *, dark: bool = False, phone: bool = False
    ) -> None:
        """Size of the window, colours of the system, a phone's pointer."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )
        self.call("Emulation.setTouchEmulationEnabled", enabled=phone)
        media = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=media)

    def picture(self, file: Path, *, whole: bool = False) -> None:
        """A screenshot of the window, or of the whole page."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(shot["data"]))
