"""A simulated worker's connections: the agent it keeps to, and those that still owe it slots.

It dials another agent when the one it keeps to is lost, or leaves several operations in a row unanswered, and
once nothing is under way there any more where that one has said that it is about to end.
Agents that were used before are asked for the slots that they have not given back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from tests.simulation.fabric.world import blocks
from tests.simulation.fabric.world.inline import InlineEnd
from tests.support.simulated.simulated_transport import SimulatedArenaEnd

from ostraca._protocol.ledger import Ledger
from ostraca_fabric.connection import ClientConnection, ConnectionSettings, Network, connect
from ostraca_fabric.errors import ConnectError, OstracaError
from ostraca_fabric.wire.messages import ArenaOffer, Hello, OpenVolume, PastSettled, SettlePast, VolumeOpened

if TYPE_CHECKING:
    from tests.simulation.fabric.world.agent_memory import MemoryReader
    from tests.simulation.fabric.world.blocks import Volume

    from ostraca_fabric.connection.client import Aside

_HANDSHAKE_S = 1.0
_GIVES_UP_AFTER = 3
"""Operations in a row without an answer, until it looks for another agent."""

FOREVER_S = 3600.0
_AGAIN_S = 1.0
_ANSWER_S = 2.0
CONNECTIONS = ConnectionSettings(handshake_s=_HANDSHAKE_S, drain_s=1.0)


@dataclass
class Link:
    """A connection to an agent, and the volumes open on it."""

    connection: ClientConnection
    handles: dict[Volume, int]
    is_lost: bool = False
    is_leaving: bool = False
    """Whether the agent has said that it is about to end."""

    under_way: int = 0
    """Requests that wait for their answers."""

    announced: tuple[int, bool] = (-1, False)
    """Version of the drives that the agent knows its worker to read, and whether its memory is read."""

    is_offered: bool = False
    """Whether the agent knows the region of the worker."""

    memory: MemoryReader | None = None
    """Reader of the agent's memory, where its worker may read it."""

    @property
    def agent(self) -> str:
        return self.connection.welcome.agent

    @property
    def start_id(self) -> bytes:
        return self.connection.welcome.start_id


class Links:
    """One worker's. *hello* is said to every agent, with the arena where that is offered.

    Of the agent that it keeps to, *volumes* are opened.
    """

    def __init__(
        self,
        hello: Hello,
        addresses: list[str],
        volumes: list[Volume],
        *,
        network: Network,
        arena: InlineEnd | SimulatedArenaEnd,
        ledger: Ledger,
        on_aside: Callable[[list[ClientConnection], Aside], None],
        spawn: Callable[[Coroutine[None, None, None]], None],
        next_request: Callable[[], int],
    ) -> None:
        self._hello = hello
        self._addresses = addresses
        self._volumes = volumes
        self._network = network
        self._arena = arena
        self._ledger = ledger
        self._on_aside = on_aside
        self._spawn = spawn
        self._next_request = next_request
        self._link: Link | None = None
        self._linking = asyncio.Lock()
        self._first = 0
        self._unanswered = 0
        self._is_settling = False

    def count(self, *, is_heard: bool) -> None:
        """Count an operation that has ended, and whether the agent said anything meanwhile."""
        self._unanswered = 0 if is_heard else self._unanswered + 1

    def leaving(self, made: list[ClientConnection]) -> None:
        """Hear on a connection that its agent is about to end."""
        if self._link is not None and self._link.connection in made:
            self._link.is_leaving = True

    @property
    def linked_to(self) -> tuple[str, bytes] | None:
        """The agent that it keeps to, and the start of it that it talked to last; None where it will dial."""
        link = self._kept
        return None if link is None else (link.agent, link.start_id)

    @property
    def _kept(self) -> Link | None:
        link = self._link
        if link is None or link.is_lost or self._unanswered >= _GIVES_UP_AFTER:
            return None
        return None if link.is_leaving and not link.under_way else link

    async def linked(self, until_s: float) -> Link | None:
        """Return a connection that seems to live; dial another where it does not."""
        if (kept := self._kept) is not None:
            return kept
        try:
            async with asyncio.timeout_at(until_s), self._linking:
                return await self._dial()
        except (TimeoutError, OstracaError):
            return None

    async def _dial(self) -> Link | None:
        if (kept := self._kept) is not None:
            return kept
        if self._link is not None:
            self._first += self._link.is_leaving
            self._link.connection.abort()
            self.lost(self._link)
            self._link = None
        if self._ledger.owing_agents:
            self._arena.renew()
        for _ in self._addresses:
            address = self._addresses[self._first % len(self._addresses)]
            try:
                return await self._dial_one(address)
            except OstracaError:
                self._first += 1
            except BaseException:
                self._first += 1  # out of time: another one the next time
                raise
        return None

    async def _dial_one(self, address: str) -> Link:
        connection = await self._connected(address, (self._arena.offer(),))
        link, opened = Link(connection, {}), None
        try:
            past = self._ledger.meet_agent(link.agent, link.start_id)
            if past:
                self._spawn(self._settle_past(link, past))
            opened = await self._opened(connection)
        finally:
            if opened is None:
                connection.abort()
        link.handles = opened
        self._link, self._unanswered = link, 0
        self._spawn(self._watch(link))
        if not self._is_settling and self._owing():
            self._is_settling = True
            self._spawn(self._settle_elsewhere())
        return link

    async def _opened(self, connection: ClientConnection) -> dict[Volume, int]:
        """Open the volumes. Raises ConnectError."""
        handles = {}
        for volume in self._volumes:
            asked = OpenVolume(
                self._next_request(), volume.name, blocks.LAYOUT, blocks.BLOCK_BYTES, create=True
            )
            try:
                opened = await connection.ask(asked, _HANDSHAKE_S)
            except TimeoutError as error:
                raise ConnectError(f"no volume {volume}: no answer") from error
            if not isinstance(opened, VolumeOpened):
                raise ConnectError(f"no volume {volume}: {opened}")
            handles[volume] = opened.handle
        return handles

    async def _connected(self, address: str, arenas: tuple[ArenaOffer, ...]) -> ClientConnection:
        hello = msgspec.structs.replace(self._hello, arenas=arenas)
        made: list[ClientConnection] = []
        on_aside = partial(self._on_aside, made)
        connection = await connect(
            address, hello, settings=CONNECTIONS, on_aside=on_aside, network=self._network
        )
        made.append(connection)
        if isinstance(self._arena, InlineEnd):
            self._arena.connected(connection)
        return connection

    async def _watch(self, link: Link) -> None:
        await link.connection.wait_closed()
        self.lost(link)

    async def _settle_past(self, link: Link, past: tuple[int, ...]) -> None:
        try:
            answer = await link.connection.ask(SettlePast(self._next_request()), FOREVER_S)
        except (ConnectError, TimeoutError):
            return
        if isinstance(answer, PastSettled):
            self._ledger.settle_past(past)

    def lost(self, link: Link) -> None:
        if not link.is_lost:
            link.is_lost = True
            if isinstance(self._arena, InlineEnd):
                self._arena.lost()
            self._ledger.lose_connection(is_drained=isinstance(self._arena, InlineEnd))

    def _owing(self) -> frozenset[str]:
        return self._ledger.owing_agents - {self._link.agent if self._link is not None else ""}

    async def _settle_elsewhere(self) -> None:
        """Ask the agents that were used before about slots that they have not given back."""
        try:
            while self._owing():
                for address in self._addresses:
                    if self._owing():
                        await self._settle_at(address)
                await asyncio.sleep(_AGAIN_S)
        finally:
            self._is_settling = False

    async def _settle_at(self, address: str) -> None:
        try:
            connection = await self._connected(address, ())
        except OstracaError:
            return
        welcome = connection.welcome
        if welcome.agent in self._owing():
            past = self._ledger.meet_agent(welcome.agent, welcome.start_id)
            if past:
                with suppress(ConnectError, TimeoutError):
                    answer = await connection.ask(SettlePast(self._next_request()), _ANSWER_S)
                    if isinstance(answer, PastSettled):
                        self._ledger.settle_past(past)
        connection.abort()
