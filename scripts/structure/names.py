"""Public class names with several definitions.

Only top-level classes count. Names with a leading underscore belong to their module alone.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from scripts.structure.config import DUPLICATE_CLASSES_MAX
from scripts.structure.sources import Source
from scripts.structure.table import Row, limited


def duplicate_classes(sources: Iterable[Source]) -> dict[str, list[str]]:
    """Return the paths of each public class name with several definitions."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for source in sources:
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(source.path))
    return {name: paths for name, paths in places.items() if len(paths) > 1}


def duplicate_row(duplicates: Mapping[str, Sequence[str]]) -> Row:
    """Judge the number of shared names."""
    ordered = sorted(duplicates.items(), key=lambda item: (-len(item[1]), item[0]))
    return limited(
        "class names defined more than once",
        len(ordered),
        DUPLICATE_CLASSES_MAX,
        [f"{name} x{len(paths)}: {', '.join(paths)}" for name, paths in ordered],
    )
