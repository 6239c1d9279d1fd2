"""Agent's end over NIXL: direct transfers between staging and arenas.

Each process has one NixlTransport, shared by the agents in the process. A single thread owns the NIXL
agent. The event loop hands waves to this thread and gets futures; NIXL is called from no other thread.

A worker's offer is not trusted. A checksum keeps damaged metadata away from NIXL's parser. The name of the
worker's NIXL agent must be unique here. NIXL refuses slots outside the registered memory. Before a peer is
returned, the first and last page of its arena are read; success also proves connectivity. For these reads
the worker must make progress: **from its Hello until the Welcome the worker calls ``progress`` every
millisecond,** and not more often.

A few more reads must then end without the worker's help, within a fraction of a millisecond, as through
shared memory (CMA) and RDMA. Over other means, namely TCP, UCX makes the worker execute the agent's reads.
UCX then *aborts the worker's process* if the connection breaks during a read (docs/adr/0011). Such a
worker is refused, and its blocks cross inline.

See ``ostraca_fabric.nixl.runtime`` for the time when a future resolves. Transfers of a dead worker process
resolve FAILED. Transfers of a suspended worker stay unsettled until the worker continues or dies.

A transfer that does not end as DONE leaves an unusable peer. The transport therefore closes the control
connection *before* the transfer's future resolves. Data received earlier might still be written when the
worker makes progress. So the worker's slots may be reused only over a new connection (``ArenaEnd.renew``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np

from ostraca_dpu_agent.adapters.transports.nixl_peer import NixlPeer, NixlRemote, NixlSlots
from ostraca_dpu_agent.adapters.transports.nixl_thread import NixlThread
from ostraca_fabric.errors import TransportError
from ostraca_fabric.model.extent import PAGE_BYTES
from ostraca_fabric.nixl.runtime import (
    NAME,
    NixlAgent,
    Registration,
    unique_name,
    unsealed,
)
from ostraca_fabric.ports.transport import BulkChannel, Direction, TransferEnd, check_offer
from ostraca_fabric.runtime.memory import HUGE_PAGE_BYTES, HugeMemory
from ostraca_fabric.tables.slots import SlotPool, Wave
from ostraca_fabric.wire.messages import ArenaOffer

T = TypeVar("T")

log = logging.getLogger(__name__)

_PROBE_BYTES = 2 * PAGE_BYTES

_UNAIDED_S = 200e-6
"""Limit for a read of a page without help; such a read takes a few microseconds, also over RDMA."""

_UNAIDED_READS = 3
"""Number of consecutive fast reads required; a worker polling every millisecond can help a single read by
chance.
"""

_UNAIDED_TRIES = 12

_abandoned: list[object] = []
"""NIXL agents closed with possibly unfinished transfers: releasing them could free memory in use."""


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


class NixlTransport:
    """Agent's end. Make with ``create``; ``close`` before the process ends."""

    name = NAME

    def __init__(self, agent: NixlAgent, settings: NixlSettings) -> None:
        self._agent = agent
        self._settings = settings
        self._thread = NixlThread(agent)
        self._remotes: dict[str, NixlRemote] = {}
        self._staging: list[NixlSlots] = []
        self._registrations: list[Registration] = []
        self._probe_memory = HugeMemory(HUGE_PAGE_BYTES, prefault=True)
        self._probes = SlotPool(HUGE_PAGE_BYTES, HUGE_PAGE_BYTES)
        self._is_closed = False
        self.register(self._probe_memory.view, chunk_bytes=HUGE_PAGE_BYTES)

    @classmethod
    def create(cls, label: str, settings: NixlSettings | None = None) -> NixlTransport:
        """Make this process's NIXL agent; *label* is for people.

        Raises TransportError without NIXL. Blocks for about 100 ms while NIXL is loaded.
        """
        agent = NixlAgent(unique_name(label))
        try:
            return cls(agent, settings or NixlSettings())
        except (OSError, RuntimeError) as error:  # no memory for probes, or no thread
            raise TransportError(f"the thread of NIXL can't start: {error}") from error

    def register(self, staging: memoryview, *, chunk_bytes: int = 0) -> None:
        """Register memory as the port specifies.

        Blocks while NIXL registers the memory. Raises TransportError.
        """
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
        """Attach an arena as the port specifies, within ``attach_s``.

        *staging* is registered memory, or a part thereof.
        """
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
        peer = NixlPeer(self._thread, remote, arena, own, channel, self._forget_if_idle, self._reload)
        try:
            await self._probe(peer)
        except BaseException:
            peer.close()
            raise
        return peer

    async def close(self) -> None:
        """Close as the port specifies.

        Afterwards, attach and submit nothing; peers may still be closed.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if not await asyncio.to_thread(self._thread.stop, wait_s=self._settings.close_s):
            _abandoned.append((self._agent, self._thread, self._staging))
            self._probe_memory.leak()
            return
        # The thread has ended and no transfer is under way, so this thread may call NIXL.
        with contextlib.suppress(TransportError):
            for slots in self._staging:
                slots.release()
            for name in list(self._remotes):
                self._agent.remove_remote(name)
            for registration in self._registrations:
                self._agent.deregister(registration)
        self._probe_memory.close()

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

    def _add_remote(self, metadata: bytes) -> NixlRemote:
        for known in list(self._remotes.values()):
            if known.metadata != metadata:
                continue
            if not known.is_broken:
                # A worker that reconnects before the loss of its old connection was noticed.
                known.peers += 1
                return known
            if known.under_way:
                raise TransportError(
                    "earlier transfers of the worker may not have ended yet: try again later"
                )
            # NIXL keeps a peer with a broken endpoint; removing the peer first forces a new endpoint.
            del self._remotes[known.name]
            with contextlib.suppress(TransportError):
                self._agent.remove_remote(known.name)
        name = self._agent.add_remote(metadata)
        existing = self._remotes.get(name)
        if existing is not None and existing.metadata != metadata:
            raise TransportError("another worker has a NIXL agent of the same name: restart the worker")
        remote = NixlRemote(name, metadata)
        self._remotes[name] = remote
        return remote

    def _reload(self, remote: NixlRemote, metadata: bytes) -> bool:
        """Load further metadata of a worker; return success. Call only in the thread."""
        try:
            name = self._agent.add_remote(unsealed(metadata))
            if name != remote.name and name not in self._remotes:
                self._agent.remove_remote(name)
        except Exception as error:  # noqa: BLE001 (NIXL parses what a worker sent)
            log.warning("Metadata of a worker's regions are of no use: %s", error)
            return False
        return name == remote.name

    async def _probe(self, peer: NixlPeer) -> None:
        """Read the arena's first and last page into memory of this agent.

        Then check that reads need no help of the worker. Raises TransportError.
        """
        until_s = asyncio.get_running_loop().time() + self._settings.attach_s
        await self._read(peer, until_s)
        in_a_row = tries = 0
        while self._settings.unaided_only and in_a_row < _UNAIDED_READS:
            if tries == _UNAIDED_TRIES:
                raise TransportError(
                    "the worker's memory is reachable only with the worker's help (over TCP), and UCX may "
                    "abort workers meanwhile: use shared memory or RDMA"
                )
            in_a_row = in_a_row + 1 if await self._read(peer, until_s) else 0
            tries += 1

    async def _read(self, peer: NixlPeer, until_s: float) -> bool:
        """Read two pages; return whether the reads took almost no time.

        Raises TransportError.
        """
        places = self._probes.take(1, _PROBE_BYTES)
        if places is None:
            raise TransportError("too many workers are silent: try again later")
        wave = Wave(
            staging=places[0] + np.array([0, PAGE_BYTES]),
            arena=np.array([0, peer.arena.size_bytes - PAGE_BYTES]),
            lengths=np.full(2, PAGE_BYTES, np.uint32),
            staging_slot_bytes=PAGE_BYTES,
            arena_slot_bytes=PAGE_BYTES,
        )
        end, begin = peer.prepare(Direction.FROM_WORKER, self._staging[0], wave, spin_s=_UNAIDED_S)
        end.add_done_callback(lambda _: self._probes.give(places))
        is_quick = await self._in_thread(begin)
        await asyncio.wait((end,), timeout=max(0.0, until_s - asyncio.get_running_loop().time()))
        if not end.done():
            raise TransportError(
                f"the worker's memory was not reachable within {self._settings.attach_s} s: "
                "check that the worker makes progress"
            )
        if end.result() is TransferEnd.FAILED:
            raise TransportError("the worker's memory is not reachable, or differs from the offer")
        return is_quick

    def _forget_if_idle(self, remote: NixlRemote) -> None:
        if remote.peers or remote.under_way or self._remotes.get(remote.name) is not remote:
            return
        del self._remotes[remote.name]
        with contextlib.suppress(TransportError):  # forgotten by NIXL already
            self._agent.remove_remote(remote.name)

    def _in_thread(self, function: Callable[[], T]) -> asyncio.Future[T]:
        if self._is_closed:
            raise TransportError("the transport is closed")
        return asyncio.wrap_future(self._thread.call(function))
