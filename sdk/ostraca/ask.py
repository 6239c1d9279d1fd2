"""Asking one question of the agent and waiting for its answer, in the caller's thread."""

from __future__ import annotations

import logging
import time
from queue import SimpleQueue
from typing import TYPE_CHECKING

from ostraca.core.events import Disconnected, Rejected, Replied, Send, Ticked
from ostraca.core.operations import Question
from ostraca_fabric.errors import ProtocolError
from ostraca_fabric.wire.messages import Cancel

if TYPE_CHECKING:
    from collections.abc import Callable

    from ostraca.core.events import Answer, Effect, Event
    from ostraca.session import Session
    from ostraca_fabric.wire.messages import Message

log = logging.getLogger("ostraca")


def ask(session: Session, question: Callable[[int], Message], *, until_s: float) -> Answer:
    """Return the answer to what *question* makes of a request id.

    Raises RefusedError as the agent refused, and ConnectError when it did not answer by *until_s* or went
    away.
    """
    request = session.next_request()
    operation = Question(question(request), request=request, until_s=until_s)
    mail: SimpleQueue[tuple[int, Event]] = SimpleQueue()
    sent_s = time.monotonic()
    effects = operation.start(sent_s)
    try:
        while True:
            for effect in effects:
                match effect:
                    case Send(message=Cancel()):
                        session.missed(sent_s)
                        session.cancel(request)
                    case Send(message=message):
                        log.debug("%s sent: %s", session.label(request), type(message).__name__)
                        session.submit(request, message, mail)
                    case Replied(answer=answer):
                        return answer
                    case Rejected(error=error):
                        raise error
            effects = _next_effects(session, operation, mail, until_s)
    finally:
        session.leave(request)


def _next_effects(
    session: Session, operation: Question, mail: SimpleQueue[tuple[int, Event]], until_s: float
) -> list[Effect]:
    came = session.wait(mail, until_s=until_s)
    return _effects(session, operation, Ticked() if came is None else came[1])


def _effects(session: Session, operation: Question, event: Event) -> list[Effect]:
    try:
        return operation.on(event, time.monotonic())
    except ProtocolError as error:
        session.break_off(f"the agent broke the wire's rules: {error}")
        return operation.on(Disconnected(), time.monotonic())
