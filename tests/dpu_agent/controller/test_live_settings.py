"""Settings that operators change while an agent runs, and take back."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import pytest
from tests.support.agent.assembly import SETTINGS, TENANT, Assembly, assembled, get_states, until

from ostraca_dpu_agent.controller.epoch_retirement import EpochRetirement
from ostraca_dpu_agent.settings import ScrubSettings
from ostraca_fabric.errors import RefusedError, UsageError
from ostraca_fabric.model.fabric_map import PlacementRecord
from ostraca_fabric.model.ids import AgentId, PlacementEpoch, TenantId
from ostraca_fabric.model.outcome import BlockState, Reason
from ostraca_fabric.model.overrides import LiveSettings, LogLevel, Overrides, Switch, decode, encode


def rule(fabric: Assembly, live: LiveSettings) -> None:
    fabric.membership.rule(Overrides(live=live))


@pytest.mark.parametrize(
    "values",
    [
        {"requests_max": 0},
        {"deadline_max_s": 0.0},
        {"deadline_max_s": math.nan},
        {"placement_ttl_s": -1.0},
        {"placement_ttl_s": math.inf},
        {"key_ttl_s": math.nan},
    ],
)
def test_invalid_override_is_refused(values: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(values))):
        LiveSettings(**values)  # type: ignore[arg-type]  # of each its own type


def test_unknown_setting_of_a_newer_release_is_ignored() -> None:
    known = LiveSettings(log_level=LogLevel.DEBUG)
    newer = encode(known).replace(b'"scrub"', b'"colour":"blue","scrub"')
    assert decode(newer, LiveSettings) == known
    assert decode(b'{"version":1,"key_ttl_s":60.0}', LiveSettings) == LiveSettings(key_ttl_s=60.0)


async def test_request_limit_takes_effect_at_the_next_request_and_is_reverted() -> None:
    async with assembled() as fabric:
        await fabric.put(fabric.worker(), range(2))
        rule(fabric, LiveSettings(requests_max=1))
        fabric.drive.holds_reads = True
        getting = asyncio.create_task(fabric.get(fabric.worker(), [0]))
        await until(lambda: bool(fabric.drive.held))
        with pytest.raises(RefusedError, match="1 requests are in progress"):
            await fabric.get(fabric.worker(), [1])
        rule(fabric, LiveSettings())
        fabric.drive.let_go()
        assert get_states(await fabric.get(fabric.worker(), [1])) == [BlockState.HIT]
        assert get_states(await getting) == [BlockState.HIT]


async def test_longer_deadlines_are_cut_to_the_limit() -> None:
    async with assembled() as fabric:
        await fabric.put(fabric.worker(), [0])
        rule(fabric, LiveSettings(deadline_max_s=0.05))
        fabric.drive.holds_reads = True
        async with asyncio.timeout(2):
            done = await fabric.get(fabric.worker(), [0], deadline_s=30.0)
        assert list(done.reasons) == [Reason.DEADLINE]
        fabric.drive.let_go()
        rule(fabric, LiveSettings())
        assert get_states(await fabric.get(fabric.worker(), [0], deadline_s=30.0)) == [BlockState.HIT]


async def test_earlier_placements_retire_after_the_override() -> None:
    async with assembled() as fabric:
        now = [0.0]
        earlier = (PlacementRecord(PlacementEpoch(1), {}),)
        store = fabric.membership.store
        store.map = replace(store.map, placement_epoch=PlacementEpoch(2), earlier_placements=earlier)
        retiring = EpochRetirement(
            AgentId("agent-0"),
            membership=fabric.membership,
            owners=fabric.owners,
            clock=lambda: now[0],
            turn_s=1.0,
            ttl_s=1000.0,
        )
        await retiring.turn()
        now[0] = 100.0
        await retiring.turn()
        assert fabric.membership.map.earlier_placements == earlier
        rule(fabric, LiveSettings(placement_ttl_s=60.0))
        await retiring.turn()
        assert not fabric.membership.map.earlier_placements


async def test_scrub_pauses_while_disabled() -> None:
    quick = ScrubSettings(bytes_s=1e12, idle_s=0.0, pause_s=0.01)
    settings = replace(SETTINGS, owner=replace(SETTINGS.owner, scrub=quick))

    async with assembled(settings) as fabric:
        for first in range(0, 32, 8):
            await fabric.put(fabric.worker(), range(first, first + 8))
        scrub = fabric.shard.scrub
        assert scrub is not None
        await until(lambda: scrub.passes > 0)
        rule(fabric, LiveSettings(scrub=False))
        await asyncio.sleep(0.05)  # what it was just reading ends
        before = scrub.read_bytes
        await asyncio.sleep(0.1)
        assert scrub.read_bytes == before
        rule(fabric, LiveSettings(scrub=True))
        await until(lambda: scrub.read_bytes > before)


async def test_agent_reports_effective_settings_and_switches() -> None:
    async with assembled() as fabric:
        assert fabric.agent.status().overrides.settings == {}
        live = LiveSettings(log_level=LogLevel.WARNING, requests_max=7, scrub=False)
        switches = {(TENANT, "v"): Switch.SHADOW, (TENANT, "w"): Switch.ON}
        revision = fabric.membership.rule(Overrides(live=live, switches=switches))
        said = fabric.agent.status().overrides
        assert said.settings == {"log_level": "warning", "requests_max": 7, "scrub": False}
        assert (said.revision, said.switched) == (revision, {f"{TENANT}/v": "shadow"})


async def test_direct_reads_end_with_the_setting_with_a_second_tenant_and_without_news(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with assembled() as fabric:
        may_read = fabric.context.may_read_directly
        assert not may_read(TENANT)
        rule(fabric, LiveSettings(direct_reads_tenant=TENANT))
        assert (may_read(TENANT), may_read(TenantId("other"))) == (True, False)
        with monkeypatch.context() as patch:
            patch.setattr(type(fabric.membership), "trouble", "the store is away")
            assert not may_read(TENANT)
        assert may_read(TENANT)
        await fabric.membership.create_volume(replace(fabric.volume.record, tenant=TenantId("other")))
        assert not may_read(TENANT)
