"""What an agent answers for a shard that it owned until lately."""

from __future__ import annotations

import pytest
from tests.agent.assembly import assembled, chain_of

from ostraca_dpu_agent.owner.service import OwnerService
from ostraca_fabric.fabric_map import Claim
from ostraca_fabric.ids import AgentId, OwnerEpoch, ShardId, StartId
from ostraca_fabric.keys import derive_keys
from ostraca_fabric.wire.messages import Resolve, Resolved, ShardKeys

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
async def test_a_shard_that_was_left_is_answered_for_unless_it_was_owned_in_between(
    owner: AgentId | None, epochs_later: int, is_answered: bool
) -> None:
    async with assembled() as fabric:
        await fabric.ready()
        await fabric.put(fabric.worker(), range(4))
        shard, claims = fabric.shard.record.id, dict[ShardId, Claim]()
        service = OwnerService(lambda: 0.0, fabric.service.events, claims.get)
        service.own(fabric.shard)
        service.leave(shard)
        if owner is not None:
            epoch = OwnerEpoch(fabric.shard.epoch + epochs_later)
            claims[shard] = Claim(owner, StartId(bytes(16)), epoch)
        keys = derive_keys(fabric.volume.secret, chain_of(range(6)))
        answer = service.answer(Resolve(1, 1.0, 0.0, (ShardKeys(shard, keys.tobytes()),), is_brief=True))
        assert isinstance(answer, Resolved)
        (said,) = answer.shards
        assert said.is_owner == is_answered
        assert list(said.found) == ([1] * 4 + [0] * 2 if is_answered else [])
        assert said.known_owner == ("" if is_answered or owner is None else owner)
