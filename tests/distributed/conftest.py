from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.distributed.gang import Gang


@pytest.fixture(scope="session")
def gang() -> Callable[[int], Gang]:
    """``gang(2)``: two real ranks for every job."""
    return Gang
