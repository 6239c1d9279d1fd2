"""Tests of tasks, and of coroutines whose first part runs without a task."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import pytest

from ostraca_fabric.runtime.tasks import Tasks, begun, in_task
from ostraca_fabric.telemetry.requests import current_label, labelled


async def test_a_coroutine_that_never_waits_ends_at_once() -> None:
    async def work() -> str:
        with labelled("short"):
            return current_label()

    assert begun(work()) == "short"
    assert current_label() == ""


async def test_a_coroutine_that_waits_goes_on_where_it_is_awaited() -> None:
    first, second = (asyncio.get_running_loop().create_future() for _ in range(2))

    async def work() -> list[str]:
        with labelled("long"):
            return [await first, current_label(), await second, current_label()]

    rest = begun(work())
    assert isinstance(rest, Awaitable)
    assert current_label() == ""
    asyncio.get_running_loop().call_soon(second.set_result, "b")
    first.set_result("a")
    assert await rest == ["a", "long", "b", "long"]


async def test_an_error_is_raised_where_it_happens() -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def work(*, waits: bool) -> None:
        if waits:
            await future
        raise KeyError

    with pytest.raises(KeyError):
        begun(work(waits=False))
    rest = begun(work(waits=True))
    assert isinstance(rest, Awaitable)
    future.set_result(None)
    with pytest.raises(KeyError):
        await rest


async def test_a_failed_future_raises_in_the_coroutine() -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def work() -> str:
        try:
            await future
        except ValueError:
            return "caught"
        return "missed"

    rest = begun(work())
    assert isinstance(rest, Awaitable)
    future.set_exception(ValueError())
    assert await rest == "caught"


async def test_a_cancelled_task_cancels_the_coroutine() -> None:
    ended = []

    async def work() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.append(current_label())

    async def wait_for(rest: Awaitable[None]) -> None:
        await rest

    with labelled("cancelled"):
        rest = begun(work())
    assert isinstance(rest, Awaitable)
    task = asyncio.create_task(wait_for(rest))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["cancelled"]


async def test_code_that_needs_a_task_gets_one() -> None:
    answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    answer.set_result("in time")

    async def work() -> str:
        await in_task()
        async with asyncio.timeout(60):
            return await answer

    rest = begun(work())
    assert isinstance(rest, Awaitable)
    assert await rest == "in time"
    assert await work() == "in time"


async def test_a_task_spawned_in_a_first_part_needs_no_turn_to_be_in_a_task() -> None:
    turns = list[int]()

    async def spawned() -> None:
        asyncio.get_running_loop().call_soon(turns.append, 1)
        await in_task()
        assert not turns

    async def work() -> None:
        await asyncio.get_running_loop().create_task(spawned())

    rest = begun(work())
    assert isinstance(rest, Awaitable)
    await rest


async def test_a_begun_value_is_there_at_once_without_a_task() -> None:
    async def work() -> str:
        return "now"

    tasks = Tasks("the test")
    done = tasks.begin(work())
    assert done.done()
    assert (done.result(), len(tasks)) == ("now", 0)


async def test_what_waits_is_begun_at_once_and_held_to_its_end() -> None:
    future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    steps, task = list[str](), asyncio.current_task()

    async def work() -> str:
        steps.append("begun")
        steps.append(await future)
        assert asyncio.current_task() is not task, "the rest has a task of its own"
        return current_label()

    tasks = Tasks("the test")
    with labelled("held"):
        rest = tasks.begin(work())
    assert (steps, rest.done(), len(tasks)) == (["begun"], False, 1)
    future.set_result("ended")
    assert await tasks.finish(within_s=60)
    assert (steps, rest.result(), len(tasks)) == (["begun", "ended"], "held", 0)


async def test_an_error_of_a_begun_coroutine_is_raised_where_its_future_is_awaited(
    caplog: pytest.LogCaptureFixture,
) -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def work(*, waits: bool) -> None:
        if waits:
            await future
        raise KeyError

    tasks = Tasks("the test")
    at_once, later = tasks.begin(work(waits=False)), tasks.begin(work(waits=True))
    assert (at_once.done(), later.done()) == (True, False)
    future.set_result(None)
    for each in (at_once, later):
        with pytest.raises(KeyError):
            await each
    assert await tasks.finish(within_s=60)
    assert caplog.text.count("a task of the test crashed") == 1


async def test_the_last_of_several_coroutines_takes_no_task_and_all_end_before_an_error_is_raised() -> None:
    tasks, own, events = Tasks("a test"), asyncio.current_task(), list[object]()
    is_last_done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def failing() -> None:
        events.append(asyncio.current_task() is own)
        raise ValueError("first")

    async def waiting() -> None:
        await is_last_done
        events.append("waited")

    async def last() -> None:
        events.append(asyncio.current_task() is own)
        is_last_done.set_result(None)

    with pytest.raises(ValueError, match="first"):
        await tasks.run_all([failing(), waiting(), last()])
    assert events == [True, False, "waited"]
    await tasks.run_all([])
