"""Metrics of an enclosure's daemon, as a part of ``metrics.METRICS``. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from ostraca_fabric.model.inventory import DriveReport
from ostraca_fabric.telemetry.metric import Metric, MetricKind, Sample
from ostraca_fabric.telemetry.status import EnclosureDaemonStatus

_C, _G, _I = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.INFO
_DRIVE = ("drive", "nguid")
_PERCENT = 100

ENCLOSURE_INFO = Metric(
    "ostraca_enclosure", _I, "", ("enclosure", "start_id", "version"), "Identity of the enclosure."
)
ENCLOSURE_UPTIME = Metric(
    "ostraca_enclosure_uptime_seconds", _G, "seconds", (), "Time since the daemon's start."
)
ENCLOSURE_CONDITION = Metric(
    "ostraca_enclosure_condition",
    _G,
    "",
    ("condition",),
    "1 while the condition is true, 0 while untrue; only ready tells whether drives are exported.",
)
ENCLOSURE_EXPORTED = Metric(
    "ostraca_enclosure_exported_drives", _G, "drives", (), "Drives visible to connecting hosts."
)
ENCLOSURE_FOUND = Metric(
    "ostraca_enclosure_found_drives", _G, "drives", (), "Drives present, exported or not."
)
ENCLOSURE_HOSTS = Metric("ostraca_enclosure_hosts", _G, "", (), "Hosts admitted by name; 0 if every host is.")
ENCLOSURE_STEPS_FAILED = Metric(
    "ostraca_enclosure_failed_steps", _C, "steps", (), "Failed steps and failed checks."
)
ENCLOSURE_LOST_LOG = Metric(
    "ostraca_enclosure_lost_log_lines",
    _C,
    "lines",
    (),
    "Log lines dropped because of a slow reader or a failed write.",
)
ENCLOSURE_DRIVE_EXPORTED = Metric(
    "ostraca_enclosure_drive_exported", _G, "", _DRIVE, "1 while the drive is exported."
)
ENCLOSURE_DRIVE_USED = Metric(
    "ostraca_enclosure_drive_endurance_used_ratio",
    _G,
    "ratio",
    _DRIVE,
    "Used share of the rated endurance, as the drive reports; may exceed 1.",
)
ENCLOSURE_DRIVE_SPARE = Metric(
    "ostraca_enclosure_drive_spare_ratio",
    _G,
    "ratio",
    _DRIVE,
    "Remaining spare capacity.",
)
ENCLOSURE_DRIVE_SPARE_LEAST = Metric(
    "ostraca_enclosure_drive_spare_threshold_ratio",
    _G,
    "ratio",
    _DRIVE,
    "Spare below which the drive is near its end.",
)
ENCLOSURE_DRIVE_WARNING = Metric(
    "ostraca_enclosure_drive_critical_warning",
    _G,
    "",
    _DRIVE,
    "Critical warning bits: 1 spare, 2 temperature, 4 reliability, 8 read-only, 16 no backup power.",
)
ENCLOSURE_DRIVE_ERRORS = Metric(
    "ostraca_enclosure_drive_media_errors",
    _G,
    "",
    _DRIVE,
    "Uncorrected media errors in the drive's life.",
)
ENCLOSURE_DRIVE_TEMPERATURE = Metric(
    "ostraca_enclosure_drive_temperature_celsius", _G, "celsius", _DRIVE, "Temperature of the drive."
)
ENCLOSURE_DRIVE_WRITTEN = Metric(
    "ostraca_enclosure_drive_written_bytes",
    _G,
    "bytes",
    _DRIVE,
    "Bytes written by hosts in the drive's life.",
)

ENCLOSURE_METRICS: tuple[Metric, ...] = tuple(each for each in globals().values() if isinstance(each, Metric))


def enclosure_samples(status: EnclosureDaemonStatus) -> Iterator[Sample]:
    """Yield the samples of an enclosure's status.

    Drives made of files report no wear.
    """
    yield Sample(ENCLOSURE_INFO, (status.enclosure, status.start_id, status.version), 1)
    for condition in status.conditions:
        yield Sample(ENCLOSURE_CONDITION, (condition.name,), condition.is_true)
    for metric, value in (
        (ENCLOSURE_UPTIME, status.uptime_s),
        (ENCLOSURE_EXPORTED, sum(drive.is_exported for drive in status.drives)),
        (ENCLOSURE_FOUND, len(status.drives)),
        (ENCLOSURE_HOSTS, len(status.hosts)),
        (ENCLOSURE_STEPS_FAILED, status.steps_failed),
        (ENCLOSURE_LOST_LOG, status.lost_log_lines),
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
