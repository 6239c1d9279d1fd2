"""Memory of this process: huge pages for transfers, and the available room.

Private anonymous memory on huge pages moves two to three times faster between processes, and from flash, than
shared or 4 KiB-paged memory. Transparent huge pages need no preparation. Pages reserved by an operator
(``vm.nr_hugepages``) are never split or missing, and belong to no limit of other memory.

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
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.errors import ResourceError
from ostraca_fabric.model.extent import PAGE_BYTES, rounded_up

HUGE_PAGE_BYTES = 2 << 20
_MAP_HUGETLB = 0x40000
_MAP_HUGE_2MB = 21 << 26
"""Flags of mmap(2), which the module ``mmap`` lacks."""

_kept: dict[int, mmap.mmap] = {}
"""Every open map by address, mapped as long as listed here."""


class HugeMemory:
    """At least *size_bytes* zero bytes, in whole huge pages.

    With *prefault*, all pages exist on return, and a lack of memory is detected at once. Prefaulting takes
    0.2 s per GiB, or more on a virtual machine whose host must first find the memory. Raises OSError above
    the address space or the memory limit.

    With *is_reserved*, the pages are from the kernel's pool. Callers check ``huge_page_rooms`` first: above
    the limit of a cgroup, the kernel kills the process. Raises ResourceError if the pool has too few pages.
    """

    def __init__(self, size_bytes: int, *, prefault: bool, is_reserved: bool = False) -> None:
        assert size_bytes > 0
        self.size_bytes = rounded_up(size_bytes, HUGE_PAGE_BYTES)
        self._map = _reserved(self.size_bytes) if is_reserved else _transparent(self.size_bytes)
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


def huge_array(size_bytes: int) -> NDArray[np.uint8]:
    """Return zero bytes in huge pages, shape (size_bytes,), which are freed with the last view."""
    memory = np.frombuffer(_transparent(size_bytes), np.uint8)
    first = -int(memory.ctypes.data) % HUGE_PAGE_BYTES
    return memory[first : first + size_bytes]


def _transparent(size_bytes: int) -> mmap.mmap:
    # An extra huge page leaves room for alignment; untouched pages cost no memory.
    made = mmap.mmap(-1, size_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages is slower, but correct
        made.madvise(mmap.MADV_HUGEPAGE)
    return made


def _reserved(size_bytes: int) -> mmap.mmap:
    """Return memory of reserved huge pages, aligned by the kernel. Raises ResourceError."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_HUGETLB | _MAP_HUGE_2MB
    try:
        return mmap.mmap(-1, size_bytes, flags=flags)
    except OSError as error:
        pages = size_bytes // HUGE_PAGE_BYTES
        free = [f"{room.free_bytes // HUGE_PAGE_BYTES} are free in {room.name}" for room in huge_page_rooms()]
        raise ResourceError(
            f"{pages} huge pages of 2 MiB are needed, and {', '.join(free) or 'none are free'}: raise "
            f"vm.nr_hugepages, or use memory without reserved huge pages ({error.strerror})"
        ) from error


ROOT = Path("/")

_LIMITS_V2 = ("memory.max", "memory.high")
_USAGE_V2 = "memory.current"
_CACHED_V2 = ("inactive_file", "active_file", "slab_reclaimable")
_LIMITS_V1 = ("memory.limit_in_bytes",)
_USAGE_V1 = "memory.usage_in_bytes"
_CACHED_V1 = ("total_inactive_file", "total_active_file")

_POOL = "sys/kernel/mm/hugepages/hugepages-2048kB"
_HUGE_V2 = (
    ("hugetlb.2MB.max", "hugetlb.2MB.current"),
    ("hugetlb.2MB.rsvd.max", "hugetlb.2MB.rsvd.current"),
)
_HUGE_V1 = (
    ("hugetlb.2MB.limit_in_bytes", "hugetlb.2MB.usage_in_bytes"),
    ("hugetlb.2MB.rsvd.limit_in_bytes", "hugetlb.2MB.rsvd.usage_in_bytes"),
)
"""Files with a limit and the usage."""

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

    is_of_huge_pages: bool = False
    """Whether reserved huge pages count alone."""


def rooms(root: Path = ROOT) -> list[Room]:
    """Return the room under each limit of this process, without unreadable limits.

    *root* is the folder with ``/proc`` and the cgroups.
    """
    return [*_of_process(root / "proc/self/statm"), *_of_machine(root / "proc/meminfo"), *_of_cgroups(root)]


def huge_page_rooms(root: Path = ROOT) -> list[Room]:
    """Return the room for reserved huge pages, in the kernel's pool and under limits of cgroups.

    *root* is as for ``rooms``.
    """
    return [*_of_pool(root / _POOL), *_of_huge_cgroups(root)]


def _of_pool(pool: Path) -> Iterator[Room]:
    names = ("nr", "free", "resv", "nr_overcommit", "surplus")
    found = {name: _words(pool / f"{name}_hugepages") for name in names}
    if all(words and words[0].isdigit() for words in found.values()):
        pages = {name: int(words[0]) for name, words in found.items()}
        more = max(0, pages["nr_overcommit"] - pages["surplus"])
        free = max(0, pages["free"] - pages["resv"]) + more
        total = pages["nr"] + more
        name = "the pool of huge pages (vm.nr_hugepages)"
        yield Room(name, total * HUGE_PAGE_BYTES, free * HUGE_PAGE_BYTES, is_of_huge_pages=True)


def _of_huge_cgroups(root: Path) -> Iterator[Room]:
    for kind, top, path_down in _cgroups(root, "hugetlb"):
        for below in path_down:
            for limit, usage in _HUGE_V2 if kind == "cgroup2" else _HUGE_V1:
                for room in _of_cgroup(top / below, root, limits=(limit,), usage=usage, cached=()):
                    yield replace(room, is_of_huge_pages=True)


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
    for kind, top, path_down in _cgroups(root, "memory"):
        limits, usage, cached = (
            (_LIMITS_V2, _USAGE_V2, _CACHED_V2) if kind == "cgroup2" else (_LIMITS_V1, _USAGE_V1, _CACHED_V1)
        )
        for below in path_down:
            yield from _of_cgroup(top / below, root, limits=limits, usage=usage, cached=cached)


def _cgroups(root: Path, controller: str) -> Iterator[tuple[str, Path, list[PurePosixPath]]]:
    """Yield type and folder of each mounted hierarchy, and our cgroups below, outermost first."""
    own = _own_cgroups(root / "proc/self/cgroup", controller)
    for kind, mounted, mount_point in _mounts(root / "proc/self/mountinfo", controller):
        if kind in own:
            yield kind, root / mount_point.lstrip("/"), _path_down(own[kind], mounted)


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


def _own_cgroups(file: Path, controller: str) -> dict[str, str]:
    """Return the path of this process's cgroup in the v2 hierarchy, and in v1's of a controller."""
    found = {}
    for line in _lines(file):
        number, controllers, path = (*line.split(":", 2), "", "")[:3]
        if number == "0" and not controllers:
            found["cgroup2"] = path
        elif controller in controllers.split(","):
            found["cgroup"] = path
    return found


def _mounts(file: Path, controller: str) -> Iterator[tuple[str, str, str]]:
    """Yield type, root and mount point of each mounted hierarchy with limits of a controller."""
    for line in _lines(file):
        left, _, right = line.partition(" - ")
        mount, system = left.split(" "), right.split(" ")
        if len(mount) > 4 and len(system) > 2:  # noqa: PLR2004 (as proc(5) numbers them)
            is_v1 = system[0] == "cgroup" and controller in system[2].split(",")
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
