"""What every arena's streams promise: a class that ``TransportContract`` inherits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.contract.transports.arena_host import ArenaHost
from tests.contract.transports.transport_bench import (
    ARENA,
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
from tests.support.agent.moving import move

from ostraca_fabric.ports.transport import (
    BlockStream,
    BulkChannel,
    RemoteArena,
    TransferEnd,
    WaveNews,
    WaveStream,
)
from ostraca_fabric.tables.digests import CheckState
from ostraca_fabric.tables.slots import Wave

GOOD, DAMAGED = np.uint8(CheckState.GOOD), np.uint8(CheckState.DAMAGED)
PER_WAVE = 4


@dataclass
class Heard:
    """News of a stream."""

    news: list[WaveNews] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    listens: bool = False
    """Whether news may be told in any thread."""

    told: list[WaveNews] = field(default_factory=list)

    def tell(self, news: Sequence[WaveNews]) -> bool:
        if self.listens:
            self.told += news
        return self.listens

    def report(self, news: Sequence[WaveNews]) -> None:
        self.news += news
        self.changed.set()

    def rows(self, end: TransferEnd | None) -> list[int]:
        """Return the rows that waves of such news had, in order."""
        return [row for each in self.news if each.end is end for row in each.rows.tolist()]

    async def until(self, rows: int) -> None:
        """Wait until as many rows are delivered."""
        while len(self.rows(DONE)) < rows:
            self.changed.clear()
            await self.changed.wait()


class StreamContract:
    """Inherit by way of ``TransportContract``."""

    async def attached(self, bench: Bench, host: ArenaHost) -> RemoteArena:
        """Return a worker's arena."""
        raise NotImplementedError

    async def connect(self, host: ArenaHost) -> BulkChannel:
        """Return the control connection to a worker."""
        raise NotImplementedError

    async def arrived(self, bench: Bench, peer: RemoteArena) -> None:
        """Wait until what was sent before is in the arena: what is asked for later is answered later."""
        assert await move(peer, FROM_WORKER, wave(1, PAGE, PAGE)) is DONE

    def stream(
        self,
        peer: RemoteArena,
        blocks: Wave,
        states: NDArray[np.uint8] | None = None,
        *,
        listens: bool = False,
    ) -> tuple[WaveStream, Heard]:
        heard = Heard(listens=listens)
        stream = peer.stream(
            blocks, states, per_wave=PER_WAVE, clock=time.monotonic, report=heard.report, tell=heard.tell
        )
        return stream, heard

    async def offering(self, bench: Bench) -> RemoteArena:
        """Return an arena of noise, beside empty staging."""
        bench.memory.array[:STAGING] = 0
        await bench.hosts[0].fill(0, noise(ARENA, 12).tobytes())
        return await self.attached(bench, bench.hosts[0])

    def fetch(self, peer: RemoteArena, blocks: Wave) -> tuple[BlockStream, list[tuple[int, int]]]:
        arrived: list[tuple[int, int]] = []
        stream = peer.fetch(blocks, per_wave=PER_WAVE, arrived=lambda *rows: arrived.append(rows))
        return stream, arrived

    async def filled(self, bench: Bench) -> RemoteArena:
        await bench.hosts[0].fill(0, bytes(ARENA))
        bench.memory.array[:STAGING] = noise(STAGING, 11)
        return await self.attached(bench, bench.hosts[0])

    async def holds(self, bench: Bench, peer: RemoteArena, blocks: Wave) -> None:
        """Check that these blocks are in the arena, and nothing else."""
        await self.arrived(bench, peer)
        wanted = moved(noise(STAGING, 11), np.zeros(ARENA, np.uint8), blocks, TO_WORKER)
        assert await bench.hosts[0].peek(0, ARENA) == wanted.tobytes()
        peer.close()

    async def test_a_stream_moves_blocks_in_memory_in_waves(self, bench: Bench) -> None:
        peer, blocks = await self.filled(bench), wave(10, 64 << 10, 60_000)
        stream, heard = self.stream(peer, blocks)
        assert not heard.news  # news comes later, not within the call
        await stream.ended
        begun = [each.rows for each in heard.news if each.end is None]  # they end in any order
        assert [len(rows) for rows in begun] == [4, 4, 2]
        assert sorted(heard.rows(None)) == sorted(heard.rows(DONE)) == list(range(10))
        times_s = [each.at_s for each in heard.news]
        assert times_s == sorted(times_s)
        for number, each in enumerate(heard.news):  # each wave begins before its end
            if each.end is not None:
                assert any(other.rows is each.rows for other in heard.news[:number] if other.end is None)
        assert not len(stream.stop())
        await self.holds(bench, peer, blocks)

    async def test_an_empty_stream_ends(self, bench: Bench) -> None:
        peer = await self.filled(bench)
        stream, heard = self.stream(peer, wave(0, PAGE, PAGE))
        await stream.ended
        assert not heard.news
        peer.close()

    @pytest.mark.parametrize("is_mixed", [False, True], ids=["of one length", "of mixed lengths"])
    async def test_blocks_of_a_stream_move_as_they_become_ready_and_no_others(
        self, bench: Bench, *, is_mixed: bool
    ) -> None:
        lengths = 60_000 - is_mixed * np.arange(12, dtype=np.uint32)
        peer, blocks, states = await self.filled(bench), wave(12, 64 << 10, lengths), np.zeros(12, np.uint8)
        states[3] = GOOD
        stream, heard = self.stream(peer, blocks, states)
        await heard.until(1)
        assert heard.rows(DONE) == [3]
        states[[0, 5, 7]] = GOOD
        states[1] = DAMAGED
        stream.look()
        await heard.until(4)
        assert sorted(heard.rows(DONE)) == [0, 3, 5, 7]
        states[8] = GOOD
        frozen = stream.freeze()
        states[9] = GOOD
        stream.look()
        await stream.ended
        good = [0, 3, 5, 7, 8]
        assert sorted(heard.rows(DONE)) == np.flatnonzero(frozen == GOOD).tolist() == good
        await self.holds(bench, peer, blocks.some(np.array(good)))

    async def test_a_stopped_stream_begins_no_wave_and_ends(self, bench: Bench) -> None:
        peer, blocks, states = await self.filled(bench), wave(12, 64 << 10, 60_000), np.zeros(12, np.uint8)
        stream, heard = self.stream(peer, blocks, states)
        states[:2] = GOOD
        stream.look()
        await heard.until(2)
        assert not len(stream.stop())
        states[:] = GOOD
        stream.look()
        await stream.ended
        assert sorted(heard.rows(None)) == sorted(heard.rows(DONE)) == [0, 1]
        await self.holds(bench, peer, blocks.some(np.array([0, 1])))

    async def test_news_is_told_or_reported_and_never_both(self, bench: Bench) -> None:
        peer, blocks = await self.filled(bench), wave(64, 128 << 10, 128 << 10)
        stream, heard = self.stream(peer, blocks, listens=True)
        await stream.ended
        assert bool(heard.told) == peer.polls, "only a transport with a thread of its own tells"
        heard.news = [*heard.told, *heard.news]
        assert sorted(heard.rows(None)) == sorted(heard.rows(DONE)) == list(range(64))
        assert not stream.take_news()
        await self.holds(bench, peer, blocks)

    async def test_after_a_stop_nothing_is_told_and_news_can_be_taken(self, bench: Bench) -> None:
        peer, blocks = await self.filled(bench), wave(64, 128 << 10, 128 << 10)
        stream, heard = self.stream(peer, blocks, listens=True)
        stream.stop()
        told, reported = len(heard.told), list(heard.news)
        heard.news += stream.take_news()
        await stream.ended
        assert len(heard.told) == told
        assert not reported, "the loop has had no turn"
        heard.news = [*heard.told, *heard.news]
        assert sorted(heard.rows(None)) == sorted(heard.rows(DONE))
        await self.holds(bench, peer, blocks.some(np.array(heard.rows(DONE), np.intp)))

    async def test_a_stop_names_the_blocks_of_waves_under_way(self, bench: Bench) -> None:
        peer, blocks = await self.filled(bench), wave(64, 128 << 10, 128 << 10)
        stream, heard = self.stream(peer, blocks)
        moving = stream.stop().tolist()
        await stream.ended
        begun = heard.rows(None)
        assert sorted(begun) == sorted(heard.rows(DONE))
        assert set(moving) <= set(begun)
        assert len(begun) < 64
        await self.holds(bench, peer, blocks.some(np.array(begun, np.intp)))

    async def test_several_streams_move_at_once(self, bench: Bench) -> None:
        peer, whole = await self.filled(bench), wave(96, 128 << 10, 100_000)
        streams = [self.stream(peer, whole.some(np.arange(at, 96, 4))) for at in range(4)]
        await asyncio.gather(*(stream.ended for stream, _ in streams))
        assert all(sorted(heard.rows(DONE)) == list(range(24)) for _, heard in streams)
        await self.holds(bench, peer, whole)

    async def test_waves_of_a_closed_arena_fail(self, bench: Bench) -> None:
        peer, blocks, states = await self.filled(bench), wave(8, 64 << 10, 60_000), np.zeros(8, np.uint8)
        stream, heard = self.stream(peer, blocks, states)
        states[:2] = GOOD
        stream.look()
        await heard.until(2)
        await self.arrived(bench, peer)  # another connection says nothing about this one
        peer.close()
        states[:] = GOOD
        stream.freeze()
        late, heard_late = self.stream(peer, blocks)
        await asyncio.gather(stream.ended, late.ended)
        assert sorted(heard.rows(DONE)) == [0, 1]
        assert sorted(heard.rows(FAILED)) == list(range(2, 8))
        assert sorted(heard_late.rows(FAILED)) == list(range(8))
        await self.holds(bench, await self.attached(bench, bench.hosts[0]), blocks.some(np.array([0, 1])))

    @pytest.mark.parametrize("side", ["arena", "staging"])
    async def test_a_stream_with_a_block_out_of_range_fails_and_touches_nothing(
        self, bench: Bench, side: str
    ) -> None:
        peer, good = await self.filled(bench), wave(4, PAGE, PAGE)
        offsets = (good.arena if side == "arena" else good.staging).copy()
        offsets[2] = ARENA
        bad = replace(good, arena=offsets) if side == "arena" else replace(good, staging=offsets)
        stream, heard = self.stream(peer, bad)
        await stream.ended
        assert sorted(heard.rows(FAILED)) == list(range(4))
        assert not heard.rows(DONE)
        await self.holds(bench, peer, good.some(np.empty(0, np.intp)))

    async def test_streams_that_wait_hold_up_no_other(self, bench: Bench) -> None:
        peer, blocks = await self.filled(bench), wave(8, 64 << 10, 60_000)
        waiting = [self.stream(peer, blocks, np.zeros(8, np.uint8))[0] for _ in range(20)]
        stream, heard = self.stream(peer, blocks)
        await stream.ended
        assert sorted(heard.rows(DONE)) == list(range(8))
        for each in waiting:
            each.freeze()
        await asyncio.gather(*(each.ended for each in waiting))
        await self.holds(bench, peer, blocks)

    async def test_blocks_are_fetched_in_waves_in_order(self, bench: Bench) -> None:
        lengths = np.array([60_000, 1, 60_000, 4096, 4097, 60_000, 3, 60_000, 60_000, 5], np.uint32)
        peer, blocks = await self.offering(bench), wave(10, 64 << 10, lengths)
        stream, arrived = self.fetch(peer, blocks)
        await stream.ended
        assert sorted(arrived) == [(0, 4), (4, 8), (8, 10)]
        wanted = moved(noise(ARENA, 12), np.zeros(STAGING, np.uint8), blocks, FROM_WORKER)
        assert np.array_equal(bench.memory.array[:STAGING], wanted)
        assert not len(stream.stop())
        peer.close()

    async def test_blocks_lie_in_staging_when_they_have_arrived(self, bench: Bench) -> None:
        peer, blocks = await self.offering(bench), wave(32, 128 << 10, 128 << 10)
        wanted = moved(noise(ARENA, 12), np.zeros(STAGING, np.uint8), blocks, FROM_WORKER)
        is_there: list[bool] = []

        def arrived(first: int, last: int) -> None:
            for at in blocks.staging[first:last].tolist():
                slot = slice(at, at + blocks.staging_slot_bytes)
                is_there.append(np.array_equal(bench.memory.array[slot], wanted[slot]))

        stream = peer.fetch(blocks, per_wave=PER_WAVE, arrived=arrived)
        await stream.ended
        assert is_there == [True] * 32
        peer.close()

    async def test_nothing_to_fetch_ends(self, bench: Bench) -> None:
        peer = await self.offering(bench)
        stream, arrived = self.fetch(peer, wave(0, PAGE, PAGE))
        await stream.ended
        assert not arrived
        peer.close()

    async def test_a_stopped_fetch_begins_no_wave_and_names_the_unsettled(self, bench: Bench) -> None:
        peer, blocks = await self.offering(bench), wave(64, 128 << 10, 128 << 10)
        stream, arrived = self.fetch(peer, blocks)
        unsettled = stream.stop().tolist()
        await stream.ended
        rows = [row for first, last in sorted(arrived) for row in range(first, last)]
        assert rows == list(range(len(rows)))
        assert len(rows) < 64
        assert unsettled == rows[len(rows) - len(unsettled) :]
        wanted = moved(
            noise(ARENA, 12), np.zeros(STAGING, np.uint8), blocks.some(np.arange(len(rows))), FROM_WORKER
        )
        assert np.array_equal(bench.memory.array[:STAGING], wanted)
        peer.close()

    @pytest.mark.parametrize("side", ["arena", "staging"])
    async def test_a_fetch_with_a_block_out_of_range_touches_nothing(self, bench: Bench, side: str) -> None:
        peer, good = await self.offering(bench), wave(4, PAGE, PAGE)
        offsets = (good.arena if side == "arena" else good.staging).copy()
        offsets[2] = ARENA
        bad = replace(good, arena=offsets) if side == "arena" else replace(good, staging=offsets)
        stream, arrived = self.fetch(peer, bad)
        await stream.ended
        assert not arrived
        assert not bench.memory.array[:STAGING].any()
        peer.close()

    async def test_nothing_arrives_from_a_closed_arena(self, bench: Bench) -> None:
        peer = await self.offering(bench)
        peer.close()
        stream, arrived = self.fetch(peer, wave(8, 64 << 10, 60_000))
        await stream.ended
        assert not arrived
        assert not bench.memory.array[:STAGING].any()

    async def test_a_worker_killed_in_mid_stream_harms_no_other(self, bench: Bench) -> None:
        doomed = bench.another_host("doomed-stream")
        peer = await self.attached(bench, doomed)
        stream, heard = self.stream(peer, wave(16, 1 << 20, 1 << 20))
        await asyncio.to_thread(doomed.kill)
        # A wave whose end is never known keeps the stream from ending.
        await asyncio.wait((stream.ended,), timeout=1.0)
        peer.close()
        assert len(stream.stop()) == len(heard.rows(None)) - len(heard.rows(DONE)) - len(heard.rows(FAILED))
        other, blocks = await self.filled(bench), wave(8, 64 << 10, 60_000)
        again, _ = self.stream(other, blocks)
        await again.ended
        await self.holds(bench, other, blocks)
