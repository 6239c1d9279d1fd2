"""What the adapter of ``ostraca._direct.device_reads.DeviceFile`` does, over a stand-in and on a GPU.

The stand-in for kvikio reads files for real, into memory of the host.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.sdk.direct.stand_in_kvikio import StandInKvikio, is_cached, kvikio_installed

from ostraca._direct.device_reads import DeviceFile
from ostraca_fabric.model.extent import PAGE_BYTES

PAGES = 64
Opener = Callable[[Path], DeviceFile]


class DeviceFileContract:
    """Inherit it, and say how files are opened, and how memory is made and read."""

    @pytest.fixture
    def opened(self) -> Iterator[Opener]:
        adapter = importlib.import_module("ostraca._direct.kvikio_file")
        descriptors, files = [], []

        def open_file(path: Path) -> DeviceFile:
            descriptors.append(os.open(path, os.O_RDONLY | os.O_DIRECT))
            file: DeviceFile = adapter.KvikioFile(descriptors[-1])
            files.append(file)
            return file

        yield open_file
        for file in files:
            file.close()
        for descriptor in descriptors:
            os.close(descriptor)

    def made(self, length: int) -> Any:
        raise NotImplementedError

    def seen(self, memory: Any) -> NDArray[np.uint8]:
        raise NotImplementedError

    def prepare_thread(self) -> None:
        """Prepare a thread for reads, as ``DeviceMemory.readable`` does."""

    def test_pages_land_at_their_places_and_nothing_beside_them(self, opened: Opener, tmp_path: Path) -> None:
        content = stored(tmp_path / "drive")
        memory, expected = self.made(10 * PAGE_BYTES), np.zeros(10 * PAGE_BYTES, np.uint8)
        file = opened(tmp_path / "drive")
        wanted = [(0, 3, 17), (4, 1, 63), (7, 2, 0)]
        with ThreadPoolExecutor(3, initializer=self.prepare_thread) as threads:
            for ended in [
                threads.submit(file.read, memory, at * PAGE_BYTES, count * PAGE_BYTES, first * PAGE_BYTES)
                for at, count, first in wanted
            ]:
                ended.result()
        for at, count, first in wanted:
            pages = content[first * PAGE_BYTES : (first + count) * PAGE_BYTES]
            expected[at * PAGE_BYTES : (at + count) * PAGE_BYTES] = pages
        assert np.array_equal(self.seen(memory), expected)

    def test_a_read_beyond_the_end_is_an_error(self, opened: Opener, tmp_path: Path) -> None:
        stored(tmp_path / "drive")
        file = opened(tmp_path / "drive")
        with pytest.raises((OSError, RuntimeError)):
            file.read(self.made(2 * PAGE_BYTES), 0, 2 * PAGE_BYTES, (PAGES - 1) * PAGE_BYTES)

    def test_no_read_goes_beyond_the_memory(self, opened: Opener, tmp_path: Path) -> None:
        stored(tmp_path / "drive")
        file = opened(tmp_path / "drive")
        with pytest.raises(ValueError, match="greater than the size"):
            file.read(self.made(2 * PAGE_BYTES), PAGE_BYTES, 2 * PAGE_BYTES, 0)

    def test_a_file_in_place_of_the_open_one_is_not_read(self, opened: Opener, tmp_path: Path) -> None:
        content = stored(tmp_path / "drive")
        descriptor = os.open(tmp_path / "drive", os.O_RDONLY | os.O_DIRECT)
        (tmp_path / "drive").unlink()
        (tmp_path / "drive").write_bytes(bytes(PAGES * PAGE_BYTES))
        file: DeviceFile = importlib.import_module("ostraca._direct.kvikio_file").KvikioFile(descriptor)
        memory = self.made(PAGE_BYTES)
        file.read(memory, 0, PAGE_BYTES, 5 * PAGE_BYTES)
        assert np.array_equal(self.seen(memory), content[5 * PAGE_BYTES : 6 * PAGE_BYTES])
        file.close()
        os.close(descriptor)


def stored(path: Path) -> NDArray[np.uint8]:
    content = np.random.default_rng(4).integers(1, 256, PAGES * PAGE_BYTES, np.uint8)
    path.write_bytes(content.tobytes())
    return content


class TestKvikioStandIn(DeviceFileContract):
    @pytest.fixture(autouse=True)
    def library(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInKvikio]:
        with kvikio_installed(monkeypatch) as library:
            yield library

    def made(self, length: int) -> NDArray[np.uint8]:
        return np.zeros(length, np.uint8)

    def seen(self, memory: Any) -> NDArray[np.uint8]:
        found: NDArray[np.uint8] = memory
        return found

    def test_fewer_bytes_than_asked_for_are_an_error(
        self, library: StandInKvikio, opened: Opener, tmp_path: Path
    ) -> None:
        stored(tmp_path / "drive")
        library.loses_bytes = 512
        with pytest.raises(OSError, match="3584 of 4096 bytes"):
            opened(tmp_path / "drive").read(self.made(PAGE_BYTES), 0, PAGE_BYTES, 0)

    def test_old_pages_in_the_page_cache_are_dropped_before_a_read(
        self, library: StandInKvikio, opened: Opener, tmp_path: Path
    ) -> None:
        stored(tmp_path / "drive")
        with (tmp_path / "drive").open("rb") as warm:
            os.fsync(warm.fileno())
            warm.read()
            if not is_cached(warm.fileno(), PAGE_BYTES):
                pytest.skip("this file system does not tell what is in the page cache")
        opened(tmp_path / "drive").read(self.made(PAGE_BYTES), 0, PAGE_BYTES, PAGE_BYTES)
        assert library.cached == [False]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that torch can use here")
class TestKvikio(DeviceFileContract):
    @pytest.fixture(autouse=True)
    def library(self) -> None:
        pytest.importorskip("kvikio", reason="kvikio reads files into GPU memory")
        self.prepare_thread()

    def prepare_thread(self) -> None:
        torch.cuda.set_device(0)
        torch.cuda.current_stream().record_event().synchronize()

    def made(self, length: int) -> torch.Tensor:
        memory = torch.zeros(length, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        return memory

    def seen(self, memory: Any) -> NDArray[np.uint8]:
        found: NDArray[np.uint8] = memory.cpu().numpy()
        return found
