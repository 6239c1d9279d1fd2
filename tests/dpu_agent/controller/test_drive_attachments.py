"""Drives come where the map and paths say, once they are known to be the map's, and go with either."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.contract.drives.drive_contract import at_page, pages, written
from tests.support.agent.assembly import DRIVE, ENCLOSURE, FABRIC, HeldDrive, until

from ostraca_dpu_agent.controller.drive_attachments import DriveAttachments, DriveOpener
from ostraca_fabric.drives.drive_health import HealthSettings
from ostraca_fabric.drives.file_drive import FileDrive
from ostraca_fabric.drives.guarded_drive import GuardedDrive
from ostraca_fabric.errors import DriveError
from ostraca_fabric.model.fabric_map import DriveRecord, FabricMap
from ostraca_fabric.model.ids import AgentId, DriveId, FabricId, PlacementEpoch
from ostraca_fabric.policies.circuit_breaker import BreakerSettings

AGAIN_S = 30.0
FILE_BYTES = 1 << 20
NGUID = "1" * 32


class Host:
    """A host with paths, and what it opened and let go."""

    def __init__(self, health: HealthSettings | None = None) -> None:
        self._health = health or HealthSettings()
        self.now_s = 0.0
        self.drive = HeldDrive()
        self.paths = {NGUID: "/dev/nvme0n1"}
        self.drives: dict[DriveId, GuardedDrive] = {}
        self.opened: list[str] = []
        self.closed: list[DriveId] = []
        opener = DriveOpener(
            self._open, self.closed.append, lambda drive: self.paths.get(drive.nguid, drive.path)
        )
        self.attachments = DriveAttachments(
            AgentId("a"), self.drives, opener, clock=lambda: self.now_s, again_s=AGAIN_S
        )
        self.record = DriveRecord(DRIVE, nguid=NGUID)
        box = replace(self.drive.record(), drives=(self.record,))
        self.map = FabricMap(FABRIC, 1, PlacementEpoch(1), enclosures={ENCLOSURE: box})

    def _open(self, record: DriveRecord) -> GuardedDrive:
        device = self.paths.get(record.nguid, record.path)
        if not device:
            raise DriveError("there is no path")
        self.opened.append(device)
        return GuardedDrive(self.drive, self._health, time.monotonic)

    @property
    def attached(self) -> set[DriveId]:
        return set(self.drives)


async def test_a_drive_with_the_map_s_superblock_is_used() -> None:
    host = Host()
    assert host.attachments.unattachable(host.map) == frozenset()
    await host.attachments.attach(host.record, host.map)
    assert (host.attached, host.opened, host.closed) == ({DRIVE}, ["/dev/nvme0n1"], [])
    assert host.attachments.obsolete(host.map) == frozenset()


@pytest.mark.parametrize("is_blank", [False, True])
@pytest.mark.parametrize("nguid", [NGUID, ""])
async def test_drive_with_other_contents_is_closed_and_tried_later(nguid: str, *, is_blank: bool) -> None:
    host = Host()
    host.record = DriveRecord(DRIVE, "" if nguid else "/drive-0", nguid)
    box = replace(host.map.enclosures[ENCLOSURE], drives=(host.record,))
    host.map = replace(host.map, enclosures={ENCLOSURE: box})
    if is_blank:
        host.drive.bytes[:8192] = bytes(8192)
    fabric_map = host.map if is_blank else replace(host.map, fabric=FabricId(b"another fabric.."))
    await host.attachments.attach(host.record, fabric_map)
    assert (host.attached, host.closed) == (set(), [DRIVE])
    where = "/dev/nvme0n1" if nguid else "/drive-0"
    assert f"another drive than {DRIVE} is at {where}: " in host.attachments.unusable(fabric_map)[DRIVE]
    assert host.attachments.unattachable(fabric_map) == {DRIVE}
    host.now_s = AGAIN_S
    assert host.attachments.unattachable(fabric_map) == frozenset()


@pytest.mark.parametrize("is_blank", [False, True])
async def test_silent_drive_is_not_written_before_identification(*, is_blank: bool) -> None:
    host = Host(HealthSettings(overdue_s=0.02, breaker=BreakerSettings(open_s=0.01, open_max_s=0.02)))
    host.record = DriveRecord(DRIVE, "/drive-0")
    box = replace(host.map.enclosures[ENCLOSURE], drives=(host.record,))
    host.map = replace(host.map, enclosures={ENCLOSURE: box})
    host.drive.holds_reads = True
    await host.attachments.attach(host.record, host.map)
    guarded = host.drives[DRIVE]
    assert (host.opened, host.closed) == (["/drive-0"], [])
    assert f"drive {DRIVE} at /drive-0 can't be identified" in host.attachments.unusable(host.map)[DRIVE]
    assert guarded.refuses_writes
    assert await written(guarded, at_page(pages(1), 9)) == [False]
    assert host.drive.asked == [], "nothing is written to what may be another drive"
    host.drive.bytes[:8192] = bytes(8192) if is_blank else host.drive.bytes[:8192]
    host.drive.let_go()
    await until(lambda: not guarded.refuses_reads)
    await host.attachments.identify(host.map)
    assert guarded.is_identified is not is_blank
    if is_blank:
        assert host.attachments.obsolete(host.map) == {DRIVE}
        host.attachments.detach(DRIVE)
        assert host.attached == set()
        assert host.attachments.unattachable(host.map) == {DRIVE}
    else:
        assert (host.attachments.obsolete(host.map), host.attachments.unusable(host.map)) == (frozenset(), {})
        assert await written(guarded, at_page(pages(1), 9)) == [True]
    guarded.unwatch()


@pytest.mark.parametrize("nguid", [NGUID, ""])
async def test_truncated_drive_is_refused_with_both_sizes(nguid: str) -> None:
    host = Host()
    host.record = DriveRecord(DRIVE, "" if nguid else "/drive-0", nguid)
    host.drive.size_bytes = 3 << 20
    await host.attachments.attach(host.record, host.map)
    assert (host.attached, host.closed) == (set(), [DRIVE])
    why = host.attachments.unusable(host.map)[DRIVE]
    where = "/dev/nvme0n1" if nguid else "/drive-0"
    assert why.startswith(f"drive {DRIVE} at {where} has 3 MiB, and 7 MiB are recorded (3145728 and ")
    host.drive.size_bytes = 7 << 20
    await host.attachments.attach(host.record, host.map)
    assert host.attached == {DRIVE}
    assert host.attachments.unusable(host.map) == {}


async def test_drive_without_a_path_is_reported_but_not_an_untried_drive() -> None:
    host = Host()
    assert host.attachments.unusable(host.map) == {}
    host.paths[NGUID] = ""
    assert host.attachments.unusable(host.map) == {DRIVE: f"no path from this host to drive {DRIVE}"}


async def test_drive_without_a_path_waits() -> None:
    host = Host()
    host.paths[NGUID] = ""
    assert host.attachments.unattachable(host.map) == {DRIVE}
    host.paths[NGUID] = "/dev/nvme3n1"
    assert host.attachments.unattachable(host.map) == frozenset()


async def test_lost_path_keeps_a_drive_and_a_changed_path_detaches() -> None:
    host = Host()
    await host.attachments.attach(host.record, host.map)
    host.paths[NGUID] = ""
    assert host.attachments.obsolete(host.map) == frozenset()
    host.paths[NGUID] = "/dev/nvme3n1"
    assert host.attachments.obsolete(host.map) == {DRIVE}
    host.attachments.detach(DRIVE)
    assert (host.attached, host.closed) == (set(), [DRIVE])
    await host.attachments.attach(host.record, host.map)
    assert host.opened == ["/dev/nvme0n1", "/dev/nvme3n1"]
    assert host.attachments.obsolete(host.map) == frozenset()


async def test_drive_removed_from_the_map_is_obsolete() -> None:
    host = Host()
    await host.attachments.attach(host.record, host.map)
    assert host.attachments.obsolete(replace(host.map, enclosures={})) == {DRIVE}


async def test_detached_drive_starts_no_further_io() -> None:
    host = Host()
    await host.attachments.attach(host.record, host.map)
    guarded = host.drives[DRIVE]
    host.attachments.detach(DRIVE)
    assert not await guarded.submit_flush()
    assert host.drive.asked == []


async def test_files_of_many_drives_are_checked_in_turn(tmp_path: Path) -> None:
    host = Host()
    for number in range(5):
        path = tmp_path / str(number)
        path.write_bytes(bytes(FILE_BYTES))
        drive = FileDrive.open(DriveId(f"drive-{number}"), str(path))
        host.drives[drive.id] = GuardedDrive(drive, HealthSettings(), time.monotonic)
        path.unlink()

    def found() -> list[str]:
        return [drive.id for drive in host.drives.values() if drive.displacement]

    await host.attachments.check_files(at_once=2)
    assert found() == ["drive-0", "drive-1"]
    await host.attachments.check_files(at_once=2)
    assert found() == ["drive-0", "drive-1", "drive-2", "drive-3"]
    host.drives.pop(DriveId("drive-0")).close()
    for _ in range(2):
        await host.attachments.check_files(at_once=2)
    assert found() == ["drive-1", "drive-2", "drive-3", "drive-4"]
    for each in host.drives.values():
        each.close()
