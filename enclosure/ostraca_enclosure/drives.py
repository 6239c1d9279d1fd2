"""What a look at an enclosure's drives finds. Pure values."""

from __future__ import annotations

from dataclasses import dataclass

from ostraca_fabric.errors import shown
from ostraca_fabric.inventory import DriveWear


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why a drive is not exported, whatever its health: somebody else may be using it."""

    sentence: str
    """What is the case, and what to do."""

    is_final: bool = False
    """Whether naming the drive does not help: it would be damaged, or can't be told from others."""


@dataclass(frozen=True, slots=True)
class Traits:
    """What an NVMe drive says of its own kind: NVMe base specification, "Identify"."""

    version: tuple[int, int]
    """Of the specification that it keeps to."""

    has_volatile_cache: bool
    """Whether what was written may be lost in a power cut: VWC, bit 0."""

    wants_host_memory: bool
    """Whether it borrows its host's memory (HMPRE): drives for servers have their own."""

    metadata_bytes: int
    """Beside each logical block, in the format in use."""

    lba_sizes: tuple[int, ...]
    """Logical blocks that it can be formatted to, in bytes, without metadata."""


@dataclass(frozen=True, slots=True)
class FoundDrive:
    """One namespace, or one file that stands for one."""

    name: str
    """What this machine calls it now."""

    device: str
    """Where it is opened."""

    nguid: str
    """32 hexadecimal digits, its own or made of what else tells it from others; empty: nothing does."""

    size_bytes: int
    lba_bytes: int
    model: str = ""
    serial: str = ""
    firmware: str = ""
    is_file: bool = False
    obstacles: tuple[Obstacle, ...] = ()
    wear: DriveWear | None = None
    traits: Traits | None = None
    silence: str = ""
    """Why ``wear`` or ``traits`` are not known, as the end of a sentence; empty where they are, and of
    files.
    """

    def is_called(self, name: str) -> bool:
        """Say whether an operator may mean it by *name*: name, device, NGUID or serial number."""
        nguid = name.replace("-", "").lower()
        return (
            name in (self.name, self.device)
            or (nguid != "" and nguid == self.nguid)
            or (name != "" and name == self.serial)
        )

    def __str__(self) -> str:
        """Return it as people find it on the shelf."""
        told = " ".join(each for each in (self.model, self.serial) if each)
        return f"{self.name} ({printable(told)})" if told else self.name


def uuid_of(nguid: str) -> str:
    """Return an NGUID as hosts are told it as a UUID: the same with each export, on each path."""
    return "-".join((nguid[:8], nguid[8:12], nguid[12:16], nguid[16:20], nguid[20:]))


def printable(text: str) -> str:
    """Return what a drive says of itself, as it can stand in a message."""
    return text if text.isascii() and text.isprintable() else shown(text)
