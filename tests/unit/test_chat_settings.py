"""Which template a run has, and what that decides: its hash, its resume, what is shown and what is refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.cli import main
from megarl.config.chat import ChatSettings
from megarl.config.load import load_config
from megarl.config.tokenizer_files import find_template, named_tokens, template_of
from megarl.core.errors import ConfigError, DataError
from megarl.data.encoder import load_encoder
from megarl.data.prompts import open_prompts
from megarl.data.tokenizer import load_tokenizer
from megarl.run.changes import require_same_run
from tests.unit.chat_tokenizers import CHATML, byte_level
from tests.unit.test_resume_changes import progress

CONFIGS = Path(__file__).parents[2] / "configs"


def chosen(directory: Path, **chat: Any) -> str | None:
    source = find_template(ChatSettings(**chat), str(directory))
    return None if source is None else source.text


def with_config(directory: Path, **settings: Any) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def test_where_a_template_is_found(tmp_path: Path) -> None:
    assert chosen(with_config(tmp_path / "none")) is None
    assert chosen(tmp_path / "nowhere") is None
    directory = with_config(tmp_path / "text", chat_template="in the config")
    assert chosen(directory) == "in the config"
    assert chosen(directory, template="none") is None
    (directory / "chat_template.jinja").write_text("in a file", newline="")
    assert chosen(directory) == "in a file"
    (tmp_path / "own.jinja").write_text("my own\r\n", newline="")
    assert chosen(directory, template=str(tmp_path / "own.jinja"), system="a") == "my own\n"
    assert find_template(ChatSettings(), "builtin:characters") is None


def test_several_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    directory = with_config(tmp_path / "list", chat_template=named)
    assert chosen(directory) == "plain"
    assert chosen(directory, options={"tools": []}) == "with tools"
    with pytest.raises(ConfigError, match=r"MRL-1437.*rag"):
        chosen(with_config(tmp_path / "rag", chat_template=[{"name": "rag", "template": "x"}]))
    for wrong in (7, [7], [{"name": "default"}], {"default": "x"}, [{"name": "default", "template": 7}]):
        with pytest.raises(ConfigError, match="MRL-1437"):
            chosen(with_config(tmp_path / "wrong", chat_template=wrong))
    (directory / "chat_template.jinja").write_text("plain file")
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("tools file")
    assert (chosen(directory), chosen(directory, options={"tools": []})) == ("plain file", "tools file")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for name in ("missing.jinja", "."):
        with pytest.raises(ConfigError, match="MRL-1430"):
            chosen(tmp_path, template=str(tmp_path / name))
    (tmp_path / "latin.jinja").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"MRL-1430.*UTF-8"):
        chosen(tmp_path, template=str(tmp_path / "latin.jinja"))
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match="MRL-1402"):
        chosen(tmp_path)


def test_tokens_that_templates_may_name(tmp_path: Path) -> None:
    directory = with_config(
        tmp_path / "a",
        bos_token={"content": "<s>"},
        eos_token="</s>",
        pad_token=None,
        add_bos_token=True,
        image_token="<i>",
    )
    (directory / "special_tokens_map.json").write_text('{"eos_token": "other", "unk_token": "<unk>"}')
    assert named_tokens(directory) == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "image_token": "<i>",
        "unk_token": "<unk>",
    }


def run_config(directory: Path, **chat: Any) -> Path:
    """The quickstart with a tokenizer that has a chat template."""
    byte_level(directory / "model")
    tree = {
        "extends": str(CONFIGS / "quickstart_ppo.yaml"),
        "model": {"tokenizer": str(directory / "model"), "config": {"vocab_size": 512}},
        "chat": chat,
    }
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def test_a_changed_template_is_another_run(tmp_path: Path) -> None:
    path = run_config(tmp_path)
    config = load_config(path, [])
    before = progress(config)
    assert before.template_digest == hashlib.sha256(CHATML.encode()).hexdigest()
    assert require_same_run(config, before) == []
    with pytest.raises(ConfigError, match=r"MRL-1501[\s\S]*chat.system: was null"):
        require_same_run(load_config(path, ["chat.system=Be brief."]), before)
    (tmp_path / "model" / "chat_template.jinja").write_text(CHATML.replace("assistant", "helper"))
    with pytest.raises(ConfigError, match="MRL-1438"):
        require_same_run(config, before)


def test_check_shows_the_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run_config(tmp_path)
    template = template_of(load_config(path, []))
    assert main(["check", str(path)]) == 0
    printed = capsys.readouterr().out
    assert template is not None
    assert f"tokenizer_config.json (sha256 {template.sha256[:12]})" in printed
    assert main(["check", str(CONFIGS / "quickstart.yaml")]) == 0
    assert "none: prompts are plain text" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("chat.template=none chat.system=a", "MRL-1435"),
        ("chat.template=nowhere.jinja", "MRL-1430"),
        ("chat.template=", "auto, none, or the path"),
        ("chat.options={messages: []}", "MRL-1012"),
        ("chat.date=yesterday", "MRL-1004 command line chat.date"),
        ("chat.system_prompt=a", "chat.system"),
        ("chat.chat_template_kwargs={}", "chat.options"),
    ],
)
def test_check_finds_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, told: str) -> None:
    words = override.split(" chat")
    words = [words[0], *(f"chat{word}" for word in words[1:])]
    assert main(["check", str(run_config(tmp_path)), *words]) == 64
    assert told in capsys.readouterr().err


def test_a_row_that_the_template_refuses_is_named(tmp_path: Path) -> None:
    template = CHATML.replace(
        "{%- for", "{%- if messages[0].role != 'user' %}{{ raise_exception('ask!') }}{% endif %}{%- for"
    )
    encoder = load_encoder(ChatSettings(), load_tokenizer(str(byte_level(tmp_path / "model", template))))
    path = tmp_path / "rows.jsonl"
    rows = [[{"role": "user", "content": "a"}], [{"role": "system", "content": "b"}, {"role": "user", "content": "c"}]]
    path.write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
    prompts = open_prompts(str(path), encoder)
    assert prompts[0].messages == tuple(rows[0])
    with pytest.raises(DataError, match=r"MRL-2041 rows.jsonl:2: .*ask!"):
        _ = prompts[1]
