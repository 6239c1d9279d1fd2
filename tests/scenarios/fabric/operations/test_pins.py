"""What a look-up with a pin promised is still there for the get, and the promise has an end."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import numpy as np
import pytest
from tests.support.fabric.fabric_host import SMALL, FabricProcess, content, empty, hashes, volume_of

import ostraca
from ostraca import Ack

pytestmark = pytest.mark.slow

BATCH = 16
"""4 MiB: a drive of four segments holds some fifteen of them."""

PIN_S = 5.0
FAR_S = 20.0


def put(volume: ostraca.Volume, seed: int) -> ostraca.PutResult:
    return volume.put(
        volume.chain(hashes(BATCH, seed)), source=content(BATCH, seed), deadline_s=FAR_S, ack=Ack.COMMITTED
    )


def evicted(client: ostraca.Client) -> int:
    return sum(shard.evicted_blocks for shard in client.status().shards)


def test_a_pin_keeps_what_was_found_from_eviction_until_it_ends(tmp_path: Path) -> None:
    seeds = itertools.count()
    shape = ("--drives", "1", "--capacity", "65MiB", "--dram", "0", "--transport", "inline")
    with (
        FabricProcess(tmp_path / "fabric", *shape) as host,
        ostraca.connect(host.address, settings=SMALL) as client,
    ):
        volume = volume_of(client)
        unpinned, pinned = (volume.chain(hashes(BATCH, next(seeds))) for _ in range(2))
        put(volume, 0)
        turns = 0
        while not evicted(client):
            assert put(volume, next(seeds)).accepted == BATCH
            turns += 1
        assert volume.lookup(unpinned, deadline_s=FAR_S).hits < BATCH
        put(volume, 1)
        pinned_at_s = time.monotonic()
        assert volume.lookup(pinned, deadline_s=FAR_S, pin_s=PIN_S).prefix == BATCH
        made = [put(volume, next(seeds)).accepted for _ in range(2 * turns)]
        into = empty(BATCH)
        found = volume.get(pinned, into=into, deadline_s=FAR_S)
        if time.monotonic() - pinned_at_s >= PIN_S:
            pytest.skip(f"this machine took longer than {PIN_S} s to write 128 MiB")
        assert found.hits == BATCH
        assert np.array_equal(into, content(BATCH, 1))
        assert made == [BATCH] * len(made), "what is pinned stands in nobody's way while others can go"
        until_s = pinned_at_s + PIN_S + FAR_S
        while volume.lookup(pinned, deadline_s=FAR_S).hits:
            assert time.monotonic() < until_s, "nothing is kept for ever"
            for _ in range(3 * turns):  # a look-up is a read: what is looked up all along is kept
                put(volume, next(seeds))
