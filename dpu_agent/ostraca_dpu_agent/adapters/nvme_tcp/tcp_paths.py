"""Paths to enclosures over the user-space initiator, and their drives.

Each controller of a target is an association of this process. ``connect`` makes missing associations, so a
lost path returns with the next call. A host name is resolved at each attempt, since pods change addresses.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from ostraca_dpu_agent.adapters.nvme_of.refusals import furthest_error
from ostraca_dpu_agent.adapters.nvme_tcp.association import LOST, Association, FoundNamespace, TcpPathSettings
from ostraca_dpu_agent.adapters.nvme_tcp.queue_pair import ConnectRefusedError
from ostraca_dpu_agent.adapters.nvme_tcp.tcp_drive import DrivePath, TcpDrive, flush_drive, move_whole
from ostraca_fabric.drives.device_opener import DeviceOpener
from ostraca_fabric.drives.io_engine import FlashIoSettings
from ostraca_fabric.errors import DriveError
from ostraca_fabric.model.extent import PAGE_BYTES
from ostraca_fabric.model.ids import DriveId
from ostraca_fabric.model.target import Controller, Target, TargetTransport, check_nqn
from ostraca_fabric.ports.drive import Drive
from ostraca_fabric.ports.opener import RawDrive
from ostraca_fabric.ports.paths import Namespace, PathError, PathState, Stage
from ostraca_fabric.runtime.os_errors import state_and_remedy
from ostraca_fabric.runtime.tasks import in_own_thread
from ostraca_fabric.sockets.nvme_tcp.commands import (
    DATA_INVALID,
    HOST_NQN_AT,
    SUBSYSTEM_NQN_AT,
    Connect,
    IoOpcode,
    NvmeStatus,
)

_SCHEME = "nvme-tcp://"
_CHECK = "check the enclosure's daemon and the network"


@dataclass(slots=True)
class _Link:
    """Path to one controller of a target."""

    connecting: threading.Lock
    association: Association | None = None
    refusal: str = "not connected"

    def live(self) -> Association | None:
        association = self.association
        return association if association is not None and association.is_live() else None


class TcpPaths:
    """Paths of one host. Implements ``Paths``; call ``close`` at the end."""

    def __init__(self, host: str, host_id: str, settings: TcpPathSettings | None = None) -> None:
        """Use *host* as NQN, with the matching UUID *host_id*. Raises UsageError."""
        self.host = check_nqn(host)
        """The NQN by which enclosures know this host."""

        self._host_id = uuid.UUID(host_id).bytes
        self._settings = settings or TcpPathSettings()
        self._changing = threading.Lock()
        self._links: dict[tuple[str, Controller], _Link] = {}
        self._is_closed = False

    async def connect(self, target: Target, secret: str) -> tuple[Namespace, ...]:
        """Connect as ``Paths`` specifies."""
        results = await asyncio.gather(
            *(
                in_own_thread("paths", partial(self._reach, target, each, secret))
                for each in target.controllers
            )
        )
        errors = [each for each in results if each is not None]
        if len(errors) == len(target.controllers):
            raise furthest_error(errors)
        return await self.namespaces(target)

    async def namespaces(self, target: Target) -> tuple[Namespace, ...]:
        """Return namespaces as ``Paths`` specifies."""
        return await in_own_thread("paths", partial(self._namespaces, target))

    async def states(self, target: Target) -> tuple[PathState, ...]:
        """Return states as ``Paths`` specifies."""
        return await in_own_thread("paths", partial(self._states, target))

    async def disconnect(self, target: Target) -> None:
        """Disconnect as ``Paths`` specifies."""
        await in_own_thread("paths", partial(self._disconnect, target))

    def close(self) -> None:
        """End all connections, and refuse new ones."""
        with self._changing:
            self._is_closed = True
            links = list(self._links.values())
        for link in links:
            _end(link)

    def current(self, nqn: str, nguid: str) -> tuple[Association, FoundNamespace]:
        """Return the first live path to a drive. Raises DriveError without any."""
        with self._changing:
            links = [link for (other, _), link in self._links.items() if other == nqn]
        for link in links:
            association = link.association
            if association is not None and not association.trouble:
                namespace = association.namespaces.get(nguid)
                if namespace is not None:
                    return association, namespace
        raise DriveError(f"this host has no live path to drive {nguid} of {nqn}: {_CHECK}")

    def path_to(self, nqn: str, nguid: str) -> DrivePath:
        """Return the path to a drive, over whichever controller is live."""
        return _NguidPath(self, nqn, nguid)

    def _reach(self, target: Target, controller: Controller, secret: str) -> PathError | None:
        """Connect to a controller, unless connected; return why not."""
        link = self._link(target, controller)
        with link.connecting:
            if link.live() is not None:
                return None
            link.association = None
            try:
                link.association = self._associate(target, controller, secret)
            except PathError as error:
                link.refusal = str(error)
                return error
            if self._is_closed:
                _end(link)
        return None

    def _associate(self, target: Target, controller: Controller, secret: str) -> Association:
        if controller.transport is not TargetTransport.TCP:
            raise PathError(
                Stage.FIT,
                f"{controller} needs the kernel's initiator, and this agent has its own, for tcp:// alone: "
                "set nvme.initiator to kernel",
            )
        if secret:
            raise PathError(
                Stage.AUTHENTICATE,
                f"{controller} has a secret, and the user-space initiator has no DH-HMAC-CHAP: register the "
                "enclosure without a secret, or set nvme.initiator to kernel",
            )
        keep_alive_ms = round(self._settings.keep_alive_s * 1000)
        connect = Connect(target.nqn, self.host, self._host_id, keep_alive_ms=keep_alive_ms)
        try:
            return Association(controller, connect, self._settings)
        except ConnectRefusedError as error:
            raise _refused(controller, target.nqn, self.host, error) from error
        except (*LOST, UnicodeError) as error:
            raise _unreachable(controller, error) from error

    def _namespaces(self, target: Target) -> tuple[Namespace, ...]:
        found: dict[str, Namespace] = {}
        for association in self._live(target):
            try:
                association.list_namespaces()
            except LOST as error:
                association.end(f"the drives could not be listed: {error}")
                continue
            identity = association.identity
            for nguid, each in association.namespaces.items():
                namespace = Namespace(
                    nguid,
                    f"{_SCHEME}{target.nqn}/{nguid}",
                    each.size_bytes,
                    each.identity.lba_bytes,
                    identity.model,
                    identity.serial,
                )
                found.setdefault(nguid, namespace)
        return tuple(found[nguid] for nguid in sorted(found))

    def _states(self, target: Target) -> tuple[PathState, ...]:
        states = []
        for controller in target.controllers:
            link = self._links.get((target.nqn, controller))
            if link is None:
                states.append(PathState(controller, is_live=False, detail="not connected"))
            elif link.live() is not None:
                states.append(PathState(controller, is_live=True, detail="live"))
            else:
                lost = link.association.trouble if link.association is not None else ""
                states.append(PathState(controller, is_live=False, detail=lost or link.refusal))
        return tuple(states)

    def _disconnect(self, target: Target) -> None:
        with self._changing:
            links = [self._links.pop((target.nqn, each), None) for each in target.controllers]
        for link in links:
            if link is not None:
                with link.connecting:
                    _end(link)

    def _live(self, target: Target) -> Iterator[Association]:
        for controller in target.controllers:
            link = self._links.get((target.nqn, controller))
            if link is not None and (association := link.live()) is not None:
                yield association

    def _link(self, target: Target, controller: Controller) -> _Link:
        with self._changing:
            return self._links.setdefault((target.nqn, controller), _Link(threading.Lock()))


class TcpOpener:
    """Implements ``ports.opener.NamespaceOpener`` for drives of ``TcpPaths``, and for devices and files."""

    initiator = "userspace"

    def __init__(self, paths: TcpPaths, settings: FlashIoSettings | None = None) -> None:
        """Open drives over *paths*, and devices and files with *settings*."""
        self._paths = paths
        self._devices = DeviceOpener(settings)

    @property
    def flash_io(self) -> str:
        """Return the way of flash I/O of devices and files."""
        return self._devices.flash_io

    def open(self, drive: DriveId, device: str, *, flushes: bool = False) -> Drive:
        """Open a drive as the port defines."""
        path = self._path(device)
        if path is None:
            return self._devices.open(drive, device, flushes=flushes)
        return TcpDrive(drive, path)

    @contextmanager
    def open_raw(self, namespace: Namespace, *, is_writable: bool = False) -> Iterator[RawDrive]:
        """Open a drive for an inspection as the port defines."""
        path = self._path(namespace.device)
        if path is None:
            with self._devices.open_raw(namespace, is_writable=is_writable) as drive:
                yield drive
        else:
            yield _RawTcpDrive(path)

    def close(self) -> None:
        """Stop threads as the port defines."""
        self._devices.close()

    def _path(self, device: str) -> DrivePath | None:
        if not device.startswith(_SCHEME):
            return None
        nqn, _, nguid = device.removeprefix(_SCHEME).rpartition("/")
        return self._paths.path_to(nqn, nguid)


@dataclass(frozen=True, slots=True)
class _NguidPath:
    """Path to one drive by identity."""

    paths: TcpPaths
    nqn: str
    nguid: str

    def current(self) -> tuple[Association, FoundNamespace]:
        """Return the live path. Raises DriveError."""
        return self.paths.current(self.nqn, self.nguid)


class _RawTcpDrive:
    """A drive accessed in whole pages."""

    def __init__(self, path: DrivePath) -> None:
        """Use *path*. Raises DriveError without one."""
        self._path = path
        self.size_bytes = path.current()[1].size_bytes // PAGE_BYTES * PAGE_BYTES

    def read(self, offset: int, length: int) -> bytes:
        """Read whole pages. Raises DriveError."""
        data = bytearray(length)
        move_whole(self._path, IoOpcode.READ, offset, memoryview(data))
        return bytes(data)

    def write(self, offset: int, data: bytes) -> None:
        """Write whole pages durably. Raises DriveError."""
        move_whole(self._path, IoOpcode.WRITE, offset, memoryview(data))
        flush_drive(self._path)


def _end(link: _Link) -> None:
    if link.association is not None:
        link.association.end("disconnected")
        link.association = None


def _refused(controller: Controller, nqn: str, host: str, error: ConnectRefusedError) -> PathError:
    place = error.result & (DATA_INVALID | 0xFFFF)
    is_wrong = error.status == NvmeStatus.CONNECT_PARAMETERS
    if error.needs_secret:
        stage = Stage.AUTHENTICATE
        why = "wants a secret, and the user-space initiator has none: set nvme.initiator to kernel"
    elif error.status == NvmeStatus.CONNECT_HOST or (is_wrong and place == DATA_INVALID | HOST_NQN_AT):
        stage, why = Stage.AUTHENTICATE, f"rejects this host: add {host} to the hosts of the enclosure"
    elif is_wrong and place == DATA_INVALID | SUBSYSTEM_NQN_AT:
        stage, why = Stage.IDENTIFY, f"has no subsystem {nqn}: check the name, --nqn and the controllers"
    elif error.status == NvmeStatus.CONTROLLER_BUSY:
        stage, why = Stage.REACH, "accepts no further hosts: try again later"
    else:
        stage, why = Stage.FIT, f"refuses the connection: {error}"
    return PathError(stage, f"{controller} {why}")


def _unreachable(controller: Controller, error: Exception) -> PathError:
    if isinstance(error, socket.gaierror | UnicodeError):  # the latter for a name that no host can have
        return PathError(Stage.REACH, f"{controller} can't be resolved: {getattr(error, 'strerror', error)}")
    if isinstance(error, OSError):
        state = state_and_remedy(error)[0]
        return PathError(Stage.REACH, f"{controller} is not reachable: {state}; {_CHECK}")
    return PathError(Stage.REACH, f"{controller} does not speak NVMe/TCP as expected: {error}; {_CHECK}")
