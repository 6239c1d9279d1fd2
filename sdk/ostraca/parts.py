"""Blocks as callers have them: ordered lists of strided parts over memory that the SDK does not own.

Engines keep KV layer by layer, keys apart from values, so one block is rarely one piece of memory. A *part*
is anything with the buffer protocol, a numpy array or a torch tensor; it may be strided, as a slice of a pool
is. A *block* is one part or a list of parts, whose bytes in order (each part in C order) are the block's
bytes. Blocks in host memory are here, those of devices in ``ostraca.device_blocks``.

Callers pass either a list of blocks, or one array or tensor whose first axis counts the blocks. Everything
that can be wrong with them is found here, once, before anything is sent; a list is gone through in Python
once, one array not at all. What comes of it is a table of parts (``ostraca.memory``), and copying all blocks
of a wave is one call into C.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ostraca.memory import PART, Axes, Layout, axes_of, check_inside, layout_of, sight
from ostraca.verify import VERDICT_OF_BAD, no_verdicts
from ostraca_fabric.errors import UsageError
from ostraca_fabric.native import at, library
from ostraca_fabric.tags import TAG_BYTES

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from numpy.typing import NDArray

    from ostraca.crew import Crew

_READ_ONLY = (
    "is read-only, and blocks are to be written there: pass writable memory, such as a bytearray or a copy"
)


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Blocks of caller memory, checked. Block b has the parts ``first_part[b]`` to ``first_part[b + 1]``."""

    parts: NDArray[np.void]
    """``ostraca.memory.PART``: addresses that are good as long as this object lives."""

    first_part: NDArray[np.int64]
    lengths: NDArray[np.uint32]
    is_written: bool
    """Whether the memory was checked for being written to."""

    owners: tuple[object, ...]
    """What keeps the memory there."""

    def prepare(self, memory: NDArray[np.uint8]) -> None:
        """Host memory needs nothing."""

    def wait(self) -> bool:
        """Copies of host memory have ended when they return."""
        return True

    def gather(
        self,
        memory: NDArray[np.uint8],
        offsets: NDArray[np.int64],
        seeds: NDArray[np.uint64],
        *,
        first: int,
        crew: Crew,
    ) -> NDArray[np.uint8]:
        """Copy blocks from *first* on into *memory*, a flat array, one to each offset; return their tags.

        *offsets* and *seeds* have shape (n,), tags (n, 16). Tags are made from the caller's bytes, not from
        the copies. Releases the GIL. Raises ValueError when a block would reach outside of *memory*.
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

        crew.share(lengths, gather)
        return tags

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
        """Verify blocks that lie in *memory*, and copy those that are good to where the caller wants them.

        *which* says which blocks they are; all columns have shape (n,), *tags* (n, 16). No block is begun at
        *until_s* on the clock of ``time.monotonic`` or later. Returns a ``Verdict`` for each; where it is not
        GOOD, the caller's memory is untouched. Releases the GIL. Raises ValueError when a block would reach
        outside of *memory*.
        """
        count = len(which)
        assert self.is_written, "this memory was not checked for being written to"
        assert len(offsets) == len(seeds) == count, "a block has one offset and one seed"
        assert tags.shape == (count, TAG_BYTES), f"tags of shape {tags.shape} for {count} blocks"
        which = np.ascontiguousarray(which, np.int64)
        if count:
            assert 0 <= which.min() <= which.max() < len(self.lengths), "blocks that were checked"
        offsets, seeds = np.ascontiguousarray(offsets, np.int64), np.ascontiguousarray(seeds, np.uint64)
        lengths, tags = self.lengths[which], np.ascontiguousarray(tags)
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
                at(which[share]),
                until_s,
                at(verdicts[share]),
                share.stop - share.start,
            )
            if handled < 0:
                raise ValueError("a block would reach outside of memory")
            verdicts[share.start : share.start + handled] += VERDICT_OF_BAD

        crew.share(lengths, scatter)
        return verdicts


def as_blocks(value: object, *, what: str, count: int, block_bytes: int, is_written: bool) -> Blocks:
    """Check caller memory and make it ready for copying.

    *what* names the argument in messages, *count* is how many blocks it must have, *block_bytes* the largest
    one allowed. With *is_written*, read-only memory is refused. Raises UsageError that says what to pass
    instead.

    That two destinations overlap *each other* is not looked for: what such memory holds afterwards is not
    defined.
    """
    found = (
        _listed(value, what, count, is_written=is_written)
        if isinstance(value, (list, tuple))
        else _rows(value, what, count, is_written=is_written)
    )
    lengths = _lengths(found)
    if count:
        worst = int(lengths.argmax())
        checked_size(what, worst, int(lengths[worst]), block_bytes)
    parts, first_part = _table(found)
    return Blocks(parts, first_part, lengths.astype(np.uint32), is_written, tuple(found.owners))


def _lengths(found: _Found) -> NDArray[np.int64]:
    """Return the bytes of each block."""
    if len(found.layouts) == 1 and len(found.addresses) == len(found.ends):
        return np.full(len(found.ends), found.layouts[0].payload_bytes, np.int64)
    payload_bytes = np.array([layout.payload_bytes for layout in found.layouts], np.int64)
    first_piece = np.concatenate([np.zeros(1, np.int64), found.ends[:-1]])
    return np.add.reduceat(payload_bytes[found.kinds], first_piece) if len(found.ends) else found.ends


def checked_size(what: str, block: int, size_bytes: int, block_bytes: int) -> None:
    """Refuse a block that is larger than the volume's. Raises UsageError."""
    if size_bytes > block_bytes:
        raise UsageError(
            f"{what}[{block}] has {size_bytes} bytes, and blocks of this volume have at most {block_bytes}: "
            "split it, or make a volume with a larger block_bytes"
        )


class _Found(NamedTuple):
    """Pieces of memory in the order of the caller's blocks."""

    addresses: NDArray[np.uint64]
    kinds: NDArray[np.int64]
    """Which of ``layouts`` each piece has."""

    layouts: list[Layout]
    ends: NDArray[np.int64]
    """For each block, how many pieces it and all before it have: at least one each."""

    owners: list[object]


def _table(found: _Found) -> tuple[NDArray[np.void], NDArray[np.int64]]:
    """Lay the parts of all pieces end to end; return them, and ``Blocks.first_part``."""
    if len(found.layouts) == 1 and len(found.layouts[0].parts) == 1:  # so are rows of an array, mostly
        parts = np.repeat(found.layouts[0].parts, len(found.addresses))
        parts["address"] += found.addresses
        return parts, np.concatenate([np.zeros(1, np.int64), found.ends])
    counts = np.array([len(layout.parts) for layout in found.layouts], np.int64)
    templates = np.concatenate([np.empty(0, PART), *(layout.parts for layout in found.layouts)])
    parts_of_piece = counts[found.kinds]
    end_of_piece = np.cumsum(parts_of_piece)
    # A piece's parts are those of its layout, one after another: count up from the layout's first.
    shift = (np.cumsum(counts) - counts)[found.kinds] - (end_of_piece - parts_of_piece)
    parts = templates[np.repeat(shift, parts_of_piece) + np.arange(parts_of_piece.sum())]
    parts["address"] += np.repeat(found.addresses, parts_of_piece)
    return parts, np.concatenate([np.zeros(1, np.int64), end_of_piece[found.ends - 1]])


def _rows(value: object, what: str, count: int, *, is_written: bool) -> _Found:
    """See one array or tensor whose first axis counts the blocks."""
    try:
        return _found_rows(value, count, is_written=is_written)
    except UsageError as error:
        raise UsageError(f"{what} {error}") from error


def _found_rows(value: object, count: int, *, is_written: bool) -> _Found:
    seen = sight(value)
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
        return _Found(np.empty(0, np.uint64), np.empty(0, np.int64), [], np.empty(0, np.int64), [])
    axes = axes_of(shaped)
    if is_written and not is_writable:
        raise UsageError(_READ_ONLY)
    check_inside(address, axes.extent_bytes, end)
    layout = layout_of(Axes(axes.shape[1:], axes.strides[1:], axes.item_bytes))
    addresses = np.uint64(address) + np.arange(count, dtype=np.uint64) * np.uint64(axes.strides[0])
    return _Found(addresses, np.zeros(count, np.int64), [layout], np.arange(1, count + 1), [owner])


def _listed(value: Sequence[object], what: str, count: int, *, is_written: bool) -> _Found:
    """See a list of blocks, each one part or a list of parts."""
    listing = _Listing(is_written=is_written)
    try:
        check_count(len(value), count)
        return listing.found(value)
    except UsageError as error:
        raise UsageError(f"{what}{listing.where} {error}") from error


class _Listing:
    """What a pass over a caller's list finds. Little is done for each part, for there may be many."""

    def __init__(self, *, is_written: bool) -> None:
        self._is_written = is_written
        self._place: tuple[int, ...] = ()
        self._addresses: list[int] = []
        self._kinds: list[int] = []
        self._owners: list[object] = []
        self._layouts: list[Layout] = []
        self._kind_of: dict[Hashable, int] = {}

    @property
    def where(self) -> str:
        """The place in the list that was looked at last."""
        return "".join(f"[{position}]" for position in self._place)

    def found(self, blocks: Sequence[object]) -> _Found:
        """Look at all of them. Raises UsageError, about what lies at ``where``."""
        ends = []
        for position, block in enumerate(blocks):
            if isinstance(block, (list, tuple)):
                self._add_list(block, position)
            else:
                self._place = (position,)
                self._add(block)
            ends.append(len(self._kinds))
        return _Found(
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
        seen = sight(part)
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


def check_count(found: int, count: int) -> None:
    """Refuse what has not one block for each of the chain. Raises UsageError."""
    if found != count:
        raise UsageError(f"has {found} blocks and the chain {count}: pass one block per engine hash")
