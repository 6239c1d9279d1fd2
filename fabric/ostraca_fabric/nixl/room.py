"""Resource check for NIXL in a process: threads, file descriptors and address space.

UCX calls ``abort`` without enough of these resources, and ends the engine's process. So all are probed before
each creation of a NIXL agent. Measured with NIXL 1.5.1 and UCX 1.21 on a host without RDMA:

- No thread left: abort, in the first agent of a process.
- 2 to 4 descriptors left: abort in the first agent; 8 left: abort in a second agent. Success from 15 on.
- 50 MiB of address space left: abort. An agent and its libraries take 120 MiB.

Another thread or process can still take the resources between the probe and their use. For that reason the
limits here are well above the measured figures.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import threading
from pathlib import Path

from ostraca_fabric.errors import TransportError

THREADS = 4
DESCRIPTORS = 32
DESCRIPTORS_PER_RDMA_DEVICE = 8
"""An estimate: UCX opens each device, its event queue and its completion channels. Not measured on a host
with RDMA."""

ADDRESS_SPACE_BYTES = 256 << 20

RDMA_DEVICES = Path("/sys/class/infiniband")


def check_room() -> None:
    """Check for enough resources for a NIXL agent. Raises TransportError with both numbers."""
    wanted = DESCRIPTORS + DESCRIPTORS_PER_RDMA_DEVICE * rdma_devices()
    opened = _descriptors(wanted)
    if opened < wanted:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        raise TransportError(
            f"NIXL needs {wanted} free file descriptors and this process has {opened} "
            f"(its limit is {limit}): raise `ulimit -n`"
        )
    _check_address_space()
    started = startable_threads(THREADS)
    if started < THREADS:
        raise TransportError(
            f"NIXL needs {THREADS} more threads and this process can start {started}: raise the limit on "
            "pids of the container, or `ulimit -u`"
        )


def rdma_devices() -> int:
    """Count this host's RDMA devices."""
    try:
        return sum(1 for _ in RDMA_DEVICES.iterdir())
    except OSError:
        return 0


def _descriptors(wanted: int) -> int:
    """Count the descriptors that can be opened at once, up to *wanted*."""
    opened: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while len(opened) < wanted:
                opened.append(os.eventfd(0, os.EFD_CLOEXEC))
    finally:
        for descriptor in opened:
            os.close(descriptor)
    return len(opened)


def _check_address_space() -> None:
    try:
        mmap.mmap(-1, ADDRESS_SPACE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0).close()
    except OSError as error:
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        raise TransportError(
            f"NIXL needs {ADDRESS_SPACE_BYTES} bytes of address space and this process has less left "
            f"(its limit is {limit}): raise `ulimit -v`"
        ) from error


def startable_threads(wanted: int) -> int:
    """Count the threads that can run at once, up to *wanted*."""
    over = threading.Event()
    running: list[threading.Thread] = []
    try:
        with contextlib.suppress(RuntimeError):
            while len(running) < wanted:
                thread = threading.Thread(target=over.wait, name="ostraca-room", daemon=True)
                thread.start()
                running.append(thread)
    finally:
        over.set()
        for thread in running:
            thread.join()
    return len(running)
