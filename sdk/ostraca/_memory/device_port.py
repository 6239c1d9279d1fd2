"""Port to device memory, such as a GPU's, as source and destination of blocks.

Blocks cross in the arena, one copy away from device memory. Such copies run asynchronously. This port defines
the contract; ``ostraca._memory.cuda`` is the adapter for CUDA. The port knows nothing of any device.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class DevicePart(NamedTuple):
    """Memory of one device, passed by the caller of an operation."""

    memory: Any
    """The adapter's own handle: keeps the memory alive and knows the items' positions."""

    device: Hashable
    shape: tuple[int, ...]
    payload_bytes: int
    """Bytes of all items, copied in C order."""


class Copies(Protocol):
    """Copies of one operation. Call ``wait`` before any other use of the host memory."""

    def to_device(self, part: DevicePart, host: NDArray[np.uint8]) -> None:
        """Start a copy of *host*, of ``payload_bytes``, to the device.

        Raises TransportError.
        """

    def from_device(self, part: DevicePart, host: NDArray[np.uint8]) -> None:
        """Start a copy from the device to *host*. Raises TransportError."""

    def wait(self) -> bool:
        """Wait until every started copy has ended. Never raises for a device's errors.

        False means that a copy failed, now or earlier. The state of the failed copy is unknown, so the host
        memory of this operation's copies must never be used again.
        """


class Devices(Protocol):
    """Devices of one client. Thread-safe."""

    def look(self, value: object) -> DevicePart | None:
        """Return device memory as a part; None for any other value.

        Raises UsageError for memory that can't be copied; the message begins with a verb.
        """

    def rows(self, part: DevicePart) -> list[DevicePart]:
        """Cut a part along its first axis."""

    def copies(self, devices: Iterable[Hashable]) -> Copies:
        """Return copies ordered after all work of this thread on the devices so far.

        Raises UsageError if no copy may be started there now.
        """

    def pin(self, memory: NDArray[np.uint8]) -> None:
        """Pin the arena's *memory*, so that copies run asynchronously.

        Cheap after the first call. Raises UsageError with a remedy if so much memory can't be pinned.
        """

    def close(self) -> bool:
        """Unpin the memory; tell whether it may be unmapped.

        No copy may be under way.
        """
