"""Run directories as a run on many devices would leave them, made up in seconds: for tests, benches and pictures."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

PHASES = (
    "actor_infer/generate", "reference/compute_log_probs", "actor_train/compute_log_probs", "critic/compute_values",
    "critic/train_step", "actor_train/train_step", "actor_train/model_update", "actor_train/do_checkpoint",
)  # fmt: skip
SHARES = (0.31, 0.06, 0.08, 0.05, 0.12, 0.29, 0.04, 0.01)
# 18 names for each phase and device; the peaks are those that a report draws
_SNAPSHOTS = ("start/offload", "start/onload", "end/onload", "end/offload")
KINDS = (
    *(
        f"{snapshot}/{kind}"
        for snapshot in _SNAPSHOTS
        for kind in ("allocated", "reserved", "max_allocated", "max_reserved")
    ),
    "end/onload/max_allocated_frac",
    "end/onload/max_reserved_frac",
)
PEAKS = ("end/onload/max_allocated", "end/onload/max_reserved")
CAPACITY = 80.0
START = 1_790_000_000.0
RESOLVED = """\
run:
  name: {name}
  num_steps: {num_steps}
  num_ranks: {num_devices}
  device: cuda
model:
  tokenizer: builtin:characters
actor:
  parallel: {{tp_size: 4, pp_size: 2, cp_size: 1}}
  optimizer:
    lr: {lr}
tracker_kwargs:
  wandb: {{api_key: do-not-show-this, project: demo}}
"""


def write_ledger(directory: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """A ledger of exactly these lines."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def line(step: int, metrics: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"step": step, "time": START + 30.0 * step, "metrics": dict(metrics), **more}


def make_run(
    directory: Path,
    *,
    num_steps: int = 120,
    num_devices: int = 8,
    kinds: Sequence[str] = PEAKS,
    speed: float = 1.0,
    lr: float = 1e-6,
) -> Path:
    """Everything that a run directory may hold. It learns; near the middle its gradient breaks once."""
    directory.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    with (directory / "metrics.jsonl").open("w") as file:
        for step in range(num_steps + 1):
            file.write(json.dumps(_step(step, num_steps, num_devices, kinds, speed, random)) + "\n")
    (directory / "resolved.yaml").write_text(
        RESOLVED.format(name=directory.name, num_steps=num_steps, num_devices=num_devices, lr=lr)
    )
    (directory / "devices.json").write_text(json.dumps([_device(index) for index in range(num_devices)]))
    with (directory / "timeline.jsonl").open("w") as file:
        for step in range(1, num_steps + 1, max(1, num_steps // 40)):
            file.write(json.dumps(_timeline(step, num_devices, random)) + "\n")
    (directory / "samples").mkdir(exist_ok=True)
    for step in sorted({1, num_steps // 2, num_steps}):
        groups = [_group(step, position, step / num_steps, random) for position in range(6)]
        text = "".join(json.dumps(group) + "\n" for group in groups)
        (directory / "samples" / f"step_{step:06d}.jsonl").write_text(text)
    return directory


def _step(
    step: int, num_steps: int, num_devices: int, kinds: Sequence[str], speed: float, random: np.random.Generator
) -> dict[str, Any]:
    done = step / num_steps
    skill = 0.9 / (1 + math.exp(-8 * speed * (done - 0.35)))
    metrics: dict[str, Any] = {}
    if step % 10 == 0:
        metrics["eval/gsm8k/score/mean@1"] = round(skill, 4)
    alerts = []
    if step > 0:
        metrics |= _learning(step, done, skill, random)
        metrics |= _seconds(step, random)
        used = _memory(num_devices, done, len(kinds), random)
        for at, phase in enumerate(PHASES):
            for place, kind in enumerate(kinds):
                values = used[at, place].tolist()
                metrics |= {f"memory/{phase}/{kind}/{device}": value for device, value in enumerate(values)}
        alerts = _alerts(step, num_steps)
        metrics |= {f"alerts/{alert['rule']}": alert["severity"] for alert in alerts}
        if step == num_steps // 2:
            metrics["actor/grad_norm"] = "NaN"
    return line(step, metrics, run_id="demo-4f2a", alerts=alerts, meta={"num_devices": num_devices})


def _learning(step: int, done: float, skill: float, random: np.random.Generator) -> dict[str, float]:
    noise = random.normal(size=12).tolist()
    return {
        "actor/entropy": 0.6 * math.exp(-1.5 * done) + 0.02 * noise[0],
        "actor/grad_norm": abs(0.4 + 0.1 * noise[1]) * (12 if step % 97 == 50 else 1),
        "actor/kl_loss": 0.002 * done**2 + 1e-5 * abs(noise[2]),
        "actor/lr": 1e-6 * (1 - 0.9 * done),
        "actor/pg_clipfrac": abs(0.01 + 0.004 * noise[3]),
        "actor/pg_loss": 0.01 * noise[4],
        "actor/ppo_kl": 0.001 + 0.0004 * noise[5],
        "actor/total_loss": 0.01 * noise[4] + 0.001,
        "critic/grad_norm": abs(1 + 0.2 * noise[6]),
        "critic/score/max": 1.0,
        "critic/score/mean": min(1.0, max(0.0, skill + 0.04 * noise[7])),
        "critic/score/min": 0.0,
        "critic/vf_explained_var": 0.8 * (1 - math.exp(-5 * done)) + 0.03 * noise[8],
        "critic/vf_loss": 0.2 * math.exp(-3 * done) + 0.01 * abs(noise[9]),
        "mismatch/k3_kl": 1e-5 * abs(noise[10]),
        "mismatch/logprob_gap_max": 0.01 * abs(noise[11]),
        "perf/mfu/actor": 0.41 + 0.01 * noise[0],
        "perf/throughput": 1200 + 40 * noise[1],
        "perf/total_num_tokens": 1_300_000,
        "response_length/clip_ratio": abs(0.02 * noise[2]),
        "response_length/max": 2048,
        "response_length/mean": 700 + 200 * done + 20 * noise[3],
        "response_length/min": 12,
        "rollout/zero_variance_group_ratio": 0.2 + 0.3 * done,
        "training/global_step": step,
    }


def _seconds(step: int, random: np.random.Generator) -> dict[str, float]:
    metrics = {}
    wall = 0.0
    for phase, share in zip(PHASES, SHARES, strict=True):
        if phase.endswith("do_checkpoint") and step % 20:
            continue
        total = 25.0 * share * float(random.uniform(0.9, 1.15)) * (4 if phase.endswith("do_checkpoint") else 1)
        metrics |= {
            f"time/{phase}/execute": 0.9 * total,
            f"time/{phase}/offload": 0.04 * total,
            f"time/{phase}/onload": 0.06 * total,
            f"time/{phase}/skew": 0.03 * total,
            f"time/{phase}/total": total,
        }
        wall += total
    return metrics | {"timing_s/step": wall + 0.5, "timing_s/step_wall": wall + 1.0}


def _memory(num_devices: int, done: float, num_kinds: int, random: np.random.Generator) -> Any:
    """GiB by phase, kind and device. One device is fuller than the others and fills up."""
    base = np.array([46, 18, 24, 20, 52, 60, 40, 30], dtype=np.float64)[:, None, None]
    used = (
        base
        + random.uniform(0, 2, size=(len(PHASES), num_kinds, num_devices))
        + 4 * np.arange(num_kinds)[None, :, None] % 7
    )
    used[4:6, :, num_devices // 3] += 6 + 5 * done
    return np.minimum(used, CAPACITY).round(3)


def _alerts(step: int, num_steps: int) -> list[dict[str, Any]]:
    alerts = []
    if step % 97 == 50 or step == num_steps // 2:
        alerts.append(
            {"rule": "H09", "severity": 3, "message": "gradient spike: actor/grad_norm is 12 times its median"}
        )
    if step > 0.8 * num_steps and step % 5 == 0:
        alerts.append({"rule": "H13", "severity": 2, "message": "device memory close to capacity: 94 % reserved"})
    return alerts


def _device(index: int) -> dict[str, Any]:
    return {
        "device": index, "rank": index, "node": index // 8, "hostname": f"node{index // 8}", "local_index": index % 8,
        "name": "H100 80GB", "uuid": f"GPU-{index:04x}", "total_gib": CAPACITY, "tp": index % 4, "pp": index // 4 % 2,
        "cp": 0, "dp": index // 8,
    }  # fmt: skip


def _timeline(step: int, num_ranks: int, random: np.random.Generator) -> dict[str, Any]:
    segments = []
    start = 0.0
    for phase, share in zip(PHASES[:-1], SHARES, strict=False):
        length = 25.0 * share
        for rank in range(num_ranks):
            at = start
            own = length * float(random.uniform(0.8, 0.97))
            for kind, part in (("onload", 0.07), ("execute", 0.88), ("offload", 0.05)):
                segments.append([rank, phase, kind, round(at, 4), round(own * part, 4)])
                at += own * part
        start += length
    return {"step": step, "segments": segments}


def _group(step: int, position: int, done: float, random: np.random.Generator) -> dict[str, Any]:
    left, right = (int(number) for number in random.integers(100, 999, 2))
    prompt = f"{left}+{right}="
    samples = []
    for seed in range(4):
        is_right = random.uniform() < 0.2 + 0.7 * done
        answer = left + right if is_right else left + right + int(random.integers(1, 30))
        samples.append(
            sample(prompt, f"{left % 10}+{right % 10}={left % 10 + right % 10}:{answer}", is_right, seed, random)
        )
    mean = sum(one["reward"] for one in samples) / len(samples)
    for one in samples:
        one["advantage"] = one["reward"] - mean
        one["token_advantages"] = [one["advantage"] * bit for bit in one["loss_mask"]]
    return {"step": step, "group": position, "prompt": _prompt(prompt, str(left + right)), "samples": samples}


def sample(prompt: str, response: str, is_right: bool, seed: int, random: np.random.Generator) -> dict[str, Any]:
    """One sample in the characters of the built-in tokenizer."""
    ids = [*encode(prompt), *encode(response), 1]
    mask = [0] * len(prompt) + [1] * (len(response) + 1)
    logprobs = [-float(random.exponential(0.4)) * bit for bit in mask]
    return {
        "response": response, "reward": float(is_right), "scores": {}, "advantage": 0.0, "finish": "stop", "version": 0,
        "seed": seed, "token_ids": ids, "loss_mask": mask, "rollout_logprobs": logprobs,
        "old_logprobs": [value * 1.001 for value in logprobs],
    }  # fmt: skip


def encode(text: str) -> list[int]:
    """Ids of the built-in characters; 0 and 1 are padding and the end."""
    return [2 + " 0123456789+-*=:?#,.abcdefghijklmnopqrstuvwxyz".index(character) for character in text]


def _prompt(text: str, answer: str) -> dict[str, Any]:
    return {
        "id": text,
        "text": text,
        "token_ids": encode(text),
        "answer": answer,
        "demonstration": None,
        "task": "sum",
        "metadata": {},
    }
