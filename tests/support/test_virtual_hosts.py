from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from tests.support.simulated.virtual_hosts import HostsLoop, VirtualHost, outside, running_host


class Bench:
    """A loop, and what was noted when."""

    def __init__(self, loop: HostsLoop) -> None:
        self.loop = loop
        self.noted: list[tuple[float, str]] = []

    def note(self, what: str) -> None:
        self.noted.append((round(self.loop.now_s, 6), what))

    async def ticking(self, ticks: int = 3) -> None:
        for tick in range(ticks):
            self.note(f"tick {tick}")
            await asyncio.sleep(1.0)

    def run(self, scenario: Coroutine[Any, Any, None]) -> list[tuple[float, str]]:
        self.loop.run_until_complete(scenario)
        return self.noted


@pytest.fixture
def bench() -> Iterator[Bench]:
    loop = HostsLoop()
    yield Bench(loop)
    loop.close()


def test_a_paused_process_does_later_what_was_due(bench: Bench) -> None:
    host = VirtualHost("a", bench.loop)

    async def scenario() -> None:
        ticking = host.spawn(bench.ticking())
        await asyncio.sleep(0.5)
        host.pause(2.0)
        await ticking

    assert bench.run(scenario()) == [(0.0, "tick 0"), (2.5, "tick 1"), (3.5, "tick 2")]


def test_a_longer_pause_counts_and_a_shorter_one_does_not(bench: Bench) -> None:
    host = VirtualHost("a", bench.loop)

    async def scenario() -> None:
        ticking = host.spawn(bench.ticking(2))
        await asyncio.sleep(0.5)
        host.pause(2.0)
        host.pause(4.0)
        host.pause(1.0)
        await ticking

    assert bench.run(scenario()) == [(0.0, "tick 0"), (4.5, "tick 1")]


def test_a_process_goes_on_although_the_loop_runs_it_within_its_resolution_too_early(bench: Bench) -> None:
    host = VirtualHost("a", bench.loop)

    async def scenario() -> None:
        host.run(lambda: bench.loop.call_at(1.0, bench.note, "waited"))
        bench.loop.call_at(3.0 - 5e-10, bench.note, "just before")
        host.pause(3.0)
        await asyncio.sleep(4.0)

    assert bench.run(scenario()) == [(3.0, "just before"), (3.0, "waited")]


def test_what_leaves_a_process_paused_just_before_leaves_when_it_goes_on(bench: Bench) -> None:
    host = VirtualHost("a", bench.loop)
    clocks = []

    def stop() -> None:
        host.before_acting = None
        host.pause(7.0)

    async def acting() -> None:
        clocks.append(bench.loop.time())
        outside(bench.note, "first")
        clocks.append(bench.loop.time())
        outside(bench.note, "second")
        await asyncio.sleep(0)
        bench.note("after")

    async def scenario() -> None:
        host.before_acting = stop
        await host.spawn(acting())

    assert bench.run(scenario()) == [(7.0, "first"), (7.0, "second"), (7.0, "after")]
    assert clocks == [0.0, 7.0]


def test_what_is_done_outside_is_nobodys_and_goes_on_through_a_pause(bench: Bench) -> None:
    host = VirtualHost("a", bench.loop)

    def later() -> None:
        assert running_host() is None
        bench.loop.call_later(1.0, bench.note, "landed")

    async def scenario() -> None:
        host.run(lambda: outside(later))
        host.pause(5.0)
        await asyncio.sleep(6.0)

    assert bench.run(scenario()) == [(1.0, "landed")]


def test_a_dead_process_does_nothing_more_not_even_at_its_end(bench: Bench) -> None:
    host = VirtualHost("a", bench.loop)

    async def cleaning_up() -> None:
        try:
            await asyncio.sleep(1.0)
        finally:
            outside(bench.note, "cleaned up")

    async def scenario() -> None:
        host.spawn(bench.ticking())
        host.spawn(cleaning_up())
        await asyncio.sleep(0.5)
        host.kill()
        await asyncio.sleep(5.0)
        host.forget()

    assert bench.run(scenario()) == [(0.0, "tick 0")]


def test_nobody_hears_of_what_one_that_dies_had_not_begun(bench: Bench) -> None:
    host = VirtualHost("a", bench.loop)

    async def doing(coroutine: Coroutine[Any, Any, None]) -> None:
        await asyncio.sleep(1.0)
        await coroutine

    async def scenario() -> None:
        host.spawn(doing(bench.ticking()))
        await asyncio.sleep(0.5)
        host.forget()

    assert bench.run(scenario()) == []


def test_one_that_dies_while_it_is_paused_has_not_acted(bench: Bench) -> None:
    host = VirtualHost("a", bench.loop)

    async def scenario() -> None:
        host.before_acting = lambda: host.pause(2.0)
        host.run(lambda: outside(bench.note, "acted"))
        host.kill()
        await asyncio.sleep(5.0)

    assert bench.run(scenario()) == []


@pytest.mark.parametrize("rate", [0.98, 1.0, 1.03])
def test_each_process_waits_by_its_own_clock(bench: Bench, rate: float) -> None:
    host = VirtualHost("a", bench.loop, rate=rate, began_s=1000.0)
    waited = []

    async def waiting() -> None:
        for _ in range(100):
            began_s = bench.loop.time()
            await asyncio.sleep(0.7)
            waited.append(bench.loop.time() - began_s)

    async def scenario() -> None:
        await host.spawn(waiting())

    bench.run(scenario())
    assert min(waited) >= 0.7 - 1e-9
    assert max(waited) < 0.7001
    assert bench.loop.now_s == pytest.approx(70 / rate)


def test_what_a_process_begins_is_its_own(bench: Bench) -> None:
    host = VirtualHost("a", bench.loop)
    seen: list[VirtualHost | None] = []

    def look() -> None:
        seen.append(running_host())

    async def child() -> None:
        look()

    async def parent() -> None:
        await asyncio.gather(child(), child())
        asyncio.get_running_loop().call_later(1.0, look)
        outside(look)

    async def scenario() -> None:
        await host.spawn(parent())
        await asyncio.sleep(2.0)
        look()

    bench.run(scenario())
    assert seen == [host, host, None, host, None]


def test_a_cancelled_timer_of_a_paused_process_stays_cancelled(bench: Bench) -> None:
    host = VirtualHost("a", bench.loop)

    async def scenario() -> None:
        call: Callable[[], asyncio.TimerHandle] = lambda: bench.loop.call_later(1.0, bench.note, "rang")  # noqa: E731
        timer = host.run(call)
        host.pause(3.0)
        await asyncio.sleep(2.0)
        timer.cancel()
        await asyncio.sleep(2.0)

    assert bench.run(scenario()) == []
