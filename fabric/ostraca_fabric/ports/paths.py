"""Paths from a host to the drives of enclosures: NVMe-oF, or files.

An adapter connects and reports, and decides nothing. Connections outlive the process, so the next process
finds them. The NGUID identifies a namespace, because device numbers follow the order of connection.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from ostraca_fabric.errors import OstracaError
from ostraca_fabric.model.target import Controller, Target


class Stage(Enum):
    """Progress of a host's connection to an enclosure, in this order."""

    REACH = "reach"
    """No controller answers."""

    AUTHENTICATE = "authenticate"
    """The enclosure refuses this host's name or secret."""

    IDENTIFY = "identify"
    """The enclosure is not the intended target, or does not identify itself."""

    FIT = "fit"
    """The path is unusable, for example because writes could arrive later than ``late_write_s``."""


class PathError(OstracaError):
    """Failure to reach an enclosure's drives; the message names the cause and the remedy."""

    def __init__(self, stage: Stage, message: str) -> None:
        super().__init__(message)
        self.stage = stage
        """Stage of the failure."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """Drive as seen by this host."""

    nguid: str
    """32 hexadecimal digits, in lower case."""

    device: str
    """Current device path."""

    size_bytes: int
    lba_bytes: int
    model: str = ""
    serial: str = ""


@dataclass(frozen=True, slots=True)
class PathState:
    """State of a path to an enclosure."""

    controller: Controller
    is_live: bool
    detail: str = ""
    """The host's own state name, such as ``connecting``, or the known cause of a path not live."""


class Paths(Protocol):
    """Paths of one host. A method may take seconds; no method blocks the event loop."""

    @property
    def host(self) -> str:
        """NQN of this host at enclosures."""

    async def connect(self, target: Target, secret: str) -> tuple[Namespace, ...]:
        """Connect to each answering controller of *target*, and return the drives.

        *secret* is the value named by the target's ``secret``, or empty without a name. A repeated call keeps
        existing connections and retries lost paths. A single live path is enough. Raises PathError if no
        controller answers, if all refuse this host, or if the answering device is not the target.
        """

    async def namespaces(self, target: Target) -> tuple[Namespace, ...]:
        """Return the drives available now, by NGUID; empty without a connection.

        Raises PathError if the drives cannot be listed.
        """

    async def states(self, target: Target) -> tuple[PathState, ...]:
        """Return the state of each controller's path, in the target's order."""

    async def disconnect(self, target: Target) -> None:
        """Remove all paths to *target*; no error if none exists.

        Close all drives of *target* first, or their I/O fails afterwards. Raises PathError if a path cannot
        be removed.
        """
