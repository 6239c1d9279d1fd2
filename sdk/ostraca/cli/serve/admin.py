"""One admin service as a process of its own: the composition root of ``ostraca serve admin``."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ostraca.cli.etcd_place import etcd_keys, etcd_settings
from ostraca.cli.serve.daemon_settings import named_fabric
from ostraca.cli.serve.secret_files import read_access, read_secret
from ostraca.cli.serve.store import opened, patiently
from ostraca_fabric import record_keys
from ostraca_fabric.adapters.asked_agents import AskedAgents
from ostraca_fabric.adapters.etcd.admin_records import EtcdRecords
from ostraca_fabric.adapters.etcd.records import decode_report
from ostraca_fabric.adapters.http.on_loop import LoopServer
from ostraca_fabric.admin.api.access import Tokens, read_tokens
from ostraca_fabric.admin.api.app import made_app
from ostraca_fabric.admin.api.context import Context
from ostraca_fabric.admin.api.limits import BodyLimit
from ostraca_fabric.admin.asking import Asking
from ostraca_fabric.admin.audit import Audit
from ostraca_fabric.admin.desk import Desk
from ostraca_fabric.admin.erasing import Erasing
from ostraca_fabric.admin.ruling_desk import RulingDesk
from ostraca_fabric.admin.steps import Steps
from ostraca_fabric.admin.tenant_desk import TenantDesk
from ostraca_fabric.admin.tidying import Tidying
from ostraca_fabric.admin.worker import Worker
from ostraca_fabric.connection import SOCKETS, SocketNetwork
from ostraca_fabric.connection.listening import listen, real_address
from ostraca_fabric.errors import FormatError, UsageError
from ostraca_fabric.ids import ID_BYTES, EnclosureId
from ostraca_fabric.tasks import Tasks
from ostraca_fabric.tls import Tls, TlsFiles
from ostraca_fabric.version import VERSION
from ostraca_fabric.wire.address import TcpAddress, is_loopback, parse_address

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from ostraca.cli.serve.admin_settings import AdminSettings
    from ostraca_fabric.adapters.etcd.membership import EtcdMembership
    from ostraca_fabric.inventory import EnclosureReport
    from ostraca_fabric.volume import VolumeRecord

log = logging.getLogger(__name__)

_GRACE_S = 3


class AdminDaemon:
    """One admin service. ``start`` it, then ``stop`` it; it is used once."""

    def __init__(self, settings: AdminSettings) -> None:
        """Read the files of secrets; nothing else happens before ``start``.

        Raises FormatError and UsageError that say what is wrong.
        """
        self.name = settings.name()
        self._settings = settings
        self._address = _address(settings)
        self._token = self._read_token()
        self._tokens = self._read_people()
        self._network = self._made_network()
        self._membership: EtcdMembership | None = None
        self._records: EtcdRecords | None = None
        self._server: LoopServer | None = None
        self._tasks = Tasks("the admin service")
        self._closing = asyncio.Event()
        self.url = ""

    @property
    def secret_files(self) -> tuple[Path, ...]:
        """The files that ``reread`` reads."""
        return (Path(self._settings.people_file), Path(self._settings.tokens_file))

    def reread(self) -> None:
        """Read the tokens again, and the certificate. Raises FormatError, and then all stays as it was."""
        people, token = self._read_people(), self._read_token()
        self._tokens, self._token = people, token
        if self._server is not None:
            try:
                self._server.take_certificate()
            except OSError as error:
                raise FormatError(f"the certificate can't be used: {error}") from error

    async def start(self) -> None:
        """Join the fabric and serve; wait for etcd as long as it is away.

        Raises an OstracaError that says what to do.
        """
        settings = self._settings
        listening = listen(self._address)
        try:
            fabric, membership = await patiently(
                "find the fabric", lambda: opened(settings.etcd, named_fabric(settings.fabric), None)
            )
        except BaseException:
            listening.close()
            raise
        self._membership = membership
        dice = random.Random()  # noqa: S311 (waits are no secret)
        self._records = records = EtcdRecords(
            fabric,
            etcd_settings(settings.etcd),
            keys=etcd_keys(settings.etcd),
            dice=dice,
            lease_ttl_s=settings.etcd.lease_ttl_s,
        )
        hands = AskedAgents(
            lambda: membership.map,
            name=f"admin {self.name}:{os.getpid()}",
            token=lambda: self._token,
            network=self._network,
        )
        steps = Steps(
            records,
            membership,
            Asking(membership, hands),
            report_of=self._report_of,
            volumes=self._volumes,
            new_format_id=lambda: secrets.token_hex(ID_BYTES),
            erasing=Erasing(membership, hands, clock=time.monotonic),
        )
        worker = Worker(records, steps, name=self.name, unix_s=time.time)
        audit = Audit(time.time, _new_id)
        rulings = RulingDesk(records, audit)
        context = Context(
            desk=Desk(records, audit),
            rulings=rulings,
            tenants=TenantDesk(records, rulings, audit, volumes=self._volumes),
            records=records,
            membership=membership,
            hands=hands,
            tokens=lambda: self._tokens,
            report_of=self._report_of,
            volumes=self._volumes,
            work_was_written=worker.look_now,
            closing=self._closing,
        )
        limits = settings.limits
        tidying = Tidying(records, audit_max=limits.audit_max, operations_max=limits.operations_max)
        self._tasks.spawn(worker.run())
        self._tasks.spawn(tidying.run())
        self._serve(context, listening)

    async def stop(self) -> None:
        """Answer what is under way, leave long work to other admins, close everything."""
        self._closing.set()
        if self._server is not None:
            await self._server.stop()
        await self._tasks.stop()
        if self._records is not None:
            await self._records.close()
        if self._membership is not None:
            await self._membership.close()

    def _serve(self, context: Context, listening: socket.socket) -> None:
        settings, tls = self._settings, self._settings.tls
        scheme = "https" if tls.cert else "http"
        self.url = str(real_address(self._address, listening)).replace("tcp://", f"{scheme}://", 1)
        app = made_app(context, version=VERSION)
        self._server = LoopServer(
            BodyLimit(app, body_bytes_max=settings.limits.body_bytes_max),  # type: ignore[arg-type]  # starlette's ASGI
            connections_max=settings.limits.connections_max,
            head_bytes_max=settings.limits.head_bytes_max,
            grace_s=_GRACE_S,
            certificate=(Path(tls.cert), Path(tls.key)) if tls.cert else None,
        )
        self._tasks.spawn(self._server.run(listening))

    async def _report_of(self, enclosure: EnclosureId) -> EnclosureReport | None:
        assert self._records is not None
        record = await self._records.get(record_keys.report(enclosure))
        return None if record is None else decode_report(record.value)

    async def _volumes(self) -> Sequence[VolumeRecord]:
        assert self._membership is not None
        return await anext(self._membership.volume_changes())

    def _made_network(self) -> SocketNetwork:
        tls = self._settings.tls
        return (
            SocketNetwork(Tls(TlsFiles(Path(tls.ca), Path(tls.cert), Path(tls.key)))) if tls.cert else SOCKETS
        )

    def _read_token(self) -> str:
        tokens = read_access(Path(self._settings.tokens_file), os.getuid()).fabric_tokens
        return tokens[0] if tokens else ""

    def _read_people(self) -> Tokens:
        file = Path(self._settings.people_file)
        try:
            return read_tokens(read_secret(file).decode())
        except (UsageError, UnicodeDecodeError) as error:
            raise FormatError(f"{file} is no file of people: {error}") from error


def _new_id() -> str:
    """Return an id that sorts by the time it was made."""
    return f"{time.time_ns() // 1_000_000:012x}-{secrets.token_hex(4)}"


def _address(settings: AdminSettings) -> TcpAddress:
    address = parse_address(f"tcp://{settings.listen}")
    assert isinstance(address, TcpAddress)
    if not settings.tls.cert and not is_loopback(address.host):
        raise UsageError(
            f"listen is {settings.listen}, where tokens would cross in the clear: give tls.cert, tls.key and "
            "tls.ca, or listen on loopback"
        )
    return address
