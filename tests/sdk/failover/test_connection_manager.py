"""An agent that ends in order: its workers go to another one first, and lose nothing of what is under way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.sdk.conftest import BLOCK_BYTES, LAYOUT, SETTINGS
from tests.sdk.front_ends import FRONT_ENDS
from tests.sdk.operations.test_faults import FAR_S, somewhere, stored
from tests.sdk.scripted_agent import LIMITS, AgentConnection, ScriptedAgent, agent_at
from tests.support.stalls import Stopwatch

import ostraca
from ostraca import BlockState, PutState
from ostraca._connection.session import AgentSession
from ostraca._memory.inline_arena import InlineArenaEnd
from ostraca._protocol.ledger import Ledger
from ostraca_fabric.errors import TransportError
from ostraca_fabric.wire.address import parse_address
from ostraca_fabric.wire.messages import Get, Leaving, OpenVolume, Put


class Held:
    """An agent's answers to messages of one kind, kept back until ``release``."""

    def __init__(self, agent: ScriptedAgent, kind: type[Get | Put]) -> None:
        self.is_asked = threading.Event()
        self._is_released = threading.Event()
        agent.script[kind] = self._answer

    def release(self) -> None:
        self._is_released.set()

    def _answer(self, connection: AgentConnection, message: Any) -> None:
        self.is_asked.set()
        self._is_released.wait(FAR_S)
        ScriptedAgent.usual(connection, message)


def await_agent(client: ostraca.Client, name: str) -> None:
    watch = Stopwatch()
    while client.agent != name:
        assert watch.took_s < FAR_S
        with client._runtime.arena.changed:
            client._runtime.arena.changed.wait(timeout=0.01)


def as_if_others_moved_the_bytes(
    ledger: Ledger, lost: Callable[..., None], *, is_drained: bool, connection: object
) -> None:
    """Lose a connection as one whose blocks crossed by NIXL."""
    assert is_drained
    lost(ledger, is_drained=False, connection=connection)


class Two:
    """Two agents with the same blocks, and a client that knows both and is with the first."""

    def __init__(self, first: ScriptedAgent, second: ScriptedAgent, client: ostraca.Client) -> None:
        self.first, self.second, self.client = first, second, client
        self.connection: AgentConnection = first.connections.get(timeout=FAR_S)
        self.volume = client.volume("kv", LAYOUT, block_bytes=BLOCK_BYTES, create=True)

    def leave(self) -> None:
        """Have the first agent say that it ends."""
        self.connection.send(Leaving())

    def await_agent(self, name: str) -> None:
        await_agent(self.client, name)

    def await_left(self) -> None:
        """Wait until the first agent's connection has ended, from its worker's end."""
        self.connection.is_gone.wait(FAR_S)
        assert self.connection.is_gone.is_set()


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    with agent_at(tmp_path / "1") as first, agent_at(tmp_path / "2", name="agent-2") as second:
        second.blocks = first.blocks
        with ostraca.connect([first.address, second.address], settings=SETTINGS) as client:
            yield Two(first, second, client)


class Made:
    """The ends that were made to be offered to another agent, and those that were cut off."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ends: list[InlineArenaEnd] = []
        self.cut_off: list[InlineArenaEnd] = []
        self.is_any = threading.Event()
        make = InlineArenaEnd.successor

        def successor(end: InlineArenaEnd) -> InlineArenaEnd:
            self.ends.append(make(end))
            self.is_any.set()
            return self.ends[-1]

        monkeypatch.setattr(InlineArenaEnd, "successor", successor)
        monkeypatch.setattr(InlineArenaEnd, "cut_off", lambda end: self.cut_off.append(end))  # noqa: PLW0108 (a method)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    return Made(monkeypatch)


@pytest.fixture
def standing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the I/O thread of a connection stand back for good, unless the leader resumes it."""
    monkeypatch.setattr("ostraca._connection.io_loop._LED_S", 10 * FAR_S)


@pytest.mark.usefixtures("standing_back")
@pytest.mark.parametrize("front_end", sorted(FRONT_ENDS))
def test_what_is_under_way_ends_at_the_agent_that_leaves_and_what_is_new_goes_to_another(
    two: Two, front_end: str
) -> None:
    chain, source = stored(two.volume, 2)
    held = Held(two.first, Get)
    with FRONT_ENDS[front_end](two.client, two.volume) as volume, ThreadPoolExecutor(1) as threads:
        getting = threads.submit(volume.get, chain, into=(slow := somewhere(2)), deadline_s=FAR_S)
        assert held.is_asked.wait(FAR_S)
        two.leave()
        two.await_agent("agent-2")
        got = volume.get(chain, into=(quick := somewhere(2)), deadline_s=FAR_S)
        assert set(got.states) == {BlockState.HIT}
        assert not getting.done()
        assert not two.connection.is_gone.is_set(), "it is waited for"
        held.release()
        assert set(getting.result(FAR_S).states) == {BlockState.HIT}
    assert np.array_equal(slow, source)
    assert np.array_equal(quick, source)
    assert len(two.first.seen_of(Get)) == len(two.second.seen_of(Get)) == 1
    two.await_left()


@pytest.mark.parametrize("front_end", sorted(FRONT_ENDS))
def test_what_is_moved_in_parts_goes_on_where_it_was_begun(tmp_path: Path, front_end: str) -> None:
    small = msgspec.structs.replace(LIMITS, blocks_max=1)
    with (
        agent_at(tmp_path / "1", limits=small) as first,
        agent_at(tmp_path / "2", name="agent-2", blocks=first.blocks) as second,
        ostraca.connect(
            [first.address, second.address], settings=replace(SETTINGS, windows_inflight=1)
        ) as client,
        ThreadPoolExecutor(1) as threads,
    ):
        two = Two(first, second, client)
        chain, _ = stored(two.volume, 4)
        held = Held(first, Get)
        with FRONT_ENDS[front_end](client, two.volume) as volume:
            getting = threads.submit(volume.get, chain, into=somewhere(4), deadline_s=FAR_S)
            assert held.is_asked.wait(FAR_S)
            two.leave()
            two.await_agent("agent-2")
            held.release()
            assert set(getting.result(FAR_S).states) == {BlockState.HIT}
        assert (len(first.seen_of(Get)), len(second.seen_of(Get))) == (4, 0)
        two.await_left()


def test_a_put_under_way_is_committed_by_the_agent_that_leaves(two: Two) -> None:
    held = Held(two.first, Put)
    with ThreadPoolExecutor(1) as threads:
        putting = threads.submit(stored, two.volume, 2)
        assert held.is_asked.wait(FAR_S)
        two.leave()
        two.await_agent("agent-2")
        held.release()
        chain, source = putting.result(FAR_S)
    two.await_left()
    again = two.volume.put(chain, source=source, deadline_s=FAR_S)
    assert again.states == (PutState.EXISTS,) * 2


def test_volumes_in_use_are_open_at_the_other_agent_before_anybody_asks_there(two: Two) -> None:
    two.leave()
    two.await_agent("agent-2")
    (asked,) = two.second.seen_of(OpenVolume)
    assert (asked.name, asked.block_bytes) == ("kv", BLOCK_BYTES)
    chain, _ = stored(two.volume, 1)
    assert len(two.second.seen_of(OpenVolume)) == 1
    assert len(chain) == len(two.second.seen_of(Put)) == 1


def test_an_agent_that_leaves_is_asked_until_there_is_another(tmp_path: Path) -> None:
    with (
        agent_at(tmp_path / "1") as first,
        ostraca.connect([first.address, f"unix://{tmp_path}/2"], settings=SETTINGS) as client,
    ):
        connection = first.connections.get(timeout=FAR_S)
        volume = client.volume("kv", LAYOUT, block_bytes=BLOCK_BYTES, create=True)
        chain, _ = stored(volume, 2)
        connection.send(Leaving())
        for _ in range(5):
            got = volume.get(chain, into=somewhere(2), deadline_s=FAR_S)
            assert set(got.states) == {BlockState.HIT}
        with agent_at(tmp_path / "2", name="agent-2", blocks=first.blocks):
            await_agent(client, "agent-2")
            got = volume.get(chain, into=somewhere(2), deadline_s=FAR_S)
            assert set(got.states) == {BlockState.HIT}
            assert client.agent == "agent-2"


def test_an_agent_that_once_did_not_answer_is_tried_last_and_not_left_out(two: Two) -> None:
    two.client._runtime.connections._health_probe.hold_off([parse_address(two.second.address)])
    two.leave()
    two.await_agent("agent-2")


def test_another_address_of_the_agent_that_leaves_is_no_other_agent(tmp_path: Path) -> None:
    with agent_at(tmp_path / "1") as first, agent_at(tmp_path / "2", name="agent-2") as second:
        (tmp_path / "alias").symlink_to(tmp_path / "1")
        addresses = [first.address, f"unix://{tmp_path}/alias", second.address]
        with ostraca.connect(addresses, settings=SETTINGS) as client:
            connection = first.connections.get(timeout=FAR_S)
            connection.send(Leaving())
            await_agent(client, "agent-2")


def test_slots_that_the_agent_left_in_doubt_come_back_when_its_connection_has_ended(two: Two) -> None:
    chain, _ = stored(two.volume, 2)
    held = Held(two.first, Get)
    got = two.volume.get(chain, into=somewhere(2), deadline_s=0.1)
    assert set(got.states) == {BlockState.LATE}
    assert held.is_asked.is_set()
    two.leave()
    two.await_agent("agent-2")
    assert two.client.quarantined_bytes
    assert not two.connection.is_gone.is_set(), "its agent has yet to say that it is done with them"
    two.connection.hang_up()
    with two.client._runtime.arena.changed:
        assert two.client._runtime.arena.changed.wait_for(
            lambda: not two.client._runtime.arena.ledger.quarantined_bytes, timeout=FAR_S
        )
    held.release()


def test_what_a_lost_connection_had_offered_is_cut_off_before_anybody_may_settle_its_slots(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, owing = two.client._runtime.arena.ledger, []
    monkeypatch.setattr(InlineArenaEnd, "cut_off", lambda _: owing.append(ledger.owing_agents))
    monkeypatch.setattr(
        Ledger, "lose_connection", partialmethod(as_if_others_moved_the_bytes, Ledger.lose_connection)
    )
    chain, _ = stored(two.volume, 2)
    held = Held(two.first, Get)
    assert set(two.volume.get(chain, into=somewhere(2), deadline_s=0.1).states) == {BlockState.LATE}
    two.leave()
    two.await_agent("agent-2")
    two.connection.hang_up()
    with two.client._runtime.arena.changed:
        assert two.client._runtime.arena.changed.wait_for(lambda: bool(ledger.owing_agents), timeout=FAR_S)
    held.release()
    assert owing == [frozenset()]
    assert two.client.quarantined_bytes


def test_who_knows_one_agent_does_not_ask_to_be_told(tmp_path: Path) -> None:
    with agent_at(tmp_path / "1") as only, ostraca.connect(only.address, settings=SETTINGS):
        assert only.connections.get(timeout=FAR_S).features == ()


def test_a_client_that_is_closed_looks_for_no_other_agent_and_keeps_nothing_that_it_was_to_offer(
    tmp_path: Path, made: Made
) -> None:
    with agent_at(tmp_path / "1") as first:
        client = ostraca.connect([first.address, f"unix://{tmp_path}/2"], settings=SETTINGS)
        first.connections.get(timeout=FAR_S).send(Leaving())
        assert made.is_any.wait(FAR_S)
        client.close()
    assert not [each for each in threading.enumerate() if each.name == "ostraca-failover"]
    assert made.cut_off == made.ends


def test_an_end_is_not_kept_where_another_that_belongs_to_it_can_not_be_made(two: Two, made: Made) -> None:
    class NotAgain(InlineArenaEnd):
        def successor(self) -> InlineArenaEnd:
            raise TransportError("no memory can be registered")

    (end,) = two.client._runtime.arena.ends.values()
    assert isinstance(end, InlineArenaEnd)
    two.client._runtime.arena.ends = {"inline": end, "other": NotAgain(end._arena, end._slots)}
    with pytest.raises(TransportError, match="no memory"):
        two.client._runtime.arena.successors()
    assert made.cut_off == made.ends


def test_what_was_offered_to_an_agent_that_is_lost_while_it_is_left_is_cut_off(
    two: Two, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    retire = AgentSession.retire

    def lose_and_retire(session: AgentSession) -> None:
        two.connection.hang_up()
        with two.client._runtime.arena.changed:
            assert two.client._runtime.arena.changed.wait_for(lambda: session._is_over, timeout=FAR_S)
        retire(session)

    monkeypatch.setattr(AgentSession, "retire", lose_and_retire)
    ends = list(two.client._runtime.arena.ends.values())
    two.leave()
    two.await_agent("agent-2")
    assert made.cut_off == ends


def test_an_end_that_breaks_while_another_agent_is_dialled_is_cut_off_and_the_next_try_makes_one(
    two: Two, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_the_first(end: InlineArenaEnd) -> None:
        if made.ends[:1] == [end]:
            raise TransportError("NIXL could not make progress")

    monkeypatch.setattr(InlineArenaEnd, "needs_progress", True)
    monkeypatch.setattr(InlineArenaEnd, "progress", break_the_first)
    two.leave()
    two.await_agent("agent-2")
    assert made.cut_off[:1] == made.ends[:1]
    assert list(two.client._runtime.arena.ends.values()) == made.ends[1:]
    chain, _ = stored(two.volume, 1)
    assert len(chain) == len(two.second.seen_of(Put)) == 1


def test_ends_are_cut_off_too_where_changing_over_fails_as_nobody_foresaw(
    two: Two, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: InlineArenaEnd) -> None:
        raise MemoryError("there is no more")

    failed: SimpleQueue[type[BaseException]] = SimpleQueue()
    monkeypatch.setattr(threading, "excepthook", lambda what: failed.put(what.exc_type))
    with monkeypatch.context() as patch:
        patch.setattr(InlineArenaEnd, "needs_progress", True)
        patch.setattr(InlineArenaEnd, "progress", fail)
        two.leave()
        assert failed.get(timeout=FAR_S) is MemoryError
    assert made.cut_off == made.ends
    chain, _ = stored(two.volume, 1)
    assert len(chain) == len(two.first.seen_of(Put)) == 1
