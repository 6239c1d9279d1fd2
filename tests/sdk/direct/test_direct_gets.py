"""Gets of a client that reads drives of this host itself, as an agent by script tells it to."""

from __future__ import annotations

import ctypes
import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from tests.sdk.conftest import BLOCK_BYTES, LAYOUT, SETTINGS, SOON_S, hashes
from tests.sdk.direct.drive_files import DRIVE_BYTES, FABRIC, as_another_user, create_drive
from tests.sdk.direct.test_direct_reader import until
from tests.sdk.scripted_agent import LIMITS, AgentConnection, ScriptedAgent, agent_at
from tests.support.simulated.stuck_memory import StuckMemory
from tests.support.stalls import Stopwatch

import ostraca
from ostraca import BlockState, PutState, Reason
from ostraca.client_metrics import DirectCounters
from ostraca_fabric.model.chain import Span
from ostraca_fabric.model.extent import PAGE_BYTES
from ostraca_fabric.wire import codec
from ostraca_fabric.wire.handshake import DIRECT, LEAVING
from ostraca_fabric.wire.messages import (
    AnnouncedDrive,
    DirectDrives,
    ExtentsRead,
    Get,
    GetDone,
    GetExtents,
    Lookup,
    Put,
)

FAR_S = 30.0
"""A deadline that only a test that fails reaches."""

BLOCKS = 6
SLOTS = SETTINGS.arena_bytes // BLOCK_BYTES
UNTOUCHED = 0xEE
HIT, MISS, LATE = BlockState.HIT, BlockState.MISS, BlockState.LATE
Places = Mapping[int, tuple[int, int]]
"""Drive number and offset of blocks, by their position in a get."""

RIGHT: Places = {position: (0, (17 + 40 * position) * PAGE_BYTES) for position in range(BLOCKS)}
"""Where the blocks are."""


def u32(positions: Iterable[int]) -> bytes:
    return np.array(list(positions), codec.U32).tobytes()


def length_of(position: int) -> int:
    """Most blocks end within a page."""
    return BLOCK_BYTES - 1000 * position


def extents(connection: AgentConnection, message: Get, places: Places) -> GetExtents:
    """Name blocks of a get at *places*, with their own tags."""
    ids = connection.block_ids(message)
    return GetExtents(
        message.request,
        u32(places),
        u32(drive for drive, _ in places.values()),
        np.array([offset for _, offset in places.values()], codec.U64).tobytes(),
        b"".join(connection.agent.blocks[ids[position]][0] for position in places),
    )


def end(connection: AgentConnection, message: Get) -> None:
    """Answer a get of which all blocks have landed, or are left to the worker."""
    count = len(connection.block_ids(message))
    connection.send(GetDone(message.request, bytes([HIT] * count), bytes(count)))


def answer(connection: AgentConnection, message: Get, places: Places) -> None:
    """Leave blocks at *places* to the worker, and deliver the others, and all that is asked for again."""
    if message.is_again:
        ScriptedAgent.usual(connection, message)
        return
    connection.send(extents(connection, message, places))
    others = [position for position in range(BLOCKS) if position not in places]
    if others:
        connection.land(message, others)
    end(connection, message)


@dataclass
class Host:
    """An agent with blocks that are on a drive, too."""

    folder: Path
    agent: ScriptedAgent
    source: list[NDArray[np.uint8]] = field(default_factory=list)

    @property
    def drive(self) -> Path:
        return self.folder / "drive.img"

    def store(self) -> None:
        """Give the blocks to the agent, and write them to the drive."""
        create_drive(self.drive)
        rng = np.random.default_rng(5)
        self.source = [rng.integers(0, 255, length_of(position), np.uint8) for position in range(BLOCKS)]
        with ostraca.connect(self.agent.address, settings=SETTINGS) as client:
            volume = volume_of(client)
            put = volume.put(volume.chain(hashes(BLOCKS)), source=self.source, deadline_s=FAR_S)
            assert set(put.states) == {PutState.COMMITTED}
        self.write_blocks()
        self.agent.seen.clear()

    def write_blocks(self) -> None:
        with self.drive.open("r+b") as file:
            for position, (_, offset) in RIGHT.items():
                file.seek(offset)
                file.write(self.source[position].tobytes())

    def offer(self, places: Places) -> None:
        """Have gets answered with blocks at *places* left to the worker."""
        self.agent.script[Get] = lambda connection, message: answer(connection, message, places)

    def report(self) -> tuple[list[int], list[int]]:
        """Return the positions that a worker reported as verified, and as failed, once."""
        until(lambda: bool(self.agent.seen_of(ExtentsRead)))
        (report,) = self.agent.seen_of(ExtentsRead)
        verified, failed = (codec.positions(each, BLOCKS) for each in (report.verified, report.failed))
        return verified.tolist(), failed.tolist()

    def asked_again(self) -> list[int]:
        """Return the positions of blocks that a worker asked for again, once, and into the same slots."""
        first, second = self.agent.seen_of(Get)
        assert [first.is_again, second.is_again] == [False, True]
        slots = codec.u64(first.slots, BLOCKS).tolist()
        positions = [slots.index(slot) for slot in np.frombuffer(second.slots, codec.U64).tolist()]
        names = [name for span in first.spans for name in names_of(span)]
        assert [name for span in second.spans for name in names_of(span)] == [names[at] for at in positions]
        assert codec.u32(second.lengths, len(positions)).tolist() == [length_of(at) for at in positions]
        return positions

    @contextmanager
    def client(self, drives: str = "drive.img", **settings: float) -> Iterator[ostraca.Client]:
        chosen = replace(SETTINGS, direct_drives=(str(self.folder / drives),), prefault=False, **settings)  # type: ignore[arg-type]
        with ostraca.connect(self.agent.address, settings=chosen) as client:
            yield client

    def get(self, client: ostraca.Client, deadline_s: float = FAR_S) -> ostraca.GetResult:
        """Get all blocks, and check that hits are right and nothing else was touched."""
        volume = volume_of(client)
        into = [np.full_like(block, UNTOUCHED) for block in self.source]
        found = volume.get(volume.chain(hashes(BLOCKS)), into=into, deadline_s=deadline_s)
        for state, block, right in zip(found.states, into, self.source, strict=True):
            assert np.array_equal(block, right) if state == HIT else (block == UNTOUCHED).all()
        return found

    def get_views(self, client: ostraca.Client, deadline_s: float = FAR_S) -> ostraca.GetResult:
        """Look at all blocks in the same way."""
        volume = volume_of(client)
        lengths = [len(block) for block in self.source]
        with volume.get_views(volume.chain(hashes(BLOCKS)), lengths=lengths, deadline_s=deadline_s) as views:
            for state, view, right in zip(views.result.states, views, self.source, strict=True):
                assert view == right.data if state == HIT else view is None
            return views.result


def names_of(span: Span) -> list[bytes]:
    return [span.hashes[at : at + span.hash_bytes] for at in range(0, len(span.hashes), span.hash_bytes)]


def volume_of(client: ostraca.Client) -> ostraca.Volume:
    return client.volume("kv", LAYOUT, block_bytes=BLOCK_BYTES, create=True)


def has_free(client: ostraca.Client, slots: int) -> bool:
    """Whether so many slots are free, with the arena's lock held."""
    ledger = client._runtime.arena.ledger
    taken = ledger.take(slots, BLOCK_BYTES)
    if taken is not None:
        ledger.give(taken)
    return taken is not None


def wait_free(client: ostraca.Client, used: int = 0) -> None:
    """Wait until all slots are free, or all but *used*."""
    changed = client._runtime.arena.changed
    with changed:
        assert changed.wait_for(lambda: has_free(client, SLOTS - used), FAR_S)
        assert not has_free(client, SLOTS - used + 1)


def counters(client: ostraca.Client) -> DirectCounters:
    direct = client.metrics().direct
    assert direct is not None
    return direct


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with agent_at(tmp_path / "agent.sock", features=(LEAVING, DIRECT)) as agent:
        made = Host(tmp_path, agent)
        made.store()
        yield made


def test_an_agent_that_knows_no_direct_reads_hears_nothing_of_drives(tmp_path: Path) -> None:
    with agent_at(tmp_path / "agent.sock", features=(LEAVING,)) as agent:
        host = Host(tmp_path, agent)
        host.store()
        with host.client() as client:
            assert set(host.get(client).states) == {HIT}
        assert not agent.seen_of(DirectDrives)


ways = pytest.mark.parametrize("get", [Host.get, Host.get_views], ids=["copied", "views"])
GetOf = Callable[..., ostraca.GetResult]


@ways
def test_blocks_named_on_a_drive_are_read_from_it_and_reported(host: Host, get: GetOf) -> None:
    host.offer(RIGHT)
    with host.client() as client:
        assert set(get(host, client).states) == {HIT}
        pages = sum(-(-length_of(position) // PAGE_BYTES) for position in range(BLOCKS))
        assert counters(client) == DirectCounters(blocks_read=BLOCKS, bytes_read=pages * PAGE_BYTES)
        wait_free(client)
    assert host.report() == ([*range(BLOCKS)], [])
    assert len(host.agent.seen_of(Get)) == 1
    assert host.agent.seen_of(DirectDrives) == [DirectDrives((AnnouncedDrive(FABRIC, "shelf/drive"),))]


@ways
def test_the_agent_delivers_some_blocks_while_the_worker_reads_others(host: Host, get: GetOf) -> None:
    host.offer({position: RIGHT[position] for position in (5, 1, 2)})
    with host.client() as client:
        assert set(get(host, client).states) == {HIT}
        assert counters(client).blocks_read == 3
        wait_free(client)
    assert host.report() == ([1, 2, 5], [])


@ways
@pytest.mark.parametrize("agent", ["answers early", "answers late"])
def test_blocks_that_fail_their_tags_are_asked_for_again(host: Host, get: GetOf, agent: str) -> None:
    places = {**RIGHT, 1: RIGHT[2], 2: RIGHT[1], 4: (0, DRIVE_BYTES - 16 * PAGE_BYTES)}
    host.offer(places)
    if agent == "answers late":
        host.agent.script |= {
            Get: lambda connection, message: (
                answer(connection, message, places)
                if message.is_again
                else connection.send(extents(connection, message, places))
            ),
            ExtentsRead: lambda connection, _: end(connection, connection.agent.seen_of(Get)[0]),
        }
    with host.client() as client:
        assert set(get(host, client).states) == {HIT}
        assert counters(client).blocks_failed == 3
        wait_free(client)
    assert host.report() == ([0, 3, 5], [1, 2, 4])
    assert host.asked_again() == [1, 2, 4]


SECOND: dict[str, tuple[BlockState, Reason, float]] = {
    "offer": (MISS, Reason.DISCONNECTED, FAR_S),
    "loss": (MISS, Reason.DISCONNECTED, FAR_S),
    "silence": (LATE, Reason.DEADLINE, SOON_S),
}
"""Outcome of blocks asked for again of an agent that does wrong then, and the time given."""


@ways
@pytest.mark.parametrize("second", SECOND)
def test_blocks_that_the_agent_fails_to_deliver_are_asked_for_only_once(
    host: Host, get: GetOf, second: str
) -> None:
    def offer(connection: AgentConnection, message: Get) -> None:
        if not message.is_again:
            answer(connection, message, {**RIGHT, 4: RIGHT[0]})
        elif second == "loss":
            connection.hang_up()
        elif second == "offer":
            connection.send(extents(connection, message, {0: RIGHT[4]}))

    host.agent.script[Get] = offer
    state, reason, deadline_s = SECOND[second]
    with host.client() as client:
        found = get(host, client, deadline_s)
        assert found.states == (HIT, HIT, HIT, HIT, state, HIT)
        assert found.reasons[4] == reason
        assert host.asked_again() == [4]
        wait_free(client, used=int(second == "silence"))


@ways
def test_blocks_that_wait_for_a_second_request_end_by_the_deadline(tmp_path: Path, get: GetOf) -> None:
    limits = msgspec.structs.replace(LIMITS, inflight_max=1)
    with agent_at(tmp_path / "agent.sock", features=(LEAVING, DIRECT), limits=limits) as agent:
        host = Host(tmp_path, agent)
        host.store()
        asked, has_lookup = threading.Event(), threading.Event()

        def offer(connection: AgentConnection, message: Get) -> None:
            asked.set()
            assert has_lookup.wait(FAR_S)
            connection.send(extents(connection, message, {**RIGHT, 4: RIGHT[0]}))

        agent.script |= {
            Get: offer,
            # The lookup takes the only place as soon as the get is answered, and keeps it.
            ExtentsRead: lambda connection, _: end(connection, *agent.seen_of(Get)),
            Lookup: lambda _, __: None,
        }
        with host.client() as client, ThreadPoolExecutor() as pool:
            getting = pool.submit(get, host, client, 2 * SOON_S)
            assert asked.wait(FAR_S)
            volume = volume_of(client)
            volume.submit_lookup(volume.chain(hashes(1)), deadline_s=FAR_S)
            has_lookup.set()
            found = getting.result()
            assert found.states == (HIT, HIT, HIT, HIT, LATE, HIT)
            assert len(agent.seen_of(Get)) == 1
            wait_free(client)


@ways
def test_a_block_that_fits_the_tag_of_another_is_not_handed_over(host: Host, get: GetOf) -> None:
    def offer_swapped(connection: AgentConnection, message: Get) -> None:
        right = extents(connection, message, {2: RIGHT[2]})
        connection.send(GetExtents(message.request, u32([1]), right.drives, right.offsets, right.tags))

    def lie(connection: AgentConnection, message: Get) -> None:
        if not message.is_again:
            offer_swapped(connection, message)
        end(connection, message)

    host.agent.script[Get] = lie
    with host.client() as client:
        found = get(host, client)
        assert (set(found.states), set(found.reasons)) == ({MISS}, {Reason.TRANSFER_FAILED})
        wait_free(client)
    assert host.report() == ([], [1])


@ways
def test_what_was_read_stays_a_hit_where_the_agent_says_nothing_more(host: Host, get: GetOf) -> None:
    host.agent.script[Get] = lambda connection, message: connection.send(
        extents(connection, message, {**RIGHT, 4: RIGHT[0]})
    )
    with host.client() as client:
        found = get(host, client, SOON_S)
        assert found.states == (HIT, HIT, HIT, HIT, LATE, HIT)
        assert host.agent.cancelled.wait(FAR_S)
        wait_free(client, used=BLOCKS)  # the agent may deliver yet
        assert host.report() == ([0, 1, 2, 3, 5], [4])

        def answer_late(connection: AgentConnection, message: Lookup) -> None:
            end(connection, *host.agent.seen_of(Get))
            ScriptedAgent.usual(connection, message)

        host.agent.script[Lookup] = answer_late
        volume = volume_of(client)
        assert volume.lookup(volume.chain(hashes(BLOCKS)), deadline_s=FAR_S).hits == BLOCKS
        wait_free(client)


@ways
@pytest.mark.parametrize("offset", [DRIVE_BYTES - PAGE_BYTES, DRIVE_BYTES, (1 << 63) - PAGE_BYTES])
def test_blocks_beyond_the_end_of_a_drive_come_from_the_agent(host: Host, offset: int, get: GetOf) -> None:
    host.offer({**RIGHT, 5: (0, offset)})
    with host.client() as client:
        assert set(get(host, client).states) == {HIT}
        assert counters(client).blocks_failed >= 1
        assert set(get(host, client).states) == {HIT}
        assert host.agent.seen_of(DirectDrives)[-1] == DirectDrives((AnnouncedDrive(FABRIC, ""),))


WRONG: dict[str, tuple[Places, ...]] = {
    "an offset of 64 bits": ({**RIGHT, 5: (0, (1 << 64) - PAGE_BYTES)},),
    "an unknown drive": ({**RIGHT, 0: (1, PAGE_BYTES)},),
    "a drive of 32 bits": ({**RIGHT, 0: ((1 << 32) - 1, PAGE_BYTES)},),
    "between pages": ({**RIGHT, 3: (0, 512)},),
    "nothing": ({},),
    "a second time": (dict(list(RIGHT.items())[:2]), dict(list(RIGHT.items())[2:])),
}


@ways
@pytest.mark.parametrize("wrong", WRONG)
def test_extents_that_cannot_be_end_the_connection(host: Host, wrong: str, get: GetOf) -> None:
    def offer(connection: AgentConnection, message: Get) -> None:
        for places in WRONG[wrong]:
            connection.send(extents(connection, message, places))

    host.agent.script[Get] = offer
    with host.client() as client:
        check_broken_off(host, client, get)


MALFORMED: dict[str, Callable[[GetExtents], GetExtents]] = {
    "a block twice": lambda right: replace_column(right, positions=u32([0, 1, 2, 3, 4, 4])),
    "no such block": lambda right: replace_column(right, positions=u32([0, 1, 2, 3, 4, 6])),
    "part of a position": lambda right: replace_column(right, positions=right.positions[:-1]),
    "too few drives": lambda right: replace_column(right, drives=right.drives[:-4]),
    "too many offsets": lambda right: replace_column(right, offsets=right.offsets + bytes(8)),
    "no tags": lambda right: replace_column(right, tags=b""),
}


def replace_column(message: GetExtents, **columns: bytes) -> GetExtents:
    whole = {name: getattr(message, name) for name in ("positions", "drives", "offsets", "tags")}
    return GetExtents(message.request, **{**whole, **columns})


@pytest.mark.parametrize("wrong", MALFORMED)
def test_columns_that_do_not_fit_end_the_connection(host: Host, wrong: str) -> None:
    host.agent.script[Get] = lambda connection, message: connection.send(
        MALFORMED[wrong](extents(connection, message, RIGHT))
    )
    with host.client() as client:
        check_broken_off(host, client)


def test_extents_of_blocks_that_have_landed_end_the_connection(host: Host) -> None:
    def offer(connection: AgentConnection, message: Get) -> None:
        connection.land(message, [2])
        connection.send(extents(connection, message, RIGHT))

    host.agent.script[Get] = offer
    with host.client() as client:
        check_broken_off(host, client)


def test_extents_for_a_client_without_drives_end_the_connection(host: Host) -> None:
    host.offer(RIGHT)
    with ostraca.connect(host.agent.address, settings=SETTINGS) as client:
        check_broken_off(host, client)
        assert not host.agent.seen_of(DirectDrives)


def test_extents_for_a_put_end_the_connection(host: Host) -> None:
    def offer(connection: AgentConnection, message: Put) -> None:
        connection.send(GetExtents(message.request, u32([0]), u32([0]), bytes(8), bytes(16)))

    host.agent.script[Put] = offer
    with host.client() as client:
        volume = volume_of(client)
        put = volume.put(volume.chain(hashes(1, "other")), source=host.source[:1], deadline_s=FAR_S)
        assert (put.states, put.reasons) == ((PutState.LATE,), (Reason.DISCONNECTED,))
        wait_free(client)


def check_broken_off(host: Host, client: ostraca.Client, get: GetOf = Host.get) -> None:
    """Check that a get ends as disconnected, without a wrong byte, and that the next one does well."""
    found = get(host, client)
    assert MISS in found.states
    misses = [reason for state, reason in zip(found.states, found.reasons, strict=True) if state != HIT]
    assert set(misses) == {Reason.DISCONNECTED}
    host.agent.script.clear()
    assert set(get(host, client).states) == {HIT}
    wait_free(client)


def test_without_the_right_to_read_a_drive_the_agent_delivers_all() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        path.chmod(0o755)
        with agent_at(path / "agent.sock", features=(LEAVING, DIRECT)) as agent:
            (path / "agent.sock").chmod(0o777)
            host = Host(path, agent)
            host.store()
            host.drive.chmod(0)
            with as_another_user(), host.client() as client:
                check_agent_delivers(host, client)


def test_a_link_to_a_drive_is_not_read(host: Host) -> None:
    (host.folder / "link.img").symlink_to(host.drive)
    with host.client("link.img") as client:
        check_agent_delivers(host, client)


def check_agent_delivers(host: Host, client: ostraca.Client) -> None:
    """Check that a client announces no drive, and that its get does well."""
    assert set(host.get(client).states) == {HIT}
    assert set(host.agent.seen_of(DirectDrives)) <= {DirectDrives(())}
    assert counters(client) == DirectCounters()


def test_a_drive_that_fails_is_withdrawn_with_the_next_get_and_announced_again_later(host: Host) -> None:
    host.offer(RIGHT)
    named, withdrawn = (DirectDrives((AnnouncedDrive(FABRIC, name),)) for name in ("shelf/drive", ""))
    with host.client(direct_retry_s=0.2) as client:
        os.truncate(host.drive, PAGE_BYTES)
        assert set(host.get(client).states) == {HIT}
        assert counters(client).blocks_failed == BLOCKS
        assert host.report() == ([], [*range(BLOCKS)])
        del host.agent.script[Get]
        assert set(host.get(client).states) == {HIT}
        os.truncate(host.drive, DRIVE_BYTES)
        host.write_blocks()
        watch = Stopwatch()
        while host.agent.seen_of(DirectDrives)[-1] != named:
            assert set(host.get(client).states) == {HIT}
            assert watch.took_s < FAR_S
        assert host.agent.seen_of(DirectDrives) == [named, withdrawn, named]
        host.offer(RIGHT)
        assert set(host.get(client).states) == {HIT}
        assert counters(client).blocks_read == BLOCKS


@dataclass
class Hang:
    """Reads into the slots of the first get from a drive end only after ``release``."""

    slots: list[int]
    memory: list[StuckMemory]

    def release(self) -> None:
        for each in self.memory:
            each.release()


@contextmanager
def hanging(
    host: Host, client: ostraca.Client, *, places: Places = RIGHT, hangs_up: bool = False
) -> Iterator[Hang]:
    """Let the next get read from a drive that hangs, and later ones as the agent usually does.

    Its blocks are said to be at *places*. With *hangs_up*, the agent closes the connection as soon as reads
    may be under way.
    """
    hang, arena = Hang([], []), client._runtime.arena.array

    def offer(connection: AgentConnection, message: Get) -> None:
        del host.agent.script[Get]
        hang.slots = codec.u64(message.slots, BLOCKS).tolist()
        for slot in hang.slots:
            hang.memory.append(StuckMemory(BLOCK_BYTES, within=arena[slot : slot + BLOCK_BYTES]))
        connection.send(extents(connection, message, places))
        end(connection, message)
        if hangs_up:
            connection.hang_up()

    StuckMemory(PAGE_BYTES).release()  # skips the test here, not in the agent's thread
    host.agent.script[Get] = offer
    try:
        yield hang
    finally:
        hang.release()


@ways
@pytest.mark.parametrize("end", ["silence", "deadline", "loss"])
def test_slots_under_a_read_that_hangs_are_used_by_nobody_before_it_ends(
    host: Host, get: GetOf, end: str
) -> None:
    silent_s, deadline_s = (0.05 if end == "silence" else FAR_S), (SOON_S if end == "deadline" else FAR_S)
    outcome = {
        "silence": (MISS, Reason.DRIVE_SUSPECT),
        "deadline": (LATE, Reason.DEADLINE),
        "loss": (MISS, Reason.DISCONNECTED),
    }[end]
    with (
        host.client(direct_silent_s=silent_s, direct_retry_s=0.05) as client,
        hanging(host, client, hangs_up=end == "loss") as hang,
    ):
        found = get(host, client, deadline_s)
        assert set(zip(found.states, found.reasons, strict=True)) == {outcome}
        asked = host.agent.seen_of(Get)[0].request
        until(lambda: end != "silence" or bool(host.agent.seen_of(ExtentsRead)))
        assert host.agent.seen_of(ExtentsRead) == [ExtentsRead(asked, b"", b"")] * (end == "silence")
        assert host.agent.cancelled.wait(FAR_S if end == "deadline" else 0) is (end == "deadline")
        wait_free(client, used=BLOCKS)
        volume, many = volume_of(client), hashes(SLOTS, "many")
        source = np.random.default_rng(1).integers(0, 255, (SLOTS, BLOCK_BYTES), np.uint8)
        put = volume.put(volume.chain(many), source=source, deadline_s=FAR_S)
        assert set(put.states) == {PutState.COMMITTED}
        for _ in range(3):
            into = np.full_like(source, UNTOUCHED)
            assert volume.get(volume.chain(many), into=into, deadline_s=FAR_S).hits == SLOTS
            assert np.array_equal(into, source)
        others = (*host.agent.seen_of(Put), *host.agent.seen_of(Get)[1:])
        used = {slot for each in others for slot in codec.u64(each.slots, len(each.slots) // 8).tolist()}
        assert len(hang.slots) == BLOCKS
        assert not used & {*hang.slots}
        wait_free(client, used=BLOCKS)
        hang.release()
        wait_free(client)
        assert counters(client).blocks_lost == BLOCKS * (end == "silence")


@ways
def test_other_blocks_in_extents_after_the_end_of_a_get_are_not_held_against_the_drive(
    host: Host, get: GetOf
) -> None:
    others = {position: RIGHT[BLOCKS - 1 - position] for position in RIGHT}  # as after an eviction
    with host.client() as client, hanging(host, client, places=others) as hang:
        assert set(get(host, client, SOON_S).states) == {LATE}
        hang.release()
        wait_free(client)
        reader = client._runtime.direct
        assert reader is not None
        assert all(drive for _, drive in reader.announced())
        assert not counters(client).blocks_failed


def test_a_client_is_closed_while_a_read_hangs_and_its_memory_stays(host: Host) -> None:
    client = ostraca.connect(
        host.agent.address, settings=replace(SETTINGS, direct_drives=(str(host.drive),), prefault=False)
    )
    with hanging(host, client) as hang:
        assert set(host.get(client, SOON_S).states) == {LATE}
        memory = client._runtime.arena._memory
        reader = client._runtime.direct
        assert reader is not None
        watch = Stopwatch()
        client.close()
        assert watch.took_s < 5.0
        assert hasattr(memory, "_map"), "leaked, not closed"
        hang.release()
        ended = threading.Event()
        reader.when_read(host.agent.seen_of(Get)[0].request, ended.set)
        assert ended.wait(FAR_S)
        for position, slot in enumerate(hang.slots):
            landed = ctypes.string_at(memory.address + slot, length_of(position))
            assert landed == host.source[position].tobytes(), "the read ended in memory of the client"
        assert reader.close(FAR_S)
