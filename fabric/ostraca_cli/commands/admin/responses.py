"""Responses of the admin service, as far as commands display them.

Unknown fields are ignored. Fields missing in an older service have defaults.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ostraca_cli.commands.admin.errors import AdminRefusedError
from ostraca_cli.terminal.units import duration_text

if TYPE_CHECKING:
    from collections.abc import Iterable

_Response = TypeVar("_Response")
_OK = 200


class ProblemInfo(msgspec.Struct, frozen=True):
    """Reason of a refusal (RFC 9457)."""

    detail: str = ""
    title: str = ""


class PageInfo(msgspec.Struct, frozen=True):
    """Page of a list, with the items undecoded."""

    items: list[msgspec.Raw]
    next: str = ""


class StepInfo(msgspec.Struct, frozen=True):
    """Step of a long operation."""

    name: str
    state: str = ""
    message: str = ""
    began: str | None = None
    ended: str | None = None
    detail: dict[str, Any] = {}


class OperationInfo(msgspec.Struct, frozen=True):
    """Long operation."""

    id: str
    kind: str = ""
    enclosure: str = ""
    drive: str = ""
    tenant: str = ""
    volume: str = ""
    state: str = ""
    message: str = ""
    progress: float = 0.0
    ends_in_s: float | None = None
    by: str = ""
    created: str | None = None
    ended: str | None = None
    steps: tuple[StepInfo, ...] = ()

    @property
    def has_ended(self) -> bool:
        """Return whether the operation has reached its final state."""
        return self.state in ("done", "failed", "cancelled")

    @property
    def title(self) -> str:
        """Return the kind and the subject of the operation, for people."""
        return f"{self.kind} of {f'{self.drive} of ' if self.drive else ''}{self.subject}"

    @property
    def subject(self) -> str:
        """Return the subject: an enclosure, a tenant, or ``tenant/volume``."""
        return self.enclosure or "/".join(filter(None, (self.tenant, self.volume)))

    @property
    def remaining(self) -> str:
        """Return the remaining time as an addition to a message; "" if unknown."""
        return "" if self.ends_in_s is None else f", within {duration_text(self.ends_in_s)} at most"


class WearInfo(msgspec.Struct, frozen=True):
    """Wear figures from a drive's SMART log."""

    percentage_used: int = 0
    media_errors: int = 0
    temperature_c: int = 0
    critical_warning: int = 0


class EnclosureDriveInfo(msgspec.Struct, frozen=True):
    """Drive of an enclosure."""

    name: str
    nguid: str
    size_bytes: int = 0
    model: str = ""
    serial: str = ""
    is_in_map: bool = False
    wear: WearInfo | None = None


class DriveProblemInfo(msgspec.Struct, frozen=True):
    """Complaint of an agent about a drive."""

    agent: str
    health: str = ""
    why: str = ""


class DriveInfo(msgspec.Struct, frozen=True):
    """Drive in the fabric map."""

    id: str
    nguid: str = ""
    path: str = ""
    size_bytes: int = 0
    state: str = ""
    hits: int = 0
    health: str = ""
    troubles: tuple[DriveProblemInfo, ...] = ()
    wear: WearInfo | None = None


class SpecInfo(msgspec.Struct, frozen=True):
    """Registered configuration of an enclosure."""

    nqn: str
    controllers: tuple[str, ...] = ()
    secret: str = ""
    failure_domain: str = ""


class StatusInfo(msgspec.Struct, frozen=True):
    """Current state of an enclosure."""

    phase: str
    operation: OperationInfo
    usable_bytes: int = 0
    drives: tuple[EnclosureDriveInfo, ...] = ()
    report: str = ""


class EnclosureInfo(msgspec.Struct, frozen=True):
    """Registered enclosure."""

    name: str
    spec: SpecInfo
    status: StatusInfo


class AuditInfo(msgspec.Struct, frozen=True):
    """Entry of the audit log."""

    id: str
    at: str | None = None
    who: str = ""
    role: str = ""
    action: str = ""
    subject: str = ""
    detail: str = ""


class PathInfo(msgspec.Struct, frozen=True):
    """Path of an agent's host to an enclosure."""

    enclosure: str
    live_paths: int = 0
    paths: int = 0
    trouble: str = ""


class AgentInfo(msgspec.Struct, frozen=True):
    """Agent of the fabric."""

    id: str
    addresses: tuple[str, ...] = ()
    is_leaving: bool = False
    shards: int = 0
    version: str = ""
    sentence: str = ""
    trouble: str = ""
    paths: tuple[PathInfo, ...] = ()


class ShardInfo(msgspec.Struct, frozen=True):
    """Shard of the fabric."""

    id: str
    size_bytes: int = 0
    weight: int = 0
    owner: str = ""
    owner_epoch: int = 0


class VolumeInfo(msgspec.Struct, frozen=True):
    """Volume of the fabric."""

    tenant: str
    name: str
    block_bytes: int = 0
    incarnation: int = 0
    model: str = ""
    switch: str = ""


class BlockLocationInfo(msgspec.Struct, frozen=True):
    """Location of a block in one placement epoch."""

    placement_epoch: int
    enclosure: str = ""
    shard: str = ""
    owner: str = ""
    owner_epoch: int = 0


class PlacementInfo(msgspec.Struct, frozen=True):
    """Locations of a block in all placement epochs."""

    agent: str
    map_revision: int = 0
    places: tuple[BlockLocationInfo, ...] = ()


class TenantInfo(msgspec.Struct, frozen=True):
    """Tenant and its limits."""

    name: str
    flash_bytes: int = 0
    agent_bytes_per_s: int = 0
    is_erasable: bool = False
    volumes: tuple[str, ...] = ()
    flash_used_bytes: int | None = None


class OutcomeInfo(msgspec.Struct, frozen=True):
    """Number of blocks with one outcome."""

    state: str
    reason: str = ""
    blocks: int = 0


class PrefetchInfo(msgspec.Struct, frozen=True):
    """Result of a prefetch."""

    counts: tuple[OutcomeInfo, ...] = ()


class MapInfo(msgspec.Struct, frozen=True):
    """State of the fabric map."""

    fabric: str
    revision: int = 0
    placement_epoch: int = 0
    earlier_placement_epochs: tuple[int, ...] = ()
    agents: int = 0
    enclosures: int = 0
    drives: int = 0
    shards: int = 0
    unowned_shards: int = 0


class CapacityInfo(msgspec.Struct, frozen=True):
    """Total and used flash."""

    usable_bytes: int = 0
    draining_bytes: int = 0
    blocks: int = 0
    written_bytes_per_day: float = 0.0
    silent_agents: tuple[str, ...] = ()


def read(body: bytes | msgspec.Raw, kind: type[_Response]) -> _Response:
    """Decode a response; raises AdminRefusedError if *body* does not match."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise AdminRefusedError(
            _OK, f"unreadable response of the admin service ({error}): check the releases on both sides"
        ) from error


def raw_items(pages: Iterable[bytes]) -> list[msgspec.Raw]:
    """Return the items of all pages undecoded; raises AdminRefusedError."""
    return [item.copy() for body in pages for item in read(body, PageInfo).items]


def items(pages: Iterable[bytes], kind: type[_Response]) -> list[_Response]:
    """Return the decoded items of all pages; raises AdminRefusedError."""
    return [read(item, kind) for item in raw_items(pages)]


def printable(text: str) -> str:
    """Return *text* without control characters; models and serials come from drives."""
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)
