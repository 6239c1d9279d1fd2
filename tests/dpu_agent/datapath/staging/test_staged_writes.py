"""Staged blocks wait for each other, though not for long: small puts share a flash write and a commit."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.support.agent.assembly import (
    DRIVE,
    FAR_S,
    SETTINGS,
    SLOT_BYTES,
    Assembly,
    HeldDrive,
    assembled,
    content_of,
    get_states,
    put_states,
    until,
)

from ostraca_dpu_agent.datapath import commits as commits_module
from ostraca_dpu_agent.datapath.commits import Commits, ReservedShard
from ostraca_dpu_agent.datapath.drive_io import WriteQueue
from ostraca_dpu_agent.settings import AgentSettings
from ostraca_fabric.model.extent import PAGE_BYTES, Pieces
from ostraca_fabric.model.ids import AgentId, OwnerEpoch, ShardId
from ostraca_fabric.model.outcome import Ack, BlockState, PutState, Reason
from ostraca_fabric.runtime.tasks import Tasks
from ostraca_fabric.wire.codec import Outcomes
from ostraca_fabric.wire.messages import Commit, Committed, OwnerNotice, ShardCommitted

BRIEFLY_S = 0.1
A_WHILE_S = 2.0
"""Enough for three puts on a busy machine."""

MEMORY = np.random.default_rng(0).integers(1, 256, 8 * PAGE_BYTES, np.uint8)


def waiting(wait_s: float, *, group_slots: int = 8) -> AgentSettings:
    flow = replace(SETTINGS.flow, write_behind_s=wait_s, put_group_bytes=group_slots * SLOT_BYTES)
    return replace(SETTINGS, flow=flow)


async def stage(fabric: Assembly, *numbers: int) -> None:
    """Put blocks one by one until staged; nothing else is written meanwhile."""
    ring = fabric.shard.core.ring
    await fabric.recorded()
    await fabric.ready()
    await until(lambda: ring.opening is None and not ring.wants_opening)
    fabric.drive.asked.clear()
    for number in numbers:
        done = await fabric.put(fabric.worker(), [number], ack=Ack.STAGED)
        assert put_states(done) == [PutState.STAGED]


async def opened(fabric: Assembly) -> None:
    """Put a block, so that the shard has an open segment."""
    await fabric.put(fabric.worker(), [99])


async def test_staged_puts_share_a_write_and_a_commit() -> None:
    async with assembled(waiting(A_WHILE_S)) as fabric:
        await opened(fabric)
        before = fabric.shard.core.counters.summary_writes
        await stage(fabric, 0, 1, 2)
        assert fabric.drive.asked == [], "no put is over before the others have come"
        await fabric.at_rest()
        assert fabric.drive.asked == ["write"] * 2, "the blocks, and a summary"
        assert fabric.shard.core.counters.summary_writes == before + 1
        assert get_states(await fabric.get(fabric.worker(), range(3))) == [BlockState.HIT] * 3
        assert fabric.context.counters.snapshot().get_hits_from_staging == 0


async def test_a_put_that_is_to_be_committed_does_not_wait() -> None:
    async with assembled(waiting(FAR_S)) as fabric:
        await opened(fabric)
        assert put_states(await fabric.put(fabric.worker(), range(2))) == [PutState.COMMITTED] * 2
        await fabric.at_rest()


async def test_enough_staged_bytes_do_not_wait() -> None:
    async with assembled(waiting(FAR_S, group_slots=4)) as fabric:
        await opened(fabric)
        await stage(fabric, 0, 1, 2)
        assert fabric.drive.asked == []
        await stage(fabric, 3)
        await fabric.at_rest()
        assert get_states(await fabric.get(fabric.worker(), range(4))) == [BlockState.HIT] * 4


async def test_staged_blocks_are_written_once_a_request_waits_for_their_memory() -> None:
    small = replace(SETTINGS.memory, put_share=4.5 * SLOT_BYTES / SETTINGS.memory.staging_bytes)
    async with assembled(replace(waiting(FAR_S, group_slots=64), memory=small)) as fabric:
        await opened(fabric)
        fabric.context.writes._wait_bytes_max = 64 * SLOT_BYTES
        await stage(fabric, 0, 1, 2, 3)
        assert fabric.drive.asked == []
        await stage(fabric, 4)
        fabric.context.writes.flush()
        await fabric.at_rest()


async def test_staged_blocks_are_written_at_the_end_of_the_agent() -> None:
    async with assembled(waiting(FAR_S)) as fabric:
        await opened(fabric)
        await stage(fabric, 0)
        assert await fabric.data_path.close(within_s=5)
        assert fabric.shard.core.counts().blocks_committed == 2


async def test_a_block_whose_space_ended_while_it_waited_is_not_written() -> None:
    settings = waiting(3 * BRIEFLY_S)
    async with assembled(replace(settings, owner=replace(settings.owner, hold_s=BRIEFLY_S))) as fabric:
        await stage(fabric, 0)
        await fabric.at_rest()
        assert fabric.drive.bytes.find(content_of(0)[:64]) < 0
        tally = fabric.context.counters.tallies["put"]
        assert tally.of(PutState.DECLINED) == 1


def pages(*at: int) -> Pieces:
    """Name pages of the drive, written from the same pages of the memory."""
    offsets = np.array(at, np.int64) * PAGE_BYTES
    return Pieces(MEMORY, offsets, offsets, np.full(len(at), PAGE_BYTES, np.uint32))


async def test_writes_of_a_turn_are_one_write_in_drive_order_and_each_learns_its_own_end() -> None:
    drive, queue = HeldDrive(), WriteQueue(wait_s=0, wait_bytes_max=1)
    drive.fail_writes(5 * PAGE_BYTES, PAGE_BYTES)
    last, first = queue.submit(drive, pages(3, 5)), queue.submit(drive, pages(1))
    await last.wait()
    await first.wait()
    assert [pieces.drive_offsets.tolist() for pieces in drive.writes] == [
        [PAGE_BYTES, 3 * PAGE_BYTES, 5 * PAGE_BYTES]
    ]
    assert first.ends.result().tolist() == [True]
    assert last.ends.result().tolist() == [True, False]
    for page, is_written in ((1, True), (2, False), (3, True)):
        assert drive.bytes[page * PAGE_BYTES : (page + 1) * PAGE_BYTES] == (
            MEMORY[page * PAGE_BYTES : (page + 1) * PAGE_BYTES].tobytes() if is_written else bytes(PAGE_BYTES)
        )


async def test_writes_of_two_drives_are_two() -> None:
    drives, queue = [HeldDrive(), HeldDrive()], WriteQueue(wait_s=0, wait_bytes_max=1)
    writes = [queue.submit(drive, pages(1)) for drive in drives]
    for write in writes:
        await write.wait()
    assert [len(drive.writes) for drive in drives] == [1, 1]


async def test_a_drives_next_turn_waits_anew() -> None:
    queue = WriteQueue(wait_s=FAR_S, wait_bytes_max=2)
    for _ in range(2):
        waits = [asyncio.ensure_future(queue.turn(HeldDrive().id, 1))]
        await asyncio.sleep(0)
        assert not waits[0].done()
        waits.append(asyncio.ensure_future(queue.turn(HeldDrive().id, 1)))
        await asyncio.gather(*waits)


class OwnersOnRecord:
    """Owners that answer each commit as told, by shard."""

    def __init__(self, answers: dict[str, ShardCommitted | None]) -> None:
        self.answers = answers
        self.asked: list[tuple[str, Commit]] = []

    async def ask(self, agent: AgentId, request: Any) -> Committed:
        self.asked.append((agent, request))
        found = [self.answers[part.shard] for part in request.shards]
        if None in found:
            raise TimeoutError
        return Committed(0, tuple(each for each in found if each is not None))

    def tell(self, agent: AgentId, notice: OwnerNotice) -> None:
        raise AssertionError(notice)


def reserved(owner: str, shard: str, epoch: int = 1) -> ReservedShard:
    return ReservedShard(AgentId(owner), ShardId(shard), DRIVE, 0, OwnerEpoch(epoch), FAR_S)


def submitted(commits: Commits, target: ReservedShard, *numbers: int) -> asyncio.Future[Outcomes]:
    column = np.array(numbers, np.uint64)
    return commits.submit(target, column, column.repeat(2).view(np.uint8).reshape(-1, 16), column + 1)


async def test_commits_of_a_turn_are_one_message_to_each_owner_and_each_learns_its_own_end() -> None:
    good, bad = PutState.COMMITTED, PutState.DECLINED
    states, reasons = bytes([good, bad, good]), bytes([0, Reason.EXPIRED, 0])
    owners = OwnersOnRecord(
        {"s": ShardCommitted("s", states, reasons), "t": None, "u": ShardCommitted("u", b"", b"")}
    )
    tasks = Tasks("a test")
    commits = Commits(owners, tasks, lambda: 0.0)
    waits = [
        submitted(commits, reserved("a", "s"), 1),
        submitted(commits, reserved("b", "t"), 2),
        submitted(commits, reserved("a", "s"), 3, 4),
        submitted(commits, reserved("a", "u"), 5),
    ]
    found = [(each.states.tolist(), each.reasons.tolist()) for each in await asyncio.gather(*waits)]
    unknown = ([PutState.LATE], [Reason.NO_OWNER])
    assert found == [([good], [0]), unknown, ([bad, good], [Reason.EXPIRED, 0]), unknown]
    assert [(agent, [part.shard for part in commit.shards]) for agent, commit in owners.asked] == [
        ("a", ["s", "u"]),
        ("b", ["t"]),
    ]
    (part, _), numbers = owners.asked[0][1].shards, np.array([1, 3, 4], np.uint64)
    assert (part.reservations, part.seeds) == (numbers.tobytes(), (numbers + 1).tobytes())
    assert part.tags == numbers.repeat(2).tobytes()
    await tasks.finish()


async def test_commits_under_two_epochs_and_of_too_many_blocks_are_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(commits_module, "_BLOCKS_MAX", 3)
    answer = ShardCommitted("s", bytes([PutState.COMMITTED] * 2), bytes(2))
    owners, tasks = OwnersOnRecord({"s": answer}), Tasks("a test")
    commits = Commits(owners, tasks, lambda: 0.0)
    waits = [submitted(commits, reserved("a", "s", epoch), epoch, 9) for epoch in (1, 2, 3)]
    for each in await asyncio.gather(*waits):
        assert each.states.tolist() == [PutState.COMMITTED] * 2
    assert [[part.owner_epoch for part in commit.shards] for _, commit in owners.asked] == [[1, 2], [3]]
    await tasks.finish()
