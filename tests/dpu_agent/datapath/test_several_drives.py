"""Two drives of one agent, of which one hangs, fails or is slow: blocks on the other never wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from tests.support.agent.assembly import (
    BLOCK_BYTES,
    ENCLOSURE,
    FAR_S,
    LAYOUT,
    SETTINGS,
    SHARD,
    Assembly,
    HeldDrive,
    MemoryWorker,
    assembled,
    chain_of,
    get_states,
    put_states,
    reasons_of,
    until,
)
from tests.support.invariants import check_slots, evict_all
from tests.support.stalls import Stopwatch

from ostraca_dpu_agent.datapath.staging.staging import Staging
from ostraca_dpu_agent.volumes import Volumes
from ostraca_fabric.drives.drive_health import HealthSettings
from ostraca_fabric.model.ids import TenantId, drive_id
from ostraca_fabric.model.outcome import BlockState, PutState, Reason
from ostraca_fabric.policies.circuit_breaker import BreakerSettings
from ostraca_fabric.wire.messages import Lookup, OpenVolume, Prefetch

HASTY = replace(
    SETTINGS,
    health=HealthSettings(
        overdue_s=0.1, write_overdue_s=0.1, breaker=BreakerSettings(open_s=0.05, open_max_s=0.1)
    ),
)
PATIENT = SETTINGS
"""The breaker never opens: what is shown holds by how waves are cut, too."""

NUMBERS = range(24)


@pytest.fixture
def other() -> HeldDrive:
    return HeldDrive(drive=drive_id(ENCLOSURE, "other"))


def pinned(staging: Staging) -> list[int]:
    """Where the slots in quarantine begin."""
    return [offset for parts in staging._pool._held.values() for part in parts for offset in part.tolist()]


async def lies_on_first(fabric: Assembly) -> list[bool]:
    """Which of the blocks belong on the first drive, by their shard."""
    routes, secret = fabric.context.routes(), fabric.volume.placement_secret
    return [routes.places(secret, chain_of([number]))[0].shard == SHARD for number in NUMBERS]


@pytest.fixture
async def stored(other: HeldDrive) -> AsyncIterator[tuple[Assembly, MemoryWorker, list[bool]]]:
    """Build a fabric with the blocks and a worker; name the blocks on the first drive."""
    async with assembled(HASTY, others=[other]) as fabric:
        worker = fabric.worker()
        assert set(put_states(await fabric.put(worker, NUMBERS))) == {PutState.COMMITTED}
        on_first = await lies_on_first(fabric)
        assert 4 < sum(on_first) < 20
        yield fabric, worker, on_first


Stored = tuple[Assembly, MemoryWorker, list[bool]]


async def test_blocks_on_the_other_drive_are_got_while_one_hangs_and_the_get_ends_early(
    stored: Stored,
) -> None:
    fabric, worker, on_first = stored
    fabric.drive.holds_reads = True
    watch = Stopwatch()
    done = await fabric.get(worker, NUMBERS)
    assert watch.took_s < 2.0, "a deadline is not what ended it"
    assert get_states(done) == [BlockState.MISS if first else BlockState.HIT for first in on_first]
    assert {reason for reason, first in zip(reasons_of(done), on_first, strict=True) if first} == {
        Reason.DRIVE_SUSPECT
    }
    held = len(fabric.drive.held)
    again = await fabric.get(worker, NUMBERS)
    assert get_states(again) == get_states(done)
    assert len(fabric.drive.held) <= held + 1, "nothing more is asked of it but for a page now and then"
    fabric.drive.let_go()
    await until(lambda: not fabric.context.drives[fabric.drive.id].refuses_reads)
    assert set(get_states(await fabric.get(worker, NUMBERS))) == {BlockState.HIT}
    await fabric.at_rest()


async def test_a_look_up_misses_what_lies_on_a_drive_that_is_held_off(stored: Stored) -> None:
    fabric, worker, on_first = stored
    fabric.drive.holds_reads = True
    await fabric.get(worker, NUMBERS)
    asked = Lookup(99, 0, FAR_S, chain_of(NUMBERS), 0.0)
    found = await fabric.data_path.lookup(worker, fabric.volume, asked)
    assert list(found.states) == [BlockState.MISS if first else BlockState.HIT for first in on_first]
    fabric.drive.let_go()
    await fabric.at_rest()


async def test_what_a_drive_that_hangs_holds_is_bounded_and_no_longer_its_worker_s(stored: Stored) -> None:
    fabric, worker, _ = stored
    staging, memory = fabric.context.staging, HASTY.memory
    fabric.drive.holds_reads = True
    await asyncio.gather(*(fabric.get(worker, NUMBERS) for _ in range(40)))
    share_bytes = memory.drive_share * memory.staging_bytes
    assert 0 < staging.held_bytes <= share_bytes
    assert staging.quarantined_bytes == staging.held_bytes
    assert staging._held_by == {fabric.drive.id: staging.held_bytes}
    fabric.drive.let_go()
    await fabric.at_rest()
    assert not staging._held_on


async def test_by_the_deadline_the_other_drive_s_blocks_are_there_before_anybody_knows_of_the_hang(
    other: HeldDrive,
) -> None:
    async with assembled(PATIENT, others=[other]) as fabric:
        worker = fabric.worker()
        await fabric.put(worker, NUMBERS)
        on_first = await lies_on_first(fabric)
        fabric.drive.holds_reads = True
        done = await fabric.get(worker, NUMBERS, deadline_s=0.5)
        assert get_states(done) == [BlockState.LATE if first else BlockState.HIT for first in on_first]
        fabric.drive.let_go()
        await fabric.at_rest()


async def test_a_put_commits_on_the_other_drive_while_one_hangs_and_declines_the_rest(
    other: HeldDrive,
) -> None:
    async with assembled(HASTY, others=[other]) as fabric:
        worker = fabric.worker()
        await fabric.ready()
        fabric.drive.holds_writes = True
        watch = Stopwatch()
        done = await fabric.put(worker, NUMBERS)
        on_first = await lies_on_first(fabric)
        assert watch.took_s < 2.0
        assert put_states(done) == [PutState.DECLINED if first else PutState.COMMITTED for first in on_first]
        assert set(reasons_of(done)) == {Reason.NONE, Reason.DRIVE_SUSPECT}
        fabric.drive.let_go()
        await until(lambda: not fabric.context.drives[fabric.drive.id].refuses_writes)
        await until(lambda: fabric.context.staging.held_bytes == 0)
        again = await fabric.put(worker, range(100, 124))
        assert set(put_states(again)) <= {PutState.COMMITTED, PutState.DECLINED}


async def test_a_drive_that_hangs_keeps_no_memory_from_another_tenant_s_blocks_of_another_size(
    other: HeldDrive,
) -> None:
    """What it holds lies in every chunk, in slots of four sizes that are all smaller."""
    async with assembled(HASTY, others=[other]) as fabric:
        theirs = await Volumes(fabric.membership, bytes(32)).open(
            TenantId("another"), OpenVolume(0, "v", LAYOUT, BLOCK_BYTES, create=True)
        )
        another = replace(fabric, volume=theirs)
        worker = fabric.worker()
        assert set(put_states(await another.put(worker, NUMBERS))) == {PutState.COMMITTED}
        on_first = await lies_on_first(another)
        fabric.drive.holds_writes = True
        sizes = (45_000, 30_000, 15_000, 7_000)
        numbers = [range(begin, begin + 8) for begin in range(100, 132, 8)]
        workers = [fabric.worker() for _ in sizes]
        messages = [
            fabric.put_message(writer, its, length=length)
            for writer, its, length in zip(workers, numbers, sizes, strict=True)
        ]
        puts = zip(workers, messages, strict=True)
        await asyncio.gather(*(fabric.data_path.put(writer, fabric.volume, put) for writer, put in puts))
        staging = fabric.context.staging
        assert staging.held_bytes == staging.quarantined_bytes > 0
        chunks = {offset // HASTY.memory.chunk_bytes for offset in pinned(staging)}
        assert len(chunks) == 4, "of which there are four"
        watch = Stopwatch()
        done = await another.get(worker, NUMBERS, deadline_s=3.0)
        assert watch.took_s < 2.0, "a deadline is not what ended it"
        for state, is_on_first in zip(get_states(done), on_first, strict=True):
            assert is_on_first or state is BlockState.HIT
        fabric.drive.let_go()
        await until(lambda: staging.held_bytes == 0)
        check_slots(staging._pool)


async def test_a_prefetch_brings_what_the_other_drive_has(other: HeldDrive) -> None:
    settings = replace(HASTY, memory=replace(HASTY.memory, cache_bytes=6 << 20))
    async with assembled(settings, others=[other]) as fabric:
        worker = fabric.worker()
        await fabric.put(worker, NUMBERS)
        on_first = await lies_on_first(fabric)
        fabric.context.staging._pool.drop(evict_all(fabric.context.staging.cache))
        fabric.drive.holds_reads = True
        done = await fabric.data_path.prefetch(
            worker, fabric.volume, Prefetch(9, 0, FAR_S, chain_of(NUMBERS))
        )
        states = [BlockState(state) for state in done.states]
        assert states == [BlockState.MISS if first else BlockState.HIT for first in on_first]
        fabric.drive.let_go()
        await fabric.at_rest()


async def test_a_slow_drive_declines_its_own_blocks_and_not_those_of_the_other(other: HeldDrive) -> None:
    async with assembled(PATIENT, others=[other]) as fabric:
        worker = fabric.worker()
        await fabric.put(worker, NUMBERS)
        on_first = await lies_on_first(fabric)
        line = fabric.context.estimator.drives[fabric.drive.id]
        now_s = fabric.context.clock()
        line.begin(now_s - 5.0, 1 << 20)
        line.end(now_s, 1 << 20)
        message = msgspec.structs.replace(fabric.get_message(NUMBERS), recompute_s=1.0)
        done = await fabric.data_path.get(worker, fabric.volume, message)
        assert get_states(done) == [BlockState.DECLINED if first else BlockState.HIT for first in on_first]
        assert {reason for reason in reasons_of(done) if reason} == {Reason.TOO_SLOW}
        await fabric.at_rest()


async def test_a_drive_that_fails_reads_is_asked_less_and_the_other_s_blocks_are_hits(stored: Stored) -> None:
    fabric, worker, on_first = stored
    fabric.drive.fail_reads(0, fabric.drive.size_bytes)
    for _ in range(5):
        done = await fabric.get(worker, NUMBERS)
        assert get_states(done) == [BlockState.MISS if first else BlockState.HIT for first in on_first]
        told = np.array(reasons_of(done))[np.array(on_first)]
        assert set(told.tolist()) <= {Reason.DRIVE_ERROR, Reason.DRIVE_SUSPECT}
    assert fabric.context.drives[fabric.drive.id].refuses_reads
    fabric.drive.mend()
    await until(lambda: not fabric.context.drives[fabric.drive.id].refuses_reads)
    assert set(get_states(await fabric.get(worker, NUMBERS))) == {BlockState.HIT}
    await fabric.at_rest()


async def test_a_drive_that_hangs_when_its_agent_starts_keeps_no_other_from_being_served(
    other: HeldDrive,
) -> None:
    hung = HeldDrive()
    hung.holds_reads = True
    watch = Stopwatch()
    async with assembled(replace(HASTY, turn_s=0.05), drive=hung, others=[other]) as fabric:
        assert watch.took_s < 5.0
        assert set(fabric.service.shards) == {other.shard}
        assert fabric.agent._controller.observe().unresponsive == {hung.id}
        worker = fabric.worker()
        done = await fabric.put(worker, NUMBERS)
        assert set(put_states(done)) == {PutState.COMMITTED, PutState.DECLINED}
        hung.let_go()
        await until(lambda: set(fabric.service.shards) == {SHARD, other.shard})
        await until(lambda: not fabric.shard.core.is_recovering)
        await fabric.ready()
        assert set(put_states(await fabric.put(worker, NUMBERS))) == {PutState.COMMITTED, PutState.EXISTS}
        await fabric.at_rest()


async def test_a_drive_that_does_not_flush_what_was_found_on_it_keeps_no_other_from_being_recovered(
    other: HeldDrive,
) -> None:
    hung = HeldDrive()
    hung.has_volatile_cache = hung.holds_flushes = True
    settings = replace(HASTY, turn_s=0.02, reopen_backoff_s=0.2)
    async with assembled(settings, drive=hung, others=[other]) as fabric:
        shards = fabric.service.shards
        await until(lambda: bool(hung.held))  # its recovery came first
        await until(lambda: other.shard in shards and not shards[other.shard].core.is_recovering)
        assert SHARD not in shards or shards[SHARD].core.is_recovering, "a power cut would lose what it says"
        hung.let_go()
        await until(lambda: SHARD in shards and not shards[SHARD].core.is_recovering)
