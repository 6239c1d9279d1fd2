"""What settings there are: read off the dataclasses that hold them, docstrings included. Pure."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any, cast, get_type_hints

Class = type
"""Where ``type`` is the name of a field."""


class Unit(Enum):
    """What a number counts, as its name says."""

    SECONDS = "seconds"
    BYTES = "bytes"
    BYTES_PER_SECOND = "bytes a second"
    SHARE = "share"
    NONE = ""


@dataclass(frozen=True, slots=True)
class Setting:
    """One value that may be set."""

    name: str
    """With its groups, as in ``owner.hold_s``."""

    type: type
    """``int``, ``float``, ``bool``, ``str``, or ``tuple`` for one of strings."""

    default: object
    holder: Class = field(compare=False)
    """The dataclass that has it as a field."""

    @property
    def doc(self) -> str:
        """The docstring that follows the field; read from the source, so only where it is shown."""
        return field_docs(self.holder).get(self.name.rpartition(".")[2], "")

    @property
    def unit(self) -> Unit:
        """What the name says that it counts."""
        words = self.name.rpartition(".")[2].split("_")
        if self.type not in (int, float):
            return Unit.NONE
        if "bytes" in words:
            return Unit.BYTES_PER_SECOND if words[-1] == "s" else Unit.BYTES
        if words[-1] == "s":
            return Unit.SECONDS
        return Unit.SHARE if "share" in words else Unit.NONE


@dataclass(frozen=True, slots=True)
class Group:
    """One dataclass: its own settings, and the groups within."""

    name: str
    """Empty for the outermost one."""

    doc: str
    settings: tuple[Setting, ...]
    groups: tuple[Group, ...]

    def all_groups(self) -> tuple[Group, ...]:
        """Return this group and all within, each before those that it holds."""
        return (self, *(inner for group in self.groups for inner in group.all_groups()))

    def all_settings(self) -> tuple[Setting, ...]:
        """Return every setting of this group and those within."""
        return tuple(setting for group in self.all_groups() for setting in group.settings)


def group_of(cls: type, name: str = "") -> Group:
    """Return what may be set of a dataclass. Every field must have a default."""
    hints = get_type_hints(cls)
    settings, groups = [], []
    for each in fields(cls):
        full = f"{name}.{each.name}" if name else each.name
        hint = hints[each.name]
        if is_dataclass(hint):
            groups.append(group_of(cast("type", hint), full))
            continue
        kind = tuple if hint == tuple[str, ...] else hint
        assert kind in (int, float, bool, str, tuple), f"{full} is a {hint}, which no file can hold"
        assert each.default is not MISSING, f"{full} has no default"
        settings.append(Setting(full, kind, each.default, cls))
    return Group(name, paragraph(inspect.getdoc(cls) or ""), tuple(settings), tuple(groups))


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """Return the docstrings that follow a class's fields, those it inherits as well, each as one
    paragraph.
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
    """Return a docstring as one line."""
    return " ".join(text.split())
