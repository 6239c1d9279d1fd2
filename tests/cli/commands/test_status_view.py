import io

import msgspec
import pytest
from rich.console import Console

from ostraca_cli.commands import status
from ostraca_cli.commands.agent_query import FabricStatus
from ostraca_cli.commands.status import as_json
from ostraca_cli.commands.status_view import fabric_view
from ostraca_cli.terminal.units import duration_text
from ostraca_fabric.telemetry.status import (
    AgentCounters,
    AgentStatus,
    AskCounters,
    DriveStatus,
    EnclosurePathStatus,
    MembershipStatus,
    OwnershipStatus,
    PeerStatus,
    PrefetchCounters,
    ShardStatus,
    TenantStatus,
    Unhit,
    UnhitVolume,
)
from ostraca_fabric.telemetry.unavailable import UNOWNED_S, Unavailable, UnownedShard, UnusedDrive

WORN = ShardStatus(
    "e/d1/s0",
    4,
    1234,
    1 << 30,
    2 << 30,
    5,
    is_failing=False,
    written_bytes=3 << 40,
    written_bytes_per_day=1 << 40,
    budget_bytes_per_day=2 << 40,
    budget_level_bytes=float(1 << 39),
    years_left=7.25,
    unreadable_segments=888,
    ownership=OwnershipStatus(3.25, "", False, 40, 30, 17, 141.0, 666),
)
FENCED = ShardStatus(
    "e/d2/s0",
    4,
    0,
    0,
    2 << 30,
    0,
    is_failing=False,
    ownership=OwnershipStatus(0.0, "another has a higher epoch"),
)
FULL = ShardStatus(
    "e/d3/s0",
    4,
    0,
    0,
    2 << 30,
    0,
    is_failing=False,
    ownership=OwnershipStatus(
        4.4, withheld_segments=15, retires_in_s=134.0, why_no_space="15 are withheld", space_in_s=134.0
    ),
)
STATUS = FabricStatus(
    agents=(
        AgentStatus(
            agent="agent-0",
            start_id="00",
            version="0.1.0",
            uptime_s=184.7,
            transports=("nixl", "inline"),
            sentence="serving 2 of 2 shards; no changes",
            workers=3,
            staging_bytes=256 << 20,
            staging_used_bytes=64 << 20,
            quarantined_bytes=0,
            cache_bytes=0,
            cache_used_bytes=0,
            quarantined_cached_blocks=17,
            quarantined_cached_bytes=17 << 20,
            counters=AgentCounters(
                get_hits=90,
                get_misses=10,
                put_committed=7,
                get_bytes=90 << 20,
                prefetched=PrefetchCounters(8, 64, 3, 24, 5, 40),
            ),
            shards=(
                ShardStatus("e/d0/s0", 4, 1234, 1 << 30, 2 << 30, 5, is_failing=True),
                WORN,
                FENCED,
                FULL,
            ),
            agents=(("agent-0", "unix:///a"), ("agent-1", "unix:///b")),
            drives=(
                DriveStatus("e/d0", condition="failed", why="is failed: 64 faults"),
                DriveStatus("e/d1"),
            ),
            peers=(
                PeerStatus("agent-1", is_held_off=True, why="it is gone", asks=AskCounters(555, 0, 2, 77)),
            ),
            membership=MembershipStatus(65.0, "etcd is down"),
        ),
    ),
    silent=(("agent-1", "unix:///b", "it is stopped"),),
)


def shown(found: FabricStatus) -> str:
    out = io.StringIO()
    Console(file=out, width=80).print(fabric_view(found))
    return out.getvalue()


def test_the_view_shows_tenants_where_more_than_one_is_connected() -> None:
    chat = TenantStatus("chat", 4, 3, 48 << 20, 96 << 20)
    for other, is_shown in ((TenantStatus("search", 1), True), (TenantStatus("search", 0, 0, 0, 7), False)):
        agent = msgspec.structs.replace(STATUS.agents[0], tenants=(chat, other))
        text = shown(FabricStatus(agents=(agent,), silent=()))
        assert ("96.0 MiB" in text) == ("search" in text) == is_shown


def test_the_view_tells_a_store_that_is_silent_from_one_that_can_not_be_believed() -> None:
    lost, old = "etcd has lost it", "e/d is left out"
    for membership, said in (
        (
            MembershipStatus(0.0, lost, lost),
            ["agent-0: the membership store answers with errors: etcd has lost it."],
        ),
        (
            MembershipStatus(map_trouble=old),
            ["agent-0: its map may lack something, or be old: e/d is left out."],
        ),
        (MembershipStatus(), []),
    ):
        agent = msgspec.structs.replace(STATUS.agents[0], membership=membership)
        text = shown(FabricStatus(agents=(agent,), silent=()))
        told = [line for line in text.splitlines() if "membership store" in line or "its map" in line]
        assert [line.strip() for line in told] == said


def test_the_view_shows_shards_fill_hits_and_the_controllers_sentence() -> None:
    text = shown(STATUS)
    for words in (
        "agent-0: serving 2 of 2 shards; no changes",
        "agent-1: no answer from unix:///b: it is stopped",
        "50% of 2.0 GiB",
        "agent-0: drive e/d0 is failed: 64 faults.",
        "25% of 256.0 MiB",
        "90%",
        "1234",
        "failing",
        "3 min 4 s",
        "off",
        "17 blocks of the DRAM cache, 17.0 MiB in all, under transfers",
        "Blocks prefetched since start",
        "3.0 TiB",
        "512.0 GiB",
        "7.2",
        "agent-0: the membership store has not answered for 1 min 5 s: etcd is down.",
        "e/d2/s0: agent-0 writes nothing to it, as another has a higher epoch.",
        "agent-0: agent agent-1 is held off: it is gone.",
        "fenced",
        "ever",
        "3.2 s",
        "2 min 21 s",
        "666",
        "888 segments",
        "not now",
        "no space for 134 s",
        "e/d3/s0: agent-0 has no space to hand out, and puts wait or are declined, as",
        "555",
        "unreached",
    ):
        assert words in text


def test_volumes_with_puts_and_no_hit_are_named() -> None:
    (agent,) = STATUS.agents
    unhit = Unhit(18, (UnhitVolume("chat/kv", 48, 32),))
    text = " ".join(shown(FabricStatus((msgspec.structs.replace(agent, unhit=unhit),), ())).split())
    assert "agent-0: volume chat/kv: 48 blocks were put and 32 requested since, without a hit" in text
    assert "(PYTHONHASHSEED)" in text
    assert "agent-0: 17 volumes more have puts and no hit." in text


def test_what_nobody_serves_is_shown_with_what_agents_know_of_it() -> None:
    (agent,) = STATUS.agents
    gone, alien = "drive e/d9 can't be opened at /d9: No such file", "on e/d8 lies shard x of fabric ff"
    first = msgspec.structs.replace(
        agent,
        unserved=Unavailable(
            3,
            (
                UnownedShard("e/d9/0", 34.0, gone),
                UnownedShard("e/d8/0", 33.0, alien),
                UnownedShard("e/d7/0", 2.0),
            ),
            2,
            (UnusedDrive("e/d9", gone), UnusedDrive("e/d6", "this host has no path to drive e/d6")),
        ),
        owners=(("agent-0", 4), ("agent-2", 1)),
    )
    serves = ShardStatus("e/d7/0", 4, 1, 1, 2, 0, is_failing=False)
    second = msgspec.structs.replace(
        agent,
        agent="agent-1",
        shards=(serves,),
        unserved=Unavailable(1, (UnownedShard("e/d8/0", 35.0, alien),)),
    )
    text = " ".join(shown(FabricStatus((first, second), (("agent-2", "unix:///c", "gone"),))).split())
    for words in (
        "e/d9/0 none – – – – unserved",
        "e/d8/0 none – – – – unserved",
        f"e/d9/0 has been unserved for 34 s, and blocks there are misses. agent-0: {gone}.",
        f"for 35 s, and blocks there are misses. agent-0: {alien}; agent-1: {alien}.",
        "agent-0: drive e/d6 is unusable: this host has no path to drive e/d6.",
        "agent-2: no answer from unix:///c: gone; owner of 1 shard",
    ):
        assert words in text
    assert "e/d7/0 none" not in text
    assert "drive e/d9 can't be used" not in text, "it was said already"


@pytest.mark.parametrize(("unowned_s", "code"), [(UNOWNED_S, 1), (UNOWNED_S - 0.1, 0)])
def test_the_command_fails_where_nobody_serves_a_shard(
    unowned_s: float, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (agent,) = STATUS.agents
    unserved = Unavailable(1, (UnownedShard("e/d9/0", unowned_s),))
    found = FabricStatus((msgspec.structs.replace(agent, unserved=unserved),), ())

    async def told(*_asked: object) -> FabricStatus:
        return found

    monkeypatch.setattr(status, "ask_fabric", told)
    assert status._show_once("unix:///a", "", None, is_json=True) == code
    words = "ostraca: 1 shard not served by any agent: e/d9/0\n" if code else ""
    assert capsys.readouterr().err == words


def test_other_agents_are_shown_only_where_one_was_asked() -> None:
    (agent,) = STATUS.agents
    alone = FabricStatus((msgspec.structs.replace(agent, peers=()),), ())
    assert "Requests to other agents" in shown(STATUS)
    assert "Requests to other agents" not in shown(alone)


@pytest.mark.parametrize(
    ("reservations", "is_told"),
    [("", False), ("held", False), ("not registered", True), ("reserved by another holder", True)],
)
def test_what_may_keep_a_host_from_writing_is_told(reservations: str, *, is_told: bool) -> None:
    (agent,) = STATUS.agents
    path = EnclosurePathStatus("shelf-1", 2, reservations=reservations)
    text = shown(FabricStatus((msgspec.structs.replace(agent, paths=(path,)),), ()))
    says = f"enclosure shelf-1 may refuse what this host writes: {reservations}."
    assert (says in " ".join(text.split())) == is_told


@pytest.mark.parametrize(
    ("initiators", "words"),
    [
        (["kernel", "kernel"], "agent-0: reaches 2 enclosures by the kernel's NVMe initiator."),
        (
            ["userspace", "files", "userspace"],
            "agent-0: reaches 1 enclosure by files, 2 enclosures by the user-space NVMe initiator, slow.",
        ),
        (["", "files"], "agent-0: reaches 1 enclosure by files."),
        ([""], None),
        ([], None),
    ],
)
def test_the_host_side_of_paths_is_named(initiators: list[str], words: str | None) -> None:
    (agent,) = STATUS.agents
    paths = tuple(
        EnclosurePathStatus(f"shelf-{number}", 2, initiator=initiator)
        for number, initiator in enumerate(initiators)
    )
    text = " ".join(shown(FabricStatus((msgspec.structs.replace(agent, paths=paths),), ())).split())
    assert ("reaches" in text) == (words is not None)
    assert words is None or words in text


def test_an_agent_that_others_refuse_is_told() -> None:
    (agent,) = STATUS.agents
    peer = PeerStatus("agent-1", is_refused=True, is_held_off=True, why="this token does not speak")
    text = shown(FabricStatus((msgspec.structs.replace(agent, peers=(peer,)),), ()))
    assert "refusing" in text
    assert "agent-0: agent agent-1 refuses it: this token does not speak." in text


def test_a_view_that_is_not_on_a_terminal_has_no_control_characters() -> None:
    assert "\x1b" not in shown(STATUS)


def test_the_json_holds_all_that_the_agents_said() -> None:
    decoded = msgspec.json.decode(as_json(STATUS))
    assert msgspec.convert(decoded["agents"], tuple[AgentStatus, ...]) == STATUS.agents
    assert decoded["silent"] == [{"agent": "agent-1", "address": "unix:///b", "reason": "it is stopped"}]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.9, "59 s"), (60, "1 min 0 s"), (3700, "1 h 1 min"), (2 * 86400 + 5 * 3600, "2 d 5 h")],
)
def test_durations_have_two_units(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
