"""What can be wrong with a configuration, and how it is told: everything at once, most fundamental first."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from megarl.core.errors import ConfigError
from megarl.core.secret import mask_urls

KeyPath = tuple[str, ...]

# Every code of this package, for the documentation and for tests. Wording may change, a code may not.
CODES: dict[str, str] = {
    "MRL-1001": "The key is not a setting.",
    "MRL-1002": "A required setting is missing.",
    "MRL-1003": "The value has the wrong type.",
    "MRL-1004": "The value is out of range, or not one of the choices.",
    "MRL-1005": "Two settings contradict each other.",
    "MRL-1006": "The file is not readable YAML: syntax, encoding, size, or no settings in it.",
    "MRL-1007": "A key is given twice in one file.",
    "MRL-1008": "YAML anchors, aliases, merge keys and tags are not accepted.",
    "MRL-1009": "`extends` is wrong, or the files extend each other in a circle.",
    "MRL-1010": "A setting on the command line is not `key=value`.",
    "MRL-1011": "The command line is wrong.",
    "MRL-1012": "An option of Megatron-Core or SGLang is one that megarl sets itself.",
    "MRL-1013": "A secret is written out in the configuration.",
    "MRL-1014": "A secret is not where its reference says.",
    "MRL-1015": "The package of a tracker is not installed.",
    "MRL-1101": "The ranks are not a whole number of model replicas.",
    "MRL-1102": "The tensor-parallel size does not divide the model.",
    "MRL-1103": "The pipeline-parallel size does not divide the layers.",
    "MRL-1104": "A step has fewer samples than its minibatches and replicas need.",
    "MRL-1105": "A response may be longer than a microbatch.",
    "MRL-1106": "A response may be longer than the model's positions.",
    "MRL-1107": "The ranks are not a whole number of expert groups.",
    "MRL-1108": "The expert-parallel sizes do not divide the experts.",
    "MRL-1109": "Expert parallelism needs a mixture of experts.",
    "MRL-1112": "Interleaved stages need a pipeline.",
    "MRL-1113": "The value model knows fewer tokens than the policy.",
    "MRL-1114": "Sequence parallelism is on without tensor parallelism, or off where experts need it.",
    "MRL-1115": "`stage_layers` does not describe the pipeline's stages.",
    "MRL-1201": "The model architecture is not supported.",
    "MRL-1202": "The model config asks for something that is not supported.",
    "MRL-1203": "A number of the model config is missing or wrong.",
    "MRL-1204": "The model's `config.json` is not a JSON object.",
    "MRL-1205": "The model's rotary embedding is not supported.",
    "MRL-1206": "The model's heads do not divide.",
    "MRL-1207": "The value model does not have exactly one output.",
    "MRL-1301": 'A callable is not written as "package.module:name".',
    "MRL-1302": "The module of a callable cannot be imported.",
    "MRL-1303": "The module of a callable does not define it.",
    "MRL-1402": "A tokenizer file cannot be read.",
    "MRL-1430": "The file of the chat template cannot be read.",
    "MRL-1435": "`chat.system` or `chat.options` is set, but there is no chat template.",
    "MRL-1437": "The tokenizer has several chat templates and no default.",
    "MRL-1460": "Two rewards have the same label.",
    "MRL-4001": "The model directory has no `config.json`.",
    "MRL-4010": "The configuration file is missing or cannot be read.",
    "MRL-4011": "The file that `extends` names is missing or cannot be read.",
    "MRL-4002": "The model directory has no safetensors weights.",
    "MRL-4101": "The tokenizer directory has no `tokenizer.json`.",
    "MRL-4102": "A data file is missing.",
    "MRL-9001": "An internal error: please report it.",
}
MAX_SHOWN = 10
_EXCERPT = 80


@dataclass(frozen=True, slots=True)
class Source:
    """Where a setting was written: a line of a file, or the command line (line 0)."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


COMMAND_LINE = Source("command line", 0)


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake. ``text`` says what is wrong; ``hints`` say what is allowed and what to write instead.

    ``keys`` are all the settings that take part. The first of them that was written by the user is the one whose line
    is shown, unless ``where`` already says it.
    """

    code: str
    text: str
    keys: tuple[KeyPath, ...] = ()
    hints: tuple[str, ...] = ()
    where: str = ""

    def __str__(self) -> str:
        first = " ".join(part for part in (self.code, self.where, self.text) if part)
        return "\n    ".join((first, *self.hints))


def raise_problems(problems: Sequence[Problem]) -> NoReturn:
    """All problems as one `ConfigError`, which carries the code of the first."""
    shown = [str(problem) for problem in problems[:MAX_SHOWN]]
    if len(problems) > MAX_SHOWN:
        shown.append(f"... and {len(problems) - MAX_SHOWN} more.")
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    shown.append(f"{count}. Nothing was started.")
    raise ConfigError(problems[0].code, "\n".join(shown).removeprefix(f"{problems[0].code} "))


def show(value: Any) -> str:
    """A value as an excerpt: at most 80 characters, escaped, so that foreign text cannot garble a terminal."""
    if isinstance(value, dict):
        return f"a mapping with {len(value)} keys" if value else "an empty mapping"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    text = mask_urls(json.dumps(value, default=repr))
    return text if len(text) <= _EXCERPT else f"{text[: _EXCERPT - 4]}...{text[-1]}"


def dotted(path: KeyPath) -> str:
    """``actor.optimizer.lr``; keys that are not plain words are quoted, escaped and cut."""
    return ".".join(key if _is_plain(key) else show(key) for key in path)


def _is_plain(key: str) -> bool:
    return 0 < len(key) <= _EXCERPT and key.isascii() and key.isprintable() and not set(key) & set(" .\"'")
