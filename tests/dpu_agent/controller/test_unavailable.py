"""What an agent says of shards that nobody serves, and of drives that it can't use."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from tests.cli.commands.test_status_view import shown
from tests.dpu_agent.controller.test_takeover import FIRST, QUICK, CutOff
from tests.support.agent.assembly import (
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

from ostraca_cli.commands.agent_query import FabricStatus
from ostraca_cli.commands.unavailable_view import unserved_shards
from ostraca_dpu_agent.controller.unavailable import find_unavailable, shard_counts
from ostraca_fabric.model.fabric_map import AgentRecord, Claim, FabricMap
from ostraca_fabric.model.ids import AgentId, OwnerEpoch, PlacementEpoch, ShardId, StartId, drive_id
from ostraca_fabric.telemetry.unavailable import TOLD_MAX, UNOWNED_S, Unavailable, UnownedShard, UnusedDrive

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ostraca_dpu_agent.agent import Agent
    from ostraca_fabric.membership.memory_membership import MemoryMembership

OTHER_DRIVE = drive_id(ENCLOSURE, "other")
MISSING = f"there is no path to {DRIVE} from here"


def without_owner(agent: Agent) -> list[UnownedShard]:
    return list(agent.status().unserved.shards)


def waited(agent: Agent, seconds: float = UNOWNED_S) -> None:
    """Let an agent have watched for longer."""
    since_s = agent._controller._unowned_since_s
    for shard in since_s:
        since_s[shard] -= seconds


def untrue(agent: Agent) -> dict[str, str]:
    return {each.name: each.sentence for each in agent.status().conditions if not each.is_true}


def test_unavailable_shards_are_listed_with_reasons_oldest_first() -> None:
    drives = [HeldDrive(drive=drive_id(ENCLOSURE, f"d{number}")) for number in range(4)]
    box = drives[0].record(*drives[1:])
    agents = {FIRST: AgentRecord(FIRST, StartId(b"0" * 16), ())}
    gone = Claim(AgentId("gone"), StartId(b"1" * 16), OwnerEpoch(1))
    claims = {drives[0].shard: Claim(FIRST, StartId(b"0" * 16), OwnerEpoch(1)), drives[1].shard: gone}
    fabric_map = FabricMap(FABRIC, 1, PlacementEpoch(1), agents, {box.id: box}, claims)
    assert shard_counts(fabric_map) == ((FIRST, 1),)
    assert find_unavailable(
        fabric_map,
        {drive.shard: 5.0 * number for number, drive in enumerate(drives)},
        why_shards={drives[1].shard: "it is another's", drives[2].shard: "it was tried before"},
        why_drives={drives[2].id: "it is cut short"},
        in_trouble={drives[1].id: "it stutters", drives[3].id: "it is failed"},
    ) == Unavailable(
        3,
        (
            UnownedShard(drives[3].shard, 15.0, "it is failed"),
            UnownedShard(drives[2].shard, 10.0, "it is cut short"),
            UnownedShard(drives[1].shard, 5.0, "it is another's"),
        ),
        1,
        (UnusedDrive(drives[2].id, "it is cut short"),),
    )


def test_of_many_some_are_named_and_all_are_counted() -> None:
    unowned_s = {ShardId(f"e/d/{number}"): float(number) for number in range(3 * TOLD_MAX)}
    empty = FabricMap(FABRIC, 1, PlacementEpoch(1))
    found = find_unavailable(empty, unowned_s, why_shards={}, why_drives={}, in_trouble={})
    assert (found.shard_count, len(found.shards)) == (3 * TOLD_MAX, TOLD_MAX)
    assert found.longest_s == 3 * TOLD_MAX - 1


@asynccontextmanager
async def beside_one_without_the_drive() -> AsyncIterator[tuple[Agent, Agent, CutOff]]:
    """Start two agents: the first owns the shard and can be cut off, the second lacks its drive."""
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


async def test_live_agents_report_unowned_shards_of_a_dead_agent() -> None:
    async with beside_one_without_the_drive() as (first, second, cut_off):
        assert untrue(first) == {}
        assert untrue(second) == {"drives_good": f"Unhealthy drives: {DRIVE} is unusable ({MISSING})."}
        assert second.status().owners == (("agent-0", 1),)
        await until(lambda: f"can't use 1 drive ({DRIVE})" in second.status().sentence)
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
        assert words.startswith(
            f"Shards without an owner, where gets are misses and puts are declined (NO_OWNER): {SHARD}"
        )
        assert words.endswith(f"(for {told.unowned_s:.0f} s; {MISSING}).")
        seen = FabricStatus((second.status(),), (("agent-0", "unix:///a", "it is gone"),))
        assert [each.shard for each in unserved_shards(seen) if each.is_overdue] == [SHARD]
        text = " ".join(shown(seen).split())
        assert f"{SHARD} none – – – – unserved" in text
        assert f"agent-1: {MISSING}." in text


async def test_drive_of_another_fabric_is_reported_as_in_the_log() -> None:
    drive, other = HeldDrive(), HeldDrive(drive=OTHER_DRIVE)
    other.bytes[: len(drive.bytes)] = drive.bytes  # another's superblock
    settings = replace(SETTINGS, turn_s=0.02, reopen_backoff_s=0.2)
    async with assembled(settings, drive=drive, others=(other,)) as fabric:
        await until(lambda: bool(without_owner(fabric.agent)))
        waited(fabric.agent)
        (told,) = without_owner(fabric.agent)
        assert told.shard == other.shard
        assert told.why.startswith(f"another drive than {OTHER_DRIVE} is at ")
        assert f": drive {OTHER_DRIVE} holds shard {SHARD} of fabric" in told.why
        assert told.why in untrue(fabric.agent)["shards_served"]
        await until(lambda: f"can't use 1 drive ({OTHER_DRIVE})" in fabric.agent.status().sentence)
        other.bytes[:] = HeldDrive(drive=OTHER_DRIVE).bytes
        await until(lambda: {SHARD, other.shard} == fabric.service.shards.keys())
        await until(lambda: untrue(fabric.agent) == {})
        assert without_owner(fabric.agent) == []
