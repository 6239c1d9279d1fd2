"""Copies of the fabric's volume records on every shard of this agent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from functools import partial

from ostraca_dpu_agent.controller.recovery import read_superblock
from ostraca_dpu_agent.shards.service import OwnerService
from ostraca_dpu_agent.shards.volume_copy import VolumeCopy
from ostraca_fabric.errors import MembershipError
from ostraca_fabric.model.ids import DriveId, ShardId
from ostraca_fabric.model.volume import VolumeRecord
from ostraca_fabric.ports.drive import Drive
from ostraca_fabric.ports.membership import Membership

log = logging.getLogger(__name__)


class VolumeCopies:
    """Volume copies of served shards; ``run`` beside the controller."""

    def __init__(
        self,
        membership: Membership,
        *,
        owner: OwnerService,
        drives: Mapping[DriveId, Drive],
        turn_s: float,
    ) -> None:
        """Follow the volumes in *membership*; look for new shards every *turn_s*."""
        self._membership = membership
        self._owner = owner
        self._drives = drives
        self._turn_s = turn_s
        self._copies: dict[ShardId, VolumeCopy] = {}
        self._volumes: tuple[VolumeRecord, ...] | None = None

    def of(self, shard: ShardId) -> VolumeCopy | None:
        """Return a shard's copy, if any."""
        return self._copies.get(shard)

    async def run(self) -> None:
        """Follow until cancelled. Writes under way belong to their shards, and end with the shards."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow())
            while True:
                self.turn()
                await asyncio.sleep(self._turn_s)

    async def _follow(self) -> None:
        while True:
            try:
                async for volumes in self._membership.volume_changes():
                    self._volumes = volumes
                    self.turn()
            except MembershipError as error:
                log.warning("changes of volumes can't be read, trying again: %s", error)
            await asyncio.sleep(self._turn_s)

    def turn(self) -> None:
        """Write the present volumes to every recovered shard."""
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
            self._copies[shard].update(self._volumes)
