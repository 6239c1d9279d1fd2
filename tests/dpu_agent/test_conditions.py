"""What an agent says of its own condition."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from tests.fabric.telemetry.metrics_samples import STATUS

from ostraca_dpu_agent.conditions import AgentPhase, observe
from ostraca_fabric.telemetry.status import (
    AgentStatus,
    DriveStatus,
    EnclosurePathStatus,
    MembershipStatus,
    OwnershipStatus,
    PathStatus,
    PeerStatus,
)
from ostraca_fabric.telemetry.unavailable import UNOWNED_S, Unavailable, UnownedShard, UnusedDrive

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "metrics.md").read_text()
SHARD = msgspec.structs.replace(STATUS.shards[0], unreadable_segments=0)
GOOD = msgspec.structs.replace(
    STATUS, unserved=Unavailable(), drives=(DriveStatus("e/d"),), shards=(SHARD,), paths=()
)
LIVE, LOST = PathStatus("tcp://a:4420", True), PathStatus("tcp://b:4420", False, "connecting")
UNUSED = UnusedDrive("e/d1", "it has gone")
HELD_OFF = PeerStatus("agent-1", is_held_off=True, why="a look-up's deadline was missed")


def untrue(status: AgentStatus, phase: AgentPhase = AgentPhase.SERVING) -> dict[str, str]:
    return {each.name: each.sentence for each in observe(status, phase) if not each.is_true}


def with_shard(**fields: object) -> AgentStatus:
    return msgspec.structs.replace(GOOD, shards=(msgspec.structs.replace(SHARD, **fields),))


def test_the_reference_page_lists_every_condition_and_no_other() -> None:
    first = PAGE.split("| condition |")[1].split("\n\n")[0]
    assert re.findall(r"^\| `(\w+)`", first, re.MULTILINE) == [
        each.name for each in observe(GOOD, AgentPhase.SERVING)
    ]


def test_an_agent_in_order_has_nothing_untrue() -> None:
    assert untrue(GOOD) == {}


@pytest.mark.parametrize("phase", [AgentPhase.STARTING, AgentPhase.STOPPING])
def test_an_agent_is_ready_only_between_its_start_and_its_end(phase: AgentPhase) -> None:
    assert untrue(GOOD, phase) == {"ready": phase.value}


def test_trouble_is_told_and_is_no_unreadiness() -> None:
    drive = DriveStatus("e/d", condition="suspect", why="has had 8 faults")
    for status, name, sentence in (
        (
            with_shard(recovered=0.5),
            "shards_recovered",
            "Shards in recovery, without puts until its end: enclosure-0/drive-0/0 (50%).",
        ),
        (
            msgspec.structs.replace(
                GOOD,
                unserved=Unavailable(
                    2, (UnownedShard("e/d/1", 10.0, "it is cut short"), UnownedShard("e/d/2", 0.5))
                ),
            ),
            "shards_served",
            (
                "Shards without an owner, where gets are misses and puts are declined "
                "(NO_OWNER): e/d/1 (for 10 s; it is cut short), e/d/2 (for 0 s; left to another agent)."
            ),
        ),
        (
            msgspec.structs.replace(GOOD, unserved=Unavailable(drive_count=1, drives=(UNUSED,))),
            "drives_good",
            "Unhealthy drives: e/d1 is unusable (it has gone).",
        ),
        (
            with_shard(ownership=OwnershipStatus(0.0, "the store is silent")),
            "shards_writable",
            "Owned shards that are fenced: enclosure-0/drive-0/0 (the store is silent).",
        ),
        (
            with_shard(
                ownership=OwnershipStatus(4.4, why_no_space="all is withheld", space_in_s=134.2),
            ),
            "shards_have_space",
            (
                "1 of 1 owned shard without free space, where new puts wait or are declined "
                "(NO_SPACE, BUSY): enclosure-0/drive-0/0 (all is withheld, for at most 134 s more). "
                "Gets continue. If this happens often, use larger shards or smaller segments."
            ),
        ),
        (
            with_shard(ownership=OwnershipStatus(withheld_segments=1, retires_in_s=9.0)),
            "grants_retired",
            (
                "Shards with possible late writes of an earlier owner: enclosure-0/drive-0/0 (1 segment "
                "for 9 s more)."
            ),
        ),
        (
            with_shard(ownership=OwnershipStatus(withheld_segments=3, retires_in_s=41.7)),
            "grants_retired",
            (
                "Shards with possible late writes of an earlier owner: enclosure-0/drive-0/0 (3 segments "
                "for 42 s more)."
            ),
        ),
        (
            msgspec.structs.replace(GOOD, peers=(HELD_OFF,)),
            "peers_reachable",
            "Agents with an open circuit breaker: agent-1 (a look-up's deadline was missed).",
        ),
        (
            msgspec.structs.replace(
                GOOD, peers=(PeerStatus("agent-1", is_refused=True, why="this token does not speak"),)
            ),
            "peers_reachable",
            (
                "Agents that refuse this agent: agent-1 (this token does not speak). Give all agents of the "
                "fabric the same token file, or certificates of the same CA; until then some shards are "
                "unreachable."
            ),
        ),
        (
            with_shard(unreadable_segments=2),
            "summaries_readable",
            ("Shards with unreadable summaries and lost blocks: enclosure-0/drive-0/0 (2 segments)."),
        ),
        (
            with_shard(is_index_full=True),
            "indexes_have_room",
            "Shards with a full index: enclosure-0/drive-0/0.",
        ),
        (
            with_shard(budget_level_bytes=-1.0, years_left=2.0),
            "write_budget_left",
            "Shards above their write budget: enclosure-0/drive-0/0.",
        ),
        (
            msgspec.structs.replace(GOOD, paths=(EnclosurePathStatus("shelf-1", 2, (LIVE, LOST)),)),
            "paths_live",
            "Enclosures with lost paths: shelf-1 (1 of 2 paths are live).",
        ),
        (
            msgspec.structs.replace(
                GOOD, paths=(EnclosurePathStatus("shelf-1", 0, (LOST,), "nothing answers there"),)
            ),
            "paths_live",
            "Enclosures with lost paths: shelf-1 (nothing answers there).",
        ),
        (
            msgspec.structs.replace(GOOD, drives=(drive,)),
            "drives_good",
            "Unhealthy drives: e/d has had 8 faults.",
        ),
        (
            msgspec.structs.replace(GOOD, cache_used_bytes=GOOD.cache_bytes),
            "cache_has_room",
            (
                "536870912 of 536870912 bytes of the DRAM cache are used: the least recently used blocks are "
                "evicted."
            ),
        ),
        (
            msgspec.structs.replace(GOOD, staging_used_bytes=GOOD.staging_bytes),
            "staging_has_room",
            "268435456 of 268435456 bytes of staging are used: requests are declined.",
        ),
    ):
        assert untrue(status) == {name: sentence}


def test_an_unreachable_membership_store_is_told() -> None:
    status = msgspec.structs.replace(GOOD, membership=MembershipStatus(3.0, "etcd is down"))
    assert untrue(status) == {
        "membership_answers": (
            "The membership store does not answer, and the agent continues with the last map: etcd is down."
        )
    }


def test_a_store_that_answers_and_can_not_be_believed_is_not_called_silent() -> None:
    status = msgspec.structs.replace(GOOD, membership=MembershipStatus(0.0, "etcd has lost the fabric"))
    assert untrue(status) == {
        "membership_answers": (
            "The membership store answers with errors, and the agent continues with the last map: etcd has "
            "lost the fabric."
        )
    }


def test_a_map_that_is_old_or_not_whole_is_told_though_the_store_answers() -> None:
    trouble = "/ostraca/test/enclosures/shelf-1 is left out: a record in etcd can't be read"
    status = msgspec.structs.replace(GOOD, membership=MembershipStatus(map_trouble=trouble))
    assert untrue(status) == {"map_current": f"The map may be incomplete or stale: {trouble}."}


def test_an_agent_that_has_read_no_map_yet_says_so() -> None:
    status = msgspec.structs.replace(GOOD, membership=MembershipStatus(8.0, "etcd is down", has_map=False))
    assert untrue(status) == {
        "membership_answers": (
            "The membership store does not answer, and the agent has no map: etcd is down."
        ),
        "map_current": "The agent has no map yet and serves nothing.",
    }


def test_an_agent_that_has_left_the_fabric_need_not_be_reached() -> None:
    assert untrue(msgspec.structs.replace(GOOD, peers=(HELD_OFF,), agents=GOOD.agents[:1])) == {}


def test_a_shard_is_without_an_owner_for_a_moment_when_it_gets_another_one() -> None:
    status = msgspec.structs.replace(GOOD, unserved=Unavailable(1, (UnownedShard("e/d/1", UNOWNED_S - 0.1),)))
    assert untrue(status) == {}


def test_a_cache_that_is_off_and_a_drive_without_a_rating_are_no_trouble() -> None:
    assert untrue(msgspec.structs.replace(GOOD, cache_bytes=0, cache_used_bytes=0)) == {}
    assert untrue(with_shard(budget_level_bytes=-1.0, years_left=None)) == {}


def test_of_many_only_some_are_named() -> None:
    shards = tuple(msgspec.structs.replace(SHARD, shard=f"s{number}", recovered=0.0) for number in range(9))
    assert untrue(msgspec.structs.replace(GOOD, shards=shards))["shards_recovered"].endswith(
        ": s0 (0%), s1 (0%), s2 (0%), s3 (0%) and 5 more."
    )
