"""The reference page of the client library lists every public name, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ostraca

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "client.md").read_text()
INSTANCE_ATTRIBUTES = {"tenant", "worker"}


def names_of(section: str) -> set[str]:
    """Return the names in the first column of a section's table, and the errors of the second."""
    [table] = re.findall(rf"## {section}\n\n\|[^\n]*\n\|[^\n]*\n(.*?)(?:\n\n|\Z)", PAGE, re.DOTALL)
    found: set[str] = set()
    for row in table.strip().splitlines():
        first, second = row.strip("|").split("|")
        found |= set(re.findall(r"`(\w+)`", first)) | set(re.findall(r"`(\w+Error)`", second))
    return found


def test_the_page_lists_the_names_of_the_package() -> None:
    assert names_of("Package `ostraca`") == set(dir(ostraca)) == set(ostraca.__all__)


@pytest.mark.parametrize(("kind", "more"), [(ostraca.Client, INSTANCE_ATTRIBUTES), (ostraca.Volume, set())])
def test_the_page_lists_the_members_of_clients_and_volumes(kind: type[object], more: set[str]) -> None:
    members = {name for name in dir(kind) if not name.startswith("_")}
    assert names_of(f"`{kind.__name__}`") == members | more
