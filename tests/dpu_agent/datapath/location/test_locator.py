"""Answers of owners: pins of cancelled requests, and reasons of misses."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest
from tests.dpu_agent.datapath.location.test_routing import E, fabric_map
from tests.dpu_agent.datapath.test_space import VOLUME
from tests.fabric.policies.test_placement import SECRET
from tests.support.agent.assembly import chain_of
from tests.support.simulated.drives.memory_drive import MemoryDrive

from ostraca_dpu_agent.datapath.location.locator import Locator, OwnerQuery
from ostraca_dpu_agent.datapath.location.routing import Routes, ShardPart
from ostraca_fabric.model.extent import MIB
from ostraca_fabric.model.ids import AgentId, PlacementEpoch, ShardId
from ostraca_fabric.model.outcome import Reason
from ostraca_fabric.ports.owners import ShardAnswer
from ostraca_fabric.wire.messages import Release, Resolve, Resolved, ShardExtents

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any

    from numpy.typing import NDArray

    from ostraca_fabric.ports.owners import LocalShards
    from ostraca_fabric.wire.messages import AgentRequest, AnswerToAgent, OwnerNotice

OWN, FAR, FARTHER = AgentId("own"), AgentId("far"), AgentId("farther")


class SlowOwners:
    """The port ``Owners``: each but ``OWN`` answers once it may. Each answer pins what it finds."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.pinned = Counter[ShardId]()

    def resolve(
        self, shard: ShardId, placement_epoch: PlacementEpoch, keys: NDArray[np.uint8], terms: Resolve
    ) -> ShardAnswer:
        """Answer at once, as the owner of this agent."""
        self.pinned[shard] += 1
        return ShardAnswer(is_owner=True, is_found=np.ones(len(keys), np.bool_), pin=7)

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
    locator = Locator(OWN, owners, {}, cast("LocalShards", owners))
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


class PartialOwners:
    """The port ``Owners``: each knows the first of the asked blocks, out of a whole shard or a part."""

    def __init__(self, *, is_recovering: bool) -> None:
        self._is_recovering = is_recovering

    async def ask(self, agent: AgentId, request: AgentRequest) -> AnswerToAgent:
        assert isinstance(request, Resolve)
        found = [bytes([1]) + bytes(len(part.keys) // 16 - 1) for part in request.shards]
        return Resolved(
            request.request,
            tuple(
                ShardExtents(
                    part.shard, is_owner=True, owner_epoch=1, found=each, is_recovering=self._is_recovering
                )
                for part, each in zip(request.shards, found, strict=True)
            ),
        )

    def tell(self, agent: AgentId, notice: OwnerNotice) -> None:
        pass


class SuspectDrive(MemoryDrive):
    """A drive behind an open circuit breaker."""

    refuses_reads = True


@pytest.mark.parametrize("is_recovering", [False, True])
@pytest.mark.parametrize("is_suspect", [False, True])
async def test_an_open_circuit_breaker_hides_no_recovery(is_suspect: bool, is_recovering: bool) -> None:
    unknown = Reason.RECOVERING if is_recovering else Reason.NOT_FOUND
    kind = SuspectDrive if is_suspect else MemoryDrive
    drives = {shard.drive: kind(shard.drive, MIB) for shard in E.shards}
    spans = chain_of(range(64))
    owners = PartialOwners(is_recovering=is_recovering)
    locations = await Locator(AgentId("x"), owners, drives, cast("LocalShards", owners)).locate(
        Routes(fabric_map(E)),
        replace(VOLUME, placement_secret=SECRET),
        spans,
        np.zeros((64, 16), np.uint8),
        wanted=np.ones(64, np.bool_),
        within_s=5.0,
        pin_s=0.0,
        is_brief=True,
    )
    found = [*map(Reason, locations.reasons[locations.is_found])]
    absent = Counter(map(Reason, locations.reasons[~locations.is_found]))
    if is_suspect:
        assert not found
        assert absent == {unknown: 61, Reason.DRIVE_SUSPECT: 3}
    else:
        assert len(found) == 3
        assert absent == {unknown: 61}
