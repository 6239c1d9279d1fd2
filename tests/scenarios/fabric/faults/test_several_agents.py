"""A fabric of several agents and enclosures: every worker reads what any other wrote."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.support.fabric.fabric_host import (
    BLOCK_BYTES,
    MIB,
    SMALL,
    FabricProcess,
    FabricThread,
    content,
    empty,
    hashes,
    volume_of,
    with_dram,
)

import ostraca
from ostraca import Ack, BlockState, PutState, Reason
from ostraca_cli.testing import small_plan
from ostraca_fabric.telemetry.status import PrefetchCounters

BLOCKS = 96  # three stripe units


@pytest.fixture
def host(tmp_path: Path) -> Iterator[FabricThread]:
    plan = replace(
        small_plan(tmp_path / "fabric"),
        agents=2,
        enclosures=2,
        drives=4,
        capacity_bytes=2 * 4 * 129 * MIB,  # one drive has room for all blocks: none is evicted
    )
    with FabricThread(plan) as started:
        yield started


def test_the_shards_are_shared_out_among_the_agents(host: FabricThread) -> None:
    served = [{shard.shard for shard in agent.shards} for agent in host.status()]
    assert all(served), "each agent serves some"
    assert not served[0] & served[1]
    assert len(served[0] | served[1]) == 8


def test_a_fabric_that_has_started_serves_every_shard(tmp_path: Path) -> None:
    plan = replace(small_plan(tmp_path / "fabric"), agents=4, drives=8, capacity_bytes=8 * 65 * MIB)
    host = FabricThread(plan)
    for _ in range(3):
        with host:
            assert len({shard.shard for agent in host.status() for shard in agent.shards}) == 8


def test_what_a_worker_of_one_agent_put_a_worker_of_the_other_gets(host: FabricThread) -> None:
    with (
        ostraca.connect(host.addresses[0], settings=SMALL) as writer,
        ostraca.connect(host.addresses[1], settings=SMALL) as reader,
    ):
        assert (writer.agent, reader.agent) == ("agent-0", "agent-1")
        for seed in range(4):
            chain = volume_of(writer).chain(hashes(BLOCKS, seed))
            put = volume_of(writer).put(chain, source=content(BLOCKS, seed), deadline_s=20, ack=Ack.COMMITTED)
            assert set(put.states) == {PutState.COMMITTED}, put
            into = empty(BLOCKS)
            got = volume_of(reader).get(chain, into=into, deadline_s=20)
            assert got.prefix == BLOCKS, got
            assert np.array_equal(into, content(BLOCKS, seed))
            again = volume_of(reader).put(chain, source=content(BLOCKS, seed), deadline_s=20)
            assert set(again.states) == {PutState.EXISTS}
    blocks = [sum(shard.blocks for shard in agent.shards) for agent in host.status()]
    assert sum(blocks) == 4 * BLOCKS
    assert all(blocks), "both agents own some of the blocks"


def test_an_orderly_stop_of_all_agents_commits_what_was_staged(host: FabricThread) -> None:
    with ostraca.connect(host.addresses[0], settings=SMALL) as client:
        chain = volume_of(client).chain(hashes(BLOCKS))
        put = volume_of(client).put(chain, source=content(BLOCKS), deadline_s=20, ack=Ack.STAGED)
        assert put.accepted == BLOCKS
    host.stop()
    host.start()
    with ostraca.connect(host.addresses[1], settings=SMALL) as client:
        assert volume_of(client).lookup(chain, deadline_s=5).prefix == BLOCKS


def test_prefetched_blocks_come_from_dram_and_need_no_flash(tmp_path: Path) -> None:
    blocks = 32
    with FabricThread(with_dram(small_plan(tmp_path / "fabric"), 64 * MIB)) as host:
        with host.connect() as client:
            volume = volume_of(client)
            chain = volume.chain(hashes(blocks))
            volume.put(chain, source=content(blocks), deadline_s=20, ack=Ack.COMMITTED)
        host.stop()
        host.start()
        with host.connect() as client:
            volume = volume_of(client)
            assert volume.prefetch(chain, deadline_s=20).hits == blocks
            into = empty(blocks)
            assert volume.get(chain, into=into, deadline_s=20).hits == blocks
            assert np.array_equal(into, content(blocks))
        (agent,) = host.status()
        assert agent.counters.get_hits_from_cache == blocks
        assert agent.cache_used_bytes == blocks * BLOCK_BYTES
        size_bytes = blocks * BLOCK_BYTES
        assert agent.counters.prefetched == PrefetchCounters(blocks, size_bytes, blocks, size_bytes)


def test_a_worker_has_blocks_brought_to_the_agent_of_another_host(tmp_path: Path) -> None:
    blocks = 32
    directory = tmp_path / "fabric"
    shape = ("--agents", "2", "--drives", "2", "--capacity", "520MiB", "--dram", "128MiB")
    first, second = (f"unix://{directory}/agent-{number}.sock" for number in range(2))
    with FabricProcess(directory, *shape, "--transport", "inline") as host:
        with ostraca.connect(first, settings=SMALL) as writer:
            volume = volume_of(writer)
            chain = volume.chain(hashes(blocks))
            put = volume.put(chain, source=content(blocks), deadline_s=20, ack=Ack.COMMITTED)
            assert set(put.states) == {PutState.COMMITTED}
            assert volume.prefetch(chain, deadline_s=20, at="agent-1").hits == blocks
            absent = volume.prefetch(chain, deadline_s=20, at="agent-2")
            assert set(absent.states) == {BlockState.DECLINED}
            assert set(absent.reasons) == {Reason.NO_AGENT}
        with ostraca.connect(second, settings=SMALL) as reader:
            assert reader.agent == "agent-1"
            into = empty(blocks)
            assert volume_of(reader).get(chain, into=into, deadline_s=20).hits == blocks
            assert np.array_equal(into, content(blocks))
            counters = reader.status().counters
        assert host.stop() == 0
    size_bytes = blocks * BLOCK_BYTES
    assert counters.get_hits_from_cache == blocks
    assert counters.prefetched == PrefetchCounters(blocks, size_bytes, blocks, size_bytes)
