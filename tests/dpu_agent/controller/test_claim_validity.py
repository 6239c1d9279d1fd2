"""Fences are put off while the store says that the agent's record stands, and by nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator

import numpy as np
import pytest
from tests.dpu_agent.shards.test_ownership import Clock, owned
from tests.support.agent.assembly import FABRIC, SHARD, HeldDrive

from ostraca_dpu_agent.controller.claim_validity import ClaimValidity
from ostraca_dpu_agent.shards.shard import OwnedShard
from ostraca_fabric.membership.memory_membership import MemoryMembership
from ostraca_fabric.model.fabric_map import AgentRecord
from ostraca_fabric.model.ids import AgentId, OwnerEpoch, ShardId, StartId

ME = AgentRecord(AgentId("agent-0"), StartId(bytes(16)), ())
GRANT_S = 5.0


class Asked:
    """An agent's claim of one shard, and a store to ask."""

    def __init__(self, shard: OwnedShard) -> None:
        self.shard = shard
        self.now_s = 1e9
        self.store = MemoryMembership(FABRIC)
        self.claim_validity = ClaimValidity(ME, self.store, grant_s=GRANT_S, clock=lambda: self.now_s)

    async def claimed(self) -> None:
        await self.store.join(ME)
        self.claim_validity.add(self.shard, requested_s=self.now_s)

    @property
    def fence_in_s(self) -> float:
        return self.shard.core.grants.until_s - self.now_s

    async def asked_after(self, seconds: float) -> None:
        """Let the store be asked once more, so much later."""
        self.now_s += seconds
        await self.claim_validity._confirm()


@pytest.fixture
async def asked() -> AsyncIterator[Asked]:
    async with owned(HeldDrive(), Clock()) as shard:
        made = Asked(shard)
        await made.claimed()
        yield made


async def test_a_fence_is_put_off_while_the_agents_record_stands(asked: Asked) -> None:
    assert asked.fence_in_s == GRANT_S
    await asked.asked_after(3.0)
    assert asked.fence_in_s == GRANT_S


async def test_a_fence_is_not_put_off_once_the_agents_record_is_gone(asked: Asked) -> None:
    await asked.store.leave(ME.id, ME.start)
    await asked.asked_after(3.0)
    assert asked.fence_in_s == GRANT_S - 3.0
    await asked.asked_after(1.0)
    assert asked.fence_in_s == GRANT_S - 4.0


async def test_fence_is_not_extended_for_released_or_lost_claims(asked: Asked) -> None:
    shard = ShardId(SHARD)
    for ends in (asked.claim_validity.drop, asked.claim_validity.remove_lost):
        asked.claim_validity.add(asked.shard, requested_s=asked.now_s)
        assert asked.claim_validity.shards == {shard}
        ends(shard)
        assert asked.claim_validity.shards == frozenset()
        await asked.asked_after(3.0)
        assert asked.fence_in_s == GRANT_S - 3.0


async def test_higher_epoch_triggers_a_single_confirmation(asked: Asked) -> None:
    doubts: list[float] = []
    asked.shard.on_doubt = lambda: doubts.append(asked.now_s)
    none, tags = np.empty(0, np.uint64), np.empty((0, 16), np.uint8)
    for _ in range(3):
        await asked.shard.commit(none, tags, none, epoch=OwnerEpoch(asked.shard.epoch + 1))
    assert doubts == [asked.now_s]
    await asked.shard.commit(none, tags, none, epoch=asked.shard.epoch)
    assert len(doubts) == 1
