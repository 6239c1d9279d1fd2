"""Each fault of a drive once through the whole fabric, by the SDK, beside a drive that does well.

What the drive did wrong is a miss, or a put that was declined, and never a wrong byte; blocks on the other
drive are there as soon as ever; the fault shows in the fabric's status; and when it ends, the drive is used
again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from tests.support.fabric.fabric_host import (
    LAYOUT,
    SMALL,
    FabricThread,
    content,
    empty,
    find_on_flash,
    hashes,
    overwrite,
)
from tests.support.fabric.faulty_drive import BLOCK_BYTES, Fault, FaultyDrive
from tests.support.stalls import Stopwatch

import ostraca
from ostraca import Ack, BlockState, PutState, Reason
from ostraca_cli.testing import small_plan
from ostraca_fabric.ports.drive import Drive
from ostraca_fabric.telemetry.status import DriveStatus

pytestmark = pytest.mark.slow

BLOCKS = 64
DEADLINE_S = 20.0
AT_ONCE_S = 4.0
"""Far from any deadline, and far more than a drive that hangs takes to be noticed."""

HIT, MISS = BlockState.HIT, BlockState.MISS


@dataclass
class Host:
    """A fabric of two drives, of which the first can be made to fail, and a client."""

    fabric: FabricThread
    drives: list[FaultyDrive] = field(default_factory=list)
    volume: ostraca.Volume = field(init=False)

    @property
    def drive(self) -> FaultyDrive:
        return self.drives[0]

    def chain(self, seed: int) -> ostraca.Chain:
        return self.volume.chain(hashes(BLOCKS, seed), is_chained=False)

    def put(self, seed: int) -> ostraca.PutResult:
        source = content(BLOCKS, seed, BLOCK_BYTES)
        watch = Stopwatch()
        put = self.volume.put(self.chain(seed), source=source, deadline_s=DEADLINE_S, ack=Ack.COMMITTED)
        assert watch.took_s < AT_ONCE_S
        return put

    def get(self, seed: int) -> ostraca.GetResult:
        """Get blocks, and check that hits are what was put and nothing else was touched."""
        into: NDArray[np.uint8] = empty(BLOCKS, BLOCK_BYTES)
        watch = Stopwatch()
        got = self.volume.get(self.chain(seed), into=into, deadline_s=DEADLINE_S)
        assert watch.took_s < AT_ONCE_S
        wanted = np.where(
            (np.array(got.states) == HIT)[:, None],
            content(BLOCKS, seed, BLOCK_BYTES),
            empty(BLOCKS, BLOCK_BYTES),
        )
        assert np.array_equal(into, wanted)
        return got

    def set(self, fault: Fault) -> None:
        def act() -> None:
            self.drive.fault = fault

        self.fabric.call_soon(act)

    def mend(self) -> None:
        self.fabric.call_soon(self.drive.mend)

    def status(self, number: int = 0) -> DriveStatus:
        (agent,) = self.fabric.status()
        return {drive.drive: drive for drive in agent.drives}[self.drives[number].id]

    def troubles(self, number: int) -> DriveStatus:
        """Return it without what was found there."""
        return msgspec.structs.replace(self.status(number), hits=0)

    def until(self, is_so: Callable[[], bool]) -> None:
        until_s = time.monotonic() + 20
        while not is_so():
            assert time.monotonic() < until_s, self.status()

    def recovers(self, seed: int) -> None:
        """Wait until every block of a put made now is committed, and got."""
        self.mend()
        self.until(lambda: set(self.put(seed).states) <= {PutState.COMMITTED, PutState.EXISTS})
        self.until(lambda: set(self.get(seed).states) == {HIT})


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with hosted(tmp_path, is_file=False) as ready:
        yield ready


@contextmanager
def hosted(tmp_path: Path, *, is_file: bool) -> Iterator[Host]:
    """Start a host; *is_file*: take its drives as files, not as flash."""
    made: list[FaultyDrive] = []

    def faulty(drive: Drive) -> FaultyDrive:
        made.append(FaultyDrive(drive, is_file=is_file))
        return made[-1]

    with FabricThread(small_plan(tmp_path / "fabric"), wrap_drive=faulty) as fabric:
        ready = Host(fabric, made)
        with fabric.connect(SMALL) as client:
            ready.volume = client.volume("v", LAYOUT, block_bytes=BLOCK_BYTES, create=True)
            try:
                yield ready
            finally:
                ready.mend()


def test_a_file_on_a_disk_that_is_busy_for_half_a_second_is_waited_for(tmp_path: Path) -> None:
    with hosted(tmp_path, is_file=True) as host:
        assert set(host.put(1).states) == {PutState.COMMITTED}

        def hang_for_a_while() -> None:
            host.drive.fault = Fault.READ_HANGS
            asyncio.get_running_loop().call_later(0.5, host.drive.mend)

        host.fabric.call_soon(hang_for_a_while)
        assert set(host.get(1).states) == {HIT}
        assert host.status().silences == 0


def test_a_file_that_never_answers_is_given_up_by_the_deadline_and_held_off_after_it(tmp_path: Path) -> None:
    with hosted(tmp_path, is_file=True) as host:
        assert set(host.put(1).states) == {PutState.COMMITTED}
        host.set(Fault.READ_HANGS)
        watch = Stopwatch()
        into: NDArray[np.uint8] = empty(BLOCKS, BLOCK_BYTES)
        got = host.volume.get(host.chain(1), into=into, deadline_s=0.7)
        assert watch.took_s < 1.0, "the deadline ended it, and not the drive's silence"
        assert set(got.states) == {HIT, BlockState.LATE}
        host.until(lambda: host.status().reads_held_off)
        assert set(host.get(1).states) == {HIT, MISS}
        host.recovers(2)


@pytest.mark.parametrize("fault", [Fault.READ_FAILS, Fault.READ_IS_SHORT, Fault.READ_HANGS])
def test_a_drive_that_cannot_be_read_is_misses_and_holds_up_no_other(host: Host, fault: Fault) -> None:
    assert set(host.put(1).states) == {PutState.COMMITTED}
    assert set(host.get(1).states) == {HIT}
    host.set(fault)
    first = host.get(1)
    for _ in range(4):
        got = host.get(1)
        assert set(got.states) == {HIT, MISS}
        if fault is not Fault.READ_IS_SHORT:  # of that a part is there, now and then
            assert got.states == first.states
        assert set(got.reasons) <= {Reason.NONE, Reason.DRIVE_ERROR, Reason.DRIVE_SUSPECT}
    seen = host.status()
    assert seen.reads_held_off or fault is Fault.READ_IS_SHORT
    assert seen.faults > 0
    assert (seen.silences if fault is Fault.READ_HANGS else seen.failed_reads) > 0
    assert host.troubles(1) == DriveStatus(host.drives[1].id)
    host.mend()
    host.until(lambda: set(host.get(1).states) == {HIT})
    assert host.status().why == ""
    host.recovers(2)


@pytest.mark.parametrize("fault", [Fault.WRITE_FAILS, Fault.WRITE_HANGS, Fault.FLUSH_FAILS])
def test_a_drive_that_cannot_be_written_declines_its_blocks_and_holds_up_no_other(
    host: Host, fault: Fault
) -> None:
    assert set(host.put(1).states) == {PutState.COMMITTED}
    host.set(fault)
    for seed in range(2, 6):
        put = host.put(seed)
        assert set(put.states) == {PutState.COMMITTED, PutState.DECLINED}
        assert set(put.reasons) <= {
            Reason.NONE,
            Reason.DRIVE_ERROR,
            Reason.DRIVE_SUSPECT,
            Reason.NO_SPACE,
        }
        got = host.get(seed)
        assert [state == HIT for state in got.states] == [state == PutState.COMMITTED for state in put.states]
    assert set(host.get(1).states) == {HIT}, "what was there before can be read"
    seen = host.status()
    assert seen.writes_held_off
    assert (seen.silences if fault is Fault.WRITE_HANGS else seen.failed_writes) > 0
    assert host.troubles(1) == DriveStatus(host.drives[1].id)
    host.recovers(9)


@pytest.mark.parametrize("fault", [Fault.WRITE_IS_TORN, Fault.WRITE_GOES_ASTRAY])
def test_a_drive_that_lies_about_its_writes_gives_misses_and_what_it_spoiled_is_dropped(
    host: Host, fault: Fault
) -> None:
    host.set(fault)
    assert set(host.put(1).states) == {PutState.COMMITTED}
    got = host.get(1)
    assert set(got.states) == {HIT, MISS}
    assert set(got.reasons) == {Reason.NONE, Reason.DAMAGED}
    host.until(lambda: host.status().damaged_blocks > 0)
    assert host.status().faults > 0
    assert host.troubles(1) == DriveStatus(host.drives[1].id)
    host.until(lambda: set(host.get(1).reasons) == {Reason.NONE, Reason.NOT_FOUND})
    host.recovers(1)


def test_a_rotten_bit_is_a_miss_and_its_block_is_dropped_and_stored_anew(host: Host) -> None:
    assert set(host.put(1).states) == {PutState.COMMITTED}
    block = content(BLOCKS, 1, BLOCK_BYTES)[7]
    path, offset = find_on_flash(host.fabric.plan, block)
    overwrite(path, offset + 1000, bytes([block[1000] ^ 4]))
    got = host.get(1)
    assert [state for state in got.states if state != HIT] == [MISS]
    assert got.reasons[7] == Reason.DAMAGED
    host.until(lambda: sum(host.status(number).damaged_blocks for number in range(2)) == 1)
    host.recovers(1)
