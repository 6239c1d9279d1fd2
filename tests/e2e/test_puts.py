"""Invariant 5: the first completed put of a block wins, and later ones cost no flash write."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from ostraca import Ack, BlockState, PutState, Reason

from tests.e2e.fabric_host import FabricThread, content, empty, hashes, small_plan, volume_of

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


def test_of_two_concurrent_puts_of_one_block_one_wins_whole(host: FabricThread) -> None:
    with host.connect() as one, host.connect() as other:
        volumes = [volume_of(one), volume_of(other)]
        for turn in range(10):
            sources = [content(BLOCKS, seed=2 * turn), content(BLOCKS, seed=2 * turn + 1)]
            start = threading.Barrier(2)
            results: list[tuple[PutState, ...]] = [(), ()]

            def put(who: int, turn: int = turn, start: threading.Barrier = start, sources: list = sources) -> None:  # type: ignore[type-arg] # noqa: B023
                chain = volumes[who].chain(hashes(BLOCKS, turn))
                start.wait(10)
                results[who] = volumes[who].put(  # noqa: B023
                    chain, source=sources[who], deadline_s=10, ack=Ack.COMMITTED
                ).states

            threads = [threading.Thread(target=put, args=(who,)) for who in (0, 1)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(20)
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
