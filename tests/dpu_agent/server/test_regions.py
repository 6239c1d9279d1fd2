"""Requests that name addresses in regions of a worker: moved there, and refused where none were offered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
from tests.dpu_agent.server.test_sessions import GET, Wire, hello, u64, wired
from tests.support.agent.assembly import (
    BLOCK_BYTES,
    SLOT_BYTES,
    Assembly,
    MemoryWorker,
    assembled,
    content_of,
    get_states,
    put_states,
    unsettled_of,
    with_cache,
)

from ostraca_fabric.connection import ClientConnection, connect
from ostraca_fabric.errors import ConnectError, UsageError
from ostraca_fabric.model.outcome import BlockState, PutState, Reason
from ostraca_fabric.wire import codec
from ostraca_fabric.wire.handshake import REGIONS
from ostraca_fabric.wire.messages import (
    REGION_OFFERS_MAX,
    Get,
    GetDone,
    OpenVolume,
    Ping,
    Put,
    RegionsOffer,
)

_Message = TypeVar("_Message", Get, Put)

NUMBERS = [0, 1, 2]
ADDRESSES = [3 * BLOCK_BYTES + 1, 0, BLOCK_BYTES]


def worker_of(fabric: Assembly) -> MemoryWorker:
    worker = replace(fabric.worker(), has_regions=True)
    worker.arena.regions = bytearray(5 * BLOCK_BYTES)
    return worker


def there(worker: MemoryWorker) -> list[bytes]:
    return [bytes(worker.arena.regions[at : at + BLOCK_BYTES]) for at in ADDRESSES]


def at_addresses(message: _Message, addresses: Sequence[int] = ADDRESSES) -> _Message:
    return msgspec.structs.replace(message, addresses=u64(*addresses))


@pytest.mark.parametrize("cache_bytes", [0, 8 << 20], ids=["flash", "DRAM"])
async def test_blocks_move_from_and_to_addresses_and_the_arena_sees_none(cache_bytes: int) -> None:
    async with assembled(with_cache(cache_bytes)) as fabric:
        worker = worker_of(fabric)
        message = fabric.put_message(worker, NUMBERS)
        worker.arena.bytes[:] = bytes(len(worker.arena.bytes))
        for number, at in zip(NUMBERS, ADDRESSES, strict=True):
            worker.arena.regions[at : at + BLOCK_BYTES] = content_of(number)
        done = await fabric.data_path.put(worker, fabric.volume, at_addresses(message))
        assert put_states(done) == [PutState.COMMITTED] * 3
        worker.arena.regions[:] = bytes(len(worker.arena.regions))
        got = await fabric.data_path.get(worker, fabric.volume, at_addresses(fabric.get_message(NUMBERS)))
        assert get_states(got) == [BlockState.HIT] * 3
        assert there(worker) == [content_of(number) for number in NUMBERS]
        assert not any(worker.arena.bytes)
        await fabric.at_rest()


async def test_a_get_that_is_over_says_which_addresses_may_be_written_yet() -> None:
    async with assembled() as fabric:
        worker = worker_of(fabric)
        await fabric.put(fabric.worker(), NUMBERS)
        worker.arena.is_held = True
        message = at_addresses(fabric.get_message(NUMBERS, deadline_s=0.1))
        done = await fabric.data_path.get(worker, fabric.volume, message)
        assert sorted(unsettled_of(done)) == NUMBERS
        assert not worker.settled
        worker.arena.let_go()
        await fabric.at_rest()
        assert worker.settled == [message.request]
        assert there(worker) == [content_of(number) for number in NUMBERS]


@pytest.mark.parametrize("address", [5 * BLOCK_BYTES, (1 << 64) - 1])
async def test_addresses_out_of_reach_are_blocks_that_failed(address: int) -> None:
    async with assembled() as fabric:
        worker = worker_of(fabric)
        await fabric.put(fabric.worker(), NUMBERS)
        message = at_addresses(fabric.get_message(NUMBERS), [0, address, 1])
        done = await fabric.data_path.get(worker, fabric.volume, message)
        assert get_states(done)[1] is BlockState.MISS
        assert done.reasons[1] == Reason.TRANSFER_FAILED
        await fabric.at_rest()


async def test_a_worker_without_regions_names_slots_alone() -> None:
    async with assembled() as fabric:
        worker = fabric.worker()
        with pytest.raises(UsageError, match="name slots alone"):
            await fabric.data_path.get(worker, fabric.volume, at_addresses(fabric.get_message(NUMBERS)))
        with pytest.raises(UsageError, match="name slots alone"):
            await fabric.data_path.put(
                worker, fabric.volume, at_addresses(fabric.put_message(worker, NUMBERS))
            )
        await fabric.at_rest()


async def test_a_connection_with_too_many_offers_is_broken_off(tmp_path: Path) -> None:
    async with wired(tmp_path) as wire:
        connection = await opened(wire, (REGIONS,))
        for _ in range(REGION_OFFERS_MAX):
            connection.tell(RegionsOffer(b"of no use"))
        await connection.ask(Ping(connection.next_request_id()), 5.0)
        connection.tell(RegionsOffer(b"one more"))
        await connection.wait_closed()
        with pytest.raises(ConnectError, match=r"\(regions\): too many offers"):
            await connection.ask(Ping(connection.next_request_id()), 5.0)


async def opened(wire: Wire, features: tuple[str, ...]) -> ClientConnection:
    connection = await connect(wire.address, msgspec.structs.replace(hello(), features=features))
    layout = wire.fabric.volume.record.layout
    opening = OpenVolume(connection.next_request_id(), "v", layout, BLOCK_BYTES, create=False)
    await connection.ask(opening, 5.0)
    return connection


@pytest.mark.parametrize(("features", "has_told"), [((), True), ((REGIONS,), False), ((REGIONS,), True)])
async def test_regions_count_from_their_offer_on_with_the_feature(
    tmp_path: Path, features: tuple[str, ...], has_told: bool
) -> None:
    """Inline, regions are out of reach all the same: what is named there fails."""
    async with wired(tmp_path) as wire:
        await wire.fabric.ready()
        await wire.fabric.put(wire.fabric.worker(), [1, 2])
        connection = await opened(wire, features)
        if has_told:
            connection.tell(RegionsOffer(b"of no use"))
        message = msgspec.structs.replace(
            GET, request=connection.next_request_id(), addresses=u64(0, SLOT_BYTES), deadline_s=30.0
        )
        answer = await connection.ask(message, 30.0)
        if features and has_told:
            assert isinstance(answer, GetDone)
            assert codec.u8(answer.reasons, 2).tolist() == [Reason.TRANSFER_FAILED] * 2
        else:
            assert getattr(answer, "code", None) == "usage"
        connection.close()
        await connection.wait_closed()
