"""Sessions of workers that read drives themselves: their drives, and the pins of blocks under reads."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from tests.support.agent.assembly import (
    BLOCK_BYTES,
    DRIVE,
    FABRIC,
    FAR_S,
    LAYOUT,
    SETTINGS,
    SLOT_BYTES,
    TENANT,
    Assembly,
    assembled,
    chain_of,
    until,
    with_cache,
)

from ostraca_dpu_agent.settings import AgentSettings
from ostraca_fabric.connection import ClientConnection
from ostraca_fabric.connection.client import Aside, connect
from ostraca_fabric.model.overrides import LiveSettings, Overrides
from ostraca_fabric.wire import codec
from ostraca_fabric.wire.handshake import DIRECT, MEMORY
from ostraca_fabric.wire.messages import (
    AnnouncedDrive,
    ArenaOffer,
    Cancel,
    DirectDrives,
    ExtentsRead,
    Get,
    GetDone,
    GetExtents,
    Hello,
    OpenVolume,
)

MIB = 1 << 20
INFLIGHT_MAX = 2


@dataclass
class DirectWorker:
    """A worker's bare connection, and the agent behind it."""

    fabric: Assembly
    asides: list[Aside] = field(default_factory=list)
    connection: ClientConnection = field(init=False)

    def announce(self, *drives: tuple[bytes, str]) -> None:
        self.connection.tell(DirectDrives(tuple(AnnouncedDrive(*each) for each in drives)))

    async def get(self, deadline_s: float = FAR_S) -> int:
        """Get a block from the agent's answer on, and return the request."""
        return (await self.answer(deadline_s)).request

    async def answer(self, deadline_s: float = FAR_S) -> GetDone:
        """Get a block, and return the agent's answer."""
        request = self.connection.next_request_id()
        lengths, slots = np.array([BLOCK_BYTES], codec.U32), np.zeros(1, codec.U64)
        message = Get(request, 0, deadline_s, chain_of([0]), lengths.tobytes(), slots.tobytes(), SLOT_BYTES)
        answer = await self.connection.ask(message, FAR_S)
        assert isinstance(answer, GetDone)
        return answer

    @property
    def offers(self) -> list[GetExtents]:
        return [each for each in self.asides if isinstance(each, GetExtents)]

    @property
    def pins(self) -> int:
        return self.fabric.shard.core.counts().pins


@asynccontextmanager
async def direct_worker(
    directory: Path, agent: AgentSettings = SETTINGS, features: tuple[str, ...] = (DIRECT,)
) -> AsyncIterator[DirectWorker]:
    address = f"unix://{directory}/agent.sock"
    settings = replace(agent, requests=replace(agent.requests, inflight_max=INFLIGHT_MAX))
    async with assembled(settings, addresses=(address,)) as fabric:
        await fabric.ready()
        await fabric.put(fabric.worker(), [0])
        live = LiveSettings(direct_reads_tenant=TENANT)
        fabric.membership.rule(Overrides(live=live, revision=1))
        worker = DirectWorker(fabric)
        offers = (ArenaOffer("inline", 8 * MIB, 2 * MIB),)
        hello = Hello(1, 1, "worker", TENANT, "", "test", features=features, arenas=offers)
        worker.connection = await connect(address, hello, on_aside=worker.asides.append)
        opening = OpenVolume(worker.connection.next_request_id(), "v", LAYOUT, BLOCK_BYTES, create=True)
        await worker.connection.ask(opening, FAR_S)
        yield worker
        worker.connection.close()
        await worker.connection.wait_closed()


async def test_drives_of_other_fabrics_and_suspended_ones_are_not_read_by_the_worker(tmp_path: Path) -> None:
    async with direct_worker(tmp_path) as worker:
        for drives, number in (
            (((bytes([1] * 16), DRIVE), (FABRIC, "")), None),
            (((FABRIC, "e/other"), (FABRIC, ""), (FABRIC, DRIVE)), 2),
            ((), None),
        ):
            worker.announce(*drives)
            worker.asides.clear()
            request = await worker.get()
            assert [int(codec.u32(each.drives, 1)[0]) for each in worker.offers] == (
                [] if number is None else [number]
            )
            worker.connection.tell(Cancel(request))


@pytest.mark.parametrize("features", [(DIRECT,), (DIRECT, MEMORY)])
async def test_places_in_memory_are_told_only_to_workers_that_were_shown_the_memory(
    tmp_path: Path, features: tuple[str, ...]
) -> None:
    async with direct_worker(tmp_path, with_cache(2 * MIB), features) as worker:
        worker.connection.tell(DirectDrives((), reads_memory=True))
        assert bool((await worker.answer()).places) == (MEMORY in features)


End = Callable[[DirectWorker, int], None]
ENDS: dict[str, End] = {
    "report": lambda worker, request: worker.connection.tell(ExtentsRead(request, bytes(4), b"")),
    "cancel": lambda worker, request: worker.connection.tell(Cancel(request)),
    "loss": lambda worker, _: worker.connection.abort(),
}


@pytest.mark.parametrize("end", ENDS)
async def test_pins_outlast_the_answer_until_the_worker_needs_them_no_more(tmp_path: Path, end: str) -> None:
    async with direct_worker(tmp_path) as worker:
        worker.announce((FABRIC, DRIVE))
        request = await worker.get()
        assert (len(worker.offers), worker.pins) == (1, 1)
        ENDS[end](worker, request)
        await until(lambda: worker.pins == 0)
        hits = worker.fabric.context.counters.get_hits_direct
        assert hits == (end == "report")
        await worker.fabric.at_rest()


async def test_pins_of_a_silent_worker_end_with_the_time_of_its_get(tmp_path: Path) -> None:
    async with direct_worker(tmp_path) as worker:
        worker.announce((FABRIC, DRIVE))
        request = await worker.get(deadline_s=0.2)
        await until(lambda: worker.pins == 0)
        worker.connection.tell(ExtentsRead(request, bytes(4), b""))
        await worker.get(deadline_s=0.2)
        assert worker.fabric.context.counters.get_hits_direct == 0, "a late report counts for nothing"
        await until(lambda: worker.pins == 0)


async def test_a_worker_that_reports_nothing_is_offered_no_more_than_its_requests(tmp_path: Path) -> None:
    async with direct_worker(tmp_path) as worker:
        worker.announce((FABRIC, DRIVE))
        for _ in range(INFLIGHT_MAX + 1):
            request = await worker.get()
        assert (len(worker.offers), worker.pins) == (INFLIGHT_MAX, INFLIGHT_MAX)
        worker.connection.tell(Cancel(worker.offers[0].request))
        request = await worker.get()
        assert worker.offers[-1].request == request
        assert worker.pins == INFLIGHT_MAX


async def test_a_request_id_used_again_ends_the_earlier_reads(tmp_path: Path) -> None:
    async with direct_worker(tmp_path) as worker:
        worker.announce((FABRIC, DRIVE))
        request = await worker.get()
        message = Get(
            request,
            0,
            FAR_S,
            chain_of([0]),
            np.array([BLOCK_BYTES], codec.U32).tobytes(),
            bytes(8),
            SLOT_BYTES,
        )
        assert isinstance(await worker.connection.ask(message, FAR_S), GetDone)
        assert (len(worker.offers), worker.pins) == (2, 1)
        worker.connection.tell(ExtentsRead(request, bytes(4), b""))
        await until(lambda: worker.pins == 0)
        await worker.fabric.at_rest()


async def test_a_senseless_report_ends_the_connection_and_the_pins(tmp_path: Path) -> None:
    async with direct_worker(tmp_path) as worker:
        worker.announce((FABRIC, DRIVE))
        request = await worker.get()
        past_the_end = np.array([1], codec.U32).tobytes()
        worker.connection.tell(ExtentsRead(request, past_the_end, b""))
        await worker.connection.wait_closed()
        await until(lambda: worker.pins == 0)
        assert not worker.fabric.context.staging.tenants.requests
