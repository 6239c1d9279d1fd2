"""Settings of an enclosure's daemon."""

from __future__ import annotations

from dataclasses import dataclass, field

from ostraca_enclosure.drive_fitness import FitSettings
from ostraca_fabric.errors import UsageError
from ostraca_fabric.telemetry.http.app import HttpSettings


@dataclass(frozen=True, slots=True)
class EnclosureSettings:
    """Settings of an enclosure's daemon."""

    drives: tuple[str, ...] = ()
    """Drives to export, by name, device, NGUID or serial number; empty: every fit and unused drive. A drive
    in this list is exported even if it may hold data; a mounted drive never is."""

    force: bool = False
    """Export unfit drives too, for laboratories."""

    reservations: bool = False
    """Whether hosts may reserve drives exported from now on; a kernel before Linux 6.13 exports without. Set
    only where agents set ``nvme.reservations``: any admitted host could lock out others."""

    turn_s: float = 5.0
    """Interval between checks of all exports. New drives are found, and failed steps retried, after this
    time."""

    health_every_s: float = 60.0
    """Interval between reads of drives' SMART logs, which cost a drive a command or two."""

    report_every_s: float = 60.0
    """Longest age of the report in etcd while nothing changes."""

    secrets_check_s: float = 5.0
    """Interval between looks at the file of hosts."""

    fit: FitSettings = field(default_factory=FitSettings)
    http: HttpSettings = field(default_factory=HttpSettings)

    def __post_init__(self) -> None:
        """Refuse what can't work."""
        if min(self.turn_s, self.health_every_s, self.report_every_s, self.secrets_check_s) <= 0:
            raise UsageError("turn_s, health_every_s, report_every_s and secrets_check_s are above 0")
