"""Exporter of file drives through the target in this process."""

from __future__ import annotations

from collections.abc import Mapping

from ostraca_enclosure.adapters.nvme_tcp.server import TargetServer
from ostraca_enclosure.plan import (
    AddListener,
    AddNamespace,
    AllowAnyHost,
    AllowHost,
    CreateSubsystem,
    DenyHost,
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


class TcpExporter:
    """Exports of a ``TargetServer``. Implements ``ports.Exporter``."""

    def __init__(self, server: TargetServer) -> None:
        """Export through *server*, which belongs to the caller."""
        self._server = server
        self._subsystem = server.subsystem

    def observe(self, hosts: Mapping[str, HostSecrets]) -> PresentExports:
        """Return the present exports. Hosts with secrets are never admitted."""
        del hosts
        subsystem = self._subsystem
        return PresentExports(
            exists=subsystem.exists,
            controllers=self._server.controllers,
            namespaces=tuple(
                ExportedNamespace(slot, file.export.nguid, file.export.device)
                for slot, file in sorted(subsystem.files.items())
            ),
            hosts=subsystem.hosts,
            allows_any_host=subsystem.allows_any_host,
        )

    def apply(self, step: Step) -> None:  # noqa: C901 (a case for each step)
        """Apply a step."""
        subsystem, hosts = self._subsystem, self._subsystem.hosts
        match step:
            case CreateSubsystem():
                subsystem.exists = True
            case RequireAllowList():
                subsystem.admit(hosts, allows_any_host=False)
            case AllowAnyHost():
                subsystem.admit(frozenset(), allows_any_host=True)
            case AllowHost(host, secrets):
                if secrets != HostSecrets():
                    raise ExportError(no_secrets(host))
                subsystem.admit(hosts | {host}, allows_any_host=False)
            case DenyHost(host):
                subsystem.admit(hosts - {host}, allows_any_host=subsystem.allows_any_host)
            case AddNamespace(export):
                subsystem.add(export)
            case RemoveNamespace(slot):
                subsystem.remove(slot)
            case AddListener(controller):
                self._server.listen(controller)
            case RemoveListener(controller):
                self._server.unlisten(controller)
            case RemoveSubsystem():
                subsystem.clear()


def no_secrets(host: str) -> str:
    """Return the refusal of a host with a secret."""
    return (
        f"host {host} has a secret, and the user-space target has no DH-HMAC-CHAP: list the host without "
        "secrets, or set target to nvmet"
    )
