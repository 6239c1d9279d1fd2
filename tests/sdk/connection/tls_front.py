"""TLS in front of an agent that listens at a unix socket: what comes over the one goes to the other."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Self

from ostraca_fabric.sockets.tls import Tls

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from ostraca_fabric.sockets.tls import TlsFiles

HOST = "127.0.0.1"
_PIECE_BYTES = 1 << 16


class TlsFront:
    """Listens at ``address`` in a thread of its own, until its ``with`` block ends."""

    def __init__(
        self, path: Path, files: TlsFiles, *, asks_for_certificates: bool = False, port: int = 0
    ) -> None:
        self.address = ""
        self.port = port
        self._path = path
        self._context = Tls(files).listening
        if asks_for_certificates:
            self._context.verify_mode = self._context.verify_mode.CERT_REQUIRED
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tls-front")
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_ending = asyncio.Event()

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._begin(), self._loop).result(10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _begin(self) -> None:
        self._server = await asyncio.start_server(
            self._relay, HOST, self.port, ssl=self._context, ssl_shutdown_timeout=0.1
        )
        self.port = self._server.sockets[0].getsockname()[1]
        self.address = f"tls://{HOST}:{self.port}"

    async def _end(self) -> None:
        self._server.close()
        self._is_ending.set()
        await asyncio.gather(*self._tasks, return_exceptions=True)  # each closes what it opened

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            there, here = await asyncio.open_unix_connection(self._path)
        except OSError:
            writer.transport.abort()
            return
        until = [
            asyncio.ensure_future(each)
            for each in (_copy(reader, here), _copy(there, writer), self._is_ending.wait())
        ]
        await asyncio.wait(until, return_when=asyncio.FIRST_COMPLETED)
        for each in until:
            each.cancel()
        await asyncio.gather(*until, return_exceptions=True)
        for end in (writer, here):
            end.close()
        await asyncio.gather(writer.wait_closed(), here.wait_closed(), return_exceptions=True)
        self._tasks.discard(task)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(_PIECE_BYTES):
        writer.write(piece)
        await writer.drain()
