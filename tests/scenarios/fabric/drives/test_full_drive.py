"""A drive that takes no more bytes: the file behind it can't be written beyond some offset.

The limit on the size of files stands for a full disk: it needs no privileges, holds for files that are
allocated already, and also gives writes that end in the middle. The drive sees a short write, then an error.
"""

from __future__ import annotations

import resource
import time
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.support.fabric.fabric_host import MIB, SMALL, FabricProcess, content, empty, hashes, volume_of

import ostraca
from ostraca import Ack, BlockState, PutState, Reason

pytestmark = pytest.mark.slow

BATCH = 16
LIMIT_BYTES = 9 * MIB + 4096
"""In the middle of the first segment's data, and of a block."""

UNLIMITED = resource.RLIM_INFINITY


def limit_files(host: FabricProcess, limit_bytes: int) -> None:
    assert host.process is not None
    _, hard = resource.prlimit(host.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(host.process.pid, resource.RLIMIT_FSIZE, (limit_bytes, hard))


def put_and_get(volume: ostraca.Volume, turn: int) -> set[Reason]:
    """Put blocks and get them: what is committed must be there, what is not must miss. Return why not."""
    chain, source = volume.chain(hashes(BATCH, turn)), content(BATCH, turn)
    put = volume.put(chain, source=source, deadline_s=10, ack=Ack.COMMITTED)
    into = empty(BATCH)
    got = volume.get(chain, into=into, deadline_s=10)
    for block, state in enumerate(put.states):
        assert state in {PutState.COMMITTED, PutState.DECLINED}
        is_committed = state == PutState.COMMITTED
        assert got.states[block] == (BlockState.HIT if is_committed else BlockState.MISS), (put, got)
        assert np.array_equal(into[block], source[block] if is_committed else empty(1)[0])
    return set(put.reasons)


def check_whole_or_missing(volume: ostraca.Volume, turns: int) -> int:
    """Get all that was ever put: each block is as it was put, or a miss. Return how many are there."""
    hits = 0
    for turn in range(turns):
        into: NDArray[np.uint8] = empty(BATCH)
        got = volume.get(volume.chain(hashes(BATCH, turn)), into=into, deadline_s=10)
        for block, state in enumerate(got.states):
            wanted = content(BATCH, turn)[block] if state == BlockState.HIT else empty(1)[0]
            assert np.array_equal(into[block], wanted)
        hits += got.hits
    return hits


def test_a_full_drive_declines_what_it_cannot_write_and_the_fabric_goes_on(tmp_path: Path) -> None:
    shape = ("--drives", "1", "--capacity", "257MiB", "--dram", "0", "--transport", "inline")
    with FabricProcess(tmp_path / "fabric", *shape) as host:
        with ostraca.connect(host.address, settings=SMALL) as client:
            volume = volume_of(client)
            assert put_and_get(volume, 0) == {Reason.NONE}
            limit_files(host, LIMIT_BYTES)
            # The rest of this segment, the next one, which was opened before, and then none that opens.
            declined = [put_and_get(volume, turn) - {Reason.NONE} for turn in range(1, 40)]
            reasons = set().union(*declined)
            assert reasons <= {Reason.DRIVE_ERROR, Reason.DRIVE_SUSPECT, Reason.NO_SPACE}
            assert {Reason.DRIVE_ERROR, Reason.DRIVE_SUSPECT} <= reasons
            assert all(declined[4:])
            limit_files(host, UNLIMITED)
            turn, until_s = 40, time.monotonic() + 45  # trials are up to 30 s apart
            while put_and_get(volume, turn) != {Reason.NONE}:
                assert time.monotonic() < until_s
                turn += 1
            assert check_whole_or_missing(volume, turn + 1) >= BATCH
        host.kill()
        host.start()
        with ostraca.connect(host.address, settings=SMALL) as client:
            assert check_whole_or_missing(volume_of(client), turn + 1) >= BATCH
