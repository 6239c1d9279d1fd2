"""Flash into staging: reads extents, adjacent ones in one I/O, and checks every block's tag.

The check runs in the drive's threads, right behind the read, while the bytes are in cache and the loop is
free.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np

from ostraca_dpu_agent.mover.runs import joined
from ostraca_fabric.extent import rounded_up
from ostraca_fabric.outcome import Reason
from ostraca_fabric.tags import matches

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from ostraca_dpu_agent.mover.locate import Located
    from ostraca_dpu_agent.mover.staging import Lease, Staging
    from ostraca_fabric.ids import DriveId
    from ostraca_fabric.ports.drive import Drive, Run


class Loader:
    """Reads located blocks into leased slots."""

    def __init__(self, staging: Staging, drives: Mapping[DriveId, Drive]) -> None:
        """Read from *drives*, a mapping the steward keeps current."""
        self._staging = staging
        self._drives = drives

    async def load(
        self,
        located: Located,
        positions: NDArray[np.intp],
        lease: Lease,
        seeds: NDArray[np.uint64],
    ) -> NDArray[np.uint8]:
        """Bring the blocks at *positions* into the lease's slots, in that order.

        Returns a Reason per block: NONE when it is there and verified, else DRIVE_ERROR or DAMAGED. Ends
        only when every read has ended: whoever can't wait that long leaves this running and keeps the lease.
        """
        reasons = np.full(len(positions), Reason.DRIVE_ERROR, np.uint8)
        reads: list[asyncio.Future[list[bool]]] = []
        try:
            for drive_id, rows in self._by_drive(located, positions).items():
                drive = self._drives.get(drive_id)
                if drive is not None:
                    runs, members = self._runs(located, positions, rows, lease)
                    check = self._checker(located, positions, members, lease, seeds, reasons)
                    reads.append(drive.submit_read(runs, check))
        finally:  # whatever went wrong: the lease must outlive every read that was begun
            await asyncio.gather(*reads)
        return reasons

    @staticmethod
    def _by_drive(located: Located, positions: NDArray[np.intp]) -> dict[DriveId, list[int]]:
        """Rows of *positions* by drive, in the order they lie there."""
        rows: dict[DriveId, list[int]] = {}
        at = np.lexsort((located.offsets[positions], located.source[positions]))
        for row in at.tolist():
            source = located.sources[int(located.source[positions[row]])]
            rows.setdefault(source.drive, []).append(row)
        return rows

    def _runs(
        self, located: Located, positions: NDArray[np.intp], rows: list[int], lease: Lease
    ) -> tuple[list[Run], list[list[int]]]:
        """Join adjacent extents: the runs, and the rows each run fills."""
        extents = []
        for row in rows:
            position = positions[row]
            offset = located.sources[int(located.source[position])].base + int(located.offsets[position])
            length = rounded_up(int(located.lengths[position]))
            extents.append((offset, self._staging.view(int(lease.offsets[row]), length), row))
        return joined(extents)

    def _checker(
        self,
        located: Located,
        positions: NDArray[np.intp],
        members: list[list[int]],
        lease: Lease,
        seeds: NDArray[np.uint64],
        reasons: NDArray[np.uint8],
    ) -> Callable[[int], bool]:
        lengths = located.lengths[positions].tolist()
        tags = located.tags[positions].tobytes()
        seeds_here = seeds[positions].tolist()
        offsets = lease.offsets.tolist()
        view = self._staging.view

        def check(run: int) -> bool:
            for row in members[run]:
                block = view(offsets[row], lengths[row])
                good = matches(block, seeds_here[row], tags[row * 16 : row * 16 + 16])
                reasons[row] = Reason.NONE if good else Reason.DAMAGED
            return True

        return check
