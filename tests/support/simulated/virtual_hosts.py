"""Several processes on one virtual loop: each can be stopped at any moment and killed, and has its own clock.

What a process does is run *in* it (``VirtualHost.run``, ``spawn``), and whatever that schedules is its own,
too. A paused process runs nothing until it goes on, in the order in which things were due; a dead one never
runs anything again, not even what a cancelled task would.

What is outside of processes (a network, a drive, a store) must go on without them. So ports that are
simulated do their work by ``outside``: it belongs to nobody, and is done only once the process that asks for
it runs. A process can be paused between a check and what it does upon it: ``before_acting`` is called just
before anything leaves it, and when that pauses it, what was to be done waits until it goes on, however late
that is by then.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import warnings
from collections import deque
from contextvars import Context, ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

from tests.support.simulated.virtual_time import VirtualLoop

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Generator

_T = TypeVar("_T")
_Arguments = TypeVarTuple("_Arguments")

_ROUND_UP_S = 2e-9
"""Added where a process's time is made the loop's, so that no timer is early by its process's own clock. The
loop's own resolution is half of that."""

_TASKS_KEPT = 64


class VirtualHost:
    """One process. Its clock runs *rate* times as fast as the loop's, from *began_s* on."""

    def __init__(self, name: str, loop: HostsLoop, *, rate: float = 1.0, began_s: float = 0.0) -> None:
        """Be there; ``run`` and ``spawn`` let it do something."""
        self.name = name
        self.is_dead = False
        self.is_paused = False
        """Whether it runs nothing just now."""

        self.goes_on_at_s = 0.0
        """By the loop's clock: when the last pause ends."""

        self.before_acting: Callable[[], None] | None = None
        """Called in the process before anything leaves it; may pause it."""

        self._loop = loop
        self._rate = rate
        self._began_s = began_s
        self._zero_s = loop.now_s
        self._waiting: deque[asyncio.Handle] = deque()
        self._held: list[Callable[[], object]] = []
        self._tasks: list[asyncio.Task[Any]] = []
        self._tasks_kept = _TASKS_KEPT
        self._context = Context()
        self._context.run(_HOST.set, self)

    @property
    def holds_acts(self) -> bool:
        """Whether it was paused just before something left it, which waits until it goes on."""
        return bool(self._held)

    def clock(self) -> float:
        """Return its own time. In the middle of what was cut by a pause, that is when it goes on."""
        now_s = self._loop.now_s
        if now_s < self.goes_on_at_s and _HOST.get() is self:
            now_s = self.goes_on_at_s
        return self._began_s + (now_s - self._zero_s) * self._rate

    def loop_time(self, own_s: float) -> float:
        """Return when the loop's clock shall show at least this much of its own time."""
        return self._zero_s + (own_s - self._began_s) / self._rate + _ROUND_UP_S

    def pause(self, for_s: float) -> None:
        """Let it run nothing for a while, from this very moment on. A pause that is under way may grow."""
        until_s = self._loop.now_s + for_s
        if until_s > self.goes_on_at_s:
            self.is_paused, self.goes_on_at_s = True, until_s
            Context().run(self._loop.call_at, until_s, self._go_on, until_s)

    def kill(self) -> None:
        """End it: nothing of it happens any more."""
        self.is_dead = True
        self._waiting.clear()

    def run(self, act: Callable[[], _T]) -> _T:
        """Do something in it, now: what begins it."""
        return self._context.copy().run(act)

    def call_soon(self, act: Callable[..., object], *arguments: object) -> None:
        """Have it do something as soon as it runs, after what it has to do already."""
        self._loop.call_soon(act, *arguments, context=self._context)

    def spawn(self, coroutine: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        """Begin a task of it."""
        return self._loop.create_task(coroutine, context=self._context.copy())

    def admits(self, handle: asyncio.Handle) -> bool:
        """Say whether something of it may be run now; what may not is kept for later, or forgotten."""
        if self.is_dead:
            return False
        if self.is_paused:
            self._waiting.append(handle)
            return False
        return True

    def keep(self, task: asyncio.Task[Any]) -> None:
        """Hold a task of it: one that nobody refers to would be torn down in the middle of something."""
        self._tasks.append(task)
        if len(self._tasks) > self._tasks_kept:
            self._tasks = [each for each in self._tasks if not each.done()]
            self._tasks_kept = max(_TASKS_KEPT, 2 * len(self._tasks))

    def forget(self) -> None:
        """Tear down what is left of it when everything is over, and let nobody hear of it."""
        self.kill()
        tasks, self._tasks = self._tasks, []
        with warnings.catch_warnings(category=RuntimeWarning, action="ignore"):  # of what it never began
            for task in tasks:
                if not task.done():
                    self._context.copy().run(_tear_down, task)

    def act(self, act: Callable[[], object]) -> None:
        """Do something outside for it, now or when it goes on."""
        if self.before_acting is not None and not self.is_paused and not self.is_dead:
            self.before_acting()
        if self.is_paused:
            self._held.append(act)
        elif not self.is_dead:
            Context().run(act)

    def _go_on(self, at_s: float) -> None:
        # Not held against the loop's clock: that may be a little earlier when it runs what is due.
        if at_s < self.goes_on_at_s or self.is_dead:
            return
        self.is_paused = False
        held, self._held = self._held, []
        for act in held:
            Context().run(act)
        self._loop.go_on_with(self._waiting)
        self._waiting = deque()


def outside(act: Callable[..., object], *arguments: object) -> None:
    """Do something for the process that runs now, outside of it.

    At once where it runs and lives; when it goes on where it was paused in this very moment; never where it
    is dead by then. What *act* schedules is nobody's.
    """
    host = _HOST.get()
    if host is None:
        Context().run(act, *arguments)
    else:
        host.act(partial(act, *arguments))


def running_host() -> VirtualHost | None:
    """Return the process that runs now; None outside of all."""
    return _HOST.get()


class HostsLoop(VirtualLoop):
    """A virtual loop for several ``VirtualHost``; in each, ``time`` and timers are by its own clock."""

    # What asyncio.BaseEventLoop has, and does not declare.
    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]

    @property
    def now_s(self) -> float:
        """The loop's own clock, whoever asks."""
        return self._jumping.now_s

    def time(self) -> float:
        """Return the time by the clock of the process that asks."""
        host = _HOST.get()
        return self._jumping.now_s if host is None else host.clock()

    def call_soon(
        self, callback: Callable[[*_Arguments], object], *args: *_Arguments, context: Context | None = None
    ) -> asyncio.Handle:
        """As any loop's; it waits while the process whose it is waits."""
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(
        self,
        when: float,
        callback: Callable[[*_Arguments], object],
        *args: *_Arguments,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """As any loop's, by the clock of the process that asks."""
        host = _HOST.get()
        timer = _Timer(when if host is None else host.loop_time(when), callback, args, self, context)
        heapq.heappush(self._scheduled, timer)
        timer._scheduled = True
        return timer

    def create_task(
        self,
        coro: Generator[Any, None, _T] | Coroutine[Any, Any, _T],
        *,
        name: object = None,
        context: Context | None = None,
    ) -> asyncio.Task[_T]:
        """As any loop's; its process holds it."""
        task = super().create_task(coro, name=name, context=context)
        host = _HOST.get() if context is None else context.get(_HOST)
        if host is not None:
            host.keep(task)
        return task

    def _asyncgen_finalizer_hook(self, agen: AsyncGenerator[Any, Any]) -> None:
        """As any loop's, but for what a dead process leaves behind: nothing of that goes on."""
        host = _HOST.get()
        if host is None or not host.is_dead:
            super()._asyncgen_finalizer_hook(agen)  # type: ignore[misc]  # not declared

    def go_on_with(self, handles: deque[asyncio.Handle]) -> None:
        """Run what has waited, before anything else that is due."""
        self._ready.extendleft(reversed(handles))


class _Handle(asyncio.Handle):
    __slots__ = ()

    _context: Context

    def _run(self) -> None:
        host = self._context.get(_HOST)
        if host is None or host.admits(self):
            super()._run()


class _Timer(asyncio.TimerHandle):
    __slots__ = ()

    _context: Context
    _scheduled: bool

    def _run(self) -> None:
        host = self._context.get(_HOST)
        if host is None or host.admits(self):
            super()._run()


_HOST: ContextVar[VirtualHost | None] = ContextVar("host", default=None)


def _tear_down(task: asyncio.Task[Any]) -> None:
    """Close the coroutine of a task that will never go on; whatever it says to that counts for nothing."""
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    coroutine = task.get_coro()
    assert coroutine is not None, "a task that has not ended has a coroutine"
    with contextlib.suppress(Exception, asyncio.CancelledError):  # of a process that is no more
        coroutine.close()
