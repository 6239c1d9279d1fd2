"""Memory of another process of this host, copied by the kernel.

The kernel asks for the permission to trace that process (process_vm_readv(2), ptrace(2)): the same user or
root, in a process namespace that shows the process, and no stricter rule of a security module such as Yama.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.model.extent import PAGE_BYTES
from ostraca_fabric.native import at, library

PROOF_BYTES = 16

_PIECES_MAX = 1024
"""Pieces per call of the kernel: its IOV_MAX."""

_MERGED_MIN = 16
"""Pieces that are worth a search for neighbours: the kernel takes 0.4 us for each piece of the process."""

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
    if not 0 <= address < 1 << 64:
        return False
    found, place = np.zeros(PROOF_BYTES, np.uint8), np.array([address], np.uint64)
    read_process(process, place, found, np.zeros(1, np.int64), np.array([PROOF_BYTES], np.uint32))
    return found.tobytes() == proof


@dataclass(frozen=True, slots=True)
class ProcessBlocks:
    """Blocks in the memory of another process, which the kernel lets this one read."""

    process: int
    addresses: NDArray[np.uint64]
    """Shape (n,)."""

    stop: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(1, np.uint8))
    """Not 0 ends copies before the next block."""

    page_bytes: int = PAGE_BYTES
    """Pages of the memory for copies: the rest of a block's last page is zeroed. 0: there are no pages."""

    errors: list[int] = field(default_factory=list)
    """Numbers of the errors of failed copies, for callers that share blocks among threads."""

    def __getitem__(self, rows: slice) -> ProcessBlocks:
        """Return some of the blocks, with the same errors."""
        return replace(self, addresses=self.addresses[rows])


def copy_verified(
    source: ProcessBlocks,
    rows: slice,
    memory: NDArray[np.uint8],
    offsets: NDArray[np.int64],
    lengths: NDArray[np.uint32],
    seeds: NDArray[np.uint64],
    tags: NDArray[np.uint8],
    states: NDArray[np.uint8],
) -> None:
    """Copy some blocks of *source* into *memory*, and check each by its tag right after.

    All columns have a row per block of *source*; contiguous, *tags* of shape (n, 16). States become those of
    ``tables.digests.PieceState``. Releases the GIL. Raises OSError for a failed copy: the states of later
    blocks stay as they are, as after a stop.
    """
    addresses, places, sizes = source.addresses[rows], offsets[rows], lengths[rows]
    verified = library.ostraca_verify(
        at(memory),
        memory.nbytes,
        at(places),
        at(sizes),
        at(seeds[rows]),
        at(tags[rows]),
        at(states[rows]),
        len(addresses),
        source.page_bytes,
        source.process,
        at(addresses),
        at(source.stop),
    )
    if verified < 0:
        raise OSError(-verified, os.strerror(-verified))
    assert verified == len(addresses), "blocks lie in memory"


def read_process(
    process: int,
    addresses: NDArray[np.uint64],
    memory: NDArray[np.uint8],
    offsets: NDArray[np.int64],
    lengths: NDArray[np.uint32],
) -> None:
    """Copy pieces of a process's memory into *memory*, a flat array: columns of shape (n,), in bytes.

    Releases the GIL. Nothing is written after the return. Raises OSError, after which any part may have been
    copied.
    """
    assert ((offsets >= 0) & (offsets + lengths <= memory.nbytes)).all(), "pieces lie in memory"
    pieces = np.empty((2, len(lengths), 2), np.uint64)
    pieces[0, :, 0] = offsets
    pieces[0, :, 0] += np.uint64(at(memory))
    pieces[1, :, 0] = addresses
    pieces[:, :, 1] = lengths
    for first in range(0, len(lengths), _PIECES_MAX):
        count = min(_PIECES_MAX, len(lengths) - first)
        here, there = pieces[:, first : first + count]
        if count >= _MERGED_MIN:
            there = _merged(there)
        copied = _libc.process_vm_readv(process, at(here), count, at(there), len(there), 0)
        if copied < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        if copied < int(lengths[first : first + count].sum(dtype=np.int64)):
            raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))


def _merged(pieces: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Join neighbours among pieces, rows of an address and a length."""
    firsts = np.flatnonzero(pieces[1:, 0] != pieces[:-1].sum(axis=1)) + 1
    firsts = np.concatenate((np.zeros(1, np.intp), firsts))
    return np.column_stack((pieces[firsts, 0], np.add.reduceat(pieces[:, 1], firsts)))
