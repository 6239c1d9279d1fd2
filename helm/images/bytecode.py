"""Compiled Python modules for a layer: a read-only image cannot cache any at run time."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from helm.images.layers import Entries


def add_bytecode(entries: Entries, modules: Iterable[tuple[str, bytes]], python: str) -> None:
    """Compile modules, given as paths and texts. Does nothing for another Python than *python*."""
    if python != f"{sys.version_info.major}.{sys.version_info.minor}":
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for module, text in modules:
            (folder / module).parent.mkdir(parents=True, exist_ok=True)
            (folder / module).write_bytes(text)
        compile_tree(folder)
        for path in sorted(folder.rglob("*.pyc")):
            entries.add_file(path.relative_to(folder).as_posix(), path.read_bytes())


def compile_tree(folder: Path, prefix: str = "/") -> None:
    """Compile all modules below *folder*; tracebacks name files below *prefix*."""
    # Hashes in place of times, and a fixed hash seed, make the result reproducible. Some packages carry
    # templates that are no valid modules, hence no check of the exit code.
    subprocess.run(
        [
            *(sys.executable, "-m", "compileall", "-qq", "-j", "2", "-s", str(folder), "-p", prefix),
            *("--invalidation-mode", "unchecked-hash", str(folder)),
        ],
        check=False,
        env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONPYCACHEPREFIX": ""},
        stdout=subprocess.DEVNULL,
    )
