"""What every membership store must do. An adapter's test inherits this and gives the store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from ostraca_fabric.errors import (
    BlocksTooLargeError,
    ChangedError,
    MembershipError,
    PlacementBusyError,
    UsageError,
)
from ostraca_fabric.model.fabric_map import (
    EARLIER_PLACEMENTS_MAX,
    AgentRecord,
    Claim,
    DriveRecord,
    EnclosureRecord,
    EnclosureState,
    Grant,
    PlacementRecord,
    ShardRecord,
    weights_of,
)
from ostraca_fabric.model.ids import (
    AgentId,
    EnclosureId,
    OwnerEpoch,
    ShardId,
    StartId,
    TenantId,
    drive_id,
    shard_id,
)
from ostraca_fabric.model.overrides import VERSION, LiveSettings, Overrides, Switch, TenantOverride
from ostraca_fabric.model.volume import BLOCK_BYTES_MAX, Layout, VolumeRecord
from ostraca_fabric.ports.membership import ClaimResult, Membership
from ostraca_fabric.ports.records import RecordLock

A, B = AgentId("agent-a"), AgentId("agent-b")
FIRST, SECOND = StartId(b"1" * 16), StartId(b"2" * 16)
NONE_BEFORE = OwnerEpoch(1)

Held = tuple[RecordLock, Callable[[], Awaitable[None]]]

Rule = Callable[[Overrides], Awaitable[int]]
"""Lets these be the overrides, whatever their revision says; returns the one that they have."""

RULED = Overrides(
    {TenantId("t"): TenantOverride(VERSION, "t", 1 << 40, 1 << 30, is_erasable=True)},
    {(TenantId("t"), "v"): Switch.SHADOW},
    LiveSettings(key_ttl_s=60),
)


def agent(name: AgentId, start: StartId = FIRST) -> AgentRecord:
    return AgentRecord(name, start, (f"unix:///run/{name}.sock",))


def enclosure(
    name: str = "enclosure-0", *, weight: int = 1 << 30, block_bytes_max: int = BLOCK_BYTES_MAX
) -> EnclosureRecord:
    drive = drive_id(EnclosureId(name), "drive-0")
    shard = ShardRecord(shard_id(drive, 0), drive, 0, 1 << 30, weight, block_bytes_max)
    return EnclosureRecord(EnclosureId(name), (DriveRecord(drive, "/nowhere"),), (shard,))


SHARD: ShardId = enclosure().shards[0].id


def volume(name: str = "v", block_bytes: int = 4096) -> VolumeRecord:
    return VolumeRecord(TenantId("t"), name, Layout("m", "bf16", 16), block_bytes)


async def claimed(
    store: Membership, name: AgentId, start: StartId = FIRST, *, at_least: int = NONE_BEFORE
) -> ClaimResult:
    made = await store.claim(SHARD, name, start, epoch_at_least=OwnerEpoch(at_least))
    assert made is not None
    return made


def claim_of(name: AgentId, made: ClaimResult) -> Claim:
    return Claim(name, FIRST, made.epoch)


class MembershipContract:
    @pytest.fixture
    def store(self) -> Membership:
        raise NotImplementedError

    async def test_an_agent_that_joined_is_in_the_map_until_it_leaves(self, store: Membership) -> None:
        await store.join(agent(A))
        assert store.map.agents == {A: agent(A)}
        await store.leave(A, FIRST)
        assert store.map.agents == {}

    async def test_leaving_under_another_start_id_changes_nothing(self, store: Membership) -> None:
        await store.join(agent(A))
        await store.leave(A, SECOND)
        assert A in store.map.agents

    async def test_an_agent_that_says_it_leaves_keeps_its_claims_until_it_does(
        self, store: Membership
    ) -> None:
        await store.put_enclosures([enclosure()])
        await store.join(agent(A))
        made = await claimed(store, A)
        await store.join(replace(agent(A), is_leaving=True))
        assert store.map.agents[A].is_leaving
        assert store.map.claims == {SHARD: claim_of(A, made)}
        assert await store.confirm(A, FIRST)

    async def test_a_shard_has_one_owner(self, store: Membership) -> None:
        await store.put_enclosures([enclosure()])
        await store.join(agent(A))
        await store.join(agent(B))
        epoch = (await claimed(store, A)).epoch
        assert await store.claim(SHARD, B, FIRST, epoch_at_least=NONE_BEFORE) is None
        assert store.map.owner(SHARD) == A
        assert store.map.claims == {SHARD: Claim(A, FIRST, epoch)}

    async def test_a_claim_begins_with_a_grant_of_nothing(self, store: Membership) -> None:
        await store.join(agent(A))
        made = await claimed(store, A)
        assert made.own == Grant(made.epoch, A, FIRST)
        assert made.earlier == ()

    async def test_the_same_process_claiming_again_keeps_its_epoch_and_its_grant(
        self, store: Membership
    ) -> None:
        await store.join(agent(A))
        first = await claimed(store, A)
        assert await claimed(store, A) == first
        assert await store.grant(SHARD, claim_of(A, first), (2, 1))
        await store.release(SHARD, A, FIRST)
        again = await claimed(store, A)
        assert again == ClaimResult(first.epoch, (Grant(first.epoch, A, FIRST, (1, 2)),))

    async def test_a_process_whose_lease_ran_out_goes_on_if_nobody_came_between(
        self, store: Membership
    ) -> None:
        await store.join(agent(A))
        first = await claimed(store, A)
        await store.grant(SHARD, claim_of(A, first), (0,))
        await store.leave(A, FIRST)
        await store.join(agent(A))
        assert (await claimed(store, A)).epoch == first.epoch

    async def test_a_process_that_somebody_came_after_begins_anew(self, store: Membership) -> None:
        await store.join(agent(A))
        await store.join(agent(B))
        first = await claimed(store, A)
        await store.grant(SHARD, claim_of(A, first), (0,))
        await store.release(SHARD, A, FIRST)
        second = await claimed(store, B)
        await store.grant(SHARD, claim_of(B, second), (1,))
        await store.release(SHARD, B, FIRST)
        third = await claimed(store, A)
        assert third.epoch > second.epoch > first.epoch
        assert [grant.segments for grant in third.grants] == [(0,), (1,), ()]

    async def test_each_new_owner_has_a_higher_epoch(self, store: Membership) -> None:
        await store.join(agent(A))
        await store.join(agent(B))
        first = await claimed(store, A, at_least=7)
        assert first.epoch >= 7
        await store.release(SHARD, A, FIRST)
        assert (await claimed(store, B)).epoch > first.epoch

    async def test_an_epoch_below_what_is_asked_for_is_not_kept(self, store: Membership) -> None:
        await store.join(agent(A))
        first = await claimed(store, A)
        await store.grant(SHARD, claim_of(A, first), (0,))
        await store.release(SHARD, A, FIRST)
        again = await claimed(store, A, at_least=first.epoch + 5)
        assert again.epoch == first.epoch + 5
        assert again.earlier == (Grant(first.epoch, A, FIRST, (0,)),)

    async def test_a_restarted_agent_has_lost_its_claims(self, store: Membership) -> None:
        await store.join(agent(A))
        first = await claimed(store, A)
        await store.join(agent(A, SECOND))
        assert store.map.owner(SHARD) is None
        assert (await claimed(store, A, SECOND)).epoch > first.epoch

    async def test_a_grant_outlives_claim_and_agent(self, store: Membership) -> None:
        await store.join(agent(A))
        await store.join(agent(B))
        first = await claimed(store, A)
        assert await store.grant(SHARD, claim_of(A, first), (3, 0))
        await store.leave(A, FIRST)
        second = await claimed(store, B)
        assert second.earlier == (Grant(first.epoch, A, FIRST, (0, 3)),)

    async def test_a_grant_of_no_segment_is_forgotten_with_its_claim(self, store: Membership) -> None:
        await store.join(agent(A))
        await store.join(agent(B))
        await claimed(store, A)
        await store.leave(A, FIRST)
        assert (await claimed(store, B)).earlier == ()

    async def test_nobody_is_granted_what_may_still_be_written(self, store: Membership) -> None:
        await store.join(agent(A))
        await store.join(agent(B))
        first = await claimed(store, A)
        await store.grant(SHARD, claim_of(A, first), (0, 1))
        await store.leave(A, FIRST)
        second = claim_of(B, await claimed(store, B))
        assert not await store.grant(SHARD, second, (1, 2))
        assert await store.grant(SHARD, second, (2,))
        assert await store.grant(SHARD, second, (1, 2), retired=frozenset({first.epoch}))
        await store.release(SHARD, B, FIRST)
        assert (await claimed(store, B)).grants == (Grant(second.epoch, B, FIRST, (1, 2)),)

    async def test_who_has_lost_the_claim_is_granted_nothing(self, store: Membership) -> None:
        await store.join(agent(A))
        await store.join(agent(B))
        first = claim_of(A, await claimed(store, A))
        await store.release(SHARD, A, FIRST)
        assert not await store.grant(SHARD, first, (0,))
        await claimed(store, B)
        assert not await store.grant(SHARD, first, (0,))

    async def test_a_closed_grant_is_known_as_such_and_not_gone_on_with(self, store: Membership) -> None:
        await store.join(agent(A))
        first = await claimed(store, A)
        await store.grant(SHARD, claim_of(A, first), (0, 1, 2))
        await store.close_grant(SHARD, claim_of(A, first), (0, 2, 7))
        await store.close_grant(SHARD, claim_of(A, first), (0, 2, 7))  # the answer was lost
        await store.release(SHARD, A, FIRST)
        again = await claimed(store, A)
        assert again.epoch > first.epoch
        assert again.earlier == (Grant(first.epoch, A, FIRST, (0, 2), is_closed=True),), "what is in doubt"
        await store.close_grant(SHARD, claim_of(B, first), ())  # of nobody

    async def test_a_grant_that_is_closed_without_doubt_is_nobodys_concern(self, store: Membership) -> None:
        await store.join(agent(A))
        await store.join(agent(B))
        first = await claimed(store, A)
        await store.grant(SHARD, claim_of(A, first), (0, 1))
        await store.close_grant(SHARD, claim_of(A, first), ())
        await store.release(SHARD, A, FIRST)
        second = await claimed(store, B)
        assert (second.epoch > first.epoch, second.earlier) == (True, ())
        assert await store.grant(SHARD, claim_of(B, second), (0, 1))

    async def test_an_agent_is_confirmed_while_its_record_stands(self, store: Membership) -> None:
        assert not await store.confirm(A, FIRST)
        await store.join(agent(A))
        assert await store.confirm(A, FIRST)
        assert not await store.confirm(A, SECOND)
        await store.join(agent(A, SECOND))
        assert not await store.confirm(A, FIRST)

    async def test_who_is_not_in_the_fabric_claims_nothing(self, store: Membership) -> None:
        assert await store.claim(SHARD, A, FIRST, epoch_at_least=NONE_BEFORE) is None

    async def test_leaving_gives_every_claim_back(self, store: Membership) -> None:
        await store.join(agent(A))
        await store.claim(SHARD, A, FIRST, epoch_at_least=NONE_BEFORE)
        await store.leave(A, FIRST)
        assert store.map.claims == {}

    async def test_the_placement_epoch_rises_with_weights_and_with_nothing_else(
        self, store: Membership
    ) -> None:
        await store.put_enclosures([enclosure()])
        before = store.map.placement_epoch
        await store.join(agent(A))
        await store.claim(SHARD, A, FIRST, epoch_at_least=NONE_BEFORE)
        await store.put_enclosures([enclosure()])
        assert store.map.placement_epoch == before
        await store.put_enclosures([enclosure(weight=0)])
        assert store.map.placement_epoch == before + 1

    async def test_enclosures_put_together_make_one_placement_epoch(self, store: Membership) -> None:
        before = store.map.placement_epoch
        await store.put_enclosures([enclosure("a"), enclosure("b")])
        assert set(store.map.enclosures) == {EnclosureId("a"), EnclosureId("b")}
        assert store.map.placement_epoch == before + 1
        assert store.map.earlier_placements == ()  # of no weight: nothing was placed

    async def test_the_placement_before_is_asked_for_a_while(self, store: Membership) -> None:
        await store.put_enclosures([enclosure("a")])
        before = store.map
        await store.put_enclosures([enclosure("b")])
        record = PlacementRecord(before.placement_epoch, weights_of([enclosure("a")]))
        assert list(store.map.earlier_placements) == [record]
        await store.retire_placement(before.placement_epoch)
        await store.retire_placement(before.placement_epoch)
        assert not store.map.earlier_placements

    async def test_one_placement_too_many_waits_or_is_forced(self, store: Membership) -> None:
        for number in range(EARLIER_PLACEMENTS_MAX + 1):
            await store.put_enclosures([enclosure(f"e{number}")])
        epochs = [record.epoch for record in store.map.earlier_placements]
        assert epochs == sorted(epochs, reverse=True)
        assert len(epochs) == EARLIER_PLACEMENTS_MAX
        before = store.map
        with pytest.raises(PlacementBusyError, match=f"epoch {epochs[-1]}"):
            await store.put_enclosures([enclosure("more")])
        assert store.map.enclosures == before.enclosures
        await store.put_enclosures([enclosure("e0")])  # no weight changes
        await store.put_enclosures([enclosure("more")], force=True)
        after = [record.epoch for record in store.map.earlier_placements]
        assert after == [before.placement_epoch, *epochs[:-1]]

    async def test_a_drained_enclosure_takes_nothing_new_until_it_is_used_again(
        self, store: Membership
    ) -> None:
        both = [enclosure("a"), enclosure("b")]
        await store.put_enclosures(both)
        drained = both[0].drained()
        await store.put_enclosures([drained])
        assert weights_of(store.map.enclosures.values()) == weights_of([both[1]])
        assert store.map.enclosures[both[0].id].state is EnclosureState.DRAINING
        await store.put_enclosures([store.map.enclosures[both[0].id].undrained()])
        assert weights_of(store.map.enclosures.values()) == weights_of(both)

    async def test_an_enclosure_that_is_removed_is_looked_up_while_its_placement_is(
        self, store: Membership
    ) -> None:
        both = [enclosure("a"), enclosure("b")]
        await store.put_enclosures(both)
        before = store.map.placement_epoch
        await store.put_enclosures([], removed=[both[0].id])
        assert set(store.map.enclosures) == {both[1].id}
        assert store.map.placement_epoch == before + 1
        assert store.map.earlier_placements[0].weights == weights_of(both)
        after = store.map.placement_epoch
        await store.put_enclosures([], removed=[both[0].id])  # it is gone
        assert store.map.placement_epoch == after

    async def test_one_that_is_removed_and_one_that_is_put_make_one_placement_epoch(
        self, store: Membership
    ) -> None:
        await store.put_enclosures([enclosure("a")])
        before = store.map.placement_epoch
        await store.put_enclosures([enclosure("b")], removed=[EnclosureId("a")])
        assert set(store.map.enclosures) == {EnclosureId("b")}
        assert store.map.placement_epoch == before + 1

    async def test_a_change_that_was_decided_on_what_is_not_so_any_more_is_not_made(
        self, store: Membership
    ) -> None:
        first = enclosure("a")
        await store.put_enclosures([first], seen={first.id: None})
        await store.put_enclosures([first.drained()], seen={first.id: first})
        before = store.map
        for put, removed in (([first], []), ([enclosure("b")], []), ([], [first.id])):
            with pytest.raises(ChangedError, match="enclosure a was changed meanwhile"):
                await store.put_enclosures(put, removed=removed, seen={first.id: first})
        with pytest.raises(ChangedError):
            await store.put_enclosures([first], seen={first.id: None})
        assert store.map.enclosures == before.enclosures

    async def test_a_watcher_sees_the_newest_map(self, store: Membership) -> None:
        changes = store.changes()
        seen = await anext(changes)
        await store.join(agent(A))
        await store.join(agent(B))
        async with asyncio.timeout(5):
            while set(seen.agents) != {A, B}:
                seen = await anext(changes)
        assert seen.revision == store.map.revision

    async def test_the_first_record_of_a_volume_stays(self, store: Membership) -> None:
        first = VolumeRecord(TenantId("t"), "v", Layout("m", "bf16", 16), 4096)
        other = VolumeRecord(TenantId("t"), "v", Layout("m", "fp8", 16), 4096)
        assert await store.create_volume(first) == first
        assert await store.create_volume(other) == first
        assert await store.volume(TenantId("t"), "v") == first
        assert await store.volume(TenantId("u"), "v") is None

    async def test_a_volume_is_not_made_that_some_shard_can_not_hold(self, store: Membership) -> None:
        await store.put_enclosures([enclosure("a"), enclosure("b", block_bytes_max=8192)])
        with pytest.raises(BlocksTooLargeError, match="shard b/drive-0/0 hold none above 8192"):
            await store.create_volume(volume(block_bytes=8193))
        assert await store.volume(TenantId("t"), "v") is None
        assert await store.create_volume(volume(block_bytes=8192)) == volume(block_bytes=8192)

    async def test_a_shard_is_not_added_that_can_not_hold_some_volume(self, store: Membership) -> None:
        await store.put_enclosures([enclosure("a")])
        await store.create_volume(volume("small"))
        await store.create_volume(volume("large", 8193))
        before = store.map
        small = enclosure("b", block_bytes_max=8192)
        with pytest.raises(BlocksTooLargeError, match=r"volume 'large' of tenant 't' .* up to 8193"):
            await store.put_enclosures([enclosure("c"), small], force=True)
        assert store.map.enclosures == before.enclosures
        await store.put_enclosures(
            [enclosure("b", weight=0, block_bytes_max=8192)]
        )  # nothing is placed on it
        with pytest.raises(BlocksTooLargeError, match="b/drive-0/0"):
            await store.put_enclosures([small])
        await store.put_enclosures([enclosure("b", block_bytes_max=8193)])

    async def test_a_watcher_of_volumes_sees_all_of_them_the_oldest_first(self, store: Membership) -> None:
        layout = Layout("m", "bf16", 16)
        first, second, third = (
            VolumeRecord(TenantId(tenant), name, layout, 4096)
            for tenant, name in (("t", "v"), ("t", "a"), ("a", "v"))
        )
        await store.create_volume(first)
        changes = store.volume_changes()
        seen = await anext(changes)
        assert seen == (first,)
        await store.create_volume(second)
        await store.create_volume(third)
        async with asyncio.timeout(5):
            while len(seen) < 3:
                seen = await anext(changes)
        assert seen == store.volumes == (first, second, third)
        assert store.volumes is store.volumes
        waiting = asyncio.ensure_future(anext(changes))
        await store.create_volume(first)
        await store.join(agent(A))
        await asyncio.sleep(0)
        assert not waiting.done()
        waiting.cancel()

    @pytest.fixture
    async def held(self, store: Membership) -> Held:
        """Return a hold that stands, and what ends it."""
        raise NotImplementedError

    async def test_a_change_under_a_hold_that_is_somebody_elses_by_now_is_not_made(
        self, store: Membership, held: Held
    ) -> None:
        hold, let_go = held
        await store.put_enclosures([enclosure("a")], under=hold)
        await let_go()
        before = store.map
        with pytest.raises(ChangedError, match="taken over by another process"):
            await store.put_enclosures([enclosure("b")], under=hold)
        assert store.map == before
        await store.put_enclosures([enclosure("a")], under=hold)  # it is so already
        await store.put_enclosures([enclosure("b")])

    # ---------------------------------------------------------------------------------------------- overrides

    @pytest.fixture
    def rule(self, store: Membership) -> Rule:
        """Return what lets these be the overrides, as an admin would."""
        raise NotImplementedError

    async def test_overrides_show_to_who_asks_the_store_and_to_who_watches(
        self, store: Membership, rule: Rule
    ) -> None:
        changes = store.override_changes()
        seen = await anext(changes)
        assert (
            seen.tenant(TenantId("t")).flash_bytes,
            seen.switches.get((TenantId("t"), "v"), Switch.ON),
        ) == (0, Switch.ON)
        revision = await rule(RULED)
        assert await store.refresh_overrides() == revision
        assert store.overrides == replace(RULED, revision=revision)
        async with asyncio.timeout(5):
            while seen != store.overrides:
                seen = await anext(changes)
        again = await rule(replace(RULED, switches={}))
        assert again > revision
        assert await store.refresh_overrides() == again
        assert store.overrides.switches.get((TenantId("t"), "v"), Switch.ON) is Switch.ON
        assert store.overrides.tenants == RULED.tenants

    async def test_a_volume_is_erased_once_however_often_it_is_asked_for(self, store: Membership) -> None:
        made = replace(volume(), is_erasable=True)
        await store.create_volume(made)
        changes = store.volume_changes()
        assert await anext(changes) == (made,)
        revision = await store.erase_volume(made)
        erased = await store.volume(made.tenant, made.name)
        assert erased == replace(made, incarnation=2)
        async with asyncio.timeout(5):
            assert await anext(changes) == (erased,)
        assert store.overrides.revision >= revision
        assert await store.erase_volume(made) >= revision
        assert await store.volume(made.tenant, made.name) == erased
        assert await store.refresh_overrides() >= revision
        assert await store.erase_volume(erased) > revision

    async def test_a_volume_that_some_agent_may_serve_for_ever_is_not_erased(self, store: Membership) -> None:
        await store.create_volume(volume())
        with pytest.raises(UsageError, match="before their first volume"):
            await store.erase_volume(volume())
        assert await store.volume(TenantId("t"), "v") == volume()
        with pytest.raises(MembershipError, match="no volume 'w'"):
            await store.erase_volume(replace(volume("w"), is_erasable=True))
