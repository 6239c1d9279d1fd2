"""How what the admin service answers looks to people. Needs rich."""

from __future__ import annotations

import sys
from datetime import datetime
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Column, Table
from rich.text import Text

from ostraca.cli.admin.text import printable
from ostraca.cli.admin.watching import ends_text
from ostraca.cli.sizes import size_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import RenderableType

    from ostraca.cli.admin.answers import (
        Agent,
        Capacity,
        Change,
        Drive,
        Enclosure,
        Map,
        MapDrive,
        Operation,
        Placement,
        Shard,
        Step,
        Tenant,
        Volume,
        Wear,
    )

_PIPE_COLUMNS = 10_000
"""Where no terminal says how wide it is: lines stay whole for ``grep`` and ``cut``."""

_MARKS = {"done": "✓", "failed": "✗", "cancelled": "✗"}
_STYLES = {"done": "green", "failed": "red", "cancelled": "yellow", "running": "cyan", "waiting": "dim"}
_BAR_COLUMNS = 40


def show(shown: RenderableType) -> None:
    """Print it, as wide as it needs to be where stdout is no terminal."""
    Console(width=None if sys.stdout.isatty() else _PIPE_COLUMNS, highlight=False).print(shown)


def enclosures_view(enclosures: Sequence[Enclosure]) -> RenderableType:
    """Return a table of enclosures."""
    table = _table(
        _folded("enclosure"),
        "phase",
        *_right("drives", "usable"),
        "failure domain",
        _folded("last operation"),
    )
    for each in enclosures:
        last = each.status.operation
        in_map = sum(drive.is_in_map for drive in each.status.drives)
        table.add_row(
            *_texts(each.name, each.status.phase, str(in_map), size_text(each.status.usable_bytes)),
            *_texts(each.spec.failure_domain or "–", f"{last.kind} {last.state}"),
        )
    return table


def enclosure_view(enclosure: Enclosure, etag: str) -> RenderableType:
    """Return everything that there is to say of one enclosure."""
    spec, status = enclosure.spec, enclosure.status
    facts = (
        ("enclosure", enclosure.name),
        ("phase", status.phase),
        ("usable", size_text(status.usable_bytes)),
        ("NQN", spec.nqn),
        *(("controller", controller) for controller in spec.controllers),
        ("secret", spec.secret or "none"),
        ("failure domain", spec.failure_domain or "its own"),
        ("its daemon", status.report or "says nothing"),
        ("ETag", etag or "–"),
    )
    return Group(_facts(facts), "", _drives(status.drives), "", operation_view(status.operation))


def operations_view(operations: Sequence[Operation]) -> RenderableType:
    """Return a table of long work."""
    table = _table("operation", "began", "by", "kind", _folded("subject"), "state", _folded("message"))
    for each in operations:
        message = each.message or next((step.name for step in each.steps if step.state == "running"), "")
        row = (each.id, time_text(each.created), each.by, each.kind, each.subject)
        table.add_row(*_texts(*row), Text(each.state, _STYLES.get(each.state, "")), _text(message))
    return table


def operation_view(operation: Operation, *, is_live: bool = False) -> RenderableType:
    """Return how far long work is, step by step; *is_live* where it is shown while it changes."""
    table = Table.grid(padding=(0, 1))
    for step in operation.steps:
        table.add_row(_mark(step, is_live=is_live), _text(step.name), _text(step.message))
    head = Text.assemble(
        f"{printable(operation.what)}, operation {printable(operation.id)}: ",
        (printable(operation.state), _STYLES.get(operation.state, "")),
    )
    parts: list[RenderableType] = [head, table]
    if not operation.has_ended:
        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            ProgressBar(total=1.0, completed=operation.progress, width=_BAR_COLUMNS),
            f"{operation.progress:.0%}{ends_text(operation)}",
        )
        parts.append(bar)
    elif operation.message:
        parts.append(_text(operation.message))
    return Group(*parts)


def change_text(change: Change) -> str:
    """Return an entry of the audit log in a line."""
    text = f"{time_text(change.at)}  {change.who} ({change.role})  {change.action}  {change.detail}"
    return printable(text.rstrip())


def map_view(found: Map) -> RenderableType:
    """Return the map in short."""
    earlier = ", ".join(map(str, found.earlier_placement_epochs))
    return _facts(
        (
            ("fabric", found.fabric),
            ("revision", str(found.revision)),
            (
                "placement epoch",
                str(found.placement_epoch) + (f", and still asked: {earlier}" if earlier else ""),
            ),
            ("agents", str(found.agents)),
            ("enclosures", str(found.enclosures)),
            ("drives", str(found.drives)),
            ("shards", f"{found.shards}, of which {found.unowned_shards} have no owner"),
        )
    )


def agents_view(agents: Sequence[Agent]) -> RenderableType:
    """Return a table of agents, and below it what each decided last, or why it says nothing."""
    table = _table(_folded("agent"), "version", *_right("shards", "paths"), _folded("addresses"))
    lines = []
    for each in agents:
        live, paths = (sum(getattr(path, name) for path in each.paths) for name in ("live_paths", "paths"))
        row = (each.id, each.version or "–", str(each.shards), f"{live} of {paths}" if each.paths else "–")
        table.add_row(*_texts(*row, ", ".join(each.addresses)))
        if each.trouble:
            lines.append(_text(f"{each.id}: {each.trouble}", "red"))
        elif each.sentence:
            lines.append(_text(f"{each.id}: {each.sentence}"))
        lines += [
            _text(f"{each.id}: enclosure {path.enclosure}: {path.trouble}", "yellow")
            for path in each.paths
            if path.trouble
        ]
    return Group(table, *lines)


def drives_view(drives: Sequence[MapDrive]) -> RenderableType:
    """Return a table of the map's drives, and below it what agents hold against them."""
    table = _table(
        _folded("drive"),
        _folded("NGUID or path"),
        *_right("size"),
        "state",
        "health",
        *_right("hits", "worn", "°C"),
    )
    lines = []
    for each in drives:
        row = (each.id, each.nguid or each.path, size_text(each.size_bytes), each.state, each.health)
        table.add_row(*_texts(*row, str(each.hits), *_worn(each.wear)))
        lines += [
            _text(f"{each.id}: {trouble.agent}: {trouble.health}: {trouble.why}", "yellow")
            for trouble in each.troubles
        ]
    return Group(table, *lines)


def shards_view(shards: Sequence[Shard]) -> RenderableType:
    """Return a table of shards."""
    table = _table(_folded("shard"), *_right("size", "placed by"), "owner", *_right("epoch"))
    for each in shards:
        weight = size_text(each.weight) if each.weight else "takes nothing"
        row = (each.id, size_text(each.size_bytes), weight, each.owner or "nobody", str(each.owner_epoch))
        table.add_row(*_texts(*row))
    return table


def volumes_view(volumes: Sequence[Volume]) -> RenderableType:
    """Return a table of volumes."""
    table = _table("tenant", _folded("volume"), "switch", *_right("block", "incarnation"), _folded("model"))
    for each in volumes:
        row = (each.tenant, each.name, each.switch, size_text(each.block_bytes), str(each.incarnation))
        table.add_row(*_texts(*row, each.model or "–"))
    return table


def tenants_view(tenants: Sequence[Tenant]) -> RenderableType:
    """Return a table of tenants."""
    table = _table(_folded("tenant"), *_right("flash", "rate at each agent"), "erasable", *_right("volumes"))
    for each in tenants:
        row = (each.name, *_quotas(each), "yes" if each.is_erasable else "no", str(len(each.volumes)))
        table.add_row(*_texts(*row))
    return table


def tenant_view(tenant: Tenant, etag: str) -> RenderableType:
    """Return what a tenant may use, and its volumes."""
    (flash, rate), used = _quotas(tenant), tenant.flash_used_bytes
    return _facts(
        (
            ("tenant", tenant.name),
            ("flash", flash + ("" if used is None else f", of which {size_text(used)} are used")),
            ("rate", f"{rate} at each agent"),
            ("erasable", "what its volumes hold" if tenant.is_erasable else "no"),
            ("volumes", ", ".join(tenant.volumes) or "none yet"),
            ("ETag", etag),
        )
    )


def _quotas(tenant: Tenant) -> tuple[str, str]:
    flash, rate = tenant.flash_bytes, tenant.agent_bytes_per_s
    return (
        size_text(flash) if flash else "what others leave",
        f"{size_text(rate)}/s" if rate else "no limit",
    )


def volume_view(volume: Volume, etag: str) -> RenderableType:
    """Return everything that there is to say of one volume."""
    return _facts(
        (
            ("volume", f"{volume.tenant}/{volume.name}"),
            ("switch", volume.switch),
            ("block", size_text(volume.block_bytes)),
            ("incarnation", str(volume.incarnation)),
            ("model", volume.model or "–"),
            ("ETag", etag or "–"),
        )
    )


def placement_view(found: Placement) -> RenderableType:
    """Return where a block belongs, now and before."""
    table = _table(
        *_right("placement epoch"), _folded("enclosure"), _folded("shard"), "owner", *_right("epoch")
    )
    for each in found.places:
        where = (each.enclosure, each.shard, each.owner or "nobody", str(each.owner_epoch))
        table.add_row(
            *_texts(str(each.placement_epoch), *(where if each.shard else ("nowhere", "–", "–", "–")))
        )
    return table


def settings_view(found: Mapping[str, object], etag: str) -> RenderableType:
    """Return the settings of all agents."""
    told = ((name, "each agent's own" if value is None else str(value)) for name, value in found.items())
    return _facts((*told, ("ETag", etag or "–")))


def capacity_view(found: Capacity) -> RenderableType:
    """Return how much flash there is."""
    silent = ", ".join(found.silent_agents)
    return _facts(
        (
            ("usable", size_text(found.usable_bytes)),
            ("draining", size_text(found.draining_bytes)),
            (
                "blocks",
                f"{found.blocks}" + (f", without those of {silent}, which are silent" if silent else ""),
            ),
            ("written", f"{size_text(int(found.written_bytes_per_day))} a day"),
        )
    )


def _drives(drives: Sequence[Drive]) -> RenderableType:
    table = _table(
        "drive",
        "NGUID",
        *_right("size"),
        _folded("model"),
        _folded("serial"),
        "in the map",
        *_right("worn", "°C"),
    )
    for each in drives:
        row = (each.name, each.nguid, size_text(each.size_bytes), each.model or "–", each.serial or "–")
        table.add_row(*_texts(*row, "yes" if each.is_in_map else "not yet", *_worn(each.wear)))
    return table


def _worn(wear: Wear | None) -> tuple[str, str]:
    return ("–", "–") if wear is None else (f"{wear.percentage_used} %", str(wear.temperature_c))


def _mark(step: Step, *, is_live: bool) -> RenderableType:
    if step.state == "running" and is_live:
        return Spinner("dots", style=_STYLES["running"])
    return Text(_MARKS.get(step.state, "·"), _STYLES.get(step.state, ""))


def time_text(text: str | None) -> str:
    """Write an RFC 3339 time for people, by this machine's zone."""
    if not text:
        return "–"
    try:
        return f"{datetime.fromisoformat(text).astimezone():%Y-%m-%d %H:%M:%S}"
    except ValueError:
        return text


def _facts(facts: Sequence[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, fact in facts:
        table.add_row(Text(name, "bold"), _text(fact))
    return table


def _table(*columns: str | Column) -> Table:
    return Table(*columns, box=None, padding=(0, 2, 0, 0))


def _right(*names: str) -> tuple[Column, ...]:
    """Columns of numbers."""
    return tuple(Column(name, justify="right") for name in names)


def _folded(name: str) -> Column:
    """A column of names that would look alike if they were cut short."""
    return Column(name, overflow="fold")


def _text(text: str, style: str = "") -> Text:
    return Text(printable(text), style)


def _texts(*texts: str) -> tuple[Text, ...]:
    return tuple(map(_text, texts))
