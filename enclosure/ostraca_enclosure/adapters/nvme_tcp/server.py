"""Listener of the target: a thread for each address, connection and watch over silent hosts."""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import threading
import time

from ostraca_enclosure.adapters.nvme_tcp.session import TargetSession
from ostraca_enclosure.adapters.nvme_tcp.subsystem import Subsystem
from ostraca_enclosure.ports import ExportError
from ostraca_fabric.model.target import Controller, TargetTransport
from ostraca_fabric.runtime.os_errors import state_and_remedy
from ostraca_fabric.runtime.threads import show_name
from ostraca_fabric.sockets.nvme_tcp.stream import PduStream

log = logging.getLogger(__name__)

CONNECTIONS_MAX = 256
"""Concurrent connections, each with a thread and up to 1 MiB."""

_BACKLOG = 64
_WATCH_S = 0.5
_RETRY_S = 0.2
_CLOSE_S = 5.0


class TargetServer:
    """Listening target of one subsystem. Call ``close`` at the end."""

    def __init__(self, subsystem: Subsystem, *, connections_max: int = CONNECTIONS_MAX) -> None:
        """Serve *subsystem*; listen nowhere yet."""
        self.subsystem = subsystem
        self._connections_max = connections_max
        self._changing = threading.Lock()
        self._listeners: dict[Controller, socket.socket] = {}
        self._streams: set[PduStream] = set()
        self._threads: set[threading.Thread] = set()
        self._closed = threading.Event()
        self._watch = threading.Thread(target=self._end_silent, name="ostraca-nvme-watch", daemon=True)
        self._watch.start()

    @property
    def controllers(self) -> frozenset[Controller]:
        """Return the addresses in use."""
        return frozenset(self._listeners)

    def listen(self, controller: Controller) -> None:
        """Listen at an address; a host name means every address of this machine. Raises ExportError."""
        if controller in self._listeners:
            return
        if controller.transport is not TargetTransport.TCP:
            raise ExportError(
                f"the user-space target can't listen at {controller}: use tcp://, or set target to nvmet"
            )
        try:
            listener = _listener(controller)
        except OSError as error:
            # The text of ``create_server`` hides the error's own.
            state, remedy = state_and_remedy(OSError(error.errno, os.strerror(error.errno or 0)))
            raise ExportError(
                f"{controller} can't be used: {state}{f'; {remedy}' if remedy else ''}"
            ) from error
        try:
            self._start(self._accept, listener)
        except RuntimeError as error:
            listener.close()
            raise ExportError(f"{controller} can't be served: {error}") from error
        self._listeners[controller] = listener

    def unlisten(self, controller: Controller) -> None:
        """Stop listening at an address; its connections stay."""
        listener = self._listeners.pop(controller, None)
        if listener is not None:
            _end(listener)

    def close(self) -> None:
        """Stop listening, end all connections, and wait a little for their threads.

        A thread of a hung disk ends with the process.
        """
        self._closed.set()
        for controller in list(self._listeners):
            self.unlisten(controller)
        self.subsystem.clear()
        self.drop_connections()
        until_s = time.monotonic() + _CLOSE_S
        with self._changing:
            threads = [self._watch, *self._threads]
        for thread in threads:
            thread.join(max(0.0, until_s - time.monotonic()))

    def drop_connections(self) -> None:
        """End all connections."""
        with self._changing:
            streams = list(self._streams)
        for stream in streams:
            stream.abort()

    def _accept(self, listener: socket.socket) -> None:
        with listener:
            while not self._closed.is_set():
                try:
                    sock, address = listener.accept()
                except OSError as error:
                    if listener.fileno() < 0 or _is_ended(listener):
                        return
                    log.warning("A connection can't be accepted, trying again: %s", error)
                    self._closed.wait(_RETRY_S)
                    continue
                self._welcome(sock, f"{address[0]}:{address[1]}")

    def _welcome(self, sock: socket.socket, peer: str) -> None:
        if len(self._streams) >= self._connections_max or self._closed.is_set():
            log.warning("%s is refused: %d connections are the limit", peer, self._connections_max)
            sock.close()
            return
        try:
            stream = PduStream(sock)
        except OSError:  # reset by the host meanwhile
            sock.close()
            return
        with self._changing:
            self._streams.add(stream)
        try:
            self._start(self._serve, stream, peer)
        except RuntimeError as error:
            log.warning("%s is refused: %s", peer, error)
            self._forget(stream)

    def _serve(self, stream: PduStream, peer: str) -> None:
        try:
            TargetSession(self.subsystem, stream, peer).run()
        finally:
            self._forget(stream)

    def _forget(self, stream: PduStream) -> None:
        with self._changing:
            self._streams.discard(stream)
        stream.close()

    def _start(self, act: object, *given: object) -> None:
        assert callable(act)

        def run() -> None:
            show_name("nvme-target")
            try:
                act(*given)
            finally:
                with self._changing:
                    self._threads.discard(threading.current_thread())

        thread = threading.Thread(target=run, name="ostraca-nvme-target", daemon=True)
        with self._changing:  # ``close`` joins started threads only
            thread.start()
            self._threads.add(thread)

    def _end_silent(self) -> None:
        show_name("nvme-watch")
        while not self._closed.wait(_WATCH_S):
            for host in self.subsystem.end_silent():
                log.warning("%s is silent: its connections end", host)


def _listener(controller: Controller) -> socket.socket:
    try:
        address = ipaddress.ip_address(controller.address)
    except ValueError:
        if socket.has_dualstack_ipv6():
            place = ("::", controller.service)
            return socket.create_server(place, family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
        return socket.create_server(("", controller.service), backlog=_BACKLOG)
    family = socket.AF_INET6 if address.version == ipaddress.IPv6Address(0).version else socket.AF_INET
    return socket.create_server((str(address), controller.service), family=family, backlog=_BACKLOG)


def _end(listener: socket.socket) -> None:
    """Wake the thread in ``accept``, which then closes the listener."""
    try:
        listener.shutdown(socket.SHUT_RDWR)
    except OSError:
        log.debug("a listener had ended already")


def _is_ended(listener: socket.socket) -> bool:
    return not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
