"""Where blocks lie on flash.

A *generation* tells one use of a segment from the next: the owner's epoch and a count, packed as
``epoch << 32 | count`` so that generations compare as they were handed out and fit a numpy column. The lowest
is the oldest. Generation 0 is "never written".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NewType

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PAGE_BYTES = 4096
"""What flash is addressed and aligned in: summary pages, extents and I/O are multiples of it."""

Generation = NewType("Generation", int)

_COUNT_BITS = 32


def generation(*, epoch: int, count: int) -> Generation:
    """Pack an owner epoch and a segment count; both must fit 32 bits."""
    if not (0 <= epoch < 1 << _COUNT_BITS and 0 <= count < 1 << _COUNT_BITS):
        message = f"generation out of range: epoch {epoch}, count {count}"
        raise OverflowError(message)
    return Generation(epoch << _COUNT_BITS | count)


def generation_parts(packed: Generation) -> tuple[int, int]:
    """Return (epoch, count)."""
    return packed >> _COUNT_BITS, packed & ((1 << _COUNT_BITS) - 1)


def rounded_up(length_bytes: int, multiple: int = PAGE_BYTES) -> int:
    """Return the least multiple of *multiple* that holds *length_bytes*."""
    return -(-length_bytes // multiple) * multiple


def whole_pages(lengths: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Return what blocks of these *lengths* take on flash, in bytes. None comes near 4 GiB."""
    pages: NDArray[np.uint32] = (lengths + (PAGE_BYTES - 1)) // PAGE_BYTES * PAGE_BYTES
    return pages
