"""A transport, its staging memory and workers, and waves between them, for the contract of transports."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tests.contract.transports.arena_host import ArenaHost

from ostraca_fabric.ports.transport import Direction, TransferEnd, Transport
from ostraca_fabric.runtime.memory import HugeMemory
from ostraca_fabric.tables.slots import Wave

PAGE = 4096
CHUNK = 1 << 20
ARENA = 16 << 20
STAGING = 16 << 20
TO_WORKER, FROM_WORKER = Direction.TO_WORKER, Direction.FROM_WORKER
DONE, FAILED = TransferEnd.DONE, TransferEnd.FAILED


class Bench:
    """A transport with staging memory, two workers that tests share, and what makes more."""

    def __init__(self, transport: Transport, memory: HugeMemory, directory: Path) -> None:
        self.transport = transport
        self.memory = memory
        self._directory = directory
        self.hosts = (self.another_host("first"), self.another_host("second"))

    def another_host(self, name: str) -> ArenaHost:
        directory = self._directory / name
        directory.mkdir()
        return ArenaHost(self.transport.name, directory, arena_bytes=ARENA, chunk_bytes=CHUNK)


def slots(count: int, slot_bytes: int, *, seed: int, memory_bytes: int = ARENA) -> NDArray[np.int64]:
    """Pick slots anywhere, as a SlotPool would cut them."""
    per_chunk = CHUNK // slot_bytes
    numbers = np.random.default_rng(seed).permutation(memory_bytes // CHUNK * per_chunk)[:count]
    return (numbers // per_chunk * CHUNK + numbers % per_chunk * slot_bytes).astype(np.int64)


def wave(
    count: int,
    slot_bytes: int,
    lengths: int | NDArray[np.uint32],
    *,
    seed: int = 1,
    arena_slot_bytes: int = 0,
) -> Wave:
    """Blocks between random slots of both sides."""
    arena_slot_bytes = arena_slot_bytes or slot_bytes
    return Wave(
        staging=slots(count, slot_bytes, seed=seed),
        arena=slots(count, arena_slot_bytes, seed=seed + 1000),
        lengths=np.broadcast_to(np.asarray(lengths, np.uint32), (count,)),
        staging_slot_bytes=slot_bytes,
        arena_slot_bytes=arena_slot_bytes,
    )


def moved(
    source: NDArray[np.uint8],
    destination: NDArray[np.uint8],
    blocks: Wave,
    direction: Direction,
) -> NDArray[np.uint8]:
    """Return what the destination must hold after the wave, and nothing else of it changed."""
    ends = (blocks.staging, blocks.arena) if direction is TO_WORKER else (blocks.arena, blocks.staging)
    after = destination.copy()
    for start, target, length in zip(ends[0], ends[1], blocks.lengths, strict=True):
        after[target : target + length] = source[start : start + length]
    return after


@functools.cache
def noise(size_bytes: int, seed: int) -> NDArray[np.uint8]:
    return np.frombuffer(np.random.default_rng(seed).bytes(size_bytes), np.uint8)
