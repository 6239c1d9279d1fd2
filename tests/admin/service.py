"""A whole admin service in this process, for tests.

The app behind uvicorn on a port of loopback, its worker, records and membership in memory, and agents whose
flash work is done by real ``FlashWorker`` objects, over ``FilePaths`` on files in a directory of the test.

The service has an event loop and a thread of its own, so that a test may block, as ``ostraca enclosure``
does, and may be a coroutine as well. What belongs to that loop is asked for by ``do``::

with AdminService(tmp_path) as service:
shelf = service.shelf("shelf-1", drives=2)  # an enclosure on files, exported
answer = service.ask("PUT", "/v1/enclosures/shelf-1", shelf.form())
assert answer.status == 201
done = service.ended(answer.body["status"]["operation"]["id"])
assert done.state is State.DONE
service.do(service.membership.retire_placement(epoch))
service.agents[AgentId("agent-0")].is_silent = True

Left out of it is what only etcd and whole agents can do: there are leases and agents' connections in
tests/fabric/membership and tests/scenarios. A test sets what an agent says of its shards:
``Agent.shards``.
"""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import uvicorn
from tests.admin.agents import Agent, AgentsHere, made_agent
from tests.admin.shelf import DRIVE_BYTES, Shelf
from tests.support.simulated.memory_records import MemoryRecords

from ostraca_admin.agent_queries import AgentQueries, QuerySettings
from ostraca_admin.api.access import Principal, Role, Tokens
from ostraca_admin.api.app import build_app
from ostraca_admin.api.context import Context
from ostraca_admin.api.limits import BodyLimit
from ostraca_admin.audit import Audit
from ostraca_admin.enclosure_service import EnclosureService
from ostraca_admin.model import Operation, OperationState, decode
from ostraca_admin.override_service import OverrideService
from ostraca_admin.tenant_service import TenantService
from ostraca_admin.workflow_runner import WorkflowRunner
from ostraca_admin.workflows.erase import ErasureSteps
from ostraca_admin.workflows.steps import RetrySettings, Steps
from ostraca_dpu_agent.volumes import Incarnations
from ostraca_fabric.membership.etcd.schema.records import decode_report
from ostraca_fabric.membership.memory_membership import MemoryMembership
from ostraca_fabric.model import record_keys
from ostraca_fabric.model.fabric_map import AgentRecord, EnclosureState
from ostraca_fabric.model.ids import ID_BYTES, AgentId, EnclosureId, FabricId, StartId
from ostraca_fabric.model.inventory import EnclosureReport
from ostraca_fabric.model.overrides import Overrides
from ostraca_fabric.model.volume import VolumeRecord
from ostraca_fabric.sockets.tls import TlsFiles

_T = TypeVar("_T")

WITHIN_S = 20.0
"""How long anything may take that a test waits for."""

TOKENS = {
    "admin": "admin-admin-admin-admin",
    "operator": "operator-operator-operator",
    "viewer": "viewer-viewer-viewer-viewer",
}
"""By role. Names of people are those of Alice, Oscar and Victor."""

_PEOPLE = {"admin": "alice", "operator": "oscar", "viewer": "victor"}


@dataclass(frozen=True)
class Answer:
    """What the service answered."""

    status: int
    headers: http.client.HTTPMessage
    body: Any
    """As JSON was read."""


class _Server(uvicorn.Server):
    """A server that says when it answers."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.has_started = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.has_started.set()


class AdminService:
    """One admin service with its fabric. Enter it; all of it ends when it is left."""

    def __init__(
        self, directory: Path, *, agents: int = 2, tls: TlsFiles | None = None, probe_s: float = 0.03
    ) -> None:
        """Keep files in *directory*.

        Over *tls* the URL is https. Drives are measured for *probe_s*, and what takes a while is
        looked at ten times as often as in earnest.
        """
        self.directory = directory
        self.tokens = dict(TOKENS)
        """By role; one that is taken out, or changed, is so at once."""

        self.token = TOKENS["admin"]
        self.url = ""
        self.records = MemoryRecords()
        self.membership = MemoryMembership(FabricId(bytes(range(ID_BYTES))))
        self.membership.store.stands = self.records.stands
        self.agents: dict[AgentId, Agent] = {}
        self.reports: dict[str, EnclosureReport] = {}
        """By enclosure: what its own daemon says, beside what lies in ``records``."""

        self._agents_count = agents
        self._tls = tls
        self._probe_s = probe_s
        self._numbers = itertools.count()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="admin service", daemon=True)
        self._ready: Future[None] = Future()
        self._stop = asyncio.Event()
        self._closing = asyncio.Event()

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.result(WITHIN_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End it, as when its machine does. Not an error when it has ended."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(WITHIN_S)
        assert not self._thread.is_alive()

    def do(self, asked: Coroutine[Any, Any, _T]) -> _T:
        """Do something on the service's loop; return what came of it. Not for that loop itself."""
        return asyncio.run_coroutine_threadsafe(asked, self._loop).result(WITHIN_S)

    def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        role: str = "admin",
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Ask the service as a *role*; an empty one shows no token.

        *body* is sent as JSON, bytes as they are. *headers* come on top.
        """
        shown = {"Authorization": f"Bearer {TOKENS[role]}"} if role else {}
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        if data is not None:
            shown["Content-Type"] = "application/json"
        with closing(self.connection()) as connection:
            connection.request(method, path, data, {**shown, **(headers or {})})
            answer = connection.getresponse()
            return Answer(answer.status, answer.headers, json.loads(answer.read()))

    def ended(self, number: str) -> Operation:
        """Wait until an operation has ended; return what came of it."""
        return self.do(self._ended(number))

    def rule(self, overrides: Overrides) -> None:
        """Let these be the overrides, as agents see them."""

        async def rule() -> None:
            self.membership.rule(overrides)

        self.do(rule())

    def onboarded(self, name: str, *, drives: int = 1) -> Shelf:
        """Make an enclosure on files that is in the map."""
        shelf = self.shelf(name, drives=drives)
        answer = self.ask("PUT", f"/v1/enclosures/{name}", shelf.form())
        done = self.ended(answer.body["status"]["operation"]["id"])
        assert done.state is OperationState.DONE, done
        return shelf

    def shelf(self, name: str, *, drives: int = 1, drive_bytes: int = DRIVE_BYTES) -> Shelf:
        """Make an enclosure on files."""
        return Shelf(self.directory / name, name, drives=drives, drive_bytes=drive_bytes)

    def pass_over(self, name: str) -> Future[None]:
        """End earlier placements as soon as an enclosure is draining in the map.

        The drain is done then, as if every shard had been written over. The returned object ends this.
        """
        return asyncio.run_coroutine_threadsafe(self._pass_over(EnclosureId(name)), self._loop)

    def connection(self) -> http.client.HTTPConnection:
        """Return a new connection to the service."""
        place = self.url.partition("://")[2]
        if self._tls is None:
            return http.client.HTTPConnection(place, timeout=WITHIN_S)
        context = ssl.create_default_context(cafile=self._tls.ca)
        return http.client.HTTPSConnection(place, timeout=WITHIN_S, context=context)

    # -------------------------------------------------------------------------------- on the service's loop

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            try:
                runner.run(self._serve())
            except BaseException as error:
                if self._ready.done():
                    raise
                self._ready.set_exception(error)

    async def _serve(self) -> None:
        for number in range(self._agents_count):
            await self._add_agent(AgentId(f"agent-{number}"))
        worker = self._worker()
        server = self._server(worker)
        listening = socket.create_server(("127.0.0.1", 0))
        host, port = listening.getsockname()
        self.url = f"http{'s' if self._tls else ''}://{host}:{port}"
        working = asyncio.ensure_future(worker.run())
        serving = asyncio.ensure_future(server.serve([listening]))
        seeing = asyncio.gather(
            self._see_maps(),
            *(agent.incarnations.run() for agent in self.agents.values() if agent.incarnations),
        )
        await server.has_started.wait()
        self._ready.set_result(None)
        await self._stop.wait()
        self._closing.set()
        server.should_exit = True
        await serving
        for each in (working, seeing):
            each.cancel()
        await asyncio.gather(working, seeing, return_exceptions=True)
        for agent in self.agents.values():
            await agent.path_manager.stop()

    async def _ended(self, number: str) -> Operation:
        at = record_keys.operation(number)
        async with aclosing(self.records.changes(at)) as changes:  # type: ignore[type-var]  # a generator
            async for _ in changes:
                record = await self.records.get(at)
                assert record is not None, "it was forgotten"
                operation = decode(record, Operation)
                if operation.state is not OperationState.RUNNING:
                    return operation
        raise AssertionError

    async def _pass_over(self, name: EnclosureId) -> None:
        async with asyncio.timeout(WITHIN_S), aclosing(self.membership.changes()) as maps:  # type: ignore[type-var]  # a generator
            async for fabric_map in maps:
                there = fabric_map.enclosures.get(name)
                if there is not None and there.state is EnclosureState.DRAINING:
                    for record in fabric_map.earlier_placements:
                        await self.membership.retire_placement(record.epoch)
                    return

    async def _see_maps(self) -> None:
        async for fabric_map in self.membership.changes():
            for agent in self.agents.values():
                agent.path_manager.use_map(fabric_map)

    async def _add_agent(self, name: AgentId) -> None:
        self.agents[name] = agent = made_agent(name, lambda: self.membership.map)
        agent.incarnations = Incarnations(self.membership, time.monotonic)
        await self.membership.join(AgentRecord(name, StartId(bytes(ID_BYTES)), (f"unix:///{name}",)))

    def _worker(self) -> WorkflowRunner:
        self.hands = AgentsHere(self.agents)
        steps = Steps(
            self.records,
            self.membership,
            AgentQueries(self.membership, self.hands, QuerySettings(probe_s=self._probe_s)),
            report_of=self._report_of,
            volumes=self._volumes,
            new_format_id=lambda: secrets.token_hex(ID_BYTES),
            erasure=ErasureSteps(self.records, self.membership, self.hands, clock=time.monotonic, poll_s=0.2),
            retry=RetrySettings(busy_s=0.5, drain_s=0.2),
        )
        return WorkflowRunner(self.records, steps, name="admin-0", unix_s=time.time, poll_s=0.2)

    def _server(self, worker: WorkflowRunner) -> _Server:
        audit = Audit(time.time, self._new_id)
        overrides = OverrideService(self.records, audit)
        context = Context(
            enclosures=EnclosureService(self.records, audit),
            overrides=overrides,
            tenants=TenantService(self.records, overrides, audit, volumes=self._volumes),
            records=self.records,
            membership=self.membership,
            agents=self.hands,
            tokens=lambda: Tokens(
                tuple((token, Principal(_PEOPLE[role], Role(role))) for role, token in self.tokens.items())
            ),
            report_of=self._report_of,
            volumes=self._volumes,
            notify_runner=worker.wake,
            closing=self._closing,
        )
        config = uvicorn.Config(
            BodyLimit(build_app(context, version="0"), body_bytes_max=64 << 10),
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            timeout_graceful_shutdown=1,
            ssl_certfile=self._tls.cert if self._tls else None,
            ssl_keyfile=self._tls.key if self._tls else None,
        )
        return _Server(config)

    def _new_id(self) -> str:
        """Return an id that comes after those before."""
        return f"{next(self._numbers):012x}-{secrets.token_hex(4)}"

    async def _report_of(self, enclosure: EnclosureId) -> EnclosureReport | None:
        record = await self.records.get(record_keys.report(enclosure))
        if record is not None:
            return decode_report(record.value)
        return self.reports.get(enclosure)

    async def _volumes(self) -> Sequence[VolumeRecord]:
        return await anext(self.membership.volume_changes())
