"""What an agent does with drives for an operator, and to which drives it does nothing."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.admin.agents import Agent, made_agent
from tests.admin.shelf import Shelf
from tests.contract.drives.engines import new_engine

from ostraca_dpu_agent.paths.contents import format_drive
from ostraca_fabric.drives.device_opener import DeviceOpener
from ostraca_fabric.drives.file_drive import DriveSettings, FileDrive
from ostraca_fabric.errors import FormatError, RefusedError
from ostraca_fabric.model.extent import PAGE_BYTES
from ostraca_fabric.model.fabric_map import DriveRecord, EnclosureRecord, FabricMap
from ostraca_fabric.model.ids import AgentId, DriveId, EnclosureId, FabricId, PlacementEpoch, drive_id
from ostraca_fabric.ports.paths import Namespace
from ostraca_fabric.wire.flash_work import (
    Content,
    DiscoverDrives,
    DiscoveredDrives,
    FlashRequest,
    Format,
    FormatResult,
    Probe,
    ProbeResult,
    TargetText,
)

FOREIGN = b"\0" * 512 + b"EFI PART"
ONE, OTHER = "1" * 32, "2" * 32
SHELF = EnclosureId("shelf")


class Host:
    def __init__(self, directory: Path) -> None:
        self.map = FabricMap(FabricId(bytes(16)), 1, PlacementEpoch(1))
        self.shelf = Shelf(directory / SHELF, SHELF, drives=0)
        self.target = TargetText(self.shelf.nqn, (self.shelf.controller,))
        self.agent: Agent = made_agent(AgentId("agent-0"), lambda: self.map)

    async def ask(self, ask: FlashRequest) -> object:
        return await self.agent.flash.answer(msgspec.msgpack.encode(ask), 20.0)

    async def format(self, nguid: str, *, format_id: str = ONE, **more: object) -> FormatResult:
        ask = Format(self.target, nguid, SHELF, "drive-0", format_id, segment_bytes=1 << 20)
        answer = await self.ask(msgspec.structs.replace(ask, **more))
        assert isinstance(answer, FormatResult)
        return answer

    def take_in(self, nguid: str, name: str) -> None:
        """Let a drive be in the map."""
        record = DriveRecord(drive_id(SHELF, name), nguid=nguid)
        self.map = replace(self.map, enclosures={SHELF: EnclosureRecord(SHELF, (record,), ())})

    def begin_of(self, nguid: str) -> bytes:
        with self.shelf.drives[nguid].open("rb") as file:
            return file.read(2 << 20)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


async def test_blank_drive_is_formatted_idempotently(host: Host) -> None:
    nguid = host.shelf.plug_in()
    made = await host.format(nguid)
    assert (made.trouble, made.shard) == ("", "shelf/drive-0/0")
    before = host.begin_of(nguid)
    assert await host.format(nguid) == made
    assert host.begin_of(nguid) == before
    looked = await host.ask(DiscoverDrives(host.target))
    assert isinstance(looked, DiscoveredDrives)
    assert [(drive.content, drive.format_id) for drive in looked.drives] == [(Content.OURS, ONE)]


async def test_a_deadline_that_is_no_number_sets_no_timer_of_the_loop(host: Host) -> None:
    body = msgspec.msgpack.encode(DiscoverDrives(host.target))
    assert isinstance(await host.agent.flash.answer(body, float("nan")), DiscoveredDrives)


@pytest.mark.parametrize("page", [0, 1])
async def test_an_interrupted_format_is_completed(host: Host, page: int) -> None:
    nguid = host.shelf.plug_in()
    made = await host.format(nguid)
    before = host.begin_of(nguid)
    with host.shelf.drives[nguid].open("r+b") as file:
        file.seek(page * PAGE_BYTES)
        file.write(bytes(PAGE_BYTES))
    assert await host.format(nguid) == made
    assert host.begin_of(nguid) == before


async def test_contents_are_kept_unless_their_kind_may_be_replaced(host: Host) -> None:
    nguid = host.shelf.plug_in(FOREIGN)
    before = host.begin_of(nguid)
    assert "a partition table" in (await host.format(nguid)).trouble
    assert "a partition table" in (await host.format(nguid, replaces=(Content.BLANK, Content.OTHER))).trouble
    assert host.begin_of(nguid) == before
    assert (await host.format(nguid, replaces=(Content.FOREIGN,))).trouble == ""
    assert "holds shard shelf/drive-0/0" in (await host.format(nguid, format_id=OTHER)).trouble


async def test_drive_of_the_map_is_never_formatted(host: Host) -> None:
    nguid = host.shelf.plug_in()
    host.take_in(nguid, "drive-7")
    before = host.begin_of(nguid)
    assert "is part of the map" in (await host.format(nguid, replaces=tuple(Content)[:4])).trouble
    with pytest.raises(RefusedError, match="is part of the map"):
        await host.ask(Probe(host.target, nguid, 0.01, writes=True))
    assert host.begin_of(nguid) == before


async def test_drive_added_to_the_map_meanwhile_is_not_formatted(host: Host) -> None:
    nguid = host.shelf.plug_in()
    namespace = Namespace(nguid, str(host.shelf.drives[nguid]), 64 << 20, 4096)
    with pytest.raises(FormatError, match="meanwhile"):
        format_drive(
            DeviceOpener(),
            namespace,
            host.map.fabric,
            drive_id(SHELF, "drive-0"),
            bytes(16),
            replaces=frozenset({Content.BLANK}),
            segment_bytes=1 << 20,
            may_begin=lambda: False,
        )
    assert not any(host.begin_of(nguid))


async def test_a_too_small_drive_is_reported_alone(host: Host) -> None:
    good, small = host.shelf.plug_in(), host.shelf.plug_in()
    os.truncate(host.shelf.drives[small], 1 << 20)
    looked = await host.ask(DiscoverDrives(host.target))
    assert isinstance(looked, DiscoveredDrives)
    assert looked.trouble == ""
    assert {drive.nguid: (drive.content, drive.says) for drive in looked.drives} == {
        good: (Content.BLANK, ""),
        small: (Content.UNREADABLE, "the drive has 1048576 bytes, too few for a shard"),
    }
    refused = await host.format(small)
    assert "has 1048576 bytes" in refused.trouble or "at least" in refused.trouble


async def test_write_test_requires_a_formatted_drive(host: Host) -> None:
    nguid = host.shelf.plug_in()
    answer = await host.ask(Probe(host.target, nguid, 0.01, writes=True))
    assert isinstance(answer, ProbeResult)
    assert "not formatted for this fabric" in answer.trouble
    assert not any(host.begin_of(nguid))
    await host.format(nguid)
    measured = await host.ask(Probe(host.target, nguid, 0.05, writes=True))
    assert isinstance(measured, ProbeResult)
    assert (measured.trouble, measured.write_bytes_s > 0, measured.read_bytes_s > 0) == ("", True, True)


class HungOpener(DeviceOpener):
    """Opener of drives that hang until ``go_on``: each format, and each read of a measurement."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._may_format = threading.Event()
        os.mkfifo(directory / "pipe")
        self._pipe = os.open(directory / "pipe", os.O_RDWR)
        self._engine_of_reads = new_engine("io_uring")

    def open(self, drive: DriveId, device: str, *, flushes: bool = False) -> FileDrive:
        del device, flushes
        return FileDrive(
            drive,
            os.dup(self._pipe),
            size_bytes=64 << 20,
            has_volatile_cache=False,
            is_file=True,
            settings=DriveSettings(),
            engine=self._engine_of_reads,
        )

    @contextmanager
    def open_raw(self, namespace: Namespace, *, is_writable: bool = False) -> Iterator[Any]:
        if is_writable:
            self._may_format.wait()
        with super().open_raw(namespace, is_writable=is_writable) as drive:
            yield drive

    async def go_on(self) -> None:
        self._may_format.set()
        await asyncio.to_thread(os.write, self._pipe, bytes(4 << 20))

    def end(self) -> None:
        self._engine_of_reads.close()
        os.close(self._pipe)


async def test_a_drive_is_busy_until_the_end_of_its_operation_which_may_miss_its_deadline(
    host: Host, tmp_path: Path
) -> None:
    opener = host.agent.path_manager.opener = HungOpener(tmp_path)
    formatted, measured = host.shelf.plug_in(), host.shelf.plug_in()
    asks = (
        Format(host.target, formatted, SHELF, "drive-0", ONE, segment_bytes=1 << 20),
        Probe(host.target, measured, 0.01, writes=False),
    )
    for ask in asks:
        with pytest.raises(RefusedError, match="within its deadline"):
            await asyncio.wait_for(host.agent.flash.answer(msgspec.msgpack.encode(ask), 0.5), 10.0)
        with pytest.raises(RefusedError, match="another operation uses"):
            await host.agent.flash.answer(msgspec.msgpack.encode(ask), 2.0)
    await opener.go_on()
    while host.agent.flash._busy:  # noqa: ASYNC110 (an end beyond the deadline tells nobody)
        await asyncio.sleep(0.01)
    assert any(host.begin_of(formatted))
    opener.end()
