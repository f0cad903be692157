from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.distributed.gang import Gang


@pytest.fixture(scope="package")
def gang() -> Iterator[Callable[[int], Gang]]:
    """``gang(2)``: two real ranks, started once for all tests of this package (again after a failure killed them)."""
    gangs: dict[int, Gang] = {}

    def get(size: int) -> Gang:
        if size in gangs and not gangs[size].alive:
            gangs.pop(size).close()
        if size not in gangs:
            gangs[size] = Gang(size)
        return gangs[size]

    yield get
    for one in gangs.values():
        one.close()
