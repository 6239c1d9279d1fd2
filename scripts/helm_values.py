"""Reference of the chart's values, made from the comments in ``values.yaml``.

``python -m scripts.helm_values`` writes the tables into docs/reference/helm-values.md anew.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from scripts.structure.config import GENERATED_MARK

_ROOT = Path(__file__).parents[1]
VALUES = _ROOT / "helm" / "ostraca" / "values.yaml"
PAGE = _ROOT / "docs" / "reference" / "helm-values.md"
BEGIN = f"{GENERATED_MARK} `python -m scripts.helm_values`. -->\n"

_KEY = re.compile(r"(?P<indent> *)(?P<name>[A-Za-z_]+):(?P<rest>.*)")
_INDENT = 2


@dataclass(frozen=True, slots=True)
class Value:
    """Value of the chart, or a group of values."""

    name: str
    """Full name, as in ``agent.nvme.kernel``."""

    purpose: str
    default: object
    is_group: bool


def values_of(text: str) -> list[Value]:
    """Return all values with their comments, in the order of the file.

    Keys without comments below a value belong to its default. Raises ValueError for a value without a comment
    beside commented ones.
    """
    table = yaml.safe_load(text)
    found: list[Value] = []
    comment: list[str] = []
    path: list[str] = []
    for line in text.splitlines():
        if line.strip().startswith("#"):
            comment.append(line.strip().removeprefix("#").strip())
            continue
        key = _KEY.fullmatch(line)
        if key is None:
            comment.clear()
            continue
        depth = len(key["indent"]) // _INDENT
        path = [*path[:depth], key["name"]]
        if comment or depth == 0:
            name = ".".join(path)
            if not comment:
                raise ValueError(f"{name} has no comment")
            found.append(Value(name, " ".join(comment), _at(table, path), is_group=False))
        comment.clear()
    groups = {each.name.rpartition(".")[0] for each in found}
    return [Value(each.name, each.purpose, each.default, each.name in groups) for each in found]


def page() -> str:
    """Return the page with its tables made anew."""
    return PAGE.read_text().partition(BEGIN)[0] + BEGIN + "\n".join(_tables(VALUES.read_text()))


def _tables(text: str) -> Iterator[str]:
    values = values_of(text)
    tops = [each for each in values if "." not in each.name]
    alone = [each for each in tops if not each.is_group]
    yield from _section("Top level", "", alone)
    for top in tops:
        if top.is_group:
            inner = [each for each in values if each.name.startswith(f"{top.name}.")]
            yield from _section(top.name, top.purpose, inner)


def _section(title: str, purpose: str, values: list[Value]) -> Iterator[str]:
    yield f"\n## {title}\n"
    if purpose:
        yield f"{purpose}\n"
    yield "| value | default | purpose |"
    yield "|---|---|---|"
    for each in values:
        default = "" if each.is_group or each.default == "" else f"`{_shown(each.default)}`"
        yield f"| `{each.name}` | {default} | {each.purpose} |"


def _shown(default: object) -> str:
    return default if isinstance(default, str) else json.dumps(default)


def _at(table: object, path: list[str]) -> object:
    for name in path:
        assert isinstance(table, dict)
        table = table[name]
    return table


if __name__ == "__main__":
    PAGE.write_text(page())
