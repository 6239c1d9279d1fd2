"""Association with a controller: admin connection, keep-alives, and I/O connections shared by all drives.

A thread sends keep-alives and notices the end of the admin connection; then the whole association ends. An
I/O connection ends alone after an error, and the next command opens another. All methods block, and may be
called in any thread.
"""

from __future__ import annotations

import logging
import select
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ostraca_dpu_agent.adapters.nvme_tcp.queue_pair import TRANSFER_BYTES_MAX, QueuePair, Transfer
from ostraca_fabric.errors import ProtocolError
from ostraca_fabric.model.target import Controller
from ostraca_fabric.runtime.threads import show_name
from ostraca_fabric.sockets.nvme_tcp.commands import (
    AdminOpcode,
    Connect,
    Feature,
    NvmeCommand,
    Property,
    property_get,
    property_set,
)
from ostraca_fabric.sockets.nvme_tcp.identities import (
    IDENTIFY_BYTES,
    LISTED_MAX,
    ControllerIdentity,
    IdentifyKind,
    NamespaceIdentity,
    parse_identity,
    parse_namespaces,
)

log = logging.getLogger(__name__)

LOST = (OSError, EOFError, ProtocolError)
"""Errors after which a connection is unusable."""

_ENABLE = 0x00460001
"""CC: enabled, entries of 64 and 16 bytes, pages of 4 KiB, NVM command set."""

_READY_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class TcpPathSettings:
    """Limits of the user-space initiator."""

    io_queues: int = 2
    """I/O connections to each controller, shared by its drives."""

    keep_alive_s: float = 5.0
    """Keep-alive time: the controller ends after twice this silence, and drops data of writes as late."""

    io_timeout_s: float = 15.0
    """Time that a command waits for its answer."""

    connect_s: float = 5.0
    """Time limit for each connection."""


@dataclass(frozen=True, slots=True)
class FoundNamespace:
    """Namespace of an association, by number."""

    number: int
    identity: NamespaceIdentity

    @property
    def size_bytes(self) -> int:
        """Return the size of the drive."""
        return self.identity.blocks * self.identity.lba_bytes


class Association:
    """Controller of one enclosure, connected at construction."""

    def __init__(self, controller: Controller, connect: Connect, settings: TcpPathSettings) -> None:
        """Connect. Raises OSError, EOFError, ProtocolError and ConnectRefusedError."""
        self._controller = controller
        self._settings = settings
        self._asking = threading.Lock()
        self._changed = threading.Condition()
        self._idle: list[QueuePair] = []
        self._queues: set[QueuePair] = set()
        self._numbers: set[int] = set()
        self._next_number = 0
        self.trouble = ""
        """Reason for the end of the association; empty while connected."""

        self._unusable: set[int] = set()
        """Namespaces left out because of their format."""

        self.namespaces: Mapping[str, FoundNamespace] = {}
        """By NGUID, as of the last ``list_namespaces``."""

        self._admin = QueuePair(controller, connect, connect_s=settings.connect_s)
        self._connect = replace(connect, controller=self._admin.controller_id, keep_alive_ms=0)
        try:
            self._enable()
            self.identity = self._identify_controller(connect.subsystem)
            self._queues_max = self._grant_queues()
            self.list_namespaces()
        except BaseException:
            self._admin.close()
            raise
        limit = self.identity.transfer_bytes_max or TRANSFER_BYTES_MAX
        self.transfer_bytes_max = min(limit, TRANSFER_BYTES_MAX)
        threading.Thread(target=self._keep_alive, name="ostraca-nvme-keep-alive", daemon=True).start()

    @property
    def _has_ended(self) -> bool:
        return bool(self.trouble)

    def is_live(self) -> bool:
        """Return whether the controller is still connected."""
        if self.trouble:
            return False
        with self._asking:
            is_idle = self._admin.stream.is_idle()
        if not is_idle:
            self.end("the enclosure closed the connection")
        return is_idle

    def list_namespaces(self) -> None:
        """List the drives again. Raises OSError, EOFError and ProtocolError."""
        found: dict[str, FoundNamespace] = {}
        for number in self._active_namespaces():
            page = self._identify(IdentifyKind.NAMESPACE, number)
            try:
                identity = NamespaceIdentity.parse(page)
            except ProtocolError as error:
                if number not in self._unusable:
                    log.warning("Namespace %d of %s is left out: %s", number, self._controller, error)
                self._unusable.add(number)
                continue
            if not identity.blocks:
                continue  # withdrawn since the listing
            if not identity.nguid:
                page = self._identify(IdentifyKind.DESCRIPTORS, number)
                identity = replace(identity, nguid=parse_identity(page))
            if identity.nguid in found:
                raise ProtocolError(f"two drives have NGUID {identity.nguid}: assign different NGUIDs")
            if identity.nguid:
                found[identity.nguid] = FoundNamespace(number, identity)
        self.namespaces = found

    def run(self, transfers: Sequence[Transfer]) -> None:
        """Run commands on an I/O connection; each status is in its transfer.

        Raises OSError, EOFError and ProtocolError; then transfers without a status failed.
        """
        queue = self._take()
        try:
            queue.run(transfers, self._settings.io_timeout_s)
        except BaseException:
            self._drop(queue)
            raise
        with self._changed:
            if not self._has_ended:
                self._idle.append(queue)
                self._changed.notify()
                return
        self._drop(queue)

    def end(self, trouble: str) -> None:
        """End all connections; commands under way fail at once."""
        with self._changed:
            if self.trouble:
                return
            self.trouble = trouble
            for queue in self._queues:
                queue.stream.abort()
            for queue in self._idle:
                queue.close()
            self._idle.clear()
            self._changed.notify_all()
        self._admin.stream.abort()  # the keep-alive thread closes the connection

    def _enable(self) -> None:
        until_s = time.monotonic() + self._settings.connect_s
        self._ask(property_set(Property.CONFIGURATION, _ENABLE))
        while not self._ask(property_get(Property.STATUS)) & 1:
            if time.monotonic() > until_s:
                raise TimeoutError("the controller did not become ready")
            time.sleep(_READY_POLL_S)

    def _grant_queues(self) -> int:
        wanted = self._settings.io_queues - 1
        granted = self._ask(
            NvmeCommand(AdminOpcode.SET_FEATURES, words=(Feature.QUEUES, wanted | wanted << 16, 0, 0, 0, 0))
        )
        return min(wanted, granted & 0xFFFF, granted >> 16 & 0xFFFF) + 1

    def _identify_controller(self, subsystem: str) -> ControllerIdentity:
        identity = ControllerIdentity.parse(self._identify(IdentifyKind.CONTROLLER, 0))
        if identity.subsystem != subsystem:
            raise ProtocolError(f"the controller belongs to {identity.subsystem!r}")
        return identity

    def _active_namespaces(self) -> Iterator[int]:
        after = 0
        while True:
            listed = parse_namespaces(self._identify(IdentifyKind.ACTIVE_NAMESPACES, after))
            if any(number <= after for number in listed):
                raise ProtocolError("the controller lists its namespaces out of order")
            yield from listed
            if len(listed) < LISTED_MAX:
                return
            after = listed[-1]

    def _identify(self, kind: IdentifyKind, namespace: int) -> bytearray:
        command = NvmeCommand(AdminOpcode.IDENTIFY, namespace=namespace, words=(kind, 0, 0, 0, 0, 0))
        with self._asking:
            transfer, page = self._admin.ask(command, self._settings.keep_alive_s, IDENTIFY_BYTES)
        if not transfer.is_good:
            raise ProtocolError(f"Identify {kind.name} failed with status {transfer.status:#x}")
        return page

    def _ask(self, command: NvmeCommand) -> int:
        with self._asking:
            transfer, _ = self._admin.ask(command, self._settings.keep_alive_s)
        if not transfer.is_good:
            raise ProtocolError(f"command {command.opcode:#x} failed with status {transfer.status:#x}")
        return transfer.result

    def _take(self) -> QueuePair:
        """Return an idle connection, or a new one."""
        until_s = time.monotonic() + self._settings.io_timeout_s
        with self._changed:
            while True:
                if self.trouble:
                    raise ConnectionError(self.trouble)
                if self._idle:
                    return self._idle.pop()
                if len(self._numbers) < self._queues_max:
                    number = self._free_number()
                    self._numbers.add(number)
                    break
                if not self._changed.wait(until_s - time.monotonic()):
                    raise TimeoutError("no connection became free in time")
        try:
            queue = QueuePair(
                self._controller,
                replace(self._connect, queue=number),
                connect_s=self._settings.connect_s,
            )
        except BaseException:
            with self._changed:
                self._numbers.discard(number)
                self._changed.notify()
            raise
        with self._changed:
            self._queues.add(queue)
            if not self._has_ended:
                return queue
        self._drop(queue)
        raise ConnectionError(self.trouble)

    def _free_number(self) -> int:
        """Return the next free number; the target may still work for the last user of a number."""
        while True:
            self._next_number = self._next_number % self._queues_max + 1
            if self._next_number not in self._numbers:
                return self._next_number

    def _drop(self, queue: QueuePair) -> None:
        queue.close()
        with self._changed:
            self._queues.discard(queue)
            self._numbers.discard(queue.number)
            self._changed.notify()

    def _keep_alive(self) -> None:
        show_name("nvme-keep-alive")
        try:
            self._watch()
        except LOST as error:
            self.end(f"keep-alive failed: {error}")
        finally:
            self.end("the connection was ended")
            with self._asking:
                self._admin.close()

    def _watch(self) -> None:
        """Send keep-alives until the association ends. Raises the errors of ``LOST``."""
        interval_s = self._settings.keep_alive_s / 2
        poll = select.poll()
        poll.register(self._admin.stream, select.POLLIN | select.POLLRDHUP)
        asked_s = time.monotonic()
        while not self.trouble:
            poll.poll(max(0.0, asked_s + interval_s - time.monotonic()) * 1000)
            if not self.is_live():
                return
            if time.monotonic() >= asked_s + interval_s:
                self._ask(NvmeCommand(AdminOpcode.KEEP_ALIVE))
                asked_s = time.monotonic()
