"""Turns of a controller on a running agent."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from typing import Any

import pytest
from tests.support.agent.assembly import (
    ENCLOSURE,
    SETTINGS,
    SHARD,
    HeldDrive,
    another_agent,
    assembled,
    committed,
    put_states,
    reserved,
    stop,
    until,
)

from ostraca_dpu_agent.agent import Agent
from ostraca_dpu_agent.controller import controller as controller_module
from ostraca_dpu_agent.controller.plan import Reclaim, Stop
from ostraca_dpu_agent.shards.core import SegmentState
from ostraca_fabric.errors import MembershipError, StoreAwayError, WrongStoreError
from ostraca_fabric.membership.memory_membership import MemoryMembership
from ostraca_fabric.model.fabric_map import AgentRecord
from ostraca_fabric.model.ids import AgentId, OwnerEpoch, ShardId, StartId, drive_id
from ostraca_fabric.model.outcome import PutState, Reason
from ostraca_fabric.ports.membership import ClaimResult
from ostraca_fabric.telemetry.status import AgentStatus, ClaimCounters, MembershipStatus


async def test_shard_opens_later_after_a_failed_read() -> None:
    drive = HeldDrive()
    drive.fail_reads(0, 8192)
    async with assembled(replace(SETTINGS, turn_s=0.02, reopen_backoff_s=0.2), drive=drive) as fabric:
        assert fabric.service.shards == {}
        drive.mend()
        await until(lambda: ShardId(SHARD) in fabric.service.shards)
        await fabric.ready()
        assert put_states(await fabric.put(fabric.worker(), [1])) == [PutState.COMMITTED]


async def test_shard_opens_later_after_a_foreign_superblock_with_one_log_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    drive = HeldDrive()
    good, drive.bytes[:] = drive.bytes[:], bytes(len(drive.bytes))
    caplog.set_level(logging.DEBUG, "ostraca_dpu_agent")

    def tries() -> list[int]:
        return [each.levelno for each in caplog.records if "can't attach drive" in each.getMessage()]

    async with assembled(replace(SETTINGS, turn_s=0.02, reopen_backoff_s=0.05), drive=drive) as fabric:
        await until(lambda: len(tries()) > 2)
        assert fabric.service.shards == {}
        drive.bytes[:] = good
        await until(lambda: ShardId(SHARD) in fabric.service.shards)
        await fabric.ready()
        assert put_states(await fabric.put(fabric.worker(), [1])) == [PutState.COMMITTED]
    assert [level for level in tries() if level > logging.DEBUG] == [logging.WARNING]


async def test_expired_claim_is_renewed_without_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failures = 0

    async def fails(*_asked: object, **_more: object) -> None:
        nonlocal failures
        failures += 1
        raise MembershipError("nobody answers")

    async with assembled(replace(SETTINGS, turn_s=0.02)) as fabric:
        owned, epoch, shard = fabric.shard, fabric.shard.epoch, ShardId(SHARD)
        worker = fabric.worker()
        assert put_states(await fabric.put(worker, [1])) == [PutState.COMMITTED]
        with monkeypatch.context() as failed_drives:
            failed_drives.setattr(MemoryMembership, "claim", fails)
            await fabric.membership.leave(AgentId("agent-0"), StartId(fabric.agent.start_id))
            await until(lambda: failures > 1)
            assert fabric.membership.map.owner(shard) is None
            assert fabric.service.shards[shard] is owned
        await until(lambda: fabric.context.routes().map.owner(shard) is not None)
        assert fabric.shard is owned
        assert fabric.shard.epoch == epoch
        assert fabric.agent.status().claims == ClaimCounters(made=2, lost=1)
        assert put_states(await fabric.put(worker, [1, 2])) == [PutState.EXISTS, PutState.COMMITTED]


async def test_shard_claimed_by_another_agent_is_stopped() -> None:
    async with assembled(replace(SETTINGS, turn_s=0.02)) as fabric:
        owned, shard = fabric.shard, ShardId(SHARD)
        other = AgentRecord(AgentId("agent-1"), StartId(b"1" * 16), ())
        fabric.membership.store.leave(AgentId("agent-0"), StartId(fabric.agent.start_id))
        fabric.membership.store.join(other)
        claimed = fabric.membership.store.claim(shard, other.id, other.start, epoch_at_least=OwnerEpoch(1))
        assert claimed is not None
        assert claimed.epoch > owned.epoch
        assert [grant.agent for grant in claimed.grants] == [AgentId("agent-0"), other.id]
        await until(lambda: shard not in fabric.service.shards)
        assert owned.is_closed
        assert owned.core.grants.is_fenced
        assert fabric.agent.status().claims == ClaimCounters(made=1, lost=1)


async def test_claim_of_another_agent_counts_as_lost() -> None:
    async with assembled(replace(SETTINGS, turn_s=0.02)) as fabric:
        shard, store = ShardId(SHARD), fabric.membership.store
        other = AgentRecord(AgentId("agent-1"), StartId(b"1" * 16), ())
        store.join(other)
        store.release(shard, AgentId("agent-0"), StartId(fabric.agent.start_id))
        assert store.claim(shard, other.id, other.start, epoch_at_least=OwnerEpoch(1)) is not None
        await until(lambda: shard not in fabric.service.shards)
        assert fabric.agent.status().claims == ClaimCounters(made=1, lost=1)


async def test_puts_are_declined_a_grant_after_the_store_fell_silent_and_gets_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def silent(*_asked: object) -> bool:
        raise StoreAwayError("nobody answers")

    settings = replace(SETTINGS, owner=replace(SETTINGS.owner, grant_s=0.3))
    async with assembled(settings) as fabric:
        worker = fabric.worker()
        assert put_states(await fabric.put(worker, [1])) == [PutState.COMMITTED]
        with monkeypatch.context() as failed_drives:
            failed_drives.setattr(MemoryMembership, "confirm", silent)
            await until(lambda: not fabric.shard.core.grants.may_write(fabric.agent._clock()))
            declined = await fabric.put(worker, [2])
            assert put_states(declined) == [PutState.DECLINED]
            assert set(declined.reasons) == {Reason.FENCED}
            assert put_states(await fabric.put(worker, [1])) == [PutState.EXISTS]
            assert condition(fabric.agent, "membership_answers") == (False, "nobody answers")
            status = fabric.agent.status()
            assert status.membership.silent_s > 0
            (ownership,) = (shard.ownership for shard in status.shards)
            assert ownership.may_write_for_s == 0.0
            assert not ownership.is_superseded
            is_writable, why = condition(fabric.agent, "shards_writable")
            assert not is_writable
            assert "the membership store has been silent for" in why
            assert condition(fabric.agent, "ready")[0]
        await until(lambda: condition(fabric.agent, "membership_answers")[0])
        await until(lambda: condition(fabric.agent, "shards_writable")[0])
        assert put_states(await fabric.put(worker, [2])) == [PutState.COMMITTED]


async def test_store_without_the_fabric_is_logged_once_and_not_as_silent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refused = 0

    async def lost(*_asked: object, **_more: object) -> bool:
        nonlocal refused
        refused += 1
        raise WrongStoreError("etcd answers, and has lost it")

    settings = replace(SETTINGS, turn_s=0.02, owner=replace(SETTINGS.owner, grant_s=0.1))
    async with assembled(settings) as fabric:
        caplog.set_level(logging.DEBUG)
        worker = fabric.worker()
        with monkeypatch.context() as failed_drives:
            for method in ("confirm", "grant", "refresh_overrides", "claim"):
                failed_drives.setattr(MemoryMembership, method, lost)
            failed_drives.setattr(type(fabric.shard), "wanted_grant", lambda _shard: (0,))
            fabric.shard.grant_due.set()
            await until(lambda: refused > 10)
            await until(lambda: any("waits for a grant" in each for each in caplog.messages))
            await until(lambda: not fabric.shard.core.grants.may_write(fabric.agent._clock()))
            assert put_states(await fabric.put(worker, [2])) == [PutState.DECLINED]
            status = fabric.agent.status()
            assert status.membership == MembershipStatus(0.0, "etcd answers, and has lost it")
            (ownership,) = (shard.ownership for shard in status.shards)
            assert ownership.why_fenced == "the membership store does not confirm the claim"
        await until(lambda: condition(fabric.agent, "membership_answers")[0])
        loud = [record.message for record in caplog.records if record.levelno > logging.DEBUG]
        said = [message for message in loud if "membership store" in message]
    begun, ended = said
    assert begun.startswith(
        "agent-0: answers of the membership store are not usable: gets continue, puts for 0.1 s"
    )
    assert begun.endswith("more; claims, grants, joins and new volumes wait (etcd answers, and has lost it)")
    assert ended.startswith("agent-0: the membership store answers again, after ")
    assert not [message for message in loud if "waits for a grant" in message or "was erased" in message]


async def test_incomplete_map_is_a_condition_despite_valid_claims(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with assembled(SETTINGS) as fabric:
        assert condition(fabric.agent, "map_current")[0]
        with monkeypatch.context() as failed_drives:
            failed_drives.setattr(MemoryMembership, "trouble", "e is left out")
            assert condition(fabric.agent, "map_current") == (False, "e is left out")
            assert condition(fabric.agent, "membership_answers")[0]
            assert fabric.agent.status().membership == MembershipStatus(map_trouble="e is left out")


async def test_agent_rejoins_after_its_own_delay_when_all_leases_expired(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited = list[StartId]()

    def waits_s(start: StartId) -> float:
        waited.append(start)
        return 0.2

    monkeypatch.setattr(controller_module, "rejoin_wait_s", waits_s)
    other = AgentRecord(AgentId("agent-1"), StartId(b"1" * 16), ())
    async with assembled(replace(SETTINGS, turn_s=0.02)) as fabric:
        store, ours = fabric.membership.store, (fabric.agent.id, StartId(fabric.agent.start_id))

        async def is_back() -> None:
            await until(lambda: store.has(*ours))
            await until(lambda: "no changes" in fabric.agent.status().sentence)

        await fabric.membership.join(other)
        await until(lambda: other.id in fabric.context.routes().map.agents)
        await fabric.membership.leave(*ours)
        await is_back()
        assert not waited, "the other has stayed"
        store.leave(other.id, other.start)
        gone_s = time.monotonic()
        await fabric.membership.leave(*ours)
        await is_back()
        assert waited == [ours[1]]
        assert time.monotonic() - gone_s >= 0.2
        await fabric.membership.leave(*ours)
        await is_back()
        assert waited == [ours[1]], "alone, it makes room for nobody"


async def test_a_shard_claimed_again_is_written_to_again_though_the_stores_answer_was_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    claim = MemoryMembership.claim
    lost = 0

    async def loses_its_answer(*asked: object, **more: object) -> None:
        nonlocal lost
        lost += 1
        await claim(*asked, **more)  # type: ignore[arg-type]  # handed on
        raise MembershipError("the answer was lost")

    settings = replace(SETTINGS, turn_s=0.02, owner=replace(SETTINGS.owner, grant_s=0.3))
    async with assembled(settings) as fabric:
        epoch, shard = fabric.shard.epoch, ShardId(SHARD)
        with monkeypatch.context() as failed_drives:
            failed_drives.setattr(MemoryMembership, "claim", loses_its_answer)
            await fabric.membership.leave(AgentId("agent-0"), StartId(fabric.agent.start_id))
            await until(lambda: lost > 0)
            await until(lambda: fabric.context.routes().map.owner(shard) is not None)
            await until(lambda: not fabric.shard.core.grants.may_write(fabric.agent._clock()))
        await until(lambda: fabric.shard.core.grants.may_write(fabric.agent._clock()))
        assert fabric.shard.epoch == epoch
        assert put_states(await fabric.put(fabric.worker(), [1])) == [PutState.COMMITTED]


async def test_shard_with_an_unreleased_claim_is_served_under_a_higher_epoch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fails(*_asked: object) -> None:
        raise MembershipError("nobody answers")

    async with assembled(replace(SETTINGS, turn_s=0.02)) as fabric:
        owned, epoch, shard = fabric.shard, fabric.shard.epoch, ShardId(SHARD)
        with monkeypatch.context() as failed_drives:
            failed_drives.setattr(MemoryMembership, "release", fails)
            assert await fabric.agent._controller.shards.hand_over(shard)
            assert fabric.membership.map.owner(shard) is not None
        await until(lambda: shard in fabric.service.shards)
        await until(lambda: fabric.shard.epoch > epoch)
        assert fabric.shard is not owned


async def test_epoch_with_a_pending_write_is_not_reused() -> None:
    drive = HeldDrive()
    drive.holds_writes = True
    async with assembled(replace(SETTINGS, turn_s=0.02, drain_s=0.05), drive=drive) as fabric:
        owned, shard = fabric.shard, ShardId(SHARD)
        await until(lambda: bool(drive.held))
        assert owned.epoch == 1
        assert not await fabric.agent._controller.shards.stop(shard)
        shards = fabric.service.shards
        await until(lambda: shard in shards and not shards[shard].core.is_recovering)
        assert fabric.shard.core.highest_epoch == 0, "flash knows of no epoch yet"
        assert fabric.shard.epoch == 2
        assert fabric.shard.withheld == owned.core.grants.segments


async def test_stopped_shard_has_no_valid_claim() -> None:
    async with assembled(replace(SETTINGS, turn_s=60.0)) as fabric:
        controller, shard = fabric.agent._controller, ShardId(SHARD)
        assert controller.claim_validity.shards == {shard}
        await controller._apply(Stop(shard, gives_back=True))
        assert controller.claim_validity.shards == frozenset()


async def test_agent_is_busy_during_a_handover() -> None:
    async with assembled(replace(SETTINGS, turn_s=60.0)) as fabric:
        await fabric.ready()
        controller, shard = fabric.agent._controller, ShardId(SHARD)
        assert not controller.observe().is_busy
        made = await reserved(fabric.shard, [1])
        handing_over = asyncio.create_task(controller.shards.hand_over(shard))
        await until(lambda: controller.observe().handing_over == {shard})
        assert controller.observe().is_busy
        assert controller.observe().served == frozenset()
        assert await committed(fabric.shard, made, [1]) == [PutState.COMMITTED]
        assert await handing_over
        assert not controller.observe().is_busy


async def test_step_for_an_unserved_shard_does_nothing() -> None:
    async with assembled(replace(SETTINGS, turn_s=60.0)) as fabric:
        controller, shard = fabric.agent._controller, ShardId(SHARD)
        await controller._apply(Stop(shard))
        await controller._apply(Stop(shard))
        await controller._apply(Reclaim(shard))
        assert await controller.shards.hand_over(shard)
        assert fabric.service.shards == {}


async def test_a_shard_may_be_closed_twice_at_once() -> None:
    async with assembled(replace(SETTINGS, turn_s=60.0)) as fabric:
        owned, controller, shard = fabric.shard, fabric.agent._controller, ShardId(SHARD)
        assert all(
            await asyncio.gather(controller.shards.hand_over(shard), controller.shards.hand_over(shard))
        )
        assert owned.is_closed


async def test_shard_after_handover_frees_its_memory_when_answers_end() -> None:
    async with assembled(replace(SETTINGS, turn_s=60.0)) as fabric:
        service, shard, now_s = fabric.service, ShardId(SHARD), fabric.agent._clock()
        await fabric.agent._controller.shards.hand_over(shard)
        service.prune()
        assert set(service._former) == {shard}
        service.end_lookups(shard, until_s=now_s)
        service.prune()
        assert service._former == {}


async def test_age_of_conditions_is_tracked_without_queries() -> None:
    async with assembled(replace(SETTINGS, turn_s=0.02)) as fabric:
        agent, clock = fabric.agent, fabric.agent._clock
        fabric.shard.core.ring.unreadable.add(1)
        spoilt_s = clock()
        await until(lambda: clock() > spoilt_s + 0.5)
        asked_s = clock()
        (found,) = (each for each in agent.status().conditions if each.name == "summaries_readable")
        assert not found.is_true
        assert found.since_s >= 0.3
        assert found.since_s <= clock() - spoilt_s
        (ready,) = (each for each in agent.status().conditions if each.name == "ready")
        assert ready.since_s >= asked_s - spoilt_s


@pytest.mark.parametrize(("stopped_s", "is_told"), [(26.0, True), (0.5, False)])
async def test_agent_reports_a_long_suspension(
    stopped_s: float, *, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "ostraca_dpu_agent")
    async with assembled(replace(SETTINGS, turn_s=0.02)) as fabric:
        agent, clock, turns = fabric.agent, fabric.agent._clock, 0
        agent._clock = lambda: clock() + stopped_s  # as after a pause of its process, which stops no clock

        def seen(*, is_whole: bool) -> AgentStatus:
            nonlocal turns
            turns += 1
            return status(is_whole=is_whole)

        status, agent._collect_status = agent._collect_status, seen  # type: ignore[method-assign]  # counts
        await until(lambda: turns == 2)
    said = [each.getMessage() for each in caplog.records if "was suspended" in each.getMessage()]
    words = "agent-0 was suspended for 26 s: the lease may have expired, "
    assert [each[: len(words)] for each in said] == [words] * is_told


def condition(agent: Agent, name: str) -> tuple[bool, str]:
    (found,) = (each for each in agent.status().conditions if each.name == name)
    return found.is_true, found.sentence.rpartition(": ")[2].rstrip(".")


def several(count: int) -> list[HeldDrive]:
    return [HeldDrive(drive=drive_id(ENCLOSURE, f"d{number}")) for number in range(count)]


async def test_refused_claim_does_not_block_other_shards(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where somebody has spoilt its record: neither at the start, nor when a lease has run out."""
    first, *others = several(4)
    claim = MemoryMembership.claim

    async def refuses_one(
        self: MemoryMembership, shard: ShardId, *asked: Any, **more: Any
    ) -> ClaimResult | None:
        if shard == first.shard:
            raise MembershipError("its record is no JSON")
        return await claim(self, shard, *asked, **more)

    with monkeypatch.context() as failed_drives:
        failed_drives.setattr(MemoryMembership, "claim", refuses_one)
        async with assembled(replace(SETTINGS, turn_s=0.02), drive=first, others=others) as fabric:
            served = set(fabric.service.shards)
            assert served == {drive.shard for drive in others}
            fabric.membership.store.leave(fabric.agent.id, fabric.agent.start_id)
            await until(lambda: fabric.agent.status().claims.made == 2 * len(others))
            assert {shard for shard in served if fabric.membership.map.owner(shard)} == served
            failed_drives.undo()
            await until(lambda: fabric.membership.map.owner(first.shard) is not None)
    told = [each for each in caplog.messages if "can't claim shard e/d0/0" in each]
    assert len(told) == 1, "once"
    assert "its record is no JSON" in told[0]


async def test_claims_of_other_agents_take_effect_during_a_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    claim, asked, may_answer = MemoryMembership.claim, asyncio.Event(), asyncio.Event()

    async def slow(self: MemoryMembership, *claimed: Any, **more: Any) -> ClaimResult | None:
        asked.set()
        await may_answer.wait()
        return await claim(self, *claimed, **more)

    first, *others = several(2)
    async with assembled(replace(SETTINGS, turn_s=0.02), drive=first, others=others) as fabric:
        monkeypatch.setattr(MemoryMembership, "claim", slow)
        owned, store = fabric.service.shards[first.shard], fabric.membership.store
        store.leave(fabric.agent.id, fabric.agent.start_id)
        fabric.membership._say_changed()
        await asked.wait()
        other = AgentRecord(AgentId("agent-1"), StartId(b"1" * 16), ())
        store.join(other)
        assert store.claim(first.shard, other.id, other.start, epoch_at_least=OwnerEpoch(1)) is not None
        fabric.membership._say_changed()
        await until(lambda: fabric.context.routes().map.owner(first.shard) == other.id)
        assert owned.core.grants.is_fenced
        may_answer.set()


async def test_agent_waits_for_an_unreachable_store_at_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    claim, tries = MemoryMembership.claim, 0

    async def away_at_first(self: MemoryMembership, *asked: Any, **more: Any) -> ClaimResult | None:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise StoreAwayError("nobody answers")
        return await claim(self, *asked, **more)

    monkeypatch.setattr(MemoryMembership, "claim", away_at_first)
    first, *others = several(2)
    async with assembled(replace(SETTINGS, turn_s=0.02), drive=first, others=others) as fabric:
        await until(lambda: set(fabric.service.shards) == {first.shard, others[0].shard})


async def test_shard_claimed_during_the_agents_end_is_handed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    claim = MemoryMembership.claim
    asked_for, may_be_answered = asyncio.Event(), asyncio.Event()

    async def answers_late(self: MemoryMembership, *asked: Any, **more: Any) -> ClaimResult | None:
        claimed = await claim(self, *asked, **more)
        asked_for.set()
        await may_be_answered.wait()
        return claimed

    drive, late = several(2)
    async with assembled(replace(SETTINGS, turn_s=0.02, drain_s=0.2), drive=drive, later=[late]) as fabric:
        with monkeypatch.context() as slow:
            slow.setattr(MemoryMembership, "claim", answers_late)
            await fabric.membership.put_enclosures([drive.record(late)])
            await asked_for.wait()
        leaving = asyncio.create_task(fabric.agent.hand_over())
        await until(lambda: fabric.membership.map.owner(drive.shard) is None)
        may_be_answered.set()
        await leaving
        await until(lambda: fabric.membership.map.owner(late.shard) is None)
        assert late.shard not in fabric.service.shards


async def test_claim_without_its_recorded_grant_is_not_continued() -> None:
    """As after a rebuild under running agents: a successor would know of nothing that is written."""
    async with assembled(replace(SETTINGS, turn_s=0.02)) as fabric:
        owned, shard, store = fabric.shard, ShardId(SHARD), fabric.membership.store
        assert put_states(await fabric.put(fabric.worker(), [1])) == [PutState.COMMITTED]
        assert owned.core.grants.segments
        del store._grants[shard]
        store.leave(fabric.agent.id, fabric.agent.start_id)
        await until(lambda: fabric.service.shards.get(shard, owned) is not owned)
        await fabric.ready()
        assert fabric.shard.epoch > owned.epoch
        assert fabric.shard.core.grants.segments <= set(store._grants[shard].unretired[-1].segments)
        assert put_states(await fabric.put(fabric.worker(), [1, 2])) == [PutState.EXISTS, PutState.COMMITTED]


async def test_earlier_pins_are_respected_after_a_new_claim(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where it finds the claim that it could not give back, and it was the first that there ever was."""
    settings = replace(SETTINGS, turn_s=0.02, owner=replace(SETTINGS.owner, pin_max_s=20.0))
    async with assembled(settings) as fabric:
        owned, shard, controller = fabric.shard, ShardId(SHARD), fabric.agent._controller
        assert owned.epoch == 1
        assert put_states(await fabric.put(fabric.worker(), [1])) == [PutState.COMMITTED]
        release, failures = MemoryMembership.release, iter([True])

        async def fails_once(self: MemoryMembership, *asked: Any) -> None:
            if next(failures, False):
                raise MembershipError("nobody answers")
            await release(self, *asked)

        monkeypatch.setattr(MemoryMembership, "release", fails_once)
        begun_s = fabric.agent._clock()
        await controller.shards.hand_over(shard)
        await until(lambda: fabric.service.shards.get(shard, owned) is not owned)
        await fabric.ready()
        held = [each for each in fabric.shard.core.ring.segments if each.state is SegmentState.SEALED]
        assert held
        assert all(segment.quiet_at_s >= begun_s + 20.0 for segment in held)


async def test_shard_without_a_capable_successor_is_not_handed_over_repeatedly() -> None:
    drives = several(8)
    settings = replace(SETTINGS, turn_s=0.02, drain_s=0.2)
    async with assembled(settings, drive=drives[0], others=drives[1:]) as fabric:
        blind = another_agent(1, settings, (), fabric.membership, fabric.owners, ())
        await blind.join()
        await blind.start()

        def owners() -> set[AgentId | None]:
            return {fabric.membership.map.owner(drive.shard) for drive in drives}

        await until(lambda: None in owners())
        await until(lambda: owners() == {fabric.agent.id})
        assert fabric.agent._controller.observe().is_backing_off
        assert fabric.agent._controller.claim_validity.counts.handed_over == 1
        assert await stop(blind)
        blind.unmap()
