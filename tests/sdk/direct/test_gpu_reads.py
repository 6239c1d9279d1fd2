"""Gets of a client that reads drives into memory of devices, as an agent by script tells it to.

The devices are stand-ins, and so is the library that reads files into their memory.
"""

from __future__ import annotations

import importlib.util
import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.sdk.conftest import BLOCK_BYTES, LAYOUT, SETTINGS, SOON_S, hashes
from tests.sdk.direct.drive_files import FABRIC, create_drive
from tests.sdk.direct.stand_in_kvikio import StandInKvikio, kvikio_installed
from tests.sdk.direct.test_direct_gets import (
    BLOCKS,
    FAR_S,
    HIT,
    LATE,
    MISS,
    RIGHT,
    UNTOUCHED,
    Host,
    Places,
    answer,
    counters,
    end,
    extents,
    length_of,
    u32,
    volume_of,
    wait_free,
)
from tests.sdk.direct.test_direct_reader import until
from tests.sdk.memory.stand_in_devices import DeviceArray, StandInDevices
from tests.sdk.scripted_agent import AgentConnection, ScriptedAgent, agent_at
from tests.support.stalls import Stopwatch

import ostraca
from ostraca import PutState, Reason
from ostraca.client_metrics import DirectCounters
from ostraca_fabric.errors import UsageError
from ostraca_fabric.model.extent import PAGE_BYTES
from ostraca_fabric.wire import codec
from ostraca_fabric.wire.handshake import DIRECT, LEAVING
from ostraca_fabric.wire.messages import ExtentsRead, Get, GetExtents

SHORTEST = 241


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with agent_at(tmp_path / "agent.sock", features=(LEAVING, DIRECT)) as agent:
        made = Host(tmp_path, agent)
        made.store()
        yield made


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> StandInDevices:
    """Give clients devices that compute tags."""
    made = StandInDevices(tagged_bytes_min=SHORTEST)
    monkeypatch.setattr("ostraca.client.CudaDevices", lambda *, gpu_tags: made if gpu_tags else None)
    return made


@pytest.fixture
def kvikio(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInKvikio]:
    with kvikio_installed(monkeypatch) as library:
        yield library


@contextmanager
def gpu_client(host: Host, drives: str = "drive.img", **settings: float) -> Iterator[ostraca.Client]:
    settings = {"direct_silent_s": FAR_S, **settings}
    with host.client(drives, gpu_tags=True, gpu_reads=True, **settings) as client:
        yield client


def on_device(lengths: Iterable[int]) -> list[DeviceArray]:
    return [DeviceArray(np.full(length, UNTOUCHED, np.uint8)) for length in lengths]


def lengths_of(host: Host) -> list[int]:
    return [len(block) for block in host.source]


def check(host: Host, found: ostraca.GetResult, into: Sequence[DeviceArray]) -> None:
    """Check that hits are right, and nothing else was touched."""
    for state, block, right in zip(found.states, into, host.source, strict=True):
        assert np.array_equal(block.read, right) if state == HIT else (block.read == UNTOUCHED).all()


def get(host: Host, client: ostraca.Client, deadline_s: float = FAR_S) -> ostraca.GetResult:
    """Get all blocks into a device."""
    volume, into = volume_of(client), on_device(lengths_of(host))
    found = volume.get(volume.chain(hashes(BLOCKS)), into=into, deadline_s=deadline_s)
    check(host, found, into)
    return found


def pages_of(positions: Iterable[int]) -> int:
    return sum(-(-length_of(position) // PAGE_BYTES) for position in positions)


def landed(host: Host, client: ostraca.Client) -> list[bool]:
    """Tell which blocks are in the arena."""
    arena = client._runtime.arena.array.tobytes()
    return [block.tobytes() in arena for block in host.source]


@pytest.mark.parametrize("mine", [range(BLOCKS), (5, 1, 2)], ids=["all", "some"])
def test_blocks_of_a_drive_land_in_device_memory_and_never_in_the_arena(
    host: Host, devices: StandInDevices, kvikio: StandInKvikio, mine: Sequence[int]
) -> None:
    host.offer({position: RIGHT[position] for position in mine})
    with gpu_client(host) as client:
        assert set(get(host, client).states) == {HIT}
        assert landed(host, client) == [position not in mine for position in range(BLOCKS)]
        assert counters(client) == DirectCounters(
            blocks_read=len(mine), bytes_read=pages_of(mine) * PAGE_BYTES
        )
        assert sorted(kvikio.reads) == sorted(
            (RIGHT[position][1], pages_of([position]) * PAGE_BYTES) for position in mine
        )
        wait_free(client)
        until(lambda: not devices.stagings)
    assert host.report() == (sorted(mine), [])
    assert len(host.agent.seen_of(Get)) == 1
    assert (kvikio.opened, kvikio.open) == (1, 0)


def test_adjacent_blocks_of_a_drive_are_read_at_once_in_any_order(
    host: Host, devices: StandInDevices, kvikio: StandInKvikio
) -> None:
    order, at, places = [3, 0, 5, 2, 4, 1], 100 * PAGE_BYTES, {}
    with host.drive.open("r+b") as file:
        for position in order:
            places[position] = (0, at)
            file.seek(at)
            file.write(host.source[position].tobytes())
            at += pages_of([position]) * PAGE_BYTES
    host.offer({position: places[position] for position in range(BLOCKS)})
    with gpu_client(host) as client:
        assert set(get(host, client).states) == {HIT}
    assert kvikio.reads == [(100 * PAGE_BYTES, pages_of(range(BLOCKS)) * PAGE_BYTES)]


def test_blocks_of_strided_parts_are_put_together_in_order(
    host: Host, devices: StandInDevices, kvikio: StandInKvikio
) -> None:
    host.offer(RIGHT)
    pool = DeviceArray(np.full((BLOCKS, 2, 2, BLOCK_BYTES), UNTOUCHED, np.uint8))
    half = [length_of(position) // 2 for position in range(BLOCKS)]
    into = [[pool[at, :, 1, :3], pool[at, 0, 0, : 2 * half[at] - 6]] for at in range(BLOCKS)]
    with gpu_client(host) as client:
        volume = volume_of(client)
        found = volume.get(volume.chain(hashes(BLOCKS)), into=into, deadline_s=FAR_S)
        assert found.hits == BLOCKS
        assert landed(host, client) == [False] * BLOCKS
    expected = np.full_like(pool.read, UNTOUCHED)
    for at, block in enumerate(host.source):
        expected[at, :, 1, :3] = block[:6].reshape(2, 3)
        expected[at, 0, 0, : len(block) - 6] = block[6:]
    assert np.array_equal(pool.read, expected)


def test_blocks_that_fail_their_tags_in_device_memory_are_asked_for_again(
    host: Host, devices: StandInDevices, kvikio: StandInKvikio
) -> None:
    host.offer({**RIGHT, 1: RIGHT[2], 4: RIGHT[0]})
    with gpu_client(host) as client:
        assert set(get(host, client).states) == {HIT}
        assert (counters(client).blocks_read, counters(client).blocks_failed) == (BLOCKS - 2, 2)
        reader = client._runtime.direct
        assert reader is not None
        assert reader.announced() == ((FABRIC, ""),), "suspended"
        wait_free(client)
    assert host.report() == ([0, 2, 3, 5], [1, 4])
    assert host.asked_again() == [1, 4]


FAULTS = {
    "an error": ("KvikIO failure: Input/output error", 0, "Input/output error"),
    "short": ("", 1, f"{pages_of([0]) * PAGE_BYTES - 1} of {pages_of([0]) * PAGE_BYTES} bytes"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_blocks_of_failed_reads_are_asked_for_again_and_their_drive_is_suspended(
    host: Host,
    devices: StandInDevices,
    kvikio: StandInKvikio,
    caplog: pytest.LogCaptureFixture,
    fault: str,
) -> None:
    with gpu_client(host) as client:
        host.offer(RIGHT)
        assert set(get(host, client).states) == {HIT}
        assert host.report() == ([*range(BLOCKS)], [])
        host.agent.seen.clear()
        kvikio.error, kvikio.loses_bytes, words = FAULTS[fault]
        assert set(get(host, client).states) == {HIT}
        assert host.asked_again() == [*range(BLOCKS)]
        assert host.report() == ([], [*range(BLOCKS)])
        assert counters(client).blocks_failed == BLOCKS
        wait_free(client)
        until(lambda: not devices.stagings)
    [line] = [each for each in caplog.messages if "is not read directly for 30 s" in each]
    assert words in line


def test_after_a_failed_first_read_drives_are_read_into_the_arena(
    host: Host, devices: StandInDevices, kvikio: StandInKvikio, caplog: pytest.LogCaptureFixture
) -> None:
    """As kvikio fails without a driver: it is imported, opens files, and reads nothing."""
    kvikio.error = (
        "KvikIO failure at: utils.cpp:21: libcuda.so.1: cannot open shared object file: No such file"
    )
    host.offer(RIGHT)
    with gpu_client(host) as client:
        assert set(get(host, client).states) == {HIT}
        assert host.asked_again() == [*range(BLOCKS)]
        kvikio.reads.clear()
        for _ in range(2):
            assert set(get(host, client).states) == {HIT}
        assert counters(client).blocks_read == 2 * BLOCKS, "the drive is not suspended"
        assert landed(host, client) == [True] * BLOCKS
        assert kvikio.reads == []
    [line] = [each for each in caplog.messages if "GPU" in each]
    assert "the first read failed: RuntimeError: KvikIO failure" in line


def test_without_kvikio_drives_are_read_into_the_arena(
    host: Host, devices: StandInDevices, caplog: pytest.LogCaptureFixture
) -> None:
    if importlib.util.find_spec("kvikio") is not None:
        pytest.skip("kvikio is installed here")
    host.offer(RIGHT)
    with gpu_client(host) as client:
        for _ in range(2):
            assert set(get(host, client).states) == {HIT}
        assert counters(client).blocks_read == 2 * BLOCKS
        assert landed(host, client) == [True] * BLOCKS
    [line] = [each for each in caplog.messages if "GPU" in each]
    assert "kvikio can't be imported" in line


HOST_READS: dict[str, tuple[dict[str, Any], str]] = {
    "short blocks": ({"tagged_bytes_min": BLOCK_BYTES + 1}, "short blocks"),
    "no memory": ({"free_bytes": PAGE_BYTES}, "no memory left"),
    "devices": ({}, "several devices"),
}


@pytest.mark.parametrize("cause", HOST_READS)
def test_what_a_device_can_not_check_is_read_into_the_arena(
    host: Host,
    devices: StandInDevices,
    kvikio: StandInKvikio,
    caplog: pytest.LogCaptureFixture,
    cause: str,
) -> None:
    changes, words = HOST_READS[cause]
    for name, value in changes.items():
        setattr(devices, name, value)
    host.offer(RIGHT)
    with gpu_client(host) as client:
        for _ in range(2):
            into = on_device(lengths_of(host))
            if cause == "devices":
                into[3].device = "stand-in:1"
            volume = volume_of(client)
            found = volume.get(volume.chain(hashes(BLOCKS)), into=into, deadline_s=FAR_S)
            assert found.hits == BLOCKS
            check(host, found, into)
        assert counters(client).blocks_read == 2 * BLOCKS
    assert kvikio.reads == []
    [line] = [each for each in caplog.messages if "Drives are read into host memory" in each]
    assert words in line


def test_host_memory_is_read_as_without_the_setting(
    host: Host, devices: StandInDevices, kvikio: StandInKvikio
) -> None:
    host.offer(RIGHT)
    with gpu_client(host) as client:
        assert set(host.get(client).states) == {HIT}
        assert set(host.get_views(client).states) == {HIT}
        assert counters(client).blocks_read == 2 * BLOCKS
    assert kvikio.reads == []
    assert devices.staged == 0


def test_the_setting_needs_tags_of_the_gpu() -> None:
    with pytest.raises(UsageError, match="gpu_reads is True without gpu_tags: set both"):
        ostraca.ClientSettings(gpu_reads=True)


# --- drives that hang ---------------------------------------------------------------------------------------

OUTCOMES = {
    "silence": (MISS, Reason.DRIVE_SUSPECT),
    "deadline": (LATE, Reason.DEADLINE),
    "cancel": (LATE, Reason.CANCELLED),
    "loss": (MISS, Reason.DISCONNECTED),
}


@pytest.mark.parametrize("end_by", OUTCOMES)
def test_device_memory_under_a_read_that_hangs_is_kept_until_it_ends_and_given_to_nobody(
    host: Host, devices: StandInDevices, kvikio: StandInKvikio, end_by: str
) -> None:
    kvikio.hang(host.drive)

    def offer(connection: AgentConnection, message: Get) -> None:
        del host.agent.script[Get]
        connection.send(extents(connection, message, RIGHT))
        end(connection, message)
        if end_by == "loss":
            kvikio.wait_reads(1)
            connection.hang_up()

    host.agent.script[Get] = offer
    silent_s = 0.05 if end_by == "silence" else FAR_S
    with gpu_client(host, direct_silent_s=silent_s, direct_retry_s=0.05) as client:
        volume, into = volume_of(client), on_device(lengths_of(host))
        chain = volume.chain(hashes(BLOCKS))
        ticket = volume.submit_get(chain, into=into, deadline_s=SOON_S if end_by == "deadline" else FAR_S)
        kvikio.wait_reads(1)
        if end_by == "cancel":
            client.cancel(ticket)
        found = taken(client)
        assert set(zip(found.states, found.reasons, strict=True)) == {OUTCOMES[end_by]}
        assert [*devices.stagings] == [0]
        host.agent.script[Get] = ScriptedAgent.usual
        assert get(host, client).hits == BLOCKS, "the agent delivers, in other memory"
        assert 0 in devices.stagings
        kvikio.release()
        until(lambda: not devices.stagings)
        check(host, found, into)
        wait_free(client)
        assert counters(client).blocks_lost == BLOCKS * (end_by == "silence")
        host.offer(RIGHT)
        until(lambda: end_by != "silence" or is_announced(client))
        assert get(host, client).hits == BLOCKS


def is_announced(client: ostraca.Client) -> bool:
    reader = client._runtime.direct
    assert reader is not None
    return reader.announced()[0][1] != ""


def taken(client: ostraca.Client) -> ostraca.GetResult:
    """Wait for the end of the only ticket."""
    watch = Stopwatch()
    while not (done := client.take_completions()):
        assert watch.passed_s < FAR_S
    assert isinstance(done[0].result, ostraca.GetResult)
    return done[0].result


def test_a_client_is_closed_while_a_read_hangs_and_the_device_memory_stays(
    host: Host, devices: StandInDevices, kvikio: StandInKvikio
) -> None:
    kvikio.hang(host.drive)
    host.offer(RIGHT)
    settings = replace(
        SETTINGS, direct_drives=(str(host.drive),), prefault=False, gpu_tags=True, gpu_reads=True
    )
    client = ostraca.connect(host.agent.address, settings=settings)
    found = get(host, client, SOON_S)
    assert set(found.states) == {LATE}
    reader, watch = client._runtime.direct, Stopwatch()
    assert reader is not None
    client.close()
    assert watch.took_s < 5.0
    assert [*devices.stagings] == [0]
    assert kvikio.open == 1
    threads = {each for each in threading.enumerate() if each.name == "ostraca-gpu"}
    assert threads
    kvikio.release()
    until(lambda: not devices.stagings)
    assert reader.close(FAR_S)
    assert kvikio.open == 0
    assert not {each for each in threads if each.is_alive()}


def test_a_drive_that_hangs_holds_no_other_drive_up(
    host: Host, devices: StandInDevices, kvikio: StandInKvikio
) -> None:
    create_drive(host.folder / "drive-b.img")
    with (host.folder / "drive-b.img").open("r+b") as file:
        for position, (_, offset) in RIGHT.items():
            file.seek(offset)
            file.write(host.source[position].tobytes())
    kvikio.hang(host.folder / "drive-b.img")
    both: Places = {at: (at % 2, RIGHT[at][1]) for at in range(BLOCKS)}
    with gpu_client(host, "drive*.img", direct_silent_s=0.2) as client:
        reader = client._runtime.direct
        assert reader is not None
        numbers = {drive: number for number, (_, drive) in enumerate(reader.announced())}
        hung = numbers["shelf/drive-b"]
        host.agent.script[Get] = lambda connection, message: answer(connection, message, both)
        found = get(host, client)
        assert [state == MISS for state in found.states] == [at % 2 == hung for at in range(BLOCKS)]
        assert (counters(client).blocks_read, counters(client).blocks_lost) == (BLOCKS // 2, BLOCKS // 2)
        kvikio.release()
        until(lambda: not devices.stagings)
        wait_free(client)


def test_blocks_of_the_agent_are_hits_while_a_drive_hangs(
    host: Host, devices: StandInDevices, kvikio: StandInKvikio
) -> None:
    kvikio.hang(host.drive)
    host.offer({position: RIGHT[position] for position in (1, 2)})
    with gpu_client(host) as client:
        found = get(host, client, 2 * SOON_S)
        assert found.states == (HIT, LATE, LATE, HIT, HIT, HIT)
        kvikio.release()
        until(lambda: not devices.stagings)
        wait_free(client)


def test_a_batch_larger_than_the_arena_takes_no_more_of_a_device_than_of_the_arena(
    host: Host, devices: StandInDevices, kvikio: StandInKvikio
) -> None:
    count, most = 160, 0
    drive_pages = BLOCK_BYTES // PAGE_BYTES
    rng = np.random.default_rng(8)
    content: NDArray[np.uint8] = rng.integers(0, 255, (count, BLOCK_BYTES), np.uint8)
    with host.drive.open("r+b") as file:
        file.seek(2 * drive_pages * PAGE_BYTES)
        file.write(content.tobytes())

    def offer(connection: AgentConnection, message: Get) -> None:
        nonlocal most
        ids = connection.block_ids(message)
        offsets = [(2 + numbers[each[1]]) * BLOCK_BYTES for each in ids]
        positions, drives = u32(range(len(ids))), u32([0] * len(ids))
        places = np.array(offsets, codec.U64).tobytes()
        tags = b"".join(connection.agent.blocks[each][0] for each in ids)
        most = max(most, sum(each.nbytes for each in devices.stagings.values()))
        connection.send(GetExtents(message.request, positions, drives, places, tags))
        end(connection, message)

    numbers = {name: number for number, name in enumerate(hashes(count, "many"))}
    with gpu_client(host) as client:
        volume = client.volume("kv", LAYOUT, block_bytes=BLOCK_BYTES, create=True)
        chain = volume.chain(hashes(count, "many"))
        put = volume.put(chain, source=content, deadline_s=FAR_S)
        assert set(put.states) == {PutState.COMMITTED}
        host.agent.script[Get] = offer
        into = DeviceArray(np.full((count, BLOCK_BYTES), UNTOUCHED, np.uint8))
        assert volume.get(chain, into=into, deadline_s=FAR_S).prefix == count
        assert np.array_equal(into.read, content)
        assert counters(client).blocks_read == count
        assert len(host.agent.seen_of(Get)) > 4
        assert 0 < most <= SETTINGS.arena_bytes
        until(lambda: not devices.stagings)
        until(lambda: len(host.agent.seen_of(ExtentsRead)) == len(host.agent.seen_of(Get)))


def test_a_client_of_no_drives_never_looks_for_kvikio(
    host: Host, devices: StandInDevices, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    settings = replace(SETTINGS, gpu_tags=True, gpu_reads=True)
    with ostraca.connect(host.agent.address, settings=settings) as client:
        assert get(host, client).hits == BLOCKS
    assert not [each for each in caplog.messages if "kvikio" in each]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that torch can use here")
def test_a_drive_is_read_into_tensors_of_a_gpu(host: Host) -> None:
    for library in ("triton", "kvikio"):
        pytest.importorskip(library, reason="triton computes tags, and kvikio reads files (make test-gpu)")
    host.offer({**RIGHT, 4: RIGHT[0]})
    into = [torch.full((length_of(at),), UNTOUCHED, dtype=torch.uint8, device="cuda") for at in range(BLOCKS)]
    with gpu_client(host) as client:
        volume = volume_of(client)
        found = volume.get(volume.chain(hashes(BLOCKS)), into=into, deadline_s=FAR_S)
        assert found.hits == BLOCKS
        assert [np.array_equal(a.cpu().numpy(), b) for a, b in zip(into, host.source, strict=True)] == [
            True
        ] * BLOCKS
        assert (counters(client).blocks_read, counters(client).blocks_failed) == (BLOCKS - 1, 1)
        assert landed(host, client) == [at == 4 for at in range(BLOCKS)]
