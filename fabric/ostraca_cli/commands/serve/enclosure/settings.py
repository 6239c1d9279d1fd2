"""Settings of ``ostraca serve enclosure``: the enclosure and its process."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass, field, replace
from pathlib import Path

from ostraca_cli.commands.serve.daemon_settings import named_fabric
from ostraca_cli.composition.etcd_options import EtcdPlace
from ostraca_cli.composition.http_pages import http_address
from ostraca_enclosure.enclosure import EnclosureSettings
from ostraca_fabric.errors import UsageError, shown
from ostraca_fabric.model.ids import EnclosureId, FabricId, checked_name
from ostraca_fabric.model.limits import check_above_zero
from ostraca_fabric.model.target import NQN_PREFIX, Controller, Target, TargetTransport, parse_controller

NVMET, USERSPACE = "nvmet", "userspace"
"""Values of ``target``."""


@dataclass(frozen=True, slots=True)
class EnclosureDaemonSettings(EnclosureSettings):
    """Settings of one enclosure and its process."""

    id: str = ""
    """Name of the enclosure in the fabric, constant for the lifetime of its state directory; empty: host
    name."""

    listen: tuple[str, ...] = ()
    """Controllers, preferred first: ``rdma://10.0.8.1:4420``, ``tcp://10.0.9.1:4420``, or
    ``files:///directory`` for drives that are files on a disk shared by all agents. Use addresses of this
    machine as agents reach them."""

    target: str = NVMET
    """Target side of NVMe-oF: ``nvmet`` of the kernel, or ``userspace`` for NVMe/TCP inside the daemon, from
    ``files`` alone. The latter needs no modules and no privileges, is slow, and has neither secrets nor RDMA:
    for trials. Its exports end with the daemon, and a host name in ``listen`` means every address."""

    nqn: str = ""
    """NQN of the subsystem, exclusive to this enclosure: every export of this machine under the NQN belongs
    to the daemon. Empty: derived from the id."""

    files: str = ""
    """Directory of drives that are files, instead of this machine's NVMe drives; empty: the directory of a
    ``files://`` controller."""

    file_drives: int = 0
    """Number of drives in that directory; missing drives are created. 0: as many as exist."""

    file_drive_bytes: int = 1 << 30
    """Size of created files."""

    hosts_file: str = ""
    """Hosts that may connect, with their secrets. Other users must have no access. Empty: every host may
    connect."""

    withdraw: bool = False
    """Whether exports end with the daemon. By default exports stay until the next start."""

    state_dir: str = "/var/lib/ostraca/enclosure"
    """Directory of this daemon alone: exported drives, changes made in the kernel, and the id of its
    fabric."""

    fabric: str = ""
    """Id of the fabric, in hexadecimal; empty: the id in the state directory, else the id in etcd."""

    http_listen: str = ""
    """``host:port`` of /metrics, /healthz, /readyz and /status; empty: none. The pages have no
    authentication."""

    etcd: EtcdPlace = field(default_factory=EtcdPlace)

    def __post_init__(self) -> None:
        """Raise UsageError for settings that cannot work."""
        EnclosureSettings.__post_init__(self)  # not super(): slots=True makes a new class
        self.wanted_fabric()
        check_above_zero(self, "file_drive_bytes")
        if self.target not in (NVMET, USERSPACE):
            raise UsageError(f"target is {shown(self.target)}: set it to {NVMET} or {USERSPACE}")
        if self.http_listen:
            http_address(self.http_listen)

    def enclosure_id(self) -> EnclosureId:
        """Return the enclosure's name; raises UsageError."""
        name = self.id or socket.gethostname().partition(".")[0].lower()
        return EnclosureId(checked_name("enclosure", name))

    def wanted_fabric(self) -> FabricId | None:
        """Return the required fabric; raises UsageError."""
        return named_fabric(self.fabric)

    def export_target(self) -> Target:
        """Return the NVMe-oF or file target for hosts; raises UsageError."""
        listen = self.listen or ((f"files://{Path(self.files).absolute()}",) if self.files else ())
        if not listen:
            raise UsageError(
                "the enclosure has no address: give --listen rdma://ADDRESS:4420 or tcp://ADDRESS:4420, or "
                "--files DIR for files as drives"
            )
        controllers = tuple(
            _at_address(parse_controller(each), is_named=self.target == USERSPACE) for each in listen
        )
        target = Target(self.nqn or f"{NQN_PREFIX}{self.enclosure_id()}", controllers)
        if self.target == USERSPACE:
            self._check_userspace(target)
        if target.is_files and len(controllers) > 1:
            raise UsageError("an enclosure on files has a single directory: give --listen files:// once")
        if target.is_files and self.files and Path(self.files).absolute() != Path(controllers[0].address):
            raise UsageError(
                f"--files {self.files} and --listen {controllers[0]} differ: omit one of the two"
            )
        return target

    def _check_userspace(self, target: Target) -> None:
        """Raise UsageError for what the user-space target can't do."""
        if any(each.transport is not TargetTransport.TCP for each in target.controllers):
            raise UsageError(
                "the user-space target speaks TCP alone: give --listen tcp://ADDRESS:4420, or --target nvmet"
            )
        if not self.files:
            raise UsageError("the user-space target exports files alone: give --files DIR, or --target nvmet")
        if self.reservations:
            raise UsageError(
                "the user-space target has no reservations: omit reservations, or give --target nvmet"
            )

    def directory(self) -> Path | None:
        """Return the directory of the drives' files, None for NVMe drives; raises UsageError."""
        target = self.export_target()
        if target.is_files:
            return Path(target.controllers[0].address)
        return Path(self.files).absolute() if self.files else None


def _at_address(controller: Controller, *, is_named: bool) -> Controller:
    """Return a controller with its numeric address; raises UsageError for a host name, unless *is_named*."""
    if controller.transport is TargetTransport.FILES:
        return controller
    try:
        address = ipaddress.ip_address(controller.address)
    except ValueError:
        if is_named:
            return controller
        raise UsageError(
            f"{controller} has a host name, and the kernel needs an address: write, for example, "
            f"{controller.transport.value}://10.0.8.1:{controller.service}"
        ) from None
    if address.is_unspecified:
        raise UsageError(f"agents cannot connect to {controller}: give each reachable address with --listen")
    return replace(controller, address=str(address))
