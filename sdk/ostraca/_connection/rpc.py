"""RPC helper: a question to the agent, in a thread without signal handlers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar

from ostraca._connection.session import AgentSession
from ostraca._protocol.operations import Disconnected, Event, Ticked, refusal
from ostraca_fabric.errors import ConnectError
from ostraca_fabric.wire.messages import Cancel, Failure, Message

log = logging.getLogger("ostraca")

_Answer = TypeVar("_Answer", bound="Message")


class RpcMailbox(SimpleQueue[tuple[int, Event]]):
    """The mailbox of a thread with a question under way, read by this thread."""

    descriptor = -1

    @property
    def reader(self) -> object:
        """The mailbox itself."""
        return self

    def wake(self) -> None:
        """Wake the thread by an event of no request."""
        self.put((0, Ticked()))


def ask(
    session: AgentSession, question: Callable[[int], Message], answer: type[_Answer], *, until_s: float
) -> _Answer:
    """Return the agent's answer to the message of *question* for a request id.

    Raises RefusedError for a refusal by the agent. Raises ConnectError without an answer by *until_s*, or
    after the loss of the agent. Another message than an *answer* breaks the connection off.
    """
    request, mailbox, sent_s = session.next_request(), RpcMailbox(), time.monotonic()
    message = question(request)
    name = type(message).__name__
    log.debug("%s sent: %s", session.label(request), name)
    session.submit(request, message, mailbox)
    try:
        while time.monotonic() < until_s:
            item = session.wait(mailbox, until_s=until_s)
            match item[1] if item else Ticked():
                case Ticked():
                    continue
                case Failure() as failed:
                    raise refusal(failed)
                case answer() as found:
                    return found
                case Disconnected():
                    break
                case other:
                    session.break_off(
                        f"the agent broke the wire's rules: {type(other).__name__} is no answer to a {name}"
                    )
                    break
        else:
            session.report_late(sent_s)
            session.send(Cancel(request))
            raise ConnectError(f"the agent did not answer {name} in time: check whether the agent is stopped")
        raise ConnectError(f"the agent went away before it answered {name}; try again")
    finally:
        session.leave(request)
