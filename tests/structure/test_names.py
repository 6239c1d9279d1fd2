"""Class names with several definitions."""

from __future__ import annotations

from scripts.structure.names import duplicate_classes, duplicate_row
from scripts.structure.table import Verdict
from tests.structure.written import written


def test_public_classes_of_one_name_are_found_wherever_their_modules_are() -> None:
    found = duplicate_classes(
        [
            written("sdk/ostraca/line.py", "class Line: ..."),
            written("fabric/ostraca_fabric/lines.py", "class Line: ...\nclass Target: ..."),
        ]
    )
    assert found == {"Line": ["sdk/ostraca/line.py", "fabric/ostraca_fabric/lines.py"]}
    assert duplicate_row(found).verdict is Verdict.OVER


def test_private_and_nested_classes_may_share_a_name() -> None:
    text = """
        from typing import TypeVar

        T = TypeVar("T")

        class _Record: ...

        class {}:
            class Kind: ...
        """
    found = duplicate_classes(
        written(f"sdk/ostraca/{name}.py", text.format(name)) for name in ("Alpha", "Beta")
    )
    assert found == {}
    assert duplicate_row(found).verdict is Verdict.OK
