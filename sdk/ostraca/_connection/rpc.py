"""RPC helper: a question to the agent, in a thread without signal handlers."""

from __future__ import annotations

import logging
import time
from queue import SimpleQueue
from typing import TYPE_CHECKING

from ostraca._protocol.events import Disconnected, Reject, Reply, Send, Ticked
from ostraca._protocol.operations import Question
from ostraca_fabric.errors import ProtocolError
from ostraca_fabric.wire.messages import Cancel

if TYPE_CHECKING:
    from collections.abc import Callable

    from ostraca._connection.session import AgentSession
    from ostraca._protocol.events import Answer, Effect, Event
    from ostraca_fabric.wire.messages import Message

log = logging.getLogger("ostraca")


class RpcMailbox(SimpleQueue["tuple[int, Event]"]):
    """The mailbox of a thread with a question under way, read by this thread."""

    descriptor = -1

    @property
    def reader(self) -> object:
        """The mailbox itself."""
        return self

    def wake(self) -> None:
        """Wake the thread by an event of no request."""
        self.put((0, Ticked()))


def ask(session: AgentSession, question: Callable[[int], Message], *, until_s: float) -> Answer:
    """Return the agent's answer to the message of *question* for a request id.

    Raises RefusedError for a refusal by the agent. Raises ConnectError without an answer by *until_s*, or
    after the loss of the agent.
    """
    request = session.next_request()
    operation = Question(question(request), request=request, until_s=until_s)
    mailbox = RpcMailbox()
    sent_s = time.monotonic()
    effects = operation.start(sent_s)
    try:
        while True:
            for effect in effects:
                match effect:
                    case Send(message=Cancel()):
                        session.report_late(sent_s)
                        session.cancel(request)
                    case Send(message=message):
                        log.debug("%s sent: %s", session.label(request), type(message).__name__)
                        session.submit(request, message, mailbox)
                    case Reply(answer=answer):
                        return answer
                    case Reject(error=error):
                        raise error
            item = session.wait(mailbox, until_s=until_s)
            effects = _effects(session, operation, Ticked() if item is None else item[1])
    finally:
        session.leave(request)


def _effects(session: AgentSession, operation: Question, event: Event) -> list[Effect]:
    try:
        return operation.on(event, time.monotonic())
    except ProtocolError as error:
        session.break_off(f"the agent broke the wire's rules: {error}")
        return operation.on(Disconnected(), time.monotonic())
