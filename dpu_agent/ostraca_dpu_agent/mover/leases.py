"""What staging lends, what for, and why it does not."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from ostraca_fabric.outcome import Reason

if TYPE_CHECKING:
    from collections.abc import Hashable

    import numpy as np
    from numpy.typing import NDArray


class Purpose(Enum):
    """What a lease is for."""

    GET = auto()
    PUT = auto()
    CACHED = auto()
    """A get of blocks that the cache holds. It takes no slots, only part of its worker's share."""


class NoRoom(Enum):
    """Why a lease was not given."""

    DEADLINE = auto()
    """None became free in time."""

    TOO_LARGE = auto()
    """It would not fit even an empty staging."""

    QUARANTINED = auto()
    """Too much is held by transfers not known to have ended, or what they hold lies in every place for slots
    of this size."""

    GIVEN_UP = auto()
    """The drive fell silent meanwhile."""


NO_ROOM_REASONS = {
    NoRoom.DEADLINE: Reason.DEADLINE,
    NoRoom.TOO_LARGE: Reason.OVERLOADED,
    NoRoom.QUARANTINED: Reason.QUARANTINED,
    NoRoom.GIVEN_UP: Reason.DRIVE_SUSPECT,
}


@dataclass(slots=True, eq=False)
class Lease:
    """Some slots of one size, held by one wave of one request."""

    offsets: NDArray[np.int64]
    slot_bytes: int
    purpose: Purpose
    holder: Hashable
    tenant: Hashable
    """Whose share it counts for: the holder's tenant, or the drive it was given up with."""

    held_bytes: int
    """What it counts for, until its release."""

    rows: NDArray[np.int64]
    """Of the cache, for CACHED."""

    drive: Hashable = None
    """The drive that reads or writes it now."""

    is_quarantined: bool = False
