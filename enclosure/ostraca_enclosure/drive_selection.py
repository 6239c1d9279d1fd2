"""Selection of the drives to export. Pure.

A drive is exported if unused by others and fit. A drive exported by this enclosure before stays
exported, whatever its health. A name from the operator overrides possible use by others; a mounted drive is
never exported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ostraca_enclosure.drive_fitness import FitSettings, fitness
from ostraca_enclosure.drives import FoundDrive


@dataclass(frozen=True, slots=True)
class DriveChoice:
    """Decision on a drive."""

    drive: FoundDrive
    is_wanted: bool
    why_not: str = ""
    """State and advice; empty for a wanted drive."""

    doubts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SelectionSettings:
    """Operator's request."""

    drives: tuple[str, ...] = ()
    """Names, devices, NGUIDs or serial numbers; empty means every fit drive."""

    is_forced: bool = False
    """Export unfit drives too."""

    fit: FitSettings = field(default_factory=FitSettings)


def choose_drives(
    found: Sequence[FoundDrive],
    settings: SelectionSettings,
    history: Collection[str],
    exported: Mapping[str, str],
) -> tuple[DriveChoice, ...]:
    """Decide on each drive.

    *history* has the NGUIDs of drives exported before. *exported* maps present exports to devices, so that a
    twin with the same NGUID withdraws no drive.
    """
    shared = Counter(drive.nguid for drive in found if drive.nguid)
    return tuple(
        _choice(
            drive,
            settings,
            history,
            is_alone=shared[drive.nguid] <= 1 or exported.get(drive.nguid) == drive.device,
        )
        for drive in found
    )


def missing_names(found: Sequence[FoundDrive], settings: SelectionSettings) -> tuple[str, ...]:
    """Return the named drives not found."""
    return tuple(name for name in settings.drives if not any(drive.is_called(name) for drive in found))


def _choice(
    drive: FoundDrive, settings: SelectionSettings, history: Collection[str], *, is_alone: bool
) -> DriveChoice:
    doubts = fitness(drive, settings.fit).doubts
    is_named = any(drive.is_called(name) for name in settings.drives)
    is_known = drive.nguid in history
    why_not = ""
    if settings.drives and not is_named:
        why_not = "not named: name the drive with --drive to export the drive"
    elif not drive.nguid and not drive.obstacles:
        why_not = "no identifier: export another drive"
    elif not is_alone:
        why_not = f"another drive has the same NGUID {drive.nguid}: remove one of the two drives"
    else:
        valid = [each for each in drive.obstacles if each.is_final or not (is_named or is_known)]
        if valid:
            why_not = min(valid, key=lambda each: not each.is_final).sentence
        elif doubts and not (settings.is_forced or is_known):
            why_not = f"{doubts[0]}; or export the drive anyway, with --force"
    return DriveChoice(drive, not why_not, why_not, doubts)
