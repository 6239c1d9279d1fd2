"""Destruction of flash under a running fabric, like a forgetful drive."""

import os
from pathlib import Path

import numpy as np

_PIECE_BYTES = 8 << 20


def drives(enclosure: Path) -> list[Path]:
    """Return the files of an enclosure's drives."""
    return sorted(enclosure.glob("*.img"))


def overwrite(drive: Path, *, seed: int) -> int:
    """Fill a drive with random bytes; return their number.

    The function empties the page cache of the drive, so that later reads see the new bytes on flash.
    """
    size_bytes = drive.stat().st_size
    random = np.random.default_rng(seed)
    with drive.open("r+b") as file:
        for offset in range(0, size_bytes, _PIECE_BYTES):
            words = random.integers(0, 1 << 64, _PIECE_BYTES // 8, np.uint64)
            file.write(words.view(np.uint8)[: size_bytes - offset].data)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return size_bytes
