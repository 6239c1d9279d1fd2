"""The copy_pool: a wave done by several threads is a wave done, and when it ends nobody is at it any more."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.sdk.conftest import BLOCK_BYTES, LAYOUT, SETTINGS, hashes
from tests.sdk.front_ends import FRONT_ENDS
from tests.sdk.memory.stand_in_devices import DeviceArray, StandInDevices
from tests.sdk.scripted_agent import ScriptedAgent

import ostraca
from ostraca import BlockState, PutState, Reason
from ostraca._memory.copy_pool import CopyPool, compute_tags, threads_for, verdicts_in
from ostraca._memory.device_blocks import DeviceBlocks
from ostraca._memory.host_blocks import as_blocks, caller_blocks
from ostraca_fabric.native import BRIEF_BYTES, brief, library
from ostraca_fabric.runtime.process_memory import ProcessBlocks
from ostraca_fabric.tables.digests import CheckState, tags_of

FAR_S = 10.0
UNTOUCHED = 0xEE
SHARE_BYTES = 1000
ALONE = CopyPool(1)


@pytest.fixture(autouse=True)
def _shares_are_small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("ostraca._memory.copy_pool.SHARE_BYTES", SHARE_BYTES)
        yield


@contextmanager
def copy_pool_of(threads: int) -> Iterator[CopyPool]:
    copy_pool = CopyPool(threads)
    try:
        yield copy_pool
    finally:
        copy_pool.close()


def sizes(*lengths: int) -> NDArray[np.uint32]:
    return np.array(lengths, np.uint32)


def helpers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("ostraca-copy")]


# --- how a wave is cut --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cpus", "threads"), [(1, 1), (2, 1), (3, 1), (4, 2), (8, 2), (11, 2), (12, 3), (16, 4), (192, 4)]
)
def test_few_cpus_copy_in_one_thread_and_many_in_a_few(cpus: int, threads: int) -> None:
    assert threads_for(cpus) == threads
    assert threads_for(cpus, are_fetching=True) == max(threads, min(2, cpus))


@given(st.lists(st.integers(1, 5 * SHARE_BYTES), min_size=1, max_size=40), st.integers(1, 4))
def test_shares_are_all_blocks_once_and_each_is_worth_a_thread(lengths: list[int], threads: int) -> None:
    done: list[slice] = []
    with copy_pool_of(threads) as copy_pool:
        copy_pool.share(sizes(*lengths), done.append)
    done.sort(key=lambda share: share.start)
    assert [block for share in done for block in range(share.start, share.stop)] == list(range(len(lengths)))
    assert len(done) <= 2 * threads
    assert len(done) == 1 or all(sum(lengths[share]) > SHARE_BYTES - max(lengths) for share in done)
    if threads > 1 and sum(lengths) >= 2 * (SHARE_BYTES + max(lengths)):
        assert len(done) > 1


def test_a_wave_that_is_small_and_a_copy_pool_of_one_make_no_threads() -> None:
    done: list[slice] = []
    with copy_pool_of(4) as small, copy_pool_of(1) as alone:
        small.share(sizes(SHARE_BYTES, SHARE_BYTES - 1), done.append)
        small.share(sizes(), done.append)
        alone.share(sizes(SHARE_BYTES, SHARE_BYTES), done.append)
        assert not helpers()
    assert done == [slice(0, 2), slice(0, 0), slice(0, 2)]


# --- what comes of it ---------------------------------------------------------------------------------------


class Wave(NamedTuple):
    """Blocks in slots out of order, some of them damaged, and tags of what they should be."""

    memory: NDArray[np.uint8]
    offsets: NDArray[np.int64]
    lengths: NDArray[np.uint32]
    seeds: NDArray[np.uint64]
    tags: NDArray[np.uint8]
    which: NDArray[np.int64]
    is_damaged: NDArray[np.bool_]


def wave_of(lengths: list[int], damaged: set[int], seed: int) -> Wave:
    dice, count = np.random.default_rng(seed), len(lengths)
    offsets = dice.permutation(count).astype(np.int64) * max(lengths)
    memory = dice.integers(0, 255, count * max(lengths), np.uint8)
    seeds = dice.integers(0, 1 << 60, count, np.uint64)
    tags = tags_of(memory, offsets, sizes(*lengths), seeds)
    is_damaged = np.array([block in damaged for block in range(count)])
    tags[is_damaged, -1] ^= 1
    return Wave(memory, offsets, sizes(*lengths), seeds, tags, dice.permutation(count), is_damaged)


def caller_memory(wave: Wave) -> list[NDArray[np.uint8]]:
    """Make memory for the blocks of a wave; the n-th of the wave is block ``which[n]``."""
    lengths = np.empty_like(wave.lengths)
    lengths[wave.which] = wave.lengths
    return [np.full(length, UNTOUCHED, np.uint8) for length in lengths]


def scattered(wave: Wave, copy_pool: CopyPool, until_s: float) -> tuple[list[int], list[bytes]]:
    """Scatter a wave; return verdicts, and the caller's memory in the order of the wave."""
    target = caller_memory(wave)
    blocks = as_blocks(target, argument="into", count=len(target), block_bytes=1 << 20, is_written=True)
    verdicts = blocks.scatter(
        *wave[:2], *wave[3:5], positions=wave.which, until_s=until_s, copy_pool=copy_pool
    )
    return verdicts.tolist(), [target[block].tobytes() for block in wave.which]


@pytest.mark.parametrize(("threads", "blocks", "is_shared"), [(2, 4, True), (2, 1, False), (1, 4, False)])
def test_large_waves_of_caller_memory_are_shared_and_single_blocks_are_not(
    threads: int, blocks: int, *, is_shared: bool
) -> None:
    wave = wave_of([4 * SHARE_BYTES] * blocks, set(), seed=1)
    with copy_pool_of(threads) as copy_pool:
        verdicts, _ = scattered(wave, copy_pool, time.monotonic() + FAR_S)
        assert bool(helpers()) == is_shared
    assert verdicts == [CheckState.GOOD] * blocks


WAVES = st.builds(
    wave_of,
    st.lists(st.integers(1, 2 * SHARE_BYTES), min_size=1, max_size=24),
    st.sets(st.integers(0, 23)),
    st.integers(0, 99),
)


@given(WAVES, st.integers(2, 4))
def test_any_cut_gives_what_one_thread_gives(wave: Wave, threads: int) -> None:
    until_s = time.monotonic() + FAR_S
    content = [wave.memory[at : at + size] for at, size in zip(wave.offsets, wave.lengths, strict=True)]
    wanted = [CheckState.DAMAGED if each else CheckState.GOOD for each in wave.is_damaged]
    with copy_pool_of(threads) as copy_pool:
        verdicts, target = scattered(wave, copy_pool, until_s)
        assert (verdicts, target) == scattered(wave, ALONE, until_s)
        assert verdicts == wanted
        assert target == [
            bytes([UNTOUCHED]) * len(each) if is_damaged else each.tobytes()
            for each, is_damaged in zip(content, wave.is_damaged, strict=True)
        ]
        checks = verdicts_in(*wave[:5], until_s=until_s, copy_pool=copy_pool)
        assert (checks == CheckState.GOOD).tolist() == (~wave.is_damaged).tolist()
        made = compute_tags(*wave[:4], copy_pool=copy_pool)
        assert np.array_equal(made, tags_of(*wave[:4]))
        source = as_blocks(
            content, argument="source", count=len(content), block_bytes=1 << 20, is_written=False
        )
        first, slots = len(content) // 3, np.full_like(wave.memory, UNTOUCHED)
        tags = source.gather(
            slots, wave.offsets[first:], wave.seeds[first:], first=first, copy_pool=copy_pool
        )
    assert np.array_equal(tags, made[first:])
    for at, size in zip(wave.offsets[first:], wave.lengths[first:], strict=True):
        assert np.array_equal(slots[at : at + size], wave.memory[at : at + size])


def in_process(wave: Wave) -> tuple[Wave, ProcessBlocks]:
    """Return a wave with empty slots elsewhere, and its blocks in the memory of a process: this one."""
    addresses = wave.offsets.astype(np.uint64) + np.uint64(wave.memory.ctypes.data)
    emptied = wave._replace(memory=np.full_like(wave.memory, UNTOUCHED), offsets=wave.offsets[::-1].copy())
    return emptied, ProcessBlocks(os.getpid(), addresses)


DEVICES = {"host": None, "device": 0, "device with tags": 1}
"""The least bytes of a block for tags of the device, by kind of caller's memory."""


def handed_over(
    wave: Wave, copy_pool: CopyPool, source: ProcessBlocks, tagged_bytes_min: int | None
) -> tuple[list[int], list[bytes]]:
    """Scatter a wave from a source; return verdicts, and the caller's memory in the order of the wave."""
    target = caller_memory(wave)
    given: list[Any] = target if tagged_bytes_min is None else [DeviceArray(each) for each in target]
    blocks = caller_blocks(
        given,
        StandInDevices(tagged_bytes_min=tagged_bytes_min or 0),
        argument="into",
        count=len(target),
        block_bytes=1 << 20,
        is_written=True,
    )
    verdicts = blocks.scatter(
        *wave[:2],
        *wave[3:5],
        positions=wave.which,
        until_s=time.monotonic() + FAR_S,
        copy_pool=copy_pool,
        source=source,
    )
    assert blocks.wait()
    return verdicts.tolist(), [target[block].tobytes() for block in wave.which]


@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize("threads", [1, 3])
def test_blocks_of_a_process_are_copied_before_they_are_checked(kind: str, threads: int) -> None:
    stored = wave_of([SHARE_BYTES, 1, 3 * SHARE_BYTES, 17] * 4, {2, 5}, seed=3)
    wave, source = in_process(stored)
    with copy_pool_of(threads) as copy_pool:
        verdicts, target = handed_over(wave, copy_pool, source, DEVICES[kind])
    slots = np.full_like(wave.memory, UNTOUCHED)
    for block, (size, is_damaged) in enumerate(zip(wave.lengths, wave.is_damaged, strict=True)):
        content = stored.memory[stored.offsets[block] :][:size]
        slots[wave.offsets[block] :][:size] = content
        assert verdicts[block] == (CheckState.DAMAGED if is_damaged else CheckState.GOOD)
        assert target[block] == (bytes([UNTOUCHED]) * size if is_damaged else content.tobytes())
    assert np.array_equal(wave.memory, slots)
    assert not source.errors


@pytest.mark.parametrize("threads", [1, 3])
def test_large_blocks_of_a_process_pass_a_single_place_for_each_share(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ostraca._memory.host_blocks._LARGE_BYTES", SHARE_BYTES)
    stored = wave_of([17, SHARE_BYTES, 1, 3 * SHARE_BYTES] * 8, {2, 5}, seed=3)
    wave, source = in_process(stored)
    with copy_pool_of(threads) as copy_pool:
        verdicts, target = handed_over(wave, copy_pool, source, tagged_bytes_min=None)
    for block, (size, is_damaged) in enumerate(zip(wave.lengths, wave.is_damaged, strict=True)):
        content = stored.memory[stored.offsets[block] :][:size].tobytes()
        assert verdicts[block] == (CheckState.DAMAGED if is_damaged else CheckState.GOOD)
        assert target[block] == (bytes([UNTOUCHED]) * size if is_damaged else content)
    slots = [wave.memory[at:][:size] for at, size in zip(wave.offsets, wave.lengths, strict=True)]
    touched = [slot for slot in slots if (slot != UNTOUCHED).any()]
    for slot in touched:
        assert len(slot) == 3 * SHARE_BYTES
        slot[:] = UNTOUCHED
    assert (wave.memory == UNTOUCHED).all()
    assert len(touched) in ([1] if threads == 1 else range(2, 2 * threads + 1)), "threads share no place"


@pytest.mark.parametrize("kind", DEVICES)
def test_no_block_after_a_failed_copy_is_handed_over(kind: str) -> None:
    wave, source = in_process(wave_of([100] * 5, {1}, seed=4))
    source.addresses[3] = 8  # no process maps its first page
    verdicts, target = handed_over(wave, ALONE, source, DEVICES[kind])
    assert [verdict == CheckState.GOOD for verdict in verdicts] == [True, False, True, False, False]
    assert [bytes([UNTOUCHED]) * 100 == each for each in target] == [False, True, False, True, True]
    assert source.errors == [errno.EFAULT]


@pytest.mark.parametrize("threads", [1, 3])
def test_blocks_of_a_process_are_checked_in_place_slice_by_slice(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ostraca._memory.copy_pool._HASH_BYTES", 5 * SHARE_BYTES)
    stored = wave_of([SHARE_BYTES, 1, 3 * SHARE_BYTES, 17] * 6, {2, 5, 20}, seed=5)
    wave, source = in_process(stored)
    source.addresses[-1] = 8
    with copy_pool_of(threads) as copy_pool:
        until_s = time.monotonic() + FAR_S
        checks = verdicts_in(*wave[:5], until_s=until_s, copy_pool=copy_pool, source=source)
    good = (checks == CheckState.GOOD).tolist()
    assert good == [*(~wave.is_damaged)[:-1], False]
    assert source.errors == [errno.EFAULT]


@pytest.mark.parametrize("threads", [2, 3, 4])
def test_whenever_time_runs_out_what_nobody_looked_at_is_untouched(threads: int) -> None:
    wave = wave_of([BLOCK_BYTES] * 64, {5, 40}, 1)
    seen_counts = set[int]()
    with copy_pool_of(threads) as copy_pool:
        for microseconds in range(0, 100_000, 20):  # a busy machine takes long to begin
            if microseconds >= 2_000 and seen_counts - {0, 64}:
                break
            verdicts, target = scattered(wave, copy_pool, time.monotonic() + microseconds * 1e-6)
            seen_counts.add(64 - verdicts.count(CheckState.PENDING))
            for verdict, bytes_there, at, is_damaged in zip(
                verdicts, target, wave.offsets, wave.is_damaged, strict=True
            ):
                if verdict == CheckState.GOOD:
                    assert not is_damaged
                    assert bytes_there == wave.memory[at : at + BLOCK_BYTES].tobytes()
                else:
                    assert is_damaged or verdict == CheckState.PENDING
                    assert bytes_there == bytes([UNTOUCHED]) * BLOCK_BYTES
    assert 0 in seen_counts
    assert seen_counts - {0, 64}, "time ran out in the midst of a wave now and then"


def test_copies_to_devices_are_all_begun_by_the_thread_that_has_the_wave() -> None:
    wave, devices, beginners = wave_of([BLOCK_BYTES] * 16, {3}, 2), StandInDevices(), set()
    target = DeviceArray(np.full((16, BLOCK_BYTES), UNTOUCHED, np.uint8))
    blocks = caller_blocks(
        target, devices, argument="into", count=16, block_bytes=BLOCK_BYTES, is_written=True
    )
    assert isinstance(blocks, DeviceBlocks)
    begin = blocks._copies.to_device  # where copies of devices begin

    def noted(*arguments: Any) -> None:
        beginners.add(threading.current_thread())
        begin(*arguments)

    blocks._copies = SimpleNamespace(to_device=noted, wait=blocks._copies.wait)
    with copy_pool_of(4) as copy_pool:
        verdicts = blocks.scatter(
            *wave[:2], *wave[3:5], positions=wave.which, until_s=time.monotonic() + FAR_S, copy_pool=copy_pool
        )
        assert helpers(), "the hashing was shared"
    assert blocks.wait()
    assert verdicts.tolist() == [CheckState.DAMAGED if block == 3 else CheckState.GOOD for block in range(16)]
    assert beginners == {threading.current_thread()}
    for at, block, is_damaged in zip(wave.offsets, wave.which, wave.is_damaged, strict=True):
        expected = UNTOUCHED if is_damaged else wave.memory[at : at + BLOCK_BYTES]
        assert (target.read[block] == expected).all()


# --- how it ends --------------------------------------------------------------------------------------------


class Held:
    """Work that every helper is held up in, and that its owner begins when one is."""

    def __init__(self, then: Callable[[], None], *, helper: Callable[[], None] = lambda: None) -> None:
        self.may_end = threading.Event()
        self.ended = 0
        self._then = then
        self._helper = helper
        self._is_held = threading.Event()
        self._owner = threading.current_thread()

    def __call__(self, _: slice) -> None:
        if threading.current_thread() is self._owner:
            assert self._is_held.wait(FAR_S)
            self._then()
        else:
            self._is_held.set()
            assert self.may_end.wait(FAR_S)
            self.ended += 1
            self._helper()


def raising(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def test_what_the_owners_share_raises_is_raised_when_the_helper_has_ended() -> None:
    work = Held(raising(ValueError("mine")))
    letting_go = threading.Timer(0.05, work.may_end.set)
    letting_go.start()
    with copy_pool_of(2) as copy_pool:
        with pytest.raises(ValueError, match="mine"):
            copy_pool.share(sizes(*[SHARE_BYTES] * 8), work)
        assert work.ended == 1, "and no share was begun any more"
    letting_go.join()


def test_what_a_helpers_share_raises_is_raised_by_the_owner_and_the_rest_is_left() -> None:
    done: list[slice] = []
    failed = threading.Event()

    def work(share: slice) -> None:
        if threading.current_thread() is owner:
            done.append(share)
            assert failed.wait(FAR_S)
        else:
            failed.set()
            raise MemoryError("theirs")

    owner = threading.current_thread()
    with copy_pool_of(2) as copy_pool:
        for _ in range(20):
            done.clear()
            failed.clear()
            with pytest.raises(MemoryError, match="theirs"):
                copy_pool.share(sizes(*[SHARE_BYTES] * 8), work)
            assert len(done) <= 2, "its own, and one it may have taken before it heard"
        failed.set()
        copy_pool.share(sizes(SHARE_BYTES), done.append)


def test_a_wave_does_not_wait_for_helpers_that_are_busy_with_another() -> None:
    other = Held(lambda: None)
    done: list[slice] = []
    with copy_pool_of(2) as copy_pool:

        def own_the_other() -> None:
            other._owner = threading.current_thread()
            copy_pool.share(sizes(*[SHARE_BYTES] * 4), other)

        thread = threading.Thread(target=own_the_other)
        thread.start()
        assert other._is_held.wait(FAR_S)
        copy_pool.share(sizes(*[SHARE_BYTES] * 4), done.append)
        assert done == [slice(block, block + 1) for block in range(4)]
        other.may_end.set()
        thread.join()


def test_waves_of_many_threads_at_once_are_all_done() -> None:
    with copy_pool_of(3) as copy_pool:
        found: list[list[int]] = []

        def many() -> None:
            for blocks in range(200):
                done = np.zeros(blocks % 17, np.int64)

                def work(share: slice, done: NDArray[np.int64] = done) -> None:
                    done[share] += 1

                copy_pool.share(sizes(*[SHARE_BYTES] * len(done)), work)
                found.append(done.tolist())

        threads = [threading.Thread(target=many) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == 800
    assert all(set(done) <= {1} for done in found)


def test_after_closing_no_thread_is_left_and_waves_are_done_alone() -> None:
    with copy_pool_of(3) as copy_pool:
        copy_pool.share(sizes(*[SHARE_BYTES] * 4), lambda _: None)
        assert len(helpers()) == 2
    assert not helpers()
    done: list[slice] = []
    copy_pool.share(sizes(*[SHARE_BYTES] * 4), done.append)
    assert done == [slice(block, block + 1) for block in range(4)]
    assert not helpers()


@pytest.mark.parametrize("started", [0, 1])
def test_where_no_more_threads_can_be_had_a_wave_is_done_by_those_there_are(
    monkeypatch: pytest.MonkeyPatch, started: int
) -> None:
    start = threading.Thread.start
    begun: list[threading.Thread] = []
    done: list[slice] = []

    def start_a_few(thread: threading.Thread) -> None:
        if len(begun) == started:
            raise RuntimeError("can't start new thread")
        begun.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_a_few)
    with copy_pool_of(4) as copy_pool:
        copy_pool.share(sizes(*[SHARE_BYTES] * 4), done.append)
        assert sorted(share.start for share in done) == [0, 1, 2, 3]
        assert len(helpers()) == started
    assert not helpers()


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_of_a_wave_is_kept_when_it_has_ended(fails: bool) -> None:
    class Memory:
        """Something of the caller's."""

    def shared(copy_pool: CopyPool) -> weakref.ref[Memory]:
        memory = Memory()

        def use() -> None:
            assert memory is not None

        def use_and_fail() -> None:
            use()
            raise ValueError("theirs")

        work = Held(use, helper=use_and_fail if fails else use)
        work.may_end.set()
        with contextlib.suppress(ValueError):
            copy_pool.share(sizes(*[SHARE_BYTES] * 4), work)
        return weakref.ref(memory)

    gc.disable()  # a cycle would keep the memory until some later time
    try:
        with copy_pool_of(2) as copy_pool:
            gone, until_s = shared(copy_pool), time.monotonic() + FAR_S
            while gone() is not None:  # the helper lets go a moment after it was waited for
                assert time.monotonic() < until_s
                time.sleep(0.001)
    finally:
        gc.enable()


# --- as part of a client ------------------------------------------------------------------------------------


@pytest.mark.parametrize("front_end", sorted(FRONT_ENDS))
@pytest.mark.parametrize("threads", [2, 3, 4])
def test_batches_in_all_front_ends_are_done_by_several_threads(
    agent: ScriptedAgent, front_end: str, threads: int
) -> None:
    with ostraca.connect(agent.address, settings=replace(SETTINGS, copy_threads=threads)) as client:
        opened = client.volume("kv", LAYOUT, block_bytes=BLOCK_BYTES, create=True)
        with FRONT_ENDS[front_end](client, opened) as volume:
            chain, leased = volume.chain(hashes(96)), volume.chain(hashes(16, "leased"))
            content = np.random.default_rng(0).integers(0, 255, (96, BLOCK_BYTES), np.uint8)
            put = volume.put(chain, source=content, deadline_s=FAR_S)
            assert set(put.states) == {PutState.COMMITTED}
            lease = volume.slots(16, lengths=BLOCK_BYTES)
            for view, row in zip(lease, content, strict=False):
                view[:] = row.data
            assert volume.put_slots(leased, lease, deadline_s=FAR_S).accepted == 16
            damaged = next(each for each, (_, kept) in agent.blocks.items() if kept == content[33].tobytes())
            tag, payload = agent.blocks[damaged]
            agent.blocks[damaged] = tag, payload[:-1] + bytes([payload[-1] ^ 1])
            into = np.full_like(content, UNTOUCHED)
            got = volume.get(chain, into=into, deadline_s=FAR_S)
            expected = content.copy()
            expected[33] = UNTOUCHED
            assert [block for block, state in enumerate(got.states) if state != BlockState.HIT] == [33]
            assert got.reasons[33] == Reason.DAMAGED
            assert np.array_equal(into, expected)
            with volume.get_views(leased, lengths=BLOCK_BYTES, deadline_s=FAR_S) as views:
                assert [bytes(view) for view in views] == [row.tobytes() for row in content[:16]]
            assert len(helpers()) == threads - 1
    assert not helpers()


def test_only_brief_work_of_one_thread_keeps_the_gil() -> None:
    """Shares of one wave that keep the GIL would run one after another."""
    alone, shared = CopyPool(1), CopyPool(2)
    assert alone.calls_for(sizes(BRIEF_BYTES - 1, 1)) is brief
    assert alone.calls_for(sizes(BRIEF_BYTES, 1)) is library
    assert shared.calls_for(sizes(SHARE_BYTES, SHARE_BYTES - 1)) is brief
    assert shared.calls_for(sizes(SHARE_BYTES, SHARE_BYTES)) is library
