"""Settling with agents that a client has left: whether their transfers of its past have ended.

A client that lost one agent and found another has slots in quarantine of which only the first can say that
nothing moves in them any more. While there are such slots, a thread asks for that agent at every address, on
connections that offer no arena, until its word has come. A connection to the agent that the client uses now
is closed without a word: that one is asked on the client's own connection.
"""

from __future__ import annotations

import logging
import select
import threading
import time
from contextlib import closing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from ostraca.dial import dial
from ostraca_fabric.errors import ConnectError, ProtocolError
from ostraca_fabric.wire.codec import TO_WORKER
from ostraca_fabric.wire.frames import encode
from ostraca_fabric.wire.messages import PastSettled, SettlePast

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ostraca.arena import Arena
    from ostraca.dial import Caller, Dialled
    from ostraca_fabric.wire.address import Address

log = logging.getLogger("ostraca")

_AGAIN_S = 1.0
_DIAL_S = 2.0
_ANSWER_S = 5.0
_REQUEST = 1


class Settler:
    """Asks in the background. Thread-safe."""

    def __init__(
        self,
        addresses: Sequence[Address],
        caller: Caller,
        arena: Arena,
        agent_now: Callable[[], str],
    ) -> None:
        """Ask nobody yet; *agent_now* names the agent that the client uses."""
        self._addresses = addresses
        self._caller = replace(caller, ends={}, features=())
        self._arena = arena
        self._agent_now = agent_now
        self._starting = threading.Lock()
        self._is_running = False
        self._closed = threading.Event()

    def look(self) -> None:
        """Begin to ask, if an agent other than the one in use owes word. Never blocks."""
        with self._starting:
            if self._is_running or self._closed.is_set() or not self._owing():
                return
            thread = threading.Thread(target=self._run, name="ostraca-settler", daemon=True)
            with suppress(RuntimeError):  # this process may have no more threads: the next call tries
                thread.start()
                self._is_running = True

    def close(self) -> None:
        """Ask no more. A question that is out may still be answered; that harms nobody."""
        self._closed.set()

    def _owing(self) -> frozenset[str]:
        with self._arena.changed:
            return self._arena.ledger.owing - {self._agent_now()}

    def _run(self) -> None:
        while True:
            for address in self._addresses:
                if self._owing() and not self._closed.is_set():
                    self._settle_at(address)
            with self._starting:
                if self._closed.is_set() or not self._owing():
                    self._is_running = False
                    return
            self._closed.wait(_AGAIN_S)

    def _settle_at(self, address: Address) -> None:
        """Ask whoever answers at an address, if it is one who owes word."""
        try:
            dialled = dial([address], self._caller, until_s=time.monotonic() + _DIAL_S)
        except (ConnectError, ProtocolError) as error:
            log.debug("%s has not settled the past: %s", address, error)
            return
        with closing(dialled.line):
            agent = dialled.welcome.agent
            if agent not in self._owing():
                return
            with self._arena.changed:
                past = self._arena.ledger.met(agent, dialled.welcome.start_id)
                self._arena.tell_changed()
            if past and _is_settled(dialled, until_s=time.monotonic() + _ANSWER_S):
                with self._arena.changed:
                    self._arena.ledger.past_settled(past)
                    self._arena.tell_changed()


def _is_settled(dialled: Dialled, *, until_s: float) -> bool:
    """Ask, and tell whether the agent says by then that nothing is under way."""
    line, reader = dialled.line, dialled.reader
    try:
        line.say(encode(SettlePast(_REQUEST)), until_s=time.monotonic() + _DIAL_S)
        while (left_s := until_s - time.monotonic()) > 0:
            if not (line.has_pending or select.select([line], [], [], left_s)[0]):
                break
            with suppress(BlockingIOError):
                count, _ = line.receive(reader)
                if not count:
                    break
                for event in reader.received(count):
                    return isinstance(event, bytes) and isinstance(TO_WORKER.decode(event), PastSettled)
    except (OSError, ProtocolError) as error:
        log.debug("%s has not settled the past: %s", dialled.welcome.agent, error)
    return False
