"""How much memory limits leave, read from the files of a kernel as they are found on real machines."""

import resource
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.support.huge_pages import HugePages

from ostraca_fabric.errors import ResourceError
from ostraca_fabric.runtime.memory import HUGE_PAGE_BYTES, HugeMemory, Room, huge_page_rooms, rooms

MIB = 1 << 20
UNLIMITED_V1 = "9223372036854771712\n"

V2_MOUNT = "30 23 0:26 {root} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = "35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
V1_OTHER = "31 23 0:28 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"


def laid_out(root: Path, files: Mapping[str, str]) -> Path:
    """Write files below *root*, which stands for ``/``."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def v2(
    limit: str, *, used_mib: int = 100, cached_mib: int = 0, at: str = "", high: str = "max"
) -> dict[str, str]:
    """Return the files of one cgroup."""
    folder = f"sys/fs/cgroup{at}"
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.high": f"{high}\n",
        f"{folder}/memory.current": f"{used_mib * MIB}\n",
        f"{folder}/memory.stat": f"anon 5\nfile 7\ninactive_file {cached_mib * MIB}\nactive_file 0\n",
    }


def v1(limit: str, *, used_mib: int = 100, cached_mib: int = 0, at: str = "") -> dict[str, str]:
    """Return the files of one cgroup."""
    folder = f"sys/fs/cgroup/memory{at}"
    return {
        f"{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"{folder}/memory.usage_in_bytes": f"{used_mib * MIB}\n",
        f"{folder}/memory.stat": f"cache 3\ntotal_inactive_file 0\ntotal_active_file {cached_mib * MIB}\n",
    }


def least(root: Path) -> Room:
    """Return the smallest room."""
    return min(rooms(root), key=lambda room: room.free_bytes)


def test_in_a_container_of_v2_the_limit_is_at_the_mount(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": V2_MOUNT.format(root="/")}
    root = laid_out(tmp_path, files | v2(str(500 * MIB)))
    assert rooms(root) == [Room("/sys/fs/cgroup/memory.max", 500 * MIB, 400 * MIB)]


def test_of_nested_limits_of_v2_the_smallest_room_counts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/pods/pod-1/agent\n",
        "proc/self/mountinfo": V1_OTHER + V2_MOUNT.format(root="/"),
    }
    outer = v2(str(1000 * MIB), used_mib=950, at="/pods")
    middle = v2("max", used_mib=200, at="/pods/pod-1")
    inner = v2(str(600 * MIB), used_mib=150, at="/pods/pod-1/agent")
    root = laid_out(tmp_path, files | outer | middle | inner)
    assert least(root) == Room("/sys/fs/cgroup/pods/memory.max", 1000 * MIB, 50 * MIB)
    assert Room("/sys/fs/cgroup/pods/pod-1/agent/memory.max", 600 * MIB, 450 * MIB) in rooms(root)
    assert len(rooms(root)) == 2


def test_where_a_cgroup_is_throttled_is_a_limit(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": V2_MOUNT.format(root="/")}
    root = laid_out(tmp_path, files | v2(str(500 * MIB), high=str(300 * MIB)))
    assert least(root) == Room("/sys/fs/cgroup/memory.high", 300 * MIB, 200 * MIB)


@pytest.mark.parametrize(("made", "mount"), [(v1, V1_MOUNT), (v2, V2_MOUNT)])
def test_cached_files_are_free(made: object, mount: str, tmp_path: Path) -> None:
    assert callable(made)
    own = "4:cpu,memory:/\n0::/\n"
    files = {"proc/self/cgroup": own, "proc/self/mountinfo": mount.format(root="/")}
    root = laid_out(tmp_path, files | made(str(500 * MIB), used_mib=499, cached_mib=490))
    assert least(root).free_bytes == 491 * MIB


def test_more_used_than_allowed_leaves_nothing(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": V2_MOUNT.format(root="/")}
    root = laid_out(tmp_path, files | v2(str(50 * MIB), used_mib=100))
    assert least(root).free_bytes == 0


def test_of_nested_limits_of_v1_the_smallest_room_counts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "9:cpu:/x\n4:memory:/a/b:c\n0::/\n",
        "proc/self/mountinfo": V1_OTHER + V1_MOUNT.format(root="/"),
    }
    outer, inner = v1(str(300 * MIB), at="/a"), v1(str(500 * MIB), used_mib=20, at="/a/b:c")
    root = laid_out(tmp_path, files | v1(UNLIMITED_V1.strip()) | outer | inner)
    assert least(root) == Room("/sys/fs/cgroup/memory/a/memory.limit_in_bytes", 300 * MIB, 200 * MIB)


@pytest.mark.parametrize("own", ["/docker/abc", "/docker/abc/", "/elsewhere", "/../sibling"])
def test_in_a_container_that_is_told_the_path_of_its_host_what_is_mounted_counts(
    own: str, tmp_path: Path
) -> None:
    files = {
        "proc/self/cgroup": f"4:memory:{own}\n",
        "proc/self/mountinfo": V1_MOUNT.format(root="/docker/abc"),
    }
    root = laid_out(tmp_path, files | v1(str(500 * MIB)))
    assert rooms(root) == [Room("/sys/fs/cgroup/memory/memory.limit_in_bytes", 500 * MIB, 400 * MIB)]


def test_the_machine_counts_with_its_swap(tmp_path: Path) -> None:
    text = "MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 400 kB\nSwapTotal: 100 kB\nSwapFree: 50 kB\n"
    root = laid_out(tmp_path, {"proc/meminfo": text})
    assert rooms(root) == [Room("the memory of this machine", 1100 << 10, 450 << 10)]


def test_the_address_space_counts_as_it_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {resource.RLIMIT_AS: 100 * MIB, resource.RLIMIT_DATA: resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limits[which], resource.RLIM_INFINITY))
    root = laid_out(tmp_path, {"proc/self/statm": "2560 100 50 1 0 1000 0\n"})
    assert rooms(root) == [Room("ulimit -v", 100 * MIB, 90 * MIB, is_address_space=True)]


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"proc/self/cgroup": "", "proc/self/mountinfo": "", "proc/meminfo": "", "proc/self/statm": ""},
        {"proc/self/cgroup": "garbage\n::\n0\n", "proc/self/mountinfo": "a b - c\n - cgroup2\n\n"},
        {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": V2_MOUNT.format(root="/")},
        {"proc/meminfo": "MemTotal: much kB\nMemAvailable:\n"},
        {"proc/meminfo": "\udcff"},
    ],
)
def test_what_can_not_be_read_is_left_out(files: dict[str, str], tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(text.encode(errors="surrogateescape"))
    assert rooms(tmp_path) == []


POOL = "sys/kernel/mm/hugepages/hugepages-2048kB"
HUGE_V1_MOUNT = "36 31 0:33 {root} /sys/fs/cgroup/hugetlb rw,relatime - cgroup cgroup rw,hugetlb\n"


def pool(nr: int, free: int, resv: int, overcommit: int = 0, surplus: int = 0) -> dict[str, str]:
    counts = {"nr": nr, "free": free, "resv": resv, "nr_overcommit": overcommit, "surplus": surplus}
    return {f"{POOL}/{name}_hugepages": f"{count}\n" for name, count in counts.items()}


@pytest.mark.parametrize(
    ("files", "limit", "free"),
    [
        (pool(300, 240, 5), 300, 235),
        (pool(300, 5, 9), 300, 0),
        (pool(12, 2, 0, overcommit=10, surplus=2), 20, 10),
    ],
)
def test_promised_pages_of_the_pool_are_not_free(
    files: dict[str, str], limit: int, free: int, tmp_path: Path
) -> None:
    (found,) = huge_page_rooms(laid_out(tmp_path, files))
    assert (found.limit_bytes, found.free_bytes) == (limit * HUGE_PAGE_BYTES, free * HUGE_PAGE_BYTES)
    assert found.is_of_huge_pages
    assert "vm.nr_hugepages" in found.name


def test_a_pod_has_the_huge_pages_of_its_cgroup(tmp_path: Path) -> None:
    v2_files = {
        "proc/self/cgroup": "0::/\n",
        "proc/self/mountinfo": V2_MOUNT.format(root="/"),
        "sys/fs/cgroup/hugetlb.2MB.max": f"{64 * MIB}\n",
        "sys/fs/cgroup/hugetlb.2MB.current": f"{10 * MIB}\n",
        "sys/fs/cgroup/hugetlb.2MB.rsvd.max": "max\n",
        "sys/fs/cgroup/hugetlb.2MB.rsvd.current": "0\n",
    }
    root = laid_out(tmp_path / "v2", v2_files | v2(str(500 * MIB)))
    limit = Room("/sys/fs/cgroup/hugetlb.2MB.max", 64 * MIB, 54 * MIB, is_of_huge_pages=True)
    assert huge_page_rooms(root) == [limit]
    assert [each.name for each in rooms(root)] == ["/sys/fs/cgroup/memory.max"]
    v1_files = {
        "proc/self/cgroup": "5:hugetlb:/pod\n4:memory:/pod\n",
        "proc/self/mountinfo": V1_MOUNT.format(root="/") + HUGE_V1_MOUNT.format(root="/"),
        "sys/fs/cgroup/hugetlb/pod/hugetlb.2MB.limit_in_bytes": f"{32 * MIB}\n",
        "sys/fs/cgroup/hugetlb/pod/hugetlb.2MB.usage_in_bytes": "0\n",
    }
    (found,) = huge_page_rooms(laid_out(tmp_path / "v1", v1_files | v1(str(500 * MIB), at="/pod")))
    assert (found.limit_bytes, found.free_bytes) == (32 * MIB, 32 * MIB)


def test_reserved_pages_are_taken_whole_and_given_back(huge_pages: HugePages) -> None:
    huge_pages.reserve(8)
    memory = HugeMemory(5 * MIB, prefault=True, is_reserved=True)
    assert (memory.size_bytes, memory.address % HUGE_PAGE_BYTES) == (3 * HUGE_PAGE_BYTES, 0)
    assert huge_pages.free == 5
    memory.array[:] = 7
    assert int(memory.array.sum()) == 7 * memory.size_bytes
    with pytest.raises(ResourceError, match=r"^6 huge pages of 2 MiB are needed, and 5 are free in the pool"):
        HugeMemory(12 * MIB, prefault=False, is_reserved=True)
    memory.close()
    assert huge_pages.free == 8
    transparent = HugeMemory(5 * MIB, prefault=True)
    assert huge_pages.free == 8
    transparent.close()


def test_this_process_has_room() -> None:
    assert least(Path("/")).free_bytes > 0
