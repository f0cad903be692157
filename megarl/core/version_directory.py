"""The files of one version of the weights on a disk: a Hugging Face directory, and what every file must hash to."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

INDEX = "model.safetensors.index.json"
MANIFEST = "megarl_manifest.json"
_FILE_NAME = re.compile(r"model-\d{5,8}\.safetensors")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class VersionFile:
    """One file of weights."""

    name: str
    num_bytes: int
    sha256: str


def read_manifest(directory: Path) -> list[VersionFile]:
    """The files that the directory promises, by plain names inside it. Raises `ValueError` or `OSError`."""
    tree = json.loads((directory / MANIFEST).read_bytes())
    files = tree.get("files") if isinstance(tree, Mapping) else None
    if not isinstance(files, Mapping) or not files:
        raise ValueError(f"{MANIFEST} names no files")
    found = []
    for name, entry in files.items():
        size, digest = (entry.get("num_bytes"), entry.get("sha256")) if isinstance(entry, Mapping) else (None, None)
        if not _FILE_NAME.fullmatch(name) or type(size) is not int or not _SHA256.fullmatch(str(digest)):
            raise ValueError(f"{MANIFEST}: {name[:80]!a} is not described as a file of weights")
        found.append(VersionFile(name, size, str(digest)))
    return found
