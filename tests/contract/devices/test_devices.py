"""Both adapters of the port to devices behave alike; CUDA's only where there is a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.contract.devices.device_contract import DeviceContract
from tests.sdk.memory.stand_in_devices import DeviceArray, StandInDevices

from ostraca._memory.cuda import CudaDevices
from ostraca._memory.device_blocks import Devices
from ostraca_fabric.errors import UsageError
from ostraca_fabric.runtime.memory import HugeMemory


class TestStandIn(DeviceContract):
    @pytest.fixture
    def devices(self) -> Devices:
        return StandInDevices()

    @pytest.fixture
    def tagging_devices(self) -> Devices:
        return StandInDevices(tagged_bytes_min=241)

    def made(self, content: NDArray[np.uint8]) -> DeviceArray:
        return DeviceArray(content.copy())

    def read(self, memory: object) -> NDArray[np.uint8]:
        assert isinstance(memory, DeviceArray)
        return memory.read

    def fill(self, readable: Any, content: NDArray[np.uint8]) -> None:
        readable[:] = content


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that torch can use here")
class TestCuda(DeviceContract):
    @pytest.fixture
    def devices(self) -> Devices:
        return CudaDevices()

    @pytest.fixture
    def tagging_devices(self) -> Devices:
        pytest.importorskip("triton", reason="triton computes tags on GPUs (make test-gpu)")
        return CudaDevices(gpu_tags=True)

    @pytest.fixture
    def arena(self) -> Iterator[NDArray[np.uint8]]:
        memory = HugeMemory(1 << 21, prefault=True)
        yield memory.array
        memory.close()

    def made(self, content: NDArray[np.uint8]) -> torch.Tensor:
        return torch.from_numpy(content.copy()).cuda()

    def read(self, memory: object) -> NDArray[np.uint8]:
        assert isinstance(memory, torch.Tensor)
        found: NDArray[np.uint8] = memory.cpu().numpy()
        return found

    def fill(self, readable: Any, content: NDArray[np.uint8]) -> None:
        readable[: len(content)].copy_(torch.from_numpy(content))
        torch.cuda.synchronize()

    def test_a_copy_comes_after_what_was_launched_before_the_call(
        self, devices: Devices, arena: NDArray[np.uint8]
    ) -> None:
        memory = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
        part = self.part(devices, memory)
        devices.pin(arena)
        torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]  # about 50 ms of nothing
        memory.fill_(7)
        copies = devices.copies([part.device])
        copies.from_device(part, arena[: 1 << 20])
        assert copies.wait()
        assert (arena[: 1 << 20] == 7).all()
        assert devices.close()

    def test_a_graph_that_is_being_captured_takes_no_copies(self, devices: Devices) -> None:
        part = self.part(devices, torch.zeros(8, device="cuda"))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), pytest.raises(UsageError, match="captured"):
            devices.copies([part.device])
