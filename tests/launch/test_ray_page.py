"""Who pastes docs/ray.md into a shell from top to bottom trains on two nodes of Ray, and has nothing left running."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.pasted import blocks, copy_of_the_repository, paste, require_namespaces

pytestmark = pytest.mark.slow


def test_the_page_can_be_pasted(tmp_path: Path) -> None:
    """All of it into one shell, since what one block starts is used by the next."""
    require_namespaces()
    page = blocks("ray.md")
    for reason in (block.missing for block in page if block.missing):
        pytest.skip(reason)
    tree = copy_of_the_repository(tmp_path)
    said = paste("".join(block.text for block in page), tree)
    (name,) = (block.run_name for block in page if block.run_name)
    assert "\nstep:2 - " in said
    assert '"node": 1' in (tree / "runs" / name / "devices.json").read_text()
