"""All measures of the repository as rows."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import PurePosixPath

from scripts.structure.config import CODE, FOLDERS, GET_MODULES_MAX, SUPPORT
from scripts.structure.folders import entries_by_folder, folder_row
from scripts.structure.history import subject_row
from scripts.structure.imports import cycle_row, import_graph
from scripts.structure.lines import line_rows
from scripts.structure.names import duplicate_classes, duplicate_row
from scripts.structure.prose_rows import code_prose_rows, docs_rows
from scripts.structure.sources import ROOT, read_sources, tracked_paths
from scripts.structure.table import Row, Verdict, limited

CANNOT_RUN = 77
"""Exit code of ``scripts.structure.get_path`` on a machine without NIXL or etcd; automake's for a skip."""

GET_MEASURE = "modules on the path of a get"


def static_rows() -> list[Row]:
    """Measure files and commits."""
    tracked = tracked_paths()
    code = [each for each in read_sources(tracked, ".py") if each.path.parts[0] in (*CODE, *SUPPORT)]
    shipped = [each for each in code if each.path.parts[0] in CODE]
    return [
        folder_row(entries_by_folder(path for path in tracked if path.parts[0] in FOLDERS)),
        duplicate_row(duplicate_classes(shipped)),
        cycle_row(import_graph(shipped)),
        *docs_rows(read_sources(tracked, ".md")),
        *code_prose_rows(code),
        *line_rows(shipped),
        subject_row(),
    ]


def get_path_row() -> Row:
    """Measure a get of a running fabric, in a process of its own."""
    command = [sys.executable, "-m", "scripts.structure.get_path"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    match done.returncode:
        case 0:
            return get_modules_row(done.stdout.splitlines())
        case code:
            verdict = Verdict.ABSENT if code == CANNOT_RUN else Verdict.FAILED
            words = done.stderr.strip().splitlines() or [f"exit code {code}"]
            return Row(GET_MEASURE, "not measured", f"<= {GET_MODULES_MAX}", verdict, tuple(words))


def get_modules_row(modules: list[str]) -> Row:
    """Judge the modules, given as paths in the repository."""
    by_package = Counter("/".join(PurePosixPath(module).parts[:2]) for module in modules)
    shares = ", ".join(f"{package} {count}" for package, count in by_package.most_common())
    return limited(GET_MEASURE, len(modules), GET_MODULES_MAX, [shares, *sorted(modules)])
