"""What an enclosure says of itself: its drives, their health and wear, and what it exports. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ostraca_fabric.ids import EnclosureId, StartId
from ostraca_fabric.target import Controller


@dataclass(frozen=True, slots=True)
class DriveWear:
    """What a drive's SMART log says: NVMe base specification, log page 02h."""

    percentage_used: int
    """Of its rated endurance, in percent; may go beyond 100."""

    available_spare: int
    """In percent of what it had; below ``spare_threshold`` it is near its end."""

    spare_threshold: int
    media_errors: int
    """Reads that its own correction could not help, since it was made."""

    temperature_c: int
    bytes_written: int
    """By hosts, since it was made: "data units written", in 512,000 bytes each."""

    bytes_read: int = 0
    power_on_hours: int = 0
    critical_warning: int = 0
    """Bits: 0 spare is low, 1 temperature, 2 reliability degraded, 3 read-only, 4 no backup power."""


@dataclass(frozen=True, slots=True)
class DriveReport:
    """One namespace of an enclosure, exported or not."""

    name: str
    """What its host calls it. It may change with each start: ``nguid`` says which one it is."""

    nguid: str
    """32 hexadecimal digits; empty where it has none, and then it can't be exported."""

    size_bytes: int
    lba_bytes: int
    model: str = ""
    serial: str = ""
    firmware: str = ""
    is_exported: bool = False
    why_not: str = ""
    """Why it is not exported, and what to do; empty where it is."""

    doubts: tuple[str, ...] = ()
    """Why it is no fit drive (``ostraca doctor drive``), one sentence each."""

    wear: DriveWear | None = None
    """None where it says nothing: drives that are files."""


@dataclass(frozen=True, slots=True)
class EnclosureReport:
    """What an enclosure's own daemon said last."""

    id: EnclosureId
    start: StartId
    """Of the daemon."""

    nqn: str
    controllers: tuple[Controller, ...]
    """Where it listens."""

    drives: tuple[DriveReport, ...] = ()
    hosts: tuple[str, ...] = ()
    """NQNs of the hosts that it lets in; empty: every one."""

    sentence: str = ""
    """What its daemon's last turn decided, and why."""

    unix_s: float = 0.0
    """When it was said, by its own clock: for people."""
