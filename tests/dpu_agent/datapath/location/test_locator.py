"""What owners have pinned for one request is given back also where who asks is cancelled."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.dpu_agent.datapath.location.test_routing import E, fabric_map

from ostraca_dpu_agent.datapath.location.locator import Locator, OwnerQuery
from ostraca_dpu_agent.datapath.location.routing import Routes, ShardPart
from ostraca_fabric.model.ids import AgentId, PlacementEpoch, ShardId
from ostraca_fabric.wire.messages import Release, Resolve, Resolved, ShardExtents

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any

    from ostraca_fabric.wire.messages import AgentRequest, AnswerToAgent, OwnerNotice

OWN, FAR, FARTHER = AgentId("own"), AgentId("far"), AgentId("farther")


class SlowOwners:
    """The port ``Owners``: each but ``OWN`` answers once it may. Each answer pins what it finds."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.pinned = Counter[ShardId]()

    def ask(self, agent: AgentId, request: AgentRequest) -> Coroutine[Any, Any, AnswerToAgent]:
        return self._answer(agent, request)

    async def _answer(self, agent: AgentId, request: AgentRequest) -> AnswerToAgent:
        if agent != OWN:
            await self.may_answer.wait()
        assert isinstance(request, Resolve)
        self.pinned.update(ShardId(part.shard) for part in request.shards)
        return Resolved(
            request.request,
            tuple(
                ShardExtents(
                    part.shard, is_owner=True, owner_epoch=1, found=bytes([1] * (len(part.keys) // 16)), pin=7
                )
                for part in request.shards
            ),
        )

    def tell(self, agent: AgentId, notice: OwnerNotice) -> None:
        assert agent in (OWN, FAR, FARTHER)
        assert isinstance(notice, Release)
        assert all(part.pins == (7,) for part in notice.shards)
        self.pinned.subtract(ShardId(part.shard) for part in notice.shards)


@pytest.mark.parametrize("others", [[FAR], [FAR, FARTHER]])
@pytest.mark.parametrize("turns", range(6))
async def test_who_is_cancelled_gives_back_whatever_owners_have_pinned_or_pin_later(
    others: list[AgentId], turns: int
) -> None:
    owners = SlowOwners()
    locator = Locator(OWN, owners, {})
    keys = np.zeros((1 + len(others), 16), np.uint8)
    query = OwnerQuery(locator, Routes(fabric_map(E)), keys, Resolve(0, 20.0, 1.0, (), is_brief=True))
    parts = {
        owner: [ShardPart(shard.id, np.array([number], np.intp), 0, PlacementEpoch(10))]
        for number, (owner, shard) in enumerate(zip((OWN, *others), E.shards, strict=False))
    }
    asking = asyncio.ensure_future(query.run(parts))
    while not owners.pinned:  # noqa: ASYNC110 (until this agent itself has answered)
        await asyncio.sleep(0)
    owners.may_answer.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    asking.cancel()
    (said,) = await asyncio.gather(asking, return_exceptions=True)
    assert await locator.tasks.finish(within_s=5.0)
    assert set(owners.pinned) == {part.shard for its in parts.values() for part in its}
    is_cancelled = isinstance(said, asyncio.CancelledError)
    assert set(owners.pinned.values()) == {0 if is_cancelled else 1}
