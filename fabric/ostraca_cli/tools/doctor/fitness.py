"""``ostraca doctor drive``: fitness of local NVMe drives for an enclosure.

The command also reports present users of the drives, and writes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from ostraca_cli.terminal.units import size_text
from ostraca_enclosure.adapters.nvme_drives import NvmeDrives
from ostraca_enclosure.drives import FitSettings, FoundDrive, fitness, printable, rated_dwpd
from ostraca_enclosure.ports import Inventory
from ostraca_fabric.errors import UsageError


def find_drives(names: Sequence[str], inventory: Inventory | None = None) -> tuple[FoundDrive, ...]:
    """Return the drives with these names, devices, NGUIDs or serial numbers.

    Raises UsageError for a missing drive, and InventoryError.
    """
    found = (inventory or NvmeDrives(time.monotonic)).look()
    for name in names:
        if not any(drive.is_called(name) for drive in found):
            there = ", ".join(drive.device for drive in found)
            remedy = f"take any of {there}" if there else "this machine has no NVMe drive"
            raise UsageError(f"{name} is no NVMe drive of this machine: {remedy}")
    return tuple(drive for drive in found if any(drive.is_called(name) for name in names))


def is_good(drive: FoundDrive) -> bool:
    """Return whether an enclosure would export the drive by default."""
    return not drive.obstacles and fitness(drive, FitSettings()).is_fit


def fitness_lines(drive: FoundDrive) -> Iterator[str]:
    """Explain a drive for people."""
    yield f"{drive.device}: {size_text(drive.size_bytes)}, logical blocks of {drive.lba_bytes} bytes"
    told = (drive.model, drive.serial and f"serial {drive.serial}", drive.firmware and f"fw {drive.firmware}")
    yield _line("drive", printable(", ".join(each for each in told if each)))
    yield _line("nguid", drive.nguid or "none")
    if (wear := drive.wear) is not None:
        dwpd = rated_dwpd(drive, wear)
        borne = f"; rated for {dwpd:.1f} drive writes per day" if dwpd is not None else ""
        yield _line("wear", f"{wear.percentage_used} % used, {size_text(wear.bytes_written)} written{borne}")
        yield _line(
            "health",
            f"{wear.available_spare} % spare, {wear.media_errors} media errors, {wear.temperature_c} °C",
        )
    found = fitness(drive, FitSettings())
    yield from (_line("in the way", obstacle.sentence) for obstacle in drive.obstacles)
    yield from (_line("doubt", doubt) for doubt in found.doubts)
    yield from (_line("advice", advice) for advice in found.advice)
    yield _line("verdict", _verdict(drive, is_fit=found.is_fit))


def fitness_facts(drive: FoundDrive) -> dict[str, Any]:
    """Return the facts of a drive, for programs."""
    found = fitness(drive, FitSettings())
    return {
        **asdict(drive),
        "doubts": found.doubts,
        "advice": found.advice,
        "is_fit": found.is_fit,
        "is_free": not drive.obstacles,
    }


def _verdict(drive: FoundDrive, *, is_fit: bool) -> str:
    if any(each.is_final for each in drive.obstacles):
        return "An enclosure never exports the drive in this state."
    said = []
    if drive.obstacles:
        said.append("An enclosure exports the drive only by name: `ostraca serve enclosure --drive`.")
    if not is_fit:
        said.append("Not fit: an enclosure exports the drive only with --force.")
    return " ".join(said) or "Fit and unused."


def _line(label: str, text: str) -> str:
    return f"  {label:<12} {text}"
