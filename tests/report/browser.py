"""A real headless Chromium, driven over its DevTools pipe: no driver and no package is needed."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")

# Key -> (code, Windows key code, text)
KEYS = {
    "Enter": ("Enter", 13, "\r"),
    "Escape": ("Escape", 27, ""),
    "Tab": ("Tab", 9, ""),
    "ArrowRight": ("ArrowRight", 39, ""),
    "ArrowLeft": ("ArrowLeft", 37, ""),
    "ArrowDown": ("ArrowDown", 40, ""),
    "ArrowUp": ("ArrowUp", 38, ""),
    "End": ("End", 35, ""),
}


def find_chromium() -> str | None:
    """The browser's program, None where there is none."""
    return next((path for path in map(shutil.which, PROGRAMS) if path), None)


class Browser:
    """One page of a browser. ``errors`` gathers what the page complained about, from its script or its console."""

    def __init__(self, program: str) -> None:
        self._directory = tempfile.mkdtemp(prefix="sbp-chromium-")
        to_child, self._write = os.pipe()
        self._read, from_child = os.pipe()
        words = [
            program,
            "--headless=new",
            "--remote-debugging-pipe",
            "--no-sandbox",  # CI containers run as root
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-extensions",
            "--disable-background-networking",
            "--hide-scrollbars",
            "--force-color-profile=srgb",
            f"--user-data-dir={self._directory}",
        ]
        # The protocol is on file descriptors 3 and 4.
        script = f'exec "$@" 3<&{to_child} 4>&{from_child}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", *words],
            pass_fds=(to_child, from_child),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": self._directory},
        )
        os.close(to_child)
        os.close(from_child)
        self._buffer = b""
        self._numbers = itertools.count(1)
        self._session: str | None = None
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        try:
            self._session = None
            self.call("Browser.close")
            self._process.wait(10)
        except Exception:
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)
        shutil.rmtree(self._directory, ignore_errors=True)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the DevTools protocol, and its result."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def _receive(self, seconds: float = 30) -> dict[str, Any]:
        until = time.monotonic() + seconds
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(until - time.monotonic(), 0))
            chunk = os.read(self._read, 1 << 16) if ready else b""
            if not chunk:
                raise RuntimeError("the browser does not answer")
            self._buffer += chunk
        raw, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(raw)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(
                " ".join(str(one.get("value", one.get("description"))) for one in params["args"])
            )
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression (awaited), as plain data."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise AssertionError(answer["exceptionDetails"].get("exception", {}).get("description"))
        return answer["result"].get("value")

    def wait(self, script: str, seconds: float = 20) -> Any:
        """Wait until the expression is true, and return it."""
        until = time.monotonic() + seconds
        while True:
            value = self.run(script)
            if value:
                return value
            if time.monotonic() > until:
                raise AssertionError(f"never true: {script}; errors: {self.errors}")
            time.sleep(0.03)

    def size(self, width: int, height: int, scheme: str = "light", scale: float = 1) -> None:
        """Set the window's size in CSS pixels, and what the system prefers: light or dark."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=False,
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def open(self, path: Path, fragment: str = "") -> None:
        """Open a page from disk and wait until its script has built it."""
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=path.resolve().as_uri() + fragment)
        self.wait("document.documentElement && document.documentElement.dataset.ready === 'true'")

    def click(self, selector: str, text: str | None = None) -> None:
        """A real mouse click on the first element that matches and, if given, holds the text."""
        box = self.wait(
            f"""(() => {{
              const found = [...document.querySelectorAll({json.dumps(selector)})].find(
                (one) => {json.dumps(text)} === null || one.textContent.includes({json.dumps(text)}));
              if (!found) return null;
              found.scrollIntoView({{block: 'center', inline: 'center'}});
              const box = found.getBoundingClientRect();
              return [box.left + box.width / 2, box.top + box.height / 2];
            }})()"""
        )
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.call(
                "Input.dispatchMouseEvent",
                type=kind,
                x=box[0],
                y=box[1],
                button="none" if kind == "mouseMoved" else "left",
                clickCount=0 if kind == "mouseMoved" else 1,
            )

    def hover(self, selector: str) -> None:
        """Move the mouse onto an element."""
        box = self.run(
            f"""(() => {{ const found = document.querySelector({json.dumps(selector)});
              found.scrollIntoView({{block: 'center'}}); const box = found.getBoundingClientRect();
              return [box.left + box.width / 2, box.top + box.height / 2]; }})()"""
        )
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])

    def key(self, name: str) -> None:
        """Press a key: one of KEYS, or a character."""
        code, number, text = KEYS.get(name, (name, ord(name[0].upper()), name))
        common = {"key": name, "code": code, "windowsVirtualKeyCode": number}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self.call("Input.insertText", text=text)

    def screenshot(self, path: Path, selector: str | None = None) -> None:
        """What is in the window as a PNG, or as much of one element as is in it."""
        options: dict[str, Any] = {}
        if selector is not None:
            clip = f"""(() => {{ const box = document.querySelector({json.dumps(selector)}).getBoundingClientRect();
              return {{x: box.left, y: box.top, scale: 1, width: Math.min(box.width, innerWidth - box.left),
                height: Math.min(box.height, innerHeight - box.top)}}; }})()"""
            options["clip"] = self.run(clip)
        path.write_bytes(
            base64.b64decode(self.call("Page.captureScreenshot", format="png", **options)["data"])
        )
