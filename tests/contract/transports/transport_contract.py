"""What every transport promises, whatever carries the bytes: a class that each adapter's tests inherit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from tests.contract.transports.arena_host import ArenaHost
from tests.contract.transports.stream_contract import StreamContract
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
from tests.support.agent.moving import move

from ostraca_fabric.errors import TransportError
from ostraca_fabric.ports.transport import Direction, RemoteArena
from ostraca_fabric.tables.slots import Wave


class TransportContract(StreamContract):
    """Inherit, say what ``bench`` and ``connect`` are, and be green."""

    @pytest.fixture(scope="class")
    @classmethod
    def bench(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
        raise NotImplementedError

    async def attached(self, bench: Bench, host: ArenaHost) -> RemoteArena:
        return await bench.transport.attach(host.offer, bench.memory.view, await self.connect(host))

    async def check(
        self, bench: Bench, direction: Direction, *waves: Wave, except_staging: bool = False
    ) -> None:
        """Move waves, all under way at once, and compare every byte of both memories afterwards.

        ``except_staging``: another transfer may be writing there.
        """
        host = bench.hosts[0]
        arena, staging = noise(ARENA, 1), noise(STAGING, 2)
        await host.fill(0, arena.tobytes())
        bench.memory.array[:STAGING] = staging
        peer = await self.attached(bench, host)
        ends = await asyncio.gather(*(move(peer, direction, each) for each in waves))
        assert ends == [DONE] * len(waves)
        for each in waves:
            if direction is TO_WORKER:
                arena = moved(staging, arena, each, direction)
            else:
                staging = moved(arena, staging, each, direction)
        assert except_staging or bench.memory.array[:STAGING].tobytes() == staging.tobytes()
        await self.arrived(bench, peer)
        assert await host.peek(0, ARENA) == arena.tobytes()
        peer.close()

    @pytest.mark.parametrize("direction", list(Direction))
    async def test_a_wave_lands_where_asked_and_nowhere_else(
        self, bench: Bench, direction: Direction
    ) -> None:
        await self.check(bench, direction, wave(16, 64 << 10, 64 << 10))

    @pytest.mark.parametrize("direction", list(Direction))
    async def test_blocks_shorter_than_their_slots_leave_the_rest_alone(
        self, bench: Bench, direction: Direction
    ) -> None:
        await self.check(bench, direction, wave(16, 64 << 10, 50_001, arena_slot_bytes=128 << 10))

    @pytest.mark.parametrize("direction", list(Direction))
    async def test_slots_need_not_divide_the_chunk(self, bench: Bench, direction: Direction) -> None:
        await self.check(bench, direction, wave(40, 7 * PAGE, 7 * PAGE - 3, arena_slot_bytes=11 * PAGE))

    @pytest.mark.parametrize("direction", list(Direction))
    async def test_a_wave_may_mix_lengths(self, bench: Bench, direction: Direction) -> None:
        lengths = np.random.default_rng(5).integers(1, 64 << 10, 32, dtype=np.uint32)
        await self.check(bench, direction, wave(32, 64 << 10, lengths))

    @pytest.mark.parametrize("direction", list(Direction))
    async def test_a_wave_may_have_256_blocks(self, bench: Bench, direction: Direction) -> None:
        await self.check(bench, direction, wave(256, 64 << 10, 64 << 10))

    @pytest.mark.parametrize("direction", list(Direction))
    async def test_a_wave_may_have_thousands_of_small_blocks(
        self, bench: Bench, direction: Direction
    ) -> None:
        lengths = np.random.default_rng(6).integers(1, PAGE + 1, 4000, dtype=np.uint32)
        await self.check(bench, direction, wave(4000, PAGE, lengths))

    @pytest.mark.parametrize("direction", list(Direction))
    async def test_several_waves_may_be_under_way(self, bench: Bench, direction: Direction) -> None:
        whole = wave(64, 256 << 10, 200_000)
        parts = [
            replace(whole, staging=whole.staging[i::8], arena=whole.arena[i::8], lengths=whole.lengths[i::8])
            for i in range(8)
        ]
        await self.check(bench, direction, *parts)

    async def test_an_empty_wave_is_done(self, bench: Bench) -> None:
        await self.check(bench, TO_WORKER, wave(0, PAGE, PAGE))

    @pytest.mark.parametrize("direction", list(Direction))
    @pytest.mark.parametrize(
        ("side", "offset"),
        [
            ("arena", ARENA),
            ("arena", -PAGE),
            ("arena", ARENA - PAGE),
            ("arena", (1 << 63) - PAGE),
            ("staging", -(1 << 63)),
            ("staging", STAGING),
        ],
    )
    async def test_a_wave_with_one_block_out_of_range_fails_and_touches_nothing(
        self, bench: Bench, direction: Direction, side: str, offset: int
    ) -> None:
        await self.fails(bench, direction, side, offset, 2 * PAGE)

    @pytest.mark.parametrize("length", [0, 2 * PAGE + 1, (1 << 32) - 1])
    async def test_a_block_that_does_not_fit_its_slot_fails(self, bench: Bench, length: int) -> None:
        await self.fails(bench, TO_WORKER, "arena", 0, length)

    async def fails(self, bench: Bench, direction: Direction, side: str, offset: int, length: int) -> None:
        host = bench.hosts[0]
        arena, staging = noise(ARENA, 3), noise(STAGING, 4)
        await host.fill(0, arena.tobytes())
        bench.memory.array[:STAGING] = staging
        peer = await self.attached(bench, host)
        good = wave(4, 2 * PAGE, 2 * PAGE)
        lengths = good.lengths.copy()
        offsets = good.arena.copy() if side == "arena" else good.staging.copy()
        offsets[2], lengths[2] = offset, length
        bad = (
            replace(good, arena=offsets, lengths=lengths)
            if side == "arena"
            else replace(good, staging=offsets, lengths=lengths)
        )
        assert await move(peer, direction, bad) is FAILED
        assert bench.memory.array[:STAGING].tobytes() == staging.tobytes()
        await self.arrived(bench, peer)
        assert await host.peek(0, ARENA) == arena.tobytes()
        peer.close()

    async def test_two_workers_do_not_see_each_others_bytes(self, bench: Bench) -> None:
        first, second = bench.hosts
        await first.fill(0, bytes(ARENA))
        await second.fill(0, bytes(ARENA))
        bench.memory.array[:STAGING] = noise(STAGING, 6)
        peers = [await self.attached(bench, host) for host in bench.hosts]
        blocks = wave(8, 64 << 10, 64 << 10)
        assert await move(peers[0], TO_WORKER, blocks) is DONE
        for peer in peers:
            await self.arrived(bench, peer)
        assert await second.peek(0, ARENA) == bytes(ARENA)
        assert any(await first.peek(0, ARENA))
        for peer in peers:
            peer.close()

    async def test_a_closed_peer_starts_nothing(self, bench: Bench) -> None:
        peer = await self.attached(bench, bench.hosts[0])
        peer.close()
        peer.close()
        assert await move(peer, TO_WORKER, wave(1, PAGE, PAGE)) is FAILED

    async def test_a_worker_may_attach_again_while_its_old_connection_is_open(self, bench: Bench) -> None:
        old = await self.attached(bench, bench.hosts[0])
        new = await self.attached(bench, bench.hosts[0])
        assert await move(old, FROM_WORKER, wave(2, PAGE, PAGE)) is DONE
        old.close()
        assert await move(new, FROM_WORKER, wave(2, PAGE, PAGE)) is DONE
        new.close()

    @pytest.mark.parametrize(
        "damage",
        [
            {"arena_bytes": -1},
            {"arena_bytes": 1 << 60},
            {"arena_bytes": ARENA + 1},
            {"chunk_bytes": 0},
            {"chunk_bytes": CHUNK - 1},
            {"chunk_bytes": 2 * ARENA},
            {"base": -1},
            {"base": 1 << 64},
            {"transport": "carrier pigeon"},
        ],
    )
    async def test_an_offer_that_makes_no_sense_is_refused(
        self, bench: Bench, damage: dict[str, int | str]
    ) -> None:
        host = bench.hosts[0]
        fields = {name: getattr(host.offer, name) for name in host.offer.__struct_fields__} | damage
        channel = await self.connect(host)
        with pytest.raises(TransportError):
            await bench.transport.attach(type(host.offer)(**fields), bench.memory.view, channel)

    @pytest.mark.parametrize("direction", list(Direction))
    async def test_a_worker_killed_in_mid_transfer_never_yields_a_done_with_wrong_bytes(
        self, bench: Bench, direction: Direction
    ) -> None:
        doomed = bench.another_host(f"doomed-{direction.name}")
        arena = noise(ARENA, 7)
        await doomed.fill(0, arena.tobytes())
        peer = await self.attached(bench, doomed)
        bench.memory.array[:STAGING] = 0
        whole = wave(16, 1 << 20, 1 << 20)
        waves = [
            replace(whole, staging=whole.staging[i::4], arena=whole.arena[i::4], lengths=whole.lengths[i::4])
            for i in range(4)
        ]
        ends = [move(peer, direction, each) for each in waves]
        await asyncio.to_thread(doomed.kill)
        # Some may never be settled: nobody can say then whether their bytes still land.
        await asyncio.wait(ends, timeout=1.0)
        for each, end in zip(waves, ends, strict=True):
            if direction is FROM_WORKER and end.done() and end.result() is DONE:
                for start, target, length in zip(each.arena, each.staging, each.lengths, strict=True):
                    assert bench.memory.view[target : target + length] == arena[start : start + length].data
        peer.close()
        # The agent's process goes on.
        await self.check(bench, TO_WORKER, wave(16, 64 << 10, 64 << 10))

    async def test_idling_costs_next_to_nothing(self, bench: Bench) -> None:
        peer = await self.attached(bench, bench.hosts[0])
        await self.arrived(bench, peer)
        start_s, start_cpu_s = time.monotonic(), time.process_time()
        await asyncio.sleep(1.0)  # what is measured is doing nothing
        assert time.process_time() - start_cpu_s <= 0.05 * (time.monotonic() - start_s)
        peer.close()
