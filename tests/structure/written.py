"""Python files that exist in a test only."""

from __future__ import annotations

from pathlib import PurePosixPath
from textwrap import dedent

from scripts.structure.sources import Source


def written(path: str, text: str = "") -> Source:
    return Source(PurePosixPath(path), dedent(text))
