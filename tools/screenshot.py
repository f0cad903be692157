"""Take a picture of a page with headless Chromium.

    python tools/screenshot.py runs/quickstart/report.html docs/images/report.png --height 1500
    python tools/screenshot.py runs/quickstart/report.html memory.png --at '#memory' --dark

Tests drive pages with the same `opened`. It speaks to Chromium over DevTools' pipe: no driver, no port. The profile is
thrown away afterwards, and Chromium talks to nobody but the page.
"""

from __future__ import annotations

import argparse
import base64
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe",
)  # fmt: skip


def find_chromium() -> str | None:
    """The command, or None if it is not installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab. Messages are JSON, each ended by a zero byte."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to_browser = os.fdopen(to_browser, "wb", buffering=0)
        self._from_browser = os.fdopen(from_browser, "rb")
        self._count = 0
        self._session: str | None = None
        # addresses of everything that the page asked for
        self.requests: list[str] = []

    def open(self, address: str, width: int, height: int, *, dark: bool) -> None:
        """Load a page and wait until it has loaded."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._call("Network.enable")
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._call("Page.enable")
        self._call("Page.navigate", url=address)
        while self._read().get("method") != "Page.loadEventFired":
            pass
        self.wait(0.05)  # what is drawn while loading is painted a frame later

    def run(self, script: str) -> Any:
        """The value of an expression in the page; of a promise, what it comes to."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait(self, seconds: float) -> None:
        """Let the page's own clock run."""
        self.run(f"new Promise((done) => setTimeout(done, {1000 * seconds}))")

    def picture(self) -> bytes:
        """What a reader sees, as PNG."""
        return base64.b64decode(self._call("Page.captureScreenshot")["data"])

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        self._to_browser.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result

    def _read(self) -> dict[str, Any]:
        message = bytearray()
        while (byte := self._from_browser.read(1)) != b"\0":
            if not byte:
                raise RuntimeError("Chromium is gone")
            message += byte
        answer: dict[str, Any] = json.loads(message)
        if answer.get("method") == "Network.requestWillBeSent":
            self.requests.append(answer["params"]["request"]["url"])
        return answer


@contextmanager
def opened(page: str | Path, width: int = 1440, height: int = 900, *, dark: bool = False) -> Iterator[Page]:
    """A file or an address in a browser of its own. RuntimeError if there is no Chromium or it fails."""
    command = find_chromium()
    if command is None:
        raise RuntimeError(f"none of {', '.join(NAMES)} is installed")
    address = page if isinstance(page, str) and "://" in page else Path(page).resolve().as_uri()
    read_commands, write_commands = os.pipe()
    read_answers, write_answers = os.pipe()
    # Chromium reads from descriptor 3 and answers on 4. Ours may have those numbers, so copies take others first.
    commands, answers = (fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in (read_commands, write_answers))

    def connect() -> None:
        os.dup2(commands, 3)
        os.dup2(answers, 4)

    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        browser = subprocess.Popen(
            [command, *FLAGS, f"--user-data-dir={profile}"],
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=connect,
        )
        for fd in (read_commands, write_answers, commands, answers):
            os.close(fd)
        tab = Page(write_commands, read_answers)
        try:
            tab.open(address, width, height, dark=dark)
            yield tab
        finally:
            browser.kill()
            browser.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description="Take a picture of a page with headless Chromium.")
    parser.add_argument("page", metavar="FILE_OR_URL")
    parser.add_argument("out", metavar="OUT.png", type=Path)
    parser.add_argument("--width", type=int, default=1440)
    parser.add_argument("--height", type=int, default=900)
    parser.add_argument("--dark", action="store_true", help="in the page's dark colours")
    parser.add_argument("--at", metavar="SELECTOR", help="scroll to this element, such as '#memory'")
    parser.add_argument("--run", metavar="SCRIPT", help="run this in the page first, for example to click on something")
    parser.add_argument("--wait", metavar="SECONDS", type=float, default=0.5, help="before the picture is taken")
    arguments = parser.parse_args()
    try:
        with opened(arguments.page, arguments.width, arguments.height, dark=arguments.dark) as page:
            if arguments.run:
                page.run(arguments.run)
            if arguments.at:
                page.run(f"document.querySelector({json.dumps(arguments.at)}).scrollIntoView()")
            page.wait(arguments.wait)
            arguments.out.write_bytes(page.picture())
    except RuntimeError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
