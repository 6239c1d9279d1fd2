"""Limits of a transport between two processes without Ostraca: NIXL or a socket.

The other process holds memory and does as little as possible. Either transport moves a batch per call, with
all blocks in a single transfer, at full speed.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np

from ostraca_cli.tools.bench.series import gb_per_s
from ostraca_fabric.errors import TransportError
from ostraca_fabric.nixl.runtime import NixlAgent, TransferState, unique_name
from ostraca_fabric.runtime.memory import HugeMemory

_SPAWN = multiprocessing.get_context("spawn")
_START_S = 30.0
_PROGRESS_S = 0.001


class RawPair(ABC):
    """Two processes with a batch of blocks each."""

    name: str

    def __init__(self, size_bytes: int, serve: Callable[..., None], *arguments: object) -> None:
        """Start the other process: ``serve(pipe, size_bytes, *arguments)``."""
        self._bytes = size_bytes
        self._pipe, theirs = _SPAWN.Pipe()
        self._other = _SPAWN.Process(target=serve, args=(theirs, size_bytes, *arguments), daemon=True)
        self._other.start()
        theirs.close()

    def write(self) -> float:
        """Move the batch to the other process; return GB/s."""
        return gb_per_s(self._bytes, lambda: self._move("WRITE"))

    def read(self) -> float:
        """Move the batch from the other process; return GB/s."""
        return gb_per_s(self._bytes, lambda: self._move("READ"))

    def close(self) -> None:
        """End the other process."""
        self._pipe.close()
        self._other.join()

    @abstractmethod
    def _move(self, operation: str) -> None:
        """Move the batch: WRITE to the other process, or READ from there."""


def raw_pair(transport: str, *, blocks: int, block_bytes: int) -> RawPair:
    """Return the limit of the transport with the fabric's name *transport*."""
    return RawNixl(blocks, block_bytes) if transport == "nixl" else RawSocket(blocks * block_bytes)


class RawNixl(RawPair):
    """Raw NIXL: huge-page slots, registered once, with descriptor lists prepared once."""

    name = "raw NIXL"

    def __init__(
        self,
        blocks: int,
        block_bytes: int,
        serve: Callable[..., None] | None = None,
        *arguments: object,
    ) -> None:
        """Start the other process: *serve* as in ``RawPair``, by default a holder of registered memory."""
        super().__init__(blocks * block_bytes, serve or hold_registered_memory, *arguments)
        address, metadata = _first_word(self._pipe)
        self._memory = _filled_memory(self._bytes)
        self._agent = NixlAgent(unique_name("raw"))
        self._agent.register(self._memory.address, self._bytes)
        remote = self._agent.add_remote(metadata)
        numbers = np.arange(blocks, dtype=np.int32)
        self._own = self._agent.prepare("", _slots(self._memory.address, blocks, block_bytes)), numbers
        self._theirs = self._agent.prepare(remote, _slots(address, blocks, block_bytes)), numbers

    def close(self) -> None:
        """Close as in ``RawPair``, but leave memory mapped: NIXL keeps the registration."""
        super().close()
        self._memory.leak()

    def _move(self, operation: str, rows: slice = slice(None)) -> None:
        own, theirs = ((slots, numbers[rows]) for slots, numbers in (self._own, self._theirs))
        transfer = self._agent.pick(operation, own, theirs)
        state = self._agent.post(transfer)
        while state is TransferState.PENDING:
            state = self._agent.poll(transfer)
        if state is not TransferState.DONE:
            raise TransportError("NIXL could not move bytes between two processes of this machine")
        self._agent.release(transfer)


class RawSocket(RawPair):
    """Unix socket with ``sendall`` at an end and ``recv_into`` at the other."""

    name = "plain socket"

    def __init__(self, size_bytes: int) -> None:
        self._socket, other_end = socket.socketpair()
        with other_end:
            super().__init__(size_bytes, _serve_socket, other_end)
        _first_word(self._pipe)
        self._memory = _filled_memory(self._bytes)
        self._batch = self._memory.view[: self._bytes]

    def close(self) -> None:
        """Close as in ``RawPair``."""
        self._socket.close()
        super().close()
        del self._batch
        self._memory.close()

    def _move(self, operation: str) -> None:
        self._pipe.send(operation)
        if operation == "WRITE":
            self._socket.sendall(self._batch)
        else:
            _receive_all(self._socket, self._batch)
        self._pipe.recv()


def registered_memory(pipe: Connection, size_bytes: int) -> tuple[NixlAgent, HugeMemory]:
    """Make the memory of the other process, and offer it on the pipe."""
    memory = _filled_memory(size_bytes)
    agent = NixlAgent(unique_name("raw-memory"))
    agent.register(memory.address, size_bytes)
    pipe.send((memory.address, agent.metadata()))
    return agent, memory


def hold_registered_memory(pipe: Connection, size_bytes: int) -> None:
    """Serve registered memory in the other process, until the pipe is closed."""
    agent, _memory = registered_memory(pipe, size_bytes)
    with contextlib.suppress(EOFError, OSError):
        while not pipe.poll(_PROGRESS_S):
            agent.progress()
        pipe.recv()
    os._exit(0)  # not through NIXL's own exit, which has crashed processes


def _serve_socket(pipe: Connection, size_bytes: int, end: socket.socket) -> None:
    """Receive or send a batch in the other process at each request on the pipe."""
    memory = _filled_memory(size_bytes)
    batch = memory.view[:size_bytes]
    pipe.send("ready")
    with contextlib.suppress(EOFError, OSError), end:
        while True:
            if pipe.recv() == "WRITE":
                _receive_all(end, batch)
            else:
                end.sendall(batch)
            pipe.send("done")


def _receive_all(end: socket.socket, batch: memoryview) -> None:
    received = 0
    while received < batch.nbytes:
        count = end.recv_into(batch[received:])
        if not count:
            raise ConnectionError("the other process of the raw measurement has gone")
        received += count


def _first_word(pipe: Connection) -> tuple[int, bytes]:
    try:
        if pipe.poll(_START_S):
            word: tuple[int, bytes] = pipe.recv()
            return word
    except EOFError as error:
        raise TransportError(
            "the other process of the raw measurement ended at once: see the message above"
        ) from error
    raise TransportError(f"the other process of the raw measurement was not ready within {_START_S:.0f} s")


def _filled_memory(size_bytes: int) -> HugeMemory:
    memory = HugeMemory(size_bytes, prefault=True)
    memory.array[:] = 1
    return memory


def _slots(address: int, blocks: int, block_bytes: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint64]]:
    """Return a strided row: (address, length, device, stride, count)."""
    return np.array([[address, block_bytes, 0, block_bytes, blocks]], np.uint64)
