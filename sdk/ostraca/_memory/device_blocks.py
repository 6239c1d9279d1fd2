"""Blocks in device memory, such as a GPU's, and the port to devices.

Blocks cross in the arena, one copy away from device memory. Such copies run asynchronously. ``Devices`` and
``Copies`` define the contract; ``ostraca._memory.cuda`` is the adapter for CUDA. This module knows nothing of
any device. The counterpart for host memory is ``ostraca._memory.host_blocks``. As there, a block is a tensor
or a list of tensors. All blocks of one call are on devices or none.

**Tags.** A put from host memory computes tags from the caller's bytes, before the copy. Device memory can't
be hashed in place, so the tag comes from the copy in the slot, after the end of the copy. A copy that goes
wrong without an error is therefore not detected; all later damage is. A get verifies the slot, as always, and
copies only good blocks.

**Ends.** Copies run beside the driver's thread. A job waits for them before the release of a slot, at any
end: success, deadline or ``cancel``. After an operation's end no copy writes to a device, and no slot read by
a copy is reused. An operation may overrun its deadline by the copies then under way.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ostraca._memory.copy_pool import CopyPool, compute_tags, verified_slices
from ostraca._protocol.operations import no_verdicts, verdicts_of
from ostraca._protocol.specs import check_count, check_size
from ostraca_fabric.errors import TransportError, UsageError


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


class DeviceBlocks:
    """Blocks of one operation, each with one or more parts.

    Created in the caller's thread, used in the driver's.
    """

    def __init__(self, devices: Devices, blocks: list[list[DevicePart]]) -> None:
        """Order the copies after all work of the caller's thread on these devices."""
        self._devices = devices
        self._blocks = blocks
        self.lengths = np.array([sum(part.payload_bytes for part in block) for block in blocks], np.uint32)
        self._copies = devices.copies({part.device for block in blocks for part in block})

    def prepare(self, memory: NDArray[np.uint8]) -> None:
        """Pin the arena, unless an earlier operation did. Raises UsageError."""
        self._devices.pin(memory)

    def gather(
        self,
        memory: NDArray[np.uint8],
        offsets: NDArray[np.int64],
        seeds: NDArray[np.uint64],
        *,
        first: int,
        copy_pool: CopyPool,
    ) -> NDArray[np.uint8]:
        """Copy blocks as ``HostBlocks.gather``, with tags of the copied bytes.

        Raises TransportError if a copy failed.
        """
        lengths = self.lengths[first : first + len(offsets)]
        assert len(lengths) == len(offsets) == len(seeds), "as many blocks as were checked"
        self.prepare(memory)
        try:
            for block, offset in enumerate(offsets.tolist(), first):
                for part, host in self._slots(block, memory, offset):
                    self._copies.from_device(part, host)
        finally:
            has_ended = self._copies.wait()
        if not has_ended:
            raise TransportError(COPY_FAILED)
        return compute_tags(memory, offsets, lengths, seeds, copy_pool=copy_pool)

    def scatter(
        self,
        memory: NDArray[np.uint8],
        offsets: NDArray[np.int64],
        seeds: NDArray[np.uint64],
        tags: NDArray[np.uint8],
        *,
        positions: NDArray[np.int64],
        until_s: float,
        copy_pool: CopyPool,
    ) -> NDArray[np.uint8]:
        """Verify blocks as ``HostBlocks.scatter``, but only start the copies.

        This thread starts all copies. Raises TransportError.
        """
        lengths, verdicts = self.lengths[positions], no_verdicts(len(positions))
        for some, good in verified_slices(
            memory, offsets, lengths, seeds, tags, until_s=until_s, copy_pool=copy_pool
        ):
            for row in (some.start + np.flatnonzero(good)).tolist():
                for part, host in self._slots(int(positions[row]), memory, int(offsets[row])):
                    self._copies.to_device(part, host)
            verdicts[some] = verdicts_of(good)
        return verdicts

    def wait(self) -> bool:
        """Wait for all copies; False if the state of a copy is unknown."""
        return self._copies.wait()

    def _slots(
        self, block: int, memory: NDArray[np.uint8], offset: int
    ) -> Iterator[tuple[DevicePart, NDArray[np.uint8]]]:
        """Yield the parts of a block, each with its piece of the slot."""
        if not 0 <= offset <= memory.nbytes - int(self.lengths[block]):
            raise ValueError(f"block {block} would reach outside of memory")
        for part in self._blocks[block]:
            yield part, memory[offset : offset + part.payload_bytes]
            offset += part.payload_bytes


COPY_FAILED = (
    "copying between the arena and a device failed, and the state of the copy is unknown, so its part of the "
    "arena stays unused: connect again after repair of the device"
)


def blocks_on_devices(
    value: object, devices: Devices, *, argument: str, count: int, block_bytes: int
) -> DeviceBlocks | None:
    """Check memory on devices, and prepare it for copies; None for host memory.

    Raises UsageError.
    """
    try:
        blocks = _on_devices(value, devices, count)
    except UsageError as error:
        raise UsageError(f"{argument} {error}") from error
    if blocks is None:
        return None
    for block, parts in enumerate(blocks):
        check_size(argument, block, sum(part.payload_bytes for part in parts), block_bytes)
    return DeviceBlocks(devices, blocks)


def _on_devices(value: object, devices: Devices, count: int) -> list[list[DevicePart]] | None:
    """Return the parts of each block; None if the first part is not on a device."""
    if not isinstance(value, (list, tuple)):
        whole = devices.look(value)
        if whole is None:
            return None
        if len(whole.shape) < 2:  # noqa: PLR2004 (blocks times bytes)
            raise UsageError(
                "is one flat piece of memory: pass a list of blocks, or a tensor of shape (blocks, bytes per "
                "block)"
            )
        check_count(whole.shape[0], count)
        return [[row] for row in devices.rows(whole)]
    first = value[0] if value else None
    if isinstance(first, (list, tuple)):
        first = first[0] if first else None
    if devices.look(first) is None:
        return None
    check_count(len(value), count)
    return [[_part(part, devices) for part in _parts(block)] for block in value]


def _parts(block: object) -> list[object]:
    parts = list(block) if isinstance(block, (list, tuple)) else [block]
    if not parts:
        raise UsageError("has an empty block: a block has at least one part")
    return parts


def _part(value: object, devices: Devices) -> DevicePart:
    found = devices.look(value)
    if found is None:
        raise UsageError(
            f"has a {type(value).__name__} in host memory beside others on a device: pass all blocks of one "
            "call in the same kind of memory"
        )
    return found
