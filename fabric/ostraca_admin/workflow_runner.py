"""Runner of long operations, step by step, with one admin per operation at a time.

The holder of an operation's ``work`` record runs the operation, and all writes depend on the record. A
stopped admin cannot write after a takeover. Another admin may repeat any step from the beginning: a step
leaves completed work as is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

import msgspec

from ostraca_admin.model import Operation, OperationState, Step, decode, encode
from ostraca_admin.workflows.preflight import StepDone, StepFailed, StepPending
from ostraca_admin.workflows.step_context import StepResult
from ostraca_admin.workflows.steps import Steps
from ostraca_fabric.errors import MembershipError, OstracaError
from ostraca_fabric.model import record_keys
from ostraca_fabric.ports.records import Record, RecordChange, RecordLock, Records
from ostraca_fabric.runtime.tasks import Tasks, set_within
from ostraca_fabric.telemetry.log_lines import LogDedup

log = logging.getLogger(__name__)

_POLL_S = 2.0
"""Interval of the search for abandoned operations of a crashed admin."""


class OperationLostError(OstracaError):
    """The operation was cancelled or taken over by another admin."""


class WorkflowRunner:
    """Operation runner of an admin. Call ``run``; on cancellation, other admins take over."""

    def __init__(
        self,
        records: Records,
        steps: Steps,
        *,
        name: str,
        unix_s: Callable[[], float],
        poll_s: float = _POLL_S,
    ) -> None:
        """Run the operations in *records* by *steps*; *name* identifies this admin there."""
        self._records = records
        self._steps = steps
        self._name = name
        self._unix_s = unix_s
        self._poll_s = poll_s
        self._running: dict[str, asyncio.Task[None]] = {}
        self._tasks = Tasks("operations")
        self._wake = asyncio.Event()

    def wake(self) -> None:
        """Search for work at once; call after recording an operation."""
        self._wake.set()

    async def run(self) -> None:
        """Run operations until cancelled."""
        waits = LogDedup(log)
        try:
            while True:
                self._wake.clear()
                try:
                    await self._start_all()
                except MembershipError as error:
                    waits.report("Operations wait for etcd: %s", error)
                else:
                    waits.resolve("Operations continue")
                await set_within(self._wake, self._poll_s)
        finally:
            await self._tasks.stop()

    async def _start_all(self) -> None:
        for record in await self._records.below(record_keys.OPERATIONS):
            try:
                operation = decode(record, Operation)
            except MembershipError as error:
                log.warning("Operation record %s is skipped: %s", record.key, error)
                continue
            if operation.state is OperationState.RUNNING and operation.id not in self._running:
                task = self._tasks.spawn(self._run_operation(operation.id))
                self._running[operation.id] = task
                task.add_done_callback(partial(self._done, operation.id))

    def _done(self, number: str, _: asyncio.Task[None]) -> None:
        self._running.pop(number, None)

    async def _run_operation(self, number: str) -> None:
        try:
            hold = await self._records.hold(record_keys.work(number), encode(_Holder(1, self._name)))
        except MembershipError as error:
            log.warning("Operation %s cannot start, retrying: %s", number, error)
            return
        if hold is None:
            return
        try:
            await self._run_held(number, hold)
        except OperationLostError as error:
            log.info("Operation %s: %s", number, error)
        except MembershipError as error:
            log.warning("Operation %s is interrupted, retrying: %s", number, error)
        finally:
            try:
                await self._records.let_go(hold)
            except MembershipError as error:
                log.warning("Operation %s stays locked until the lease ends: %s", number, error)

    async def _run_held(self, number: str, hold: RecordLock) -> None:
        while True:
            operation, revision = await self._read(number)
            step = operation.next_step()
            if operation.state is not OperationState.RUNNING:
                return
            assert step is not None, "the last step ends its operation"
            if step.state is not OperationState.RUNNING:
                step = msgspec.structs.replace(
                    step, state=OperationState.RUNNING, began_unix_s=self._unix_s()
                )
                operation = operation.with_step(step)
                revision = await self._write(operation, revision, hold)
                log.info(
                    "Operation %s: %s of %s: %s", number, operation.kind.value, operation.subject, step.name
                )
            await self._run_step(operation, step, revision, hold)

    async def _run_step(self, operation: Operation, step: Step, revision: int, hold: RecordLock) -> None:
        """Run a step as far as possible, and record the result."""
        try:
            result = await self._steps.run(operation, step, hold)
        except MembershipError:
            raise
        except OstracaError as error:
            result = StepResult(StepFailed(str(error)))
        verdict, now_s = result.verdict, self._unix_s()
        if isinstance(verdict, StepPending):
            step = msgspec.structs.replace(step, message=verdict.message, detail=verdict.detail)
            operation = operation.with_step(step)
            progress = operation.progress if verdict.progress is None else verdict.progress
            operation = msgspec.structs.replace(operation, progress=progress, ends_in_s=verdict.ends_in_s)
            await self._write(operation, revision, hold, *result.changes, unchanged=result.unchanged)
            await asyncio.sleep(verdict.retry_s)
            return
        state = OperationState.DONE if isinstance(verdict, StepDone) else OperationState.FAILED
        step = msgspec.structs.replace(
            step, state=state, message=verdict.message, ended_unix_s=now_s, detail=verdict.detail
        )
        operation = operation.with_step(step)
        log.info("Operation %s: %s: %s: %s", operation.id, step.name, state.value, verdict.message)
        if isinstance(verdict, StepFailed):
            operation = _ended(operation, OperationState.FAILED, f"{step.name}: {verdict.message}", now_s)
        elif operation.next_step() is None:
            operation = _ended(operation, OperationState.DONE, verdict.message, now_s)
        await self._write(operation, revision, hold, *result.changes, unchanged=result.unchanged)

    async def _read(self, number: str) -> tuple[Operation, int]:
        record: Record | None = await self._records.get(record_keys.operation(number))
        if record is None:
            raise OperationLostError("the record is gone")
        return decode(record, Operation), record.revision

    async def _write(
        self,
        operation: Operation,
        revision: int,
        hold: RecordLock,
        *changes: RecordChange,
        unchanged: dict[str, int] | None = None,
    ) -> int:
        """Record progress while this admin holds the operation. Raises OperationLostError otherwise."""
        at = record_keys.operation(operation.id)
        written = await self._records.write(
            [RecordChange(at, encode(operation)), *changes],
            unchanged={**(unchanged or {}), at: revision, hold.key: hold.revision},
        )
        if written is None:
            raise OperationLostError("cancelled, taken over by another admin, or its subject has changed")
        return written


class _Holder(msgspec.Struct, frozen=True):
    version: int
    admin: str


def _ended(operation: Operation, state: OperationState, message: str, now_s: float) -> Operation:
    progress = 1.0 if state is OperationState.DONE else operation.progress
    return msgspec.structs.replace(
        operation, state=state, message=message, progress=progress, ends_in_s=None, ended_unix_s=now_s
    )
