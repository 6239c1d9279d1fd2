"""Workers whose blocks cross by NIXL, from agents that are processes of their own on their host."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from tests.support.pod.processes import Pod, await_hits, until
from tests.support.pod.work import (
    CHAINS,
    SMALL,
    await_puts,
    declined,
    empty,
    hashes,
    missing,
    put,
    put_all,
    volume_of,
)
from tests.support.stalls import Stopwatch

import ostraca
from ostraca import Reason
from ostraca._memory.nixl_arena import NixlArenaEnd

pytestmark = [pytest.mark.slow, pytest.mark.nixl]

NIXL = replace(SMALL, transports=("nixl",))
"""And by nothing else: a worker that can't have NIXL is not connected."""

SOON_S, SLACK_S = 0.2, 0.1


def test_blocks_of_an_agent_that_was_killed_are_got_by_nixl_from_its_successor(own: Pod) -> None:
    pytest.importorskip("nixl_cu12", reason="NIXL is not installed")
    own.create()
    dying, other = (own.agent(f"agent-{number}", transport="nixl") for number in range(2))
    own.start()
    with (
        ostraca.connect([dying.address, other.address], settings=NIXL) as bereft,
        ostraca.connect(other.address, settings=NIXL) as near,
        ThreadPoolExecutor(1) as threads,
    ):
        assert put(bereft) == list(CHAINS)
        assert missing(near) == []
        getting = threads.submit(missing, bereft)
        dying.kill()
        getting.result()  # some of it was on its way, and no byte of it may be wrong
        for client in (near, bereft):
            await_hits(client)
            await_puts(client)
        dying.launch()
        dying.await_ready()
        own.await_settled()
        assert missing(near) == []
        assert missing(bereft) == []
        until(lambda: not bereft.quarantined_bytes, "what was on its way is known to have ended")
    own.check_logs()


def test_an_agent_that_stopped_under_transfers_is_left_by_its_worker_and_harms_nothing_when_it_goes_on(
    own: Pod,
) -> None:
    pytest.importorskip("nixl_cu12", reason="NIXL is not installed")
    own.create()
    stopped = own.agent("agent-0", transport="nixl")
    own.agent("agent-1", transport="nixl")
    own.start()
    with (
        own.connect(stopped, settings=NIXL) as client,
        ThreadPoolExecutor(1) as threads,
    ):
        put_all(client)
        getting = threads.submit(missing, client, deadline_s=0.3)
        stopped.signal(signal.SIGSTOP)
        try:
            getting.result()
            until(lambda: stopped.name not in own.claims().values(), "its shards are the other's")
            await_hits(client)
            assert client.agent == "agent-1"
        finally:
            stopped.signal(signal.SIGCONT)
        for _ in range(5):  # what it may write yet, it writes where nobody looks
            missing(client)
        own.await_settled()
        assert missing(client) == []
        until(lambda: not client.quarantined_bytes, "what was on its way is known to have ended")
    own.check_logs()


def test_operations_end_in_time_while_what_a_dead_agent_was_offered_is_taken_back(
    own: Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("nixl_cu12", reason="NIXL is not installed")
    own.create()
    dying, other = (own.agent(f"agent-{number}", transport="nixl") for number in range(2))
    own.start()
    takes_back, make = threading.Event(), NixlArenaEnd._register

    def made_late(end: NixlArenaEnd) -> object:
        """Wait for longer than any deadline, then build."""
        assert takes_back.wait(60)
        return make(end)

    with own.connect(dying, settings=replace(NIXL, spare_after_s=60.0)) as client:
        put_all(client)
        volume = volume_of(client)
        chain = volume.chain(hashes(CHAINS[0]))
        dying.signal(signal.SIGSTOP)
        assert set(volume.get(chain, into=empty(), deadline_s=SOON_S).reasons) == {Reason.DEADLINE}
        assert client.quarantined_bytes, "the agent may write there yet"
        monkeypatch.setattr(NixlArenaEnd, "_register", made_late)
        dying.kill()
        until(lambda: not client.is_connected, "the worker knows that it is gone")
        for _ in range(3):
            watch = Stopwatch()
            got = volume.get(chain, into=empty(), deadline_s=SOON_S)
            assert watch.took_s < SOON_S + SLACK_S
            assert set(got.reasons) == {Reason.DEADLINE}
        takes_back.set()
        await_hits(client)
        assert client.agent == other.name
    own.check_logs()


def test_an_agent_that_is_killed_while_its_workers_leave_it_keeps_no_slot_of_theirs(own: Pod) -> None:
    pytest.importorskip("nixl_cu12", reason="NIXL is not installed")
    own.create()
    dying, other = (own.agent(f"agent-{number}", transport="nixl") for number in range(2))
    own.start()
    with (
        own.connect(dying, settings=NIXL) as client,
        ThreadPoolExecutor(4) as threads,
    ):
        put_all(client)
        dying.signal(signal.SIGTERM)
        getting = [threads.submit(missing, client) for _ in range(4)]
        until(lambda: client.agent == other.name, "the worker is with the other agent")
        dying.kill()
        for each in getting:
            each.result()
        await_hits(client)
        own.start()
        assert missing(client) == []
        until(lambda: not client.quarantined_bytes, "what was on its way is known to have ended")
    own.check_logs()


def test_without_etcd_blocks_are_got_by_nixl_all_along_and_put_again_once_it_is_back(own: Pod) -> None:
    pytest.importorskip("nixl_cu12", reason="NIXL is not installed")
    own.create()
    near, far = (own.agent(f"agent-{number}", transport="nixl") for number in range(2))
    own.start()
    with (
        ostraca.connect(near.address, settings=NIXL) as client,
        ostraca.connect(far.address, settings=NIXL) as other,
    ):
        put_all(client)
        own.etcd.kill()
        try:
            fresh = iter(range(1000, 100_000, len(CHAINS)))

            def are_declined() -> bool:
                assert missing(client) == missing(other) == []
                return set(declined(client, range(begin := next(fresh), begin + 24))) == {Reason.FENCED}

            until(are_declined, "puts are declined")
            assert missing(client) == missing(other) == []
        finally:
            own.etcd.start()
        for each in (client, other):
            await_puts(each)
            assert missing(each) == []
        until(lambda: not client.quarantined_bytes, "every transfer is known to have ended")
    own.check_logs()
