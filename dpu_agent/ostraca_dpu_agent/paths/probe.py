"""Measurement of a drive's speed over this host's path, in a second or two."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.flash.geometry import FIRST_SEGMENT_OFFSET, MIB
from ostraca_fabric.model.extent import PAGE_BYTES, Pieces
from ostraca_fabric.ports.drive import Drive
from ostraca_fabric.runtime.memory import HugeMemory
from ostraca_fabric.wire.flash_work import ProbeResult

_AT_ONCE = 4
_SHORT_READS_MAX = 2000


async def measure_drive(drive: Drive, *, seconds: float, writes: bool) -> ProbeResult:
    """Measure a drive for about *seconds*.

    With *writes*, parts of the drive behind the first MiB are overwritten. Writing comes first: a drive
    never written answers reads without flash access.
    """
    memory = HugeMemory(_AT_ONCE * MIB, prefault=True)
    # Random bytes in each page: drives that skip zeroes or deduplicate would appear too fast.
    memory.array[:] = np.random.default_rng(0).integers(0, 256, _AT_ONCE * MIB, np.uint8)
    probe = _Probe(drive, memory)
    parts = 3 if writes else 2
    try:
        written_s = await probe.measure_stream(seconds / parts, drive.submit_write) if writes else 0.0
        read_s = await probe.measure_stream(seconds / parts, drive.submit_read)
        waits = await probe.measure_short_reads(seconds / parts)
    except BaseException:
        memory.leak()  # an I/O may still use the memory
        raise
    memory.close()
    p50, p99 = np.percentile(waits, (50, 99)).tolist() if waits else (0.0, 0.0)
    trouble = f"{probe.failed} of its I/Os failed" if probe.failed else ""
    return ProbeResult(read_s, written_s, p50, p99, probe.failed, trouble)


class _Probe:
    def __init__(self, drive: Drive, memory: HugeMemory) -> None:
        self._drive = drive
        self._memory = memory
        self._dice = random.Random(1)  # noqa: S311 (positions, no secret)
        self.failed = 0

    async def measure_stream(
        self, seconds: float, submit: Callable[[Pieces], asyncio.Future[NDArray[np.bool_]]]
    ) -> float:
        """Return bytes per second of 1 MiB I/Os at random positions, four at once."""
        places = max(1, (self._drive.size_bytes - FIRST_SEGMENT_OFFSET) // MIB)
        began_s, moved_bytes = time.monotonic(), 0
        while (took_s := time.monotonic() - began_s) < seconds:
            at = [FIRST_SEGMENT_OFFSET + self._dice.randrange(places) * MIB for _ in range(_AT_ONCE)]
            pieces = Pieces(
                self._memory.array,
                np.arange(_AT_ONCE, dtype=np.int64) * MIB,
                np.array(at, np.int64),
                np.full(_AT_ONCE, MIB, np.uint32),
            )
            good = await asyncio.shield(submit(pieces))
            moved_bytes += int(good.sum()) * MIB
            self.failed += int((~good).sum())
            if not good.any():
                break
        return moved_bytes / max(took_s, time.monotonic() - began_s)

    async def measure_short_reads(self, seconds: float) -> list[float]:
        """Return the duration of single page reads in sequence, in seconds."""
        pages, waits = self._drive.size_bytes // PAGE_BYTES, list[float]()
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s and len(waits) < _SHORT_READS_MAX:
            page = self._memory.array[:PAGE_BYTES]
            began_s = time.monotonic()
            place = self._dice.randrange(pages) * PAGE_BYTES
            good = await asyncio.shield(self._drive.submit_read(Pieces.one(page, drive_offset=place)))
            if not good.all():
                self.failed += 1
                break
            waits.append(time.monotonic() - began_s)
        return waits
