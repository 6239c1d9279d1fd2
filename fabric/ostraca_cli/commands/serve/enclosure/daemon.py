"""Process of an enclosure: composition root of ``ostraca serve enclosure``.

The first start joins the fabric before exporting, because another daemon may have the same enclosure id.
Later starts export at once and join meanwhile, so that drives return while etcd is away.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Mapping
from pathlib import Path

from ostraca_cli.commands.serve.enclosure.hosts import read_hosts
from ostraca_cli.commands.serve.enclosure.settings import USERSPACE, EnclosureDaemonSettings
from ostraca_cli.commands.serve.state_directory import StateDirectory
from ostraca_cli.commands.serve.store import await_namesake, open_reports, retry_while_away
from ostraca_cli.composition.state import lock_directory
from ostraca_enclosure.adapters.file_drives import FileDrives, FileExporter
from ostraca_enclosure.adapters.nvme_drives import NvmeDrives
from ostraca_enclosure.adapters.nvme_tcp.server import TargetServer
from ostraca_enclosure.adapters.nvme_tcp.subsystem import Subsystem
from ostraca_enclosure.adapters.nvme_tcp.tcp_exporter import TcpExporter, no_secrets
from ostraca_enclosure.adapters.nvmet import Configfs, NvmetExporter
from ostraca_enclosure.controller import EnclosureIdentity, ExportController
from ostraca_enclosure.drives import SelectionSettings
from ostraca_enclosure.enclosure import Enclosure
from ostraca_enclosure.plan import HostSecrets
from ostraca_enclosure.ports import Exporter, Inventory
from ostraca_enclosure.state_files import ExportHistory, NvmetRecord, boot_id
from ostraca_fabric.errors import FormatError, NamesakeError, OstracaError, OtherFabricError
from ostraca_fabric.membership.etcd.admin_records import EtcdReports
from ostraca_fabric.model.ids import ID_BYTES, FabricId, StartId
from ostraca_fabric.runtime.atomic_files import make_private_folder
from ostraca_fabric.runtime.tasks import Tasks

log = logging.getLogger(__name__)

NVMET = Path("/sys/kernel/config/nvmet")
PROC = Path("/proc")


class EnclosureDaemon:
    """Enclosure process: call ``start``, then ``stop``; single use."""

    def __init__(self, settings: EnclosureDaemonSettings, state: StateDirectory) -> None:
        """Read the state directory and the file of hosts; the rest waits for ``start``.

        Raises FormatError and UsageError with the problem of a file or a setting.
        """
        self.id = settings.enclosure_id()
        self.target = settings.export_target()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Future of the fatal error, if any."""

        self._settings = settings
        self._state = state
        self._start = StartId(secrets.token_bytes(ID_BYTES))
        self._tasks = Tasks("the enclosure daemon")
        self._reports: EtcdReports | None = None
        self._locks = contextlib.ExitStack()
        directory = settings.directory()
        self._files = FileDrives(directory) if directory is not None else None
        self._directory = directory
        self._server: TargetServer | None = None
        hosts = self._read_hosts()
        target = "files" if self.target.is_files else settings.target
        self.enclosure = Enclosure(self._make_controller(hosts), settings, time.monotonic, target=target)

    @property
    def secret_files(self) -> tuple[Path, ...]:
        """Return the files read by ``reread``."""
        return (Path(self._settings.hosts_file),) if self._settings.hosts_file else ()

    def reread(self) -> None:
        """Read the file of hosts again, and apply the new list.

        Raises FormatError; then everything stays unchanged.
        """
        self.enclosure.use_hosts(self._read_hosts())

    async def start(self) -> None:
        """Join the fabric and export; the first start waits while etcd is away.

        Raises an OstracaError with advice: no space for drives; etcd has no fabric or another fabric; a
        daemon of this enclosure runs elsewhere. The caller calls ``stop`` next in every case.
        """
        settings = self._settings
        if (wanted := settings.wanted_fabric()) is not None:
            self._state.check_fabric(wanted)
        if self._files is not None and self._directory is not None:
            make_private_folder(self._directory)
            lock = lock_directory(
                self._directory,
                f"another process uses {self._directory}: stop the process, or give another --files",
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
        """Stop the work, withdraw the report, close everything.

        Exports stay, unless ``withdraw`` is set.
        """
        await self._tasks.stop()
        await self.enclosure.stop(withdraw=self._settings.withdraw)
        if self._reports is not None:
            await self._reports.close()
        if self._server is not None:
            await asyncio.to_thread(self._server.close)
        self._locks.close()

    async def _join_meanwhile(self) -> None:
        try:
            await self._join()
        except OstracaError as error:
            if not self.failed.done():
                self.failed.set_exception(error)

    async def _join(self) -> None:
        """Store the report in the fabric, once no other process has this enclosure's id."""
        settings = self._settings
        wanted = settings.wanted_fabric()
        try:
            fabric, reports = await retry_while_away(
                "join the fabric", lambda: open_reports(settings.etcd, wanted or self._state.fabric)
            )
        except OtherFabricError as error:
            if wanted is None:  # only the state directory names the expected fabric
                self._state.check_fabric(FabricId(error.fabric))
            raise
        self._reports = reports
        self._state.check_fabric(fabric)
        await retry_while_away(
            "check for another daemon of this enclosure", lambda: self._await_namesake(reports)
        )
        reports.succeed(self._state.start, self.enclosure.report_lost)
        self._state.remember(fabric=fabric, start=self._start)
        self.enclosure.report_to(reports)

    async def _await_namesake(self, reports: EtcdReports) -> None:
        """Wait until no other process has this enclosure's id; raises NamesakeError if one keeps the id."""
        namesake = await await_namesake(lambda: reports.find(self.id), self._state.start, self._settings.etcd)
        if namesake is not None:
            raise NamesakeError(
                f"enclosure {self.id} already has a daemon, at {', '.join(map(str, namesake.controllers))}: "
                "give each enclosure its own id, and keep its state directory"
            )

    def _read_hosts(self) -> Mapping[str, HostSecrets]:
        if not self._settings.hosts_file:
            return {}
        path = Path(self._settings.hosts_file)
        hosts = read_hosts(path, is_files=self.target.is_files)
        if self._settings.target == USERSPACE:
            for host, secrets in hosts.items():
                if secrets.host:
                    raise FormatError(f"{path}: {no_secrets(host)}")
        return hosts

    def _make_controller(self, hosts: Mapping[str, HostSecrets]) -> ExportController:
        settings = self._settings
        if not hosts:
            log.warning("Every host may connect: list the admitted hosts with --hosts FILE")
        inventory: Inventory = self._files or NvmeDrives(
            time.monotonic, health_every_s=settings.health_every_s
        )
        controller = ExportController(
            EnclosureIdentity(self.id, self._start, self.target.nqn, self.target.controllers),
            SelectionSettings(settings.drives, settings.force, settings.fit),
            inventory,
            self._exporter(),
            ExportHistory(self._state.path),
            time.time,
        )
        controller.use_hosts(hosts)
        return controller

    def _exporter(self) -> Exporter:
        target = self.target
        if target.is_files:
            return FileExporter(Path(target.controllers[0].address), target.nqn)
        if self._settings.target == USERSPACE:
            self._server = TargetServer(Subsystem(target.nqn))
            return TcpExporter(self._server)
        record = NvmetRecord(self._state.path, boot_id(PROC))
        return NvmetExporter(Configfs(NVMET), target.nqn, record, reservations=self._settings.reservations)
