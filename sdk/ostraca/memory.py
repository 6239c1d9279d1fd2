"""Memory of callers as C sees it: where it begins, and in which runs of contiguous bytes its items lie.

Arrays, torch CPU tensors and anything with the buffer protocol come down to an address, a shape and strides,
and these to *parts*: rows of a table that C walks. What can be wrong with them is found here. Parts are made
from shapes and strides that numpy or torch vouch for, so they name nothing outside of the memory. torch is
never imported: a tensor can only come from someone who did.

Errors raised here begin with a verb; whoever passes the memory on says which argument it was.
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
"""``struct part`` of ``native/ostraca.h``: runs of bytes, laid out by the first ``dims`` of its axes."""
assert PART.itemsize == 8 * (3 + 2 * AXES_MAX), "C has eleven words of eight bytes, without gaps"


Shaped = tuple[tuple[int, ...], tuple[int, ...], Any]
"""Shape, strides and data type as numpy or torch says them: numpy's strides are bytes, torch's are items."""

Sight = tuple[object, int, int | None, bool, Shaped]
"""Some memory: what keeps it there (and a buffer from being resized), its address, where it ends when it is
not certain that all items lie in it, whether it is writable, and how it is shaped. A plain tuple, because one
is made for each part of a list."""


class Axes(NamedTuple):
    """How items lie in memory, seen from the first one."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In bytes."""

    item_bytes: int

    @property
    def extent_bytes(self) -> int:
        """The bytes from the beginning of the first item to the end of the last one."""
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return last + self.item_bytes


class Layout(NamedTuple):
    """The parts of memory whose items lie in one way."""

    parts: NDArray[np.void]
    """With addresses counted from the first item."""

    payload_bytes: int
    """The bytes of all items."""

    extent_bytes: int


def sight(value: object) -> Sight | None:
    """Look at an array, a tensor or a buffer; None for anything else. Nothing is copied.

    Raises UsageError when C can't read its memory.
    """
    if isinstance(value, np.ndarray):
        return _of_array(value)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _of_tensor(value, torch)
    try:
        view = memoryview(value)  # type: ignore[arg-type]  # whether it has the buffer protocol is what is asked
    except TypeError:
        return None
    try:
        return _of_array(np.asarray(view))
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"has the format {view.format!r}, which can't be read as numbers: cast it to bytes"
        ) from error


def axes_of(shaped: Shaped) -> Axes:
    """Return how items lie in memory shaped like this. Raises UsageError when blocks can't lie so."""
    shape, strides, kind = shaped
    item_bytes = kind.itemsize
    if not isinstance(kind, np.dtype):
        strides = tuple(stride * item_bytes for stride in strides)
    elif kind.hasobject:
        raise UsageError(f"holds Python objects ({kind}): pass memory of numbers or bytes")
    if not item_bytes or 0 in shape:
        raise UsageError("has no bytes: a block has at least one")
    axes = Axes(tuple(shape), tuple(strides), item_bytes)
    _check_strides(axes)
    return axes


def layout_of(axes: Axes) -> Layout:
    """Return the parts of memory whose items lie so, in C order.

    That takes tens of microseconds, and engines cut all their blocks alike: keep what this returned.
    """
    run_bytes, merged = _merged(axes)
    outer, inner = merged[:-AXES_MAX], merged[-AXES_MAX:]
    addresses = np.zeros(1, np.int64)
    for size, stride in outer:
        addresses = (addresses[:, None] + np.arange(size) * stride).reshape(-1)
    parts = np.zeros(len(addresses), PART)
    parts["address"], parts["run_bytes"], parts["dims"] = addresses, run_bytes, len(inner)
    for axis, (size, stride) in enumerate(inner):
        parts["shape"][:, axis], parts["strides"][:, axis] = size, stride
    return Layout(parts, axes.item_bytes * prod(axes.shape), axes.extent_bytes)


def check_inside(address: int, extent_bytes: int, end: int | None) -> None:
    """Refuse memory that is not there for all items: torch lets storages shrink under their tensors."""
    if end is not None and not 0 < address <= end - extent_bytes:
        raise UsageError("is a tensor whose storage is gone or shrunk: pass one that has its memory")


def _of_array(array: NDArray[Any]) -> Sight:
    flags = array.flags
    is_writable = flags.writeable
    shaped = array.shape, array.strides, array.dtype
    if is_writable and flags.c_contiguous:
        # Numpy takes five times as long to tell an address. What exports no buffer is left to it.
        try:
            first: ctypes.c_char = ctypes.c_char.from_buffer(array)  # type: ignore[arg-type]  # it is a buffer
            return array, ctypes.addressof(first), None, is_writable, shaped
        except (TypeError, ValueError):
            pass
    return array, array.ctypes.data, None, is_writable, shaped


def _of_tensor(tensor: Any, torch: Any) -> Sight:  # noqa: ANN401 (torch is not ours to import)
    if tensor.is_cuda:
        raise UsageError(
            f"lies on {tensor.device}, and the first block in host memory: pass all blocks of one call in "
            "one kind of memory"
        )
    if not tensor.is_cpu:
        raise UsageError(
            f"lies on {tensor.device}: copy it to the CPU (tensor.cpu(), or a pinned buffer); of devices, "
            "only CUDA's memory is a source or target"
        )
    return plain_memory(tensor, torch)


def plain_memory(tensor: Any, torch: Any) -> Sight:  # noqa: ANN401 (torch is not ours to import)
    """See a tensor's memory, wherever it is. Raises UsageError when it is not plain bytes."""
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
        raise UsageError(
            "is a tensor that is sparse, quantized or lazily conjugated: materialise it first (to_dense(), "
            "int_repr(), resolve_conj())"
        )
    try:
        # Types that numpy lacks (bfloat16, float8) pass, because no numpy array is made.
        storage = tensor.untyped_storage()
        end = storage.data_ptr() + storage.nbytes()
        return storage, tensor.data_ptr(), end, True, (tensor.shape, tensor.stride(), tensor.dtype)
    except (RuntimeError, NotImplementedError) as error:
        raise UsageError(f"is a tensor that can't be read as plain memory: {error}") from error


def _check_strides(axes: Axes) -> None:
    """Refuse strides by which one byte would stand for two, and backward ones."""
    long = sorted((stride, size) for stride, size in zip(axes.strides, axes.shape, strict=True) if size > 1)
    covered = axes.item_bytes
    for stride, size in long:
        if stride < covered:
            raise UsageError(
                f"has strides {axes.strides} for shape {axes.shape}: strides must be positive and elements "
                "must not overlap; pass a contiguous copy, or a slice that does not repeat or reverse any"
            )
        covered = stride * (size - 1) + covered


def _merged(axes: Axes) -> tuple[int, list[tuple[int, int]]]:
    """Return the bytes of one run, and the axes (size, stride) that runs are laid out by: few, and long."""
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
