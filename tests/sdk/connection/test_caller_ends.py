"""Connections of callers at interrupts, ends, failovers and forks; and the counts of their operations."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.sdk.conftest import SETTINGS
from tests.sdk.connection.caller_host import CallerHost, host_of, wait_for
from tests.sdk.operations.test_faults import FAR_S, stored
from tests.sdk.operations.test_runner import Raised, await_no_thread, handled, raise_it
from tests.sdk.scripted_agent import AgentConnection, ScriptedAgent, agent_at
from tests.support.stalls import Stopwatch

import ostraca
from ostraca import BlockState, Reason
from ostraca._connection.caller_connections import (
    CallerConnection,
)
from ostraca._connection.session import AgentSession
from ostraca._memory.host_blocks import CallerBlocks
from ostraca._operations.driver import _LATER_MAX
from ostraca_fabric.wire.messages import (
    Leaving,
    Lookup,
)

MISS, DECLINED = BlockState.MISS, BlockState.DECLINED

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
    memory: CallerBlocks | None = None
    connection: CallerConnection | None = None

    def suits(self, _: AgentSession) -> bool:
        return True

    def run_at(self, connection: CallerConnection) -> bool:
        self.connection = connection
        self.act()
        return True


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
