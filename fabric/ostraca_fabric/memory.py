"""Memory that transfers read and write: huge pages, page-aligned, and never unmapped under a transfer.

Private anonymous memory on huge pages moves two to three times faster between processes, and from flash, than
shared or 4 KiB-paged memory. It is kept out of forked children (MADV_DONTFORK): a fork would turn its pages
copy-on-write, and the first write of this process would then move it to new pages while a network card goes
on using the old ones. So **a child forked from this process has no such memory: touching it there is a
segmentation fault.** Use spawn, not fork.

Unmapping memory while another process transfers over TCP kills the owner of the memory. Therefore nothing
here is unmapped by going out of scope. Its owner ends it in one of two ways: ``close`` when no transfer of it
is outstanding, or ``leak`` when one is not known to have ended: the memory then stays mapped as long as the
process lives.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from typing import TYPE_CHECKING

import numpy as np

from ostraca_fabric.extent import PAGE_BYTES, rounded_up

if TYPE_CHECKING:
    from numpy.typing import NDArray

HUGE_PAGE_BYTES = 2 << 20

_kept: dict[int, mmap.mmap] = {}
"""Every map not closed, by its address: what keeps it mapped when nobody refers to it any more."""


class HugeMemory:
    """At least *size_bytes* bytes of zeroes, beginning at a huge page, in whole huge pages.

    With *prefault* every page is there when this returns (0.2 s per GiB, more on a virtual machine whose host
    has yet to find the memory), and running out of memory shows now rather than later. Raises OSError when
    the address space or the memory limit does not allow as much.
    """

    def __init__(self, size_bytes: int, *, prefault: bool) -> None:
        assert size_bytes > 0
        self.size_bytes = rounded_up(size_bytes, HUGE_PAGE_BYTES)
        # One huge page more, so that an aligned part of the size lies in it; what is not touched is free.
        self._map = mmap.mmap(
            -1, self.size_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        with contextlib.suppress(OSError):  # a kernel without huge pages: slower, not wrong
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._map.madvise(mmap.MADV_DONTFORK)
        map_address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        start = -map_address % HUGE_PAGE_BYTES
        self.address = map_address + start
        self.view = memoryview(self._map)[start : start + self.size_bytes]
        _kept[self.address] = self._map
        if prefault:
            self.array[::PAGE_BYTES] = 0

    @property
    def array(self) -> NDArray[np.uint8]:
        """The bytes as an array, shape (size_bytes,)."""
        return np.frombuffer(self.view, np.uint8)

    def close(self) -> None:
        """Unmap, once the last view that others hold is gone. Only when no transfer is outstanding."""
        assert self.address in _kept, "closed or leaked before"
        del _kept[self.address]
        self.view = memoryview(b"")
        del self._map

    def leak(self) -> None:
        """Leave it mapped as long as the process lives, because a transfer may still reach it."""
        assert self.address in _kept, "closed or leaked before"
        self.view = memoryview(b"")
