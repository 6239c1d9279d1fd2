"""Views of admin service responses for people; needs rich."""

from __future__ import annotations

import sys
from datetime import datetime
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Column, Table
from rich.text import Text

from ostraca_cli.commands.admin.responses import (
    AgentInfo,
    AuditInfo,
    CapacityInfo,
    DriveInfo,
    EnclosureInfo,
    MapInfo,
    OperationInfo,
    PlacementInfo,
    ShardInfo,
    StepInfo,
    TenantInfo,
    VolumeInfo,
    WearInfo,
    items,
    printable,
    read,
)
from ostraca_cli.terminal.units import size_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Any

    from rich.console import RenderableType

_PIPE_COLUMNS = 10_000
"""Width without a terminal: lines stay whole for ``grep`` and ``cut``."""

_MARKS = {"done": "✓", "failed": "✗", "cancelled": "✗"}
_STYLES = {"done": "green", "failed": "red", "cancelled": "yellow", "running": "cyan", "waiting": "dim"}
_BAR_COLUMNS = 40


def show_list(kind: str, pages: Iterable[bytes]) -> None:
    """Print the list at ``/v1/kind`` as a table; raises AdminRefusedError."""
    item_type, view = _LISTS[kind]
    _show(view(items(pages, item_type)))


def show_resource(kind: str, body: bytes, etag: str) -> None:
    """Print a resource of this kind; raises AdminRefusedError."""
    resource_type, view = RESOURCES[kind]
    _show(view(read(body, resource_type), etag))


def _show(view: RenderableType) -> None:
    """Print a view, unwrapped if stdout is not a terminal."""
    Console(width=None if sys.stdout.isatty() else _PIPE_COLUMNS, highlight=False).print(view)


def _enclosures_view(enclosures: Sequence[EnclosureInfo]) -> RenderableType:
    rows = (
        (
            each.name,
            each.status.phase,
            str(sum(drive.is_in_map for drive in each.status.drives)),
            size_text(each.status.usable_bytes),
            each.spec.failure_domain or "–",
            f"{each.status.operation.kind} {each.status.operation.state}",
        )
        for each in enclosures
    )
    return _table(
        rows,
        _folded("enclosure"),
        "phase",
        *_right("drives", "usable"),
        "failure domain",
        _folded("last operation"),
    )


def _enclosure_view(enclosure: EnclosureInfo, etag: str) -> RenderableType:
    spec, status = enclosure.spec, enclosure.status
    facts = (
        ("enclosure", enclosure.name),
        ("phase", status.phase),
        ("usable", size_text(status.usable_bytes)),
        ("NQN", spec.nqn),
        *(("controller", controller) for controller in spec.controllers),
        ("secret", spec.secret or "none"),
        ("failure domain", spec.failure_domain or "its own"),
        ("daemon", status.report or "no report"),
        ("ETag", etag),
    )
    drives = _table(
        (
            (
                *(each.name, each.nguid, size_text(each.size_bytes), each.model or "–", each.serial or "–"),
                *("yes" if each.is_in_map else "not yet", *_worn(each.wear)),
            )
            for each in status.drives
        ),
        *("drive", "NGUID"),
        *_right("size"),
        *(_folded("model"), _folded("serial")),
        "in the map",
        *_right("worn", "°C"),
    )
    return Group(_facts(facts), "", drives, "", operation_view(status.operation))


def _operations_view(operations: Sequence[OperationInfo]) -> RenderableType:
    rows = (
        (
            *(each.id, time_text(each.created), each.by, each.kind, each.subject),
            _text(each.state, _STYLES.get(each.state, "")),
            each.message or next((step.name for step in each.steps if step.state == "running"), ""),
        )
        for each in operations
    )
    return _table(rows, "operation", "created", "by", "kind", _folded("subject"), "state", _folded("message"))


def operation_view(operation: OperationInfo, *, is_live: bool = False) -> RenderableType:
    """Return the progress of a long operation, step by step.

    *is_live*: the view is refreshed in place.
    """
    steps = Table.grid(padding=(0, 1))
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
        f"{operation.progress:.0%}{operation.remaining}",
    )
    return Group(head, steps, bar)


def audit_text(entry: AuditInfo) -> str:
    """Return an entry of the audit log as a line."""
    text = f"{time_text(entry.at)}  {entry.who} ({entry.role})  {entry.action}  {entry.detail}"
    return printable(text.rstrip())


def _map_view(found: MapInfo, _: str) -> RenderableType:
    earlier = ", ".join(map(str, found.earlier_placement_epochs))
    return _facts(
        (
            ("fabric", found.fabric),
            ("revision", str(found.revision)),
            (
                "placement epoch",
                str(found.placement_epoch)
                + (f"; earlier epochs still searched: {earlier}" if earlier else ""),
            ),
            ("agents", str(found.agents)),
            ("enclosures", str(found.enclosures)),
            ("drives", str(found.drives)),
            ("shards", f"{found.shards}, {found.unowned_shards} without an owner"),
        )
    )


def _agents_view(agents: Sequence[AgentInfo]) -> RenderableType:
    """Return a table of agents, then the last decision of each or the reason of silence."""
    rows, lines = [], []
    for each in agents:
        live, paths = (sum(getattr(path, name) for path in each.paths) for name in ("live_paths", "paths"))
        reachable = f"{live} of {paths}" if each.paths else "–"
        rows.append(
            (each.id, each.version or "–", str(each.shards), reachable, ", ".join(each.addresses)),
        )
        if each.trouble or each.sentence:
            lines.append(_text(f"{each.id}: {each.trouble or each.sentence}", "red" * bool(each.trouble)))
        lines += [
            _text(f"{each.id}: enclosure {path.enclosure}: {path.trouble}", "yellow")
            for path in each.paths
            if path.trouble
        ]
    return Group(
        _table(rows, _folded("agent"), "version", *_right("shards", "paths"), _folded("addresses")), *lines
    )


def _drives_view(drives: Sequence[DriveInfo]) -> RenderableType:
    """Return a table of the map's drives, then the complaints of agents."""
    rows = (
        (
            *(each.id, each.nguid or each.path, size_text(each.size_bytes), each.state, each.health),
            *(str(each.hits), *_worn(each.wear)),
        )
        for each in drives
    )
    lines = (
        _text(f"{each.id}: {problem.agent}: {problem.health}: {problem.why}", "yellow")
        for each in drives
        for problem in each.troubles
    )
    return Group(
        _table(
            rows,
            _folded("drive"),
            _folded("NGUID or path"),
            *_right("size"),
            "state",
            "health",
            *_right("hits", "worn", "°C"),
        ),
        *lines,
    )


def _shards_view(shards: Sequence[ShardInfo]) -> RenderableType:
    rows = (
        (
            each.id,
            size_text(each.size_bytes),
            size_text(each.weight) if each.weight else "closed",
            each.owner or "none",
            str(each.owner_epoch),
        )
        for each in shards
    )
    return _table(rows, _folded("shard"), *_right("size", "weight"), "owner", *_right("epoch"))


def _volumes_view(volumes: Sequence[VolumeInfo]) -> RenderableType:
    rows = (
        (
            *(each.tenant, each.name, each.switch, size_text(each.block_bytes), str(each.incarnation)),
            each.model or "–",
        )
        for each in volumes
    )
    return _table(
        rows, "tenant", _folded("volume"), "switch", *_right("block", "incarnation"), _folded("model")
    )


def _volume_view(volume: VolumeInfo, etag: str) -> RenderableType:
    return _facts(
        (
            ("volume", f"{volume.tenant}/{volume.name}"),
            ("switch", volume.switch),
            ("block", size_text(volume.block_bytes)),
            ("incarnation", str(volume.incarnation)),
            ("model", volume.model or "–"),
            ("ETag", etag),
        )
    )


def _tenants_view(tenants: Sequence[TenantInfo]) -> RenderableType:
    rows = (
        (each.name, *_limits(each), "yes" if each.is_erasable else "no", str(len(each.volumes)))
        for each in tenants
    )
    return _table(
        rows, _folded("tenant"), *_right("flash", "rate at each agent"), "erasable", *_right("volumes")
    )


def _tenant_view(tenant: TenantInfo, etag: str) -> RenderableType:
    (flash, rate), used = _limits(tenant), tenant.flash_used_bytes
    return _facts(
        (
            ("tenant", tenant.name),
            ("flash", flash + ("" if used is None else f", {size_text(used)} in use")),
            ("rate", f"{rate} at each agent"),
            ("erasable", "yes" if tenant.is_erasable else "no"),
            ("volumes", ", ".join(tenant.volumes) or "none yet"),
            ("ETag", etag),
        )
    )


def _limits(tenant: TenantInfo) -> tuple[str, str]:
    flash, rate = tenant.flash_bytes, tenant.agent_bytes_per_s
    return size_text(flash) if flash else "shared", f"{size_text(rate)}/s" if rate else "no limit"


def _placement_view(found: PlacementInfo, _: str) -> RenderableType:
    """Return the placement of a block, now and in earlier epochs."""
    rows = (
        (str(each.placement_epoch), each.enclosure, each.shard, each.owner or "none", str(each.owner_epoch))
        if each.shard
        else (str(each.placement_epoch), "none", "–", "–", "–")
        for each in found.places
    )
    return _table(
        rows, *_right("placement epoch"), _folded("enclosure"), _folded("shard"), "owner", *_right("epoch")
    )


def _settings_view(found: Mapping[str, object], etag: str) -> RenderableType:
    facts = ((name, "unset" if value is None else str(value)) for name, value in found.items())
    return _facts((*facts, ("ETag", etag)))


def _capacity_view(found: CapacityInfo, _: str) -> RenderableType:
    silent = ", ".join(found.silent_agents)
    return _facts(
        (
            ("usable", size_text(found.usable_bytes)),
            ("draining", size_text(found.draining_bytes)),
            ("blocks", f"{found.blocks}" + (f", without silent agents ({silent})" if silent else "")),
            ("written", f"{size_text(int(found.written_bytes_per_day))} a day"),
        )
    )


_LISTS: dict[str, tuple[type[Any], Callable[[Any], RenderableType]]] = {
    "agents": (AgentInfo, _agents_view),
    "drives": (DriveInfo, _drives_view),
    "enclosures": (EnclosureInfo, _enclosures_view),
    "operations": (OperationInfo, _operations_view),
    "shards": (ShardInfo, _shards_view),
    "tenants": (TenantInfo, _tenants_view),
    "volumes": (VolumeInfo, _volumes_view),
}

RESOURCES: dict[str, tuple[type[Any], Callable[[Any, str], RenderableType]]] = {
    "capacity": (CapacityInfo, _capacity_view),
    "enclosure": (EnclosureInfo, _enclosure_view),
    "map": (MapInfo, _map_view),
    "operation": (OperationInfo, lambda operation, _: operation_view(operation)),
    "placement": (PlacementInfo, _placement_view),
    "settings": (dict, _settings_view),
    "tenant": (TenantInfo, _tenant_view),
    "volume": (VolumeInfo, _volume_view),
}
"""Type and view of each kind of resource; a view receives the resource and its ETag."""


def _worn(wear: WearInfo | None) -> tuple[str, str]:
    return ("–", "–") if wear is None else (f"{wear.percentage_used} %", str(wear.temperature_c))


def _mark(step: StepInfo, *, is_live: bool) -> RenderableType:
    if step.state == "running" and is_live:
        return Spinner("dots", style=_STYLES["running"])
    return Text(_MARKS.get(step.state, "·"), _STYLES.get(step.state, ""))


def time_text(text: str | None) -> str:
    """Write an RFC 3339 time in the zone of this machine."""
    if not text:
        return "–"
    try:
        return f"{datetime.fromisoformat(text).astimezone():%Y-%m-%d %H:%M:%S}"
    except ValueError:
        return text


def _facts(facts: Iterable[tuple[str, str]]) -> Table:
    """Return a table of names and values; a missing ETag becomes a dash."""
    table = Table.grid(padding=(0, 2))
    for name, fact in facts:
        table.add_row(Text(name, "bold"), _text(fact or "–"))
    return table


def _table(rows: Iterable[tuple[str | Text, ...]], *columns: str | Column) -> Table:
    table = Table(*columns, box=None, padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*(_text(each) if isinstance(each, str) else each for each in row))
    return table


def _right(*names: str) -> tuple[Column, ...]:
    """Return right-aligned columns, for numbers."""
    return tuple(Column(name, justify="right") for name in names)


def _folded(name: str) -> Column:
    """Return a column that wraps names, because truncated names would look alike."""
    return Column(name, overflow="fold")


def _text(text: str, style: str = "") -> Text:
    return Text(printable(text), style)
