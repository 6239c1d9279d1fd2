"""A worker that had to go to another agent goes back to the one it prefers, and loses nothing by that."""

from __future__ import annotations

import itertools
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.sdk.conftest import BLOCK_BYTES, LAYOUT, SETTINGS, no_thread_to_be_had
from tests.sdk.failover.test_connection_manager import Held, Made, await_agent, made
from tests.sdk.failover.test_transfer_reconciler import lose
from tests.sdk.front_ends import FRONT_ENDS
from tests.sdk.operations.test_faults import FAR_S, somewhere, stored
from tests.sdk.scripted_agent import agent_at

import ostraca
from ostraca import BlockState
from ostraca._failover.background import Failback, FailbackPauses
from ostraca_fabric.errors import UsageError
from ostraca_fabric.wire.messages import Get, Leaving, OpenVolume

FAILBACK = replace(SETTINGS, failback_after_s=0.05)

__all__ = ["made"]


class Looked:
    """Counts how often clients have looked whether they may go back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._times = 0
        self._changed = threading.Condition()
        is_welcome_at = Failback._is_welcome_at

        def counted(failback: Failback, address: object) -> bool:
            is_welcome: bool = is_welcome_at(failback, address)  # type: ignore[arg-type]
            with self._changed:
                self._times += 1
                self._changed.notify_all()
            return is_welcome

        monkeypatch.setattr(Failback, "_is_welcome_at", counted)

    def await_more(self, times: int) -> None:
        with self._changed:
            until = self._times + times
            assert self._changed.wait_for(lambda: self._times >= until, timeout=FAR_S)


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> Looked:
    return Looked(monkeypatch)


@pytest.mark.parametrize("front_end", sorted(FRONT_ENDS))
def test_a_worker_goes_back_when_the_first_agent_is_there_and_what_is_under_way_ends_where_it_is(
    tmp_path: Path, front_end: str
) -> None:
    with (
        agent_at(tmp_path / "2", name="agent-2") as second,
        ostraca.connect([f"unix://{tmp_path}/1", second.address], settings=FAILBACK) as client,
    ):
        connection = second.connections.get(timeout=FAR_S)
        volume = client.volume("kv", LAYOUT, block_bytes=BLOCK_BYTES, create=True)
        chain, source = stored(volume, 2)
        held = Held(second, Get)
        with FRONT_ENDS[front_end](client, volume) as shelled, ThreadPoolExecutor(1) as threads:
            getting = threads.submit(shelled.get, chain, into=(slow := somewhere(2)), deadline_s=FAR_S)
            assert held.is_asked.wait(FAR_S)
            with agent_at(tmp_path / "1", blocks=second.blocks) as first:
                await_agent(client, "agent-1")
                got = shelled.get(chain, into=(quick := somewhere(2)), deadline_s=FAR_S)
                assert set(got.states) == {BlockState.HIT}
                assert not getting.done()
                assert not connection.is_gone.is_set(), "it is waited for"
                held.release()
                assert set(getting.result(FAR_S).states) == {BlockState.HIT}
                assert connection.is_gone.wait(FAR_S)
                assert len(first.seen_of(OpenVolume)) == 1, "before anything is asked there"
        assert np.array_equal(slow, source)
        assert np.array_equal(quick, source)


def test_a_process_that_has_said_that_it_ends_is_not_gone_back_to_but_the_next_one_is(
    tmp_path: Path, looked: Looked
) -> None:
    with agent_at(tmp_path / "2", name="agent-2") as second:
        with agent_at(tmp_path / "1") as first:
            client = ostraca.connect([first.address, second.address], settings=FAILBACK)
            first.connections.get(timeout=FAR_S).send(Leaving())
            await_agent(client, "agent-2")
            looked.await_more(3)
            assert client.agent == "agent-2"
        (tmp_path / "1").unlink()
        with client, agent_at(tmp_path / "1"):
            await_agent(client, "agent-1")


def test_an_agent_that_is_lost_and_answers_again_is_gone_back_to(tmp_path: Path) -> None:
    with (
        agent_at(tmp_path / "3", name="agent-3") as third,
        agent_at(tmp_path / "2", name="agent-2", blocks=third.blocks) as second,
    ):
        addresses = [f"unix://{tmp_path}/1", second.address, third.address]
        with ostraca.connect(addresses, settings=FAILBACK) as client:
            volume = client.volume("kv", LAYOUT, block_bytes=BLOCK_BYTES, create=True)
            chain, _ = stored(volume, 2)
            with agent_at(tmp_path / "1", blocks=third.blocks) as first:
                await_agent(client, "agent-1")
                connection = first.connections.get(timeout=FAR_S)
                while connection.is_gone.wait(0.0):  # the first ones only asked whether it is there
                    connection = first.connections.get(timeout=FAR_S)
            with client._runtime.arena.changed:
                assert client._runtime.arena.changed.wait_for(lambda: not client.is_connected, timeout=FAR_S)
            assert set(volume.get(chain, into=somewhere(2), deadline_s=FAR_S).states) == {BlockState.HIT}
            assert client.agent == "agent-2", "before the third"
            (tmp_path / "1").unlink()
            with agent_at(tmp_path / "1", blocks=third.blocks):
                await_agent(client, "agent-1")


def test_an_address_that_fell_silent_and_is_gone_back_to_may_be_dialled_again(tmp_path: Path) -> None:
    quick = replace(FAILBACK, silent_misses_max=1, silent_ping_s=0.05, silent_deadline_min_s=0.01)
    with (
        agent_at(tmp_path / "1") as first,
        agent_at(tmp_path / "2", name="agent-2", blocks=first.blocks) as second,
        ostraca.connect([first.address, second.address], settings=quick) as client,
    ):
        volume = client.volume("kv", LAYOUT, block_bytes=BLOCK_BYTES, create=True)
        chain, _ = stored(volume, 2)
        connection = first.connections.get(timeout=FAR_S)
        first.goes_on.clear()
        assert set(volume.get(chain, into=somewhere(2), deadline_s=0.1).states) == {BlockState.LATE}
        with client._runtime.arena.changed:
            assert client._runtime.arena.changed.wait_for(lambda: not client.is_connected, timeout=FAR_S)
        assert set(volume.get(chain, into=somewhere(2), deadline_s=FAR_S).states) == {BlockState.HIT}
        assert client.agent == "agent-2"
        first.goes_on.set()
        assert connection.is_gone.wait(FAR_S)
        await_agent(client, "agent-1")
        assert client._runtime.connections._health_probe.at_hand(
            client._runtime.connections._addresses
        ) == list(client._runtime.connections._addresses)


def test_another_address_of_the_agent_that_a_worker_is_with_is_not_gone_back_to(
    tmp_path: Path, looked: Looked, made: Made
) -> None:
    with agent_at(tmp_path / "2", name="agent-2") as second:
        with ostraca.connect([f"unix://{tmp_path}/1", second.address], settings=FAILBACK) as client:
            (tmp_path / "1").symlink_to(tmp_path / "2")
            looked.await_more(3)
            assert client.agent == "agent-2"
        assert not made.ends


def test_an_agent_that_refuses_is_not_gone_back_to_and_no_end_is_made_for_it(
    tmp_path: Path, looked: Looked, made: Made
) -> None:
    with (
        agent_at(tmp_path / "2", name="agent-2") as second,
        ostraca.connect([f"unix://{tmp_path}/1", second.address], settings=FAILBACK) as client,
    ):
        looked.await_more(3)
        assert client.agent == "agent-2"
        assert not made.ends


def test_a_worker_that_is_told_to_stays_and_one_with_its_first_address_never_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    start = threading.Thread.start

    def told(thread: threading.Thread) -> None:
        begun.append(thread.name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", told)
    with agent_at(tmp_path / "1") as first, agent_at(tmp_path / "2", name="agent-2") as second:
        with ostraca.connect([first.address, second.address], settings=FAILBACK):
            assert "ostraca-failback" not in begun
        staying = replace(SETTINGS, failback_after_s=math.inf)
        with ostraca.connect([f"unix://{tmp_path}/3", second.address], settings=staying) as client:
            assert client.agent == "agent-2"
            assert begun.count("ostraca-failback") == 1, "it waits for ever, and ends with the client"
    with pytest.raises(UsageError, match="failback_after_s is 0"):
        replace(SETTINGS, failback_after_s=0)


def test_where_no_thread_can_be_had_a_worker_looks_after_it_was_connected_anew(tmp_path: Path) -> None:
    with agent_at(tmp_path / "2", name="agent-2") as second:
        with no_thread_to_be_had("ostraca-failback"):
            client = ostraca.connect([f"unix://{tmp_path}/1", second.address], settings=FAILBACK)
        with client, agent_at(tmp_path / "1", blocks=second.blocks):
            lose(client, second.connections.get(timeout=FAR_S))
            client._runtime.connections.dial(time.monotonic() + FAR_S)
            assert client.agent == "agent-1"


def test_an_agent_that_does_not_stay_is_gone_back_to_less_and_less_often() -> None:
    pauses, now_s, waited = FailbackPauses(10.0), 0.0, []
    for _ in range(8):
        pauses.note_move(now_s)
        waited.append(pauses.pause_s)
        now_s += pauses.pause_s
        pauses.note_return(now_s)
        now_s += 1.0
    assert waited == [10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 320.0, 320.0]
    assert all(after >= before for before, after in itertools.pairwise(waited))
    pauses.note_move(now_s + 640.0)
    assert pauses.pause_s == 10.0, "it had stayed for long"
