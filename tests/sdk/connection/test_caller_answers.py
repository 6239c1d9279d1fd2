"""Answers to lookups of callers, wrong ones and late ones too."""

from __future__ import annotations

import threading

import pytest
from tests.sdk.conftest import BLOCK_BYTES, LAYOUT, SOON_S
from tests.sdk.connection.caller_host import Answer, CallerHost, failing, wait_for
from tests.sdk.operations.test_faults import FAR_S, silent
from tests.sdk.scripted_agent import LIMITS, AgentConnection, ScriptedAgent
from tests.support.stalls import Stopwatch

from ostraca import BlockState, Reason, UnknownVolumeError
from ostraca_fabric.wire.messages import (
    Failure,
    GetDone,
    Leaving,
    Lookup,
    LookupDone,
    OpenVolume,
    Ping,
    VolumeOpened,
)

HIT, MISS, LATE, DECLINED = BlockState.HIT, BlockState.MISS, BlockState.LATE, BlockState.DECLINED

# --- Answers ------------------------------------------------------------------------------------------------


def hit(message: Lookup, request: int | None = None) -> LookupDone:
    return LookupDone(message.request if request is None else request, bytes([HIT] * 4), bytes(4))


WRONG: dict[str, Answer] = {
    "of another request": lambda at, message: at.send(hit(message, message.request - 1)),
    "of another operation": lambda at, message: at.send(GetDone(message.request, bytes([HIT] * 4), bytes(4))),
    "of fewer blocks": lambda at, message: at.send(LookupDone(message.request, bytes(3), bytes(3))),
    "with unknown states": lambda at, message: at.send(LookupDone(message.request, b"\x07" * 4, bytes(4))),
    "of no operation": lambda at, _: at.send(Leaving()),
    "garbage": lambda at, _: at.socket.sendall(b"\x00\x00\x00\x04\x01\xff\xff\xff" * 4),
    "bulk bytes": lambda at, message: at.send_bulk(message.request, (0, bytes(100))),
    "a frame too long": lambda at, _: at.socket.sendall(b"\xff\xff\xff\xff" * 4),
    "the end of the connection": lambda at, _: at.hang_up(),
    "a failure of another request": lambda at, message: at.send(Failure(message.request - 1, "usage", "")),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_after_a_wrong_answer_the_connection_ends_and_the_driver_asks(host: CallerHost, wrong: str) -> None:
    host.open()
    asked = host.answer(Lookup, WRONG[wrong])
    assert host.lookup().states == (MISS,) * 4
    assert asked == [*host.of_callers, host.session]
    assert host.of_callers[0].is_gone.wait(FAR_S)
    assert host.client.is_connected
    assert not host.idle
    assert host.client.metrics().operation("lookup").requests == 1
    assert host.lookup().states == (MISS,) * 4
    assert asked[2:] == [host.session]


def test_after_a_wrong_answer_it_takes_a_few_operations_until_another_connection(host: CallerHost) -> None:
    host.open()
    host.answer(Lookup, WRONG["the end of the connection"])
    for _ in range(4):
        host.lookup()
    assert not host.callers._is_running
    assert len(host.agent.hellos) == 2
    host.lookup()
    host.agent.connections.get(timeout=FAR_S)


def test_a_refusal_is_raised_and_the_connection_goes_on(host: CallerHost) -> None:
    host.open()
    asked = host.answer(Lookup, failing("unknown_volume"))
    for _ in range(2):
        with pytest.raises(UnknownVolumeError, match="because"):
            host.lookup()
    host.answer(Lookup, ScriptedAgent.usual)
    assert host.lookup().states == (MISS,) * 4
    assert asked == host.of_callers * 2
    assert not host.of_callers[0].is_gone.is_set()


def test_an_overloaded_agent_declines(host: CallerHost) -> None:
    host.open()
    asked = host.answer(Lookup, failing("overloaded"))
    found = host.lookup()
    assert set(found.states) == {DECLINED}
    assert set(found.reasons) == {Reason.OVERLOADED}
    assert found.chains[0].note == "overloaded: because"
    assert asked == host.of_callers
    assert len(host.idle) == 1


@pytest.mark.parametrize("code", ["not_in_memory", "no_arena"])
def test_a_lookup_that_is_refused_as_a_get_is_asked_by_the_driver(host: CallerHost, code: str) -> None:
    host.open()
    asked = host.answer(Lookup, failing(code))
    assert host.lookup().states == (MISS,) * 4
    assert asked == [*host.of_callers, host.session]


OPENED: dict[str, Answer] = {
    "a refusal": failing("unknown_volume"),
    "an answer to another request": lambda at, message: at.send(VolumeOpened(message.request - 1, 0, 1)),
    "another message": lambda at, message: at.send(LookupDone(message.request, b"", b"")),
}


@pytest.mark.parametrize("answer", OPENED)
def test_a_volume_that_is_not_opened_for_a_caller_is_the_drivers(host: CallerHost, answer: str) -> None:
    host.open()
    opened = host.answer(OpenVolume, OPENED[answer])
    asked = host.answer(Lookup, ScriptedAgent.usual)
    assert host.lookup().states == (MISS,) * 4
    assert opened == host.of_callers
    assert asked == [host.session]
    assert host.of_callers[0].is_gone.wait(FAR_S)


def test_each_volume_is_opened_once_for_a_connection(host: CallerHost) -> None:
    other = host.client.volume("other", LAYOUT, block_bytes=BLOCK_BYTES, create=True)
    host.open()
    for _ in range(3):
        for volume in (host.volume, other):
            volume.lookup(host.chain, deadline_s=FAR_S)
    assert [each.name for each in host.of_callers[0].volumes.values()] == ["kv", "other"]
    assert not any(each.create for each in host.of_callers[0].volumes.values())


# --- Time ---------------------------------------------------------------------------------------------------


def test_silence_until_the_deadline_is_late_and_ends_the_connection(host: CallerHost) -> None:
    host.open()
    asked = host.answer(Lookup, silent)
    watch = Stopwatch()
    found = host.lookup(SOON_S)
    passed_s, took_s = watch.passed_s, watch.took_s
    assert passed_s >= SOON_S
    assert took_s < SOON_S + 0.9
    assert set(found.states) == {LATE}
    assert set(found.reasons) == {Reason.DEADLINE}
    assert host.of_callers[0].is_gone.wait(FAR_S)
    assert host.lookup().states == (MISS,) * 4
    assert asked == [*host.of_callers, host.session]
    assert host.client.metrics().operation("lookup").requests == 2


def test_an_answer_that_trickles_is_late_at_the_deadline(host: CallerHost) -> None:
    host.open()
    is_over = threading.Event()

    def trickle(connection: AgentConnection, _: Lookup) -> None:
        connection.socket.sendall((LIMITS.frame_bytes_max - 1).to_bytes(4, "little") + b"\0")
        while not is_over.is_set():
            connection.socket.sendall(b"0")

    host.answer(Lookup, trickle)
    watch = Stopwatch()
    assert set(host.lookup(SOON_S).states) == {LATE}
    assert watch.took_s < SOON_S + 0.9
    is_over.set()


def test_a_volume_that_is_not_opened_in_time_makes_the_lookup_late(host: CallerHost) -> None:
    host.open()
    host.answer(OpenVolume, silent)
    watch = Stopwatch()
    found = host.lookup(SOON_S)
    assert watch.took_s < SOON_S + 0.9
    assert set(found.states) == {LATE}
    assert not host.agent.seen_of(Lookup)


def test_a_deadline_that_has_passed_is_late_without_a_question(host: CallerHost) -> None:
    host.open()
    asked = host.answer(Lookup, ScriptedAgent.usual)
    assert set(host.lookup(1e-9).states) == {LATE}
    assert not asked


def test_callers_notice_that_an_agent_is_silent(host: CallerHost) -> None:
    host.open(2)
    host.agent.script[Lookup] = silent
    for _ in range(2):
        assert set(host.lookup(SOON_S).states) == {LATE}
    wait_for(lambda: host.agent.seen_of(Ping))
    assert host.client.is_connected, "it has answered"
