"""Whether a drive is fit for a fabric: what it says of itself, held against what blocks need. Pure.

A doubt keeps a drive from being exported the first time; advice does not. Once exported, a drive stays
so, however it ages: blocks are on it, and its agents see for themselves when it fails. Files are for laptops
and CI, and nothing is asked of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ostraca_enclosure.drives import FoundDrive, Traits
from ostraca_fabric.errors import UsageError
from ostraca_fabric.inventory import DriveWear

VERSION_LEAST = (1, 4)
LBA_PREFERRED = 4096
LBA_SIZES = (512, LBA_PREFERRED)
RATED_YEARS = 5
"""For how long drives are rated in writes a day."""

WEAR_TELLING = 3
"""From how many percent of wear on what was written says how much could be; below, it is too coarse."""

_WARNINGS = (
    "its spare is below the threshold: replace it",
    "its temperature is beyond its limits: look after its cooling",
    "its reliability is degraded by errors: replace it",
    "its media are read-only: replace it",
    "its backup for power cuts has failed: replace it",
    "its persistent memory is read-only or unreliable: replace it",
)
"""Of the bits of the critical warning, in order."""


@dataclass(frozen=True, slots=True)
class FitSettings:
    """What is asked of a drive before it is exported the first time."""

    size_bytes_least: int = 100 << 30
    """The smallest that is worth a slot."""

    used_percent_max: int = 80
    """How much of its rated endurance may be used. Above, it will not last for long as a cache that is
    written all the time."""

    dwpd_least: float = 0.8
    """How often it must bear being written in full each day for five years, as far as its wear so far tells.
    Drives for servers are rated 1 or 3; those for desktops about 0.3. It can be told of used drives only, in
    steps of a percent, so it is a little below 1."""

    media_errors_max: int = 0
    """How many errors its own correction could not help with."""

    def __post_init__(self) -> None:
        """Refuse what can't be met."""
        if not 0 < self.used_percent_max <= 100:  # noqa: PLR2004 (percent)
            raise UsageError(f"used_percent_max is 1 to 100, not {self.used_percent_max}")


@dataclass(frozen=True, slots=True)
class Fitness:
    """What is to be said of a drive."""

    doubts: tuple[str, ...] = ()
    """Why it is not fit, one sentence each, with what to do."""

    advice: tuple[str, ...] = ()
    """What would be better."""

    @property
    def is_fit(self) -> bool:
        """Whether nothing speaks against it."""
        return not self.doubts


def fitness(drive: FoundDrive, settings: FitSettings) -> Fitness:
    """Say whether *drive* is fit."""
    if drive.is_file:
        return Fitness()
    doubts = [*_size_doubts(drive, settings)]
    if drive.silence:
        doubts.append(f"its health is not known: {drive.silence}")
    if drive.traits is not None:
        doubts += _kind_doubts(drive.traits)
    if drive.wear is not None:
        doubts += _wear_doubts(drive, drive.wear, settings)
    return Fitness(tuple(doubts), tuple(_advice(drive)))


def rated_dwpd(drive: FoundDrive, wear: DriveWear) -> float | None:
    """Return how often a day it may be written in full for five years, as its wear so far tells; None where
    that does not tell yet.
    """
    if wear.percentage_used < WEAR_TELLING or drive.size_bytes <= 0:
        return None
    bearable_bytes = wear.bytes_written * 100 / wear.percentage_used
    return bearable_bytes / drive.size_bytes / (RATED_YEARS * 365)


def _size_doubts(drive: FoundDrive, settings: FitSettings) -> Iterator[str]:
    if drive.size_bytes < settings.size_bytes_least:
        yield (
            f"it has {drive.size_bytes} bytes, and {settings.size_bytes_least} are the least that is worth "
            "it: take a larger one, or lower fit.size_bytes_least"
        )
    if drive.lba_bytes not in LBA_SIZES:
        yield (
            f"its logical blocks have {drive.lba_bytes} bytes, and 512 or {LBA_PREFERRED} are used: format "
            f"it to {LBA_PREFERRED} with `nvme format`, which empties it"
        )


def _kind_doubts(traits: Traits) -> Iterator[str]:
    if traits.version < VERSION_LEAST:
        yield (
            f"it keeps to NVMe {traits.version[0]}.{traits.version[1]}, and 1.4 is the least: update its "
            "firmware, or take a newer one"
        )
    if traits.has_volatile_cache:
        yield (
            "its write cache is volatile, so it is not protected against power cuts, and each commit waits "
            "for a flush: take a drive with power-loss protection"
        )
    if traits.wants_host_memory:
        yield "it borrows its host's memory, as drives for desktops do: take one for servers"
    if traits.metadata_bytes:
        yield (
            f"it is formatted with {traits.metadata_bytes} bytes of metadata beside each block: format it "
            "without with `nvme format`, which empties it"
        )


def _wear_doubts(drive: FoundDrive, wear: DriveWear, settings: FitSettings) -> Iterator[str]:
    for bit, sentence in enumerate(_WARNINGS):
        if wear.critical_warning >> bit & 1:
            yield sentence
    if wear.critical_warning >> len(_WARNINGS):
        yield f"it gives a critical warning ({wear.critical_warning:#x}) that is not known here: replace it"
    is_spare_told = wear.critical_warning & 1
    if wear.available_spare < wear.spare_threshold and not is_spare_told:
        yield (
            f"{wear.available_spare} % of its spare is left, below its threshold of "
            f"{wear.spare_threshold} %: replace it"
        )
    if wear.percentage_used > settings.used_percent_max:
        yield (
            f"{wear.percentage_used} % of its endurance is used, and {settings.used_percent_max} % is the "
            "most: replace it, or raise fit.used_percent_max"
        )
    if wear.media_errors > settings.media_errors_max:
        yield (
            f"it has had {wear.media_errors} media errors, and {settings.media_errors_max} is the most: "
            "replace it, or raise fit.media_errors_max"
        )
    dwpd = rated_dwpd(drive, wear)
    if dwpd is not None and dwpd < settings.dwpd_least:
        yield (
            f"by its wear so far it bears {dwpd:.2f} writes of itself a day for {RATED_YEARS} years, and "
            f"{settings.dwpd_least} is the least: take a drive rated for 1 or more"
        )


def _advice(drive: FoundDrive) -> Iterator[str]:
    if drive.lba_bytes == LBA_SIZES[0]:
        can = drive.traits is not None and LBA_PREFERRED in drive.traits.lba_sizes
        how = ": format it to that with `nvme format`, which empties it" if can else ""
        yield f"its logical blocks have 512 bytes, and {LBA_PREFERRED} is what blocks are aligned to{how}"
