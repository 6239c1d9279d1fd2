"""Process of an admin service: composition root of ``ostraca serve admin``."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from ostraca_admin.agent_queries import AgentQueries
from ostraca_admin.api.access import Tokens, read_tokens
from ostraca_admin.api.app import build_app
from ostraca_admin.api.context import Context
from ostraca_admin.api.limits import BodyLimit
from ostraca_admin.api.probes import ProbedApp, Readiness
from ostraca_admin.audit import Audit, Retention
from ostraca_admin.enclosure_service import EnclosureService
from ostraca_admin.override_service import OverrideService
from ostraca_admin.remote_agents import RemoteAgents
from ostraca_admin.report_follower import ReportFollower
from ostraca_admin.tenant_service import TenantService
from ostraca_admin.workflow_runner import WorkflowRunner
from ostraca_admin.workflows.erase import ErasureSteps
from ostraca_admin.workflows.steps import Steps
from ostraca_cli.commands.serve.admin_settings import AdminSettings
from ostraca_cli.commands.serve.daemon_settings import named_fabric
from ostraca_cli.commands.serve.store import open_membership, retry_while_away
from ostraca_cli.composition.etcd_options import etcd_keys, etcd_settings
from ostraca_cli.composition.secret_files import read_access, read_secret
from ostraca_fabric.connection import SOCKETS, SocketNetwork
from ostraca_fabric.connection.network import listen, real_address
from ostraca_fabric.errors import FormatError, UsageError
from ostraca_fabric.membership.etcd.admin_records import EtcdRecords
from ostraca_fabric.model.ids import ID_BYTES
from ostraca_fabric.model.volume import VolumeRecord
from ostraca_fabric.runtime.tasks import Tasks
from ostraca_fabric.runtime.version import VERSION
from ostraca_fabric.sockets.tls import Tls, TlsFiles
from ostraca_fabric.telemetry.http.server import LoopServer
from ostraca_fabric.wire.address import TcpAddress, is_loopback, parse_address

_GRACE_S = 3


class AdminDaemon:
    """Admin service: call ``start``, then ``stop``; single use."""

    def __init__(self, settings: AdminSettings) -> None:
        """Read the files of secrets; everything else waits for ``start``.

        Raises FormatError and UsageError with the problem.
        """
        self.name = settings.name()
        self._settings = settings
        self._address = _address(settings)
        self._token = self._read_token()
        self._tokens = self._read_people()
        self._network = self._made_network()
        self._server: LoopServer | None = None
        self._readiness = Readiness(time.monotonic)
        self._front = ProbedApp(
            self._readiness,
            connections=lambda: 0 if self._server is None else self._server.connections,
            connections_max=settings.limits.connections_max,
        )
        self._tasks = Tasks("the admin service")
        self._closing = asyncio.Event()
        self._stack = AsyncExitStack()
        self.url = ""

    @property
    def secret_files(self) -> tuple[Path, ...]:
        """Return the files read by ``reread``."""
        settings = self._settings
        tls = (settings.tls.cert, settings.tls.key)
        return tuple(Path(each) for each in (settings.people_file, settings.tokens_file, *tls) if each)

    def reread(self) -> None:
        """Read the tokens and the certificate again.

        Raises FormatError; then everything stays unchanged.
        """
        people, token = self._read_people(), self._read_token()
        self._tokens, self._token = people, token
        if self._server is not None:
            try:
                self._server.take_certificate()
            except OSError as error:
                raise FormatError(f"unusable certificate: {error}") from error

    async def start(self) -> None:
        """Serve the health pages, join the fabric, and serve the API; waits while etcd is away.

        Raises an OstracaError with advice.
        """
        settings = self._settings
        self._listen()
        fabric, membership = await retry_while_away(
            "find the fabric",
            lambda: open_membership(settings.etcd, named_fabric(settings.fabric), None),
            say=self._say_wait,
        )
        self._stack.push_async_callback(membership.close)
        records = EtcdRecords(
            fabric,
            etcd_settings(settings.etcd),
            keys=etcd_keys(settings.etcd),
            dice=random.Random(),  # noqa: S311 (waits are no secret)
            lease_ttl_s=settings.etcd.lease_ttl_s,
        )
        self._stack.push_async_callback(records.close)

        async def volumes() -> Sequence[VolumeRecord]:
            return await anext(membership.volume_changes())

        agents = RemoteAgents(
            lambda: membership.map,
            name=f"admin {self.name}:{os.getpid()}",
            token=lambda: self._token,
            network=self._network,
        )
        steps = Steps(
            records,
            membership,
            AgentQueries(membership, agents),
            report_of=records.find,
            volumes=volumes,
            new_format_id=lambda: secrets.token_hex(ID_BYTES),
            erasure=ErasureSteps(records, membership, agents, clock=time.monotonic),
        )
        runner = WorkflowRunner(records, steps, name=self.name, unix_s=time.time)
        audit = Audit(time.time, _new_id)
        overrides = OverrideService(records, audit)
        enclosures = EnclosureService(records, audit)
        context = Context(
            enclosures=enclosures,
            overrides=overrides,
            tenants=TenantService(records, overrides, audit, volumes=volumes),
            records=records,
            membership=membership,
            agents=agents,
            tokens=lambda: self._tokens,
            report_of=records.find,
            volumes=volumes,
            notify_runner=runner.wake,
            closing=self._closing,
        )
        limits = settings.limits
        retention = Retention(records, audit_max=limits.audit_max, operations_max=limits.operations_max)
        self._tasks.spawn(runner.run())
        self._tasks.spawn(retention.run())
        if settings.follows_reports:
            self._tasks.spawn(ReportFollower(records.reports, enclosures, audit, notify=runner.wake).run())
        api = build_app(context, version=VERSION)
        self._front.app = BodyLimit(api, body_bytes_max=limits.body_bytes_max)
        self._readiness.ask = partial(records.get_many, [])

    async def stop(self) -> None:
        """Answer open requests, leave long operations to other services, close everything."""
        self._closing.set()
        if self._server is not None:
            await self._server.stop()
        await self._tasks.stop()
        await self._stack.aclose()

    def _listen(self) -> None:
        settings, tls = self._settings, self._settings.tls
        listening = listen(self._address)
        scheme = "https" if tls.cert else "http"
        self.url = str(real_address(self._address, listening)).replace("tcp://", f"{scheme}://", 1)
        self._server = LoopServer(
            self._front,  # type: ignore[arg-type]  # starlette's names of ASGI types
            head_bytes_max=settings.limits.head_bytes_max,
            grace_s=_GRACE_S,
            certificate=(Path(tls.cert), Path(tls.key)) if tls.cert else None,
        )
        self._tasks.spawn(self._server.run(listening))

    def _say_wait(self, problem: str) -> None:
        self._readiness.wait = problem

    def _made_network(self) -> SocketNetwork:
        tls = self._settings.tls
        if not tls.cert:
            return SOCKETS
        files = TlsFiles(Path(tls.ca), Path(tls.cert), Path(tls.key))
        return SocketNetwork(Tls(files, peer_name=tls.peer_name))

    def _read_token(self) -> str:
        tokens = read_access(Path(self._settings.tokens_file), os.getuid()).fabric_tokens
        return tokens[0] if tokens else ""

    def _read_people(self) -> Tokens:
        file = Path(self._settings.people_file)
        try:
            return read_tokens(read_secret(file).decode())
        except (UsageError, UnicodeDecodeError) as error:
            raise FormatError(f"{file} is no valid file of people: {error}") from error


def _new_id() -> str:
    """Return a new id; ids sort by creation time."""
    return f"{time.time_ns() // 1_000_000:012x}-{secrets.token_hex(4)}"


def _address(settings: AdminSettings) -> TcpAddress:
    address = parse_address(f"tcp://{settings.listen}")
    assert isinstance(address, TcpAddress)
    if not settings.tls.cert and not is_loopback(address.host):
        raise UsageError(
            f"listen address {settings.listen} without TLS would expose tokens: give tls.cert, tls.key and "
            "tls.ca, or listen on loopback"
        )
    return address
