"""What can befall a simulated drive, and how it tells what did."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class DriveFaults:
    """Chances, each from 0 to 1 and for each I/O, unless a field says otherwise. As it is made: a good drive.

    Nothing here makes a power cut or the death of a process: those are calls, of the flash and of the drive.
    """

    read_errors: float = 0.0
    """A read fails (EIO), and would not the next time."""

    unreadable: float = 0.0
    """A page that was written before can't be read from now on, until it is written again."""

    write_errors: float = 0.0
    """A write fails (EIO), with nothing, a part, or all of it on flash. A flush fails and flushes nothing."""

    no_space: float = 0.0
    """A write fails (ENOSPC), with nothing of it on flash."""

    misdirected: float = 0.0
    """A write lands whole at another place, and is said to have ended well."""

    rot: float = 0.0
    """One bit changes, somewhere that was written before."""

    rot_on_read: float = 0.0
    """One bit changes on the way to memory alone."""

    stalls: float = 0.0
    """An I/O takes longer, by up to ``stall_s``."""

    stall_s: float = 2.0
    late: float = 0.0
    """A write under way when its submitter dies lands whole or in part up to ``late_s`` later. Otherwise what
    lands of it has landed by then."""

    late_s: float = 4.0
    late_from_s: float = 0.0
    """No sooner than this, where it is late."""

    late_failures: float = 0.0
    """Of writes that fail with EIO: lands in whole up to ``late_s`` later."""

    lies_about_flush: bool = False
    """Flushes end well and do nothing."""

    service_s: float = 0.0001
    """What an I/O takes without any fault, give or take a half."""


class Befell(Enum):
    """Kinds of what befell."""

    READ_ERROR = "a read failed"
    UNREADABLE = "a page became unreadable"
    WRITE_ERROR = "a write or a flush failed"
    NO_SPACE = "a write found no space"
    MISDIRECTED = "a write landed elsewhere"
    ROT = "a bit changed on flash"
    ROT_ON_READ = "a bit changed on the way"
    LATE = "a write landed over what was submitted after it, or when its owner had a successor"
    CACHE_LOST = "a power cut took what a living writer had not flushed"
    POWER_CUT = "an I/O was under way at a power cut"


@dataclass(frozen=True, slots=True)
class Mishap:
    """Something that befell bytes of a drive."""

    kind: Befell
    begin: int
    end: int

    def touches(self, begin: int, end: int) -> bool:
        """Say whether it befell any of these bytes."""
        return begin < self.end and self.begin < end
