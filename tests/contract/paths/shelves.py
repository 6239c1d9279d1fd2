"""Enclosures for the contract of paths: one on files, one over a simulated NVMe-oF."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.contract.paths.paths_contract import DRIVE_BYTES, NGUIDS, NQN
from tests.contract.paths.simulated_nvme import SimulatedNvme, Subsystem
from tests.support.nvme_tcp.tcp_target import TcpTarget, free_controller

from ostraca_dpu_agent.adapters.nvme_of.file_paths import FilePaths
from ostraca_dpu_agent.adapters.nvme_of.kernel import PathSettings
from ostraca_dpu_agent.adapters.nvme_of.nvme_paths import NvmePaths
from ostraca_dpu_agent.adapters.nvme_of.sysfs import NvmeSysfs
from ostraca_dpu_agent.adapters.nvme_tcp.tcp_paths import TcpPaths
from ostraca_fabric.drives.file_exports import EXPORTS_FILE, FileExports, write_exports
from ostraca_fabric.model.target import Controller, TargetTransport

HOST_ID = "6f2b2a5e-1c0b-4f0a-9d6e-2f8a1b3c4d5e"


class FileShelf:
    """An enclosure on files; a second directory of it is a second path."""

    def __init__(self, directory: Path) -> None:
        self._directories = (directory / "a", directory / "b")
        self.controllers = (
            Controller(TargetTransport.FILES, str(self._directories[0])),
            Controller(TargetTransport.FILES, str(self._directories[1])),
        )
        self._directories[0].mkdir()
        self._hosts: Mapping[str, str] = {}
        self.drives = {nguid: self._directories[0] / f"drive-{nguid[:2]}.img" for nguid in NGUIDS}
        for path in self.drives.values():
            with path.open("wb") as file:
                file.truncate(DRIVE_BYTES)
        self.come_back()

    @property
    def exports(self) -> Path:
        return self._directories[0] / EXPORTS_FILE

    def paths(self, host: str) -> FilePaths:
        return FilePaths(host)

    def allow(self, hosts: Mapping[str, str]) -> None:
        self._hosts = hosts
        self.come_back()

    def leave(self) -> None:
        self.exports.unlink()

    def come_back(self) -> None:
        write_exports(self._directories[0], FileExports(NQN, self.drives, self._hosts))

    def add_path(self) -> None:
        self._directories[1].symlink_to(self._directories[0])


class TcpShelf:
    """An enclosure over the user-space target, with the user-space initiator."""

    def __init__(self, directory: Path) -> None:
        self.target = TcpTarget(directory, NQN, dict.fromkeys(NGUIDS, DRIVE_BYTES))
        self.controllers = (self.target.controller, free_controller())
        self._made: list[TcpPaths] = []

    def paths(self, host: str) -> TcpPaths:
        made = TcpPaths(host, HOST_ID)
        self._made.append(made)
        return made

    def allow(self, hosts: Mapping[str, str]) -> None:
        self.target.allow(frozenset(hosts))

    def leave(self) -> None:
        self.target.stop()

    def come_back(self) -> None:
        self.target.start()

    def add_path(self) -> None:
        self.target.server.listen(self.controllers[1])

    def close(self) -> None:
        for paths in self._made:
            paths.close()
        self.target.stop()


class NvmeShelf:
    """An enclosure over NVMe-oF, and a host, whose kernel is simulated."""

    def __init__(
        self,
        directory: Path,
        transport: TargetTransport = TargetTransport.TCP,
        *,
        kernel: SimulatedNvme | None = None,
    ) -> None:
        self.kernel = kernel or SimulatedNvme(directory)
        self.controllers = (
            Controller(transport, "192.0.2.1", 4420),
            Controller(TargetTransport.TCP, "fd00::1", 4421),
        )
        self.subsystem = Subsystem(
            NQN,
            {1: (f"nguid={NGUIDS[0]}", DRIVE_BYTES), 2: (f"uuid={NGUIDS[1]}", DRIVE_BYTES)},
        )
        self.port = (transport.value, "192.0.2.1", "4420")
        self.come_back()

    def paths(self, host: str, settings: PathSettings | None = None) -> NvmePaths:
        return NvmePaths(host, HOST_ID, settings, self.kernel, NvmeSysfs(self.kernel.sysfs))

    def allow(self, hosts: Mapping[str, str]) -> None:
        self.subsystem.hosts = hosts

    def leave(self) -> None:
        del self.kernel.ports[self.port]
        self.kernel.lose(self.port)

    def come_back(self) -> None:
        self.kernel.ports[self.port] = [self.subsystem]
        self.kernel.regain(self.port)

    def add_path(self) -> None:
        self.kernel.ports["tcp", "fd00::1", "4421"] = [self.subsystem]
