"""The directory that SGLang is started from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_model_directory(directory: Path, model_config: Mapping[str, Any]) -> None:
    """Write config.json alone: no weights, which come by a push, and no tokenizer, since token ids are all we speak.

    SGLang stops at every end-of-sequence token that the files name, whatever a request asks for; so they name none.
    """
    directory.mkdir(parents=True, exist_ok=True)
    nameless = {key: value for key, value in model_config.items() if key != "eos_token_id"}
    text = json.dumps(nameless | {"eos_token_id": None}, indent=2)
    (directory / "config.json").write_text(text, encoding="utf-8")
