"""Fabrics whose prefixes begin one another's: none is begun, nor rebuilt, that would be one of them.

Each would be told of the other's keys with its own, and what an operator deletes of the one would take the
other along.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ostraca_fabric.adapters.etcd.records import decode_meta, decode_rebuild
from ostraca_fabric.errors import MembershipError, NotAllowedError, WrongStoreError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ostraca_fabric.adapters.etcd.client import EtcdClient
    from ostraca_fabric.adapters.etcd.keys import Keys

_ADVICE = "of two fabrics in one etcd, neither's prefix may begin the other's. Take another prefix"


async def none_above(client: EtcdClient, keys: Keys) -> list[bytes]:
    """Return the keys at which a fabric would lie whose prefix begins this one, and lies none: they have to
    stay absent. Those that our user of etcd may not read are left out. Raises WrongStoreError where one lies.
    """
    absent = []
    for above in keys.above():
        for key in (above.meta(), above.rebuild()):
            try:
                there = (await client.range(key)).kvs
            except NotAllowedError:  # who gave us our prefix alone has to know what else is there
                continue
            if there:
                raise WrongStoreError(
                    f"a fabric lies under {above.text} of etcd at {client.endpoint}, which {keys.text} "
                    f"begins with: {_ADVICE}"
                )
            absent.append(key)
    return absent


def check_none_below(values: Mapping[bytes, bytes], keys: Keys) -> None:
    """Raise WrongStoreError where a fabric lies further down, given all that lies below a prefix. Pure."""
    for key, value in sorted(values.items()):
        if (below := keys.below(key)) is not None and (keys.kind(key) is None or _is_of_a_fabric(value)):
            raise WrongStoreError(
                f"another fabric lies under {below}, which begins with {keys.text}: {_ADVICE}, and delete "
                f"nothing under {keys.text}"
            )


def _is_of_a_fabric(value: bytes) -> bool:
    """Say whether it is a fabric's own record, and not that of a volume, say, which is called as that is."""
    for decode in (decode_meta, decode_rebuild):
        try:
            decode(value)
        except MembershipError:
            continue
        return True
    return False
