"""Cuts connections of running processes, as a network that breaks does: without a word to either program."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from pathlib import Path

import pytest

_PIDFD_GETFD = 438
"""The number of this system call, the same on every architecture; Python has no name for it."""

_libc = ctypes.CDLL(None, use_errno=True)


def cut_connections(pid: int, *, families: tuple[int, ...]) -> int:
    """Shut down every connection of a process that is of these families; return how many there were.

    Skips the test where the kernel does not let us: it takes the rights of a debugger.
    """
    pidfd = os.pidfd_open(pid)
    try:
        return sum(_cut(pidfd, number, families) for number in _sockets(pid))
    finally:
        os.close(pidfd)


def _sockets(pid: int) -> list[int]:
    found = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            if str(descriptor.readlink()).startswith("socket:"):
                found.append(int(descriptor.name))
    return found


def _cut(pidfd: int, number: int, families: tuple[int, ...]) -> bool:
    ours = _libc.syscall(_PIDFD_GETFD, pidfd, number, 0)
    if ours < 0:
        pytest.skip(f"sockets of other processes can't be had here: {os.strerror(ctypes.get_errno())}")
    with socket.socket(fileno=ours) as theirs:
        if theirs.family not in families or theirs.type != socket.SOCK_STREAM:
            return False
        with contextlib.suppress(OSError):  # it listens, or is not connected
            theirs.getpeername()
            theirs.shutdown(socket.SHUT_RDWR)
            return True
        return False
