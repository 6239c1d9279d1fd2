"""Exports drives through Linux's own NVMe-oF target, nvmet, by its configfs tree.

One subsystem holds all drives of the enclosure. Its NQN is its own: whatever lies there under it is taken for
this enclosure's, and mended or removed. Ports and hosts lie beside it and may be others': which of them were
made here is written down before they are made (``MadeHere``), and nothing else is removed. A port of somebody
else at the same address is joined, and left when it ends.

What the kernel keeps to, and this relies on: a new subsystem lets nobody in; hosts can't be listed while any
may connect; a namespace is set while it is off, and seen when it is on; a port is set before a subsystem is
linked to it, and listens from then on. A host that is shut out keeps what it has connected.
"""

from __future__ import annotations

import errno
import hashlib
import ipaddress
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ostraca_enclosure.adapters.configfs import Configfs
from ostraca_enclosure.drives import uuid_of
from ostraca_enclosure.plan import (
    CloseToOthers,
    Create,
    Export,
    Have,
    HostSecrets,
    LetIn,
    Listen,
    Offer,
    Offered,
    OpenToAll,
    Remove,
    ShutOut,
    Step,
    StopListening,
    TakeBack,
)
from ostraca_enclosure.ports import ExportError
from ostraca_fabric.target import Controller, Transport

if TYPE_CHECKING:
    from ostraca_enclosure.adapters.made_here import MadeHere

PORT_MAX = 65535
NAMESPACE_MAX = 1024
"""Of one subsystem: nvmet's own limit."""

_SERIAL_CHARACTERS = 20
_KEYS = (("dhchap_key", "host"), ("dhchap_ctrl_key", "controller"))
_HOW = {
    errno.EACCES: "run it as root",
    errno.EPERM: "run it as root",
    errno.ENOENT: "is nvmet loaded? `modprobe nvmet nvmet-tcp nvmet-rdma`",
    errno.EADDRNOTAVAIL: "this machine has no such address",
    errno.EADDRINUSE: "something else listens there",
    errno.EBUSY: "something else holds it",
}


class NvmetExporter:
    """One enclosure's subsystem. Implements ``ports.Exporter``."""

    def __init__(self, tree: Configfs, nqn: str, made: MadeHere, *, reservations: bool = False) -> None:
        """*tree* is that of nvmet; *made* remembers what was made there. With *reservations* hosts may
        reserve drives that are offered from now on, where the kernel knows how.
        """
        self._tree = tree
        self._nqn = nqn
        self._made = made
        self._reservations = reservations
        self._subsystem = f"subsystems/{nqn}"

    def observe(self, hosts: Mapping[str, HostSecrets]) -> Have:
        """Return what is exported."""
        with self._told("look at nvmet"):
            if not self._tree.has("subsystems"):
                raise ExportError(
                    f"there is no nvmet at {self._tree.root}: mount configfs and `modprobe nvmet nvmet-tcp "
                    "nvmet-rdma`"
                )
            ports = frozenset(
                controller for port in self._tree.names("ports") if (controller := self._listens(port))
            )
            if not self._tree.has(self._subsystem):
                return Have(controllers=ports)
            let_in = frozenset(self._tree.names(f"{self._subsystem}/allowed_hosts"))
            return Have(
                is_there=True,
                controllers=ports,
                offered=tuple(map(self._offered, self._slots())),
                hosts=let_in,
                stale=frozenset(
                    each for each in let_in & hosts.keys() if not self._has_secrets(each, hosts[each])
                ),
                is_open=self._tree.read(f"{self._subsystem}/attr_allow_any_host") == "1",
            )

    def apply(self, step: Step) -> None:  # noqa: C901 (a case for each step)
        """Do one step."""
        with self._told("do that"):
            match step:
                case Create():
                    self._create()
                case CloseToOthers():
                    self._tree.write(f"{self._subsystem}/attr_allow_any_host", "0")
                case OpenToAll():
                    self._tree.write(f"{self._subsystem}/attr_allow_any_host", "1")
                case LetIn(host, secrets):
                    self._let_in(host, secrets)
                case ShutOut(host):
                    self._tree.unlink(f"{self._subsystem}/allowed_hosts/{host}")
                    self._forget_host(host)
                case Offer(export):
                    self._offer(export)
                case TakeBack(slot):
                    self._take_back(slot)
                case Listen(controller):
                    self._listen(controller)
                case StopListening(controller):
                    self._stop_listening(controller)
                case Remove():
                    self._remove()

    # ------------------------------------------------------------------------------------- the subsystem

    def _create(self) -> None:
        self._tree.mkdir(self._subsystem)
        # Hosts show it, and remember it: the same after a reboot. Kernels before 5.4 choose one themselves.
        if self._tree.has(f"{self._subsystem}/attr_serial"):
            serial = hashlib.blake2b(self._nqn.encode()).hexdigest()[:_SERIAL_CHARACTERS]
            self._tree.write(f"{self._subsystem}/attr_serial", serial)

    def _remove(self) -> None:
        for slot in self._slots():
            self._take_back(slot)
        for host in self._tree.names(f"{self._subsystem}/allowed_hosts"):
            self._tree.unlink(f"{self._subsystem}/allowed_hosts/{host}")
        for port in self._tree.names("ports"):
            if self._is_linked(port):
                self._leave(port)
        self._tree.rmdir(self._subsystem)
        for host in self._made.hosts:
            self._forget_host(host)
        for port in self._made.ports:
            self._forget_port(port)

    # ---------------------------------------------------------------------------------------- namespaces

    def _slots(self) -> list[int]:
        found = self._tree.names(f"{self._subsystem}/namespaces")
        return sorted(int(each) for each in found if each.isdigit())

    def _namespace(self, slot: int) -> str:
        return f"{self._subsystem}/namespaces/{slot}"

    def _offered(self, slot: int) -> Offered:
        at = self._namespace(slot)
        nguid = self._tree.read(f"{at}/device_nguid").replace("-", "").lower()
        return Offered(
            slot,
            nguid if nguid.strip("0") else "",
            self._tree.read(f"{at}/device_path"),
            is_whole=self._tree.read(f"{at}/enable") == "1",
        )

    def _offer(self, export: Export) -> None:
        used = set(self._slots())
        for each in map(self._offered, used):
            if each.is_whole and (each.nguid, each.device) == (export.nguid, export.device):
                return
        slot = next((each for each in range(1, NAMESPACE_MAX + 1) if each not in used), 0)
        if not slot:
            raise ExportError(f"the subsystem has {NAMESPACE_MAX} namespaces, and that is the most")
        at = self._namespace(slot)
        self._tree.mkdir(at)
        self._tree.write(f"{at}/device_path", export.device)
        self._tree.write(f"{at}/device_nguid", export.nguid)
        self._tree.write(f"{at}/device_uuid", uuid_of(export.nguid))
        if self._reservations and self._tree.has(f"{at}/resv_enable"):
            self._tree.write(f"{at}/resv_enable", "1")
        self._tree.write(f"{at}/enable", "1")

    def _take_back(self, slot: int) -> None:
        at = self._namespace(slot)
        if self._tree.has(at):
            self._tree.write(f"{at}/enable", "0")
            self._tree.rmdir(at)

    # --------------------------------------------------------------------------------------------- hosts

    def _let_in(self, host: str, secrets: HostSecrets) -> None:
        at, link = f"hosts/{host}", f"{self._subsystem}/allowed_hosts/{host}"
        is_there = self._tree.has(at)
        if is_there and not self._has_secrets(host, secrets):
            if host not in self._made.hosts:
                raise ExportError(
                    f"somebody else made {at} of nvmet, with other secrets: remove it there, or let it have "
                    "these"
                )
            if any(self._key(host, file) and not getattr(secrets, whose) for file, whose in _KEYS):
                # Not every kernel takes a key back: only a host that is made anew has none.
                self._tree.unlink(link)
                self._tree.rmdir(at)
                is_there = False
        if not is_there:
            self._made.note_host(host)
            self._tree.mkdir(at)
        for file, whose in _KEYS:
            wanted = getattr(secrets, whose)
            if wanted and self._key(host, file) != wanted:
                if not self._tree.has(f"{at}/{file}"):
                    raise ExportError(
                        "this kernel's nvmet knows no DH-HMAC-CHAP: take Linux 6.0 or newer, with "
                        "CONFIG_NVME_TARGET_AUTH, or list the host without secrets"
                    )
                self._tree.write(f"{at}/{file}", wanted)
        self._tree.link(link, at)

    def _key(self, host: str, file: str) -> str:
        at = f"hosts/{host}/{file}"
        return self._tree.read(at) if self._tree.has(at) else ""

    def _has_secrets(self, host: str, secrets: HostSecrets) -> bool:
        return all(self._key(host, file) == getattr(secrets, whose) for file, whose in _KEYS)

    def _forget_host(self, host: str) -> None:
        if host in self._made.hosts:
            self._rmdir_unless_held(f"hosts/{host}")
            self._made.forget_host(host)

    # --------------------------------------------------------------------------------------------- ports

    def _address(self, port: str) -> Controller | None:
        """Return where a port listens, None where that is nowhere yet, or by something else."""
        said = [self._tree.read(f"ports/{port}/addr_{each}") for each in ("trtype", "traddr", "trsvcid")]
        try:
            return Controller(Transport(said[0]), str(ipaddress.ip_address(said[1])), int(said[2]))
        except ValueError:
            return None

    def _is_linked(self, port: str) -> bool:
        return self._nqn in self._tree.names(f"ports/{port}/subsystems")

    def _listens(self, port: str) -> Controller | None:
        return self._address(port) if self._is_linked(port) else None

    def _listen(self, controller: Controller) -> None:
        ports = self._tree.names("ports")
        port = next((each for each in ports if self._address(each) == controller), None)
        if port is None:
            port = next((each for each in self._made.ports if self._is_unused(each)), None) or self._free(
                ports
            )
            self._made.note_port(port)
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
        """Say whether a port that was made here was never set: a crash came between."""
        return self._tree.has(f"ports/{port}") and self._address(port) is None

    def _free(self, ports: list[str]) -> str:
        free = next((str(each) for each in range(1, PORT_MAX + 1) if str(each) not in ports), None)
        if free is None:
            raise ExportError("nvmet has all the ports it can have: remove some")
        return free

    def _stop_listening(self, controller: Controller) -> None:
        for port in self._tree.names("ports"):
            if self._listens(port) == controller:
                self._leave(port)

    def _leave(self, port: str) -> None:
        """End a port's link to this subsystem, and the port where nothing else is on it and it was ours."""
        self._tree.unlink(f"ports/{port}/subsystems/{self._nqn}")
        self._forget_port(port)

    def _forget_port(self, port: str) -> None:
        if port in self._made.ports:
            if not self._tree.names(f"ports/{port}/subsystems"):
                self._rmdir_unless_held(f"ports/{port}")
            self._made.forget_port(port)

    # ---------------------------------------------------------------------------------------------------

    def _rmdir_unless_held(self, path: str) -> None:
        try:
            self._tree.rmdir(path)
        except OSError as error:
            if error.errno not in (errno.EBUSY, errno.ENOTEMPTY):
                raise

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            how = _HOW.get(error.errno or 0, "")
            where = f" ({error.filename})" if error.filename else ""
            raise ExportError(
                f"nvmet would not {what}: {error.strerror}{where}{': ' if how else ''}{how}"
            ) from error
