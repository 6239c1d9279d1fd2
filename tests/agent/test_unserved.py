"""What an agent says of shards that nobody serves, and of drives that it can't use."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from tests.agent.assembly import (
    DRIVE,
    ENCLOSURE,
    FABRIC,
    SETTINGS,
    SHARD,
    HeldDrive,
    another_agent,
    assembled,
    stop,
    until,
)
from tests.agent.test_takeover import FIRST, QUICK, CutOff
from tests.cli.test_status_view import shown

from ostraca.cli.status import FabricStatus
from ostraca.cli.unserved_view import served_by_nobody
from ostraca_dpu_agent.unserved import owners_of, unserved
from ostraca_fabric.fabric_map import AgentRecord, Claim, FabricMap
from ostraca_fabric.ids import AgentId, OwnerEpoch, PlacementEpoch, ShardId, StartId, drive_id
from ostraca_fabric.unserved import TOLD_MAX, UNOWNED_S, Unserved, UnservedShard, UnusedDrive

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ostraca_dpu_agent.agent import Agent
    from ostraca_fabric.adapters.memory_membership import MemoryMembership

OTHER_DRIVE = drive_id(ENCLOSURE, "other")
MISSING = f"there is no path to {DRIVE} from here"


def without_owner(agent: Agent) -> list[UnservedShard]:
    return list(agent.status().unserved.shards)


def waited(agent: Agent, seconds: float = UNOWNED_S) -> None:
    """Let an agent have watched for longer."""
    since_s = agent._steward._unowned_since_s
    for shard in since_s:
        since_s[shard] -= seconds


def untrue(agent: Agent) -> dict[str, str]:
    return {each.name: each.sentence for each in agent.status().conditions if not each.is_true}


def test_shards_are_told_with_what_is_wrong_with_their_drives_those_longest_without_an_owner_first() -> None:
    drives = [HeldDrive(drive=drive_id(ENCLOSURE, f"d{number}")) for number in range(4)]
    box = drives[0].record(*drives[1:])
    agents = {FIRST: AgentRecord(FIRST, StartId(b"0" * 16), ())}
    gone = Claim(AgentId("gone"), StartId(b"1" * 16), OwnerEpoch(1))
    claims = {drives[0].shard: Claim(FIRST, StartId(b"0" * 16), OwnerEpoch(1)), drives[1].shard: gone}
    fabric_map = FabricMap(FABRIC, 1, PlacementEpoch(1), agents, {box.id: box}, claims)
    assert owners_of(fabric_map) == ((FIRST, 1),)
    assert unserved(
        fabric_map,
        {drive.shard: 5.0 * number for number, drive in enumerate(drives)},
        why_shards={drives[1].shard: "it is another's", drives[2].shard: "it was tried before"},
        why_drives={drives[2].id: "it is cut short"},
        in_trouble={drives[1].id: "it stutters", drives[3].id: "it is failed"},
    ) == Unserved(
        3,
        (
            UnservedShard(drives[3].shard, 15.0, "it is failed"),
            UnservedShard(drives[2].shard, 10.0, "it is cut short"),
            UnservedShard(drives[1].shard, 5.0, "it is another's"),
        ),
        1,
        (UnusedDrive(drives[2].id, "it is cut short"),),
    )


def test_of_many_some_are_named_and_all_are_counted() -> None:
    unowned_s = {ShardId(f"e/d/{number}"): float(number) for number in range(3 * TOLD_MAX)}
    empty = FabricMap(FABRIC, 1, PlacementEpoch(1))
    found = unserved(empty, unowned_s, why_shards={}, why_drives={}, in_trouble={})
    assert (found.shard_count, len(found.shards)) == (3 * TOLD_MAX, TOLD_MAX)
    assert found.longest_s == 3 * TOLD_MAX - 1


@asynccontextmanager
async def beside_one_without_the_drive() -> AsyncIterator[tuple[Agent, Agent, CutOff]]:
    """The first agent owns the shard, and can be cut off; the second one lacks its drive."""
    async with AsyncExitStack() as both:
        cut_off: list[CutOff] = []

        def behind(membership: MemoryMembership) -> MemoryMembership:
            cut_off.append(CutOff(membership))
            return cut_off[0]

        fabric = await both.enter_async_context(assembled(QUICK, behind=behind))
        second = another_agent(1, QUICK, (), fabric.membership, fabric.owners, ())
        await second.join()
        await second.start()
        yield fabric.agent, second, cut_off[0]
        assert await stop(second)
        second.unmap()


async def test_what_an_agent_that_died_leaves_to_nobody_is_told_by_the_others() -> None:
    async with beside_one_without_the_drive() as (first, second, cut_off):
        assert untrue(first) == {}
        assert untrue(second) == {"drives_good": f"Drives in trouble: {DRIVE} can't be used ({MISSING})."}
        assert second.status().owners == (("agent-0", 1),)
        await until(lambda: f"I can't use 1 drive: {DRIVE}" in second.status().sentence)
        cut_off.cut()
        cut_off.store.leave(FIRST, first.start_id)
        cut_off._say_changed()
        await until(lambda: bool(without_owner(second)))
        assert "shards_served" not in untrue(second), "it is so for a moment in every fail-over"
        waited(second)
        (told,) = without_owner(second)
        assert told.unowned_s >= UNOWNED_S
        assert (told.shard, told.why) == (SHARD, MISSING)
        words = untrue(second)["shards_served"]
        assert words.startswith("Nobody serves 1 shard of the fabric, so that blocks there are misses")
        assert words.endswith(f"(for {told.unowned_s:.0f} s; {MISSING}).")
        seen = FabricStatus((second.status(),), (("agent-0", "unix:///a", "it is gone"),))
        assert [each.shard for each in served_by_nobody(seen) if each.is_overdue] == [SHARD]
        text = " ".join(shown(seen).split())
        assert f"{SHARD} nobody – – – – unserved" in text
        assert f"agent-1: {MISSING}." in text


async def test_a_drive_of_another_fabric_is_told_with_the_sentence_of_the_log() -> None:
    drive, other = HeldDrive(), HeldDrive(drive=OTHER_DRIVE)
    other.bytes[: len(drive.bytes)] = drive.bytes  # another's superblock
    async with assembled(replace(SETTINGS, turn_s=0.02), drive=drive, others=(other,)) as fabric:
        await until(lambda: bool(without_owner(fabric.agent)))
        waited(fabric.agent)
        (told,) = without_owner(fabric.agent)
        assert told.shard == other.shard
        assert told.why.startswith(f"on {OTHER_DRIVE} at 0 lies shard {SHARD} of fabric")
        assert told.why in untrue(fabric.agent)["shards_served"]
        assert f"1 shard could not be opened: {other.shard}" in fabric.agent.status().sentence
        other.bytes[:] = HeldDrive(drive=OTHER_DRIVE).bytes
        fabric.agent._steward.shards._failed.clear()
        await until(lambda: {SHARD, other.shard} == fabric.service.shards.keys())
        await until(lambda: untrue(fabric.agent) == {})
        assert without_owner(fabric.agent) == []
