"""Blocks in host memory: ordered lists of strided parts, owned by the caller.

Engines store KV by layer, with keys apart from values, so a block is rarely contiguous. A *part* is an object
with the buffer protocol, a numpy array or a torch tensor; it may be strided, like a slice of a pool. A
*block* is a part or a list of parts. The block's bytes are the bytes of the parts in order, each part in C
order. ``ostraca._memory.device_blocks`` holds blocks in device memory.

Callers pass a list of blocks, or an array or tensor whose first axis counts the blocks. All checks run here,
once, before any message is sent. Python walks a list once, and an array not at all. The result is a table of
parts: an address, and runs of contiguous bytes. A single call into C copies all blocks of a wave. Shapes and
strides come from numpy or torch, so parts never reach outside of the memory. This module never imports torch:
a tensor implies a caller's import.

Messages of errors raised by checks of a part begin with a verb; the argument's name is put in front.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ostraca._memory.copy_pool import CopyPool, compute_tags
from ostraca._memory.device_blocks import DeviceBlocks, Devices, blocks_on_devices
from ostraca._protocol.specs import check_count, check_sizes
from ostraca_fabric.errors import UsageError
from ostraca_fabric.native import at
from ostraca_fabric.runtime.process_memory import ProcessBlocks
from ostraca_fabric.tables.digests import TAG_BYTES

PART = np.dtype(
    [("address", np.uint64), ("run_bytes", np.uint64), ("runs", np.uint64), ("stride_bytes", np.int64)]
)
"""``struct part`` of ``native/parts.c``: runs of bytes, *stride_bytes* from one to the next."""


Shaped = tuple[tuple[int, ...], tuple[int, ...], Any]
"""Shape, strides and data type from numpy or torch: numpy's strides are in bytes, torch's in items."""

BufferView = tuple[object, int, int | None, bool, Shaped]
"""View of some memory: owner, address, end, writable flag, and ``Shaped``. The owner keeps the memory alive,
and a buffer from being resized. The end is None if all items certainly lie in the memory. A plain tuple,
because each part of a list needs one.
"""


class Axes(NamedTuple):
    """Positions of items in memory, relative to the first item."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In bytes."""

    item_bytes: int

    @property
    def extent_bytes(self) -> int:
        """Bytes from the start of the first item to the end of the last item."""
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return last + self.item_bytes


class MemoryLayout(NamedTuple):
    """Parts of memory with equally placed items."""

    parts: NDArray[np.void]
    """Addresses are relative to the first item."""

    payload_bytes: int
    """Bytes of all items."""

    extent_bytes: int
    """Bytes from the start of the first item to the end of the last item."""


def view_buffer(value: object) -> BufferView | None:
    """Inspect an array, a tensor or a buffer, without a copy.

    Returns None for any other value. Raises UsageError if C can't read the memory.
    """
    if isinstance(value, np.ndarray):
        return _of_array(value)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _of_tensor(value, torch)
    try:
        view = memoryview(value)  # type: ignore[arg-type]  # tests for the buffer protocol
    except TypeError:
        return None
    try:
        return _of_array(np.asarray(view))
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"has the format {view.format!r}, unreadable as numbers: cast the buffer to bytes"
        ) from error


def axes_of(shaped: Shaped) -> Axes:
    """Return the item positions in memory of this shape.

    Raises UsageError if blocks can't lie in such memory.
    """
    shape, strides, kind = shaped
    item_bytes = kind.itemsize
    if not isinstance(kind, np.dtype):
        strides = tuple(stride * item_bytes for stride in strides)
    elif kind.hasobject:
        raise UsageError(f"holds Python objects ({kind}): pass memory of numbers or bytes")
    if not item_bytes or 0 in shape:
        raise UsageError("has no bytes: a block has at least 1 byte")
    axes = Axes(tuple(shape), tuple(strides), item_bytes)
    _check_strides(axes)
    return axes


def layout_of(axes: Axes) -> MemoryLayout:
    """Return the parts of memory with these axes, in C order.

    The computation takes up to tens of microseconds, and engines cut all blocks alike: cache the result.
    """
    run_bytes, merged = _merge_axes(axes)
    runs, stride_bytes = merged.pop() if merged else (1, 0)
    parts = np.array([(0, run_bytes, runs, stride_bytes)], PART)
    for size, stride in reversed(merged):
        parts = _repeated(parts, size, stride)
    return MemoryLayout(parts, axes.item_bytes * prod(axes.shape), axes.extent_bytes)


def _repeated(parts: NDArray[np.void], count: int, stride_bytes: int) -> NDArray[np.void]:
    """Return *count* times the parts, each time *stride_bytes* further."""
    if count == 1:
        return parts
    rows = parts[np.newaxis].repeat(count, axis=0)
    addresses = rows["address"]
    addresses += (np.arange(count) * stride_bytes).astype(np.uint64)[:, np.newaxis]
    return rows.reshape(-1)


def check_inside(address: int, extent_bytes: int, end: int | None) -> None:
    """Check that a tensor's storage still contains all items.

    Torch lets storages shrink under their tensors. Raises UsageError.
    """
    if end is not None and not 0 < address <= end - extent_bytes:
        raise UsageError("is a tensor with a freed or shrunk storage: pass a tensor with its memory")


def _of_array(array: NDArray[Any]) -> BufferView:
    flags = array.flags
    is_writable = flags.writeable
    shaped = array.shape, array.strides, array.dtype
    if is_writable and flags.c_contiguous:
        # Numpy's own way to the address takes five times as long; it serves arrays without a buffer export.
        try:
            first: ctypes.c_char = ctypes.c_char.from_buffer(array)  # type: ignore[arg-type]  # it is a buffer
            return array, ctypes.addressof(first), None, is_writable, shaped
        except (TypeError, ValueError):
            pass
    return array, array.ctypes.data, None, is_writable, shaped


def _of_tensor(tensor: Any, torch: Any) -> BufferView:  # noqa: ANN401 (torch is never imported here)
    if tensor.is_cuda:
        raise UsageError(
            f"lies on {tensor.device}, and the first block in host memory: pass all blocks of a call in "
            "the same kind of memory"
        )
    if not tensor.is_cpu:
        raise UsageError(
            f"lies on {tensor.device}: copy the tensor to the CPU (tensor.cpu(), or a pinned buffer), as "
            "only CUDA devices are supported"
        )
    return plain_memory(tensor, torch)


def plain_memory(tensor: Any, torch: Any) -> BufferView:  # noqa: ANN401 (torch is never imported here)
    """Inspect a tensor's memory on any device.

    Raises UsageError for a tensor without plain bytes.
    """
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
        raise UsageError(
            "is a sparse, quantized or lazily conjugated tensor: materialise the tensor first (to_dense(), "
            "int_repr(), resolve_conj())"
        )
    try:
        # Types that numpy lacks (bfloat16, float8) pass, because no numpy array is made.
        storage = tensor.untyped_storage()
        end = storage.data_ptr() + storage.nbytes()
        return storage, tensor.data_ptr(), end, True, (tensor.shape, tensor.stride(), tensor.dtype)
    except (RuntimeError, NotImplementedError) as error:
        raise UsageError(f"is a tensor without plain memory: {error}") from error


def _check_strides(axes: Axes) -> None:
    """Refuse overlapping items and negative strides. Raises UsageError."""
    covered = axes.item_bytes
    for stride, size in sorted(zip(axes.strides, axes.shape, strict=True)):
        if size == 1:
            continue
        if stride < covered:
            raise UsageError(
                f"has strides {axes.strides} for shape {axes.shape}: strides must be positive and elements "
                "must not overlap; pass a contiguous copy, or a slice that does not repeat or reverse any"
            )
        covered = stride * (size - 1) + covered


def _merge_axes(axes: Axes) -> tuple[int, list[tuple[int, int]]]:
    """Merge axes into long runs; return a run's bytes, and the other axes.

    Each axis is a pair of size and stride.
    """
    run_bytes = axes.item_bytes
    merged: list[tuple[int, int]] = []  # the innermost first
    for size, stride in zip(reversed(axes.shape), reversed(axes.strides), strict=True):
        if size == 1:
            continue
        if not merged and stride == run_bytes:
            run_bytes *= size
        elif merged and stride == merged[-1][0] * merged[-1][1]:
            merged[-1] = merged[-1][0] * size, merged[-1][1]
        else:
            merged.append((size, stride))
    return run_bytes, merged[::-1]


READ_ONLY = (
    "is read-only, and blocks are to be written there: pass writable memory, such as a bytearray or a copy"
)


_LARGE_BYTES = 64 << 10
"""``NEIGHBOURS_BYTES`` of ``native/ostraca.h``: such blocks are copied from another process one by one."""

_HOST_TYPES = (np.ndarray, bytearray, memoryview, bytes)
"""Types never on a device."""


@dataclass(frozen=True, slots=True, eq=False)
class HostBlocks:
    """Checked blocks of caller memory.

    Block b has the parts ``first_part[b]`` to ``first_part[b + 1]``.
    """

    parts: NDArray[np.void]
    """Table of ``PART``; addresses are valid for the life of this object."""

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

    @property
    def is_contiguous(self) -> bool:
        """Whether each block is a single run of bytes."""
        return len(self.parts) == len(self.lengths) and bool((self.parts["runs"] == 1).all())

    def addresses(self, positions: NDArray[np.intp]) -> NDArray[np.uint64]:
        """Return the addresses of contiguous blocks. Shape (n,)."""
        return np.ascontiguousarray(self.parts["address"][positions])

    def tags(
        self, positions: NDArray[np.intp], seeds: NDArray[np.uint64], *, copy_pool: CopyPool
    ) -> NDArray[np.uint8]:
        """Return the tags of contiguous blocks, with a seed each. Shape (n, 16)."""
        places = self.addresses(positions).view(np.int64)
        return compute_tags(None, places, self.lengths[positions], seeds, copy_pool=copy_pool)

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
        (n, 16). Tags are computed from the caller's bytes, not from the copies. Raises ValueError for a
        block beyond *memory*.
        """
        count = len(offsets)
        assert 0 <= first <= first + count <= len(self.lengths), "as many blocks as were checked"
        assert len(seeds) == count, "a block has one seed"
        offsets, seeds = np.ascontiguousarray(offsets, np.int64), np.ascontiguousarray(seeds, np.uint64)
        lengths, first_part = self.lengths[first : first + count], self.first_part[first:]
        tags, calls = np.empty((count, TAG_BYTES), np.uint8), copy_pool.calls_for(lengths)

        def gather(share: slice) -> None:
            blocks = share.stop - share.start
            gathered = calls.ostraca_gather(
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
        source: ProcessBlocks | None = None,
    ) -> NDArray[np.uint8]:
        """Verify blocks in *memory*, and copy the good blocks to caller memory.

        *positions* selects the blocks. All columns have shape (n,), *tags* (n, 16). No block is begun at or
        after *until_s* on the clock of ``time.monotonic``. Returns a ``CheckState`` for each block;
        without GOOD, the caller's memory is unchanged. Raises ValueError for a block beyond *memory*.

        Blocks with a *source* are copied into *memory* from there first, large blocks all to the same place.
        A failed copy is noted in the source's errors, and blocks after it are PENDING.
        """
        count = len(positions)
        assert self.is_written, "this memory was not checked for being written to"
        assert len(offsets) == len(seeds) == count, "a block has one offset and one seed"
        assert tags.shape == (count, TAG_BYTES), f"tags of shape {tags.shape} for {count} blocks"
        positions = np.ascontiguousarray(positions, np.int64)
        if count:  # negative ones are large, and ``max`` takes thrice as long
            unsigned = positions.view(np.uint64)
            assert unsigned[unsigned.argmax()] < len(self.lengths), "blocks that were checked"
        offsets, seeds = np.ascontiguousarray(offsets, np.int64), np.ascontiguousarray(seeds, np.uint64)
        lengths, tags = self.lengths[positions], np.array(tags)  # C takes writable memory faster
        verdicts, calls = np.zeros(count, np.uint8), copy_pool.calls_for(lengths)

        def scatter(share: slice) -> None:
            places = offsets[share] if source is None else _places_of_copies(offsets[share], lengths[share])
            failed = calls.ostraca_scatter(
                at(memory),
                memory.nbytes,
                at(places),
                at(lengths[share]),
                at(seeds[share]),
                at(tags[share]),
                at(self.parts),
                at(self.first_part),
                at(positions[share]),
                until_s,
                0 if source is None else source.process,
                None if source is None else at(source.addresses[share]),
                at(verdicts[share]),
                share.stop - share.start,
            )
            if failed < 0:
                raise ValueError("a block would reach outside of memory")
            if failed and source is not None:
                source.errors.append(failed)

        copy_pool.share(lengths, scatter)
        return verdicts


def _places_of_copies(offsets: NDArray[np.int64], lengths: NDArray[np.uint32]) -> NDArray[np.int64]:
    """Return places for blocks on their way from another process: a single one if the blocks are large.

    Such a place stays in the processor's cache. Smaller blocks need their own: neighbours are copied at once.
    """
    largest = lengths.argmax()
    return np.full_like(offsets, offsets[largest]) if lengths[largest] >= _LARGE_BYTES else offsets


CallerBlocks = HostBlocks | DeviceBlocks


def caller_blocks(
    value: object, devices: Devices, *, argument: str, count: int, block_bytes: int, is_written: bool
) -> CallerBlocks:
    """Check caller memory of any kind, and prepare it for copies.

    Raises UsageError.
    """
    first = _first_part(value)
    if not isinstance(first, _HOST_TYPES):
        on_devices = blocks_on_devices(
            value, first, devices, argument=argument, count=count, block_bytes=block_bytes
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
    if not isinstance(value, (list, tuple)):
        try:
            parts, length, owner = _rows_of(value, count, is_written=is_written)
        except UsageError as error:
            raise UsageError(f"{argument} {error}") from error
        check_sizes(argument, np.array([length]), block_bytes)
        first_part, sizes = np.arange(count + 1) * (len(parts) // max(1, count)), np.empty(count, np.uint32)
        sizes.fill(length)
        return HostBlocks(parts, first_part, sizes, is_written, (owner,))
    listing = _Listing(is_written=is_written)
    try:
        found = listing.inspect(value, count)
    except UsageError as error:
        raise UsageError(f"{argument}{listing.place_text} {error}") from error
    lengths = _lengths(found)
    check_sizes(argument, lengths, block_bytes)
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
    if len(found.layouts) == 1:  # true of most lists
        template = found.layouts[0].parts
        parts = np.empty((len(found.addresses), len(template)), PART)
        parts[:] = template
        parts["address"] += found.addresses[:, None]
        return parts.reshape(-1), np.concatenate([np.zeros(1, np.int64), found.ends]) * len(template)
    counts = np.array([len(layout.parts) for layout in found.layouts], np.int64)
    templates = np.concatenate([np.empty(0, PART), *(layout.parts for layout in found.layouts)])
    parts_of_piece = counts[found.kinds]
    end_of_piece = np.cumsum(parts_of_piece)
    # A piece has the parts of its layout in order: count up from the layout's first part.
    shift = (np.cumsum(counts) - counts)[found.kinds] - (end_of_piece - parts_of_piece)
    parts = templates[np.repeat(shift, parts_of_piece) + np.arange(parts_of_piece.sum())]
    parts["address"] += np.repeat(found.addresses, parts_of_piece)
    return parts, np.concatenate([np.zeros(1, np.int64), end_of_piece[found.ends - 1]])


def _rows_of(value: object, count: int, *, is_written: bool) -> tuple[NDArray[np.void], int, object]:
    """Inspect an array or tensor whose first axis counts the blocks.

    Returns as many parts for each block, a block's bytes, and the owner of the memory.
    """
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
        return np.empty(0, PART), 0, owner
    axes = axes_of(shaped)
    if is_written and not is_writable:
        raise UsageError(READ_ONLY)
    if end is not None:
        check_inside(address, axes.extent_bytes, end)
    layout = layout_of(Axes(axes.shape[1:], axes.strides[1:], axes.item_bytes))
    parts = _repeated(layout.parts, count, axes.strides[0])
    addresses = parts["address"]
    addresses += np.uint64(address)
    return parts, layout.payload_bytes, owner


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

    def inspect(self, blocks: Sequence[object], count: int) -> _Pieces:
        """Inspect all *count* blocks, each a part or a list of parts.

        Raises UsageError about the item at ``place_text``.
        """
        check_count(len(blocks), count)
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
            raise UsageError(READ_ONLY)
        if end is not None:
            check_inside(address, self._layouts[kind].extent_bytes, end)
        self._addresses.append(address)
        self._kinds.append(kind)
        self._owners.append(owner)
