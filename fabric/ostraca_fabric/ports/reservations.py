"""NVMe reservations of an enclosure's drives, for one host and one reservation type.

A host *registers* a key with a drive. While a reservation for all registrants is *held*, only registered
hosts may write, and all hosts may read. A host *preempted* by another host cannot write until a new
registration. The drive also refuses that host's commands in transit, but not commands already in the drive's
queue.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

WRITE_EXCLUSIVE_ALL_REGISTRANTS = 5
"""NVMe base specification, "Reservation Types"."""


class ReservationCommand(Enum):
    """Reservation command of a host."""

    REGISTER = "register"
    """Register this host's key. A repeated registration changes nothing."""

    RESERVE = "reserve"
    """Restrict writing to registered hosts."""

    CLEAR = "clear"
    """End the reservation and every registration."""

    PREEMPT = "preempt"
    """End the registration of another key."""


@dataclass(frozen=True, slots=True)
class ReservationReport:
    """Registrations and reservation of a drive."""

    type: int
    """Reservation type; 0 without a reservation."""

    keys: frozenset[int]

    @property
    def is_held(self) -> bool:
        """Whether only registered hosts may write."""
        return self.type == WRITE_EXCLUSIVE_ALL_REGISTRANTS


class HostReservations(Protocol):
    """Reservations of one host.

    A method may take seconds; no method blocks the event loop. All raise OstracaError if the host's kernel
    does not answer in time.
    """

    async def reports(self, devices: Sequence[str]) -> Mapping[str, ReservationReport | None]:
        """Return the reservation of each drive, by device path.

        None stands for a device without reservations. Devices that cannot be asked now are left out.
        """

    async def act(self, device: str, act: ReservationCommand, key: int, other: int = 0) -> bool:
        """Perform *act* on a drive with this host's *key*; *other* is the key to preempt.

        Return False, without a change, if this host is registered with another key, *key* is not registered,
        or a conflicting reservation is held.
        """
