"""Blocks as callers have them: ordered lists of strided parts over memory that the SDK does not own.

Engines keep KV layer by layer, keys apart from values, so one block is rarely one piece of memory. A *part*
is anything with the buffer protocol, a numpy array or a torch CPU tensor; it may be strided, as a slice of a
pool is. A *block* is one part or a list of parts, whose bytes in order (each part in C order) are the block's
bytes.

Callers pass either a list of blocks, or one array or tensor whose first axis counts the blocks. The second
costs no Python object per block when every row is contiguous. Both become numpy views here, once, and
everything that can be wrong with them is found here, before anything is sent. torch is never imported: a
tensor can only come from someone who did.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ostraca_fabric.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_WORDS: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("u2"),
    4: np.dtype("u4"),
    8: np.dtype("u8"),
}
_TORCH_WORDS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


class Blocks(Protocol):
    """Blocks of caller memory, checked."""

    @property
    def lengths(self) -> NDArray[np.uint32]:
        """The bytes of each block."""

    def gather(self, block: int, slot: NDArray[np.uint8]) -> None:
        """Copy a block's bytes into *slot*, which has exactly its length."""

    def scatter(self, block: int, slot: NDArray[np.uint8]) -> None:
        """Copy *slot*, which has exactly the block's length, into the caller's memory."""

    def pieces(self, block: int) -> list[memoryview]:
        """Return a block's bytes as contiguous pieces in order. Strided parts are copied for it."""


@dataclass(frozen=True, slots=True)
class RowBlocks:
    """Blocks that are the rows of one array: uint8, shape (n, block bytes), each row contiguous."""

    rows: NDArray[np.uint8]
    lengths: NDArray[np.uint32]

    def gather(self, block: int, slot: NDArray[np.uint8]) -> None:
        """Copy a row out."""
        np.copyto(slot, self.rows[block])

    def scatter(self, block: int, slot: NDArray[np.uint8]) -> None:
        """Copy a row in."""
        np.copyto(self.rows[block], slot)

    def pieces(self, block: int) -> list[memoryview]:
        """Return the row."""
        return [self.rows[block].data]


@dataclass(frozen=True, slots=True)
class PartBlocks:
    """Blocks that are lists of parts: flat uint8 views where contiguous, else views of plain words."""

    blocks: tuple[tuple[NDArray[Any], ...], ...]
    lengths: NDArray[np.uint32]

    def gather(self, block: int, slot: NDArray[np.uint8]) -> None:
        """Copy the parts out, one after another."""
        first = 0
        for part in self.blocks[block]:
            np.copyto(_as_part(slot[first : first + part.nbytes], part), part)
            first += part.nbytes

    def scatter(self, block: int, slot: NDArray[np.uint8]) -> None:
        """Copy into the parts, one after another."""
        first = 0
        for part in self.blocks[block]:
            np.copyto(part, _as_part(slot[first : first + part.nbytes], part))
            first += part.nbytes

    def pieces(self, block: int) -> list[memoryview]:
        """Return the parts' bytes."""
        return [
            _flat(part if _is_flat(part) else np.ascontiguousarray(part)).data for part in self.blocks[block]
        ]


def as_blocks(
    value: object, *, what: str, count: int, block_bytes: int, is_written: bool
) -> RowBlocks | PartBlocks:
    """Check caller memory and make it ready for copying.

    *what* names the argument in messages, *count* is how many blocks it must have, *block_bytes* the largest
    one allowed. With *is_written*, read-only memory is refused. Raises UsageError that says what to pass
    instead.

    That two destinations overlap *each other* is not looked for: what such memory holds afterwards is not
    defined.
    """
    array = _array(value)
    if array is not None:
        blocks = _blocks_of_array(array, what=what, count=count, is_written=is_written)
    elif isinstance(value, (list, tuple)):
        blocks = _blocks_of_list(value, what=what, count=count, is_written=is_written)
    else:
        raise UsageError(
            f"{what} is a {type(value).__name__}: pass a list with one block per engine hash, or one array "
            "or tensor whose "
            "first axis counts the blocks"
        )
    if count and int(blocks.lengths.max()) > block_bytes:
        worst = int(blocks.lengths.argmax())
        raise UsageError(
            f"{what}[{worst}] has {int(blocks.lengths[worst])} bytes, and blocks of this volume have at "
            f"most {block_bytes}: "
            "split it, or make a volume with a larger block_bytes"
        )
    return blocks


def _blocks_of_array(
    array: NDArray[Any], *, what: str, count: int, is_written: bool
) -> RowBlocks | PartBlocks:
    if array.ndim < 2:  # noqa: PLR2004 (blocks times bytes)
        raise UsageError(
            f"{what} is one flat piece of memory: pass a list of blocks, or an array of shape (blocks, "
            "bytes per block)"
        )
    _check_count(what, len(array), count)
    if not count:
        return RowBlocks(np.empty((0, 0), np.uint8), np.empty(0, np.uint32))
    whole = _checked(what, array, is_written=is_written)
    if whole[0].flags.c_contiguous:
        rows = whole.reshape(count, -1).view(np.uint8)
        return RowBlocks(rows, _lengths([rows.shape[1]] * count))
    return PartBlocks(tuple((row,) for row in whole), _lengths([whole[0].nbytes] * count))


def _blocks_of_list(value: Sequence[object], *, what: str, count: int, is_written: bool) -> PartBlocks:
    _check_count(what, len(value), count)
    blocks = tuple(_parts(f"{what}[{position}]", block, is_written) for position, block in enumerate(value))
    return PartBlocks(blocks, _lengths([sum(part.nbytes for part in block) for block in blocks]))


def _parts(where: str, block: object, is_written: bool) -> tuple[NDArray[Any], ...]:  # noqa: FBT001 (private)
    single = _array(block)
    if single is not None:
        return (_part(where, single, is_written=is_written),)
    if not isinstance(block, (list, tuple)) or not block:
        raise UsageError(
            f"{where} is {'empty' if isinstance(block, (list, tuple)) else f'a {type(block).__name__}'}: a "
            "block is an array, a "
            "tensor, anything with the buffer protocol, or a list of these"
        )
    found = []
    for position, part in enumerate(block):
        array = _array(part)
        if array is None:
            raise UsageError(
                f"{where}[{position}] is a {type(part).__name__}: a part is an array, a tensor or anything "
                "with the buffer protocol"
            )
        found.append(_part(f"{where}[{position}]", array, is_written=is_written))
    return tuple(found)


def _part(where: str, array: NDArray[Any], *, is_written: bool) -> NDArray[Any]:
    checked = _checked(where, array, is_written=is_written)
    return _flat(checked) if checked.flags.c_contiguous else checked


def _checked(where: str, array: NDArray[Any], *, is_written: bool) -> NDArray[Any]:
    """Return the array as plain words of its item size, in its own shape and strides."""
    if array.dtype.hasobject:
        raise UsageError(f"{where} holds Python objects ({array.dtype}): pass memory of numbers or bytes")
    if not array.size or not array.itemsize:
        raise UsageError(f"{where} has no bytes: a block has at least one")
    if is_written and not array.flags.writeable:
        raise UsageError(
            f"{where} is read-only, and blocks are to be written there: pass writable memory, such as a "
            "bytearray or a copy"
        )
    if not array.flags.c_contiguous:
        _check_strides(where, array)
    word: np.dtype[Any] = _WORDS.get(array.itemsize) or np.dtype(f"V{array.itemsize}")
    return array.view(word)


def _check_strides(where: str, array: NDArray[Any]) -> None:
    """Refuse strides by which one byte would stand for two, and backward ones."""
    axes = sorted((stride, size) for stride, size in zip(array.strides, array.shape, strict=True) if size > 1)
    covered = array.itemsize
    for stride, size in axes:
        if stride < covered:
            raise UsageError(
                f"{where} has strides {array.strides} for shape {array.shape}: strides must be positive and "
                "elements must not "
                "overlap; pass a contiguous copy, or a slice that does not repeat or reverse elements"
            )
        covered = stride * (size - 1) + covered


def _check_count(what: str, found: int, count: int) -> None:
    if found != count:
        raise UsageError(f"{what} has {found} blocks and the chain {count}: pass one block per engine hash")


def _lengths(found: list[int]) -> NDArray[np.uint32]:
    """Keep lengths as the wire has them.

    What does not fit is longer than any block and is refused as such.
    """
    return np.minimum(np.asarray(found, np.uint64), np.uint64(0xFFFFFFFF)).astype(np.uint32)


def _is_flat(part: NDArray[Any]) -> bool:
    return part.ndim == 1 and part.dtype == np.uint8 and part.flags.c_contiguous


def _flat(part: NDArray[Any]) -> NDArray[np.uint8]:
    return part.reshape(-1).view(np.uint8)


def _as_part(piece: NDArray[np.uint8], part: NDArray[Any]) -> NDArray[Any]:
    """Look at a contiguous piece of a slot as the part looks: same words, same shape."""
    return piece if part.ndim == 1 and part.dtype == np.uint8 else piece.view(part.dtype).reshape(part.shape)


def _array(value: object) -> NDArray[Any] | None:
    """See an array, a tensor or a buffer as numpy does, without a copy; None for anything else."""
    if isinstance(value, np.ndarray):
        return np.asarray(value)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _array_of_tensor(value, torch)
    try:
        view = memoryview(value)  # type: ignore[arg-type]  # whether it has the buffer protocol is what is asked
    except TypeError:
        return None
    try:
        return np.asarray(view)
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"memory of format {view.format!r} can't be read as numbers: cast it to bytes"
        ) from error


def _array_of_tensor(tensor: Any, torch: Any) -> NDArray[Any]:  # noqa: ANN401 (torch is not ours to import)
    """See a tensor's memory as integers of its item size.

    So types that numpy lacks (bfloat16, float8) pass.
    """
    if tensor.device.type != "cpu":
        raise UsageError(
            f"a tensor lies on {tensor.device}: copy it to the CPU (tensor.cpu(), or a pinned buffer); "
            "device memory is not a "
            "source or target yet"
        )
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        raise UsageError(
            "a tensor is sparse or lazily conjugated: materialise it first (to_dense(), resolve_conj())"
        )
    plain = tensor.detach()
    word = _TORCH_WORDS.get(tensor.element_size())
    try:
        found: NDArray[Any] = (plain.view(getattr(torch, word)) if word else plain).numpy()
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"a tensor of {tensor.dtype} can't be read as plain memory: {error}") from error
    return found
