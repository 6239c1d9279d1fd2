"""Keys of records beside the fabric map, below a fabric's prefix. Pure."""

from __future__ import annotations

from ostraca_fabric.model.ids import EnclosureId, TenantId

SPECS = "specs/"
STATUSES = "statuses/"
OPERATIONS = "operations/"
WORK = "work/"
NGUIDS = "nguids/"
RETIRED = "retired/"
AUDIT = "audit/"
REPORTS = "reports/"
TENANTS = "tenants/"
SWITCHES = "switches/"
VOLUMES = "volumes/"


def spec(enclosure: EnclosureId) -> str:
    """Registration of an enclosure."""
    return f"{SPECS}{enclosure}"


def status(enclosure: EnclosureId) -> str:
    """Phase of a registered enclosure, and its drives in use."""
    return f"{STATUSES}{enclosure}"


def report(enclosure: EnclosureId) -> str:
    """Report of an enclosure's daemon: drives, health and wear. Bound to the daemon's lease."""
    return f"{REPORTS}{enclosure}"


def operation(operation: str) -> str:
    """Operation with its steps."""
    return f"{OPERATIONS}{operation}"


def work(operation: str) -> str:
    """Admin service performing an operation. Bound to the service's lease."""
    return f"{WORK}{operation}"


def nguid(nguid: str) -> str:
    """Enclosure and drive of a namespace."""
    return f"{NGUIDS}{nguid}"


def retired(enclosure: EnclosureId) -> str:
    """Retired enclosure: reports register no such enclosure, operators do."""
    return f"{RETIRED}{enclosure}"


def audit(entry: str) -> str:
    """Change, with author and time."""
    return f"{AUDIT}{entry}"


def tenant(tenant: TenantId) -> str:
    """Tenant created by an operator, with its quotas."""
    return f"{TENANTS}{tenant}"


def volumes(tenant: TenantId) -> str:
    """Prefix of a tenant's volumes."""
    return f"{VOLUMES}{tenant}/"


def switch(tenant: TenantId, volume: str) -> str:
    """Switch of a volume: on, off or shadow."""
    return f"{SWITCHES}{tenant}/{volume}"


def live() -> str:
    """Live settings of all agents."""
    return "live"


def overrides_marker() -> str:
    """Written with every override and erasure: its revision is that of the latest."""
    return "ruled"
