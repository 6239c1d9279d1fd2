"""Several placement epochs at once, on running agents: what an enclosure that comes or goes loses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from tests.support.agent.assembly import (
    FAR_S,
    SETTINGS,
    SHARD,
    Assembly,
    HeldDrive,
    MemoryWorker,
    assembled,
    beside,
    chain_of,
    get_states,
    put_states,
    until,
)
from tests.support.agent.shard_invariants import check_core
from tests.support.stalls import Stopwatch

from ostraca_dpu_agent.agent import Agent
from ostraca_dpu_agent.datapath.location.routing import Routes
from ostraca_fabric.model.ids import AgentId, EnclosureId, PlacementEpoch, ShardId, drive_id
from ostraca_fabric.model.outcome import BlockState, PutState, Reason
from ostraca_fabric.policies.placement import ranked_agents
from ostraca_fabric.ports.owners import GivenSpace, LocalShards, ShardAnswer, WantedSpace
from ostraca_fabric.tables.digests import derive_keys
from ostraca_fabric.telemetry.explain import BlockExplanation
from ostraca_fabric.wire import codec
from ostraca_fabric.wire.messages import (
    AgentRequest,
    AnswerToAgent,
    Explain,
    Lookup,
    OwnerNotice,
    Release,
    Reserve,
    Reserved,
    Resolve,
    Resolved,
    ShardKeys,
    ShardWants,
)

NUMBERS = range(40)
NEWER = range(100, 140)
AGENTS = [AgentId("agent-0"), AgentId("agent-1")]


def new_drive(name: str = "f") -> HeldDrive:
    return HeldDrive(drive=drive_id(EnclosureId(name), "d"))


def of_agent_1() -> HeldDrive:
    """Return a drive whose shard prefers the second of two agents."""
    drives = (new_drive(f"f{number}") for number in range(100))
    return next(drive for drive in drives if ranked_agents(drive.shard, AGENTS)[0] == AGENTS[1])


async def add(fabric: Assembly, *drives: HeldDrive, agent: Agent | None = None) -> None:
    """Add enclosures, and wait until their shards take blocks.

    The workers' agent has paths to them then.
    """
    await fabric.membership.put_enclosures([drive.record() for drive in drives])
    shards = (agent or fabric.agent)._owner.shards
    await until(lambda: all(drive.shard in shards for drive in drives))
    rings = [shards[drive.shard].core.ring for drive in drives]
    await until(lambda: all(ring.ready or ring.pools.common.current for ring in rings))
    await until(lambda: fabric.context.drives.keys() >= {drive.id for drive in drives})
    await until(lambda: fabric.context.routes().map.revision == fabric.membership.map.revision)


async def drain(fabric: Assembly, drive: HeldDrive) -> None:
    """Let nothing more be placed on a drive's enclosure."""
    record = drive.record()
    idle = tuple(replace(shard, weight=0) for shard in record.shards)
    await fabric.membership.put_enclosures([replace(record, shards=idle)])
    await until(lambda: fabric.context.routes().map.revision == fabric.membership.map.revision)


def placed_on(fabric: Assembly, numbers: range, drive: HeldDrive) -> list[bool]:
    routes, secret = fabric.context.routes(), fabric.volume.placement_secret
    return [routes.places(secret, chain_of([number]))[0].shard == drive.shard for number in numbers]


async def looked_up(
    fabric: Assembly, numbers: range, *, pin_s: float = 0.0, is_counted: bool = True
) -> set[BlockState]:
    asked = Lookup(99, 0, FAR_S, chain_of(numbers), pin_s, is_counted=is_counted)
    done = await fabric.data_path.lookup(fabric.worker(), fabric.volume, asked)
    return {BlockState(state) for state in done.states}


async def put(fabric: Assembly, worker: MemoryWorker, numbers: range) -> set[PutState]:
    return set(put_states(await fabric.put(worker, numbers)))


async def got(fabric: Assembly, worker: MemoryWorker, numbers: range) -> set[BlockState]:
    return set(get_states(await fabric.get(worker, numbers)))


async def all_at_rest(fabric: Assembly, *agents: Agent) -> None:
    """Check that nobody holds anything on any shard of these agents."""
    await fabric.at_rest()
    for agent in (fabric.agent, *agents):
        for owned in agent._owner.shards.values():
            check_core(owned.core)
            counts = owned.core.counts
            await until(lambda counts=counts: counts().reservations == counts().pins == 0)  # type: ignore[misc]


@asynccontextmanager
async def grown() -> AsyncIterator[tuple[Assembly, MemoryWorker, HeldDrive]]:
    """Build a fabric with NUMBERS, and add an enclosure after the puts."""
    drive = new_drive()
    async with assembled(later=[drive]) as fabric:
        await fabric.ready()
        worker = fabric.worker()
        assert await put(fabric, worker, NUMBERS) == {PutState.COMMITTED}
        await add(fabric, drive)
        assert 5 < sum(placed_on(fabric, NUMBERS, drive)) < 35
        yield fabric, worker, drive


async def test_all_blocks_are_found_after_an_enclosure_has_come() -> None:
    async with grown() as (fabric, worker, drive):
        assert await looked_up(fabric, NUMBERS) == {BlockState.HIT}
        assert await looked_up(fabric, NUMBERS, pin_s=1.0) == {BlockState.HIT}
        assert await got(fabric, worker, NUMBERS) == {BlockState.HIT}
        assert await looked_up(fabric, NUMBERS, is_counted=False) == {BlockState.HIT}, "part of no statistics"
        counters = fabric.agent.status().counters
        assert counters.found_earlier == 3 * sum(placed_on(fabric, NUMBERS, drive))


async def test_blocks_at_an_earlier_place_without_an_owner_are_not_missing_for_certain() -> None:
    async with grown() as (fabric, _, _):
        known, spans = fabric.context.routes().map, chain_of(NUMBERS)
        claims = {shard: claim for shard, claim in known.claims.items() if shard != SHARD}
        found = await fabric.context.locator.locate(
            Routes(replace(known, claims=claims)),
            fabric.volume,
            spans,
            derive_keys(fabric.volume.secret, spans),
            wanted=np.ones(len(NUMBERS), np.bool_),
            within_s=FAR_S,
            pin_s=0.0,
        )
        assert not found.is_found.any()
        assert set(found.reasons.tolist()) == {Reason.NO_OWNER}


async def test_blocks_of_an_earlier_placement_exist_and_are_not_rewritten() -> None:
    async with grown() as (fabric, worker, drive):
        assert await put(fabric, worker, NUMBERS) == {PutState.EXISTS}
        counts = fabric.service.shards[drive.shard].core.counts()
        assert (counts.blocks_committed, counts.blocks_reserved) == (
            0,
            sum(placed_on(fabric, NUMBERS, drive)),
        )
        await all_at_rest(fabric)


async def test_new_blocks_go_where_the_current_epoch_places_them() -> None:
    async with grown() as (fabric, worker, drive):
        assert await put(fabric, worker, NEWER) == {PutState.COMMITTED}
        on_new = sum(placed_on(fabric, NEWER, drive))
        assert fabric.service.shards[drive.shard].core.counts().blocks == on_new > 5
        assert await got(fabric, worker, NEWER) == {BlockState.HIT}
        await all_at_rest(fabric)


async def test_drained_enclosure_serves_blocks_and_accepts_none() -> None:
    async with grown() as (fabric, worker, drive):
        await put(fabric, worker, NEWER)
        await drain(fabric, drive)
        held = fabric.service.shards[drive.shard].core.counts().blocks
        assert await looked_up(fabric, NUMBERS) == await looked_up(fabric, NEWER) == {BlockState.HIT}
        assert await got(fabric, worker, NEWER) == {BlockState.HIT}
        assert await put(fabric, worker, range(200, 220)) == {PutState.COMMITTED}
        assert fabric.service.shards[drive.shard].core.counts().blocks == held
        await all_at_rest(fabric)


async def test_blocks_of_four_epochs_are_found_but_not_of_a_retired_epoch() -> None:
    drives = [new_drive(name) for name in ("f", "g", "h")]
    async with assembled(later=drives) as fabric:
        await fabric.ready()
        worker = fabric.worker()
        for age, drive in enumerate(drives):
            assert await put(fabric, worker, range(20 * age, 20 * age + 20)) == {PutState.COMMITTED}
            await add(fabric, drive)
        everything = range(60)
        assert await got(fabric, worker, everything) == {BlockState.HIT}
        first = fabric.membership.map.earlier_placements[-1]
        lost = [
            number
            for number in range(20)
            if not placed_on(fabric, range(number, number + 1), fabric.drive)[0]
        ]
        await fabric.membership.retire_placement(first.epoch)
        await until(lambda: len(fabric.context.routes().records) == 3)
        found = get_states(await fabric.get(worker, everything))
        missed = {number for number, state in zip(everything, found, strict=True) if state is BlockState.MISS}
        assert missed
        assert missed <= set(lost)
        await all_at_rest(fabric)


async def test_block_in_two_places_is_read_from_the_current_place() -> None:
    async with grown() as (fabric, worker, drive):
        number = placed_on(fabric, NUMBERS, drive).index(True)
        new, old = fabric.service.shards[drive.shard], fabric.service.shards[fabric.shard.record.id]
        epoch = fabric.membership.map.placement_epoch
        await fabric.membership.retire_placement(PlacementEpoch(epoch - 1))
        await until(lambda: not fabric.context.routes().has_earlier)
        assert await put(fabric, worker, range(number, number + 1)) == {PutState.COMMITTED}
        await drain(fabric, drive)  # from here on the first place is the current one, too
        await fabric.membership.put_enclosures([drive.record()])
        await until(lambda: len(fabric.context.routes().records) == 3)
        routes, spans = fabric.context.routes(), chain_of([number])
        keys = derive_keys(fabric.volume.secret, spans)
        located = await fabric.context.locator.locate(
            routes, fabric.volume, spans, keys, wanted=np.ones(1, np.bool_), within_s=FAR_S, pin_s=5.0
        )
        assert [source.shard for source in located.sources] == [drive.shard]
        assert (new.core.counts().pins, old.core.counts().pins) == (1, 0)
        fabric.context.locator.release(located.pins)
        await all_at_rest(fabric)


async def test_read_at_an_earlier_place_does_not_retain_a_block() -> None:
    async with grown() as (fabric, worker, drive):
        index = fabric.shard.core.index
        was_placed = np.array([not on_new for on_new in placed_on(fabric, NUMBERS, drive)])
        keys = derive_keys(fabric.volume.secret, chain_of(NUMBERS))
        index.forget_all_reads()
        assert await got(fabric, worker, NUMBERS) == {BlockState.HIT}
        np.testing.assert_array_equal(index.is_read(index.find(keys)), was_placed)
        await drain(fabric, drive)
        await until(lambda: fabric.service._placement == fabric.membership.map.placement_epoch)
        assert not index.is_read(index.find(keys)).any()


@pytest.mark.parametrize(
    ("behind", "outcome"),
    [
        (0, (PutState.STAGED, Reason.NONE)),
        (1, (PutState.STAGED, Reason.NONE)),
        (2, (PutState.DECLINED, Reason.STALE_MAP)),
    ],
)
async def test_a_put_may_miss_one_change_of_placement_and_not_two(
    behind: int, outcome: tuple[PutState, Reason]
) -> None:
    async with grown() as (fabric, _, drive):
        await drain(fabric, drive)
        epoch = fabric.membership.map.placement_epoch
        wants = ShardWants(SHARD, bytes(16), np.array([4096], np.uint32).tobytes())
        asked = Reserve(1, FAR_S, 1.0, (wants,), placement_epoch=epoch - behind)
        reserved = fabric.service.answer(asked)
        assert isinstance(reserved, Reserved)
        (made,) = reserved.shards
        assert (PutState(made.states[0]), Reason(made.reasons[0])) == outcome


async def test_put_of_an_existing_block_answers_exists_under_any_map() -> None:
    async with grown() as (fabric, _, drive):
        await drain(fabric, drive)
        key = derive_keys(fabric.volume.secret, chain_of([NUMBERS[0]])).tobytes()
        wants = ShardWants(SHARD, key, np.array([4096], np.uint32).tobytes())
        reserved = fabric.service.answer(Reserve(1, FAR_S, 1.0, (wants,), placement_epoch=1))
        assert isinstance(reserved, Reserved)
        assert list(reserved.shards[0].states) == [PutState.EXISTS]


class Waiting:
    """In front of an agent's service: answers no look-up before it is let go."""

    def __init__(self, agent: Agent) -> None:
        self._service = agent._dispatcher
        self.let_go = asyncio.Event()
        self.released: list[Release] = []

    def answer(self, request: AgentRequest) -> AnswerToAgent | Awaitable[AnswerToAgent]:
        return self._late(request) if isinstance(request, Resolve) else self._service.answer(request)

    def notice(self, notice: OwnerNotice) -> None:
        if isinstance(notice, Release):
            self.released.append(notice)
        self._service.notice(notice)

    async def _late(self, request: Resolve) -> AnswerToAgent:
        await self.let_go.wait()
        answer = self._service.answer(request)
        assert isinstance(answer, Resolved)
        return answer


@asynccontextmanager
async def of_two_agents() -> AsyncIterator[tuple[Assembly, MemoryWorker, Agent, Waiting]]:
    """Two agents with an enclosure each, of which the second one's is drained, and answers when it is let go.

    The first holds NUMBERS, and so does the second in part.
    """
    drive = of_agent_1()
    async with assembled(later=[drive]) as fabric, beside(fabric, SETTINGS, later=[drive]) as other:
        await fabric.ready()
        worker = fabric.worker()
        await add(fabric, drive, agent=other)
        assert await put(fabric, worker, NUMBERS) == {PutState.COMMITTED}
        assert other._owner.shards[drive.shard].core.counts().blocks > 5
        await drain(fabric, drive)
        waiting = Waiting(other)
        fabric.owners.register(other.id, waiting)
        yield fabric, worker, other, waiting
        waiting.let_go.set()
        fabric.owners.register(other.id, other._dispatcher)


async def test_silent_owner_of_an_earlier_epoch_does_not_delay_a_put() -> None:
    async with of_two_agents() as (fabric, worker, other, waiting):
        watch = Stopwatch()
        assert await put(fabric, worker, NUMBERS) == {PutState.EXISTS, PutState.COMMITTED}
        assert watch.took_s < FAR_S / 10
        waiting.let_go.set()
        await all_at_rest(fabric, other)


async def test_found_blocks_need_no_answer_of_an_earlier_owner() -> None:
    async with of_two_agents() as (fabric, worker, other, waiting):
        await put(fabric, worker, NUMBERS)  # what the other one has is stored once more
        watch = Stopwatch()
        assert await got(fabric, worker, NUMBERS) == {BlockState.HIT}
        assert watch.took_s < FAR_S / 10
        waiting.let_go.set()
        await until(lambda: bool(waiting.released))
        await all_at_rest(fabric, other)


async def test_get_waits_for_the_only_owner_with_a_block() -> None:
    async with of_two_agents() as (fabric, worker, other, waiting):
        getting = asyncio.create_task(fabric.get(worker, NUMBERS))
        await asyncio.wait([getting], timeout=0.05)
        assert not getting.done()
        waiting.let_go.set()
        assert set(get_states(await getting)) == {BlockState.HIT}
        await all_at_rest(fabric, other)


async def test_explain_names_the_owner_with_the_block() -> None:
    async with grown() as (fabric, _, drive):
        obsolete = placed_on(fabric, NUMBERS, drive).index(True)
        for number, shard, is_listed in ((obsolete, SHARD, True), (NEWER[0], None, False)):
            asked = Explain(1, FAR_S, "v", chain_of([number]))
            told = await fabric.data_path.explain(fabric.volume, asked)
            explained = msgspec.msgpack.decode(told.body, type=BlockExplanation)
            expected = (
                shard or fabric.context.routes().places(fabric.volume.placement_secret, asked.spans)[0].shard
            )
            assert explained.shard == expected
            assert explained.owner_view is not None
            assert explained.owner_view.is_listed is is_listed


async def test_owner_gets_one_request_for_all_epochs() -> None:
    async with grown() as (fabric, _, drive):
        asked: list[Resolve] = []

        class Noting(Waiting):
            def answer(self, request: AgentRequest) -> AnswerToAgent | Awaitable[AnswerToAgent]:
                if isinstance(request, Resolve):
                    asked.append(request)
                return self._service.answer(request)

        fabric.ask_by_message()
        fabric.owners.register(fabric.agent.id, Noting(fabric.agent))
        assert await looked_up(fabric, NUMBERS) == {BlockState.HIT}
        (only,) = asked
        epoch = fabric.membership.map.placement_epoch
        obsolete = sum(placed_on(fabric, NUMBERS, drive))
        assert [_shape(shard) for shard in only.shards] == [
            (SHARD, len(NUMBERS) - obsolete, epoch),
            (drive.shard, obsolete, epoch),
            (SHARD, obsolete, epoch - 1),
        ]


class NotingShards(LocalShards):
    """An agent's own shards; notes the agent at each look-up."""

    def __init__(self, agent: Agent, asked: list[AgentId]) -> None:
        self._agent = agent
        self._asked = asked

    def resolve(
        self, shard: ShardId, placement_epoch: PlacementEpoch, keys: NDArray[np.uint8], terms: Resolve
    ) -> ShardAnswer:
        self._asked.append(self._agent.id)
        return self._agent._owner.resolve(shard, placement_epoch, keys, terms)

    def is_whole(self, shard: ShardId) -> bool:
        return self._agent._owner.is_whole(shard)

    def has(
        self,
        runs: Sequence[tuple[ShardId | None, int]],
        placement_epoch: PlacementEpoch,
        keys: NDArray[np.uint8],
        terms: Resolve,
    ) -> NDArray[np.bool_]:
        self._asked.append(self._agent.id)
        return self._agent._owner.has(runs, placement_epoch, keys, terms)

    def notice(self, notice: OwnerNotice) -> None:
        self._agent._owner.notice(notice)

    def reserve(
        self, wanted: Sequence[WantedSpace], terms: Reserve
    ) -> list[GivenSpace] | Awaitable[list[GivenSpace]]:
        return self._agent._owner.reserve(wanted, terms)


async def test_an_agent_asks_others_before_itself() -> None:
    async with of_two_agents() as (fabric, _, other, waiting):
        asked: list[AgentId] = []

        class Noting(Waiting):
            def answer(self, request: AgentRequest) -> AnswerToAgent | Awaitable[AnswerToAgent]:
                if isinstance(request, Resolve):
                    assert request.is_brief, "a look-up need not know where blocks lie"
                    asked.append(self._service._data_path._agent)
                return self._service.answer(request)

        for agent in (fabric.agent, other):
            fabric.owners.register(agent.id, Noting(agent))
            agent._data_path.context.locator.here = NotingShards(agent, asked)
        for seen_from in (fabric, replace(fabric, agent=other)):
            assert await looked_up(seen_from, NUMBERS) == {BlockState.HIT}
        assert asked == [AGENTS[1], AGENTS[0], AGENTS[0], AGENTS[1]]
        fabric.owners.register(fabric.agent.id, fabric.agent._dispatcher)
        fabric.owners.register(other.id, waiting)


def _shape(shard: ShardKeys) -> tuple[str, int, int]:
    return shard.shard, len(shard.keys) // codec.KEY_BYTES, shard.placement_epoch
