"""NVMe-oF controllers and namespaces in Linux's ``/sys``. Reads only.

Attributes can vanish with their device at any moment; unreadable values are left empty.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path

from ostraca_dpu_agent.adapters.nvme_of.kernel import (
    ADMIN_TIMEOUT_DEFAULT_S,
    IO_TIMEOUT_DEFAULT_S,
    KEEP_ALIVE_DEFAULT_S,
    RETRIES_DEFAULT,
)
from ostraca_fabric.model.target import Controller
from ostraca_fabric.ports.paths import Namespace

_CONTROLLER = re.compile(r"nvme[0-9]+\Z")
_HEAD = re.compile(r"nvme[0-9]+n[0-9]+\Z")
_PATH = re.compile(r"nvme[0-9]+(?:c[0-9]+)?n[0-9]+\Z")
_SECTOR_BYTES = 512
_FABRICS = ("rdma", "tcp")
_CONNECTING = ("new", "connecting")
_NQN_BEGINS = "nqn."


@dataclass(frozen=True, slots=True)
class FoundController:
    """A controller that this host has connected or is connecting."""

    name: str
    """Name, as ``nvme0``."""

    directory: Path
    transport: str
    address: str
    service: int
    host: str
    """The NQN used for the connection."""

    state: str
    fast_io_fail_s: float | None
    """None: off."""

    keep_alive_s: float
    io_timeout_s: float
    """Longest timeout of the namespaces; without namespaces, the default of new ones."""

    secret: str
    is_patient: bool
    """Whether the controller reconnects without limit, or the kernel does not tell."""

    nqn: str
    """The subsystem's. Linux learns it only after authentication, and shows ``(efault)`` until then."""

    has_answered: bool
    """Whether the other end assigned a controller id. The allow-list then permitted this host; the check of
    the secret comes next.
    """

    @property
    def is_live(self) -> bool:
        """Whether the controller takes I/O now."""
        return self.state == "live"

    @property
    def is_going(self) -> bool:
        """Whether the controller is being removed."""
        return self.state.startswith("deleting")


class NvmeSysfs:
    """NVMe state in ``/sys``."""

    def __init__(self, root: Path = Path("/sys"), dev: Path = Path("/dev")) -> None:
        """Read *root*; open namespaces in *dev*."""
        self._root = root
        self._dev = dev

    def has_multipath(self) -> bool:
        """Return whether several paths to a namespace form one device."""
        return _text(self._parameter("multipath")) == "Y"

    def io_timeout_s(self) -> float:
        """Return the command timeout of new controllers."""
        return _number(_text(self._parameter("io_timeout")), IO_TIMEOUT_DEFAULT_S)

    def refused_s(self) -> float:
        """Return the longest time to notice a refused secret (``UnfinishedAttempts``)."""
        return _number(_text(self._parameter("admin_timeout")), ADMIN_TIMEOUT_DEFAULT_S) * (
            1 + _number(_text(self._parameter("max_retries")), RETRIES_DEFAULT)
        )

    def names(self) -> frozenset[str]:
        """Return the names of all controllers, for any target."""
        return frozenset(each.name for each in _entries(self._root / "class" / "nvme", _CONTROLLER))

    def controllers(self, nqn: str) -> list[FoundController]:
        """Return a subsystem's controllers over a fabric, in numerical order."""
        return [each for each in self._controllers() if each.nqn == nqn]

    def first_attempts(self) -> list[FoundController]:
        """Return controllers without an earlier connection, for any target: only the kernel ends these."""
        return [
            each
            for each in self._controllers()
            if each.state in _CONNECTING and not each.nqn.startswith(_NQN_BEGINS)
        ]

    def _controllers(self) -> list[FoundController]:
        found = []
        for directory in _entries(self._root / "class" / "nvme", _CONTROLLER):
            if _text(directory / "transport") not in _FABRICS:
                continue
            address, service = _where(directory)
            fast_io_fail = _text(directory / "fast_io_fail_tmo")
            found.append(
                FoundController(
                    name=directory.name,
                    directory=directory,
                    transport=_text(directory / "transport"),
                    address=address,
                    service=service,
                    host=_text(directory / "hostnqn"),
                    state=_text(directory / "state"),
                    fast_io_fail_s=float(fast_io_fail) if fast_io_fail.isdigit() else None,
                    keep_alive_s=_number(_text(directory / "kato"), KEEP_ALIVE_DEFAULT_S),
                    io_timeout_s=max(
                        (
                            _number(_text(path / "queue" / "io_timeout"), 0) / 1000
                            for path in _entries(directory, _PATH)
                        ),
                        default=self.io_timeout_s(),
                    ),
                    secret=_text(directory / "dhchap_secret"),
                    is_patient=_text(directory / "ctrl_loss_tmo") in ("off", ""),
                    nqn=_text(directory / "subsysnqn"),
                    has_answered=_number(_text(directory / "cntlid"), 0) > 0,
                )
            )
        return found

    def namespaces(self, nqn: str) -> list[Namespace]:
        """Return a subsystem's namespaces; an unidentified one has an empty NGUID."""
        found = []
        for subsystem in _entries(
            self._root / "class" / "nvme-subsystem", re.compile(r"nvme-subsys[0-9]+\Z")
        ):
            if _text(subsystem / "subsysnqn") != nqn:
                continue
            # With multipath a namespace belongs to the subsystem, otherwise to its only controller.
            heads = list(_entries(subsystem, _HEAD))
            for controller in _entries(subsystem, _CONTROLLER):
                heads += _entries(controller, _HEAD)
            model, serial = _text(subsystem / "model"), _text(subsystem / "serial")
            found += [self._namespace(head, model, serial) for head in heads]
        return sorted(found, key=lambda each: (each.nguid, each.device))

    def _namespace(self, head: Path, model: str, serial: str) -> Namespace:
        return Namespace(
            nguid=_identity(head),
            device=str(self._dev / head.name),
            size_bytes=int(_number(_text(head / "size"), 0)) * _SECTOR_BYTES,
            lba_bytes=int(_number(_text(head / "queue" / "logical_block_size"), _SECTOR_BYTES)),
            model=model,
            serial=serial,
        )

    def _parameter(self, name: str) -> Path:
        return self._root / "module" / "nvme_core" / "parameters" / name


def is_address(text: str) -> bool:
    """Return whether *text* is an IP address, not a name."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def canonical(address: str) -> str:
    """Return an IP address in canonical form; other text unchanged."""
    return str(ipaddress.ip_address(address)) if is_address(address) else address


def _where(directory: Path) -> tuple[str, int]:
    """Return the address and port of a controller."""
    where = dict(part.partition("=")[::2] for part in _text(directory / "address").split(","))
    return canonical(where.get("traddr", "")), int(_number(where.get("trsvcid", ""), 0))


def leads_to(found: FoundController, controller: Controller, addresses: tuple[str, ...]) -> bool:
    """Return whether a path leads to a controller.

    *addresses*: the resolved addresses of the controller's name.
    """
    return (
        found.transport == controller.transport.value
        and found.service == controller.service
        and found.address in addresses
    )


def _identity(head: Path) -> str:
    """Return the NGUID, or else the UUID: Linux's nvmet provides only the UUID."""
    for attribute in ("nguid", "uuid"):
        digits = _text(head / attribute).replace("-", "").lower()
        if re.fullmatch(r"[0-9a-f]{32}", digits) and int(digits, 16):
            return digits
    return ""


def _entries(directory: Path, pattern: re.Pattern[str]) -> list[Path]:
    try:
        names = [each.name for each in directory.iterdir() if pattern.match(each.name)]
    except OSError:
        return []
    return [directory / name for name in sorted(names, key=lambda name: (len(name), name))]


def _text(attribute: Path) -> str:
    try:
        return attribute.read_text(errors="replace").strip()
    except OSError:
        return ""


def _number(text: str, default: float) -> float:
    return float(text) if text.isascii() and text.isdigit() else default
