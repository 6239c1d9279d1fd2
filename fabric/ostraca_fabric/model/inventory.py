"""Report of an enclosure: drives, their health and wear, and exports. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ostraca_fabric.model.ids import EnclosureId, StartId
from ostraca_fabric.model.target import Controller


@dataclass(frozen=True, slots=True)
class DriveWear:
    """Values of a drive's SMART log: NVMe base specification, log page 02h."""

    percentage_used: int
    """Used part of the rated endurance, in percent; may exceed 100."""

    available_spare: int
    """Percentage of the original spare; below ``spare_threshold`` the drive is near the end of life."""

    spare_threshold: int
    media_errors: int
    """Reads beyond the drive's own correction, over the drive's life."""

    temperature_c: int
    bytes_written: int
    """Written by hosts over the drive's life: "data units written", in 512,000 bytes each."""

    bytes_read: int = 0
    power_on_hours: int = 0
    critical_warning: int = 0
    """Bits: 0 spare is low, 1 temperature, 2 reliability degraded, 3 read-only, 4 no backup power."""


@dataclass(frozen=True, slots=True)
class DriveReport:
    """Namespace of an enclosure, exported or not."""

    name: str
    """Device name on the host. May change with each start: use ``nguid`` for identity."""

    nguid: str
    """32 hexadecimal digits; empty for a namespace without NGUID, which can't be exported."""

    size_bytes: int
    lba_bytes: int
    model: str = ""
    serial: str = ""
    firmware: str = ""
    is_exported: bool = False
    why_not: str = ""
    """Reason against the export, and the remedy; empty if exported."""

    doubts: tuple[str, ...] = ()
    """Reasons against the drive's fitness (``ostraca doctor drive``), one sentence each."""

    wear: DriveWear | None = None
    """None for drives without a SMART log: files."""


@dataclass(frozen=True, slots=True)
class EnclosureReport:
    """Last report of an enclosure's daemon."""

    id: EnclosureId
    start: StartId
    """Start id of the daemon."""

    nqn: str
    controllers: tuple[Controller, ...]
    """Addresses where the enclosure listens."""

    drives: tuple[DriveReport, ...] = ()
    hosts: tuple[str, ...] = ()
    """NQNs of permitted hosts; empty: every host may connect."""

    sentence: str = ""
    """Decision of the daemon's last turn, with the reason."""

    unix_s: float = 0.0
    """Time of the report by the daemon's clock: for display only."""
