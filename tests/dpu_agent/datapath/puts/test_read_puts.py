"""Puts whose blocks the agent reads out of a worker's memory."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest
from tests.support.agent.assembly import (
    BLOCK_BYTES,
    FAR_S,
    SLOT_BYTES,
    content_of,
    get_states,
    put_states,
    reasons_of,
    unsettled_of,
    until,
)
from tests.support.agent.read_worker import NOWHERE, read_worker

from ostraca_fabric.errors import MalformedError, UsageError
from ostraca_fabric.model.extent import PAGE_BYTES
from ostraca_fabric.model.outcome import Ack, BlockState, PutState, Reason
from ostraca_fabric.tables.digests import TAG_BYTES

SOON_S = 0.1

COUNTS = pytest.mark.parametrize("count", [4, 8])
"""Blocks of a put that is fetched before its owners answer, and of one in two groups."""


@COUNTS
async def test_blocks_are_read_out_of_a_workers_memory_and_stored_without_bytes_of_others(count: int) -> None:
    async with read_worker() as (fabric, worker):
        fabric.context.staging.array[:] = 0x77  # of an earlier lease
        done = await fabric.data_path.put(worker, fabric.volume, worker.put_message(range(count)))
        assert put_states(done) == [PutState.COMMITTED] * count
        assert (unsettled_of(done), worker.settled, worker.arena.moved) == ([], [], [])
        reader = fabric.worker()
        assert get_states(await fabric.get(reader, range(count))) == [BlockState.HIT] * count
        for number in range(count):
            right, slot = content_of(number), number * SLOT_BYTES
            assert reader.arena.bytes[slot : slot + BLOCK_BYTES] == right
            place = fabric.drive.bytes.find(right)
            assert bytes(fabric.drive.bytes[place + BLOCK_BYTES : place + SLOT_BYTES]) == bytes(
                SLOT_BYTES - BLOCK_BYTES
            )
        await fabric.at_rest()


async def test_blocks_are_written_in_the_order_of_their_places_and_come_from_their_own() -> None:
    """Where the ring begins anew, later blocks have earlier places."""
    async with read_worker() as (fabric, worker):
        for first in range(100, 250, 3):
            numbers = range(first, first + 3)
            done = await fabric.data_path.put(worker, fabric.volume, worker.put_message(numbers))
            assert put_states(done) == [PutState.COMMITTED] * 3
            assert get_states(await fabric.get(fabric.worker(), numbers)) == [BlockState.HIT] * 3
        writes = [each for each in fabric.drive.writes if (each.lengths > PAGE_BYTES).any()]
        assert all((np.diff(each.drive_offsets) > 0).all() for each in writes)
        assert any((np.diff(each.memory_offsets) < 0).any() for each in writes), "some change their order"
        await fabric.at_rest()


async def test_addresses_in_a_memory_that_is_not_read_are_refused() -> None:
    async with read_worker() as (fabric, worker):
        message = worker.put_message(range(2))
        for addresses in (message.addresses[:-1], message.addresses[8:], message.addresses * 2):
            wrong = msgspec.structs.replace(message, addresses=addresses)
            with pytest.raises(MalformedError):
                await fabric.data_path.put(worker, fabric.volume, wrong)
        with pytest.raises(UsageError, match="does not reach: name slots alone"):
            await fabric.data_path.put(fabric.worker(), fabric.volume, message)
        await fabric.at_rest()


@COUNTS
@pytest.mark.parametrize("ack", Ack)
async def test_a_block_that_changed_in_a_workers_memory_is_damaged_and_no_other(count: int, ack: Ack) -> None:
    async with read_worker() as (fabric, worker):
        message = worker.put_message(range(count), ack=ack)
        worker.source[int(worker.places(count)[2]) + BLOCK_BYTES - 1] ^= 1
        done = await fabric.data_path.put(worker, fabric.volume, message)
        stored = PutState.COMMITTED if ack is Ack.COMMITTED else PutState.STAGED
        assert put_states(done) == [PutState.DECLINED if number == 2 else stored for number in range(count)]
        assert reasons_of(done)[2] == Reason.DAMAGED
        await fabric.at_rest()
        found = get_states(await fabric.get(fabric.worker(), range(count)))
        assert found == [BlockState.MISS if number == 2 else BlockState.HIT for number in range(count)]


@COUNTS
async def test_a_block_that_can_not_be_read_is_declined_alone_and_its_space_comes_back(count: int) -> None:
    async with read_worker() as (fabric, worker):
        message = worker.put_message(range(count))
        addresses = worker.addresses(count)
        addresses[2] = NOWHERE
        wrong = msgspec.structs.replace(message, addresses=addresses.tobytes())
        done = await fabric.data_path.put(worker, fabric.volume, wrong)
        failed = [reason == Reason.TRANSFER_FAILED for reason in reasons_of(done)]
        assert failed == [number == 2 for number in range(count)]
        assert put_states(done) == [PutState.DECLINED if each else PutState.COMMITTED for each in failed]
        await fabric.at_rest()
        again = await fabric.data_path.put(worker, fabric.volume, message)
        assert put_states(again) == [PutState.COMMITTED if each else PutState.EXISTS for each in failed]


@COUNTS
@pytest.mark.parametrize("how", ["deadline", "cancelled"])
async def test_a_put_that_is_over_during_reads_names_their_blocks_and_stores_none(
    count: int, how: str
) -> None:
    async with read_worker() as (fabric, worker):
        copies, staging = worker.copies, fabric.context.staging
        copies.hold()
        message = worker.put_message(range(count), deadline_s=SOON_S if how == "deadline" else FAR_S)
        putting = asyncio.create_task(fabric.data_path.put(worker, fabric.volume, message))
        await until(lambda: sum(copies.begun) == count and fabric.shard.core.counts().reservations == count)
        if how == "cancelled":
            worker.stopped(message.request).set_result(None)
        done = await putting
        assert put_states(done) == [PutState.LATE] * count
        assert unsettled_of(done) == [*range(count)]
        assert staging.quarantined_bytes == count * SLOT_BYTES
        assert worker.settled == [], "blocks may be copied yet"
        copies.let_go()
        await fabric.at_rest()
        assert worker.settled == [done.request]
        assert fabric.shard.core.counts().blocks_committed == 1, "the one before"


@pytest.mark.parametrize("first", [0, 4])
async def test_a_put_that_is_over_during_reads_stores_the_group_that_was_checked(first: int) -> None:
    async with read_worker() as (fabric, worker):
        message = worker.put_message(range(8), ack=Ack.STAGED)
        checked = [*range(first, first + 4)]
        copies = worker.copies
        copies.hold(passing=message.tags[TAG_BYTES * first : TAG_BYTES * (first + 4)])
        putting = asyncio.create_task(fabric.data_path.put(worker, fabric.volume, message))
        await until(lambda: "write" in fabric.drive.asked and copies.held == 1)
        worker.stopped(message.request).set_result(None)
        done = await putting
        staged = [position for position in range(8) if done.states[position] == PutState.STAGED]
        assert staged == checked
        assert unsettled_of(done) == [position for position in range(8) if position not in staged]
        copies.let_go()
        await fabric.at_rest()
        found = get_states(await fabric.get(fabric.worker(), range(8)))
        assert [position for position in range(8) if found[position] == BlockState.HIT] == staged


@pytest.mark.parametrize("is_read", [True, False], ids=["memory", "arena"])
async def test_a_staged_put_is_answered_before_its_last_group_is_written(*, is_read: bool) -> None:
    async with read_worker() as (fabric, reading):
        worker = reading if is_read else fabric.worker()
        message = (
            reading.put_message(range(4), ack=Ack.STAGED)
            if is_read
            else fabric.put_message(worker, range(4), ack=Ack.STAGED)
        )
        done = await fabric.data_path.put(worker, fabric.volume, message)
        assert put_states(done) == [PutState.STAGED] * 4
        assert fabric.drive.asked == [], "the write comes after the answer"
        await fabric.at_rest()
        assert fabric.drive.asked == ["write"] * 2
        assert get_states(await fabric.get(fabric.worker(), range(4))) == [BlockState.HIT] * 4
