"""One enclosure as a process: the composition root of ``ostraca serve enclosure``.

The first start joins the fabric before it exports anything, for another daemon may be this enclosure. Later
ones export at once, so that drives come back while etcd is away, and join beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ostraca.cli.serve.enclosure.hosts import read_hosts
from ostraca.cli.serve.store import opened_reports, patiently
from ostraca.cli.state import locked
from ostraca_enclosure.adapters.configfs import Configfs
from ostraca_enclosure.adapters.file_drives import FileDrives
from ostraca_enclosure.adapters.file_exporter import FileExporter
from ostraca_enclosure.adapters.made_here import MadeHere, boot_id
from ostraca_enclosure.adapters.nvme_drives import NvmeDrives
from ostraca_enclosure.adapters.nvmet import NvmetExporter
from ostraca_enclosure.choice import Asked
from ostraca_enclosure.enclosure import Enclosure
from ostraca_enclosure.steward import Place, Steward
from ostraca_enclosure.taken import Taken
from ostraca_fabric.errors import NamesakeError, OstracaError, OtherFabricError
from ostraca_fabric.ids import ID_BYTES, FabricId, StartId
from ostraca_fabric.tasks import Tasks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ostraca.cli.serve.enclosure.settings import EnclosureDaemonSettings
    from ostraca.cli.serve.state_directory import StateDirectory
    from ostraca_enclosure.plan import HostSecrets
    from ostraca_enclosure.ports import Exporter, Inventory
    from ostraca_fabric.adapters.etcd.reports import EtcdReports
    from ostraca_fabric.target import Target

log = logging.getLogger(__name__)

NVMET = Path("/sys/kernel/config/nvmet")
PROC = Path("/proc")

_LOOK_AGAIN_S = 0.25
_LEASES_WAITED = 2


class EnclosureDaemon:
    """One enclosure. ``start`` it, then ``stop`` it; it is used once."""

    def __init__(self, settings: EnclosureDaemonSettings, state: StateDirectory) -> None:
        """Read what the state directory and the file of hosts say; nothing else happens before ``start``.

        Raises FormatError and UsageError that say what is wrong with a file or a setting.
        """
        self.id = settings.enclosure_id()
        self.target = settings.target()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Gets the error for which this can't go on, if there is one."""

        self._settings = settings
        self._state = state
        self._start = StartId(secrets.token_bytes(ID_BYTES))
        self._tasks = Tasks("an enclosure's daemon")
        self._reports: EtcdReports | None = None
        self._locks = contextlib.ExitStack()
        directory = settings.directory()
        self._files = FileDrives(directory) if directory is not None else None
        self._directory = directory
        hosts = self._read_hosts()
        self.enclosure = Enclosure(self._made_steward(hosts), settings, time.monotonic)

    @property
    def secret_files(self) -> tuple[Path, ...]:
        """The files that ``reread`` reads."""
        return (Path(self._settings.hosts_file),) if self._settings.hosts_file else ()

    def reread(self) -> None:
        """Read the file of hosts again, and let in whom it lists. Raises FormatError, and then all stays as
        it was.
        """
        self.enclosure.use_hosts(self._read_hosts())

    async def start(self) -> None:
        """Join the fabric and export; wait for etcd as long as it is away, the first time.

        Raises an OstracaError that says what to do: there is no room for drives; etcd has another fabric, or
        none; a daemon of this enclosure runs elsewhere. ``stop`` comes next then, too.
        """
        settings = self._settings
        if (wanted := settings.wanted_fabric()) is not None:
            self._state.check_fabric(wanted)
        if self._files is not None and self._directory is not None:
            self._directory.mkdir(parents=True, exist_ok=True)
            lock = locked(
                self._directory,
                f"another process works on {self._directory}: stop it, or take another --files",
            )
            self._locks.enter_context(lock)
            await asyncio.to_thread(self._files.prepare, settings.file_drives, settings.file_drive_bytes)
        if self._state.start is None:
            await self._join()
            await self.enclosure.start()
        else:
            await self.enclosure.start()
            self._tasks.spawn(self._join_meanwhile())

    async def stop(self) -> None:
        """Take no further turn, take the report back, close everything. Exports stay, unless ``withdraw``."""
        await self._tasks.stop()
        await self.enclosure.stop(withdraw=self._settings.withdraw)
        if self._reports is not None:
            await self._reports.close()
        self._locks.close()

    async def _join_meanwhile(self) -> None:
        try:
            await self._join()
        except OstracaError as error:
            if not self.failed.done():
                self.failed.set_exception(error)

    async def _join(self) -> None:
        """Put the report into the fabric, and see to it that it is this one's, and nobody else is it."""
        settings = self._settings
        wanted = settings.wanted_fabric()
        try:
            fabric, reports = await patiently(
                "join the fabric", lambda: opened_reports(settings.etcd, wanted or self._state.fabric)
            )
        except OtherFabricError as error:
            if wanted is None:  # then nothing but the directory says which fabric it is to be
                self._state.check_fabric(FabricId(error.fabric))
            raise
        self._reports = reports
        self._state.check_fabric(fabric)
        await patiently("look who else is this enclosure", lambda: self._await_namesake(reports))
        reports.succeed(self._state.start, self.enclosure.report_lost)
        self._state.remember(fabric=fabric, start=self._start)
        self.enclosure.report_to(reports)

    async def _await_namesake(self, reports: EtcdReports) -> None:
        """Wait until no other process is this enclosure. Raises NamesakeError when one goes on to be.

        The one that had this state directory before is gone, whatever its lease says.
        """
        until_s = time.monotonic() + _LEASES_WAITED * self._settings.etcd.lease_ttl_s
        while (there := await reports.find(self.id)) is not None and there.start != self._state.start:
            if time.monotonic() >= until_s:
                raise NamesakeError(
                    f"enclosure {self.id} has a daemon already, at {', '.join(map(str, there.controllers))}: "
                    "give each enclosure an id of its own, and keep its state directory with it"
                )
            await asyncio.sleep(_LOOK_AGAIN_S)

    def _read_hosts(self) -> Mapping[str, HostSecrets]:
        if not self._settings.hosts_file:
            return {}
        return read_hosts(Path(self._settings.hosts_file), is_files=self.target.is_files)

    def _made_steward(self, hosts: Mapping[str, HostSecrets]) -> Steward:
        settings = self._settings
        if not hosts:
            log.warning("Every host may connect: list those that may with --hosts FILE")
        inventory: Inventory = self._files or NvmeDrives(
            time.monotonic, health_every_s=settings.health_every_s
        )
        steward = Steward(
            Place(self.id, self._start, self.target.nqn, self.target.controllers),
            Asked(settings.drives, settings.force, settings.fit),
            inventory,
            _exporter(self.target, self._state.path, reservations=settings.reservations),
            Taken(self._state.path),
            time.time,
        )
        steward.use_hosts(hosts)
        return steward


def _exporter(target: Target, state: Path, *, reservations: bool) -> Exporter:
    if target.is_files:
        return FileExporter(Path(target.controllers[0].address), target.nqn)
    made = MadeHere(state, boot_id(PROC))
    return NvmetExporter(Configfs(NVMET), target.nqn, made, reservations=reservations)
