"""The tables of docs/reference/settings.md, made from the dataclasses.

``python -m tests.docs.settings_page`` writes them into the page anew.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ostraca.cli.settings.fields import group_of
from ostraca.cli.settings.values import write_value
from ostraca_dpu_agent.settings import AgentSettings

if TYPE_CHECKING:
    from ostraca.cli.settings.fields import Group, Setting

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "settings.md"
BEGIN = "<!-- From here on made by `python -m tests.docs.settings_page`. -->\n"


def page_with(tables: str) -> str:
    """Return the page with these tables in place of its own."""
    return f"{PAGE.read_text().partition(BEGIN)[0]}{BEGIN}{tables}"


def tables() -> str:
    """Return every group of an agent's settings, as the page has it."""
    return "".join(f"\n{_section(group)}" for group in group_of(AgentSettings).all_groups())


def _section(group: Group) -> str:
    title = f"## {group.name}" if group.name else "## In no group"
    head = (title, "", group.doc, "", "| setting | unit | default | what it is for |", "|---|---|---|---|")
    return "\n".join((*head, *map(_row, group.settings), ""))


def _row(setting: Setting) -> str:
    default = write_value(setting, setting.default).strip('"')  # type: ignore[arg-type]  # of its own type
    name = setting.name.rpartition(".")[2]
    return f"| `{name}` | {setting.unit.value} | {default} | {setting.doc.replace('|', '&#124;')} |"


if __name__ == "__main__":
    PAGE.write_text(page_with(tables()))
