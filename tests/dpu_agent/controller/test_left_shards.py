"""What an agent answers for a shard that it owned until lately."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.dpu_agent.controller.test_takeover import QUICK, SECOND, THE_SHARD, pair
from tests.support.agent.assembly import ENCLOSURE, assembled, chain_of, put_states, reserved, until

from ostraca_dpu_agent.controller.recovery import read_slices
from ostraca_dpu_agent.shards.service import OwnerService
from ostraca_fabric.model.fabric_map import Claim
from ostraca_fabric.model.ids import AgentId, OwnerEpoch, ShardId, StartId
from ostraca_fabric.model.outcome import PutState
from ostraca_fabric.tables.digests import derive_keys
from ostraca_fabric.wire.messages import Resolve, Resolved, ShardKeys

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from tests.support.agent.assembly import Assembly

    from ostraca_fabric.wire.messages import ShardExtents

ONE, OTHER = AgentId("one"), AgentId("other")


@pytest.mark.parametrize(
    ("owner", "epochs_later", "is_answered"),
    [
        (None, 0, True),
        (OTHER, 1, True),
        (ONE, 1, True),  # nobody else could take it
        (ONE, 2, False),  # somebody has, and written to it perhaps
        (OTHER, 2, False),
    ],
)
async def test_previous_owner_answers_unless_another_owned_the_shard_since(
    owner: AgentId | None, epochs_later: int, is_answered: bool
) -> None:
    async with assembled() as fabric:
        await fabric.ready()
        await fabric.put(fabric.worker(), range(4))
        shard, claims = fabric.shard.record.id, dict[ShardId, Claim]()
        service = OwnerService(lambda: 0.0, fabric.service.events, claims.get)
        service.serve(fabric.shard)
        left = OwnerEpoch(7)  # while it is read, it does not know it itself
        service.hand_over(shard, left)
        if owner is not None:
            epoch = OwnerEpoch(left + epochs_later)
            claims[shard] = Claim(owner, StartId(bytes(16)), epoch)
        keys = derive_keys(fabric.volume.secret, chain_of(range(6)))
        answer = service.answer(Resolve(1, 1.0, 0.0, (ShardKeys(shard, keys.tobytes()),), is_brief=True))
        assert isinstance(answer, Resolved)
        (said,) = answer.shards
        assert said.is_owner == is_answered
        assert list(said.found) == ([1] * 4 + [0] * 2 if is_answered else [])
        assert said.known_owner == ("" if is_answered or owner is None else owner)


def asked(fabric: Assembly, numbers: Sequence[int]) -> ShardExtents:
    """Ask the agent itself which blocks it knows of."""
    keys = derive_keys(fabric.volume.secret, chain_of(numbers))
    request = Resolve(1, 1.0, 0.0, (ShardKeys(THE_SHARD, keys.tobytes()),), is_brief=True)
    answer = fabric.service.answer(request)
    assert isinstance(answer, Resolved)
    return answer.shards[0]


async def test_shard_handed_over_during_recovery_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    has_read, may_end = asyncio.Event(), asyncio.Event()

    async def held(*given: Any) -> AsyncIterator[Any]:
        async for part in read_slices(*given):
            yield part
            has_read.set()
            await may_end.wait()

    async with assembled(QUICK) as fabric:
        await fabric.ready()
        await fabric.put(fabric.worker(), range(4))
        monkeypatch.setattr("ostraca_dpu_agent.controller.served_shard.read_slices", held)
        store, shards = fabric.membership.store, fabric.agent._controller.shards
        store.leave(fabric.agent.id, fabric.agent.start_id)
        store.lose_grants([THE_SHARD])  # so it begins anew
        fabric.membership._say_changed()
        await has_read.wait()
        await until(lambda: asked(fabric, range(4)).found == bytes([1] * 4))
        shards.is_ending.set()
        handing_over = asyncio.create_task(shards.hand_over(THE_SHARD))
        await asyncio.sleep(0)
        may_end.set()
        await handing_over
        claim = Claim(OTHER, StartId(bytes(16)), OwnerEpoch(store._grants[THE_SHARD].epoch + 1))
        store._publish(claims={THE_SHARD: claim})
        said = asked(fabric, range(6))
        assert (said.is_owner, said.found) == (True, bytes([1] * 4 + [0] * 2))


async def test_old_index_does_not_answer_after_new_writes() -> None:
    async with assembled(QUICK) as fabric:
        await fabric.ready()
        await fabric.put(fabric.worker(), range(4))
        first, shards = fabric.shard, fabric.agent._controller.shards
        shards.begin_hand_over(THE_SHARD)
        await until(lambda: THE_SHARD in fabric.service.shards and fabric.shard is not first)
        await until(lambda: not fabric.shard.core.is_recovering)
        await fabric.ready()
        assert put_states(await fabric.put(fabric.worker(), range(4, 6))) == [PutState.COMMITTED] * 2
        stopping = asyncio.create_task(shards.stop(THE_SHARD))  # as where its drive breaks
        await asyncio.sleep(0)
        assert not asked(fabric, range(6)).is_owner
        await stopping


async def test_shard_removed_from_the_map_frees_its_memory() -> None:
    async with assembled(QUICK) as fabric:
        await fabric.ready()
        shards = fabric.agent._controller.shards
        shards.is_ending.set()  # so nobody takes it
        await shards.hand_over(THE_SHARD)
        assert set(fabric.service._former) == {THE_SHARD}
        await fabric.membership.put_enclosures([], removed=[ENCLOSURE])
        await until(lambda: not fabric.service._former)


async def test_shard_with_a_successor_during_handover_frees_its_memory() -> None:
    async with pair(replace(QUICK, drain_s=0.5)) as agents:
        await agents.fabric.ready()
        made = await reserved(agents.first_shard, [1], hold_s=0.2)
        assert len(made.reservations) == 1
        shards = agents.fabric.agent._controller.shards
        handing_over = asyncio.create_task(shards.hand_over(THE_SHARD))
        await until(lambda: THE_SHARD in shards.handing_over)
        claim = Claim(SECOND, agents.second.start_id, OwnerEpoch(agents.first_shard.epoch + 1))
        agents.store._publish(claims={THE_SHARD: claim})
        agents.fabric.membership._say_changed()
        await handing_over
        await until(lambda: not agents.fabric.service._former)
