"""The tables of the settings' reference pages, made from the dataclasses.

That of live-settings.md from the form that is sent.

``python -m tests.docs.settings_page`` writes the tables into the pages anew.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ostraca_admin.api.routes.settings import SettingsForm
from ostraca_cli.commands.serve.admin_settings import AdminSettings
from ostraca_cli.commands.serve.daemon_settings import DaemonSettings
from ostraca_cli.commands.serve.enclosure.settings import EnclosureDaemonSettings
from ostraca_cli.settings.fields import Unit, group_of
from ostraca_cli.settings.values import write_value
from ostraca_dpu_agent.settings import AgentSettings

if TYPE_CHECKING:
    from ostraca_cli.settings.fields import Group, Setting

_REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
AGENT_PAGE = _REFERENCE / "settings.md"
DAEMON_PAGE = _REFERENCE / "daemon-settings.md"
ADMIN_PAGE = _REFERENCE / "admin-settings.md"
ENCLOSURE_PAGE = _REFERENCE / "enclosure-settings.md"
LIVE_PAGE = _REFERENCE / "live-settings.md"
BEGIN = "<!-- From here on made by `python -m tests.docs.settings_page`. -->\n"
FIRST_BEGIN = "<!-- This table is made by `python -m tests.docs.settings_page`. -->\n"
FIRST_END = "<!-- End of the table. -->\n"


_TIMES = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"), (1e-3, "ms"))
_RATES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_HEAD = ("| setting | default | purpose |", "|---|---|---|")

TUNED_FIRST = {
    "memory.cache_bytes": "the host has memory to spare: gets from DRAM need no flash read",
    "memory.staging_bytes": "gets are `DECLINED(OVERLOADED)` while drives are idle",
    "memory.chunk_bytes": "blocks are larger than this",
    "memory.cache_protected_share": "few prefixes serve nearly all requests",
    "flow.requests_max": "more workers share one agent",
    "connections.connections_max": "workers and peers exceed the limit",
    "owner.blocks_per_shard_max": "`indexes_have_room` is untrue while flash is not full",
    "owner.endurance.rated_dwpd": "drives must last: copy the rating of the data sheet",
    "owner.scrub.bytes_s": "a pass takes too long, or scrubbing should cost less",
    "owner.grant_s": "`etcd.lease_ttl_s` changes: keep both equal, at all agents",
    "owner.late_write_s": "`fast_io_fail_tmo` of paths exceeds a minute",
    "nvme.io_queues": "the processor of a queue limits agents of a small pod",
    "health.file_overdue_s": "drives are files on spinning disks",
    "drain_s": "deadlines in use are longer",
    "placement_ttl_s": "the next change of enclosures waits for an earlier placement epoch",
}
"""The settings that operators change first, each with the occasion."""


def page_with(page: Path, tables: str) -> str:
    """Return a page with these tables in place of its own."""
    return f"{page.read_text().partition(BEGIN)[0]}{BEGIN}{tables}"


def agent_page() -> str:
    """Return the agent's page: settings to tune first, then how to set them, then every group."""
    head, _, rest = AGENT_PAGE.read_text().partition(FIRST_BEGIN)
    _, _, rest = rest.partition(FIRST_END)
    how, _, _ = rest.partition(BEGIN)
    return f"{head}{FIRST_BEGIN}{first_table()}{FIRST_END}{how}{BEGIN}{agent_tables()}"


def first_table() -> str:
    """Return the settings to tune first, with defaults as in the code."""
    known = {setting.name: setting for setting in group_of(AgentSettings).all_settings()}
    rows = (f"| `{name}` | {_default(known[name])} | {when} |" for name, when in TUNED_FIRST.items())
    return "\n".join(("", "| setting | default | change if |", "|---|---|---|", *rows, "", ""))


def agent_tables() -> str:
    """Return every group of an agent's settings, as the page has it."""
    return "".join(f"\n{_section(group)}" for group in group_of(AgentSettings).all_groups())


def daemon_tables() -> str:
    """Return the settings of `ostraca serve agent` that `ostraca up` has not."""
    known = {setting.name for setting in group_of(AgentSettings).all_settings()}
    own = (
        replace(group, settings=tuple(each for each in group.settings if each.name not in known))
        for group in group_of(DaemonSettings).all_groups()
    )
    return "".join(f"\n{_section(group)}" for group in own if group.settings)


def admin_tables() -> str:
    """Return the settings of `ostraca serve admin`."""
    return _with_links(AdminSettings)


def enclosure_tables() -> str:
    """Return the settings of `ostraca serve enclosure`."""
    return _with_links(EnclosureDaemonSettings)


def _with_links(cls: type) -> str:
    """Return every group; in place of a group that an agent has as well, a link to that."""
    agents = group_of(AgentSettings).all_groups()
    daemons = group_of(DaemonSettings).all_groups()
    sections = []
    for group in group_of(cls).all_groups():
        page = AGENT_PAGE if group in agents else DAEMON_PAGE if group in daemons else None
        if page is None:
            sections.append(_section(group))
        else:
            link = f"[`{group.name}` of an agent]({page.name}#{group.name})"
            sections.append(f"## {group.name}\n\nThe same settings and defaults as {link}.\n")
    return "".join(f"\n{section}" for section in sections)


def live_table() -> str:
    """Return what may be set of all agents while they run."""
    fields = SettingsForm.model_json_schema()["properties"]
    rows = (
        f"| `{name}` | {_kind(said['anyOf'][0])} | {said['description']} |" for name, said in fields.items()
    )
    return "\n".join(("", "| setting | values | purpose |", "|---|---|---|", *rows, ""))


def _kind(said: dict[str, Any]) -> str:
    if "enum" in said:
        return ", ".join(f"`{value}`" for value in said["enum"])
    return {"number": "seconds", "integer": "a number", "boolean": "`on`, `off`", "string": "a name"}[
        said["type"]
    ]


def _section(group: Group) -> str:
    title = f"## {group.name}" if group.name else "## Top level"
    return "\n".join((title, "", group.doc, "", *_HEAD, *map(_row, group.settings), ""))


def _row(setting: Setting) -> str:
    name = setting.name.rpartition(".")[2]
    return f"| `{name}` | {_default(setting)} | {setting.doc.replace('|', '&#124;')} |"


def _default(setting: Setting) -> str:
    """Return a default as a settings file may write it, short: in the largest unit that divides it."""
    units = {Unit.SECONDS: _TIMES, Unit.BYTES_PER_SECOND: _RATES}.get(setting.unit, ())
    for size, name in units:
        count = setting.default / size  # type: ignore[operator]  # a number, as it has a unit
        if count >= 1 and math.isclose(count, round(count)):
            return f"{round(count)}{name}"
    return write_value(setting, setting.default).strip('"')  # type: ignore[arg-type]  # of its own type


if __name__ == "__main__":
    AGENT_PAGE.write_text(agent_page())
    DAEMON_PAGE.write_text(page_with(DAEMON_PAGE, daemon_tables()))
    ADMIN_PAGE.write_text(page_with(ADMIN_PAGE, admin_tables()))
    ENCLOSURE_PAGE.write_text(page_with(ENCLOSURE_PAGE, enclosure_tables()))
    LIVE_PAGE.write_text(page_with(LIVE_PAGE, live_table()))
