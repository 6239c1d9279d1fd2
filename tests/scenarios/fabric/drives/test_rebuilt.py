"""A fabric whose record is lost is rebuilt from its drives, and finds its blocks again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.support.fabric.fabric_host import (
    BLOCK_BYTES,
    LAYOUT,
    MIB,
    FabricThread,
    content,
    empty,
    hashes,
    volume_of,
)

import ostraca
from ostraca import Ack, BlockState, PutState, UsageError
from ostraca_cli.program import main
from ostraca_cli.testing import small_plan
from ostraca_fabric.errors import FormatError

COUNT = 8
HITS, MISSES = [BlockState.HIT] * COUNT, [BlockState.MISS] * COUNT


def plan_of(directory: Path, drive_bytes: int = 33 * MIB) -> FabricThread:
    return FabricThread(replace(small_plan(directory), capacity_bytes=2 * drive_bytes))


def put(host: FabricThread) -> None:
    with host, host.connect() as client:
        volume = volume_of(client)
        chain = volume.chain(hashes(COUNT))
        done = volume.put(chain, source=content(COUNT), deadline_s=10, ack=Ack.COMMITTED)
        assert list(done.states) == [PutState.COMMITTED] * COUNT


def got(host: FabricThread) -> list[BlockState]:
    """Get the blocks by a client that makes no volume: it was found again."""
    with host, host.connect() as client:
        volume = client.volume("v", LAYOUT, block_bytes=BLOCK_BYTES)
        into = empty(COUNT)
        done = volume.get(volume.chain(hashes(COUNT)), into=into, deadline_s=10)
        hits = [block for block, state in enumerate(done.states) if state == BlockState.HIT]
        assert np.array_equal(into[hits], content(COUNT)[hits])
        return list(done.states)


def rebuild(directory: Path, *options: object) -> int:
    return main(["fabric", "rebuild", "--dir", str(directory), *map(str, options)])


def test_with_its_record_lost_everything_is_found_again(tmp_path: Path) -> None:
    host = plan_of(tmp_path / "f")
    put(host)
    (tmp_path / "f" / "fabric.json").unlink()
    with pytest.raises(FormatError, match="ostraca fabric rebuild"):
        host.start()
    assert rebuild(tmp_path / "f") == 0
    assert got(host) == HITS


def test_with_its_key_lost_too_a_copy_of_the_key_finds_everything_and_a_new_key_nothing(
    tmp_path: Path,
) -> None:
    host, directory = plan_of(tmp_path / "f"), tmp_path / "f"
    put(host)
    (directory / "fabric.key").rename(tmp_path / "copy")
    (directory / "fabric.json").unlink()
    assert rebuild(directory) == 1
    assert rebuild(directory, "--new-key") == 0
    assert got(host) == MISSES
    (directory / "fabric.key").unlink()
    assert rebuild(directory, "--force", "--key", tmp_path / "copy") == 0
    assert got(host) == HITS


def test_a_drive_that_was_replaced_is_told_what_volumes_there_are(tmp_path: Path) -> None:
    host, directory = plan_of(tmp_path / "f"), tmp_path / "f"
    put(host)
    for number in range(2):
        drive = directory / "enclosure-0" / f"drive-{number}.img"
        drive.unlink()
        assert main(["doctor", str(drive), "--format", f"enclosure-0/drive-{number}/0"]) == 0
        with host:
            pass  # the owner of the new, empty drive records the volumes
        (directory / "fabric.json").unlink()
        assert rebuild(directory) == 0
    assert got(host) == MISSES  # both drives are new; the volume is known still


def test_a_volume_whose_blocks_no_segment_holds_is_refused_when_it_is_opened(tmp_path: Path) -> None:
    with plan_of(tmp_path / "f", 3 * MIB) as host, host.connect() as client:
        with pytest.raises(UsageError, match="hold none above 1036288: take smaller blocks") as refused:
            client.volume("large", LAYOUT, block_bytes=MIB, create=True)
        assert "enclosure-0/drive-0/0" in str(refused.value)
        with pytest.raises(ostraca.UnknownVolumeError):
            client.volume("large", LAYOUT, block_bytes=1036288)
        assert client.volume("large", LAYOUT, block_bytes=1036288, create=True).name == "large"
