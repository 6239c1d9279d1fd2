"""Connections of callers: when they are opened, and what lookups take them."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from tests.sdk.conftest import SETTINGS, SOON_S, no_thread_to_be_had
from tests.sdk.connection.caller_host import CallerHost, host_of, wait_for
from tests.sdk.connection.tls_front import TlsFront
from tests.sdk.operations.test_faults import FAR_S, silent, somewhere, stored
from tests.sdk.scripted_agent import LIMITS, AgentConnection, ScriptedAgent, agent_at

import ostraca
from ostraca import BlockState
from ostraca_fabric.model.ids import StartId
from ostraca_fabric.sockets.tls import TlsFiles
from ostraca_fabric.wire.messages import (
    Lookup,
)

HIT, MISS, LATE = BlockState.HIT, BlockState.MISS, BlockState.LATE

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
    assert len(host.agent.hellos) == 2, "one caller at a time needs one"
    first, hello = host.agent.hellos
    assert not hello.arenas
    assert (hello.client, hello.memory) == (first.client, first.memory)
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
