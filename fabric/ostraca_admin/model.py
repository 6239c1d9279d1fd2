"""Records of the admin service: registrations, states, operations, audit. Pure.

Records are JSON, readable with ``etcdctl get``. Times come from the writer's clock, for people.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

import msgspec

from ostraca_fabric.errors import MembershipError
from ostraca_fabric.model.fabric_map import DriveRecord, EnclosureRecord, ShardRecord
from ostraca_fabric.model.ids import EnclosureId, drive_id, shard_id
from ostraca_fabric.model.target import Target, parse_controller
from ostraca_fabric.ports.records import Record
from ostraca_fabric.wire.flash_work import TargetText

VERSION = 1


class EnclosurePhase(Enum):
    """Phase in the life of an enclosure."""

    ONBOARDING = "onboarding"
    """Not in the map yet."""

    READY = "ready"
    DRAINING = "draining"
    """Closed to new blocks, but still read."""

    DRAINED = "drained"
    """No lookup needs the enclosure any more."""


class OperationKind(Enum):
    """Kind of a long operation."""

    ONBOARD = "onboard"
    DRAIN = "drain"
    UNDRAIN = "undrain"
    REPLACE = "replace"
    EXPAND = "expand"
    RETIRE = "retire"
    ERASE = "erase"
    """For a tenant or one volume, not for an enclosure."""


STEPS = {
    OperationKind.ONBOARD: (
        "reachable",
        "authenticated",
        "identified",
        "preflight",
        "formatted",
        "probed",
        "in the map",
    ),
    OperationKind.DRAIN: ("closed to writes", "no longer searched"),
    OperationKind.UNDRAIN: ("open to writes",),
    OperationKind.REPLACE: ("identified", "preflight", "formatted", "probed", "in the map"),
    OperationKind.EXPAND: ("identified", "preflight", "formatted", "probed", "in the map"),
    OperationKind.RETIRE: ("out of the map", "unregistered"),
    OperationKind.ERASE: ("next incarnation", "purged", "expired"),
}
"""Steps of each kind of operation, in order."""


class OperationState(Enum):
    """State of an operation or of a step."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class EnclosureSpec(msgspec.Struct, frozen=True):
    """Registration of an enclosure."""

    version: int
    name: str
    nqn: str
    controllers: tuple[str, ...]
    secret: str = ""
    failure_domain: str = ""
    drives: tuple[str, ...] = ()
    """NGUIDs of the drives to use; empty means all visible drives."""

    wipe: tuple[str, ...] = ()
    """NGUIDs of drives with contents that may be overwritten."""

    segment_bytes: int = 0
    """Segment size for newly formatted drives; 0 means derived from the drive's size."""

    def target(self) -> Target:
        """Return the target for the agents' connections."""
        return Target(self.nqn, tuple(map(parse_controller, self.controllers)), self.secret)

    def target_text(self) -> TargetText:
        """Return the target in text form, as sent to agents."""
        return TargetText(self.nqn, self.controllers, self.secret)


class ChosenDrive(msgspec.Struct, frozen=True):
    """Drive of an enclosure, in use by the fabric or about to be."""

    name: str
    """Name within the enclosure; never given to another drive."""

    nguid: str
    format_id: str
    size_bytes: int
    model: str = ""
    serial: str = ""
    shard_bytes: int = 0
    """Size of the shard after formatting; 0 before."""

    usable_bytes: int = 0
    block_bytes_max: int = 0
    is_coming: bool = False
    """Whether an operation adds the drive, or tried to, so that the drive is not in the map yet. An
    admin's own map may be late, and cannot tell."""


class RegistrationStatus(msgspec.Struct, frozen=True):
    """State of a registered enclosure."""

    version: int
    phase: EnclosurePhase
    operation: str
    """The last operation on the enclosure."""

    drives: tuple[ChosenDrive, ...] = ()
    next_drive: int = 0
    """Number in the name of the next drive."""


class Step(msgspec.Struct, frozen=True):
    """Step of an operation."""

    name: str
    state: OperationState = OperationState.WAITING
    message: str = ""
    """Finding, or advice to the operator."""

    began_unix_s: float = 0.0
    ended_unix_s: float = 0.0
    detail: dict[str, Any] = {}
    """Numbers and lists for programs."""


@dataclass(frozen=True, slots=True)
class OperationDrives:
    """Drives affected by an operation."""

    drive: str = ""
    replacement: str = ""
    wipe: tuple[str, ...] = ()
    drives: tuple[str, ...] = ()


class Operation(msgspec.Struct, frozen=True):
    """Long operation requested by an operator."""

    version: int
    id: str
    kind: OperationKind
    enclosure: str
    by: str
    created_unix_s: float
    steps: tuple[Step, ...]
    state: OperationState = OperationState.RUNNING
    message: str = ""
    progress: float = 0.0
    """From 0 to 1."""

    ends_in_s: float | None = None
    """Estimate; None if unknown."""

    ended_unix_s: float = 0.0
    drive: str = ""
    """Name of the drive to be replaced."""

    replacement: str = ""
    """NGUID of the new drive; empty means the only unused drive."""

    wipe: tuple[str, ...] = ()
    force: bool = False
    tenant: str = ""
    """Tenant with the volumes to be erased."""

    volume: str = ""
    """Volume to be erased; empty means all."""

    drives: tuple[str, ...] = ()
    """NGUIDs of the drives to add; empty means all visible unused drives."""

    @property
    def subject(self) -> str:
        """Subject: an enclosure, a tenant, or a volume as ``tenant/volume``."""
        return self.enclosure or "/".join(filter(None, (self.tenant, self.volume)))

    @property
    def affected_drives(self) -> OperationDrives:
        """Drives affected by the operation."""
        return OperationDrives(self.drive, self.replacement, self.wipe, self.drives)

    def with_step(self, step: Step) -> Operation:
        """Return a copy with the step's new state, and progress to match."""
        steps = tuple(step if each.name == step.name else each for each in self.steps)
        done = sum(each.state is OperationState.DONE for each in steps)
        return msgspec.structs.replace(self, steps=steps, progress=max(self.progress, done / len(steps)))

    def next_step(self) -> Step | None:
        """Return the first unfinished step, or None."""
        return next((each for each in self.steps if each.state is not OperationState.DONE), None)


@dataclass(frozen=True, slots=True)
class Registration:
    """Records of a registered enclosure with their revisions."""

    spec: EnclosureSpec
    spec_revision: int
    status: RegistrationStatus
    status_revision: int
    operation: Operation
    operation_revision: int


class AuditEntry(msgspec.Struct, frozen=True):
    """Change made by a person or a program."""

    version: int
    id: str
    unix_s: float
    who: str
    role: str
    action: str
    subject: str
    detail: str = ""


class DriveUse(msgspec.Struct, frozen=True):
    """Assignment of a namespace to a drive of an enclosure."""

    version: int
    enclosure: str
    drive: str


class RetiredEnclosure(msgspec.Struct, frozen=True):
    """Note of the retirement of an enclosure."""

    version: int
    enclosure: str
    operation: str
    """The retirement."""


_Kept = TypeVar("_Kept", bound=msgspec.Struct)


class _Versioned(msgspec.Struct, frozen=True):
    version: int


def encode(kept: msgspec.Struct) -> bytes:
    """Encode a record."""
    return msgspec.json.encode(kept)


def decode(record: Record, kind: type[_Kept]) -> _Kept:
    """Decode a record. Raises MembershipError with the record's key and advice."""
    try:
        version = msgspec.json.decode(record.value, type=_Versioned).version
        if version <= VERSION:
            return msgspec.json.decode(record.value, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise MembershipError(f"unreadable record {record.key} of the admin service: {error}") from error
    raise MembershipError(
        f"record {record.key} of the admin service has version {version}, and this release reads up to "
        f"{VERSION}: upgrade the admin service to the fabric's release"
    )


def decode_readable(records: Iterable[Record], kind: type[_Kept]) -> list[tuple[Record, _Kept]]:
    """Decode records, without those unreadable for this release."""
    decoded = []
    for record in records:
        with contextlib.suppress(MembershipError):
            decoded.append((record, decode(record, kind)))
    return decoded


def map_record(spec: EnclosureSpec, status: RegistrationStatus, *, is_draining: bool) -> EnclosureRecord:
    """Return the map record of an enclosure: formatted drives with a shard each."""
    enclosure = EnclosureId(spec.name)
    drives, shards = list[DriveRecord](), list[ShardRecord]()
    for drive in status.drives:
        if drive.shard_bytes:
            named = drive_id(enclosure, drive.name)
            drives.append(DriveRecord(named, nguid=drive.nguid))
            shards.append(
                ShardRecord(
                    shard_id(named, 0),
                    named,
                    0,
                    drive.shard_bytes,
                    drive.usable_bytes,
                    drive.block_bytes_max,
                    drive.usable_bytes,
                )
            )
    record = EnclosureRecord(enclosure, tuple(drives), tuple(shards), target=spec.target())
    return record.drained() if is_draining else record
