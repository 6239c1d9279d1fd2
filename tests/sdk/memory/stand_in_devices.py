"""Devices that this machine lacks: memory that only copies reach, and copies that take their time."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ostraca._memory.device_blocks import DevicePart
from ostraca_fabric.errors import TransportError, UsageError
from ostraca_fabric.tables.digests import tags_of


class DeviceArray:
    """Memory of a stand-in device. It has no buffer protocol, so nothing else can read it."""

    def __init__(self, array: NDArray[np.uint8], device: str = "stand-in:0") -> None:
        self._array = array
        self.device = device

    def __getitem__(self, at: Any) -> DeviceArray:
        return DeviceArray(self._array[at], self.device)

    @property
    def read(self) -> NDArray[np.uint8]:
        """What lies there, for tests to look at."""
        return self._array


class StandInDevices:
    """Implements ``ostraca._memory.device_blocks.Devices``.

    Copies of a device run one after the other, in a thread.
    """

    def __init__(self, *, tagged_bytes_min: int = 0) -> None:
        self.tagged_bytes_min = tagged_bytes_min
        self.free_bytes = 1 << 40
        self.stagings: weakref.WeakValueDictionary[int, NDArray[np.uint8]] = weakref.WeakValueDictionary()
        """Memory for staging that is still in use, by number."""
        self.staged = 0
        self.damages = False
        """Flip a bit in each copy between host and staging."""
        self.crossings = 0
        """Copies between host and staging."""
        self.pinned: list[NDArray[np.uint8]] = []
        self.pins = 0
        self.is_closed = False
        self.fails = False
        self.copied = 0
        self.under_way = 0
        self._threads: dict[Hashable, ThreadPoolExecutor] = {}
        self._is_broken = False
        self._may_copy = threading.Event()
        self._may_copy.set()
        self._lock = threading.Lock()

    def hold(self) -> None:
        """Copy nothing until ``let_go``."""
        self._may_copy.clear()

    def let_go(self) -> None:
        self._may_copy.set()

    def look(self, value: object) -> DevicePart | None:
        if not isinstance(value, DeviceArray):
            return None
        array = value.read
        if not array.size:
            raise UsageError("has no bytes: a block has at least one")
        return DevicePart(array, value.device, array.shape, array.nbytes)

    def rows(self, part: DevicePart) -> list[DevicePart]:
        return [DevicePart(row, part.device, row.shape, row.nbytes) for row in part.memory]

    def copies(self, devices: Iterable[Hashable]) -> StandInCopies:
        for device in devices:
            self._threads.setdefault(device, ThreadPoolExecutor(1))
        return StandInCopies(self)

    def pin(self, memory: NDArray[np.uint8]) -> None:
        with self._lock:
            if not self.pinned:
                self.pinned.append(memory)
                self.pins += 1

    def close(self) -> bool:
        assert self.under_way == 0, "a copy is under way"
        self.is_closed = True
        self.pinned.clear()
        for thread in self._threads.values():
            thread.shutdown()
        return not self._is_broken

    def begin(self, device: Hashable, copy: Callable[[], None]) -> Future[None]:
        with self._lock:
            self.under_way += 1
        return self._threads[device].submit(self._run, copy)

    def lost(self) -> None:
        self._is_broken = True

    def _run(self, copy: Callable[[], None]) -> None:
        assert self._may_copy.wait(30)
        try:
            if self.fails:
                raise TransportError("the device fell off the bus")
            copy()
        finally:
            with self._lock:
                self.under_way -= 1
                self.copied += 1


class StandInCopies:
    """Implements ``ostraca._memory.device_blocks.Copies``."""

    def __init__(self, devices: StandInDevices) -> None:
        self._devices = devices
        self._begun: list[Future[None]] = []

    def staging(self, device: Hashable, staging_bytes: int, blocks: int) -> StandInStaging | None:
        assert blocks
        if staging_bytes > self._devices.free_bytes:
            return None
        memory = np.full(staging_bytes, 0xDD, np.uint8)
        self._devices.stagings[self._devices.staged] = memory
        self._devices.staged += 1
        return StandInStaging(self._devices, device, memory, self._begun)

    def to_device(self, part: DevicePart, host: NDArray[np.uint8]) -> None:
        assert len(host) == part.payload_bytes

        def copy() -> None:
            part.memory[...] = host.reshape(part.shape)

        self._begun.append(self._devices.begin(part.device, copy))

    def from_device(self, part: DevicePart, host: NDArray[np.uint8]) -> None:
        assert len(host) == part.payload_bytes

        def copy() -> None:
            host[...] = part.memory.reshape(-1)

        self._begun.append(self._devices.begin(part.device, copy))

    def wait(self) -> bool:
        ended, under_way = wait(self._begun)
        assert not under_way
        if any(copy.exception() is not None for copy in ended):
            self._devices.lost()
            return False
        return True


class StandInStaging:
    """Implements ``ostraca._memory.device_blocks.DeviceStaging``.

    Only copies of the caller's memory take their time.
    """

    def __init__(
        self,
        devices: StandInDevices,
        device: Hashable,
        memory: NDArray[np.uint8],
        begun: list[Future[None]],
    ) -> None:
        self._devices = devices
        self._device = device
        self._memory = memory
        self._begun = begun

    def from_parts(self, parts: Iterable[tuple[int, DevicePart]]) -> None:
        for at, part in parts:
            begun = self._devices.begin(part.device, partial(self._take, at, part))
            self._begun.append(begun)
            wait([begun])

    def to_parts(self, parts: Iterable[tuple[int, DevicePart]]) -> None:
        for at, part in parts:
            self._begun.append(self._devices.begin(part.device, partial(self._give, at, part)))

    def from_host(self, host: NDArray[np.uint8], at: int) -> None:
        self._cross(host, self._memory[at : at + host.nbytes])

    def to_host(self, at: int, host: NDArray[np.uint8]) -> None:
        self._cross(self._memory[at : at + host.nbytes], host)

    def tags(
        self, positions: NDArray[np.int64], lengths: NDArray[np.uint32], seeds: NDArray[np.uint64]
    ) -> NDArray[np.uint8]:
        if self._devices.fails:
            self._begun.append(self._devices.begin(self._device, lambda: None))
            raise TransportError("tags can't be computed")
        return tags_of(self._memory, positions, lengths, seeds)

    def readable(self) -> NDArray[np.uint8]:
        if self._devices.fails:
            raise TransportError("the device fell off the bus")
        return self._memory

    def _take(self, at: int, part: DevicePart) -> None:
        self._memory[at : at + part.payload_bytes] = part.memory.reshape(-1)

    def _give(self, at: int, part: DevicePart) -> None:
        part.memory[...] = self._memory[at : at + part.payload_bytes].reshape(part.shape)

    def _cross(self, source: NDArray[np.uint8], target: NDArray[np.uint8]) -> None:
        assert len(source) == len(target)
        target[:] = source
        self._devices.crossings += 1
        if self._devices.damages:
            target[len(target) // 2] ^= 1
