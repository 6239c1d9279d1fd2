"""What Linux shows of NVMe-oF controllers and namespaces in ``/sys``. It reads, and changes nothing.

Attributes go away with what they describe, at any moment: what can't be read is left empty.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path

from ostraca_fabric.adapters.nvme_timeouts import (
    ADMIN_TIMEOUT_DEFAULT_S,
    IO_TIMEOUT_DEFAULT_S,
    KEEP_ALIVE_DEFAULT_S,
    RETRIES_DEFAULT,
)
from ostraca_fabric.ports.paths import Namespace
from ostraca_fabric.target import Controller

_CONTROLLER = re.compile(r"nvme[0-9]+\Z")
_HEAD = re.compile(r"nvme[0-9]+n[0-9]+\Z")
_PATH = re.compile(r"nvme[0-9]+(?:c[0-9]+)?n[0-9]+\Z")
_SECTOR_BYTES = 512
_FABRICS = ("rdma", "tcp")
_CONNECTING = ("new", "connecting")
_NQN_BEGINS = "nqn."


@dataclass(frozen=True, slots=True)
class FoundController:
    """A controller that this host has connected, or is trying to."""

    name: str
    """As ``nvme0``."""

    directory: Path
    transport: str
    address: str
    service: int
    host: str
    """The NQN under which it was connected."""

    state: str
    fast_io_fail_s: float | None
    """None: off."""

    keep_alive_s: float
    io_timeout_s: float
    """Of its namespaces, the longest; where it has none, of those it will have."""

    secret: str
    is_patient: bool
    """Whether it is tried again for ever, or this kernel does not say."""

    @property
    def is_live(self) -> bool:
        """Whether it takes I/O now."""
        return self.state == "live"

    @property
    def is_going(self) -> bool:
        """Whether it is being ended."""
        return self.state.startswith("deleting")


@dataclass(frozen=True, slots=True)
class Connecting:
    """A controller that is not there yet, or is there no more and comes back."""

    name: str
    transport: str
    address: str
    service: int
    host: str
    has_answered: bool
    """Whether the other end has taken it, and given it an id: its allow-list did not mind then, and the
    secret is what it asks for next."""

    has_been: bool
    """Whether it was there before: it has a subsystem. One that has not is ended by the kernel alone."""


class NvmeSysfs:
    """NVMe as ``/sys`` shows it."""

    def __init__(self, root: Path = Path("/sys"), dev: Path = Path("/dev")) -> None:
        """Look at *root*; namespaces are opened in *dev*."""
        self._root = root
        self._dev = dev

    def has_multipath(self) -> bool:
        """Say whether several paths to a namespace are one device."""
        return _text(self._parameter("multipath")) == "Y"

    def io_timeout_s(self) -> float:
        """Return how long a command of a controller that is made now may take."""
        return _number(_text(self._parameter("io_timeout")), IO_TIMEOUT_DEFAULT_S)

    def refused_s(self) -> float:
        """Return how long this host may take to learn that its secret was refused (``nvme_late``)."""
        return _number(_text(self._parameter("admin_timeout")), ADMIN_TIMEOUT_DEFAULT_S) * (
            1 + _number(_text(self._parameter("max_retries")), RETRIES_DEFAULT)
        )

    def names(self) -> frozenset[str]:
        """Return the names of all controllers there are, wherever they lead."""
        return frozenset(each.name for each in _entries(self._root / "class" / "nvme", _CONTROLLER))

    def controllers(self, nqn: str) -> list[FoundController]:
        """Return the controllers that lead to a subsystem over a fabric, in the order of their numbers."""
        found = []
        for directory in _entries(self._root / "class" / "nvme", _CONTROLLER):
            if _text(directory / "subsysnqn") != nqn or _text(directory / "transport") not in _FABRICS:
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
                )
            )
        return found

    def connecting(self) -> list[Connecting]:
        """Return the controllers that are being connected, wherever they lead.

        Linux learns a controller's subsystem after authentication, and till then shows ``(efault)`` for it.
        """
        found = []
        for directory in _entries(self._root / "class" / "nvme", _CONTROLLER):
            transport = _text(directory / "transport")
            if transport not in _FABRICS or _text(directory / "state") not in _CONNECTING:
                continue
            address, service = _where(directory)
            found.append(
                Connecting(
                    name=directory.name,
                    transport=transport,
                    address=address,
                    service=service,
                    host=_text(directory / "hostnqn"),
                    has_answered=_number(_text(directory / "cntlid"), 0) > 0,
                    has_been=_text(directory / "subsysnqn").startswith(_NQN_BEGINS),
                )
            )
        return found

    def namespaces(self, nqn: str) -> list[Namespace]:
        """Return the namespaces of a subsystem, by NGUID, which is empty where one has no identity."""
        found = []
        for subsystem in _entries(
            self._root / "class" / "nvme-subsystem", re.compile(r"nvme-subsys[0-9]+\Z")
        ):
            if _text(subsystem / "subsysnqn") != nqn:
                continue
            # With multipath a namespace is the subsystem's, without it its only controller's.
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
    """Say whether this is an address, and no name."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def canonical(address: str) -> str:
    """Return an address in its one spelling; as it is where it is none."""
    return str(ipaddress.ip_address(address)) if is_address(address) else address


def _where(directory: Path) -> tuple[str, int]:
    """Return the address and port of a controller."""
    where = dict(part.partition("=")[::2] for part in _text(directory / "address").split(","))
    return canonical(where.get("traddr", "")), int(_number(where.get("trsvcid", ""), 0))


def leads_to(found: FoundController | Connecting, controller: Controller, addresses: tuple[str, ...]) -> bool:
    """Say whether this is a path to a controller, whose name stands for *addresses*."""
    return (
        found.transport == controller.transport.value
        and found.service == controller.service
        and found.address in addresses
    )


def _identity(head: Path) -> str:
    """Return the NGUID, or else the UUID, which is as good a name: nvmet gives its namespaces only that."""
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
        return attribute.read_text().strip()
    except OSError:
        return ""


def _number(text: str, default: float) -> float:
    return float(text) if text.isascii() and text.isdigit() else default
