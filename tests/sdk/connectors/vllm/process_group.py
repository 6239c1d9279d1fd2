"""Processes of one group, and the shared memory that vLLM leaves behind when it is stopped."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path


def members(group: int) -> Iterator[tuple[int, str]]:
    """Return the processes of a group that have not ended, with their commands."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (folder / "cmdline").read_text()
            if command and os.getpgid(int(folder.name)) == group:
                yield int(folder.name), command


def mapped_files(group: int) -> set[Path]:
    """Return the files of shared memory that processes of a group have mapped."""
    found = set()
    for process, _ in members(group):
        with contextlib.suppress(OSError):
            found |= set(re.findall(r"/dev/shm/\S+", Path(f"/proc/{process}/maps").read_text()))
    return {Path(name) for name in found}
