"""Lay down an environment with real SGLang and its router on a machine without a GPU.

python tools/sglang/provision.py [--into .venv-sglang]

SGLang's own requirements resolve to the CUDA stack, so everything is installed without its requirements, from the list
of pinned versions next to this file, and two shims stand in for compiled parts that do not fit. Done once: a stamp
inside the environment holds what it was made from.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_REQUIREMENTS = _HERE / "requirements.txt"
_SHIMS = _HERE / "shims"
_STAMP = ".megarl-sglang"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, default=Path(".venv-sglang"), help="the environment's directory")
    into = parser.parse_args().into.absolute()
    recipe = _recipe()
    stamp = into / _STAMP
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == recipe:
        print(f"{into} is up to date.")
        return
    python = into / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(into)], check=True)
    _install(python)
    _lay_shims(into)
    check = "import sgl_kernel, torchvision, sglang.srt.server_args, sglang_router.launch_router"
    subprocess.run([str(python), "-c", check], check=True)
    stamp.write_text(recipe, encoding="utf-8")
    print(f"{into} has SGLang.")


def _recipe() -> str:
    """One line that changes with any file that the environment is made from."""
    files = [_REQUIREMENTS, *sorted(path for path in _SHIMS.rglob("*") if path.suffix in (".py", ".pth"))]
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()


def _install(python: Path) -> None:
    """torch goes first and alone: asked for by name and version it is the CPU build where one is at hand."""
    lines = _REQUIREMENTS.read_text(encoding="utf-8").split()
    torch = [line for line in lines if line.startswith("torch==")]
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *torch], check=True)
    subprocess.run([*pip, "--no-deps", *(line for line in lines if line not in torch)], check=True)


def _lay_shims(into: Path) -> None:
    (packages,) = into.glob("lib/python3.*/site-packages")
    shutil.copytree(_SHIMS, packages, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))


if __name__ == "__main__":
    main()
