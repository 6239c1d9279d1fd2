"""Does long work, step by step: one admin at a time for each operation.

Whoever holds an operation's ``work`` record does it, and writes under it: an admin that was stopped, and
whose work another has taken over, writes nothing any more. Every step may be done again, from the beginning,
by another admin: what it finds done it leaves so.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from ostraca_fabric import record_keys
from ostraca_fabric.admin.judging import Again, Done, Failed
from ostraca_fabric.admin.model import Operation, State, Step, decode, encode
from ostraca_fabric.errors import MembershipError, OstracaError
from ostraca_fabric.ports.records import Written
from ostraca_fabric.spells import Spell
from ostraca_fabric.tasks import Tasks

if TYPE_CHECKING:
    from collections.abc import Callable

    from ostraca_fabric.admin.steps import Steps
    from ostraca_fabric.ports.records import Hold, Record, Records

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 2.0
"""How often operations are looked for that nobody does: those of an admin that is gone."""


class GoneError(OstracaError):
    """The operation is another admin's by now, or was cancelled."""


class Worker:
    """One admin's. ``run`` it; cancelled, it leaves what it does to others."""

    def __init__(
        self,
        records: Records,
        steps: Steps,
        *,
        name: str,
        unix_s: Callable[[], float],
        look_every_s: float = _LOOK_EVERY_S,
    ) -> None:
        """Do what is written in *records* by *steps*; *name* says there who does it."""
        self._records = records
        self._steps = steps
        self._name = name
        self._unix_s = unix_s
        self._look_every_s = look_every_s
        self._doing: dict[str, asyncio.Task[None]] = {}
        self._tasks = Tasks("long work")
        self._look = asyncio.Event()

    def look_now(self) -> None:
        """Look for work: some was just written down."""
        self._look.set()

    async def run(self) -> None:
        """Do work until cancelled."""
        waits = Spell(log)
        try:
            while True:
                self._look.clear()
                try:
                    await self._begin_all()
                except MembershipError as error:
                    waits.goes_on("Long work waits: %s", error)
                else:
                    waits.over("Long work waits no more")
                try:
                    async with asyncio.timeout(self._look_every_s):
                        await self._look.wait()
                except TimeoutError:
                    pass
        finally:
            await self._tasks.stop()

    async def _begin_all(self) -> None:
        for record in await self._records.below(record_keys.OPERATIONS):
            try:
                operation = decode(record.value, Operation)
            except MembershipError as error:
                log.warning("%s is left to others: %s", record.key, error)
                continue
            if operation.state is State.RUNNING and operation.id not in self._doing:
                doing = self._tasks.spawn(self._do(operation.id))
                self._doing[operation.id] = doing
                doing.add_done_callback(partial(self._done, operation.id))

    def _done(self, number: str, _: asyncio.Task[None]) -> None:
        self._doing.pop(number, None)

    async def _do(self, number: str) -> None:
        try:
            hold = await self._records.hold(record_keys.work(number), encode(_Doer(1, self._name)))
        except MembershipError as error:
            log.warning("Operation %s can't be begun now: %s", number, error)
            return
        if hold is None:
            return
        try:
            await self._do_held(number, hold)
        except GoneError as error:
            log.info("Operation %s: %s", number, error)
        except MembershipError as error:
            log.warning("Operation %s is left for a while: %s", number, error)
        finally:
            try:
                await self._records.let_go(hold)
            except MembershipError as error:
                log.warning("Operation %s can't be let go, our lease will: %s", number, error)

    async def _do_held(self, number: str, hold: Hold) -> None:
        while True:
            operation, revision = await self._read(number)
            step = operation.next_step()
            if operation.state is not State.RUNNING:
                return
            if step is None:
                await self._write(_ended(operation, State.DONE, "done", self._unix_s()), revision, hold)
                return
            if step.state is not State.RUNNING:
                step = msgspec.structs.replace(step, state=State.RUNNING, began_unix_s=self._unix_s())
                operation = operation.with_step(step)
                revision = await self._write(operation, revision, hold)
                log.info(
                    "Operation %s: %s of %s: %s", number, operation.kind.value, operation.subject, step.name
                )
            await self._take(operation, step, revision, hold)

    async def _take(self, operation: Operation, step: Step, revision: int, hold: Hold) -> None:
        """Do one step as far as it goes, and write down what it came to."""
        try:
            taken = await self._steps.take(operation, step, hold)
        except MembershipError:
            raise
        except OstracaError as error:
            taken = self._steps.failed(str(error))
        verdict, now_s = taken.verdict, self._unix_s()
        if isinstance(verdict, Again):
            step = msgspec.structs.replace(step, message=verdict.message, detail=verdict.detail)
            operation = operation.with_step(step)
            progress = operation.progress if verdict.progress is None else verdict.progress
            operation = msgspec.structs.replace(operation, progress=progress, ends_in_s=verdict.ends_in_s)
            await self._write(operation, revision, hold, *taken.changes, unchanged=taken.unchanged)
            await asyncio.sleep(verdict.after_s)
            return
        state = State.DONE if isinstance(verdict, Done) else State.FAILED
        step = msgspec.structs.replace(
            step, state=state, message=verdict.message, ended_unix_s=now_s, detail=verdict.detail
        )
        operation = operation.with_step(step)
        log.info("Operation %s: %s: %s: %s", operation.id, step.name, state.value, verdict.message)
        if isinstance(verdict, Failed):
            operation = _ended(operation, State.FAILED, f"{step.name}: {verdict.message}", now_s)
        elif operation.next_step() is None:
            operation = _ended(operation, State.DONE, verdict.message, now_s)
        await self._write(operation, revision, hold, *taken.changes, unchanged=taken.unchanged)

    async def _read(self, number: str) -> tuple[Operation, int]:
        record: Record | None = await self._records.get(record_keys.operation(number))
        if record is None:
            message = "it is not there any more"
            raise GoneError(message)
        return decode(record.value, Operation), record.revision

    async def _write(
        self,
        operation: Operation,
        revision: int,
        hold: Hold,
        *changes: Written,
        unchanged: dict[str, int] | None = None,
    ) -> int:
        """Write down how far it is, while it is ours. Raises GoneError when it is not."""
        at = record_keys.operation(operation.id)
        made = await self._records.write(
            [Written(at, encode(operation)), *changes],
            unchanged={**(unchanged or {}), at: revision, hold.key: hold.revision},
        )
        if made is None:
            message = "it was cancelled, or another admin does it, or what it was about has changed"
            raise GoneError(message)
        return made


class _Doer(msgspec.Struct, frozen=True):
    version: int
    admin: str


def _ended(operation: Operation, state: State, message: str, now_s: float) -> Operation:
    progress = 1.0 if state is State.DONE else operation.progress
    return msgspec.structs.replace(
        operation, state=state, message=message, progress=progress, ends_in_s=None, ended_unix_s=now_s
    )
