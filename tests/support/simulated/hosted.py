"""Ports of a process that can be paused and killed: around those that stand for the world outside of it.

What a process asks for leaves it by ``outside``; what comes back is run in it, as soon as it runs. A process
that stands still is sent no more than a socket's buffer holds, and what its drives and its network have taken
goes on without it.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

from tests.support.simulated.futures import resolve
from tests.support.simulated.virtual_hosts import outside

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray
    from tests.support.simulated.drives.simulated_drive import SimulatedDrive
    from tests.support.simulated.virtual_hosts import VirtualHost

    from ostraca_fabric.connection.network import Accept, Listening, Network
    from ostraca_fabric.model.extent import Pieces
    from ostraca_fabric.model.ids import DriveId
    from ostraca_fabric.tables.digests import TagCheck
    from ostraca_fabric.wire.address import Address

    _Ends = NDArray[np.bool_]

_UNREAD_BYTES_MAX = 256 << 10
_PIECE_BYTES = 64 << 10


class HostedDrive:
    """A process's path to a drive: implements ``ports.drive.Drive``."""

    def __init__(self, path: SimulatedDrive) -> None:
        """Take the path, which is this process's own."""
        self.path = path
        self.id: DriveId = path.id
        self.size_bytes = path.size_bytes
        self.on_write: Callable[[Pieces], None] | None = None
        """Called in the process when it has decided on a write."""

        self.before_write: Callable[[Pieces], None] | None = None
        """Called in the process just before a write leaves it; may pause it."""

        self._submitted = 0

    @property
    def has_volatile_cache(self) -> bool:
        """As in the port."""
        return self.path.has_volatile_cache

    @property
    def is_file(self) -> bool:
        """As in the port."""
        return self.path.is_file

    @property
    def queued(self) -> int:
        """As in the port."""
        return self._submitted

    @property
    def refuses_reads(self) -> bool:
        """As in the port: nobody watches it here."""
        return False

    @property
    def refuses_writes(self) -> bool:
        """As in the port."""
        return False

    @property
    def reads_given_up(self) -> asyncio.Future[None] | None:
        """As in the port."""
        return None

    @property
    def writes_given_up(self) -> asyncio.Future[None] | None:
        """As in the port."""
        return None

    def submit_read(self, pieces: Pieces, check: TagCheck | None = None) -> asyncio.Future[_Ends]:
        """As in the port."""
        return self._submit(len(pieces), partial(self.path.submit_read, pieces, check))

    def submit_write(self, pieces: Pieces) -> asyncio.Future[_Ends]:
        """As in the port."""
        decided = self.path.flash.upcoming
        if self.on_write is not None:
            self.on_write(pieces)
        if self.before_write is not None:
            self.before_write(pieces)
        return self._submit(len(pieces), partial(self.path.submit_write, pieces, decided=decided))

    def submit_flush(self) -> asyncio.Future[bool]:
        """As in the port."""
        return self._submit(0, self.path.submit_flush)

    def submit_look(self) -> asyncio.Future[str | None]:
        """As in the port."""
        return self.path.submit_look()

    def close(self) -> None:
        """As in the port."""
        outside(self.path.close)

    def _submit(self, pieces: int, submit: Callable[[], asyncio.Future[Any]]) -> asyncio.Future[Any]:
        end: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._submitted += pieces

        def ended(inner: asyncio.Future[Any]) -> None:
            self._submitted -= pieces
            resolve(end, inner.result())

        outside(lambda: submit().add_done_callback(ended))
        return end


class HostedNetwork:
    """A process's network: implements ``connection.network.Network``."""

    def __init__(self, network: Network, host: VirtualHost) -> None:
        """Take what the machine has."""
        self._network = network
        self._host = host

    async def listen(self, address: Address, accept: Accept) -> Listening:
        """As in the port. Does not wait for anything but itself."""
        return await self._network.listen(address, lambda: _HostedProtocol(self._host, accept))

    async def dial(self, address: Address, protocol: asyncio.BufferedProtocol) -> None:
        """As in the port."""
        hosted = _HostedProtocol(self._host, lambda: protocol)
        dialled: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
        dialling: list[asyncio.Task[None]] = []

        def begin() -> None:
            task = asyncio.get_running_loop().create_task(self._network.dial(address, hosted))
            task.add_done_callback(ended)
            dialling.append(task)

        def ended(task: asyncio.Task[None]) -> None:
            resolve(dialled, asyncio.CancelledError() if task.cancelled() else task.exception())

        outside(begin)
        try:
            error = await dialled
        except asyncio.CancelledError:
            outside(lambda: [task.cancel() for task in dialling])
            raise
        if error is not None:
            raise error


class _HostedProtocol(asyncio.BufferedProtocol):
    """What the network calls, outside; what comes of it is called in the process, in the same order."""

    def __init__(self, host: VirtualHost, accept: Callable[[], asyncio.BufferedProtocol]) -> None:
        self._host = host
        self._accept = accept
        self._protocol: asyncio.BufferedProtocol | None = None
        self._transport: asyncio.Transport | None = None
        self._unread_bytes = 0
        self._buffer = bytearray(_PIECE_BYTES)

    @property
    def protocol(self) -> asyncio.BufferedProtocol:
        assert self._protocol is not None, "the process made it when the connection was made"
        return self._protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._host.call_soon(self._made, _HostedTransport(transport))

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        data = bytes(memoryview(self._buffer)[:nbytes])
        self._unread_bytes += nbytes
        if self._transport is not None and self._unread_bytes > _UNREAD_BYTES_MAX:
            self._transport.pause_reading()
        self._host.call_soon(self._feed, data)

    def eof_received(self) -> bool:
        self._host.call_soon(self._eof)
        return True

    def pause_writing(self) -> None:
        self._at_once(self._pause)

    def resume_writing(self) -> None:
        self._at_once(self._resume)

    def connection_lost(self, exc: Exception | None) -> None:
        self._host.call_soon(self._lost, exc)

    def _at_once(self, act: Callable[[], None]) -> None:
        """Have the process do something in the middle of what it does, if that is what led to it."""
        if self._host.is_paused or self._host.is_dead:
            self._host.call_soon(act)
        else:
            self._host.run(act)

    # In the process.

    def _made(self, transport: _HostedTransport) -> None:
        self._protocol = self._accept()
        self._hosted = transport
        self._protocol.connection_made(transport)

    def _feed(self, data: bytes) -> None:
        left = memoryview(data)
        while left and not self._hosted.is_closing():
            buffer = memoryview(self.protocol.get_buffer(len(left)))
            count = min(len(left), len(buffer))
            buffer[:count] = left[:count]
            self.protocol.buffer_updated(count)
            left = left[count:]
        self._unread_bytes -= len(data)
        if self._transport is not None and self._unread_bytes <= _UNREAD_BYTES_MAX:
            outside(self._transport.resume_reading)

    def _pause(self) -> None:
        self.protocol.pause_writing()

    def _resume(self) -> None:
        self.protocol.resume_writing()

    def _lost(self, error: Exception | None) -> None:
        self.protocol.connection_lost(error)

    def _eof(self) -> None:
        if not self._hosted.is_closing() and not self.protocol.eof_received():
            self._hosted.close()


class _HostedTransport(asyncio.Transport):
    """What a process does to a connection."""

    def __init__(self, inner: asyncio.Transport) -> None:
        super().__init__()
        self._inner = inner
        self._is_closing = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._inner.get_extra_info(name, default)

    def is_closing(self) -> bool:
        return self._is_closing or self._inner.is_closing()

    def close(self) -> None:
        self._is_closing = True
        outside(self._inner.close)

    def abort(self) -> None:
        self._is_closing = True
        outside(self._inner.abort)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        outside(self._inner.write, bytes(data))

    def can_write_eof(self) -> bool:
        return self._inner.can_write_eof()

    def write_eof(self) -> None:
        outside(self._inner.write_eof)

    def get_write_buffer_size(self) -> int:
        return self._inner.get_write_buffer_size()

    def pause_reading(self) -> None:
        outside(self._inner.pause_reading)

    def resume_reading(self) -> None:
        outside(self._inner.resume_reading)
