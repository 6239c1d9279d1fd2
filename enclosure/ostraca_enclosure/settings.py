"""What an operator may set of an enclosure: which drives, and how often it looks."""

from __future__ import annotations

from dataclasses import dataclass, field

from ostraca_enclosure.fit import FitSettings
from ostraca_fabric.adapters.http.settings import HttpSettings
from ostraca_fabric.errors import UsageError


@dataclass(frozen=True, slots=True)
class EnclosureSettings:
    """Settings of an enclosure's daemon."""

    drives: tuple[str, ...] = ()
    """Drives to export, each by its name, device, NGUID or serial number; empty: every drive that is fit and
    that nobody uses. A drive that is named is exported also where somebody's data may be on it; one that is
    mounted never is."""

    force: bool = False
    """Export drives that are not fit, as in laboratories."""

    reservations: bool = False
    """Whether hosts may reserve drives that are exported from now on; a kernel before Linux 6.13 exports them
    without. Turn it on where agents do it (``nvme.reservations``), and nowhere else: any host that is let in
    could keep the others out."""

    turn_s: float = 5.0
    """How often it looks whether all is exported as it should be. A drive that was plugged in is seen after
    this time, and a step that failed is tried again."""

    health_every_s: float = 60.0
    """How often drives are asked for their SMART log. Each time costs a drive a command or two."""

    report_every_s: float = 60.0
    """How old its report in etcd may grow while nothing changes."""

    secrets_look_s: float = 5.0
    """How often the file of hosts is looked at for changes."""

    fit: FitSettings = field(default_factory=FitSettings)
    http: HttpSettings = field(default_factory=HttpSettings)

    def __post_init__(self) -> None:
        """Refuse what can't work."""
        if min(self.turn_s, self.health_every_s, self.report_every_s, self.secrets_look_s) <= 0:
            message = "turn_s, health_every_s, report_every_s and secrets_look_s are above 0"
            raise UsageError(message)
