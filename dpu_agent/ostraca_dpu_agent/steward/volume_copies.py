"""Keeping the copies of the fabric's volumes up to date on every shard that this agent owns."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from functools import partial
from typing import TYPE_CHECKING

from ostraca_dpu_agent.owner.volume_copy import VolumeCopy
from ostraca_dpu_agent.steward.recover import read_superblock
from ostraca_fabric.errors import MembershipError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ostraca_dpu_agent.owner.service import OwnerService
    from ostraca_fabric.ids import DriveId, ShardId
    from ostraca_fabric.ports.drive import Drive
    from ostraca_fabric.ports.membership import Membership
    from ostraca_fabric.volume import VolumeRecord

log = logging.getLogger(__name__)


class VolumeCopies:
    """One copy for each shard served; ``run`` it beside the steward."""

    def __init__(
        self,
        membership: Membership,
        *,
        owner: OwnerService,
        drives: Mapping[DriveId, Drive],
        turn_s: float,
    ) -> None:
        """Follow the volumes in *membership*, and look every *turn_s* for shards that are newly owned."""
        self._membership = membership
        self._owner = owner
        self._drives = drives
        self._turn_s = turn_s
        self._copies: dict[ShardId, VolumeCopy] = {}
        self._volumes: tuple[VolumeRecord, ...] | None = None

    def of(self, shard: ShardId) -> VolumeCopy | None:
        """Return what is known of a shard's copy."""
        return self._copies.get(shard)

    async def run(self) -> None:
        """Follow until cancelled. Writes under way then are their shards' own, and end with them."""
        changes = self._membership.volume_changes()
        change = asyncio.ensure_future(anext(changes))
        try:
            while True:
                await asyncio.wait([change], timeout=self._turn_s)
                if change.done():
                    try:
                        self._volumes = change.result()
                    except MembershipError as error:
                        log.warning("the fabric's volumes can't be followed now: %s", error)
                        changes = self._membership.volume_changes()
                        await asyncio.sleep(self._turn_s)
                    change = asyncio.ensure_future(anext(changes))
                self.turn()
        finally:
            change.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await change

    def turn(self) -> None:
        """Have every shard that is owned and recovered say what volumes there are."""
        served = self._owner.shards
        self._copies = {
            shard: copy for shard, copy in self._copies.items() if served.get(shard) is copy.owned
        }
        for shard, owned in served.items():
            drive = self._drives.get(owned.record.drive)
            if self._volumes is None or drive is None or owned.core.is_recovering or owned.is_closed:
                continue
            if shard not in self._copies:
                fabric = self._membership.map.fabric
                reads = partial(read_superblock, drive, owned.record, fabric)
                self._copies[shard] = VolumeCopy(owned, drive, reads)
            self._copies[shard].want(self._volumes)
