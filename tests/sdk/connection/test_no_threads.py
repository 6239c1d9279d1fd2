"""Where nobody can read what an agent sends: a process that may have no more threads."""

from __future__ import annotations

import pytest
from tests.sdk.conftest import BLOCK_BYTES, LAYOUT, SETTINGS, no_thread_to_be_had
from tests.sdk.failover.test_transfer_reconciler import lose
from tests.sdk.operations.test_faults import FAR_S, somewhere, stored
from tests.sdk.scripted_agent import ScriptedAgent

import ostraca
from ostraca import BlockState, ConnectError, Reason


def test_operations_are_declined_and_the_next_one_dials_again(
    agent: ScriptedAgent,
) -> None:
    with ostraca.connect(agent.address, settings=SETTINGS) as client:
        volume = client.volume("kv", LAYOUT, block_bytes=BLOCK_BYTES, create=True)
        chain, _ = stored(volume, 2)
        lose(client, agent.connections.get(timeout=FAR_S))
        with no_thread_to_be_had("ostraca-io"):
            got = volume.get(chain, into=somewhere(2), deadline_s=1.0)
            assert set(got.reasons) == {Reason.DISCONNECTED}
            assert "can't start new thread" in got.note
        got = volume.get(chain, into=somewhere(2), deadline_s=FAR_S)
        assert set(got.states) == {BlockState.HIT}


def test_whoever_connects_is_told(agent: ScriptedAgent) -> None:
    with no_thread_to_be_had("ostraca-io"), pytest.raises(ConnectError, match="can't start new thread"):
        ostraca.connect(agent.address, settings=SETTINGS)
