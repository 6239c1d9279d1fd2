"""Entries per folder: tracked source files, and folders that contain any."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath

from scripts.structure.config import DATA_FOLDERS, DATA_SUFFIXES, ENTRIES_MAX, NOT_ENTRIES
from scripts.structure.table import Row, limited


def entries_by_folder(paths: Iterable[PurePosixPath]) -> dict[PurePosixPath, int]:
    """Count entries of each folder, from all tracked *paths*. Data files and data folders are no entries."""
    entries: defaultdict[PurePosixPath, set[str]] = defaultdict(set)
    for path in filter(is_source, paths):
        if path.name not in NOT_ENTRIES:
            entries[path.parent].add(path.name)
        for folder in path.parents[:-1]:
            if folder.parent.name:
                entries[folder.parent].add(folder.name)
    return {folder: len(names) for folder, names in entries.items()}


def is_source(path: PurePosixPath) -> bool:
    """Return whether a person reads and edits this file as part of the code or the docs."""
    return path.suffix not in DATA_SUFFIXES and DATA_FOLDERS.isdisjoint(path.parent.parts)


def folder_row(entries: Mapping[PurePosixPath, int]) -> Row:
    """Judge the fullest folder."""
    by_count = sorted(entries.items(), key=lambda item: (-item[1], item[0]))
    over = [f"{count:3} {folder}" for folder, count in by_count if count > ENTRIES_MAX]
    return limited(
        "entries in the fullest folder",
        by_count[0][1] if by_count else 0,
        ENTRIES_MAX,
        over,
        note=f" ({len(over)} folders over)",
    )
