"""A steward's turns on a running agent."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest
from tests.agent.assembly import SETTINGS, SHARD, HeldDrive, assembled, put_states, until

from ostraca_dpu_agent.agent import Agent
from ostraca_dpu_agent.steward.plan import Reclaim, Stop
from ostraca_fabric.adapters.memory_membership import MemoryMembership
from ostraca_fabric.errors import MembershipError
from ostraca_fabric.fabric_map import AgentRecord
from ostraca_fabric.ids import AgentId, OwnerEpoch, ShardId, StartId
from ostraca_fabric.outcome import PutState, Reason
from ostraca_fabric.status import AgentStatus, ClaimCounters


async def test_a_shard_whose_drive_failed_a_read_is_opened_a_while_later() -> None:
    drive = HeldDrive()
    drive.fail_reads(0, 8192)
    async with assembled(replace(SETTINGS, turn_s=0.02, open_again_s=0.2), drive=drive) as fabric:
        assert fabric.service.shards == {}
        drive.mend()
        await until(lambda: ShardId(SHARD) in fabric.service.shards)
        await fabric.ready()
        assert put_states(await fabric.put(fabric.worker(), [1])) == [PutState.COMMITTED]


async def test_a_claim_that_ran_out_is_claimed_again_and_nothing_was_lost(
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
        with monkeypatch.context() as broken:
            broken.setattr(MemoryMembership, "claim", fails)
            await fabric.membership.leave(AgentId("agent-0"), StartId(fabric.agent.start_id))
            await until(lambda: failures > 1)
            assert fabric.membership.map.owner(shard) is None
            assert fabric.service.shards[shard] is owned
        await until(lambda: fabric.mover.routes().map.owner(shard) is not None)
        assert fabric.shard is owned
        assert fabric.shard.epoch == epoch
        assert fabric.agent.status().claims == ClaimCounters(made=2, lost=1)
        assert put_states(await fabric.put(worker, [1, 2])) == [PutState.EXISTS, PutState.COMMITTED]


async def test_a_shard_that_another_agent_claimed_meanwhile_is_served_no_more() -> None:
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


async def test_a_claim_that_is_another_agent_s_all_at_once_counts_as_lost() -> None:
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
        raise MembershipError("nobody answers")

    settings = replace(SETTINGS, owner=replace(SETTINGS.owner, grant_s=0.3))
    async with assembled(settings) as fabric:
        worker = fabric.worker()
        assert put_states(await fabric.put(worker, [1])) == [PutState.COMMITTED]
        with monkeypatch.context() as broken:
            broken.setattr(MemoryMembership, "confirm", silent)
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
        with monkeypatch.context() as broken:
            broken.setattr(MemoryMembership, "claim", loses_its_answer)
            await fabric.membership.leave(AgentId("agent-0"), StartId(fabric.agent.start_id))
            await until(lambda: lost > 0)
            await until(lambda: fabric.mover.routes().map.owner(shard) is not None)
            await until(lambda: not fabric.shard.core.grants.may_write(fabric.agent._clock()))
        await until(lambda: fabric.shard.core.grants.may_write(fabric.agent._clock()))
        assert fabric.shard.epoch == epoch
        assert put_states(await fabric.put(fabric.worker(), [1])) == [PutState.COMMITTED]


async def test_a_shard_whose_claim_could_not_be_given_back_is_served_anew_under_a_higher_epoch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fails(*_asked: object) -> None:
        raise MembershipError("nobody answers")

    async with assembled(replace(SETTINGS, turn_s=0.02)) as fabric:
        owned, epoch, shard = fabric.shard, fabric.shard.epoch, ShardId(SHARD)
        with monkeypatch.context() as broken:
            broken.setattr(MemoryMembership, "release", fails)
            assert await fabric.agent._steward._hand_over(shard)
            assert fabric.membership.map.owner(shard) is not None
        await until(lambda: shard in fabric.service.shards)
        await until(lambda: fabric.shard.epoch > epoch)
        assert fabric.shard is not owned


async def test_a_step_for_a_shard_that_is_served_no_more_does_nothing() -> None:
    async with assembled(replace(SETTINGS, turn_s=60.0)) as fabric:
        steward, shard = fabric.agent._steward, ShardId(SHARD)
        await steward._apply(Stop(shard))
        await steward._apply(Stop(shard))
        await steward._apply(Reclaim(shard))
        assert await steward._hand_over(shard)
        assert fabric.service.shards == {}


async def test_a_shard_may_be_closed_twice_at_once() -> None:
    async with assembled(replace(SETTINGS, turn_s=60.0)) as fabric:
        owned, steward, shard = fabric.shard, fabric.agent._steward, ShardId(SHARD)
        assert all(await asyncio.gather(steward._hand_over(shard), steward._hand_over(shard)))
        assert owned.is_closed


async def test_a_shard_that_was_left_takes_no_memory_once_it_is_answered_for_no_longer() -> None:
    async with assembled(replace(SETTINGS, turn_s=60.0)) as fabric:
        service, shard, now_s = fabric.service, ShardId(SHARD), fabric.agent._clock()
        await fabric.agent._steward._hand_over(shard)
        service.prune()
        assert set(service._left) == {shard}
        service.succeeded(shard, until_s=now_s)
        service.prune()
        assert service._left == {}


async def test_since_when_a_condition_is_so_is_known_though_nobody_has_asked() -> None:
    async with assembled(replace(SETTINGS, turn_s=0.02)) as fabric:
        agent, clock = fabric.agent, fabric.agent._clock
        fabric.shard.fence()
        fenced_s = clock()
        await until(lambda: clock() > fenced_s + 0.5)
        asked_s = clock()
        (found,) = (each for each in agent.status().conditions if each.name == "shards_writable")
        assert not found.is_true
        assert found.since_s >= 0.3
        assert found.since_s <= clock() - fenced_s
        (ready,) = (each for each in agent.status().conditions if each.name == "ready")
        assert ready.since_s >= asked_s - fenced_s


@pytest.mark.parametrize(("stopped_s", "is_told"), [(26.0, True), (0.5, False)])
async def test_an_agent_that_was_stopped_for_long_says_so(
    stopped_s: float, *, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "ostraca_dpu_agent")
    async with assembled(replace(SETTINGS, turn_s=0.02)) as fabric:
        agent, clock, turns = fabric.agent, fabric.agent._clock, 0
        agent._clock = lambda: clock() + stopped_s  # as after a pause of its process, which stops no clock

        def seen(*, has_pools: bool) -> AgentStatus:
            nonlocal turns
            turns += 1
            return status(has_pools=has_pools)

        status, agent._seen = agent._seen, seen  # type: ignore[method-assign]  # counts
        await until(lambda: turns == 2)
    said = [each.getMessage() for each in caplog.records if "was stopped" in each.getMessage()]
    words = "agent-0 was stopped, or could do nothing, for 26 s: its lease may have ended meanwhile, "
    assert [each[: len(words)] for each in said] == [words] * is_told


def condition(agent: Agent, name: str) -> tuple[bool, str]:
    (found,) = (each for each in agent.status().conditions if each.name == name)
    return found.is_true, found.sentence.rpartition(": ")[2].rstrip(".")
