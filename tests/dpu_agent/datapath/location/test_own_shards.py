"""Blocks of an agent's own shards: a pass over all shards finds the same as a question to each."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.dpu_agent.datapath.location.test_locator import SuspectDrive
from tests.dpu_agent.datapath.location.test_routing import AGENTS, SPANS, D, E, fabric_map
from tests.dpu_agent.datapath.test_space import VOLUME
from tests.fabric.policies.test_placement import SECRET
from tests.support.simulated.drives.memory_drive import MemoryDrive

from ostraca_dpu_agent.datapath.location.locator import Locator
from ostraca_dpu_agent.datapath.location.routing import Routes
from ostraca_fabric.model.extent import MIB
from ostraca_fabric.model.outcome import Reason
from ostraca_fabric.ports.owners import GivenSpace, LocalShards, ShardAnswer, WantedSpace
from ostraca_fabric.wire.messages import Resolve, Resolved, ShardExtents

if TYPE_CHECKING:
    from collections.abc import Sequence
    from collections.abc import Set as AbstractSet

    from numpy.typing import NDArray

    from ostraca_fabric.model.ids import AgentId, PlacementEpoch, ShardId
    from ostraca_fabric.wire.messages import AgentRequest, AnswerToAgent, OwnerNotice, Reserve

OWN = AGENTS[0]
BLOCKS = sum(map(len, SPANS))
KEYS = np.arange(2 * BLOCKS, dtype=np.uint64).view(np.uint8).reshape(BLOCKS, 16)
SHARDS = [shard for each in (D, E) for shard in each.shards]
ROUTES = Routes(fabric_map(D, E))


class KnownBlocks(LocalShards):
    """The ports ``LocalShards`` and ``Owners`` over one set of blocks; notes who is asked for which."""

    def __init__(self, known: AbstractSet[bytes], recovering: AbstractSet[ShardId]) -> None:
        self._known = known
        self._recovering = recovering
        self.asked: list[tuple[AgentId, bytes]] = []

    def is_whole(self, shard: ShardId) -> bool:
        return shard not in self._recovering

    def has(
        self,
        runs: Sequence[tuple[ShardId | None, int]],
        placement_epoch: PlacementEpoch,
        keys: NDArray[np.uint8],
        terms: Resolve,
    ) -> NDArray[np.bool_]:
        assert placement_epoch == ROUTES.map.placement_epoch
        is_asked = np.repeat([shard is not None for shard, _ in runs], [count for _, count in runs])
        assert len(is_asked) == len(keys)
        is_found = np.zeros(len(keys), np.bool_)
        is_found[is_asked] = self._find(OWN, keys[is_asked])
        return is_found

    def resolve(
        self, shard: ShardId, placement_epoch: PlacementEpoch, keys: NDArray[np.uint8], terms: Resolve
    ) -> ShardAnswer:
        is_found = self._find(OWN, keys)
        return ShardAnswer(is_owner=True, is_found=is_found, is_recovering=shard in self._recovering)

    def reserve(self, wanted: Sequence[WantedSpace], terms: Reserve) -> list[GivenSpace]:
        pytest.fail("a look-up reserves no space")

    async def ask(self, agent: AgentId, request: AgentRequest) -> AnswerToAgent:
        assert isinstance(request, Resolve)
        return Resolved(
            request.request,
            tuple(
                ShardExtents(
                    part.shard,
                    is_owner=True,
                    owner_epoch=1,
                    found=self._find(agent, np.frombuffer(part.keys, np.uint8).reshape(-1, 16)).tobytes(),
                    is_recovering=part.shard in self._recovering,
                )
                for part in request.shards
            ),
        )

    def notice(self, notice: OwnerNotice) -> None:
        pass

    def tell(self, agent: AgentId, notice: OwnerNotice) -> None:
        pass

    def _find(self, agent: AgentId, keys: NDArray[np.uint8]) -> NDArray[np.bool_]:
        self.asked += [(agent, key.tobytes()) for key in keys]
        return np.array([key.tobytes() in self._known for key in keys], np.bool_)


@pytest.mark.parametrize("seed", range(24))
async def test_the_pass_finds_what_each_shard_would_tell(seed: int) -> None:
    dice = np.random.default_rng(seed)
    known = {key.tobytes() for key in KEYS[dice.random(BLOCKS) < dice.random()]}
    recovering = {shard.id for shard in SHARDS if dice.random() < seed % 3 / 4}
    drives = {
        shard.drive: (SuspectDrive if dice.random() < seed % 4 / 5 else MemoryDrive)(shard.drive, MIB)
        for shard in SHARDS
    }
    wanted = dice.random(BLOCKS) < dice.choice([0.0, 0.5, 0.9, 1.0])
    volume = replace(VOLUME, placement_secret=SECRET)

    def locator() -> tuple[Locator, KnownBlocks]:
        blocks = KnownBlocks(known, recovering)
        return Locator(OWN, blocks, drives, blocks), blocks

    plain, asked_each = locator()
    locations = await plain.locate(
        ROUTES, volume, SPANS, KEYS, wanted=wanted, within_s=5.0, pin_s=0.0, is_brief=True
    )
    swift, asked_at_once = locator()
    is_found, reasons = await swift.exist(ROUTES, volume, SPANS, KEYS, wanted=wanted, within_s=5.0)
    assert is_found.tolist() == locations.is_found.tolist()
    is_absent = ~is_found
    assert reasons[is_absent].tolist() == locations.reasons[is_absent].tolist()
    assert sorted(asked_at_once.asked) == sorted(asked_each.asked)
    assert len(asked_each.asked) == np.count_nonzero(wanted), "each wanted block is asked for once"


async def test_a_block_without_a_shard_has_no_owner() -> None:
    blocks = KnownBlocks({key.tobytes() for key in KEYS}, set())
    everything = np.ones(BLOCKS, np.bool_)
    volume = replace(VOLUME, placement_secret=SECRET)
    is_found, reasons = await Locator(OWN, blocks, {}, blocks).exist(
        Routes(fabric_map()), volume, SPANS, KEYS, wanted=everything, within_s=5.0
    )
    assert not is_found.any()
    assert set(reasons.tolist()) == {Reason.NO_OWNER}
    assert not blocks.asked
