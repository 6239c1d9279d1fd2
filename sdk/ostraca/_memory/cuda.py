"""CUDA tensors of torch as device memory.

Adapter of ``ostraca._memory.device_blocks``. The arena is registered with CUDA as pinned memory at the first
use, once per client, so that copies run asynchronously. Each operation has its own stream on each of its
devices. The stream is ordered after all work that the caller's thread had launched on the device's current
stream before the call. The operation ends after its streams, so later work of the caller needs no
synchronisation.

With ``gpu_tags``, the GPU computes tags (``ostraca._memory.gpu_tags``) in memory of torch's allocator.
A client has a stream per device for staging, so the allocator can reuse that memory. Blocks arrive and are
verified there while the caller's earlier work still runs. Only copies to and from the caller's tensors wait.

Tensors may be strided: a non-contiguous tensor is copied through a temporary on the device, in stream order.
This module never imports torch: a tensor implies a caller's import. It imports triton with ``gpu_tags`` only.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
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
    """CUDA implementation of ``ostraca._memory.device_blocks.Devices``.

    With *gpu_tags*, raises UsageError if triton can't be imported.
    """

    def __init__(self, *, gpu_tags: bool = False) -> None:
        self._pinning = threading.Lock()
        self._pinned_at = 0
        self._is_broken = False
        self._tagging = _import_gpu_tags() if gpu_tags else None
        self._checking = threading.Lock()
        self._staging_streams: dict[Hashable, Any] = {}
        """Stream for staging on each device whose tags were checked."""

    @property
    def tagged_bytes_min(self) -> int:
        """Return the shortest block with a tag from the GPU, as the port defines."""
        return self._tagging.LENGTH_MIN if self._tagging is not None else 0

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
        """Return the copies of one operation, ordered after all launched work.

        With tags of the GPU, the first call for a device compiles kernels, and takes seconds.
        """
        torch, devices = sys.modules["torch"], list(devices)
        copies = CudaCopies(torch, devices, self._lost, self._tagging, self._staging_streams)
        for device in devices if self._tagging is not None else ():
            self._check_tags(torch, device, self._tagging)
        return copies

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

    def _check_tags(self, torch: Any, device: Hashable, tagging: Any) -> None:  # noqa: ANN401 (modules)
        """Compile the kernels for a device, and compare its tags with the host's. Raises UsageError."""
        with self._checking:
            if device in self._staging_streams:
                return
            stream = torch.cuda.Stream(device, priority=-1)
            try:
                with torch.cuda.device(device), torch.cuda.stream(stream):
                    is_right = tagging.check_device(torch, device)
            except Exception as error:
                raise UsageError(
                    f"tags can't be computed on {device}: set gpu_tags to False in the settings "
                    f"({type(error).__name__}: {error})"
                ) from error
            if not is_right:
                raise UsageError(
                    f"{device} computes wrong tags: set gpu_tags to False in the settings, and report the "
                    "versions of torch, triton and the driver"
                )
            self._staging_streams[device] = stream

    def _lost(self) -> None:
        self._is_broken = True


class CudaCopies:
    """CUDA implementation of ``ostraca._memory.device_blocks.Copies``."""

    def __init__(
        self,
        torch: Any,  # noqa: ANN401 (torch is never imported here)
        devices: Iterable[Hashable],
        lost: Callable[[], None],
        tagging: Any,  # noqa: ANN401 (neither is triton)
        staging_streams: dict[Hashable, Any],
    ) -> None:
        self._torch = torch
        self._lost = lost
        self._tagging = tagging
        self._staging_streams = staging_streams
        self._has_failed = False
        self._streams: dict[Hashable, Any] = {}
        self._launched = {device: self._mark(device) for device in devices}

    def staging(self, device: Hashable, staging_bytes: int, blocks: int) -> CudaStaging | None:
        """Return new memory, as the port defines."""
        torch, stream = self._torch, self._staging_streams[device]
        try:
            with torch.cuda.stream(stream):
                memory, sums = self._tagging.new_memory(torch, device, staging_bytes, blocks)
        except torch.OutOfMemoryError:
            return None
        except RuntimeError as error:
            raise TransportError(f"memory of {device} can't be used: {error}") from error
        self._streams["staging"] = stream
        return CudaStaging(torch, memory, sums, self._tagging, stream, self._ordered_stream(device))

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

    def _ordered_stream(self, device: Hashable) -> Any:  # noqa: ANN401 (a stream)
        """Return the stream of copies ordered after the caller's launched work."""
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = self._torch.cuda.Stream(device)
            stream.wait_event(self._launched[device])
        return stream

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
            stream = self._ordered_stream(device)
            # Inference mode accepts all tensors: with gradients, and inference tensors.
            with torch.inference_mode(), torch.cuda.stream(stream):
                act(part.memory, torch.from_numpy(host), torch)
        except RuntimeError as error:
            raise TransportError(f"a copy between the arena and {device} can't be begun: {error}") from error


class CudaStaging:
    """CUDA implementation of ``ostraca._memory.device_blocks.DeviceStaging``."""

    def __init__(
        self,
        torch: Any,  # noqa: ANN401 (torch is never imported here)
        memory: Any,  # noqa: ANN401 (a tensor)
        sums: Any,  # noqa: ANN401 (a tensor)
        tagging: Any,  # noqa: ANN401 (a module that needs triton)
        stream: Any,  # noqa: ANN401 (a stream)
        ordered: Any,  # noqa: ANN401 (a stream)
    ) -> None:
        self._torch = torch
        self._memory = memory
        self._sums = sums
        self._tagging = tagging
        self._stream = stream
        self._ordered = ordered

    def from_parts(self, parts: Iterable[tuple[int, DevicePart]]) -> None:
        """Start copies of the caller's memory, as the port defines."""
        with self._acting_on(self._ordered):
            self._ordered.wait_stream(self._stream)
            for at, part in parts:
                read(part.memory, self._memory[at : at + part.payload_bytes], self._torch)
            self._memory.record_stream(self._ordered)
            self._stream.wait_stream(self._ordered)

    def to_parts(self, parts: Iterable[tuple[int, DevicePart]]) -> None:
        """Start copies to the caller's memory, as the port defines."""
        with self._acting_on(self._ordered):
            self._ordered.wait_stream(self._stream)
            for at, part in parts:
                write(part.memory, self._memory[at : at + part.payload_bytes], self._torch)
            self._memory.record_stream(self._ordered)

    def from_host(self, host: NDArray[np.uint8], at: int) -> None:
        """Start a copy of pinned memory, as the port defines."""
        with self._acting_on(self._stream):
            self._memory[at : at + host.nbytes].copy_(self._torch.from_numpy(host), non_blocking=True)

    def to_host(self, at: int, host: NDArray[np.uint8]) -> None:
        """Start a copy to pinned memory, as the port defines."""
        with self._acting_on(self._stream):
            self._torch.from_numpy(host).copy_(self._memory[at : at + host.nbytes], non_blocking=True)

    def tags(
        self, positions: NDArray[np.int64], lengths: NDArray[np.uint32], seeds: NDArray[np.uint64]
    ) -> NDArray[np.uint8]:
        """Return the tags, as the port defines."""
        with self._acting_on(self._stream):
            found: NDArray[np.uint8] = self._tagging.tags_on_device(
                self._memory, self._sums, positions, lengths, seeds
            )
            return found

    def readable(self) -> Any:  # noqa: ANN401 (a tensor)
        """Return the memory as a tensor, as the port defines.

        The allocator gives memory of earlier work of this stream, so that work must end first. The event also
        makes CUDA's context the thread's own, which libraries expect.
        """
        self._torch.cuda.set_device(self._memory.device)
        self._stream.record_event().synchronize()
        return self._memory

    @contextmanager
    def _acting_on(self, stream: Any) -> Iterator[None]:  # noqa: ANN401 (a stream)
        """Let torch and triton use a stream of the device. Raises TransportError for their errors."""
        torch, device = self._torch, self._memory.device
        try:
            # Inference mode accepts all tensors: with gradients, and inference tensors.
            with torch.inference_mode(), torch.cuda.device(device), torch.cuda.stream(stream):
                yield
        except Exception as error:
            raise TransportError(f"blocks can't be staged on {device}: {error}") from error


def part_of(tensor: Any, torch: Any) -> DevicePart:  # noqa: ANN401 (torch is never imported here)
    """Return a tensor as a part.

    Raises UsageError for bytes that can't be copied.
    """
    _, address, end, _, shaped = plain_memory(tensor, torch)
    axes = axes_of(shaped)
    check_inside(address, axes.extent_bytes, end)
    return DevicePart(tensor.detach(), tensor.device, tuple(tensor.shape), axes.item_bytes * prod(axes.shape))


def _import_gpu_tags() -> Any:  # noqa: ANN401 (a module that needs triton)
    try:
        return importlib.import_module("ostraca._memory.gpu_tags")
    except ImportError as error:
        raise UsageError(
            f"gpu_tags needs triton ({error}): install ostraca[gpu], or set gpu_tags to False in the settings"
        ) from error


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
