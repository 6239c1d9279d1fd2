"""NVMe drives of this machine: sysfs, use by other programs, and health and traits from ``nvme``.

Namespaces over NVMe-oF belong to other enclosures and are left out. The identifier of a drive is the NGUID,
else the UUID, else the EUI-64 behind eight zero bytes. An operator can name a drive without any of these. The
identifier is then a stable hash of model, serial number and namespace.

Use is checked read-only: mounts, swap, partitions, md, LVM, and programs with exclusive access. Releases of
nvme-cli differ in notation: numbers beyond 64 bits as text, the critical warning as a table, temperatures in
Kelvin.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ostraca_enclosure.drives import FoundDrive, Obstacle, Traits
from ostraca_enclosure.ports import InventoryError
from ostraca_fabric.model.inventory import DriveWear

_SWAP_HEAD_LINES = 1
_MOUNT_DEVICE, _MOUNT_POINT = 2, 4
"""Columns of /proc/self/mountinfo: proc(5)."""


def obstacles(block: Path, proc: Path, device: Path) -> tuple[Obstacle, ...]:
    """Return the reasons against exporting a device.

    *block* is the directory in sysfs, *proc* the mount point of procfs, *device* the device file. Raises
    OSError.
    """
    parts = sorted(each.parent for each in block.glob("*/partition"))
    found = [*_mounts(block, parts, proc), *_swaps(block, parts, proc), *_kinds(block)]
    found += _holders(block, parts)
    if parts:
        found.append(
            Obstacle(
                f"partitions exist ({', '.join(each.name for each in parts)}), possibly with data: wipe the "
                f"drive with `wipefs -a {device}`, or name the drive with --drive"
            )
        )
    if read_attribute(block / "ro") == "1":
        found.append(
            Obstacle("the drive is read-only: make the drive writable, or name the drive with --drive")
        )
    if not found:
        found += _held_open(device)
    return tuple(found)


def _mounts(block: Path, parts: list[Path], proc: Path) -> Iterator[Obstacle]:
    numbers = {read_attribute(each / "dev"): each.name for each in (block, *parts)}
    names = {each.name for each in (block, *parts)}
    for line in (proc / "self/mountinfo").read_text(errors="replace").splitlines():
        fields = line.split(" ")
        _, _, after = line.partition(" - ")
        source = after.split(" ")[1] if after.count(" ") else ""
        # Compare numbers and names: btrfs and similar file systems mount under numbers of their own.
        if fields[_MOUNT_DEVICE] in numbers or Path(source).name in names:
            yield Obstacle(
                f"mounted at {fields[_MOUNT_POINT]}: unmount the drive if its data may be lost", is_final=True
            )
            return


def _swaps(block: Path, parts: list[Path], proc: Path) -> Iterator[Obstacle]:
    names = {each.name for each in (block, *parts)}
    swaps = proc / "swaps"
    lines = swaps.read_text(errors="replace").splitlines() if swaps.exists() else []
    for line in lines[_SWAP_HEAD_LINES:]:
        where = line.split()[0] if line.split() else ""
        if Path(where).name in names:
            yield Obstacle(f"in use as swap: `swapoff {where}`", is_final=True)
            return


def _kinds(block: Path) -> Iterator[Obstacle]:
    zoned = read_attribute(block / "queue/zoned")
    if zoned not in ("", "none"):
        yield Obstacle(
            f"a zoned drive ({zoned}) accepts sequential writes only: use another drive", is_final=True
        )
    if read_attribute(block / "size") in ("", "0"):
        yield Obstacle("size 0, as after a failure: see the kernel log")


def _holders(block: Path, parts: list[Path]) -> Iterator[Obstacle]:
    held = sorted({each.name for one in (block, *parts) for each in (one / "holders").glob("*")})
    if held:
        yield Obstacle(
            f"in use by {', '.join(held)} (md, LVM or device mapper): dismantle {held[0]}, or name the drive "
            "with --drive"
        )


def _held_open(device: Path) -> Iterator[Obstacle]:
    """Yield an obstacle if an exclusive open fails, as during exclusive use by others."""
    try:
        os.close(os.open(device, os.O_RDONLY | os.O_EXCL | os.O_CLOEXEC))
    except OSError as error:
        if error.errno == errno.EBUSY:
            yield Obstacle(
                f"in exclusive use by a program: end the program (`fuser -v {device}`), or name the drive "
                "with --drive"
            )
        else:
            how = "run the daemon as root" if error.errno == errno.EACCES else "see the kernel log"
            yield Obstacle(f"can't be opened ({error.strerror}): {how}")


def read_attribute(file: Path) -> str:
    """Return the text of an attribute in sysfs; empty if missing."""
    try:
        return file.read_text(errors="replace").strip()
    except FileNotFoundError:
        return ""


Run = Callable[[Sequence[str]], str]
"""Function to run a command and return the output. Raises InventoryError."""

COMMAND_S = 10.0
"""Time limit of a command; a drive silent for longer is faulty."""

_KELVIN = 273
_DATA_UNIT_BYTES = 512_000


def run_command(words: Sequence[str]) -> str:
    """Run a command. Raises InventoryError with advice."""
    try:
        completed = subprocess.run(  # noqa: S603 (fixed words, and device names from the kernel)
            words, capture_output=True, text=True, check=False, timeout=COMMAND_S, errors="replace"
        )
    except FileNotFoundError as error:
        raise InventoryError(f"{words[0]} is missing: install nvme-cli") from error
    except subprocess.TimeoutExpired as error:
        raise InventoryError(
            f"`{' '.join(words)}` took longer than {COMMAND_S:.0f} s: see the kernel log"
        ) from error
    except OSError as error:
        raise InventoryError(f"`{' '.join(words)}` can't be run: {error}") from error
    if completed.returncode:
        why = (completed.stderr or completed.stdout).strip().splitlines()
        raise InventoryError(
            f"`{' '.join(words)}` failed ({why[0] if why else completed.returncode}): run the daemon as root"
        )
    return completed.stdout


def wear_of(run: Run, device: str) -> DriveWear:
    """Return the values of a drive's SMART log. Raises InventoryError."""
    values = _query(run, "smart-log", device)
    return DriveWear(
        percentage_used=_number(values, "percent_used", "percentage_used"),
        available_spare=_number(values, "avail_spare", "available_spare"),
        spare_threshold=_number(values, "spare_thresh", "available_spare_threshold"),
        media_errors=_number(values, "media_errors"),
        temperature_c=_number(values, "temperature") - _KELVIN,
        bytes_written=_number(values, "data_units_written") * _DATA_UNIT_BYTES,
        bytes_read=_number(values, "data_units_read") * _DATA_UNIT_BYTES,
        power_on_hours=_number(values, "power_on_hours"),
        critical_warning=_number(values, "critical_warning"),
    )


def traits_of(run: Run, device: str) -> Traits:
    """Return the traits of a drive. Raises InventoryError."""
    controller = _query(run, "id-ctrl", device)
    namespace = _query(run, "id-ns", device)
    formats = namespace.get("lbafs")
    if not isinstance(formats, list):
        raise InventoryError(f"`nvme id-ns {device}` lists no formats: update nvme-cli")
    in_use = _number(namespace, "flbas") & 0xF
    version = _number(controller, "ver")
    return Traits(
        version=(version >> 16, version >> 8 & 0xFF),
        has_volatile_cache=bool(_number(controller, "vwc") & 1),
        wants_host_memory=_number(controller, "hmpre") > 0,
        metadata_bytes=_number(formats[in_use], "ms") if in_use < len(formats) else 0,
        lba_sizes=tuple(1 << _number(each, "ds") for each in formats if not _number(each, "ms")),
    )


def _query(run: Run, command: str, device: str) -> Mapping[str, Any]:
    values = run(["nvme", command, device, "-o", "json"])
    try:
        found = json.loads(values)
    except ValueError as error:
        raise InventoryError(f"`nvme {command} {device} -o json` prints no JSON: update nvme-cli") from error
    if not isinstance(found, dict):
        raise InventoryError(f"`nvme {command} {device} -o json` prints no object: update nvme-cli")
    return found


def _number(values: Mapping[str, Any], *names: str) -> int:
    """Return a number under any of its names. Raises InventoryError."""
    value = next((values[name] for name in names if name in values), None)
    if isinstance(value, dict):  # verbose output: the number beside the meaning of the bits
        value = value.get("value")
    if isinstance(value, str):
        text = value.replace(",", "").strip()
        value = int(text, 0) if text.removeprefix("0x").isalnum() and text[:1].isdigit() else None
    if not isinstance(value, int | float) or value < 0:
        raise InventoryError(f"`nvme` does not report {names[0]}: update nvme-cli")
    return int(value)


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
