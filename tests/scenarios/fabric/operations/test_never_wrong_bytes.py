"""Invariant 1: a get hands over exactly the bytes of one put of that block, or it is a miss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.support.fabric.fabric_host import (
    BLOCK_BYTES,
    MIB,
    FabricThread,
    content,
    empty,
    find_on_flash,
    hashes,
    overwrite,
    volume_of,
)

from ostraca import Ack, BlockState, PutState, Reason
from ostraca_cli.testing import small_plan

BLOCKS = 8


@pytest.fixture
def host(tmp_path: Path) -> Iterator[FabricThread]:
    with FabricThread(small_plan(tmp_path / "fabric")) as started:
        yield started


def put_all(host: FabricThread, blocks: int = BLOCKS) -> None:
    with host.connect() as client:
        volume = volume_of(client)
        result = volume.put(
            volume.chain(hashes(blocks)), source=content(blocks), deadline_s=10, ack=Ack.COMMITTED
        )
        assert set(result.states) == {PutState.COMMITTED}, result


def check_only_misses_at(host: FabricThread, damaged: set[int], reasons: set[Reason]) -> None:
    """Get all blocks: those damaged miss and leave the caller's memory alone, all others are whole."""
    with host.connect() as client:
        volume = volume_of(client)
        into = empty(BLOCKS)
        result = volume.get(volume.chain(hashes(BLOCKS)), into=into, deadline_s=10)
        for block in range(BLOCKS):
            if block in damaged:
                assert result.states[block] == BlockState.MISS
                assert result.reasons[block] in reasons
                assert np.array_equal(into[block], empty(1)[0]), "a miss leaves the caller's memory alone"
            else:
                assert result.states[block] == BlockState.HIT, result
                assert np.array_equal(into[block], content(BLOCKS)[block])


def test_what_was_put_is_got_byte_for_byte(host: FabricThread) -> None:
    put_all(host)
    check_only_misses_at(host, set(), set())


def test_a_bit_flipped_on_flash_is_a_miss(host: FabricThread) -> None:
    put_all(host)
    path, offset = find_on_flash(host.plan, content(BLOCKS)[3])
    victim = int(content(BLOCKS)[3][BLOCK_BYTES // 2]) ^ 0x10
    overwrite(path, offset + BLOCK_BYTES // 2, bytes([victim]))
    check_only_misses_at(host, {3}, {Reason.DAMAGED})


def test_a_damaged_block_is_dropped_and_can_be_put_again(host: FabricThread) -> None:
    put_all(host)
    path, offset = find_on_flash(host.plan, content(BLOCKS)[3])
    overwrite(path, offset, b"rotten")
    check_only_misses_at(host, {3}, {Reason.DAMAGED})
    with host.connect() as client:
        volume = volume_of(client)
        chain = volume.chain(hashes(BLOCKS))
        for _ in range(200):
            if volume.lookup(chain, deadline_s=5).holes:
                break
        result = volume.put(chain, source=content(BLOCKS), deadline_s=10, ack=Ack.COMMITTED)
        assert [state == PutState.EXISTS for state in result.states] == [
            block != 3 for block in range(BLOCKS)
        ]
        assert result.states[3] == PutState.COMMITTED
    check_only_misses_at(host, set(), set())


def test_a_torn_write_is_a_miss(host: FabricThread) -> None:
    put_all(host)
    path, offset = find_on_flash(host.plan, content(BLOCKS)[5])
    overwrite(path, offset + 4096, bytes(BLOCK_BYTES - 4096))
    check_only_misses_at(host, {5}, {Reason.DAMAGED})


def test_a_truncated_drive_file_is_a_miss(host: FabricThread) -> None:
    put_all(host)
    wanted = content(BLOCKS)
    cut_path, cut_at = find_on_flash(host.plan, wanted[0])
    damaged = set()
    for block in range(BLOCKS):
        path, offset = find_on_flash(host.plan, wanted[block])
        if path == cut_path and offset >= cut_at:
            damaged.add(block)
    with cut_path.open("r+b") as file:
        file.truncate(cut_at)
    check_only_misses_at(host, damaged, {Reason.DRIVE_ERROR})


def test_two_extents_swapped_on_flash_are_misses(host: FabricThread) -> None:
    put_all(host)
    wanted = content(BLOCKS)
    first, second = find_on_flash(host.plan, wanted[1]), find_on_flash(host.plan, wanted[2])
    overwrite(*first, wanted[2].tobytes())
    overwrite(*second, wanted[1].tobytes())
    check_only_misses_at(host, {1, 2}, {Reason.DAMAGED})


def test_blocks_of_other_tenants_and_volumes_and_ranks_are_misses(host: FabricThread) -> None:
    put_all(host)
    with host.connect(tenant="someone-else") as stranger:
        volume = volume_of(stranger)
        assert volume.lookup(volume.chain(hashes(BLOCKS)), deadline_s=5).hits == 0
    with host.connect() as client:
        other = volume_of(client, "another-volume")
        assert other.lookup(other.chain(hashes(BLOCKS)), deadline_s=5).hits == 0
        volume = volume_of(client)
        assert volume.lookup(volume.chain(hashes(BLOCKS), rank=1), deadline_s=5).hits == 0
        assert volume.lookup(volume.chain(hashes(BLOCKS), group=1), deadline_s=5).hits == 0


def test_a_block_asked_for_with_another_length_is_a_miss(host: FabricThread) -> None:
    put_all(host)
    with host.connect() as client:
        volume = volume_of(client)
        result = volume.get(volume.chain(hashes(BLOCKS)), into=empty(BLOCKS, BLOCK_BYTES // 2), deadline_s=5)
        assert set(result.reasons) == {Reason.WRONG_LENGTH}


def test_committed_blocks_are_found_again_after_a_restart(tmp_path: Path) -> None:
    host = FabricThread(small_plan(tmp_path / "fabric"))
    with host:
        put_all(host)
    with host:
        check_only_misses_at(host, set(), set())
        assert sum(shard.blocks for agent in host.status() for shard in agent.shards) == BLOCKS


def test_a_full_fabric_evicts_its_oldest_blocks_and_goes_on(tmp_path: Path) -> None:
    plan = replace(small_plan(tmp_path / "fabric"), drives=1, capacity_bytes=(3 * 64 + 1) * MIB)
    rounds = 2 * plan.capacity_bytes // (32 * BLOCK_BYTES)
    blocks = content(32)
    with FabricThread(plan) as host, host.connect() as client:
        volume = volume_of(client)
        for turn in range(rounds):
            blocks[:, :4] = np.frombuffer(turn.to_bytes(4, "big"), np.uint8)
            chain = volume.chain(hashes(32, turn))
            put = volume.put(chain, source=blocks, deadline_s=10, ack=Ack.COMMITTED)
            assert set(put.states) == {PutState.COMMITTED}, put
            into = empty(32)
            assert volume.get(chain, into=into, deadline_s=10).hits == 32
            assert np.array_equal(into, blocks)
        oldest = volume.lookup(volume.chain(hashes(32, 0)), deadline_s=5)
        assert oldest.hits == 0
        assert sum(shard.evicted_blocks for agent in host.status() for shard in agent.shards) > 0
