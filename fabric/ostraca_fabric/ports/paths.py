"""Paths to the drives of enclosures, as one host has them: NVMe-oF connections, or files in a directory.

An adapter connects, and says what is there; it decides nothing. What it has connected outlives the process,
so the next one finds it. A namespace is known by its NGUID: devices are numbered as they come.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from ostraca_fabric.errors import OstracaError

if TYPE_CHECKING:
    from ostraca_fabric.target import Controller, Target


class Stage(Enum):
    """How far a host came with an enclosure, in this order."""

    REACH = "reach"
    """Nothing answers at its controllers."""

    AUTHENTICATE = "authenticate"
    """It does not let this host in: by its name, or by its secret."""

    IDENTIFY = "identify"
    """It is another than was meant, or does not say what it is."""

    FIT = "fit"
    """Its path would deliver writes later than ``late_write_s`` assumes, or is of no use otherwise."""


class PathError(OstracaError):
    """An enclosure's drives can't be reached from this host; the message says why and what to do."""

    def __init__(self, stage: Stage, message: str) -> None:
        super().__init__(message)
        self.stage = stage
        """Where it ended."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """One drive as this host sees it."""

    nguid: str
    """32 hexadecimal digits, in lower case."""

    device: str
    """Where it can be opened now."""

    size_bytes: int
    lba_bytes: int
    model: str = ""
    serial: str = ""


@dataclass(frozen=True, slots=True)
class PathState:
    """One path to an enclosure."""

    controller: Controller
    is_live: bool
    detail: str = ""
    """What the host says of it, as ``connecting``; why it is not live, where that is known."""


class Paths(Protocol):
    """One host's paths. Every method may take seconds; none holds the event loop up."""

    @property
    def host(self) -> str:
        """The NQN by which enclosures know this host."""

    async def connect(self, target: Target, secret: str) -> tuple[Namespace, ...]:
        """Have a path to each controller of *target* that answers, and return the drives behind them.

        *secret* is what the target's ``secret`` names, empty where it names none. May be repeated: what is
        connected already stays as it is, and paths that were lost are tried again. One live path is enough.
        Raises PathError: no controller answers, or none lets this host in, or what does is not the target.
        """

    async def namespaces(self, target: Target) -> tuple[Namespace, ...]:
        """Return the drives that can be opened now, by NGUID; none where nothing is connected. Raises
        PathError where that can't be said.
        """

    async def states(self, target: Target) -> tuple[PathState, ...]:
        """Return how each controller's path is, in the target's order."""

    async def disconnect(self, target: Target) -> None:
        """Have no path to *target* any more. Nothing of it may be open, or it fails from then on. Not an
        error where nothing is connected. Raises PathError where a path can't be ended.
        """
