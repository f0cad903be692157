"""A page in headless Chromium that tests can click on, over DevTools' pipe: no driver, no port, no network."""

from __future__ import annotations

import base64
import fcntl
import importlib.util
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]


def screenshot_tool() -> ModuleType:
    """``tools/screenshot.py``."""
    spec = importlib.util.spec_from_file_location("screenshot", ROOT / "tools" / "screenshot.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Page:
    """One tab. Messages are JSON, each ended by a zero byte."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to_browser = os.fdopen(to_browser, "wb", buffering=0)
        self._from_browser = os.fdopen(from_browser, "rb")
        self._count = 0
        self._session: str | None = None
        # what the page asked the network for
        self.requests: list[str] = []

    def open(self, path: Path, width: int, height: int, *, dark: bool) -> None:
        """Load a file and wait until it has drawn itself."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._call("Network.enable")
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._call("Page.enable")
        self._call("Page.navigate", url=path.resolve().as_uri())
        while self._read().get("method") != "Page.loadEventFired":
            pass
        self.run(
            "new Promise((done) => setTimeout(done, 50))"
        )  # uPlot paints in a microtask, the browser a frame later

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def picture(self) -> bytes:
        """What a reader sees, as PNG."""
        return base64.b64decode(self._call("Page.captureScreenshot")["data"])

    def close(self) -> None:
        """End the browser."""
        self._session = None
        self._call("Browser.close")
        self._to_browser.close()
        self._from_browser.close()

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        self._to_browser.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def _read(self) -> dict[str, Any]:
        message = bytearray()
        while (byte := self._from_browser.read(1)) != b"\0":
            assert byte, "Chromium is gone"
            message += byte
        answer: dict[str, Any] = json.loads(message)
        if answer.get("method") == "Network.requestWillBeSent":
            self.requests.append(answer["params"]["request"]["url"])
        return answer


@contextmanager
def opened(path: Path, width: int = 1440, height: int = 4000, *, dark: bool = False) -> Iterator[Page]:
    """A file in a browser with a throwaway profile."""
    tool = screenshot_tool()
    read_commands, write_commands = os.pipe()
    read_answers, write_answers = os.pipe()
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        flags = [flag for flag in tool.FLAGS if "virtual-time" not in flag]
        # Chromium reads from descriptor 3 and answers on 4. Ours may have those numbers, so copies take others first.
        commands, answers = (fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in (read_commands, write_answers))

        def connect() -> None:
            os.dup2(commands, 3)
            os.dup2(answers, 4)

        browser = subprocess.Popen(
            [tool.find_chromium(), *flags, f"--user-data-dir={profile}", "--remote-debugging-pipe"],
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=connect,
        )
        for fd in (read_commands, write_answers, commands, answers):
            os.close(fd)
        page = Page(write_commands, read_answers)
        try:
            page.open(path, width, height, dark=dark)
            yield page
            page.close()
        finally:
            browser.kill()
            browser.wait()
