"""Which fabric lies under a prefix, for who comes without knowing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ostraca_fabric.adapters.etcd.client import EtcdClient
from ostraca_fabric.adapters.etcd.records import decode_meta

if TYPE_CHECKING:
    from ostraca_fabric.adapters.etcd.backoff import Dice
    from ostraca_fabric.adapters.etcd.keys import Keys
    from ostraca_fabric.adapters.etcd.settings import EtcdSettings
    from ostraca_fabric.ids import FabricId


async def fabric_at(keys: Keys, settings: EtcdSettings, *, dice: Dice) -> FabricId | None:
    """Return the id of the fabric at *keys*, None when there is none.

    Raises StoreAwayError when etcd can't be reached, and MembershipError when it refuses, or a newer release
    made that fabric.
    """
    client = EtcdClient(settings, dice=dice)
    try:
        answer = await client.range(keys.meta())
    finally:
        await client.close()
    return decode_meta(answer.kvs[0].value) if answer.kvs else None
