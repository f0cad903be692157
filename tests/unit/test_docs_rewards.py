"""docs/rewards.md tells the truth: its functions run, its settings are accepted, its tables name every option."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.config.catalogue import settings_of
from megarl.config.load import load_config
from megarl.config.reward_options import REWARD_OPTIONS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
SETTINGS = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_function_and_its_test_run(tmp_path: Path) -> None:
    function, test = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "my_rewards.py").write_text(function)
    (tmp_path / "try_it.py").write_text(test)
    ran = subprocess.run([sys.executable, "try_it.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_settings_are_accepted(settings: str, tmp_path: Path) -> None:
    base = (ROOT / "configs" / "quickstart.yaml").read_text(encoding="utf-8")
    without_reward = re.sub(r"^reward:.*\n(?:[ #].*\n)*", "", base, flags=re.MULTILINE)
    (tmp_path / "run.yaml").write_text(f"{without_reward}\n{settings}")
    load_config(tmp_path / "run.yaml", [])


@pytest.mark.parametrize("name", REWARD_OPTIONS)
def test_the_tables_name_every_option_with_its_default(name: str) -> None:
    section = PAGE.partition(f"\n### {name}\n")[2].partition("\n### ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| .+ \|$", section, re.MULTILINE)
    expected = {
        key: "required" if found.required else found.default.strip('"').replace(r"\\", "\\")
        for key, found in settings_of(REWARD_OPTIONS[name]).items()
    }
    assert {key: default.strip("`") for key, default in rows} == expected
    assert f"[{name}](#{name})" in PAGE or name == "coin_flip"
