"""Blocks in device memory, such as a GPU's, and the port to devices.

Blocks cross in the arena, one copy away from device memory. Such copies run asynchronously. ``Devices`` and
``Copies`` define the contract; ``ostraca._memory.cuda`` is the adapter for CUDA. This module knows nothing of
any device. The counterpart for host memory is ``ostraca._memory.host_blocks``. As there, a block is a tensor
or a list of tensors. All blocks of one call are on devices or none.

**Tags of the host.** A put from host memory computes tags from the caller's bytes, before the copy. The host
can't hash device memory in place, so the tag comes from the copy in the slot, after the end of the copy. A
copy that goes wrong without an error is therefore not detected; all later damage is. A get verifies the slot,
as always, and copies only good blocks.

**Tags of the device.** A device that computes tags has ``DeviceStaging``: memory for the blocks of a wave,
back to back. A put computes tags there before the blocks leave the device, a get after they have arrived. So
a bad copy between host and device is a failed check. Only good blocks are copied from staging to the caller's
memory. Adjacent slots cross in one copy.

If a block is shorter than ``Devices.tagged_bytes_min``, the host computes all tags of the operation, likewise
for blocks on several devices. Without memory left for staging, the host computes the tags of the wave.

**Ends.** Copies run beside the driver's thread. A job waits for them before the release of a slot, at any
end: success, deadline or ``cancel``. After an operation's end no copy writes to a device, and no slot read by
a copy is reused. An operation may overrun its deadline by the copies then under way.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ostraca._memory.copy_pool import CopyPool, check_tags, compute_tags, slices_until
from ostraca._protocol.specs import check_count, check_sizes
from ostraca_fabric.errors import TransportError, UsageError
from ostraca_fabric.runtime.process_memory import ProcessBlocks
from ostraca_fabric.tables.digests import GOOD, TAG_BYTES, check_states


class DevicePart(NamedTuple):
    """Memory of one device, passed by the caller of an operation."""

    memory: Any
    """The adapter's own handle: keeps the memory alive and knows the items' positions."""

    device: Hashable
    shape: tuple[int, ...]
    payload_bytes: int
    """Bytes of all items, copied in C order."""


class DeviceStaging(Protocol):
    """Memory of one device for the blocks of a wave, where the device computes their tags.

    Stays valid while in use by any thread. Each call but the last two only starts copies, ordered after the
    earlier ones. Positions (*at*) are in bytes. All calls raise TransportError.
    """

    def from_parts(self, parts: Iterable[tuple[int, DevicePart]]) -> None:
        """Start copies of the caller's memory, each to its position."""

    def to_parts(self, parts: Iterable[tuple[int, DevicePart]]) -> None:
        """Start copies to the caller's memory, each from its position."""

    def from_host(self, host: NDArray[np.uint8], at: int) -> None:
        """Start a copy of pinned memory to position *at*."""

    def to_host(self, at: int, host: NDArray[np.uint8]) -> None:
        """Start a copy to pinned memory."""

    def tags(
        self, positions: NDArray[np.int64], lengths: NDArray[np.uint32], seeds: NDArray[np.uint64]
    ) -> NDArray[np.uint8]:
        """Return the tags of blocks here, once all copies so far have ended: shape (n, 16).

        Arguments have shape (n,). Positions are multiples of ``STAGING_ALIGNMENT``. Raises TransportError.
        """

    def readable(self) -> Any:  # noqa: ANN401 (as a library for reads of files takes it)
        """Return the memory for reads of files in this thread, once all earlier uses of it have ended.

        For any thread. ``tags`` may follow once the reads have ended.
        """


class Copies(Protocol):
    """Copies of one operation. Call ``wait`` before any other use of the host memory."""

    def staging(self, device: Hashable, staging_bytes: int, blocks: int) -> DeviceStaging | None:
        """Return new memory of *device*, for so many blocks; None without memory left there.

        Only for devices with ``Devices.tagged_bytes_min``.
        """

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

    @property
    def tagged_bytes_min(self) -> int:
        """Shortest block with a tag from the device; 0 if the host computes all tags."""

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


class _Wave:
    """Slots of blocks that cross together, and their positions in staging."""

    def __init__(
        self,
        memory: NDArray[np.uint8],
        offsets: NDArray[np.int64],
        lengths: NDArray[np.uint32],
        seeds: NDArray[np.uint64],
    ) -> None:
        self.memory, self.offsets, self.lengths, self.seeds = memory, offsets, lengths, seeds
        spans = -(-lengths.astype(np.int64) // STAGING_ALIGNMENT) * STAGING_ALIGNMENT
        self.positions = np.cumsum(spans) - spans
        self.staging_bytes = int(spans.sum())

    def runs(self) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """Yield adjacent slots as one piece of memory, with their position in staging.

        Raises ValueError for a block beyond memory.
        """
        ends = self.offsets + self.lengths
        if (self.offsets < 0).any() or (ends > self.memory.nbytes).any():
            raise ValueError("a block would reach outside of memory")
        shifts = self.offsets - self.positions
        is_joined = (self.offsets[1:] == ends[:-1]) & (shifts[1:] == shifts[:-1])
        cuts = [0, *(np.flatnonzero(~is_joined) + 1).tolist(), len(ends)]
        for first, last in pairwise(cuts):
            yield int(self.positions[first]), self.memory[self.offsets[first] : ends[last - 1]]


class DeviceBlocks:
    """Blocks of one operation, each with one or more parts.

    Created in the caller's thread, used in the driver's.
    """

    def __init__(self, devices: Devices, blocks: list[list[DevicePart]]) -> None:
        """Order the copies after all work of the caller's thread on these devices."""
        self._devices = devices
        self._blocks = blocks
        self.lengths = np.array([sum(part.payload_bytes for part in block) for block in blocks], np.uint32)
        used = {part.device for block in blocks for part in block}
        self._copies = devices.copies(used)
        self._tagging: Hashable | None = None
        """The only device, if it computes the tags."""
        tagged_bytes_min = devices.tagged_bytes_min
        if tagged_bytes_min and len(used) == 1 and int(self.lengths.min()) >= tagged_bytes_min:
            (self._tagging,) = used

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
        """Copy blocks as ``HostBlocks.gather``, with tags of the device or of the copied bytes.

        Raises TransportError if a copy failed.
        """
        lengths = self.lengths[first : first + len(offsets)]
        assert len(lengths) == len(offsets) == len(seeds), "as many blocks as were checked"
        self.prepare(memory)
        tags = np.empty((len(offsets), TAG_BYTES), np.uint8)
        untagged: list[slice] = []
        with self._telling_lost_copies():
            for some in slices_until(lengths, math.inf):
                wave = _Wave(memory, offsets[some], lengths[some], seeds[some])
                staged = self._stage(wave)
                if staged is not None:
                    self._pack(wave, staged, first + some.start)
                    tags[some] = staged.tags(wave.positions, wave.lengths, wave.seeds)
                    continue
                untagged.append(some)
                for block, offset in enumerate(wave.offsets.tolist(), first + some.start):
                    for part, host in self._slots(block, memory, offset):
                        self._copies.from_device(part, host)
        if not self._copies.wait():
            raise TransportError(COPY_FAILED)
        for some in untagged:
            tags[some] = compute_tags(memory, offsets[some], lengths[some], seeds[some], copy_pool=copy_pool)
        return tags

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
        source: ProcessBlocks | None = None,
    ) -> NDArray[np.uint8]:
        """Verify blocks as ``HostBlocks.scatter``, but only start the copies.

        This thread starts all copies. Raises TransportError.
        """
        lengths, verdicts = self.lengths[positions], np.zeros(len(positions), np.uint8)
        with self._telling_lost_copies():
            for some in slices_until(lengths, until_s):
                wave = _Wave(memory, offsets[some], lengths[some], seeds[some])
                staged = self._stage(wave) if source is None else None
                if staged is None:
                    columns = wave.offsets, wave.lengths, wave.seeds, tags[some]
                    copied = None if source is None else source[some]
                    verdicts[some] = check_tags(memory, *columns, copy_pool=copy_pool, source=copied)
                    self._deliver(wave, positions[some], verdicts[some] == GOOD)
                else:
                    for at, host in wave.runs():
                        staged.from_host(host, at)
                    good = self._unpack(staged, wave.positions, wave.seeds, tags[some], positions[some])
                    verdicts[some] = check_states(good)
        return verdicts

    def wait(self) -> bool:
        """Wait for all copies; False if the state of a copy is unknown."""
        return self._copies.wait()

    @property
    def has_device_tags(self) -> bool:
        """Whether the device computes the tags."""
        return self._tagging is not None

    def stage(self, staging_bytes: int, blocks: int) -> DeviceStaging | None:
        """Return memory for blocks on the device that computes their tags; None without any left.

        Raises TransportError.
        """
        if self._tagging is None:
            return None
        with self._telling_lost_copies():
            return self._copies.staging(self._tagging, staging_bytes, blocks)

    def scatter_staged(
        self,
        staged: DeviceStaging,
        places: NDArray[np.int64],
        seeds: NDArray[np.uint64],
        tags: NDArray[np.uint8],
        *,
        positions: NDArray[np.int64],
        until_s: float,
    ) -> NDArray[np.uint8]:
        """Verify blocks at *places* in staging, and start copies of the good ones, as ``scatter``."""
        verdicts = np.zeros(len(positions), np.uint8)
        with self._telling_lost_copies():
            for some in slices_until(self.lengths[positions], until_s):
                good = self._unpack(staged, places[some], seeds[some], tags[some], positions[some])
                verdicts[some] = check_states(good)
        return verdicts

    @contextmanager
    def _telling_lost_copies(self) -> Iterator[None]:
        """Raise a TransportError with a remedy if the state of a copy is unknown."""
        try:
            yield
        except TransportError as error:
            if self._copies.wait():
                raise
            raise TransportError(COPY_FAILED) from error

    def _stage(self, wave: _Wave) -> DeviceStaging | None:
        """Return memory for a wave on the device that computes its tags."""
        return self.stage(wave.staging_bytes, len(wave.positions))

    def _pack(self, wave: _Wave, staged: DeviceStaging, first: int) -> None:
        """Start copies of blocks from *first* on to staging, and from there to their slots."""
        blocks = range(first, first + len(wave.positions))
        staged.from_parts(self._staged_parts(blocks, wave.positions.tolist()))
        for at, host in wave.runs():
            staged.to_host(at, host)

    def _unpack(
        self,
        staged: DeviceStaging,
        places: NDArray[np.int64],
        seeds: NDArray[np.uint64],
        tags: NDArray[np.uint8],
        blocks: NDArray[np.int64],
    ) -> NDArray[np.bool_]:
        """Tell which blocks in staging are good, and start their copies to the caller's memory."""
        found = staged.tags(places, self.lengths[blocks], seeds)
        good: NDArray[np.bool_] = (found == tags).all(axis=1)
        staged.to_parts(self._staged_parts(blocks[good].tolist(), places[good].tolist()))
        return good

    def _deliver(self, wave: _Wave, blocks: NDArray[np.int64], good: NDArray[np.bool_]) -> None:
        """Start copies of good blocks in slots to the caller's memory."""
        for block, offset in zip(blocks[good].tolist(), wave.offsets[good].tolist(), strict=True):
            for part, host in self._slots(block, wave.memory, offset):
                self._copies.to_device(part, host)

    def _staged_parts(
        self, blocks: Iterable[int], positions: Iterable[int]
    ) -> Iterator[tuple[int, DevicePart]]:
        """Yield the parts of blocks, each with its position in staging."""
        for block, position in zip(blocks, positions, strict=True):
            at = position
            for part in self._blocks[block]:
                yield at, part
                at += part.payload_bytes

    def _slots(
        self, block: int, memory: NDArray[np.uint8], offset: int
    ) -> Iterator[tuple[DevicePart, NDArray[np.uint8]]]:
        """Yield the parts of a block, each with its piece of the slot."""
        if not 0 <= offset <= memory.nbytes - int(self.lengths[block]):
            raise ValueError(f"block {block} would reach outside of memory")
        for part in self._blocks[block]:
            yield part, memory[offset : offset + part.payload_bytes]
            offset += part.payload_bytes


STAGING_ALIGNMENT = 16
"""Blocks begin at multiples of so many bytes in ``DeviceStaging``."""

COPY_FAILED = (
    "copying between the arena and a device failed, and the state of the copy is unknown, so its part of the "
    "arena stays unused: connect again after repair of the device"
)


def blocks_on_devices(
    value: object, first: object, devices: Devices, *, argument: str, count: int, block_bytes: int
) -> DeviceBlocks | None:
    """Check memory on devices, whose *first* part is given, for copies; None for host memory.

    Raises UsageError.
    """
    try:
        blocks = _on_devices(value, first, devices, count)
    except UsageError as error:
        raise UsageError(f"{argument} {error}") from error
    if blocks is None:
        return None
    lengths = np.array([sum(part.payload_bytes for part in parts) for parts in blocks], np.int64)
    check_sizes(argument, lengths, block_bytes)
    return DeviceBlocks(devices, blocks)


def _on_devices(value: object, first: object, devices: Devices, count: int) -> list[list[DevicePart]] | None:
    """Return the parts of each block; None if the first part is not on a device."""
    whole = devices.look(first)
    if whole is None:
        return None
    if not isinstance(value, (list, tuple)):
        if len(whole.shape) < 2:  # noqa: PLR2004 (blocks times bytes)
            raise UsageError(
                "is one flat piece of memory: pass a list of blocks, or a tensor of shape (blocks, bytes per "
                "block)"
            )
        check_count(whole.shape[0], count)
        return [[row] for row in devices.rows(whole)]
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
