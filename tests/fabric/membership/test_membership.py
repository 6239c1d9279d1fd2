"""What only a membership store of its own process, on other machines, has to withstand."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Protocol

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
)
from tests.fabric.membership.nodes import Cluster, free_ports
from tests.fabric.membership.sample_fabric import VOLUME
from tests.support.stalls import Stopwatch

from ostraca_fabric.errors import MembershipError, StoreAwayError, UsageError, WrongStoreError
from ostraca_fabric.membership.etcd.client.settings import EtcdSettings
from ostraca_fabric.membership.etcd.membership import EtcdMembership
from ostraca_fabric.membership.etcd.schema import view
from ostraca_fabric.membership.etcd.schema.keys import EtcdKeys, RecordKind
from ostraca_fabric.membership.etcd.schema.records import encode_enclosure, encode_meta, encode_volume
from ostraca_fabric.membership.etcd.schema.view import View
from ostraca_fabric.membership.etcd.store import fabric_at
from ostraca_fabric.model.fabric_map import Claim, Grant
from ostraca_fabric.model.ids import AgentId, EnclosureId, FabricId, ShardId, TenantId
from ostraca_fabric.model.volume import Layout, VolumeRecord
from ostraca_fabric.ports.membership import ClaimResult
from ostraca_fabric.tables.digests import fabric_key_check

pytestmark = pytest.mark.slow

FABRIC, OTHER_FABRIC = FabricId(b"f" * 16), FabricId(b"o" * 16)
KEYS = EtcdKeys("/ostraca/test")
TTL_S = 2.0


class Open(Protocol):
    def __call__(
        self, cluster: Cluster, *, fabric: FabricId = FABRIC, keys: EtcdKeys = KEYS, begin: bool = True
    ) -> Awaitable[EtcdMembership]: ...


@pytest.fixture
async def opened() -> AsyncIterator[Open]:
    """Yield a function that opens memberships like separate processes; close them in the end."""
    async with AsyncExitStack() as stack:

        async def open_one(
            cluster: Cluster, *, fabric: FabricId = FABRIC, keys: EtcdKeys = KEYS, begin: bool = True
        ) -> EtcdMembership:
            settings = EtcdSettings(cluster.endpoints, operation_timeout_s=3, watch_silence_max_s=2)
            membership = await EtcdMembership.open(
                fabric, settings, dice=random.Random(9), keys=keys, begin=begin, lease_ttl_s=TTL_S
            )
            stack.push_async_callback(membership.close)
            return membership

        yield open_one


async def until(membership: EtcdMembership, shows: Callable[[], bool]) -> None:
    """Follow the map until it shows something."""
    async with asyncio.timeout(30):
        async for _ in membership.changes():
            if shows():
                return


async def troubled(membership: EtcdMembership, begins: str) -> None:
    """Wait until its trouble begins so; empty: until there is none."""
    async with asyncio.timeout(20):
        while not membership.trouble.startswith(begins) or (membership.trouble and not begins):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def claimed(
    membership: EtcdMembership, name: AgentId, shard: ShardId = SHARD
) -> tuple[Claim, ClaimResult]:
    made = await membership.claim(shard, name, FIRST, epoch_at_least=NONE_BEFORE)
    assert made is not None
    return Claim(name, FIRST, made.epoch), made


# ---------------------------------------------------------------------- whose etcd it is, and which fabric


async def test_two_fabrics_on_one_etcd_do_not_see_each_other(etcd: Cluster, opened: Open) -> None:
    ours = await opened(etcd, keys=EtcdKeys("/two/pod"))
    theirs = await opened(etcd, fabric=OTHER_FABRIC, keys=EtcdKeys("/two/pod-2"))
    await ours.put_enclosures([enclosure()])
    await ours.join(agent(A))
    await theirs.join(agent(B))
    await claimed(ours, A)
    assert set(ours.map.agents) == {A}
    assert set(theirs.map.agents) == {B}
    assert not theirs.map.claims
    assert not theirs.map.enclosures


@pytest.mark.parametrize(("first", "second"), [("/nest/in", "/nest/in/a/b"), ("/nest/out/a/b", "/nest/out")])
async def test_no_fabric_is_begun_whose_prefix_begins_another_s_or_begins_with_it(
    etcd: Cluster, opened: Open, first: str, second: str
) -> None:
    await opened(etcd, keys=EtcdKeys(first))
    with pytest.raises(WrongStoreError, match=rf"fabric lies under {first}/.*{second}/.*Take another prefix"):
        await opened(etcd, fabric=OTHER_FABRIC, keys=EtcdKeys(second))
    assert await fabric_at(EtcdKeys(second), EtcdSettings(etcd.endpoints), dice=random.Random(9)) is None
    await opened(etcd, keys=EtcdKeys(first))
    await opened(etcd, fabric=OTHER_FABRIC, keys=EtcdKeys(f"{first}-2"))


async def test_no_fabric_is_begun_in_a_prefix_that_a_rebuild_above_has_taken(
    etcd: Cluster, opened: Open
) -> None:
    etcd.ctl("put", "/nest/taken/rebuild", "{}")
    with pytest.raises(WrongStoreError, match="a fabric lies under /nest/taken/"):
        await opened(etcd, keys=EtcdKeys("/nest/taken/live"))


async def test_a_fabric_is_not_told_of_one_further_down_that_an_earlier_release_has_begun(
    etcd: Cluster, opened: Open
) -> None:
    """It lies under a name that is a kind of the upper one's keys."""
    upper = await opened(etcd, keys=EtcdKeys("/nest/upper"))
    etcd.ctl("put", "/nest/upper/placement/meta", encode_meta(OTHER_FABRIC).decode())
    lower = await opened(etcd, fabric=OTHER_FABRIC, keys=EtcdKeys("/nest/upper/placement"))
    await lower.join(agent(B))
    await upper.join(agent(A))
    assert upper.trouble == ""
    assert set(upper.map.agents) == {A}


async def test_an_etcd_without_the_fabric_is_refused(etcd: Cluster, opened: Open) -> None:
    with pytest.raises(MembershipError, match=r"no fabric under /nothing/here/.*check the endpoints"):
        await opened(etcd, keys=EtcdKeys("/nothing/here"), begin=False)


async def test_an_agent_that_was_in_the_fabric_is_not_told_to_begin_it(etcd: Cluster) -> None:
    settings = EtcdSettings(etcd.endpoints)
    with pytest.raises(
        WrongStoreError, match=r"no longer under /gone/.*check.*prefix.*fabric rebuild"
    ) as lost:
        await EtcdMembership.open(
            FABRIC, settings, dice=random.Random(9), keys=EtcdKeys("/gone"), has_joined=True
        )
    assert "begin" not in str(lost.value)


@pytest.mark.parametrize("begin", [False, True])
async def test_another_fabric_is_refused_and_left_as_it_is(etcd: Cluster, opened: Open, begin: bool) -> None:
    keys = EtcdKeys("/another")
    await opened(etcd, fabric=OTHER_FABRIC, keys=keys)
    with pytest.raises(MembershipError, match=f"{OTHER_FABRIC.hex()}, and not {FABRIC.hex()}"):
        await opened(etcd, keys=keys, begin=begin)
    again = await opened(etcd, fabric=OTHER_FABRIC, keys=keys, begin=False)
    assert again.map.fabric == OTHER_FABRIC


async def test_an_agent_with_another_fabric_key_is_refused(etcd: Cluster) -> None:
    keys, settings, dice = EtcdKeys("/keyed"), EtcdSettings(etcd.endpoints), random.Random(9)
    checks = [fabric_key_check(bytes([number]) * 32, FABRIC) for number in range(2)]
    for check, begin in ((checks[0], True), (checks[0], False), ("", False)):
        membership = await EtcdMembership.open(
            FABRIC, settings, dice=dice, keys=keys, begin=begin, key_check=check
        )
        await membership.close()
    with pytest.raises(MembershipError, match="has another fabric key: use the key file"):
        await EtcdMembership.open(FABRIC, settings, dice=dice, keys=keys, key_check=checks[1])


async def test_the_fabric_at_a_prefix_can_be_asked_for(etcd: Cluster, opened: Open) -> None:
    keys, settings = EtcdKeys("/asked/for"), EtcdSettings(etcd.endpoints)
    assert await fabric_at(keys, settings, dice=random.Random(9)) is None
    await opened(etcd, keys=keys)
    assert await fabric_at(keys, settings, dice=random.Random(9)) == FABRIC
    (nobody,) = free_ports(1)
    nowhere = EtcdSettings((f"127.0.0.1:{nobody}",), operation_timeout_s=0.5)
    with pytest.raises(StoreAwayError, match="did not read"):
        await fabric_at(keys, nowhere, dice=random.Random(9))


async def test_a_fabric_of_a_newer_release_is_refused(etcd: Cluster, opened: Open) -> None:
    etcd.ctl("put", "/newer/meta", json.dumps({"version": 2, "fabric": FABRIC.hex()}))
    with pytest.raises(
        WrongStoreError, match=r"/newer/meta .*version 2, and this release reads 1.*start a release"
    ):
        await opened(etcd, keys=EtcdKeys("/newer"))
    with pytest.raises(WrongStoreError, match=r"/newer/meta .*version 2.*start a release"):
        await fabric_at(EtcdKeys("/newer"), EtcdSettings(etcd.endpoints), dice=random.Random(9))


async def test_a_fabric_whose_record_is_broken_is_named_with_what_to_do(etcd: Cluster, opened: Open) -> None:
    etcd.ctl("put", "/broken/meta", "of something else")
    says = r"/broken/meta of etcd at .*can't be read: .*: restore the record .*another prefix"
    with pytest.raises(WrongStoreError, match=says):
        await opened(etcd, keys=EtcdKeys("/broken"))
    with pytest.raises(WrongStoreError, match=says):
        await fabric_at(EtcdKeys("/broken"), EtcdSettings(etcd.endpoints), dice=random.Random(9))


async def test_a_fabric_that_is_raised_to_a_newer_version_is_changed_no_more(
    etcd: Cluster, opened: Open
) -> None:
    membership = await opened(etcd, keys=EtcdKeys("/raised"))
    await membership.join(agent(A))
    etcd.ctl("put", "/raised/meta", json.dumps({"version": 2, "fabric": FABRIC.hex()}))
    with pytest.raises(MembershipError, match="start a release"):
        await membership.claim(SHARD, A, FIRST, epoch_at_least=NONE_BEFORE)
    assert set(membership.map.agents) == {A}


@pytest.mark.parametrize("prefix", ["", "/", "ostraca", "/a//b", "/A", "/a/../b/ "])
def test_a_prefix_that_could_not_be_told_from_others_is_refused(prefix: str) -> None:
    with pytest.raises(UsageError, match="not a usable prefix"):
        EtcdKeys(prefix)


async def test_a_record_that_can_not_be_read_is_left_out_and_told(etcd: Cluster, opened: Open) -> None:
    membership = await opened(etcd, keys=EtcdKeys("/unreadable"))
    etcd.ctl("put", "/unreadable/agents/new", json.dumps({"version": 9, "agent": "new"}))
    etcd.ctl("put", f"/unreadable/claims/{SHARD}", "{}")
    etcd.ctl("put", "/unreadable/later/thing", "of a newer release")
    await membership.join(agent(A))
    assert set(membership.map.agents) == {A}
    assert "/unreadable/agents/new is left out" in membership.trouble
    with pytest.raises(MembershipError, match=rf"^/unreadable/claims/{SHARD}: a record .* can't be read"):
        await membership.claim(SHARD, A, FIRST, epoch_at_least=NONE_BEFORE)
    at_volume = EtcdKeys("/unreadable").volume(VOLUME.tenant, VOLUME.name).decode()
    etcd.ctl("put", at_volume, '{"version":9}')
    for asked in (membership.volume(VOLUME.tenant, VOLUME.name), membership.create_volume(VOLUME)):
        with pytest.raises(MembershipError, match=rf"^{at_volume}: a record in etcd has version 9"):
            await asked
    etcd.ctl("del", at_volume)
    for key in ("agents/new", f"claims/{SHARD}"):
        etcd.ctl("del", f"/unreadable/{key}")
    await membership.join(agent(B))
    assert membership.trouble == ""


# --------------------------------------------------------------------------------- agents that come and go


async def test_what_the_watch_has_not_told_yet_is_seen_after_a_refresh(etcd: Cluster, opened: Open) -> None:
    """An operator's tool blocks this loop meanwhile, so no watch of this process can have told anything."""
    membership = await opened(etcd, keys=EtcdKeys("/refreshed"))
    there = enclosure()
    etcd.ctl("put", f"/refreshed/enclosures/{there.id}", encode_enclosure(there).decode())
    etcd.ctl("put", f"/refreshed/volumes/{VOLUME.tenant}/{VOLUME.name}", encode_volume(VOLUME).decode())
    assert (membership.map.enclosures, membership.volumes) == ({}, ())
    await membership.refresh()
    assert (membership.map.enclosures, membership.volumes) == ({there.id: there}, (VOLUME,))


async def test_of_many_that_claim_at_once_one_has_the_shard(etcd: Cluster, opened: Open) -> None:
    keys = EtcdKeys("/at-once")
    names = [AgentId(f"agent-{number}") for number in range(6)]
    stores = [await opened(etcd, keys=keys) for _ in names]
    await asyncio.gather(*(store.join(agent(name)) for store, name in zip(stores, names, strict=True)))
    shards = [ShardId(f"enclosure-0/drive-0/{number}") for number in range(10)]
    for shard in shards:
        claims = (
            store.claim(shard, name, FIRST, epoch_at_least=NONE_BEFORE)
            for store, name in zip(stores, names, strict=True)
        )
        made = [each for each in await asyncio.gather(*claims) if each is not None]
        assert [each.epoch for each in made] == [1]


async def test_enclosures_put_by_two_at_once_are_both_there(etcd: Cluster, opened: Open) -> None:
    stores = [await opened(etcd, keys=EtcdKeys("/both")) for _ in range(2)]
    before = stores[0].map.placement_epoch
    puts = (store.put_enclosures([enclosure(name)]) for store, name in zip(stores, ("a", "b"), strict=True))
    await asyncio.gather(*puts)
    await until(stores[0], lambda: len(stores[0].map.enclosures) == 2)
    assert set(stores[0].map.enclosures) == {EnclosureId("a"), EnclosureId("b")}
    assert stores[0].map.placement_epoch == before + 2


async def test_more_than_etcd_takes_at_once_is_refused_with_what_to_do(etcd: Cluster, opened: Open) -> None:
    membership = await opened(etcd, keys=EtcdKeys("/many"))
    with pytest.raises(MembershipError, match="use several steps"):
        await membership.put_enclosures([enclosure(f"e{number}") for number in range(200)])
    assert not membership.map.enclosures


async def test_a_dead_agent_is_gone_after_its_lease_and_its_grant_stays(etcd: Cluster, opened: Open) -> None:
    dying, other = [await opened(etcd, keys=EtcdKeys("/dead")) for _ in range(2)]
    await dying.join(agent(A))
    await other.join(agent(B))
    first, _ = await claimed(dying, A)
    assert await dying.grant(SHARD, first, (4, 2))
    await until(other, lambda: other.map.owner(SHARD) == A)
    await dying.close()  # without a word, as a process that is killed
    await until(other, lambda: A not in other.map.agents)
    assert not other.map.claims  # gone in the same step
    _, made = await claimed(other, B)
    assert made.epoch > first.epoch
    assert made.earlier == (Grant(first.epoch, A, FIRST, (2, 4)),)


async def test_another_start_of_an_agent_ends_the_claims_of_the_one_before(
    etcd: Cluster, opened: Open
) -> None:
    before, after = [await opened(etcd, keys=EtcdKeys("/restarted")) for _ in range(2)]
    await before.join(agent(A))
    first, _ = await claimed(before, A)
    await before.grant(SHARD, first, (0,))
    await after.join(agent(A, SECOND))
    assert not await before.confirm(A, FIRST)
    assert not await before.grant(SHARD, first, (0, 1))
    assert await before.claim(SHARD, A, FIRST, epoch_at_least=NONE_BEFORE) is None
    made = await after.claim(SHARD, A, SECOND, epoch_at_least=NONE_BEFORE)
    assert made is not None
    assert made.earlier == (Grant(first.epoch, A, FIRST, (0,)),)
    await before.leave(A, FIRST)  # late, and of somebody who is gone
    assert await after.confirm(A, SECOND)


async def test_a_lease_lost_while_the_loop_was_blocked_is_no_surprise(etcd: Cluster, opened: Open) -> None:
    membership, other = [await opened(etcd, keys=EtcdKeys("/blocked")) for _ in range(2)]
    await membership.join(agent(A))
    await other.join(agent(B))
    first, _ = await claimed(membership, A)
    await membership.grant(SHARD, first, (0,))
    (lease,) = json.loads(etcd.ctl("get", "/blocked/agents/agent-a", "--write-out", "json"))["kvs"]
    etcd.ctl("lease", "revoke", f"{lease['lease']:x}")
    time.sleep(1)  # noqa: ASYNC251 (it stands, while another takes the shard)
    second, _ = await claimed(other, B)
    assert not await membership.confirm(A, FIRST)
    assert not await membership.grant(SHARD, first, (0, 1))
    await until(membership, lambda: A not in membership.map.agents)
    await membership.join(agent(A))
    assert await membership.confirm(A, FIRST)
    assert membership.map.claims == {SHARD: second}


async def test_an_agent_stays_while_its_loop_is_blocked_for_a_while(etcd: Cluster, opened: Open) -> None:
    membership = await opened(etcd, keys=EtcdKeys("/busy"))
    await membership.join(agent(A))
    first, _ = await claimed(membership, A)
    time.sleep(1.4 * TTL_S)  # noqa: ASYNC251 (that is what is tested)
    assert await membership.confirm(A, FIRST)
    assert await membership.grant(SHARD, first, (0,))


# ---------------------------------------------------------------------------- when etcd comes and goes


async def test_an_etcd_that_is_away_takes_no_map_along(
    fresh_etcd: Cluster, opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    membership = await opened(fresh_etcd)
    await membership.put_enclosures([enclosure()])
    await membership.join(agent(A))
    first, _ = await claimed(membership, A)
    known = membership.map
    fresh_etcd.kill()
    watch = Stopwatch()
    with pytest.raises(MembershipError, match=r"127\.0\.0\.1"):
        await membership.confirm(A, FIRST)
    assert watch.took_s < 5
    assert membership.map is known
    assert "has not been heard" in membership.trouble
    assert caplog.messages == [], "who asks says it, once"
    fresh_etcd.start()
    assert await membership.confirm(A, FIRST)
    assert await membership.grant(SHARD, first, (0,))
    await membership.join(agent(B))
    assert membership.map.claims == {SHARD: first}
    assert membership.trouble == ""


async def test_an_etcd_that_is_back_is_asked_a_few_times_by_each_and_not_by_all_at_once_again(
    fresh_etcd: Cluster, opened: Open
) -> None:
    count = 12
    members = [await opened(fresh_etcd) for _ in range(count)]
    names = [AgentId(f"agent-{number}") for number in range(count)]
    await asyncio.gather(*(each.join(agent(name)) for each, name in zip(members, names, strict=True)))
    fresh_etcd.kill()

    async def confirms(membership: EtcdMembership, name: AgentId) -> bool:
        """Ask until it is answered, as an agent does."""
        while True:
            try:
                return await membership.confirm(name, FIRST)
            except StoreAwayError:
                await asyncio.sleep(0.1)

    asking = [asyncio.ensure_future(confirms(*each)) for each in zip(members, names, strict=True)]
    for membership in members:
        await troubled(membership, "etcd has not been heard")
    fresh_etcd.launch()
    assert await asyncio.gather(*asking) == [True] * count
    for membership in members:
        await troubled(membership, "")
    calls = fresh_etcd.nodes[0].calls()
    assert calls["LeaseGrant"] == 0, "no lease was lost"
    assert count <= calls["Watch"] <= 2 * count
    assert count <= calls["Txn"] <= 2 * count
    assert calls["LeaseKeepAlive"] <= 4 * count
    assert calls["Range"] <= count


async def test_what_was_compacted_while_etcd_was_away_is_in_the_map(
    fresh_etcd: Cluster, opened: Open
) -> None:
    membership = await opened(fresh_etcd)
    await membership.join(agent(A))
    await claimed(membership, A)
    fresh_etcd.kill()
    fresh_etcd.start()  # this loop stands meanwhile
    fresh_etcd.ctl("del", f"/ostraca/test/claims/{SHARD}")
    fresh_etcd.ctl("put", "/ostraca/test/agents/agent-b", json.dumps(_as_json(agent(B).id)))
    fresh_etcd.compact()
    await until(membership, lambda: set(membership.map.agents) == {A, B})
    assert not membership.map.claims


async def test_an_etcd_that_lost_its_data_changes_nothing_until_somebody_sees_to_it(
    fresh_etcd: Cluster, opened: Open
) -> None:
    membership = await opened(fresh_etcd)
    await membership.put_enclosures([enclosure()])
    await membership.join(agent(A))
    await claimed(membership, A)
    known = membership.map
    fresh_etcd.kill()
    shutil.rmtree(fresh_etcd.nodes[0].folder / fresh_etcd.nodes[0].name)
    fresh_etcd.start()
    for asked in (
        membership.confirm(A, FIRST),
        membership.claim(SHARD, A, FIRST, epoch_at_least=NONE_BEFORE),
        membership.join(agent(A)),
    ):
        with pytest.raises(
            WrongStoreError, match=r"has lost fabric 6666.*fabric rebuild.*without running agents"
        ):
            await asked
    await troubled(membership, "etcd answers, and has lost fabric")
    assert membership.map is known
    again = await opened(fresh_etcd)  # somebody begins it anew
    await until(membership, lambda: not membership.map.agents)
    await membership.join(agent(A))
    await until(again, lambda: set(again.map.agents) == {A})
    assert membership.trouble.startswith("etcd has gone back to an older state, or lost its data")
    assert again.trouble == ""


async def test_an_older_state_of_etcd_is_told_as_such_and_no_compaction_is(
    fresh_etcd: Cluster, opened: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    membership = await opened(fresh_etcd)
    (node,) = fresh_etcd.nodes
    fresh_etcd.kill()
    shutil.copytree(node.folder / node.name, tmp_path / "backup")
    fresh_etcd.start()
    await membership.put_enclosures([enclosure()])
    await membership.join(agent(A))
    fresh_etcd.kill()
    fresh_etcd.start()
    fresh_etcd.ctl("put", "/ostraca/test/later/thing", "1")
    fresh_etcd.compact()  # this loop stands meanwhile
    await membership.join(agent(B))
    assert membership.trouble == ""
    fresh_etcd.kill()
    shutil.rmtree(node.folder / node.name)
    shutil.copytree(tmp_path / "backup", node.folder / node.name)
    fresh_etcd.start()
    await until(membership, lambda: not membership.map.agents)
    assert not membership.map.enclosures
    assert "has gone back to an older state" in membership.trouble
    assert "stop all agents for late_write_s" in membership.trouble
    assert any("has gone back to an older state" in each for each in caplog.messages)


async def test_a_record_without_end_takes_nothing_else_along(etcd: Cluster, opened: Open) -> None:
    membership = await opened(etcd, keys=EtcdKeys("/deep"))
    etcd.ctl("put", "/deep/agents/deep", typed='{"version":1,"agent":' + "[" * 100_000)
    await membership.join(agent(A))
    assert set(membership.map.agents) == {A}
    assert "/deep/agents/deep is left out" in membership.trouble


async def test_the_map_is_followed_on_after_what_no_record_should_do(
    etcd: Cluster, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = EtcdKeys("/unforeseen")
    membership, other = [await opened(etcd, keys=keys) for _ in range(2)]

    def breaks(_data: bytes) -> None:
        raise ZeroDivisionError("of a record")

    with monkeypatch.context() as broken:
        broken.setitem(view._DECODERS, RecordKind.AGENT, breaks)
        etcd.ctl("put", "/unforeseen/agents/agent-b", json.dumps(_as_json("agent-b")))
        await other.put_enclosures([enclosure()])
        await until(membership, lambda: bool(membership.map.enclosures))
        assert "a bug in Ostraca: ZeroDivisionError('of a record')" in membership.trouble
    with monkeypatch.context() as broken:
        broken.setattr(View, "take", breaks)
        etcd.ctl("put", "/unforeseen/later/thing", "1")
        await troubled(membership, "changes in etcd can't be followed: a bug")
    await until(membership, lambda: set(membership.map.agents) == {B})
    await troubled(membership, "")


async def test_a_watch_that_was_refused_once_is_no_trouble_once_it_goes_on(
    etcd: Cluster, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    membership = await opened(etcd, keys=EtcdKeys("/refused"))
    await membership.join(agent(A))  # so the watch has begun

    async def refuses() -> None:
        raise MembershipError("etcd refuses")

    with monkeypatch.context() as broken:
        broken.setattr(membership._client, "metadata", refuses)
        broken.setattr(
            membership._client.channels, "holds", lambda _channel: False
        )  # so the watch is begun anew
        etcd.ctl("put", "/refused/later/thing", "1")
        await troubled(membership, "etcd refuses")
    await troubled(membership, "")


async def test_the_death_of_a_leader_costs_no_claim_and_makes_none_twice(
    three: Cluster, opened: Open
) -> None:
    one, other = [await opened(three) for _ in range(2)]
    await one.join(agent(A))
    await other.join(agent(B))
    shards = [ShardId(f"enclosure-0/drive-0/{number}") for number in range(60)]
    for number, shard in enumerate(shards):
        if number == 20:
            three.leader().kill()
        made = await asyncio.gather(
            one.claim(shard, A, FIRST, epoch_at_least=NONE_BEFORE),
            other.claim(shard, B, FIRST, epoch_at_least=NONE_BEFORE),
        )
        assert [each.epoch for each in made if each is not None] == [1]
    await until(one, lambda: one.map.revision >= other.map.revision)
    assert one.map.claims == other.map.claims
    assert set(one.map.claims) == set(shards)
    assert await one.confirm(A, FIRST)
    assert await other.confirm(B, FIRST)


async def test_volumes_made_by_another_agent_are_known_and_theirs_is_the_first(
    etcd: Cluster, opened: Open
) -> None:
    one, other = [await opened(etcd, keys=EtcdKeys("/volumes")) for _ in range(2)]
    records = [VolumeRecord(TenantId("t"), "v", Layout("m", dtype, 16), 4096) for dtype in ("bf16", "fp8")]
    made = await asyncio.gather(one.create_volume(records[0]), other.create_volume(records[1]))
    assert made[0] == made[1]
    assert await one.volume(TenantId("t"), "v") == await other.volume(TenantId("t"), "v") == made[0]


def _as_json(name: str) -> dict[str, object]:
    return {"version": 1, "agent": name, "start": FIRST.hex(), "addresses": []}
