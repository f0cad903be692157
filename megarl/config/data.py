"""The prompts to train on."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, StringConstraints, field_serializer

from megarl.config.names import DATASETS, DatasetName
from megarl.config.section import REQUIRED, Section, setting

_MANY = 1_000_000_000
DATA_RULE = f"a JSONL or Parquet file, or a built-in task: {', '.join(DATASETS)}"
# enough of a SHA-256 to name one file, and short enough to be copied by hand
SHOWN_HASH_DIGITS = 16


class SourceSettings(Section):
    """One of the sources of the training prompts."""

    path: DatasetName = setting(REQUIRED, "The prompts.", rule=DATA_RULE)
    weight: float = setting(
        1.0, "Prompts are drawn from the sources in proportion to their weights.", gt=0, le=1_000_000_000.0
    )
    task: str | None = setting(None, "Task of its prompts; null: what a row says.", min_length=1)
    prompt_key: str | None = setting(None, "Like data.prompt_key, for this source; null: the same.", min_length=1)
    answer_key: str | None = setting(None, "Like data.answer_key, for this source; null: the same.", min_length=1)
    demonstration_key: str | None = setting(
        None, "Like data.demonstration_key, for this source; null: the same.", min_length=1
    )
    answer_after: str | None = setting(None, "Like data.answer_after, for this source; null: the same.", min_length=1)


def _as_sources(value: Any) -> Any:
    """``train: rows.jsonl`` is short for a list of one source of that path."""
    items = value if isinstance(value, list) else [value]
    if not isinstance(value, (str, list)):
        return value
    return [{"path": item} if isinstance(item, str) else item for item in items]


class DataSettings(Section):
    """The prompts to train on."""

    train: Annotated[list[SourceSettings], BeforeValidator(_as_sources)] = setting(
        REQUIRED,
        "The training prompts: one source, or a list of sources that are mixed.",
        rule=f"{DATA_RULE}; or a list of sources, each with a path and a weight",
        elsewhere="train_files train_file train_data dataset prompt_data",
        min_length=1,
    )
    prompt_key: str = setting(
        "prompt", "Key of a row's prompt: a text, or a list of messages.", min_length=1, elsewhere="input_key"
    )
    answer_key: str = setting("answer", "Key of a row's reference answer.", min_length=1, elsewhere="label_key")
    answer_after: str | None = setting(
        None,
        "Take only what follows the last occurrence of this text in the answer, such as '####'; null: all of it.",
        min_length=1,
    )
    demonstration_key: str = setting("demonstration", "Key of a row's worked answer.", min_length=1)
    shuffle: bool = setting(True, "Draw prompts in a new order in every epoch.")
    too_long: Literal["error", "skip"] = setting(
        "skip",
        "Prompts longer than rollout.max_prompt_tokens: stop at them, or leave them out and count them.",
        elsewhere="filter_overlong_prompts",
    )
    bad_rows: Literal["error", "skip"] = setting("error", "Stop at rows that cannot be read, or leave them out.")
    max_bad_rows: int = setting(
        100, "Most rows of a file that bad_rows=skip leaves out; more are an error.", ge=0, le=_MANY
    )
    accept_changed: list[Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16,64}$")]] = setting(
        [],
        "Go on with training files that changed since the run began, named by the first digits of their new hashes.",
        rule="a list, which may be empty, of 16 to 64 hexadecimal digits each",
    )

    @field_serializer("train")
    def _as_written(self, sources: list[SourceSettings]) -> Any:
        """One source with nothing but a path is just that path."""
        trees = [source.model_dump(mode="json") for source in sources]
        if len(sources) == 1 and sources[0] == SourceSettings(path=sources[0].path):
            return sources[0].path
        return trees
