"""Lookups and small gets that callers do themselves, on connections beside the client's own."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from tests.sdk.conftest import BLOCK_BYTES, LAYOUT, SETTINGS, SOON_S, hashes, no_thread_to_be_had
from tests.sdk.connection.tls_front import TlsFront
from tests.sdk.direct.test_agent_memory import (
    BLOCKS,
    MEMORY_BYTES,
    UNTOUCHED,
    MemoryHost,
    length_of,
    memory_host,
)
from tests.sdk.operations.test_faults import FAR_S, silent, somewhere, stored
from tests.sdk.operations.test_runner import Raised, await_no_thread, handled, raise_it
from tests.sdk.scripted_agent import LIMITS, AgentConnection, ScriptedAgent, agent_at
from tests.support.stalls import Stopwatch

import ostraca
from ostraca import BlockState, Reason, UnknownVolumeError
from ostraca._connection.caller_connections import (
    SCRATCH_BYTES,
    CallerConnection,
    CallerConnections,
)
from ostraca._operations.driver import _LATER_MAX
from ostraca_fabric.model.ids import StartId
from ostraca_fabric.sockets.tls import TlsFiles
from ostraca_fabric.wire import codec
from ostraca_fabric.wire.messages import (
    DirectDrives,
    Failure,
    Get,
    GetDone,
    Leaving,
    Lookup,
    LookupDone,
    Message,
    OpenVolume,
    Ping,
    VolumeOpened,
)

HIT, MISS, LATE, DECLINED = BlockState.HIT, BlockState.MISS, BlockState.LATE, BlockState.DECLINED
Answer = Callable[[AgentConnection, Any], None]


def wait_for(is_so: Callable[[], object]) -> None:
    watch = Stopwatch()
    while not is_so():
        assert watch.passed_s < FAR_S
        time.sleep(0.001)  # nothing tells


class CallerHost:
    """A client with connections of callers, and the agent's ends of all."""

    def __init__(self, agent: ScriptedAgent, client: ostraca.Client) -> None:
        self.agent, self.client = agent, client
        self.session: AgentConnection = agent.connections.get(timeout=FAR_S)
        self.of_callers: list[AgentConnection] = []
        self.volume = client.volume("kv", LAYOUT, block_bytes=BLOCK_BYTES, create=True)
        self.chain = self.volume.chain(hashes(4))

    @property
    def callers(self) -> CallerConnections:
        return self.client._runtime.connections.callers

    @property
    def idle(self) -> list[CallerConnection]:
        return list(self.callers._idle)

    def open(self, count: int = 1) -> None:
        """Have connections opened, as after many operations that lacked one."""
        self.callers._wanted = 0
        for _ in range(4 * count):
            self.client._runner.do(self.callers.want_another)
        wait_for(lambda: len(self.callers._idle) == count)
        self.of_callers += [self.agent.connections.get(timeout=FAR_S) for _ in range(count)]

    def lookup(self, deadline_s: float = FAR_S) -> ostraca.LookupResult:
        return self.volume.lookup(self.chain, deadline_s=deadline_s)

    def answer(self, kind: type[Message], answer: Answer) -> list[AgentConnection]:
        """Have the agent answer callers so, and the driver as usual; return what connections are asked on."""
        asked: list[AgentConnection] = []

        def decide(connection: AgentConnection, message: Any) -> None:
            asked.append(connection)
            (ScriptedAgent.usual if connection is self.session else answer)(connection, message)

        self.agent.script[kind] = decide
        return asked


@contextmanager
def host_of(agent: ScriptedAgent, **changed: Any) -> Iterator[CallerHost]:
    with ostraca.connect(agent.address, settings=replace(SETTINGS, **changed)) as client:
        yield CallerHost(agent, client)


@pytest.fixture
def host(agent: ScriptedAgent) -> Iterator[CallerHost]:
    with host_of(agent) as made:
        yield made


# --- When connections are opened ----------------------------------------------------------------------------


def test_after_a_few_lookups_they_need_no_driver(host: CallerHost) -> None:
    asked = host.answer(Lookup, ScriptedAgent.usual)
    for _ in range(4):
        host.lookup()
    beside = host.agent.connections.get(timeout=FAR_S)
    wait_for(lambda: host.idle)
    for _ in range(20):
        assert set(host.lookup().states) == {MISS}
    assert asked == [host.session] * 4 + [beside] * 20
    hello = host.agent.hellos[1]
    assert (hello.arenas, hello.memory) == ((), None)
    assert hello.client == host.agent.hellos[0].client
    assert len(host.agent.hellos) == 2, "one caller at a time needs one"
    assert len([each for each in beside.volumes.values() if each.name == "kv"]) == 1


def test_a_program_with_few_lookups_opens_none(host: CallerHost) -> None:
    for _ in range(3):
        host.lookup()
    assert not host.callers._is_running
    assert len(host.agent.hellos) == 1


def test_other_operations_open_none(host: CallerHost) -> None:
    chain, _ = stored(host.volume, 2)
    for _ in range(8):
        host.volume.prefetch(chain, deadline_s=FAR_S)
        host.volume.get(chain, into=somewhere(2), deadline_s=FAR_S)
    assert not host.callers._is_running
    assert len(host.agent.hellos) == 1


def test_a_client_that_was_told_not_to_opens_none(agent: ScriptedAgent) -> None:
    with host_of(agent, caller_connections=False) as host:
        for _ in range(20):
            host.lookup()
        assert not host.callers._is_running
        assert len(agent.hellos) == 1


def test_without_a_thread_the_driver_looks_up(host: CallerHost) -> None:
    with no_thread_to_be_had("ostraca-callers"):
        for _ in range(20):
            assert len(host.lookup().states) == 4
    assert len(host.agent.hellos) == 1
    host.open()


def test_four_callers_at_once_need_no_driver(host: CallerHost) -> None:
    stored(host.volume, 2)
    host.open(4)
    everyone = threading.Barrier(4)

    def answer(connection: AgentConnection, message: Lookup) -> None:
        everyone.wait(FAR_S)
        ScriptedAgent.usual(connection, message)

    asked = host.answer(Lookup, answer)
    chains = [host.chain[:blocks] for blocks in (1, 2, 3, 4)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda chain: host.volume.lookup(chain, deadline_s=FAR_S), chains))
    assert [each.states for each in found] == [(HIT,), (HIT, HIT), (HIT, HIT, MISS), (HIT, HIT, MISS, MISS)]
    assert sorted(map(id, asked)) == sorted(map(id, host.of_callers))
    assert len(host.idle) == 4, "all are given back"


def test_a_fifth_caller_takes_the_drivers_way(host: CallerHost) -> None:
    host.open(4)
    is_asked, goes_on = threading.Semaphore(0), threading.Event()

    def answer(connection: AgentConnection, message: Lookup) -> None:
        is_asked.release()
        assert goes_on.wait(FAR_S)
        ScriptedAgent.usual(connection, message)

    asked = host.answer(Lookup, answer)
    with ThreadPoolExecutor(4) as threads:
        others = [threads.submit(host.lookup) for _ in range(4)]
        for _ in range(4):
            assert is_asked.acquire(timeout=FAR_S)
        host.lookup()
        goes_on.set()
        assert all(len(each.result().states) == 4 for each in others)
    assert asked.count(host.session) == 1
    host.client.close()
    assert len(host.agent.hellos) == 5, "there are four at most"


def test_over_tls_callers_look_up_too(agent: ScriptedAgent, agent_files: TlsFiles) -> None:
    path = Path(agent.address.removeprefix("unix://"))
    settings = replace(SETTINGS, tls_ca=str(agent_files.ca))
    with (
        TlsFront(path, agent_files) as front,
        ostraca.connect(front.address, settings=settings) as client,
    ):
        host = CallerHost(agent, client)
        chain, _ = stored(host.volume, 4)
        host.open()
        asked = host.answer(Lookup, ScriptedAgent.usual)
        for _ in range(10):
            assert host.volume.lookup(chain, deadline_s=FAR_S).hits == 4
        assert asked == host.of_callers * 10
        host.answer(Lookup, silent)
        assert set(host.lookup(SOON_S).states) == {LATE}
        assert host.of_callers[0].is_gone.wait(FAR_S)


def test_an_agent_that_was_started_anew_meanwhile_is_another(host: CallerHost) -> None:
    host.agent._handshake = replace(host.agent._handshake, start_id=StartId(os.urandom(16)))
    asked = host.answer(Lookup, ScriptedAgent.usual)
    for _ in range(4):
        host.lookup()
    assert host.agent.connections.get(timeout=FAR_S).is_gone.wait(FAR_S)
    host.lookup()
    assert asked == [host.session] * 5
    assert not host.idle


# --- What fits no single request ----------------------------------------------------------------------------


def test_large_lookups_take_the_drivers_way(tmp_path: Path) -> None:
    limits = msgspec.structs.replace(LIMITS, blocks_max=3)
    with agent_at(tmp_path / "agent.sock", limits=limits) as agent, host_of(agent) as host:
        host.open()
        asked = host.answer(Lookup, ScriptedAgent.usual)
        assert len(host.lookup().states) == 4
        assert asked == [host.session] * 2, "two requests"
        assert len(host.volume.lookup(host.chain[:3], deadline_s=FAR_S).states) == 3
        assert asked[2:] == host.of_callers


def test_lookups_of_many_chains_take_the_drivers_way(
    host: CallerHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.open()
    asked = host.answer(Lookup, ScriptedAgent.usual)
    monkeypatch.setattr("ostraca._operations.lookup.SPANS_MAX", 3)
    most = [host.chain[:1]] * 3
    assert len(host.volume.lookup(most, deadline_s=FAR_S).chains) == 3
    assert len(host.volume.lookup([*most, host.chain[:1]], deadline_s=FAR_S).chains) == 4
    assert asked == [*host.of_callers, host.session]


def test_chains_without_blocks_are_not_named(host: CallerHost) -> None:
    stored(host.volume, 2)
    host.open()
    asked = host.answer(Lookup, ScriptedAgent.usual)
    empty, chain = host.chain[:0], host.chain[:3]
    found = host.volume.lookup([empty, chain, empty, chain[1:], empty], deadline_s=FAR_S)
    assert [each.states for each in found.chains] == [(), (HIT, HIT, MISS), (), (HIT, MISS), ()]
    assert asked == host.of_callers
    assert [len(span) for span in host.agent.seen_of(Lookup)[0].spans] == [3, 2]


def test_no_blocks_are_no_request(host: CallerHost) -> None:
    host.open()
    asked = host.answer(Lookup, ScriptedAgent.usual)
    assert host.volume.lookup(host.chain[:0], deadline_s=FAR_S).states == ()
    assert not asked
    assert len(host.idle) == 1


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


def failing(code: str) -> Answer:
    return lambda connection, message: connection.send(Failure(message.request, code, "because"))


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


# --- Interrupts, ends and forks -----------------------------------------------------------------------------


def test_a_caller_that_is_interrupted_costs_its_connection_alone(host: CallerHost) -> None:
    host.open(2)
    with handled(raise_it) as send:
        host.answer(Lookup, lambda *_: send())
        with pytest.raises(Raised):
            host.lookup()
    wait_for(lambda: [each.is_gone.is_set() for each in host.of_callers].count(True) == 1)
    asked = host.answer(Lookup, ScriptedAgent.usual)
    assert host.lookup().states == (MISS,) * 4
    assert asked == [each for each in host.of_callers if not each.is_gone.is_set()]
    gc.collect()


def test_a_signal_that_another_thread_takes_is_handled_soon(host: CallerHost) -> None:
    host.open()
    with handled(raise_it):
        host.answer(Lookup, lambda *_: signal.pthread_kill(threading.get_ident(), signal.SIGUSR1))
        watch = Stopwatch()
        with pytest.raises(Raised):
            host.lookup()
    assert watch.took_s < 5.0


def test_a_handler_may_look_up_while_its_caller_waits(host: CallerHost) -> None:
    host.open()
    found: list[object] = []
    with handled(lambda: found.append(host.lookup().states)) as send:

        def answer(connection: AgentConnection, message: Lookup) -> None:
            send()
            wait_for(lambda: found)
            ScriptedAgent.usual(connection, message)

        host.answer(Lookup, answer)
        assert host.lookup().states == (MISS,) * 4
    assert found == [(MISS,) * 4]
    assert len(host.idle) == 1


def test_a_connection_that_an_interrupted_caller_dropped_is_closed(host: CallerHost) -> None:
    host.open()
    assert host.callers._take() is not None
    gc.collect()
    host.open()
    assert host.of_callers[0].is_gone.wait(FAR_S)


def test_a_close_ends_the_wait_of_a_caller(host: CallerHost) -> None:
    host.open(2)
    is_asked = threading.Event()
    host.answer(Lookup, lambda *_: is_asked.set())
    watch = Stopwatch()
    with ThreadPoolExecutor(1) as threads:
        looking = threads.submit(host.lookup)
        assert is_asked.wait(FAR_S)
        host.client.close()
        found = looking.result(FAR_S)
    assert watch.took_s < 5.0
    assert set(found.states) == {DECLINED}
    assert set(found.reasons) == {Reason.DISCONNECTED}
    assert all(each.is_gone.wait(FAR_S) for each in host.of_callers)
    with pytest.raises(ostraca.ClosedError):
        host.lookup()


def test_a_client_that_is_dropped_closes_them(agent: ScriptedAgent) -> None:
    client = ostraca.connect(agent.address, settings=SETTINGS)
    host = CallerHost(agent, client)
    host.open(2)
    ends = host.of_callers
    with pytest.warns(ResourceWarning, match="was dropped and not closed"):
        del host, client  # the only references
    assert all(each.is_gone.wait(FAR_S) for each in ends)
    await_no_thread("ostraca-driver", "ostraca-callers")


@dataclass
class Acting:
    """A job that does something at its connection, and no more."""

    act: Callable[[], object]
    is_for_memory: bool = False
    lacks_connection: bool = False
    connection: CallerConnection | None = None

    def run_at(self, connection: CallerConnection) -> bool:
        self.connection = connection
        self.act()
        return True

    def forget_memory(self) -> None:
        """Hold none."""


def test_a_connection_that_comes_back_after_the_end_is_closed(host: CallerHost) -> None:
    host.open()
    job = Acting(host.client.close)
    assert host.callers.run(job)
    assert job.connection is not None
    assert job.connection.is_closed
    assert not host.idle
    assert host.of_callers[0].is_gone.wait(FAR_S)


def test_a_connection_that_opens_after_the_end_is_closed(host: CallerHost) -> None:
    host.agent.goes_on.clear()
    for _ in range(4):
        host.client._runner.do(host.callers.want_another)
    wait_for(lambda: len(host.agent._open) == 2)
    host.client.close()
    host.agent.goes_on.set()
    assert host.agent.connections.get(timeout=FAR_S).is_gone.wait(FAR_S)
    await_no_thread("ostraca-callers")
    assert not host.idle
    assert host.callers._session is None


def test_a_connection_that_opens_after_a_failover_is_closed(host: CallerHost) -> None:
    """A session that ended meanwhile must not be the current one again."""
    session = host.callers._session
    host.agent.goes_on.clear()
    for _ in range(4):
        host.client._runner.do(host.callers.want_another)
    wait_for(lambda: len(host.agent._open) == 2)
    host.callers.use(None)
    host.agent.goes_on.set()
    assert host.agent.connections.get(timeout=FAR_S).is_gone.wait(FAR_S)
    await_no_thread("ostraca-callers")
    assert (host.callers._session, host.idle) == (None, [])
    host.callers.use(session)
    host.open()


def test_callers_follow_their_client_to_another_agent(tmp_path: Path) -> None:
    with agent_at(tmp_path / "1") as first, agent_at(tmp_path / "2", name="agent-2") as second:
        client = ostraca.connect([first.address, second.address], settings=SETTINGS)
        with client:
            host = CallerHost(first, client)
            host.open(2)
            is_asked = threading.Event()
            host.answer(Lookup, lambda *_: is_asked.set())
            with ThreadPoolExecutor(1) as threads:
                looking = threads.submit(host.lookup)
                assert is_asked.wait(FAR_S)
                host.session.send(Leaving())
                assert looking.result(FAR_S).states == (MISS,) * 4
            assert client.agent == "agent-2"
            assert all(each.is_gone.wait(FAR_S) for each in host.of_callers)
            assert second.seen_of(Lookup)
            second.connections.get(timeout=FAR_S)
            host.agent = second
            wait_for(lambda: not host.callers._is_running)
            host.open(1)
            second.seen.clear()
            asked: list[AgentConnection] = []

            def usual(connection: AgentConnection, message: Lookup) -> None:
                asked.append(connection)
                ScriptedAgent.usual(connection, message)

            second.script[Lookup] = usual
            assert host.lookup().states == (MISS,) * 4
            assert asked == host.of_callers[2:]


def test_after_the_loss_of_the_session_callers_do_not_use_the_rest(host: CallerHost) -> None:
    host.open(2)
    host.session.hang_up()
    wait_for(lambda: not host.client.is_connected)
    assert host.lookup().states == (MISS,) * 4
    assert all(each.is_gone.wait(FAR_S) for each in host.of_callers)


def test_a_forked_child_closes_the_descriptors(host: CallerHost) -> None:
    host.open(2)
    numbers = [connection._channel.stream.fileno() for connection in host.idle]
    child = os.fork()
    if not child:
        left = 0
        for number in numbers:
            try:
                os.fstat(number)
                left += 1
            except OSError:
                pass
        try:
            host.lookup()
        except ostraca.ClosedError:
            os._exit(left)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    asked = host.answer(Lookup, ScriptedAgent.usual)
    assert host.lookup().states == (MISS,) * 4
    assert asked[0] in host.of_callers


# --- Counts -------------------------------------------------------------------------------------------------


def test_each_operation_counts_once(host: CallerHost) -> None:
    stored(host.volume, 2)
    for _ in range(3):
        host.lookup()
    host.open()
    for number in range(10):
        host.lookup()
        tally = host.client.metrics().operation("lookup")
        assert tally.requests == 4 + number
        assert sum(each.blocks for each in tally.blocks) == 4 * tally.requests
    host.volume.lookup(host.chain, deadline_s=FAR_S, is_counted=False)
    assert host.client.metrics().operation("lookup").requests == 13


def test_operations_before_a_close_are_counted(host: CallerHost) -> None:
    host.open()
    for _ in range(10):
        host.lookup()
    host.client.close()
    assert host.client.metrics().operation("lookup").requests == 10


def test_many_operations_do_not_pile_up_until_the_driver_looks(
    agent: ScriptedAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ostraca._operations.driver._IDLE_S", 10 * FAR_S)
    with host_of(agent) as host:
        host.open()
        for _ in range(_LATER_MAX + 1):
            host.lookup()
        tally = host.client._runtime.meter.tallies["lookup"]
        wait_for(lambda: tally.snapshot().requests >= _LATER_MAX)


# --- Gets ---------------------------------------------------------------------------------------------------


class MemoryCallers(CallerHost):
    """The same with an agent that shows its memory."""

    def __init__(self, host: MemoryHost, client: ostraca.Client) -> None:
        host.agent.connections.get(timeout=FAR_S)  # of ``store``
        super().__init__(host.agent, client)
        self.host = host
        self.chain = self.volume.chain(hashes(BLOCKS))

    def into(self) -> list[NDArray[np.uint8]]:
        return [np.full_like(block, UNTOUCHED) for block in self.host.source]

    def offers(self, places: dict[int, int] | None = None) -> list[AgentConnection]:
        """Have callers' gets answered with these places, and the driver's as usual."""
        self.host.offer(*range(BLOCKS), places=places)
        return self.answer(Get, self.agent.script[Get])

    @property
    def of_memory(self) -> list[bool]:
        return [get.in_memory for get in self.agent.seen_of(Get)]


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[MemoryCallers]:
    with memory_host(tmp_path) as host, host.client() as client:
        yield MemoryCallers(host, client)


def test_small_gets_are_copied_by_their_callers(memory: MemoryCallers) -> None:
    asked = memory.offers()
    memory.open()
    for _ in range(3):
        assert set(memory.host.get(memory.client).states) == {HIT}
    assert asked == memory.of_callers * 3
    assert memory.of_memory == [True] * 3
    assert not any(any(get.slots) for get in memory.agent.seen_of(Get))
    assert memory.agent.seen_of(DirectDrives)[-1] == DirectDrives((), reads_memory=True)
    assert not memory.client._runtime.arena.array.any()
    metrics = memory.client.metrics()
    tally = metrics.operation("get")
    assert (tally.requests, tally.bytes) == (3, 3 * sum(map(length_of, range(BLOCKS))))
    assert metrics.hit_tokens == 3 * BLOCKS * LAYOUT.page_tokens
    assert metrics.direct is not None
    assert (metrics.direct.blocks_read, metrics.direct.blocks_failed) == (3 * BLOCKS, 0)
    assert metrics.direct.bytes_read == tally.bytes


def test_gets_open_connections_where_memory_can_be_read(memory: MemoryCallers) -> None:
    memory.offers()
    for _ in range(4):
        memory.host.get(memory.client)
    assert memory.agent.connections.get(timeout=FAR_S).features


def test_wrong_bytes_never_reach_the_callers_memory(memory: MemoryCallers) -> None:
    memory.host.memory[:BLOCK_BYTES] = 0xAB
    places = {**memory.host.places, 1: 0, 4: MEMORY_BYTES - BLOCK_BYTES}
    asked = memory.offers(places)
    usual, seen, into = memory.agent.script[Get], [], memory.into()

    def look(connection: AgentConnection, message: Get) -> None:
        if connection is memory.session:
            seen.append([bool((block == UNTOUCHED).all()) for block in into])
        usual(connection, message)

    memory.agent.script[Get] = look
    memory.open()
    found = memory.volume.get(memory.chain, into=into, deadline_s=FAR_S)
    assert set(found.states) == {HIT}
    assert seen == [[position in (1, 4) for position in range(BLOCKS)]]
    for block, right in zip(into, memory.host.source, strict=True):
        assert np.array_equal(block, right)
    assert asked == [*memory.of_callers, memory.session]
    assert memory.of_memory == [True, False]
    metrics = memory.client.metrics()
    assert metrics.operation("get").requests == 1
    assert metrics.direct is not None
    assert (metrics.direct.blocks_read, metrics.direct.blocks_failed) == (BLOCKS - 2, 2)


def without_places(connection: AgentConnection, message: Get) -> None:
    connection.send(GetDone(message.request, bytes([HIT] * BLOCKS), bytes(BLOCKS)))


def of_slots(connection: AgentConnection, message: Get) -> None:
    ids = connection.block_ids(message)
    tags = b"".join(connection.agent.blocks[each][0] for each in ids)
    positions = np.arange(BLOCKS, dtype=codec.U32).tobytes()
    connection.send(GetDone(message.request, bytes([HIT] * BLOCKS), bytes(BLOCKS), b"", positions, tags))


def test_blocks_beyond_the_agents_memory_end_the_connection(memory: MemoryCallers) -> None:
    asked = memory.offers({**memory.host.places, 3: MEMORY_BYTES})
    memory.open()
    assert set(memory.host.get(memory.client).states) == {HIT}
    assert asked == [*memory.of_callers, memory.session]
    assert memory.of_callers[0].is_gone.wait(FAR_S)


def test_blocks_in_slots_that_there_are_not_end_the_connection(memory: MemoryCallers) -> None:
    asked = memory.answer(Get, of_slots)
    memory.open()
    assert set(memory.host.get(memory.client).states) == {HIT}
    assert asked == [*memory.of_callers, memory.session]
    assert memory.of_callers[0].is_gone.wait(FAR_S)


def test_claimed_hits_without_places_are_misses(memory: MemoryCallers) -> None:
    memory.answer(Get, without_places)
    memory.open()
    found = memory.host.get(memory.client)
    assert set(found.states) == {MISS}
    assert set(found.reasons) == {Reason.TRANSFER_FAILED}


@pytest.mark.parametrize("code", ["not_in_memory", "no_arena"])
def test_blocks_that_are_not_in_memory_are_the_drivers_and_later_gets_too(
    memory: MemoryCallers, code: str
) -> None:
    memory.answer(Get, failing(code))
    memory.open()
    for _ in range(20):
        assert set(memory.host.get(memory.client).states) == {HIT}
    tried = [at for at, is_tried in enumerate(self_tried(memory.of_memory)) if is_tried]
    assert tried == [0, 2, 5, 10, 19]
    assert len(memory.idle) == 1
    assert memory.client.metrics().operation("get").requests == 20
    memory.offers()
    memory.callers._passes = 0
    memory.agent.seen.clear()
    for _ in range(3):
        memory.host.get(memory.client)
    assert memory.of_memory == [True] * 3, "as it found them"


def self_tried(of_memory: list[bool]) -> list[bool]:
    """Return for each get whether its caller tried first: such a get asks twice."""
    found: list[bool] = []
    for number, is_tried in enumerate(of_memory):
        if is_tried:
            found.append(True)
        elif not number or not of_memory[number - 1]:
            found.append(False)
    return found


def test_lookups_need_no_memory_and_go_on(memory: MemoryCallers) -> None:
    memory.answer(Get, failing("not_in_memory"))
    memory.open()
    memory.host.get(memory.client)
    asked = memory.answer(Lookup, ScriptedAgent.usual)
    assert memory.volume.lookup(memory.chain, deadline_s=FAR_S).hits == BLOCKS
    assert asked == memory.of_callers


def test_an_agent_that_declines_a_get_is_believed(memory: MemoryCallers) -> None:
    states, reasons = bytes([DECLINED] * BLOCKS), bytes([Reason.QUOTA] * BLOCKS)
    asked = memory.answer(Get, lambda at, message: at.send(GetDone(message.request, states, reasons)))
    memory.open()
    found = memory.host.get(memory.client)
    assert set(found.reasons) == {Reason.QUOTA}
    assert asked == memory.of_callers


def test_memory_that_can_not_be_read_any_more_is_the_drivers(memory: MemoryCallers) -> None:
    memory.offers()
    memory.open()
    session = memory.client._runtime.connections.session
    assert session is not None
    assert session.memory is not None
    session.memory._address = (1 << 46) + 1
    usual = memory.agent.script[Get]
    memory.host.offer(*range(BLOCKS))
    assert set(memory.host.get(memory.client).states) == {HIT}
    assert not session.memory.is_usable
    memory.agent.seen.clear()
    memory.callers._passes = 0
    memory.agent.script[Get] = usual
    assert set(memory.host.get(memory.client).states) == {HIT}
    assert memory.of_memory == [False]


def test_a_get_is_late_at_its_deadline_and_nothing_lands_later(memory: MemoryCallers) -> None:
    asked = memory.answer(Get, silent)
    memory.open()
    into, watch = memory.into(), Stopwatch()
    found = memory.volume.get(memory.chain, into=into, deadline_s=SOON_S)
    assert watch.took_s < SOON_S + 0.9
    assert set(found.states) == {LATE}
    assert all((block == UNTOUCHED).all() for block in into)
    assert memory.of_callers[0].is_gone.wait(FAR_S)
    assert asked == memory.of_callers


def test_a_get_that_is_interrupted_costs_its_connection_alone(memory: MemoryCallers) -> None:
    into = memory.into()
    with handled(raise_it) as send:
        memory.answer(Get, lambda *_: send())
        memory.open()
        with pytest.raises(Raised):
            memory.volume.get(memory.chain, into=into, deadline_s=FAR_S)
    assert memory.of_callers[0].is_gone.wait(FAR_S)
    assert all((block == UNTOUCHED).all() for block in into)
    memory.offers()
    assert set(memory.host.get(memory.client).states) == {HIT}
    gc.collect()


def test_a_get_keeps_no_memory_of_its_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ostraca._operations.driver._IDLE_S", 10 * FAR_S)
    with memory_host(tmp_path) as host, host.client() as client:
        memory = MemoryCallers(host, client)
        memory.offers()
        memory.open()
        into = [bytearray(len(block)) for block in host.source]
        assert memory.volume.get(memory.chain, into=into, deadline_s=FAR_S).hits == BLOCKS
        for block, right in zip(into, host.source, strict=True):
            assert block == right.tobytes()
            block.append(1)  # raises BufferError while anything holds it
        assert memory.of_memory == [True]


def test_large_gets_take_the_drivers_way(memory: MemoryCallers) -> None:
    memory.open()
    blocks = SCRATCH_BYTES // BLOCK_BYTES
    chain = memory.volume.chain(hashes(blocks + 1, "large"))
    for some, of_memory in ((chain, [False, False]), (chain[:blocks], [True])):
        memory.agent.seen.clear()
        memory.answer(Get, failing("overloaded"))
        memory.volume.get(some, into=somewhere(len(some)), deadline_s=FAR_S)
        assert memory.of_memory[: len(of_memory)] == of_memory


def test_gets_into_regions_take_the_drivers_way(memory: MemoryCallers) -> None:
    memory.open()
    assert set(memory.host.get_rows(memory.client).states) == {HIT}
    assert memory.of_memory == [False]


def test_gets_of_a_client_that_reads_no_memory_take_the_drivers_way(tmp_path: Path) -> None:
    with memory_host(tmp_path) as host:
        settings = replace(SETTINGS, direct_memory=False)
        with ostraca.connect(host.agent.address, settings=settings) as client:
            memory = MemoryCallers(host, client)
            memory.open()
            assert set(host.get(client).states) == {HIT}
            assert memory.of_memory == [False]
            assert not memory.of_callers[0].features
            assert not host.agent.seen_of(DirectDrives)
