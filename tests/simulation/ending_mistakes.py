"""Mistakes made on purpose, for ``make mutants``: around agents that end in order."""

from __future__ import annotations

from typing import Any

from tests.simulation.mistakes import _change

from ostraca_dpu_agent.mover.mover import Mover
from ostraca_dpu_agent.owner.service import OwnerService
from ostraca_fabric.connection.server import Server
from ostraca_fabric.ids import ShardId


def a_shard_that_was_left_is_answered_for_no_longer() -> None:
    def leave(self: OwnerService, shard: ShardId) -> None:
        del self.shards[shard]

    _change(OwnerService, "leave", leave)


def who_leaves_tells_nobody() -> None:
    _change(Server, "announce_leaving", lambda _self: None)


def who_leaves_waits_for_no_transfer() -> None:
    async def close(_self: Mover, **_within: Any) -> bool:
        return True

    _change(Mover, "close", close)
