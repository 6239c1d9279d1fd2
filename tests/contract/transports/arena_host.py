"""A worker process with an arena, for the transports' contract: it obeys a pipe and makes progress.

When told to it fills and shows its arena, sits still, and prepares and renews its end. Over NIXL that is all;
inline it also serves connections, as the SDK does: bulk frames land in the arena, a Fetch is answered from
it.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import socket
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from ostraca._memory.inline_arena import InlineArenaEnd
from ostraca._memory.nixl_arena import NixlArenaEnd
from ostraca._memory.regions import RegionMemory
from ostraca_fabric.model.extent import PAGE_BYTES
from ostraca_fabric.runtime.memory import HugeMemory
from ostraca_fabric.tables.slots import SlotPool
from ostraca_fabric.wire import codec
from ostraca_fabric.wire.frames import BulkEnd, FrameReader
from ostraca_fabric.wire.messages import ArenaOffer, Fetch

PROGRESS_S = 0.0005
STOPPED_WITHIN_S = 10.0


class ArenaHost:
    """The process, as a test sees it."""

    def __init__(self, kind: str, directory: Path, *, arena_bytes: int, chunk_bytes: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self.address = directory / "arena.sock"
        self.process = spawn.Process(
            target=_host, args=(kind, str(self.address), arena_bytes, chunk_bytes, theirs), daemon=True
        )
        self.process.start()
        theirs.close()
        self.offer: ArenaOffer = self._pipe.recv()

    async def fill(self, offset: int, payload: bytes) -> None:
        await asyncio.to_thread(self._ask, ("fill", offset, payload))

    async def peek(self, offset: int, length: int) -> bytes:
        found = await asyncio.to_thread(self._ask, ("peek", offset, length))
        assert isinstance(found, bytes)
        return found

    async def sit_still(self, is_still: bool) -> None:
        """Make no progress, or again; obey all the same."""
        await asyncio.to_thread(self._ask, ("still", 0, is_still))

    async def renew(self) -> None:
        """Make an end of its own for the next connection, and offer that."""
        offer = await asyncio.to_thread(self._ask, ("renew", 0, None))
        assert isinstance(offer, ArenaOffer)
        self.offer = offer

    async def prepare_renewal(self) -> None:
        """Make ready what takes over when the end is renewed. That changes nothing that is offered."""
        assert await asyncio.to_thread(self._ask, ("prepare", 0, None)) == self.offer

    async def offer_region(self, content: bytes) -> tuple[bytes, int]:
        """Register memory with this content as a region; return the metadata, and the address."""
        found = await asyncio.to_thread(self._ask, ("region", 0, content))
        assert isinstance(found, tuple)
        return found

    async def peek_region(self, number: int) -> bytes:
        """Return the content of a region, by its order."""
        found = await asyncio.to_thread(self._ask, ("region content", number, 0))
        assert isinstance(found, bytes)
        return found

    def pause(self) -> None:
        """Stop it: no thread of it runs when this returns."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGSTOP)
        tasks = Path(f"/proc/{self.process.pid}/task")
        by_s = time.monotonic() + STOPPED_WITHIN_S
        while not all(_is_stopped(task) for task in tasks.iterdir()):
            assert time.monotonic() < by_s, "it does not stop"
            time.sleep(0.0005)

    def resume(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def stop(self) -> int:
        """End the process in good order and return its exit code."""
        self._pipe.send(("stop", 0, 0))
        self.process.join(10)
        exitcode = self.process.exitcode
        self.process.kill()
        return -1 if exitcode is None else exitcode

    def _ask(self, request: tuple[str, int, object]) -> object:
        self._pipe.send(request)
        return self._pipe.recv()


def _host(kind: str, address: str, arena_bytes: int, chunk_bytes: int, pipe: Connection) -> None:
    memory = HugeMemory(arena_bytes, prefault=True)
    slots = SlotPool(arena_bytes, chunk_bytes)
    end: NixlArenaEnd | InlineArenaEnd
    if kind == "nixl":
        end = NixlArenaEnd(memory, slots)
    else:
        end = InlineArenaEnd(memory.view, slots)
        end.open(np.arange(0, arena_bytes, PAGE_BYTES), arena_bytes)
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(address)
        listening.listen()
        threading.Thread(target=_accept, args=(listening, end), daemon=True).start()
    pipe.send(end.offer())
    host, is_still = _Host(memory, end), False
    while True:
        while not pipe.poll(PROGRESS_S):
            if not is_still:
                end.progress()
        request, offset, argument = pipe.recv()
        if request == "stop":
            break
        if request == "still":
            is_still = argument
        pipe.send(host.obey(request, offset, argument))
    end.close()
    memory.close()


class _Host:
    def __init__(self, memory: HugeMemory, end: NixlArenaEnd | InlineArenaEnd) -> None:
        self._memory = memory
        self._end = end
        self._regions: list[RegionMemory] = []

    def obey(self, request: str, offset: int, argument: Any) -> object:
        match request:
            case "peek":
                return bytes(self._memory.view[offset : offset + argument])
            case "fill":
                self._memory.view[offset : offset + len(argument)] = argument
            case "prepare":
                self._end.prepare_renewal()
                return self._end.offer()
            case "renew":
                self._end.renew()
                return self._end.offer()
            case "region":
                return self._offered(bytearray(argument))
            case "region content":
                return self._regions[offset].array.tobytes()
        return None

    def _offered(self, content: bytearray) -> tuple[bytes, int]:
        region = RegionMemory(np.frombuffer(content, np.uint8), 1, may_withhold=True)
        self._regions.append(region)
        while (metadata := self._end.offer_region(region)) is None:
            time.sleep(PROGRESS_S)
        return metadata, region.address


def _accept(listening: socket.socket, end: InlineArenaEnd) -> None:
    while True:
        connection, _ = listening.accept()
        threading.Thread(target=_serve, args=(connection, end), daemon=True).start()


def _serve(connection: socket.socket, end: InlineArenaEnd) -> None:
    with connection:
        reader = FrameReader(end.sink, frame_bytes_max=1 << 20)
        while count := connection.recv_into(reader.buffer()):
            for event in reader.received(count):
                if isinstance(event, BulkEnd):
                    continue
                assert isinstance(event, bytes), event
                fetch = codec.TO_WORKER.decode(event)
                assert isinstance(fetch, Fetch)
                for frame in end.answer(fetch):
                    connection.sendall(frame.header)
                    while frame.blocks.left_bytes:
                        piece = frame.blocks.next_piece()
                        connection.sendall(piece)
                        frame.blocks.passed_bytes += len(piece)


def _is_stopped(task: Path) -> bool:
    """Whether a thread is stopped by a signal, as proc(5) says it; one that is gone is."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (FileNotFoundError, ProcessLookupError):
        return True
