"""Paths to enclosures over NVMe-oF, by Linux's own host: RDMA or TCP, native multipath.

A path is a controller of the kernel's. Each is made with time-outs that keep ``late_write_s`` true
(``nvme_timeouts``), and tries to come back for ever by itself. Whatever else leads to the same subsystem is
held to the same: a controller that an earlier process connected, or somebody by hand, is made fit, or else
ended and connected anew, since one path that holds writes back spoils the promise for all. Controllers are
connected in the target's order, and with the kernel's ``numa`` policy I/O takes the first that is live.

What may block in the kernel is done by processes that are given up after a time (``nvme_kernel``); what is
read from ``/sys`` is read on a thread.
"""

from __future__ import annotations

import asyncio
import errno
import re
import socket
import uuid
from collections import defaultdict
from typing import TYPE_CHECKING

from ostraca_fabric.adapters.nvme_kernel import KernelError, LinuxKernel
from ostraca_fabric.adapters.nvme_late import Asked, LateControllers
from ostraca_fabric.adapters.nvme_refusals import refusal
from ostraca_fabric.adapters.nvme_sysfs import NvmeSysfs, canonical, is_address, leads_to
from ostraca_fabric.adapters.nvme_timeouts import PathSettings, too_late
from ostraca_fabric.adapters.path_errors import furthest
from ostraca_fabric.errors import UsageError, shown
from ostraca_fabric.ports.paths import Namespace, PathError, PathState, Stage
from ostraca_fabric.target import check_nqn

if TYPE_CHECKING:
    from ostraca_fabric.adapters.nvme_kernel import Kernel
    from ostraca_fabric.adapters.nvme_sysfs import FoundController
    from ostraca_fabric.target import Controller, Target

_SECRET = re.compile(r"DHHC-1:0[0-3]:[A-Za-z0-9+/]+=*:\Z")
"""NVMe TCP transport and base specifications, "Secret Representation". The kernel logs others in clear."""

_LOOK_EVERY_S = 0.05
_FOREVER = "-1"


class NvmePaths:
    """One host's paths to enclosures over NVMe-oF."""

    def __init__(
        self,
        host: str,
        host_id: str,
        settings: PathSettings | None = None,
        kernel: Kernel | None = None,
        sysfs: NvmeSysfs | None = None,
    ) -> None:
        """Be the host of this NQN; *host_id* is the UUID that goes with it, the same after each start.

        Raises UsageError when they are none.
        """
        self._host = check_nqn(host)
        try:
            self._host_id = str(uuid.UUID(host_id))
        except ValueError:
            raise UsageError(
                f"{shown(host_id)} is no host id: write a UUID, and keep it with the host"
            ) from None
        self._settings = settings or PathSettings()
        self._kernel = kernel or LinuxKernel(ask_s=self._settings.ask_s)
        self._sysfs = sysfs or NvmeSysfs()
        self._refusals: dict[tuple[str, Controller], str] = {}
        """By the target's NQN and controller: why it was not connected when that was tried last."""

        self._addresses: dict[Controller, tuple[str, ...]] = {}
        """What controllers' names stood for when they were resolved last."""

        self._changing: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """By the target's NQN."""

        self._late = LateControllers(self._sysfs)
        self._knows_secrets = False
        """Whether the kernel has said that it can show one. It says nothing while it connects something."""

        self._connecting = asyncio.Lock()
        """The kernel makes one controller after the other: whose turn it is."""

    @property
    def host(self) -> str:
        """The NQN by which enclosures know this host."""
        return self._host

    async def connect(self, target: Target, secret: str) -> tuple[Namespace, ...]:
        """See ``Paths``."""
        if secret and not _SECRET.match(secret):
            raise PathError(
                Stage.AUTHENTICATE,
                "the secret of this host is none of NVMe's: write DHHC-1:00:<base64>:, as nvme "
                "gen-dhchap-key makes it",
            )
        async with self._changing[target.nqn]:
            await asyncio.to_thread(self._check_host, target)
            await self._make_fit(target, secret)
            errors, made = [], []
            for controller in target.controllers:
                try:
                    name = await self._connect_one(target, controller, secret)
                except PathError as error:
                    errors.append(error)
                    self._refusals[target.nqn, controller] = str(error)
                else:
                    self._refusals.pop((target.nqn, controller), None)
                    made += [name] if name else []
            if len(errors) == len(target.controllers):
                raise furthest(errors)
            if made:
                await self._attached(target, made)
        return await self.namespaces(target)

    async def namespaces(self, target: Target) -> tuple[Namespace, ...]:
        """See ``Paths``. A drive that no live path leads to can't be opened, though its device is there."""
        return await asyncio.to_thread(self._namespaces, target)

    async def states(self, target: Target) -> tuple[PathState, ...]:
        """See ``Paths``."""
        found = await asyncio.to_thread(self._sysfs.controllers, target.nqn)
        return tuple([await self._state(target, controller, found) for controller in target.controllers])

    async def disconnect(self, target: Target) -> None:
        """See ``Paths``. Paths that were connected under another host's name are left alone."""
        async with self._changing[target.nqn]:
            for found in await self._ours(target):
                if not found.is_going:
                    await self._remove(found)
            for controller in target.controllers:
                self._refusals.pop((target.nqn, controller), None)

    def _check_host(self, target: Target) -> None:
        if len(target.controllers) > 1 and not self._sysfs.has_multipath():
            raise PathError(
                Stage.FIT,
                f"this host would see each drive of {target.nqn} once for each of its "
                f"{len(target.controllers)} controllers: load nvme_core with multipath=Y, or give the "
                "enclosure one controller",
            )
        late = too_late(
            self._settings,
            io_timeout_s=self._sysfs.io_timeout_s(),
            keep_alive_s=self._settings.keep_alive_s,
            fast_io_fail_s=self._settings.fast_io_fail_s,
        )
        if late:
            raise PathError(
                Stage.FIT,
                f"no path of this host is fit: {late}; lower nvme_core.io_timeout, or raise late_write_s of "
                "every agent",
            )

    async def _check_kernel_knows_secrets(self) -> None:
        """A kernel that does not would log the secret as an option that it does not know."""
        if self._knows_secrets:
            return
        self._knows_secrets = "dhchap_secret" in await self._kernel.options()
        if not self._knows_secrets:
            raise PathError(
                Stage.FIT,
                "this host's kernel can't show an enclosure a secret (CONFIG_NVME_HOST_AUTH): use one that "
                "can, Linux 6.0 or later, or let the enclosure ask for none",
            )

    async def _make_fit(self, target: Target, secret: str) -> None:
        """Leave no path to the target that would hold writes back for too long, and none of a lost secret."""
        for found in await asyncio.to_thread(self._sysfs.controllers, target.nqn):
            if found.is_going:
                continue
            if found.host != self._host:
                raise PathError(
                    Stage.FIT,
                    f"{found.name} leads to {target.nqn} under another host's name ({found.host}), which its "
                    f"allow-list knows apart: nvme disconnect -d {found.name}",
                )
            late = self._too_late(found, found.fast_io_fail_s)
            if late and found.is_live and not self._too_late(found, self._settings.fast_io_fail_s):
                # A path that is lost already would go by the time-out that it was lost under.
                await self._write(found, "fast_io_fail_tmo", str(self._settings.fast_io_fail_s))
                late = ""
            is_secret_old = not found.is_live and bool(secret) and found.secret not in ("", secret)
            if late or is_secret_old or found.state == "dead":
                await self._remove(found)
            elif not found.is_patient:
                await self._write(found, "ctrl_loss_tmo", _FOREVER)

    def _too_late(self, found: FoundController, fast_io_fail_s: float | None) -> str:
        return too_late(
            self._settings,
            io_timeout_s=found.io_timeout_s,
            keep_alive_s=found.keep_alive_s,
            fast_io_fail_s=fast_io_fail_s,
        )

    async def _connect_one(self, target: Target, controller: Controller, secret: str) -> str:
        """Have a path to one controller. Return its name where it was made now."""
        addresses = await self._resolved(controller)
        for found in await self._ours(target):
            if not leads_to(found, controller, addresses) or found.is_going:
                continue
            if found.is_live:
                return ""
            raise PathError(
                Stage.REACH,
                f"the path to {controller} is lost, and tried again every "
                f"{self._settings.reconnect_delay_s} s ({found.name} is {found.state})",
            )
        asked = Asked(target.nqn, controller, addresses, self._host, secret)
        if (before := await asyncio.to_thread(self._late.told, asked)) is not None:
            raise before
        settings = self._settings
        options = {
            "transport": controller.transport.value,
            "traddr": addresses[0],
            "trsvcid": controller.service,
            "nqn": target.nqn,
            "hostnqn": self._host,
            "hostid": self._host_id,
            "nr_io_queues": settings.io_queues,
            "keep_alive_tmo": settings.keep_alive_s,
            "reconnect_delay": settings.reconnect_delay_s,
            "ctrl_loss_tmo": _FOREVER,
            "fast_io_fail_tmo": settings.fast_io_fail_s,
        } | ({"dhchap_secret": secret} if secret else {})
        others = await asyncio.to_thread(self._sysfs.names)
        try:
            if secret:
                await self._check_kernel_knows_secrets()
            async with self._connecting:
                others = await asyncio.to_thread(self._sysfs.names)
                return await self._kernel.connect(
                    ",".join(f"{name}={value}" for name, value in options.items()), settings.connect_s
                )
        except KernelError as error:
            if error.code == errno.EALREADY:  # somebody has just done it: the next look finds it
                return ""
            late = None
            if error.code == errno.ETIME:
                late = await asyncio.to_thread(self._late.seen, asked, others)
            told = refusal(
                controller,
                target.nqn,
                self._host,
                error.without(others),
                has_secret=bool(secret),
                late=late,
            )
            if late is not None:
                self._late.remember(late, asked, told)
            raise told from error

    async def _attached(self, target: Target, made: list[str]) -> None:
        """Wait until the kernel has named the drives of controllers that were just made."""
        try:
            wanted = max([await self._kernel.active(name) for name in made])
        except KernelError:
            wanted = 1
        until = asyncio.get_running_loop().time() + self._settings.attach_s
        while asyncio.get_running_loop().time() < until:
            if len(await asyncio.to_thread(self._sysfs.namespaces, target.nqn)) >= wanted:
                return
            await asyncio.sleep(_LOOK_EVERY_S)

    def _namespaces(self, target: Target) -> tuple[Namespace, ...]:
        if not any(each.is_live and each.host == self._host for each in self._sysfs.controllers(target.nqn)):
            return ()
        found: dict[str, Namespace] = {}
        for namespace in self._sysfs.namespaces(target.nqn):
            if not namespace.nguid or not namespace.size_bytes:
                continue
            other = found.setdefault(namespace.nguid, namespace)
            if other is not namespace:
                raise PathError(
                    Stage.IDENTIFY,
                    f"two drives of {target.nqn} have NGUID {namespace.nguid} ({other.device}, "
                    f"{namespace.device}): give each its own, or load nvme_core with multipath=Y where they "
                    "are one",
                )
        return tuple(found.values())

    async def _state(self, target: Target, controller: Controller, found: list[FoundController]) -> PathState:
        refused = self._refusals.get((target.nqn, controller), "not connected")
        try:
            addresses = self._addresses.get(controller) or await self._resolved(controller)
        except PathError as error:
            return PathState(controller, is_live=False, detail=str(error))
        states = [
            each.state
            for each in found
            if each.host == self._host and leads_to(each, controller, addresses) and not each.is_going
        ]
        if "live" in states:
            return PathState(controller, is_live=True, detail="live")
        return PathState(controller, is_live=False, detail=states[0] if states else refused)

    async def _ours(self, target: Target) -> list[FoundController]:
        found = await asyncio.to_thread(self._sysfs.controllers, target.nqn)
        return [each for each in found if each.host == self._host]

    async def _resolved(self, controller: Controller) -> tuple[str, ...]:
        if is_address(controller.address):
            return (canonical(controller.address),)
        try:
            async with asyncio.timeout(self._settings.resolve_s):
                found = await asyncio.get_running_loop().getaddrinfo(
                    controller.address, controller.service, type=socket.SOCK_STREAM
                )
        except (OSError, UnicodeError) as error:
            why = "nobody says it in time" if isinstance(error, TimeoutError) else str(error)
            raise PathError(Stage.REACH, f"{controller} has no address: {why}") from error
        self._addresses[controller] = tuple(dict.fromkeys(canonical(str(each[4][0])) for each in found))
        return self._addresses[controller]

    async def _write(self, found: FoundController, attribute: str, text: str) -> None:
        try:
            await self._kernel.write(found.directory / attribute, text, self._settings.remove_s)
        except KernelError as error:
            raise PathError(Stage.FIT, f"{found.name} can't be given {attribute}={text}: {error}") from error

    async def _remove(self, found: FoundController) -> None:
        try:
            await self._kernel.write(found.directory / "delete_controller", "1", self._settings.remove_s)
        except KernelError as error:
            if error.code == errno.ENOENT:  # it has just gone
                return
            raise PathError(Stage.FIT, f"{found.name} can't be ended: {error}") from error
