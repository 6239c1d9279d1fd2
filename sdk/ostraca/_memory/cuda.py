"""CUDA tensors of torch as device memory.

Adapter of ``ostraca._memory.device_blocks``. The arena is registered with CUDA as pinned memory at the first
use, once per client, so that copies run asynchronously. Each operation has its own stream on each of its
devices. The stream is ordered after all work that the caller's thread had launched on the device's current
stream before the call. The operation ends after its streams, so later work of the caller needs no
synchronisation.

Tensors may be strided: a non-contiguous tensor is copied through a temporary on the device, in stream order.
This module never imports torch: a tensor implies a caller's import.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Hashable, Iterable
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ostraca._memory.device_blocks import DevicePart
from ostraca._memory.host_blocks import axes_of, check_inside, plain_memory
from ostraca_fabric.errors import TransportError, UsageError

_PORTABLE = 1
"""``cudaHostRegisterPortable``: pinned for every device of the process."""


class CudaDevices:
    """CUDA implementation of ``ostraca._memory.device_blocks.Devices``."""

    def __init__(self) -> None:
        self._pinning = threading.Lock()
        self._pinned_at = 0
        self._is_broken = False

    def look(self, value: object) -> DevicePart | None:
        """Return a CUDA tensor as a part; None for any other value."""
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(value, torch.Tensor) or not value.is_cuda:
            return None
        return part_of(value, torch)

    def rows(self, part: DevicePart) -> list[DevicePart]:
        """Cut a tensor along its first axis."""
        count = part.shape[0]
        return [
            part._replace(memory=row, shape=part.shape[1:], payload_bytes=part.payload_bytes // count)
            for row in part.memory.unbind(0)
        ]

    def copies(self, devices: Iterable[Hashable]) -> CudaCopies:
        """Return the copies of one operation, ordered after all launched work."""
        return CudaCopies(sys.modules["torch"], devices, self._lost)

    def pin(self, memory: NDArray[np.uint8]) -> None:
        """Register the arena with CUDA, as the port defines."""
        with self._pinning:
            if self._pinned_at:
                return
            cudart = sys.modules["torch"].cuda.cudart()
            code = int(cudart.cudaHostRegister(memory.ctypes.data, memory.nbytes, _PORTABLE))
            if code:
                raise UsageError(
                    f"the arena of {memory.nbytes} bytes can't be pinned for CUDA (its error {code}): raise "
                    "the limit of locked memory (ulimit -l), or lower arena_bytes in the settings"
                )
            self._pinned_at = memory.ctypes.data

    def close(self) -> bool:
        """Unregister the arena, as the port defines."""
        with self._pinning:
            address, self._pinned_at = self._pinned_at, 0
            if self._is_broken:
                return False
            return not address or not int(sys.modules["torch"].cuda.cudart().cudaHostUnregister(address))

    def _lost(self) -> None:
        self._is_broken = True


class CudaCopies:
    """CUDA implementation of ``ostraca._memory.device_blocks.Copies``."""

    def __init__(self, torch: Any, devices: Iterable[Hashable], lost: Any) -> None:  # noqa: ANN401 (torch is never imported here)
        self._torch = torch
        self._lost = lost
        self._has_failed = False
        self._streams: dict[Hashable, Any] = {}
        self._launched = {device: self._mark(device) for device in devices}

    def to_device(self, part: DevicePart, host: NDArray[np.uint8]) -> None:
        """Start a copy to the device, as the port defines."""
        self._begin(write, part, host)

    def from_device(self, part: DevicePart, host: NDArray[np.uint8]) -> None:
        """Start a copy from the device, as the port defines."""
        self._begin(read, part, host)

    def wait(self) -> bool:
        """Synchronise with the streams, as the port defines."""
        for stream in self._streams.values():
            try:
                stream.synchronize()
            except RuntimeError:  # CUDA errors are sticky: all later calls of the process fail too
                self._has_failed = True
                self._lost()
        return not self._has_failed

    def _mark(self, device: Hashable) -> Any:  # noqa: ANN401 (an event)
        cuda = self._torch.cuda
        with cuda.device(device):
            if cuda.is_current_stream_capturing():
                raise UsageError(
                    f"a CUDA graph is being captured on {device}: blocks can't move now, call when it is done"
                )
            return cuda.current_stream(device).record_event()

    def _begin(self, act: Any, part: DevicePart, host: NDArray[np.uint8]) -> None:  # noqa: ANN401 (write or read)
        torch, device = self._torch, part.device
        try:
            stream = self._streams.get(device)
            if stream is None:
                stream = self._streams[device] = torch.cuda.Stream(device)
                stream.wait_event(self._launched[device])
            # Inference mode accepts all tensors: with gradients, and inference tensors.
            with torch.inference_mode(), torch.cuda.stream(stream):
                act(part.memory, torch.from_numpy(host), torch)
        except RuntimeError as error:
            raise TransportError(f"a copy between the arena and {device} can't be begun: {error}") from error


def part_of(tensor: Any, torch: Any) -> DevicePart:  # noqa: ANN401 (torch is never imported here)
    """Return a tensor as a part.

    Raises UsageError for bytes that can't be copied.
    """
    _, address, end, _, shaped = plain_memory(tensor, torch)
    axes = axes_of(shaped)
    check_inside(address, axes.extent_bytes, end)
    return DevicePart(tensor.detach(), tensor.device, tuple(tensor.shape), axes.item_bytes * prod(axes.shape))


def write(tensor: Any, host: Any, torch: Any) -> None:  # noqa: ANN401
    """Start a copy of bytes into a tensor, in C order."""
    if tensor.is_contiguous():
        _bytes(tensor, torch).copy_(host, non_blocking=True)
    else:
        # Through device memory, so that *host* needs no alignment for this type.
        dense = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        _bytes(dense, torch).copy_(host, non_blocking=True)
        tensor.copy_(dense, non_blocking=True)


def read(tensor: Any, host: Any, torch: Any) -> None:  # noqa: ANN401
    """Start a copy of a tensor's bytes, in C order."""
    host.copy_(_bytes(tensor.contiguous(), torch), non_blocking=True)


def _bytes(dense: Any, torch: Any) -> Any:  # noqa: ANN401
    """Return the bytes of a contiguous tensor."""
    # Strides of axes with one item are arbitrary, so they are set anew.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
