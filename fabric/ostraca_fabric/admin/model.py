"""What the admin service keeps: registrations, what became of them, long work, and who changed what. Pure.

JSON that ``etcdctl get`` shows. Times are by the clock of who wrote them, for people.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

import msgspec

from ostraca_fabric.errors import MembershipError
from ostraca_fabric.target import Target, parse_controller
from ostraca_fabric.wire.flash_work import TargetText

VERSION = 1


class Phase(Enum):
    """Where an enclosure is in its life."""

    ONBOARDING = "onboarding"
    """Not in the map yet."""

    READY = "ready"
    DRAINING = "draining"
    """It takes no new blocks, and is still read."""

    DRAINED = "drained"
    """Nothing of it is looked up any more."""


class Kind(Enum):
    """What long work does."""

    ONBOARD = "onboard"
    DRAIN = "drain"
    UNDRAIN = "undrain"
    REPLACE = "replace"
    EXPAND = "expand"
    RETIRE = "retire"
    ERASE = "erase"
    """Of a tenant, or of one volume: not of an enclosure."""


STEPS = {
    Kind.ONBOARD: (
        "reachable",
        "authenticated",
        "identified",
        "preflight",
        "formatted",
        "probed",
        "in the map",
    ),
    Kind.DRAIN: ("takes nothing new", "passed over"),
    Kind.UNDRAIN: ("takes blocks again",),
    Kind.REPLACE: ("identified", "preflight", "formatted", "probed", "in the map"),
    Kind.EXPAND: ("identified", "preflight", "formatted", "probed", "in the map"),
    Kind.RETIRE: ("out of the map", "forgotten"),
    Kind.ERASE: ("next incarnation", "purged", "outlived"),
}
"""Of each kind of long work, in order."""


class State(Enum):
    """How long work, or one step of it, goes."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class EnclosureSpec(msgspec.Struct, frozen=True):
    """What an enclosure was registered as."""

    version: int
    name: str
    nqn: str
    controllers: tuple[str, ...]
    secret: str = ""
    failure_domain: str = ""
    drives: tuple[str, ...] = ()
    """NGUIDs of those to use; none: all that it shows."""

    wipe: tuple[str, ...] = ()
    """NGUIDs of drives that may be formatted though they hold something."""

    segment_bytes: int = 0
    """Of drives that are formatted now; 0: as follows from their size."""

    def target(self) -> Target:
        """Return what agents connect to."""
        return Target(self.nqn, tuple(map(parse_controller, self.controllers)), self.secret)

    def target_text(self) -> TargetText:
        """Return it as agents are told."""
        return TargetText(self.nqn, self.controllers, self.secret)


class ChosenDrive(msgspec.Struct, frozen=True):
    """A drive of an enclosure that the fabric uses, or is about to."""

    name: str
    """Within its enclosure; never given to another drive."""

    nguid: str
    format_id: str
    size_bytes: int
    model: str = ""
    serial: str = ""
    shard_bytes: int = 0
    """Of its shard, once it is formatted; 0 before."""

    usable_bytes: int = 0
    block_bytes_max: int = 0
    is_coming: bool = False
    """Long work brings it in, or tried to: the map does not have it yet. An admin's own map may be late, and
    would not tell."""


class EnclosureStatus(msgspec.Struct, frozen=True):
    """What became of a registration."""

    version: int
    phase: Phase
    operation: str
    """The last long work on it."""

    drives: tuple[ChosenDrive, ...] = ()
    next_drive: int = 0
    """The number in the name of the next drive."""


class Step(msgspec.Struct, frozen=True):
    """One step of long work."""

    name: str
    state: State = State.WAITING
    message: str = ""
    """What was found, or what to do."""

    began_unix_s: float = 0.0
    ended_unix_s: float = 0.0
    detail: dict[str, Any] = {}
    """Numbers and lists for programs."""


@dataclass(frozen=True, slots=True)
class About:
    """Which drives long work is about."""

    drive: str = ""
    replacement: str = ""
    wipe: tuple[str, ...] = ()
    drives: tuple[str, ...] = ()


class Operation(msgspec.Struct, frozen=True):
    """Long work that was asked for."""

    version: int
    id: str
    kind: Kind
    enclosure: str
    by: str
    created_unix_s: float
    steps: tuple[Step, ...]
    state: State = State.RUNNING
    message: str = ""
    progress: float = 0.0
    """From 0 to 1."""

    ends_in_s: float | None = None
    """An estimate; None where nothing is known."""

    ended_unix_s: float = 0.0
    drive: str = ""
    """Which drive is replaced."""

    replacement: str = ""
    """The NGUID of the drive that comes for it; empty: the only one that is not used."""

    wipe: tuple[str, ...] = ()
    force: bool = False
    tenant: str = ""
    """Whose volumes are erased."""

    volume: str = ""
    """Which of them; empty: all."""

    drives: tuple[str, ...] = ()
    """NGUIDs of the drives that are added; none: all that it shows and does not use."""

    @property
    def subject(self) -> str:
        """What it is about: an enclosure, a tenant, or a volume as ``tenant/volume``."""
        return self.enclosure or "/".join(filter(None, (self.tenant, self.volume)))

    @property
    def about(self) -> About:
        """Which drives it is about."""
        return About(self.drive, self.replacement, self.wipe, self.drives)

    def with_step(self, step: Step) -> Operation:
        """Return it with a step as it is now."""
        steps = tuple(step if each.name == step.name else each for each in self.steps)
        done = sum(each.state is State.DONE for each in steps)
        return msgspec.structs.replace(self, steps=steps, progress=max(self.progress, done / len(steps)))

    def next_step(self) -> Step | None:
        """Return the first step that is not done."""
        return next((each for each in self.steps if each.state is not State.DONE), None)


@dataclass(frozen=True, slots=True)
class Kept:
    """A registered enclosure as it is kept."""

    spec: EnclosureSpec
    spec_revision: int
    status: EnclosureStatus
    status_revision: int
    operation: Operation
    operation_revision: int


class AuditEntry(msgspec.Struct, frozen=True):
    """A change that somebody made."""

    version: int
    id: str
    unix_s: float
    who: str
    role: str
    action: str
    subject: str
    detail: str = ""


class DriveUse(msgspec.Struct, frozen=True):
    """Which enclosure's drive a namespace is."""

    version: int
    enclosure: str
    drive: str


_Kept = TypeVar("_Kept", bound=msgspec.Struct)


class _Versioned(msgspec.Struct, frozen=True):
    version: int


def encode(kept: msgspec.Struct) -> bytes:
    """Write a record."""
    return msgspec.json.encode(kept)


def decode(data: bytes, kind: type[_Kept]) -> _Kept:
    """Read a record. Raises MembershipError that says what to do."""
    try:
        version = msgspec.json.decode(data, type=_Versioned).version
        if version <= VERSION:
            return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise MembershipError(f"a record of the admin service can't be read: {error}") from error
    raise MembershipError(
        f"a record of the admin service has version {version}, and this release reads {VERSION} and older: "
        "start a release of Ostraca as new as the fabric's"
    )
