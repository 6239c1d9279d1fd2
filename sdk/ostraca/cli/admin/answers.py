"""What the admin service answers, as far as commands show it to people. Fields that are not known here are
left out, and those that an older service lacks have defaults.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ostraca.cli.admin.errors import AdminRefusedError

if TYPE_CHECKING:
    from collections.abc import Iterable

_Answer = TypeVar("_Answer", bound=msgspec.Struct)
_OK = 200


class Problem(msgspec.Struct, frozen=True):
    """Why something was refused (RFC 9457)."""

    detail: str = ""
    title: str = ""


class Page(msgspec.Struct, frozen=True):
    """Some of a list, each as it came."""

    items: list[msgspec.Raw]
    next: str = ""


class Step(msgspec.Struct, frozen=True):
    """One step of long work."""

    name: str
    state: str = ""
    message: str = ""
    began: str | None = None
    ended: str | None = None
    detail: dict[str, Any] = {}


class Operation(msgspec.Struct, frozen=True):
    """Long work."""

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
    steps: tuple[Step, ...] = ()

    @property
    def has_ended(self) -> bool:
        """Whether nothing of it will change any more."""
        return self.state in ("done", "failed", "cancelled")

    @property
    def what(self) -> str:
        """What it does, for people."""
        return f"{self.kind} of {f'{self.drive} of ' if self.drive else ''}{self.subject}"

    @property
    def subject(self) -> str:
        """What it is about: an enclosure, a tenant, or a volume as ``tenant/volume``."""
        return self.enclosure or "/".join(filter(None, (self.tenant, self.volume)))


class Wear(msgspec.Struct, frozen=True):
    """What a drive's SMART log says."""

    percentage_used: int = 0
    media_errors: int = 0
    temperature_c: int = 0
    critical_warning: int = 0


class Drive(msgspec.Struct, frozen=True):
    """A drive of an enclosure."""

    name: str
    nguid: str
    size_bytes: int = 0
    model: str = ""
    serial: str = ""
    is_in_map: bool = False
    wear: Wear | None = None


class Trouble(msgspec.Struct, frozen=True):
    """What an agent holds against a drive."""

    agent: str
    health: str = ""
    why: str = ""


class MapDrive(msgspec.Struct, frozen=True):
    """A drive of the map."""

    id: str
    nguid: str = ""
    path: str = ""
    size_bytes: int = 0
    state: str = ""
    hits: int = 0
    health: str = ""
    troubles: tuple[Trouble, ...] = ()
    wear: Wear | None = None


class Spec(msgspec.Struct, frozen=True):
    """What was registered."""

    nqn: str
    controllers: tuple[str, ...] = ()
    secret: str = ""
    failure_domain: str = ""


class Status(msgspec.Struct, frozen=True):
    """What became of it."""

    phase: str
    operation: Operation
    usable_bytes: int = 0
    drives: tuple[Drive, ...] = ()
    report: str = ""


class Enclosure(msgspec.Struct, frozen=True):
    """A registered enclosure."""

    name: str
    spec: Spec
    status: Status


class Change(msgspec.Struct, frozen=True):
    """An entry of the audit log."""

    id: str
    at: str | None = None
    who: str = ""
    role: str = ""
    action: str = ""
    subject: str = ""
    detail: str = ""


class Path(msgspec.Struct, frozen=True):
    """How an agent's host reaches an enclosure."""

    enclosure: str
    live_paths: int = 0
    paths: int = 0
    trouble: str = ""


class Agent(msgspec.Struct, frozen=True):
    """An agent of the fabric."""

    id: str
    addresses: tuple[str, ...] = ()
    is_leaving: bool = False
    shards: int = 0
    version: str = ""
    sentence: str = ""
    trouble: str = ""
    paths: tuple[Path, ...] = ()


class Shard(msgspec.Struct, frozen=True):
    """A shard."""

    id: str
    size_bytes: int = 0
    weight: int = 0
    owner: str = ""
    owner_epoch: int = 0


class Volume(msgspec.Struct, frozen=True):
    """A volume."""

    tenant: str
    name: str
    block_bytes: int = 0
    incarnation: int = 0
    model: str = ""
    switch: str = ""


class Place(msgspec.Struct, frozen=True):
    """Where one placement epoch places a block."""

    placement_epoch: int
    enclosure: str = ""
    shard: str = ""
    owner: str = ""
    owner_epoch: int = 0


class Placement(msgspec.Struct, frozen=True):
    """Where a block belongs."""

    agent: str
    map_revision: int = 0
    places: tuple[Place, ...] = ()


class Tenant(msgspec.Struct, frozen=True):
    """A tenant that was made, and what it may use."""

    name: str
    flash_bytes: int = 0
    agent_bytes_per_s: int = 0
    is_erasable: bool = False
    volumes: tuple[str, ...] = ()
    flash_used_bytes: int | None = None


class Outcome(msgspec.Struct, frozen=True):
    """How many blocks ended so."""

    state: str
    reason: str = ""
    blocks: int = 0


class Prefetched(msgspec.Struct, frozen=True):
    """What became of a prefetch."""

    counts: tuple[Outcome, ...] = ()


class Map(msgspec.Struct, frozen=True):
    """One state of the fabric map."""

    fabric: str
    revision: int = 0
    placement_epoch: int = 0
    earlier_placement_epochs: tuple[int, ...] = ()
    agents: int = 0
    enclosures: int = 0
    drives: int = 0
    shards: int = 0
    unowned_shards: int = 0


class Capacity(msgspec.Struct, frozen=True):
    """How much flash there is, and how full it is."""

    usable_bytes: int = 0
    draining_bytes: int = 0
    blocks: int = 0
    written_bytes_per_day: float = 0.0
    silent_agents: tuple[str, ...] = ()


def read(body: bytes | msgspec.Raw, kind: type[_Answer]) -> _Answer:
    """Read an answer. Raises AdminRefusedError when it is none."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise AdminRefusedError(
            _OK, f"the admin service's answer can't be read ({error}): is it of another release?"
        ) from error


def raw_items(pages: Iterable[bytes]) -> list[msgspec.Raw]:
    """Return what is listed on pages, each as it came. Raises AdminRefusedError."""
    return [item.copy() for body in pages for item in read(body, Page).items]


def items(pages: Iterable[bytes], kind: type[_Answer]) -> list[_Answer]:
    """Return what is listed on pages. Raises AdminRefusedError."""
    return [read(item, kind) for item in raw_items(pages)]
