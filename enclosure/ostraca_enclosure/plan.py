"""Wanted and present exports, and the steps from one to the other. Pure.

No host ever sees a drive outside of both its old and its new rights. The order of steps ensures this:

- First, the subsystem is closed to other hosts.
- Drives are withdrawn before any host is admitted, and offered after all other hosts are excluded.
- Hosts are admitted before others are excluded, since a file-backed export can't express an empty list of
  hosts.
- Last, the subsystem is opened to all hosts, if wanted, and listens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from ostraca_fabric.model.target import Controller


@dataclass(frozen=True, slots=True)
class HostSecrets:
    """Secrets between a host and the enclosure: DH-HMAC-CHAP, ``DHHC-1:...``."""

    host: str = field(default="", repr=False)
    """Secret of the host; empty if the host needs only its name."""

    controller: str = field(default="", repr=False)
    """Secret of the enclosure for the host; empty for none."""


@dataclass(frozen=True, slots=True, order=True)
class Export:
    """Drive as seen by hosts: a namespace."""

    nguid: str
    device: str


@dataclass(frozen=True, slots=True)
class WantedExports:
    """Wanted exports and hosts."""

    controllers: tuple[Controller, ...] = ()
    drives: frozenset[Export] = frozenset()
    hosts: Mapping[str, HostSecrets] = field(default_factory=dict)
    """By NQN. Empty means every host may connect."""


NOTHING = WantedExports()
"""Withdraw all exports."""


@dataclass(frozen=True, slots=True, order=True)
class ExportedNamespace:
    """Namespace as found."""

    slot: int
    """Number in the subsystem."""

    nguid: str
    device: str
    is_enabled: bool = True
    """False for an unfinished namespace, invisible to hosts."""


@dataclass(frozen=True, slots=True)
class PresentExports:
    """Present exports and hosts."""

    exists: bool = False
    """Whether a subsystem of this name exists."""

    controllers: frozenset[Controller] = frozenset()
    namespaces: tuple[ExportedNamespace, ...] = ()
    hosts: frozenset[str] = frozenset()
    """NQNs of the hosts admitted by name."""

    stale_hosts: frozenset[str] = frozenset()
    """Admitted hosts with secrets other than requested."""

    allows_any_host: bool = False
    """Whether every host may connect."""

    @property
    def exports(self) -> frozenset[Export]:
        """Drives visible to hosts."""
        return frozenset(Export(each.nguid, each.device) for each in self.namespaces if each.is_enabled)


class _Step:
    __slots__ = ()
    text: ClassVar[str]
    """The step in words, with its fields as ``{0.field}``."""

    def __str__(self) -> str:
        return self.text.format(self)


@dataclass(frozen=True, slots=True)
class CreateSubsystem(_Step):
    """Create the subsystem: closed and empty."""

    text: ClassVar[str] = "create the subsystem"


@dataclass(frozen=True, slots=True)
class RequireAllowList(_Step):
    """Admit only listed hosts."""

    text: ClassVar[str] = "admit listed hosts only"


@dataclass(frozen=True, slots=True)
class AllowHost(_Step):
    """Admit a host with exactly these secrets, or change the host's secrets."""

    host: str
    secrets: HostSecrets = HostSecrets()

    text: ClassVar[str] = "admit {0.host}"


@dataclass(frozen=True, slots=True)
class DenyHost(_Step):
    """Exclude a host from new connections.

    Existing connections stay until the host disconnects: the kernel can't end them.
    """

    host: str

    text: ClassVar[str] = "exclude {0.host} (present connections stay until the host disconnects)"


@dataclass(frozen=True, slots=True)
class AllowAnyHost(_Step):
    """Admit every host."""

    text: ClassVar[str] = "admit every host"


@dataclass(frozen=True, slots=True)
class RemoveListener(_Step):
    """Stop listening at a controller."""

    controller: Controller

    text: ClassVar[str] = "stop listening at {0.controller}"


@dataclass(frozen=True, slots=True)
class RemoveNamespace(_Step):
    """Withdraw a drive."""

    slot: int
    nguid: str

    def __str__(self) -> str:
        return f"withdraw namespace {self.slot} ({self.nguid or 'no NGUID'})"


@dataclass(frozen=True, slots=True)
class AddNamespace(_Step):
    """Export a drive."""

    export: Export

    text: ClassVar[str] = "export {0.export.device} ({0.export.nguid})"


@dataclass(frozen=True, slots=True)
class AddListener(_Step):
    """Listen at a controller."""

    controller: Controller

    text: ClassVar[str] = "listen at {0.controller}"


@dataclass(frozen=True, slots=True)
class RemoveSubsystem(_Step):
    """Remove the subsystem, with all objects created for its use."""

    text: ClassVar[str] = "remove the subsystem"


Step = (
    CreateSubsystem
    | RequireAllowList
    | AllowHost
    | DenyHost
    | AllowAnyHost
    | RemoveListener
    | RemoveNamespace
    | AddNamespace
    | AddListener
    | RemoveSubsystem
)

GUARDS = (CreateSubsystem, RequireAllowList, AllowHost, DenyHost, AllowAnyHost)
"""Steps with effect on admission; after a failure, the remaining steps rely on the wrong hosts and are
skipped."""


def plan(wanted: WantedExports, present: PresentExports) -> list[Step]:
    """Return the necessary steps in order; empty if all is as wanted."""
    if not wanted.controllers and not wanted.drives and not wanted.hosts:
        return _withdrawal(present)
    missing = wanted.drives - present.exports
    return [
        *([] if present.exists else [CreateSubsystem()]),
        *(RemoveListener(each) for each in sorted(present.controllers - set(wanted.controllers), key=str)),
        *([RequireAllowList()] if wanted.hosts and present.allows_any_host else []),
        *(RemoveNamespace(each.slot, each.nguid) for each in _surplus_namespaces(wanted, present)),
        *_host_steps(wanted, present),
        *(AddNamespace(each) for each in sorted(missing, key=_by_device)),
        *([AllowAnyHost()] if not wanted.hosts and not present.allows_any_host else []),
        *(AddListener(each) for each in wanted.controllers if each not in present.controllers),
    ]


def _host_steps(wanted: WantedExports, present: PresentExports) -> Iterator[Step]:
    for host, secrets in sorted(wanted.hosts.items(), key=lambda item: item[0]):
        if host not in present.hosts or host in present.stale_hosts:
            yield AllowHost(host, secrets)
    yield from map(DenyHost, sorted(present.hosts - set(wanted.hosts)))


def _surplus_namespaces(wanted: WantedExports, present: PresentExports) -> list[ExportedNamespace]:
    """Return namespaces unwanted, unfinished, or present twice."""
    kept: set[str] = set()
    surplus = []
    for each in present.namespaces:
        is_wanted = each.is_enabled and Export(each.nguid, each.device) in wanted.drives
        if is_wanted and each.nguid not in kept:
            kept.add(each.nguid)
        else:
            surplus.append(each)
    return surplus


def _by_device(export: Export) -> tuple[int, str]:
    """Return a sort key with nvme2n1 before nvme10n1."""
    return len(export.device), export.device


def _withdrawal(present: PresentExports) -> list[Step]:
    steps: list[Step] = [RemoveListener(each) for each in sorted(present.controllers, key=str)]
    steps += [RemoveNamespace(each.slot, each.nguid) for each in present.namespaces]
    steps += [DenyHost(each) for each in sorted(present.hosts)]
    if present.exists:
        steps.append(RemoveSubsystem())
    return steps
