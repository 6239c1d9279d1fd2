"""Answers of the service, read by its own commands too. Needs neither FastAPI nor pydantic.

The docstring after a field is its description in the OpenAPI. New fields need defaults, for older services.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import UTC, datetime
from enum import Enum
from typing import Any, ClassVar, Literal, TypeVar

from ostraca_admin.model import AuditEntry, Operation, Registration
from ostraca_fabric.model.fabric_map import EnclosureRecord
from ostraca_fabric.model.inventory import DriveWear, EnclosureReport

_View = TypeVar("_View", bound="ApiView")

Health = Literal["unknown", "good", "held off", "suspect", "failed"]
"""From unknown (no agent reports) to worst."""


@dataclass(frozen=True, slots=True)
class ApiView:
    """Answer, or part of an answer."""

    __pydantic_config__: ClassVar[dict[str, bool]] = {"use_attribute_docstrings": True}


@dataclass(frozen=True, slots=True)
class StepView(ApiView):
    """Step of an operation."""

    name: str
    state: str
    message: str
    began: datetime | None
    ended: datetime | None
    detail: dict[str, Any]


@dataclass(frozen=True, slots=True)
class OperationView(ApiView):
    """Long operation."""

    id: str
    kind: str
    enclosure: str
    """Subject; empty for operations on a tenant."""

    drive: str
    tenant: str
    volume: str
    """Volume to erase; empty: all volumes of the tenant."""

    state: str
    message: str
    progress: float
    """From 0 to 1."""

    ends_in_s: float | None
    """Estimated upper bound of the remaining time; null if unknown."""

    by: str
    created: datetime | None
    ended: datetime | None
    steps: tuple[StepView, ...]

    @property
    def has_ended(self) -> bool:
        """Return whether the operation has reached its final state."""
        return self.state in ("done", "failed", "cancelled")

    @property
    def subject(self) -> str:
        """Return the subject: an enclosure, a tenant, or ``tenant/volume``."""
        return self.enclosure or "/".join(filter(None, (self.tenant, self.volume)))

    @property
    def title(self) -> str:
        """Return the kind and the subject of the operation, for people."""
        return f"{self.kind} of {f'{self.drive} of ' if self.drive else ''}{self.subject}"


@dataclass(frozen=True, slots=True)
class EnclosureDriveView(ApiView):
    """Drive of an enclosure."""

    name: str
    nguid: str
    size_bytes: int
    model: str
    serial: str
    is_in_map: bool
    wear: DriveWear | None
    """Latest report of the enclosure daemon; null without a report."""


@dataclass(frozen=True, slots=True)
class SpecView(ApiView):
    """Registration of an enclosure."""

    nqn: str
    controllers: tuple[str, ...]
    secret: str
    failure_domain: str
    drives: tuple[str, ...]
    wipe: tuple[str, ...]
    segment_bytes: int


@dataclass(frozen=True, slots=True)
class EnclosureStatusView(ApiView):
    """State of a registered enclosure."""

    phase: str
    usable_bytes: int
    drives: tuple[EnclosureDriveView, ...]
    operation: OperationView
    report: str
    """Latest decision of the enclosure daemon; empty without a report."""


@dataclass(frozen=True, slots=True)
class EnclosureView(ApiView):
    """Registered enclosure."""

    name: str
    spec: SpecView
    status: EnclosureStatusView


@dataclass(frozen=True, slots=True)
class AuditView(ApiView):
    """Change made by a person or a program."""

    id: str
    at: datetime | None
    actor: str
    role: str
    action: str
    subject: str
    detail: str


@dataclass(frozen=True, slots=True)
class PathView(ApiView):
    """Paths from an agent's host to an enclosure."""

    enclosure: str
    live_paths: int
    paths: int
    error: str
    reservations: str
    """State of NVMe reservations; empty if disabled."""


@dataclass(frozen=True, slots=True)
class AgentView(ApiView):
    """Agent of the fabric."""

    id: str
    addresses: tuple[str, ...]
    is_leaving: bool
    shards: int
    """Number of owned shards."""

    version: str
    """Empty if the agent is silent."""

    message: str
    """Latest decision of the controller, with the reason."""

    error: str
    """Reason of silence; empty if the agent answers."""

    paths: tuple[PathView, ...]
    overrides_revision: int
    """Revision of the latest applied overrides; 0 if the agent is silent."""

    settings: dict[str, bool | int | float | str]
    """Live settings in force."""


@dataclass(frozen=True, slots=True)
class ShardView(ApiView):
    """Shard of the fabric."""

    id: str
    enclosure: str
    drive: str
    size_bytes: int
    weight: int
    """Weight in placement: usable bytes, 0 while draining."""

    owner: str
    """Empty without an owner."""

    owner_epoch: int


@dataclass(frozen=True, slots=True)
class MapView(ApiView):
    """Summary of a fabric map."""

    fabric: str
    revision: int
    placement_epoch: int
    earlier_placement_epochs: tuple[int, ...]
    """Earlier epochs still searched by lookups."""

    agents: int
    enclosures: int
    drives: int
    shards: int
    unowned_shards: int


@dataclass(frozen=True, slots=True)
class CapacityView(ApiView):
    """Capacity and usage of flash."""

    usable_bytes: int
    """Capacity of shards open for new blocks."""

    draining_bytes: int
    """Capacity of draining shards."""

    blocks: int
    """Number of blocks on shards of responding owners."""

    written_bytes_per_day: float
    silent_agents: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DriveProblemView(ApiView):
    """Problem of a drive, as seen by an agent."""

    agent: str
    health: Health
    reason: str


@dataclass(frozen=True, slots=True)
class DriveView(ApiView):
    """Drive of the map."""

    id: str
    enclosure: str
    nguid: str
    """Empty for a drive with a file path."""

    path: str
    size_bytes: int
    """Total size of the shards."""

    state: str
    """State of the enclosure: ready or draining."""

    hits: int
    """Blocks found by gets on the drive, by responding agents since their start."""

    health: Health
    """Worst health reported by an agent. Held off: the circuit breaker refuses reads or writes, except for
    trials. Unknown: no responding agent has a path to the drive."""

    problems: tuple[DriveProblemView, ...]
    wear: DriveWear | None
    """Latest report of the enclosure daemon; null without a report."""


@dataclass(frozen=True, slots=True)
class TenantView(ApiView):
    """Tenant with limits and usage."""

    name: str
    flash_bytes: int
    agent_bytes_per_s: int
    is_erasable: bool
    volumes: tuple[str, ...]
    flash_used_bytes: int | None
    """Flash in segments of the tenant alone, by responding agents; null without a quota, because such blocks
    share segments."""


@dataclass(frozen=True, slots=True)
class VolumeView(ApiView):
    """Volume of a tenant."""

    tenant: str
    name: str
    block_bytes: int
    incarnation: int
    model: str
    switch: Literal["off", "shadow", "on"]


@dataclass(frozen=True, slots=True)
class PlaceView(ApiView):
    """Place of a block in a placement epoch."""

    placement_epoch: int
    enclosure: str
    """Empty if no shard is open for new blocks, or the shard is gone."""

    shard: str
    owner: str
    """Agent that owns the shard; empty without an owner."""

    owner_epoch: int


@dataclass(frozen=True, slots=True)
class PlacementView(ApiView):
    """Places of a block, whether or not the block exists."""

    agent: str
    """The agent that answered."""

    map_revision: int
    """Revision of the agent's map."""

    places: tuple[PlaceView, ...]
    """The current placement epoch first, then earlier epochs still searched."""


@dataclass(frozen=True, slots=True)
class OutcomeView(ApiView):
    """Number of blocks with the same outcome."""

    state: str
    reason: str
    blocks: int


@dataclass(frozen=True, slots=True)
class ChainView(ApiView):
    """Outcome of each block of a chain."""

    states: tuple[str, ...]
    """HIT for a block now in the agent's DRAM cache."""

    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PrefetchView(ApiView):
    """Outcome of a prefetch."""

    agent: str
    counts: tuple[OutcomeView, ...]
    chains: tuple[ChainView, ...]


def view_of(kind: type[_View], source: object, **more: object) -> _View:
    """Return a view with the attributes of *source*, and *more* for other fields."""
    own = {each.name: getattr(source, each.name) for each in fields(kind) if each.name not in more}
    return kind(
        **{name: each.value if isinstance(each, Enum) else each for name, each in own.items()}, **more
    )


def operation_view(operation: Operation) -> OperationView:
    """Return the view of an operation."""
    steps = tuple(
        view_of(StepView, step, began=_when(step.began_unix_s), ended=_when(step.ended_unix_s))
        for step in operation.steps
    )
    created, ended = _when(operation.created_unix_s), _when(operation.ended_unix_s)
    return view_of(OperationView, operation, created=created, ended=ended, steps=steps)


def audit_view(entry: AuditEntry) -> AuditView:
    """Return the view of an audit entry."""
    return view_of(AuditView, entry, at=_when(entry.unix_s), actor=entry.who)


def enclosure_view(
    registration: Registration, record: EnclosureRecord | None, report: EnclosureReport | None
) -> EnclosureView:
    """Return the view of an enclosure, with map record and daemon's report."""
    spec, status = registration.spec, registration.status
    wear = {drive.nguid: drive.wear for drive in report.drives} if report else {}
    in_map = {drive.nguid for drive in record.drives} if record else set()
    drives = tuple(
        view_of(EnclosureDriveView, drive, is_in_map=drive.nguid in in_map, wear=wear.get(drive.nguid))
        for drive in status.drives
    )
    usable_bytes = sum(drive.usable_bytes for drive in status.drives if drive.nguid in in_map)
    operation, said = operation_view(registration.operation), report.sentence if report else ""
    shown = EnclosureStatusView(status.phase.value, usable_bytes, drives, operation, said)
    return EnclosureView(spec.name, view_of(SpecView, spec), shown)


def _when(unix_s: float) -> datetime | None:
    """Return a time as datetime; None for 0, the time of an event still to come."""
    return datetime.fromtimestamp(unix_s, UTC) if unix_s else None
