"""Settings as text: a TOML file that says what each is for. Pure."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from ostraca.cli.settings.fields import group_of, value_of
from ostraca.cli.settings.values import write_value

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ostraca.cli.settings.fields import Group

_WIDTH = 100


def as_toml(settings: object, origins: Mapping[str, str]) -> str:
    """Write out settings with what their docstrings say. Read back they give the same settings."""
    groups = group_of(type(settings)).all_groups()
    blocks = ["\n".join(_lines(group, settings, origins)) for group in groups]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _lines(group: Group, settings: object, origins: Mapping[str, str]) -> Iterator[str]:
    if group.name:
        yield f"[{group.name}]"
    yield from _comment(group.doc)
    for setting in group.settings:
        yield ""
        yield from _comment(setting.doc)
        written = write_value(setting, value_of(settings, setting.name))
        default = write_value(setting, setting.default)  # type: ignore[arg-type]  # of the setting's own type
        if setting.name in origins:
            yield f"# From {origins[setting.name]}; the default is {default}."
        elif written != default:
            yield f"# The default is {default}."
        yield f"{setting.name.rpartition('.')[2]} = {written}"


def _comment(text: str) -> Iterator[str]:
    for line in textwrap.wrap(text, _WIDTH - 2, break_long_words=False, break_on_hyphens=False):
        yield f"# {line}"
