"""What serving a shard among other owners has to wait for, on virtual time and with the times of a pod."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest
from tests.dpu_agent.shards.test_ownership import RECORD, owned, ready, superblock_of
from tests.support.agent.assembly import FABRIC, SETTINGS, SHARD, HeldDrive, committed, reserved
from tests.support.agent.owned_shard import keys_of
from tests.support.simulated.virtual_time import VirtualLoop

from ostraca_dpu_agent.controller.served_shard import ServedShard
from ostraca_dpu_agent.shards.shard import OwnedShard, core_of
from ostraca_fabric.drives.drive_health import HealthSettings
from ostraca_fabric.drives.guarded_drive import GuardedDrive
from ostraca_fabric.errors import MembershipError
from ostraca_fabric.membership.memory_membership import MemoryMembership
from ostraca_fabric.model.fabric_map import AgentRecord, Claim, Grant
from ostraca_fabric.model.ids import AgentId, OwnerEpoch, ShardId, StartId
from ostraca_fabric.model.outcome import PutState
from ostraca_fabric.telemetry.requests import EventRing

OWNER = replace(
    SETTINGS.owner, grant_s=3.0, hold_s=5.0, late_write_s=120.0, adopt_every_s=10.0, pin_max_s=7.0
)
WAIT_S = 3.0 + 5.0 + 120.0
"""How long an earlier owner that did not close its grant is waited for."""

THE_SHARD = ShardId(SHARD)
FIRST, SECOND = (AgentRecord(AgentId(f"agent-{number}"), StartId(bytes(16)), ()) for number in range(2))


class Busy(MemoryMembership):
    """A store that takes its time to record a grant, or fails to."""

    def __init__(self) -> None:
        super().__init__(FABRIC)
        self.asked: list[tuple[int, ...]] = []
        self.answers = asyncio.Event()
        self.answers.set()
        self.says: Callable[[], bool] | None = None
        """What becomes of a request in place of recording anything."""

    async def grant(
        self,
        shard: ShardId,
        claim: Claim,
        segments: Sequence[int],
        *,
        retired: frozenset[OwnerEpoch] = frozenset(),
    ) -> bool:
        self.asked.append(tuple(segments))
        await self.answers.wait()
        if self.says is not None:
            return self.says()
        return await super().grant(shard, claim, segments, retired=retired)


@dataclass
class Succession:
    """An owner that is gone from the store but not from the drive, and who came after it."""

    store: Busy
    drive: HeldDrive
    before: OwnedShard
    after: OwnedShard
    serving: ServedShard

    def now_s(self) -> float:
        """How long ago the second one began to serve the shard."""
        return asyncio.get_running_loop().time() - self.serving.claimed_s

    async def at(self, now_s: float) -> None:
        await asyncio.sleep(now_s - self.now_s())

    async def lands(self, number: int) -> None:
        """Let the first one list a block, whether it may or not."""
        made = await reserved(self.before, [number])
        assert await committed(self.before, made, [number]) == [PutState.COMMITTED]

    def finds(self, number: int) -> bool:
        """Whether the second one lists a block."""
        return bool(self.after.core.resolve(self.after._clock(), keys_of([number]), pin_s=0.0).found[0])


@asynccontextmanager
async def succession(*, is_closed: bool = False, also: tuple[Grant, ...] = ()) -> AsyncIterator[Succession]:
    """Prepare the second owner to begin.

    The first owner's grant is closed or not, and earlier owners have grants of their own.
    """
    drive, clock, store = HeldDrive(12), asyncio.get_running_loop().time, Busy()
    await store.put_enclosures([drive.record()])
    async with owned(drive, clock) as before:
        before.confirm(math.inf)
        await store.join(FIRST)
        await store.claim(THE_SHARD, FIRST.id, FIRST.start, epoch_at_least=OwnerEpoch(1))
        wanted = before.wanted_grant()
        assert wanted is not None
        assert await store.grant(THE_SHARD, Claim(FIRST.id, FIRST.start, OwnerEpoch(1)), wanted)
        before.apply_grant(wanted)
        await ready(before)
        await store.leave(FIRST.id, FIRST.start)
        await store.join(SECOND)
        claimed = await store.claim(THE_SHARD, SECOND.id, SECOND.start, epoch_at_least=OwnerEpoch(1))
        assert claimed is not None
        claimed = replace(
            claimed,
            grants=(*also, *(replace(each, is_closed=is_closed) for each in claimed.earlier), claimed.own),
        )
        superblock = await superblock_of(drive)
        core, events = core_of(superblock, OWNER), EventRing("b", 16, clock)
        after = OwnedShard(RECORD, drive, core, settings=OWNER, clock=clock, events=events)
        serving = ServedShard(
            after,
            GuardedDrive(drive, HealthSettings(), clock),
            superblock,
            claimed,
            agent=(SECOND.id, SECOND.start),
            claimed_s=clock(),
            settings=OWNER,
            membership=store,
            clock=clock,
            preempt=bars_nobody,
        )
        assert await serving.recover()
        store.asked.clear()
        drive.writes.clear()
        yield Succession(store, drive, before, after, serving)
        assert await after.close(within_s=5)


async def bars_nobody(_: AgentId) -> None:
    """There is nothing that could."""


def played(story: Callable[[], Coroutine[None, None, None]]) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(story())


def begin(scene: Succession) -> None:
    scene.serving.begin(scene.after.spawn)
    scene.after.confirm(math.inf)


# ------------------------------------------------------------------------------------- recorded before used


def test_segment_is_not_used_before_its_recorded_grant() -> None:
    async def story() -> None:
        async with succession() as scene:
            scene.store.answers.clear()
            begin(scene)
            await asyncio.sleep(1.0)
            assert len(scene.store.asked) == 1
            assert not is_used(scene)
            assert (await reserved(scene.after, [1])).states.tolist() == [PutState.DECLINED]
            scene.store.answers.set()
            await ready(scene.after)
            assert scene.after.core.grants.segments == set(scene.store.asked[0])
            assert (await reserved(scene.after, [1])).states.tolist() == [PutState.STAGED]

    played(story)


def is_used(scene: Succession) -> bool:
    """Whether any segment is granted as far as the second one knows, or was opened."""
    return bool(scene.after.core.grants.segments or scene.drive.writes)


def fails() -> bool:
    raise MembershipError("nobody answers")


@pytest.mark.parametrize("says", [fails, lambda: False], ids=["fails", "refuses"])
def test_segment_without_a_recorded_grant_is_not_used(says: Callable[[], bool]) -> None:
    async def story() -> None:
        async with succession() as scene:
            scene.store.says = says
            begin(scene)
            await asyncio.sleep(10.0)
            assert len(scene.store.asked) > 1, "it is asked again"
            assert not is_used(scene)
            assert (await reserved(scene.after, [1])).states.tolist() == [PutState.DECLINED]
            scene.store.says = None
            await ready(scene.after)
            assert (await reserved(scene.after, [1])).states.tolist() == [PutState.STAGED]

    played(story)


# ----------------------------------------------------------------------------------------- what is waited for


@pytest.mark.parametrize(("is_closed", "waits_s"), [(False, WAIT_S), (True, 120.0)])
def test_earlier_grant_is_kept_while_writes_may_land(*, is_closed: bool, waits_s: float) -> None:
    async def story() -> None:
        async with succession(is_closed=is_closed) as scene:
            begin(scene)
            assert scene.serving.retires_in_s == pytest.approx(waits_s)
            await scene.at(waits_s - 0.1)
            assert scene.after.withheld
            await scene.at(waits_s + 0.1)
            assert not scene.after.withheld
            assert scene.serving.retires_in_s is None
            assert [grant.agent for grant in scene.store.store._grants[THE_SHARD].unretired] == [SECOND.id]

    played(story)


def test_late_commits_are_adopted_at_the_next_read() -> None:
    async def story() -> None:
        async with succession() as scene:
            begin(scene)
            for number, lands_s in enumerate((5.0, 53.0)):
                await scene.at(lands_s)
                await scene.lands(number)
                assert not scene.finds(number)
                await scene.at(lands_s + OWNER.adopt_every_s)
                assert scene.finds(number)
                assert scene.after.withheld

    played(story)


def test_last_late_commits_are_adopted_before_retirement() -> None:
    async def story() -> None:
        async with succession() as scene:
            begin(scene)
            await scene.at(WAIT_S - 1.0)
            await scene.lands(1)
            await scene.at(WAIT_S - 0.1)
            assert not scene.finds(1)
            await scene.at(WAIT_S + 0.1)
            assert not scene.after.withheld
            assert scene.finds(1)

    played(story)


def test_segments_stay_withheld_until_the_grant_retires_in_the_store() -> None:
    async def story() -> None:
        async with succession() as scene:
            begin(scene)
            await scene.at(WAIT_S - 1.0)
            scene.store.says = fails
            await scene.at(WAIT_S + 10.0)
            assert scene.after.withheld
            scene.store.says = None
            await scene.at(WAIT_S + 20.0)
            assert not scene.after.withheld

    played(story)


def test_due_grant_is_read_once_while_the_store_is_unreachable() -> None:
    async def story() -> None:
        async with succession() as scene:
            scene.drive.has_volatile_cache = True  # each look ends with a flush
            begin(scene)
            await scene.at(WAIT_S - 1.0)
            await scene.lands(1)
            scene.store.says = fails
            scene.drive.asked.clear()
            await scene.at(WAIT_S + 0.1)
            assert scene.finds(1)
            asked = len(scene.store.asked)
            await scene.at(WAIT_S + 600.0)
            assert scene.drive.asked == ["flush"]
            assert len(scene.store.asked) - asked >= 599, "the store is asked each second"
            assert scene.after.withheld
            scene.store.says = None
            await scene.at(WAIT_S + 602.0)
            assert not scene.after.withheld

    played(story)


def test_grants_not_due_are_read_while_the_store_is_unreachable() -> None:
    closed = Grant(OwnerEpoch(0), FIRST.id, FIRST.start, (11,), is_closed=True)

    async def story() -> None:
        async with succession(also=(closed,)) as scene:
            begin(scene)
            await scene.at(110.0)
            scene.store.says = fails
            scene.drive.has_volatile_cache = True
            await scene.at(120.1)
            assert len(scene.store.asked) > 1, "the closed one is due"
            await scene.lands(1)
            scene.drive.asked.clear()
            await scene.at(WAIT_S - 1.0)
            assert scene.drive.asked == []
            await scene.lands(2)
            scene.drive.asked.clear()
            await scene.at(WAIT_S + 1.1)
            assert scene.finds(1)
            assert scene.finds(2)
            await scene.at(WAIT_S + 600.0)
            assert scene.drive.asked == ["flush"]
            scene.store.says = None
            await scene.at(WAIT_S + 602.0)
            assert not scene.after.withheld

    played(story)


def test_failed_read_of_a_due_grant_is_repeated_before_retirement() -> None:
    async def story() -> None:
        async with succession() as scene:
            begin(scene)
            await scene.at(WAIT_S - 1.0)
            await scene.lands(1)
            scene.drive.has_volatile_cache = scene.drive.fails_flushes = True
            scene.store.asked.clear()
            await scene.at(WAIT_S + 60.0)
            assert scene.store.asked == []
            scene.drive.fails_flushes = False
            await scene.at(WAIT_S + 95.0)
            assert not scene.after.withheld
            assert scene.finds(1)

    played(story)
