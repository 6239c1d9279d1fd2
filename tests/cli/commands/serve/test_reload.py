"""Files that are read again when they change."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from ostraca_cli.commands.serve.reload import FileReloader
from ostraca_fabric.errors import FormatError


class Use:
    """Uses what a file says, unless that is wrong."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.used: list[str] = []
        self.is_unable = False
        self.again = asyncio.Event()

    def __call__(self) -> None:
        content = self.file.read_text()
        if content == "wrong" or self.is_unable:
            message = "the file is wrong"
            raise FormatError(message)
        self.used.append(content)
        self.again.set()


def reloading(file: Path, *, look_s: float = 60.0) -> tuple[Use, FileReloader]:
    use = Use(file)
    return use, FileReloader([file], use, look_s=look_s)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text("first")
    return path


def test_a_file_is_read_again_only_when_it_has_changed(file: Path) -> None:
    use, watched = reloading(file)
    assert not watched.look()
    file.write_text("second, and longer")
    assert watched.look()
    assert not watched.look()
    assert use.used == ["second, and longer"]


def test_a_request_without_files_is_passed_on_without_a_line_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    used: list[bool] = []
    watched = FileReloader([], lambda: used.append(True), look_s=60.0)
    with caplog.at_level(logging.INFO):
        assert watched.look(is_requested=True)
    assert (used, caplog.messages) == ([True], [])


def test_a_link_that_leads_elsewhere_is_a_change(file: Path, tmp_path: Path) -> None:
    link, other = tmp_path / "link", tmp_path / "other"
    other.write_text("other")
    link.symlink_to(file)
    use, watched = reloading(link)
    (tmp_path / "next").symlink_to(other)
    (tmp_path / "next").rename(link)
    assert watched.look()
    assert use.used == ["other"]


def test_a_wrong_file_leaves_all_as_it_was_and_is_told_once_until_it_is_right(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    use, watched = reloading(file)
    file.write_text("wrong")
    with caplog.at_level(logging.ERROR):
        assert not watched.look()
        assert not watched.look()
    assert [record.message for record in caplog.records] == [
        f"Unusable change of {file}, the previous content stays in use: the file is wrong"
    ]
    file.write_text("right again")
    assert watched.look()
    assert use.used == ["right again"]


def test_a_file_that_could_not_be_used_for_another_cause_is_used_once_that_is_gone(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    use, watched = reloading(file)
    file.write_text("second, and longer")
    use.is_unable = True
    assert not watched.look()
    assert not watched.look()
    use.is_unable = False
    assert watched.look()
    assert not watched.look()
    assert use.used == ["second, and longer"]
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1


async def test_a_signal_reads_it_again_changed_or_not(file: Path) -> None:
    use, watched = reloading(file)
    running = asyncio.create_task(watched.run())
    watched.look_now()
    await asyncio.wait_for(use.again.wait(), 10)
    assert use.used == ["first"]
    running.cancel()
    await asyncio.wait([running])


async def test_without_a_signal_it_looks_now_and_then(file: Path) -> None:
    use, watched = reloading(file, look_s=0.01)
    changed(file)
    running = asyncio.create_task(watched.run())
    await asyncio.wait_for(use.again.wait(), 10)
    running.cancel()
    await asyncio.wait([running])
    assert use.used == ["changed by itself"]


@pytest.mark.parametrize("turns", range(6))
async def test_it_ends_when_it_is_cancelled_just_after_a_signal(file: Path, turns: int) -> None:
    _, watched = reloading(file)
    running = asyncio.create_task(watched.run())
    await asyncio.sleep(0)
    watched.look_now()
    for _ in range(turns):
        await asyncio.sleep(0)
    running.cancel()
    done, _ = await asyncio.wait([running], timeout=5)
    assert done == {running}


def changed(file: Path) -> None:
    file.write_text("changed by itself")
