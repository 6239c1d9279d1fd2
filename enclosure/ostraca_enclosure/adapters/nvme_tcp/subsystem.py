"""State of the target: drives, admitted hosts, and controllers of connected hosts. Thread-safe.

A controller lives as long as its admin connection. A host silent for twice its keep-alive time loses the
controller, and the same time bounds the age of a write's data (``session``).
"""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ostraca_enclosure.adapters.nvme_tcp.served_file import ServedFile
from ostraca_enclosure.plan import Export
from ostraca_enclosure.ports import ExportError
from ostraca_fabric.runtime.version import VERSION
from ostraca_fabric.sockets.nvme_tcp.commands import Connect
from ostraca_fabric.sockets.nvme_tcp.identities import LISTED_MAX, ControllerIdentity
from ostraca_fabric.sockets.nvme_tcp.stream import PduStream

TRANSFER_BYTES_MAX = 1 << 20
"""Most data of a command, and the memory of an I/O connection."""

QUEUES_MAX = 16
"""I/O connections of one controller."""

KEEP_ALIVES = 2
"""Keep-alive times without a sign of the host until its controller ends."""

UNWATCHED_S = 10.0
"""Bound for a host without keep-alives."""

_CONTROLLER_MAX = 0xFFEF
_SERIAL_CHARACTERS = 20


def boot_s() -> float:
    """Return seconds since the boot; the clock also runs while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(slots=True, eq=False)
class ServedController:
    """Controller of one connected host."""

    id: int
    host: str
    host_id: bytes
    silence_max_s: float
    """Longest silence of the host, and age of a write's data."""

    is_watched: bool
    heard_s: float
    configuration: int = 0
    streams: dict[int, PduStream] = field(default_factory=dict)
    """By queue; 0 is the admin queue."""


class Subsystem:
    """Subsystem of an enclosure; empty and closed until configured."""

    def __init__(self, nqn: str, clock: Callable[[], float] = boot_s) -> None:
        """Use *nqn*; *clock* is in seconds, and never stops."""
        self.nqn = nqn
        self.clock = clock
        self.exists = False
        self._changing = threading.Lock()
        self.files: dict[int, ServedFile] = {}
        """Exported drives, by namespace."""

        self.hosts: frozenset[str] = frozenset()
        """Hosts admitted by name."""

        self.allows_any_host = False
        """Whether every host may connect."""

        self._controllers: dict[int, ServedController] = {}
        self._controller_ids = itertools.cycle(range(1, _CONTROLLER_MAX + 1))
        self._slots = itertools.count(1)
        self.serial = hashlib.blake2b(nqn.encode()).hexdigest()[:_SERIAL_CHARACTERS]

    @property
    def connections(self) -> int:
        """Return the number of connections with a controller."""
        with self._changing:
            return sum(len(each.streams) for each in self._controllers.values())

    def admit(self, hosts: frozenset[str], *, allows_any_host: bool) -> None:
        """Replace the list of hosts; existing connections stay."""
        self.hosts, self.allows_any_host = hosts, allows_any_host

    def admits(self, host: str) -> bool:
        """Return whether a host may connect now."""
        return self.exists and (self.allows_any_host or host in self.hosts)

    def add(self, export: Export) -> None:
        """Export a drive. Raises ExportError.

        No number is used twice, so no host can take one drive for another.
        """
        with self._changing:
            if any(each.export == export for each in self.files.values()):
                return
            if len(self.files) >= LISTED_MAX:
                raise ExportError(f"the subsystem has {LISTED_MAX} drives already, its limit")
            self.files = {**self.files, next(self._slots): ServedFile(export)}

    def remove(self, slot: int) -> None:
        """Withdraw a drive; commands in progress end first."""
        with self._changing:
            files = dict(self.files)
            file = files.pop(slot, None)
            self.files = files
        if file is not None:
            file.close()

    def clear(self) -> None:
        """Withdraw everything, and end all connections."""
        self.exists = False
        self.admit(frozenset(), allows_any_host=False)
        for slot in list(self.files):
            self.remove(slot)
        with self._changing:
            streams = [stream for each in self._controllers.values() for stream in each.streams.values()]
        for stream in streams:
            stream.abort()

    def identity(self, controller: ServedController) -> ControllerIdentity:
        """Return the identity of a controller."""
        return ControllerIdentity(
            self.nqn,
            controller.id,
            self.serial,
            "Ostraca user-space target",
            VERSION,
            TRANSFER_BYTES_MAX,
            has_volatile_cache=True,
            namespaces_max=max([LISTED_MAX, *self.files]),
        )

    def begin(self, connect: Connect, stream: PduStream) -> ServedController | None:
        """Create a controller for an admin connection; None without a free number."""
        keep_alive_s = connect.keep_alive_ms / 1000
        with self._changing:
            number = next(
                (
                    each
                    for each in itertools.islice(self._controller_ids, _CONTROLLER_MAX)
                    if each not in self._controllers
                ),
                None,
            )
            if number is None:
                return None
            controller = ServedController(
                number,
                connect.host,
                connect.host_id,
                KEEP_ALIVES * keep_alive_s if keep_alive_s else UNWATCHED_S,
                bool(keep_alive_s),
                self.clock(),
            )
            controller.streams[0] = stream
            self._controllers[number] = controller
            return controller

    def join(self, connect: Connect, stream: PduStream) -> ServedController | None:
        """Add an I/O connection to its controller; None if they do not fit."""
        with self._changing:
            controller = self._controllers.get(connect.controller)
            if (
                controller is None
                or (controller.host, controller.host_id) != (connect.host, connect.host_id)
                or not 1 <= connect.queue <= QUEUES_MAX
                or connect.queue in controller.streams
            ):
                return None
            controller.streams[connect.queue] = stream
            return controller

    def end(self, controller: ServedController, queue: int) -> None:
        """Remove a connection; the end of the admin connection ends all."""
        with self._changing:
            controller.streams.pop(queue, None)
            others = []
            if not queue:
                self._controllers.pop(controller.id, None)
                others = list(controller.streams.values())
        for stream in others:
            stream.abort()

    def end_silent(self) -> list[str]:
        """End controllers of silent hosts; return the hosts."""
        now_s = self.clock()
        with self._changing:
            silent = [
                each
                for each in self._controllers.values()
                if each.is_watched and now_s - each.heard_s > each.silence_max_s
            ]
            streams = [stream for each in silent for stream in each.streams.values()]
        for stream in streams:
            stream.abort()
        return [each.host for each in silent]
