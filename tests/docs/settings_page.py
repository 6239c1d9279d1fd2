"""The tables of docs/reference/settings.md, daemon-settings.md, admin-settings.md and
enclosure-settings.md, made from the dataclasses; and that of live-settings.md, made from what is sent.

``python -m tests.docs.settings_page`` writes them into the pages anew.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ostraca.cli.serve.admin_settings import AdminSettings
from ostraca.cli.serve.daemon_settings import DaemonSettings
from ostraca.cli.serve.enclosure.settings import EnclosureDaemonSettings
from ostraca.cli.settings.fields import group_of
from ostraca.cli.settings.values import write_value
from ostraca_dpu_agent.settings import AgentSettings
from ostraca_fabric.admin.api.settings import SettingsForm

if TYPE_CHECKING:
    from ostraca.cli.settings.fields import Group, Setting

_REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
AGENT_PAGE = _REFERENCE / "settings.md"
DAEMON_PAGE = _REFERENCE / "daemon-settings.md"
ADMIN_PAGE = _REFERENCE / "admin-settings.md"
ENCLOSURE_PAGE = _REFERENCE / "enclosure-settings.md"
LIVE_PAGE = _REFERENCE / "live-settings.md"
BEGIN = "<!-- From here on made by `python -m tests.docs.settings_page`. -->\n"


def page_with(page: Path, tables: str) -> str:
    """Return a page with these tables in place of its own."""
    return f"{page.read_text().partition(BEGIN)[0]}{BEGIN}{tables}"


def agent_tables() -> str:
    """Return every group of an agent's settings, as the page has it."""
    return "".join(f"\n{_section(group)}" for group in group_of(AgentSettings).all_groups())


def daemon_tables() -> str:
    """Return what may be set of `ostraca serve agent` beside that."""
    known = {setting.name for setting in group_of(AgentSettings).all_settings()}
    own = (
        replace(group, settings=tuple(each for each in group.settings if each.name not in known))
        for group in group_of(DaemonSettings).all_groups()
    )
    return "".join(f"\n{_section(group)}" for group in own if group.settings)


def admin_tables() -> str:
    """Return what may be set of `ostraca serve admin`."""
    return "".join(f"\n{_section(group)}" for group in group_of(AdminSettings).all_groups())


def enclosure_tables() -> str:
    """Return every group of what may be set of `ostraca serve enclosure`."""
    groups = group_of(EnclosureDaemonSettings).all_groups()
    return "".join(f"\n{_section(group)}" for group in groups)


def live_table() -> str:
    """Return what may be set of all agents while they run."""
    fields = SettingsForm.model_json_schema()["properties"]
    rows = (
        f"| `{name}` | {_kind(said['anyOf'][0])} | {said['description']} |" for name, said in fields.items()
    )
    return "\n".join(("", "| setting | values | what it is for |", "|---|---|---|", *rows, ""))


def _kind(said: dict[str, Any]) -> str:
    if "enum" in said:
        return ", ".join(f"`{value}`" for value in said["enum"])
    return {"number": "seconds", "integer": "a number", "boolean": "`on`, `off`"}[said["type"]]


def _section(group: Group) -> str:
    title = f"## {group.name}" if group.name else "## In no group"
    head = (title, "", group.doc, "", "| setting | unit | default | what it is for |", "|---|---|---|---|")
    return "\n".join((*head, *map(_row, group.settings), ""))


def _row(setting: Setting) -> str:
    default = write_value(setting, setting.default).strip('"')  # type: ignore[arg-type]  # of its own type
    name = setting.name.rpartition(".")[2]
    return f"| `{name}` | {setting.unit.value} | {default} | {setting.doc.replace('|', '&#124;')} |"


if __name__ == "__main__":
    AGENT_PAGE.write_text(page_with(AGENT_PAGE, agent_tables()))
    DAEMON_PAGE.write_text(page_with(DAEMON_PAGE, daemon_tables()))
    ADMIN_PAGE.write_text(page_with(ADMIN_PAGE, admin_tables()))
    ENCLOSURE_PAGE.write_text(page_with(ENCLOSURE_PAGE, enclosure_tables()))
    LIVE_PAGE.write_text(page_with(LIVE_PAGE, live_table()))
