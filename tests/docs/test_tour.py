"""Names in the tour of the code exist where the tour says."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "contributing" / "tour.md"
PACKAGES = ("fabric", "dpu_agent", "enclosure", "sdk")
FILES_MAX = 10

SECTIONS = PAGE.read_text().split("\n## ")[1:]
LINKS = re.findall(r"\[`([\w.]+)`\]\((\.\./\.\./[\w/]+\.py)\)", PAGE.read_text())


@cache
def names_in(file: Path) -> frozenset[str]:
    """Return the classes and functions of a file, and methods with the name of their class."""
    names: set[str] = set()
    for node in ast.parse(file.read_text()).body if file.exists() else ():
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{each.name}" for each in node.body if hasattr(each, "name")}
    return frozenset(names)


def test_every_linked_name_is_defined_in_the_linked_file() -> None:
    missing = [
        f"{name} in {path}" for name, path in LINKS if name not in names_in((PAGE.parent / path).resolve())
    ]
    assert missing == []
    assert len(LINKS) > 25


def test_every_other_name_is_defined_somewhere() -> None:
    prose = re.sub(r"```.*?```", "", PAGE.read_text(), flags=re.DOTALL)
    named = set(re.findall(r"`([A-Z]\w*[a-z]\w*(?:\.\w+)?)`", prose))
    files = [path for package in PACKAGES for path in (REPOSITORY / package).rglob("*.py")]
    known = frozenset().union(*map(names_in, files))
    assert named - known == set()


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.splitlines()[0])
def test_a_section_opens_few_files(section: str) -> None:
    assert len(set(re.findall(r"\]\(([^)]*\.py)\)", section))) <= FILES_MAX
