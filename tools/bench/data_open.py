"""How long it takes to open a data file, how much memory it holds, and how fast a row anywhere in it is read.

    python tools/bench/data_open.py

Files of 100,000 and 400,000 rows of GSM8K's shape, about 560 bytes each, as JSONL and as Parquet with one row group and
with many. Every row is checked and the content is hashed. Each file is opened in a process of its own; "memory" is what
that process grew by without pages of files, which the system may drop. CPU seconds are what counts on a busy machine.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

NUM_READ = 2000
MAX_CPU_SECONDS_OF_100K = 1.0


def write_files(directory: Path, num_rows: int) -> list[Path]:
    import pyarrow as pa
    from pyarrow import parquet

    generator = random.Random(0)
    words = ["apples", "each", "day", "gives", "half", "of", "them", "to", "friends", "how", "many", "left", "twice"]
    rows = []
    for number in range(num_rows):
        question = " ".join(generator.choices(words, k=40))
        steps = "\n".join(f"{number}*{k}=<<{number}*{k}={number * k}>>{number * k} apples are left." for k in range(6))
        rows.append({"question": question, "answer": f"{steps}\n#### {number}"})
    lines = directory / f"{num_rows}.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    table = pa.Table.from_pylist(rows)
    one, many = directory / f"{num_rows}_one_group.parquet", directory / f"{num_rows}_many_groups.parquet"
    parquet.write_table(table, one, row_group_size=num_rows)
    parquet.write_table(table, many, row_group_size=1000)
    return [lines, one, many]


def measure(path: Path) -> dict[str, float]:
    """In this process, which should have done nothing else."""
    from megarl.data.encoder import PromptEncoder
    from megarl.data.prompts import PromptKeys, open_prompts
    from megarl.data.tokenizer import Tokenizer

    class NoTokens(Tokenizer):
        """Any text can be encoded, at no cost: this is not about tokenizers."""

        def __init__(self) -> None:
            self._outside_alphabet = None
            self.eos_token_id, self.stop_token_ids = 0, (0,)

        def encode(self, text: str):  # type: ignore[no-untyped-def]
            return text[:0]

    if path.suffix == ".parquet":
        from pyarrow import parquet  # noqa: F401  (loading the library is not opening the file)
    process = psutil.Process()

    def own_bytes() -> int:
        memory = process.memory_info()
        return memory.rss - memory.shared

    before, wall, cpu = own_bytes(), time.perf_counter(), time.process_time()
    source = open_prompts(str(path), PromptEncoder(NoTokens()), PromptKeys("question", answer_after="####"))
    result = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, "rows": len(source)}
    indices = random.Random(1).choices(range(len(source)), k=NUM_READ)
    start = time.process_time()
    for index in indices:
        source[index]
    result["read_us"] = (time.process_time() - start) / NUM_READ * 1e6
    result["memory_mb"] = (own_bytes() - before) / 2**20
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 400_000])
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure)))
        return 0
    is_slow = False
    print(f"{'file':34s} {'MB':>5s} {'open s':>7s} {'CPU s':>6s} {'memory MB':>9s} {'read a row, CPU us':>18s}")
    with tempfile.TemporaryDirectory() as text:
        for num_rows in arguments.rows:
            for path in write_files(Path(text), num_rows):
                command = [sys.executable, __file__, "--measure", str(path)]
                found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
                size = path.stat().st_size / 1e6
                figures = f"{found['wall']:7.2f} {found['cpu']:6.2f} {found['memory_mb']:9.1f} {found['read_us']:18.0f}"
                print(f"{path.name:34s} {size:5.0f} {figures}", flush=True)
                is_slow |= num_rows == 100_000 and found["cpu"] > MAX_CPU_SECONDS_OF_100K
    return 1 if is_slow else 0


if __name__ == "__main__":
    sys.exit(main())
