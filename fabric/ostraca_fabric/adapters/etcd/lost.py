"""What etcd has to know of shards whose records it has lost, before the fabric is begun there again.

Grants were lost with the rest: nobody knows which segments somebody may still be writing. Agents may run all
the while, and claim a shard as soon as there is a fabric. So this comes first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ostraca_fabric.adapters.etcd.client import EtcdClient
from ostraca_fabric.adapters.etcd.records import encode_grants
from ostraca_fabric.adapters.etcd.transactions import is_absent, put
from ostraca_fabric.adapters.membership_rules import GRANTS_LOST

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ostraca_fabric.adapters.etcd.backoff import Dice
    from ostraca_fabric.adapters.etcd.keys import Keys
    from ostraca_fabric.adapters.etcd.settings import EtcdSettings
    from ostraca_fabric.ids import ShardId


async def keep_lost(shards: Iterable[ShardId], keys: Keys, settings: EtcdSettings, *, dice: Dice) -> None:
    """Keep of each of these shards that all of it may still be written, unless there is a record of its
    grants. Then begin the fabric.

    Raises StoreAwayError when etcd can't be reached, and MembershipError when it refuses; some may be kept
    then, and it may be called again.
    """
    client, value = EtcdClient(settings, dice=dice), encode_grants(GRANTS_LOST)
    try:
        for shard in shards:
            at_grants = keys.grants(shard)
            await client.txn([is_absent(at_grants)], [put(at_grants, value)])
    finally:
        await client.close()
