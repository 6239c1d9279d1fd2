"""A request sent to an agent in another process, with its deadline.

The request is under way from its creation, without a task of its own. A caller can thus send requests to
several agents before waiting for the first. An answer that no caller takes is given back:
its pins and reservations would otherwise last until their timeouts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any, Protocol, cast

import msgspec

from ostraca_fabric.connection import ClientConnection
from ostraca_fabric.model.ids import AgentId
from ostraca_fabric.telemetry.requests import current_label
from ostraca_fabric.wire.messages import (
    AgentRequest,
    Answer,
    AnswerToAgent,
    Inspect,
    Message,
    Release,
    Reserved,
    Resolve,
    Resolved,
    ShardExtents,
    ShardRelease,
    ShardReservations,
)

_SLACK_S = 0.001
"""Possible earliness of a loop's timers."""


class Slots(asyncio.Semaphore):
    """Semaphore for the requests that a peer takes at once."""

    def take(self) -> bool:
        """Take a slot if one is free and no caller waits; return success."""
        if self.locked():
            return False
        self._value -= 1
        return True


class RequestObserver(Protocol):
    """Receiver of a request's events: ``PeerLink``."""

    @property
    def agent(self) -> AgentId:
        """The peer's id."""

    @property
    def patience_s(self) -> float:
        """Longest time of a lookup before a failure is counted."""

    def note_sent(self) -> None:
        """Note that a request was sent."""

    def note_slow(self, request: PeerRequest) -> None:
        """Note a lookup without an answer after ``patience_s``; the lookup continues."""

    def note_missed(self, request: PeerRequest, after_s: float) -> None:
        """Note a missed deadline, *after_s* after sending."""

    def note_end(self, request: PeerRequest, outcome: AnswerToAgent | BaseException) -> None:
        """Note the end of a request: answered or abandoned."""


class PeerRequest:
    """A request to await exactly once, to the end.

    The request holds a slot of the peer until then. The await returns the answer, or raises TimeoutError
    and ConnectError.
    """

    def __init__(
        self,
        observer: RequestObserver,
        connection: ClientConnection,
        slots: Slots,
        request: AgentRequest,
        until_s: float,
    ) -> None:
        """Send the request; the caller has taken a slot.

        Raises as ``ClientConnection.submit``, after freeing the slot.
        """
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        self.connection = connection
        self.is_quick = isinstance(request, Resolve | Inspect)
        """Whether the shard owner answers from memory."""

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
        self._observer = observer
        self._slots = slots
        self._began_s = began_s
        self._until_s = until_s
        first_s = min(until_s, began_s + observer.patience_s) if self.is_quick else until_s
        self._timer = loop.call_at(first_s, self._on_time)
        observer.note_sent()

    def __await__(self) -> Generator[Any, None, AnswerToAgent]:
        """Wait for the answer."""
        return self._wait().__await__()

    async def _wait(self) -> AnswerToAgent:
        outcome: AnswerToAgent | BaseException
        try:
            outcome = cast("AnswerToAgent", await self.answered)
        except BaseException as error:
            outcome = error
            now_s = self._loop.time()
            if now_s >= self._until_s - _SLACK_S and isinstance(error, TimeoutError | asyncio.CancelledError):
                self._observer.note_missed(self, now_s - self._began_s)
            raise
        else:
            return outcome
        finally:
            self._timer.cancel()
            self.connection.forget(self._request.request)
            self._observer.note_end(self, outcome)
            self._slots.release()

    def _on_time(self) -> None:
        if self.answered.done():
            return
        if self._loop.time() < self._until_s - _SLACK_S:
            self._timer = self._loop.call_at(self._until_s, self._on_time)
            self._observer.note_slow(self)
        else:
            self.answered.set_exception(timeout_error(self._observer.agent, self._deadline_s))


def timeout_error(agent: AgentId, deadline_s: float) -> TimeoutError:
    """Build the error for a missing answer."""
    return TimeoutError(f"agent {agent} did not answer within {deadline_s:.3f} s")


def release_of(answer: Message) -> Release | None:
    """Build the Release for all pins and reservations in this answer, or None."""
    if not isinstance(answer, Resolved | Reserved):
        return None
    releases = tuple(release for part in answer.shards if (release := _of_shard(part)) is not None)
    return Release(releases) if releases else None


def _of_shard(part: ShardExtents | ShardReservations) -> ShardRelease | None:
    if isinstance(part, ShardExtents):
        return ShardRelease(part.shard, (part.pin,)) if part.pin else None
    return ShardRelease(part.shard, (), part.reservations) if part.reservations else None
