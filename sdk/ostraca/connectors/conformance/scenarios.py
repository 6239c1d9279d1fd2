"""Scenarios: behaviour that an engine may expect of every connector.

Each scenario has a fabric to itself, and raises AssertionError on failure.
"""

from __future__ import annotations

import re
import shlex
import threading
import time
from collections.abc import Callable
from types import MappingProxyType

import numpy as np

from ostraca.connectors.conformance.bench import (
    PAGES,
    PROMPT,
    SHORT_S,
    ConformanceBench,
    content,
    find,
    load,
    load_all,
    miss,
    refuse,
    store,
    timely,
    until,
)
from ostraca.connectors.conformance.ports import RANDOM_SEED, Connector, FabricUnderTest, Pages

_DAMAGED = 2
"""Number of the damaged page."""

_TURNS = 3
_WAIT_S = 0.3
_STORM_S = 2.0
_DIALS_MAX = 20
"""Most calls in ``_STORM_S`` of ceaseless requests to an agent that hangs up."""


def run(scenario: str, connector: Connector, fabric: FabricUnderTest) -> None:
    """Run a scenario by name on a fabric not yet started. Raises AssertionError on failure."""
    SCENARIOS[scenario](ConformanceBench(connector, fabric))


def _flipped(bench: ConformanceBench) -> None:
    _damaged(bench, lambda pages: np.append(pages[_DAMAGED, :99], pages[_DAMAGED, 99] ^ np.uint8(1)))


def _truncated(bench: ConformanceBench) -> None:
    def cut(pages: Pages) -> Pages:
        half = pages.shape[1] // 2
        return np.concatenate([pages[_DAMAGED, :half], np.zeros(half, np.uint8)])

    _damaged(bench, cut)


def _swapped(bench: ConformanceBench) -> None:
    _damaged(bench, lambda pages: pages[_DAMAGED + 1])


def _stale(bench: ConformanceBench) -> None:
    """Put the bytes that an earlier layout had for the same page in the page's place."""
    bench.fabric.start()
    with bench.engine("earlier") as engine:
        earlier = content(engine, seed=1)
        store(engine, earlier)
    bench.fabric.stop()
    _damaged(bench, lambda _: earlier[_DAMAGED])


def _damaged(bench: ConformanceBench, damage: Callable[[Pages], Pages]) -> None:
    """Damage a stored page on flash: the page is missing, and pages before it are not.

    *damage* returns new bytes for the beginning of the damaged page's first block.
    """
    bench.fabric.start()
    with bench.engine() as engine:
        pages, block_bytes = content(engine), engine.block_bytes
        store(engine, pages)
    bench.fabric.stop()
    damaged = damage(pages[:, :block_bytes])[:block_bytes]
    bench.fabric.overwrite(pages[_DAMAGED].tobytes(), damaged.tobytes())
    bench.fabric.start()
    with bench.engine() as engine:
        find(engine, _DAMAGED)
        are_good = load(engine, pages)
        assert all(are_good[:_DAMAGED]), "pages before the damaged page are lost"
        assert not are_good[_DAMAGED], "a damaged page counts as loaded"
        until(lambda: not engine.lookup(PROMPT, PAGES)[_DAMAGED], "a damaged page is found for ever")


def _late(bench: ConformanceBench) -> None:
    bench.fabric.start()
    with bench.engine(deadline_s=SHORT_S) as engine:
        pages = content(engine)
        store(engine, pages)
        bench.fabric.freeze()
        are_good, memory = timely(lambda: engine.load(PROMPT, PAGES))
        assert not any(are_good), "a frozen agent delivers"
        before = memory.copy()
        bench.fabric.thaw()
        load_all(engine, pages)
        time.sleep(_WAIT_S)
        assert np.array_equal(memory, before), "bytes landed after the end of the load"


def _stuck(bench: ConformanceBench) -> None:
    _away(bench, bench.fabric.freeze, bench.fabric.thaw, deadline_s=SHORT_S)


def _gone_and_back(bench: ConformanceBench) -> None:
    _away(bench, bench.fabric.stop, bench.fabric.start, deadline_s=5.0)


def _away(
    bench: ConformanceBench, begin: Callable[[], None], end: Callable[[], object], *, deadline_s: float
) -> None:
    """Ask and store during an outage: each request ends, and the engine goes on afterwards."""
    bench.fabric.start()
    with bench.engine(deadline_s=deadline_s) as engine:
        pages = content(engine)
        store(engine, pages)
        begin()
        for _ in range(_TURNS):
            miss(engine, pages)
            refuse(engine, pages)
        end()
        load_all(engine, pages)


def _storm(bench: ConformanceBench) -> None:
    bench.fabric.start()
    with bench.engine() as engine:
        pages = content(engine)
        store(engine, pages)
        bench.fabric.stop()
        with bench.fabric.hang_up() as calls:
            until_s = time.monotonic() + _STORM_S
            while time.monotonic() < until_s:
                miss(engine, pages)
        assert 0 < len(calls) <= _DIALS_MAX, f"{len(calls)} calls in {_STORM_S} s to an agent that hangs up"


def _absent(bench: ConformanceBench) -> None:
    with bench.engine() as engine:
        pages = content(engine)
        for _ in range(_TURNS):
            miss(engine, pages)
            refuse(engine, pages)
        bench.fabric.start()
        store(engine, pages)
        load_all(engine, pages)


def _killed(bench: ConformanceBench) -> None:
    """Kill the agent during loads and stores."""
    bench.fabric.start()
    with bench.engine() as engine:
        pages = content(engine)
        store(engine, pages)
    bench.fabric.stop()
    bench.fabric.start()
    with bench.engine() as engine:
        for turn in range(_TURNS):
            load_all(engine, pages)
            killing = threading.Timer(_WAIT_S, bench.fabric.kill)
            killing.start()
            while killing.is_alive():
                load(engine, pages)
                timely(lambda turn=turn: engine.store(str(turn), pages))  # type: ignore[misc]  # a default
            killing.join()
            miss(engine, pages)
            bench.fabric.start()
        load_all(engine, pages)


def _two_engines(bench: ConformanceBench) -> None:
    bench.fabric.start()
    with bench.engine() as one, bench.engine() as other:
        pages = content(one)
        storing = [
            threading.Thread(target=engine.store, args=(PROMPT, pages), name="store")
            for engine in (one, other)
        ]
        for thread in storing:
            thread.start()
        for thread in storing:
            thread.join()
        store(one, pages)
        find(other)
        for engine in (one, other):
            load_all(engine, pages)


def _restart(bench: ConformanceBench) -> None:
    bench.fabric.start()
    with bench.engine() as engine:
        pages = content(engine)
        store(engine, pages)
    for _ in range(2):
        with bench.engine() as engine:
            find(engine)
            load_all(engine, pages)
        bench.fabric.stop()
        bench.fabric.start()


def _wrong_layout(bench: ConformanceBench) -> None:
    bench.fabric.start()
    with bench.engine() as engine, bench.engine("other") as other:
        pages, others = content(engine), content(other, seed=1)
        store(engine, pages)
        store(other, others, "connected")
        assert not any(other.lookup(PROMPT, PAGES)), "a page of another layout is found"
        store(other, others)
        load_all(other, others)
        load_all(engine, pages)


def _seeds(bench: ConformanceBench) -> None:
    """Two engines with different seeds share pages, or a log line names the variable to set."""
    bench.fabric.start()
    for seeds in (("1", "2"), (RANDOM_SEED, RANDOM_SEED)):
        with bench.log() as lines:
            for seed in seeds:
                with bench.engine(seed=seed) as engine:
                    store(engine, content(engine), seed)
                    are_found = engine.lookup(str(seeds), PAGES)
                    store(engine, content(engine), str(seeds))
            assert all(are_found) or any("PYTHONHASHSEED" in line for line in lines), (
                f"engines with the seeds {seeds} share nothing, and no log line says why"
            )


def _explained(bench: ConformanceBench) -> None:
    """Find the command in the log of an engine without hits, and run the command."""
    bench.fabric.start()
    with bench.log() as lines, bench.engine() as engine:
        store(engine, content(engine), "connected")
        lines.clear()
        assert not any(engine.lookup(PROMPT, PAGES))
        commands = [found[1] for line in lines if (found := re.search(r"ostraca explain (.*)", line))]
        assert commands, f"the log names no command: {lines}"
        told = bench.fabric.explain(shlex.split(commands[0]))
        assert "It can't be got" in told, told
        assert "no put is known" in told, told


SCENARIOS = MappingProxyType(
    {
        "a flipped bit on flash": _flipped,
        "a truncated block": _truncated,
        "another block's bytes": _swapped,
        "stale bytes of the same page": _stale,
        "late bytes": _late,
        "an agent that hangs": _stuck,
        "an agent that hangs up": _storm,
        "no fabric at the start": _absent,
        "a fabric gone and back": _gone_and_back,
        "an agent killed": _killed,
        "two engines": _two_engines,
        "restarts": _restart,
        "another layout": _wrong_layout,
        "different hash seeds": _seeds,
        "zero hits, explained": _explained,
    }
)
"""Scenarios by name."""
