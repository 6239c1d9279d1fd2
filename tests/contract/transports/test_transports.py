"""Both transports pass the same contract, NIXL on shared memory as on TCP; then what is NIXL's own."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from tests.contract.transports.arena_host import ArenaHost
from tests.contract.transports.stream_contract import Heard
from tests.contract.transports.transport_bench import (
    ARENA,
    CHUNK,
    DONE,
    FAILED,
    FROM_WORKER,
    PAGE,
    STAGING,
    TO_WORKER,
    Bench,
    moved,
    noise,
    wave,
)
from tests.contract.transports.transport_contract import TransportContract
from tests.support.agent.moving import move
from tests.support.stalls import Stopwatch

from ostraca._memory.inline_arena import InlineArenaEnd, RequestRows
from ostraca_dpu_agent.adapters.transports import nixl_transport
from ostraca_dpu_agent.adapters.transports.inline_transport import InlineTransport
from ostraca_dpu_agent.adapters.transports.nixl_thread import NixlStream
from ostraca_dpu_agent.adapters.transports.nixl_transport import NixlSettings, NixlTransport
from ostraca_fabric.connection import ConnectionSettings, FramedConnection
from ostraca_fabric.errors import MalformedError, ProtocolError, TransportError
from ostraca_fabric.nixl import runtime
from ostraca_fabric.nixl.runtime import sealed, unsealed
from ostraca_fabric.ports.transport import BulkChannel, Direction, TransferEnd, Transport
from ostraca_fabric.runtime.memory import HugeMemory
from ostraca_fabric.tables.slots import SlotPool, Wave, WaveQueue
from ostraca_fabric.wire.messages import ArenaOffer, Fetch

needs_nixl = pytest.mark.skipif(runtime.package() is None, reason="NIXL is not installed")


class QuietChannel:
    """A control connection, of which NIXL asks nothing but to be broken off."""

    def __init__(self) -> None:
        self.broken_off: list[str] = []

    def break_off(self, why: str, *, code: str = "transport") -> None:
        self.broken_off.append(f"{code}: {why}")


NO_CHANNEL = cast("BulkChannel", QuietChannel())


class BulkLink(FramedConnection):
    """A control connection on which nothing is said but Fetch and bulk frames."""

    def on_message(self, payload: bytes) -> None:
        raise AssertionError(payload)

    def on_broken(self, error: ProtocolError) -> None:
        self.abort()

    def on_closed(self, error: Exception | None) -> None:
        """Nothing to do: what waited has been told."""

    def break_off(self, why: str, *, code: str = "transport") -> None:
        self.abort()


@contextmanager
def bench_of(transport: Transport, directory: Path) -> Iterator[Bench]:
    memory = HugeMemory(STAGING, prefault=True)
    transport.register(memory.view, chunk_bytes=CHUNK)
    bench = Bench(transport, memory, directory)
    yield bench
    asyncio.run(transport.close())
    assert [host.stop() for host in bench.hosts] == [0, 0]
    memory.leak()  # a worker was killed under transfers


class TestInline(TransportContract):
    @pytest.fixture(scope="class")
    @classmethod
    def bench(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
        with bench_of(InlineTransport(), tmp_path_factory.mktemp("inline")) as bench:
            yield bench

    @pytest.fixture(autouse=True)
    async def _links(self) -> AsyncIterator[None]:
        self.links: list[BulkLink] = []
        yield
        for link in self.links:
            link.abort()
            await link.wait_closed()

    async def connect(self, host: ArenaHost) -> BulkChannel:
        _, link = await asyncio.get_running_loop().create_unix_connection(
            lambda: BulkLink(ConnectionSettings()), str(host.address)
        )
        self.links.append(link)
        return link

    async def test_a_fetch_outside_the_arena_is_refused(self) -> None:
        memory = HugeMemory(CHUNK, prefault=False)
        end = InlineArenaEnd(memory.view, SlotPool(CHUNK, CHUNK))
        for offset in (CHUNK, CHUNK - PAGE + 1, (1 << 64) - PAGE):
            fetch = Fetch(1, slots=offset.to_bytes(8, "little"), lengths=PAGE.to_bytes(4, "little"))
            with pytest.raises(MalformedError):
                end.answer(fetch)
        memory.close()

    @pytest.mark.parametrize(
        ("places", "lengths"),
        [
            ([CHUNK - PAGE], [PAGE + 1]),
            ([0], [PAGE + 1]),
            ([1], [1]),
            ([PAGE], [1]),
            ([CHUNK], [1]),
            ([(1 << 64) - PAGE], [1]),
            ([0], [(1 << 32) - 1]),
            ([0, PAGE], [PAGE, PAGE]),
            ([0, CHUNK - PAGE, 1], [1, 1, 1]),
            ([0, CHUNK - PAGE, CHUNK], [PAGE, PAGE, PAGE]),
            ([0, 0], [PAGE, PAGE]),
            ([0, CHUNK - PAGE, 0], [1, PAGE, 1]),
        ],
    )
    async def test_a_frame_lands_in_open_slots_alone_or_not_at_all(
        self, places: list[int], lengths: list[int]
    ) -> None:
        end, slots = InlineArenaEnd(memoryview(bytearray(CHUNK)), SlotPool(CHUNK, CHUNK)), [0, CHUNK - PAGE]
        assert not lands(end, [0], [PAGE])
        end.open(np.array(slots), PAGE)
        assert lands(end, slots, [PAGE, 1])
        assert lands(end, slots[::-1], [1, PAGE])
        assert not lands(end, places, lengths)
        assert lands(end, slots, [PAGE, PAGE]), "that changed nothing"

    async def test_a_slot_that_was_shut_takes_no_more_and_its_neighbours_do(self) -> None:
        end, slots = InlineArenaEnd(memoryview(bytearray(CHUNK)), SlotPool(CHUNK, CHUNK)), [0, CHUNK - PAGE]
        end.open(np.array(slots), PAGE)
        end.shut(np.array(slots[1:]))
        assert not lands(end, slots, [PAGE, PAGE])
        assert not lands(end, slots[1:], [PAGE])
        assert lands(end, slots[:1], [PAGE])
        end.shut_all()
        assert not lands(end, slots[:1], [PAGE])
        end.open(np.array(slots), PAGE)
        end.close()
        assert not lands(end, slots[:1], [PAGE])

    async def test_bound_slots_are_names_of_rows_until_unbound(self) -> None:
        """Blocks of bound slots land in rows, and are fetched from there; other slots are the arena's."""
        arena, region = bytearray(CHUNK), np.arange(10_000, dtype=np.uint8)
        end, slots = InlineArenaEnd(memoryview(arena), SlotPool(CHUNK, CHUNK)), np.array([0, 2 * PAGE])
        rows = RequestRows(region, np.array([3000, 50]), 1000)
        end.bind(5, slots, rows)
        assert not lands(end, [0], [1]), "a bound slot is shut until it is opened"
        end.open(slots, rows.row_bytes)
        passage = end.sink(1, np.array([2 * PAGE, 0], np.uint64), np.array([4, 1000], np.uint32))
        assert passage is not None
        assert passage.lies_in(region)
        passage.fill(memoryview(b"\1" * 1004))
        assert (region[50:54] == 1).all()
        assert (region[3000:4000] == 1).all()
        assert not lands(end, [0], [1001]), "the next row is another's"
        end.open(np.array([PAGE]), PAGE)
        assert not lands(end, [0, PAGE], [1, 1]), "a frame lands in one memory"
        assert lands(end, [PAGE], [PAGE])
        assert fetched(end, [2 * PAGE, 0], [1000, 5]) == [
            region[50:1050].tobytes(),
            region[3000:3005].tobytes(),
        ]
        for places, lengths in (([0], [1001]), ([1], [1]), ([0, PAGE], [1, 1])):
            with pytest.raises(MalformedError):
                fetched(end, places, lengths)
        assert end.unbind(5) is rows
        assert end.unbind(5) is None
        assert not lands(end, [0], [1])
        assert fetched(end, [2 * PAGE], [3]) == [bytes(3)]

    async def test_slots_of_two_requests_with_rows_share_no_frame(self) -> None:
        end = InlineArenaEnd(memoryview(bytearray(CHUNK)), SlotPool(CHUNK, CHUNK))
        for request, slot in ((1, 0), (2, PAGE)):
            end.bind(request, np.array([slot]), RequestRows(np.zeros(64, np.uint8), np.array([0]), 64))
            end.open(np.array([slot]), 64)
        assert lands(end, [0], [64])
        assert lands(end, [PAGE], [64])
        assert not lands(end, [0, PAGE], [64, 64])
        end.unbind(1)
        assert not lands(end, [0], [64])
        assert lands(end, [PAGE], [64])
        end.shut_all()
        assert not lands(end, [PAGE], [64])

    @pytest.mark.parametrize("slot_bytes", [PAGE, 256 << 10])
    async def test_a_worker_stopped_in_mid_wave_holds_its_own_transfers_and_nobody_elses(
        self, bench: Bench, slot_bytes: int
    ) -> None:
        sleeper = bench.another_host(f"stopped-in-mid-wave-{slot_bytes}")
        await sleeper.fill(0, bytes(ARENA))
        peer = await self.attached(bench, sleeper)
        sleeper.pause()
        blocks = wave(ARENA // slot_bytes, slot_bytes, slot_bytes)
        ends = [move(peer, TO_WORKER, blocks) for _ in range(8)]
        await self.check(bench, FROM_WORKER, wave(64, PAGE, PAGE), except_staging=True)
        assert not any(end.done() for end in ends), "128 MiB, of which a socket holds two at most"
        staging = noise(STAGING, 9)
        bench.memory.array[:STAGING] = staging
        sleeper.resume()
        assert await asyncio.wait_for(asyncio.gather(*ends), 30) == [DONE] * 8
        await self.arrived(bench, peer)
        assert (
            await sleeper.peek(0, ARENA)
            == moved(staging, np.zeros(ARENA, np.uint8), blocks, TO_WORKER).tobytes()
        )
        peer.close()
        assert await asyncio.to_thread(sleeper.stop) == 0

    async def test_a_worker_stopped_before_it_answers_holds_its_fetch_and_nobody_elses(
        self, bench: Bench
    ) -> None:
        sleeper = bench.another_host("stopped-before-it-answers")
        arena = noise(ARENA, 10)
        await sleeper.fill(0, arena.tobytes())
        peer = await self.attached(bench, sleeper)
        sleeper.pause()
        end = move(peer, FROM_WORKER, wave(4096, PAGE, PAGE))
        await self.check(bench, TO_WORKER, wave(64, PAGE, PAGE), except_staging=True)
        assert not end.done()
        bench.memory.array[:STAGING] = 0
        sleeper.resume()
        assert await asyncio.wait_for(end, 30) is DONE
        after = moved(arena, np.zeros(STAGING, np.uint8), wave(4096, PAGE, PAGE), FROM_WORKER)
        assert bench.memory.array[:STAGING].tobytes() == after.tobytes()
        peer.close()
        assert await asyncio.to_thread(sleeper.stop) == 0

    async def test_when_the_connection_ends_in_mid_wave_its_transfers_fail(self, bench: Bench) -> None:
        sleeper = bench.another_host("cut-in-mid-wave")
        peer = await self.attached(bench, sleeper)
        sleeper.pause()
        ends = [move(peer, direction, wave(64, 256 << 10, 256 << 10)) for direction in Direction]
        self.links[-1].abort()
        assert await asyncio.wait_for(asyncio.gather(*ends), 10) == [FAILED] * 2
        peer.close()
        sleeper.kill()


def fetched(end: InlineArenaEnd, slots: list[int], lengths: list[int]) -> list[bytes]:
    """Return the blocks that answer a fetch."""
    columns = np.array(slots, np.uint64).tobytes(), np.array(lengths, np.uint32).tobytes()
    whole = b"".join(frame.blocks.copied(1 << 20) for frame in end.answer(Fetch(1, *columns)))
    cuts = np.cumsum(lengths).tolist()
    return [whole[last - length : last] for last, length in zip(cuts, lengths, strict=True)]


def lands(end: InlineArenaEnd, places: list[int], lengths: list[int]) -> bool:
    return end.sink(1, np.array(places, np.uint64), np.array(lengths, np.uint32)) is not None


class NixlContract(TransportContract):
    async def connect(self, host: ArenaHost) -> BulkChannel:
        return NO_CHANNEL

    @pytest.mark.parametrize("damage", ["nothing", "noise", "cut", "flipped", "sealed noise", "sealed cut"])
    async def test_metadata_that_is_none_is_refused(self, bench: Bench, damage: str) -> None:
        good = bench.hosts[0].offer
        metadata = {
            "nothing": b"",
            "noise": noise(500, 1).tobytes(),
            "cut": good.metadata[:-7],
            "flipped": good.metadata[:99] + bytes([good.metadata[99] ^ 1]) + good.metadata[100:],
            "sealed noise": sealed(noise(500, 2).tobytes()),
            "sealed cut": sealed(unsealed(good.metadata)[:30]),
        }[damage]
        await self.refused(bench, changed(good, metadata=metadata))

    @pytest.mark.parametrize("damage", ["after", "before", "larger"])
    async def test_memory_that_the_worker_did_not_register_is_refused(
        self, bench: Bench, damage: str
    ) -> None:
        good = bench.hosts[0].offer
        offer = {
            "after": changed(good, base=good.base + ARENA),
            "before": changed(good, base=good.base - PAGE),
            "larger": changed(good, arena_bytes=2 * ARENA),
        }[damage]
        await self.refused(bench, offer)
        await self.check(bench, TO_WORKER, wave(4, PAGE, PAGE))

    async def refused(self, bench: Bench, offer: ArenaOffer) -> None:
        with pytest.raises(TransportError):
            await bench.transport.attach(offer, bench.memory.view, NO_CHANNEL)

    async def test_memory_that_was_not_registered_here_is_refused(self, bench: Bench) -> None:
        with pytest.raises(TransportError):
            await bench.transport.attach(bench.hosts[0].offer, memoryview(bytearray(CHUNK)), NO_CHANNEL)

    async def test_a_worker_whose_endpoint_broke_gets_a_new_one_when_it_reconnects(
        self, bench: Bench
    ) -> None:
        assert isinstance(bench.transport, NixlTransport)
        old = await self.attached(bench, bench.hosts[0])
        (broken,) = bench.transport._remotes.values()
        broken.is_broken = True  # as a transfer that reports a disconnect leaves it
        new = await self.attached(bench, bench.hosts[0])
        (fresh,) = bench.transport._remotes.values()
        assert fresh is not broken
        assert await move(new, FROM_WORKER, wave(2, PAGE, PAGE)) is DONE
        old.close()
        assert await move(new, FROM_WORKER, wave(2, PAGE, PAGE)) is DONE
        new.close()

    async def test_a_part_of_registered_memory_will_do(self, bench: Bench) -> None:
        part = bench.memory.view[CHUNK : 3 * CHUNK]
        bench.memory.array[:STAGING] = noise(STAGING, 8)
        peer = await bench.transport.attach(bench.hosts[0].offer, part, NO_CHANNEL)
        one = Wave(
            staging=np.array([PAGE]),
            arena=np.array([2 * PAGE]),
            lengths=np.array([PAGE], np.uint32),
            staging_slot_bytes=PAGE,
            arena_slot_bytes=PAGE,
        )
        assert await move(peer, TO_WORKER, one) is DONE
        assert await bench.hosts[0].peek(2 * PAGE, PAGE) == bytes(part[PAGE : 2 * PAGE])
        assert await move(peer, TO_WORKER, replace(one, staging=np.array([part.nbytes]))) is FAILED
        peer.close()


@needs_nixl
@pytest.mark.nixl
class TestNixl(NixlContract):
    @pytest.fixture(scope="class")
    @classmethod
    def bench(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
        with bench_of(NixlTransport.create("agent"), tmp_path_factory.mktemp("nixl")) as bench:
            yield bench

    async def test_a_stream_of_a_closed_arena_begins_nothing(self, bench: Bench) -> None:
        begun: list[NDArray[np.intp]] = []

        def begin(rows: NDArray[np.intp], _: object) -> bool:
            begun.append(rows)
            return True

        transport, heard = cast("NixlTransport", bench.transport), Heard()
        stream = NixlStream(
            transport._thread,
            begin,
            WaveQueue(4, None, per_wave=2),
            time.monotonic,
            heard.report,
            heard.tell,
            None,
        )
        stream.fail()
        while stream.step():
            pass
        await stream.ended
        assert not begun
        assert sorted(heard.rows(FAILED)) == [0, 1, 2, 3]

    async def test_a_stopped_stream_tells_nothing_of_waves_that_settle_later(self, bench: Bench) -> None:
        settles: list[Callable[[TransferEnd | None], None]] = []

        def begin(_: NDArray[np.intp], settled: Callable[[TransferEnd | None], None]) -> bool:
            settles.append(settled)
            return False

        transport, heard = cast("NixlTransport", bench.transport), Heard(listens=True)
        stream = NixlStream(
            transport._thread,
            begin,
            WaveQueue(8, None, per_wave=4),
            time.monotonic,
            heard.report,
            heard.tell,
            None,
        )
        assert stream.step()
        assert stream.step()
        assert stream.stop().tolist() == list(range(8))
        settles[0](DONE)
        assert stream.step()
        settles[1](DONE)
        assert not stream.step()
        await stream.ended
        assert not heard.told
        assert heard.rows(DONE) == list(range(8))


@needs_nixl
@pytest.mark.nixl
class TestNixlOverTcp(NixlContract):
    @pytest.fixture(scope="class")
    @classmethod
    def bench(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("UCX_TLS", "tcp")
            transport = NixlTransport.create("agent", NixlSettings(unaided_only=False))
            with bench_of(transport, tmp_path_factory.mktemp("tcp")) as bench:
                yield bench

    async def test_a_worker_that_has_stopped_is_not_attached_and_harms_no_other(self, bench: Bench) -> None:
        stopped = bench.another_host("stopped")
        stopped.pause()
        watch = Stopwatch()
        with pytest.raises(TransportError, match="progress"):
            await bench.transport.attach(stopped.offer, bench.memory.view, NO_CHANNEL)
        assert watch.took_s < NixlSettings().attach_s + 1
        await self.check(bench, TO_WORKER, wave(4, PAGE, PAGE))
        stopped.kill()

    async def test_a_transfer_stays_unsettled_while_its_worker_is_stopped(self, bench: Bench) -> None:
        sleeper = bench.another_host("sleeper")
        peer = await self.attached(bench, sleeper)
        sleeper.pause()
        end = move(peer, FROM_WORKER, wave(16, 1 << 20, 1 << 20))
        await asyncio.wait((end,), timeout=0.5)
        assert not end.done()
        await self.check(bench, TO_WORKER, wave(4, PAGE, PAGE), except_staging=True)
        sleeper.resume()
        assert await asyncio.wait_for(end, 10) is DONE
        peer.close()
        assert await asyncio.to_thread(sleeper.stop) == 0


def test_any_changed_byte_of_the_metadata_is_noticed_before_nixl_parses_it() -> None:
    metadata = sealed(noise(460, 9).tobytes())
    assert sealed(unsealed(metadata)) == metadata
    for place in range(len(metadata)):
        damaged = metadata[:place] + bytes([metadata[place] ^ 1]) + metadata[place + 1 :]
        with pytest.raises(TransportError):
            unsealed(damaged)


@needs_nixl
@pytest.mark.nixl
async def test_a_transfer_whose_end_nixl_cannot_tell_never_settles_and_its_memory_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = ArenaHost("nixl", tmp_path, arena_bytes=ARENA, chunk_bytes=CHUNK)
    memory = HugeMemory(STAGING, prefault=True)
    transport = NixlTransport.create("unsure")
    transport.register(memory.view, chunk_bytes=CHUNK)
    peer = await transport.attach(host.offer, memory.view, NO_CHANNEL)
    agent, post = transport._agent, transport._agent.post

    def post_and_lose_sight(transfer: runtime.Transfer) -> runtime.TransferState:
        post(transfer)
        return runtime.TransferState.UNKNOWN

    monkeypatch.setattr(agent, "post", post_and_lose_sight)
    end = move(peer, TO_WORKER, wave(1, PAGE, PAGE))
    await asyncio.wrap_future(transport._thread.call(lambda: None))  # behind the transfer's own end
    assert not end.done()
    peer.close()
    await transport.close()
    assert not end.done()
    assert any(isinstance(kept, tuple) and agent is kept[0] for kept in nixl_transport._abandoned)
    memory.leak()
    assert await asyncio.to_thread(host.stop) == 0


@needs_nixl
@pytest.mark.nixl
@pytest.mark.parametrize("how", ["closed", "left open"])
def test_a_process_that_used_nixl_ends_with_code_zero(how: str, tmp_path: Path) -> None:
    host = ArenaHost("nixl", tmp_path, arena_bytes=ARENA, chunk_bytes=CHUNK)
    code = EXITING.format(offer=msgspec.msgpack.encode(host.offer), closes=how == "closed")
    ended = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"done", b"")
    assert host.stop() == 0


EXITING = """
import asyncio, msgspec, numpy, sys, time
from ostraca_dpu_agent.adapters.transports.nixl_transport import NixlTransport
from ostraca_fabric.runtime.memory import HugeMemory
from ostraca_fabric.tables.slots import Wave
from ostraca_fabric.wire.messages import ArenaOffer

async def main():
    memory = HugeMemory(1 << 21, prefault=True)
    transport = NixlTransport.create("exiting")
    transport.register(memory.view)
    offer = msgspec.msgpack.decode({offer!r}, type=ArenaOffer)
    peer = await transport.attach(offer, memory.view, None)
    one = numpy.zeros(1, numpy.int64)
    wave, ends = Wave(one, one, numpy.array([4096], "u4"), 4096, 4096), []
    stream = peer.stream(wave, None, per_wave=1, clock=time.monotonic, report=ends.extend, tell=lambda _: 0)
    await stream.ended
    sys.stdout.write(ends[-1].end.name.lower())
    assert "torch" not in sys.modules
    if {closes}:
        peer.close()
        await transport.close()
        memory.close()

asyncio.run(main())
"""


def changed(offer: ArenaOffer, **changes: int | bytes) -> ArenaOffer:
    return msgspec.structs.replace(offer, **changes)
