"""What steps of long work come to, by values."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest

from ostraca_fabric.admin.draining import drained
from ostraca_fabric.admin.judging import (
    Again,
    Done,
    Failed,
    authenticated,
    chosen,
    identified,
    may_be_formatted,
    reached,
    replacement_of,
    seen_by_all,
)
from ostraca_fabric.admin.model import VERSION, EnclosureSpec, EnclosureStatus, Phase
from ostraca_fabric.errors import ConnectError, OstracaError
from ostraca_fabric.fabric_map import DriveRecord, EnclosureRecord, FabricMap, PlacementRecord, ShardRecord
from ostraca_fabric.ids import (
    AgentId,
    EnclosureId,
    FabricId,
    PlacementEpoch,
    StartId,
    TenantId,
    drive_id,
    shard_id,
)
from ostraca_fabric.inventory import DriveReport, EnclosureReport
from ostraca_fabric.layout import Layout
from ostraca_fabric.ports.paths import Stage
from ostraca_fabric.target import Controller, Transport
from ostraca_fabric.volume import VolumeRecord
from ostraca_fabric.wire.flash_work import Content, Looked, SeenDrive

MIB = 1 << 20
A, B = AgentId("agent-a"), AgentId("agent-b")
ONE, TWO, THREE = (f"{number:032x}" for number in (1, 2, 3))
SPEC = EnclosureSpec(VERSION, "shelf", "nqn.2025-01.io.ostraca:shelf", ("tcp://a:4420",))
NEW = EnclosureStatus(VERSION, Phase.ONBOARDING, "1")

Answers = Mapping[AgentId, Looked | OstracaError]


def seen(nguid: str, content: Content = Content.BLANK, size_bytes: int = 64 * MIB, **more: str) -> SeenDrive:
    return SeenDrive(nguid, size_bytes, 4096, "model", f"serial-{nguid[-1]}", content, **more)


def looked(*drives: SeenDrive) -> Looked:
    return Looked("nqn.2025-01.io.ostraca:host", drives, 1, 1)


def stopped(stage: Stage, trouble: str = "no") -> Looked:
    return Looked("nqn.2025-01.io.ostraca:host", stage=stage.value, trouble=trouble)


def named(
    answers: Answers, spec: EnclosureSpec = SPEC, status: EnclosureStatus = NEW
) -> tuple[object, list[str]]:
    verdict, after = identified(answers, spec, status, lambda: "f" * 32)
    return verdict, [f"{drive.name} {drive.nguid[-1]}" for drive in after.drives]


def test_every_agent_must_reach_an_enclosure_and_those_that_do_not_are_named() -> None:
    assert isinstance(reached({A: looked(), B: looked()}, 2), Done)
    assert isinstance(reached({A: looked(), B: stopped(Stage.AUTHENTICATE)}, 2), Done)
    for bad in (stopped(Stage.REACH, "nothing answers"), ConnectError("nothing answers")):
        verdict = reached({A: looked(), B: bad}, 2)
        assert isinstance(verdict, Failed)
        assert verdict.message.startswith("of 2 agents 1 cannot reach it: agent-b: ")
        assert "nothing answers" in verdict.message
    assert isinstance(reached({}, 0), Failed)


def test_an_agent_that_is_refused_or_whose_path_is_unfit_says_why() -> None:
    assert isinstance(authenticated({A: looked()}, 1), Done)
    for stage in (Stage.AUTHENTICATE, Stage.FIT):
        verdict = authenticated({A: stopped(stage, "its secret is wrong")}, 1)
        assert verdict == Failed(
            "of 1 agents 1 is not let in: agent-a: its secret is wrong",
            {"agents": {"agent-a": "its secret is wrong"}},
        )


def test_all_drives_are_used_unless_some_are_named() -> None:
    answers = {A: looked(seen(TWO), seen(ONE)), B: looked(seen(ONE), seen(TWO))}
    verdict, drives = named(answers)
    assert isinstance(verdict, Done)
    assert drives == ["drive-0 1", "drive-1 2"]
    verdict, drives = named(answers, msgspec.structs.replace(SPEC, drives=(TWO,)))
    assert (isinstance(verdict, Done), drives) == (True, ["drive-0 2"])
    verdict, drives = named(answers, msgspec.structs.replace(SPEC, drives=(THREE,)))
    assert isinstance(verdict, Failed)
    assert f"no drive {THREE}" in verdict.message


def test_drives_that_have_a_name_keep_it_and_names_are_not_given_again() -> None:
    once = chosen(chosen(NEW, seen(ONE), "a" * 32), seen(TWO), "b" * 32)
    without = msgspec.structs.replace(once, drives=once.drives[1:])
    verdict, drives = named({A: looked(seen(TWO), seen(THREE))}, status=without)
    assert (isinstance(verdict, Done), drives) == (True, ["drive-1 2", "drive-2 3"])


def test_agents_that_see_different_drives_do_not_see_one_enclosure() -> None:
    for other in (looked(seen(ONE)), looked(seen(ONE), seen(TWO, size_bytes=65 * MIB))):
        answers = {A: looked(seen(ONE), seen(TWO)), B: other}
        verdict, drives = named(answers)
        assert (isinstance(verdict, Failed), drives) == (True, [])
        assert isinstance(seen_by_all(answers), Failed)


def test_an_enclosure_without_drives_is_told_to_export_some() -> None:
    verdict, _ = named({A: looked()})
    assert isinstance(verdict, Failed)
    assert "ostraca serve enclosure" in verdict.message


@pytest.mark.parametrize(
    ("found", "wipe", "is_good"),
    [
        (seen(ONE), False, True),
        (seen(ONE, Content.OURS, format_id="a" * 32), False, True),
        (seen(ONE, Content.OURS, format_id="b" * 32), False, False),
        (seen(ONE, Content.OTHER, says="it holds shard x of fabric y"), False, False),
        (seen(ONE, Content.FOREIGN, says="it holds a file system"), False, False),
        (seen(ONE, Content.FOREIGN, says="it holds a file system"), True, True),
        (seen(ONE, Content.OTHER), True, True),
        (seen(ONE, Content.UNREADABLE, says="it can't be read"), True, False),
        (seen(ONE, size_bytes=65 * MIB), True, False),
        (seen(TWO), False, False),
    ],
)
def test_a_drive_is_formatted_if_it_is_empty_ours_or_named(
    found: SeenDrive, *, wipe: bool, is_good: bool
) -> None:
    drives = chosen(NEW, seen(ONE), "a" * 32).drives
    verdict = may_be_formatted(
        drives,
        {found.nguid: found},
        wipe=frozenset({ONE} if wipe else ()),
        segment_bytes=MIB,
        report=None,
        volumes=(),
    )
    assert isinstance(verdict, Done) is is_good
    if not is_good:
        assert ONE in verdict.message


def test_a_drive_too_small_for_some_volume_is_not_formatted() -> None:
    volume = VolumeRecord(TenantId("t"), "v", Layout("m", "bf16", 16), 2 * MIB)
    drives = chosen(NEW, seen(ONE), "a" * 32).drives
    verdict = may_be_formatted(
        drives, {ONE: seen(ONE)}, wipe=frozenset(), segment_bytes=MIB, report=None, volumes=(volume,)
    )
    assert isinstance(verdict, Failed)
    assert "segment_bytes" in verdict.message


def test_doubts_of_the_enclosure_s_own_daemon_are_passed_on() -> None:
    told = EnclosureReport(
        EnclosureId("shelf"),
        StartId(bytes(16)),
        SPEC.nqn,
        (Controller(Transport.TCP, "a", 4420),),
        (DriveReport("nvme0n1", ONE, 64 * MIB, 4096, doubts=("it has no power-loss protection",)),),
    )
    verdict = may_be_formatted(
        chosen(NEW, seen(ONE), "a" * 32).drives,
        {ONE: seen(ONE)},
        wipe=frozenset(),
        segment_bytes=MIB,
        report=told,
        volumes=(),
    )
    assert verdict == Done(
        "1 drives can be used, with 1 doubts", {"doubts": [f"{ONE}: it has no power-loss protection"]}
    )


def test_a_drive_s_replacement_is_the_only_one_that_is_free_or_the_one_that_is_named() -> None:
    status = chosen(NEW, seen(ONE), "a" * 32)
    both = {ONE: seen(ONE), TWO: seen(TWO)}
    assert replacement_of(both, status, "") == seen(TWO)
    assert replacement_of(both, status, TWO) == seen(TWO)
    for drives, wanted, says in (
        ({ONE: seen(ONE)}, "", "put one in"),
        ({**both, THREE: seen(THREE)}, "", "name one"),
        (both, THREE, "put it in"),
        (both, ONE, "used already"),
    ):
        found = replacement_of(drives, status, wanted)
        assert isinstance(found, Failed)
        assert says in found.message


def test_an_enclosure_is_drained_when_no_placement_that_is_asked_has_weight_there() -> None:
    shelf, other = EnclosureId("shelf"), EnclosureId("other")
    fabric_map = FabricMap(
        FabricId(bytes(16)), 1, PlacementEpoch(3), enclosures={each: _record(each) for each in (shelf, other)}
    )
    assert isinstance(drained(fabric_map, shelf, (), {}, again_s=1.0), Done)
    elsewhere = PlacementRecord(PlacementEpoch(2), {other: {shard_id(drive_id(other, "d"), 0): 1}})
    here = PlacementRecord(PlacementEpoch(1), {shelf: {shard_id(drive_id(shelf, "d"), 0): 1}})
    before = _with(fabric_map, (elsewhere,))
    assert isinstance(drained(before, shelf, (), {}, again_s=1.0), Done)
    verdict = drained(_with(fabric_map, (elsewhere, here)), shelf, (), {}, again_s=1.0)
    assert isinstance(verdict, Again)
    assert verdict.detail["placement_epochs"] == [1]


def _with(fabric_map: FabricMap, earlier: tuple[PlacementRecord, ...]) -> FabricMap:
    return FabricMap(
        fabric_map.fabric, 1, PlacementEpoch(3), enclosures=fabric_map.enclosures, earlier_placements=earlier
    )


def _record(enclosure: EnclosureId) -> EnclosureRecord:
    drive = drive_id(enclosure, "d")
    return EnclosureRecord(
        enclosure, (DriveRecord(drive),), (ShardRecord(shard_id(drive, 0), drive, 0, 1, 1),)
    )
