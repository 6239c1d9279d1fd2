"""Background tasks, held until their end; a crash is logged as a bug."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Generator, Sequence
from contextlib import asynccontextmanager, suppress
from contextvars import Context, ContextVar, copy_context
from typing import Any, Generic, TypeVar, cast

from ostraca_fabric.runtime.threads import run_in_background

_T = TypeVar("_T")

log = logging.getLogger(__name__)

_NOWHERE = object()

_begun_in: ContextVar[object] = ContextVar("ostraca_begun_in", default=_NOWHERE)
"""Task, if any, in which the first part of a coroutine runs. Tasks spawned there inherit the value."""


async def in_own_thread(name: str, act: Callable[[], _T]) -> _T:
    """Run *act*, which may hang, in a daemon thread.

    The threads of ``asyncio.to_thread`` are few and shared: hung calls there would stop all others, and the
    end of the event loop. A cancelled caller leaves the call running.
    """
    return await asyncio.shield(asyncio.wrap_future(run_in_background(name, act)))


class Tasks:
    """Background tasks of an owner. The owner must call ``finish`` or ``stop`` in the end."""

    def __init__(self, name: str, *, on_crash: Callable[[], None] | None = None) -> None:
        """Begin without tasks.

        *name* identifies the owner in logs. *on_crash* is called after each crash.
        """
        self._name = name
        self._on_crash = on_crash
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        """Count the tasks that have not ended."""
        return len(self._tasks)

    def spawn(self, coroutine: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        """Start and hold a task."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def begin(self, coroutine: Coroutine[Any, Any, _T]) -> asyncio.Future[_T]:
        """Run *coroutine* up to its first wait, as ``begun``; hold a task for the rest, if any."""
        try:
            rest = begun(coroutine)
        except Exception as error:  # noqa: BLE001 (raised where the future is awaited)
            failed: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
            failed.set_exception(error)
            return failed
        return self.spawn(_finished(rest)) if isinstance(rest, _Rest) else completed(cast("_T", rest))

    async def run_all(self, coroutines: Sequence[Coroutine[Any, Any, None]]) -> None:
        """Run coroutines at once, the last in this task; then raise an exception of any of them."""
        if not coroutines:
            return
        others = [self.spawn(each) for each in coroutines[:-1]]
        try:
            await coroutines[-1]
        finally:
            if others:
                await wait_for_all(others)

    async def finish(self, *, within_s: float | None = None) -> bool:
        """Wait for all tasks, also tasks started meanwhile; tell whether all ended."""
        loop = asyncio.get_running_loop()
        until = None if within_s is None else loop.time() + within_s
        while self._tasks:
            left = None if until is None else until - loop.time()
            if left is not None and left <= 0:
                return False
            await asyncio.wait(set(self._tasks), timeout=left)
        return True

    async def stop(self) -> None:
        """Cancel all tasks and wait for their end.

        Only for loops that wait, never for tasks that access memory.
        """
        for task in set(self._tasks):
            task.cancel()
        await self.finish()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a task of %s crashed; this is a bug in Ostraca", self._name, exc_info=task.exception())
            if self._on_crash is not None:
                self._on_crash()


def begun(coroutine: Coroutine[Any, Any, _T]) -> _T | Awaitable[_T]:
    """Run *coroutine* up to its first wait; return its result, or an awaitable for the rest.

    The first part runs without a task, which would take as long as a short answer. Before code that needs a
    task, such as ``asyncio.timeout``, await ``in_task`` there. Raises as the first part.
    """
    context = copy_context()
    try:
        awaited = context.run(_begin, coroutine)
    except StopIteration as end:
        result: _T = end.value
        return result
    return _Rest(coroutine, context, awaited)


def _begin(coroutine: Coroutine[Any, Any, object]) -> object:
    _begun_in.set(asyncio.current_task())
    return coroutine.send(None)


class _Rest(Generic[_T]):
    """The rest of a coroutine, in the context of its first part. Await it once."""

    def __init__(self, coroutine: Coroutine[Any, Any, _T], context: Context, awaited: object) -> None:
        self._coroutine = coroutine
        self._context = context
        self._awaited = awaited
        """Yielded to the event loop, which the first part had no task for."""

    def __await__(self) -> Generator[Any, Any, _T]:
        coroutine, run, awaited = self._coroutine, self._context.run, self._awaited
        run(_begun_in.set, _NOWHERE)
        try:
            while True:
                try:
                    sent = yield awaited
                except BaseException as error:  # noqa: BLE001 (raised where the coroutine waits)
                    awaited = run(coroutine.throw, error)
                else:
                    awaited = run(coroutine.send, sent)
        except StopIteration as end:
            result: _T = end.value
            return result


async def _finished(rest: Awaitable[_T]) -> _T:
    return await rest


async def in_task() -> None:
    """Continue in a task, in the first part of a coroutine of ``begun``."""
    if _begun_in.get() is asyncio.current_task():
        await asyncio.sleep(0)


@asynccontextmanager
async def meanwhile(name: str, coroutine: Coroutine[Any, Any, object]) -> AsyncIterator[None]:
    """Run *coroutine* as a task until the end of the block; *name* as in ``Tasks``."""
    tasks = Tasks(name)
    tasks.spawn(coroutine)
    try:
        yield
    finally:
        await tasks.stop()


async def until_done(*futures: asyncio.Future[Any]) -> None:
    """Wait until any of the futures is done, whatever its result.

    The end of the wait, also by cancellation, changes none of the futures. ``asyncio.wait`` does the same for
    several times the cost.
    """
    for future in futures:
        if future.done():
            return
    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def wake(_: asyncio.Future[Any]) -> None:
        if not waiter.done():
            waiter.set_result(None)

    for future in futures:
        future.add_done_callback(wake)
    try:
        await waiter
    finally:
        for future in futures:
            future.remove_done_callback(wake)


async def wait_for_all(tasks: Collection[asyncio.Future[None]]) -> None:
    """Wait for the end of all tasks, then raise an exception of any task."""
    for task in tasks:
        await until_done(task)
    for task in tasks:
        task.result()


def completed(result: _T) -> asyncio.Future[_T]:
    """Return a future that is done."""
    future: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
    future.set_result(result)
    return future


async def gathered(coroutines: Sequence[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Run coroutines at once and return their results. A single coroutine takes no task."""
    if len(coroutines) == 1:
        return [await coroutines[0]]
    return await asyncio.gather(*coroutines)


async def set_within(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event, at most *seconds*; return whether the event was set."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            return await event.wait()
    return False


async def changes_of(newest: Callable[[], _T], changed: Callable[[], asyncio.Event]) -> AsyncIterator[_T]:
    """Yield the newest object, and again after a change; *changed* returns the next change's event."""
    seen = None
    while True:
        change = changed()
        if (found := newest()) is not seen:
            seen = found
            yield found
        else:
            await change.wait()
