"""Blocks in host memory: ordered lists of strided parts, owned by the caller.

Engines store KV by layer, with keys apart from values, so a block is rarely contiguous. A *part* is an object
with the buffer protocol, a numpy array or a torch tensor; it may be strided, like a slice of a pool. A
*block* is a part or a list of parts. The block's bytes are the bytes of the parts in order, each part in C
order. ``ostraca._memory.device_blocks`` holds blocks in device memory.

Callers pass a list of blocks, or an array or tensor whose first axis counts the blocks. All checks run here,
once, before any message is sent. Python walks a list once, and an array not at all. The result is a table of
parts (``ostraca._memory.buffers``), and a single call into C copies all blocks of a wave.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from ostraca._memory.buffers import (
    PART,
    Axes,
    MemoryLayout,
    axes_of,
    check_count,
    check_inside,
    check_size,
    layout_of,
    view_buffer,
)
from ostraca._memory.copy_pool import VERDICT_OF_BAD, no_verdicts
from ostraca._memory.device_blocks import blocks_on_devices
from ostraca_fabric.errors import UsageError
from ostraca_fabric.native import at, library
from ostraca_fabric.tables.digests import TAG_BYTES

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from numpy.typing import NDArray

    from ostraca._memory.copy_pool import CopyPool
    from ostraca._memory.device_port import Devices

_READ_ONLY = (
    "is read-only, and blocks are to be written there: pass writable memory, such as a bytearray or a copy"
)


_HOST_TYPES = (np.ndarray, bytearray, memoryview, bytes)
"""Types never on a device."""


class CallerBlocks(Protocol):
    """Checked blocks of caller memory.

    Either ``HostBlocks`` or ``ostraca._memory.device_blocks.DeviceBlocks``.
    """

    @property
    def lengths(self) -> NDArray[np.uint32]:
        """Bytes of each block."""

    def prepare(self, memory: NDArray[np.uint8]) -> None:
        """Prepare for copies from and to *memory*. Raises UsageError."""

    def gather(
        self,
        memory: NDArray[np.uint8],
        offsets: NDArray[np.int64],
        seeds: NDArray[np.uint64],
        *,
        first: int,
        copy_pool: CopyPool,
    ) -> NDArray[np.uint8]:
        """Copy blocks from *first* on into *memory*; return their tags.

        All copies have ended on return.
        """

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
        """Verify blocks in *memory*, and copy the good blocks to caller memory.

        Returns a ``BlockVerdict`` for each. Call ``wait`` before any use of the copies.
        """

    def wait(self) -> bool:
        """Wait for all copies; False if their slots must be given up."""


@dataclass(frozen=True, slots=True, eq=False)
class HostBlocks:
    """Checked blocks of caller memory.

    Block b has the parts ``first_part[b]`` to ``first_part[b + 1]``.
    """

    parts: NDArray[np.void]
    """Table of ``ostraca._memory.buffers.PART``; addresses are valid for the life of this object."""

    first_part: NDArray[np.int64]
    lengths: NDArray[np.uint32]
    is_written: bool
    """Whether the memory was checked for writing."""

    owners: tuple[object, ...]
    """Objects that keep the memory alive."""

    def prepare(self, memory: NDArray[np.uint8]) -> None:
        """Do nothing: host memory needs no preparation."""

    def wait(self) -> bool:
        """Return True: copies of host memory end before their call returns."""
        return True

    def gather(
        self,
        memory: NDArray[np.uint8],
        offsets: NDArray[np.int64],
        seeds: NDArray[np.uint64],
        *,
        first: int,
        copy_pool: CopyPool,
    ) -> NDArray[np.uint8]:
        """Copy blocks from *first* on into *memory*, and return their tags.

        *memory* is a flat array; each block goes to its offset. *offsets* and *seeds* have shape (n,), tags
        (n, 16). Tags are computed from the caller's bytes, not from the copies. Releases the GIL. Raises
        ValueError for a block beyond *memory*.
        """
        count = len(offsets)
        assert 0 <= first <= first + count <= len(self.lengths), "as many blocks as were checked"
        assert len(seeds) == count, "a block has one seed"
        offsets, seeds = np.ascontiguousarray(offsets, np.int64), np.ascontiguousarray(seeds, np.uint64)
        lengths, first_part = self.lengths[first : first + count], self.first_part[first:]
        tags = np.empty((count, TAG_BYTES), np.uint8)

        def gather(share: slice) -> None:
            blocks = share.stop - share.start
            gathered = library.ostraca_gather(
                at(memory),
                memory.nbytes,
                at(offsets[share]),
                at(lengths[share]),
                at(seeds[share]),
                at(self.parts),
                at(first_part[share.start :]),
                at(tags[share]),
                blocks,
            )
            if gathered < 0:
                raise MemoryError("no memory to hash blocks in")
            if gathered < blocks:
                raise ValueError(f"block {first + share.start + gathered} would reach outside of memory")

        copy_pool.share(lengths, gather)
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
    ) -> NDArray[np.uint8]:
        """Verify blocks in *memory*, and copy the good blocks to caller memory.

        *positions* selects the blocks. All columns have shape (n,), *tags* (n, 16). No block is begun at or
        after *until_s* on the clock of ``time.monotonic``. Returns a ``BlockVerdict`` for each block;
        without GOOD, the caller's memory is unchanged. Releases the GIL. Raises ValueError for a block beyond
        *memory*.
        """
        count = len(positions)
        assert self.is_written, "this memory was not checked for being written to"
        assert len(offsets) == len(seeds) == count, "a block has one offset and one seed"
        assert tags.shape == (count, TAG_BYTES), f"tags of shape {tags.shape} for {count} blocks"
        positions = np.ascontiguousarray(positions, np.int64)
        if count:
            assert 0 <= positions.min() <= positions.max() < len(self.lengths), "blocks that were checked"
        offsets, seeds = np.ascontiguousarray(offsets, np.int64), np.ascontiguousarray(seeds, np.uint64)
        lengths, tags = self.lengths[positions], np.ascontiguousarray(tags)
        verdicts = no_verdicts(count)

        def scatter(share: slice) -> None:
            handled = library.ostraca_scatter(
                at(memory),
                memory.nbytes,
                at(offsets[share]),
                at(lengths[share]),
                at(seeds[share]),
                at(tags[share]),
                at(self.parts),
                at(self.first_part),
                at(positions[share]),
                until_s,
                at(verdicts[share]),
                share.stop - share.start,
            )
            if handled < 0:
                raise ValueError("a block would reach outside of memory")
            verdicts[share.start : share.start + handled] += VERDICT_OF_BAD

        copy_pool.share(lengths, scatter)
        return verdicts


def caller_blocks(
    value: object, devices: Devices, *, argument: str, count: int, block_bytes: int, is_written: bool
) -> CallerBlocks:
    """Check caller memory of any kind, and prepare it for copies.

    Raises UsageError.
    """
    if not isinstance(_first_part(value), _HOST_TYPES):
        on_devices = blocks_on_devices(
            value, devices, argument=argument, count=count, block_bytes=block_bytes
        )
        if on_devices is not None:
            return on_devices
    return as_blocks(value, argument=argument, count=count, block_bytes=block_bytes, is_written=is_written)


def _first_part(value: object) -> object:
    for _ in range(2):  # a list of blocks, a list of parts
        if isinstance(value, (list, tuple)) and value:
            value = value[0]
    return value


def as_blocks(value: object, *, argument: str, count: int, block_bytes: int, is_written: bool) -> HostBlocks:
    """Check caller memory, and prepare it for copies.

    Messages name the argument *argument*; *count* is the required number of blocks, *block_bytes* the largest
    size. With *is_written*, read-only memory is refused. Raises UsageError with a remedy.

    Overlapping destinations are not detected: the content of such memory is undefined afterwards.
    """
    found = (
        _inspect_list(value, argument, count, is_written=is_written)
        if isinstance(value, (list, tuple))
        else _inspect_array(value, argument, count, is_written=is_written)
    )
    lengths = _lengths(found)
    if count:
        worst = int(lengths.argmax())
        check_size(argument, worst, int(lengths[worst]), block_bytes)
    parts, first_part = _table(found)
    return HostBlocks(parts, first_part, lengths.astype(np.uint32), is_written, tuple(found.owners))


def _lengths(found: _Pieces) -> NDArray[np.int64]:
    """Return the bytes of each block."""
    if len(found.layouts) == 1 and len(found.addresses) == len(found.ends):
        return np.full(len(found.ends), found.layouts[0].payload_bytes, np.int64)
    payload_bytes = np.array([layout.payload_bytes for layout in found.layouts], np.int64)
    first_piece = np.concatenate([np.zeros(1, np.int64), found.ends[:-1]])
    return np.add.reduceat(payload_bytes[found.kinds], first_piece) if len(found.ends) else found.ends


class _Pieces(NamedTuple):
    """Pieces of memory, in the order of the caller's blocks."""

    addresses: NDArray[np.uint64]
    kinds: NDArray[np.int64]
    """Index into ``layouts`` for each piece."""

    layouts: list[MemoryLayout]
    ends: NDArray[np.int64]
    """For each block, the number of pieces up to and including it: at least one per block."""

    owners: list[object]


def _table(found: _Pieces) -> tuple[NDArray[np.void], NDArray[np.int64]]:
    """Lay the parts of all pieces end to end.

    Returns the parts and ``HostBlocks.first_part``.
    """
    if len(found.layouts) == 1 and len(found.layouts[0].parts) == 1:  # true of most arrays
        parts = np.repeat(found.layouts[0].parts, len(found.addresses))
        parts["address"] += found.addresses
        return parts, np.concatenate([np.zeros(1, np.int64), found.ends])
    counts = np.array([len(layout.parts) for layout in found.layouts], np.int64)
    templates = np.concatenate([np.empty(0, PART), *(layout.parts for layout in found.layouts)])
    parts_of_piece = counts[found.kinds]
    end_of_piece = np.cumsum(parts_of_piece)
    # A piece has the parts of its layout in order: count up from the layout's first part.
    shift = (np.cumsum(counts) - counts)[found.kinds] - (end_of_piece - parts_of_piece)
    parts = templates[np.repeat(shift, parts_of_piece) + np.arange(parts_of_piece.sum())]
    parts["address"] += np.repeat(found.addresses, parts_of_piece)
    return parts, np.concatenate([np.zeros(1, np.int64), end_of_piece[found.ends - 1]])


def _inspect_array(value: object, argument: str, count: int, *, is_written: bool) -> _Pieces:
    """Inspect an array or tensor whose first axis counts the blocks."""
    try:
        return _cut_inspect_array(value, count, is_written=is_written)
    except UsageError as error:
        raise UsageError(f"{argument} {error}") from error


def _cut_inspect_array(value: object, count: int, *, is_written: bool) -> _Pieces:
    seen = view_buffer(value)
    if seen is None:
        raise UsageError(
            f"is a {type(value).__name__}: pass a list with one block per engine hash, or one array or "
            "tensor whose first axis counts the blocks"
        )
    owner, address, end, is_writable, shaped = seen
    if len(shaped[0]) < 2:  # noqa: PLR2004 (blocks times bytes)
        raise UsageError(
            "is one flat piece of memory: pass a list of blocks, or an array of shape (blocks, bytes per "
            "block)"
        )
    check_count(shaped[0][0], count)
    if not count:
        return _Pieces(np.empty(0, np.uint64), np.empty(0, np.int64), [], np.empty(0, np.int64), [])
    axes = axes_of(shaped)
    if is_written and not is_writable:
        raise UsageError(_READ_ONLY)
    check_inside(address, axes.extent_bytes, end)
    layout = layout_of(Axes(axes.shape[1:], axes.strides[1:], axes.item_bytes))
    addresses = np.uint64(address) + np.arange(count, dtype=np.uint64) * np.uint64(axes.strides[0])
    return _Pieces(addresses, np.zeros(count, np.int64), [layout], np.arange(1, count + 1), [owner])


def _inspect_list(value: Sequence[object], argument: str, count: int, *, is_written: bool) -> _Pieces:
    """Inspect a list of blocks, each a part or a list of parts."""
    listing = _Listing(is_written=is_written)
    try:
        check_count(len(value), count)
        return listing.inspect(value)
    except UsageError as error:
        raise UsageError(f"{argument}{listing.place_text} {error}") from error


class _Listing:
    """Result of a pass over a caller's list, with little work per part."""

    def __init__(self, *, is_written: bool) -> None:
        self._is_written = is_written
        self._place: tuple[int, ...] = ()
        self._addresses: list[int] = []
        self._kinds: list[int] = []
        self._owners: list[object] = []
        self._layouts: list[MemoryLayout] = []
        self._kind_of: dict[Hashable, int] = {}

    @property
    def place_text(self) -> str:
        """Place in the list of the last inspected item."""
        return "".join(f"[{position}]" for position in self._place)

    def inspect(self, blocks: Sequence[object]) -> _Pieces:
        """Inspect all blocks. Raises UsageError about the item at ``place_text``."""
        ends = []
        for position, block in enumerate(blocks):
            if isinstance(block, (list, tuple)):
                self._add_list(block, position)
            else:
                self._place = (position,)
                self._add(block)
            ends.append(len(self._kinds))
        return _Pieces(
            np.array(self._addresses, np.uint64),
            np.array(self._kinds, np.int64),
            self._layouts,
            np.array(ends, np.int64),
            self._owners,
        )

    def _add_list(self, parts: Sequence[object], position: int) -> None:
        if not parts:
            self._place = (position,)
            raise UsageError("is empty: a block has at least one part")
        for place, part in enumerate(parts):
            self._place = position, place
            self._add(part)

    def _add(self, part: object) -> None:
        seen = view_buffer(part)
        if seen is None:
            raise UsageError(
                f"is a {type(part).__name__}: a block is an array, a tensor, anything with the buffer "
                "protocol, or a list of these"
            )
        owner, address, end, is_writable, shaped = seen
        kind = self._kind_of.get(shaped)
        if kind is None:
            layout = layout_of(axes_of(shaped))
            kind = self._kind_of[shaped] = len(self._layouts)
            self._layouts.append(layout)
        if self._is_written and not is_writable:
            raise UsageError(_READ_ONLY)
        if end is not None:
            check_inside(address, self._layouts[kind].extent_bytes, end)
        self._addresses.append(address)
        self._kinds.append(kind)
        self._owners.append(owner)
