"""Answers that no agent should give: what fuzzing found, one by one."""

from __future__ import annotations

import numpy as np
import pytest
from tests.sdk.conftest import BLOCK_BYTES, LAYOUT, SOON_S, hashes
from tests.sdk.scripted_agent import AgentConnection, ScriptedAgent

import ostraca
from ostraca import BlockState, PutState, Reason
from ostraca_fabric.errors import MalformedError
from ostraca_fabric.wire import codec
from ostraca_fabric.wire.messages import (
    Failure,
    Fetch,
    Get,
    GetDone,
    GetProgress,
    Lookup,
    Message,
    Put,
    Settled,
    StatusDone,
    StatusRequest,
    VolumeOpened,
)

JUNK = b"\xbb" * BLOCK_BYTES


def stored(
    volume: ostraca.Volume, count: int
) -> tuple[ostraca.Chain, np.ndarray[tuple[int, int], np.dtype[np.uint8]]]:
    """Put blocks, and return their chain and bytes."""
    chain = volume.chain(hashes(count))
    blocks = np.random.default_rng(1).integers(0, 256, (count, BLOCK_BYTES), np.uint8)
    assert volume.put(chain, source=blocks, deadline_s=5.0).accepted == count
    return chain, blocks


def slots_of(message: Get) -> list[int]:
    found: list[int] = codec.u64(message.slots, len(message.slots) // 8).tolist()
    return found


def test_bytes_for_a_block_that_was_named_as_landed_are_thrown_away(
    agent: ScriptedAgent, volume: ostraca.Volume
) -> None:
    chain, blocks = stored(volume, 2)

    def answer(connection: AgentConnection, message: Get) -> None:
        connection.land(message, [0, 1])
        for slot in slots_of(message):
            connection.send_bulk(message.request, (slot, JUNK))
        connection.send(GetDone(message.request, bytes([BlockState.HIT] * 2), bytes(2)))

    agent.script[Get] = answer
    with volume.get_views(chain, lengths=BLOCK_BYTES, deadline_s=5.0) as views:
        assert views.result.states == (BlockState.HIT, BlockState.HIT)
        assert [bytes(view or b"") for view in views] == [block.tobytes() for block in blocks]


def test_bytes_for_a_view_that_is_lent_are_thrown_away(agent: ScriptedAgent, volume: ostraca.Volume) -> None:
    chain, blocks = stored(volume, 1)
    asked: list[Get] = []

    def get(connection: AgentConnection, message: Get) -> None:
        asked.append(message)
        ScriptedAgent.usual(connection, message)

    def lookup(connection: AgentConnection, message: Lookup) -> None:
        connection.send_bulk(asked[0].request, (slots_of(asked[0])[0], JUNK))
        ScriptedAgent.usual(connection, message)

    agent.script |= {Get: get, Lookup: lookup}
    with volume.get_views(chain, lengths=BLOCK_BYTES, deadline_s=5.0) as views:
        assert volume.lookup(chain, deadline_s=5.0).prefix == 1
        assert bytes(views[0] or b"") == blocks[0].tobytes()


def test_bytes_that_would_reach_into_the_next_slot_are_thrown_away(
    agent: ScriptedAgent, client: ostraca.Client
) -> None:
    volume = client.volume("small", LAYOUT, block_bytes=4096, create=True)
    chain = volume.chain(hashes(2))
    blocks = np.random.default_rng(1).integers(0, 256, (2, 4096), np.uint8)
    assert volume.put(chain, source=blocks, deadline_s=5.0).accepted == 2

    def answer(connection: AgentConnection, message: Get) -> None:
        connection.land(message, [0, 1])
        connection.send(GetDone(message.request, bytes([BlockState.HIT] * 2), bytes(2)))

    def long(connection: AgentConnection, message: Get) -> None:
        connection.send_bulk(message.request, (slots_of(message)[0], b"\xbb" * 8192))
        answer(connection, message)

    agent.script[Get] = long
    into = np.zeros_like(blocks)
    assert volume.get(chain, into=into, deadline_s=5.0).hits == 2
    assert np.array_equal(into, blocks)


@pytest.mark.parametrize("transfer", [-1, -(1 << 63)])
def test_a_fetch_that_no_frame_can_answer_ends_the_connection(
    agent: ScriptedAgent, volume: ostraca.Volume, transfer: int
) -> None:
    def answer(connection: AgentConnection, message: Put) -> None:
        connection.send(Fetch(transfer, message.slots, message.lengths))

    agent.script[Put] = answer
    source = np.zeros((1, BLOCK_BYTES), np.uint8)
    result = volume.put(volume.chain(hashes(1)), source=source, deadline_s=5.0)
    assert result.states == (PutState.LATE,)
    assert result.reasons == (Reason.DISCONNECTED,)


def test_a_state_that_is_none_is_a_miss_also_when_blocks_landed_with_it(
    agent: ScriptedAgent, volume: ostraca.Volume
) -> None:
    chain, _ = stored(volume, 1)

    def answer(connection: AgentConnection, message: Get) -> None:
        tag, payload = agent.blocks[connection.block_ids(message)[0]]
        connection.send_bulk(message.request, (slots_of(message)[0], payload))
        connection.send(GetDone(message.request, b"\xc8", b"\x00", b"", bytes(4), tag))

    agent.script[Get] = answer
    result = volume.get(chain, into=np.zeros((1, BLOCK_BYTES), np.uint8), deadline_s=5.0)
    assert (result.states, result.reasons) == ((BlockState.MISS,), (Reason.DISCONNECTED,))


@pytest.mark.parametrize(
    "answer", [VolumeOpened(0, 1, 1), StatusDone(0, b""), Failure(0, "frame_too_long", "the answer is")]
)
def test_an_answer_that_does_not_speak_of_slots_frees_none(
    agent: ScriptedAgent, client: ostraca.Client, volume: ostraca.Volume, answer: Message
) -> None:
    """The get is over for its caller when it comes, so nobody finds that it does not fit."""
    chain, _ = stored(volume, 1)
    late: list[tuple[AgentConnection, int]] = []
    agent.script[Get] = lambda connection, message: late.append((connection, message.request))
    result = volume.get(chain, into=np.zeros((1, BLOCK_BYTES), np.uint8), deadline_s=SOON_S)
    assert result.states == (BlockState.LATE,)
    ((connection, request),) = late
    kind = type(answer)
    fields = [getattr(answer, name) for name in kind.__struct_fields__][1:]
    connection.send(kind(request, *fields))
    assert volume.lookup(chain, deadline_s=5.0).prefix == 1, "answered behind it"
    assert client.quarantined_bytes == BLOCK_BYTES
    connection.send(Settled(request))
    assert volume.lookup(chain, deadline_s=5.0).prefix == 1
    assert client.quarantined_bytes == 0


def test_a_status_that_can_not_be_read_is_a_typed_error(agent: ScriptedAgent, client: ostraca.Client) -> None:
    agent.script[StatusRequest] = lambda connection, message: connection.send(
        StatusDone(message.request, b"\xc1")
    )
    with pytest.raises(MalformedError, match="AgentStatus"):
        client.status()


def test_progress_of_a_request_that_is_over_is_passed_over(
    agent: ScriptedAgent, client: ostraca.Client, volume: ostraca.Volume
) -> None:
    chain, _ = stored(volume, 1)

    def answer(connection: AgentConnection, message: Get) -> None:
        ScriptedAgent.usual(connection, message)
        connection.send(GetProgress(message.request, bytes(4), bytes(16)))

    agent.script[Get] = answer
    assert volume.get(chain, into=np.zeros((1, BLOCK_BYTES), np.uint8), deadline_s=5.0).hits == 1
    assert volume.lookup(chain, deadline_s=5.0).prefix == 1
    assert client.is_connected
