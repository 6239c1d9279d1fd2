"""Rows of an engine's pool: used in place, lent to one transfer at a time, and let go of at the end."""

from __future__ import annotations

import itertools
import logging
import mmap
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.sdk.connectors.engine_steps import ROW_BYTES, EngineSteps, prompt, settings
from tests.sdk.scripted_agent import AgentConnection, agent_at
from tests.support.fabric.fabric_host import FabricThread, content

from ostraca.connectors.transfers.counters import LOAD_CHUNKS
from ostraca.connectors.transfers.jobs import RowJob
from ostraca.connectors.vllm.settings import LOGGER
from ostraca_cli.testing import small_plan
from ostraca_fabric.model.outcome import BlockState, PutState, Reason
from ostraca_fabric.wire.messages import Get, GetDone, Put, PutDone

KEYS = prompt(8)
PAGES = content(len(KEYS), block_bytes=ROW_BYTES)


def has_stored(engine: EngineSteps, keys: Sequence[bytes], requests: Iterator[int]) -> bool:
    return not engine.store_prompt(f"store {next(requests)}", keys, PAGES).failed


def test_chunks_go_from_and_to_rows_without_the_arena_also_after_a_reconnect(tmp_path: Path) -> None:
    requests = itertools.count()
    with EngineSteps(settings(f"unix://{tmp_path}/fabric/agent-0.sock")) as engine:
        for keys in (KEYS, prompt(8, "after the reconnect")):
            with FabricThread(small_plan(tmp_path / "fabric")):
                engine.wait_for_the_fabric()
                engine.until(partial(has_stored, engine, keys, requests))
                engine.begin("load", keys)
                assert not engine.load("load", keys, first_row=100).failed
                assert np.array_equal(engine.rows[100:108], PAGES)
                assert not engine.rows[108:].any()
                engine.rows[:] = 0
        assert not engine.has_used_the_arena()


def test_rows_of_a_pool_with_gaps_are_copied(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wide = np.zeros((256, 2, ROW_BYTES), np.uint8)
    with (
        FabricThread(small_plan(tmp_path / "fabric")) as host,
        caplog.at_level(logging.INFO, LOGGER),
        EngineSteps(settings(host.addresses[0]), memory=wide[:, 0]) as engine,
    ):
        assert not engine.wait_for_the_fabric().store_prompt("a", KEYS, PAGES).failed
        engine.begin("b", KEYS)
        assert not engine.load("b", KEYS, first_row=100).failed
        assert np.array_equal(wide[100:108, 0], PAGES)
        assert not wide[:, 1].any()
        assert engine.has_used_the_arena()
    assert "blocks are copied between pool and arena: memory has gaps" in caplog.text


@pytest.mark.parametrize("is_load", [True, False])
def test_a_row_under_a_transfer_is_no_row_of_a_load_until_the_transfer_ends(
    tmp_path: Path, *, is_load: bool
) -> None:
    held: list[tuple[AgentConnection, Any]] = []
    with agent_at(tmp_path / "agent.sock") as agent, EngineSteps(settings(agent.address)) as engine:
        engine.wait_for_the_fabric().begin("a", KEYS)
        engine.rows[:8] = PAGES
        assert not engine.store("a", KEYS).failed

        agent.script |= dict.fromkeys((Get, Put), lambda *request: held.append(request))
        (engine.tier.load if is_load else engine.tier.store)(RowJob(-1, "a", tuple(KEYS[:2]), (3, 4)))
        engine.until(lambda: bool(held))
        agent.script.clear()
        assert engine.load("a", KEYS[2:4], first_row=4).failed == tuple(KEYS[2:4])
        assert engine.count(LOAD_CHUNKS, "error") == 2
        assert bool(engine.store("a", KEYS[2:4], first_row=4).failed) == is_load
        assert not engine.load("a", KEYS[2:4], first_row=5).failed, "rows beside it"

        ((connection, message),) = held
        if is_load:
            connection.send(GetDone(message.request, bytes([BlockState.MISS] * 2), bytes([Reason.BUSY] * 2)))
        else:
            connection.send(PutDone(message.request, bytes([PutState.STAGED] * 2), bytes(2)))
        assert engine.finish().job_id == -1
        for _ in range(20):
            engine.rows[3:5] = 0
            assert not engine.load("a", KEYS[:2], first_row=3).failed
            assert np.array_equal(engine.rows[3:5], PAGES[:2])
            assert not engine.store("a", KEYS[:2], first_row=3).failed


@pytest.mark.parametrize("is_linked", [True, False])
def test_the_end_of_an_engine_lets_go_of_its_pool(tmp_path: Path, *, is_linked: bool) -> None:
    mapped = mmap.mmap(-1, 8 * ROW_BYTES)
    rows = np.frombuffer(mapped, np.uint8).reshape(8, ROW_BYTES)
    with agent_at(tmp_path / "agent.sock") as agent:
        address = agent.address if is_linked else f"unix://{tmp_path}/nobody.sock"
        with EngineSteps(settings(address), memory=rows) as engine:
            if is_linked:
                agent.script[Get] = lambda *_: None
                engine.wait_for_the_fabric().begin("a", KEYS)
                engine.tier.load(RowJob(0, "a", tuple(KEYS), tuple(range(8))))
                engine.until(lambda: bool(agent.seen_of(Get)))
        del rows, engine.rows
        mapped.close()  # raises BufferError if anything still refers to it
        if is_linked:
            (job,) = engine.tier.take_finished()
            assert job.failed == tuple(KEYS)
