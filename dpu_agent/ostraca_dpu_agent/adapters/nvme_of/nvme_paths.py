"""Paths to enclosures over NVMe-oF, by Linux's host: RDMA or TCP, multipath.

A path is a controller of the kernel. Each is made with timeouts that satisfy ``late_write_s``
(``timeouts``), and reconnects by itself without limit. The same rule applies to other controllers of a
subsystem, made by an earlier process or by hand. An unfit controller is adjusted, or else removed and
connected anew: a single path that delays writes breaks the bound for all. Controllers are connected in the
target's order. With the kernel's ``numa`` policy, I/O uses the first live controller.

Calls that may block in the kernel run in processes that are abandoned after a timeout (``kernel``).
``/sys`` is read on a thread.
"""

from __future__ import annotations

import asyncio
import errno
import re
import socket
import uuid
from collections import defaultdict

from ostraca_dpu_agent.adapters.nvme_of.kernel import (
    Kernel,
    KernelError,
    LinuxKernel,
    PathSettings,
    excessive_delay,
)
from ostraca_dpu_agent.adapters.nvme_of.refusals import (
    ConnectionAttempt,
    UnfinishedAttempts,
    furthest_error,
    refusal,
)
from ostraca_dpu_agent.adapters.nvme_of.sysfs import (
    FoundController,
    NvmeSysfs,
    canonical,
    is_address,
    leads_to,
)
from ostraca_fabric.errors import UsageError, shown
from ostraca_fabric.model.target import Controller, Target, check_nqn
from ostraca_fabric.ports.paths import Namespace, PathError, PathState, Stage

_SECRET = re.compile(r"DHHC-1:0[0-3]:[A-Za-z0-9+/]+=*:\Z")
"""Format from the NVMe TCP transport and base specifications, "Secret Representation". The kernel logs
malformed secrets in clear text.
"""

_POLL_S = 0.05
_FOREVER = "-1"


class NvmePaths:
    """Paths of one host to enclosures over NVMe-oF."""

    def __init__(
        self,
        host: str,
        host_id: str,
        settings: PathSettings | None = None,
        kernel: Kernel | None = None,
        sysfs: NvmeSysfs | None = None,
    ) -> None:
        """Use *host* as NQN; *host_id* is the matching UUID, constant over restarts.

        Raises UsageError if either is invalid.
        """
        self.host = check_nqn(host)
        """The NQN by which enclosures know this host."""

        try:
            self._host_id = str(uuid.UUID(host_id))
        except ValueError:
            raise UsageError(f"{shown(host_id)} is no host id: use a UUID, constant for the host") from None
        self._settings = settings or PathSettings()
        self._kernel = kernel or LinuxKernel(ask_s=self._settings.ask_s)
        self._sysfs = sysfs or NvmeSysfs()
        self._refusals: dict[tuple[str, Controller], str] = {}
        """By the target's NQN and controller: reason of the last failed connection."""

        self._addresses: dict[Controller, tuple[str, ...]] = {}
        """Last resolved addresses of controllers' names."""

        self._changing: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """By the target's NQN."""

        self._unfinished = UnfinishedAttempts(self._sysfs)
        self._knows_secrets = False
        """Whether the kernel is known to support secrets. The kernel does not answer during a connection
        attempt.
        """

        self._connecting = asyncio.Lock()
        """Serialises connection attempts, since the kernel makes one controller at a time."""

    async def connect(self, target: Target, secret: str) -> tuple[Namespace, ...]:
        """Connect as ``Paths`` specifies."""
        if secret and not _SECRET.match(secret):
            raise PathError(
                Stage.AUTHENTICATE,
                "the secret of this host has no NVMe format: use DHHC-1:00:<base64>:, as printed by `nvme "
                "gen-dhchap-key`",
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
                raise furthest_error(errors)
            if made:
                await self._wait_for_drives(target, made)
        return await self.namespaces(target)

    async def namespaces(self, target: Target) -> tuple[Namespace, ...]:
        """Return namespaces as ``Paths`` specifies.

        Without a live path a drive can't be opened, even if its device exists.
        """
        return await asyncio.to_thread(self._namespaces, target)

    async def states(self, target: Target) -> tuple[PathState, ...]:
        """Return states as ``Paths`` specifies."""
        found = await asyncio.to_thread(self._sysfs.controllers, target.nqn)
        return tuple([await self._state(target, controller, found) for controller in target.controllers])

    async def disconnect(self, target: Target) -> None:
        """Disconnect as ``Paths`` specifies.

        Paths under another host's name stay connected.
        """
        async with self._changing[target.nqn]:
            for found in await self._own_controllers(target):
                if not found.is_going:
                    await self._remove(found)
            for controller in target.controllers:
                self._refusals.pop((target.nqn, controller), None)

    def _check_host(self, target: Target) -> None:
        if len(target.controllers) > 1 and not self._sysfs.has_multipath():
            raise PathError(
                Stage.FIT,
                f"without multipath this host sees each drive of {target.nqn} {len(target.controllers)} "
                "times, once per controller: load nvme_core with multipath=Y, or list one controller only",
            )
        late = excessive_delay(
            self._settings,
            io_timeout_s=self._sysfs.io_timeout_s(),
            keep_alive_s=self._settings.keep_alive_s,
            fast_io_fail_s=self._settings.fast_io_fail_s,
        )
        if late:
            raise PathError(
                Stage.FIT,
                f"paths of this host may delay writes too long: {late}; lower nvme_core.io_timeout, or raise "
                "late_write_s of every agent",
            )

    async def _check_kernel_knows_secrets(self) -> None:
        """Raise PathError if the kernel does not support secrets.

        Such a kernel would log the secret as an unknown option.
        """
        if self._knows_secrets:
            return
        self._knows_secrets = "dhchap_secret" in await self._kernel.options()
        if not self._knows_secrets:
            raise PathError(
                Stage.FIT,
                "the kernel of this host lacks secrets (CONFIG_NVME_HOST_AUTH): use Linux 6.0 or later, or "
                "configure the enclosure without secrets",
            )

    async def _make_fit(self, target: Target, secret: str) -> None:
        """Adjust or remove paths that would delay writes or use an old secret."""
        for found in await asyncio.to_thread(self._sysfs.controllers, target.nqn):
            if found.is_going:
                continue
            if found.host != self.host:
                raise PathError(
                    Stage.FIT,
                    f"{found.name} is connected to {target.nqn} under another host NQN ({found.host}): run "
                    f"`nvme disconnect -d {found.name}`",
                )
            late = self._excessive_delay(found, found.fast_io_fail_s)
            if late and found.is_live and not self._excessive_delay(found, self._settings.fast_io_fail_s):
                # A path already lost keeps the timeout that was set at the loss.
                await self._write(found, "fast_io_fail_tmo", str(self._settings.fast_io_fail_s))
                late = ""
            is_secret_old = not found.is_live and bool(secret) and found.secret not in ("", secret)
            if late or is_secret_old or found.state == "dead":
                await self._remove(found)
            elif not found.is_patient:
                await self._write(found, "ctrl_loss_tmo", _FOREVER)

    def _excessive_delay(self, found: FoundController, fast_io_fail_s: float | None) -> str:
        return excessive_delay(
            self._settings,
            io_timeout_s=found.io_timeout_s,
            keep_alive_s=found.keep_alive_s,
            fast_io_fail_s=fast_io_fail_s,
        )

    async def _connect_one(self, target: Target, controller: Controller, secret: str) -> str:
        """Ensure a path to a controller; return its name if made now."""
        addresses = await self._resolve(controller)
        for found in await self._own_controllers(target):
            if not leads_to(found, controller, addresses) or found.is_going:
                continue
            if found.is_live:
                return ""
            raise PathError(
                Stage.REACH,
                f"the path to {controller} is lost; the kernel tries again every "
                f"{self._settings.reconnect_delay_s} s ({found.name} is {found.state})",
            )
        attempt = ConnectionAttempt(target.nqn, controller, addresses, self.host, secret)
        if (earlier := await asyncio.to_thread(self._unfinished.error_of, attempt)) is not None:
            raise earlier
        settings = self._settings
        options = {
            "transport": controller.transport.value,
            "traddr": addresses[0],
            "trsvcid": controller.service,
            "nqn": target.nqn,
            "hostnqn": self.host,
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
            if (
                error.code == errno.EALREADY
            ):  # already connected by another process; the next look finds the path
                return ""
            late = None
            if error.code == errno.ETIME:
                late = await asyncio.to_thread(self._unfinished.progress_of, attempt, others)
            refused = refusal(
                controller,
                target.nqn,
                self.host,
                error.without(others),
                has_secret=bool(secret),
                late=late,
            )
            if late is not None:
                self._unfinished.remember(late, attempt, refused)
            raise refused from error

    async def _wait_for_drives(self, target: Target, made: list[str]) -> None:
        """Wait until the kernel has named the drives of new controllers."""
        try:
            wanted = max([await self._kernel.active(name) for name in made])
        except KernelError:
            wanted = 1
        until = asyncio.get_running_loop().time() + self._settings.attach_s
        while asyncio.get_running_loop().time() < until:
            if len(await asyncio.to_thread(self._sysfs.namespaces, target.nqn)) >= wanted:
                return
            await asyncio.sleep(_POLL_S)

    def _namespaces(self, target: Target) -> tuple[Namespace, ...]:
        if not any(each.is_live and each.host == self.host for each in self._sysfs.controllers(target.nqn)):
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
                    f"{namespace.device}): assign different NGUIDs, or, for two paths to one drive, load "
                    "nvme_core with multipath=Y",
                )
        return tuple(found.values())

    async def _state(self, target: Target, controller: Controller, found: list[FoundController]) -> PathState:
        refused = self._refusals.get((target.nqn, controller), "not connected")
        try:
            addresses = self._addresses.get(controller) or await self._resolve(controller)
        except PathError as error:
            return PathState(controller, is_live=False, detail=str(error))
        states = [
            each.state
            for each in found
            if each.host == self.host and leads_to(each, controller, addresses) and not each.is_going
        ]
        if "live" in states:
            return PathState(controller, is_live=True, detail="live")
        return PathState(controller, is_live=False, detail=states[0] if states else refused)

    async def _own_controllers(self, target: Target) -> list[FoundController]:
        found = await asyncio.to_thread(self._sysfs.controllers, target.nqn)
        return [each for each in found if each.host == self.host]

    async def _resolve(self, controller: Controller) -> tuple[str, ...]:
        if is_address(controller.address):
            return (canonical(controller.address),)
        try:
            async with asyncio.timeout(self._settings.resolve_s):
                found = await asyncio.get_running_loop().getaddrinfo(
                    controller.address, controller.service, type=socket.SOCK_STREAM
                )
        except (OSError, UnicodeError) as error:
            why = "no answer in time" if isinstance(error, TimeoutError) else str(error)
            raise PathError(Stage.REACH, f"{controller} can't be resolved: {why}") from error
        self._addresses[controller] = tuple(dict.fromkeys(canonical(str(each[4][0])) for each in found))
        return self._addresses[controller]

    async def _write(self, found: FoundController, attribute: str, text: str) -> None:
        try:
            await self._kernel.write(found.directory / attribute, text, self._settings.remove_s)
        except KernelError as error:
            raise PathError(
                Stage.FIT, f"{attribute}={text} can't be set for {found.name}: {error}"
            ) from error

    async def _remove(self, found: FoundController) -> None:
        try:
            await self._kernel.write(found.directory / "delete_controller", "1", self._settings.remove_s)
        except KernelError as error:
            if error.code == errno.ENOENT:  # already gone
                return
            raise PathError(Stage.FIT, f"{found.name} can't be removed: {error}") from error
