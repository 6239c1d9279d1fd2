"""What is put when flash is scarce, through the SDK."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from tests.support.fabric.fabric_host import (
    BLOCK_BYTES,
    LAYOUT,
    FabricThread,
    content,
    empty,
    hashes,
    volume_of,
)

from ostraca import Ack, BlockState, PutResult, PutState, Reason, Volume
from ostraca_cli.testing import small_plan
from ostraca_dpu_agent.settings import AgentSettings, OwnerSettings
from ostraca_fabric.policies.endurance import EnduranceSettings

BLOCKS = 16
RETRY_S = 0.5
SCARCE = EnduranceSettings(rated_dwpd=1.0, burst_s=3600.0, retry_s=RETRY_S)
"""Of a shard of 257 MiB some 10 blocks at first, and then one in 90 s."""


def scarce(directory: Path) -> FabricThread:
    settings = AgentSettings(owner=OwnerSettings(endurance=SCARCE))
    return FabricThread(replace(small_plan(directory), settings=settings))


def put(volume: Volume, seed: int, blocks: int = BLOCKS) -> PutResult:
    chain = volume.chain(hashes(blocks, seed))
    return volume.put(chain, source=content(blocks, seed), deadline_s=10, ack=Ack.COMMITTED)


def put_again_later(volume: Volume, seed: int, first_s: float) -> PutResult:
    """Put until it is no longer taken for a retry, which must not be too early."""
    while (again := put(volume, seed)).reasons[0] == Reason.ADMISSION:
        assert time.monotonic() < first_s + 20
    assert time.monotonic() >= first_s + RETRY_S
    return again


def test_scarce_flash_takes_a_block_the_second_time_and_says_why_not_before(tmp_path: Path) -> None:
    with scarce(tmp_path / "fabric") as host, host.connect() as client:
        volume, first_s = volume_of(client), time.monotonic()
        declined = put(volume, 0)
        assert set(declined.states) == {PutState.DECLINED}
        assert set(declined.reasons) == {Reason.ADMISSION}
        again = put_again_later(volume, 0, first_s)
        taken = again.states.count(PutState.COMMITTED)
        assert 8 <= taken <= 11
        assert list(again.states) == [PutState.COMMITTED] * taken + [PutState.DECLINED] * (BLOCKS - taken)
        assert set(again.reasons[taken:]) == {Reason.BUDGET}
        into = empty(BLOCKS)
        got = volume.get(volume.chain(hashes(BLOCKS)), into=into, deadline_s=10)
        assert list(got.states) == [BlockState.HIT] * taken + [BlockState.MISS] * (BLOCKS - taken)
        assert np.array_equal(into[:taken], content(BLOCKS)[:taken])
        assert PutState.EXISTS in put(volume, 0).states
        (status,) = host.status()
        puts = next(each for each in status.operations if each.operation == "put")
        assert puts.of(PutState.DECLINED, Reason.ADMISSION) >= BLOCKS
        assert puts.of(PutState.DECLINED, Reason.BUDGET) >= BLOCKS - taken
        written = max(status.shards, key=lambda shard: shard.written_bytes)
        assert taken * BLOCK_BYTES < written.written_bytes < (taken + 2) * BLOCK_BYTES
        assert written.budget_bytes_per_day == 257 << 20
        assert written.budget_level_bytes < BLOCK_BYTES
        assert written.years_left is not None
        assert 5 < written.years_left < 100, "a start counts as an hour"


def test_without_a_rating_everything_is_taken_and_nobody_knows_how_long_it_lasts(tmp_path: Path) -> None:
    with FabricThread(small_plan(tmp_path / "fabric")) as host, host.connect() as client:
        volume = volume_of(client)
        for seed in range(4):
            assert set(put(volume, seed).states) == {PutState.COMMITTED}
        (status,) = host.status()
        assert sum(shard.written_bytes for shard in status.shards) >= 4 * BLOCKS * BLOCK_BYTES
        assert {(shard.budget_bytes_per_day, shard.years_left) for shard in status.shards} == {(0.0, None)}


def test_chains_below_the_break_even_length_are_not_put_and_beginnings_of_longer_ones_are(
    tmp_path: Path,
) -> None:
    with FabricThread(small_plan(tmp_path / "fabric")) as host, host.connect() as client:
        ten_blocks = 10 * LAYOUT.page_tokens
        volume = client.volume(
            "v", LAYOUT, block_bytes=BLOCK_BYTES, create=True, break_even_tokens=ten_blocks
        )
        short = put(volume, 1, 9)
        assert set(short.states) == {PutState.DECLINED}
        assert set(short.reasons) == {Reason.TOO_SHORT}
        long = volume.chain(hashes(10, 2))
        beginning = volume.put(long[:3], source=content(3, 2), deadline_s=10, ack=Ack.COMMITTED)
        assert set(beginning.states) == {PutState.COMMITTED}
        unordered = volume.chain(hashes(2, 3), is_chained=False)
        assert set(volume.put(unordered, source=content(2, 3), deadline_s=10, ack=Ack.COMMITTED).states) == {
            PutState.COMMITTED
        }
        assert set(put(volume_of(client), 1, 9).states) == {PutState.COMMITTED}, "another handle"
