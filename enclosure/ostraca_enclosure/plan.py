"""What an enclosure is to export and to whom, what it does, and the steps from one to the other. Pure.

No host is ever shown what it neither saw before nor is to see afterwards: the subsystem is closed to others
first, drives are taken back before anybody is let in, and offered after all others are shut out. Hosts are
let in before others are shut out, because files have no word for "nobody". It is opened to all, and listens,
last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ostraca_fabric.target import Controller


@dataclass(frozen=True, slots=True)
class HostSecrets:
    """What a host and the enclosure show each other: DH-HMAC-CHAP secrets, ``DHHC-1:...``."""

    host: str = field(default="", repr=False)
    """What the host shows; empty: nothing is asked of it but its name."""

    controller: str = field(default="", repr=False)
    """What the enclosure shows the host; empty: nothing."""


@dataclass(frozen=True, slots=True, order=True)
class Export:
    """A drive as hosts see it: a namespace."""

    nguid: str
    device: str


@dataclass(frozen=True, slots=True)
class Want:
    """What is to be exported, and to whom."""

    controllers: tuple[Controller, ...] = ()
    drives: frozenset[Export] = frozenset()
    hosts: Mapping[str, HostSecrets] = field(default_factory=dict)
    """By NQN. None: every host may connect."""


NOTHING = Want()
"""All is to be withdrawn."""


@dataclass(frozen=True, slots=True, order=True)
class Offered:
    """A namespace as it was found."""

    slot: int
    """Its number in the subsystem."""

    nguid: str
    device: str
    is_whole: bool = True
    """False: it was begun and not ended, so no host sees it."""


@dataclass(frozen=True, slots=True)
class Have:
    """What is exported, and to whom."""

    is_there: bool = False
    """Whether there is a subsystem of this name at all."""

    controllers: frozenset[Controller] = frozenset()
    offered: tuple[Offered, ...] = ()
    hosts: frozenset[str] = frozenset()
    """NQNs of those that are let in by name."""

    stale: frozenset[str] = frozenset()
    """Those of them whose secrets are others than were asked about."""

    is_open: bool = False
    """Whether every host may connect."""


@dataclass(frozen=True, slots=True)
class Create:
    """Begin the subsystem: closed, and empty."""

    def __str__(self) -> str:
        return "begin the subsystem"


@dataclass(frozen=True, slots=True)
class CloseToOthers:
    """Let in nobody but those that are listed."""

    def __str__(self) -> str:
        return "let in listed hosts alone"


@dataclass(frozen=True, slots=True)
class LetIn:
    """Let a host in, or change its secrets: it is let in with these, and no others, afterwards."""

    host: str
    secrets: HostSecrets = HostSecrets()

    def __str__(self) -> str:
        return f"let {self.host} in"


@dataclass(frozen=True, slots=True)
class ShutOut:
    """Let a host connect no more. What it has connected stays until it disconnects: the kernel has no word
    for that.
    """

    host: str

    def __str__(self) -> str:
        return f"shut {self.host} out (what it has connected stays until it disconnects)"


@dataclass(frozen=True, slots=True)
class OpenToAll:
    """Let every host in."""

    def __str__(self) -> str:
        return "let every host in"


@dataclass(frozen=True, slots=True)
class StopListening:
    """Be reached at a controller no more."""

    controller: Controller

    def __str__(self) -> str:
        return f"listen at {self.controller} no more"


@dataclass(frozen=True, slots=True)
class TakeBack:
    """Show a drive no more."""

    slot: int
    nguid: str

    def __str__(self) -> str:
        return f"take namespace {self.slot} ({self.nguid or 'no NGUID'}) back"


@dataclass(frozen=True, slots=True)
class Offer:
    """Show a drive."""

    export: Export

    def __str__(self) -> str:
        return f"offer {self.export.device} ({self.export.nguid})"


@dataclass(frozen=True, slots=True)
class Listen:
    """Be reached at a controller."""

    controller: Controller

    def __str__(self) -> str:
        return f"listen at {self.controller}"


@dataclass(frozen=True, slots=True)
class Remove:
    """End the subsystem, with all that was made for it."""

    def __str__(self) -> str:
        return "end the subsystem"


Step = (
    Create | CloseToOthers | LetIn | ShutOut | OpenToAll | StopListening | TakeBack | Offer | Listen | Remove
)

GUARDS = (Create, CloseToOthers, LetIn, ShutOut, OpenToAll)
"""Steps after whose failure nothing else is done: what follows relies on who is let in."""


def plan(want: Want, have: Have) -> list[Step]:
    """Return what to do, in this order; nothing where all is as it should be."""
    if not want.controllers and not want.drives and not want.hosts:
        return _withdrawn(have)
    return [
        *([] if have.is_there else [Create()]),
        *(StopListening(each) for each in sorted(have.controllers - set(want.controllers), key=str)),
        *([CloseToOthers()] if want.hosts and have.is_open else []),
        *(TakeBack(each.slot, each.nguid) for each in _surplus(want, have)),
        *_admitted(want, have),
        *(Offer(each) for each in sorted(want.drives, key=_by_device) if not _is_offered(each, have)),
        *([OpenToAll()] if not want.hosts and not have.is_open else []),
        *(Listen(each) for each in want.controllers if each not in have.controllers),
    ]


def _admitted(want: Want, have: Have) -> Iterator[Step]:
    for host, secrets in sorted(want.hosts.items(), key=lambda item: item[0]):
        if host not in have.hosts or host in have.stale:
            yield LetIn(host, secrets)
    for host in sorted(have.hosts - set(want.hosts)):
        yield ShutOut(host)


def _surplus(want: Want, have: Have) -> list[Offered]:
    """Return namespaces that are not wanted, are not whole, or are there twice."""
    wanted = {(each.nguid, each.device) for each in want.drives}
    kept: set[str] = set()
    surplus = []
    for each in have.offered:
        if each.is_whole and (each.nguid, each.device) in wanted and each.nguid not in kept:
            kept.add(each.nguid)
        else:
            surplus.append(each)
    return surplus


def _by_device(export: Export) -> tuple[int, str]:
    """Sort nvme2n1 before nvme10n1."""
    return len(export.device), export.device


def _is_offered(export: Export, have: Have) -> bool:
    return any(
        each.is_whole and (each.nguid, each.device) == (export.nguid, export.device) for each in have.offered
    )


def _withdrawn(have: Have) -> list[Step]:
    steps: list[Step] = [StopListening(each) for each in sorted(have.controllers, key=str)]
    steps += [TakeBack(each.slot, each.nguid) for each in have.offered]
    steps += [ShutOut(each) for each in sorted(have.hosts)]
    if have.is_there:
        steps.append(Remove())
    return steps
