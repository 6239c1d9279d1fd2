"""An agent for the SDK's tests: it speaks the real wire, and does wrong exactly what a test asks for.

It keeps blocks in a dict and moves them inline, or reads them out of workers' memory if it may. ``script``
maps a message type to a function that is called instead of the usual answer; it is given the connection and
the message, and runs in the agent's thread.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from tests.fabric.connection.bulk import bulk_frame

from ostraca_fabric.errors import ProtocolError
from ostraca_fabric.model.ids import AgentId, StartId, TenantId
from ostraca_fabric.model.outcome import BlockState, PutState, Reason
from ostraca_fabric.runtime.process_memory import read_process, shows_proof
from ostraca_fabric.wire import codec
from ostraca_fabric.wire.codec import FROM_WORKER, HELLO
from ostraca_fabric.wire.frames import BulkEnd, Event, FrameReader, Passage, encode
from ostraca_fabric.wire.handshake import LEAVING, Access, AgentHandshake
from ostraca_fabric.wire.messages import (
    AgentMemory,
    Cancel,
    ConnectionLimits,
    DirectDrives,
    ExtentsRead,
    Failure,
    Fetch,
    Get,
    GetDone,
    GetProgress,
    Hello,
    Lookup,
    LookupDone,
    Message,
    OpenVolume,
    Ping,
    Pong,
    Prefetch,
    PrefetchDone,
    Put,
    PutDone,
    VolumeOpened,
    Welcome,
)

Script = dict[type[Message], Callable[["AgentConnection", Any], None]]
LIMITS = ConnectionLimits(frame_bytes_max=1 << 20, blocks_max=1024, inflight_max=16)
BlockId = tuple[str, bytes, int, int]


@dataclass(frozen=True, slots=True)
class Incoming:
    """Blocks that a worker was asked for, one behind another."""

    memory: np.ndarray[tuple[int], np.dtype[np.uint8]]
    offsets: np.ndarray[tuple[int], np.dtype[np.int64]]
    lengths: np.ndarray[tuple[int], np.dtype[np.uint32]]

    @classmethod
    def of(cls, lengths: np.ndarray[tuple[int], np.dtype[np.uint32]]) -> Incoming:
        ends = np.cumsum(lengths, dtype=np.int64)
        return cls(np.zeros(int(ends[-1]), np.uint8), ends - lengths, lengths)

    def blocks(self) -> list[bytes]:
        return [block.tobytes() for block in np.split(self.memory, self.offsets[1:])]


@dataclass(slots=True)
class AgentConnection:
    """One worker's connection, in its own thread."""

    agent: ScriptedAgent
    socket: socket.socket
    is_greeted: bool = False
    features: tuple[str, ...] = ()
    is_gone: threading.Event = field(default_factory=threading.Event)
    """Set when the worker has closed it."""

    volumes: dict[int, OpenVolume] = field(default_factory=dict)
    incoming: dict[int, Incoming] = field(default_factory=dict)
    messages: queue.SimpleQueue[Message | None] = field(default_factory=queue.SimpleQueue)
    ended: queue.SimpleQueue[BulkEnd | None] = field(default_factory=queue.SimpleQueue)

    def send(self, message: Message) -> None:
        self.socket.sendall(encode(message))

    def send_bulk(self, transfer: int, *blocks: tuple[int, bytes]) -> None:
        """Send bytes to places of the worker's arena, in one frame."""
        self.socket.sendall(bulk_frame(transfer, *blocks))

    def block_ids(self, message: Get | Put | Lookup | Prefetch) -> list[BlockId]:
        name = self.volumes[message.handle].name
        return [
            (name, span.hashes[at : at + span.hash_bytes], span.rank, span.group)
            for span in message.spans
            for at in range(0, len(span.hashes), span.hash_bytes)
        ]

    def land(self, message: Get, positions: list[int], *, spoil: Callable[[bytes], bytes] = bytes) -> None:
        """Send blocks to their slots, and say that they landed."""
        ids, slots = self.block_ids(message), codec.u64(message.slots, len(message.slots) // 8)
        found = [self.agent.blocks[ids[position]] for position in positions]
        self.send_bulk(
            message.request,
            *(
                (int(slots[position]), spoil(payload))
                for position, (_, payload) in zip(positions, found, strict=True)
            ),
        )
        tags = b"".join(tag for tag, _ in found)
        self.send(GetProgress(message.request, np.array(positions, codec.U32).tobytes(), tags))

    @property
    def process(self) -> int:
        """The worker's process, according to the kernel."""
        return int(np.frombuffer(self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12), "i4")[0])

    def reads(self, hello: Hello) -> bool:
        """Return whether a worker that said this is read."""
        memory = hello.memory
        return memory is not None and shows_proof(self.process, memory.proof_address, memory.proof)

    def read(self, message: Put) -> list[bytes]:
        """Read the blocks of a put out of the worker's memory."""
        count = len(message.lengths) // 4
        lengths, addresses = codec.u32(message.lengths, count), codec.u64(message.addresses, count)
        return [
            read_process(self.process, address, length)
            for address, length in zip(addresses.tolist(), lengths.tolist(), strict=True)
        ]

    def fetch(self, message: Put) -> list[bytes]:
        """Read the blocks of a put if their addresses are named, else have the worker send them."""
        if message.addresses:
            return self.read(message)
        incoming = Incoming.of(codec.u32(message.lengths, len(message.lengths) // 4))
        self.incoming[message.request] = incoming
        self.send(Fetch(message.request, message.slots, message.lengths))
        come = 0
        while come < len(incoming.lengths):
            bulk = self.ended.get()
            if bulk is None:
                raise ConnectionResetError
            come += len(bulk.places)
        return self.incoming.pop(message.request).blocks()

    def sink(
        self,
        transfer: int,
        places: np.ndarray[tuple[int], np.dtype[np.uint64]],
        lengths: np.ndarray[tuple[int], np.dtype[np.uint32]],
    ) -> Passage:
        incoming, parts = self.incoming[transfer], places.astype(np.intp)
        assert np.array_equal(lengths, incoming.lengths[parts])
        return Passage(incoming.memory, incoming.offsets[parts], lengths)

    def hang_up(self) -> None:
        self.socket.shutdown(socket.SHUT_RDWR)


class ScriptedAgent:
    """A listening agent. ``seen`` holds every message it was sent, ``connections`` whom it welcomed.

    With *reads_workers*, it reads puts out of the memory of workers that show their proof.

    While ``goes_on`` is clear, it is as one whose process is stopped.
    """

    def __init__(
        self,
        path: Path,
        *,
        name: str = "agent-1",
        limits: ConnectionLimits = LIMITS,
        features: tuple[str, ...] = (LEAVING,),
        blocks: dict[BlockId, tuple[bytes, bytes]] | None = None,
        memory: AgentMemory | None = None,
        reads_workers: bool = False,
    ) -> None:
        self.address = f"unix://{path}"
        self.script: Script = {}
        self.seen: list[Message] = []
        self.hellos: list[Hello] = []
        self.cancelled = threading.Event()
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.blocks: dict[BlockId, tuple[bytes, bytes]] = {} if blocks is None else blocks
        self.connections: queue.SimpleQueue[AgentConnection] = queue.SimpleQueue()
        self._handshake = AgentHandshake(
            AgentId(name),
            StartId(os.urandom(16)),
            Access(own_uid=os.getuid()),
            limits=limits,
            features=features,
            transports=("inline",),
            memory=memory,
        )
        self._reads_workers = reads_workers
        self._open: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def let_in(self, token: str) -> None:
        """Let workers in that show this token, from now on, and put out whoever is in."""
        access = Access(own_uid=os.getuid(), tenant_tokens={TenantId("default"): (token,)})
        self._handshake = replace(self._handshake, access=access)
        while not self.connections.empty():
            with contextlib.suppress(OSError):
                self.connections.get().hang_up()

    def stop(self) -> None:
        self.goes_on.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def seen_of(self, kind: type[Message]) -> list[Any]:
        return [message for message in self.seen if isinstance(message, kind)]

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(sock)
            thread = threading.Thread(target=self._serve, args=(sock,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, sock: socket.socket) -> None:
        """Read one connection.

        Messages are answered in a thread of their own: some answers wait for bulk bytes.
        """
        connection = AgentConnection(self, sock)
        answering = threading.Thread(target=self._answer, args=(connection,))
        answering.start()

        reader = FrameReader(connection.sink, frame_bytes_max=1 << 20)
        # The worker hanging up, at whatever point, is how most tests end.
        with contextlib.suppress(OSError):
            while count := sock.recv_into(reader.buffer()):
                for event in reader.received(count):
                    self._on_event(connection, event)
        connection.is_gone.set()
        connection.messages.put(None)
        connection.ended.put(None)
        answering.join()
        sock.close()

    def _on_event(self, connection: AgentConnection, event: Event) -> None:
        self.goes_on.wait()
        if isinstance(event, ProtocolError):
            raise event
        if isinstance(event, BulkEnd):
            connection.ended.put(event)
        elif connection.is_greeted:
            message = FROM_WORKER.decode(event)
            self.seen.append(message)
            if isinstance(message, Cancel):
                self.cancelled.set()
            connection.messages.put(message)
        else:
            self.hellos.append(hello := HELLO.decode(event))
            answer = self._handshake.answer(hello, os.getuid())
            if isinstance(answer, Welcome):
                reads = self._reads_workers and connection.reads(hello)
                answer = msgspec.structs.replace(answer, reads_worker=reads)
            connection.send(answer)
            if isinstance(answer, Welcome):
                connection.is_greeted, connection.features = True, answer.features
            self.connections.put(connection)

    def _answer(self, connection: AgentConnection) -> None:
        with contextlib.suppress(OSError):
            while (message := connection.messages.get()) is not None:
                self.script.get(type(message), type(self).usual)(connection, message)

    @staticmethod
    def usual(connection: AgentConnection, message: Message) -> None:
        """Answer as an agent with enough of everything would."""
        agent = connection.agent
        match message:
            case OpenVolume():
                handle = len(connection.volumes)
                connection.volumes[handle] = message
                connection.send(VolumeOpened(message.request, handle, 1))
            case Lookup() | Prefetch():
                states = bytes(
                    BlockState.HIT if each in agent.blocks else BlockState.MISS
                    for each in connection.block_ids(message)
                )
                reasons = bytes(Reason.NONE if state else Reason.NOT_FOUND for state in states)
                done = LookupDone if isinstance(message, Lookup) else PrefetchDone
                connection.send(done(message.request, states, reasons))
            case Get():
                there = [each in agent.blocks for each in connection.block_ids(message)]
                for position in np.flatnonzero(there).tolist():
                    connection.land(message, [position])
                reasons = bytes(Reason.NONE if state else Reason.NOT_FOUND for state in there)
                connection.send(GetDone(message.request, bytes(there), reasons))
            case Put():
                ids = connection.block_ids(message)
                outcomes = []
                for each, payload, tag in zip(
                    ids, connection.fetch(message), codec.rows16(message.tags, len(ids)), strict=True
                ):
                    outcomes.append(PutState.EXISTS if each in agent.blocks else PutState.COMMITTED)
                    agent.blocks.setdefault(each, (tag.tobytes(), payload))
                connection.send(PutDone(message.request, bytes(outcomes), bytes(len(ids))))
            case Ping(request):
                connection.send(Pong(request))
            case Cancel() | DirectDrives() | ExtentsRead():
                pass
            case _:
                connection.send(Failure(0, "usage", f"{type(message).__name__} is not in the script"))


@contextlib.contextmanager
def agent_at(path: Path, **how: Any) -> Iterator[ScriptedAgent]:
    """Run an agent for the length of a ``with`` block."""
    agent = ScriptedAgent(path, **how)
    try:
        yield agent
    finally:
        agent.stop()
