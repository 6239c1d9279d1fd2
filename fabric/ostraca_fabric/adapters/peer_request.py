"""One request that was sent to an agent elsewhere: its deadline, and what becomes of an answer that nobody
takes.

It is under way from when it is made, without a task of its own. So who asks several agents asks all of them
before it waits for one.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol, cast

import msgspec

from ostraca_fabric.labels import current_label
from ostraca_fabric.wire.messages import Inspect, Resolve

if TYPE_CHECKING:
    from collections.abc import Generator
    from typing import Any

    from ostraca_fabric.connection import ClientConnection
    from ostraca_fabric.connection.client import Answer
    from ostraca_fabric.ids import AgentId
    from ostraca_fabric.wire.messages import AgentRequest, AnswerToAgent

_SLACK_S = 0.001
"""A loop's timers may be so early."""


class Slots(asyncio.Semaphore):
    """How many requests a peer takes at once."""

    def take(self) -> bool:
        """Take one if that needs no waiting, and nobody waits."""
        if self.locked():
            return False
        self._value -= 1
        return True


class Peer(Protocol):
    """What hears of its requests: ``PeerLink``."""

    @property
    def agent(self) -> AgentId:
        """Which one it is."""

    @property
    def patience_s(self) -> float:
        """How long a look-up may take before it is held against the peer."""

    def begun(self) -> None:
        """A request was sent."""

    def slow(self, request: PeerRequest) -> None:
        """A look-up has taken all of ``patience_s``, and goes on."""

    def missed(self, request: PeerRequest, after_s: float) -> None:
        """A deadline passed without an answer, *after_s* after the request was sent."""

    def ended(self, request: PeerRequest, how: AnswerToAgent | BaseException) -> None:
        """A request is over: its answer was taken, or none is waited for any more."""


class PeerRequest:
    """Await it, once and to its end: it has one of the peer's slots until then.

    Gives the answer. Raises TimeoutError and ConnectError.
    """

    def __init__(
        self, peer: Peer, connection: ClientConnection, slots: Slots, request: AgentRequest, until_s: float
    ) -> None:
        """Send it; a slot was taken for it. Raises as ``ClientConnection.submit``: then the slot is free."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        self.connection = connection
        self.is_quick = isinstance(request, Resolve | Inspect)
        """Whether owners answer it from memory."""

        self._deadline_s = request.deadline_s
        self._request = msgspec.structs.replace(
            request,
            request=connection.next_request_id(),
            deadline_s=max(0.0, until_s - began_s),
            label=current_label(),
        )
        try:
            self.answered: asyncio.Future[Answer] = connection.submit(self._request)
        except BaseException:
            slots.release()
            raise
        self._loop = loop
        self._peer = peer
        self._slots = slots
        self._began_s = began_s
        self._until_s = until_s
        first_s = min(until_s, began_s + peer.patience_s) if self.is_quick else until_s
        self._timer = loop.call_at(first_s, self._on_time)
        peer.begun()

    def __await__(self) -> Generator[Any, None, AnswerToAgent]:
        """Wait for the answer."""
        return self._answered().__await__()

    async def _answered(self) -> AnswerToAgent:
        how: AnswerToAgent | BaseException
        try:
            how = cast("AnswerToAgent", await self.answered)
        except BaseException as error:
            how = error
            now_s = self._loop.time()
            if now_s >= self._until_s - _SLACK_S and isinstance(error, TimeoutError | asyncio.CancelledError):
                self._peer.missed(self, now_s - self._began_s)
            raise
        else:
            return how
        finally:
            self._timer.cancel()
            self.connection.forget(self._request.request)
            self._peer.ended(self, how)
            self._slots.release()

    def _on_time(self) -> None:
        if self.answered.done():
            return
        if self._loop.time() < self._until_s - _SLACK_S:
            self._timer = self._loop.call_at(self._until_s, self._on_time)
            self._peer.slow(self)
        else:
            self.answered.set_exception(late(self._peer.agent, self._deadline_s))


def late(agent: AgentId, deadline_s: float) -> TimeoutError:
    """Say that an agent did not answer."""
    return TimeoutError(f"agent {agent} did not answer within {deadline_s:.3f} s")
