"""Checks of GPUs, and of the packages that use them. What torch sees is looked at once; the rest is arithmetic."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from megarl.config.schema import RunConfig
from megarl.launch.doctor.finding import Finding, Level

_SECONDS_TO_ANSWER = 60.0
_ASK_VERSION = "import importlib.metadata; print(importlib.metadata.version('sglang'))"


@dataclass(frozen=True, slots=True)
class Devices:
    """What this process sees of GPUs, and what its machine has."""

    torch: str
    # what torch was built with
    cuda: str | None = None
    nccl: str | None = None
    names: tuple[str, ...] = ()
    uuids: tuple[str, ...] = ()
    # of NVIDIA's driver on this machine
    driver: str | None = None
    # whether the machine has GPUs of NVIDIA's, seen or not
    has_nvidia: bool = False

    def uuid_of(self, index: int) -> str:
        """Of the device with this number; "" if there is none."""
        return self.uuids[index] if index < len(self.uuids) else ""


def look_at_devices(root: Path = Path("/")) -> Devices:
    """``root`` has ``dev/nvidia0`` and ``proc/driver/nvidia/version`` where there are GPUs."""
    import torch

    version = root / "proc/driver/nvidia/version"
    try:
        found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)", version.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        found = None
    driver = found.group(1) if found else None
    has_nvidia = driver is not None or (root / "dev/nvidia0").exists()
    cuda, nccl = torch.version.cuda, None
    if torch.distributed.is_nccl_available():
        nccl = ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    if not torch.cuda.is_available():
        return Devices(torch.__version__, cuda, nccl, driver=driver, has_nvidia=has_nvidia)
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    names, uuids = (tuple(str(getattr(one, name, "")) for one in properties) for name in ("name", "uuid"))
    return Devices(torch.__version__, cuda, nccl, names, uuids, driver, has_nvidia)


def check_devices(seen: Devices, config: RunConfig | None, device_index: int, num_cores: int) -> Iterator[Finding]:
    """The device of a rank, which is number ``device_index`` of those that it sees, and what is needed to use it."""
    wanted = config.run.device if config is not None else "auto"
    yield _device(seen, wanted, device_index, num_cores)
    on_gpu = bool(seen.names) and wanted != "cpu"
    unneeded = "" if on_gpu else ", not needed on CPU"
    if seen.driver is not None or not on_gpu:
        yield Finding("GPU driver", "ok", seen.driver or f"none{unneeded}")
    else:
        yield Finding("GPU driver", "ok", "of an unknown version: there is no /proc/driver/nvidia/version")
    yield Finding(
        "CUDA",
        "ok",
        f"torch {seen.torch} with CUDA {seen.cuda}" if seen.cuda else f"torch {seen.torch} without CUDA{unneeded}",
    )
    yield Finding("NCCL", "ok", seen.nccl if seen.nccl is not None else f"not in this torch{unneeded}")
    for name, module, remedy in (
        ("Transformer Engine", "transformer_engine", 'pip install "megarl[gpu]": layers are slower without it'),
        ("Apex", "apex", ""),
    ):
        version = _version_here(module)
        level: Level = "warning" if version is None and on_gpu and remedy else "ok"
        text = version or "not installed" + (unneeded or (", not needed" if level == "ok" else ""))
        yield Finding(name, level, text, remedy if level == "warning" else "")
    yield _sglang(config)


def _device(seen: Devices, wanted: str, device_index: int, num_cores: int) -> Finding:
    if seen.names and wanted != "cpu":
        text = f"{len(seen.names)} x {', '.join(sorted(set(seen.names)))}"
        if device_index < len(seen.names):
            return Finding("device", "ok", text)
        what = f"{text}, but a rank here is to use number {device_index + 1} of them"
        return Finding("device", "error", what, "start fewer ranks per node, or give each rank a GPU of its own")
    on_cpu = f"CPU, {num_cores} core{'s' * (num_cores > 1)}"
    if wanted == "cpu":
        return Finding("device", "ok", f"{on_cpu} (run.device=cpu)")
    if seen.names:
        return Finding("device", "ok", on_cpu)
    level: Level = "error" if wanted == "cuda" else "warning" if seen.has_nvidia else "ok"
    if seen.has_nvidia:
        driver = f" (driver {seen.driver})" if seen.driver else ""
        text = f"this machine has NVIDIA GPUs{driver}, but torch {seen.torch} finds none"
    elif wanted == "cuda":
        text = f"run.device=cuda, but torch {seen.torch} finds no GPU"
    else:
        return Finding("device", "ok", f"{on_cpu} (torch {seen.torch} finds no GPU)")
    if seen.cuda is None:
        text, remedy = f"{text}: it is a build without CUDA", "install a CUDA build of torch, or set run.device=cpu"
    else:
        remedy = "check nvidia-smi and CUDA_VISIBLE_DEVICES, or set run.device=cpu"
    return Finding("device", level, text, remedy)


def _version_here(module: str) -> str | None:
    """Of a package of this interpreter; nothing of it is executed."""
    if importlib.util.find_spec(module) is None:
        return None
    try:
        return metadata.version(module)
    except metadata.PackageNotFoundError:
        return "installed"


def _sglang(config: RunConfig | None) -> Finding:
    """Looked for where the run would: in the interpreter that `generation.python` names, or in this one."""
    own = config.generation if config is not None and config.generates else None
    starts_servers = own is not None and own.engine == "sglang" and not own.urls
    if own is None or not starts_servers or own.python is None:
        version = _version_here("sglang")
        if version is None and starts_servers:
            remedy = 'pip install "megarl[gpu]", or name an interpreter that has it in generation.python'
            return Finding("SGLang", "error", "not installed, but generation.engine=sglang", remedy)
        return Finding("SGLang", "ok", version or "not installed, not needed")
    try:
        asked = subprocess.run(
            [own.python, "-c", _ASK_VERSION], capture_output=True, text=True, timeout=_SECONDS_TO_ANSWER, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = error.strerror if isinstance(error, OSError) else "it does not answer"
        text = f"generation.python={own.python} cannot be run: {reason}"
        return Finding("SGLang", "error", text, "name a Python interpreter of this machine that has SGLang")
    if asked.returncode:
        remedy = f"{own.python} -m pip install sglang"
        return Finding("SGLang", "error", f"not installed for generation.python={own.python}", remedy)
    return Finding("SGLang", "ok", f"{asked.stdout.strip()[:40]}, of {own.python}")
