"""A fabric that ends while a drive hangs in what belongs to nobody: it does not wait for that."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.support.fabric.faulty_drive import Fault, FaultyDrive
from tests.support.stalls import Stopwatch

from ostraca_cli.composition.embedded import EmbeddedFabric
from ostraca_cli.testing import small_plan
from ostraca_fabric.model.extent import PAGE_BYTES, Pieces
from ostraca_fabric.runtime.memory import HugeMemory


@pytest.mark.parametrize("does_end", [True, False])
async def test_what_a_drive_was_asked_for_last_is_waited_for_but_not_for_ever(
    tmp_path: Path, *, does_end: bool
) -> None:
    fabric = EmbeddedFabric(small_plan(tmp_path), wrap_drive=FaultyDrive)
    await fabric.start()
    drive, *_ = drives = fabric._drives.drives
    assert isinstance(drive, FaultyDrive)
    assert {each.flash_io for each in fabric.status()} <= {"io_uring", "threads"}
    drive.fault = Fault.READ_HANGS
    memory = HugeMemory(PAGE_BYTES, prefault=False)
    reading = drive.submit_read(Pieces.one(memory.array[:PAGE_BYTES], drive_offset=0))
    watch = Stopwatch()
    if does_end:
        asyncio.get_running_loop().call_later(0.2, drive.mend)
    assert await fabric.stop() == does_end
    assert watch.took_s < 30.0
    drive.mend()
    if not does_end:
        assert (await reading).all()
        assert await fabric._drives.are_idle()
        for each in drives:
            each.close()
        fabric._opener.close()
    assert reading.result().all()
    memory.close()
