"""Every adapter of paths passes the same contract; then what is each one's own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.contract.paths_contract import DRIVE_BYTES, HOST, NGUIDS, NQN, PathsContract, live

from ostraca_fabric.adapters.file_exports import EXPORTS_FILE, FileExports, write_exports
from ostraca_fabric.adapters.file_paths import FilePaths
from ostraca_fabric.errors import UsageError
from ostraca_fabric.ports.paths import PathError, Stage
from ostraca_fabric.target import Controller, Target, Transport


class FileShelf:
    """An enclosure on files; a second directory of it is a second path."""

    def __init__(self, directory: Path) -> None:
        self._directories = (directory / "a", directory / "b")
        self.controllers = (
            Controller(Transport.FILES, str(self._directories[0])),
            Controller(Transport.FILES, str(self._directories[1])),
        )
        self._directories[0].mkdir()
        self._hosts: Mapping[str, str] = {}
        self.drives = {nguid: self._directories[0] / f"drive-{nguid[:2]}.img" for nguid in NGUIDS}
        for path in self.drives.values():
            with path.open("wb") as file:
                file.truncate(DRIVE_BYTES)
        self.come_back()

    @property
    def exports(self) -> Path:
        return self._directories[0] / EXPORTS_FILE

    def paths(self, host: str) -> FilePaths:
        return FilePaths(host)

    def allow(self, hosts: Mapping[str, str]) -> None:
        self._hosts = hosts
        self.come_back()

    def leave(self) -> None:
        self.exports.unlink()

    def come_back(self) -> None:
        write_exports(self._directories[0], FileExports(NQN, self.drives, self._hosts))

    def add_path(self) -> None:
        self._directories[1].symlink_to(self._directories[0])


class TestFilePaths(PathsContract):
    @pytest.fixture
    def shelf(self, tmp_path: Path) -> FileShelf:
        return FileShelf(tmp_path)


@pytest.fixture
def files(tmp_path: Path) -> FileShelf:
    return FileShelf(tmp_path)


def only(shelf: FileShelf) -> Target:
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
