"""The small files beside a ``tokenizer.json``: what they say, without opening the tokenizer itself."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.config.chat import ChatSettings
from megarl.config.problems import show
from megarl.config.schema import RunConfig
from megarl.core.errors import ConfigError

TOKENIZER_CONFIG = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_DIRECTORY = "additional_chat_templates"


@dataclass(frozen=True, slots=True)
class TemplateSource:
    """A chat template's text, and the file that it is from."""

    path: Path
    text: str

    def __str__(self) -> str:
        return f"{self.path} (sha256 {self.sha256[:12]})"

    @property
    def sha256(self) -> str:
        """Of the text: a run that goes on must have the same."""
        return hashlib.sha256(self.text.encode("utf-8", "surrogatepass")).hexdigest()


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object, or an empty one when there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError("MRL-1402", f"{path}: not valid JSON ({show(str(error))}).") from error
    if not isinstance(content, dict):
        raise ConfigError("MRL-1402", f"{path}: must hold a JSON object.")
    return content


def named_tokens(directory: Path) -> dict[str, str]:
    """``bos_token``, ``eos_token`` and their like, by name: what a chat template may refer to."""
    found: dict[str, str] = {}
    for name in (TOKENIZER_CONFIG, "special_tokens_map.json"):
        for key, token in read_object(directory / name).items():
            text = token.get("content") if isinstance(token, Mapping) else token
            if key.endswith("_token") and isinstance(text, str):
                found.setdefault(key, text)
    return found


def template_of(config: RunConfig) -> TemplateSource | None:
    """The chat template of a run."""
    return find_template(config.chat, config.model.tokenizer or config.model.path or "")


def find_template(settings: ChatSettings, tokenizer: str) -> TemplateSource | None:
    """The chat template that these settings choose; None: prompts are plain text. ``tokenizer``: as in the config."""
    found = _find(settings, tokenizer)
    if found is None and (settings.system is not None or settings.options):
        key = "chat.options" if settings.system is None else "chat.system"
        raise ConfigError(
            "MRL-1435",
            f"{key} is set, but there is no chat template that could read it: "
            f"chat.template={show(settings.template)}, tokenizer {show(tokenizer)}.\n"
            "Name a template (chat.template: FILE.jinja), or put the text into the prompts.",
        )
    return found


def _find(settings: ChatSettings, tokenizer: str) -> TemplateSource | None:
    if settings.template == "none":
        return None
    if settings.template != "auto":
        return TemplateSource(Path(settings.template), _read_text(Path(settings.template), "chat.template"))
    if tokenizer.startswith("builtin:"):
        return None
    templates = _templates_of(Path(tokenizer))
    wanted = "tool_use" if settings.options.get("tools") is not None and "tool_use" in templates else "default"
    if templates and wanted not in templates:
        raise ConfigError(
            "MRL-1437",
            f"{tokenizer} has several chat templates ({', '.join(sorted(map(show, templates)))}) and no default.\n"
            "Write one of them into a file and name it: chat.template: FILE.jinja",
        )
    return templates.get(wanted)


def _templates_of(directory: Path) -> dict[str, TemplateSource]:
    """By name. Files of their own come before what is in tokenizer_config.json, as in transformers."""
    files = {"default": directory / TEMPLATE_FILE} if (directory / TEMPLATE_FILE).is_file() else {}
    files |= {path.stem: path for path in sorted((directory / TEMPLATE_DIRECTORY).glob("*.jinja"))}
    if files:
        return {name: TemplateSource(path, _read_text(path, "chat template")) for name, path in files.items()}
    path = directory / TOKENIZER_CONFIG
    found = read_object(path).get("chat_template")
    named = [{"name": "default", "template": found}] if isinstance(found, str) else found or []
    try:
        templates = {one["name"]: TemplateSource(path, one["template"]) for one in named}
        if not all(isinstance(text, str) for name, one in templates.items() for text in (name, one.text)):
            raise TypeError
    except (TypeError, KeyError):
        raise ConfigError(
            "MRL-1437", f"{path}: chat_template must be text, or a list of {{name, template}}, not {show(found)}."
        ) from None
    return templates


def _read_text(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(
            "MRL-1430",
            f"{what} {show(str(path))} cannot be read: {reason}.\n"
            "Name a Jinja file, or write chat.template: auto for the tokenizer's own, none for plain text.",
        ) from error
