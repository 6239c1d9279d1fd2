"""End-to-end runs of `ostraca bench`; the figures mean nothing."""

import contextlib
import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tests.support.fabric.faulty_drive import BLOCK_BYTES, Fault, FaultyDrive

from ostraca_cli.program import main
from ostraca_cli.testing import FabricThread, small_plan
from ostraca_cli.tools.bench.fabric import running_fabric
from ostraca_cli.tools.bench.limits import DirectFile, Memcpy
from ostraca_cli.tools.bench.raw_pair import raw_pair
from ostraca_cli.tools.bench.workload import Workload
from ostraca_fabric.errors import ConnectError
from ostraca_fabric.model.outcome import Ack
from ostraca_fabric.nixl.runtime import package
from ostraca_fabric.ports.drive import Drive

KIB = 1 << 10
MIB = 1 << 20
TINY = ("--blocks", "4", "--block-bytes", "64KiB", "--seconds", "0.01", "--json")


@pytest.mark.slow
def test_it_measures_a_fabric_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--dir", str(tmp_path), *TINY]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [finding["name"] for finding in report["findings"]] == [
        "put committed, from arena",
        "get from flash, views",
        "get from DRAM, views",
        "get from DRAM, copied",
        "put staged, from arena",
        "put staged, from memory",
    ]
    assert all(finding["ratio"] > 0 for finding in report["findings"])
    assert report["conditions"] == {"blocks": 4, "block_bytes": 64 * KIB, "seconds": 0.01}


@pytest.mark.slow
def test_it_measures_a_fabric_that_runs_and_leaves_it_running(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--capacity", "384MiB", "--dram", "64MiB", "--transport", "inline")
    with running_fabric(tmp_path, *options) as fabric:
        assert main(["bench", fabric.address, *TINY]) == 0
        limits = {finding["limit"] for finding in json.loads(capsys.readouterr().out)["findings"]}
        assert limits == {"plain socket WRITE", "plain socket READ", "memcpy"}
        assert main(["status", fabric.address]) == 0


def test_a_fabric_that_does_not_get_ready_is_said_with_its_last_words(tmp_path: Path) -> None:
    with (
        pytest.raises(ConnectError, match=r"the log ends: ostraca: .*--capacity is 1\.0 MiB"),
        running_fabric(tmp_path, "--capacity", "1MiB"),
    ):
        pass


def test_the_file_beside_the_drives_is_read_and_written_and_leaves_nothing(tmp_path: Path) -> None:
    file = DirectFile(tmp_path, file_bytes=4 * MIB, batch_bytes=2 * MIB)
    assert file.tune_reads() in {(threads, MIB) for threads in (1, 2, 4, 8)}
    assert min(file.read(), file.write()) > 0
    assert file.path.stat().st_size == 4 * MIB
    assert np.fromfile(file.path, np.uint8).any()
    file.close()
    assert list(tmp_path.iterdir()) == []


def test_memory_is_copied_at_some_rate() -> None:
    memcpy = Memcpy(blocks=4, block_bytes=64 * KIB)
    assert memcpy.turn() > 0
    memcpy.close()


def test_a_staged_put_ends_after_its_commit_so_that_puts_do_not_pile_up(tmp_path: Path) -> None:
    drives: list[FaultyDrive] = []

    def faulty(drive: Drive) -> FaultyDrive:
        drives.append(FaultyDrive(drive, is_file=True))
        return drives[-1]

    with (
        FabricThread(small_plan(tmp_path), wrap_drive=faulty) as fabric,
        contextlib.closing(Workload(fabric.addresses[0], blocks=4, block_bytes=BLOCK_BYTES)) as work,
        ThreadPoolExecutor(1) as pool,
    ):
        for drive in drives:
            fabric.call_soon(partial(setattr, drive, "fault", Fault.WRITE_HANGS))
        put = pool.submit(work.put, Ack.STAGED)
        try:
            with pytest.raises(TimeoutError):
                put.result(timeout=0.3)
        finally:
            for drive in drives:
                fabric.call_soon(drive.mend)
        assert put.result(timeout=20) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "transport",
    [
        "inline",
        pytest.param(
            "nixl",
            marks=[pytest.mark.nixl, pytest.mark.skipif(package() is None, reason="NIXL is not installed")],
        ),
    ],
)
def test_a_raw_pair_moves_its_batch_both_ways(transport: str) -> None:
    pair = raw_pair(transport, blocks=4, block_bytes=64 * KIB)
    assert min(pair.write(), pair.read()) > 0
    pair.close()
