"""A shard passes from one agent to another: the first is cut off from the store, dies, or ends in order."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
from tests.dpu_agent.shards.test_volume_copy import LateDrive, named, names_on
from tests.support.agent.assembly import (
    FAR_S,
    SETTINGS,
    SHARD,
    Assembly,
    another_agent,
    assembled,
    chain_of,
    committed,
    found,
    get_states,
    put_states,
    reasons_of,
    reserved,
    stop,
    until,
)
from tests.support.agent.owned_shard import keys_of
from tests.support.agent.shard_invariants import check_core

from ostraca_dpu_agent.controller.claim_validity import ClaimValidity
from ostraca_fabric.errors import MembershipError
from ostraca_fabric.membership.memory_membership import MemoryMembership
from ostraca_fabric.membership.rules import GRANTS_LOST
from ostraca_fabric.model.ids import AgentId, OwnerEpoch, ShardId
from ostraca_fabric.model.outcome import BlockState, PutState, Reason
from ostraca_fabric.model.overrides import Overrides
from ostraca_fabric.tables.digests import derive_keys
from ostraca_fabric.telemetry.explain import BlockExplanation, verdict
from ostraca_fabric.telemetry.status import ClaimCounters
from ostraca_fabric.wire.messages import Explain, Lookup

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.agent.assembly import HeldDrive

    from ostraca_dpu_agent.agent import Agent
    from ostraca_dpu_agent.settings import AgentSettings
    from ostraca_dpu_agent.shards.shard import OwnedShard
    from ostraca_fabric.membership.memory_membership import MemoryStore
    from ostraca_fabric.model.fabric_map import FabricMap, Grant
    from ostraca_fabric.model.ids import DriveId, StartId
    from ostraca_fabric.model.overrides import Overrides
    from ostraca_fabric.model.volume import VolumeRecord
    from ostraca_fabric.ports.membership import ClaimResult
    from ostraca_fabric.telemetry.status import OwnershipStatus

FIRST, SECOND, THE_SHARD = AgentId("agent-0"), AgentId("agent-1"), ShardId(SHARD)
QUICK = replace(
    SETTINGS,
    turn_s=0.02,
    owner=replace(
        SETTINGS.owner,
        grant_s=0.5,
        hold_s=0.5,
        late_write_s=0.6,
        pause_max_s=0.3,
        adopt_every_s=0.05,
        pin_max_s=0.3,
    ),
)


class CutOff(MemoryMembership):
    """A store that one agent can be cut off from: it keeps the last map, and is told nothing."""

    def __init__(self, of: MemoryMembership) -> None:
        self.store = of.store
        self._of = of
        self._last: FabricMap | None = None

    def cut(self) -> None:
        self._last = self.store.map

    def heal(self) -> None:
        self._last = None

    @property
    def map(self) -> FabricMap:
        return self._last or self.store.map

    async def changes(self) -> AsyncIterator[FabricMap]:
        async for newer in self._of.changes():
            if self._last is None:
                yield newer

    async def confirm(self, agent: AgentId, start: StartId) -> bool:
        if self._last is not None:
            raise MembershipError("cut off")
        return await self._of.confirm(agent, start)

    def volume_changes(self) -> AsyncIterator[tuple[VolumeRecord, ...]]:
        return self._of.volume_changes()

    def override_changes(self) -> AsyncIterator[Overrides]:
        return self._of.override_changes()

    def _say_changed(self) -> None:
        self._of._say_changed()


@dataclass
class Pair:
    """Two agents; the first owns the shard, and can be cut off."""

    fabric: Assembly
    cut_off: CutOff
    second: Agent

    @property
    def store(self) -> MemoryStore:
        return self.fabric.membership.store

    @property
    def first_shard(self) -> OwnedShard:
        return self.fabric.shard

    @property
    def second_shard(self) -> OwnedShard:
        return self.second._owner.shards[THE_SHARD]

    @property
    def grants(self) -> tuple[Grant, ...]:
        return self.store._grants[THE_SHARD].unretired

    def seen_from_the_second(self) -> Assembly:
        """Return the fabric as seen by the second agent's workers."""
        return replace(self.fabric, agent=self.second)

    def ownership(self, agent: Agent) -> OwnershipStatus:
        """Return an agent's report on the shard it owns, or believes to own."""
        (shard,) = agent.status().shards
        return shard.ownership

    def conditions(self, agent: Agent) -> dict[str, str]:
        """Return the conditions that report trouble."""
        return {each.name: each.sentence for each in agent.status().conditions if not each.is_true}

    async def explained(self, agent: Agent, number: int) -> BlockExplanation:
        """Return an agent's explanation of a block."""
        asked = Explain(1, 5.0, "v", chain_of([number]))
        told = await agent._data_path.explain(self.fabric.volume, asked)
        return msgspec.msgpack.decode(told.body, type=BlockExplanation)

    async def taken_over(self) -> None:
        """Wait until the second agent hands out space."""

        def has_space() -> bool:
            shards = self.second._owner.shards
            return THE_SHARD in shards and bool(shards[THE_SHARD].core.ring.ready)

        await until(has_space)

    def lease_runs_out(self) -> None:
        """Let the store forget the first agent, which can't hear of it."""
        self.cut_off.cut()
        self.store.leave(FIRST, self.fabric.agent.start_id)
        self.fabric.membership._say_changed()


@asynccontextmanager
async def pair(
    settings: AgentSettings = QUICK, *, segments: int = 12, drive: HeldDrive | None = None
) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as both:
        cut_off: list[CutOff] = []

        def behind(membership: MemoryMembership) -> MemoryMembership:
            cut_off.append(CutOff(membership))
            return cut_off[0]

        fabric = await both.enter_async_context(
            assembled(settings, segments=segments, drive=drive, behind=behind)
        )
        second = another_agent(1, settings, (), fabric.membership, fabric.owners, (fabric.drive,))
        await second.join()
        await second.start()
        assert fabric.membership.map.owner(THE_SHARD) == FIRST
        yield Pair(fabric, cut_off[0], second)
        assert await stop(second)
        second.unmap()


async def test_takeover_of_an_isolated_owner_loses_no_committed_block() -> None:
    async with pair() as agents:
        worker = agents.fabric.worker()
        assert set(put_states(await agents.fabric.put(worker, range(20)))) == {PutState.COMMITTED}
        before = agents.grants[-1]
        agents.lease_runs_out()
        await agents.taken_over()
        other = agents.seen_from_the_second()
        assert agents.second_shard.epoch > agents.first_shard.epoch
        assert set(get_states(await other.get(other.worker(), range(20)))) == {BlockState.HIT}
        mine, theirs = agents.grants[-1], agents.grants[0]
        assert theirs == before
        assert set(mine.segments).isdisjoint(theirs.segments)
        assert set(put_states(await other.put(other.worker(), [30, 1]))) == {
            PutState.COMMITTED,
            PutState.EXISTS,
        }


async def test_late_commits_are_adopted_until_the_previous_fence() -> None:
    async with pair() as agents:
        first = agents.first_shard
        early = await reserved(first, [1, 2])
        assert await committed(first, early, [1, 2]) == [PutState.COMMITTED] * 2
        made = await reserved(first, [40, 41])
        agents.lease_runs_out()
        await agents.taken_over()
        other = agents.seen_from_the_second()
        assert found(other, [1, 40]) == [True, False]
        second = agents.second_shard
        assert await committed(second, await reserved(second, [41]), [41]) == [PutState.COMMITTED]
        (ours,) = agents.second_shard.core.index.find(keys_of([41])).tolist()
        assert await committed(first, made, [40, 41]) == [PutState.COMMITTED] * 2
        await until(lambda: found(other, [40]) == [True])
        assert agents.ownership(agents.second).adopted_blocks == 1
        assert agents.second_shard.core.index.find(keys_of([41])).tolist() == [ours]  # its own entry wins
        await until(lambda: not first.core.grants.may_write(agents.fabric.agent._clock()))
        declined = await agents.fabric.put(agents.fabric.worker(), [50])
        assert put_states(declined) == [PutState.DECLINED]
        assert set(declined.reasons) <= {Reason.FENCED, Reason.NO_OWNER}
        assert agents.ownership(agents.fabric.agent).is_fenced


async def test_grant_retires_after_the_last_possible_write() -> None:
    async with pair() as agents:
        await agents.fabric.put(agents.fabric.worker(), [1, 2, 3])
        clock, withheld = agents.fabric.agent._clock, set(agents.grants[-1].segments)
        agents.lease_runs_out()
        begun_s = clock()
        await agents.taken_over()
        assert agents.second_shard.withheld == withheld
        mine = agents.ownership(agents.second)
        assert (mine.withheld_segments, mine.adopted_blocks, mine.is_fenced) == (len(withheld), 0, False)
        assert mine.retires_in_s is not None
        assert 0 < mine.retires_in_s <= QUICK.owner.grant_s + QUICK.owner.hold_s + QUICK.owner.late_write_s
        assert 0 < mine.granted_ahead_segments <= mine.granted_segments
        assert f"({len(withheld)} segments for" in agents.conditions(agents.second)["grants_retired"]
        assert "that its earlier owner may still use" in verdict(await agents.explained(agents.second, 1))
        await until(lambda: len(agents.grants) == 1)
        owner = QUICK.owner
        assert clock() - begun_s >= owner.grant_s + owner.hold_s + owner.late_write_s
        assert agents.grants[0].agent == SECOND
        await until(lambda: agents.second_shard.withheld == frozenset())
        assert agents.ownership(agents.second).retires_in_s is None
        assert agents.conditions(agents.second) == {}
        assert verdict(await agents.explained(agents.second, 1)).endswith("lists it.")
        other = agents.seen_from_the_second()
        assert set(get_states(await other.get(other.worker(), [1, 2, 3]))) == {BlockState.HIT}
        check_core(agents.second_shard.core)


async def test_owner_without_segments_reports_the_state() -> None:
    late = replace(QUICK, owner=replace(QUICK.owner, late_write_s=2.0))
    async with pair(late, segments=3) as agents:
        first, worker = agents.fabric, agents.fabric.worker()
        numbers = count()
        while len(agents.grants[-1].segments) < 3:
            await first.put(worker, [next(numbers)])
        agents.lease_runs_out()
        shards = agents.second._owner.shards
        await until(lambda: THE_SHARD in shards and len(shards[THE_SHARD].withheld) == 3)
        other = agents.seen_from_the_second()
        await until(lambda: other.context.routes().map.owner(THE_SHARD) == SECOND)
        declined = await other.put(other.worker(), [next(numbers)])
        assert (put_states(declined), reasons_of(declined)) == ([PutState.DECLINED], [Reason.NO_SPACE])
        found = agents.conditions(agents.second)
        why = "writes of an earlier owner may still land in 3 of its 3 segments"
        assert "1 of 1 owned shard without free space" in found["shards_have_space"]
        assert f"e/d/0 ({why}, for " in found["shards_have_space"]
        ownership = agents.ownership(agents.second)
        assert ownership.why_no_space == why
        assert ownership.space_in_s == pytest.approx(ownership.retires_in_s, abs=0.1)
        assert "shards_writable" not in found
        await until(lambda: "shards_have_space" not in agents.conditions(agents.second))
        assert put_states(await other.put(other.worker(), [next(numbers)])) == [PutState.COMMITTED]


async def test_vanished_agent_is_preempted_before_its_segments_are_used() -> None:
    async with pair() as agents:
        await agents.fabric.put(agents.fabric.worker(), [1, 2, 3])
        preempted = []

        async def preempt(drive: DriveId, agent: AgentId) -> None:
            preempted.append((drive, agent, len(agents.grants), bool(agents.second_shard.withheld)))

        controller = agents.second._controller
        controller.shards._opener = replace(controller.shards._opener, preempt=preempt)
        agents.lease_runs_out()
        await agents.taken_over()
        assert preempted == []
        await until(lambda: agents.second_shard.withheld == frozenset())
        assert preempted == [(agents.fabric.drive.id, FIRST, 1, True)]


async def test_late_writes_over_volume_records_are_repaired_at_retirement() -> None:
    async with pair() as agents:
        drive, membership = agents.fabric.drive, agents.fabric.membership
        await until(lambda: names_on(drive) == ["v"] and bool(agents.first_shard.core.ring.ready))
        drive.holds_writes = True
        await membership.create_volume(named("w"))
        await until(lambda: len(drive.held) == 1)
        drive.holds_writes = False
        await membership.create_volume(named("x"))
        agents.lease_runs_out()
        await until(lambda: names_on(drive) == ["v", "w", "x"])
        await until(lambda: not agents.first_shard.may_write_volumes)
        assert agents.second_shard.withheld
        drive.let_go()
        await until(lambda: names_on(drive) == ["v", "w"])
        assert agents.second_shard.withheld
        await until(lambda: names_on(drive) == ["v", "w", "x"])
        assert not agents.second_shard.withheld


async def test_ending_owner_reports_late_volume_records() -> None:
    drive = LateDrive(segments=12)
    async with pair(drive=drive) as agents:
        membership = agents.fabric.membership
        await until(lambda: names_on(drive) == ["v"] and bool(agents.first_shard.core.ring.ready))
        drive.fails_writes = True
        await membership.create_volume(named("w"))
        await until(lambda: len(drive.held) == 1)
        drive.fails_writes = False
        leaving = asyncio.create_task(agents.fabric.agent.hand_over())
        await until(lambda: membership.map.owner(THE_SHARD) == SECOND)
        await membership.create_volume(named("x"))
        await until(lambda: names_on(drive) == ["v", "w", "x"])
        assert len(agents.second_shard.withheld) == 1
        drive.let_go()
        assert names_on(drive) == ["v", "w"]
        await until(lambda: names_on(drive) == ["v", "w", "x"])
        assert not agents.second_shard.withheld
        await leaving


async def test_volume_records_pause_after_the_fence_until_the_next_confirmation() -> None:
    async with pair() as agents:
        drive, membership = agents.fabric.drive, agents.fabric.membership
        await until(lambda: names_on(drive) == ["v"])
        agents.cut_off.cut()
        await until(lambda: not agents.first_shard.may_write_volumes)
        copies = agents.fabric.agent._volume_copies
        copy = copies.of(THE_SHARD)
        assert copy is not None
        await membership.create_volume(named("w"))
        await until(lambda: copy._wanted is not None and len(copy._wanted.volumes) == 2)
        await until(lambda: not copy._is_writing)
        assert names_on(drive) == ["v"]
        agents.cut_off.heal()
        await until(lambda: names_on(drive) == ["v", "w"])


async def test_graceful_end_causes_no_misses() -> None:
    async with pair() as agents:
        other, drive = agents.seen_from_the_second(), agents.fabric.drive
        await agents.fabric.put(agents.fabric.worker(), range(8))
        first = agents.first_shard
        seen = []

        async def look() -> None:
            done = await other.data_path.lookup(
                other.worker(), other.volume, Lookup(1, 0, 1.0, chain_of(range(8)))
            )
            seen.append([BlockState(state) for state in done.states])

        drive.holds_reads = True  # nobody can read what is on the drive, not even its superblock
        leaving = asyncio.create_task(agents.fabric.agent.hand_over())
        await until(lambda: agents.fabric.membership.map.owner(THE_SHARD) is None)
        assert first.is_closed
        (closed,) = agents.grants
        assert (closed.agent, closed.is_closed, closed.segments) == (FIRST, True, ())
        await look()
        drive.let_go()
        await until(lambda: agents.fabric.membership.map.owner(THE_SHARD) == SECOND)
        await look()
        await agents.taken_over()
        await look()
        assert agents.second_shard.withheld == frozenset(), "so that puts wait for nothing either"
        assert agents.second._controller.retires_in_s(THE_SHARD) is None
        await leaving
        assert agents.fabric.agent.status().claims == ClaimCounters(made=1, handed_over=1)
        assert seen == [[BlockState.HIT] * 8] * 3
        got = await other.get(other.worker(), range(8))
        assert get_states(got) == [BlockState.HIT] * 8


async def test_previous_owner_does_not_report_evicted_blocks() -> None:
    async with pair(replace(QUICK, drain_s=20.0)) as agents:
        other, drive = agents.seen_from_the_second(), agents.fabric.drive
        await agents.fabric.put(agents.fabric.worker(), range(8))
        drive.holds_reads = True  # so that nobody claims the shard before it was left
        leaving = asyncio.create_task(agents.fabric.agent.hand_over())
        await until(lambda: THE_SHARD in agents.fabric.service.handed_over)
        drive.let_go()
        await agents.taken_over()
        assert other.context.routes().previous_owners == {THE_SHARD: FIRST}
        index = agents.second_shard.core.index
        index.remove(index.find(derive_keys(other.volume.secret, chain_of(range(4)))))
        for pin_s in (0.0, 0.2):
            asked = Lookup(1, 0, FAR_S, chain_of(range(8)), pin_s)
            done = await other.data_path.lookup(other.worker(), other.volume, asked)
            assert list(done.states) == [BlockState.MISS] * 4 + [BlockState.HIT] * 4
        assert put_states(await other.put(other.worker(), range(8))) == (
            [PutState.COMMITTED] * 4 + [PutState.EXISTS] * 4
        )
        assert set(get_states(await other.get(other.worker(), range(8)))) == {BlockState.HIT}
        await leaving


async def test_leaving_agent_ignores_expired_claims() -> None:
    # The reservation outlasts the grant by far, also on a loaded machine.
    async with pair(replace(QUICK, owner=replace(QUICK.owner, hold_s=2.0))) as agents:
        first, clock = agents.first_shard, agents.fabric.agent._clock
        await reserved(first, [1])  # what is waited for
        agents.second._controller.shards.is_ending.set()  # nobody comes after
        agents.store.leave(FIRST, agents.fabric.agent.start_id)  # and nobody has heard of it
        leaving = asyncio.create_task(agents.fabric.agent.hand_over())
        asked_s = clock()
        await until(lambda: clock() > asked_s + 1.2 * QUICK.owner.grant_s)
        assert agents.store.has(FIRST, agents.fabric.agent.start_id), "its record stands again"
        assert not first.is_closed
        assert not first.core.grants.may_write(clock())
        await leaving


async def test_a_higher_epoch_in_the_map_is_a_fence_at_once() -> None:
    async with pair() as agents:
        first, controller = agents.first_shard, agents.fabric.agent._controller
        claim = agents.fabric.membership.map.claims[THE_SHARD]
        later = replace(claim, agent=SECOND, epoch=OwnerEpoch(claim.epoch + 1))
        controller._note_owners(replace(agents.fabric.membership.map, claims={THE_SHARD: later}))
        assert first.core.grants.is_fenced


async def test_commit_with_a_higher_epoch_triggers_a_confirmation() -> None:
    async with pair(replace(QUICK, owner=replace(QUICK.owner, grant_s=20 * FAR_S))) as agents:
        first, clock = agents.first_shard, agents.fabric.agent._clock
        none, tags = np.empty(0, np.uint64), np.empty((0, 16), np.uint8)
        await first.commit(none, tags, none, epoch=OwnerEpoch(first.epoch + 1))
        assert not first.core.grants.may_write(clock())
        assert "names a higher epoch" in agents.ownership(agents.fabric.agent).why_fenced
        await until(lambda: first.core.grants.may_write(clock()))  # at once: it is not its turn for long


async def test_own_higher_claim_does_not_fence_the_owner() -> None:
    class Late(CutOff):
        """Its answer to a claim comes after the map that shows it, and after the turn that asked."""

        async def claim(
            self, shard: ShardId, agent: AgentId, start: StartId, *, epoch_at_least: OwnerEpoch
        ) -> ClaimResult | None:
            claimed = await super().claim(shard, agent, start, epoch_at_least=epoch_at_least)
            await asyncio.sleep(0.4)
            return claimed

    often = replace(SETTINGS, turn_s=QUICK.turn_s)  # and a grant that outlasts the claim
    async with assembled(often) as before:
        assert put_states(await before.put(before.worker(), [1])) == [PutState.COMMITTED]
    async with assembled(often, drive=before.drive, behind=Late) as after:
        await until(lambda: after.shard.epoch > 1)
        assert not after.shard.core.grants.is_fenced
        await until(lambda: bool(after.shard.core.grants.segments))
        assert put_states(await after.put(after.worker(), [2])) == [PutState.COMMITTED]


async def test_a_grant_under_which_space_is_held_is_not_closed() -> None:
    async with pair() as agents:
        await reserved(agents.first_shard, [1])
        await agents.fabric.agent._controller.close()
        assert [grant.is_closed for grant in agents.grants if grant.agent == FIRST] == [False]


async def test_next_owner_waits_for_segments_of_failed_writes() -> None:
    """A path may deliver it yet. It writes elsewhere meanwhile."""
    async with pair() as agents:
        first, drive = agents.first_shard, agents.fabric.drive
        await agents.fabric.put(agents.fabric.worker(), [0])
        writing = first.core.ring.pools.common.current
        assert writing is not None
        spoilt = writing.number
        drive.fail_writes(first.core.geometry.data_offset(spoilt), first.core.geometry.data_bytes)
        assert put_states(await agents.fabric.put(agents.fabric.worker(), [1])) == [PutState.DECLINED]
        drive.mend()
        leaving = asyncio.create_task(agents.fabric.agent.hand_over())
        await agents.taken_over()
        (closed,) = (grant for grant in agents.grants if grant.agent == FIRST)
        assert (closed.is_closed, closed.segments) == (True, (spoilt,))
        assert agents.second_shard.withheld == {spoilt}
        other = agents.seen_from_the_second()
        assert put_states(await other.put(other.worker(), [1])) == [PutState.COMMITTED]
        assert agents.second_shard.core.ring.segments[spoilt].log is None, "and not there"
        await leaving


async def test_returning_owner_waits_for_its_earlier_reservations() -> None:
    async with pair() as agents:
        controller, first = agents.fabric.agent._controller, agents.first_shard
        agents.second._controller.shards.is_ending.set()
        handed_out = frozenset(agents.grants[-1].segments)
        await controller.shards.stop(THE_SHARD)
        await controller.shards.release(THE_SHARD)
        shards = agents.fabric.service.shards
        await until(lambda: THE_SHARD in shards and not shards[THE_SHARD].core.is_recovering)
        assert shards[THE_SHARD].epoch > first.epoch
        assert shards[THE_SHARD].withheld == handed_out


async def test_successor_respects_pins_of_the_previous_owner() -> None:
    settings = replace(QUICK, owner=replace(QUICK.owner, late_write_s=0.1, pause_max_s=0.05, pin_max_s=2.5))
    async with pair(settings) as agents:
        clock, worker = agents.fabric.agent._clock, agents.fabric.worker()
        for number in range(0, 300, 10):  # the ring goes round
            await agents.fabric.put(worker, range(number, number + 10))
        begun_s = clock()
        agents.lease_runs_out()
        shards = agents.second._owner.shards
        await until(lambda: THE_SHARD in shards and not shards[THE_SHARD].core.is_recovering)
        core, other = agents.second_shard.core, agents.seen_from_the_second()
        has_blocks, before = core.index.rows_taken > 0, core.ring.generations.copy()
        assert np.count_nonzero(has_blocks) > 6
        number = 1000
        while (core.ring.generations == before)[has_blocks].all():
            await other.put(other.worker(), range(number, number + 10))
            await until(lambda: bool(core.ring.ready) or core.ring.opening is None)
            number += 10
            assert clock() - begun_s < FAR_S
        assert clock() - begun_s >= settings.owner.pin_max_s


async def test_fence_counts_from_the_request_to_the_store() -> None:
    now_s = [1e9]

    class Slow(MemoryMembership):
        async def confirm(self, agent: AgentId, start: StartId) -> bool:
            now_s[0] += 3.0
            return await super().confirm(agent, start)

    async with pair() as agents:
        store = Slow(agents.fabric.membership.map.fabric)
        me = agents.fabric.membership.map.agents[FIRST]
        await store.join(me)
        claim_validity = ClaimValidity(me, store, grant_s=5.0, clock=lambda: now_s[0])
        claim_validity.add(agents.first_shard, requested_s=1e9 - 1.0)
        await claim_validity._confirm()
        assert agents.first_shard.core.grants.until_s == 1e9 + 5.0


async def test_shard_with_lost_grants_is_readable_at_once_and_writable_later() -> None:
    owner = replace(QUICK.owner, grant_s=1.5, hold_s=1.5)  # in which the first one commits below
    async with pair(replace(QUICK, owner=owner)) as agents:
        first, clock = agents.first_shard, agents.fabric.agent._clock
        worker = agents.fabric.worker()
        assert set(put_states(await agents.fabric.put(worker, range(20)))) == {PutState.COMMITTED}
        made = await reserved(first, [40])
        agents.store._grants[THE_SHARD] = GRANTS_LOST
        agents.lease_runs_out()
        begun_s = clock()
        other = agents.seen_from_the_second()
        await until(lambda: THE_SHARD in agents.second._owner.shards and bool(agents.second_shard.withheld))
        await until(lambda: other.context.routes().map.owner(THE_SHARD) == SECOND)
        second = agents.second_shard
        assert second.withheld == frozenset(range(12))
        assert second.epoch == first.epoch + 1, "one above the highest on flash"
        assert set(get_states(await other.get(other.worker(), range(20)))) == {BlockState.HIT}
        assert put_states(await other.put(other.worker(), [30])) == [PutState.DECLINED]
        assert await committed(first, made, [40]) == [PutState.COMMITTED], (
            "its claim's end has not reached it"
        )
        await until(lambda: found(other, [40]) == [True])
        await until(lambda: second.withheld == frozenset())
        assert clock() - begun_s >= owner.grant_s + owner.hold_s + owner.late_write_s
        assert [grant.epoch for grant in agents.grants] == [second.epoch]
        await until(lambda: bool(second.core.ring.ready))
        assert put_states(await other.put(other.worker(), [30])) == [PutState.COMMITTED]
        assert set(get_states(await other.get(other.worker(), [*range(20), 30]))) == {BlockState.HIT}
        assert found(other, [40]) == [True]


async def test_owner_restarts_after_lost_grants() -> None:
    async with assembled(QUICK, segments=12) as fabric:
        owned, store = fabric.shard, fabric.membership.store
        assert put_states(await fabric.put(fabric.worker(), [1])) == [PutState.COMMITTED]
        store.leave(FIRST, fabric.agent.start_id)
        store._grants[THE_SHARD] = GRANTS_LOST
        fabric.membership._say_changed()
        await until(lambda: THE_SHARD in fabric.service.shards and fabric.shard is not owned)
        await until(lambda: not fabric.shard.core.is_recovering)
        assert fabric.shard.epoch == owned.epoch + 1
        assert fabric.shard.withheld == frozenset(range(12))
        assert get_states(await fabric.get(fabric.worker(), [1])) == [BlockState.HIT]
        await until(lambda: bool(fabric.shard.core.grants.segments))
        assert put_states(await fabric.put(fabric.worker(), [2])) == [PutState.COMMITTED]


async def begun_anew(fabric: Assembly, owned: OwnedShard) -> None:
    """Wait until a shard has its next owner, here, with block 1, which was put before."""
    await until(lambda: THE_SHARD in fabric.service.shards and fabric.shard is not owned)
    await until(lambda: not fabric.shard.core.is_recovering)
    assert get_states(await fabric.get(fabric.worker(), [1])) == [BlockState.HIT]
    await until(lambda: bool(fabric.shard.core.grants.segments))
    assert fabric.shard.epoch == owned.epoch + 1
    assert put_states(await fabric.put(fabric.worker(), [2])) == [PutState.COMMITTED]


async def test_owner_restarts_after_a_lost_successor() -> None:
    async with assembled(QUICK, segments=12) as fabric:
        owned, store = fabric.shard, fabric.membership.store
        assert put_states(await fabric.put(fabric.worker(), [1])) == [PutState.COMMITTED]
        owned.fence()  # as it has seen another one's claim, which was in no backup
        store.leave(FIRST, fabric.agent.start_id)
        fabric.membership._say_changed()
        await begun_anew(fabric, owned)


@pytest.mark.parametrize("is_heard", [True, False])
async def test_owner_restarts_after_a_successor_when_the_store_was_restored(*, is_heard: bool) -> None:
    async with assembled(QUICK, segments=12) as fabric:
        owned, store = fabric.shard, fabric.membership.store
        assert put_states(await fabric.put(fabric.worker(), [1])) == [PutState.COMMITTED]
        claims = store.map.claims
        if is_heard:  # of the next owner, and then the store is put back to before it
            after = replace(claims[THE_SHARD], agent=SECOND, epoch=OwnerEpoch(owned.epoch + 1))
            store._publish(claims={THE_SHARD: after})
            fabric.membership._say_changed()
            while not owned.core.grants.is_fenced:  # noqa: ASYNC110 (and no longer: it stops its shard next)
                await asyncio.sleep(0)
            store._publish(claims=claims)
        else:  # its summaries have told of that one
            owned.fence()
        fabric.membership._say_changed()
        await begun_anew(fabric, owned)
