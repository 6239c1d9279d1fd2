"""Flash into staging, at the level of the loader."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from tests.support.agent.assembly import SETTINGS, HeldDrive, until

from ostraca_dpu_agent.datapath.admission import LatencyEstimator
from ostraca_dpu_agent.datapath.flash_io import Loader
from ostraca_dpu_agent.datapath.location.routing import BlockLocations, BlockSource
from ostraca_dpu_agent.datapath.staging.leases import Purpose, StagingLease
from ostraca_dpu_agent.datapath.staging.staging import Staging
from ostraca_fabric.model.ids import AgentId, DriveId, ShardId


async def test_a_load_that_crashes_ends_only_when_the_reads_it_began_have_ended() -> None:
    staging, slow, other = Staging(SETTINGS.memory), HeldDrive(), HeldDrive()
    drives = {DriveId("slow"): slow, DriveId("other"): other}
    loader = Loader(staging, drives, LatencyEstimator(4096), clock=lambda: 0.0)
    located = BlockLocations.empty(2)
    located.sources = [
        BlockSource(AgentId("a"), ShardId(name), DriveId(name), 0) for name in ("slow", "other")
    ]
    located.source[:], located.lengths[:] = [0, 1], 4096
    located.offsets[1] = 100  # no whole page: no owner of ours says that, and the drive takes it for a bug
    lease = await staging.lease(2, 4096, Purpose.GET, holder=None, within_s=0)
    assert isinstance(lease, StagingLease)
    slow.holds_reads = True
    loading = asyncio.create_task(loader.load(located, np.arange(2), lease, np.zeros(2, np.uint64)))
    await until(lambda: len(slow.held) == 1)
    for _ in range(10):
        await asyncio.sleep(0)
    assert not loading.done(), "the caller would give the lease back"
    slow.let_go()
    with pytest.raises(AssertionError):
        await loading
    staging.release(lease)
