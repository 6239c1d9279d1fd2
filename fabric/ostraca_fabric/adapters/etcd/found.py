"""Which fabric lies under a prefix, for who comes without knowing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ostraca_fabric.adapters.etcd.client import EtcdClient
from ostraca_fabric.adapters.etcd.records import decode_meta
from ostraca_fabric.errors import MembershipError, WrongStoreError

if TYPE_CHECKING:
    from ostraca_fabric.adapters.etcd.backoff import Dice
    from ostraca_fabric.adapters.etcd.keys import Keys
    from ostraca_fabric.adapters.etcd.settings import EtcdSettings
    from ostraca_fabric.ids import FabricId


async def fabric_at(keys: Keys, settings: EtcdSettings, *, dice: Dice) -> FabricId | None:
    """Return the id of the fabric at *keys*, None when there is none.

    Raises StoreAwayError when etcd can't be reached, MembershipError when it refuses, and WrongStoreError
    when the fabric's record can't be read, as that of a newer release.
    """
    client = EtcdClient(settings, dice=dice)
    try:
        answer = await client.range(keys.meta())
    finally:
        await client.close()
    try:
        return decode_meta(answer.kvs[0].value) if answer.kvs else None
    except MembershipError as error:
        raise not_for_us(keys, client.endpoint, error) from error


def not_for_us(keys: Keys, endpoint: str, why: MembershipError) -> WrongStoreError:
    """Return the error for a fabric whose own record can't be read; *why* says what to do."""
    return WrongStoreError(f"{keys.meta().decode()} of etcd at {endpoint} is not for this release: {why}")
