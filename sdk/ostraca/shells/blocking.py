"""The blocking shell: a job in the thread that called."""

from __future__ import annotations

import time
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeVar

from ostraca.jobs import Outcome

if TYPE_CHECKING:
    from ostraca.batch import Batch
    from ostraca.client import Client
    from ostraca.core.events import Event
    from ostraca.jobs import Job
    from ostraca.session import Session

_Result = TypeVar("_Result")

_ROOM_RECHECK_S = 0.05
"""Longest sleep while waiting for other callers' slots: a session that is lost meanwhile is then noticed."""


def run(client: Client, job: Job[_Result]) -> _Result:
    """Do it all, and return the result by the deadline. Raises as ``Batch.on`` and ``Client.target``."""
    mail: SimpleQueue[tuple[int, Event]] = SimpleQueue()
    ready = job.at_once()
    if ready is not None:
        return job.skipped(ready)
    try:
        target = client.reach.target(job.volume, mail, job.until_s)
    except BaseException:
        job.never_begun()
        raise
    if target is None:
        return job.skipped(job.unreachable(client.reach.unreachable_because))
    try:
        batch = job.begin(target)
    except BaseException:
        target.session.put_down()
        raise
    try:
        batch.advance()
        while not batch.is_over:
            if batch.is_starved:
                _wait_for_room(client, job.until_s)
            else:
                _take_one(batch, target.session, mail, job.until_s)
            batch.advance()
    finally:
        batch.close()
    return job.end(Outcome(batch.states, batch.reasons, batch.note), batch)


def _wait_for_room(client: Client, until_s: float) -> None:
    """Wait until slots or requests of others may have ended, at most until the deadline."""
    changed = client.arena.changed
    with changed:
        changed.wait(min(_ROOM_RECHECK_S, max(0.0, until_s - time.monotonic())))


def _take_one(batch: Batch, session: Session, mail: SimpleQueue[tuple[int, Event]], until_s: float) -> None:
    """Take one event, or find that time has run out."""
    came = session.wait(mail, until_s=until_s)
    if came is not None:
        batch.on(*came)
    batch.tick()
