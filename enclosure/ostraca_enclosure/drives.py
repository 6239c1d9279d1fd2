"""Drives of an enclosure: data, fitness for a fabric, and selection for export. Pure.

A drive is exported if unused by others and fit. A doubt about fitness prevents the first export of a drive;
advice does not. Once exported by this enclosure, a drive stays exported, however aged: blocks are stored
there, and agents notice failures themselves. A name from the operator overrides possible use by others; a
mounted drive is never exported. Files are for laptops and CI, without requirements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ostraca_fabric.errors import UsageError, shown
from ostraca_fabric.model.inventory import DriveWear


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Reason against an export regardless of health: another program may use the drive."""

    sentence: str
    """The state and advice."""

    is_final: bool = False
    """Whether naming the drive does not help: the drive would be damaged, or can't be identified."""


@dataclass(frozen=True, slots=True)
class Traits:
    """Traits of an NVMe drive: NVMe base specification, "Identify"."""

    version: tuple[int, int]
    """Implemented version of the specification."""

    has_volatile_cache: bool
    """Whether written data may be lost in a power cut: VWC, bit 0."""

    wants_host_memory: bool
    """Whether the drive uses host memory (HMPRE); server drives do not."""

    metadata_bytes: int
    """Metadata beside each logical block, in the format in use."""

    lba_sizes: tuple[int, ...]
    """Possible sizes of logical blocks without metadata, in bytes."""


@dataclass(frozen=True, slots=True)
class FoundDrive:
    """Namespace, or a file in place of a namespace."""

    name: str
    """Present name on this machine."""

    device: str
    """Path for opening the drive."""

    nguid: str
    """32 hexadecimal digits, the drive's own or derived from other identifiers; empty without any
    identifier."""

    size_bytes: int
    lba_bytes: int
    model: str = ""
    serial: str = ""
    firmware: str = ""
    is_file: bool = False
    obstacles: tuple[Obstacle, ...] = ()
    wear: DriveWear | None = None
    traits: Traits | None = None
    health_error: str = ""
    """Why ``wear`` or ``traits`` are unknown, as the end of a sentence; empty if known, and for files."""

    def is_called(self, name: str) -> bool:
        """Return whether *name* means this drive: name, device, NGUID or serial number."""
        nguid = name.replace("-", "").lower()
        return (
            name in (self.name, self.device)
            or (nguid != "" and nguid == self.nguid)
            or (name != "" and name == self.serial)
        )

    def __str__(self) -> str:
        """Return the name with model and serial number, as on the drive's label."""
        label = " ".join(each for each in (self.model, self.serial) if each)
        return f"{self.name} ({printable(label)})" if label else self.name


def uuid_of(nguid: str) -> str:
    """Return an NGUID in UUID form for hosts: the same in each export, on each path."""
    return "-".join((nguid[:8], nguid[8:12], nguid[12:16], nguid[16:20], nguid[20:]))


def printable(text: str) -> str:
    """Return a text from a drive in a form safe for messages."""
    return text if text.isascii() and text.isprintable() else shown(text)


VERSION_LEAST = (1, 4)
LBA_PREFERRED = 4096
LBA_SIZES = (512, LBA_PREFERRED)
RATED_YEARS = 5
"""Years of the rating in writes per day."""

WEAR_TELLING = 3
"""Least wear in percent for an estimate of endurance from written bytes; below, the wear is too coarse."""

_WARNINGS = (
    "spare capacity is below the threshold: replace the drive",
    "temperature is beyond the limits: check the cooling",
    "reliability is degraded by errors: replace the drive",
    "media are read-only: replace the drive",
    "power-loss protection has failed: replace the drive",
    "persistent memory is read-only or unreliable: replace the drive",
)
"""For the bits of the critical warning, in order."""


@dataclass(frozen=True, slots=True)
class FitSettings:
    """Requirements of a drive before its first export."""

    size_bytes_min: int = 100 << 30
    """Smallest size."""

    used_percent_max: int = 80
    """Largest used share of the rated endurance. More worn drives do not last under a cache's writes."""

    dwpd_min: float = 0.8
    """Least full writes per day over five years, extrapolated from wear so far, in steps of a percent. Server
    drives are rated 1 or 3, desktop drives about 0.3. Only for used drives, hence a little below 1."""

    media_errors_max: int = 0
    """Largest number of uncorrected media errors."""

    def __post_init__(self) -> None:
        """Check the range. Raises UsageError."""
        if not 0 < self.used_percent_max <= 100:  # noqa: PLR2004 (percent)
            raise UsageError(f"used_percent_max is 1 to 100, not {self.used_percent_max}")


@dataclass(frozen=True, slots=True)
class Fitness:
    """Findings on a drive."""

    doubts: tuple[str, ...] = ()
    """Reasons against the drive, a sentence each, with advice."""

    advice: tuple[str, ...] = ()
    """Possible improvements."""

    @property
    def is_fit(self) -> bool:
        """Whether there is no doubt."""
        return not self.doubts


def fitness(drive: FoundDrive, settings: FitSettings) -> Fitness:
    """Return the fitness of *drive*."""
    if drive.is_file:
        return Fitness()
    doubts = [*_size_doubts(drive, settings)]
    if drive.health_error:
        doubts.append(f"health is unknown: {drive.health_error}")
    if drive.traits is not None:
        doubts += _kind_doubts(drive.traits)
    if drive.wear is not None:
        doubts += _wear_doubts(drive, drive.wear, settings)
    return Fitness(tuple(doubts), tuple(_advice(drive)))


def rated_dwpd(drive: FoundDrive, wear: DriveWear) -> float | None:
    """Return full writes per day over five years, extrapolated from wear so far.

    None while wear is too low for an estimate.
    """
    if wear.percentage_used < WEAR_TELLING or drive.size_bytes <= 0:
        return None
    bearable_bytes = wear.bytes_written * 100 / wear.percentage_used
    return bearable_bytes / drive.size_bytes / (RATED_YEARS * 365)


def _size_doubts(drive: FoundDrive, settings: FitSettings) -> Iterator[str]:
    if drive.size_bytes < settings.size_bytes_min:
        yield (
            f"size is {drive.size_bytes} bytes, and at least {settings.size_bytes_min} are required: use a "
            "larger drive, or lower fit.size_bytes_min"
        )
    if drive.lba_bytes not in LBA_SIZES:
        yield (
            f"logical blocks have {drive.lba_bytes} bytes, and 512 or {LBA_PREFERRED} are supported: format "
            f"the drive to {LBA_PREFERRED} with `nvme format`, which erases all data"
        )


def _kind_doubts(traits: Traits) -> Iterator[str]:
    if traits.version < VERSION_LEAST:
        yield (
            f"NVMe version is {traits.version[0]}.{traits.version[1]}, and at least 1.4 is required: update "
            "the firmware, or use a newer drive"
        )
    if traits.has_volatile_cache:
        yield (
            "write cache is volatile: power cuts lose data, and each commit waits for a flush: use a drive "
            "with power-loss protection"
        )
    if traits.wants_host_memory:
        yield "desktop drive that uses host memory: use a server drive"
    if traits.metadata_bytes:
        yield (
            f"format has {traits.metadata_bytes} bytes of metadata beside each block: format the drive "
            "without metadata with `nvme format`, which erases all data"
        )


def _wear_doubts(drive: FoundDrive, wear: DriveWear, settings: FitSettings) -> Iterator[str]:
    for bit, sentence in enumerate(_WARNINGS):
        if wear.critical_warning >> bit & 1:
            yield sentence
    if wear.critical_warning >> len(_WARNINGS):
        yield f"unknown critical warning ({wear.critical_warning:#x}): replace the drive"
    is_spare_reported = wear.critical_warning & 1
    if wear.available_spare < wear.spare_threshold and not is_spare_reported:
        yield (
            f"spare capacity is {wear.available_spare} %, below the threshold of {wear.spare_threshold} %: "
            "replace the drive"
        )
    if wear.percentage_used > settings.used_percent_max:
        yield (
            f"{wear.percentage_used} % of the rated endurance is used, and {settings.used_percent_max} % is "
            "the limit: replace the drive, or raise fit.used_percent_max"
        )
    if wear.media_errors > settings.media_errors_max:
        yield (
            f"{wear.media_errors} media errors occurred, and {settings.media_errors_max} is the limit: "
            "replace the drive, or raise fit.media_errors_max"
        )
    dwpd = rated_dwpd(drive, wear)
    if dwpd is not None and dwpd < settings.dwpd_min:
        yield (
            f"endurance by wear so far is {dwpd:.2f} drive writes a day over {RATED_YEARS} years, and at "
            f"least {settings.dwpd_min} is required: use a drive rated for 1 or more"
        )


def _advice(drive: FoundDrive) -> Iterator[str]:
    if drive.lba_bytes == LBA_SIZES[0]:
        can = drive.traits is not None and LBA_PREFERRED in drive.traits.lba_sizes
        how = (
            f": format the drive to {LBA_PREFERRED} with `nvme format`, which erases all data" if can else ""
        )
        yield f"logical blocks have 512 bytes, and Ostraca aligns blocks to {LBA_PREFERRED}{how}"


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
