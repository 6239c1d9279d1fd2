"""Columns: one value per block, as the little-endian bytes of a numpy array.

Reading checks the length against the count of blocks the rest of the message names, so nothing beyond this
module meets a short column.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import numpy as np

from ostraca_fabric.errors import MalformedError

if TYPE_CHECKING:
    from numpy.typing import NDArray

U8: np.dtype[np.uint8] = np.dtype("u1")
U32: np.dtype[np.uint32] = np.dtype("<u4")
U64: np.dtype[np.uint64] = np.dtype("<u8")
_Value = TypeVar("_Value", np.uint8, np.uint32, np.uint64)

KEY_BYTES = 16
TAG_BYTES = 16


def filled(count: int, code: int) -> NDArray[np.uint8]:
    """Make a column of one code for *count* blocks. Of an enum's member, numpy takes thrice as long."""
    column = np.empty(count, U8)
    column.fill(int(code))
    return column


def u8(column: bytes, count: int) -> NDArray[np.uint8]:
    """Read *count* bytes."""
    return _read("u8", column, U8, count)


def u32(column: bytes, count: int) -> NDArray[np.uint32]:
    """Read *count* 32-bit values."""
    return _read("u32", column, U32, count)


def u64(column: bytes, count: int) -> NDArray[np.uint64]:
    """Read *count* 64-bit values."""
    return _read("u64", column, U64, count)


def rows16(column: bytes, count: int) -> NDArray[np.uint8]:
    """Read *count* keys or tags: shape (count, 16)."""
    return _read("16-byte", column, U8, count * 16).reshape(count, 16)


def positions(column: bytes, blocks: int) -> NDArray[np.uint32]:
    """Read positions in a request of *blocks* blocks, each below that."""
    found = _read("position", column, U32, len(column) // U32.itemsize)
    if len(found) and int(found.max()) >= blocks:
        message = f"position {int(found.max())} in a request of {blocks} blocks"
        raise MalformedError(message)
    return found


def _read(what: str, column: bytes, dtype: np.dtype[_Value], count: int) -> NDArray[_Value]:
    if len(column) != count * dtype.itemsize:
        message = f"{what} column of {len(column)} bytes where {count} values were due"
        raise MalformedError(message)
    return np.frombuffer(column, dtype)
