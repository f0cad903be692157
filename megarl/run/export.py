"""A checkpoint's policy as a Hugging Face directory, written tensor by tensor without any rank."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megarl.checkpoint.store import Checkpoint
from megarl.config.layout import hf_config_of, model_shape
from megarl.config.load import load_config
from megarl.config.schema import RunConfig
from megarl.config.tokenizer_files import TEMPLATE_DIRECTORY, TEMPLATE_FILE, read_object, template_of
from megarl.core.errors import ConfigError, MissingInputError, StorageError
from megarl.data.encoder import load_encoder
from megarl.data.tokenizer import load_tokenizer
from megarl.run.choose_step import Step, open_step
from megarl.run.progress import Progress

if TYPE_CHECKING:
    from megarl.models.cuts import Parameter

_MAX_FILE_BYTES = 4 * 2**30
_TYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}
_GENERATION_CONFIG = "generation_config.json"
# what belongs to a tokenizer in a Hugging Face directory
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", TEMPLATE_FILE, TEMPLATE_DIRECTORY, "chat_template.json",
)  # fmt: skip


def export_checkpoint(run: Path, step: Step, out: Path) -> str:
    """Write ``out``; what it says to the user. ``out`` appears whole or not at all."""
    if not (run / "resolved.yaml").is_file():
        raise MissingInputError(
            "MRL-4301", f"{run} is not a run directory: there is no resolved.yaml in it.\nName one, such as runs/NAME."
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError("MRL-1503", f"--out {out} exists and is not empty.\nName a directory that is not there yet.")
    checkpoint = open_step(run / "checkpoints", step)
    config = load_config(run / "resolved.yaml")
    out = out.resolve()
    unfinished = out.with_name(f".{out.name}.{secrets.token_hex(4)}")
    try:
        unfinished.mkdir(parents=True)
        num_bytes = _write_model(unfinished, config, checkpoint)
        _write_companions(unfinished, config, checkpoint)
        if out.exists():
            out.rmdir()
        unfinished.rename(out)
    except OSError as error:
        raise StorageError("MRL-7302", f"{out} cannot be written: {error.strerror}.") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return f"Step {checkpoint.step} of {run} is in {out}: {num_bytes:,} bytes of weights.\n"


@dataclass(frozen=True, slots=True)
class _Shard:
    """One safetensors file: parameters in the order of the model, and the bytes of their tensors."""

    parameters: list[Parameter]
    num_bytes: int


def _write_model(directory: Path, config: RunConfig, checkpoint: Checkpoint) -> int:
    """All weights, one parameter in memory at a time; their bytes."""
    dtype = getattr(torch, Progress.from_tree(checkpoint.progress).dtype)
    shards = list(_shards(_table(config), dtype))
    file_of: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(directory / name, shard, checkpoint, dtype)
        file_of |= {hf_name: name for parameter in shard.parameters for hf_name in parameter.hf_names}
    total = sum(shard.num_bytes for shard in shards)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": file_of}
        _write_json(directory / "model.safetensors.index.json", index)
    return total


def _table(config: RunConfig) -> list[Parameter]:
    with warnings.catch_warnings():
        # Only now, when nothing can be the user's mistake any more: this imports Megatron-Core, which takes seconds
        # and warns about GPU packages.
        warnings.simplefilter("ignore")
        from megarl.models.parameter_table import whole_table
    return whole_table(model_shape(config))


def _shards(table: list[Parameter], dtype: torch.dtype) -> Iterator[_Shard]:
    parameters: list[Parameter] = []
    num_bytes = 0
    for parameter in table:
        size = parameter.num_elements * dtype.itemsize
        if parameters and num_bytes + size > _MAX_FILE_BYTES:
            yield _Shard(parameters, num_bytes)
            parameters, num_bytes = [], 0
        parameters.append(parameter)
        num_bytes += size
    yield _Shard(parameters, num_bytes)


def _write_shard(path: Path, shard: _Shard, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
    """A safetensors file: the length of the header, the header, and the tensors' bytes in its order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for parameter in shard.parameters:
        for name, shape in zip(parameter.hf_names, parameter.hf_shapes, strict=True):
            start, end = end, end + prod(shape) * dtype.itemsize
            header[name] = {"dtype": _TYPE_NAMES[dtype], "shape": shape, "data_offsets": [start, end]}
    from megarl.models.saved_tensors import saved_tensors  # see `_table`

    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for parameter in shard.parameters:
            for tensor in saved_tensors(checkpoint.read, parameter):
                file.write(tensor.to(dtype).contiguous().view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def _write_companions(directory: Path, config: RunConfig, checkpoint: Checkpoint) -> None:
    """What makes weights a model: its config, how it generates, and its tokenizer."""
    source = Path(config.model.path) if config.model.path is not None else None
    hf_config = hf_config_of(config)
    dtype = Progress.from_tree(checkpoint.progress).dtype
    # transformers 5 says dtype, older ones torch_dtype; both read the older word
    hf_config.pop("dtype", None)
    _write_json(directory / "config.json", {**hf_config, "torch_dtype": dtype})
    tokenizer = load_tokenizer(config.model.tokenizer or config.model.path or "")
    if config.model.tokenizer is not None and config.model.tokenizer.startswith("builtin:"):
        for name, content in tokenizer.to_files().items():
            (directory / name).write_text(content, encoding="utf-8")
    else:
        _copy(Path(config.model.tokenizer or config.model.path or ""), _TOKENIZER_FILES, directory)
    template = template_of(config)
    if template is not None and config.chat.template != "auto":  # otherwise it is among the tokenizer's files
        (directory / TEMPLATE_FILE).write_text(template.text, encoding="utf-8", newline="")
    _write_generation_config(directory, source, load_encoder(config.chat, tokenizer).stop_token_ids)


def _write_generation_config(directory: Path, source: Path | None, stops: tuple[int, ...]) -> None:
    """The published file as it is, unless the policy was trained to stop at a token that it does not name."""
    published = read_object(source / _GENERATION_CONFIG) if source is not None else {}
    known = published.get("eos_token_id")
    if source is not None and {*stops} <= {*(known if isinstance(known, list) else [known])}:
        _copy(source, (_GENERATION_CONFIG,), directory)
    else:
        _write_json(
            directory / _GENERATION_CONFIG, {**published, "eos_token_id": stops[0] if len(stops) == 1 else list(stops)}
        )


def _copy(source: Path, names: tuple[str, ...], target: Path) -> None:
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
        elif (source / name).is_dir():
            shutil.copytree(source / name, target / name)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
