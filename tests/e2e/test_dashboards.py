"""SwanLab's own dashboard, in a real browser, shows a run of ours: grouped, once, with lines in the charts."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megarl.trackers.followers import Followers
from tests.unit.test_followers import QUICK, make

pytestmark = pytest.mark.slow

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-component-update",
    "--disable-background-networking", "--disable-sync", "--window-size=1400,1600", "--virtual-time-budget=20000",
)  # fmt: skip


@contextmanager
def dashboard(log_dir: Path) -> Iterator[str]:
    """`swanlab watch`, on this machine only; its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "swanlab", "watch", str(log_dir), "-h", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        address = f"http://127.0.0.1:{port}"
        for _ in range(2000):  # connecting is refused at once until it listens
            try:
                fetch(f"{address}/api/v1/project")
                break
            except OSError:
                assert server.poll() is None, server.stdout.read() if server.stdout else ""
                subprocess.run(["sleep", "0.05"], check=True)
        yield address
    finally:
        server.kill()
        server.communicate()


def fetch(url: str) -> dict:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.load(answer)


def browse(address: str, directory: Path, *options: str) -> str:
    assert BROWSER is not None
    command = [BROWSER, *FLAGS, f"--user-data-dir={directory / 'profile'}", *options, address]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.skipif(BROWSER is None, reason="no Chromium: `make setup-browser` installs it")
def test_swanlab_shows_the_run_once_in_groups_with_lines(tmp_path: Path) -> None:
    run = make("local", tmp_path)
    followers = run.follow()
    for step in range(20):
        run.record(step)
        followers.log({}, step)
        if step == 10:  # a second process writes it all anew
            followers.finish()
            followers = Followers(run.directory, [run.tracker], QUICK)
    followers.finish()
    assert followers.all_delivered
    with dashboard(run.directory / "trackers" / "swanlab") as address:
        project = fetch(f"{address}/api/v1/project")["data"]
        (experiment,) = project["experiments"]
        assert experiment["name"] == "quickstart"
        number = experiment["id"]
        shown = fetch(f"{address}/api/v1/experiment/{number}/chart")["data"]
        assert [group["name"] for group in shown["namespaces"]][:2] == ["critic", "actor"]
        points = fetch(f"{address}/api/v1/experiment/{number}/tag/critic%2Fscore%2Fmean")["data"]["list"]
        assert [int(point["index"]) for point in points] == list(range(20))
        page = browse(f"{address}/experiment/{number}/chart", tmp_path, "--dump-dom")
        text = re.sub(r"<[^>]+>", " ", page)
        for name in ("critic", "actor", "critic/score/mean", "actor/pg_loss"):
            assert name in text, text[:2000]
        assert page.count("<canvas") + page.count("<svg") > 10
        picture = tmp_path / "dashboard.png"
        browse(f"{address}/experiment/{number}/chart", tmp_path, f"--screenshot={picture}")
    assert num_colours(picture) > 50, "a blank page has a few"


def num_colours(path: Path) -> int:
    from PIL import Image

    with Image.open(path) as picture:
        return len(picture.convert("RGB").getcolors(1 << 24) or ())
