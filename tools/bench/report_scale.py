"""What a report of a long run on many devices costs: ``python tools/bench/report_scale.py``.

Makes up a run, then runs ``megarl report`` on it in a process of its own. Printed are the size of the ledger, the time
and the peak memory of the command, and the size of the page. ``--all-kinds`` records all 18 kinds of memory of each
phase and device instead of the two peaks: a ledger of gigabytes.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.unit.report_runs import KINDS, PEAKS, make_run  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--devices", type=int, default=64)
    parser.add_argument("--all-kinds", action="store_true")
    parser.add_argument("--keep", type=Path, help="write the page here as well")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        run = make_run(
            Path(directory) / "scale",
            num_steps=arguments.steps,
            num_devices=arguments.devices,
            kinds=KINDS if arguments.all_kinds else PEAKS,
        )
        page = arguments.keep or run / "report.html"
        start = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "megarl", "report", str(run), "--out", str(page)],
            check=True,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
        )
        seconds = time.perf_counter() - start
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        ledger = (run / "metrics.jsonl").stat().st_size / 1e6
        print(f"{arguments.steps} steps x {arguments.devices} devices: ledger {ledger:,.0f} MB", flush=True)
        size = page.stat().st_size / 1e6
        processor, peak = used.ru_utime + used.ru_stime, used.ru_maxrss / 2**10
        print(
            f"megarl report: {seconds:.1f} s ({processor:.1f} s of processor time), peak {peak:,.0f} MiB, "
            f"page {size:.1f} MB",
            flush=True,
        )


if __name__ == "__main__":
    main()
