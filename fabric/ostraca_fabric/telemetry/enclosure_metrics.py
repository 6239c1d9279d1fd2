"""Metrics of an enclosure's daemon, as a table like ``metrics``. Pure."""

from __future__ import annotations

from collections.abc import Callable

from ostraca_fabric.model.inventory import DriveWear
from ostraca_fabric.telemetry.openmetrics import Metric, MetricKind, Values
from ostraca_fabric.telemetry.status import EnclosureDaemonStatus

_C, _G, _I = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.INFO
_DRIVE = ("drive", "nguid")
_PERCENT = 100


def _wear(value: Callable[[DriveWear], float]) -> Callable[[EnclosureDaemonStatus], Values]:
    """Return the values of each drive with a SMART log: drives made of files report no wear."""
    return lambda status: {
        (drive.name, drive.nguid): value(drive.wear) for drive in status.drives if drive.wear is not None
    }


ENCLOSURE_METRICS: tuple[Metric[EnclosureDaemonStatus], ...] = (
    Metric(
        "ostraca_enclosure",
        _I,
        "",
        ("enclosure", "start_id", "version", "target"),
        "Identity of the enclosure.",
        lambda status: {(status.enclosure, status.start_id, status.version, status.target): 1},
    ),
    Metric(
        "ostraca_enclosure_uptime_seconds",
        _G,
        "seconds",
        (),
        "Time since the daemon's start.",
        lambda status: status.uptime_s,
    ),
    Metric(
        "ostraca_enclosure_condition",
        _G,
        "",
        ("condition",),
        "1 while the condition is true, 0 while untrue; only ready tells whether drives are exported.",
        lambda status: {(each.name,): each.is_true for each in status.conditions},
    ),
    Metric(
        "ostraca_enclosure_exported_drives",
        _G,
        "drives",
        (),
        "Drives visible to connecting hosts.",
        lambda status: sum(drive.is_exported for drive in status.drives),
    ),
    Metric(
        "ostraca_enclosure_found_drives",
        _G,
        "drives",
        (),
        "Drives present, exported or not.",
        lambda status: len(status.drives),
    ),
    Metric(
        "ostraca_enclosure_hosts",
        _G,
        "",
        (),
        "Hosts admitted by name; 0 if every host is.",
        lambda status: len(status.hosts),
    ),
    Metric(
        "ostraca_enclosure_failed_steps",
        _C,
        "steps",
        (),
        "Failed steps and failed checks.",
        lambda status: status.steps_failed,
    ),
    Metric(
        "ostraca_enclosure_lost_log_lines",
        _C,
        "lines",
        (),
        "Log lines dropped because of a slow reader or a failed write.",
        lambda status: status.lost_log_lines,
    ),
    Metric(
        "ostraca_enclosure_drive_exported",
        _G,
        "",
        _DRIVE,
        "1 while the drive is exported.",
        lambda status: {(drive.name, drive.nguid): drive.is_exported for drive in status.drives},
    ),
    Metric(
        "ostraca_enclosure_drive_endurance_used_ratio",
        _G,
        "ratio",
        _DRIVE,
        "Used share of the rated endurance, as the drive reports; may exceed 1.",
        _wear(lambda wear: wear.percentage_used / _PERCENT),
    ),
    Metric(
        "ostraca_enclosure_drive_spare_ratio",
        _G,
        "ratio",
        _DRIVE,
        "Remaining spare capacity.",
        _wear(lambda wear: wear.available_spare / _PERCENT),
    ),
    Metric(
        "ostraca_enclosure_drive_spare_threshold_ratio",
        _G,
        "ratio",
        _DRIVE,
        "Spare below which the drive is near its end.",
        _wear(lambda wear: wear.spare_threshold / _PERCENT),
    ),
    Metric(
        "ostraca_enclosure_drive_critical_warning",
        _G,
        "",
        _DRIVE,
        "Critical warning bits: 1 spare, 2 temperature, 4 reliability, 8 read-only, 16 no backup power.",
        _wear(lambda wear: wear.critical_warning),
    ),
    Metric(
        "ostraca_enclosure_drive_media_errors",
        _G,
        "",
        _DRIVE,
        "Uncorrected media errors in the drive's life.",
        _wear(lambda wear: wear.media_errors),
    ),
    Metric(
        "ostraca_enclosure_drive_temperature_celsius",
        _G,
        "celsius",
        _DRIVE,
        "Temperature of the drive.",
        _wear(lambda wear: wear.temperature_c),
    ),
    Metric(
        "ostraca_enclosure_drive_written_bytes",
        _G,
        "bytes",
        _DRIVE,
        "Bytes written by hosts in the drive's life.",
        _wear(lambda wear: wear.bytes_written),
    ),
)
