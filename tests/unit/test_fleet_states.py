"""What becomes of a server that fails, hangs, lies or dies, and of the requests that it had."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

import numpy as np
import pytest

from megarl.core.engine_fault import EngineFault
from megarl.core.errors import EngineError
from megarl.core.protocols import Generation
from megarl.core.sample import VersionSpan
from megarl.generation.fleet.admission import require_verified
from megarl.generation.fleet.settings import FAILURES_TO_DEATH, MAX_ATTEMPTS
from tests.unit.fleet_world import World, fault, live, requests_of

NOW = range(7, 8)


def story(tell: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that happens in jumping time."""

    @wraps(tell)
    def test(*args: Any, **kwargs: Any) -> None:
        live(tell(*args, **kwargs))

    return test


async def serve(world: World, num_groups: int = 4, group_size: int = 4, versions: range = NOW) -> list[Any]:
    requests, groups = requests_of(num_groups, group_size)
    work = await world.fleet.submit(requests, groups, versions)
    served = await world.fleet.wait(work)
    assert not served.needs_push
    assert [generation and generation.id for generation in served.generations] == [request.id for request in requests]
    return served.generations


@story
async def test_all_are_served_in_order_by_the_least_loaded() -> None:
    world = World(2)
    await world.start()
    generations = await serve(world)
    assert [int(generation.token_ids[0]) for generation in generations] == list(range(16))
    assert {generation.engine for generation in generations} == {server.url for server in world.servers}
    assert [len(server.served) for server in world.servers] == [8, 8]
    assert world.said == [], "a run that goes well has nothing to tell"


@story
async def test_a_group_stays_with_one_server_that_has_room() -> None:
    world = World(3, num_slots=4)
    await world.start()
    generations = await serve(world, num_groups=6, group_size=4)
    for group in range(6):
        assert len({generation.engine for generation in generations[group * 4 : group * 4 + 4]}) == 1


@story
async def test_a_large_group_uses_other_servers_when_its_own_is_full() -> None:
    world = World(2, num_slots=2)
    await world.start()
    await serve(world, num_groups=1, group_size=8)
    assert [server.most_running for server in world.servers] == [2, 2]


@story
async def test_before_any_push_a_batch_says_that_it_needs_one() -> None:
    world = World(2)
    await world.fleet.open()
    work = await world.fleet.submit(*requests_of(1, 2), NOW)
    served = await world.fleet.wait(work)
    assert served.needs_push
    assert served.generations == [None, None]
    assert await world.fleet.needs_push()


@pytest.mark.parametrize("kind", ["unreachable", "refused", "garbled", "rejected", "timeout"])
@story
async def test_a_failed_request_is_asked_of_another_server_with_its_seed(kind: str) -> None:
    world = World(2)
    await world.start()
    world.servers[0].script = [fault(kind)]
    generations = await serve(world)
    assert [int(generation.token_ids[0]) for generation in generations] == list(range(16))
    _, counts = await world.fleet.take_counts()
    assert counts["engine/num_retries"] == 1
    assert counts["engine/num_rejected"] == (kind in ("garbled", "rejected"))
    assert any(f"{world.servers[0].url}: healthy -> suspect" in line for line in world.said)


@story
async def test_a_suspect_serves_again_after_a_good_probe_and_the_cause_is_said_once() -> None:
    world = World(1)
    await world.start()
    for _ in range(3):
        world.servers[0].script = [fault("garbled")]
        await serve(world, 1, 1)
        await world.until(lambda: world.state(0) == "healthy")
    assert sum("healthy -> suspect" in line for line in world.said) == 1
    assert sum("suspect -> healthy" in line for line in world.said) == 1
    assert "suspect 3x by garbled" in await world.fleet.describe()


@story
async def test_a_suspect_whose_weights_changed_is_stale() -> None:
    world = World(2)
    await world.start()
    world.servers[0].script = [fault("unreachable")]
    world.servers[0].weights = 0  # somebody started it again
    await serve(world)
    await world.until(lambda: world.state(0) == "stale")
    await world.push(7)
    assert world.state(0) == "healthy"


@story
async def test_many_failures_in_a_row_are_the_end_of_a_server_that_feels_well() -> None:
    world = World(2)
    await world.start()
    world.servers[0].script = [fault("refused")] * 100
    work = asyncio.create_task(serve(world, 20, 4))
    await world.until(lambda: world.servers[0].num_starts == 1)
    assert world.fleet.roster.servers[0].num_failed >= FAILURES_TO_DEATH
    assert len(await work) == 80
    assert world.state(0) == "stale"


@story
async def test_requests_that_fail_together_count_as_one_failure() -> None:
    world = World(2, num_slots=64)
    await world.start()
    world.servers[0].script = [fault("refused")] * 16
    await serve(world, 8, 4)
    assert world.servers[0].num_starts == 0


@story
async def test_a_killed_server_is_started_again_and_serves_only_after_a_push() -> None:
    world = World(2)
    await world.start()
    work = asyncio.create_task(serve(world, 20, 4))
    await world.until(lambda: world.servers[0].num_running == 4)
    world.servers[0].is_running = False
    await world.until(lambda: world.state(0) == "stale")
    num_served = len(world.servers[0].served)
    generations = await work
    assert all(generation.version == 7 for generation in generations)
    assert len(world.servers[0].served) == num_served, "it has no weights yet"
    assert await world.fleet.needs_push()
    await world.push(8)
    await serve(world, 4, 4, range(8, 9))
    assert len(world.servers[0].served) > num_served
    healthy, counts = await world.fleet.take_counts()
    assert (healthy, counts["engine/num_lost"], counts["engine/num_restarts"]) == (2, 1, 1)
    changes = [line.split(": ")[1] for line in world.said]
    assert changes == ["healthy -> dead", "dead -> stale", "stale -> healthy"]


@story
async def test_requests_of_a_server_that_hangs_move_long_before_they_time_out() -> None:
    world = World(2, request_timeout_seconds=600.0)
    await world.start()
    begin = asyncio.get_running_loop().time()
    work = asyncio.create_task(serve(world, 4, 4))
    await world.until(lambda: world.servers[0].num_running == 4)
    world.servers[0].hangs = True
    await work
    # two probes of five seconds, and the first comes within five
    assert asyncio.get_running_loop().time() - begin < 25
    await world.until(lambda: world.servers[0].num_starts == 1)
    assert asyncio.get_running_loop().time() - begin < 60


@story
async def test_a_lone_server_that_hangs_is_started_again_and_the_batch_asks_for_a_push() -> None:
    world = World(1)
    await world.start()
    requests, groups = requests_of(2, 4)
    work = await world.fleet.submit(requests, groups, NOW)
    await world.until(lambda: world.servers[0].num_running == 4)
    world.servers[0].hangs = True
    served = await world.fleet.wait(work)
    assert served.needs_push
    await world.push(7)
    await serve(world, 2, 4)


@story
async def test_one_failed_probe_never_kills() -> None:
    world = World(2)
    await world.start()
    world.servers[0].hangs = True
    await world.until(lambda: world.state(0) == "suspect")
    world.servers[0].hangs = False
    await world.until(lambda: world.state(0) == "healthy")
    assert world.servers[0].num_starts == 0


@story
async def test_a_busy_server_that_has_no_time_for_probes_is_not_suspected() -> None:
    world = World(1)

    async def unwell(timeout: float) -> bool:
        await asyncio.sleep(timeout)
        return False

    world.servers[0].is_healthy = unwell  # type: ignore[method-assign]
    await world.start()
    await serve(world, 20, 4)
    assert world.said == []


@pytest.mark.parametrize("claims", [6, 0, 9])
@story
async def test_samples_of_other_weights_are_never_taken(claims: int) -> None:
    world = World(2)
    await world.start()
    world.servers[0].claims = claims
    generations = await serve(world)
    assert {generation.version for generation in generations} == {7}
    assert {generation.engine for generation in generations} == {world.servers[1].url}
    assert world.state(0) == "stale"
    assert any("healthy -> stale" in line and f"version {claims}" in line for line in world.said)


@story
async def test_a_batch_is_not_given_to_weights_that_it_does_not_want() -> None:
    world = World(2)
    await world.start(7)
    world.servers[1].weights = 8
    await world.fleet.targets()
    await world.fleet.pushed(world.servers[1].url, 8, None)
    generations = await serve(world, versions=range(8, 9))
    assert {generation.engine for generation in generations} == {world.servers[1].url}
    work = await world.fleet.submit(*requests_of(1, 1), range(9, 10))
    assert (await world.fleet.wait(work)).needs_push


@story
async def test_a_server_that_cannot_be_pushed_is_started_again_and_then_retired() -> None:
    world = World(2)
    await world.start()
    url = world.servers[0].url
    for version in range(8, 40):
        await world.fleet.targets()
        await world.fleet.pushed(url, version, "the checksum differs")
        await world.until(lambda: world.state(0) in ("stale", "retired"))
        if world.state(0) == "retired":
            break
    assert world.servers[0].num_starts == 2
    assert url not in await world.fleet.targets()


@story
async def test_a_push_to_an_earlier_life_does_not_count() -> None:
    world = World(2)
    await world.start()
    url = world.servers[0].url
    assert url in await world.fleet.targets()
    world.servers[0].is_running = False
    await world.until(lambda: world.state(0) == "stale")
    await world.fleet.pushed(url, 8, None)
    assert world.state(0) == "stale"


@story
async def test_a_server_that_dies_every_time_is_retired_and_the_floor_ends_the_run() -> None:
    world = World(1, max_restarts=2)
    await world.start()
    world.servers[0].is_running = False
    world.processes.on_start = lambda server: setattr(server, "is_running", False)
    begin = asyncio.get_running_loop().time()
    with pytest.raises(EngineError, match=r"MRL-5160 0 of 1 (?s:.)*restarts 2 of 2"):
        while (await world.fleet.wait(await world.fleet.submit(*requests_of(1, 1), NOW))).needs_push:
            await world.push(7)
    assert world.servers[0].num_starts == 2
    assert asyncio.get_running_loop().time() - begin < 60


@story
async def test_a_server_that_does_not_start_is_retired() -> None:
    world = World(2, min_servers=2)
    await world.start()
    world.processes.broken.add(world.servers[0].url)
    world.servers[0].is_running = False
    work = await world.fleet.submit(*requests_of(100, 4), NOW)
    with pytest.raises(EngineError, match="MRL-5160 1 of 2"):
        await world.fleet.wait(work)


@story
async def test_an_external_server_may_come_back_but_nobody_waits_for_it() -> None:
    world = World(2, has_processes=False)
    await world.start()
    world.servers[0].is_running = False
    await world.until(lambda: world.state(0) == "dead")
    world.servers[0].is_running, world.servers[0].weights = True, 0
    await world.until(lambda: world.state(0) == "stale")
    await world.push(8)
    assert world.state(0) == "healthy"
    for server in world.servers:
        server.is_running = False
    await world.until(lambda: {world.state(0), world.state(1)} == {"dead"})
    await world.until(lambda: {world.state(0), world.state(1)} == {"retired"})


@story
async def test_comeback() -> None:
    world = World(1)
    await world.start()
    world.servers[0].is_running = False
    await world.until(lambda: world.state(0) == "dead")
    assert await world.fleet.targets() == []
    await world.until(lambda: world.state(0) == "stale")
    assert await world.fleet.targets() == [world.servers[0].url]


@story
async def test_a_request_that_fails_everywhere_is_given_up() -> None:
    world = World(2, max_restarts=100)
    world.processes.on_start = lambda server: server.script.extend([fault("refused")] * 100)
    await world.start()
    for server in world.servers:
        server.script = [fault("refused")] * 100
    requests, groups = requests_of(1, 1)
    for _ in range(10):
        served = None
        work = await world.fleet.submit(requests, groups, NOW)
        try:
            served = await world.fleet.wait(work)
        except EngineError as error:
            assert error.code == "MRL-5161"
            assert str(error).count("refused: as the test wants it") >= MAX_ATTEMPTS
            return
        assert served.needs_push
        await world.push(7)
    raise AssertionError("it was tried for ever")


@story
async def test_the_deadline_of_a_step() -> None:
    world = World(1, step_timeout_seconds=50.0)
    world.servers[0].seconds = 30.0
    await world.start()
    work = await world.fleet.submit(*requests_of(3, 4), NOW)
    with pytest.raises(EngineError, match=r"MRL-5162 8 of 12 requests wait after 50 s"):
        await world.fleet.wait(work)
    await world.until(lambda: world.servers[0].num_running == 0)


@story
async def test_a_long_tail_is_cut_and_its_beginnings_are_kept() -> None:
    world = World(2, num_slots=2)
    await world.start()
    world.servers[1].seconds = 50.0
    requests, groups = requests_of(6, 2)
    work = await world.fleet.submit(requests, groups, NOW)
    begin = asyncio.get_running_loop().time()
    served = await world.fleet.wait(work, num_groups=3)
    assert asyncio.get_running_loop().time() - begin < 10
    finishes = [generation and generation.finish for generation in served.generations]
    assert finishes.count("stop") == 6
    assert finishes[2:4] == ["abort", "abort"], "the slow server's"
    assert finishes.count("abort") + finishes.count(None) == 6, "those that had not begun have nothing"
    _, counts = await world.fleet.take_counts()
    assert counts["engine/num_aborted"] == 6
    assert all(server.load == 0 for server in world.fleet.roster.servers)


@story
async def test_a_server_that_ends_requests_by_itself_is_not_believed() -> None:
    world = World(2)
    await world.start()
    world.servers[0].script = [lambda server, request: server.aborted.add(request.id)]
    generations = await serve(world)
    assert {generation.finish for generation in generations} == {"stop"}


@story
async def test_the_older_of_two_batches_goes_first() -> None:
    world = World(1, num_slots=2)
    await world.start()
    older = await world.fleet.submit(*requests_of(2, 2), NOW)
    younger = await world.fleet.submit(*requests_of(2, 2), NOW)
    await world.fleet.wait(older)
    served = await world.fleet.wait(younger)
    assert all(served.generations)
    assert len({request.id for request in world.servers[0].served}) == 8, "equal names do not meet at a server"
    assert [request.seed for request in world.servers[0].served] == [0, 1, 2, 3] * 2


@pytest.mark.parametrize("versions", [range(7, 9), range(7, 8)])
@story
async def test_a_push_while_requests_run(versions: range) -> None:
    world = World(1)
    await world.start()
    work = await world.fleet.submit(*requests_of(2, 4), versions)
    await world.until(lambda: world.servers[0].num_running == 4)
    await world.servers[0].pause("in_place")
    await world.push(8)
    await world.servers[0].continue_generation()
    served = await world.fleet.wait(work)
    assert world.servers[0].told == ["pause in_place", "continue"]
    versions_of = [generation and generation.version for generation in served.generations]
    # the first four were begun by 7; the others would be drawn by 8, which the second batch does not want
    assert versions_of == [7] * 4 + [8 if 8 in versions else None] * 4
    assert served.needs_push == (8 not in versions)


@story
async def test_memory_is_taken_back_by_those_who_gave_it() -> None:
    world = World(2)
    await world.start()
    await world.fleet.release(["weights", "kv_cache"])
    assert await world.fleet.needs_push()
    world.servers[0].is_running = False
    await world.until(lambda: world.state(0) == "dead")
    await asyncio.sleep(100)
    assert world.servers[0].num_starts == 0, "it would take memory that the trainer uses"
    await world.fleet.resume(["weights"])
    await world.until(lambda: world.state(0) == "stale")
    await world.push(7)
    await world.fleet.resume(["kv_cache"])
    assert world.servers[0].told == ["release weights kv_cache"]
    assert world.servers[1].told == ["release weights kv_cache", "resume weights", "resume kv_cache"]
    await serve(world)


@story
async def test_a_server_that_keeps_its_memory_is_lost() -> None:
    world = World(2)
    await world.start()
    world.servers[0].hangs = True
    await world.fleet.release(["weights", "kv_cache"])
    assert world.state(0) == "dead"
    await world.until(lambda: not world.servers[0].is_running)  # its process must not hold the memory
    assert world.servers[0].num_starts == 0
    await world.fleet.resume(["weights", "kv_cache"])
    await world.push(7)
    await serve(world)


@story
async def test_a_server_that_comes_up_in_the_trainers_turn_makes_room() -> None:
    world = World(2)
    await world.start()
    world.servers[0].is_running = False
    await world.until(lambda: world.servers[0].num_starts == 1)
    await world.fleet.release(["weights", "kv_cache"])
    await world.until(lambda: world.state(0) == "stale")
    assert world.servers[0].told == ["release weights kv_cache"]
    await world.fleet.resume(["weights"])
    assert world.servers[0].told[1:] == ["resume weights"]


@pytest.mark.parametrize(
    "spans",
    [
        [(7, 0, 1)],
        [(7, 0, 1), (8, 1, 3)],
        [(7, 1, 2)],
        [(8, 0, 1), (7, 1, 2)],
        [(7, 0, 1), (9, 1, 2)],
        [(8, 0, 2)],
    ],
)
def test_spans_that_make_no_sense_are_rejected(spans: list[tuple[int, int, int]]) -> None:
    tokens, logprobs = np.arange(2), np.zeros(2, np.float32)
    parts = tuple(VersionSpan(*span) for span in spans)
    generation = Generation("a", tokens, logprobs, "stop", 7, parts)
    with pytest.raises(EngineFault):
        require_verified(generation, "a", [7, 8])


def test_an_answer_to_another_request_is_rejected() -> None:
    generation = Generation("a", np.arange(2), np.zeros(2, np.float32), "stop", 7)
    require_verified(generation, "a", [7])
    with pytest.raises(EngineFault, match="another request"):
        require_verified(generation, "b", [7])
