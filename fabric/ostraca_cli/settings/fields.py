"""Description of settings, derived from dataclasses and their docstrings. Pure."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any, cast, get_type_hints

Class = type
"""Alias, because ``Setting`` has a field named ``type``."""


class Unit(Enum):
    """Unit of a number, derived from the setting's name."""

    SECONDS = "seconds"
    BYTES = "bytes"
    BYTES_PER_SECOND = "bytes a second"
    SHARE = "share"
    NONE = ""


@dataclass(frozen=True, slots=True)
class Setting:
    """Setting with a single value."""

    name: str
    """Name with groups, as in ``owner.hold_s``."""

    type: type
    """``int``, ``float``, ``bool``, ``str``, or ``tuple`` for a tuple of strings."""

    default: object
    holder: Class = field(compare=False)
    """Dataclass with the field."""

    @property
    def doc(self) -> str:
        """Return the docstring after the field, read from the source on demand."""
        return field_docs(self.holder).get(self.name.rpartition(".")[2], "")

    @property
    def unit(self) -> Unit:
        """Return the unit implied by the name."""
        words = self.name.rpartition(".")[2].split("_")
        if self.type not in (int, float):
            return Unit.NONE
        if "bytes" in words:
            return Unit.BYTES_PER_SECOND if words[-1] == "s" else Unit.BYTES
        if words[-1] == "s" and "per" not in words:
            return Unit.SECONDS
        return Unit.SHARE if "share" in words else Unit.NONE


@dataclass(frozen=True, slots=True)
class Group:
    """Dataclass of settings: own settings and inner groups."""

    name: str
    """Empty for the outermost group."""

    doc: str
    settings: tuple[Setting, ...]
    groups: tuple[Group, ...]

    def all_groups(self) -> tuple[Group, ...]:
        """Return this group and all inner groups, outer groups first."""
        return (self, *(inner for group in self.groups for inner in group.all_groups()))

    def all_settings(self) -> tuple[Setting, ...]:
        """Return the settings of this group and all inner groups."""
        return tuple(setting for group in self.all_groups() for setting in group.settings)


def group_of(cls: type, name: str = "") -> Group:
    """Describe the settings of a dataclass; every field must have a default."""
    hints = get_type_hints(cls)
    settings, groups = [], []
    for each in fields(cls):
        full = f"{name}.{each.name}" if name else each.name
        hint = hints[each.name]
        if is_dataclass(hint):
            groups.append(group_of(cast("type", hint), full))
            continue
        kind = tuple if hint == tuple[str, ...] else hint
        assert kind in (int, float, bool, str, tuple), f"{full} has the unsupported type {hint}"
        assert each.default is not MISSING, f"{full} has no default"
        settings.append(Setting(full, kind, each.default, cls))
    return Group(name, paragraph(inspect.getdoc(cls) or ""), tuple(settings), tuple(groups))


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """Return the docstrings after the fields of a class, inherited fields included.

    Each docstring becomes a single paragraph.
    """
    docs: dict[str, str] = {}
    for each in reversed(cls.__mro__):
        if is_dataclass(each):
            docs |= _own_docs(each)
    return docs


def _own_docs(cls: type) -> dict[str, str]:
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    docs = {}
    for one, after in zip(tree.body, tree.body[1:], strict=False):
        match one, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                docs[name] = paragraph(text)
    return docs


def value_of(settings: object, name: str) -> Any:  # noqa: ANN401 (a setting of any type)
    """Return the value of a setting, by its name with groups."""
    for part in name.split("."):
        settings = getattr(settings, part)
    return settings


def paragraph(text: str) -> str:
    """Return a docstring as a single line."""
    return " ".join(text.split())
