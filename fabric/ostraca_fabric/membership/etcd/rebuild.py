"""Rebuild of a fabric lost from etcd, using its drives. ``meta`` is written last.

Agents may run meanwhile. Without ``meta`` below a prefix, they believe nothing there and change nothing. So
the fabric is complete from its first moment:

- A missing enclosure would make agents stop its shards.
- A missing grant would let an agent write where another agent may still be writing.
- A missing volume would be created again in its first incarnation, and expose blocks erased since.

A prefix without ``meta`` is in one of three states:

- Empty: a rebuild may begin, and writes ``rebuild`` with the fabric's id.
- Left by an unfinished rebuild of the same fabric. The new rebuild takes the prefix over: the earlier
  rebuild, if still running, writes no more. Leftover records are replaced by the drives' content, but no
  incarnation is lowered.
- Anything else: left unchanged.

Each record has its own transaction, so the number of records is unlimited. The last transaction writes
``meta`` and deletes ``rebuild``.

``FabricRepair`` completes an existing fabric from its drives, while agents may run: missing grants, over the
whole shard, and higher incarnations of volumes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial

from ostraca_fabric.errors import ChangedError, MembershipError, WrongStoreError
from ostraca_fabric.membership.etcd.client import rpc_pb2 as rpc
from ostraca_fabric.membership.etcd.client.client import (
    EtcdClient,
    delete,
    is_absent,
    is_empty,
    is_unchanged,
    put,
    range_end,
)
from ostraca_fabric.membership.etcd.client.settings import EtcdSettings
from ostraca_fabric.membership.etcd.client.watch import entry_of
from ostraca_fabric.membership.etcd.schema.keys import EtcdKeys
from ostraca_fabric.membership.etcd.schema.records import (
    decode_at,
    decode_rebuild,
    decode_volume,
    encode_enclosure,
    encode_grants,
    encode_meta,
    encode_placement,
    encode_rebuild,
    encode_volume,
)
from ostraca_fabric.membership.etcd.schema.view import FIRST_PLACEMENT
from ostraca_fabric.membership.etcd.store import (
    Decision,
    EtcdStore,
    Read,
    Tries,
    check_none_below,
    none_above,
)
from ostraca_fabric.membership.rules import GRANTS_LOST, Placements
from ostraca_fabric.model.fabric_map import EnclosureRecord, check_blocks_fit
from ostraca_fabric.model.ids import FabricId, ShardId, StartId
from ostraca_fabric.model.overrides import OVERRIDES_MARKER
from ostraca_fabric.model.volume import VolumeRecord
from ostraca_fabric.policies.backoff import Dice


class Rebuilding(AbstractAsyncContextManager["Rebuilding"]):
    """Attempt to rebuild a fabric: ``take``, ``write``, then ``begin``.

    Use as a context manager. Every method raises StoreAwayError if etcd is unreachable, and MembershipError
    if etcd refuses. An attempt may end anywhere, and a new attempt may follow.
    """

    def __init__(
        self,
        fabric: FabricId,
        settings: EtcdSettings,
        *,
        keys: EtcdKeys,
        dice: Dice,
        start: StartId,
        unix_s: float,
    ) -> None:
        """Prepare a rebuild of *fabric* at *keys*.

        *start* identifies the attempt. *unix_s* is the time of the rebuild. ``meta`` keeps the time, to tell
        this rebuild from earlier rebuilds.
        """
        self._client = EtcdClient(settings, dice=dice)
        self._keys = keys
        self._fabric = fabric
        self._unix_s = unix_s
        self._mark = encode_rebuild(fabric, start)
        self._taken = 0
        """Revision in which this attempt took the prefix."""

    async def __aexit__(self, *_: object) -> None:
        """Close the connections, at any stage."""
        await self._client.close()

    async def is_begun(self) -> bool:
        """Tell whether an unfinished rebuild of this fabric exists.

        Raises WrongStoreError if no rebuild is allowed under this prefix.
        """
        await none_above(self._client, self._keys)
        return bool((await self._read()).entries)

    async def take(self) -> None:
        """Take the prefix, so that no other attempt writes there.

        Raises WrongStoreError if no rebuild is allowed under this prefix.
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
        """Write all missing records.

        Raises BlocksTooLargeError if the enclosures cannot hold the volumes' blocks, and ChangedError if
        another attempt has taken the prefix.
        """
        check_blocks_fit(volumes, enclosures)
        for change in _changes(await self._read(), self._keys, enclosures, volumes):
            if not await self._is_done(change):
                raise self._overtaken()

    async def begin(self, key_check: str) -> None:
        """Write ``meta`` with *key_check*, and thereby begin the fabric.

        Raises ChangedError if another attempt has taken the prefix.
        """
        meta = self._keys.meta()
        value = encode_meta(self._fabric, key_check, rebuilt_unix_s=self._unix_s)
        if await self._is_done(put(meta, value), delete(self._keys.rebuild())):
            return
        # A repeated call may have been done already.
        begun = (await self._client.range(meta)).kvs
        if not begun or begun[0].value != value:
            raise self._overtaken()

    async def _is_done(self, *changes: rpc.RequestOp) -> bool:
        """Apply changes if the prefix is still ours; tell whether they were applied."""
        is_ours = [is_absent(self._keys.meta()), is_unchanged(self._keys.rebuild(), self._taken)]
        return bool((await self._client.txn(is_ours, changes)).succeeded)

    async def _read(self) -> Read:
        """Return the content of the prefix.

        Raises WrongStoreError unless the prefix is empty or left by a rebuild of this fabric.
        """
        keys, prefix = self._keys, self._keys.prefix
        listed = await self._client.range(prefix, end=range_end(prefix))
        read = Read({kv.key: entry_of(kv) for kv in listed.kvs}, listed.header.revision)
        where = f"under {keys.text} of etcd at {self._client.endpoint}"
        if keys.meta() in read.entries:
            raise WrongStoreError(f"a fabric was begun {where} meanwhile: look again")
        mark = read.value(keys.rebuild())
        fabric = None if mark is None else decode_at(keys.rebuild(), mark, decode_rebuild)[0]
        if fabric != self._fabric:
            check_none_below({key: entry.value for key, entry in read.entries.items()}, keys)
        if fabric is None and read.entries:
            raise WrongStoreError(
                f"no fabric is {where}, but keys of an unknown fabric are, such as "
                f"{min(read.entries).decode()}: take another prefix, or delete these keys (`etcdctl del "
                f"--prefix {keys.text}`)"
            )
        if fabric not in (None, self._fabric):
            raise WrongStoreError(
                f"an unfinished rebuild of another fabric, {fabric.hex()}, lies {where}; these are drives of "
                f"{self._fabric.hex()}: take another prefix, or give the unfinished rebuild up (`etcdctl del "
                f"--prefix {keys.text}`)"
            )
        return read

    def _overtaken(self) -> ChangedError:
        return ChangedError(
            f"another rebuild of fabric {self._fabric.hex()} has begun under {self._keys.text}: wait for its "
            "end, then check with --dry-run"
        )


def _changes(
    read: Read, keys: EtcdKeys, enclosures: Sequence[EnclosureRecord], volumes: Iterable[VolumeRecord]
) -> Iterator[rpc.RequestOp]:
    """Yield the changes to the records left by earlier attempts. Pure."""
    wanted = {
        keys.grants(shard.id): encode_grants(GRANTS_LOST) for each in enclosures for shard in each.shards
    }
    for volume in volumes:
        at_volume = keys.volume(volume.tenant, volume.name)
        left = read.value(at_volume)
        lowest = 1 if left is None else decode_at(at_volume, left, decode_volume).incarnation
        wanted[at_volume] = encode_volume(volume.raised_to(lowest))
    wanted |= {keys.enclosure(each.id): encode_enclosure(each) for each in enclosures}
    placements = Placements(FIRST_PLACEMENT).after((), enclosures, force=False)
    wanted[keys.placement()] = encode_placement(placements.epoch)
    yield from (delete(each.key) for each in read.below(keys.enclosures()) if each.key not in wanted)
    yield from (put(key, value) for key, value in wanted.items() if read.value(key) != value)


class FabricRepair:
    """Repair of one fabric. Call ``close`` at the end.

    Every method raises StoreAwayError if etcd is unreachable, and MembershipError if etcd refuses. The work
    may then be incomplete; repeat the call.
    """

    def __init__(self, fabric: FabricId, settings: EtcdSettings, *, keys: EtcdKeys, dice: Dice) -> None:
        """Prepare the repair of the fabric at *keys*."""
        self._client = EtcdClient(settings, dice=dice)
        self._store = EtcdStore(self._client, keys, fabric)
        self._keys = keys

    async def close(self) -> None:
        """Close every connection."""
        await self._client.close()

    async def keep_grants(self, shards: Iterable[ShardId]) -> None:
        """Record for shards without grants that an unknown writer may write anywhere.

        Put enclosures with these shards only afterwards.
        """
        for key in map(self._keys.grants, shards):
            await self._store.change(f"keep {key.decode()}", partial(_keep_grants, key), key)

    async def raise_volumes(self, volumes: Iterable[VolumeRecord]) -> list[VolumeRecord]:
        """Raise existing volumes at least to these incarnations.

        Agents treat the change as an erasure. Return the previous records of the raised volumes.
        """
        before = [await self._raise(volume) for volume in volumes]
        return [each for each in before if each is not None]

    async def _raise(self, volume: VolumeRecord) -> VolumeRecord | None:
        """Raise a volume, and return its previous record, or None if already as high."""
        key, marker = self._keys.volume(volume.tenant, volume.name), self._keys.overrides_marker()
        earlier: list[VolumeRecord] = []

        def decide(read: Read) -> Decision[None]:
            if (value := read.value(key)) is None:
                raise MembershipError(f"there is no volume {volume.name!r} of tenant {volume.tenant!r}")
            earlier.append(decode_at(key, value, decode_volume))
            after = earlier[-1].raised_to(volume.incarnation)
            changes = [put(key, encode_volume(after)), put(marker, OVERRIDES_MARKER)]
            return None, changes if after != earlier[-1] else []

        await self._store.change(f"raise the incarnation of volume {volume.name}", decide, key)
        return earlier[0] if earlier[0].incarnation < volume.incarnation else None


def _keep_grants(key: bytes, read: Read) -> Decision[None]:
    return None, [] if read.modified(key) else [put(key, encode_grants(GRANTS_LOST))]
