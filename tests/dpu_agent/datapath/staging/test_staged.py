"""Staged blocks: gets at the agent of a put, before flash has the blocks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import msgspec
import numpy as np
import pytest
from tests.support.agent.assembly import (
    BLOCK_BYTES,
    SETTINGS,
    SLOT_BYTES,
    Assembly,
    MemoryWorker,
    assembled,
    chain_of,
    content_of,
    get_states,
    put_states,
    reasons_of,
    unsettled_of,
    until,
    with_cache,
)
from tests.support.invariants import evict_all

from ostraca_dpu_agent.datapath.location.routing import Routes
from ostraca_dpu_agent.settings import MIB, AgentSettings
from ostraca_fabric.model.extent import FIRST_SEGMENT_OFFSET
from ostraca_fabric.model.outcome import Ack, BlockState, PutState, Reason
from ostraca_fabric.telemetry.explain import BlockExplanation, verdict
from ostraca_fabric.wire.messages import Explain, Lookup

HIT, MISS = BlockState.HIT, BlockState.MISS
SOON_S = 0.5
ONE_GROUP = replace(SETTINGS, flow=replace(SETTINGS.flow, put_group_bytes=10 * SLOT_BYTES))


@asynccontextmanager
async def staged(numbers: range, settings: AgentSettings = ONE_GROUP) -> AsyncIterator[Assembly]:
    """Put blocks whose writes to flash are held until the end."""
    async with assembled(settings) as fabric:
        await fabric.ready()
        fabric.drive.holds_writes = True
        try:
            done = await fabric.put(fabric.worker(), numbers, ack=Ack.STAGED)
            assert put_states(done) == [PutState.STAGED] * len(numbers)
            yield fabric
        finally:
            fabric.drive.let_go()


def _itself(routes: Routes) -> Routes:
    return routes


def check_content(worker: MemoryWorker, numbers: range) -> None:
    for slot, number in enumerate(numbers):
        at = slot * SLOT_BYTES
        assert worker.arena.bytes[at : at + BLOCK_BYTES] == content_of(number)


@pytest.mark.parametrize("cache_bytes", [0, 2 * MIB])
async def test_a_staged_block_is_a_hit_for_all_workers_of_the_agent(cache_bytes: int) -> None:
    async with staged(range(4), with_cache(cache_bytes)) as fabric:
        reader = fabric.worker()
        done = await fabric.get(reader, range(5))
        assert get_states(done) == [HIT] * 4 + [MISS]
        check_content(reader, range(4))
        counters = fabric.context.counters.snapshot()
        assert (counters.get_hits, counters.get_hits_from_staging, counters.get_hits_from_cache) == (4, 4, 0)
        fabric.drive.let_go()
        await fabric.at_rest()
        assert not fabric.context.staged.groups
        assert get_states(await fabric.get(reader, range(4))) == [HIT] * 4
        assert fabric.context.counters.snapshot().get_hits_from_staging == 4


async def test_staged_cached_and_committed_blocks_are_one_answer() -> None:
    async with assembled(with_cache(2 * MIB)) as fabric:
        writer, reader = fabric.worker(), fabric.worker()
        staging = fabric.context.staging
        await fabric.put(writer, range(2))
        staging._pool.drop(evict_all(staging.cache))
        await fabric.put(writer, range(2, 4))
        fabric.drive.holds_writes = True
        await fabric.put(writer, range(4, 6), ack=Ack.STAGED)
        assert get_states(await fabric.get(reader, range(6))) == [HIT] * 6
        check_content(reader, range(6))
        counters = fabric.context.counters.snapshot()
        assert (counters.get_hits_from_cache, counters.get_hits_from_staging) == (2, 2)
        fabric.drive.let_go()
        await fabric.at_rest()


async def test_a_staged_block_of_another_length_is_a_miss() -> None:
    async with staged(range(2)) as fabric:
        message = fabric.get_message(range(2))
        lengths = np.full(2, BLOCK_BYTES - 1, np.uint32).tobytes()
        shorter = msgspec.structs.replace(message, lengths=lengths)
        assert get_states(await fabric.data_path.get(fabric.worker(), fabric.volume, shorter)) == [MISS] * 2


@pytest.mark.parametrize("pin_s", [0.0, 2.0])
async def test_lookups_and_explanations_find_staged_blocks(pin_s: float) -> None:
    async with staged(range(2)) as fabric:
        lookup = Lookup(1, 0, 5.0, chain_of(range(3)), pin_s=pin_s)
        done = await fabric.data_path.lookup(fabric.worker(), fabric.volume, lookup)
        assert [BlockState(state) for state in done.states] == [HIT, HIT, MISS]
        for number, is_staged in ((0, True), (2, False)):
            told = await fabric.data_path.explain(fabric.volume, Explain(1, 5.0, "v", chain_of([number])))
            explanation = msgspec.msgpack.decode(told.body, type=BlockExplanation)
            assert explanation.is_staged == is_staged
            assert ("on the way to flash" in verdict(explanation)) == is_staged


async def test_a_block_without_its_reservation_is_a_miss() -> None:
    brief = replace(SETTINGS, owner=replace(SETTINGS.owner, hold_s=SOON_S))
    async with staged(range(2), brief) as fabric:
        staged_s, reader = time.monotonic(), fabric.worker()
        asked_s = hit_s = staged_s
        while get_states(done := await fabric.get(reader, range(2))) == [HIT] * 2:
            hit_s, asked_s = asked_s, time.monotonic()
            assert hit_s - staged_s < SOON_S, "no reservation lasts longer"
        assert get_states(done) == [MISS] * 2
        fabric.drive.let_go()
        await fabric.at_rest()


async def test_a_block_whose_shard_has_another_owner_is_a_miss() -> None:
    async with staged(range(2)) as fabric:
        (shard, claim), routes = next(iter(fabric.membership.map.claims.items())), fabric.context.routes
        for change in ({"epoch": claim.epoch + 1}, {"agent": "agent-9"}):
            claims = {shard: replace(claim, **change)}
            stolen = Routes(replace(fabric.membership.map, claims=claims))
            fabric.context.routes = partial(_itself, stolen)
            assert get_states(await fabric.get(fabric.worker(), range(2))) == [MISS] * 2
        fabric.context.routes = routes
        assert get_states(await fabric.get(fabric.worker(), range(2))) == [HIT] * 2


async def test_a_block_that_can_not_be_committed_is_a_miss() -> None:
    async with assembled() as fabric:
        await fabric.ready()
        fabric.drive.fail_writes(FIRST_SEGMENT_OFFSET, fabric.drive.size_bytes)
        done = await fabric.put(fabric.worker(), range(2))
        assert set(reasons_of(done)) == {Reason.DRIVE_ERROR}
        assert get_states(await fabric.get(fabric.worker(), range(2))) == [MISS] * 2
        await fabric.at_rest()
        assert not fabric.context.staged.groups


async def test_a_block_with_a_wrong_tag_is_never_readable() -> None:
    async with assembled() as fabric:
        await fabric.ready()
        fabric.drive.holds_writes = True
        writer = fabric.worker()
        message = fabric.put_message(writer, range(2), ack=Ack.STAGED)
        writer.arena.bytes[0] ^= 1
        await fabric.data_path.put(writer, fabric.volume, message)
        states = get_states(await fabric.get(fabric.worker(), range(2)))
        fabric.drive.let_go()
        assert states == [MISS, HIT]
        await fabric.at_rest()


@pytest.mark.parametrize("cache_bytes", [0, 2 * MIB])
async def test_the_slots_of_a_put_stay_until_the_last_reader_has_ended(cache_bytes: int) -> None:
    async with staged(range(2), with_cache(cache_bytes)) as fabric:
        staging, readers = fabric.context.staging, [fabric.worker(), fabric.worker()]
        assert staging.quarantined_bytes == 0, "no transfer is under way"
        for reader in readers:
            reader.arena.is_held = True
        getting = [asyncio.create_task(fabric.get(reader, range(2))) for reader in readers]
        await until(lambda: all(reader.arena.held for reader in readers))
        fabric.drive.let_go()
        await until(lambda: fabric.shard.core.counts().blocks_committed == 2)
        await until(lambda: not fabric.context.staged.groups)
        for reader, task in zip(readers, getting, strict=True):
            assert staging.held_bytes == 2 * SLOT_BYTES
            reader.arena.let_go()
            assert get_states(await task) == [HIT] * 2
            check_content(reader, range(2))
        await fabric.at_rest()
        assert len(staging.cache) == (2 if cache_bytes else 0)


async def test_a_read_that_outlives_its_get_keeps_the_slots_in_quarantine() -> None:
    async with staged(range(2)) as fabric:
        staging, reader = fabric.context.staging, fabric.worker()
        reader.arena.is_held = True
        done = await fabric.get(reader, range(2), deadline_s=SOON_S)
        assert get_states(done) == [BlockState.LATE] * 2
        assert unsettled_of(done) == [0, 1]
        fabric.drive.let_go()
        await until(lambda: not fabric.context.staged.groups)
        assert staging.quarantined_bytes == 2 * SLOT_BYTES
        assert staging.quarantined_cached_bytes == 0
        reader.arena.let_go()
        await fabric.at_rest()
        assert reader.settled == [done.request]
        assert get_states(await fabric.get(fabric.worker(), range(2))) == [HIT] * 2


async def test_blocks_committed_before_their_parts_turn_come_from_flash() -> None:
    async with staged(range(10)) as fabric:
        reader = fabric.worker()
        reader.arena.is_held = True
        getting = asyncio.create_task(fabric.get(reader, range(10)))
        await until(lambda: len(reader.arena.held) == 2)
        fabric.drive.let_go()
        await until(lambda: not fabric.context.staged.groups)
        reader.arena.let_go()
        assert get_states(await getting) == [HIT] * 10
        check_content(reader, range(10))
        assert fabric.context.counters.snapshot().get_hits_from_staging == 8
        await fabric.at_rest()


async def test_another_put_of_a_staged_block_is_refused_while_readers_have_it() -> None:
    async with staged(range(1)) as fabric:
        done = await fabric.put(fabric.worker(), range(1), deadline_s=SOON_S)
        assert put_states(done) == [PutState.DECLINED]
        assert get_states(await fabric.get(fabric.worker(), range(1))) == [HIT]
