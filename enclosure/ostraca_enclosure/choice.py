"""Which of the drives that were found are exported. Pure.

A drive is exported when nobody else can be using it, and it is fit. One that was *taken* before (exported by
this enclosure) stays so whatever its health has become. Naming a drive overcomes what only may be somebody's;
a mounted one is never exported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ostraca_enclosure.drives import FoundDrive
from ostraca_enclosure.fit import FitSettings, fitness


@dataclass(frozen=True, slots=True)
class Choice:
    """What was decided of one drive."""

    drive: FoundDrive
    is_wanted: bool
    why_not: str = ""
    """What is the case and what to do; empty where it is wanted."""

    doubts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Asked:
    """What an operator has asked for."""

    drives: tuple[str, ...] = ()
    """Names, devices, NGUIDs or serial numbers; none: every drive that is fit."""

    is_forced: bool = False
    """Drives are exported that are not fit."""

    fit: FitSettings = field(default_factory=FitSettings)


def choose(
    found: Sequence[FoundDrive], asked: Asked, taken: Collection[str], exported: Mapping[str, str]
) -> tuple[Choice, ...]:
    """Decide of each drive.

    *taken* are NGUIDs of those exported before; *exported* says of those exported now which device they are,
    so that a twin that turns up takes nothing back.
    """
    shared = Counter(drive.nguid for drive in found if drive.nguid)
    return tuple(
        _choice(
            drive,
            asked,
            taken,
            is_alone=shared[drive.nguid] <= 1 or exported.get(drive.nguid) == drive.device,
        )
        for drive in found
    )


def missing(found: Sequence[FoundDrive], asked: Asked) -> tuple[str, ...]:
    """Return what was named and was not found."""
    return tuple(name for name in asked.drives if not any(drive.is_called(name) for drive in found))


def _choice(drive: FoundDrive, asked: Asked, taken: Collection[str], *, is_alone: bool) -> Choice:
    doubts = fitness(drive, asked.fit).doubts
    is_named = any(drive.is_called(name) for name in asked.drives)
    is_taken = drive.nguid in taken
    why_not = ""
    if asked.drives and not is_named:
        why_not = "it is not among the drives that were named: name it with --drive to export it"
    elif not drive.nguid and not drive.obstacles:
        why_not = "nothing tells it from other drives: export another"
    elif not is_alone:
        why_not = f"another drive has its NGUID {drive.nguid}, too: take one of them out"
    else:
        counts = [each for each in drive.obstacles if each.is_final or not (is_named or is_taken)]
        if counts:
            why_not = min(counts, key=lambda each: not each.is_final).sentence
        elif doubts and not (asked.is_forced or is_taken):
            why_not = f"{doubts[0]}; or export it as it is, with --force"
    return Choice(drive, not why_not, why_not, doubts)
