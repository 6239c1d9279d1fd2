"""A worker that lost its connection asks on the next one whether anything of the past is still under way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from tests.dpu_agent.server.test_sessions import GET, hello
from tests.support.agent.assembly import BLOCK_BYTES, LAYOUT, Assembly, assembled, until
from tests.support.simulated.wrong_way import Harm, WrongWayTransport

from ostraca_dpu_agent.adapters.transports.inline_transport import InlineTransport
from ostraca_fabric.connection import ClientConnection, connect
from ostraca_fabric.wire.messages import Failure, GetDone, OpenVolume, PastSettled, Ping, Pong, SettlePast

OURS, THEIRS = b"o" * 16, b"t" * 16


@dataclass
class Scene:
    """An agent whose transfers do not end before it relents."""

    address: str
    fabric: Assembly
    transport: WrongWayTransport

    async def connected(self, client: bytes = OURS, tenant: str = "tenant") -> ClientConnection:
        said = msgspec.structs.replace(hello(tenant=tenant), client=client)
        connection = await connect(self.address, said)
        opened = OpenVolume(connection.next_request_id(), "v", LAYOUT, BLOCK_BYTES, create=True)
        await connection.ask(opened, 5.0)
        return connection

    async def stuck_get(self, connection: ClientConnection) -> None:
        """Leave a get's transfer under way: it is over for its worker."""
        get = msgspec.structs.replace(GET, request=connection.next_request_id(), deadline_s=0.5)
        done = await connection.ask(get, 5.0)
        assert isinstance(done, GetDone)
        assert done.unsettled

    def asked(self, connection: ClientConnection) -> asyncio.Task[object]:
        return asyncio.create_task(connection.ask(SettlePast(connection.next_request_id()), 30.0))


@asynccontextmanager
async def scene(directory: Path) -> AsyncIterator[Scene]:
    address = f"unix://{directory}/agent.sock"
    transport = WrongWayTransport(InlineTransport(), [Harm.STUCK], seed=1, share=0.0)
    async with assembled(addresses=(address,), transport=transport) as fabric:
        worker = fabric.worker()
        await fabric.put(worker, [1, 2])
        transport.share = 1.0
        yield Scene(address, fabric, transport)
        transport.relent()


async def still_hears(connection: ClientConnection) -> None:
    assert isinstance(await connection.ask(Ping(connection.next_request_id()), 5.0), Pong)


async def test_the_past_is_settled_when_the_last_transfer_of_earlier_connections_has_ended(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path) as here:
        first = await here.connected()
        await here.stuck_get(first)
        first.close()
        await first.wait_closed()
        second = await here.connected()
        answer = here.asked(second)
        await still_hears(second)
        assert not answer.done()
        here.transport.relent()
        assert isinstance(await answer, PastSettled)
        second.close()


async def test_an_earlier_connection_that_the_agent_still_thinks_alive_is_ended(tmp_path: Path) -> None:
    async with scene(tmp_path) as here:
        first, other = await here.connected(), await here.connected(THEIRS)
        namesake = await here.connected(OURS, tenant="another")
        await here.stuck_get(first)
        second = await here.connected()
        answer = here.asked(second)
        await first.wait_closed()
        await still_hears(other)
        await still_hears(namesake)
        assert not answer.done()
        here.transport.relent()
        assert isinstance(await answer, PastSettled)
        for connection in (second, other, namesake):
            connection.close()


async def test_without_a_past_it_is_settled_at_once_and_later_connections_do_not_matter(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path) as here:
        first = await here.connected()
        later = await here.connected()
        await here.stuck_get(later)
        assert isinstance(await here.asked(first), PastSettled)
        await still_hears(later)
        first.close()
        later.close()


async def test_who_named_no_client_has_no_past(tmp_path: Path) -> None:
    async with scene(tmp_path) as here:
        nobody = await here.connected(b"")
        answer = await here.asked(nobody)
        assert isinstance(answer, Failure)
        assert answer.code == "usage"
        nobody.close()


async def test_who_goes_away_while_it_waits_holds_nothing_up(tmp_path: Path) -> None:
    async with scene(tmp_path) as here:
        first = await here.connected()
        await here.stuck_get(first)
        first.abort()
        second = await here.connected()
        answer = here.asked(second)
        await still_hears(second)
        second.abort()
        await asyncio.wait([answer])
        assert answer.exception() is not None
        sessions = here.fabric.agent._dispatcher
        await until(lambda: not sessions._sessions)
        assert len(sessions._closing) == 1, "the transfer is still known, for whoever asks next"
        here.transport.relent()
        await until(lambda: not sessions._closing[0].transfers)
