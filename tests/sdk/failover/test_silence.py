"""An agent that has stopped: how long it is waited for, and what comes then."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.sdk.conftest import BLOCK_BYTES, LAYOUT, SETTINGS, SOON_S, hashes
from tests.sdk.front_ends import FRONT_ENDS
from tests.sdk.operations.test_faults import FAR_S, silent, some_bytes, somewhere, stored
from tests.sdk.scripted_agent import ScriptedAgent, agent_at
from tests.support.stalls import Stopwatch

import ostraca
from ostraca import BlockState, PutState, Reason
from ostraca._protocol.silence import SilenceDetector
from ostraca_fabric.wire.messages import Get, Ping

MISSES = SETTINGS.silent_misses_max
AT_ONCE_S = 2.0
"""Far less than ``FAR_S``, on a machine that does other things as well."""


class TestSilence:
    @pytest.fixture
    def silence(self) -> SilenceDetector:
        return SilenceDetector(misses_max=2, deadline_min_s=0.05, patience_s=0.5)

    def test_after_misses_in_a_row_it_is_asked_and_after_patience_it_is_silent(
        self, silence: SilenceDetector
    ) -> None:
        assert not silence.report_late(sent_s=1.0, received_s=0.5, now_s=2.0)
        assert silence.until_s(received_s=0.5, accepted_s=0.0) is None
        assert silence.report_late(sent_s=2.0, received_s=0.5, now_s=3.0)
        assert silence.until_s(received_s=0.5, accepted_s=0.0) == 3.5
        assert not silence.report_late(sent_s=2.0, received_s=0.5, now_s=3.1), "one Ping is enough"

    def test_whatever_is_heard_makes_it_fine_again(self, silence: SilenceDetector) -> None:
        for sent_s in (1.0, 2.0):
            silence.report_late(sent_s=sent_s, received_s=0.5, now_s=sent_s + 1.0)
        assert silence.until_s(received_s=3.2, accepted_s=0.0) is None
        assert silence.pinged_s is None
        assert not silence.report_late(sent_s=4.0, received_s=3.2, now_s=5.0), "and all begins anew"

    def test_misses_with_anything_heard_between_them_are_not_in_a_row(self, silence: SilenceDetector) -> None:
        assert not silence.report_late(sent_s=1.0, received_s=0.5, now_s=2.0)
        assert not silence.report_late(sent_s=2.2, received_s=2.1, now_s=3.0)
        assert silence.report_late(sent_s=2.2, received_s=2.1, now_s=3.1)

    def test_an_operation_since_which_anything_was_heard_is_no_miss(self, silence: SilenceDetector) -> None:
        for now_s in range(2, 10):
            assert not silence.report_late(sent_s=now_s - 1, received_s=now_s - 0.5, now_s=now_s)

    def test_deadlines_that_hardly_gave_it_time_say_nothing(self, silence: SilenceDetector) -> None:
        for now_s in range(2, 10):
            assert not silence.report_late(sent_s=now_s - 0.04, received_s=0.5, now_s=now_s)

    def test_a_ping_that_waits_to_be_sent_was_not_said_yet(self, silence: SilenceDetector) -> None:
        for sent_s in (1.0, 2.0):
            silence.report_late(sent_s=sent_s, received_s=0.5, now_s=sent_s + 1.0)
        assert silence.until_s(received_s=0.5, accepted_s=3.4) == 3.9

    @given(st.lists(st.tuples(st.sampled_from(["miss", "hear"]), st.floats(0.01, 2.0)), max_size=40))
    def test_who_is_heard_in_time_is_never_silent(self, story: list[tuple[str, float]]) -> None:
        silence = SilenceDetector(misses_max=2, deadline_min_s=0.05, patience_s=0.5)
        now_s, received_s = 10.0, 10.0
        for what, passed_s in story:
            until_s = silence.until_s(received_s=received_s, accepted_s=0.0)
            now_s += passed_s
            if what == "hear":
                received_s = now_s
            else:
                silence.report_late(sent_s=now_s - passed_s, received_s=received_s, now_s=now_s)
            assert until_s is None or until_s > received_s or what == "hear"
            found_s = silence.until_s(received_s=received_s, accepted_s=0.0)
            assert found_s is None or found_s > received_s + 0.5, "as it was asked after that, if it was"


def is_got(result: ostraca.GetResult) -> bool:
    return set(result.states) == {BlockState.HIT}


def falls_silent(
    agent: ScriptedAgent, client: ostraca.Client, get: Callable[[float], ostraca.GetResult]
) -> None:
    """Stop an agent, have operations miss their deadlines, and wait until it is given up."""
    agent.goes_on.clear()
    for _ in range(MISSES):
        assert set(get(SOON_S).reasons) == {Reason.DEADLINE}
    with client._runtime.arena.changed:
        assert client._runtime.arena.changed.wait_for(lambda: not client.is_connected, timeout=FAR_S)


def test_an_agent_that_has_stopped_costs_two_deadlines_and_then_nothing_until_it_goes_on(
    agent: ScriptedAgent, client: ostraca.Client, volume: ostraca.Volume
) -> None:
    chain, source = stored(volume, 2)
    falls_silent(
        agent, client, lambda deadline_s: volume.get(chain, into=somewhere(2), deadline_s=deadline_s)
    )
    for _ in range(3):
        watch, into = Stopwatch(), somewhere(2)
        got = volume.get(chain, into=into, deadline_s=FAR_S)
        assert watch.took_s < AT_ONCE_S
        assert got.states == (BlockState.DECLINED,) * 2
        assert got.reasons == (Reason.DISCONNECTED,) * 2
        assert np.array_equal(into, somewhere(2))
    agent.goes_on.set()
    watch = Stopwatch()
    while not is_got(volume.get(chain, into=(into := somewhere(2)), deadline_s=FAR_S)):
        assert watch.took_s < FAR_S
    assert np.array_equal(into, source)


@pytest.mark.parametrize("front_end", sorted(FRONT_ENDS))
def test_the_next_agent_is_asked_when_one_has_stopped_and_that_one_is_left_alone(
    tmp_path: Path, front_end: str
) -> None:
    with agent_at(tmp_path / "1") as first, agent_at(tmp_path / "2", name="agent-2") as second:
        second.blocks = first.blocks
        with ostraca.connect([first.address, second.address], settings=SETTINGS) as client:
            opened = client.volume("kv", LAYOUT, block_bytes=BLOCK_BYTES, create=True)
            with FRONT_ENDS[front_end](client, opened) as volume:
                chain, source = stored(volume, 2)
                falls_silent(
                    first,
                    client,
                    lambda deadline_s: volume.get(chain, into=somewhere(2), deadline_s=deadline_s),
                )
                watch, into = Stopwatch(), somewhere(2)
                assert is_got(volume.get(chain, into=into, deadline_s=FAR_S))
                assert watch.took_s < AT_ONCE_S, "nothing was waited for at the first one"
                assert np.array_equal(into, source)
                assert client.agent == "agent-2"
                first.goes_on.set()
                assert is_got(volume.get(chain, into=into, deadline_s=FAR_S))
                assert client.agent == "agent-2"


def test_what_is_under_way_ends_when_its_agent_is_given_up(
    agent: ScriptedAgent, client: ostraca.Client, volume: ostraca.Volume
) -> None:
    chain, _ = stored(volume, 2)
    ends: list[ostraca.PutResult] = []
    agent.goes_on.clear()
    long = threading.Thread(
        target=lambda: ends.append(
            volume.put(volume.chain(hashes(2, "other")), source=some_bytes(2), deadline_s=FAR_S)
        )
    )
    watch = Stopwatch()
    long.start()
    falls_silent(
        agent, client, lambda deadline_s: volume.get(chain, into=somewhere(2), deadline_s=deadline_s)
    )
    long.join()
    assert watch.took_s < FAR_S / 2
    assert ends[0].states == (PutState.LATE,) * 2
    assert ends[0].reasons == (Reason.DISCONNECTED,) * 2


def test_an_agent_that_answers_pings_is_never_given_up_however_long_it_takes(
    agent: ScriptedAgent, client: ostraca.Client, volume: ostraca.Volume
) -> None:
    chain, _ = stored(volume, 1)
    agent.script[Get] = silent
    for _ in range(2 * MISSES):
        assert volume.get(chain, into=somewhere(1), deadline_s=SOON_S).reasons == (Reason.DEADLINE,)
    assert volume.lookup(chain, deadline_s=FAR_S).hits == 1, "what was sent before it was read before it"
    assert agent.seen_of(Ping)
    assert client.is_connected
    assert agent.connections.qsize() == 1


def test_deadlines_that_hardly_gave_an_agent_time_bring_no_ping(
    agent: ScriptedAgent, client: ostraca.Client
) -> None:
    volume = client.volume("kv", LAYOUT, block_bytes=BLOCK_BYTES, create=True)
    chain, _ = stored(volume, 1)
    agent.script[Get] = silent
    for _ in range(4 * MISSES):
        volume.get(chain, into=somewhere(1), deadline_s=SETTINGS.silent_deadline_min_s / 10)
    assert volume.lookup(chain, deadline_s=FAR_S).hits == 1
    assert agent.seen_of(Ping) == []


def test_an_address_that_does_not_answer_costs_one_operation_its_deadline(
    agent: ScriptedAgent, client: ostraca.Client, volume: ostraca.Volume
) -> None:
    chain, source = stored(volume, 1)
    agent.goes_on.clear()
    agent.connections.get().hang_up()
    with client._runtime.arena.changed:
        assert client._runtime.arena.changed.wait_for(lambda: not client.is_connected, timeout=FAR_S)
    assert volume.get(chain, into=somewhere(1), deadline_s=SOON_S).reasons == (Reason.DEADLINE,)
    watch = Stopwatch()
    while watch.passed_s < 10 * SETTINGS.redial_s:
        assert volume.get(chain, into=somewhere(1), deadline_s=FAR_S).reasons == (Reason.DISCONNECTED,)
    assert watch.took_s < AT_ONCE_S
    agent.goes_on.set()
    while not is_got(volume.get(chain, into=(into := somewhere(1)), deadline_s=FAR_S)):
        assert watch.took_s < FAR_S
    assert np.array_equal(into, source)


def test_an_address_that_was_left_alone_is_tried_again_where_the_others_are_gone(tmp_path: Path) -> None:
    settings = replace(SETTINGS, redial_s=600.0, redial_max_s=600.0)
    with agent_at(tmp_path / "1") as first, agent_at(tmp_path / "2", name="agent-2") as second:
        second.blocks = first.blocks
        with ostraca.connect([first.address, second.address], settings=settings) as client:
            volume = client.volume("kv", LAYOUT, block_bytes=BLOCK_BYTES, create=True)
            chain, _ = stored(volume, 1)
            falls_silent(
                first,
                client,
                lambda deadline_s: volume.get(chain, into=somewhere(1), deadline_s=deadline_s),
            )
            assert is_got(volume.get(chain, into=somewhere(1), deadline_s=FAR_S))
            first.goes_on.set()
            second.stop()
            watch = Stopwatch()
            while not is_got(volume.get(chain, into=somewhere(1), deadline_s=FAR_S)):
                assert watch.took_s < FAR_S
            assert client.agent == "agent-1"
