"""A real user-space target on loopback, on drives that are files."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

from ostraca_enclosure.adapters.nvme_tcp.server import TargetServer
from ostraca_enclosure.adapters.nvme_tcp.subsystem import Subsystem, boot_s
from ostraca_enclosure.plan import Export
from ostraca_fabric.model.target import Controller, TargetTransport


def free_controller() -> Controller:
    """Return an address of loopback whose port is free now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return Controller(TargetTransport.TCP, "127.0.0.1", listener.getsockname()[1])


class TcpTarget:
    """A target that can go away and come back, as when its process is started again."""

    def __init__(
        self,
        directory: Path,
        nqn: str,
        drives: Mapping[str, int],
        *,
        clock: Callable[[], float] = boot_s,
    ) -> None:
        """Make drives of some sizes, by NGUID."""
        self.nqn = nqn
        self.controller = free_controller()
        self.hosts: frozenset[str] = frozenset()
        self.files = {nguid: directory / f"drive-{nguid[:4]}.img" for nguid in drives}
        for nguid, path in self.files.items():
            with path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, drives[nguid])
        self._clock = clock
        self.start()

    def start(self) -> None:
        self.subsystem = Subsystem(self.nqn, self._clock)
        self.subsystem.exists = True
        for nguid, path in self.files.items():
            self.subsystem.add(Export(nguid, str(path)))
        self.allow(self.hosts)
        self.server = TargetServer(self.subsystem)
        self.server.listen(self.controller)

    def allow(self, hosts: frozenset[str]) -> None:
        self.hosts = hosts
        self.subsystem.admit(hosts, allows_any_host=not hosts)

    def stop(self) -> None:
        self.server.close()
