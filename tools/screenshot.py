"""Take a picture of a page with headless Chromium.

    python tools/screenshot.py runs/quickstart/report.html docs/images/report.png --height 3000

The page is given time to draw, in virtual seconds: an idle page is photographed at once. ``--dark`` asks for the page's
dark colours. Chromium gets a profile of its own that is thrown away, and talks to nobody but the page.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--virtual-time-budget=10000",
)  # fmt: skip
DARK, LIGHT = 0, 1


def find_chromium() -> str | None:
    """The command, or None if it is not installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def chromium(page: str, *flags: str, width: int = 1440, height: int = 900, dark: bool = False) -> str:
    """Open a file or an address with ``flags``; what Chromium writes to its output. RuntimeError if it fails."""
    command = find_chromium()
    if command is None:
        raise RuntimeError(f"none of {', '.join(NAMES)} is installed")
    address = page if "://" in page else Path(page).resolve().as_uri()
    scheme = f"--blink-settings=preferredColorScheme={DARK if dark else LIGHT}"
    with tempfile.TemporaryDirectory(prefix="chromium-") as profile:
        result = subprocess.run(
            [command, *FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}", scheme, *flags, address],
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
    if result.returncode != 0:
        raise RuntimeError(f"{command} ended with {result.returncode}: {result.stderr[-2000:]}")
    return result.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description="Take a picture of a page with headless Chromium.")
    parser.add_argument("page", help="a file or an address")
    parser.add_argument("out", type=Path, help="the PNG file to write")
    parser.add_argument("--width", type=int, default=1440)
    parser.add_argument("--height", type=int, default=900)
    parser.add_argument("--dark", action="store_true", help="in the page's dark colours")
    arguments = parser.parse_args()
    try:
        chromium(
            arguments.page,
            f"--screenshot={arguments.out.resolve()}",
            width=arguments.width,
            height=arguments.height,
            dark=arguments.dark,
        )
    except RuntimeError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
