"""Limit of gets: raw NIXL writes and one pass of tags at the other process, pipelined, without product code.

The other process makes tags of each wave as soon as the wave has landed. It spins meanwhile, on a counter in
shared memory.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from typing import TYPE_CHECKING

import numpy as np

from ostraca_cli.tools.bench.raw_pair import RawNixl, registered_memory
from ostraca_cli.tools.bench.series import gb_per_s
from ostraca_fabric.tables.digests import tags_of

if TYPE_CHECKING:
    from ctypes import c_int64
    from multiprocessing.connection import Connection

WAVE_BYTES = 4 << 20
_PROGRESS_S = 0.001
_SPAWN = multiprocessing.get_context("spawn")


class TaggedNixl(RawNixl):
    """Two processes with a batch of blocks each; the other one makes tags of what it gets."""

    name = "NIXL and one tag pass"

    def __init__(self, blocks: int, block_bytes: int) -> None:
        """Start the other process."""
        self._blocks = blocks
        self._per_wave = max(1, WAVE_BYTES // block_bytes)
        self._landed = _SPAWN.RawValue("q", 0)
        super().__init__(blocks, block_bytes, _make_tags, blocks, self._landed)

    def write(self) -> float:
        """Move the batch, until all tags are made; return GB/s."""
        return gb_per_s(self._bytes, self._write_and_check)

    def _write_and_check(self) -> None:
        self._landed.value = 0
        self._pipe.send("go")
        for at in range(0, self._blocks, self._per_wave):
            self._move("WRITE", slice(at, at + self._per_wave))
            self._landed.value = min(at + self._per_wave, self._blocks)
        self._pipe.recv()


def _make_tags(pipe: Connection, size_bytes: int, blocks: int, landed: c_int64) -> None:
    """Make the tags of every batch, until the pipe is closed."""
    agent, memory = registered_memory(pipe, size_bytes)
    block_bytes = size_bytes // blocks
    offsets = np.arange(blocks, dtype=np.int64) * block_bytes
    lengths, seeds = np.full(blocks, block_bytes, np.uint32), np.zeros(blocks, np.uint64)
    with contextlib.suppress(EOFError, OSError):
        while True:
            while not pipe.poll(_PROGRESS_S):
                agent.progress()
            pipe.recv()
            done = 0
            while done < blocks:
                rows = slice(done, landed.value)
                if rows.stop > done:
                    tags_of(memory.array, offsets[rows], lengths[rows], seeds[rows])
                    done = rows.stop
                else:
                    agent.progress()  # a first transfer needs both ends
                    if pipe.poll():
                        raise EOFError  # the other process has gone
            pipe.send("done")
    os._exit(0)  # not through NIXL's own exit, which has crashed processes
