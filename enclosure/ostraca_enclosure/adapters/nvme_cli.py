"""Data of NVMe drives from ``nvme`` (package nvme-cli), in JSON.

Releases of nvme-cli differ in notation: numbers beyond 64 bits as text, the critical warning as a table,
temperatures in Kelvin. Only this module handles the differences.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ostraca_enclosure.drives import Traits
from ostraca_enclosure.ports import InventoryError
from ostraca_fabric.model.inventory import DriveWear

Run = Callable[[Sequence[str]], str]
"""Function to run a command and return the output. Raises InventoryError."""

COMMAND_S = 10.0
"""Time limit of a command; a drive silent for longer is faulty."""

_KELVIN = 273
_DATA_UNIT_BYTES = 512_000


def run_command(words: Sequence[str]) -> str:
    """Run a command. Raises InventoryError with advice."""
    try:
        completed = subprocess.run(  # noqa: S603 (fixed words, and device names from the kernel)
            words, capture_output=True, text=True, check=False, timeout=COMMAND_S, errors="replace"
        )
    except FileNotFoundError as error:
        raise InventoryError(f"{words[0]} is missing: install nvme-cli") from error
    except subprocess.TimeoutExpired as error:
        raise InventoryError(
            f"`{' '.join(words)}` took longer than {COMMAND_S:.0f} s: see the kernel log"
        ) from error
    except OSError as error:
        raise InventoryError(f"`{' '.join(words)}` can't be run: {error}") from error
    if completed.returncode:
        why = (completed.stderr or completed.stdout).strip().splitlines()
        raise InventoryError(
            f"`{' '.join(words)}` failed ({why[0] if why else completed.returncode}): run the daemon as root"
        )
    return completed.stdout


def wear_of(run: Run, device: str) -> DriveWear:
    """Return the values of a drive's SMART log. Raises InventoryError."""
    values = _query(run, "smart-log", device)
    return DriveWear(
        percentage_used=_number(values, "percent_used", "percentage_used"),
        available_spare=_number(values, "avail_spare", "available_spare"),
        spare_threshold=_number(values, "spare_thresh", "available_spare_threshold"),
        media_errors=_number(values, "media_errors"),
        temperature_c=_number(values, "temperature") - _KELVIN,
        bytes_written=_number(values, "data_units_written") * _DATA_UNIT_BYTES,
        bytes_read=_number(values, "data_units_read") * _DATA_UNIT_BYTES,
        power_on_hours=_number(values, "power_on_hours"),
        critical_warning=_number(values, "critical_warning"),
    )


def traits_of(run: Run, device: str) -> Traits:
    """Return the traits of a drive. Raises InventoryError."""
    controller = _query(run, "id-ctrl", device)
    namespace = _query(run, "id-ns", device)
    formats = namespace.get("lbafs")
    if not isinstance(formats, list):
        raise InventoryError(f"`nvme id-ns {device}` lists no formats: update nvme-cli")
    in_use = _number(namespace, "flbas") & 0xF
    version = _number(controller, "ver")
    return Traits(
        version=(version >> 16, version >> 8 & 0xFF),
        has_volatile_cache=bool(_number(controller, "vwc") & 1),
        wants_host_memory=_number(controller, "hmpre") > 0,
        metadata_bytes=_number(formats[in_use], "ms") if in_use < len(formats) else 0,
        lba_sizes=tuple(1 << _number(each, "ds") for each in formats if not _number(each, "ms")),
    )


def _query(run: Run, command: str, device: str) -> Mapping[str, Any]:
    values = run(["nvme", command, device, "-o", "json"])
    try:
        found = json.loads(values)
    except ValueError as error:
        raise InventoryError(f"`nvme {command} {device} -o json` prints no JSON: update nvme-cli") from error
    if not isinstance(found, dict):
        raise InventoryError(f"`nvme {command} {device} -o json` prints no object: update nvme-cli")
    return found


def _number(values: Mapping[str, Any], *names: str) -> int:
    """Return a number under any of its names. Raises InventoryError."""
    value = next((values[name] for name in names if name in values), None)
    if isinstance(value, dict):  # verbose output: the number beside the meaning of the bits
        value = value.get("value")
    if isinstance(value, str):
        text = value.replace(",", "").strip()
        value = int(text, 0) if text.removeprefix("0x").isalnum() and text[:1].isdigit() else None
    if not isinstance(value, int | float) or value < 0:
        raise InventoryError(f"`nvme` does not report {names[0]}: update nvme-cli")
    return int(value)
