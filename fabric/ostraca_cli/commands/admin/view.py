"""Views of admin service responses for people; needs rich."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Column, Table
from rich.text import Text

from ostraca_admin.api.views import (
    AgentView,
    AuditView,
    CapacityView,
    DriveView,
    EnclosureDriveView,
    EnclosureView,
    MapView,
    OperationView,
    PlacementView,
    ShardView,
    StepView,
    TenantView,
    VolumeView,
)
from ostraca_cli.commands.admin.responses import items, printable, read, remaining_text
from ostraca_cli.terminal.tables import folded, number, print_view, table
from ostraca_cli.terminal.units import size_text

_Column = tuple[str | Column, Callable[[Any], str | Text]]
"""Header, and the text of an item."""

_MARKS = {"done": "✓", "failed": "✗", "cancelled": "✗"}
_STYLES = {"done": "green", "failed": "red", "cancelled": "yellow", "running": "cyan", "waiting": "dim"}
_BAR_COLUMNS = 40


def show_list(kind: str, pages: Iterable[bytes]) -> None:
    """Print the list at ``/v1/kind`` as a table; raises AdminRefusedError."""
    item_type, *columns = _LISTS[kind]
    listed = items(pages, item_type)
    notes = _NOTES.get(kind, lambda _: ())
    print_view(Group(_columns(listed, columns), *(note for each in listed for note in notes(each))))


def show_resource(kind: str, body: bytes, etag: str) -> None:
    """Print a resource of this kind; raises AdminRefusedError."""
    resource_type, facts, *parts = _RESOURCES[kind]
    found = read(body, resource_type)
    named = (*facts(found), *([("ETag", etag)] if etag else []))
    print_view(Group(*([_facts(named)] if named else []), *(part(found) for part in parts)))


def operation_view(operation: OperationView, *, is_live: bool = False) -> Group:
    """Return the progress of a long operation, step by step.

    *is_live*: the view is refreshed in place.
    """
    steps = Table.grid(Column(), Column(), folded(""), padding=(0, 1))
    for step in operation.steps:
        steps.add_row(_mark(step, is_live=is_live), _text(step.name), _text(step.message))
    head = Text.assemble(
        f"{printable(operation.title)}, operation {printable(operation.id)}: ",
        (printable(operation.state), _STYLES.get(operation.state, "")),
    )
    if operation.has_ended:
        return Group(head, steps, *([_text(operation.message)] if operation.message else []))
    bar = Table.grid(padding=(0, 1))
    bar.add_row(
        ProgressBar(total=1.0, completed=operation.progress, width=_BAR_COLUMNS),
        f"{operation.progress:.0%}{remaining_text(operation)}",
    )
    return Group(head, steps, bar)


def audit_text(entry: AuditView) -> str:
    """Return an entry of the audit log as a line."""
    text = f"{time_text(entry.at)}  {entry.actor} ({entry.role})  {entry.action}  {entry.detail}"
    return printable(text.rstrip())


def time_text(at: datetime | None) -> str:
    """Write a time in the zone of this machine."""
    return "–" if at is None else f"{at.astimezone():%Y-%m-%d %H:%M:%S}"


def _enclosure_facts(enclosure: EnclosureView) -> Sequence[tuple[str, str]]:
    spec, status = enclosure.spec, enclosure.status
    return (
        ("enclosure", enclosure.name),
        ("phase", status.phase),
        ("usable", size_text(status.usable_bytes)),
        ("NQN", spec.nqn),
        *(("controller", controller) for controller in spec.controllers),
        ("secret", spec.secret or "none"),
        ("failure domain", spec.failure_domain or "its own"),
        ("daemon", status.report or "no report"),
    )


def _agent_notes(agent: AgentView) -> Iterator[Text]:
    """Yield the last decision of an agent or the reason of silence, and lost paths."""
    if agent.error or agent.message:
        yield _text(f"{agent.id}: {agent.error or agent.message}", "red" * bool(agent.error))
    for path in agent.paths:
        if path.error:
            yield _text(f"{agent.id}: enclosure {path.enclosure}: {path.error}", "yellow")


def _reached(agent: AgentView) -> str:
    live, paths = (sum(getattr(path, name) for path in agent.paths) for name in ("live_paths", "paths"))
    return f"{live} of {paths}" if agent.paths else "–"


def _placement_epoch(found: MapView) -> str:
    earlier = ", ".join(map(str, found.earlier_placement_epochs))
    return str(found.placement_epoch) + (f"; earlier epochs still searched: {earlier}" if earlier else "")


def _flash(tenant: TenantView) -> str:
    return size_text(tenant.flash_bytes) if tenant.flash_bytes else "shared"


def _rate(tenant: TenantView) -> str:
    return f"{size_text(tenant.agent_bytes_per_s)}/s" if tenant.agent_bytes_per_s else "no limit"


def _flash_in_use(tenant: TenantView) -> str:
    used = tenant.flash_used_bytes
    return _flash(tenant) + ("" if used is None else f", {size_text(used)} in use")


def _blocks(found: CapacityView) -> str:
    silent = ", ".join(found.silent_agents)
    return f"{found.blocks}" + (f", without silent agents ({silent})" if silent else "")


def _worn(drive: DriveView | EnclosureDriveView) -> str:
    return "–" if drive.wear is None else f"{drive.wear.percentage_used} %"


def _temperature(drive: DriveView | EnclosureDriveView) -> str:
    return "–" if drive.wear is None else str(drive.wear.temperature_c)


_ENCLOSURE_DRIVES: tuple[_Column, ...] = (
    ("drive", lambda each: each.name),
    (folded("NGUID"), lambda each: each.nguid),
    (number("size"), lambda each: size_text(each.size_bytes)),
    (folded("model"), lambda each: each.model or "–"),
    (folded("serial"), lambda each: each.serial or "–"),
    ("in the map", lambda each: "yes" if each.is_in_map else "not yet"),
    (number("worn"), _worn),
    (number("°C"), _temperature),
)

_PLACES: tuple[_Column, ...] = (
    (number("placement epoch"), lambda each: str(each.placement_epoch)),
    (folded("enclosure"), lambda each: each.enclosure if each.shard else "none"),
    (folded("shard"), lambda each: each.shard or "–"),
    (folded("owner"), lambda each: (each.owner or "none") if each.shard else "–"),
    (number("epoch"), lambda each: str(each.owner_epoch) if each.shard else "–"),
)

_LISTS: dict[str, tuple[type[Any], *tuple[_Column, ...]]] = {
    "agents": (
        AgentView,
        (folded("agent"), lambda each: each.id),
        ("version", lambda each: each.version or "–"),
        (number("shards"), lambda each: str(each.shards)),
        (number("paths"), _reached),
        (folded("addresses"), lambda each: ", ".join(each.addresses)),
    ),
    "drives": (
        DriveView,
        (folded("drive"), lambda each: each.id),
        (folded("NGUID or path"), lambda each: each.nguid or each.path),
        (number("size"), lambda each: size_text(each.size_bytes)),
        ("state", lambda each: each.state),
        ("health", lambda each: each.health),
        (number("hits"), lambda each: str(each.hits)),
        (number("worn"), _worn),
        (number("°C"), _temperature),
    ),
    "enclosures": (
        EnclosureView,
        (folded("enclosure"), lambda each: each.name),
        ("phase", lambda each: each.status.phase),
        (number("drives"), lambda each: str(sum(drive.is_in_map for drive in each.status.drives))),
        (number("usable"), lambda each: size_text(each.status.usable_bytes)),
        (folded("failure domain"), lambda each: each.spec.failure_domain or "–"),
        (
            folded("last operation"),
            lambda each: f"{each.status.operation.kind} {each.status.operation.state}",
        ),
    ),
    "operations": (
        OperationView,
        (folded("operation"), lambda each: each.id),
        ("created", lambda each: time_text(each.created)),
        ("by", lambda each: each.by),
        ("kind", lambda each: each.kind),
        (folded("subject"), lambda each: each.subject),
        ("state", lambda each: _text(each.state, _STYLES.get(each.state, ""))),
        (folded("message"), lambda each: each.message or _running(each)),
    ),
    "shards": (
        ShardView,
        (folded("shard"), lambda each: each.id),
        (number("size"), lambda each: size_text(each.size_bytes)),
        (number("weight"), lambda each: size_text(each.weight) if each.weight else "closed"),
        (folded("owner"), lambda each: each.owner or "none"),
        (number("epoch"), lambda each: str(each.owner_epoch)),
    ),
    "tenants": (
        TenantView,
        (folded("tenant"), lambda each: each.name),
        (number("flash"), _flash),
        (number("rate at each agent"), _rate),
        ("erasable", lambda each: _yes(each.is_erasable)),
        (number("volumes"), lambda each: str(len(each.volumes))),
    ),
    "volumes": (
        VolumeView,
        (folded("tenant"), lambda each: each.tenant),
        (folded("volume"), lambda each: each.name),
        ("switch", lambda each: each.switch),
        (number("block"), lambda each: size_text(each.block_bytes)),
        (number("incarnation"), lambda each: str(each.incarnation)),
        (folded("model"), lambda each: each.model or "–"),
    ),
}
"""Type of the items at ``/v1/kind``, and the columns of their table: header and text of an item."""

_NOTES: dict[str, Callable[[Any], Iterable[Text]]] = {
    "agents": _agent_notes,
    "drives": lambda drive: (
        _text(f"{drive.id}: {problem.agent}: {problem.health}: {problem.reason}", "yellow")
        for problem in drive.problems
    ),
}
"""Lines about an item after the table."""

_RESOURCES: dict[
    str,
    tuple[
        type[Any],
        Callable[[Any], Sequence[tuple[str, str]]],
        *tuple[Callable[[Any], RenderableType], ...],
    ],
] = {
    "capacity": (
        CapacityView,
        lambda found: (
            ("usable", size_text(found.usable_bytes)),
            ("draining", size_text(found.draining_bytes)),
            ("blocks", _blocks(found)),
            ("written", f"{size_text(int(found.written_bytes_per_day))} a day"),
        ),
    ),
    "enclosure": (
        EnclosureView,
        _enclosure_facts,
        lambda enclosure: Padding(_columns(enclosure.status.drives, _ENCLOSURE_DRIVES), (1, 0), expand=False),
        lambda enclosure: operation_view(enclosure.status.operation),
    ),
    "map": (
        MapView,
        lambda found: (
            ("fabric", found.fabric),
            ("revision", str(found.revision)),
            ("placement epoch", _placement_epoch(found)),
            ("agents", str(found.agents)),
            ("enclosures", str(found.enclosures)),
            ("drives", str(found.drives)),
            ("shards", f"{found.shards}, {found.unowned_shards} without an owner"),
        ),
    ),
    "operation": (OperationView, lambda _: (), operation_view),
    "placement": (PlacementView, lambda _: (), lambda found: _columns(found.places, _PLACES)),
    "settings": (
        dict,
        lambda found: tuple((name, _setting(value)) for name, value in found.items()),
    ),
    "tenant": (
        TenantView,
        lambda tenant: (
            ("tenant", tenant.name),
            ("flash", _flash_in_use(tenant)),
            ("rate", f"{_rate(tenant)} at each agent"),
            ("erasable", _yes(tenant.is_erasable)),
            ("volumes", ", ".join(tenant.volumes) or "none yet"),
        ),
    ),
    "volume": (
        VolumeView,
        lambda volume: (
            ("volume", f"{volume.tenant}/{volume.name}"),
            ("switch", volume.switch),
            ("block", size_text(volume.block_bytes)),
            ("incarnation", str(volume.incarnation)),
            ("model", volume.model or "–"),
        ),
    ),
}
"""Type of each kind of resource, names and values, and further parts of the view."""


def _running(operation: OperationView) -> str:
    return next((step.name for step in operation.steps if step.state == "running"), "")


def _setting(value: object) -> str:
    """Write a setting as accepted by `ostraca settings set`."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return "unset" if value is None else str(value)


def _yes(is_so: bool) -> str:  # noqa: FBT001 (the value to write)
    return "yes" if is_so else "no"


def _mark(step: StepView, *, is_live: bool) -> RenderableType:
    if step.state == "running" and is_live:
        return Spinner("dots", style=_STYLES["running"])
    return Text(_MARKS.get(step.state, "·"), _STYLES.get(step.state, ""))


def _facts(facts: Iterable[tuple[str, str]]) -> Table:
    """Return a table of names and values."""
    shown = Table.grid(Column(), folded(""), padding=(0, 2))
    for name, fact in facts:
        shown.add_row(Text(name, "bold"), _text(fact))
    return shown


def _columns(listed: Iterable[object], columns: Sequence[_Column]) -> Table:
    """Return a table of items; rich keeps the cells in a column, so each table has copies."""
    headers = (header if isinstance(header, str) else header.copy() for header, _ in columns)
    return table(([_cell(text(each)) for _, text in columns] for each in listed), *headers)


def _cell(text: str | Text) -> Text:
    return _text(text) if isinstance(text, str) else text


def _text(text: str, style: str = "") -> Text:
    return Text(printable(text), style)
