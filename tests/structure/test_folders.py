"""Counts of entries per folder."""

from __future__ import annotations

from pathlib import PurePosixPath

from scripts.structure.folders import entries_by_folder, folder_row
from scripts.structure.table import Row, Verdict


def _entries(*paths: str) -> dict[str, int]:
    return {
        str(folder): count for folder, count in entries_by_folder(map(PurePosixPath, paths)).items() if count
    }


def test_files_and_folders_with_sources_are_entries_of_their_folder_alone() -> None:
    found = _entries("sdk/ostraca/client.py", "sdk/ostraca/core/plan.py", "sdk/ostraca/core/deep/ring.c")
    assert found == {"sdk": 1, "sdk/ostraca": 2, "sdk/ostraca/core": 2, "sdk/ostraca/core/deep": 1}


def test_a_package_with_nothing_but_its_init_file_is_an_entry_without_entries() -> None:
    assert _entries("sdk/ostraca/__init__.py", "sdk/ostraca/py.typed") == {"sdk": 1}


def test_data_and_folders_of_data_are_no_entries() -> None:
    paths = (
        "benchmarks/a.py",
        "benchmarks/text.txt",
        "benchmarks/results/plot.py",
        "docs/adr/0001-layout.md",
    )
    assert _entries(*paths) == {"benchmarks": 1}


def test_a_folder_over_the_limit_is_named_and_one_at_the_limit_is_not() -> None:
    entries = {PurePosixPath("sdk/full"): 15, PurePosixPath("sdk/crowded"): 16}
    assert folder_row(entries) == Row(
        "entries in the fullest folder", "16 (1 folders over)", "<= 15", Verdict.OVER, (" 16 sdk/crowded",)
    )
    del entries[PurePosixPath("sdk/crowded")]
    assert folder_row(entries).verdict is Verdict.OK
