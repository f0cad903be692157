"""The prompts to train on."""

from __future__ import annotations

from typing import Literal

from megarl.config.names import DATASETS, DatasetName
from megarl.config.section import REQUIRED, Section, setting

_MANY = 1_000_000_000
DATA_RULE = f"a JSONL file or a built-in task: {', '.join(DATASETS)}"


class DataSettings(Section):
    """The prompts to train on."""

    train: DatasetName = setting(
        REQUIRED,
        "The training prompts.",
        rule=DATA_RULE,
        elsewhere="train_files train_file train_data dataset prompt_data",
    )
    prompt_key: str = setting("prompt", "Key of a row's prompt.", min_length=1, elsewhere="input_key")
    answer_key: str = setting("answer", "Key of a row's reference answer.", min_length=1, elsewhere="label_key")
    demonstration_key: str = setting("demonstration", "Key of a row's worked answer.", min_length=1)
    shuffle: bool = setting(True, "Draw prompts in a new order in every epoch.")
    bad_rows: Literal["error", "skip"] = setting("error", "Stop at rows that cannot be read, or leave them out.")
    max_bad_rows: int = setting(100, "Most rows that bad_rows=skip leaves out; more are an error.", ge=0, le=_MANY)
