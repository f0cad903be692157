"""Who pastes docs/launching.md into a shell from top to bottom sees it work, and has nothing left running."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e.runs import ROOT
from tests.launch.pasted import Block, blocks, copy_of_the_repository, paste, require_namespaces, require_one_ledger

pytestmark = pytest.mark.slow

SETUP = "make setup-launchers\n. .venv/bin/activate\n"
BLOCKS = blocks("launching.md")
TO_RUN = [block for block in BLOCKS if block.text != SETUP]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require_namespaces()
    return copy_of_the_repository(tmp_path_factory.mktemp("repository"))


def test_the_page_begins_with_what_installs_the_rest() -> None:
    """Whoever runs these tests has done this; it would reinstall the environment that they run in."""
    assert BLOCKS[0].text == SETUP
    assert BLOCKS.count(BLOCKS[0]) == 1
    assert "make setup-launchers\n" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_every_way_is_on_the_page() -> None:
    text = "".join(block.text for block in TO_RUN)
    for way in ("megarl train", "torchrun", "ray job submit", "megarl launch slurm", "megarl doctor"):
        assert f"\n{way} " in f"\n{text}"
    assert set(re.findall(r"examples/(two_nodes_\w+)/", text)) == {
        path.name for path in (ROOT / "examples").glob("two_nodes_*")
    }


@pytest.mark.parametrize("block", TO_RUN, ids=str)
def test_it_can_be_pasted(block: Block, tree: Path) -> None:
    if block.missing:
        pytest.skip(block.missing)
    before = set(tree.iterdir())
    said = paste(block.text, tree)
    if block.run_name:
        assert "\nstep:2 - " in said
        assert (tree / "runs" / block.run_name / "metrics.jsonl").is_file()
    assert set(tree.iterdir()) - before <= {tree / "runs"}, "what it writes is in runs/"


def test_all_of_them_gave_the_same_numbers(tree: Path) -> None:
    require_one_ledger(tree)
