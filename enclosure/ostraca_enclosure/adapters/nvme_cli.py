"""What NVMe drives say of themselves, asked by ``nvme`` (the package nvme-cli) in its JSON.

Releases of nvme-cli differ in how they write: numbers beyond 64 bits as texts, the critical warning as a
table, temperatures in Kelvin. All of it is read here, and nowhere else.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ostraca_enclosure.drives import Traits
from ostraca_enclosure.ports import InventoryError
from ostraca_fabric.inventory import DriveWear

Run = Callable[[Sequence[str]], str]
"""Runs a command to its end and returns what it printed. Raises InventoryError."""

COMMAND_S = 10.0
"""How long one command may take: a drive that says nothing for so long is not well."""

_KELVIN = 273
_DATA_UNIT_BYTES = 512_000


def run_command(words: Sequence[str]) -> str:
    """Run a command. Raises InventoryError that says what to do."""
    try:
        done = subprocess.run(  # noqa: S603 (words are ours, and device names as the kernel gives them)
            words, capture_output=True, text=True, check=False, timeout=COMMAND_S, errors="replace"
        )
    except FileNotFoundError as error:
        raise InventoryError(f"there is no {words[0]}: install nvme-cli") from error
    except subprocess.TimeoutExpired as error:
        raise InventoryError(
            f"`{' '.join(words)}` took longer than {COMMAND_S:.0f} s: look at the kernel's log"
        ) from error
    except OSError as error:
        raise InventoryError(f"`{' '.join(words)}` can't be run: {error}") from error
    if done.returncode:
        why = (done.stderr or done.stdout).strip().splitlines()
        raise InventoryError(
            f"`{' '.join(words)}` failed ({why[0] if why else done.returncode}): does it run as root?"
        )
    return done.stdout


def wear_of(run: Run, device: str) -> DriveWear:
    """Ask a drive for its SMART log. Raises InventoryError."""
    said = _asked(run, "smart-log", device)
    return DriveWear(
        percentage_used=_number(said, "percent_used", "percentage_used"),
        available_spare=_number(said, "avail_spare", "available_spare"),
        spare_threshold=_number(said, "spare_thresh", "available_spare_threshold"),
        media_errors=_number(said, "media_errors"),
        temperature_c=_number(said, "temperature") - _KELVIN,
        bytes_written=_number(said, "data_units_written") * _DATA_UNIT_BYTES,
        bytes_read=_number(said, "data_units_read") * _DATA_UNIT_BYTES,
        power_on_hours=_number(said, "power_on_hours"),
        critical_warning=_number(said, "critical_warning"),
    )


def traits_of(run: Run, device: str) -> Traits:
    """Ask a drive what kind it is. Raises InventoryError."""
    controller = _asked(run, "id-ctrl", device)
    namespace = _asked(run, "id-ns", device)
    formats = namespace.get("lbafs")
    if not isinstance(formats, list):
        raise InventoryError(f"`nvme id-ns {device}` names no formats: update nvme-cli")
    in_use = _number(namespace, "flbas") & 0xF
    version = _number(controller, "ver")
    return Traits(
        version=(version >> 16, version >> 8 & 0xFF),
        has_volatile_cache=bool(_number(controller, "vwc") & 1),
        wants_host_memory=_number(controller, "hmpre") > 0,
        metadata_bytes=_number(formats[in_use], "ms") if in_use < len(formats) else 0,
        lba_sizes=tuple(1 << _number(each, "ds") for each in formats if not _number(each, "ms")),
    )


def _asked(run: Run, what: str, device: str) -> Mapping[str, Any]:
    said = run(["nvme", what, device, "-o", "json"])
    try:
        found = json.loads(said)
    except ValueError as error:
        raise InventoryError(f"`nvme {what} {device} -o json` says no JSON: update nvme-cli") from error
    if not isinstance(found, dict):
        raise InventoryError(f"`nvme {what} {device} -o json` says no object: update nvme-cli")
    return found


def _number(said: Mapping[str, Any], *names: str) -> int:
    """Return a number by any of its names. Raises InventoryError."""
    value = next((said[name] for name in names if name in said), None)
    if isinstance(value, dict):  # verbose output: the number beside what its bits mean
        value = value.get("value")
    if isinstance(value, str):
        text = value.replace(",", "").strip()
        value = int(text, 0) if text.removeprefix("0x").isalnum() and text[:1].isdigit() else None
    if not isinstance(value, int | float) or value < 0:
        raise InventoryError(f"`nvme` does not say {names[0]}: update nvme-cli")
    return int(value)
