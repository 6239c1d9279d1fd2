"""What an agent may do wrong, and what the SDK makes of it: misses, in time, and no stray byte."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.sdk.conftest import BLOCK_BYTES, LAYOUT, SETTINGS, SOON_S, hashes
from tests.sdk.scripted_agent import AgentConnection, ScriptedAgent, agent_at
from tests.support.invariants import check_ledger
from tests.support.stalls import Stopwatch

import ostraca
from ostraca import Ack, BlockState, PutState, Reason
from ostraca._memory.host_blocks import HostBlocks
from ostraca_fabric.tables.digests import CheckState, are_good
from ostraca_fabric.wire import codec
from ostraca_fabric.wire.messages import (
    ConnectionLimits,
    Failure,
    Get,
    GetDone,
    GetProgress,
    Lookup,
    LookupDone,
    OpenVolume,
    Prefetch,
    Put,
    PutDone,
    Settled,
)

FAR_S = 30.0
"""A deadline that only a test that fails reaches."""

UNTOUCHED = 0xEE


def some_bytes(blocks: int) -> NDArray[np.uint8]:
    return np.random.default_rng(blocks).integers(0, 255, (blocks, BLOCK_BYTES), np.uint8)


def somewhere(blocks: int) -> NDArray[np.uint8]:
    return np.full((blocks, BLOCK_BYTES), UNTOUCHED, np.uint8)


def stored(volume: ostraca.Volume, blocks: int) -> tuple[ostraca.Chain, NDArray[np.uint8]]:
    chain, source = volume.chain(hashes(blocks)), some_bytes(blocks)
    assert volume.put(chain, source=source, deadline_s=FAR_S).states == (PutState.COMMITTED,) * blocks
    return chain, source


def silent(_: AgentConnection, __: object) -> None:
    """Say nothing."""


def wait_until_quarantine_is(client: ostraca.Client, holds: Callable[[int], bool]) -> None:
    with client._runtime.arena.changed:
        assert client._runtime.arena.changed.wait_for(
            lambda: holds(client._runtime.arena.ledger.quarantined_bytes), timeout=10
        )
        check_ledger(client._runtime.arena.ledger)


def is_whole(client: ostraca.Client) -> bool:
    """Whether every slot is free."""
    arena = client._runtime.arena
    with arena.changed:
        lease = arena.ledger.take_up_to(64, BLOCK_BYTES)
    if lease is not None:
        arena.give(lease)
    return lease is not None and len(lease) == 64


def set_clock(monkeypatch: pytest.MonkeyPatch, clock: Callable[[], float]) -> None:
    """Have batches, and the front ends that wait for them, read this clock."""
    modules = ("_operations.job", "_operations.get", "_operations.driver", "_memory.copy_pool")
    for module in modules:
        monkeypatch.setattr(f"ostraca.{module}.time", SimpleNamespace(monotonic=clock))


@pytest.mark.parametrize("name", ["lookup", "prefetch", "get", "put"])
def test_an_agent_that_says_nothing_makes_an_operation_late_at_its_deadline(
    agent: ScriptedAgent, volume: ostraca.Volume, name: str
) -> None:
    chain, memory = volume.chain(hashes(4)), somewhere(4)
    agent.script = dict.fromkeys((Lookup, Prefetch, Get, Put), silent)
    operations: dict[str, Callable[[], object]] = {
        "lookup": lambda: volume.lookup(chain, deadline_s=SOON_S).states,
        "prefetch": lambda: volume.prefetch(chain, deadline_s=SOON_S).states,
        "get": lambda: volume.get(chain, into=memory, deadline_s=SOON_S).states,
        "put": lambda: volume.put(chain, source=memory, deadline_s=SOON_S).states,
    }
    watch = Stopwatch()
    states = operations[name]()
    passed_s, took_s = watch.passed_s, watch.took_s
    assert states == ((PutState.LATE if name == "put" else BlockState.LATE),) * 4
    assert passed_s >= SOON_S
    assert took_s < SOON_S + 0.9
    assert (memory == UNTOUCHED).all()
    assert agent.cancelled.wait(10)


def test_corrupted_bytes_are_damaged_and_the_destination_is_untouched(
    agent: ScriptedAgent, volume: ostraca.Volume
) -> None:
    chain, source = stored(volume, 4)

    def spoil_two(connection: AgentConnection, message: Get) -> None:
        connection.land(message, [0, 3])
        connection.land(message, [1, 2], spoil=lambda payload: payload[:-1] + bytes([payload[-1] ^ 1]))
        connection.send(GetDone(message.request, bytes([BlockState.HIT] * 4), bytes(4)))

    agent.script[Get] = spoil_two
    target = somewhere(4)
    result = volume.get(chain, into=target, deadline_s=FAR_S)
    assert result.states == (BlockState.HIT, BlockState.MISS, BlockState.MISS, BlockState.HIT)
    assert result.reasons == (Reason.NONE, Reason.DAMAGED, Reason.DAMAGED, Reason.NONE)
    assert np.array_equal(target[[0, 3]], source[[0, 3]])
    assert (target[1:3] == UNTOUCHED).all()


@pytest.mark.parametrize("other", ["hash", "rank", "group", "volume", "layout", "length"])
def test_a_whole_block_under_another_identity_is_damaged(
    agent: ScriptedAgent, client: ostraca.Client, volume: ostraca.Volume, other: str
) -> None:
    """The bytes and their tag are right, for another block: as after a swapped index entry."""
    chain, _ = stored(volume, 1)
    kept = next(iter(agent.blocks.values()))
    asked = {
        "hash": lambda: volume.chain(hashes(1, "another")),
        "rank": lambda: volume.chain(hashes(1), rank=1),
        "group": lambda: volume.chain(hashes(1), group=1),
    }.get(other, lambda: chain)()
    reading, length = volume, BLOCK_BYTES
    if other == "volume":
        reading = client.volume("kv-2", LAYOUT, block_bytes=BLOCK_BYTES, create=True)
    if other == "layout":
        layout = ostraca.Layout(model="test/model", dtype="fp8_e4m3", page_tokens=16)
        reading = client.volume("kv", layout, block_bytes=BLOCK_BYTES)
    if other == "length":
        length -= 1

    def swap(connection: AgentConnection, message: Get) -> None:
        connection.agent.blocks = dict.fromkeys(connection.block_ids(message), (kept[0], kept[1][:length]))
        ScriptedAgent.usual(connection, message)

    agent.script[Get] = swap
    target = bytearray(length)
    result = reading.get(asked, into=[target], deadline_s=FAR_S)
    assert (result.states, result.reasons) == ((BlockState.MISS,), (Reason.DAMAGED,))
    assert not any(target)


def test_blocks_that_landed_in_time_and_were_not_checked_in_time_are_late_and_not_handed_over(
    agent: ScriptedAgent, volume: ostraca.Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain, source = stored(volume, 4)
    agent.script[Get] = lambda connection, message: connection.land(message, [0, 1, 2, 3])
    target = somewhere(4)

    scatter_in_time = HostBlocks.scatter

    def scatter_first(blocks: HostBlocks, memory: Any, *columns: Any, positions: Any, **others: Any) -> Any:
        """Time runs out when the first block has been handed over."""
        first = [column[:1] for column in columns]
        verdicts = np.full(len(positions), CheckState.PENDING, np.uint8)
        verdicts[:1] = scatter_in_time(blocks, memory, *first, positions=positions[:1], **others)
        return verdicts

    def clock() -> float:
        return time.monotonic() + FAR_S * bool((target[0] != UNTOUCHED).any())

    monkeypatch.setattr(HostBlocks, "scatter", scatter_first)
    set_clock(monkeypatch, clock)
    result = volume.get(chain, into=target, deadline_s=FAR_S)
    assert result.states == (BlockState.HIT, BlockState.LATE, BlockState.LATE, BlockState.LATE)
    assert np.array_equal(target[0], source[0])
    assert (target[1:] == UNTOUCHED).all()


def test_views_that_were_not_checked_in_time_are_late_and_not_handed_over(
    agent: ScriptedAgent, volume: ostraca.Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain, source = stored(volume, 5)
    agent.script[Get] = lambda connection, message: connection.land(message, [0, 1, 2, 3, 4])
    checks = []

    def counted(*arguments: Any, **others: Any) -> Any:
        checks.append(len(arguments[1]))
        return are_good(*arguments, **others)

    def clock() -> float:
        """Time runs out during the second of the checks between which it is looked at."""
        return time.monotonic() + FAR_S * (len(checks) > 1)

    monkeypatch.setattr("ostraca._memory.copy_pool.are_good", counted)
    monkeypatch.setattr("ostraca._memory.copy_pool._HASH_BYTES", 2 * BLOCK_BYTES)
    set_clock(monkeypatch, clock)
    with volume.get_views(chain, lengths=BLOCK_BYTES, deadline_s=FAR_S) as views:
        assert checks == [2, 2]
        assert views.result.states == (*[BlockState.HIT] * 4, BlockState.LATE)
        assert [None if view is None else view.tobytes() for view in views] == [
            *(row.tobytes() for row in source[:4]),
            None,
        ]


def test_an_agent_that_goes_away_in_mid_get_leaves_what_landed_and_misses_for_the_rest(
    agent: ScriptedAgent, client: ostraca.Client, volume: ostraca.Volume
) -> None:
    chain, source = stored(volume, 4)

    def land_one_and_die(connection: AgentConnection, message: Get) -> None:
        connection.land(message, [1])
        connection.hang_up()

    agent.script[Get] = land_one_and_die
    target = somewhere(4)
    result = volume.get(chain, into=target, deadline_s=FAR_S)
    assert result.states == (BlockState.MISS, BlockState.HIT, BlockState.MISS, BlockState.MISS)
    assert result.reasons == (Reason.DISCONNECTED, Reason.NONE, Reason.DISCONNECTED, Reason.DISCONNECTED)
    assert np.array_equal(target[1], source[1])
    assert (target[[0, 2, 3]] == UNTOUCHED).all()
    # The bytes came through the connection itself, so with its end nothing can land any more.
    assert client.quarantined_bytes == 0
    assert is_whole(client)


def test_an_agent_that_goes_away_in_mid_put_leaves_the_put_undecided(
    agent: ScriptedAgent, client: ostraca.Client, volume: ostraca.Volume
) -> None:
    def fetch_and_die(connection: AgentConnection, message: Put) -> None:
        connection.fetch(message)
        connection.hang_up()

    agent.script[Put] = fetch_and_die
    result = volume.put(volume.chain(hashes(2)), source=some_bytes(2), deadline_s=FAR_S, ack=Ack.COMMITTED)
    assert result.states == (PutState.LATE, PutState.LATE)
    assert result.reasons == (Reason.DISCONNECTED, Reason.DISCONNECTED)
    assert is_whole(client)


def test_bytes_that_land_after_the_end_touch_quarantined_slots_only(
    agent: ScriptedAgent, client: ostraca.Client, volume: ostraca.Volume
) -> None:
    chain, source = stored(volume, 8)
    agent.script[Get] = silent
    late_target = somewhere(8)
    assert volume.get(chain, into=late_target, deadline_s=SOON_S).states == (BlockState.LATE,) * 8
    assert client.quarantined_bytes == 8 * BLOCK_BYTES
    late = agent.seen_of(Get)[0]

    def land_the_late_one_first(connection: AgentConnection, message: Get) -> None:
        connection.land(late, list(range(8)), spoil=lambda payload: bytes(len(payload)))
        ScriptedAgent.usual(connection, message)

    agent.script[Get] = land_the_late_one_first
    target = somewhere(8)
    assert volume.get(chain, into=target, deadline_s=FAR_S).states == (BlockState.HIT,) * 8
    assert np.array_equal(target, source)
    assert (late_target == UNTOUCHED).all()
    both = [set(codec.u64(message.slots, 8).tolist()) for message in agent.seen_of(Get)]
    assert not both[0] & both[1]
    assert client.quarantined_bytes == 8 * BLOCK_BYTES

    def answer_the_late_one_first(connection: AgentConnection, message: Lookup) -> None:
        connection.send(GetDone(late.request, bytes([BlockState.LATE] * 8), bytes([Reason.DEADLINE] * 8)))
        ScriptedAgent.usual(connection, message)

    agent.script[Lookup] = answer_the_late_one_first
    volume.lookup(chain, deadline_s=FAR_S)
    assert client.quarantined_bytes == 0
    assert is_whole(client)


@pytest.mark.parametrize("kind", [Get, Put])
def test_unsettled_slots_stay_in_quarantine_until_the_agent_says_settled(
    agent: ScriptedAgent, client: ostraca.Client, volume: ostraca.Volume, kind: type[Get | Put]
) -> None:
    unsettled = np.array([1, 2], codec.U32).tobytes()

    def leave_two(connection: AgentConnection, message: Get | Put) -> None:
        done = GetDone if isinstance(message, Get) else PutDone
        connection.send(done(message.request, bytes(4), bytes([Reason.TRANSFER_FAILED] * 4), unsettled))

    agent.script[kind] = leave_two
    chain = volume.chain(hashes(4))
    if kind is Get:
        volume.get(chain, into=somewhere(4), deadline_s=FAR_S)
    else:
        volume.put(chain, source=somewhere(4), deadline_s=FAR_S)
    assert client.quarantined_bytes == 2 * BLOCK_BYTES
    agent.connections.get().send(Settled(agent.seen_of(kind)[0].request))
    wait_until_quarantine_is(client, lambda held: held == 0)
    assert is_whole(client)


def test_an_internal_failure_leaves_slots_in_quarantine_because_nobody_knows(
    agent: ScriptedAgent, client: ostraca.Client, volume: ostraca.Volume
) -> None:
    agent.script[Get] = lambda connection, message: connection.send(
        Failure(message.request, "internal", "a bug")
    )
    result = volume.get(volume.chain(hashes(2)), into=somewhere(2), deadline_s=FAR_S)
    assert (result.states, result.note) == ((BlockState.DECLINED,) * 2, "internal: a bug")
    assert client.quarantined_bytes == 2 * BLOCK_BYTES


def test_at_the_quarantine_limit_operations_are_declined_at_once(
    agent: ScriptedAgent, client: ostraca.Client, volume: ostraca.Volume
) -> None:
    agent.script[Get] = silent
    volume.get(volume.chain(hashes(32)), into=somewhere(32), deadline_s=SOON_S)
    assert client.quarantined_bytes == SETTINGS.quarantine_bytes_max
    got = volume.get(volume.chain(hashes(2)), into=somewhere(2), deadline_s=FAR_S)
    assert (got.states, got.reasons) == ((BlockState.DECLINED,) * 2, (Reason.QUARANTINED,) * 2)
    put = volume.put(volume.chain(hashes(2)), source=somewhere(2), deadline_s=FAR_S)
    assert (put.states, put.reasons) == ((PutState.DECLINED,) * 2, (Reason.QUARANTINED,) * 2)
    assert volume.lookup(volume.chain(hashes(2)), deadline_s=FAR_S).states == (BlockState.MISS,) * 2


def test_a_malformed_answer_ends_that_connection_and_the_next_operation_makes_a_new_one(
    agent: ScriptedAgent, client: ostraca.Client, volume: ostraca.Volume
) -> None:
    chain, source = stored(volume, 2)
    agent.script[Lookup] = lambda connection, message: connection.send(
        LookupDone(message.request, bytes(1), bytes(9))
    )
    found = volume.lookup(chain, deadline_s=FAR_S)
    assert (found.states, found.reasons) == ((BlockState.MISS,) * 2, (Reason.DISCONNECTED,) * 2)
    target = somewhere(2)
    assert volume.get(chain, into=target, deadline_s=FAR_S).hits == 2
    assert np.array_equal(target, source)
    assert len(agent.seen_of(OpenVolume)) == 2


def test_progress_about_a_block_that_was_never_asked_for_ends_the_connection(
    agent: ScriptedAgent, volume: ostraca.Volume
) -> None:
    agent.script[Get] = lambda connection, message: connection.send(
        GetProgress(message.request, np.array([5], codec.U32).tobytes(), bytes(16))
    )
    result = volume.get(volume.chain(hashes(2)), into=somewhere(2), deadline_s=FAR_S)
    assert result.reasons == (Reason.DISCONNECTED,) * 2


def test_a_restarted_agent_is_found_again(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    with agent_at(path) as first:
        client = ostraca.connect(first.address, settings=SETTINGS)
        volume = client.volume("kv", LAYOUT, block_bytes=BLOCK_BYTES, create=True)
        chain, source = stored(volume, 2)
        kept = first.blocks
    path.unlink()
    with client:
        gone = volume.get(chain, into=somewhere(2), deadline_s=FAR_S)
        assert set(gone.reasons) == {Reason.DISCONNECTED}
        with agent_at(path, blocks=kept):
            target = somewhere(2)
            until_s = time.monotonic() + 10
            while volume.get(chain, into=target, deadline_s=FAR_S).hits < 2:
                assert time.monotonic() < until_s
            assert np.array_equal(target, source)


def test_another_agent_takes_over_when_the_first_goes_away(tmp_path: Path) -> None:
    with agent_at(tmp_path / "b.sock", name="agent-2") as second:
        with agent_at(tmp_path / "a.sock") as first:
            client = ostraca.connect([first.address, second.address], settings=SETTINGS)
            volume = client.volume("kv", LAYOUT, block_bytes=BLOCK_BYTES, create=True)
            chain, source = stored(volume, 2)
            second.blocks = first.blocks
            assert client.agent == "agent-1"
        with client:
            target = somewhere(2)
            until_s = time.monotonic() + 10
            while volume.get(chain, into=target, deadline_s=FAR_S).hits < 2:
                assert time.monotonic() < until_s
            assert np.array_equal(target, source)
            assert client.agent == "agent-2"


def test_a_batch_larger_than_arena_and_request_limits_is_moved_in_parts(tmp_path: Path) -> None:
    limits = ConnectionLimits(frame_bytes_max=1 << 20, blocks_max=24, inflight_max=2)
    with (
        agent_at(tmp_path / "a.sock", limits=limits) as agent,
        ostraca.connect(agent.address, settings=SETTINGS) as client,
    ):
        volume = client.volume("kv", LAYOUT, block_bytes=BLOCK_BYTES, create=True)
        chain, source = stored(volume, 200)
        target = somewhere(200)
        assert volume.get(chain, into=target, deadline_s=FAR_S).prefix == 200
        assert np.array_equal(target, source)
        assert volume.lookup([chain, chain[:50]], deadline_s=FAR_S).hits == 250
        assert volume.prefetch(chain, deadline_s=FAR_S).hits == 200
        assert max(sum(map(len, message.spans)) for message in agent.seen_of(Get)) <= 24
        assert is_whole(client)


def test_no_more_requests_are_under_way_than_the_agent_takes(tmp_path: Path) -> None:
    limits = ConnectionLimits(frame_bytes_max=1 << 20, blocks_max=2, inflight_max=3)
    with (
        agent_at(tmp_path / "a.sock", limits=limits) as agent,
        ostraca.connect(agent.address, settings=SETTINGS) as client,
    ):
        volume = client.volume("kv", LAYOUT, block_bytes=BLOCK_BYTES, create=True)
        agent.script[Lookup] = silent
        chain = volume.chain(hashes(20))
        threads = [
            threading.Thread(target=volume.lookup, args=[chain], kwargs={"deadline_s": 0.2}) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert agent.cancelled.wait(10)
        assert len(agent.seen_of(Lookup)) == 3


def test_threads_of_one_client_do_not_disturb_each_other(
    volume: ostraca.Volume, client: ostraca.Client
) -> None:
    problems: list[str] = []

    def work(number: int) -> None:
        chain = volume.chain(hashes(24, f"thread {number}"))
        source = np.random.default_rng(number).integers(0, 255, (24, BLOCK_BYTES), np.uint8)
        for _ in range(5):
            target = somewhere(24)
            volume.put(chain, source=source, deadline_s=FAR_S)
            if volume.get(chain, into=target, deadline_s=FAR_S).hits < 24 or not np.array_equal(
                target, source
            ):
                problems.append(f"thread {number}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    assert is_whole(client)


def test_closing_ends_calls_of_other_threads_at_once(
    agent: ScriptedAgent, client: ostraca.Client, volume: ostraca.Volume
) -> None:
    asked = threading.Event()
    agent.script[Get] = lambda *_: asked.set()
    results: list[ostraca.GetResult] = []
    chain = volume.chain(hashes(2))
    thread = threading.Thread(
        target=lambda: results.append(volume.get(chain, into=somewhere(2), deadline_s=FAR_S))
    )
    thread.start()
    assert asked.wait(10)
    client.close()
    thread.join()
    assert results[0].reasons == (Reason.DISCONNECTED,) * 2
    with pytest.raises(ostraca.ClosedError, match="connect again"):
        volume.get(chain, into=somewhere(2), deadline_s=FAR_S)


def test_a_put_gives_the_callers_memory_back_before_it_returns(volume: ostraca.Volume) -> None:
    chain = volume.chain(hashes(3))
    source = some_bytes(3)
    expected = source.copy()
    volume.put(chain, source=source, deadline_s=FAR_S)
    source[:] = 0
    target = somewhere(3)
    assert volume.get(chain, into=target, deadline_s=FAR_S).hits == 3
    assert np.array_equal(target, expected)


def test_a_second_put_exists(volume: ostraca.Volume) -> None:
    chain, source = stored(volume, 3)
    assert volume.put(chain, source=source, deadline_s=FAR_S).states == (PutState.EXISTS,) * 3
