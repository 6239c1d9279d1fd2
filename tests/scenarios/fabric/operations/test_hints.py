"""What callers say of their blocks decides what eviction keeps, through the SDK."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.support.fabric.fabric_host import MIB, FabricThread, content, empty, hashes, volume_of

from ostraca import Ack, BlockState, Chain, PutState, Volume
from ostraca_cli.testing import small_plan

COUNT = 2
BATCH = 8


@pytest.fixture
def host(tmp_path: Path) -> Iterator[FabricThread]:
    """One drive of 8 segments of 4 MiB."""
    plan = replace(small_plan(tmp_path / "fabric"), drives=1, capacity_bytes=33 * MIB)
    with FabricThread(plan) as started:
        yield started


def stored(volume: Volume, seed: int, count: int = COUNT, ttl_s: float | None = None) -> Chain:
    chain = volume.chain(hashes(count, seed))
    done = volume.put(chain, source=content(count, seed), deadline_s=10, ack=Ack.COMMITTED, ttl_s=ttl_s)
    assert set(done.states) == {PutState.COMMITTED}
    return chain


def put_until_evicted(host: FabricThread, volume: Volume, use: Callable[[], None]) -> None:
    """Put other blocks, and *use* those of the test before each put, until their segment has gone."""
    for seed in range(1000, 1100):
        use()
        stored(volume, seed, BATCH)
        (status,) = host.status()
        if status.shards[0].evicted_blocks:
            assert status.shards[0].reinserted_blocks, "what is read is kept"
            return
    raise AssertionError("nothing was ever evicted")


def is_there(volume: Volume, chain: Chain, seed: int) -> bool:
    """Get a chain, and say whether it is there: all of it, as it was put, or none."""
    into = empty(COUNT)
    got = volume.get(chain, into=into, deadline_s=10)
    if got.states == (BlockState.HIT,) * COUNT:
        assert np.array_equal(into, content(COUNT, seed))
        return True
    assert got.states == (BlockState.MISS,) * COUNT
    return False


def test_blocks_whose_session_ended_go_and_others_that_were_read_alike_stay(host: FabricThread) -> None:
    with host.connect() as client:
        volume = volume_of(client)
        kept, ended, seldom = stored(volume, 1), stored(volume, 2), stored(volume, 3)

        def use() -> None:
            assert set(volume.lookup([kept, ended], deadline_s=10).states) == {BlockState.HIT}
            volume.end_session(ended)

        assert is_there(volume, ended, 2)
        volume.end_session(ended)
        assert is_there(volume, ended, 2), "nothing is removed early"
        put_until_evicted(host, volume, use)
        assert is_there(volume, kept, 1)
        assert not is_there(volume, ended, 2)
        assert not is_there(volume, seldom, 3)


def test_blocks_whose_time_to_live_has_run_out_go_however_often_they_are_read(host: FabricThread) -> None:
    short_s = 0.05
    with host.connect() as client:
        volume = volume_of(client)
        kept, long = stored(volume, 1), stored(volume, 2, ttl_s=3600)
        short = stored(volume, 3, ttl_s=short_s)
        put_s = time.monotonic()

        def use() -> None:
            assert set(volume.lookup([kept, long, short], deadline_s=10).states) == {BlockState.HIT}

        while time.monotonic() < put_s + 2 * short_s:
            use()
        put_until_evicted(host, volume, use)
        assert is_there(volume, kept, 1)
        assert is_there(volume, long, 2)
        assert not is_there(volume, short, 3)
