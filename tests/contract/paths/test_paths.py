"""Every adapter of paths passes the same contract; then what is each one's own."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from tests.contract.paths.paths_contract import HOST, NGUIDS, NQN, SECRET, PathsContract, Shelf, live
from tests.contract.paths.shelves import HOST_ID, FileShelf, NvmeShelf, TcpShelf

from ostraca_dpu_agent.adapters.nvme_of.file_paths import FilePaths, TargetPaths
from ostraca_dpu_agent.adapters.nvme_of.nvme_paths import NvmePaths
from ostraca_dpu_agent.adapters.nvme_tcp.tcp_paths import TcpPaths
from ostraca_fabric.drives.file_exports import EXPORTS_FILE, FileExports, write_exports
from ostraca_fabric.errors import UsageError
from ostraca_fabric.model.target import Controller, Target, TargetTransport
from ostraca_fabric.ports.paths import Namespace, PathError, Paths, Stage

SILENT = 40
"""More than the threads of ``asyncio.to_thread``."""


class TestNvmePathsOverTcp(PathsContract):
    @pytest.fixture
    def shelf(self, tmp_path: Path) -> NvmeShelf:
        return NvmeShelf(tmp_path)


class TestNvmePathsOverRdma(PathsContract):
    @pytest.fixture
    def shelf(self, tmp_path: Path) -> NvmeShelf:
        return NvmeShelf(tmp_path, TargetTransport.RDMA)


class AnyFileShelf:
    """An enclosure on files for hosts that have paths of both kinds."""

    def __init__(self, shelf: FileShelf) -> None:
        self._shelf = shelf
        self.controllers = shelf.controllers
        self.allow, self.leave = shelf.allow, shelf.leave
        self.come_back, self.add_path = shelf.come_back, shelf.add_path

    def paths(self, host: str) -> Paths:
        return TargetPaths(files=self._shelf.paths(host), nvme=NvmePaths(host, HOST_ID))


class AnyNvmeShelf:
    """An enclosure over NVMe-oF for hosts that have paths of both kinds."""

    def __init__(self, shelf: NvmeShelf) -> None:
        self._shelf = shelf
        self.controllers = shelf.controllers
        self.allow, self.leave = shelf.allow, shelf.leave
        self.come_back, self.add_path = shelf.come_back, shelf.add_path

    def paths(self, host: str) -> Paths:
        return TargetPaths(files=FilePaths(host), nvme=self._shelf.paths(host))


class TestTargetPathsOnFiles(PathsContract):
    @pytest.fixture
    def shelf(self, tmp_path: Path) -> Shelf:
        return AnyFileShelf(FileShelf(tmp_path))


class TestTargetPathsOverNvme(PathsContract):
    @pytest.fixture
    def shelf(self, tmp_path: Path) -> Shelf:
        return AnyNvmeShelf(NvmeShelf(tmp_path))


class TestTcpPaths(PathsContract):
    @pytest.fixture
    def shelf(self, tmp_path: Path) -> Iterator[TcpShelf]:
        made = TcpShelf(tmp_path)
        yield made
        made.close()

    async def test_a_host_needs_its_secret_and_no_message_shows_one(  # type: ignore[override] # has none
        self, shelf: TcpShelf
    ) -> None:
        with pytest.raises(PathError, match=r"set nvme\.initiator to kernel") as caught:
            await shelf.paths(HOST).connect(only(shelf), SECRET)
        assert caught.value.stage is Stage.AUTHENTICATE
        assert SECRET not in str(caught.value)


class TestFilePaths(PathsContract):
    @pytest.fixture
    def shelf(self, tmp_path: Path) -> FileShelf:
        return FileShelf(tmp_path)


@pytest.fixture
def files(tmp_path: Path) -> FileShelf:
    return FileShelf(tmp_path)


def only(shelf: Shelf) -> Target:
    return Target(NQN, shelf.controllers[:1])


async def test_damaged_exports_name_their_file_and_are_nobodys(files: FileShelf) -> None:
    paths = FilePaths(HOST)
    await paths.connect(only(files), "")
    files.exports.write_text("{}")
    for ask in (paths.connect(only(files), ""), paths.namespaces(only(files))):
        with pytest.raises(PathError, match=EXPORTS_FILE) as caught:
            await ask
        assert caught.value.stage is Stage.IDENTIFY
    assert live(await paths.states(only(files))) == [False]


async def test_a_directory_that_cannot_be_read_is_not_reached(files: FileShelf) -> None:
    files.exports.unlink()
    files.exports.mkdir()
    with pytest.raises(PathError, match="directory") as caught:
        await FilePaths(HOST).connect(only(files), "")
    assert caught.value.stage is Stage.REACH


async def test_a_directory_that_is_another_enclosures_by_now_has_none_of_its_drives(files: FileShelf) -> None:
    paths = FilePaths(HOST)
    await paths.connect(only(files), "")
    write_exports(files.exports.parent, FileExports(f"{NQN}-b", files.drives))
    assert await paths.namespaces(only(files)) == ()
    assert live(await paths.states(only(files))) == [False]


async def test_a_drive_whose_file_is_gone_is_left_out(files: FileShelf) -> None:
    files.drives[NGUIDS[0]].unlink()
    assert [each.nguid for each in await FilePaths(HOST).connect(only(files), "")] == [NGUIDS[1]]


def test_a_host_needs_a_qualified_name() -> None:
    with pytest.raises(UsageError, match="qualified name"):
        FilePaths("host-1")


async def in_time(connecting: Sequence[asyncio.Task[tuple[Namespace, ...]]]) -> bool:
    """Return whether other work gets a thread before the end of any of these."""
    other = asyncio.create_task(asyncio.to_thread(lambda: None))
    ended, _ = await asyncio.wait([other, *connecting], timeout=5.0, return_when=asyncio.FIRST_COMPLETED)
    return other in ended


async def test_silent_targets_leave_threads_to_other_work() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=2 * SILENT) as listener:
        controller = Controller(TargetTransport.TCP, *listener.getsockname())
        paths = TcpPaths(HOST, HOST_ID)
        targets = [Target(f"{NQN}-{number}", (controller,)) for number in range(SILENT)]
        connecting = [asyncio.create_task(paths.connect(each, "")) for each in targets]
        await asyncio.sleep(0)
        assert await in_time(connecting)
    ends = await asyncio.gather(*connecting, return_exceptions=True)
    assert all(isinstance(each, PathError) for each in ends)


async def test_hung_folders_leave_threads_to_other_work(tmp_path: Path) -> None:
    paths, targets = FilePaths(HOST), []
    for number in range(SILENT):
        directory = tmp_path / str(number)
        directory.mkdir()
        os.mkfifo(directory / EXPORTS_FILE)
        targets.append(Target(NQN, (Controller(TargetTransport.FILES, str(directory)),)))
    connecting = [asyncio.create_task(paths.connect(each, "")) for each in targets]
    await asyncio.sleep(0)
    is_in_time = await in_time(connecting)
    while not all(each.done() for each in connecting):
        for each in targets:
            with suppress(OSError):  # without a reader yet
                pipe = Path(each.controllers[0].address, EXPORTS_FILE)
                os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
        await asyncio.wait(connecting, timeout=0.01)
    assert is_in_time
    await asyncio.gather(*connecting, return_exceptions=True)


async def test_a_name_that_no_host_can_have_hides_no_other_controller(tmp_path: Path) -> None:
    shelf = TcpShelf(tmp_path)
    impossible = Controller(TargetTransport.TCP, "no-host..invalid", 4420)
    paths, target = shelf.paths(HOST), Target(NQN, (impossible, shelf.controllers[0]))
    assert [each.nguid for each in await paths.connect(target, "")] == list(NGUIDS)
    (state, _) = await paths.states(target)
    assert "no-host..invalid:4420 can't be resolved" in state.detail
    shelf.close()
