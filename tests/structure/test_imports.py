"""The import graph and its cycles."""

from __future__ import annotations

from scripts.structure.imports import cycle_row, cycles, import_graph
from scripts.structure.table import Row, Verdict
from tests.structure.written import written


def test_edges_lead_to_modules_and_packages_that_the_sources_define() -> None:
    graph = import_graph(
        [
            written("sdk/ostraca/__init__.py", "from ostraca.client import Client"),
            written("sdk/ostraca/client.py", "import os\nimport ostraca.volume\nfrom ostraca import __all__"),
            written("sdk/ostraca/volume.py", "import numpy"),
        ]
    )
    assert graph == {
        "ostraca": {"ostraca.client"},
        "ostraca.client": {"ostraca", "ostraca.volume"},
        "ostraca.volume": frozenset(),
    }


def test_imports_for_types_and_inside_functions_are_edges() -> None:
    graph = import_graph(
        [
            written(
                "sdk/ostraca/a.py",
                """
                from typing import TYPE_CHECKING

                if TYPE_CHECKING:
                    from ostraca.b import B

                def late() -> None:
                    from ostraca import c
                """,
            ),
            written("sdk/ostraca/b.py"),
            written("sdk/ostraca/c.py"),
        ]
    )
    assert graph["ostraca.a"] == {"ostraca.b", "ostraca.c"}


def test_relative_imports_start_from_the_package_of_their_file() -> None:
    graph = import_graph(
        [
            written("sdk/ostraca/core/__init__.py", "from . import plan"),
            written("sdk/ostraca/core/plan.py", "from ..batch import Batch\nfrom .ring import Ring"),
            written("sdk/ostraca/core/ring.py"),
            written("sdk/ostraca/batch.py"),
        ]
    )
    assert graph["ostraca.core"] == {"ostraca.core.plan"}
    assert graph["ostraca.core.plan"] == {"ostraca.batch", "ostraca.core.ring"}


def test_cycles_are_whole_components_and_the_largest_comes_first() -> None:
    edges = {"a": "b", "b": "ac", "c": "d", "d": "e", "e": "fc", "f": "g", "g": ""}
    graph = {module: frozenset(imported) for module, imported in edges.items()}
    assert cycles(graph) == [["c", "d", "e"], ["a", "b"]]
    assert cycle_row(graph) == Row(
        "module cycles",
        "2 (largest 3)",
        "<= 0",
        Verdict.OVER,
        ("3 modules: c, d, e", "2 modules: a, b"),
    )


def test_modules_without_a_way_back_make_no_cycle() -> None:
    graph = {"a": frozenset("bc"), "b": frozenset("c"), "c": frozenset[str]()}
    assert cycle_row(graph) == Row("module cycles", "0 (largest 0)", "<= 0", Verdict.OK)
