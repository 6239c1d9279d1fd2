"""Lookups that do not count: neither as reads, nor among events, nor as hits of a volume."""

from __future__ import annotations

import numpy as np
import pytest
from tests.dpu_agent.datapath.test_explain import explained, story
from tests.dpu_agent.datapath.test_switch import counted, outcomes, turn
from tests.support.agent.assembly import FAR_S, Assembly, assembled, chain_of

from ostraca_fabric.model.outcome import BlockState, Reason
from ostraca_fabric.model.overrides import Switch
from ostraca_fabric.wire.messages import Lookup, LookupDone


async def recheck(fabric: Assembly, *, pin_s: float = 0.0) -> LookupDone:
    request = Lookup(10_000, 0, FAR_S, chain_of(range(6)), pin_s, is_counted=False)
    return await fabric.data_path.lookup(fabric.worker(), fabric.volume, request)


@pytest.mark.parametrize("pin_s", [0.0, 1.0])
async def test_a_recheck_finds_blocks_and_leaves_no_trace_but_its_own_count(pin_s: float) -> None:
    async with assembled() as fabric:
        await fabric.put(fabric.worker(), range(4))
        fabric.shard.core.index.forget_all_reads()
        before = story(await explained(fabric, 0))
        done = await recheck(fabric, pin_s=pin_s)
        assert list(done.states) == [BlockState.HIT] * 4 + [BlockState.MISS] * 2
        index = fabric.shard.core.index
        assert not index.is_read(np.arange(4)).any()
        assert story(await explained(fabric, 0)) == before
        assert counted(fabric, "recheck") == {("HIT", "NONE"): 4, ("MISS", "NOT_FOUND"): 2}
        assert counted(fabric, "lookup") == {}


async def test_rechecks_hide_no_volume_without_hits() -> None:
    async with assembled() as fabric:
        await fabric.put(fabric.worker(), range(32))
        await recheck(fabric)
        await fabric.get(fabric.worker(), range(100, 132))
        assert fabric.agent.status().unhit.count == 1


@pytest.mark.parametrize("switch", [Switch.OFF, Switch.SHADOW])
async def test_a_recheck_of_a_switched_volume_is_declined(switch: Switch) -> None:
    async with assembled() as fabric:
        await fabric.put(fabric.worker(), range(4))
        turn(fabric, switch)
        reason = Reason.SWITCHED_OFF if switch is Switch.OFF else Reason.SHADOWED
        assert outcomes(await recheck(fabric)) == {(BlockState.DECLINED, reason)}
        await fabric.at_rest()
        assert counted(fabric, "recheck") == {("DECLINED", reason.name): 6}
        assert counted(fabric, "shadow_lookup") == {}
