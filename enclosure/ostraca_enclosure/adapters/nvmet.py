"""Exporter of drives through nvmet, Linux's NVMe-oF target, by configfs.

A single subsystem holds all drives of the enclosure. All objects under the enclosure's NQN belong to the
enclosure, and are repaired or removed. Ports and hosts may belong to others. Names of ports and hosts created
here are recorded before creation (``NvmetRecord``), and only those are removed. An existing port at the same
address is joined, and left at the end.

Properties of the kernel relied upon:

- A new subsystem admits no host. Hosts can't be listed while any host may connect.
- A namespace is configured while disabled, and visible once enabled.
- A port is configured before a subsystem is linked, and listens from then on.
- An excluded host keeps existing connections.
"""

from __future__ import annotations

import errno
import hashlib
import ipaddress
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from ostraca_enclosure.drives import uuid_of
from ostraca_enclosure.plan import (
    AddListener,
    AddNamespace,
    AllowAnyHost,
    AllowHost,
    CreateSubsystem,
    DenyHost,
    Export,
    ExportedNamespace,
    HostSecrets,
    PresentExports,
    RemoveListener,
    RemoveNamespace,
    RemoveSubsystem,
    RequireAllowList,
    Step,
)
from ostraca_enclosure.ports import ExportError
from ostraca_enclosure.state_files import NvmetRecord
from ostraca_fabric.model.target import Controller, TargetTransport


class Configfs:
    """Configfs tree below a directory, with the few calls needed for the target.

    Objects are created by ``mkdir``, configured by writes, joined by links. Attributes are files, present as
    long as their directory. Each is read and written whole. Paths are relative; every method raises OSError.
    """

    def __init__(self, root: Path) -> None:
        """Use *root*, a kernel subsystem's tree such as /sys/kernel/config/nvmet."""
        self.root = root

    def has(self, path: str) -> bool:
        """Return whether *path* exists."""
        return os.path.lexists(self.root / path)

    def names(self, path: str) -> list[str]:
        """Return the directories and links in a directory; empty if missing."""
        try:
            with os.scandir(self.root / path) as entries:
                return sorted(each.name for each in entries if each.is_symlink() or each.is_dir())
        except FileNotFoundError:
            return []

    def read(self, path: str) -> str:
        """Return the value of an attribute."""
        return (self.root / path).read_text().strip()

    def write(self, path: str, text: str) -> None:
        """Set an attribute, in one write."""
        descriptor = os.open(self.root / path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(descriptor, f"{text}\n".encode())
        finally:
            os.close(descriptor)

    def mkdir(self, path: str) -> None:
        """Create a directory if missing."""
        (self.root / path).mkdir(exist_ok=True)

    def rmdir(self, path: str) -> None:
        """Remove a directory with its attributes, if present."""
        with suppress(FileNotFoundError):
            (self.root / path).rmdir()

    def link(self, path: str, to: str) -> None:
        """Link *path* to *to*, if not yet linked."""
        with suppress(FileExistsError):
            (self.root / path).symlink_to(self.root / to)

    def unlink(self, path: str) -> None:
        """Remove a link, if present."""
        (self.root / path).unlink(missing_ok=True)


PORT_MAX = 65535
NAMESPACE_MAX = 1024
"""Most namespaces of a subsystem: nvmet's own limit."""

_SERIAL_CHARACTERS = 20
_KEYS = (("dhchap_key", "host"), ("dhchap_ctrl_key", "controller"))
_REMEDIES = {
    errno.EACCES: "run it as root",
    errno.EPERM: "run it as root",
    errno.ENOENT: "is nvmet loaded? `modprobe nvmet nvmet-tcp nvmet-rdma`",
    errno.EADDRNOTAVAIL: "no such address on this machine",
    errno.EADDRINUSE: "another program listens there",
    errno.EBUSY: "another program uses the object",
}


class NvmetExporter:
    """Subsystem of an enclosure. Implements ``ports.Exporter``."""

    def __init__(self, tree: Configfs, nqn: str, record: NvmetRecord, *, reservations: bool = False) -> None:
        """Export through *tree*, nvmet's configfs; *record* lists the objects created there.

        With *reservations*, hosts may reserve drives offered from now on, if the kernel supports this.
        """
        self._tree = tree
        self._nqn = nqn
        self._record = record
        self._reservations = reservations
        self._subsystem = f"subsystems/{nqn}"

    def observe(self, hosts: Mapping[str, HostSecrets]) -> PresentExports:
        """Return the present exports."""
        with _export_errors("list exports"):
            if not self._tree.has("subsystems"):
                raise ExportError(
                    f"nvmet is missing at {self._tree.root}: mount configfs and `modprobe nvmet nvmet-tcp "
                    "nvmet-rdma`"
                )
            ports = frozenset(
                controller
                for port in self._tree.names("ports")
                if (controller := self._listening_address(port))
            )
            if not self._tree.has(self._subsystem):
                return PresentExports(controllers=ports)
            admitted = frozenset(self._tree.names(f"{self._subsystem}/allowed_hosts"))
            return PresentExports(
                exists=True,
                controllers=ports,
                namespaces=tuple(map(self._exported_namespace, self._slots())),
                hosts=admitted,
                stale_hosts=frozenset(
                    each for each in admitted & hosts.keys() if not self._has_secrets(each, hosts[each])
                ),
                allows_any_host=self._tree.read(f"{self._subsystem}/attr_allow_any_host") == "1",
            )

    def apply(self, step: Step) -> None:  # noqa: C901 (a case for each step)
        """Apply a step."""
        with _export_errors("apply the step"):
            match step:
                case CreateSubsystem():
                    self._create()
                case RequireAllowList():
                    self._tree.write(f"{self._subsystem}/attr_allow_any_host", "0")
                case AllowAnyHost():
                    self._tree.write(f"{self._subsystem}/attr_allow_any_host", "1")
                case AllowHost(host, secrets):
                    self._allow_host(host, secrets)
                case DenyHost(host):
                    self._tree.unlink(f"{self._subsystem}/allowed_hosts/{host}")
                    self._forget_host(host)
                case AddNamespace(export):
                    self._add_namespace(export)
                case RemoveNamespace(slot):
                    self._remove_namespace(slot)
                case AddListener(controller):
                    self._add_listener(controller)
                case RemoveListener(controller):
                    self._remove_listener(controller)
                case RemoveSubsystem():
                    self._remove()

    def _create(self) -> None:
        self._tree.mkdir(self._subsystem)
        # Hosts show and remember the serial, so keep it over reboots. Kernels before 5.4 choose their own.
        if self._tree.has(f"{self._subsystem}/attr_serial"):
            serial = hashlib.blake2b(self._nqn.encode()).hexdigest()[:_SERIAL_CHARACTERS]
            self._tree.write(f"{self._subsystem}/attr_serial", serial)

    def _remove(self) -> None:
        for slot in self._slots():
            self._remove_namespace(slot)
        for host in self._tree.names(f"{self._subsystem}/allowed_hosts"):
            self._tree.unlink(f"{self._subsystem}/allowed_hosts/{host}")
        for port in self._tree.names("ports"):
            if self._is_linked(port):
                self._unlink_port(port)
        self._tree.rmdir(self._subsystem)
        for host in self._record.names("hosts"):
            self._forget_host(host)
        for port in self._record.names("ports"):
            self._forget_port(port)

    def _slots(self) -> list[int]:
        found = self._tree.names(f"{self._subsystem}/namespaces")
        return sorted(int(each) for each in found if each.isdigit())

    def _namespace(self, slot: int) -> str:
        return f"{self._subsystem}/namespaces/{slot}"

    def _exported_namespace(self, slot: int) -> ExportedNamespace:
        at = self._namespace(slot)
        nguid = self._tree.read(f"{at}/device_nguid").replace("-", "").lower()
        return ExportedNamespace(
            slot,
            nguid if nguid.strip("0") else "",
            self._tree.read(f"{at}/device_path"),
            is_enabled=self._tree.read(f"{at}/enable") == "1",
        )

    def _add_namespace(self, export: Export) -> None:
        used = set(self._slots())
        for each in map(self._exported_namespace, used):
            if each.is_enabled and (each.nguid, each.device) == (export.nguid, export.device):
                return
        slot = next((each for each in range(1, NAMESPACE_MAX + 1) if each not in used), 0)
        if not slot:
            raise ExportError(
                f"the subsystem has {NAMESPACE_MAX} namespaces already, the most that nvmet supports"
            )
        at = self._namespace(slot)
        self._tree.mkdir(at)
        self._tree.write(f"{at}/device_path", export.device)
        self._tree.write(f"{at}/device_nguid", export.nguid)
        self._tree.write(f"{at}/device_uuid", uuid_of(export.nguid))
        if self._reservations and self._tree.has(f"{at}/resv_enable"):
            self._tree.write(f"{at}/resv_enable", "1")
        self._tree.write(f"{at}/enable", "1")

    def _remove_namespace(self, slot: int) -> None:
        at = self._namespace(slot)
        if self._tree.has(at):
            self._tree.write(f"{at}/enable", "0")
            self._tree.rmdir(at)

    def _allow_host(self, host: str, secrets: HostSecrets) -> None:
        at, link = f"hosts/{host}", f"{self._subsystem}/allowed_hosts/{host}"
        exists = self._tree.has(at)
        if exists and not self._has_secrets(host, secrets):
            if host not in self._record.names("hosts"):
                raise ExportError(
                    f"nvmet has {at} with other secrets, created by another program: remove {at}, or use "
                    "the same secrets"
                )
            if any(self._key(host, file) and not getattr(secrets, field) for file, field in _KEYS):
                # Not every kernel can remove a key: only a newly created host has none.
                self._tree.unlink(link)
                self._tree.rmdir(at)
                exists = False
        if not exists:
            self._record.add("hosts", host)
            self._tree.mkdir(at)
        for file, field in _KEYS:
            wanted = getattr(secrets, field)
            if wanted and self._key(host, file) != wanted:
                if not self._tree.has(f"{at}/{file}"):
                    raise ExportError(
                        "the kernel's nvmet lacks DH-HMAC-CHAP: use Linux 6.0 or later with "
                        "CONFIG_NVME_TARGET_AUTH, or list the host without secrets"
                    )
                self._tree.write(f"{at}/{file}", wanted)
        self._tree.link(link, at)

    def _key(self, host: str, file: str) -> str:
        at = f"hosts/{host}/{file}"
        return self._tree.read(at) if self._tree.has(at) else ""

    def _has_secrets(self, host: str, secrets: HostSecrets) -> bool:
        return all(self._key(host, file) == getattr(secrets, field) for file, field in _KEYS)

    def _forget_host(self, host: str) -> None:
        if host in self._record.names("hosts"):
            self._rmdir_unless_held(f"hosts/{host}")
            self._record.remove("hosts", host)

    def _address(self, port: str) -> Controller | None:
        """Return a port's address; None if unset, or of another kind."""
        said = [self._tree.read(f"ports/{port}/addr_{each}") for each in ("trtype", "traddr", "trsvcid")]
        try:
            return Controller(TargetTransport(said[0]), str(ipaddress.ip_address(said[1])), int(said[2]))
        except ValueError:
            return None

    def _is_linked(self, port: str) -> bool:
        return self._nqn in self._tree.names(f"ports/{port}/subsystems")

    def _listening_address(self, port: str) -> Controller | None:
        return self._address(port) if self._is_linked(port) else None

    def _add_listener(self, controller: Controller) -> None:
        ports = self._tree.names("ports")
        port = next((each for each in ports if self._address(each) == controller), None)
        if port is None:
            port = next(
                (each for each in self._record.names("ports") if self._is_unused(each)), None
            ) or self._free_port(ports)
            self._record.add("ports", port)
            self._tree.mkdir(f"ports/{port}")
            address = ipaddress.ip_address(controller.address)
            for name, value in (
                ("adrfam", f"ipv{address.version}"),
                ("trtype", controller.transport.value),
                ("traddr", str(address)),
                ("trsvcid", str(controller.service)),
            ):
                self._tree.write(f"ports/{port}/addr_{name}", value)
        self._tree.link(f"ports/{port}/subsystems/{self._nqn}", self._subsystem)

    def _is_unused(self, port: str) -> bool:
        """Return whether a port created here was never configured, because of a crash."""
        return self._tree.has(f"ports/{port}") and self._address(port) is None

    def _free_port(self, ports: list[str]) -> str:
        free = next((str(each) for each in range(1, PORT_MAX + 1) if str(each) not in ports), None)
        if free is None:
            raise ExportError(f"nvmet has {PORT_MAX} ports already: remove unused ports")
        return free

    def _remove_listener(self, controller: Controller) -> None:
        for port in self._tree.names("ports"):
            if self._listening_address(port) == controller:
                self._unlink_port(port)

    def _unlink_port(self, port: str) -> None:
        """Unlink a port from this subsystem; remove the port if created here and unused."""
        self._tree.unlink(f"ports/{port}/subsystems/{self._nqn}")
        self._forget_port(port)

    def _forget_port(self, port: str) -> None:
        if port in self._record.names("ports"):
            if not self._tree.names(f"ports/{port}/subsystems"):
                self._rmdir_unless_held(f"ports/{port}")
            self._record.remove("ports", port)

    def _rmdir_unless_held(self, path: str) -> None:
        try:
            self._tree.rmdir(path)
        except OSError as error:
            if error.errno not in (errno.EBUSY, errno.ENOTEMPTY):
                raise


@contextmanager
def _export_errors(action: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "")
        where = f" ({error.filename})" if error.filename else ""
        raise ExportError(
            f"nvmet failed to {action}: {error.strerror}{where}{': ' if remedy else ''}{remedy}"
        ) from error
