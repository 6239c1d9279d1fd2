"""The agent's end over NIXL: bytes go straight between staging memory and the workers' arenas.

One NixlTransport per process, shared by the agents in it; one thread owns its NIXL agent. The event loop
hands waves to that thread and gets futures; nothing of NIXL is called from anywhere else.

A worker's offer is not trusted. Its metadata carries a checksum, so that what was damaged on the way never
reaches NIXL's parser; its agent's name must be nobody else's here; NIXL refuses slots outside the memory that
the worker registered; and before a peer is handed out, the first and the last page of its arena have been
read, which also proves that the two can connect. For that the worker must make progress: **from its Hello on
until the Welcome it calls ``progress`` every millisecond,** and not more often.

Then a few more reads must end without the worker's help, within a fraction of that millisecond, as they do
through shared memory (CMA) and RDMA. Elsewhere, over TCP that is, UCX has the worker carry out the agent's
reads, and *aborts the worker's process* when the connection breaks under one (docs/adr/0011). So such a
worker is refused, and its blocks cross inline.

When a future resolves: see ``nixl_runtime``. The transfers of a worker whose process died resolve FAILED;
those of one that has stopped stay unsettled until it goes on or dies.

A transfer that does not end as DONE leaves a peer over which nothing works any more, so it breaks the control
connection off, *before* its future resolves: what the worker's end had received by then might still land when
the worker makes progress, so its slots may only come back over a new connection (``ArenaEnd.renew``).
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from ostraca_fabric.adapters.nixl_identity import NAME, unique_name, unsealed
from ostraca_fabric.adapters.nixl_runtime import NixlAgent, Registration, State
from ostraca_fabric.adapters.nixl_slots import NixlSlots, transfer_of
from ostraca_fabric.adapters.nixl_thread import NixlThread
from ostraca_fabric.adapters.waves import check_offer, wave_fits
from ostraca_fabric.errors import TransportError
from ostraca_fabric.extent import PAGE_BYTES
from ostraca_fabric.memory import HUGE_PAGE_BYTES, HugeMemory
from ostraca_fabric.ports.transport import Direction, TransferEnd, Wave
from ostraca_fabric.slots import SlotPool

if TYPE_CHECKING:
    from collections.abc import Callable

    from ostraca_fabric.adapters.nixl_runtime import Transfer
    from ostraca_fabric.ports.transport import BulkChannel
    from ostraca_fabric.wire.messages import ArenaOffer

T = TypeVar("T")

_PROBE_BYTES = 2 * PAGE_BYTES

_UNAIDED_S = 200e-6
"""A read of a page that needs nobody's help takes a few microseconds, also over RDMA."""

_UNAIDED_READS = 3
"""Reads in a row that must be so fast; a worker that polls every millisecond can help with one by chance."""

_UNAIDED_TRIES = 12

_given_up: list[object] = []
"""NIXL agents closed with transfers not known to have ended: letting them go could free memory in use."""


@dataclass(frozen=True, slots=True)
class NixlSettings:
    """Limits of the agent's end."""

    attach_s: float = 2.0
    """Longest wait for a worker to become reachable: it takes 20 ms when both ends make progress."""

    unaided_only: bool = True
    """Whether workers are refused that UCX reaches only with their help. Off, a connection that breaks can
    abort a worker's process: for tests, and for who can live with that."""

    close_s: float = 1.0
    """How long closing waits for transfers under way before it gives their memory up."""


class _Remote:
    """One worker process's NIXL agent, as known to ours. Belongs to the owning thread."""

    def __init__(self, name: str, metadata: bytes) -> None:
        self.name = name
        self.metadata = metadata
        self.peers = 0
        self.under_way = 0
        self.is_broken = False


class NixlTransport:
    """The agent's end. Make it with ``create``; ``close`` it before the process ends."""

    name = NAME

    def __init__(self, agent: NixlAgent, settings: NixlSettings) -> None:
        self._agent = agent
        self._settings = settings
        self._thread = NixlThread(agent)
        self._remotes: dict[str, _Remote] = {}
        self._staging: list[NixlSlots] = []
        self._registrations: list[Registration] = []
        self._probe_memory = HugeMemory(HUGE_PAGE_BYTES, prefault=True)
        self._probes = SlotPool(HUGE_PAGE_BYTES, HUGE_PAGE_BYTES)
        self._is_closed = False
        self.register(self._probe_memory.view, chunk_bytes=HUGE_PAGE_BYTES)

    @classmethod
    def create(cls, label: str, settings: NixlSettings | None = None) -> NixlTransport:
        """Make this process's NIXL agent; *label* is for people. Raises TransportError without NIXL.

        Blocks for some 100 ms, in which NIXL is loaded.
        """
        return cls(NixlAgent(unique_name(label)), settings or NixlSettings())

    def register(self, staging: memoryview, *, chunk_bytes: int = 0) -> None:
        """As in the port. Blocks while NIXL registers the memory. Raises TransportError."""
        address = np.frombuffer(staging, np.uint8).ctypes.data
        slots = NixlSlots(
            self._agent,
            address=address,
            size_bytes=staging.nbytes,
            chunk_bytes=chunk_bytes or staging.nbytes,
        )
        registration = self._thread.call(partial(self._agent.register, address, staging.nbytes)).result()
        self._registrations.append(registration)
        self._staging.append(slots)

    async def attach(
        self,
        offer: ArenaOffer,
        staging: memoryview,
        channel: BulkChannel,
    ) -> NixlPeer:
        """As in the port, within ``attach_s``. *staging* is registered memory, or a part of it."""
        check_offer(offer, NAME)
        metadata = unsealed(offer.metadata)
        own = self._slots_of(staging)
        remote = await self._in_thread(partial(self._add_remote, metadata))
        arena = NixlSlots(
            self._agent,
            address=offer.base,
            size_bytes=offer.arena_bytes,
            chunk_bytes=offer.chunk_bytes,
            remote=remote.name,
        )
        peer = NixlPeer(self, remote, arena, own, channel)
        try:
            await self._probe(peer)
        except BaseException:
            peer.close()
            raise
        return peer

    async def close(self) -> None:
        """As in the port. Attach and submit nothing more; peers may still be closed."""
        if self._is_closed:
            return
        self._is_closed = True
        if not await asyncio.to_thread(self._thread.stop, wait_s=self._settings.close_s):
            _given_up.append((self._agent, self._thread, self._staging))
            self._probe_memory.leak()
            return
        # The thread is gone and nothing is under way: from here on this thread may call NIXL.
        with contextlib.suppress(TransportError):
            for slots in self._staging:
                slots.release()
            for name in list(self._remotes):
                self._agent.remove_remote(name)
            for registration in self._registrations:
                self._agent.deregister(registration)
        self._probe_memory.close()

    def submit(
        self, direction: Direction, peer: NixlPeer, own: NixlSlots, wave: Wave
    ) -> asyncio.Future[TransferEnd]:
        """Start a wave that fits. For NixlPeer."""
        end, begin = self._prepared(direction, peer, own, wave)
        self._thread.submit(begin)
        return end

    def _prepared(
        self, direction: Direction, peer: NixlPeer, own: NixlSlots, wave: Wave, *, spin_s: float = 0.0
    ) -> tuple[asyncio.Future[TransferEnd], Callable[[], bool]]:
        """Return how a wave will end, and the thread's job that begins it.

        The job spins up to *spin_s* for the end, and tells whether it saw it.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[TransferEnd] = loop.create_future()

        def ended(state: State) -> None:
            if state is not State.DONE:
                _soon(loop, peer.break_off)
            if state is not State.UNKNOWN:
                _soon(loop, _resolve, future, TransferEnd.DONE if state is State.DONE else TransferEnd.FAILED)

        def make() -> Transfer:
            return transfer_of(self._agent, direction, own, peer.arena, wave)

        return future, partial(self._begin, peer.remote, make, ended, spin_s)

    def leave(self, remote: _Remote, arena: NixlSlots) -> None:
        """A peer is closed: forget its worker once nothing is under way. For NixlPeer."""

        def job() -> None:
            with contextlib.suppress(TransportError):  # a broken worker's lists went with it
                arena.release()
            remote.peers -= 1
            self._forget_if_idle(remote)

        self._thread.submit(job)

    def _slots_of(self, staging: memoryview) -> NixlSlots:
        address = np.frombuffer(staging, np.uint8).ctypes.data
        for slots in self._staging:
            if (slots.address, slots.size_bytes) == (address, staging.nbytes):
                return slots
        for slots in self._staging:
            if slots.address <= address and address + staging.nbytes <= slots.address + slots.size_bytes:
                part = NixlSlots(
                    self._agent, address=address, size_bytes=staging.nbytes, chunk_bytes=staging.nbytes
                )
                self._staging.append(part)
                return part
        raise TransportError("the staging memory was not registered with this transport")

    def _add_remote(self, metadata: bytes) -> _Remote:
        for known in list(self._remotes.values()):
            if known.metadata != metadata:
                continue
            if not known.is_broken:
                # A worker that reconnects, before its old connection is known to be gone.
                known.peers += 1
                return known
            if known.under_way:
                raise TransportError(
                    "the worker's last transfers are not known to have ended: try again later"
                )
            # NIXL goes on knowing a peer whose endpoint broke; only forgetting it first makes a new endpoint.
            del self._remotes[known.name]
            with contextlib.suppress(TransportError):
                self._agent.remove_remote(known.name)
        name = self._agent.add_remote(metadata)
        known_as = self._remotes.get(name)
        if known_as is not None and known_as.metadata != metadata:
            raise TransportError("the worker's NIXL agent is named like another worker's")
        remote = _Remote(name, metadata)
        remote.peers = 1
        self._remotes[name] = remote
        return remote

    async def _probe(self, peer: NixlPeer) -> None:
        """Read the arena's first and last page into memory of our own, then see whether that takes the
        worker's help. Raises TransportError.
        """
        until_s = asyncio.get_running_loop().time() + self._settings.attach_s
        await self._read(peer, until_s)
        in_a_row = tries = 0
        while self._settings.unaided_only and in_a_row < _UNAIDED_READS:
            if tries == _UNAIDED_TRIES:
                raise TransportError(
                    "the worker's memory is reached with the worker's help only (over TCP), and UCX aborts "
                    "workers in mid help: NIXL takes shared memory or RDMA"
                )
            in_a_row = in_a_row + 1 if await self._read(peer, until_s) else 0
            tries += 1

    async def _read(self, peer: NixlPeer, until_s: float) -> bool:
        """Read two pages; tell whether that took next to no time. Raises TransportError."""
        places = self._probes.take(1, _PROBE_BYTES)
        if places is None:
            raise TransportError("too many workers are neither reachable nor known to be gone")
        wave = Wave(
            staging=places[0] + np.array([0, PAGE_BYTES]),
            arena=np.array([0, peer.arena.size_bytes - PAGE_BYTES]),
            lengths=np.full(2, PAGE_BYTES, np.uint32),
            staging_slot_bytes=PAGE_BYTES,
            arena_slot_bytes=PAGE_BYTES,
        )
        end, begin = self._prepared(Direction.FROM_WORKER, peer, self._staging[0], wave, spin_s=_UNAIDED_S)
        end.add_done_callback(lambda _: self._probes.give(places))
        is_quick = await self._in_thread(begin)
        await asyncio.wait((end,), timeout=max(0.0, until_s - asyncio.get_running_loop().time()))
        if not end.done():
            raise TransportError(
                f"the worker's memory was not reachable within {self._settings.attach_s} s: "
                "does it make progress?"
            )
        if end.result() is TransferEnd.FAILED:
            raise TransportError("the worker's memory is not reachable, or not what it offered")
        return is_quick

    def _begin(
        self, remote: _Remote, make: Callable[[], Transfer], ended: Callable[[State], None], spin_s: float
    ) -> bool:
        try:
            transfer = make()
        except TransportError:
            remote.is_broken = True
            ended(State.FAILED)
            return True
        remote.under_way += 1
        return self._thread.post(transfer, partial(self._end, remote, ended), spin_s=spin_s)

    def _end(self, remote: _Remote, ended: Callable[[State], None], state: State) -> None:
        if state is not State.DONE:
            remote.is_broken = True
        if state is not State.UNKNOWN:
            remote.under_way -= 1
        self._forget_if_idle(remote)
        ended(state)

    def _forget_if_idle(self, remote: _Remote) -> None:
        if remote.peers or remote.under_way or self._remotes.get(remote.name) is not remote:
            return
        del self._remotes[remote.name]
        with contextlib.suppress(TransportError):  # forgotten by NIXL already
            self._agent.remove_remote(remote.name)

    def _in_thread(self, function: Callable[[], T]) -> asyncio.Future[T]:
        if self._is_closed:
            raise TransportError("the transport is closed")
        return asyncio.wrap_future(self._thread.call(function))


class NixlPeer:
    """One worker's arena; from ``NixlTransport.attach``."""

    def __init__(
        self,
        transport: NixlTransport,
        remote: _Remote,
        arena: NixlSlots,
        own: NixlSlots,
        channel: BulkChannel,
    ) -> None:
        self.remote = remote
        self.arena = arena
        self._transport = transport
        self._own = own
        self._channel = channel
        self._is_closed = False

    def submit(self, direction: Direction, wave: Wave) -> asyncio.Future[TransferEnd]:
        """As in the port. The wave's arrays must not change until the future resolves."""
        fits = wave_fits(wave, staging_bytes=self._own.size_bytes, arena_bytes=self.arena.size_bytes)
        if self._is_closed or not fits or not len(wave.lengths):
            future: asyncio.Future[TransferEnd] = asyncio.get_running_loop().create_future()
            future.set_result(TransferEnd.DONE if fits and not self._is_closed else TransferEnd.FAILED)
            return future
        return self._transport.submit(direction, self, self._own, wave)

    def break_off(self) -> None:
        """End the control connection: no transfer to or from this worker works any more."""
        self._channel.break_off("a transfer failed, and with it the way to this worker's memory")

    def close(self) -> None:
        """As in the port. The worker is forgotten when its last transfer has ended."""
        if not self._is_closed:
            self._is_closed = True
            self._transport.leave(self.remote, self.arena)


def _resolve(future: asyncio.Future[TransferEnd], end: TransferEnd) -> None:
    if not future.done():
        future.set_result(end)


def _soon(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: object) -> None:
    """Call a function in the loop's thread, after what was handed to it before."""
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(function, *arguments)
