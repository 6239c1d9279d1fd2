"""Invariant 5: the first completed put of a block wins, and later ones cost no flash write."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.support.fabric.fabric_host import (
    BLOCK_BYTES,
    SMALL,
    FabricThread,
    content,
    empty,
    hashes,
    volume_of,
)

from ostraca import Ack, BlockState, PutState, Reason, Volume
from ostraca._connection.session import AgentSession
from ostraca._operations.put import PutFromJob
from ostraca_cli.testing import small_plan
from ostraca_fabric.drives.file_drive import FileDrive
from ostraca_fabric.wire.messages import Fetch

BLOCKS = 8


@pytest.fixture
def host(tmp_path: Path) -> Iterator[FabricThread]:
    with FabricThread(small_plan(tmp_path / "fabric")) as started:
        yield started


def blocks_on_flash(host: FabricThread) -> int:
    return sum(shard.blocks for agent in host.status() for shard in agent.shards)


def committed(host: FabricThread) -> int:
    return sum(agent.counters.put_committed for agent in host.status())


def test_a_second_put_of_a_block_is_exists_and_writes_nothing(host: FabricThread) -> None:
    with host.connect() as client:
        volume = volume_of(client)
        chain = volume.chain(hashes(BLOCKS))
        volume.put(chain, source=content(BLOCKS), deadline_s=10, ack=Ack.COMMITTED)
        again = volume.put(chain, source=content(BLOCKS, seed=9), deadline_s=10, ack=Ack.COMMITTED)
        assert set(again.states) == {PutState.EXISTS}
        into = empty(BLOCKS)
        assert volume.get(chain, into=into, deadline_s=10).hits == BLOCKS
        assert np.array_equal(into, content(BLOCKS)), "the first put's bytes"
    assert committed(host) == BLOCKS


def test_the_agent_fetches_a_window_of_a_put_while_the_next_is_gathered(
    host: FabricThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_fetched, fetched_early = threading.Event(), list[bool]()
    answer, fill = AgentSession._answer, PutFromJob._tags

    def answering(session: AgentSession, fetch: Fetch) -> None:
        answer(session, fetch)
        is_fetched.set()

    def filling(job: PutFromJob, at: NDArray[np.intp], *columns: Any) -> Any:
        if at[0]:
            fetched_early.append(is_fetched.wait(10))
        return fill(job, at, *columns)

    monkeypatch.setattr(AgentSession, "_answer", answering)
    monkeypatch.setattr(PutFromJob, "_tags", filling)
    monkeypatch.setattr("ostraca._connection.io_loop._LED_S", 60.0)
    with host.connect(replace(SMALL, put_window_bytes=BLOCKS // 2 * BLOCK_BYTES)) as client:
        volume = volume_of(client)
        chain = volume.chain(hashes(BLOCKS))
        put = volume.put(chain, source=content(BLOCKS), deadline_s=40, ack=Ack.COMMITTED)
    assert set(put.states) == {PutState.COMMITTED}
    assert fetched_early == [True]


@pytest.mark.parametrize("flushes", [True, False])
def test_drives_are_flushed_before_a_block_is_committed_where_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, flushes: bool
) -> None:
    flushed: list[asyncio.Future[bool]] = []
    flush = FileDrive.submit_flush

    def watched(drive: FileDrive) -> asyncio.Future[bool]:
        flushed.append(flush(drive))
        return flushed[-1]

    monkeypatch.setattr(FileDrive, "submit_flush", watched)
    with FabricThread(replace(small_plan(tmp_path / "fabric"), flushes=flushes)) as host:
        with host.connect() as client:
            volume, before = volume_of(client), len(flushed)
            chain = volume.chain(hashes(1))
            put = volume.put(chain, source=content(1), deadline_s=10, ack=Ack.COMMITTED)
            assert put.states == (PutState.COMMITTED,)
        assert (len(flushed) - before >= 2) == flushes, "the block, then the summary that lists it"


def test_the_same_block_twice_in_one_put_is_stored_once(host: FabricThread) -> None:
    with host.connect() as client:
        volume = volume_of(client)
        twice = [hashes(1)[0]] * 2
        result = volume.put(
            volume.chain(twice, is_chained=False), source=content(2), deadline_s=10, ack=Ack.COMMITTED
        )
        assert result.states[0] == PutState.COMMITTED
        assert (result.states[1], result.reasons[1]) == (PutState.DECLINED, Reason.IN_FLIGHT)
    assert blocks_on_flash(host) == 1


def put_together(
    volumes: Sequence[Volume], sources: Sequence[NDArray[np.uint8]], turn: int
) -> list[tuple[PutState, ...]]:
    """Put the same chain from several clients at the same time; return what each was told."""
    start = threading.Barrier(len(volumes))

    def put(who: int) -> tuple[PutState, ...]:
        chain = volumes[who].chain(hashes(BLOCKS, turn))
        start.wait(10)
        return volumes[who].put(chain, source=sources[who], deadline_s=10, ack=Ack.COMMITTED).states

    with ThreadPoolExecutor(len(volumes)) as threads:
        return list(threads.map(put, range(len(volumes))))


def test_of_two_concurrent_puts_of_one_block_one_wins_whole(host: FabricThread) -> None:
    with host.connect() as one, host.connect() as other:
        volumes = [volume_of(one), volume_of(other)]
        for turn in range(10):
            sources = [content(BLOCKS, seed=2 * turn), content(BLOCKS, seed=2 * turn + 1)]
            results = put_together(volumes, sources, turn)
            into = empty(BLOCKS)
            got = volumes[0].get(volumes[0].chain(hashes(BLOCKS, turn)), into=into, deadline_s=10)
            for block in range(BLOCKS):
                winners = [who for who in (0, 1) if results[who][block] == PutState.COMMITTED]
                assert len(winners) == 1, results
                assert got.states[block] == BlockState.HIT
                assert np.array_equal(into[block], sources[winners[0]][block])


def test_a_staged_block_is_committed_soon_and_not_gettable_before(host: FabricThread) -> None:
    with host.connect() as client:
        volume = volume_of(client)
        chain = volume.chain(hashes(BLOCKS))
        result = volume.put(chain, source=content(BLOCKS), deadline_s=10, ack=Ack.STAGED)
        assert set(result.states) <= {PutState.STAGED, PutState.COMMITTED}
        into = empty(BLOCKS)
        got = volume.get(chain, into=into, deadline_s=10)
        for block, state in enumerate(got.states):
            assert (state == BlockState.HIT) == bool(np.array_equal(into[block], content(BLOCKS)[block]))
    host.stop()
    host.start()
    with host.connect() as client:
        volume = volume_of(client)
        assert volume.lookup(volume.chain(hashes(BLOCKS)), deadline_s=5).prefix == BLOCKS, (
            "an orderly stop writes what was acknowledged as staged"
        )
