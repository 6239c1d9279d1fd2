"""Workers that copy blocks out of the agent's memory, in a whole fabric."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.support.fabric.fabric_host import (
    BLOCK_BYTES,
    SMALL,
    FabricProcess,
    FabricThread,
    content,
    empty,
    hashes,
    volume_of,
)
from tests.support.fabric.worker_host import blocks_read

import ostraca
from ostraca import Ack, BlockState, PutState
from ostraca_cli.testing import small_plan

BLOCKS = 32
DEADLINE_S = 20.0
HIT = BlockState.HIT
OWN = replace(SMALL, direct_memory=True)


@contextmanager
def fabric_process(directory: Path, transport: str) -> Iterator[FabricProcess]:
    shape = ("--capacity", "260MiB", "--dram", "64MiB", "--transport", transport)
    with FabricProcess(directory / "fabric", *shape) as process:
        yield process
        assert process.stop() == 0
        process.check_log()


def put(client: ostraca.Client, seed: int) -> None:
    volume = volume_of(client)
    chain = volume.chain(hashes(BLOCKS, seed), is_chained=False)
    found = volume.put(chain, source=content(BLOCKS, seed), deadline_s=DEADLINE_S, ack=Ack.COMMITTED)
    assert set(found.states) == {PutState.COMMITTED}, found


def get(client: ostraca.Client, seed: int) -> ostraca.GetResult:
    """Get the blocks of a put, and check that hits are right and nothing else was touched."""
    volume, into = volume_of(client), empty(BLOCKS)
    chain = volume.chain(hashes(BLOCKS, seed), is_chained=False)
    found = volume.get(chain, into=into, deadline_s=DEADLINE_S)
    is_hit = np.array(found.states) == HIT
    assert np.array_equal(into, np.where(is_hit[:, None], content(BLOCKS, seed), empty(BLOCKS)))
    return found


@pytest.mark.parametrize("transport", ["inline", "nixl"])
def test_blocks_of_the_cache_come_out_of_the_agents_process(tmp_path: Path, transport: str) -> None:
    settings = replace(OWN, transports=(transport,))
    with (
        fabric_process(tmp_path, transport) as fabric,
        ostraca.connect(fabric.address, settings=settings) as client,
    ):
        put(client, 1)
        assert set(get(client, 1).states) == {HIT}
        assert blocks_read(client) == BLOCKS
        counters = client.status().counters
        assert (counters.get_hits_direct, counters.get_hits_from_cache) == (BLOCKS, BLOCKS)
        pool = np.full((BLOCKS, BLOCK_BYTES), 0xEE, np.uint8)
        volume = volume_of(client)
        chain = volume.chain(hashes(BLOCKS, 1), is_chained=False)
        with ostraca.connect(fabric.address, settings=settings) as other, other.register(pool) as region:
            rows = region.rows(range(BLOCKS))
            found = volume_of(other).get(chain, into=rows, deadline_s=DEADLINE_S)
            assert not other._runtime.arena.array.any(), "rows need no arena"
        assert set(found.states) == {HIT}
        assert np.array_equal(pool, content(BLOCKS, 1))
        with volume.get_views(chain, lengths=BLOCK_BYTES, deadline_s=DEADLINE_S) as views:
            assert all(view == right.data for view, right in zip(views, content(BLOCKS, 1), strict=True))
        assert blocks_read(client) == 2 * BLOCKS


def test_an_agent_that_starts_anew_is_read_again(tmp_path: Path) -> None:
    with (
        fabric_process(tmp_path, "inline") as fabric,
        ostraca.connect(fabric.address, settings=OWN) as client,
    ):
        put(client, 1)
        assert set(get(client, 1).states) == {HIT}
        fabric.kill()
        fabric.start()
        assert blocks_read(client) == BLOCKS
        while get(client, 1).hits < BLOCKS:
            pass
        assert blocks_read(client) == BLOCKS, "they came from flash"
        assert set(get(client, 1).states) == {HIT}
        assert blocks_read(client) == 2 * BLOCKS


@pytest.mark.slow
def test_only_right_bytes_are_read_while_the_cache_turns_over(tmp_path: Path) -> None:
    """A cache of two batches: each put takes the memory of blocks that others are reading."""
    plan = replace(small_plan(tmp_path / "fabric"), dram_bytes=2 * BLOCKS * BLOCK_BYTES)
    seeds, rounds = [0], 60
    is_over, wrong = threading.Event(), list[BaseException]()

    def write(host: FabricThread) -> None:
        try:
            with host.connect() as writer:
                for seed in range(1, 1 + rounds):
                    put(writer, seed)
                    seeds.append(seed)
        finally:
            is_over.set()

    def read(host: FabricThread) -> None:
        try:
            with host.connect(OWN) as client:
                while not is_over.is_set():
                    get(client, seeds[-1])
                    get(client, seeds[max(0, len(seeds) - 3)])
                direct = client.metrics().direct
                assert direct is not None
                assert direct.blocks_read > 0
        except BaseException as error:
            wrong.append(error)
            raise

    with FabricThread(plan) as host:
        threads = [threading.Thread(target=work, args=(host,)) for work in (write, read, read)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
    assert len(seeds) == 1 + rounds, "every put was stored"
