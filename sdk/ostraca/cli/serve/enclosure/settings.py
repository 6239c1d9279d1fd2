"""Everything an operator may set of ``ostraca serve enclosure``: the enclosure, and its process."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass, field, replace
from pathlib import Path

from ostraca.cli.etcd_place import EtcdPlace
from ostraca.cli.http import http_address
from ostraca.cli.serve.daemon_settings import named_fabric
from ostraca_enclosure.settings import EnclosureSettings
from ostraca_fabric.errors import UsageError
from ostraca_fabric.ids import EnclosureId, FabricId, checked_name
from ostraca_fabric.limits import check_above_zero
from ostraca_fabric.target import NQN_PREFIX, Controller, Target, Transport, parse_controller


@dataclass(frozen=True, slots=True)
class EnclosureDaemonSettings(EnclosureSettings):
    """Settings of one enclosure, and of the process that serves it."""

    id: str = ""
    """What the enclosure is called in the fabric, by no other name for as long as its state directory lasts;
    empty: as the machine is."""

    listen: tuple[str, ...] = ()
    """Controllers, those to prefer first: ``rdma://10.0.8.1:4420``, ``tcp://10.0.9.1:4420``, or
    ``files:///directory`` for drives that are files on a disk that all agents share. Addresses are this
    machine's own, as agents reach them."""

    nqn: str = ""
    """The subsystem's qualified name, this enclosure's alone: whatever this machine exports under it is taken
    for its own. Empty: made of the id."""

    files: str = ""
    """A directory of drives that are files, in place of this machine's NVMe drives; empty: that of a
    ``files://`` controller."""

    file_drives: int = 0
    """So many drives are in that directory; those that are missing are made. 0: as many as there are."""

    file_drive_bytes: int = 1 << 30
    """The size of files that are made."""

    hosts_file: str = ""
    """Which hosts may connect, with which secrets. Nobody else may read it. Empty: every host may connect."""

    withdraw: bool = False
    """Whether exports end with the daemon. By default they stay, and its next start finds them."""

    state_dir: str = "/var/lib/ostraca/enclosure"
    """A directory of its own: which drives it has exported, what it has made of the kernel's, which fabric
    it has joined."""

    fabric: str = ""
    """The fabric's id, in hexadecimal; empty: the one that its state directory remembers, else the one that
    etcd has at the prefix."""

    http_listen: str = ""
    """``host:port`` of /metrics, /healthz, /readyz and /status; empty for none. Whoever reaches it may read
    them."""

    etcd: EtcdPlace = field(default_factory=EtcdPlace)

    def __post_init__(self) -> None:
        """Refuse what can't work."""
        EnclosureSettings.__post_init__(
            self
        )  # not super(): a slotted dataclass is another class than its body
        self.wanted_fabric()
        check_above_zero(self, "file_drive_bytes")
        if self.http_listen:
            http_address(self.http_listen)

    def enclosure_id(self) -> EnclosureId:
        """Return what the enclosure is called. Raises UsageError."""
        name = self.id or socket.gethostname().partition(".")[0].lower()
        return EnclosureId(checked_name("enclosure", name))

    def wanted_fabric(self) -> FabricId | None:
        """Return the fabric that was named. Raises UsageError."""
        return named_fabric(self.fabric)

    def target(self) -> Target:
        """Return what hosts connect to. Raises UsageError."""
        listen = self.listen or ((f"files://{Path(self.files).absolute()}",) if self.files else ())
        if not listen:
            message = (
                "where is the enclosure to be reached? Give --listen rdma://ADDRESS:4420 or "
                "tcp://ADDRESS:4420; or --files DIR, for drives that are files"
            )
            raise UsageError(message)
        controllers = tuple(_at_address(parse_controller(each)) for each in listen)
        target = Target(self.nqn or f"{NQN_PREFIX}{self.enclosure_id()}", controllers)
        if target.is_files and len(controllers) > 1:
            message = "an enclosure on files lies in one directory: give --listen files:// once"
            raise UsageError(message)
        if target.is_files and self.files and Path(self.files).absolute() != Path(controllers[0].address):
            raise UsageError(
                f"drives in {self.files} can't be reached at {controllers[0]}: leave one of the two out"
            )
        return target

    def directory(self) -> Path | None:
        """Return where the drives' files lie, None where drives are NVMe. Raises UsageError."""
        target = self.target()
        if target.is_files:
            return Path(target.controllers[0].address)
        return Path(self.files).absolute() if self.files else None


def _at_address(controller: Controller) -> Controller:
    """Return a controller with its address as the kernel writes it. Raises UsageError where it has a name."""
    if controller.transport is Transport.FILES:
        return controller
    try:
        address = ipaddress.ip_address(controller.address)
    except ValueError:
        raise UsageError(
            f"{controller} has a name, and the kernel listens at addresses: write it as "
            f"{controller.transport.value}://10.0.8.1:{controller.service}"
        ) from None
    if address.is_unspecified:
        raise UsageError(
            f"agents can't connect to {controller}: list the addresses they reach, one --listen for each"
        )
    return replace(controller, address=str(address))
