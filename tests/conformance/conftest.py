"""The suite runs on every engine; on real SGLang only where there is one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conformance.subjects import SGLANG_PYTHON, SUBJECTS, Subject


@pytest.fixture(scope="session", params=SUBJECTS)
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    if "sglang" in request.param and not SGLANG_PYTHON:
        pytest.skip("MEGARL_SGLANG_PYTHON names no interpreter with SGLang")
    with SUBJECTS[request.param](tmp_path_factory.mktemp("engine")) as subject:
        subject.push()
        yield subject


@pytest.fixture
def subject(shared: Subject) -> Iterator[Subject]:
    """An engine that serves and has nothing to do, before and after."""
    yield shared
    shared.engine.abort()
    shared.engine.continue_generation()
