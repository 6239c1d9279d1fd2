"""One Linux host's NVMe-oF, as its kernel behaves: controllers in a directory laid out as ``/sys`` is.

It follows ``drivers/nvme/host`` of Linux 6.12 (``fabrics.c``, ``sysfs.c``, ``multipath.c``): which options it
takes and how it answers them, what it logs, how it names things and where, and what it shows of them.
"""

from __future__ import annotations

import asyncio
import errno
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ostraca_dpu_agent.adapters.nvme_of.kernel import KernelError

OPTIONS = frozenset(
    {
        "transport",
        "traddr",
        "trsvcid",
        "nqn",
        "nr_io_queues",
        "reconnect_delay",
        "ctrl_loss_tmo",
        "keep_alive_tmo",
        "hostnqn",
        "hostid",
        "fast_io_fail_tmo",
        "dhchap_secret",
    }
)
_BLOCK_BYTES = 512


@dataclass
class Subsystem:
    """What an enclosure's nvmet exports."""

    nqn: str
    namespaces: Mapping[int, tuple[str, int]]
    """By namespace id: what identifies it in sysfs (``nguid=…`` or ``uuid=…``), and its size in bytes."""

    hosts: Mapping[str, str] = field(default_factory=dict)
    """As in ``allowed_hosts``, with their keys; none: ``attr_allow_any_host``."""


@dataclass
class _Controller:
    name: str
    options: Mapping[str, str]
    subsystem: Subsystem
    directory: Path


class SimulatedNvme:
    """It is the kernel of ``NvmePaths``, whose sysfs is in ``sysfs``."""

    def __init__(self, directory: Path) -> None:
        """Be a host that has nothing connected, with the parameters of Linux's modules as they are."""
        self.sysfs = directory / "sys"
        self.ports: dict[tuple[str, str, str], list[Subsystem]] = {}
        """By transport, address and port: what is exported there; nothing listens at others."""

        self.options_known = OPTIONS
        self.silent: set[tuple[str, str, str]] = set()
        """Ports that never answer."""

        self.mute: set[tuple[str, str, str]] = set()
        """Ports whose answer to a secret is lost, as over RDMA: the host asks until ``end_begun``."""

        self.halting: set[tuple[str, str, str]] = set()
        """Ports that let a host in, and then answer no more."""

        self.scan_s = 0.0
        """How long after a controller was made its namespaces are named."""

        self.written: list[str] = []
        """Options of each controller that was asked for."""

        self.is_log_readable = True
        self.noise: tuple[str, ...] = ()
        """What the log says meanwhile of others."""

        self._controllers: dict[str, _Controller] = {}
        self._begun: dict[str, Path] = {}
        """Controllers that are being connected, past their time: the kernel does nothing else."""

        self._count = 0
        parameters = self.sysfs / "module" / "nvme_core" / "parameters"
        parameters.mkdir(parents=True)
        (parameters / "multipath").write_text("Y\n")
        (parameters / "io_timeout").write_text("30\n")
        (parameters / "admin_timeout").write_text("60\n")
        (parameters / "max_retries").write_text("5\n")
        for name in ("nvme", "nvme-subsystem"):
            (self.sysfs / "class" / name).mkdir(parents=True)

    @property
    def multipath(self) -> Path:
        return self.sysfs / "module" / "nvme_core" / "parameters" / "multipath"

    @property
    def io_timeout(self) -> Path:
        return self.sysfs / "module" / "nvme_core" / "parameters" / "io_timeout"

    def names(self) -> list[str]:
        return sorted(self._controllers)

    # What the network does.

    def lose(self, port: tuple[str, str, str]) -> None:
        """Have nothing answer at a port any more: its controllers try to come back."""
        for each in self._controllers.values():
            if _port(each.options) == port:
                (each.directory / "state").write_text("connecting\n")

    def regain(self, port: tuple[str, str, str]) -> None:
        """Have the controllers of a port come back."""
        for each in self._controllers.values():
            if _port(each.options) == port:
                (each.directory / "state").write_text("live\n")

    def end_begun(self) -> None:
        """Have the kernel give up what it was connecting."""
        for name, directory in self._begun.items():
            (self.sysfs / "class" / "nvme" / name).unlink()
            shutil.rmtree(directory)
        self._begun.clear()

    # ``Kernel``.

    async def options(self) -> frozenset[str]:
        if self._begun:
            raise KernelError(errno.ETIME, "options")
        return self.options_known

    async def connect(self, options: str, within_s: float) -> str:
        self.written.append(options)
        wanted = dict(part.partition("=")[::2] for part in options.split(","))
        unknown = [name for name in wanted if name not in self.options_known]
        if unknown:
            raise self._error(
                errno.EINVAL,
                f"nvme_fabrics: unknown parameter or missing value '{unknown[0]}={wanted[unknown[0]]}' in "
                "ctrl creation request",
            )
        uuid.UUID(wanted["hostid"])
        port = _port(wanted)
        if port in self.silent or self._begun:
            raise KernelError(errno.ETIME, "connect")
        if any(
            _port(each.options) == port
            and (each.options["nqn"], each.options["hostnqn"]) == (wanted["nqn"], wanted["hostnqn"])
            for each in self._controllers.values()
        ):
            raise KernelError(errno.EALREADY, "connect")
        name = f"nvme{self._count}"
        subsystem = self._admitted(name, port, wanted)
        self._count += 1
        self._make(name, wanted, subsystem)
        return name

    async def active(self, controller: str) -> int:
        return len(self._controllers[controller].subsystem.namespaces)

    async def write(self, attribute: Path, text: str, within_s: float) -> None:
        controller = self._controllers.get(attribute.parent.name)
        if controller is None:
            raise KernelError(errno.ENOENT, "open")
        if attribute.name == "delete_controller":
            self._delete(controller)
        elif attribute.name in ("fast_io_fail_tmo", "ctrl_loss_tmo"):
            self.put(controller.name, attribute.name, "off" if int(text) < 0 else str(int(text)))
        else:
            raise KernelError(errno.EACCES, "open")

    def put(self, controller: str, attribute: str, text: str) -> None:
        """Have a controller show this."""
        (self.sysfs / "class" / "nvme" / controller / attribute).write_text(f"{text}\n")

    def get(self, controller: str, attribute: str) -> str:
        return (self.sysfs / "class" / "nvme" / controller / attribute).read_text().strip()

    def _admitted(self, name: str, port: tuple[str, str, str], wanted: Mapping[str, str]) -> Subsystem:
        device = f"nvme {name}"
        if port not in self.ports:
            if port[0] == "rdma":
                raise self._error(errno.ECONNRESET, f"{device}: rdma connection establishment failed (-104)")
            raise self._error(errno.ECONNREFUSED, f"{device}: failed to connect socket: -111")
        nqn, host = wanted["nqn"], wanted["hostnqn"]
        subsystem = next((each for each in self.ports[port] if each.nqn == nqn), None)
        if subsystem is None:
            raise self._error(errno.EIO, f'{device}: Connect Invalid Data Parameter, subsysnqn "{nqn}"')
        if subsystem.hosts and host not in subsystem.hosts:
            raise self._error(
                errno.EIO, f"{device}: Connect for subsystem {nqn} is not allowed, hostnqn: {host}"
            )
        key, shown = subsystem.hosts.get(host, ""), wanted.get("dhchap_secret", "")
        if key and not shown:
            raise self._error(errno.EIO, f"{device}: qid 0: authentication setup failed")
        if key and key != shown:
            if port in self.mute:
                raise self._late(name, wanted, f"{device}: I/O tag 29 (001d) opcode 0x7f (Fabrics Cmd)")
            raise self._error(errno.EIO, f"{device}: qid 0: authentication failed, error 16785")
        if port in self.halting:
            raise self._late(name, wanted, *([f"{device}: qid 0: authenticated"] if key else []))
        return subsystem

    def _late(self, name: str, wanted: Mapping[str, str], *said: str) -> KernelError:
        """Begin with a controller that took the connection, and does not come to be in its time."""
        directory = self.sysfs / "devices" / "virtual" / "nvme-fabrics" / "ctl" / name
        directory.mkdir(parents=True)
        for attribute, text in {
            "subsysnqn": "(efault)",
            "transport": wanted["transport"],
            "address": f"traddr={wanted['traddr']},trsvcid={wanted['trsvcid']}",
            "hostnqn": wanted["hostnqn"],
            "state": "connecting",
            "cntlid": "1",
        }.items():
            (directory / attribute).write_text(f"{text}\n")
        (self.sysfs / "class" / "nvme" / name).symlink_to(directory)
        self._begun[name] = directory
        return self._error(errno.ETIME, *said)

    def _error(self, code: int, *said: str) -> KernelError:
        return KernelError(code, "connect", (*self.noise, *said, *self.noise) if self.is_log_readable else ())

    def _make(self, name: str, wanted: Mapping[str, str], subsystem: Subsystem) -> None:
        directory = self.sysfs / "devices" / "virtual" / "nvme-fabrics" / "ctl" / name
        directory.mkdir(parents=True)
        fast = int(wanted.get("fast_io_fail_tmo", "-1"))
        loss = int(wanted.get("ctrl_loss_tmo", "600"))
        for attribute, text in {
            "subsysnqn": subsystem.nqn,
            "transport": wanted["transport"],
            "address": f"traddr={wanted['traddr']},trsvcid={wanted['trsvcid']},src_addr=192.0.2.99",
            "hostnqn": wanted["hostnqn"],
            "hostid": wanted["hostid"],
            "state": "live",
            "cntlid": "1",
            "kato": wanted.get("keep_alive_tmo", "5"),
            "fast_io_fail_tmo": "off" if fast < 0 else str(fast),
            "ctrl_loss_tmo": "off" if loss < 0 else str(loss),
            "reconnect_delay": wanted.get("reconnect_delay", "10"),
            "queue_count": str(1 + int(wanted.get("nr_io_queues", "8"))),
            "delete_controller": "",
            **({"dhchap_secret": wanted["dhchap_secret"]} if "dhchap_secret" in wanted else {}),
        }.items():
            (directory / attribute).write_text(f"{text}\n")
        (self.sysfs / "class" / "nvme" / name).symlink_to(directory)
        found = _Controller(name, wanted, subsystem, directory)
        self._controllers[name] = found
        shared = self._subsystem_directory(subsystem.nqn)
        (shared / name).symlink_to(directory)
        if self.scan_s:
            asyncio.get_running_loop().call_later(self.scan_s, self._scan, found)
        else:
            self._scan(found)

    def _scan(self, found: _Controller) -> None:
        shared = self._subsystem_directory(found.subsystem.nqn)
        number = found.name.removeprefix("nvme")
        for nsid, (identity, size_bytes) in found.subsystem.namespaces.items():
            head = f"nvme{shared.name.removeprefix('nvme-subsys')}n{nsid}"
            if self.multipath.read_text() == "Y\n":
                self._show(found.directory / f"nvme{number}c{number}n{nsid}", None, 0)
                self._show(shared / head, identity, size_bytes)
            else:
                self._show(found.directory / f"nvme{number}n{nsid}", identity, size_bytes)

    def _show(self, disk: Path, identity: str | None, size_bytes: int) -> None:
        (disk / "queue").mkdir(parents=True, exist_ok=True)
        seconds = int(self.io_timeout.read_text())
        (disk / "queue" / "io_timeout").write_text(f"{seconds * 1000}\n")
        (disk / "queue" / "logical_block_size").write_text(f"{_BLOCK_BYTES}\n")
        (disk / "size").write_text(f"{size_bytes // _BLOCK_BYTES}\n")
        if identity:
            name, _, digits = identity.partition("=")
            (disk / name).write_text(f"{uuid.UUID(digits)}\n")

    def _subsystem_directory(self, nqn: str) -> Path:
        shown = self.sysfs / "class" / "nvme-subsystem"
        for each in shown.iterdir():
            if (each / "subsysnqn").read_text() == f"{nqn}\n":
                return each
        name = f"nvme-subsys{len(list(shown.iterdir()))}"
        directory = self.sysfs / "devices" / "virtual" / "nvme-subsystem" / name
        directory.mkdir(parents=True)
        for attribute, text in {"subsysnqn": nqn, "model": "Linux", "serial": "8d2f7f2c"}.items():
            (directory / attribute).write_text(f"{text}\n")
        (shown / name).symlink_to(directory)
        return shown / name

    def _delete(self, found: _Controller) -> None:
        del self._controllers[found.name]
        shared = self._subsystem_directory(found.subsystem.nqn)
        (shared / found.name).unlink()
        (self.sysfs / "class" / "nvme" / found.name).unlink()
        shutil.rmtree(found.directory)
        if not any(each.subsystem.nqn == found.subsystem.nqn for each in self._controllers.values()):
            name = shared.name
            shared.unlink()
            shutil.rmtree(self.sysfs / "devices" / "virtual" / "nvme-subsystem" / name)


def _port(options: Mapping[str, str]) -> tuple[str, str, str]:
    return options["transport"], options["traddr"], options["trsvcid"]
