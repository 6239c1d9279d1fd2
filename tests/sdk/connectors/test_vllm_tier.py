"""vLLM tier on a real fabric, driven as by vLLM's scheduler."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.sdk.conftest import no_thread_to_be_had
from tests.sdk.connectors.engine_steps import IDENTITY, PATIENCE_S, ROW_BYTES, EngineSteps, prompt, settings
from tests.sdk.scripted_agent import AgentConnection, agent_at
from tests.support.fabric.fabric_host import FabricProcess, FabricThread, content
from tests.support.stalls import Stopwatch

from ostraca.connectors.transfers.counters import (
    DROPPED_CHUNKS,
    LOAD_BYTES,
    LOAD_CHUNKS,
    LOOKUP_CHUNKS,
    OFFERED_CHUNKS,
    REQUESTS,
    STORE_CHUNKS,
)
from ostraca.connectors.transfers.jobs import RowJob
from ostraca.connectors.vllm.core.hints import RequestHints
from ostraca.connectors.vllm.core.lookup_table import ChunkState
from ostraca.connectors.vllm.core.prefix import engine_hash
from ostraca.connectors.vllm.settings import LOGGER
from ostraca.watch import BlockAnnouncement
from ostraca_cli.program import main
from ostraca_cli.testing import small_plan
from ostraca_fabric.model.outcome import PutState, Reason
from ostraca_fabric.wire.messages import EndSession, Get, Prefetch, Put, PutDone

KEYS = prompt(40)
STEP_S = 0.5
"""Longest call of the scheduler on a busy machine; a call with a wait takes seconds."""

LONG_STEP_S = 1.5
"""Longest call with 8,192 keys: 0.13 s of work, 0.7 s beside other tests."""


def pages(chunks: int = len(KEYS)) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    return content(chunks, block_bytes=ROW_BYTES)


def counted(host: FabricThread, operation: str) -> int:
    """Return the blocks of an operation, as the agents count."""
    tallies = [tally for agent in host.status() for tally in agent.operations if tally.operation == operation]
    return sum(count.blocks for tally in tallies for count in tally.blocks)


@pytest.fixture
def fabric(tmp_path: Path) -> Iterator[FabricThread]:
    with FabricThread(small_plan(tmp_path / "fabric")) as started:
        yield started


@pytest.fixture
def engine(fabric: FabricThread) -> Iterator[EngineSteps]:
    with EngineSteps(settings(fabric.addresses[0])) as steps:
        yield steps.wait_for_the_fabric()


def test_what_one_engine_stores_another_finds_and_loads(fabric: FabricThread, engine: EngineSteps) -> None:
    stored = engine.store_prompt("a", KEYS, pages())
    assert (set(stored.succeeded), stored.failed) == (set(KEYS), ())
    with EngineSteps(settings(fabric.addresses[0])) as other:
        other.wait_for_the_fabric().begin("b", [*KEYS, *prompt(3, "more")])
        assert other.ask("b", KEYS) == [ChunkState.PRESENT] * len(KEYS)
        assert other.ask("b", prompt(3, "more")) == [ChunkState.MISSING] * 3
        loaded = other.load("b", KEYS, first_row=100)
        assert (set(loaded.succeeded), loaded.failed) == (set(KEYS), ())
        assert np.array_equal(other.rows[100 : 100 + len(KEYS)], pages())
        assert other.count(LOAD_BYTES) == len(KEYS) * ROW_BYTES


def test_an_engine_that_has_the_beginning_itself_finds_the_rest(engine: EngineSteps) -> None:
    engine.store_prompt("a", KEYS, pages())
    engine.begin("b", KEYS)
    assert engine.ask("b", KEYS[35:]) == [ChunkState.PRESENT] * 5


def test_chunks_asked_for_in_one_step_are_one_request(engine: EngineSteps) -> None:
    for request in "abc":
        engine.begin(request, KEYS)
        for key in KEYS:
            engine.tier.look_up(key, request)
    engine.tier.end_step()
    assert engine.count(REQUESTS, "lookup") == 1


def test_a_chunk_damaged_on_flash_is_computed_and_not_tried_again(
    fabric: FabricThread, engine: EngineSteps
) -> None:
    engine.store_prompt("a", KEYS, pages())
    engine.begin("b", KEYS)
    assert engine.ask("b", KEYS) == [ChunkState.PRESENT] * len(KEYS)
    fabric.damage(pages()[3])
    loaded = engine.load("b", KEYS, first_row=100)
    assert loaded.failed == (KEYS[3],)
    assert np.array_equal(np.delete(engine.rows[100:140], 3, axis=0), np.delete(pages(), 3, axis=0))
    assert engine.ask("b", KEYS[:5]) == [ChunkState.PRESENT] * 3 + [ChunkState.MISSING, ChunkState.PRESENT]
    engine.begin("c", KEYS)
    assert engine.ask("c", KEYS[3:4]) == [ChunkState.MISSING], "nor by others, for a while"


def test_another_revision_of_the_weights_finds_nothing(fabric: FabricThread, engine: EngineSteps) -> None:
    engine.store_prompt("a", KEYS, pages())
    with EngineSteps(settings(fabric.addresses[0], revision="2")) as other:
        other.wait_for_the_fabric().begin("b", KEYS)
        assert other.ask("b", KEYS) == [ChunkState.MISSING] * len(KEYS)


def test_after_a_hot_swap_of_weights_every_lookup_misses(
    fabric: FabricThread, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = tmp_path / "manifest"
    manifest.write_text("step 1")
    changes = {"weights_file": str(manifest), "failed_hold_s": 1e-6}
    with EngineSteps(settings(fabric.addresses[0], **changes)) as engine:
        engine.wait_for_the_fabric().store_prompt("a", KEYS, pages())
        engine.begin("during", KEYS)
        assert engine.ask("during", KEYS) == [ChunkState.PRESENT] * len(KEYS)

        engine.tier.drain()
        engine.wait_for_the_fabric().begin("same", KEYS)
        assert engine.ask("same", KEYS) == [ChunkState.PRESENT] * len(KEYS), "a reset with equal weights"

        manifest.write_text("step 2")
        engine.tier.drain()
        engine.wait_for_the_fabric().begin("b", KEYS)
        assert engine.ask("b", KEYS) == [ChunkState.MISSING] * len(KEYS)
        assert engine.load("during", KEYS, first_row=100).failed == tuple(KEYS), "found before the swap"
        assert not engine.rows[100:140].any()

        manifest.unlink()
        engine.tier.drain()
        assert "the engine serves without the tier: weights_file" in caplog.text
        engine.begin("c", KEYS)
        assert engine.ask("c", KEYS) == [ChunkState.MISSING] * len(KEYS)
        assert engine.store("c", KEYS).failed == tuple(KEYS)

        manifest.write_text("step 1")
        engine.tier.drain()
        engine.wait_for_the_fabric().begin("d", KEYS)
        assert engine.ask("d", KEYS) == [ChunkState.PRESENT] * len(KEYS), "the first weights are back"


def test_stored_and_vanished_chunks_are_announced_on_demand(fabric: FabricThread) -> None:
    with (
        EngineSteps(settings(fabric.addresses[0], enable_kv_events=True)) as engine,
        EngineSteps(settings(fabric.addresses[0])) as silent,
    ):
        engine.wait_for_the_fabric().store_prompt("a", KEYS[:4], pages(4))
        assert engine.tier.take_events() == [BlockAnnouncement(tuple(KEYS[:4]), is_removed=False)]
        assert engine.tier.take_events() == []
        engine.begin("b", KEYS[:6])
        engine.load("b", KEYS[:6], first_row=100)
        assert engine.tier.take_events() == [], "chunks never announced"
        silent.wait_for_the_fabric().store_prompt("a", KEYS[:4], pages(4))
        assert silent.tier.take_events() == []


def test_a_lookup_withdraws_announced_chunks_that_the_fabric_has_lost(tmp_path: Path) -> None:
    host = FabricThread(small_plan(tmp_path / "fabric")).start()
    with EngineSteps(settings(host.addresses[0], enable_kv_events=True)) as engine:
        stored = BlockAnnouncement(tuple(KEYS[:4]), is_removed=False)
        engine.wait_for_the_fabric().store_prompt("a", KEYS[:4], pages(4))
        assert engine.tier.take_events() == [stored]
        host.stop()
        shutil.rmtree(tmp_path / "fabric")
        with FabricThread(small_plan(tmp_path / "fabric")):
            heard: list[BlockAnnouncement] = []
            until_s = time.monotonic() + PATIENCE_S
            while not heard and time.monotonic() < until_s:
                engine.begin("b", KEYS[:6])
                engine.ask("b", KEYS[:6])
                engine.tier.end_request("b")
                heard += engine.tier.take_events()
            assert heard == [BlockAnnouncement(tuple(KEYS[:4]), is_removed=True)]
            engine.store_prompt("c", KEYS[:4], pages(4))
            assert engine.tier.take_events() == [stored]


def test_a_connection_lost_during_a_load_loses_no_chunk(tmp_path: Path) -> None:
    with (
        agent_at(tmp_path / "agent.sock") as agent,
        EngineSteps(settings(agent.address, enable_kv_events=True)) as engine,
    ):
        engine.wait_for_the_fabric().store_prompt("a", KEYS[:4], pages(4))
        engine.tier.take_events()
        agent.script[Get] = lambda connection, _: connection.hang_up()
        engine.begin("b", KEYS[:4])
        assert engine.load("b", KEYS[:4]).failed == tuple(KEYS[:4])
        assert engine.count(LOAD_CHUNKS, "disconnected") == 4
        assert engine.tier.take_events() == []
        watch = Stopwatch()
        for turn in itertools.count():
            engine.begin(f"c {turn}", KEYS[:4])
            if engine.ask(f"c {turn}", KEYS[:4]) == [ChunkState.PRESENT] * 4:
                break
            assert watch.took_s < 5.0, "the chunks are held off"
            engine.tier.end_request(f"c {turn}")


@pytest.mark.parametrize("evicts", [True, False])
def test_an_eviction_of_chunks_that_no_request_names_is_announced(tmp_path: Path, *, evicts: bool) -> None:
    host = FabricThread(small_plan(tmp_path / "fabric")).start()
    with EngineSteps(settings(host.addresses[0], enable_kv_events=True, recheck_s=0.05)) as engine:
        engine.wait_for_the_fabric().store_prompt("a", KEYS, pages())
        assert engine.tier.has_work, "news to publish"
        assert engine.tier.take_events() == [BlockAnnouncement(tuple(KEYS), is_removed=False)]
        host.stop()
        if evicts:
            shutil.rmtree(tmp_path / "fabric")
        threading.Event().wait(0.2)
        assert engine.tier.take_events() == [], "a fabric that is away has lost nothing"
        with FabricThread(small_plan(tmp_path / "fabric")) as again:
            lookups = counted(again, "recheck")
            heard: list[BlockAnnouncement] = []

            def has_heard() -> bool:
                heard.extend(engine.tier.take_events())
                return bool(heard) or (not evicts and counted(again, "recheck") > lookups + 10 * len(KEYS))

            engine.until(has_heard)
            assert heard == ([BlockAnnouncement(tuple(KEYS), is_removed=True)] if evicts else [])
            assert counted(again, "lookup") == 0


def test_an_engine_without_requests_steps_on_for_evictions_for_a_while(fabric: FabricThread) -> None:
    with EngineSteps(settings(fabric.addresses[0], enable_kv_events=True)) as engine:
        engine.wait_for_the_fabric()
        engine.until(lambda: not engine.tier.has_work)
        engine.store_prompt("a", KEYS, pages())
        engine.tier.take_events()
        watch = Stopwatch()
        assert engine.tier.has_work
        engine.until(lambda: not engine.tier.has_work)
        assert watch.took_s < 1.5


def test_hints_prefetch_limit_the_keeping_and_end_the_session(tmp_path: Path) -> None:
    def store(connection: AgentConnection, message: Put) -> None:
        blocks = len(connection.block_ids(message))
        connection.send(PutDone(message.request, bytes([PutState.STAGED] * blocks), bytes(blocks)))

    with agent_at(tmp_path / "agent.sock") as agent, EngineSteps(settings(agent.address)) as engine:
        agent.script[Put] = store
        engine.wait_for_the_fabric().begin("plain", KEYS)
        assert not engine.store("plain", KEYS).failed
        engine.tier.end_step()
        engine.tier.end_request("plain")

        engine.begin("hinted", KEYS, RequestHints(has_prefetch=True, ttl_s=300.0, is_session_end=True))
        engine.tier.end_step()
        engine.tier.end_step()
        assert not engine.store("hinted", KEYS).failed
        engine.tier.end_request("hinted")
        engine.until(lambda: bool(agent.seen_of(EndSession)))
        assert [put.ttl_s for put in agent.seen_of(Put)] == [0.0, 300.0]
        (prefetch,) = agent.seen_of(Prefetch)
        (end,) = agent.seen_of(EndSession)
        hashes = b"".join(map(engine_hash, KEYS))
        assert [b"".join(span.hashes for span in each.spans) for each in (prefetch, end)] == [hashes] * 2


def test_an_engine_that_tells_no_positions_shares_with_its_like(fabric: FabricThread) -> None:
    blind = replace(IDENTITY, is_chained=False)
    with (
        EngineSteps(settings(fabric.addresses[0]), identity=blind) as writer,
        EngineSteps(settings(fabric.addresses[0]), identity=blind) as reader,
    ):
        writer.wait_for_the_fabric().store_prompt("a", KEYS, pages())
        reader.wait_for_the_fabric().begin("b", KEYS)
        assert reader.ask("b", KEYS[7:]) == [ChunkState.PRESENT] * 33


@pytest.mark.parametrize("seed", ["random", "7"])
def test_hashes_of_another_length_have_a_volume_of_their_own(
    engine: EngineSteps, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, seed: str
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", seed)
    short = prompt(4, hash_bytes=16)
    engine.begin("a", short)
    with caplog.at_level(logging.WARNING, LOGGER):
        assert engine.ask("a", short) == [ChunkState.MISSING] * 4
    told = [each for each in caplog.records if "hashes of the xxhash algorithms differ" in each.getMessage()]
    assert len(told) == (seed == "random")
    engine.wait_for_the_fabric()
    assert not engine.store_prompt("b", short, pages(4)).failed
    engine.begin("c", short)
    assert engine.ask("c", short) == [ChunkState.PRESENT] * 4


@pytest.mark.parametrize(
    ("first", "second", "differs"),
    [(None, None, False), ("0", "0", False), (None, "0", True), ("0", None, True), ("0", "7", True)],
)
def test_engines_whose_seeds_of_sha256_differ_are_told(
    fabric: FabricThread,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    first: str | None,
    second: str | None,
    *,
    differs: bool,
) -> None:
    for seed in (first, second):
        if seed is None:
            monkeypatch.delenv("PYTHONHASHSEED", raising=False)
        else:
            monkeypatch.setenv("PYTHONHASHSEED", seed)
        assert "PYTHONHASHSEED" not in caplog.text
        with EngineSteps(settings(fabric.addresses[0], break_even_tokens=640)) as engine:
            engine.wait_for_the_fabric().begin("a", KEYS)
            assert engine.ask("a", KEYS) == [ChunkState.MISSING] * len(KEYS)
            engine.until(lambda: not engine.tier._link._task._is_running)
    told = [each for each in caplog.records if "another engine has begun volume" in each.getMessage()]
    assert len(told) == differs


def test_an_engine_with_short_hashes_leaves_no_seed_among_engines_with_long_ones(
    fabric: FabricThread, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for seed, hash_bytes in (("1", 16), ("2", 32), ("2", 32)):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        keys = prompt(4, hash_bytes=hash_bytes)
        with EngineSteps(settings(fabric.addresses[0])) as engine:
            engine.wait_for_the_fabric().begin("a", keys)
            assert engine.ask("a", keys) == [ChunkState.MISSING] * 4
            engine.until(lambda: engine.tier.is_linked and not engine.tier._link._task._is_running)
    assert "PYTHONHASHSEED" not in caplog.text


def test_stores_beyond_the_limit_are_dropped_from_the_end_and_counted(fabric: FabricThread) -> None:
    with EngineSteps(settings(fabric.addresses[0], stores_inflight_chunks_max=10)) as engine:
        stored = engine.wait_for_the_fabric().store_prompt("a", KEYS, pages())
        assert set(stored.succeeded) == set(KEYS[:10])
        assert engine.count(OFFERED_CHUNKS) == 40
        assert engine.count(STORE_CHUNKS, "too_many") == engine.count(DROPPED_CHUNKS, "too_many") == 30
        assert engine.tier.counters.drops() == "30 of 40 chunks were not stored: 30 too_many"


def test_loads_beyond_the_limit_are_computed(fabric: FabricThread) -> None:
    with EngineSteps(settings(fabric.addresses[0], loads_inflight_chunks_max=10)) as engine:
        engine.wait_for_the_fabric().store_prompt("a", KEYS, pages())
        engine.begin("b", KEYS)
        assert engine.load("b", KEYS).failed == tuple(KEYS)
        assert engine.count(LOAD_CHUNKS, "too_many") == 40


def test_a_load_that_would_take_longer_than_computing_is_declined(fabric: FabricThread) -> None:
    with EngineSteps(settings(fabric.addresses[0], prefill_tokens_per_s=1e12)) as engine:
        engine.wait_for_the_fabric().store_prompt("a", KEYS, pages())
        fabric.await_writes()
        engine.begin("b", KEYS)
        assert not engine.load("b", KEYS).failed, "until something was loaded, nobody knows how long it takes"
        engine.begin("c", KEYS)
        assert engine.load("c", KEYS).failed == tuple(KEYS)
        assert engine.count(LOAD_CHUNKS, "too_slow") == 40


@pytest.mark.parametrize("reason", [Reason.OVERLOADED, Reason.NO_SPACE, Reason.QUARANTINED])
def test_a_fabric_that_has_no_room_for_stores_is_left_alone_for_a_while(
    tmp_path: Path, reason: Reason
) -> None:
    def decline(connection: AgentConnection, message: Put) -> None:
        blocks = len(connection.block_ids(message))
        connection.send(
            PutDone(message.request, bytes([PutState.DECLINED] * blocks), bytes([reason] * blocks))
        )

    with (
        agent_at(tmp_path / "agent.sock") as agent,
        EngineSteps(settings(agent.address, backoff_s=60.0, backoff_max_s=60.0)) as engine,
    ):
        agent.script[Put] = decline
        engine.wait_for_the_fabric().begin("a", KEYS)
        for _ in range(20):
            assert engine.store("a", KEYS).failed == tuple(KEYS)
        assert len(agent.seen_of(Put)) == engine.count(REQUESTS, "store") == 1
        assert engine.count(STORE_CHUNKS, reason.name.lower()) == 40
        assert engine.count(STORE_CHUNKS, "backoff") == 19 * 40
        told = dict.fromkeys((OFFERED_CHUNKS, DROPPED_CHUNKS), 0)
        for sample in engine.tier.samples():
            if sample.metric in told:
                told[sample.metric] += int(sample.value)
        assert told == {OFFERED_CHUNKS: 20 * 40, DROPPED_CHUNKS: 20 * 40}
        assert engine.ask("a", KEYS) == [ChunkState.MISSING] * 40
        assert engine.count(LOOKUP_CHUNKS, "not_found") == 40, "it is read from meanwhile"


def test_the_log_tells_the_command_that_explains_a_chunk(
    fabric: FabricThread, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        caplog.at_level(logging.DEBUG, LOGGER),
        EngineSteps(settings(fabric.addresses[0])) as engine,
    ):
        engine.wait_for_the_fabric().store_prompt("a", KEYS, pages())
        engine.begin("b", KEYS)
        engine.load("b", KEYS[35:], first_row=100)
    fabric.await_writes()
    for chunks in ("40 chunks under way", "5 chunks under way"):
        (line,) = [line for line in caplog.messages if f" {chunks}" in line]
        command = line.split(": ostraca ")[1].split()
        assert main([*command, "--agent", fabric.addresses[0]]) == 0
        assert "It can be got now, from flash" in capsys.readouterr().out


def test_draining_leaves_nothing_under_way(engine: EngineSteps) -> None:
    engine.store_prompt("a", KEYS, pages())
    engine.begin("b", KEYS)
    engine.tier.drain()
    assert not engine.tier.has_work


@pytest.mark.parametrize("is_answered", [True, False])
def test_the_end_of_an_engine_waits_for_its_stores_for_a_while(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, is_answered: bool
) -> None:
    def answer(connection: AgentConnection, message: Put) -> None:
        blocks = len(connection.block_ids(message))
        # A tier without patience has hung up by then.
        if is_answered and not connection.is_gone.wait(0.2):
            connection.send(PutDone(message.request, bytes([PutState.STAGED] * blocks), bytes(blocks)))

    with agent_at(tmp_path / "agent.sock") as agent, caplog.at_level(logging.INFO, LOGGER):
        agent.script[Put] = answer
        close_deadline_s = 20.0 if is_answered else 0.2
        with EngineSteps(settings(agent.address, close_deadline_s=close_deadline_s)) as engine:
            engine.wait_for_the_fabric().begin("a", KEYS)
            engine.tier.store(RowJob(0, "a", tuple(KEYS), tuple(range(len(KEYS)))))
            engine.until(lambda: bool(agent.seen_of(Put)))
            watch = Stopwatch()
        assert watch.took_s < settings(agent.address).store_deadline_s
    assert engine.count(STORE_CHUNKS, "staged") == (40 if is_answered else 0)
    assert engine.count(DROPPED_CHUNKS, "disconnected") == (0 if is_answered else 40)
    said = "Ostraca: 40 of 40 chunks were not stored: 40 disconnected"
    assert (said in caplog.messages) == (not is_answered)


def test_an_engine_starts_without_a_fabric_and_uses_it_once_it_is_there(tmp_path: Path) -> None:
    host = FabricThread(small_plan(tmp_path / "fabric"))
    address = f"unix://{tmp_path}/fabric/agent-0.sock"
    with EngineSteps(settings(address)) as engine:
        engine.begin("a", KEYS)
        assert engine.ask("a", KEYS) == [ChunkState.MISSING] * len(KEYS)
        assert engine.store("a", KEYS).failed == tuple(KEYS)
        assert engine.count(STORE_CHUNKS, "no_fabric") == engine.count(LOOKUP_CHUNKS, "no_fabric") == 40
        assert engine.slowest_call_s < STEP_S
        with host:
            engine.wait_for_the_fabric()
            assert not engine.store_prompt("b", KEYS, pages()).failed


def test_a_token_that_comes_late_and_is_replaced_is_read_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, requests = tmp_path / "token", itertools.count()
    with agent_at(tmp_path / "agent.sock") as agent, caplog.at_level(logging.INFO, LOGGER):
        agent.let_in("first-token-12345")
        with EngineSteps(settings(agent.address, token_file=str(file))) as engine:
            engine.until(lambda: f"the token file {file} can't be read" in caplog.text)
            file.write_text("first-token-12345\n")
            engine.wait_for_the_fabric()
            for token in ("second-token-1234", "third-token-12345"):
                agent.let_in(token)
                engine.store_prompt(f"{next(requests)}", KEYS[:1], pages(1))
                file.write_text(f"{token}\n")
                engine.until(
                    lambda: bool(engine.store_prompt(f"{next(requests)}", KEYS[:1], pages(1)).succeeded)
                )


def test_the_link_goes_on_trying_whatever_went_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none_left(*_: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with agent_at(tmp_path / "agent.sock") as agent, caplog.at_level(logging.WARNING, LOGGER):
        with no_thread_to_be_had("ostraca-link"):
            engine = EngineSteps(settings(agent.address))
            assert not engine.tier.is_linked
        with engine, monkeypatch.context() as full:
            full.setattr(os, "eventfd", none_left)
            engine.until(lambda: not engine.tier.is_linked and "Too many open files" in caplog.text)
            full.undo()
            engine.wait_for_the_fabric()
    assert "the process can start no more threads" in caplog.text


def test_a_fabric_that_goes_away_and_comes_back_costs_little_and_is_used_again(tmp_path: Path) -> None:
    host = FabricThread(small_plan(tmp_path / "fabric")).start()
    with EngineSteps(settings(host.addresses[0])) as engine:
        engine.wait_for_the_fabric().store_prompt("a", KEYS, pages())
        host.stop()
        sent, engine.slowest_call_s, watch = engine.requests_sent(), 0.0, Stopwatch()
        for turn in range(200):
            engine.begin(f"gone {turn}", KEYS)
            assert ChunkState.PRESENT not in engine.ask(f"gone {turn}", KEYS)
            engine.tier.end_request(f"gone {turn}")
        assert engine.requests_sent() - sent < 20 + 20 * watch.took_s, (
            "a storm of requests to a fabric that is gone"
        )
        assert engine.slowest_call_s < STEP_S
        with host:
            found = [ChunkState.MISSING]
            turn = 0
            while ChunkState.MISSING in found:
                turn += 1
                engine.begin(f"back {turn}", KEYS)
                found = engine.ask(f"back {turn}", KEYS)
            assert np.array_equal(engine.rows[:40], pages())
            loaded = engine.load(f"back {turn}", KEYS, first_row=100)
            assert not loaded.failed
            assert np.array_equal(engine.rows[100:140], pages())


@pytest.mark.parametrize("is_there", [True, False])
def test_a_prompt_of_many_chunks_holds_no_step_of_the_scheduler_up(
    fabric: FabricThread, *, is_there: bool
) -> None:
    long = prompt(8192, "long")
    address = fabric.addresses[0] if is_there else "unix:///nobody.sock"
    with EngineSteps(settings(address)) as engine:
        if is_there:
            engine.wait_for_the_fabric()
        engine.begin("a", long)
        assert engine.ask("a", long) == [ChunkState.MISSING] * len(long)
        assert engine.slowest_call_s < LONG_STEP_S


@pytest.mark.slow
def test_a_stopped_agent_holds_no_step_of_the_scheduler_up(tmp_path: Path) -> None:
    shape = ("--drives", "2", "--capacity", "520MiB", "--dram", "0", "--transport", "inline")
    changes = {"lookup_deadline_s": 0.2, "load_deadline_s": 0.5, "store_deadline_s": 0.5}
    with (
        FabricProcess(tmp_path / "fabric", *shape) as host,
        EngineSteps(settings(host.address, **changes)) as engine,
    ):
        engine.wait_for_the_fabric().store_prompt("a", KEYS, pages())
        engine.begin("b", KEYS)
        host.signal(signal.SIGSTOP)
        engine.slowest_call_s = 0.0
        assert engine.load("b", KEYS, first_row=100).failed == tuple(KEYS)
        assert engine.store("b", KEYS).failed == tuple(KEYS)
        for turn in range(20):
            engine.begin(f"c {turn}", KEYS)
            assert engine.ask(f"c {turn}", KEYS) == [ChunkState.MISSING] * len(KEYS)
        assert engine.slowest_call_s < STEP_S
        host.signal(signal.SIGCONT)
        assert not engine.rows[100:140].any(), "nothing of the late load reached the engine's memory"
