"""Weight push to engines that are servers. Every rank exports; couriers bring what was exported to their servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megarl.core.bucket import num_bytes, recut
from megarl.core.loop_thread import LoopThread
from megarl.core.protocols import PushTargets, RemoteEngine
from megarl.core.world import DRIVER, World
from megarl.metrics.meter import Meter
from megarl.weights.attest import Attestor
from megarl.weights.delivery import Delivery
from megarl.weights.inprocess import Export
from megarl.weights.road import Road, Server
from megarl.weights.tally import Tally


class ServerTransport:
    """Brings the trainer's weights to all servers that are up, and tells the fleet what became of each.

    A server's failure is its own: every rank gets through the whole export whatever happens. ``couriers`` says which
    rank speaks to which server, the driver if it is not named; ``targets`` and ``in_flight`` (whether requests may be
    running now) are the driver's.
    """

    def __init__(
        self,
        export: Export,
        couriers: Mapping[str, int],
        engine_of: Callable[[str], RemoteEngine],
        targets: PushTargets | None,
        road: Road,
        world: World,
        loop: LoopThread,
        in_flight: Callable[[], bool] = lambda: False,
    ) -> None:
        self._export = export
        self._couriers = couriers
        self._engine_of = engine_of
        self._targets = targets
        self._road = road
        self._world = world
        self._loop = loop
        self._in_flight = in_flight
        self._attestor = Attestor(road.timeout_seconds)

    def push(self, version: int) -> Meter:
        """Give every server the trainer's weights under ``version``, and prove that they arrived. Collective."""
        plan = self._world.broadcast(self._plan())
        urls = [url for url in plan["urls"] if self._couriers.get(url, DRIVER) == self._world.rank]
        servers = [Server(self._engine_of(url)) for url in urls]
        delivery = Delivery(servers, self._road, self._attestor, self._loop)
        delivery.begin("in_place" if plan["in_flight"] else "retract")
        tally, size = Tally(version), 0
        for bucket, is_last in recut(self._export(), self._road.bucket_bytes):
            size += num_bytes(bucket)
            delivery.take(bucket, tally, is_last)
        delivery.finish(tally)
        report = {
            "problems": dict(zip(urls, [server.problem for server in servers], strict=True)),
            # of all weights, if they went all the way to somebody
            "checksum": tally.checksum if tally.num_bytes == size else None,
        }
        self._tell(version, self._world.gather(report) or [])
        if plan["in_flight"]:
            self._world.barrier()  # an answer of the new weights must not come before the fleet knows of them
            delivery.let_go()
        if delivery.error is not None:
            raise delivery.error
        meter = Meter()
        if self._world.is_driver:
            meter.last("weights/version", version)
            meter.sum("weights/push_bytes", size)
        return meter

    def _plan(self) -> dict[str, Any] | None:
        if not self._world.is_driver:
            return None
        assert self._targets is not None, "the driver has them"
        return {"urls": self._targets.targets(), "in_flight": self._in_flight()}

    def _tell(self, version: int, reports: list[dict[str, Any]]) -> None:
        """The driver's last part: every server's verdict to the fleet."""
        sent = {report["checksum"] for report in reports if report["problems"] and report["checksum"] is not None}
        for rank, report in enumerate(reports):
            for url, problem in report["problems"].items():
                if problem is None and len(sent) > 1:
                    problem = f"the couriers did not send the same weights; rank {rank} sent {report['checksum']:x}"
                assert self._targets is not None, "only the driver has reports"
                self._targets.pushed(url, version, problem)
