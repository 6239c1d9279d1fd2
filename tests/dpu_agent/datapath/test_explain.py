"""Why a block is a miss, told by one agent."""

from __future__ import annotations

from dataclasses import replace

import msgspec
from tests.support.agent.assembly import (
    SETTINGS,
    SHARD,
    SLOT_BYTES,
    Assembly,
    assembled,
    beside,
    chain_of,
    content_of,
    until,
    with_cache,
)

from ostraca_dpu_agent.agent import Agent
from ostraca_fabric.model.outcome import Ack
from ostraca_fabric.telemetry.explain import BlockExplanation, verdict
from ostraca_fabric.wire.messages import Explain


async def explained(fabric: Assembly, number: int, at: Agent | None = None) -> BlockExplanation:
    data_path = fabric.data_path if at is None else at._data_path
    answer = await data_path.explain(fabric.volume, Explain(1, 5.0, "v", chain_of([number])))
    return msgspec.msgpack.decode(answer.body, type=BlockExplanation)


def story(found: BlockExplanation) -> list[tuple[str, str, str]]:
    return [(event.kind, event.state, event.reason) for event in found.events]


async def test_a_block_that_nobody_put_says_so_and_how_far_memory_reaches_back() -> None:
    async with assembled() as fabric:
        await fabric.get(fabric.worker(), [0])
        found = await explained(fabric, 0)
        assert story(found) == [("GOT", "MISS", "NOT_FOUND")]
        assert (found.enclosure, found.shard, found.owner) == ("e", SHARD, "agent-0")
        assert "no put is known; events reach back" in verdict(found)


async def test_a_committed_block_says_where_it_lies_and_counts_as_no_read() -> None:
    async with assembled() as fabric:
        await fabric.put(fabric.worker(), [0, 1])
        before = fabric.shard.core.counts()
        found = await explained(fabric, 1)
        assert fabric.shard.core.counts() == before
        assert story(found) == [
            ("RESERVED", "STAGED", ""),
            ("COMMITTED", "COMMITTED", ""),
            ("PUT", "COMMITTED", ""),
        ]
        view = found.owner_view
        assert view is not None
        assert (view.is_owner, view.is_listed, view.is_pinned, view.length) == (True, True, False, 60_000)
        at = fabric.drive.bytes.find(content_of(1))
        assert view.offset == at
        assert verdict(found).startswith("It can be got now, from flash")


async def test_a_block_that_is_being_written_says_so() -> None:
    async with assembled() as fabric, beside(fabric, SETTINGS) as other:
        await fabric.ready()
        fabric.drive.holds_writes = True
        await fabric.put(fabric.worker(), [0], ack=Ack.STAGED)
        here, there = verdict(await explained(fabric, 0)), verdict(await explained(fabric, 0, at=other))
        fabric.drive.let_go()
        assert here.startswith("It can be got now, from the DRAM of agent-0, by its workers alone")
        assert there.startswith("It can't be got yet: it is being written")
        await fabric.at_rest()


async def test_an_evicted_block_says_when_and_nothing_of_whose_put_pushed_it_out() -> None:
    async with assembled(segments=3) as fabric:
        worker = fabric.worker()
        await fabric.put(worker, [0])
        for first in range(1, 61, 10):
            await fabric.put(worker, range(first, first + 10))
        await until(lambda: fabric.shard.core.counts().segments_evicted > 0)
        fabric.shard.wake()
        await fabric.get(worker, [0])
        found = await explained(fabric, 0)
        assert [each for each in story(found) if each[0] not in ("RESERVED", "COMMITTED")] == [
            ("PUT", "COMMITTED", ""),
            ("EVICTED", "", ""),
            ("GOT", "MISS", "NOT_FOUND"),
        ]
        assert [event.label for event in found.events if event.kind == "EVICTED"] == [""]
        assert "it was evicted with its segment" in verdict(found)


async def test_a_damaged_block_says_that_it_was_dropped() -> None:
    async with assembled() as fabric:
        worker = fabric.worker()
        await fabric.put(worker, [0])
        fabric.drive.flip_bit(fabric.drive.bytes.find(content_of(0)[:64]) + 100)
        await fabric.get(worker, [0])
        await until(lambda: fabric.shard.core.counts().blocks_dropped == 1)
        found = await explained(fabric, 0)
        assert {("GOT", "MISS", "DAMAGED"), ("DROPPED", "", "")} <= set(story(found))
        assert "found damaged on flash and dropped" in verdict(found)


async def test_a_block_in_dram_says_so_and_when_it_had_to_go() -> None:
    async with assembled(with_cache(2 * SLOT_BYTES)) as fabric:
        worker = fabric.worker()
        await fabric.put(worker, [0])
        found = await explained(fabric, 0)
        assert found.is_cached
        assert verdict(found) == "It can be got now, from the DRAM of agent-0."
        await fabric.put(worker, [1, 2])
        found = await explained(fabric, 0)
        assert not found.is_cached
        assert ("CACHE_EVICTED", "", "") in story(found)


async def test_an_owner_that_is_gone_is_named() -> None:
    async with assembled() as fabric:
        await fabric.put(fabric.worker(), [0])
        fabric.owners.unregister(fabric.agent.id)
        found = await explained(fabric, 0)
        assert found.owner_view is None
        assert verdict(found) == f"It can't be got now: agent-0 does not answer for shard {SHARD}."
        fabric.owners.register(fabric.agent.id, fabric.agent._dispatcher)


async def test_the_agent_remembers_as_many_events_as_its_settings_say() -> None:
    async with assembled(replace(SETTINGS, events_max=2)) as fabric:
        await fabric.put(fabric.worker(), [0])
        assert len((await explained(fabric, 0)).events) == 2


async def test_a_block_on_a_drive_that_is_held_off_says_so() -> None:
    async with assembled(replace(SETTINGS, turn_s=60.0)) as fabric:  # or its shard is given back
        await fabric.put(fabric.worker(), [0])
        drive = fabric.agent._drives[fabric.drive.id]
        for place in range(SETTINGS.health.failed_faults):
            drive.note_damage(place << 22)
        assert "leaves its drive alone for a while" in verdict(await explained(fabric, 0))
