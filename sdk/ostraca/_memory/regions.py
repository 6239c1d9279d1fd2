"""Regions: caller memory, registered with a client, as source and destination of transfers.

A region is cut into rows of one size; a row holds a block. Where this process itself moves the bytes of a
connection (inline), blocks go from and to rows without the arena between. Over any other transport, rows are
copied from and to the arena, as all memory of callers, unless the caller consents to withheld rows.

**Rows that are no HITs.** A get verifies blocks in their rows. So the content of all other rows of the get is
undefined afterwards.

**Ends.** After an operation's end, no byte lands in its rows, and this process reads none there. An agent may
still copy rows of a put into its own memory, where changed bytes fail their tags. A row belongs to one get at
a time, or to any number of puts: the claims say so. A region ends when no operation claims a row, and no
agent reads there over NIXL.

**Withheld rows** are the exception, by consent of the caller: a drive or an agent may still write there after
the end of the get. Their claims end with the writes (``ostraca._memory.row_writes``).
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ostraca._memory.copy_pool import CopyPool, verdicts_in
from ostraca._memory.host_blocks import (
    PART,
    READ_ONLY,
    BufferView,
    HostBlocks,
    axes_of,
    layout_of,
    view_buffer,
)
from ostraca._memory.inline_arena import RequestRows
from ostraca._protocol.specs import check_count, check_sizes
from ostraca_fabric.errors import UsageError
from ostraca_fabric.model.extent import PAGE_BYTES, whole_pages
from ostraca_fabric.model.limits import whole
from ostraca_fabric.runtime.process_memory import ProcessBlocks
from ostraca_fabric.wire.codec import are_distinct

_WRITTEN, _WITHHELD = -1, -2

_AWAIT_WITHHELD = "wait for the end of that write, as with GetResult.withheld"


class RegionMemory:
    """Memory of a region, and the claims of operations to rows.

    Claims are for the driver's thread. Releases are for any thread: writes may end after the operation.
    """

    def __init__(
        self, given: object, row_bytes: int | None, *, may_withhold: bool = False, owner: object = None
    ) -> None:
        """Check the memory. Raises UsageError.

        *owner* is the table of the client whose driver makes all claims.
        """
        self.owner = owner
        self.array, self.is_writable, rows = _inspect(given)
        if row_bytes is None and not rows:
            raise UsageError("memory has a single axis: pass row_bytes, or an array of shape (rows, bytes)")
        size_bytes = self.array.nbytes
        self.row_bytes = (
            size_bytes // rows
            if row_bytes is None
            else whole("row_bytes", row_bytes, least=1, most=size_bytes)
        )
        if size_bytes % self.row_bytes:
            raise UsageError(f"memory of {size_bytes} bytes is not whole rows of {self.row_bytes} bytes")
        self.address = self.array.ctypes.data
        self.size_bytes = size_bytes
        self.rows = size_bytes // self.row_bytes
        self.may_withhold = may_withhold
        """Whether the caller consents to withheld rows."""

        self.takes_reads = may_withhold and not (self.address | self.row_bytes) % PAGE_BYTES
        """Whether reads of drives may land in rows: whole pages, by consent of the caller."""

        self._acts: list[Callable[[], object]] = []
        self._finish = weakref.finalize(self, _run_all, self._acts)
        self._finish.atexit = False
        self._changed = threading.Lock()
        self._users = np.zeros(self.rows, np.int32)
        """Number of puts that use a row, or ``_WRITTEN`` for a get, or ``_WITHHELD``."""

        self._claims = 0
        self._is_leaving = False

    @property
    def is_ended(self) -> bool:
        """Whether the region was unregistered."""
        return not self.array.nbytes

    @property
    def withheld(self) -> NDArray[np.intp]:
        """Numbers of the rows under late writes of ended gets."""
        return np.flatnonzero(self._users == _WITHHELD)

    def check_registered(self) -> None:
        """Raise UsageError after the region's end."""
        if self.is_ended:
            raise UsageError("the region is unregistered: register the memory again")

    def check_unused(self) -> None:
        """Raise UsageError while rows are claimed."""
        claims, withheld = self._claims, len(self.withheld)
        if withheld:
            raise UsageError(f"late bytes may still land in {withheld} rows of the region: {_AWAIT_WITHHELD}")
        if claims:
            raise UsageError(
                f"{claims} operations use rows of the region, or agents read them: wait for their ends"
            )

    def claim(self, numbers: NDArray[np.int64], *, is_written: bool) -> None:
        """Claim rows for an operation. Raises UsageError if another operation uses one of them."""
        self.check_registered()
        with self._changed:
            users = self._users[numbers]
            is_taken = users != 0 if is_written else users < 0
            if is_taken.any():
                user, cure = "another operation", "wait for that operation's end"
                if users[is_taken][0] == _WITHHELD:
                    user, cure = "a late write", _AWAIT_WITHHELD
                raise UsageError(f"row {numbers[is_taken][0]} of the region is in use by {user}: {cure}")
            if is_written:
                self._users[numbers] = _WRITTEN
            else:
                np.add.at(self._users, numbers, 1)
            self._claims += 1

    def withhold(self, numbers: NDArray[np.int64]) -> None:
        """Turn rows claimed by a get into withheld rows, with a separate claim."""
        self._users[numbers] = _WITHHELD
        self.hold()

    def release(self, numbers: NDArray[np.int64], *, is_written: bool) -> None:
        """Undo a claim; withheld rows were written."""
        with self._changed:
            if is_written:
                self._users[numbers] = 0
            else:
                np.subtract.at(self._users, numbers, 1)
        self.let_go()

    def hold(self) -> None:
        """Keep the memory until ``let_go``, as a claim without rows does."""
        with self._changed:
            self._claims += 1

    def let_go(self) -> None:
        """Undo a claim without rows."""
        with self._changed:
            self._claims -= 1
            is_over = self._is_leaving and not self._claims
        if is_over:
            self.end()

    def end(self) -> None:
        """Let go of the memory."""
        self.array = np.empty(0, np.uint8)
        self._finish()

    def when_ended(self, act: Callable[[], object]) -> None:
        """Call *act* at the end of the region, also of a dropped region, as ``RegionPlace`` specifies."""
        self._acts.append(act)

    def end_unused(self) -> None:
        """Let go of the memory as soon as no row is claimed. No claim may follow."""
        self._is_leaving = True
        self.hold()
        self.let_go()


class RegionTable:
    """Registered regions of a client. For the driver's thread. Dropped regions leave by themselves."""

    def __init__(self) -> None:
        self._live: weakref.WeakSet[RegionMemory] = weakref.WeakSet()

    def add(self, region: RegionMemory) -> None:
        """Add a region. Raises UsageError if a registered region shares memory with it."""
        for other in self._live:
            if other.address < region.address + region.size_bytes and (
                region.address < other.address + other.size_bytes
            ):
                raise UsageError(
                    f"memory overlaps a registered region of {other.rows} rows of {other.row_bytes} bytes: "
                    "register memory once, and share the region"
                )
        self._live.add(region)

    def remove(self, region: RegionMemory) -> None:
        """End a region. Raises UsageError while operations use its rows."""
        region.check_unused()
        region.end()
        self._live.discard(region)

    def end(self) -> None:
        """End all regions, or later with withheld rows. No operation may be under way."""
        for region in list(self._live):
            region.end_unused()


@dataclass(frozen=True, slots=True, eq=False)
class RegionRows:
    """Rows of a region, in the order of the blocks: ``into`` of a get, or ``source`` of a put."""

    memory: RegionMemory
    numbers: NDArray[np.int64]
    lengths: NDArray[np.uint32]
    """Bytes of each block: the first of its row."""

    def __len__(self) -> int:
        """Count the rows."""
        return len(self.numbers)

    def blocks(self, *, argument: str, count: int, block_bytes: int, is_written: bool) -> RegionBlocks:
        """Check the rows as memory of *count* blocks, each of at most *block_bytes*. Raises UsageError."""
        memory, numbers = self.memory, self.numbers
        memory.check_registered()
        try:
            self._check(count, is_written=is_written)
        except UsageError as error:
            raise UsageError(f"{argument} {error}") from error
        check_sizes(argument, self.lengths, block_bytes)
        parts = np.zeros(count, PART)
        parts["address"] = np.uint64(memory.address) + (numbers * memory.row_bytes).astype(np.uint64)
        parts["run_bytes"], parts["runs"] = self.lengths, 1
        # No owners: the region keeps the memory until its end, and not longer.
        return RegionBlocks(parts, np.arange(count + 1), self.lengths, is_written, (), memory, numbers)

    def _check(self, count: int, *, is_written: bool) -> None:
        check_count(len(self.numbers), count)
        if is_written and not self.memory.is_writable:
            raise UsageError(READ_ONLY)
        if is_written and not are_distinct(self.numbers):
            raise UsageError("names a row twice: each block of a get needs a row of its own")


class Region:
    """Registered memory: ``Client.register`` makes one. Unregister it, or use it as a context manager.

    Until then the memory stays in use, and can't be resized. Dropping the region and its rows, and the end of
    the client, unregister it too, but not before the end of the last late write.
    """

    def __init__(self, memory: RegionMemory, unregister: Callable[[RegionMemory], None]) -> None:
        """Present *memory* to users; for ``Client.register``."""
        self._memory = memory
        self._unregister = unregister

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self._memory.row_bytes

    @property
    def withheld(self) -> tuple[int, ...]:
        """Rows under late writes of drives and agents, after the end of a get (``GetResult.withheld``)."""
        return tuple(self._memory.withheld.tolist())

    def __len__(self) -> int:
        """Count the rows."""
        return self._memory.rows

    def __repr__(self) -> str:
        """Show rows and state."""
        state = ", unregistered" if self._memory.is_ended else ""
        return f"<Region: {len(self)} rows of {self.row_bytes} bytes{state}>"

    def rows(
        self,
        indices: Sequence[int] | NDArray[np.integer[Any]] | range,
        *,
        lengths: int | Sequence[int] | NDArray[np.integer[Any]] | None = None,
    ) -> RegionRows:
        """Name rows for the blocks of an operation, in order, by their numbers from 0 on.

        *lengths* is the bytes of each block, or a single number for all; without, a block fills its row. A
        shorter block lies at the begin of its row. Raises UsageError for numbers outside of the region.
        """
        numbers = _whole_numbers("indices", indices, least=0, most=len(self) - 1)
        if lengths is None:
            lengths = self.row_bytes
        if isinstance(lengths, int):
            lengths = [lengths] * len(numbers)
        sizes = _whole_numbers("lengths", lengths, least=1, most=self.row_bytes)
        if len(sizes) != len(numbers):
            raise UsageError(f"{len(sizes)} lengths for {len(numbers)} rows: pass a length for each row")
        return RegionRows(self._memory, numbers, sizes.astype(np.uint32))

    def unregister(self) -> None:
        """Let go of the memory: from here on the client neither reads nor writes it.

        Repeated calls do nothing. Raises UsageError while operations use rows, each of which ends by its
        deadline, and while rows are withheld.
        """
        if not self._memory.is_ended:
            self._unregister(self._memory)

    def __enter__(self) -> Self:
        """Return the region to the ``with`` block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Unregister the region. If the block raised, a region in use is left to its last reference."""
        try:
            self.unregister()
        except UsageError:
            if error is None:
                raise


@dataclass(frozen=True, slots=True, eq=False)
class RegionBlocks(HostBlocks):
    """Rows as checked blocks. The methods of ``HostBlocks`` copy; those below work in place."""

    memory: RegionMemory
    numbers: NDArray[np.int64]

    def claim(self) -> None:
        """Claim the rows, before the first access. Raises UsageError."""
        self.memory.claim(self.numbers, is_written=self.is_written)

    def release(self, at: slice | NDArray[np.intp] = slice(None)) -> None:
        """Release claimed rows, all or some *at* positions, after the last access."""
        self.memory.release(self.numbers[at], is_written=self.is_written)

    def request_rows(self, at: NDArray[np.intp]) -> RequestRows:
        """Return rows for a request of the blocks *at* these positions. Shape (n,)."""
        return RequestRows(self.memory.array[:], self.offsets(at), self.memory.row_bytes)

    def verify(
        self,
        positions: NDArray[np.int64],
        seeds: NDArray[np.uint64],
        tags: NDArray[np.uint8],
        *,
        until_s: float,
        copy_pool: CopyPool,
        source: ProcessBlocks | None = None,
    ) -> NDArray[np.uint8]:
        """Verify blocks that landed in their rows; return a ``CheckState`` for each.

        Arguments are those of ``HostBlocks.scatter``.
        """
        columns = self.offsets(positions), self.lengths[positions], seeds, tags
        return verdicts_in(self.memory.array, *columns, until_s=until_s, copy_pool=copy_pool, source=source)

    def wipe(self, at: NDArray[np.int64]) -> None:
        """Zero the blocks *at* these positions, as the bytes may belong to another tenant."""
        self._zero(at, 0, self.lengths[at])

    def wipe_pages(self, at: NDArray[np.intp]) -> None:
        """Zero the pages of the blocks *at* positions; for rows that take reads of drives."""
        self._zero(at, 0, whole_pages(self.lengths[at]))

    def wipe_padding(self, at: NDArray[np.intp] | NDArray[np.int64]) -> None:
        """Zero the rest of the last page of the blocks *at* positions, beyond any tag."""
        has_padding = at[self.lengths[at] % PAGE_BYTES != 0]
        self._zero(has_padding, self.lengths[has_padding], whole_pages(self.lengths[has_padding]))

    def _zero(
        self,
        at: NDArray[np.intp] | NDArray[np.int64],
        first: int | NDArray[np.uint32],
        end: NDArray[np.uint32],
    ) -> None:
        """Zero bytes *first* to *end* of the rows of the blocks *at* positions."""
        rows = self.offsets(at)
        for begin, stop in zip((rows + first).tolist(), (rows + end).tolist(), strict=True):
            self.memory.array[begin:stop] = 0

    def offsets(self, at: NDArray[np.intp] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the places of the blocks *at* these positions in the region's memory."""
        return self.numbers[at] * self.memory.row_bytes


def _run_all(acts: list[Callable[[], object]]) -> None:
    for act in acts:
        act()


def _whole_numbers(name: str, values: object, *, least: int, most: int) -> NDArray[np.int64]:
    """Return numbers of one axis. Raises UsageError."""
    try:
        found = np.asarray(values)
    except (ValueError, TypeError) as error:
        raise UsageError(f"{name} can't be read as numbers: {error}") from error
    if found.ndim != 1 or (len(found) and found.dtype.kind not in "iu"):
        raise UsageError(f"{name} is no list of whole numbers: pass a number for each row")
    if len(found) and not least <= found.min() <= found.max() <= most:
        raise UsageError(f"{name} has numbers outside of {least} to {most}, the limits of the region")
    return found.astype(np.int64)


def _inspect(given: object) -> tuple[NDArray[np.uint8], bool, int]:
    """Return memory as a flat array, whether it is writable, and the size of its first axis.

    The size is 0 for memory with a single axis. Raises UsageError.
    """
    torch = sys.modules.get("torch")
    is_tensor = torch is not None and isinstance(given, torch.Tensor)
    if is_tensor and not given.is_cpu:  # type: ignore[attr-defined]
        raise UsageError(
            f"memory lies on {given.device}, and regions are host memory: pass tensors of devices "  # type: ignore[attr-defined]
            "themselves as into and source"
        )
    try:
        _, _, _, is_writable, shaped = _contiguous(given)
    except UsageError as error:
        raise UsageError(f"memory {error}") from error
    if is_tensor:
        flat = given.detach().reshape(-1).view(torch.uint8).numpy()  # type: ignore[attr-defined, union-attr]
    else:
        array = np.asarray(given if isinstance(given, np.ndarray) else memoryview(given))  # type: ignore[arg-type]
        flat = _exported(array.reshape(-1).view(np.uint8))
    return flat, is_writable, shaped[0][0] if len(shaped[0]) > 1 else 0


def _exported(flat: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the same memory as an export of its buffer, which can then neither end nor move.

    ``numpy.ndarray(buffer=...)`` keeps the object alone.
    """
    base: Any = flat
    while isinstance(base, np.ndarray):
        base = base.base
    if base is None or isinstance(base, memoryview):
        return flat
    try:
        export = np.frombuffer(base, np.uint8)
    except (TypeError, ValueError, BufferError):  # of another library
        return flat
    first = flat.ctypes.data - export.ctypes.data
    return export[first : first + flat.nbytes] if 0 <= first <= export.nbytes - flat.nbytes else flat


def _contiguous(given: object) -> BufferView:
    seen = view_buffer(given)
    if seen is None:
        raise UsageError(f"is a {type(given).__name__}: pass an array, a tensor or a buffer, as of mmap")
    parts = layout_of(axes_of(seen[4])).parts
    if len(parts) > 1 or parts["runs"][0] > 1:
        raise UsageError("has gaps: register contiguous memory, or pass its parts as into and source")
    return seen
