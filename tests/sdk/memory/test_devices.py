"""Memory of devices as source and destination.

What lands there has ended when the operation has, and no slot is reused under a copy. The device is a
stand-in whose copies are held up at will.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.sdk.conftest import BLOCK_BYTES, LAYOUT, SETTINGS, SOON_S, hashes
from tests.sdk.memory.stand_in_devices import DeviceArray, StandInDevices
from tests.sdk.scripted_agent import AgentConnection, ScriptedAgent

import ostraca
from ostraca import BlockState, PutState, Reason
from ostraca_fabric.errors import TransportError
from ostraca_fabric.runtime import memory
from ostraca_fabric.tables.digests import tag_of, tag_seeds
from ostraca_fabric.wire.messages import Get, Message

FAR_S = 30.0
UNTOUCHED = 0xEE


@pytest.fixture(params=[0, 241], ids=["tags of the host", "tags of the device"])
def devices(client: ostraca.Client, request: pytest.FixtureRequest) -> Iterator[StandInDevices]:
    """Return the client's devices for all tests of this module."""
    found = StandInDevices(tagged_bytes_min=request.param)
    client._runtime.devices = found
    yield found
    found.let_go()


def content_of(blocks: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 255, (blocks, BLOCK_BYTES), np.uint8)


def on_device(blocks: int) -> DeviceArray:
    return DeviceArray(np.full((blocks, BLOCK_BYTES), UNTOUCHED, np.uint8))


def stored(
    volume: ostraca.Volume, blocks: int, seed: str = "prompt"
) -> tuple[ostraca.Chain, NDArray[np.uint8]]:
    chain, content = volume.chain(hashes(blocks, seed)), content_of(blocks)
    assert volume.put(chain, source=content, deadline_s=FAR_S).accepted == blocks
    return chain, content


def free_slots(client: ostraca.Client) -> int:
    taken = []
    while (slot := client._runtime.arena.ledger.take_up_to(1, BLOCK_BYTES)) is not None:
        taken.append(slot)
    for slot in taken:
        client._runtime.arena.give(slot)
    return len(taken)


def until(condition: object) -> None:
    """Wait for what another thread does."""
    until_s = time.monotonic() + FAR_S
    while not condition():  # type: ignore[operator]  # a callable
        assert time.monotonic() < until_s
        time.sleep(0.001)


# --- in all front ends --------------------------------------------------------------------------------------


def test_blocks_go_from_one_device_to_another_by_way_of_the_fabric(
    devices: StandInDevices, volume: ostraca.Volume, agent: ScriptedAgent
) -> None:
    chain, content = volume.chain(hashes(16)), content_of(16)
    put = volume.put(chain, source=DeviceArray(content.copy()), deadline_s=FAR_S)
    assert set(put.states) == {PutState.COMMITTED}
    seeds = tag_seeds(volume._spec.identity, [chain.span()], np.full(16, BLOCK_BYTES, np.uint32)).tolist()
    tags = {tag for tag, _ in agent.blocks.values()}
    assert tags == {tag_of(block, seed) for block, seed in zip(content, seeds, strict=True)}
    into = on_device(16)
    got = volume.get(chain, into=into, deadline_s=FAR_S)
    assert got.prefix == 16
    assert np.array_equal(into.read, content)
    assert devices.under_way == 0
    assert devices.copied == 32


def test_blocks_of_strided_parts_on_several_devices_are_put_together_in_order(
    devices: StandInDevices, volume: ostraca.Volume
) -> None:
    chain, content = stored(volume, 4)
    half = BLOCK_BYTES // 2
    pools = [
        DeviceArray(np.full((4, 2, half), UNTOUCHED, np.uint8), f"stand-in:{number}") for number in range(2)
    ]
    into = [[pools[0][block, 1], pools[1][block, 0]] for block in range(4)]
    assert volume.get(chain, into=into, deadline_s=FAR_S).prefix == 4
    assert np.array_equal(pools[0].read[:, 1], content[:, :half])
    assert np.array_equal(pools[1].read[:, 0], content[:, half:])
    assert (pools[0].read[:, 0] == UNTOUCHED).all()
    assert (pools[1].read[:, 1] == UNTOUCHED).all()
    again = volume.chain(hashes(4, "again"))
    assert volume.put(again, source=into, deadline_s=FAR_S).accepted == 4
    back = np.zeros((4, BLOCK_BYTES), np.uint8)
    assert volume.get(again, into=back, deadline_s=FAR_S).hits == 4
    assert np.array_equal(back, content)


def test_a_batch_larger_than_the_arena_goes_through_it_in_windows(
    devices: StandInDevices, volume: ostraca.Volume
) -> None:
    chain, content = stored(volume, 160)
    into = on_device(160)
    assert volume.get(chain, into=into, deadline_s=FAR_S).prefix == 160
    assert np.array_equal(into.read, content)


def test_a_damaged_block_never_reaches_the_device(
    devices: StandInDevices, volume: ostraca.Volume, agent: ScriptedAgent
) -> None:
    chain, content = stored(volume, 3)
    damaged = next(each for each, (_, payload) in agent.blocks.items() if payload == content[1].tobytes())
    tag, payload = agent.blocks[damaged]
    agent.blocks[damaged] = tag, payload[:-1] + bytes([payload[-1] ^ 1])
    into = on_device(3)
    got = volume.get(chain, into=into, deadline_s=FAR_S)
    assert got.states == (BlockState.HIT, BlockState.MISS, BlockState.HIT)
    assert got.reasons[1] == Reason.DAMAGED
    assert np.array_equal(into.read[::2], content[::2])
    assert (into.read[1] == UNTOUCHED).all()


def test_nothing_lands_after_the_deadline_and_what_is_called_a_hit_has_landed(
    devices: StandInDevices, volume: ostraca.Volume, agent: ScriptedAgent
) -> None:
    chain, content = stored(volume, 4)

    def half(connection: AgentConnection, message: Message) -> None:
        assert isinstance(message, Get)
        connection.land(message, [0, 1])

    agent.script = {Get: half}
    into = on_device(4)
    devices.hold()
    letting_go = threading.Timer(2 * SOON_S, devices.let_go)
    letting_go.start()
    got = volume.get(chain, into=into, deadline_s=SOON_S)
    assert devices.under_way == 0
    assert got.states == (BlockState.HIT,) * 2 + (BlockState.LATE,) * 2
    after = into.read.copy()
    assert np.array_equal(after[:2], content[:2])
    assert (after[2:] == UNTOUCHED).all()
    letting_go.join()
    assert devices.copied == 2


def test_a_copy_that_fails_is_an_error_and_its_slots_never_come_back(
    devices: StandInDevices, client: ostraca.Client, volume: ostraca.Volume
) -> None:
    chain, content = stored(volume, 8)
    before = free_slots(client)
    devices.fails = True
    with pytest.raises(TransportError, match="connect again"):
        volume.get(chain[:4], into=on_device(4), deadline_s=FAR_S)
    with pytest.raises(TransportError, match="connect again"):
        volume.put(volume.chain(hashes(4, "other")), source=DeviceArray(content_of(4)), deadline_s=FAR_S)
    assert free_slots(client) == before - 8
    devices.fails = False
    back = np.zeros((8, BLOCK_BYTES), np.uint8)
    assert volume.get(chain, into=back, deadline_s=FAR_S).hits == 8, "others go on, from host memory too"
    assert np.array_equal(back, content)
    address = client._runtime.arena._memory.address
    client.close()
    gc.collect()
    assert address in memory._kept, "something may still be written there"


def test_host_memory_and_devices_are_not_mixed_in_one_call(
    devices: StandInDevices, volume: ostraca.Volume
) -> None:
    chain = volume.chain(hashes(2))
    host, device = bytearray(BLOCK_BYTES), on_device(1)[0]
    for into, words in (
        ([device, host], "host memory beside others"),
        ([[device, host], [host, device]], "host memory beside others"),
        ([device], "1 blocks and the chain 2"),
        ([device, []], "at least one part"),
        (device, "flat piece"),
        (on_device(3), "3 blocks and the chain 2"),
        ([on_device(2), device], "has 131072 bytes"),
        ([on_device(1)[:, :0], device], "no bytes"),
    ):
        with pytest.raises(ostraca.UsageError, match=words):
            volume.get(chain, into=into, deadline_s=FAR_S)
    assert devices.pins == 0, "nothing was begun"


# --- tags of the device -------------------------------------------------------------------------------------


def test_a_bad_copy_from_a_device_differs_from_its_tag(
    devices: StandInDevices, volume: ostraca.Volume, agent: ScriptedAgent
) -> None:
    devices.tagged_bytes_min, devices.damages = BLOCK_BYTES, True
    chain, content = volume.chain(hashes(1)), content_of(1)
    volume.put(chain, source=DeviceArray(content.copy()), deadline_s=FAR_S)
    (seed,) = tag_seeds(volume._spec.identity, [chain.span()], np.full(1, BLOCK_BYTES, np.uint32)).tolist()
    ((tag, payload),) = agent.blocks.values()
    assert tag == tag_of(content[0], seed)
    assert tag != tag_of(payload, seed)


def test_a_bad_copy_to_a_device_is_a_miss_and_does_not_reach_the_caller(
    devices: StandInDevices, volume: ostraca.Volume
) -> None:
    chain, content = stored(volume, 1)
    devices.tagged_bytes_min, devices.damages = BLOCK_BYTES, True
    into = on_device(1)
    got = volume.get(chain, into=into, deadline_s=FAR_S)
    assert (got.states, got.reasons) == ((BlockState.MISS,), (Reason.DAMAGED,))
    assert (into.read == UNTOUCHED).all()
    devices.damages = False
    assert volume.get(chain, into=into, deadline_s=FAR_S).hits == 1
    assert np.array_equal(into.read, content)


def test_blocks_of_adjacent_slots_leave_the_device_in_one_copy(
    devices: StandInDevices, volume: ostraca.Volume
) -> None:
    devices.tagged_bytes_min = BLOCK_BYTES
    content = content_of(16)
    put = volume.put(volume.chain(hashes(16)), source=DeviceArray(content.copy()), deadline_s=FAR_S)
    assert (put.accepted, devices.crossings) == (16, 1)


@pytest.mark.parametrize(
    ("tagged_bytes_min", "free_bytes", "device"),
    [
        (BLOCK_BYTES + 1, 1 << 40, "stand-in:0"),  # a block is too short
        (BLOCK_BYTES, BLOCK_BYTES - 1, "stand-in:0"),  # the device has no memory left
        (BLOCK_BYTES, 1 << 40, "stand-in:1"),  # blocks on several devices
    ],
)
def test_the_host_computes_tags_where_the_device_can_not(
    devices: StandInDevices,
    volume: ostraca.Volume,
    tagged_bytes_min: int,
    free_bytes: int,
    device: str,
) -> None:
    devices.tagged_bytes_min, devices.free_bytes = tagged_bytes_min, free_bytes
    chain, content = volume.chain(hashes(2)), content_of(2)
    source = [DeviceArray(content[0].copy()), DeviceArray(content[1].copy(), device)]
    assert volume.put(chain, source=source, deadline_s=FAR_S).accepted == 2
    into = [on_device(1)[0], DeviceArray(np.zeros(BLOCK_BYTES, np.uint8), device)]
    assert volume.get(chain, into=into, deadline_s=FAR_S).hits == 2
    assert [block.read.tobytes() for block in into] == [block.tobytes() for block in content]
    assert devices.crossings == 0


# --- slots and pinning --------------------------------------------------------------------------------------


def opened(client: ostraca.Client) -> ostraca.Volume:
    return client.volume("kv", LAYOUT, block_bytes=BLOCK_BYTES, create=True)


def test_no_slot_is_free_while_a_copy_reads_it_though_the_get_was_cancelled(
    devices: StandInDevices, client: ostraca.Client, agent: ScriptedAgent
) -> None:
    volume = opened(client)
    chain, content = stored(volume, 4)
    all_free = free_slots(client)
    devices.hold()
    into = on_device(4)
    ticket = volume.submit_get(chain, into=into, deadline_s=FAR_S)
    until(lambda: devices.under_way == 4)
    client.cancel(ticket)
    assert free_slots(client) <= all_free - 4
    assert client.take_completions() == []
    devices.let_go()
    until(lambda: len(client._runtime.completions) == 1)
    (done,) = client.take_completions()
    assert done.error is None
    assert isinstance(done.result, ostraca.GetResult)
    assert done.result.hits == 4
    assert np.array_equal(into.read, content)
    until(lambda: free_slots(client) == all_free)


def test_the_arena_is_pinned_once_and_only_for_devices(
    devices: StandInDevices, client: ostraca.Client
) -> None:
    volume = opened(client)
    chain, _ = stored(volume, 4)
    assert devices.pins == 0
    for _ in range(3):
        assert volume.get(chain, into=on_device(4), deadline_s=FAR_S).hits == 4
        volume.put(chain, source=on_device(4), deadline_s=FAR_S)
    assert devices.pins == 1
    assert devices.pinned[0].nbytes == SETTINGS.arena_bytes_whole
    address = client._runtime.arena._memory.address
    client.close()
    assert devices.is_closed
    devices.pinned.clear()
    gc.collect()
    assert address not in memory._kept
