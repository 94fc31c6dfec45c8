"""Drive a headless Chromium over its debugging pipe: no port, no package."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One page in a browser of its own."""

    def __init__(self, folder: Path, width: int = 1280, height: int = 900, *flags: str) -> None:
        assert PROGRAM is not None
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        command = [
            PROGRAM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-background-networking", f"--user-data-dir={folder / 'profile'}",
            f"--window-size={width},{height}", "--remote-debugging-pipe", *flags, "about:blank",
        ]  # fmt: skip
        # The browser reads commands from descriptor 3 and writes answers to 4.
        script = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        self.process = subprocess.Popen(
            ["bash", "-c", script, "bash", *command],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._ids = itertools.count(1)
        self._buffer = b""
        self.events: list[dict[str, Any]] = []
        self._session: str | None = None
        pages = self.send("Target.getTargets")["targetInfos"]
        target = next(page["targetId"] for page in pages if page["type"] == "page")
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self._write)
        os.close(self._read)

    def send(self, method: str, time_limit: float = 30.0, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result; events that come in between are kept."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next(time_limit)
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            if "method" in answer:
                self.events.append(answer)

    def _next(self, time_limit: float) -> dict[str, Any]:
        deadline = time.monotonic() + time_limit
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"the browser did not answer within {time_limit:.0f} s"
            piece = os.read(self._read, 1 << 20)
            assert piece, "the browser ended"
            self._buffer += piece
        message, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def open(self, page: Path, drawn: str = "document.documentElement?.dataset.charts !== undefined") -> None:
        """Load a file and wait until it is drawn: a report's script draws its charts."""
        self.send("Page.navigate", url=page.resolve().as_uri())
        self.wait(drawn)
        self.settle()

    def run(self, expression: str, **options: Any) -> Any:
        """Evaluate JavaScript, as the debugger does: the page's own policy does not forbid it."""
        result = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True, **options)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, condition: str, time_limit: float = 20.0) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + time_limit
        while not self.run(condition):
            assert time.monotonic() < deadline, f"not within {time_limit:.0f} s: {condition}"
            time.sleep(0.05)

    def settle(self) -> None:
        """Wait until what was asked for is drawn."""
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 30))))")

    def mouse(self, kind: str, x: float, y: float, **options: Any) -> None:
        """Move, press or release the mouse."""
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **options)

    def drag(self, x: float, y: float, to_x: float) -> None:
        """Drag along a line."""
        self.mouse("mouseMoved", x, y)
        self.mouse("mousePressed", x, y, button="left", clickCount=1)
        self.mouse("mouseMoved", (x + to_x) / 2, y, button="left", buttons=1)
        self.mouse("mouseMoved", to_x, y, button="left", buttons=1)
        self.mouse("mouseReleased", to_x, y, button="left", clickCount=1)
        self.settle()

    def click(self, x: float, y: float, times: int = 1) -> None:
        """Click once or twice."""
        for clicks in range(1, times + 1):
            self.mouse("mousePressed", x, y, button="left", clickCount=clicks)
            self.mouse("mouseReleased", x, y, button="left", clickCount=clicks)
        self.settle()

    def picture(self, file: Path, part: str | None = None) -> None:
        """Save what is seen, or the first element that a selector finds, with a margin."""
        options: dict[str, Any] = {}
        if part is not None:
            x, y, width, height = self.run(
                f"(box => [0, box.top + scrollY - 10, innerWidth, box.height + 20])"
                f"(document.querySelector({part!r}).getBoundingClientRect())"
            )
            clip = {"x": x, "y": y, "width": width, "height": height, "scale": 1}
            options = {"clip": clip, "captureBeyondViewport": True}
        file.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png", **options)["data"]))
