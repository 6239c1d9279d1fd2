"""Making a fabric again that etcd has lost, from what its drives say: all of it comes before ``meta``.

Agents may run all the while. They believe nothing below a prefix without ``meta``, and change nothing there.
So what they join is whole from its first moment: no enclosure is missing, whose shards they would stop, no
grant, without which they would write where somebody else may be writing still, and no volume. A worker would
make that again in its first incarnation, and find what was erased since.

A prefix without ``meta`` is

- empty: a try may begin. It writes ``rebuild``, which says of which fabric;
- of a try at the same fabric that has not ended. The next one takes it over: that one writes no more if it
  runs still, and what it left becomes what the drives say now, but that no incarnation is made lower;
- anything else, and is left as it is.

Each record is a transaction of its own, so there is no limit to their number. ``meta`` comes, and ``rebuild``
goes, in the last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from ostraca_fabric.adapters.etcd.client import EtcdClient, range_end
from ostraca_fabric.adapters.etcd.nesting import check_none_below, none_above
from ostraca_fabric.adapters.etcd.records import (
    decode_rebuild,
    decode_volume,
    encode_enclosure,
    encode_grants,
    encode_meta,
    encode_placement,
    encode_rebuild,
    encode_volume,
)
from ostraca_fabric.adapters.etcd.store import Read, Tries
from ostraca_fabric.adapters.etcd.transactions import delete, is_absent, is_empty, is_unchanged, put
from ostraca_fabric.adapters.etcd.view import FIRST_PLACEMENT
from ostraca_fabric.adapters.etcd.watch import entry_of
from ostraca_fabric.adapters.membership_rules import GRANTS_LOST, Placements
from ostraca_fabric.errors import ChangedError, WrongStoreError
from ostraca_fabric.fabric_map import check_blocks_fit

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ostraca_fabric.adapters.etcd import rpc_pb2 as rpc
    from ostraca_fabric.adapters.etcd.backoff import Dice
    from ostraca_fabric.adapters.etcd.keys import Keys
    from ostraca_fabric.adapters.etcd.settings import EtcdSettings
    from ostraca_fabric.fabric_map import EnclosureRecord
    from ostraca_fabric.ids import FabricId, StartId
    from ostraca_fabric.volume import VolumeRecord


class Rebuilding:
    """One try. Use it as a context manager: ``take`` the prefix, ``write`` all there is, then ``begin``.

    Every method raises StoreAwayError when etcd can't be reached, and MembershipError when it refuses. A try
    may end anywhere, and another be made.
    """

    def __init__(
        self,
        fabric: FabricId,
        settings: EtcdSettings,
        *,
        keys: Keys,
        dice: Dice,
        start: StartId,
        unix_s: float,
    ) -> None:
        """Make this fabric again at *keys*; *start* tells this try from others, and the time *unix_s*, which
        stays in ``meta``, its fabric from that of an earlier rebuild.
        """
        self._client = EtcdClient(settings, dice=dice)
        self._keys = keys
        self._fabric = fabric
        self._unix_s = unix_s
        self._mark = encode_rebuild(fabric, start)
        self._taken = 0
        """The revision in which the prefix became ours."""

    async def __aenter__(self) -> Self:
        """Use it until the end of a block."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close it, wherever it is."""
        await self._client.close()

    async def is_begun(self) -> bool:
        """Say whether a try was made that has not ended. Raises WrongStoreError where none may be made."""
        await none_above(self._client, self._keys)
        return bool((await self._read()).entries)

    async def take(self) -> None:
        """Make the prefix ours, so that no other try writes there. Raises WrongStoreError where none may be
        made.
        """
        key, prefix = self._keys.rebuild(), self._keys.prefix
        tries = Tries("begin a rebuild", self._client)
        while (read := await self._read()).value(key) != self._mark:
            above = await none_above(self._client, self._keys)
            is_as_read = (
                is_unchanged(key, read.modified(key)) if read.entries else is_empty(prefix, range_end(prefix))
            )
            is_free = [is_as_read, *map(is_absent, above)]
            if not (await self._client.txn(is_free, [put(key, self._mark)])).succeeded:
                await tries.again()
        self._taken = read.modified(key)

    async def write(self, enclosures: Sequence[EnclosureRecord], volumes: Sequence[VolumeRecord]) -> None:
        """Write all that is missing. Raises BlocksTooLargeError where the enclosures do not hold the volumes'
        blocks, and ChangedError where another try has taken the prefix over.
        """
        check_blocks_fit(volumes, enclosures)
        for change in _changes(await self._read(), self._keys, enclosures, volumes):
            if not await self._is_done(change):
                raise self._overtaken()

    async def begin(self, key_check: str) -> None:
        """Begin the fabric, whose key is told by *key_check*. Raises ChangedError where another try has taken
        the prefix over.
        """
        meta = self._keys.meta()
        value = encode_meta(self._fabric, key_check, rebuilt_unix_s=self._unix_s)
        if await self._is_done(put(meta, value), delete(self._keys.rebuild())):
            return
        # It may be ours, asked for twice.
        begun = (await self._client.range(meta)).kvs
        if not begun or begun[0].value != value:
            raise self._overtaken()

    async def _is_done(self, *changes: rpc.RequestOp) -> bool:
        """Change something while the prefix is ours; say whether it was."""
        is_ours = [is_absent(self._keys.meta()), is_unchanged(self._keys.rebuild(), self._taken)]
        return bool((await self._client.txn(is_ours, changes)).succeeded)

    async def _read(self) -> Read:
        """Return what lies there. Raises WrongStoreError where it is neither nothing nor of a try at this
        fabric.
        """
        keys, prefix = self._keys, self._keys.prefix
        listed = await self._client.range(prefix, end=range_end(prefix))
        read = Read({kv.key: entry_of(kv) for kv in listed.kvs}, listed.header.revision)
        where = f"under {keys.text} of etcd at {self._client.endpoint}"
        if keys.meta() in read.entries:
            raise WrongStoreError(f"a fabric was begun {where} meanwhile: look again")
        mark = read.value(keys.rebuild())
        fabric = None if mark is None else decode_rebuild(mark)[0]
        if fabric != self._fabric:
            check_none_below({key: entry.value for key, entry in read.entries.items()}, keys)
        if fabric is None and read.entries:
            raise WrongStoreError(
                f"no fabric is {where}, and there are other keys, as {min(read.entries).decode()}: nobody "
                "knows of which fabric. Take another prefix, or delete them (`etcdctl del --prefix "
                f"{keys.text}`)"
            )
        if fabric not in (None, self._fabric):
            raise WrongStoreError(
                f"a rebuild of another fabric, {fabric.hex()}, has not ended {where}, and these are drives "
                f"of {self._fabric.hex()}: take another prefix, or give that one up (`etcdctl del --prefix "
                f"{keys.text}`)"
            )
        return read

    def _overtaken(self) -> ChangedError:
        return ChangedError(
            f"another rebuild of fabric {self._fabric.hex()} has begun under {self._keys.text}: let that one "
            "end, then look with --dry-run"
        )


def _changes(
    read: Read, keys: Keys, enclosures: Sequence[EnclosureRecord], volumes: Iterable[VolumeRecord]
) -> Iterator[rpc.RequestOp]:
    """Say what to change in what a try has left, which may be nothing. Pure."""
    wanted = {
        keys.grants(shard.id): encode_grants(GRANTS_LOST) for each in enclosures for shard in each.shards
    }
    for volume in volumes:
        at_volume = keys.volume(volume.tenant, volume.name)
        left = read.value(at_volume)
        lowest = 1 if left is None else decode_volume(left).incarnation
        wanted[at_volume] = encode_volume(volume.raised_to(lowest))
    wanted |= {keys.enclosure(each.id): encode_enclosure(each) for each in enclosures}
    placements = Placements(FIRST_PLACEMENT).after((), enclosures, force=False)
    wanted[keys.placement()] = encode_placement(placements.epoch)
    yield from (delete(each.key) for each in read.below(keys.enclosures()) if each.key not in wanted)
    yield from (put(key, value) for key, value in wanted.items() if read.value(key) != value)
