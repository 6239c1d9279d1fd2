"""Somebody else is faster, between what was read and what is written; and answers that are lost."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack

import pytest
from tests.contract.membership.membership_contract import (
    FIRST,
    NONE_BEFORE,
    SECOND,
    SHARD,
    A,
    B,
    agent,
    enclosure,
    volume,
)
from tests.fabric.membership.contract import FABRIC, EtcdContract
from tests.fabric.membership.nodes import Cluster

from ostraca_fabric.errors import BlocksTooLargeError, MembershipError
from ostraca_fabric.membership.etcd.client import rpc_pb2 as rpc
from ostraca_fabric.membership.etcd.client.client import EtcdClient, put
from ostraca_fabric.membership.etcd.client.settings import EtcdSettings
from ostraca_fabric.membership.etcd.membership import EtcdMembership
from ostraca_fabric.membership.etcd.schema.keys import EtcdKeys
from ostraca_fabric.membership.etcd.schema.records import encode_meta
from ostraca_fabric.membership.etcd.store import EtcdStore
from ostraca_fabric.model.fabric_map import AgentRecord, Claim, Grant
from ostraca_fabric.model.ids import AgentId, EnclosureId

pytestmark = pytest.mark.slow

Meddle = Callable[[], Awaitable[object]]


def keys_of(request: pytest.FixtureRequest) -> EtcdKeys:
    """Return keys that no other test uses."""
    name = f"{request.node.parent.name}-{request.node.name}".lower()
    return EtcdKeys(
        "/races/" + "".join(letter if letter.isalnum() else "-" for letter in name)[-60:].strip("-")
    )


class Two:
    """Two processes, the first of which is slow."""

    def __init__(self, slow: EtcdMembership, fast: EtcdMembership) -> None:
        self.slow, self.fast = slow, fast

    def meanwhile(self, meddle: Meddle) -> None:
        """Let something happen between what the slow one reads next, and what it then writes."""
        store = self.slow._store
        write = store.write

        async def late(*given: object, **named: object) -> int | None:
            store.write = write  # type: ignore[method-assign]
            await meddle()
            return await write(*given, **named)  # type: ignore[arg-type]

        store.write = late  # type: ignore[method-assign]

    async def claimed(self, by: EtcdMembership, name: AgentId = A) -> Claim:
        made = await by.claim(SHARD, name, FIRST, epoch_at_least=NONE_BEFORE)
        assert made is not None
        return Claim(name, FIRST, made.epoch)


@pytest.fixture
async def two(etcd: Cluster, request: pytest.FixtureRequest) -> AsyncIterator[Two]:
    async with AsyncExitStack() as stack:
        opened = []
        for _ in range(2):
            opened.append(
                await EtcdMembership.open(
                    FABRIC,
                    EtcdSettings(etcd.endpoints),
                    dice=random.Random(3),
                    keys=keys_of(request),
                    begin=True,
                )
            )
            stack.push_async_callback(opened[-1].close)
        await opened[0].join(agent(A))
        await opened[1].join(agent(B))
        yield Two(*opened)


async def test_nothing_is_written_when_what_it_was_decided_on_has_changed(
    etcd: Cluster, request: pytest.FixtureRequest
) -> None:
    keys, client = keys_of(request), EtcdClient(EtcdSettings(etcd.endpoints), dice=random.Random(1))
    store, one, other = EtcdStore(client, keys, FABRIC), keys.agent(A), keys.agent(B)
    await store.begin()
    for changed in (one, other, keys.meta()):
        read = await store.read(one, other)
        await client.txn([], [put(changed, encode_meta(FABRIC))])
        assert await store.write(read, [put(one, b"late")], unchanged=[one, other]) is None
    read = await store.read(one, other)
    assert read.value(one) == encode_meta(FABRIC)
    assert await store.write(read, [put(one, b"in time")], unchanged=[one, other]) is not None
    await client.close()


async def test_who_was_replaced_while_it_claims_has_no_claim(two: Two) -> None:
    two.meanwhile(lambda: two.fast.join(agent(A, SECOND)))
    assert await two.slow.claim(SHARD, A, FIRST, epoch_at_least=NONE_BEFORE) is None
    assert not two.fast.map.claims


async def test_who_left_while_it_claims_has_no_claim(two: Two) -> None:
    two.meanwhile(lambda: two.fast.leave(A, FIRST))
    assert await two.slow.claim(SHARD, A, FIRST, epoch_at_least=NONE_BEFORE) is None
    assert not two.fast.map.claims


async def test_whose_record_was_deleted_while_it_claims_has_no_claim(
    two: Two, etcd: Cluster, request: pytest.FixtureRequest
) -> None:
    """By hand: its lease lives on, and a claim could be bound to it."""

    async def delete() -> None:
        etcd.ctl("del", keys_of(request).agent(A).decode())

    two.meanwhile(delete)
    assert await two.slow.claim(SHARD, A, FIRST, epoch_at_least=NONE_BEFORE) is None
    await two.slow.join(agent(A))
    assert not two.slow.map.claims


async def test_a_shard_that_another_takes_meanwhile_is_the_other_s(two: Two) -> None:
    two.meanwhile(lambda: two.claimed(two.fast, B))
    assert await two.slow.claim(SHARD, A, FIRST, epoch_at_least=NONE_BEFORE) is None
    assert two.fast.map.owner(SHARD) == B


async def test_a_shard_that_another_had_meanwhile_is_claimed_with_all_that_was_granted(two: Two) -> None:
    """The claim is as it was read: absent. The grants are not."""

    async def have() -> None:
        claim = await two.claimed(two.fast, B)
        await two.fast.grant(SHARD, claim, (5,))
        await two.fast.release(SHARD, B, FIRST)

    two.meanwhile(have)
    made = await two.slow.claim(SHARD, A, FIRST, epoch_at_least=NONE_BEFORE)
    assert made is not None
    assert [grant.segments for grant in made.grants] == [(5,), ()]
    assert made.epoch > made.earlier[0].epoch


async def test_who_loses_the_claim_while_it_is_granted_segments_is_granted_nothing(two: Two) -> None:
    claim = await two.claimed(two.slow)
    assert await two.slow.grant(SHARD, claim, (1,))
    two.meanwhile(lambda: two.fast.leave(A, FIRST))
    assert not await two.slow.grant(SHARD, claim, (1, 2))
    after = await two.fast.claim(SHARD, B, FIRST, epoch_at_least=NONE_BEFORE)
    assert after is not None
    assert after.earlier == (Grant(claim.epoch, A, FIRST, (1,)),)


async def test_giving_a_claim_back_late_takes_nothing_from_the_next_owner(two: Two) -> None:
    await two.claimed(two.slow)

    async def pass_on() -> None:
        await two.fast.leave(A, FIRST)
        await two.claimed(two.fast, B)

    two.meanwhile(pass_on)
    await two.slow.release(SHARD, A, FIRST)
    assert two.fast.map.owner(SHARD) == B
    assert await two.fast.confirm(B, FIRST)


async def test_a_lease_that_ends_while_an_agent_joins_is_replaced(two: Two) -> None:
    two.meanwhile(lambda: two.fast.leave(A, FIRST))
    moved = AgentRecord(A, FIRST, ("unix:///run/elsewhere.sock",))
    await two.slow.join(moved)
    assert two.slow.map.agents[A] == moved
    assert await two.slow.confirm(A, FIRST)
    await two.claimed(two.slow)


async def test_enclosures_put_meanwhile_are_counted_among_those_placed_in(two: Two) -> None:
    before = two.slow.map.placement_epoch
    two.meanwhile(lambda: two.fast.put_enclosures([enclosure("a")]))
    await two.slow.put_enclosures([enclosure("b")])
    assert two.slow.map.placement_epoch == before + 2
    assert list(two.slow.map.earlier_placements[0].weights) == [EnclosureId("a")]


async def test_an_enclosure_and_a_volume_that_it_does_not_hold_are_not_both_made(two: Two) -> None:
    small, large = enclosure(block_bytes_max=4096), volume(block_bytes=8192)
    two.meanwhile(lambda: two.fast.create_volume(large))
    with pytest.raises(BlocksTooLargeError):
        await two.slow.put_enclosures([small])
    two.meanwhile(lambda: two.fast.put_enclosures([enclosure(block_bytes_max=8192)]))
    with pytest.raises(BlocksTooLargeError):
        await two.slow.create_volume(volume("larger", 8193))


async def test_somebody_who_changes_the_same_record_all_the_time_ends_in_an_error(two: Two) -> None:
    rival = enclosure("a")

    async def again() -> None:
        two.meanwhile(again)
        weight = next(weights)
        await two.fast.put_enclosures([enclosure("a", weight=weight)], force=True)

    weights = iter(range(1, 1000))
    two.meanwhile(again)
    with pytest.raises(MembershipError, match="other writers kept changing the same records"):
        await two.slow.put_enclosures([rival], force=True)


class TestEveryAnswerIsLostOnce(EtcdContract):
    """Each transaction is done, not heard of, and asked for again, as a client over several members does."""

    @pytest.fixture
    def keys(self, request: pytest.FixtureRequest) -> EtcdKeys:
        return keys_of(request)

    @pytest.fixture
    async def store(self, etcd: Cluster, keys: EtcdKeys) -> AsyncIterator[EtcdMembership]:
        membership = await EtcdMembership.open(
            FABRIC, EtcdSettings(etcd.endpoints), dice=random.Random(7), keys=keys, begin=True
        )
        client = membership._client
        txn = client.txn

        async def twice(compare: Iterable[rpc.Compare], success: Iterable[rpc.RequestOp]) -> rpc.TxnResponse:
            asked = list(compare), list(success)
            await txn(*asked)
            return await txn(*asked)

        client.txn = twice  # type: ignore[method-assign, assignment]
        yield membership
        await membership.close()
