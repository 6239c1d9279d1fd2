"""The chart's values: each has a comment, a row in the reference, and a place in the schema."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from scripts.helm_values import PAGE, VALUES, page, values_of

SCHEMA = json.loads((VALUES.parent / "values.schema.json").read_text())


def test_the_reference_is_what_the_values_say_of_themselves() -> None:
    assert PAGE.read_text() == page(), "run: python -m scripts.helm_values"


def test_a_value_without_a_comment_is_refused() -> None:
    with pytest.raises(ValueError, match="second has no comment"):
        values_of("# Comment.\nfirst: 1\nsecond: 2\n")


def test_each_value_is_described_once() -> None:
    values = values_of(VALUES.read_text())
    names = [each.name for each in values]
    assert len(names) == len(set(names))
    described = {each.name for each in values if not each.is_group}
    assert _leaves(yaml.safe_load(VALUES.read_text()), described) == described


def test_the_schema_has_the_same_names_and_admits_no_others() -> None:
    described = {each.name for each in values_of(VALUES.read_text()) if not each.is_group}
    assert _properties(SCHEMA, described) == described | {"global"}


def _leaves(table: dict[str, Any], described: set[str], prefix: str = "") -> set[str]:
    found: set[str] = set()
    for key, value in table.items():
        name = f"{prefix}{key}"
        is_inner = isinstance(value, dict) and value and name not in described
        found |= _leaves(value, described, f"{name}.") if is_inner else {name}
    return found


def _properties(schema: dict[str, Any], described: set[str], prefix: str = "") -> set[str]:
    found: set[str] = set()
    for key, inner in schema["properties"].items():
        name = f"{prefix}{key}"
        is_inner = "properties" in inner and name not in described
        if is_inner:
            assert inner["additionalProperties"] is False, name
        found |= _properties(inner, described, f"{name}.") if is_inner else {name}
    return found
