"""Counts of a client: blocks, bytes and tokens that moved, for callers' results of any mix."""

from __future__ import annotations

import numpy as np
import pytest
from tests.sdk.conftest import BLOCK_BYTES, LAYOUT, hashes

import ostraca

FAR_S = 30.0
LENGTHS = [BLOCK_BYTES, 1000, 40_000, 7]


@pytest.mark.parametrize("stored", [[], [1], [0, 2], [0, 1, 2, 3]])
def test_only_blocks_that_moved_count_with_their_bytes(client: ostraca.Client, stored: list[int]) -> None:
    volume = client.volume("kv", LAYOUT, block_bytes=BLOCK_BYTES, create=True)
    source = [np.full(length, 3, np.uint8) for length in LENGTHS]
    for position in stored:
        one = volume.chain(hashes(4))[position : position + 1]
        assert volume.put(one, source=[source[position]], deadline_s=FAR_S).accepted == 1
    found = volume.get(volume.chain(hashes(4)), into=source, deadline_s=FAR_S)
    assert [
        position for position, state in enumerate(found.states) if state == ostraca.BlockState.HIT
    ] == stored
    moved_bytes, metrics = sum(LENGTHS[position] for position in stored), client.metrics()
    assert [metrics.operation(name).bytes for name in ("put", "get")] == [moved_bytes] * 2
    assert metrics.hit_tokens == len(stored) * LAYOUT.page_tokens
    with pytest.raises(ostraca.UsageError, match="no operation: pass one of lookup, get"):
        metrics.operation("gets")
