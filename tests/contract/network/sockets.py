"""Cuts connections of running processes, as a network that breaks does: without a word to either program."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

_PIDFD_GETFD = 438
"""The number of this system call, the same on every architecture; Python has no name for it."""

_libc = ctypes.CDLL(None, use_errno=True)


INTERNET = (socket.AF_INET, socket.AF_INET6)


def cut_internet(pid: int) -> int:
    """Shut down every TCP connection of a process; return how many there were."""
    return _cut_all(pid, lambda connection: connection.family in INTERNET)


def cut_connection_to(pid: int, path: str) -> int:
    """Shut down every connection of a process to this unix socket; return how many there were."""
    return _cut_all(pid, lambda connection: connection.getpeername() == path)


def _cut_all(pid: int, is_meant: Callable[[socket.socket], bool]) -> int:
    """Skip the test where the kernel does not let us: it takes the rights of a debugger."""
    pidfd = os.pidfd_open(pid)
    try:
        return sum(_cut(pidfd, number, is_meant) for number in _sockets(pid))
    finally:
        os.close(pidfd)


def _sockets(pid: int) -> list[int]:
    found = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            if str(descriptor.readlink()).startswith("socket:"):
                found.append(int(descriptor.name))
    return found


def _cut(pidfd: int, number: int, is_meant: Callable[[socket.socket], bool]) -> bool:
    ours = _libc.syscall(_PIDFD_GETFD, pidfd, number, 0)
    if ours < 0 and ctypes.get_errno() == errno.EBADF:  # closed meanwhile
        return False
    if ours < 0:
        pytest.skip(f"sockets of other processes can't be had here: {os.strerror(ctypes.get_errno())}")
    if not stat.S_ISSOCK(os.fstat(ours).st_mode):  # closed meanwhile, and something else now
        os.close(ours)
        return False
    with socket.socket(fileno=ours) as theirs:
        with contextlib.suppress(OSError):  # it listens, or is not connected
            theirs.getpeername()
            if theirs.type == socket.SOCK_STREAM and is_meant(theirs):
                theirs.shutdown(socket.SHUT_RDWR)
                return True
        return False
