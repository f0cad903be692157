"""How many samples per second a reward's workers score, against calling the same function in a plain loop.

    python -m tools.bench.reward_throughput --answers answers.jsonl --reward math_answer \\
        --plain tools.bench.reward_throughput:bare_math_verify

``answers.jsonl`` has one ``{"response": ..., "answer": ...}`` per line: for example the worked answers of GSM8K's test
set, whose last line is ``#### N``. Without a file, a function that is busy for two milliseconds is measured.
With ``--relay`` the pool's workers are behind a relay on loopback, as they are on nodes for rewards. ``--busy-ms 0``
measures the way to the workers and back alone.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from megarl.config.rewards import RewardSettings
from megarl.config.scoring import ScoringSettings
from megarl.core.sample import Prompt, Sample
from megarl.launch.hosted import HostedRelay
from megarl.rewards.load import load_reward
from megarl.rewards.pool import default_num_workers
from megarl.rewards.relay_link import Relay, Relays
from megarl.rewards.score import call
from megarl.rewards.worker_calls import WorkerCalls

LOOPBACK = "127.0.0.1"


def busy(prompt: Prompt, sample: Sample, milliseconds: float = 2.0) -> float:
    """About what comparing two mathematical expressions costs."""
    until = time.process_time() + milliseconds / 1000
    while time.process_time() < until:
        pass
    return float(prompt.answer is not None and sample.response.endswith(prompt.answer))


def bare_math_verify(prompt: Prompt, sample: Sample) -> float:
    """What a user would write without megarl."""
    from math_verify import parse, verify

    return float(verify(parse(f"${prompt.answer}$"), parse(sample.response)))


def pairs_of(path: Path | None, num_samples: int) -> list[tuple[Prompt, Sample]]:
    """Prompts and samples, of 200 tokens each."""
    rows = [{"response": f"{i} + {i} = {2 * i}", "answer": f"{2 * i}"} for i in range(num_samples)]
    if path is not None:
        lines = path.read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines[:num_samples]]
    tokens = np.arange(200)
    mask, logprobs = np.repeat(np.array([0, 1], np.int8), 100), np.zeros(200, np.float32)
    return [
        (Prompt(str(i), "", tokens[:100], row["answer"]), Sample(tokens, mask, logprobs, "stop", row["response"]))
        for i, row in enumerate(rows)
    ]


@contextmanager
def workers_of(name: str, options: dict[str, Any], num_workers: int, *, is_remote: bool) -> Iterator[WorkerCalls]:
    """The pool, on this machine, or behind a relay that is ended with it."""
    with closing(HostedRelay()) as hosted:
        if is_remote:
            token = secrets.token_hex(32)
            port, why = hosted.start(LOOPBACK, token, None)
            if not port:
                sys.exit(why)
            os.environ.update(Relays((Relay(LOOPBACK, port, num_workers),), token).variables())
        settings = ScoringSettings(num_workers=num_workers)
        with closing(WorkerCalls(RewardSettings(name=name, options=options), settings)) as calls:
            yield calls


def main() -> None:
    """Print both rates and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--answers", type=Path)
    parser.add_argument("--reward", default="tools.bench.reward_throughput:busy")
    parser.add_argument("--plain", help="the function of the plain loop; the same if not given")
    parser.add_argument("--num-samples", type=int, default=2000)
    parser.add_argument("--num-workers", type=int, default=default_num_workers())
    parser.add_argument("--relay", action="store_true", help="workers behind a relay on loopback")
    parser.add_argument("--busy-ms", type=float, help="how long the function without a file is busy")
    arguments = parser.parse_args()
    options = {} if arguments.busy_ms is None else {"milliseconds": arguments.busy_ms}
    pairs = pairs_of(arguments.answers, arguments.num_samples)
    reward = load_reward(arguments.plain or arguments.reward, options)
    call(reward, *pairs[0])  # whatever is loaded at the first call is not measured
    began = time.perf_counter()
    plain = [call(reward, prompt, sample) for prompt, sample in pairs]
    plain_seconds = time.perf_counter() - began
    with workers_of(arguments.reward, options, arguments.num_workers, is_remote=arguments.relay) as calls:
        for future in [calls.submit(*pair) for pair in pairs[: 4 * arguments.num_workers]]:
            future.result()
        began, cpu_began = time.perf_counter(), time.process_time()
        scored = [future.result() for future in [calls.submit(*pair) for pair in pairs]]
        pool_seconds = time.perf_counter() - began
        driver_ms = (time.process_time() - cpu_began) / len(pairs) * 1000
    same = [getattr(one, "value", None) for one in scored] == [float(getattr(one, "value", one)) for one in plain]
    where = " behind a relay" if arguments.relay else ""
    sys.stdout.write(
        f"{len(pairs)} samples, {arguments.num_workers} workers{where}: plain loop {len(pairs) / plain_seconds:.0f}/s, "
        f"pool {len(pairs) / pool_seconds:.0f}/s, ratio {plain_seconds / pool_seconds:.2f}, "
        f"{driver_ms:.2f} ms of the driver's CPU per sample, same rewards: {same}\n"
    )


if __name__ == "__main__":
    main()
