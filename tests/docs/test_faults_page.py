"""docs/explanation/faults.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs" / "explanation" / "faults.md").read_text()


def test_every_test_that_the_page_names_exists() -> None:
    code = "".join(path.read_text() for path in (REPOSITORY / "tests").rglob("test_*.py"))
    there = re.findall(r"def test_(\w+)\(", code)
    named = re.findall(r"`([a-z]+(?:_[a-z]+){4,})(…?)`", PAGE)
    assert len(named) > 20
    for name, is_short in named:
        assert any(each == name or (is_short and each.startswith(name)) for each in there), name
