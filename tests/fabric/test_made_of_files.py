from __future__ import annotations

from pathlib import Path

import pytest

from ostraca_fabric.errors import UsageError
from ostraca_fabric.made_of_files import MadeOfFiles


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
    made = MadeOfFiles([file], lambda: words(file))
    assert made.current() is made.current()
    assert made.current() == ["first"]


def test_what_was_written_over_is_used(file: Path) -> None:
    made = MadeOfFiles([file], lambda: words(file))
    file.write_text("second")
    assert made.current() == ["second"]


def test_where_a_link_leads_elsewhere_all_is_as_if_written_over(file: Path, tmp_path: Path) -> None:
    """So secrets are renewed that a cluster mounts."""
    link, other = tmp_path / "link", tmp_path / "other"
    link.symlink_to(file)
    other.write_text("other")
    made = MadeOfFiles([link], lambda: words(link))
    assert made.current() == ["first"]
    link.unlink()
    link.symlink_to(other)
    assert made.current() == ["other"]


@pytest.mark.parametrize("is_gone", [False, True])
def test_what_cannot_be_used_changes_nothing_and_is_told_once(
    file: Path, *, is_gone: bool, caplog: pytest.LogCaptureFixture
) -> None:
    made = MadeOfFiles([file], lambda: words(file))
    if is_gone:
        file.unlink()
    else:
        file.write_text("nonsense")
    assert made.current() == ["first"]
    assert made.current() == ["first"]
    assert [str(file) in record.getMessage() for record in caplog.records] == [True]
    file.write_text("second")
    assert made.current() == ["second"]


def test_what_cannot_be_made_at_first_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        MadeOfFiles([tmp_path / "file"], lambda: words(tmp_path / "file"))
