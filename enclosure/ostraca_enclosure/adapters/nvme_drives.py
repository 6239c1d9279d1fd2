"""NVMe drives of this machine, as Linux's sysfs has them, and what they say of themselves by ``nvme``.

Only drives of its own: a namespace that came over NVMe-oF is some other enclosure's. A drive is identified by
its NGUID; where it has none, by its UUID, else its EUI-64 behind eight zero bytes. One that has none of
these can be named by an operator: then it goes by a hash of model, serial number and namespace, which stays
with it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ostraca_enclosure.adapters.in_use import obstacles
from ostraca_enclosure.adapters.nvme_cli import Run, run_command, traits_of, wear_of
from ostraca_enclosure.drives import FoundDrive, Obstacle, Traits
from ostraca_enclosure.ports import InventoryError
from ostraca_fabric.inventory import DriveWear

_NAMESPACE = re.compile(r"nvme[0-9]+n[0-9]+\Z")
"""Not those with a c within: they are paths of a namespace, which is listed by itself."""

_CONTROLLER = re.compile(r"nvme[0-9]+\Z")
_SECTOR_BYTES = 512
"""What sysfs counts sizes in, whatever the logical block."""

_NGUID_DIGITS = 32
_OWN_TRANSPORT = "pcie"


@dataclass(frozen=True, slots=True)
class Roots:
    """Where the kernel shows itself."""

    sys: Path = Path("/sys")
    proc: Path = Path("/proc")
    dev: Path = Path("/dev")


@dataclass(frozen=True, slots=True)
class _Health:
    asked_s: float
    wear: DriveWear | None
    traits: Traits | None
    silence: str


class NvmeDrives:
    """The NVMe drives of one machine. Implements ``ports.Inventory``."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        roots: Roots = Roots(),
        run: Run = run_command,
        health_every_s: float = 60.0,
    ) -> None:
        """Drives are asked how they are every *health_every_s* by *clock*, which is monotonic; what else is
        looked at costs them nothing, and is looked at each time.
        """
        self._clock = clock
        self._roots = roots
        self._run = run
        self._health_every_s = health_every_s
        self._health: dict[tuple[str, str], _Health] = {}

    def look(self) -> tuple[FoundDrive, ...]:
        """Return every drive."""
        block = self._roots.sys / "block"
        try:
            names = sorted((each.name for each in block.iterdir() if _NAMESPACE.match(each.name)), key=_order)
            found = tuple(drive for name in names for drive in self._found(block / name))
        except OSError as error:
            raise InventoryError(f"drives can't be looked for in {block}: {error}") from error
        there = {_identity(drive) for drive in found}
        self._health = {drive: said for drive, said in self._health.items() if drive in there}
        return found

    def _found(self, block: Path) -> Iterator[FoundDrive]:
        try:
            parent = (block / "device").resolve(strict=True)
            if _transports(parent) != {_OWN_TRANSPORT}:
                return
            device = self._roots.dev / block.name
            drive = FoundDrive(
                block.name,
                str(device),
                "",
                int(_read(block / "size") or 0) * _SECTOR_BYTES,
                int(_read(block / "queue/logical_block_size") or 0),
                _read(parent / "model"),
                _read(parent / "serial"),
                _read(parent / "firmware_rev"),
                obstacles=obstacles(block, self._roots.proc, device),
            )
        except FileNotFoundError:
            return  # it went while it was looked at
        yield self._with_health(_identified(drive, block))

    def _with_health(self, drive: FoundDrive) -> FoundDrive:
        which = _identity(drive)
        said = self._health.get(which)
        if said is None or self._clock() - said.asked_s >= self._health_every_s:
            said = self._health[which] = self._asked(drive.device)
        return replace(drive, wear=said.wear, traits=said.traits, silence=said.silence)

    def _asked(self, device: str) -> _Health:
        wear, traits, silence = None, None, ""
        try:
            wear = wear_of(self._run, device)
            traits = traits_of(self._run, device)
        except InventoryError as error:
            silence = str(error)
        return _Health(self._clock(), wear, traits, silence)


def _identity(drive: FoundDrive) -> tuple[str, str]:
    """Tell a drive from another that has come to its name."""
    return drive.device, drive.serial


def _identified(drive: FoundDrive, block: Path) -> FoundDrive:
    for name, width in (("nguid", _NGUID_DIGITS), ("uuid", _NGUID_DIGITS), ("eui", _NGUID_DIGITS // 2)):
        digits = re.sub(r"[-: ]", "", _read(block / name)).lower()
        if re.fullmatch(rf"[0-9a-f]{{{width}}}", digits) and digits.strip("0"):
            return replace(drive, nguid=digits.zfill(_NGUID_DIGITS))
    told = "\0".join((drive.model, drive.serial, _read(block / "nsid")))
    if not drive.serial:
        why = Obstacle("it has no NGUID, UUID, EUI-64 or serial number: take another drive", is_final=True)
        return replace(drive, obstacles=(*drive.obstacles, why))
    why = Obstacle(
        "it has no NGUID, UUID or EUI-64 by which hosts could tell it from others: name it with --drive, and "
        "it goes by its serial number"
    )
    nguid = hashlib.blake2b(told.encode(), digest_size=_NGUID_DIGITS // 2).hexdigest()
    return replace(drive, nguid=nguid, obstacles=(*drive.obstacles, why))


def _transports(parent: Path) -> set[str]:
    """Return how a namespace's controllers are reached: its own controller's, or those of its subsystem."""
    if own := _read(parent / "transport"):
        return {own}
    return {
        _read(each / "transport")
        for each in parent.iterdir()
        if _CONTROLLER.match(each.name) and each.is_dir()
    }


def _order(name: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"[0-9]+", name)))


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except FileNotFoundError:
        return ""
