"""The documentation is generated, complete and within its budget; names agree with what they name."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

from megarl.config.names import DATASETS, REWARD_MODEL, REWARDS
from megarl.config.problems import CODES
from megarl.data.prompts import BUILTINS as BUILTIN_DATA
from megarl.rewards.load import BUILTINS as BUILTIN_REWARDS

ROOT = Path(__file__).parents[2]


def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("config_reference", ROOT / "tools" / "config_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_document_is_what_the_tool_writes() -> None:
    written = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert written == tool().reference(), "run: python tools/config_reference.py"


def test_there_are_at_most_250_keys_each_with_a_description_and_a_rule() -> None:
    merged = tool().merged_settings()
    assert len(merged) <= 250
    assert len({setting.path for setting, _ in merged}) == len(merged)
    for setting, _ in merged:
        assert setting.description.endswith("."), setting.path
        assert setting.rule, setting.path


def test_every_number_has_limits() -> None:
    for setting, _ in tool().merged_settings():
        if "number" in setting.rule:
            assert re.search(r">=? \S+ and <=? \S+", setting.rule), setting.path


def test_every_code_of_the_package_is_documented_and_every_documented_code_is_used() -> None:
    sources = [
        *(ROOT / "megarl" / "config").glob("*.py"),
        ROOT / "megarl" / "cli.py",
        ROOT / "megarl/core/importing.py",
        ROOT / "megarl/core/secret.py",
    ]
    used = set()
    for path in sources:
        text = path.read_text(encoding="utf-8")
        used |= set(re.findall(r"MRL-\d{4}", text.partition("CODES:")[0] if path.name == "problems.py" else text))
    assert used == set(CODES)


def test_the_names_that_are_built_in_are_those_that_exist() -> None:
    assert set(DATASETS) == set(BUILTIN_DATA)
    assert set(REWARDS) == {*BUILTIN_REWARDS, REWARD_MODEL}
