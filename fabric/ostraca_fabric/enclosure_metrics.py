"""The metrics of an enclosure's daemon, and what its status says in their terms. Pure.

They are part of the one table, ``metrics.METRICS``.
"""

from __future__ import annotations

from collections.abc import Iterator

from ostraca_fabric.inventory import DriveReport
from ostraca_fabric.metric import Kind, Metric, Sample
from ostraca_fabric.status import EnclosureStatus

_C, _G, _I = Kind.COUNTER, Kind.GAUGE, Kind.INFO
_DRIVE = ("drive", "nguid")
_PERCENT = 100

ENCLOSURE_INFO = Metric(
    "ostraca_enclosure", _I, "", ("enclosure", "start_id", "version"), "Which enclosure this is."
)
ENCLOSURE_UPTIME = Metric(
    "ostraca_enclosure_uptime_seconds", _G, "seconds", (), "How long the enclosure's daemon has been running."
)
ENCLOSURE_CONDITION = Metric(
    "ostraca_enclosure_condition",
    _G,
    "",
    ("condition",),
    "1 while a condition is as it should be, 0 while it is not; only ready says whether drives are exported.",
)
ENCLOSURE_EXPORTED = Metric(
    "ostraca_enclosure_exported_drives", _G, "drives", (), "Drives that hosts find when they connect."
)
ENCLOSURE_FOUND = Metric(
    "ostraca_enclosure_found_drives", _G, "drives", (), "Drives that are there, exported or not."
)
ENCLOSURE_HOSTS = Metric(
    "ostraca_enclosure_hosts", _G, "", (), "Hosts that are let in by name; 0 where every host is."
)
ENCLOSURE_STEPS_FAILED = Metric(
    "ostraca_enclosure_failed_steps", _C, "steps", (), "Steps that failed, and looks that did."
)
ENCLOSURE_DRIVE_EXPORTED = Metric(
    "ostraca_enclosure_drive_exported", _G, "", _DRIVE, "1 while the drive is exported, else 0."
)
ENCLOSURE_DRIVE_USED = Metric(
    "ostraca_enclosure_drive_endurance_used_ratio",
    _G,
    "ratio",
    _DRIVE,
    "How much of the drive's rated endurance is used, as it says itself; may go beyond 1.",
)
ENCLOSURE_DRIVE_SPARE = Metric(
    "ostraca_enclosure_drive_spare_ratio",
    _G,
    "ratio",
    _DRIVE,
    "How much of the drive's spare is left.",
)
ENCLOSURE_DRIVE_SPARE_LEAST = Metric(
    "ostraca_enclosure_drive_spare_threshold_ratio",
    _G,
    "ratio",
    _DRIVE,
    "Below so much spare the drive is near its end.",
)
ENCLOSURE_DRIVE_WARNING = Metric(
    "ostraca_enclosure_drive_critical_warning",
    _G,
    "",
    _DRIVE,
    "The drive's critical warning, as bits: 1 spare, 2 temperature, 4 reliability, 8 read-only, 16 no "
    "backup power.",
)
ENCLOSURE_DRIVE_ERRORS = Metric(
    "ostraca_enclosure_drive_media_errors",
    _G,
    "",
    _DRIVE,
    "Errors that the drive's own correction could not help, since it was made.",
)
ENCLOSURE_DRIVE_TEMPERATURE = Metric(
    "ostraca_enclosure_drive_temperature_celsius", _G, "celsius", _DRIVE, "How warm the drive is."
)
ENCLOSURE_DRIVE_WRITTEN = Metric(
    "ostraca_enclosure_drive_written_bytes",
    _G,
    "bytes",
    _DRIVE,
    "Written to the drive by hosts, since it was made.",
)

ENCLOSURE_METRICS: tuple[Metric, ...] = tuple(each for each in globals().values() if isinstance(each, Metric))


def enclosure_samples(status: EnclosureStatus) -> Iterator[Sample]:
    """Say what an enclosure's status says. Drives that are files say nothing of wear."""
    yield Sample(ENCLOSURE_INFO, (status.enclosure, status.start_id, status.version), 1)
    for condition in status.conditions:
        yield Sample(ENCLOSURE_CONDITION, (condition.name,), condition.is_true)
    for metric, value in (
        (ENCLOSURE_UPTIME, status.uptime_s),
        (ENCLOSURE_EXPORTED, sum(drive.is_exported for drive in status.drives)),
        (ENCLOSURE_FOUND, len(status.drives)),
        (ENCLOSURE_HOSTS, len(status.hosts)),
        (ENCLOSURE_STEPS_FAILED, status.steps_failed),
    ):
        yield Sample(metric, (), value)
    for drive in status.drives:
        yield from _drive_samples(drive)


def _drive_samples(drive: DriveReport) -> Iterator[Sample]:
    labels, wear = (drive.name, drive.nguid), drive.wear
    yield Sample(ENCLOSURE_DRIVE_EXPORTED, labels, drive.is_exported)
    if wear is None:
        return
    for metric, value in (
        (ENCLOSURE_DRIVE_USED, wear.percentage_used / _PERCENT),
        (ENCLOSURE_DRIVE_SPARE, wear.available_spare / _PERCENT),
        (ENCLOSURE_DRIVE_SPARE_LEAST, wear.spare_threshold / _PERCENT),
        (ENCLOSURE_DRIVE_WARNING, wear.critical_warning),
        (ENCLOSURE_DRIVE_ERRORS, wear.media_errors),
        (ENCLOSURE_DRIVE_TEMPERATURE, wear.temperature_c),
        (ENCLOSURE_DRIVE_WRITTEN, wear.bytes_written),
    ):
        yield Sample(metric, labels, value)
