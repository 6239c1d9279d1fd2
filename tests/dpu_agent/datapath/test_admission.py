"""What a load is expected to take.

It follows what was measured, and never errs on the side of declining without having seen why.
"""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.dpu_agent.datapath.test_space import VOLUME
from tests.support.agent.assembly import (
    DRIVE,
    Assembly,
    HeldDrive,
    MemoryWorker,
    assembled,
    chain_of,
    get_states,
    with_cache,
)
from tests.support.stalls import Stopwatch

from ostraca_dpu_agent.datapath.admission import (
    GetAdmission,
    LatencyEstimator,
    LoadQueue,
)
from ostraca_dpu_agent.datapath.requests.blocks import RequestBlocks
from ostraca_dpu_agent.settings import MIB
from ostraca_fabric.model.extent import Pieces
from ostraca_fabric.model.ids import DriveId
from ostraca_fabric.model.outcome import BlockState, Reason
from ostraca_fabric.tables.digests import TagCheck, derive_keys
from ostraca_fabric.telemetry.status import EstimateCounters
from ostraca_fabric.wire.messages import GetDone

DRIVES = tuple(DriveId(f"e/{number}") for number in range(3))
SIZES = st.integers(0, 1 << 34)
TIMES = st.floats(0, 10, allow_subnormal=False)


def measured(queue: LoadQueue, now_s: float, took_s: float, load_bytes: int) -> float:
    """Have one load end on an idle queue; return when."""
    queue.begin(now_s, load_bytes)
    queue.end(now_s + took_s, load_bytes)
    return now_s + took_s


class Worker:
    """Somebody with a queue of its own."""


@st.composite
def estimators(draw: st.DrawFn) -> tuple[LatencyEstimator, LoadQueue, float]:
    """Draw an estimator with any past, the queue to a worker, and the time."""
    estimator, worker = LatencyEstimator(4 * MIB), Worker()
    to_worker = estimator.worker_queue(worker)
    estimator.kept = worker  # type: ignore[attr-defined]  # a queue lasts as long as its worker
    queues = [to_worker, *(estimator.drives[drive] for drive in DRIVES)]
    now_s = draw(TIMES)
    for queue in queues:
        for load_bytes, gap_s, took_s in draw(st.lists(st.tuples(SIZES, TIMES, TIMES), max_size=6)):
            now_s = measured(queue, now_s + gap_s, took_s, load_bytes)
        queue.waiting_bytes = draw(SIZES)
        if draw(st.booleans()):
            queue.begin(now_s, draw(SIZES))
    return estimator, to_worker, now_s + draw(TIMES)


Load = tuple[dict[DriveId, int], int]
LOADS = st.tuples(st.dictionaries(st.sampled_from(DRIVES), SIZES), SIZES)


# --- one queue ----------------------------------------------------------------------------------------------


def test_nothing_is_known_to_be_slow_before_it_was_measured() -> None:
    estimator, worker = LatencyEstimator(4 * MIB), Worker()
    assert estimator.estimate_s(0.0, {DRIVES[0]: 1 << 40}, 1 << 40, estimator.worker_queue(worker)) == 0


def test_a_steady_speed_is_found_and_what_is_queued_waits_for_it() -> None:
    queue, now_s = LoadQueue(), 0.0
    queue.begin(now_s, 4 * MIB)
    for _ in range(64):  # one begins when one ends, at 1 MiB a millisecond
        queue.begin(now_s, 4 * MIB)
        now_s += 0.004
        queue.end(now_s, 4 * MIB)
    assert queue.serve_s(now_s, 256 * MIB) == pytest.approx(0.256, rel=0.1)
    assert queue.wait_s(now_s) == pytest.approx(0.004, rel=0.2), "one is in progress"
    queue.waiting_bytes = 1024 * MIB
    assert queue.wait_s(now_s) == pytest.approx(1.028, rel=0.1)


def test_small_loads_say_that_beginning_takes_time_and_not_that_bytes_do() -> None:
    queue, now_s = LoadQueue(), 0.0
    for _ in range(64):
        now_s = measured(queue, now_s + 0.01, 0.001, 64 << 10)
    assert queue.wait_s(now_s) == pytest.approx(0.001, rel=0.2)
    assert queue.serve_s(now_s, 1 << 30) < 0.1, "16 s at their speed"


def test_both_are_told_apart_when_sizes_differ() -> None:
    queue, now_s = LoadQueue(), 0.0
    for size_mib in [1, 8, 32] * 20:
        now_s = measured(queue, now_s, 0.010 + 0.001 * size_mib, size_mib * MIB)
    assert queue.wait_s(now_s) == pytest.approx(0.010, rel=0.1)
    assert queue.serve_s(now_s, 100 * MIB) == pytest.approx(0.100, rel=0.1)


def test_idle_time_is_no_slowness() -> None:
    queue, now_s = LoadQueue(), 0.0
    for _ in range(20):
        now_s = measured(queue, now_s + 100.0, 0.1, 32 * MIB)
    assert queue.wait_s(now_s) + queue.serve_s(now_s, 32 * MIB) == pytest.approx(0.1, rel=0.1)


def test_the_past_fades_with_new_measurements_and_without() -> None:
    queue, now_s = LoadQueue(), 0.0
    for took_s in [1.0] * 20 + [0.01] * 320:
        now_s = measured(queue, now_s, took_s, 4 * MIB)
    assert queue.serve_s(now_s, 4 * MIB) < 0.03
    before_s = queue.serve_s(now_s, 1 << 30)
    assert queue.serve_s(now_s + 5.0, 1 << 30) == pytest.approx(before_s / 2)
    assert queue.serve_s(now_s + 100.0, 1 << 30) < before_s / 1000


def test_a_line_that_has_been_silent_is_expected_to_be_so_for_as_long_again() -> None:
    queue = LoadQueue()
    queue.begin(10.0, MIB)
    assert queue.wait_s(10.5) == pytest.approx(0.5)
    queue.abandon(MIB)
    assert queue.wait_s(20.0) == 0
    assert queue.active_bytes == 0


def test_what_was_abandoned_counts_for_no_measurement() -> None:
    queue = LoadQueue()
    queue.begin(0.0, MIB)
    queue.abandon(MIB)
    now_s = measured(queue, 100.0, 0.001, MIB)
    assert queue.wait_s(now_s) + queue.serve_s(now_s, MIB) < 0.0011


# --- all queues together ------------------------------------------------------------------------------------


@given(estimators(), LOADS, st.integers(0, 3), SIZES)
def test_more_that_is_queued_never_makes_the_estimate_smaller(
    known: tuple[LatencyEstimator, LoadQueue, float], load: Load, which: int, more: int
) -> None:
    estimator, to_worker, now_s = known
    before_s = estimator.estimate_s(now_s, *load, to_worker)
    queue = [to_worker, *(estimator.drives[drive] for drive in DRIVES)][which]
    queue.waiting_bytes += more
    assert estimator.estimate_s(now_s, *load, to_worker) >= before_s >= 0


@given(estimators(), LOADS, st.sampled_from(DRIVES), SIZES)
def test_more_to_load_never_makes_the_estimate_smaller(
    known: tuple[LatencyEstimator, LoadQueue, float], load: Load, drive: DriveId, more: int
) -> None:
    estimator, to_worker, now_s = known
    larger = {**load[0], drive: load[0].get(drive, 0) + more}, load[1] + more
    before_s = estimator.estimate_s(now_s, *load, to_worker)
    assert estimator.estimate_s(now_s, *larger, to_worker) >= before_s * (1 - 1e-9)


@given(estimators(), LOADS)
def test_blocks_of_the_cache_cost_no_drive_time(
    known: tuple[LatencyEstimator, LoadQueue, float], load: Load
) -> None:
    estimator, to_worker, now_s = known
    from_cache: Load = {}, load[1]
    assert estimator.estimate_s(now_s, *from_cache, to_worker) <= estimator.estimate_s(
        now_s, *load, to_worker
    )
    for drive in DRIVES:
        estimator.drives[drive].waiting_bytes += 1 << 40
    assert estimator.estimate_s(now_s, *from_cache, to_worker) == estimator.estimate_s(
        now_s, {}, load[1], to_worker
    )


@given(estimators(), LOADS, SIZES)
def test_what_a_request_has_queued_itself_is_not_waited_for(
    known: tuple[LatencyEstimator, LoadQueue, float], load: Load, own_bytes: int
) -> None:
    estimator, to_worker, now_s = known
    before_s = estimator.estimate_s(now_s, *load, to_worker)
    assert 0 <= estimator.estimate_s(now_s, *load, to_worker, own_bytes=own_bytes) <= before_s


@given(st.lists(st.tuples(st.integers(1, 1 << 28), TIMES, TIMES), max_size=20), st.floats(0.1, 10), SIZES)
def test_times_that_were_longer_by_a_factor_are_expected_to_be_so_again(
    ended: list[tuple[int, float, float]], factor: float, load_bytes: int
) -> None:
    expected_s = []
    for times in (1.0, factor):
        queue = LoadQueue()
        for load_bytes_, gap_s, took_s in ended:
            measured(queue, gap_s, took_s * times, load_bytes_)
        queue._ended_s = 0.0
        expected_s.append(queue.wait_s(0.0) + queue.serve_s(0.0, load_bytes))
    assert expected_s[1] == pytest.approx(expected_s[0] * factor, rel=1e-6, abs=1e-9)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2), SIZES), max_size=30))
def test_a_booking_that_is_closed_leaves_nothing_behind(steps: list[tuple[bool, int, int]]) -> None:
    worker = Worker()
    admission = GetAdmission(LatencyEstimator(4 * MIB), lambda: 0.0, worker, 1, len, recompute_s=0.0)
    queues = [LoadQueue() for _ in range(3)]
    for is_added, which, size in steps:
        admission._book(queues[which], size if is_added else -size)
        assert queues[which].waiting_bytes == admission._booked[queues[which]] >= 0
    admission.close()
    for is_added, which, size in steps:  # of lanes that hear of the end later
        admission._book(queues[which], size if is_added else -size)
    assert [queue.waiting_bytes for queue in queues] == [0, 0, 0]


# --- in an agent --------------------------------------------------------------------------------------------

PER_BLOCK_S = 0.04


class SlowDrive(HeldDrive):
    """Reads one batch after the other, and takes its time for each block."""

    def __init__(self, segments: int) -> None:
        super().__init__(segments)
        self.block_s = 0.0
        self._free_at_s = 0.0

    def submit_read(self, pieces: Pieces, check: TagCheck | None = None) -> asyncio.Future[NDArray[np.bool_]]:
        loop = asyncio.get_running_loop()
        read, slow = super().submit_read(pieces, check), loop.create_future()
        self._free_at_s = max(self._free_at_s, loop.time()) + self.block_s * len(pieces)
        loop.call_at(
            self._free_at_s, lambda: read.add_done_callback(lambda _: slow.set_result(read.result()))
        )
        return slow


async def load(
    fabric: Assembly, worker: MemoryWorker, numbers: range, *, recompute_s: float
) -> tuple[GetDone, Stopwatch]:
    """Get blocks; return a watch that runs since it began, too."""
    request = msgspec.structs.replace(fabric.get_message(numbers), recompute_s=recompute_s)
    watch = Stopwatch()
    done = await fabric.data_path.get(worker, fabric.volume, request)
    return done, watch


def is_all(done: GetDone, state: BlockState, reason: Reason = Reason.NONE) -> bool:
    return set(get_states(done)) == {state} and set(done.reasons) == {reason}


@pytest.mark.parametrize("sizes", [[2, 2, 2], [1, 2, 3]])
def test_moves_count_the_bytes_of_their_blocks(sizes: list[int]) -> None:
    estimator, worker = LatencyEstimator(4 * MIB), Worker()
    lengths = np.array(sizes, np.uint32) * np.uint32(MIB)
    blocks = RequestBlocks.of(VOLUME, chain_of(range(len(sizes))), lengths.tobytes())
    assert (blocks.shortest_bytes, blocks.longest_bytes) == (min(sizes) * MIB, max(sizes) * MIB)
    admission = GetAdmission(estimator, lambda: 0.0, worker, len(blocks), blocks.total_bytes, recompute_s=0.0)
    admission.start_move(0.0, np.array([0, 2]))
    assert estimator.worker_queue(worker).active_bytes == (sizes[0] + sizes[2]) * MIB
    admission.end_move(1.0, np.array([2]))
    assert estimator.worker_queue(worker).active_bytes == sizes[0] * MIB


async def test_a_load_that_would_lose_is_declined_at_once_and_one_that_wins_is_not() -> None:
    async with assembled(drive=SlowDrive(6)) as fabric:
        drive, worker = fabric.drive, fabric.worker()
        assert isinstance(drive, SlowDrive)
        await fabric.put(worker, range(16))
        drive.block_s = PER_BLOCK_S
        takes_s = 16 * PER_BLOCK_S
        done, watch = await load(fabric, worker, range(16), recompute_s=takes_s / 4)
        assert is_all(done, BlockState.HIT), "nothing is known yet"
        assert watch.passed_s > takes_s * 0.9
        lease = fabric.context.staging.lease
        fabric.context.staging.lease = None  # type: ignore[assignment,method-assign]  # declined before any lease
        done, watch = await load(fabric, worker, range(16), recompute_s=takes_s / 4)
        assert is_all(done, BlockState.DECLINED, Reason.TOO_SLOW)
        assert watch.took_s < takes_s / 2
        fabric.context.staging.lease = lease  # type: ignore[method-assign]
        done, _ = await load(fabric, worker, range(16), recompute_s=takes_s * 4)
        assert is_all(done, BlockState.HIT)
        estimates = fabric.agent.status().counters.estimates
        assert estimates.loads == 2
        assert estimates.estimated_s > takes_s * 0.7, "of the second one: the first was unknown"
        assert estimates.took_s > 2 * takes_s * 0.9
        assert estimates.error_s >= abs(estimates.took_s - estimates.estimated_s) > takes_s / 2
        await fabric.at_rest()


async def test_a_load_is_declined_for_what_is_queued_before_it() -> None:
    async with assembled(drive=SlowDrive(6)) as fabric:
        drive, workers = fabric.drive, [fabric.worker() for _ in range(3)]
        assert isinstance(drive, SlowDrive)
        await fabric.put(workers[0], range(24))
        drive.block_s = PER_BLOCK_S
        await load(fabric, workers[0], range(16), recompute_s=0.0)
        before = asyncio.create_task(load(fabric, workers[0], range(16), recompute_s=0.0))
        await asyncio.sleep(0)
        own_s = 4 * PER_BLOCK_S
        queued, _ = await load(fabric, workers[1], range(20, 24), recompute_s=3 * own_s)
        assert is_all(queued, BlockState.DECLINED, Reason.TOO_SLOW)
        done, _ = await before
        assert is_all(done, BlockState.HIT)
        alone, _ = await load(fabric, workers[2], range(20, 24), recompute_s=3 * own_s)
        assert is_all(alone, BlockState.HIT)
        queues = fabric.context.estimator.drives.values()
        assert [(queue.waiting_bytes, queue.active_bytes) for queue in queues] == [(0, 0)]
        await fabric.at_rest()


async def test_blocks_of_the_dram_cache_are_brought_while_those_on_a_slow_drive_are_declined() -> None:
    async with assembled(with_cache(4 * 61440), drive=SlowDrive(6)) as fabric:
        drive, worker = fabric.drive, fabric.worker()
        assert isinstance(drive, SlowDrive)
        await fabric.put(worker, range(16))
        drive.block_s = PER_BLOCK_S
        await load(fabric, worker, range(16), recompute_s=0.0)
        is_cached = fabric.context.staging.cache.contains(
            derive_keys(fabric.volume.secret, chain_of(range(16)))
        )
        assert np.count_nonzero(is_cached) == 4
        mixed, watch = await load(fabric, worker, range(16), recompute_s=4 * PER_BLOCK_S)
        assert get_states(mixed) == [BlockState.HIT if here else BlockState.DECLINED for here in is_cached]
        assert watch.took_s < 6 * PER_BLOCK_S, "half of what loading the others takes"
        await fabric.at_rest()


async def test_a_worker_that_takes_nothing_makes_only_its_own_loads_look_slow() -> None:
    async with assembled() as fabric:
        stuck, other = fabric.worker(), fabric.worker()
        await fabric.put(other, range(8))
        stuck.arena.is_held = True
        late = asyncio.create_task(fabric.get(stuck, range(8), deadline_s=0.6))
        await asyncio.sleep(0.2)  # it is silence that is measured
        for worker, state in ((stuck, BlockState.DECLINED), (other, BlockState.HIT)):
            done, _ = await load(fabric, worker, range(4), recompute_s=0.15)
            assert is_all(done, state, Reason.TOO_SLOW if state is BlockState.DECLINED else Reason.NONE)
        assert set(get_states(await late)) == {BlockState.LATE}
        stuck.arena.let_go()
        done, _ = await load(fabric, stuck, range(4), recompute_s=0.15)
        assert is_all(done, BlockState.HIT)
        assert fabric.context.estimator.worker_queue(stuck).active_bytes == 0
        assert DRIVE in fabric.context.estimator.drives
        await fabric.at_rest()


async def test_callers_that_do_not_say_how_long_recomputing_takes_are_never_declined() -> None:
    async with assembled(drive=SlowDrive(6)) as fabric:
        drive, worker = fabric.drive, fabric.worker()
        assert isinstance(drive, SlowDrive)
        await fabric.put(worker, range(4))
        drive.block_s = PER_BLOCK_S
        for recompute_s in (0.0, -1.0, float("nan"), float("inf")):
            done, _ = await load(fabric, worker, range(4), recompute_s=recompute_s)
            assert is_all(done, BlockState.HIT)
        assert fabric.agent.status().counters.estimates.loads == 1, "of the endless one"
        assert isinstance(fabric.agent.status().counters.estimates, EstimateCounters)
