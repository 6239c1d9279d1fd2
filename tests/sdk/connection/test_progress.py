"""A transport that must take part does so while slots are in use, and is let be while they are not."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.sdk.conftest import SETTINGS
from tests.sdk.operations.test_faults import somewhere, stored
from tests.sdk.scripted_agent import AgentConnection, ScriptedAgent

import ostraca
from ostraca import Reason
from ostraca._memory.inline_arena import InlineArenaEnd
from ostraca_fabric.errors import TransportError
from ostraca_fabric.wire.messages import Get, Lookup

FAR_S = 10.0
PACES = 20
"""How often who waits would take part meanwhile."""


class Progress:
    """How often the transport took part."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made = threading.Semaphore(0)
        monkeypatch.setattr(InlineArenaEnd, "needs_progress", True)
        monkeypatch.setattr(InlineArenaEnd, "progress", lambda _: self.made.release())

    def has_been(self) -> bool:
        return self.made.acquire(blocking=False)


@pytest.fixture
def progress(client: ostraca.Client, monkeypatch: pytest.MonkeyPatch) -> Progress:
    del client  # is connected by then
    return Progress(monkeypatch)


def test_a_look_up_takes_no_part_in_transfers(
    agent: ScriptedAgent, volume: ostraca.Volume, progress: Progress
) -> None:
    chain, _ = stored(volume, 2)
    while progress.has_been():
        pass

    def take_a_while(connection: AgentConnection, message: Lookup) -> None:
        threading.Timer(PACES * SETTINGS.progress_s, ScriptedAgent.usual, (connection, message)).start()

    agent.script = {Lookup: take_a_while}
    assert volume.lookup(chain, deadline_s=FAR_S).hits == 2
    assert not progress.has_been()


def test_who_waits_for_a_look_up_takes_part_in_the_transfer_of_another_caller(
    agent: ScriptedAgent, volume: ostraca.Volume, progress: Progress
) -> None:
    chain, _ = stored(volume, 2)
    asked, got = threading.Event(), threading.Event()

    def hold(connection: AgentConnection, message: Lookup) -> None:
        asked.set()
        threading.Thread(target=lambda: got.wait(FAR_S) and ScriptedAgent.usual(connection, message)).start()

    def wait_for_progress(connection: AgentConnection, message: Get) -> None:
        while progress.has_been():
            pass
        assert progress.made.acquire(timeout=FAR_S)
        ScriptedAgent.usual(connection, message)

    agent.script = {Lookup: hold, Get: wait_for_progress}
    with ThreadPoolExecutor(1) as other:
        looked_up = other.submit(volume.lookup, chain, deadline_s=2 * FAR_S)
        assert asked.wait(FAR_S)
        assert volume.get(chain, into=somewhere(2), deadline_s=FAR_S / 2).hits == 2
        got.set()
        assert looked_up.result().hits == 2


def test_where_transfers_can_not_go_on_the_connection_ends_and_the_next_one_begins(
    agent: ScriptedAgent, volume: ostraca.Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain, _ = stored(volume, 2)
    broken = threading.Event()

    def break_once(_: InlineArenaEnd) -> None:
        if not broken.is_set():
            broken.set()
            raise TransportError("NIXL could not make progress")

    monkeypatch.setattr(InlineArenaEnd, "needs_progress", True)
    monkeypatch.setattr(InlineArenaEnd, "progress", break_once)
    agent.script = {Get: lambda *_: None}
    got = volume.get(chain, into=somewhere(2), deadline_s=FAR_S)
    assert broken.is_set()
    assert set(got.reasons) == {Reason.DISCONNECTED}
    agent.script = {}
    assert volume.lookup(chain, deadline_s=FAR_S).hits == 2
