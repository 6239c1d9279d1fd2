"""Settling with an agent that was left while it held slots in doubt."""

from __future__ import annotations

from functools import partialmethod
from pathlib import Path

import pytest
from tests.sdk.conftest import BLOCK_BYTES, LAYOUT, SETTINGS, no_thread_to_be_had
from tests.sdk.failover.test_connection_manager import Held, as_if_others_moved_the_bytes
from tests.sdk.operations.test_faults import FAR_S, somewhere, stored
from tests.sdk.scripted_agent import AgentConnection, agent_at

import ostraca
from ostraca import BlockState
from ostraca._protocol.ledger import Ledger
from ostraca_fabric.wire.messages import Get, PastSettled, SettlePast


def lose(client: ostraca.Client, connection: AgentConnection) -> None:
    """Have an agent hang up, and wait until its worker knows."""
    connection.hang_up()
    with client._runtime.arena.changed:
        assert client._runtime.arena.changed.wait_for(lambda: not client.is_connected, timeout=FAR_S)


def settle(connection: AgentConnection, message: SettlePast) -> None:
    connection.send(PastSettled(message.request))


def test_where_no_thread_can_be_had_operations_go_on_and_the_past_is_settled_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Ledger, "lose_connection", partialmethod(as_if_others_moved_the_bytes, Ledger.lose_connection)
    )
    with (
        agent_at(tmp_path / "2", name="agent-2") as left,
        ostraca.connect([f"unix://{tmp_path}/1", left.address], settings=SETTINGS) as client,
        agent_at(tmp_path / "1", blocks=left.blocks) as found,
    ):
        volume = client.volume("kv", LAYOUT, block_bytes=BLOCK_BYTES, create=True)
        chain, _ = stored(volume, 2)
        held = Held(left, Get)
        assert set(volume.get(chain, into=somewhere(2), deadline_s=0.1).states) == {BlockState.LATE}
        lose(client, left.connections.get(timeout=FAR_S))
        held.release()
        left.script[SettlePast] = settle
        with no_thread_to_be_had("ostraca-reconciler"):
            got = volume.get(chain, into=somewhere(2), deadline_s=FAR_S)
            assert (client.agent, set(got.states)) == ("agent-1", {BlockState.HIT})
        assert client.quarantined_bytes, "nobody could ask for them"
        lose(client, found.connections.get(timeout=FAR_S))
        assert set(volume.get(chain, into=somewhere(2), deadline_s=FAR_S).states) == {BlockState.HIT}
        with client._runtime.arena.changed:
            assert client._runtime.arena.changed.wait_for(
                lambda: not client._runtime.arena.ledger.quarantined_bytes, timeout=FAR_S
            )
