"""What a fabric that is there lacks, as its drives tell: of shards whose grants were lost, that all of them
may still be written; of volumes, that they are of a higher incarnation. Agents may run all the while.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ostraca_fabric.adapters.etcd.client import EtcdClient
from ostraca_fabric.adapters.etcd.records import decode_volume, encode_grants, encode_volume
from ostraca_fabric.adapters.etcd.store import EtcdStore
from ostraca_fabric.adapters.etcd.transactions import put
from ostraca_fabric.adapters.membership_rules import GRANTS_LOST
from ostraca_fabric.errors import MembershipError
from ostraca_fabric.rulings import RULED

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ostraca_fabric.adapters.etcd.backoff import Dice
    from ostraca_fabric.adapters.etcd.keys import Keys
    from ostraca_fabric.adapters.etcd.settings import EtcdSettings
    from ostraca_fabric.ids import FabricId, ShardId
    from ostraca_fabric.volume import VolumeRecord


class Lost:
    """One fabric's. Close it. Every method raises StoreAwayError when etcd can't be reached, and
    MembershipError when it refuses; some may be done then, and it may be called again.
    """

    def __init__(self, fabric: FabricId, settings: EtcdSettings, *, keys: Keys, dice: Dice) -> None:
        """Tell the fabric that lies at *keys*."""
        self._client = EtcdClient(settings, dice=dice)
        self._store = EtcdStore(self._client, keys, fabric)
        self._keys = keys

    async def close(self) -> None:
        """Close every connection."""
        await self._client.close()

    async def keep_grants(self, shards: Iterable[ShardId]) -> None:
        """Keep of each of these shards that all of it may still be written, unless there is a record of its
        grants. Put enclosures with such shards later.
        """
        for key in map(self._keys.grants, shards):
            tries = self._store.tries(f"keep {key.decode()}")
            while not (read := await self._store.read(key)).modified(key):
                change = put(key, encode_grants(GRANTS_LOST))
                if await self._store.write(read, [change], unchanged=[key]) is None:
                    await tries.again()

    async def raise_volumes(self, volumes: Iterable[VolumeRecord]) -> list[VolumeRecord]:
        """Have none of these volumes, all of which are there, in a lower incarnation than this; agents hear
        of it as of an erasure. Return what those were that are raised.
        """
        raised = []
        for volume in volumes:
            before = await self._raise(volume)
            if before.incarnation < volume.incarnation:
                raised.append(before)
        return raised

    async def _raise(self, volume: VolumeRecord) -> VolumeRecord:
        """Return what it was."""
        key, ruled = self._keys.volume(volume.tenant, volume.name), self._keys.ruled()
        tries = self._store.tries(f"raise the incarnation of volume {volume.name}")
        before: VolumeRecord | None = None
        while True:
            read = await self._store.read(key)
            if (value := read.value(key)) is None:
                raise MembershipError(f"there is no volume {volume.name!r} of tenant {volume.tenant!r}")
            there = decode_volume(value)
            before = before or there
            after = there.raised_to(volume.incarnation)
            changes = [put(key, encode_volume(after)), put(ruled, RULED)]
            if after == there or await self._store.write(read, changes, unchanged=[key]) is not None:
                return before
            await tries.again()
