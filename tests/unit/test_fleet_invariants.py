"""Whatever goes wrong and whenever: every request is served once, by the right weights, and no server is overrun."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.fleet_world import ScriptedServer, World, fault, honest, live, requests_of

NOW = range(7, 8)
KINDS = ("unreachable", "timeout", "refused", "garbled", "rejected", "stale")
# when, which of the bad servers, what happens to it
EVENTS = st.tuples(
    st.floats(0.0, 60.0),
    st.integers(0, 2),
    st.sampled_from(("die", "hang", "wake", "lie", "lie newer", *KINDS)),
)


async def trouble(server: ScriptedServer, seconds: float, event: str) -> None:
    await asyncio.sleep(seconds)
    if event == "die":
        server.is_running = False
    elif event in ("hang", "wake"):
        server.hangs = event == "hang"
    elif event.startswith("lie"):
        server.claims = 9 if event.endswith("newer") else 6
    else:
        server.script.extend([honest, fault(event)] * 3)


async def pushes(world: World) -> None:
    """Somebody who pushes whenever a server could be brought back."""
    while True:
        await asyncio.sleep(3.0)
        if await world.fleet.needs_push():
            await world.push(7)


@settings(max_examples=150, deadline=None)
@given(
    num_bad=st.integers(0, 3),
    num_slots=st.integers(1, 5),
    num_groups=st.integers(1, 12),
    events=st.lists(EVENTS, max_size=12),
    has_processes=st.booleans(),
    num_batches=st.integers(1, 2),
)
def test_all_are_served_once_while_one_server_stays_good(
    num_bad: int,
    num_slots: int,
    num_groups: int,
    events: list[tuple[float, int, str]],
    has_processes: bool,
    num_batches: int,
) -> None:
    async def happen() -> None:
        world = World(num_bad + 1, num_slots=num_slots, has_processes=has_processes)
        await world.start()
        bad = world.servers[1:]
        background = [asyncio.create_task(pushes(world))]
        for seconds, place, event in events if bad else ():
            background.append(asyncio.create_task(trouble(bad[place % num_bad], seconds, event)))
        requests, groups = requests_of(num_groups, 3)
        batches = [await world.fleet.submit(requests, groups, NOW) for _ in range(num_batches)]
        for batch in batches:
            served = await world.fleet.wait(batch)
            assert not served.needs_push
            assert [generation and generation.id for generation in served.generations] == [r.id for r in requests]
            for request, generation in zip(requests, served.generations, strict=True):
                assert generation is not None
                assert generation.token_ids.tolist() == [request.seed, 7]
                assert (generation.version, generation.finish) == (7, "stop")
        assert all(server.most_running <= num_slots for server in world.servers)
        assert all(server.load == 0 for server in world.fleet.roster.servers)
        assert world.fleet.roster.servers[0].num_failed == 0
        assert all(server.num_restarts <= world.settings.max_restarts for server in world.fleet.roster.servers)
        await world.fleet.close()
        for task in background:
            task.cancel()

    live(happen())


@settings(max_examples=60, deadline=None)
@given(
    events=st.lists(EVENTS, min_size=1, max_size=12),
    num_wanted=st.integers(1, 6),
)
def test_a_batch_always_ends_and_takes_nothing_wrong(events: list[tuple[float, int, str]], num_wanted: int) -> None:
    """No server is good here: the batch may end early, be cut, or ask for a push, but never holds a bad sample."""

    async def happen() -> None:
        world = World(3, max_restarts=50)
        await world.start()
        background = [asyncio.create_task(trouble(world.servers[place], when, what)) for when, place, what in events]
        requests, groups = requests_of(6, 3)
        missing = list(range(len(requests)))
        for _ in range(100):
            batch = await world.fleet.submit([requests[i] for i in missing], [groups[i] for i in missing], NOW)
            served = await world.fleet.wait(batch, num_wanted)
            for i, generation in zip(missing, served.generations, strict=True):
                if generation is not None:
                    assert generation.id == requests[i].id
                    assert set(generation.token_ids.tolist()[1:]) <= {7}
            if not served.needs_push:
                break
            missing = [i for i, generation in zip(missing, served.generations, strict=True) if generation is None]
            await world.push(7)
        else:
            raise AssertionError("it never ended")
        for task in background:
            task.cancel()

    live(happen())
