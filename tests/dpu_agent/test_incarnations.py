"""Which incarnation of a volume an agent serves, and until when it may."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from tests.support.agent.assembly import FABRIC, LAYOUT, TENANT, until

from ostraca_dpu_agent.volumes import Incarnations
from ostraca_fabric.errors import MembershipError
from ostraca_fabric.membership.memory_membership import MemoryMembership
from ostraca_fabric.model.overrides import LiveSettings, Overrides
from ostraca_fabric.model.volume import VolumeRecord

ERASABLE = VolumeRecord(TENANT, "v", LAYOUT, 4096, is_erasable=True)
LASTING = VolumeRecord(TENANT, "w", LAYOUT, 4096)
TTL_S = 40.0


class AwayMembership(MemoryMembership):
    """A store that can be away."""

    is_away = False

    async def refresh_overrides(self) -> int:
        if self.is_away:
            raise MembershipError("the store is away")
        return await super().refresh_overrides()


class Watch:
    """A clock that is set by hand."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
async def membership() -> AwayMembership:
    membership = AwayMembership(FABRIC)
    for volume in (ERASABLE, LASTING):
        await membership.create_volume(volume)
    membership.rule(Overrides(live=LiveSettings(key_ttl_s=TTL_S)))
    return membership


@asynccontextmanager
async def running(incarnations: Incarnations) -> AsyncIterator[None]:
    task = asyncio.ensure_future(incarnations.run())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_an_erased_volume_is_served_under_its_next_incarnation_at_once(
    membership: AwayMembership,
) -> None:
    incarnations = Incarnations(membership, Watch())
    async with running(incarnations):
        assert incarnations.newest(ERASABLE) is ERASABLE
        revision = await membership.erase_volume(ERASABLE)
        await until(lambda: incarnations.purged >= revision)
        assert incarnations.newest(ERASABLE) == ERASABLE.erased()
        assert incarnations.newest(ERASABLE.erased()) == ERASABLE.erased()
        assert incarnations.newest(ERASABLE.erased().erased()).incarnation == 3, "others may know more"
        assert incarnations.newest(LASTING) is LASTING


async def test_an_erasure_is_purged_once_what_was_begun_before_has_ended(membership: AwayMembership) -> None:
    incarnations = Incarnations(membership, Watch())
    await incarnations.refresh()
    before = incarnations.purged
    for record in (ERASABLE, LASTING, ERASABLE):
        incarnations.begin_use(record)
    revision = await membership.erase_volume(ERASABLE)
    await incarnations.refresh()
    assert incarnations.newest(ERASABLE) == ERASABLE.erased()
    assert incarnations.purged == before < revision
    incarnations.end_use(ERASABLE)
    assert incarnations.purged == before, "another one of it is still under way"
    incarnations.end_use(ERASABLE)
    incarnations.end_use(LASTING)
    assert incarnations.purged == revision
    incarnations.begin_use(ERASABLE.erased())
    assert incarnations.purged == revision


async def test_an_erasable_volume_is_served_for_key_ttl_s_after_the_store_was_asked_last(
    membership: AwayMembership,
) -> None:
    watch = Watch()
    incarnations = Incarnations(membership, watch)
    assert not incarnations.is_served(ERASABLE), "it may have been erased before this agent began"
    assert incarnations.is_served(LASTING)
    await incarnations.refresh()
    watch.now_s = TTL_S
    assert incarnations.is_served(ERASABLE)
    membership.is_away = True
    with pytest.raises(MembershipError):
        await incarnations.refresh()
    watch.now_s = TTL_S + 0.1
    assert not incarnations.is_served(ERASABLE)
    assert incarnations.is_served(LASTING), "what can't be erased is served under the last map"
    membership.is_away = False
    await incarnations.refresh()
    assert incarnations.is_served(ERASABLE)


async def test_a_shorter_time_is_kept_to_from_when_it_is_ruled(membership: AwayMembership) -> None:
    watch = Watch()
    incarnations = Incarnations(membership, watch)
    async with running(incarnations):
        await until(lambda: incarnations.is_served(ERASABLE))
        watch.now_s = TTL_S / 2
        membership.rule(Overrides(live=LiveSettings(key_ttl_s=TTL_S / 4)))
        await until(lambda: incarnations.is_served(ERASABLE))


async def test_the_time_counts_from_before_the_store_was_asked(membership: AwayMembership) -> None:
    watch = Watch()
    incarnations = Incarnations(membership, watch)

    async def slowly() -> int:
        watch.now_s += 30.0
        return 0

    membership.refresh_overrides = slowly  # type: ignore[method-assign]
    await incarnations.refresh()
    assert incarnations.is_served(ERASABLE)
    watch.now_s = TTL_S + 0.1
    assert not incarnations.is_served(ERASABLE), "what was erased while it asked it may not have heard of"


async def test_a_store_that_is_away_is_asked_again(
    membership: AwayMembership, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ostraca_dpu_agent.volumes._RETRY_S", 0.01)
    membership.is_away = True
    incarnations = Incarnations(membership, Watch())
    async with running(incarnations):
        for _ in range(20):
            await asyncio.sleep(0)
        assert not incarnations.is_served(ERASABLE)
        membership.is_away = False
        await until(lambda: incarnations.is_served(ERASABLE))
