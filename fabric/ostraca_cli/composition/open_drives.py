"""Open drives of a process, shared by its agents."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable

from ostraca_fabric.model.fabric_map import DriveRecord
from ostraca_fabric.model.ids import DriveId
from ostraca_fabric.ports.drive import Drive

log = logging.getLogger(__name__)

_LAST_IO_S = 2.0
"""Longest time of the last I/O on a working drive."""

_POLL_S = 0.02


class OpenDrives:
    """Drives by id, each opened once for all users."""

    def __init__(self, open_drive: Callable[[DriveRecord], Drive]) -> None:
        """Use *open_drive* to open a drive, for the first user."""
        self._open = open_drive
        self._drives: dict[DriveId, Drive] = {}
        self._users: Counter[DriveId] = Counter()
        self._nguids: dict[DriveId, str] = {}

    @property
    def drives(self) -> tuple[Drive, ...]:
        """Return the open drives."""
        return tuple(self._drives.values())

    @property
    def nguids(self) -> frozenset[str]:
        """Return the NGUIDs of the open drives."""
        return frozenset(self._nguids.values())

    def open(self, record: DriveRecord) -> Drive:
        """Return the drive; opens the drive for its first user. Raises DriveError."""
        if record.id not in self._drives:
            self._drives[record.id] = self._open(record)
            self._nguids[record.id] = record.nguid
        self._users[record.id] += 1
        return self._drives[record.id]

    def close(self, drive: DriveId) -> None:
        """Close the drive with its last user, so that a later open sees a new drive.

        The close runs in a thread, because the drive's last I/O may never end.
        """
        self._users[drive] -= 1
        if not self._users[drive] and (opened := self._drives.pop(drive, None)) is not None:
            self._nguids.pop(drive)
            threading.Thread(target=opened.close, name=f"closes-{drive}", daemon=True).start()

    async def are_idle(self, *, within_s: float = _LAST_IO_S) -> bool:
        """Wait for the end of all I/O on the open drives; return whether all I/O ended.

        Agents track the I/O of blocks and of served shards, but neither reads of shards not yet served nor
        health probes of silent drives. The memory of such I/O stays mapped until its end.
        """
        until_s = time.monotonic() + within_s
        waiting = [drive for drive in self.drives if drive.queued]
        while waiting and time.monotonic() < until_s:
            await asyncio.sleep(_POLL_S)
            waiting = [drive for drive in waiting if drive.queued]
        for drive in waiting:
            log.warning("drive %s still has I/O under way: the drive stays open", drive.id)
        return not waiting

    def close_all(self) -> None:
        """Close the drives, all idle by now: closing waits for I/O, even hung I/O."""
        for drive in self.drives:
            drive.close()
        self._drives.clear()
