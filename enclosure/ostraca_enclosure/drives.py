"""Drives found in an enclosure. Pure values."""

from __future__ import annotations

from dataclasses import dataclass

from ostraca_fabric.errors import shown
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
