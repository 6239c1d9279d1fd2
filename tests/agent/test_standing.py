"""Fences are put off while the store says that the agent's record stands, and by nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator

import numpy as np
import pytest
from tests.agent.assembly import FABRIC, SHARD, HeldDrive
from tests.agent.test_among_owners import Clock, owned

from ostraca_dpu_agent.owner.shard import OwnedShard
from ostraca_dpu_agent.steward.standing import Standing
from ostraca_fabric.adapters.memory_membership import MemoryMembership
from ostraca_fabric.fabric_map import AgentRecord
from ostraca_fabric.ids import AgentId, OwnerEpoch, ShardId, StartId

ME = AgentRecord(AgentId("agent-0"), StartId(bytes(16)), ())
GRANT_S = 5.0


class Asked:
    """An agent's claim of one shard, and a store to ask."""

    def __init__(self, shard: OwnedShard) -> None:
        self.shard = shard
        self.now_s = 1e9
        self.store = MemoryMembership(FABRIC)
        self.standing = Standing(ME, self.store, grant_s=GRANT_S, clock=lambda: self.now_s)

    async def claimed(self) -> None:
        await self.store.join(ME)
        self.standing.claimed(self.shard, asked_s=self.now_s)

    @property
    def fence_in_s(self) -> float:
        return self.shard.core.grants.until_s - self.now_s

    async def asked_after(self, seconds: float) -> None:
        """Let the store be asked once more, so much later."""
        self.now_s += seconds
        await self.standing._ask()


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


async def test_a_fence_is_not_put_off_for_a_claim_that_is_given_up_or_lost(asked: Asked) -> None:
    shard = ShardId(SHARD)
    for ends in (asked.standing.given_up, asked.standing.lost):
        asked.standing.claimed(asked.shard, asked_s=asked.now_s)
        assert asked.standing.shards == {shard}
        ends(shard)
        assert asked.standing.shards == frozenset()
        await asked.asked_after(3.0)
        assert asked.fence_in_s == GRANT_S - 3.0


async def test_an_owner_that_hears_of_a_higher_epoch_has_the_store_asked_once(asked: Asked) -> None:
    doubts: list[float] = []
    asked.shard.when_doubted = lambda: doubts.append(asked.now_s)
    none, tags = np.empty(0, np.uint64), np.empty((0, 16), np.uint8)
    for _ in range(3):
        await asked.shard.commit(none, tags, none, epoch=OwnerEpoch(asked.shard.epoch + 1))
    assert doubts == [asked.now_s]
    await asked.shard.commit(none, tags, none, epoch=asked.shard.epoch)
    assert len(doubts) == 1
