"""Memory of another process of this host, copied by the kernel.

The kernel asks for the permission to trace that process (process_vm_readv(2), ptrace(2)): the same user or
root, in a process namespace that shows the process, and no stricter rule of a security module such as Yama.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
from ctypes import CDLL
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.native import at, library

PROOF_BYTES = 16

_libc = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_readv.restype = ctypes.c_ssize_t
_libc.process_vm_readv.argtypes = (
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
)


class MemoryProof:
    """Random bytes in this process: a reader that finds these bytes reads the right process."""

    def __init__(self) -> None:
        """Draw the bytes."""
        self.content = secrets.token_bytes(PROOF_BYTES)
        self._memory = np.frombuffer(self.content, np.uint8).copy()
        self.address = self._memory.ctypes.data


def shows_proof(process: int, address: int, proof: bytes) -> bool:
    """Return whether a process has the bytes of a ``MemoryProof`` at an address. Raises OSError."""
    return 0 <= address < 1 << 64 and read_process(process, address, PROOF_BYTES) == proof


@dataclass(frozen=True, slots=True)
class ProcessBlocks:
    """Blocks in the memory of another process, which the kernel lets this one read."""

    process: int
    addresses: NDArray[np.uint64]
    """Shape (n,)."""

    errors: list[int] = field(default_factory=list)
    """Numbers of the errors of failed copies, for callers that share blocks among threads."""

    def __getitem__(self, rows: slice) -> ProcessBlocks:
        """Return some of the blocks, with the same errors."""
        return replace(self, addresses=self.addresses[rows])


def copy_verified(
    source: ProcessBlocks,
    memory: NDArray[np.uint8],
    offsets: NDArray[np.int64],
    lengths: NDArray[np.uint32],
    seeds: NDArray[np.uint64],
    tags: NDArray[np.uint8],
    states: NDArray[np.uint8],
    *,
    calls: CDLL = library,
) -> None:
    """Copy the blocks of *source* into *memory*, and check each by its tag right after.

    All columns have a row per block of *source*; contiguous, *tags* of shape (n, 16). States become those of
    ``tables.digests.CheckState``. *calls* is the library to call. Raises OSError for a failed copy: the
    states of later blocks stay as they are.
    """
    verified = calls.ostraca_verify(
        at(memory),
        memory.nbytes,
        at(offsets),
        at(lengths),
        at(seeds),
        at(tags),
        at(states),
        len(lengths),
        0,
        source.process,
        at(source.addresses),
    )
    if verified < 0:
        raise OSError(-verified, os.strerror(-verified))
    assert verified == len(lengths), "blocks lie in memory"


def read_process(process: int, address: int, size_bytes: int) -> bytes:
    """Return bytes of a process's memory. Raises OSError."""
    found = np.empty(size_bytes, np.uint8)
    here, there = (np.array([place, size_bytes], np.uint64) for place in (at(found), address))
    copied = _libc.process_vm_readv(process, at(here), 1, at(there), 1, 0)
    if copied < size_bytes:
        number = ctypes.get_errno() if copied < 0 else errno.EFAULT
        raise OSError(number, os.strerror(number))
    return found.tobytes()
