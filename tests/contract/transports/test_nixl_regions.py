"""Blocks in regions of a worker, beside its arena: NIXL moves them, and nothing outside of offered memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.contract.transports.arena_host import ArenaHost
from tests.contract.transports.test_transports import QuietChannel, bench_of, needs_nixl
from tests.contract.transports.transport_bench import (
    ARENA,
    CHUNK,
    DONE,
    FAILED,
    FROM_WORKER,
    PAGE,
    STAGING,
    TO_WORKER,
    Bench,
    moved,
    noise,
    wave,
)
from tests.support.agent.assembly import until
from tests.support.agent.moving import move

from ostraca_dpu_agent.adapters.transports.nixl_peer import NixlPeer
from ostraca_dpu_agent.adapters.transports.nixl_transport import NixlTransport
from ostraca_fabric.nixl.runtime import sealed
from ostraca_fabric.ports.transport import BulkChannel, Direction
from ostraca_fabric.tables.slots import Wave

pytestmark = [pytest.mark.nixl, needs_nixl]

REGION = 3 * PAGE + 5


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with bench_of(NixlTransport.create("regions"), tmp_path_factory.mktemp("regions")) as bench:
        yield bench


class Worker:
    """One attached worker process, and what was said to its connection."""

    def __init__(self, host: ArenaHost, peer: NixlPeer, channel: QuietChannel) -> None:
        self.host, self.peer, self.channel = host, peer, channel

    async def offer(self, content: NDArray[np.uint8]) -> int:
        """Offer a region with this content; return its address."""
        metadata, address = await self.host.offer_region(content.tobytes())
        self.peer.offer_regions(metadata)
        return address


@pytest.fixture
async def worker(bench: Bench, tmp_path: Path) -> AsyncIterator[Worker]:
    host, channel = ArenaHost("nixl", tmp_path, arena_bytes=ARENA, chunk_bytes=CHUNK), QuietChannel()
    assert isinstance(bench.transport, NixlTransport)
    peer = await bench.transport.attach(host.offer, bench.memory.view, cast("BulkChannel", channel))
    yield Worker(host, peer, channel)
    peer.close()
    assert await asyncio.to_thread(host.stop) == 0


def blocks_at(address: int, offsets: list[int], lengths: list[int]) -> Wave:
    return Wave(
        staging=np.arange(len(offsets), dtype=np.int64) * 2 * PAGE,
        arena=np.array(offsets, np.int64) + address,
        lengths=np.array(lengths, np.uint32),
        staging_slot_bytes=2 * PAGE,
        arena_slot_bytes=2 * PAGE,
        in_regions=True,
    )


OFFSETS, LENGTHS = [1, 2 * PAGE, 3 * PAGE], [PAGE + 3, PAGE, 5]


@pytest.mark.parametrize("direction", list(Direction))
async def test_blocks_move_from_and_to_any_place_of_several_regions_and_the_arena(
    bench: Bench, worker: Worker, direction: Direction
) -> None:
    first, second, staging = noise(REGION, 1), noise(REGION, 2), noise(STAGING, 3)
    bench.memory.array[:STAGING] = staging
    for number, content in enumerate((first, second)):
        address = await worker.offer(content)
        blocks = blocks_at(address, OFFSETS, LENGTHS)
        assert await move(worker.peer, direction, blocks) is DONE
        local = replace(blocks, arena=blocks.arena - address)
        if direction is TO_WORKER:
            assert (
                await worker.host.peek_region(number) == moved(staging, content, local, direction).tobytes()
            )
        else:
            staging = moved(content, staging, local, direction)
            assert bench.memory.array[:STAGING].tobytes() == staging.tobytes()
    assert await move(worker.peer, FROM_WORKER, wave(4, PAGE, PAGE)) is DONE
    assert not worker.channel.broken_off


@pytest.mark.parametrize("offset", [-1, REGION - 4, 1 << 40])
async def test_a_block_outside_of_the_regions_fails_and_its_worker_must_connect_again(
    worker: Worker, offset: int
) -> None:
    address = await worker.offer(noise(REGION, 1))
    blocks = blocks_at(address, [0, offset], [PAGE, 5])
    assert await move(worker.peer, TO_WORKER, blocks) is FAILED
    assert await worker.host.peek_region(0) == noise(REGION, 1).tobytes()
    assert worker.channel.broken_off


async def test_addresses_of_the_other_half_of_the_address_space_fail(worker: Worker) -> None:
    await worker.offer(noise(REGION, 1))
    assert await move(worker.peer, TO_WORKER, blocks_at(-(1 << 63), [0], [5])) is FAILED
    assert not worker.channel.broken_off


async def test_a_region_is_out_of_reach_before_its_offer(worker: Worker) -> None:
    _, address = await worker.host.offer_region(noise(REGION, 1).tobytes())
    assert await move(worker.peer, TO_WORKER, blocks_at(address, [0], [5])) is FAILED


@pytest.mark.parametrize("kind", ["damaged", "none", "of another worker", "no text", "beyond memory"])
async def test_metadata_that_is_not_the_workers_own_breaks_its_connection_off_and_no_other(
    bench: Bench, worker: Worker, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata, _ = await worker.host.offer_region(noise(REGION, 1).tobytes())
    other, _ = await bench.hosts[0].offer_region(noise(REGION, 1).tobytes())
    assert isinstance(bench.transport, NixlTransport)
    api = bench.transport._agent._api
    if kind == "no text":
        monkeypatch.setattr(api, "add_remote_agent", lambda _: b"\xff")
    elif kind == "beyond memory":
        monkeypatch.setattr(api, "add_remote_agent", lambda _: bytes(1 << 60))
    offers = {"damaged": metadata[:-1] + b"?", "none": sealed(b"?"), "of another worker": other}
    worker.peer.offer_regions(offers.get(kind, metadata))
    await until(lambda: bool(worker.channel.broken_off))
    assert worker.channel.broken_off[0].startswith("regions: ")
    monkeypatch.undo()
    peer = await bench.transport.attach(
        bench.hosts[0].offer, bench.memory.view, cast("BulkChannel", QuietChannel())
    )
    assert await move(peer, FROM_WORKER, wave(4, PAGE, PAGE)) is DONE
    peer.close()


async def test_a_closed_peer_takes_no_offer(bench: Bench, worker: Worker) -> None:
    """The name would come back, and nothing would ever forget it."""
    metadata, _ = await worker.host.offer_region(noise(REGION, 1).tobytes())
    worker.peer.close()
    worker.peer.offer_regions(metadata)
    assert isinstance(bench.transport, NixlTransport)
    again = await bench.transport.attach(
        worker.host.offer, bench.memory.view, cast("BulkChannel", worker.channel)
    )
    assert await move(again, FROM_WORKER, wave(4, PAGE, PAGE)) is DONE
    again.close()
