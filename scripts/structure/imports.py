"""Import graph of first-party modules, and its cycles.

Imports for types and imports inside functions count. As in import-linter, an import of ``a.b`` is an edge to
``a.b`` and not to the packages above.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping

from scripts.structure.config import CYCLES_MAX
from scripts.structure.sources import Source
from scripts.structure.table import Row, limited

Graph = Mapping[str, frozenset[str]]
"""Imported modules of each module."""


def import_graph(sources: Iterable[Source]) -> dict[str, frozenset[str]]:
    """Build the graph of the modules that *sources* define; other imports are left out."""
    by_module = {source.module: source for source in sources}
    return {
        module: frozenset(
            name if name in by_module else name.rpartition(".")[0] for name in imported_names(source)
        )
        & by_module.keys() - {module}
        for module, source in by_module.items()
    }


def imported_names(source: Source) -> Iterator[str]:
    """Yield the absolute name of each imported module or member, as in ``package.module.Member``."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = origin_of(node, source.package)
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def origin_of(node: ast.ImportFrom, package: str) -> str:
    """Return the absolute name of the module that ``from ... import`` names, inside *package*."""
    if node.level == 0:
        return node.module or ""
    above = package.split(".")[: len(package.split(".")) - node.level + 1]
    return ".".join([*above, *([node.module] if node.module else [])])


def cycles(graph: Graph) -> list[list[str]]:
    """Return the strongly connected components with several members, the largest first.

    Source: Tarjan, "Depth-first search and linear graph algorithms", 1972.
    """
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        order[module] = lowest[module] = len(order)
        stack.append(module)
        for imported in sorted(graph[module]):
            if imported not in order:
                visit(imported)
                lowest[module] = min(lowest[module], lowest[imported])
            elif imported in stack:
                lowest[module] = min(lowest[module], order[imported])
        if lowest[module] == order[module]:
            begin = stack.index(module)
            members = sorted(stack[begin:])
            del stack[begin:]
            if len(members) > 1:
                found.append(members)

    for module in sorted(graph):
        if module not in order:
            visit(module)
    return sorted(found, key=lambda members: (-len(members), members))


def cycle_row(graph: Graph) -> Row:
    """Judge the number of cycles."""
    found = cycles(graph)
    return limited(
        "module cycles",
        len(found),
        CYCLES_MAX,
        [f"{len(members)} modules: {', '.join(members)}" for members in found],
        note=f" (largest {max(map(len, found), default=0)})",
    )
