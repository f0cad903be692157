"""Who serves what: requests go to the least loaded server, and elsewhere if it fails them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from megarl.core import whereabouts
from megarl.core.engine_fault import EngineFault
from megarl.core.errors import EngineError
from megarl.core.protocols import Generation, GenerationRequest, OnServed
from megarl.generation.fleet.admission import drawn_by, require_verified
from megarl.generation.fleet.roster import Roster
from megarl.generation.fleet.server import Server
from megarl.generation.fleet.settings import ABORT_SECONDS, GRACE_SECONDS, MAX_ATTEMPTS, FleetSettings
from megarl.generation.fleet.work import Job, Work


@dataclass(eq=False, slots=True)
class Flight:
    """One attempt to have a job served by a server."""

    work: Work
    job: Job
    server: Server
    # what the server knows it by. Unique: two batches, or two attempts, must not meet at a server under one name
    id: str
    # among the requests that the server was sent
    number: int
    # where in `Server.verified` it began
    first_version: int
    task: asyncio.Task[None] | None = None


class Dispatch:
    """Batches in flight. Only the event loop's thread may call it.

    Every job is served at most once: an answer counts only while its flight is listed, and a job has one flight at a
    time.
    """

    def __init__(self, roster: Roster, settings: FleetSettings) -> None:
        self._roster = roster
        self._settings = settings
        self._works: list[Work] = []
        self._flights: dict[str, Flight] = {}
        self._num_works = 0
        # several runs may use the same servers
        self._name = secrets.token_hex(4)
        self._is_start_due = False
        roster.on_leave = self.move_away
        roster.on_change = self.start_soon

    def submit(
        self,
        requests: Sequence[GenerationRequest],
        groups: Sequence[int],
        versions: range,
        on_served: OnServed | None = None,
    ) -> Work:
        """Take a batch; it starts as soon as there is room, older batches first."""
        self._num_works += 1
        work = Work(self._num_works, requests, groups, versions, on_served)
        self._works.append(work)
        self.start_soon()
        return work

    def start_soon(self) -> None:
        """Look for work that can start now; later, because whoever calls is in the middle of a change."""
        if not self._is_start_due:
            self._is_start_due = True
            asyncio.get_running_loop().call_soon(self._start_all)

    def move_away(self, server: Server) -> None:
        """What the server works on must be done by others; nothing that it still answers counts.

        A request that is cancelled closes its connection, which is how servers learn that nobody waits for it.
        """
        for flight in [flight for flight in self._flights.values() if flight.server is server]:
            self._land(flight)
            if flight.task is not None:
                flight.task.cancel()
            self._do_again(flight)
        self.start_soon()

    def has_others(self, server: Server) -> bool:
        """Whether everything that the server works on could be done by others now."""
        works = {flight.work for flight in self._flights.values() if flight.server is server}
        return all(any(other.serves(work.versions) for other in self._roster.servers) for work in works)

    def drop(self, work: Work) -> None:
        """The batch is over: nothing of it starts any more, and what runs is stopped."""
        work.is_cut = True
        work.queue.clear()
        if work in self._works:
            self._works.remove(work)
        for flight in [flight for flight in self._flights.values() if flight.work is work]:
            self._land(flight)
            if flight.task is not None:
                flight.task.cancel()

    async def cut(self, work: Work) -> None:
        """Abort the rest of the batch, and give it a moment to come back with what it has."""
        self._roster.tally["engine/num_aborted"] += work.num_unserved
        work.is_cut = True
        work.queue.clear()
        running: dict[Server, list[str]] = {}
        for flight in self._flights.values():
            if flight.work is work:
                running.setdefault(flight.server, []).append(flight.id)
        await asyncio.gather(*(self._abort(server, ids) for server, ids in running.items()))
        end = asyncio.get_running_loop().time() + ABORT_SECONDS
        while work.num_running and await self._roster.changed.wait(end - asyncio.get_running_loop().time()):
            pass

    async def close(self) -> None:
        """Stop everything."""
        for work in list(self._works):
            self.drop(work)

    # -- taking off

    def _start_all(self) -> None:
        self._is_start_due = False
        for work in self._works:
            while work.queue and self._start_one(work):
                pass

    def _start_one(self, work: Work) -> bool:
        serving = [server for server in self._roster.servers if server.serves(work.versions)]
        with_room = sorted((s for s in serving if s.load < self._settings.num_slots), key=lambda server: server.load)
        urls_with_room, urls_serving = {s.url for s in with_room}, {s.url for s in serving}
        for server in with_room:
            job = work.queue.take(server.url, urls_with_room, urls_serving)
            if job is not None:
                self._start(work, job, server)
                return True
        return False

    def _start(self, work: Work, job: Job, server: Server) -> None:
        job.num_starts += 1
        server.num_sent += 1
        server.load += 1
        work.num_running += 1
        name = f"{self._name}-{work.number}-{job.place}-{job.num_starts}"
        first = len(server.verified) - 1
        flight = Flight(work, job, server, name, server.num_sent, first)
        self._flights[name] = flight
        flight.task = asyncio.create_task(self._fly(flight))

    async def _fly(self, flight: Flight) -> None:
        seconds = self._settings.request_timeout_seconds
        try:
            request = replace(flight.job.request, id=flight.id)
            async with asyncio.timeout(seconds + GRACE_SECONDS):
                generation = await flight.server.engine.generate(request, seconds)
                whereabouts.tick()
            if flight.id in self._flights:
                self._take(flight, generation)
        except TimeoutError:
            self._fail(flight, EngineFault("timeout", f"no answer in {seconds:g} s"))
        except EngineFault as fault:
            self._fail(flight, fault)
        except Exception as error:
            # a mistake of ours: whoever waits for the batch must hear of it
            self._land(flight)
            flight.work.error = error
        self._roster.changed.beat()
        self.start_soon()

    # -- landing

    def _land(self, flight: Flight) -> bool:
        """Take it off the list; False if it was not on it: somebody decided already that it does not count."""
        if self._flights.pop(flight.id, None) is None:
            return False
        flight.server.load -= 1
        flight.work.num_running -= 1
        return True

    def _take(self, flight: Flight, generation: Generation) -> None:
        require_verified(generation, flight.id, flight.server.verified[flight.first_version :])
        if generation.finish == "abort" and not flight.work.is_cut:
            raise EngineFault("rejected", "the server ended the request by itself")
        self._land(flight)
        self._roster.served(flight.server)
        is_wanted = all(version in flight.work.versions for version in drawn_by(generation))
        if is_wanted:
            whole = replace(generation, id=flight.job.request.id, engine=flight.server.url)
            flight.work.finish(flight.job, whole)
        else:
            self._roster.tally["engine/num_rejected"] += 1
            self._do_again(flight)

    def _fail(self, flight: Flight, fault: EngineFault) -> None:
        if not self._land(flight):
            return
        job, server = flight.job, flight.server
        job.faults.append((server.url, fault))
        if len(job.faults) >= MAX_ATTEMPTS and not flight.work.is_cut:
            faults = "\n".join(f"  {url}: {fault}" for url, fault in job.faults)
            flight.work.error = EngineError(
                "MRL-5161",
                f"request {job.request.id!r} failed {len(job.faults)} times and is given up:\n{faults}\n"
                f"The servers:\n{self._roster.describe()}",
            )
        else:
            self._do_again(flight)
        self._roster.failed(server, fault, flight.number)

    def _do_again(self, flight: Flight) -> None:
        if not flight.work.is_cut:
            flight.work.queue.put_back(flight.job)
            self._roster.tally["engine/num_retries"] += 1

    async def _abort(self, server: Server, ids: Sequence[str]) -> None:
        with suppress(EngineFault, TimeoutError):
            async with asyncio.timeout(ABORT_SECONDS):
                await server.engine.abort(ids)
