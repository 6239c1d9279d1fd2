"""What the oracle holds a recovery's reading against."""

from __future__ import annotations

import random

import numpy as np
import pytest
from tests.simulation.shard.history import play
from tests.simulation.shard.listings import Listings
from tests.simulation.shard.world import DRIVE, ENCLOSURE, FABRIC, SHARD
from tests.support.simulated.drives.simulated_flash import SimulatedFlash

from ostraca_fabric.flash.superblock import Superblock
from ostraca_fabric.model.extent import FIRST_SEGMENT_OFFSET, MIB, PAGE_BYTES, Geometry


@pytest.mark.parametrize("segment", [0, 1])
def test_what_a_power_cut_takes_from_a_volatile_cache_may_have_been_read_before(segment: int) -> None:
    shard_bytes = FIRST_SEGMENT_OFFSET + 2 * MIB
    geometry = Geometry.planned(shard_bytes, segment_bytes=MIB, block_bytes=4096)
    flash = SimulatedFlash(shard_bytes, random.Random(1), has_volatile_cache=True)
    listings = Listings(flash, Superblock(FABRIC, bytes(16), ENCLOSURE, DRIVE, SHARD, 0, geometry))
    page = np.ones(PAGE_BYTES, np.uint8)
    flash.land(flash.next_number(), geometry.summary_offset(segment), page, lambda: False)
    assert listings.misread(0) == set()
    flash.power_cut()
    assert listings.misread(0) == {segment}
    assert listings.misread(len(flash.mishaps)) == set()


def test_a_late_write_that_recovery_reads_and_a_power_cut_takes_back_excuses_what_it_hid() -> None:
    assert play(1378109471).excused["a spoilt listing"]
