"""Caller memory as seen by C: an address, and runs of contiguous bytes.

Arrays, torch CPU tensors and objects with the buffer protocol become an address, a shape and strides, and
then *parts*: rows of a table walked by C. Invalid memory is refused here. Shapes and strides come from numpy
or torch, so parts never reach outside of the memory. This module never imports torch: a tensor implies a
caller's import.

Messages of errors raised here begin with a verb; the caller puts the argument's name in front.
"""

from __future__ import annotations

import ctypes
import sys
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ostraca_fabric.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

AXES_MAX = 4
PART = np.dtype(
    [
        ("address", np.uint64),
        ("run_bytes", np.uint64),
        ("dims", np.uint64),
        ("shape", np.uint64, AXES_MAX),
        ("strides", np.int64, AXES_MAX),
    ]
)
"""``struct part`` of ``native/ostraca.h``: runs of bytes, laid out by the first ``dims`` axes."""
assert PART.itemsize == 8 * (3 + 2 * AXES_MAX), "C has eleven words of eight bytes, without gaps"


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

    The computation takes tens of microseconds, and engines cut all blocks alike: cache the result.
    """
    run_bytes, merged = _merge_axes(axes)
    outer, inner = merged[:-AXES_MAX], merged[-AXES_MAX:]
    addresses = np.zeros(1, np.int64)
    for size, stride in outer:
        addresses = (addresses[:, None] + np.arange(size) * stride).reshape(-1)
    parts = np.zeros(len(addresses), PART)
    parts["address"], parts["run_bytes"], parts["dims"] = addresses, run_bytes, len(inner)
    for axis, (size, stride) in enumerate(inner):
        parts["shape"][:, axis], parts["strides"][:, axis] = size, stride
    return MemoryLayout(parts, axes.item_bytes * prod(axes.shape), axes.extent_bytes)


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
    long = sorted((stride, size) for stride, size in zip(axes.strides, axes.shape, strict=True) if size > 1)
    covered = axes.item_bytes
    for stride, size in long:
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


def check_size(argument: str, block: int, size_bytes: int, block_bytes: int) -> None:
    """Check that a block is no larger than the volume's limit.

    Raises UsageError.
    """
    if size_bytes > block_bytes:
        raise UsageError(
            f"{argument}[{block}] has {size_bytes} bytes, and blocks of this volume at most {block_bytes}: "
            "split the block, or open a volume with a larger block_bytes"
        )


def check_count(found: int, count: int) -> None:
    """Check for a block per engine hash of the chain. Raises UsageError."""
    if found != count:
        raise UsageError(f"has {found} blocks and the chain {count}: pass one block per engine hash")
