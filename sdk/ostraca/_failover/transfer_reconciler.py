"""Transfer reconciliation: asks earlier agents whether their transfers ended.

After a failover, slots of the first agent's transfers are in quarantine, and only that agent can report the
end. While such slots exist, a thread looks for the agent at every address, on connections without an arena,
until the report arrives. A connection to the current agent is closed at once: the client's own session asks
the current agent.
"""

from __future__ import annotations

import logging
import time
from contextlib import closing, suppress
from dataclasses import replace
from itertools import chain, repeat
from typing import TYPE_CHECKING

from ostraca._connection.dial import dial
from ostraca._connection.stream import can_be_read
from ostraca_fabric.errors import ConnectError, ProtocolError
from ostraca_fabric.runtime.threads import BackgroundTask
from ostraca_fabric.wire.codec import TO_WORKER
from ostraca_fabric.wire.frames import encode
from ostraca_fabric.wire.messages import PastSettled, SettlePast

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ostraca._connection.dial import ClientIdentity, ControlChannel
    from ostraca._memory.arena import Arena
    from ostraca_fabric.wire.address import Address

log = logging.getLogger("ostraca")

_AGAIN_S = 1.0
_DIAL_S = 2.0
_ANSWER_S = 5.0
_REQUEST = 1


class TransferReconciler:
    """Transfer reconciliation in the background. Thread-safe."""

    def __init__(
        self,
        addresses: Sequence[Address],
        identity: ClientIdentity,
        arena: Arena,
        agent_now: Callable[[], str],
    ) -> None:
        """Begin without questions; *agent_now* names the current agent."""
        self._addresses = addresses
        self._identity = replace(identity, ends={}, features=())
        self._arena = arena
        self._agent_now = agent_now
        self._task = BackgroundTask(
            "reconciler",
            self._ask_all,
            is_needed=lambda: bool(self._owing()),
            pauses_s=lambda: chain((0.0,), repeat(_AGAIN_S)),
        )

    def look(self) -> None:
        """Start to ask if an agent other than the current agent owes a report.

        Never blocks.
        """
        self._task.start()

    def close(self) -> None:
        """Stop asking. A late answer is harmless."""
        self._task.close()

    def _owing(self) -> frozenset[str]:
        with self._arena.changed:
            return self._arena.ledger.owing_agents - {self._agent_now()}

    def _ask_all(self) -> None:
        for address in self._addresses:
            if self._owing() and not self._task.is_closed:
                self._settle_at(address)

    def _settle_at(self, address: Address) -> None:
        """Ask the agent at *address*, if it owes a report."""
        try:
            channel = dial([address], self._identity, until_s=time.monotonic() + _DIAL_S)
        except (ConnectError, ProtocolError) as error:
            log.debug("no report on earlier transfers from %s: %s", address, error)
            return
        with closing(channel.stream):
            agent = channel.welcome.agent
            if agent not in self._owing():
                return
            with self._arena.changed:
                past = self._arena.ledger.meet_agent(agent, channel.welcome.start_id)
                self._arena.tell_changed()
            if past and _ask_settled(channel, until_s=time.monotonic() + _ANSWER_S):
                with self._arena.changed:
                    self._arena.ledger.settle_past(past)
                    self._arena.tell_changed()


def _ask_settled(channel: ControlChannel, *, until_s: float) -> bool:
    """Tell whether the agent reports by *until_s* that no transfer is under way."""
    stream, reader = channel.stream, channel.reader
    try:
        stream.send_first(encode(SettlePast(_REQUEST)), until_s=time.monotonic() + _DIAL_S)
        while time.monotonic() < until_s:
            if not (stream.has_pending or can_be_read(stream, until_s=until_s)):
                break
            with suppress(BlockingIOError):
                count, _ = stream.receive(reader)
                if not count:
                    break
                for event in reader.received(count):
                    return isinstance(event, bytes) and isinstance(TO_WORKER.decode(event), PastSettled)
    except (OSError, ProtocolError) as error:
        log.debug("no report on earlier transfers from %s: %s", channel.welcome.agent, error)
    return False
