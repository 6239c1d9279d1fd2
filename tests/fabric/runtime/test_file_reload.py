from __future__ import annotations

import errno
import io
import os
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from ostraca_fabric.errors import UsageError
from ostraca_fabric.runtime.file_reload import ReloadedFiles


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "file"
    file.write_text("first")
    return file


def words(file: Path) -> list[str]:
    """Something that is another object each time it is made."""
    try:
        text = file.read_text()
    except OSError as error:
        raise UsageError(str(error)) from error
    if text == "nonsense":
        raise UsageError("it is nonsense")
    return [text]


def test_it_is_made_once_as_long_as_its_files_stay(file: Path) -> None:
    made = ReloadedFiles([file], lambda: words(file))
    assert made.current() is made.current()
    assert made.current() == ["first"]


def test_what_was_written_over_is_used(file: Path) -> None:
    made = ReloadedFiles([file], lambda: words(file))
    file.write_text("second")
    assert made.current() == ["second"]


def test_where_a_link_leads_elsewhere_all_is_as_if_written_over(file: Path, tmp_path: Path) -> None:
    """So secrets are renewed that a cluster mounts."""
    link, other = tmp_path / "link", tmp_path / "other"
    link.symlink_to(file)
    other.write_text("other")
    made = ReloadedFiles([link], lambda: words(link))
    assert made.current() == ["first"]
    link.unlink()
    link.symlink_to(other)
    assert made.current() == ["other"]


def test_an_owner_set_again_is_no_change(file: Path) -> None:
    """The kubelet does so to mounted secrets, every minute."""
    made = ReloadedFiles([file], lambda: words(file))
    before = made.current()
    os.utime(file, ns=(0, 0))
    os.chown(file, os.getuid(), os.getgid())
    assert made.current() is before


@pytest.mark.parametrize("is_gone", [False, True])
def test_what_cannot_be_used_changes_nothing_and_is_told_once(
    file: Path, *, is_gone: bool, caplog: pytest.LogCaptureFixture
) -> None:
    made = ReloadedFiles([file], lambda: words(file))
    if is_gone:
        file.unlink()
    else:
        file.write_text("nonsense")
    assert made.current() == ["first"]
    assert made.current() == ["first"]
    assert [str(file) in record.getMessage() for record in caplog.records] == [True]
    file.write_text("second")
    assert made.current() == ["second"]


def test_what_could_not_be_used_for_another_cause_is_used_once_that_is_gone(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none_left(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    made = ReloadedFiles([file], lambda: words(file))
    file.write_text("second")
    with monkeypatch.context() as full:
        full.setattr(io, "open", none_left)
        assert made.current() == made.current() == ["first"]
    assert made.current() == ["second"]
    assert made.current() is made.current()
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1


def test_content_whose_time_was_set_back_is_used(file: Path) -> None:
    """As tools do that keep the times of what they copy."""
    before = file.stat()
    made = ReloadedFiles([file], lambda: words(file))
    file.write_text("other")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert made.current() == ["other"]


def test_two_threads_never_make_it_at_once(file: Path) -> None:
    """Else what was made of older content could come last, and stay."""
    together = threading.Barrier(2)
    met = []

    def make() -> list[str]:
        with suppress(threading.BrokenBarrierError):
            together.wait(0.1)
            met.append(threading.current_thread().name)
        return words(file)

    together.abort()
    made = ReloadedFiles([file], make)
    together.reset()
    for text in ("second", "and third"):
        file.write_text(text)
        threads = [threading.Thread(target=made.current) for _ in range(2)]
        for thread in threads:
            thread.start()
            file.write_text(f"{text} {thread.name}")
        for thread in threads:
            thread.join()
    assert not met
    assert made.current() == [file.read_text()]


def test_what_cannot_be_made_at_first_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        ReloadedFiles([tmp_path / "file"], lambda: words(tmp_path / "file"))
