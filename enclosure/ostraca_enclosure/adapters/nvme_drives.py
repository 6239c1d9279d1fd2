"""NVMe drives of this machine, from sysfs, with health and traits from ``nvme``.

Namespaces over NVMe-oF belong to other enclosures and are left out. The identifier of a drive is the NGUID,
else the UUID, else the EUI-64 behind eight zero bytes. An operator can name a drive without any of these. The
identifier is then a stable hash of model, serial number and namespace.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ostraca_enclosure.adapters.in_use import obstacles, read_attribute
from ostraca_enclosure.adapters.nvme_cli import Run, run_command, traits_of, wear_of
from ostraca_enclosure.drives import FoundDrive, Obstacle, Traits
from ostraca_enclosure.ports import InventoryError
from ostraca_fabric.model.inventory import DriveWear

_NAMESPACE = re.compile(r"nvme[0-9]+n[0-9]+\Z")
"""Names with a c inside are paths of a namespace, listed separately."""

_CONTROLLER = re.compile(r"nvme[0-9]+\Z")
_SECTOR_BYTES = 512
"""Unit of sizes in sysfs, regardless of the logical block."""

_NGUID_DIGITS = 32
_OWN_TRANSPORT = "pcie"


@dataclass(frozen=True, slots=True)
class Roots:
    """Mount points of the kernel's file systems."""

    sys: Path = Path("/sys")
    proc: Path = Path("/proc")
    dev: Path = Path("/dev")


@dataclass(frozen=True, slots=True)
class _Health:
    queried_s: float
    wear: DriveWear | None
    traits: Traits | None
    health_error: str


class NvmeDrives:
    """NVMe drives of a machine. Implements ``ports.Inventory``."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        roots: Roots = Roots(),
        run: Run = run_command,
        health_every_s: float = 60.0,
    ) -> None:
        """Query drives' health every *health_every_s* by *clock*, monotonic in seconds.

        All other data cost the drives no command, and are read at each look.
        """
        self._clock = clock
        self._roots = roots
        self._run = run
        self._health_every_s = health_every_s
        self._health: dict[tuple[str, str], _Health] = {}

    def look(self) -> tuple[FoundDrive, ...]:
        """Return all drives."""
        block = self._roots.sys / "block"
        try:
            names = sorted((each.name for each in block.iterdir() if _NAMESPACE.match(each.name)), key=_order)
            found = tuple(drive for name in names for drive in self._describe(block / name))
        except OSError as error:
            raise InventoryError(f"drives can't be listed in {block}: {error}") from error
        present = {_identity(drive) for drive in found}
        self._health = {drive: health for drive, health in self._health.items() if drive in present}
        return found

    def _describe(self, block: Path) -> Iterator[FoundDrive]:
        try:
            parent = (block / "device").resolve(strict=True)
            if _transports(parent) != {_OWN_TRANSPORT}:
                return
            device = self._roots.dev / block.name
            drive = FoundDrive(
                block.name,
                str(device),
                "",
                int(read_attribute(block / "size") or 0) * _SECTOR_BYTES,
                int(read_attribute(block / "queue/logical_block_size") or 0),
                read_attribute(parent / "model"),
                read_attribute(parent / "serial"),
                read_attribute(parent / "firmware_rev"),
                obstacles=obstacles(block, self._roots.proc, device),
            )
        except FileNotFoundError:
            return  # the drive disappeared meanwhile
        yield self._with_health(_identified(drive, block))

    def _with_health(self, drive: FoundDrive) -> FoundDrive:
        key = _identity(drive)
        health = self._health.get(key)
        if health is None or self._clock() - health.queried_s >= self._health_every_s:
            health = self._health[key] = self._query_health(drive.device)
        return replace(drive, wear=health.wear, traits=health.traits, health_error=health.health_error)

    def _query_health(self, device: str) -> _Health:
        wear, traits, health_error = None, None, ""
        try:
            wear = wear_of(self._run, device)
            traits = traits_of(self._run, device)
        except InventoryError as error:
            health_error = str(error)
        return _Health(self._clock(), wear, traits, health_error)


def _identity(drive: FoundDrive) -> tuple[str, str]:
    """Return a key to tell a drive from a successor with the same name."""
    return drive.device, drive.serial


def _identified(drive: FoundDrive, block: Path) -> FoundDrive:
    for name, width in (("nguid", _NGUID_DIGITS), ("uuid", _NGUID_DIGITS), ("eui", _NGUID_DIGITS // 2)):
        digits = re.sub(r"[-: ]", "", read_attribute(block / name)).lower()
        if re.fullmatch(rf"[0-9a-f]{{{width}}}", digits) and digits.strip("0"):
            return replace(drive, nguid=digits.zfill(_NGUID_DIGITS))
    identifiers = "\0".join((drive.model, drive.serial, read_attribute(block / "nsid")))
    if not drive.serial:
        why = Obstacle("no NGUID, UUID, EUI-64 or serial number: use another drive", is_final=True)
        return replace(drive, obstacles=(*drive.obstacles, why))
    why = Obstacle(
        "no NGUID, UUID or EUI-64 as an identifier for hosts: name the drive with --drive, to use an "
        "identifier derived from the serial number"
    )
    nguid = hashlib.blake2b(identifiers.encode(), digest_size=_NGUID_DIGITS // 2).hexdigest()
    return replace(drive, nguid=nguid, obstacles=(*drive.obstacles, why))


def _transports(parent: Path) -> set[str]:
    """Return the transports of a namespace: its own controller's, or its subsystem's."""
    if own := read_attribute(parent / "transport"):
        return {own}
    return {
        read_attribute(each / "transport")
        for each in parent.iterdir()
        if _CONTROLLER.match(each.name) and each.is_dir()
    }


def _order(name: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"[0-9]+", name)))
