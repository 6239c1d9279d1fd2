"""Memory of this process: huge pages for transfers, and the available room.

Private anonymous memory on huge pages moves two to three times faster between processes, and from flash, than
shared or 4 KiB-paged memory.

MADV_DONTFORK keeps the memory out of forked children. Otherwise a fork would make its pages copy-on-write.
The first write would then move data to new pages, while a network card continues to use the old pages. So **a
forked child has no such memory: access there is a segmentation fault.** Use spawn, not fork.

Unmapping memory while another process transfers over TCP kills the owner of the memory. Therefore memory is
never unmapped by going out of scope. The owner ends the memory in one of two ways: ``close`` if no transfer
is outstanding, or ``leak`` if a transfer may be. Leaked memory stays mapped as long as the process lives.

Memory available to this process, by its limits and the machine.

A process above its cgroup's limit is killed without a message. A process that takes more than the machine has
may be killed, or cause another process to be killed. So callers check here before large allocations. Limits
nest: a cgroup's limit applies to all cgroups below, and the smallest room counts. Reclaimable usage of a
cgroup, such as cached files, counts as free.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import resource
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.model.extent import PAGE_BYTES, rounded_up

HUGE_PAGE_BYTES = 2 << 20

_kept: dict[int, mmap.mmap] = {}
"""Every open map by address, mapped as long as listed here."""


class HugeMemory:
    """At least *size_bytes* zero bytes, in whole huge pages.

    With *prefault*, all pages exist on return, and a lack of memory is detected at once. Prefaulting takes
    0.2 s per GiB, or more on a virtual machine whose host must first find the memory. Raises OSError above
    the address space or the memory limit.
    """

    def __init__(self, size_bytes: int, *, prefault: bool) -> None:
        assert size_bytes > 0
        self.size_bytes = rounded_up(size_bytes, HUGE_PAGE_BYTES)
        # An extra huge page leaves room for alignment; untouched pages cost no memory.
        self._map = mmap.mmap(
            -1, self.size_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        with contextlib.suppress(OSError):  # a kernel without huge pages is slower, but correct
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
        """Unmap the memory, once the last other view is gone.

        Call only without outstanding transfers.
        """
        assert self.address in _kept, "closed or leaked before"
        del _kept[self.address]
        self.view = memoryview(b"")
        del self._map

    def leak(self) -> None:
        """Keep the memory mapped as long as the process lives, for an unfinished transfer."""
        assert self.address in _kept, "closed or leaked before"
        self.view = memoryview(b"")

    def end(self, *, is_quiet: bool) -> None:
        """Unmap the memory if *is_quiet*: no transfer is outstanding. Otherwise keep the memory mapped."""
        (self.close if is_quiet else self.leak)()


ROOT = Path("/")

_LIMITS_V2 = ("memory.max", "memory.high")
_USAGE_V2 = "memory.current"
_CACHED_V2 = ("inactive_file", "active_file", "slab_reclaimable")
_LIMITS_V1 = ("memory.limit_in_bytes",)
_USAGE_V1 = "memory.usage_in_bytes"
_CACHED_V1 = ("total_inactive_file", "total_active_file")

_VM_SIZE, _VM_DATA = 0, 5
"""Columns of ``statm``."""

_KIB = 1 << 10


@dataclass(frozen=True, slots=True)
class Room:
    """Room under one limit."""

    name: str
    """Name of the limit for an operator: a cgroup file, an option of ``ulimit``, or the machine."""

    limit_bytes: int
    free_bytes: int
    is_address_space: bool = False
    """Whether all mapped memory counts, not only touched memory."""


def rooms(root: Path = ROOT) -> list[Room]:
    """Return the room under each limit of this process, without unreadable limits.

    *root* is the folder with ``/proc`` and the cgroups.
    """
    return [*_of_process(root / "proc/self/statm"), *_of_machine(root / "proc/meminfo"), *_of_cgroups(root)]


def _of_process(statm: Path) -> Iterator[Room]:
    columns = _words(statm)
    for name, which, column in (
        ("ulimit -v", resource.RLIMIT_AS, _VM_SIZE),
        ("ulimit -d", resource.RLIMIT_DATA, _VM_DATA),
    ):
        limit_bytes, _ = resource.getrlimit(which)
        if limit_bytes != resource.RLIM_INFINITY and len(columns) > column:
            used_bytes = int(columns[column]) * PAGE_BYTES
            yield Room(name, limit_bytes, max(0, limit_bytes - used_bytes), is_address_space=True)


def _of_machine(meminfo: Path) -> Iterator[Room]:
    found = {words[0]: int(words[1]) * _KIB for words in _table(meminfo) if words[1].isdigit()}
    if "MemTotal:" in found and "MemAvailable:" in found:
        yield Room(
            "the memory of this machine",
            found["MemTotal:"] + found.get("SwapTotal:", 0),
            found["MemAvailable:"] + found.get("SwapFree:", 0),
        )


def _of_cgroups(root: Path) -> Iterator[Room]:
    own = _own_cgroups(root / "proc/self/cgroup")
    for kind, mounted, mount_point in _mounts(root / "proc/self/mountinfo"):
        if kind not in own:
            continue
        top = root / mount_point.lstrip("/")
        limits, usage, cached = (
            (_LIMITS_V2, _USAGE_V2, _CACHED_V2) if kind == "cgroup2" else (_LIMITS_V1, _USAGE_V1, _CACHED_V1)
        )
        for below in _path_down(own[kind], mounted):
            yield from _of_cgroup(top / below, root, limits=limits, usage=usage, cached=cached)


def _path_down(own: str, mounted: str) -> list[PurePosixPath]:
    """Return the cgroups from the mounted one down to our own, relative to the mount.

    In a container the path may be the host's, outside the mount: then the mounted cgroup is ours.
    """
    path, top = PurePosixPath(own), PurePosixPath(mounted)
    below = path.relative_to(top) if path.is_relative_to(top) and ".." not in path.parts else PurePosixPath()
    return [*reversed(below.parents), below] if below.parts else [below]


def _of_cgroup(
    cgroup: Path, root: Path, *, limits: Iterable[str], usage: str, cached: Iterable[str]
) -> Iterator[Room]:
    used = _words(cgroup / usage)
    if not used or not used[0].isdigit():
        return
    kept = {words[0]: int(words[1]) for words in _table(cgroup / "memory.stat") if words[1].isdigit()}
    held_bytes = max(0, int(used[0]) - sum(kept.get(name, 0) for name in cached))
    for name in limits:
        limit = _words(cgroup / name)
        if limit and limit[0].isdigit():
            shown = f"/{(cgroup / name).relative_to(root)}"
            yield Room(shown, int(limit[0]), max(0, int(limit[0]) - held_bytes))


def _own_cgroups(file: Path) -> dict[str, str]:
    """Return the path of this process's cgroup in the v2 and v1 memory hierarchies."""
    found = {}
    for line in _lines(file):
        number, controllers, path = (*line.split(":", 2), "", "")[:3]
        if number == "0" and not controllers:
            found["cgroup2"] = path
        elif "memory" in controllers.split(","):
            found["cgroup"] = path
    return found


def _mounts(file: Path) -> Iterator[tuple[str, str, str]]:
    """Yield type, root and mount point of each mounted hierarchy with memory limits."""
    for line in _lines(file):
        left, _, right = line.partition(" - ")
        mount, system = left.split(" "), right.split(" ")
        if len(mount) > 4 and len(system) > 2:  # noqa: PLR2004 (as proc(5) numbers them)
            is_v1 = system[0] == "cgroup" and "memory" in system[2].split(",")
            if is_v1 or system[0] == "cgroup2":
                yield system[0], mount[3], mount[4]


def _table(file: Path) -> Iterator[list[str]]:
    return (words for words in map(str.split, _lines(file)) if len(words) > 1)


def _words(file: Path) -> list[str]:
    return " ".join(_lines(file)).split()


def _lines(file: Path) -> list[str]:
    with suppress(OSError, ValueError):
        return file.read_text().splitlines()
    return []
