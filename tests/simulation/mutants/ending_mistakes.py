"""Mistakes made on purpose, for ``make mutants``: around agents that end in order."""

from __future__ import annotations

from typing import Any

from tests.simulation.mutants.mistakes import _change

from ostraca_dpu_agent.datapath.data_path import DataPath
from ostraca_dpu_agent.shards.service import OwnerService
from ostraca_fabric.connection.server import Server
from ostraca_fabric.model.ids import OwnerEpoch, ShardId


def a_shard_that_was_left_is_answered_for_no_longer() -> None:
    def hand_over(self: OwnerService, shard: ShardId, _epoch: OwnerEpoch) -> None:
        del self.shards[shard]

    _change(OwnerService, "hand_over", hand_over)


def who_leaves_tells_nobody() -> None:
    _change(Server, "announce_leaving", lambda _self: None)


def who_leaves_waits_for_no_transfer() -> None:
    async def close(_self: DataPath, **_within: Any) -> bool:
        return True

    _change(DataPath, "close", close)
