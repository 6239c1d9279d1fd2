"""What a transport can do at best between two processes, without Ostraca: raw NIXL, or a plain socket.

The other process holds memory and does as little as it can. Either transport moves one batch per call, all
its blocks in one transfer, as fast as it goes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ostraca.cli.bench.series import gb_per_s
from ostraca_fabric.adapters.nixl_identity import unique_name
from ostraca_fabric.adapters.nixl_runtime import NixlAgent, State
from ostraca_fabric.errors import TransportError
from ostraca_fabric.memory import HugeMemory

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_SPAWN = multiprocessing.get_context("spawn")
_START_S = 30.0
_PROGRESS_S = 0.001


class RawPair(Protocol):
    """Two processes with a batch of blocks each."""

    name: str

    def write(self) -> float:
        """Move the batch to the other process; return GB/s."""

    def read(self) -> float:
        """Move the batch from the other process; return GB/s."""

    def close(self) -> None:
        """End the other process."""


def raw_pair(transport: str, *, blocks: int, block_bytes: int) -> RawPair:
    """Return the limit of a transport by the name that a fabric gives it."""
    pair = RawNixl if transport == "nixl" else RawSocket
    return pair(blocks=blocks, block_bytes=block_bytes)


class RawNixl:
    """Raw NIXL: slots of huge-page memory, registered once, descriptor lists prepared once."""

    name = "raw NIXL"

    def __init__(self, *, blocks: int, block_bytes: int) -> None:
        self._bytes = blocks * block_bytes
        self._pipe, theirs = _SPAWN.Pipe()
        self._other = _SPAWN.Process(target=_hold_registered_memory, args=(theirs, self._bytes), daemon=True)
        self._other.start()
        theirs.close()
        address, metadata = _first_word(self._pipe)
        self._memory = _filled(self._bytes)
        self._agent = NixlAgent(unique_name("raw"))
        self._agent.register(self._memory.address, self._bytes)
        remote = self._agent.add_remote(metadata)
        numbers = np.arange(blocks, dtype=np.int32)
        self._own = self._agent.prepare("", _slots(self._memory.address, blocks, block_bytes)), numbers
        self._theirs = self._agent.prepare(remote, _slots(address, blocks, block_bytes)), numbers

    def write(self) -> float:
        """As in RawPair."""
        return gb_per_s(self._bytes, lambda: self._move("WRITE"))

    def read(self) -> float:
        """As in RawPair."""
        return gb_per_s(self._bytes, lambda: self._move("READ"))

    def close(self) -> None:
        """As in RawPair. The memory stays mapped: NIXL keeps it registered as long as the process lives."""
        self._pipe.close()
        self._other.join()
        self._memory.leak()

    def _move(self, operation: str) -> None:
        transfer = self._agent.pick(operation, self._own, self._theirs)
        state = self._agent.post(transfer)
        while state is State.PENDING:
            state = self._agent.poll(transfer)
        if state is not State.DONE:
            raise TransportError("NIXL could not move bytes between two processes of this machine")
        self._agent.release(transfer)


class RawSocket:
    """A unix socket, ``sendall`` at one end and ``recv_into`` at the other."""

    name = "plain socket"

    def __init__(self, *, blocks: int, block_bytes: int) -> None:
        self._bytes = blocks * block_bytes
        self._pipe, theirs = _SPAWN.Pipe()
        ours, other_end = socket.socketpair()
        self._socket = ours
        self._other = _SPAWN.Process(target=_serve_socket, args=(theirs, other_end, self._bytes), daemon=True)
        self._other.start()
        theirs.close()
        other_end.close()
        _first_word(self._pipe)
        self._memory = _filled(self._bytes)

    def write(self) -> float:
        """As in RawPair."""
        return gb_per_s(self._bytes, self._send)

    def read(self) -> float:
        """As in RawPair."""
        return gb_per_s(self._bytes, self._receive)

    def close(self) -> None:
        """As in RawPair."""
        self._pipe.close()
        self._socket.close()
        self._other.join()
        self._memory.close()

    def _send(self) -> None:
        self._pipe.send("receive")
        self._socket.sendall(self._memory.view[: self._bytes])
        self._pipe.recv()

    def _receive(self) -> None:
        self._pipe.send("send")
        _receive_all(self._socket, self._memory.view[: self._bytes])
        self._pipe.recv()


def _hold_registered_memory(pipe: Connection, size_bytes: int) -> None:
    """Body of the other process: be reachable until the pipe is closed."""
    memory = _filled(size_bytes)
    agent = NixlAgent(unique_name("raw-memory"))
    agent.register(memory.address, size_bytes)
    pipe.send((memory.address, agent.metadata()))
    with contextlib.suppress(EOFError, OSError):
        while not pipe.poll(_PROGRESS_S):
            agent.progress()
        pipe.recv()
    os._exit(0)  # not through NIXL's own exit, which has crashed processes


def _serve_socket(pipe: Connection, end: socket.socket, size_bytes: int) -> None:
    """Body of the other process: receive or send a batch whenever the pipe says so."""
    memory = _filled(size_bytes)
    batch = memory.view[:size_bytes]
    pipe.send("ready")
    with contextlib.suppress(EOFError, OSError), end:
        while True:
            if pipe.recv() == "receive":
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
            "the other process of the raw measurement ended at once: see its message above"
        ) from error
    raise TransportError(f"the other process of the raw measurement was not ready within {_START_S:.0f} s")


def _filled(size_bytes: int) -> HugeMemory:
    memory = HugeMemory(size_bytes, prefault=True)
    memory.array[:] = 1
    return memory


def _slots(address: int, blocks: int, block_bytes: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint64]]:
    """Return one strided row: (address, length, device, stride, count)."""
    return np.array([[address, block_bytes, 0, block_bytes, blocks]], np.uint64)
