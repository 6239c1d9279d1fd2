"""Where records beside the map lie, below a fabric's prefix: one function per key. Pure."""

from __future__ import annotations

from ostraca_fabric.ids import EnclosureId, TenantId

SPECS = "specs/"
STATUSES = "statuses/"
OPERATIONS = "operations/"
WORK = "work/"
NGUIDS = "nguids/"
AUDIT = "audit/"
REPORTS = "reports/"
TENANTS = "tenants/"
SWITCHES = "switches/"


def spec(enclosure: EnclosureId) -> str:
    """What an enclosure was registered as."""
    return f"{SPECS}{enclosure}"


def status(enclosure: EnclosureId) -> str:
    """Where a registered enclosure is in its life, and which of its drives are used."""
    return f"{STATUSES}{enclosure}"


def report(enclosure: EnclosureId) -> str:
    """What an enclosure's daemon says of it: drives, health and wear. Bound to that daemon's lease."""
    return f"{REPORTS}{enclosure}"


def operation(operation: str) -> str:
    """Long work that was asked for, with its steps."""
    return f"{OPERATIONS}{operation}"


def work(operation: str) -> str:
    """Which admin does an operation. Bound to that admin's lease."""
    return f"{WORK}{operation}"


def nguid(nguid: str) -> str:
    """Which enclosure's drive a namespace is."""
    return f"{NGUIDS}{nguid}"


def audit(entry: str) -> str:
    """Who changed what, and when."""
    return f"{AUDIT}{entry}"


def tenant(tenant: TenantId) -> str:
    """A tenant that was made, with its quotas."""
    return f"{TENANTS}{tenant}"


def switch(tenant: TenantId, volume: str) -> str:
    """What is to become of requests for a volume."""
    return f"{SWITCHES}{tenant}/{volume}"


def live() -> str:
    """The settings of all agents that change while they run."""
    return "live"


def ruled() -> str:
    """Written with every ruling and erasure: its revision is that of the last one."""
    return "ruled"
