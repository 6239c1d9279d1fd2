"""A steward's turns on a running agent."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.agent.assembly import ENCLOSURE, SETTINGS, SHARD, HeldDrive, assembled, put_states, until

from ostraca_dpu_agent.agent import Agent
from ostraca_fabric.adapters.memory_membership import MemoryMembership
from ostraca_fabric.errors import MembershipError
from ostraca_fabric.ids import AgentId, OwnerEpoch, ShardId, StartId
from ostraca_fabric.outcome import PutState


async def test_a_shard_whose_drive_failed_a_read_is_opened_a_while_later() -> None:
    drive = HeldDrive()
    drive.fail_reads(0, 8192)
    async with assembled(replace(SETTINGS, turn_s=0.02, open_again_s=0.2), drive=drive) as fabric:
        assert fabric.service.shards == {}
        drive.mend()
        await until(lambda: ShardId(SHARD) in fabric.service.shards)
        await fabric.ready()
        assert put_states(await fabric.put(fabric.worker(), [1])) == [PutState.COMMITTED]


async def test_a_claim_that_is_lost_ends_service_and_a_store_that_fails_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failures = 0

    async def fails(*_asked: object, **_more: object) -> OwnerEpoch | None:
        nonlocal failures
        failures += 1
        raise MembershipError("nobody answers")

    async with assembled(replace(SETTINGS, turn_s=0.02)) as fabric:
        first, shard = fabric.shard.epoch, ShardId(SHARD)
        with monkeypatch.context() as broken:
            broken.setattr(MemoryMembership, "claim", fails)
            await fabric.membership.release(shard, AgentId("agent-0"), StartId(fabric.agent.start_id))
            await until(lambda: failures > 1)
            assert fabric.service.shards == {}
            assert membership_answers(fabric.agent) == (False, "nobody answers")
        await until(lambda: fabric.mover.routes().map.owner(shard) is not None)
        assert fabric.shard.epoch > first
        assert put_states(await fabric.put(fabric.worker(), [1])) == [PutState.COMMITTED]
        assert ENCLOSURE in fabric.membership.map.enclosures
        await until(lambda: membership_answers(fabric.agent)[0])


def membership_answers(agent: Agent) -> tuple[bool, str]:
    (found,) = (each for each in agent.status().conditions if each.name == "membership_answers")
    return found.is_true, found.sentence.rpartition(": ")[2].rstrip(".")
