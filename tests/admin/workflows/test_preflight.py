"""What steps of long work come to, by values."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest

from ostraca_admin.model import VERSION, EnclosurePhase, EnclosureSpec, RegistrationStatus
from ostraca_admin.workflows.drain import drain_verdict
from ostraca_admin.workflows.preflight import (
    StepDone,
    StepFailed,
    StepPending,
    authentication_verdict,
    choose_drives,
    choose_replacement,
    format_verdict,
    reach_verdict,
    visible_drives,
    with_drive,
)
from ostraca_fabric.errors import ConnectError, OstracaError
from ostraca_fabric.model.fabric_map import (
    DriveRecord,
    EnclosureRecord,
    FabricMap,
    PlacementRecord,
    ShardRecord,
)
from ostraca_fabric.model.ids import (
    AgentId,
    EnclosureId,
    FabricId,
    PlacementEpoch,
    StartId,
    TenantId,
    drive_id,
    shard_id,
)
from ostraca_fabric.model.inventory import DriveReport, EnclosureReport
from ostraca_fabric.model.target import Controller, TargetTransport
from ostraca_fabric.model.volume import Layout, VolumeRecord
from ostraca_fabric.ports.paths import Stage
from ostraca_fabric.wire.flash_work import Content, DiscoveredDrive, DiscoveredDrives

MIB = 1 << 20
A, B = AgentId("agent-a"), AgentId("agent-b")
ONE, TWO, THREE = (f"{number:032x}" for number in (1, 2, 3))
SPEC = EnclosureSpec(VERSION, "shelf", "nqn.2025-01.io.ostraca:shelf", ("tcp://a:4420",))
NEW = RegistrationStatus(VERSION, EnclosurePhase.ONBOARDING, "1")

Answers = Mapping[AgentId, DiscoveredDrives | OstracaError]


def seen(
    nguid: str, content: Content = Content.BLANK, size_bytes: int = 64 * MIB, **more: str
) -> DiscoveredDrive:
    return DiscoveredDrive(nguid, size_bytes, 4096, "model", f"serial-{nguid[-1]}", content, **more)


def looked(*drives: DiscoveredDrive) -> DiscoveredDrives:
    return DiscoveredDrives("nqn.2025-01.io.ostraca:host", drives, 1, 1)


def stopped(stage: Stage, trouble: str = "no") -> DiscoveredDrives:
    return DiscoveredDrives("nqn.2025-01.io.ostraca:host", stage=stage.value, trouble=trouble)


def named(
    answers: Answers, spec: EnclosureSpec = SPEC, status: RegistrationStatus = NEW
) -> tuple[object, list[str]]:
    verdict, after = choose_drives(answers, spec, status, lambda: "f" * 32)
    return verdict, [f"{drive.name} {drive.nguid[-1]}" for drive in after.drives]


def test_every_agent_must_reach_an_enclosure_and_those_that_do_not_are_named() -> None:
    assert isinstance(reach_verdict({A: looked(), B: looked()}), StepDone)
    assert isinstance(reach_verdict({A: looked(), B: stopped(Stage.AUTHENTICATE)}), StepDone)
    for bad in (stopped(Stage.REACH, "nothing answers"), ConnectError("nothing answers")):
        verdict = reach_verdict({A: looked(), B: bad})
        assert isinstance(verdict, StepFailed)
        assert verdict.message.startswith("1 of 2 agents cannot reach the enclosure: agent-b: ")
        assert "nothing answers" in verdict.message
    assert isinstance(reach_verdict({}), StepFailed)


def test_an_agent_that_is_refused_or_whose_path_is_unfit_says_why() -> None:
    assert isinstance(authentication_verdict({A: looked()}), StepDone)
    for stage in (Stage.AUTHENTICATE, Stage.FIT):
        verdict = authentication_verdict({A: stopped(stage, "its secret is wrong")})
        assert verdict == StepFailed(
            "1 of 1 agents are not admitted: agent-a: its secret is wrong",
            {"agents": {"agent-a": "its secret is wrong"}},
        )


def test_all_drives_are_used_unless_some_are_named() -> None:
    answers = {A: looked(seen(TWO), seen(ONE)), B: looked(seen(ONE), seen(TWO))}
    verdict, drives = named(answers)
    assert isinstance(verdict, StepDone)
    assert drives == ["drive-0 1", "drive-1 2"]
    verdict, drives = named(answers, msgspec.structs.replace(SPEC, drives=(TWO,)))
    assert (isinstance(verdict, StepDone), drives) == (True, ["drive-0 2"])
    verdict, drives = named(answers, msgspec.structs.replace(SPEC, drives=(THREE,)))
    assert isinstance(verdict, StepFailed)
    assert f"drives not visible: {THREE}" in verdict.message


def test_drives_that_have_a_name_keep_it_and_names_are_not_given_again() -> None:
    once = with_drive(with_drive(NEW, seen(ONE), "a" * 32), seen(TWO), "b" * 32)
    without = msgspec.structs.replace(once, drives=once.drives[1:])
    verdict, drives = named({A: looked(seen(TWO), seen(THREE))}, status=without)
    assert (isinstance(verdict, StepDone), drives) == (True, ["drive-1 2", "drive-2 3"])


def test_agents_that_see_different_drives_do_not_see_one_enclosure() -> None:
    for other in (looked(seen(ONE)), looked(seen(ONE), seen(TWO, size_bytes=65 * MIB))):
        answers = {A: looked(seen(ONE), seen(TWO)), B: other}
        verdict, drives = named(answers)
        assert (isinstance(verdict, StepFailed), drives) == (True, [])
        assert isinstance(visible_drives(answers), StepFailed)


def test_an_enclosure_without_drives_is_told_to_export_some() -> None:
    verdict, _ = named({A: looked()})
    assert isinstance(verdict, StepFailed)
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
    found: DiscoveredDrive, *, wipe: bool, is_good: bool
) -> None:
    drives = with_drive(NEW, seen(ONE), "a" * 32).drives
    verdict = format_verdict(
        drives,
        {found.nguid: found},
        wipe=frozenset({ONE} if wipe else ()),
        segment_bytes=MIB,
        report=None,
        volumes=(),
    )
    assert isinstance(verdict, StepDone) is is_good
    if not is_good:
        assert ONE in verdict.message


@pytest.mark.parametrize(
    ("model", "serial", "described"), [("m", "s", "(m s): "), ("m", "", "(m): "), ("", "", "(drive): ")]
)
def test_a_refused_drive_is_described_by_what_is_known(model: str, serial: str, described: str) -> None:
    found = msgspec.structs.replace(seen(ONE, Content.OTHER), model=model, serial=serial)
    verdict = format_verdict(
        with_drive(NEW, seen(ONE), "a" * 32).drives,
        {ONE: found},
        wipe=frozenset(),
        segment_bytes=MIB,
        report=None,
        volumes=(),
    )
    assert verdict.message.startswith(f"{ONE} {described}")


def test_a_drive_too_small_for_some_volume_is_not_formatted() -> None:
    volume = VolumeRecord(TenantId("t"), "v", Layout("m", "bf16", 16), 2 * MIB)
    drives = with_drive(NEW, seen(ONE), "a" * 32).drives
    verdict = format_verdict(
        drives, {ONE: seen(ONE)}, wipe=frozenset(), segment_bytes=MIB, report=None, volumes=(volume,)
    )
    assert isinstance(verdict, StepFailed)
    assert "segment_bytes" in verdict.message


def test_doubts_of_the_enclosure_s_own_daemon_are_passed_on() -> None:
    told = EnclosureReport(
        EnclosureId("shelf"),
        StartId(bytes(16)),
        SPEC.nqn,
        (Controller(TargetTransport.TCP, "a", 4420),),
        (DriveReport("nvme0n1", ONE, 64 * MIB, 4096, doubts=("it has no power-loss protection",)),),
    )
    verdict = format_verdict(
        with_drive(NEW, seen(ONE), "a" * 32).drives,
        {ONE: seen(ONE)},
        wipe=frozenset(),
        segment_bytes=MIB,
        report=told,
        volumes=(),
    )
    assert verdict == StepDone(
        "1 drive usable, with 1 doubt", {"doubts": [f"{ONE}: it has no power-loss protection"]}
    )


def test_a_drive_s_replacement_is_the_only_one_that_is_free_or_the_one_that_is_named() -> None:
    status = with_drive(NEW, seen(ONE), "a" * 32)
    both = {ONE: seen(ONE), TWO: seen(TWO)}
    assert choose_replacement(both, status, "") == seen(TWO)
    assert choose_replacement(both, status, TWO) == seen(TWO)
    for drives, wanted, says in (
        ({ONE: seen(ONE)}, "", "insert a drive"),
        ({**both, THREE: seen(THREE)}, "", "name one"),
        (both, THREE, "insert the drive"),
        (both, ONE, "already in use"),
    ):
        found = choose_replacement(drives, status, wanted)
        assert isinstance(found, StepFailed)
        assert says in found.message


def test_an_enclosure_is_drained_when_no_placement_that_is_asked_has_weight_there() -> None:
    shelf, other = EnclosureId("shelf"), EnclosureId("other")
    fabric_map = FabricMap(
        FabricId(bytes(16)), 1, PlacementEpoch(3), enclosures={each: _record(each) for each in (shelf, other)}
    )
    assert isinstance(drain_verdict(fabric_map, shelf, (), {}, retry_s=1.0), StepDone)
    elsewhere = PlacementRecord(PlacementEpoch(2), {other: {shard_id(drive_id(other, "d"), 0): 1}})
    here = PlacementRecord(PlacementEpoch(1), {shelf: {shard_id(drive_id(shelf, "d"), 0): 1}})
    before = _with(fabric_map, (elsewhere,))
    assert isinstance(drain_verdict(before, shelf, (), {}, retry_s=1.0), StepDone)
    verdict = drain_verdict(_with(fabric_map, (elsewhere, here)), shelf, (), {}, retry_s=1.0)
    assert isinstance(verdict, StepPending)
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
