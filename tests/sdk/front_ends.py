"""The three front ends with one face: each does an operation and returns what the blocking call would."""

from __future__ import annotations

import asyncio
import select
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import ostraca
from ostraca import aio
from ostraca._operations.completions import Completion

OPERATIONS = ("lookup", "prefetch", "get", "get_views", "put", "put_slots")


class _FrontEnd:
    """A volume whose operations go through another front end. Everything else is the volume's own."""

    def __init__(
        self, volume: ostraca.Volume, perform: Callable[[str, tuple[Any, ...], dict[str, Any]], Any]
    ) -> None:
        self._volume = volume
        self._perform = perform

    def __getattr__(self, name: str) -> Any:
        if name not in OPERATIONS:
            return getattr(self._volume, name)
        return lambda *args, **kwargs: self._perform(name, args, kwargs)


class Taker:
    """Waits for one ticket among several threads, as an engine's event loop would for many."""

    def __init__(self, client: ostraca.Client) -> None:
        self._client = client
        self._done: dict[ostraca.Ticket, Completion] = {}
        self._lock = threading.Lock()

    def wait(self, ticket: ostraca.Ticket) -> Any:
        while True:
            with self._lock:
                self._done.update({done.ticket: done for done in self._client.take_completions()})
                done = self._done.pop(ticket, None)
            if done is None:
                select.select([self._client.fileno()], [], [], 0.01)
            elif done.error is not None:
                raise done.error
            else:
                return done.result


@contextmanager
def submitting(client: ostraca.Client, volume: ostraca.Volume, taker: Taker | None = None) -> Iterator[Any]:
    """Submit. Whoever submits on several volumes of a client has one taker for all of them."""
    taker = taker or Taker(client)

    def perform(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return taker.wait(getattr(volume, f"submit_{name}")(*args, **kwargs))

    yield _FrontEnd(volume, perform)


@contextmanager
def awaiting(client: ostraca.Client, volume: ostraca.Volume) -> Iterator[Any]:
    awaited = aio.AsyncVolume(volume)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def perform(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        operation: Coroutine[Any, Any, Any] = getattr(awaited, name)(*args, **kwargs)
        return asyncio.run_coroutine_threadsafe(operation, loop).result()

    try:
        yield _FrontEnd(volume, perform)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextmanager
def blocking(_: ostraca.Client, volume: ostraca.Volume) -> Iterator[Any]:
    yield volume


FrontEnd = Callable[[ostraca.Client, ostraca.Volume], AbstractContextManager[Any]]

FRONT_ENDS: dict[str, FrontEnd] = {"blocking": blocking, "submitting": submitting, "awaiting": awaiting}
