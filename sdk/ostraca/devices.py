"""The port to memory of devices, such as a GPU's, as source and destination of blocks.

Blocks cross in the arena, so a device's memory is one copy away from it. Such copies run beside whoever began
them; what must hold is said here, and ``ostraca.cuda`` is the adapter for CUDA. Nothing here knows what a
device is.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class DevicePart(NamedTuple):
    """Some memory of one device, which the caller of an operation passed."""

    memory: Any
    """The adapter's own: what keeps it there, and says how its items lie."""

    device: Hashable
    shape: tuple[int, ...]
    payload_bytes: int
    """The bytes of all items, which are copied in C order."""


class Copies(Protocol):
    """The copies of one operation. Whoever begins one must ``wait`` before host memory is used again."""

    def to_device(self, part: DevicePart, host: NDArray[np.uint8]) -> None:
        """Begin to copy *host*, of ``payload_bytes``, to the device. Raises TransportError."""

    def from_device(self, part: DevicePart, host: NDArray[np.uint8]) -> None:
        """Begin to copy from the device to *host*. Raises TransportError."""

    def wait(self) -> bool:
        """Return when every copy that was begun has ended. Never raises for what a device does.

        False says that one failed, now or earlier: where it stands is not known, and the host memory of this
        operation's copies must never be used again.
        """


class Devices(Protocol):
    """The devices of one client. Thread-safe."""

    def look(self, value: object) -> DevicePart | None:
        """Return device memory as a part; None for anything else.

        Raises UsageError, whose message begins with a verb, when it can't be copied.
        """

    def rows(self, part: DevicePart) -> list[DevicePart]:
        """Cut a part along its first axis."""

    def copies(self, devices: Iterable[Hashable]) -> Copies:
        """Return copies that come after everything that this thread has begun on these devices by now.

        Raises UsageError when nothing may be begun there now.
        """

    def pin(self, memory: NDArray[np.uint8]) -> None:
        """Make copies of the arena's *memory* run beside whoever begins them. Cheap after the first time.

        Raises UsageError that says what to do when so much can't be pinned.
        """

    def close(self) -> bool:
        """Let the memory go; no copy may be under way. Says whether it may be unmapped."""
