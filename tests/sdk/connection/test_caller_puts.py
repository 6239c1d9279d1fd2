"""Small puts whose callers have the agent copy the blocks out of their memory."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from tests.sdk.conftest import BLOCK_BYTES, SETTINGS, SOON_S, hashes, no_thread_to_be_had
from tests.sdk.connection.caller_host import Answer, CallerHost, failing, wait_for
from tests.sdk.memory.stand_in_devices import DeviceArray, StandInDevices
from tests.sdk.operations.test_faults import FAR_S, silent, some_bytes, somewhere
from tests.sdk.operations.test_memory_puts import CONTIGUOUS, starts_of
from tests.sdk.operations.test_runner import Raised, handled, raise_it
from tests.sdk.scripted_agent import LIMITS, AgentConnection, ScriptedAgent, agent_at
from tests.support.stalls import Stopwatch

import ostraca
from ostraca import Ack, LayoutMismatchError, PutState, Reason
from ostraca._connection.caller_connections import SCRATCH_BYTES
from ostraca_fabric.wire import codec
from ostraca_fabric.wire.messages import Failure, Leaving, LookupDone, Put, PutDone

COMMITTED, DECLINED, STAGED = PutState.COMMITTED, PutState.DECLINED, PutState.STAGED
EXISTS, LATE = PutState.EXISTS, PutState.LATE
BLOCKS = 4


class PutCallers(CallerHost):
    """The same with an agent that may read workers' memory."""

    def __init__(self, agent: ScriptedAgent, client: ostraca.Client) -> None:
        super().__init__(agent, client)
        self.source = some_bytes(BLOCKS)

    def put(self, source: object = None, **how: Any) -> ostraca.PutResult:
        given = self.source if source is None else source
        return self.volume.put(self.chain, source=given, **{"deadline_s": FAR_S, **how})

    def answered(self, answer: Answer = ScriptedAgent.usual) -> list[AgentConnection]:
        """Have callers' puts answered so, and the driver's as usual; return what connections are asked on."""
        return self.answer(Put, answer)

    def assert_stored(self, right: NDArray[np.uint8] | None = None) -> None:
        """Get all blocks, whose tags come from their put."""
        wanted = self.source if right is None else right
        into = somewhere(len(wanted))[:, : wanted.shape[1]]
        chain = self.volume.chain(hashes(len(wanted)))
        assert self.volume.get(chain, into=list(into), deadline_s=FAR_S).hits == len(wanted)
        assert np.array_equal(into, wanted)

    @property
    def uses_arena(self) -> bool:
        return bool(self.client._runtime.arena.array.any())

    @property
    def counted(self) -> int:
        """Puts that the client counts."""
        return self.client.metrics().operation("put").requests


@contextmanager
def callers_of(agent: ScriptedAgent, **changed: Any) -> Iterator[PutCallers]:
    settings = replace(SETTINGS, **{"prefault": False, **changed})
    with ostraca.connect(agent.address, settings=settings) as client:
        yield PutCallers(agent, client)


@pytest.fixture
def reading(tmp_path: Path) -> Iterator[PutCallers]:
    with agent_at(tmp_path / "agent.sock", reads_workers=True) as agent, callers_of(agent) as host:
        yield host


# --- Puts by their callers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CONTIGUOUS)
def test_small_puts_are_read_where_they_are(reading: PutCallers, kind: str) -> None:
    asked = reading.answered()
    reading.open()
    source = CONTIGUOUS[kind](reading.source)
    assert reading.put(source).states == (COMMITTED,) * BLOCKS
    assert asked == reading.of_callers
    (put,) = reading.agent.seen_of(Put)
    assert codec.u64(put.addresses, BLOCKS).tolist() == starts_of(source)
    assert not any(put.slots)
    assert not reading.uses_arena
    reading.assert_stored(reading.source[:, 1:-7] if "gaps" in kind else reading.source)


def test_the_caller_says_the_same_as_the_driver(reading: PutCallers) -> None:
    lengths = [BLOCK_BYTES, 5, 4097, BLOCK_BYTES - 1]
    source = [block[:length] for block, length in zip(reading.source, lengths, strict=True)]
    asked = reading.answered(failing("overloaded"))
    reading.put(source, ttl_s=7.0)
    reading.open()
    reading.put(source, ttl_s=7.0)
    assert asked == [reading.session, *reading.of_callers]
    by_driver, by_caller = reading.agent.seen_of(Put)
    assert (by_caller.ack, by_caller.ttl_s) == (Ack.STAGED, 7.0)
    assert FAR_S - 5.0 < by_caller.deadline_s <= FAR_S
    of_neither = {"request": 0, "deadline_s": 0.0, "slots": b"", "handle": 0}
    assert msgspec.structs.replace(by_driver, **of_neither) == msgspec.structs.replace(
        by_caller, **of_neither
    )


def test_puts_open_connections_where_the_agent_reads(reading: PutCallers) -> None:
    for _ in range(3):
        reading.put()
    assert not reading.callers._is_running
    reading.put()
    reading.agent.connections.get(timeout=FAR_S)
    driver, caller = reading.agent.hellos
    assert caller.memory == driver.memory
    assert caller.memory is not None
    assert not caller.arenas


def test_each_put_counts_once(reading: PutCallers) -> None:
    reading.open()
    for number in range(1, 6):
        assert set(reading.put().states) == {COMMITTED if number == 1 else EXISTS}
        tally = reading.client.metrics().operation("put")
        assert (tally.requests, tally.bytes) == (number, reading.source.nbytes)
        assert sum(each.blocks for each in tally.blocks) == number * BLOCKS


def test_a_put_keeps_no_memory_of_its_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ostraca._operations.driver._IDLE_S", 10 * FAR_S)
    with agent_at(tmp_path / "a", reads_workers=True) as agent, callers_of(agent) as host:
        host.open()
        asked = host.answered()
        source = [bytearray(block) for block in host.source]
        assert host.put(source).states == (COMMITTED,) * BLOCKS
        for block in source:
            block.append(1)  # raises BufferError while anything holds it
        assert asked == host.of_callers


def test_four_callers_put_at_once_without_the_driver(reading: PutCallers) -> None:
    reading.open(4)
    everyone = threading.Barrier(4)

    def answer(connection: AgentConnection, message: Put) -> None:
        everyone.wait(FAR_S)
        ScriptedAgent.usual(connection, message)

    asked, whole = reading.answered(answer), reading.volume.chain(hashes(4))

    def put(number: int) -> ostraca.PutResult:
        return reading.volume.put(
            whole[number : number + 1], source=reading.source[number : number + 1], deadline_s=FAR_S
        )

    with ThreadPoolExecutor(4) as threads:
        assert [each.states for each in threads.map(put, range(4))] == [(COMMITTED,)] * 4
    assert sorted(map(id, asked)) == sorted(map(id, reading.of_callers))
    assert len(reading.idle) == 4
    reading.assert_stored()


# --- The driver's way ---------------------------------------------------------------------------------------

Puts = Callable[[PutCallers], ostraca.PutResult]


def put_large(host: PutCallers, blocks: int) -> ostraca.PutResult:
    chain = host.volume.chain(hashes(blocks))
    return host.volume.put(chain, source=some_bytes(blocks), deadline_s=FAR_S)


def put_rows(host: PutCallers) -> ostraca.PutResult:
    with host.client.register(host.source) as region:
        return host.put(region.rows(range(BLOCKS)))


def put_from_device(host: PutCallers) -> ostraca.PutResult:
    devices = host.client._runtime.devices = StandInDevices()
    try:
        return host.put(DeviceArray(host.source))
    finally:
        devices.let_go()


DRIVERS: dict[str, Puts] = {
    "too large": lambda host: put_large(host, SCRATCH_BYTES // BLOCK_BYTES + 1),
    "strided": lambda host: host.put(host.source[:, ::2]),
    "of parts": lambda host: host.put([[block[:7], block[7:]] for block in host.source]),
    "one of parts": lambda host: host.put([*host.source[1:], [host.source[0][:7], host.source[0][9:]]]),
    "rows of a region": put_rows,
    "committed": lambda host: host.put(ack=Ack.COMMITTED),
    "of a device": put_from_device,
}


@pytest.mark.parametrize("kind", DRIVERS)
def test_other_puts_take_the_drivers_way_and_open_nothing(reading: PutCallers, kind: str) -> None:
    for _ in range(8):
        assert {*DRIVERS[kind](reading).states} <= {COMMITTED, EXISTS}
    assert not reading.callers._is_running
    assert len(reading.agent.hellos) == 1
    reading.open()
    asked = reading.answered()
    DRIVERS[kind](reading)
    assert asked
    assert all(each is reading.session for each in asked)


def test_the_largest_put_of_a_caller_fits(reading: PutCallers) -> None:
    reading.open()
    asked = reading.answered()
    assert set(put_large(reading, SCRATCH_BYTES // BLOCK_BYTES).states) == {COMMITTED}
    assert asked == reading.of_callers


def test_a_put_of_more_blocks_than_a_request_takes_is_the_drivers(tmp_path: Path) -> None:
    limits = msgspec.structs.replace(LIMITS, blocks_max=BLOCKS - 1)
    with agent_at(tmp_path / "a", reads_workers=True, limits=limits) as agent, callers_of(agent) as host:
        host.open()
        asked = host.answered()
        assert host.put().states == (COMMITTED,) * BLOCKS
        assert asked == [host.session] * 2
        assert len(host.idle) == 1
        host.assert_stored()


def test_no_blocks_need_no_agent(reading: PutCallers) -> None:
    reading.open()
    assert reading.volume.put(reading.volume.chain([]), source=[], deadline_s=FAR_S).states == ()
    assert not reading.agent.seen_of(Put)
    assert reading.counted == 1


def test_an_agent_that_does_not_read_is_asked_by_the_driver_and_nothing_is_opened(
    agent: ScriptedAgent,
) -> None:
    with callers_of(agent) as host:
        for _ in range(8):
            assert {*host.put().states} <= {COMMITTED, EXISTS}
        assert not host.callers._is_running
        assert len(agent.hellos) == 1
        host.open()
        asked = host.answered()
        host.put()
        assert asked == [host.session]
        assert len(host.idle) == 1


def test_an_agent_that_reads_on_connections_with_an_arena_alone_is_asked_by_the_driver(
    reading: PutCallers,
) -> None:
    """As an agent of an earlier release."""
    reading.agent._reads_workers = False
    reading.open()
    asked = reading.answered()
    for _ in range(8):
        reading.put()
    assert asked == [reading.session] * 8
    assert all(put.addresses for put in reading.agent.seen_of(Put))
    assert len(reading.agent.hellos) == 2
    assert len(reading.idle) == 1
    reading.assert_stored()


@pytest.mark.parametrize("changed", [{"direct_memory": False}, {"caller_connections": False}])
def test_a_client_that_was_told_not_to_leaves_puts_to_the_driver(
    tmp_path: Path, changed: dict[str, bool]
) -> None:
    with agent_at(tmp_path / "a", reads_workers=True) as agent, callers_of(agent, **changed) as host:
        asked = host.answered()
        for _ in range(8):
            host.put()
        assert asked == [host.session] * 8
        assert len(agent.hellos) == 1


# --- Answers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["no_arena", "not_in_memory"])
def test_a_put_that_is_refused_for_its_connection_is_the_drivers(reading: PutCallers, code: str) -> None:
    reading.open()
    asked = reading.answered(failing(code))
    assert reading.put().states == (COMMITTED,) * BLOCKS
    assert asked == [*reading.of_callers, reading.session]
    assert len(reading.idle) == 1, "it goes on"
    assert reading.counted == 1
    reading.assert_stored()


def test_a_put_that_can_not_be_done_is_refused_and_the_connection_goes_on(reading: PutCallers) -> None:
    reading.open()
    asked = reading.answered(failing("layout_mismatch"))
    with pytest.raises(LayoutMismatchError, match="because"):
        reading.put()
    assert asked == reading.of_callers
    assert len(reading.idle) == 1


def done(message: Put, state: PutState = COMMITTED, reason: Reason = Reason.NONE) -> PutDone:
    return PutDone(message.request, bytes([state]) * BLOCKS, bytes([reason]) * BLOCKS)


def last_unread(connection: AgentConnection, message: Put) -> None:
    """Answer as an agent that can't read the last block."""
    answer = done(message, DECLINED, Reason.BUSY)
    reasons = answer.reasons[:-1] + bytes([Reason.TRANSFER_FAILED])
    connection.send(msgspec.structs.replace(answer, reasons=reasons))


def test_memory_that_can_not_be_read_is_told_and_later_puts_use_the_arena(
    reading: PutCallers, caplog: pytest.LogCaptureFixture
) -> None:
    reading.open()
    asked = reading.answered(last_unread)
    with caplog.at_level(logging.WARNING, "ostraca"):
        put = reading.put()
        assert put.states == (DECLINED,) * BLOCKS
        assert put.reasons == (Reason.BUSY,) * (BLOCKS - 1) + (Reason.TRANSFER_FAILED,)
        assert asked == reading.of_callers
        reading.agent.seen.clear()
        for _ in range(2):
            assert {*reading.put().states} <= {COMMITTED, EXISTS}
        assert reading.counted == 3
    assert asked[1:] == [reading.session] * 2
    assert not any(each.addresses for each in reading.agent.seen_of(Put))
    assert reading.uses_arena
    reading.assert_stored()
    (record,) = [each for each in caplog.records if "could not read" in each.message]
    assert record.threadName == "ostraca-driver", "no lock of a log is taken in a caller's thread"


@pytest.mark.parametrize("reason", [Reason.DAMAGED, Reason.BUSY, Reason.IN_FLIGHT])
def test_other_reasons_change_nothing(reading: PutCallers, reason: Reason) -> None:
    reading.open()
    asked = reading.answered(lambda at, message: at.send(done(message, DECLINED, reason)))
    for _ in range(2):
        put = reading.put()
        assert (set(put.states), set(put.reasons)) == ({DECLINED}, {reason})
    assert asked == reading.of_callers * 2


def test_an_overloaded_agent_declines_and_the_connection_goes_on(reading: PutCallers) -> None:
    reading.open()
    reading.answered(failing("overloaded"))
    put = reading.put()
    assert (set(put.states), set(put.reasons)) == ({DECLINED}, {Reason.OVERLOADED})
    assert put.note == "overloaded: because"
    assert len(reading.idle) == 1


def test_a_put_that_failed_in_the_middle_counts_and_ends_the_connection(reading: PutCallers) -> None:
    """The agent says later when it reads no more."""
    reading.open()
    asked = reading.answered(failing("internal"))
    put = reading.put()
    assert set(put.states) == {DECLINED}
    assert put.note == "internal: because"
    assert reading.of_callers[0].is_gone.wait(FAR_S)
    assert asked == reading.of_callers
    assert not reading.idle


def test_an_answer_before_the_agent_has_read_all_counts_and_ends_the_connection(reading: PutCallers) -> None:
    def answer(connection: AgentConnection, message: Put) -> None:
        states = bytes([STAGED] * (BLOCKS - 1) + [LATE])
        reasons = bytes([Reason.NONE] * (BLOCKS - 1) + [Reason.DEADLINE])
        connection.send(PutDone(message.request, states, reasons, np.array([3], codec.U32).tobytes()))

    reading.open()
    asked = reading.answered(answer)
    assert reading.put().states == (STAGED,) * (BLOCKS - 1) + (LATE,)
    assert reading.of_callers[0].is_gone.wait(FAR_S)
    assert not reading.idle
    assert asked == reading.of_callers
    assert reading.counted == 1
    assert {*reading.put().states} <= {COMMITTED, EXISTS}
    assert asked[1:] == [reading.session]


WRONG: dict[str, Answer] = {
    "of another request": lambda at, message: at.send(
        msgspec.structs.replace(done(message), request=message.request - 1)
    ),
    "of another operation": lambda at, message: at.send(
        LookupDone(message.request, bytes(BLOCKS), bytes(BLOCKS))
    ),
    "of fewer blocks": lambda at, message: at.send(PutDone(message.request, b"\2", b"\0")),
    "with unknown states": lambda at, message: at.send(
        PutDone(message.request, b"\x77" * BLOCKS, bytes(BLOCKS))
    ),
    "a failure of another request": lambda at, message: at.send(Failure(message.request - 1, "usage", "")),
    "the end of the connection": lambda at, _: at.hang_up(),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_after_a_wrong_answer_the_connection_ends_and_the_driver_puts(
    reading: PutCallers, wrong: str
) -> None:
    reading.open()
    asked = reading.answered(WRONG[wrong])
    assert reading.put().states == (COMMITTED,) * BLOCKS
    assert asked == [*reading.of_callers, reading.session]
    assert reading.of_callers[0].is_gone.wait(FAR_S)
    assert reading.counted == 1
    reading.assert_stored()


def test_blocks_stored_before_the_loss_of_the_connection_exist_for_the_driver(reading: PutCallers) -> None:
    def store_and_hang_up(connection: AgentConnection, message: Put) -> None:
        ids = connection.block_ids(message)
        tags = codec.rows16(message.tags, len(ids))
        for each, tag, payload in zip(ids, tags, connection.read(message), strict=True):
            reading.agent.blocks[each] = tag.tobytes(), payload
        connection.hang_up()

    reading.open()
    reading.answered(store_and_hang_up)
    assert reading.put().states == (EXISTS,) * BLOCKS
    reading.assert_stored()


# --- Time, interrupts and ends ------------------------------------------------------------------------------


def test_silence_until_the_deadline_is_late_and_ends_the_connection(reading: PutCallers) -> None:
    reading.open()
    asked = reading.answered(silent)
    watch = Stopwatch()
    put = reading.put(deadline_s=SOON_S)
    passed_s, took_s = watch.passed_s, watch.took_s
    assert passed_s >= SOON_S
    assert took_s < SOON_S + 0.9
    assert (set(put.states), set(put.reasons)) == ({LATE}, {Reason.DEADLINE})
    assert reading.of_callers[0].is_gone.wait(FAR_S)
    assert reading.put().states == (COMMITTED,) * BLOCKS
    assert asked == [*reading.of_callers, reading.session]
    assert reading.counted == 2


def test_a_deadline_that_has_passed_is_late_without_a_question(reading: PutCallers) -> None:
    reading.open()
    reading.put()
    assert set(reading.put(deadline_s=1e-9).states) == {LATE}
    assert len(reading.agent.seen_of(Put)) == 1
    assert len(reading.idle) == 1
    assert reading.counted == 2


def test_a_put_that_is_interrupted_costs_its_connection_alone(reading: PutCallers) -> None:
    reading.open(2)
    source = [bytearray(block) for block in reading.source]
    with handled(raise_it) as send:
        asked = reading.answered(lambda *_: send())
        with pytest.raises(Raised):
            reading.put(source)
    gc.collect()
    for block in source:
        block.append(1)
    (broken,) = asked
    assert broken.is_gone.wait(FAR_S)
    (other,) = [each for each in reading.of_callers if each is not broken]
    asked = reading.answered()
    assert reading.put().states == (COMMITTED,) * BLOCKS
    assert asked == [other]
    reading.assert_stored()
    assert reading.client.is_connected


def test_a_handler_may_put_while_its_caller_waits(reading: PutCallers) -> None:
    reading.open()
    found: list[object] = []
    other = reading.volume.chain(hashes(BLOCKS, "other"))

    def put_other() -> None:
        found.append(reading.volume.put(other, source=reading.source, deadline_s=FAR_S).states)

    with handled(put_other) as send:

        def answer(connection: AgentConnection, message: Put) -> None:
            send()
            wait_for(lambda: found)
            ScriptedAgent.usual(connection, message)

        reading.answered(answer)
        assert reading.put().states == (COMMITTED,) * BLOCKS
    assert found == [(COMMITTED,) * BLOCKS]
    reading.assert_stored()


def test_a_close_ends_the_wait_of_a_put_that_may_still_be_stored(reading: PutCallers) -> None:
    reading.open()
    is_asked = threading.Event()
    reading.answered(lambda *_: is_asked.set())
    with ThreadPoolExecutor(1) as threads:
        putting = threads.submit(reading.put)
        assert is_asked.wait(FAR_S)
        reading.client.close()
        put = putting.result(FAR_S)
    assert (set(put.states), set(put.reasons)) == ({LATE}, {Reason.DISCONNECTED})
    assert put.note == "closed here"


def test_a_put_follows_its_client_to_another_agent(tmp_path: Path) -> None:
    with (
        agent_at(tmp_path / "1", reads_workers=True) as first,
        agent_at(tmp_path / "2", name="agent-2", reads_workers=True) as second,
        ostraca.connect([first.address, second.address], settings=SETTINGS) as client,
    ):
        host = PutCallers(first, client)
        host.open()
        is_asked = threading.Event()
        host.answered(lambda *_: is_asked.set())
        with ThreadPoolExecutor(1) as threads:
            putting = threads.submit(host.put)
            assert is_asked.wait(FAR_S)
            host.session.send(Leaving())
            assert putting.result(FAR_S).states == (COMMITTED,) * BLOCKS
        assert client.agent == "agent-2"
        assert host.of_callers[0].is_gone.wait(FAR_S)
        assert host.counted == 1
        assert not first.blocks
        assert len(second.blocks) == BLOCKS
        host.assert_stored()


def test_a_put_that_its_caller_has_sent_is_late_where_the_driver_can_not_begin(reading: PutCallers) -> None:
    """The agent may have stored the blocks."""

    def lose(connection: AgentConnection, _: Put) -> None:
        reading.agent.goes_on.clear()
        reading.session.hang_up()
        wait_for(lambda: not reading.client.is_connected)
        connection.hang_up()

    reading.open()
    asked = reading.answered(lose)
    with no_thread_to_be_had("ostraca-dial"):
        put = reading.put()
    assert asked == reading.of_callers
    assert (set(put.states), set(put.reasons)) == ({LATE}, {Reason.OVERLOADED})
    assert "can start no more threads" in put.note
