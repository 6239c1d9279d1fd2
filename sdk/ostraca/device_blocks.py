"""Blocks in the memory of devices, by way of ``ostraca.devices``: what ``ostraca.parts`` does in host memory.

A block is a tensor or a list of them, as in host memory, and all blocks of one call are on devices or none.

**Tags.** A put from host memory makes its tags from the caller's bytes, before they are copied. The bytes of
a device can't be hashed where they are, so here a tag is made from the copy that landed in the slot, once it
is known to have ended. A copy that goes wrong without an error is therefore not noticed; everything behind
the slot is. A get verifies the slot, as always, and copies only what is good.

**Ends.** Copies go on beside the shell's thread. A batch waits for them before it lets go of a slot, whether
it ends well, by its deadline or by ``cancel``: after an operation's end nothing is written to a device, and
no slot is reused that a copy still reads. The copies under way at the deadline are what it may overrun by.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from ostraca.parts import as_blocks, check_count, checked_size
from ostraca.verify import checked_until, no_verdicts, tags_made, verdicts_of
from ostraca_fabric.errors import TransportError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from ostraca.crew import Crew
    from ostraca.devices import DevicePart, Devices


class CallerBlocks(Protocol):
    """Blocks of caller memory, checked: ``ostraca.parts.Blocks`` or ``DeviceBlocks``."""

    @property
    def lengths(self) -> NDArray[np.uint32]:
        """Bytes of each block."""

    def prepare(self, memory: NDArray[np.uint8]) -> None:
        """Get ready to copy from and to *memory*. Raises UsageError."""

    def gather(
        self,
        memory: NDArray[np.uint8],
        offsets: NDArray[np.int64],
        seeds: NDArray[np.uint64],
        *,
        first: int,
        crew: Crew,
    ) -> NDArray[np.uint8]:
        """Copy blocks from *first* on into *memory*; return their tags. All copies have ended then."""

    def scatter(
        self,
        memory: NDArray[np.uint8],
        offsets: NDArray[np.int64],
        seeds: NDArray[np.uint64],
        tags: NDArray[np.uint8],
        *,
        which: NDArray[np.int64],
        until_s: float,
        crew: Crew,
    ) -> NDArray[np.uint8]:
        """Verify blocks that lie in *memory*, and copy those that are good; ``wait`` before it is used.

        Returns a ``Verdict`` for each.
        """

    def wait(self) -> bool:
        """Return when all copies have ended; False when the slots they used must be given up."""


class DeviceBlocks:
    """Blocks of one operation, each of some parts. Made in the caller's thread, used in the shell's."""

    def __init__(self, devices: Devices, blocks: list[list[DevicePart]]) -> None:
        """Come after everything that the caller's thread has begun on these devices."""
        self._devices = devices
        self._blocks = blocks
        self.lengths = np.array([sum(part.payload_bytes for part in block) for block in blocks], np.uint32)
        self._copies = devices.copies({part.device for block in blocks for part in block})

    def prepare(self, memory: NDArray[np.uint8]) -> None:
        """Pin the arena, if no operation did before. Raises UsageError."""
        self._devices.pin(memory)

    def gather(
        self,
        memory: NDArray[np.uint8],
        offsets: NDArray[np.int64],
        seeds: NDArray[np.uint64],
        *,
        first: int,
        crew: Crew,
    ) -> NDArray[np.uint8]:
        """As ``Blocks.gather``, with tags of what landed. Raises TransportError when a copy failed."""
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
            raise TransportError(FAILED)
        return tags_made(memory, offsets, lengths, seeds, crew=crew)

    def scatter(
        self,
        memory: NDArray[np.uint8],
        offsets: NDArray[np.int64],
        seeds: NDArray[np.uint64],
        tags: NDArray[np.uint8],
        *,
        which: NDArray[np.int64],
        until_s: float,
        crew: Crew,
    ) -> NDArray[np.uint8]:
        """As ``Blocks.scatter``, but copies are only begun, all of them by this thread.

        Raises TransportError.
        """
        lengths, verdicts = self.lengths[which], no_verdicts(len(which))
        for some, good in checked_until(memory, offsets, lengths, seeds, tags, until_s=until_s, crew=crew):
            for row in (some.start + np.flatnonzero(good)).tolist():
                for part, host in self._slots(int(which[row]), memory, int(offsets[row])):
                    self._copies.to_device(part, host)
            verdicts[some] = verdicts_of(good)
        return verdicts

    def wait(self) -> bool:
        """Return when all copies have ended; False when where one stands is not known."""
        return self._copies.wait()

    def _slots(
        self, block: int, memory: NDArray[np.uint8], offset: int
    ) -> Iterator[tuple[DevicePart, NDArray[np.uint8]]]:
        """Yield the parts of a block, and what of its slot is theirs."""
        if not 0 <= offset <= memory.nbytes - int(self.lengths[block]):
            raise ValueError(f"block {block} would reach outside of memory")
        for part in self._blocks[block]:
            yield part, memory[offset : offset + part.payload_bytes]
            offset += part.payload_bytes


FAILED = (
    "copying between the arena and a device failed, and where it stands is not known: its part of the arena "
    "is given up; connect again once the device works"
)


def caller_blocks(
    value: object, devices: Devices, *, what: str, count: int, block_bytes: int, is_written: bool
) -> CallerBlocks:
    """Check caller memory, wherever it is, and make it ready for copying. Raises UsageError."""
    try:
        blocks = _on_devices(value, devices, count)
    except UsageError as error:
        raise UsageError(f"{what} {error}") from error
    if blocks is None:
        return as_blocks(value, what=what, count=count, block_bytes=block_bytes, is_written=is_written)
    for block, parts in enumerate(blocks):
        checked_size(what, block, sum(part.payload_bytes for part in parts), block_bytes)
    return DeviceBlocks(devices, blocks)


def _on_devices(value: object, devices: Devices, count: int) -> list[list[DevicePart]] | None:
    """Return the parts of each block when the first of all is on a device; None when it is not."""
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
            "call in one kind of memory"
        )
    return found
