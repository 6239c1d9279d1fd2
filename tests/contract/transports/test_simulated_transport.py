"""The simulated data plane keeps the contract of the real ones; then what befalls it on purpose."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from tests.contract.transports.arena_host import ArenaHost
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
    wave,
)
from tests.contract.transports.transport_contract import TransportContract
from tests.support.agent.moving import move
from tests.support.simulated.simulated_transport import (
    SimulatedArenaEnd,
    SimulatedPlane,
    SimulatedTransport,
    TransferFaults,
)
from tests.support.simulated.virtual_hosts import HostsLoop, VirtualHost

from ostraca_fabric.ports.transport import BulkChannel, RemoteArena
from ostraca_fabric.runtime.memory import HugeMemory

NO_CHANNEL = cast("BulkChannel", None)


class LocalHost:
    """A worker in this process: as much of ``ArenaHost`` as the contract asks for."""

    def __init__(self, plane: SimulatedPlane) -> None:
        self.end = SimulatedArenaEnd(plane, memoryview(bytearray(ARENA)), chunk_bytes=CHUNK)
        self.offer = self.end.offer()

    async def fill(self, offset: int, payload: bytes) -> None:
        self.end.array[offset : offset + len(payload)] = np.frombuffer(payload, np.uint8)

    async def peek(self, offset: int, length: int) -> bytes:
        return self.end.array[offset : offset + length].tobytes()

    def kill(self) -> None:
        self.end.close()


class LocalBench(Bench):
    def __init__(self, plane: SimulatedPlane, memory: HugeMemory) -> None:
        self._plane = plane
        super().__init__(SimulatedTransport(plane), memory, Path())

    def another_host(self, name: str) -> ArenaHost:
        return cast("ArenaHost", LocalHost(self._plane))


class TestSimulated(TransportContract):
    @pytest.fixture(scope="class")
    @classmethod
    def bench(cls) -> Iterator[Bench]:
        memory = HugeMemory(STAGING, prefault=False)
        yield LocalBench(SimulatedPlane(random.Random(1)), memory)
        memory.close()

    async def connect(self, host: ArenaHost) -> BulkChannel:
        return NO_CHANNEL


class Pair:
    """An agent's process and a worker, on virtual time."""

    def __init__(self, faults: TransferFaults, seed: int) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, HostsLoop)
        self.plane = SimulatedPlane(random.Random(seed), faults)
        self.worker = LocalHost(self.plane)
        self.staging = np.full(STAGING, 7, np.uint8)
        self.transport = SimulatedTransport(self.plane)
        self.host = VirtualHost("agent", loop)

    async def attached(self) -> RemoteArena:
        return await self.transport.attach(self.worker.offer, self.staging.data, NO_CHANNEL)

    @property
    def landed(self) -> int:
        return int(np.count_nonzero(self.worker.end.array == 7))


def play(
    scenario: Callable[[Pair], Coroutine[None, None, None]],
    faults: TransferFaults | None = None,
    seed: int = 1,
) -> Pair:
    pairs = []

    async def played() -> None:
        pairs.append(Pair(faults or TransferFaults(), seed))
        await scenario(pairs[0])

    loop = HostsLoop()
    try:
        loop.run_until_complete(played())
    finally:
        loop.close()
    return pairs[0]


WHOLE = 16 * 4 * PAGE


def test_a_wave_that_fails_has_moved_a_part_at_most() -> None:
    async def scenario(pair: Pair) -> None:
        peer = await pair.attached()
        assert await move(peer, TO_WORKER, wave(16, 4 * PAGE, 4 * PAGE)) is FAILED

    landed = {play(scenario, TransferFaults(failures=1.0), seed).landed for seed in range(4)}
    assert len(landed) == 4
    assert max(landed) < WHOLE


def test_a_wave_of_a_paused_process_lands_and_is_told_of_later() -> None:
    async def scenario(pair: Pair) -> None:
        peer = await pair.attached()
        end = pair.host.run(lambda: move(peer, TO_WORKER, wave(16, 4 * PAGE, 4 * PAGE)))
        pair.host.pause(5.0)
        await asyncio.sleep(1.0)
        assert pair.landed == WHOLE
        assert await end is DONE

    play(scenario)


@pytest.mark.parametrize("is_over", [False, True], ids=["lands", "is over"])
def test_what_a_dead_process_had_under_way_lands_late_unless_it_is_over(is_over: bool) -> None:
    async def scenario(pair: Pair) -> None:
        peer = await pair.attached()
        end = move(peer, TO_WORKER, wave(16, 4 * PAGE, 4 * PAGE))
        pair.transport.crash()
        pair.staging[:] = 0  # its memory is not its own any more
        assert pair.landed == 0
        if is_over:
            pair.transport.over()
        await asyncio.sleep(5.0)
        assert not end.done()

    assert play(scenario, TransferFaults(late=1.0, late_s=5.0)).landed == (0 if is_over else WHOLE)


def test_an_arena_that_was_renewed_takes_what_was_under_way_and_nothing_new() -> None:
    async def scenario(pair: Pair) -> None:
        peer = await pair.attached()
        end = move(peer, TO_WORKER, wave(4, PAGE, PAGE))
        pair.worker.end.renew()
        assert await move(peer, TO_WORKER, wave(16, PAGE, PAGE, seed=9)) is FAILED
        assert await end is DONE
        assert pair.landed == 4 * PAGE

    play(scenario)


def test_a_successor_reaches_the_same_arena_after_the_end_before_is_cut_off() -> None:
    async def scenario(pair: Pair) -> None:
        before = await pair.attached()
        second = pair.worker.end.successor()
        pair.worker.offer = second.offer()
        after = await pair.attached()
        assert await move(before, TO_WORKER, wave(4, PAGE, PAGE)) is DONE
        pair.worker.end.cut_off()
        assert await move(before, TO_WORKER, wave(16, PAGE, PAGE, seed=9)) is FAILED
        assert await move(after, TO_WORKER, wave(4, PAGE, PAGE)) is DONE
        assert pair.landed == 4 * PAGE

    play(scenario)


def test_nothing_lands_in_an_arena_that_is_closed() -> None:
    async def scenario(pair: Pair) -> None:
        peer = await pair.attached()
        ends = [move(peer, direction, wave(4, PAGE, PAGE)) for direction in (TO_WORKER, FROM_WORKER)]
        pair.worker.end.close()
        assert await asyncio.gather(*ends) == [FAILED, FAILED]
        assert pair.landed == 0

    play(scenario)


def test_each_block_lands_as_what_its_slot_stood_for_when_it_was_submitted() -> None:
    async def scenario(pair: Pair) -> None:
        told: list[object] = []
        pair.worker.end.on_submitted = lambda at: f"first owner of {at}"
        pair.worker.end.on_landing = lambda at, stood_for: told.append((at, stood_for))
        peer = await pair.attached()
        blocks = wave(2, PAGE, PAGE)
        end = move(peer, TO_WORKER, blocks)
        pair.worker.end.on_submitted = lambda at: f"second owner of {at}"
        await end
        assert set(told) == {(at, f"first owner of {at}") for at in blocks.arena.tolist()}

    play(scenario)
