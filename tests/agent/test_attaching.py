"""Drives come where the map and paths say, once they are known to be the map's, and go with either."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.agent.assembly import DRIVE, ENCLOSURE, FABRIC, HeldDrive

from ostraca_dpu_agent.steward.attaching import Attaching, Opening
from ostraca_fabric.adapters.guarded_drive import GuardedDrive
from ostraca_fabric.drive_health import HealthSettings
from ostraca_fabric.errors import DriveError
from ostraca_fabric.fabric_map import DriveRecord, FabricMap
from ostraca_fabric.ids import AgentId, DriveId, FabricId, PlacementEpoch

AGAIN_S = 30.0
NGUID = "1" * 32


class Host:
    """A host with paths, and what it opened and let go."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.drive = HeldDrive()
        self.paths = {NGUID: "/dev/nvme0n1"}
        self.drives: dict[DriveId, GuardedDrive] = {}
        self.opened: list[str] = []
        self.closed: list[DriveId] = []
        opening = Opening(
            self._open, self.closed.append, lambda drive: self.paths.get(drive.nguid, drive.path)
        )
        self.attaching = Attaching(
            AgentId("a"), self.drives, opening, clock=lambda: self.now_s, again_s=AGAIN_S
        )
        self.record = DriveRecord(DRIVE, nguid=NGUID)
        box = replace(self.drive.record(), drives=(self.record,))
        self.map = FabricMap(FABRIC, 1, PlacementEpoch(1), enclosures={ENCLOSURE: box})

    def _open(self, record: DriveRecord) -> GuardedDrive:
        device = self.paths.get(record.nguid, record.path)
        if not device:
            raise DriveError("there is no path")
        self.opened.append(device)
        return GuardedDrive(self.drive, HealthSettings(), lambda: self.now_s)

    @property
    def attached(self) -> set[DriveId]:
        return set(self.drives)


async def test_a_drive_with_the_map_s_superblock_is_used() -> None:
    host = Host()
    assert host.attaching.waiting(host.map) == frozenset()
    await host.attaching.attach(host.record, host.map)
    assert (host.attached, host.opened, host.closed) == ({DRIVE}, ["/dev/nvme0n1"], [])
    assert host.attaching.moved(host.map) == frozenset()


@pytest.mark.parametrize("is_blank", [False, True])
async def test_a_drive_that_holds_something_else_is_let_go_and_looked_at_again_later(
    *, is_blank: bool
) -> None:
    host = Host()
    if is_blank:
        host.drive.bytes[:8192] = bytes(8192)
    fabric_map = host.map if is_blank else replace(host.map, fabric=FabricId(b"another fabric.."))
    await host.attaching.attach(host.record, fabric_map)
    assert (host.attached, host.closed) == (set(), [DRIVE])
    assert host.attaching.waiting(fabric_map) == {DRIVE}
    host.now_s = AGAIN_S
    assert host.attaching.waiting(fabric_map) == frozenset()


@pytest.mark.parametrize("nguid", [NGUID, ""])
async def test_a_drive_that_is_shorter_than_recorded_is_refused_with_both_sizes(nguid: str) -> None:
    host = Host()
    host.record = DriveRecord(DRIVE, "" if nguid else "/drive-0", nguid)
    host.drive.size_bytes = 3 << 20
    await host.attaching.attach(host.record, host.map)
    assert (host.attached, host.closed) == (set(), [DRIVE])
    why = host.attaching.unattached(host.map)[DRIVE]
    where = "/dev/nvme0n1" if nguid else "/drive-0"
    assert why.startswith(f"drive {DRIVE} at {where} has 3 MiB where 7 MiB are recorded (3145728 and ")
    host.drive.size_bytes = 7 << 20
    await host.attaching.attach(host.record, host.map)
    assert host.attached == {DRIVE}
    assert host.attaching.unattached(host.map) == {}


async def test_a_drive_without_a_path_is_told_and_one_that_is_not_tried_yet_is_not() -> None:
    host = Host()
    assert host.attaching.unattached(host.map) == {}
    host.paths[NGUID] = ""
    assert host.attaching.unattached(host.map) == {DRIVE: f"this host has no path to drive {DRIVE}"}


async def test_a_drive_without_a_path_waits_for_one() -> None:
    host = Host()
    host.paths[NGUID] = ""
    assert host.attaching.waiting(host.map) == {DRIVE}
    host.paths[NGUID] = "/dev/nvme3n1"
    assert host.attaching.waiting(host.map) == frozenset()


async def test_a_path_that_is_lost_moves_no_drive_and_one_that_leads_elsewhere_does() -> None:
    host = Host()
    await host.attaching.attach(host.record, host.map)
    host.paths[NGUID] = ""
    assert host.attaching.moved(host.map) == frozenset()
    host.paths[NGUID] = "/dev/nvme3n1"
    assert host.attaching.moved(host.map) == {DRIVE}
    host.attaching.detach(DRIVE)
    assert (host.attached, host.closed) == (set(), [DRIVE])
    await host.attaching.attach(host.record, host.map)
    assert host.opened == ["/dev/nvme0n1", "/dev/nvme3n1"]
    assert host.attaching.moved(host.map) == frozenset()


async def test_a_drive_that_the_map_has_no_longer_is_to_go() -> None:
    host = Host()
    await host.attaching.attach(host.record, host.map)
    assert host.attaching.moved(replace(host.map, enclosures={})) == {DRIVE}


async def test_what_was_let_go_begins_nothing_any_more() -> None:
    host = Host()
    await host.attaching.attach(host.record, host.map)
    guarded = host.drives[DRIVE]
    host.attaching.detach(DRIVE)
    assert not await guarded.submit_flush()
    assert host.drive.asked == []
