"""What every adapter of ``ostraca._memory.device_blocks`` does."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ostraca._memory.device_blocks import DevicePart, Devices
from ostraca_fabric.tables.digests import tags_of

PART_BYTES = 1 << 16


class DeviceContract:
    """Inherit it, and say how memory of a device is made and read."""

    @pytest.fixture
    def devices(self) -> Devices:
        raise NotImplementedError

    @pytest.fixture
    def tagging_devices(self) -> Devices:
        """Return devices that compute tags."""
        raise NotImplementedError

    @pytest.fixture
    def arena(self) -> NDArray[np.uint8]:
        return np.zeros(1 << 20, np.uint8)

    def made(self, content: NDArray[np.uint8]) -> object:
        """Return device memory that holds this, with its strides."""
        raise NotImplementedError

    def read(self, memory: object) -> NDArray[np.uint8]:
        raise NotImplementedError

    def fill(self, readable: Any, content: NDArray[np.uint8]) -> None:
        """Write to memory for reads of files, as a library for such reads does."""
        raise NotImplementedError

    def part(self, devices: Devices, memory: object) -> DevicePart:
        part = devices.look(memory)
        assert part is not None
        return part

    def test_memory_of_the_host_is_none_of_its(self, devices: Devices) -> None:
        for value in (bytearray(8), np.zeros(8), [1], None, "text"):
            assert devices.look(value) is None

    def test_what_is_copied_to_a_device_and_back_is_the_same(
        self, devices: Devices, arena: NDArray[np.uint8]
    ) -> None:
        content = np.random.default_rng(1).integers(0, 255, PART_BYTES, np.uint8)
        memory = self.made(np.zeros(PART_BYTES, np.uint8))
        part = self.part(devices, memory)
        assert part.payload_bytes == PART_BYTES
        devices.pin(arena)
        devices.pin(arena)
        copies = devices.copies([part.device])
        arena[100 : 100 + PART_BYTES] = content
        copies.to_device(part, arena[100 : 100 + PART_BYTES])
        assert copies.wait()
        assert np.array_equal(self.read(memory), content)
        copies.from_device(part, arena[-PART_BYTES:])
        assert copies.wait()
        assert np.array_equal(arena[-PART_BYTES:], content)
        assert devices.close()

    def test_strided_memory_is_copied_in_c_order_and_nothing_beside_it_is_touched(
        self, devices: Devices, arena: NDArray[np.uint8]
    ) -> None:
        pool = np.zeros((4, 6, 8), np.uint8)
        memory = self.made(pool)
        part = self.part(devices, memory[1:3, ::2, 3:6])  # type: ignore[index]  # as numpy is indexed
        assert (part.shape, part.payload_bytes) == ((2, 3, 3), 18)
        devices.pin(arena)
        copies = devices.copies([part.device])
        arena[7:25] = np.arange(1, 19)
        copies.to_device(part, arena[7:25])
        assert copies.wait()
        pool[1:3, ::2, 3:6] = np.arange(1, 19).reshape(2, 3, 3)
        assert np.array_equal(self.read(memory), pool)
        copies.from_device(part, arena[31:49])
        assert copies.wait()
        assert arena[31:49].tolist() == list(range(1, 19))
        assert devices.close()

    def test_rows_are_parts_of_one_memory(self, devices: Devices, arena: NDArray[np.uint8]) -> None:
        memory = self.made(np.arange(24, dtype=np.uint8).reshape(3, 2, 4))
        rows = devices.rows(self.part(devices, memory))
        assert [(row.shape, row.payload_bytes) for row in rows] == [((2, 4), 8)] * 3
        devices.pin(arena)
        copies = devices.copies([rows[0].device])
        for number, row in enumerate(rows):
            copies.from_device(row, arena[8 * number : 8 * number + 8])
        assert copies.wait()
        assert arena[:24].tolist() == list(range(24))
        assert devices.close()

    def test_a_device_tags_blocks_in_staging_as_the_host_does(
        self, tagging_devices: Devices, arena: NDArray[np.uint8]
    ) -> None:
        devices, random = tagging_devices, np.random.default_rng(2)
        shortest = devices.tagged_bytes_min
        lengths = np.array([shortest, 1024, 1025, 4096 + 63, 20_000], np.uint32)
        positions = np.array([0, 256, 256 + 1024, 4096, 16384], np.int64)
        seeds = random.integers(0, 1 << 64, len(lengths), np.uint64)
        content = random.integers(0, 256, 40_000, np.uint8)
        part = self.part(devices, self.made(content))
        devices.pin(arena)
        copies = devices.copies([part.device])
        staging = copies.staging(part.device, len(content), len(lengths))
        assert staging is not None
        staging.from_parts([(0, part)])
        assert np.array_equal(
            staging.tags(positions, lengths, seeds), tags_of(content, positions, lengths, seeds)
        )
        arena[: len(content)] = content[::-1]
        staging.from_host(arena[8192:30_000], 8192)
        content[8192:30_000] = arena[8192:30_000]
        assert np.array_equal(
            staging.tags(positions, lengths, seeds), tags_of(content, positions, lengths, seeds)
        )
        staging.to_host(100, arena[200:39_200])
        assert copies.wait()
        assert np.array_equal(arena[200:39_200], content[100:39_100])
        assert devices.close()

    def test_blocks_leave_staging_for_the_memory_of_their_parts_alone(
        self, tagging_devices: Devices, arena: NDArray[np.uint8]
    ) -> None:
        devices, content = tagging_devices, np.arange(1, 45, dtype=np.uint8)
        pool = np.zeros((4, 6, 8), np.uint8)
        memory = self.made(pool)
        strided = self.part(devices, memory[1:3, ::2, 3:6])  # type: ignore[index]  # as numpy is indexed
        dense = self.part(devices, memory[3, 5])  # type: ignore[index]
        devices.pin(arena)
        copies = devices.copies([dense.device])
        staging = copies.staging(dense.device, 64, 2)
        assert staging is not None
        arena[5:49] = content
        staging.from_host(arena[5:49], 0)
        staging.to_parts([(7, strided), (32, dense)])
        assert copies.wait()
        pool[1:3, ::2, 3:6] = content[7:25].reshape(2, 3, 3)
        pool[3, 5] = content[32:40]
        assert np.array_equal(self.read(memory), pool)
        assert devices.close()

    def test_reads_of_files_land_in_staging_and_the_device_tags_them(
        self, tagging_devices: Devices, arena: NDArray[np.uint8]
    ) -> None:
        devices, content = tagging_devices, np.random.default_rng(3).integers(0, 256, 20_000, np.uint8)
        memory = self.made(np.zeros(len(content), np.uint8))
        part = self.part(devices, memory)
        devices.pin(arena)
        copies = devices.copies([part.device])
        staging = copies.staging(part.device, len(content), 1)
        assert staging is not None
        with ThreadPoolExecutor(1) as thread:
            thread.submit(lambda: self.fill(staging.readable(), content)).result()
        seed, length = np.array([7], np.uint64), np.array([len(content)], np.uint32)
        start = np.zeros(1, np.int64)
        assert np.array_equal(staging.tags(start, length, seed), tags_of(content, start, length, seed))
        staging.to_parts([(0, part)])
        assert copies.wait()
        assert np.array_equal(self.read(memory), content)
        assert devices.close()

    def test_a_device_without_memory_left_stages_nothing(self, tagging_devices: Devices) -> None:
        part = self.part(tagging_devices, self.made(np.zeros(8, np.uint8)))
        copies = tagging_devices.copies([part.device])
        assert copies.staging(part.device, 1 << 45, 1) is None
        assert copies.wait()
        assert tagging_devices.close()

    def test_nothing_has_to_be_closed_that_was_never_used(self, devices: Devices) -> None:
        assert devices.close()
