"""Tracked files of the repository, and Python files among them with their modules' names."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Source:
    """A text file; ``path`` is relative to the repository root."""

    path: PurePosixPath
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree of a Python file."""
        return ast.parse(self.text, str(self.path))

    @property
    def module(self) -> str:
        """The importable name of a file below the ``CODE`` folders."""
        parts = self.path.with_suffix("").parts[1:]
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def package(self) -> str:
        """The origin of relative imports in this file."""
        return self.module if self.path.name == "__init__.py" else self.module.rpartition(".")[0]


def tracked_paths(*folders: str) -> list[PurePosixPath]:
    """List existing files tracked by git in *folders*; without folders, in the whole repository."""
    listed = output_of("git", "ls-files", "-z", "--", *folders).split("\0")
    return [PurePosixPath(path) for path in listed if path and (ROOT / path).exists()]


def read_sources(paths: Iterable[PurePosixPath], suffix: str) -> list[Source]:
    """Read the files with this *suffix*."""
    return [Source(path, (ROOT / path).read_text("utf-8")) for path in paths if path.suffix == suffix]


def output_of(*command: str) -> str:
    """Run a command in the repository root; return the standard output. Raises CalledProcessError."""
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
