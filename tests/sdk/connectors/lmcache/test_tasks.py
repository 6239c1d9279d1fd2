"""Tasks of the LMCache plug-in on a real fabric, driven as by LMCache's controllers."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.sdk.connectors.lmcache.server_steps import (
    BLOCK_BYTES,
    LAYOUT,
    OBJECT_BYTES,
    ServerSteps,
    names,
    objects,
    settings,
)
from tests.sdk.scripted_agent import AgentConnection, agent_at
from tests.support.fabric.fabric_host import FabricThread, content
from tests.support.stalls import Stopwatch

import ostraca
from ostraca.connectors.lmcache.objects import block_hashes
from ostraca.connectors.lmcache.settings import LmcacheSettings
from ostraca.connectors.lmcache.tasks import L2Tasks, TaskKind
from ostraca.connectors.transfers.counters import LOAD_BYTES, LOAD_CHUNKS, LOOKUP_CHUNKS, STORE_CHUNKS
from ostraca_cli.testing import small_plan
from ostraca_fabric.wire.messages import EndSession, Get, Lookup, Put

COUNT = 12
BLOCKS = 3 * COUNT
NAMES = names(COUNT)
CALL_S = 0.5
"""Longest call on a busy machine; a call with a wait takes seconds."""


def pages() -> NDArray[np.uint8]:
    return content(COUNT, block_bytes=OBJECT_BYTES)


def blank() -> NDArray[np.uint8]:
    return np.zeros((COUNT, OBJECT_BYTES), np.uint8)


@pytest.fixture
def fabric(tmp_path: Path) -> Iterator[FabricThread]:
    with FabricThread(small_plan(tmp_path / "fabric")) as started:
        yield started


@pytest.fixture
def server(fabric: FabricThread) -> Iterator[ServerSteps]:
    with ServerSteps(settings(fabric.addresses[0])) as steps:
        yield steps.wait_for_the_fabric()


def test_what_one_server_stores_another_finds_and_loads(fabric: FabricThread, server: ServerSteps) -> None:
    server.store_and_find(NAMES, objects(pages()))
    with ServerSteps(settings(fabric.addresses[0])) as other:
        other.wait_for_the_fabric()
        absent = names(2, model_name="absent")
        assert other.look_up([*NAMES, *absent]) == [True] * COUNT + [False] * 2
        memory = blank()
        assert other.load(NAMES, objects(memory)) == [True] * COUNT
        assert np.array_equal(memory, pages())
        assert other.count(LOAD_BYTES) == memory.nbytes
        assert other.count(LOAD_CHUNKS, "hit") == BLOCKS


@pytest.mark.parametrize(
    "changes",
    [
        {"model_name": "other"},
        {"kv_rank": 7},
        {"object_group_id": 1},
        {"cache_salt": "other"},
        {"chunk_hash": b"other"},
    ],
)
def test_another_name_finds_and_loads_nothing(server: ServerSteps, changes: dict[str, object]) -> None:
    server.store_and_find(NAMES[:1], objects(pages()[:1]))
    other, memory = names(1, **changes), blank()[:1]
    assert server.look_up(other, {0: LAYOUT, 1: LAYOUT}) == [False]
    assert server.load(other, objects(memory)) == [False]
    assert not memory.any()


@pytest.mark.parametrize("size_bytes", [OBJECT_BYTES, OBJECT_BYTES - 1, BLOCK_BYTES])
def test_another_layout_or_size_is_a_miss(server: ServerSteps, size_bytes: int) -> None:
    server.store_and_find(NAMES, objects(pages()))
    layout, memory = LAYOUT._replace(size_bytes=size_bytes, form="other"), blank()[:, :size_bytes].copy()
    assert server.load(NAMES, objects(memory, layout)) == [False] * COUNT
    assert not memory.any()


def test_another_revision_of_the_weights_finds_nothing(fabric: FabricThread, server: ServerSteps) -> None:
    server.store_and_find(NAMES, objects(pages()))
    with ServerSteps(settings(fabric.addresses[0], revision="2")) as other:
        assert other.wait_for_the_fabric().look_up(NAMES) == [False] * COUNT


def test_the_layout_of_stored_objects_wins_over_the_described_one(server: ServerSteps) -> None:
    assert server.look_up(NAMES, {}) == [False] * COUNT
    assert server.count(LOOKUP_CHUNKS, "unknown_layout") == COUNT
    server.store_and_find(NAMES, objects(pages()))
    assert server.look_up(NAMES, {0: LAYOUT._replace(size_bytes=1)}) == [True] * COUNT


def test_an_object_with_a_damaged_block_is_a_miss_and_held_off(
    fabric: FabricThread, server: ServerSteps
) -> None:
    server.store_and_find(NAMES, objects(pages()))
    fabric.damage(pages()[3][BLOCK_BYTES : 2 * BLOCK_BYTES])
    memory = blank()
    expected = [number != 3 for number in range(COUNT)]
    assert server.load(NAMES, objects(memory)) == expected
    assert np.array_equal(memory[expected], pages()[expected])
    assert not memory[3][BLOCK_BYTES : 2 * BLOCK_BYTES].any(), "the failed block is not touched"
    assert server.look_up(NAMES) == expected
    assert server.count(LOOKUP_CHUNKS, "failed_load") == 3


def test_objects_without_memory_or_named_twice_fail_alone(server: ServerSteps) -> None:
    server.store_and_find(NAMES, objects(pages()))
    memory = blank()
    given = [None, *objects(memory)[1:]]
    assert server.load([*NAMES[:2], NAMES[1]], given[:3]) == [False, True, False]
    assert np.array_equal(memory[1], pages()[1])
    assert not memory[2].any(), "the second mention is not filled"
    assert server.store([], []) == server.load([], []) == server.look_up([]) == []
    assert server.load(NAMES[:1], [None]) == [False]


def test_work_beyond_the_limits_is_refused_at_once_and_counted(fabric: FabricThread) -> None:
    limits = {"stores_inflight_chunks_max": 3, "loads_inflight_chunks_max": 3}
    with ServerSteps(settings(fabric.addresses[0], **limits)) as server:
        server.wait_for_the_fabric()
        assert server.store(NAMES[:2], objects(pages()[:2])) == [True, False]
        assert server.count(STORE_CHUNKS, "too_many") == 3
        assert server.load(NAMES[:2], objects(blank()[:2])) == [False, False]
        assert server.count(LOAD_CHUNKS, "too_many") == 6


def test_lookups_beyond_the_limit_are_misses(tmp_path: Path) -> None:
    with (
        agent_at(tmp_path / "agent.sock") as agent,
        ServerSteps(settings(agent.address, lookups_inflight_max=1, lookup_deadline_s=0.5)) as server,
    ):
        agent.script[Lookup] = lambda *_: None
        first = server.wait_for_the_fabric().tasks.look_up(NAMES, {0: LAYOUT})
        assert server.tasks.take(TaskKind.LOOKUP, first) is None
        assert server.look_up(NAMES) == [False] * COUNT
        assert server.count(LOOKUP_CHUNKS, "too_many") == BLOCKS
        assert server.wait(TaskKind.LOOKUP, first) == [False] * COUNT, "ended by its deadline"


def test_deleted_objects_are_named_to_the_fabric_with_their_size(tmp_path: Path) -> None:
    with agent_at(tmp_path / "agent.sock") as agent, ServerSteps(settings(agent.address)) as server:
        server.wait_for_the_fabric().store(NAMES, objects(pages()))
        unknown = names(1, model_name="unknown")
        assert server.tasks.delete([*NAMES, *unknown]) == [OBJECT_BYTES] * COUNT + [0]
        server.until(lambda: bool(agent.seen_of(EndSession)))
        (end,) = agent.seen_of(EndSession)
        named = [each for name in NAMES for each in block_hashes(name, LAYOUT, BLOCK_BYTES)]
        assert b"".join(span.hashes for span in end.spans) == b"".join(named)


def test_a_server_starts_without_a_fabric_and_uses_it_once_it_is_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    host = FabricThread(small_plan(tmp_path / "fabric"))
    with (
        caplog.at_level(logging.INFO, LmcacheSettings.LOGGER),
        ServerSteps(settings(f"unix://{tmp_path}/fabric/agent-0.sock")) as server,
    ):
        server.until(lambda: "no fabric yet" in caplog.text)
        for _ in range(20):
            assert server.store(NAMES, objects(pages())) == [False] * COUNT
            assert server.look_up(NAMES) == server.load(NAMES, objects(blank())) == [False] * COUNT
        for metric in (STORE_CHUNKS, LOOKUP_CHUNKS, LOAD_CHUNKS):
            assert server.count(metric, "no_fabric") == 20 * BLOCKS
        assert server.slowest_call_s < CALL_S
        with host:
            server.wait_for_the_fabric().store_and_find(NAMES, objects(pages()))
    warnings = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert len(warnings) == 1, [each.getMessage() for each in warnings]


def test_the_start_waits_for_the_fabric_on_demand_alone(fabric: FabricThread) -> None:
    with ServerSteps(settings(fabric.addresses[0], start_wait_s=20.0)) as server:
        assert server.store(NAMES, objects(pages())) == [True] * COUNT
    began_s = time.monotonic()
    with ServerSteps(settings("unix:///nobody.sock", start_wait_s=0.2)) as server:
        assert time.monotonic() - began_s >= 0.2
        assert server.store(NAMES, objects(pages())) == [False] * COUNT
    watch = Stopwatch()
    with ServerSteps(settings("unix:///nobody.sock")):
        assert watch.took_s < CALL_S


def test_a_fabric_that_goes_away_and_comes_back_costs_little_and_is_used_again(tmp_path: Path) -> None:
    host = FabricThread(small_plan(tmp_path / "fabric")).start()
    with ServerSteps(settings(host.addresses[0])) as server:
        server.wait_for_the_fabric().store_and_find(NAMES, objects(pages()))
        host.stop()
        sent, server.slowest_call_s, watch = server.requests_sent(), 0.0, Stopwatch()
        for _ in range(200):
            assert not any(server.look_up(NAMES))
            assert not any(server.store(NAMES, objects(pages())))
        assert server.requests_sent() - sent < 40 + 20 * watch.took_s, (
            "a storm of requests to a fabric that is gone"
        )
        assert server.slowest_call_s < CALL_S
        with host:
            server.until(lambda: all(server.look_up(NAMES)))
            memory = blank()
            assert server.load(NAMES, objects(memory)) == [True] * COUNT
            assert np.array_equal(memory, pages())


def test_tasks_of_two_threads_end_each_with_its_own_result(server: ServerSteps) -> None:
    server.store_and_find(NAMES, objects(pages()))
    wrong: list[str] = []

    def store() -> None:
        for turn in range(30):
            of = names(4, model_name=f"model {turn}")
            if server.store(of, objects(pages()[:4])) != [True] * 4:
                wrong.append(f"store {turn}")

    storing = threading.Thread(target=store)
    storing.start()
    for turn in range(30):
        memory = blank()
        first = server.tasks.look_up(NAMES, {0: LAYOUT})
        second = server.tasks.look_up([*NAMES[5:], *names(1, model_name="absent")], {0: LAYOUT})
        assert server.load(NAMES, objects(memory)) == [True] * COUNT
        assert np.array_equal(memory, pages())
        assert server.wait(TaskKind.LOOKUP, first) == [True] * COUNT, turn
        assert server.wait(TaskKind.LOOKUP, second) == [True] * (COUNT - 5) + [False], turn
    storing.join()
    assert not wrong


def test_a_receiver_gets_the_success_of_each_object_once(server: ServerSteps) -> None:
    server.store_and_find(NAMES, objects(pages()))
    ended: list[list[bool]] = []
    number = server.tasks.look_up([*NAMES, *names(1, model_name="absent")], {0: LAYOUT})
    server.tasks.call_at_end(TaskKind.LOOKUP, number, ended.append)
    server.until(lambda: bool(ended))
    assert ended == [[True] * COUNT + [False]]
    assert server.tasks.take(TaskKind.LOOKUP, number) is None
    number = server.tasks.load([], [])
    server.tasks.call_at_end(TaskKind.LOAD, number, ended.append)
    assert ended[1:] == [[]], "at once after the end"
    assert server.tasks.take_all(TaskKind.LOAD) == {}


def test_a_failing_receiver_holds_up_no_later_task(
    server: ServerSteps, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(outcome: list[bool]) -> None:
        raise RuntimeError(f"{len(outcome)} objects are freed already")

    memory = objects(pages())
    number = server.tasks.store(NAMES[:2], memory[:2])
    server.tasks.call_at_end(TaskKind.STORE, number, fail)
    server.until(lambda: "2 objects are freed already" in caplog.text)
    server.store_and_find(NAMES[2:], memory[2:])


def test_receivers_of_lookups_and_loads_under_way_are_called_by_the_close(tmp_path: Path) -> None:
    with agent_at(tmp_path / "agent.sock") as agent, ServerSteps(settings(agent.address)) as server:
        agent.script |= {Lookup: lambda *_: None, Get: lambda *_: None}
        ended: list[list[bool]] = []
        lookup = server.wait_for_the_fabric().tasks.look_up(NAMES, {0: LAYOUT})
        server.tasks.call_at_end(TaskKind.LOOKUP, lookup, ended.append)
        load = server.tasks.load(NAMES, objects(blank()))
        server.tasks.call_at_end(TaskKind.LOAD, load, ended.append)
        server.until(lambda: bool(agent.seen_of(Lookup) and agent.seen_of(Get)))
        server.tasks.close()
        assert ended == [[False] * COUNT] * 2


def test_engines_with_another_hash_seed_are_told(
    fabric: FabricThread, caplog: pytest.LogCaptureFixture
) -> None:
    def await_comparison(*, is_first: bool, is_other: bool) -> None:
        until_s = time.monotonic() + 20.0
        while (is_first and committed() == before) or (is_other and "PYTHONHASHSEED" not in caplog.text):
            assert time.monotonic() < until_s, "no comparison, or no log line"
            threading.Event().wait(0.01)

    def committed() -> int:
        return client.status().counters.put_committed

    with (
        ostraca.connect(fabric.addresses[0]) as client,
        caplog.at_level(logging.INFO, LmcacheSettings.LOGGER),
    ):
        before = committed()
        for number, seed in enumerate(("1", "1", "2")):
            assert "PYTHONHASHSEED" not in caplog.text
            tasks = L2Tasks(settings(fabric.addresses[0], start_wait_s=20.0), hash_seed=seed)
            try:
                await_comparison(is_first=not number, is_other=seed == "2")
            finally:
                tasks.close()


def test_stores_end_before_the_close_loads_fail_and_later_tasks_fail_at_once(tmp_path: Path) -> None:
    def keep(connection: AgentConnection, message: Get) -> None:
        """Leave the get without an answer."""

    def answer(connection: AgentConnection, message: Put) -> None:
        if not connection.is_gone.wait(0.2):  # without patience, the plug-in has hung up
            type(agent).usual(connection, message)

    with agent_at(tmp_path / "agent.sock") as agent, ServerSteps(settings(agent.address)) as server:
        agent.script |= {Get: keep, Put: answer}
        memory = blank()
        under_way = server.wait_for_the_fabric().tasks.load(NAMES, objects(memory))
        storing = server.tasks.store(NAMES, objects(pages()))
        server.until(lambda: bool(agent.seen_of(Get) and agent.seen_of(Put)))
        descriptors = list(server.tasks.descriptors.values())
        assert len(set(descriptors)) == 3
        server.tasks.close()
        server.tasks.close()
        assert server.tasks.take(TaskKind.LOAD, under_way) == [False] * COUNT
        assert server.tasks.take(TaskKind.STORE, storing) == [True] * COUNT
        for descriptor in descriptors:
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.eventfd_write(descriptor, 1)
        later = server.tasks.look_up(NAMES, {0: LAYOUT})
        assert server.tasks.take(TaskKind.LOOKUP, later) == [False] * COUNT
        later = server.tasks.store(NAMES, objects(memory))
        assert server.tasks.take_all(TaskKind.STORE) == {later: [False] * COUNT}
        assert server.tasks.delete(NAMES) == [OBJECT_BYTES] * COUNT
        assert not memory.any()
