"""Reservations of an enclosure's drives, as one host may ask for them: NVMe's, of the one type that fits.

A host *registers* a key with a drive. While a reservation for all registrants is *held*, the drive takes
writes of registered hosts alone, and lets everybody read. A host that another one *bars* writes no more until
it registers again; what it still has on its way is refused as well. What lies in the drive's own queue is
not.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

WRITE_EXCLUSIVE_ALL_REGISTRANTS = 5
"""NVMe base specification, "Reservation Types"."""


class Act(Enum):
    """What a host may ask of a drive."""

    REGISTER = "register"
    """Have this host's key known. Again changes nothing."""

    RESERVE = "reserve"
    """Let nobody write but who is registered."""

    CLEAR = "clear"
    """End the reservation, and every registration."""

    BAR = "bar"
    """End the registration of another key."""


@dataclass(frozen=True, slots=True)
class Report:
    """Who has registered with a drive, and how it is reserved."""

    type: int
    """0: it is not."""

    keys: frozenset[int]

    @property
    def is_held(self) -> bool:
        """Whether registered hosts alone may write it."""
        return self.type == WRITE_EXCLUSIVE_ALL_REGISTRANTS


class Reservations(Protocol):
    """One host's. Every method may take seconds; none holds the event loop up. They raise OstracaError where
    the host's kernel does not answer in time.
    """

    async def reports(self, devices: Sequence[str]) -> Mapping[str, Report | None]:
        """Return how drives are reserved, by where they are opened; None for what knows no reservations. What
        can't be asked now is left out.
        """

    async def act(self, device: str, act: Act, key: int, other: int = 0) -> bool:
        """Ask it of a drive, as the host of this *key*; *other* is the key to bar. Say whether it was done:
        not where another key is registered for this host, or this one is not, or a reservation is held that
        is in the way.
        """
