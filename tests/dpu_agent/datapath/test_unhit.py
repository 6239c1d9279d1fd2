"""An agent says which volumes are put into and never found in."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest
from tests.support.agent.assembly import Assembly, assembled, chain_of

from ostraca_fabric.model.outcome import BlockState, PutState, Reason
from ostraca_fabric.telemetry.requests import NOTICE_BLOCKS
from ostraca_fabric.telemetry.status import Unhit, UnhitVolume
from ostraca_fabric.wire.messages import Lookup, LookupDone, PutDone

BLOCKS = range(32)
OTHERS = range(100, 132)


async def look_up(fabric: Assembly, numbers: Sequence[int]) -> LookupDone:
    return await fabric.data_path.lookup(
        fabric.worker(), fabric.volume, Lookup(10_000, 0, 5.0, chain_of(numbers))
    )


@pytest.mark.parametrize("by_get", [True, False])
async def test_a_volume_whose_workers_never_meet_is_named_until_one_does(*, by_get: bool) -> None:
    async with assembled() as fabric:
        await look_up(fabric, OTHERS)
        await fabric.put(fabric.worker(), BLOCKS)
        assert fabric.agent.status().unhit == Unhit()
        if by_get:
            await fabric.get(fabric.worker(), OTHERS)
        else:
            await look_up(fabric, OTHERS)
        named = UnhitVolume("tenant/v", len(BLOCKS), len(OTHERS))
        assert fabric.agent.status().unhit == Unhit(1, (named,))
        await look_up(fabric, [*OTHERS, 0])
        assert fabric.agent.status().unhit == Unhit()


async def test_it_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async with assembled() as fabric:
        put = PutDone(1, bytes([PutState.STAGED] * NOTICE_BLOCKS), bytes(NOTICE_BLOCKS), b"")
        miss = LookupDone(
            2, bytes([BlockState.MISS] * NOTICE_BLOCKS), bytes([Reason.NOT_FOUND] * NOTICE_BLOCKS)
        )
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                fabric.data_path._watch_hits("put", fabric.volume, put)
                fabric.data_path._watch_hits("lookup", fabric.volume, miss)
        told = [record.getMessage() for record in caplog.records if "No hits" in record.getMessage()]
        assert len(told) == 1
        assert "volume tenant/v: 1024 blocks were put and 1024 requested since" in told[0]
