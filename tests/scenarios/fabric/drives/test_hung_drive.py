"""A fabric that ends while a drive hangs in what belongs to nobody: it does not wait for that."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from tests.support.stalls import Stopwatch

from ostraca_cli.composition.embedded import EmbeddedFabric
from ostraca_cli.testing import small_plan
from ostraca_fabric.drives.file_drive import FileDrive
from ostraca_fabric.model.extent import PAGE_BYTES, Pieces
from ostraca_fabric.runtime.memory import HugeMemory


@pytest.mark.parametrize("does_end", [True, False])
async def test_what_a_drive_was_asked_for_last_is_waited_for_but_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, does_end: bool
) -> None:
    goes_on, moved = threading.Event(), FileDrive._moved

    def hanging(drive: FileDrive, *given: Any) -> Any:
        assert goes_on.wait(60.0)
        return moved(drive, *given)

    fabric = EmbeddedFabric(small_plan(tmp_path))
    await fabric.start()
    drive, *_ = drives = fabric._drives.drives
    monkeypatch.setattr(FileDrive, "_moved", hanging)
    memory = HugeMemory(PAGE_BYTES, prefault=False)
    reading = drive.submit_read(Pieces.one(memory.array[:PAGE_BYTES], drive_offset=0))
    watch = Stopwatch()
    if does_end:
        threading.Timer(0.2, goes_on.set).start()
    assert await fabric.stop() == does_end
    assert watch.took_s < 30.0
    goes_on.set()
    assert (await reading).all()
    if not does_end:
        assert await fabric._drives.are_idle()
        for each in drives:
            each.close()
    memory.close()
