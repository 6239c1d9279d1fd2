"""Reads of one revision, and writes that are done only if nothing that was read has changed since.

Every change of a fabric is made of these two: read, decide, write; and from the start when somebody else was
first. The fabric's own record (``meta``) is read and compared with each: who was told of a wrong etcd or
prefix, or runs a release that the fabric has left behind, changes nothing.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ostraca_fabric.adapters.etcd.client import range_end
from ostraca_fabric.adapters.etcd.found import not_for_us
from ostraca_fabric.adapters.etcd.nesting import check_none_below, none_above
from ostraca_fabric.adapters.etcd.records import decode_key_check, decode_meta, encode_meta
from ostraca_fabric.adapters.etcd.told import Entry
from ostraca_fabric.adapters.etcd.transactions import (
    get,
    get_all,
    is_absent,
    is_empty,
    is_unchanged,
    none_written,
    put,
)
from ostraca_fabric.adapters.etcd.watch import entry_of
from ostraca_fabric.errors import MembershipError, OtherFabricError, WrongStoreError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ostraca_fabric.adapters.etcd import rpc_pb2 as rpc
    from ostraca_fabric.adapters.etcd.client import EtcdClient
    from ostraca_fabric.adapters.etcd.keys import Keys
    from ostraca_fabric.ids import FabricId

OPERATIONS_MAX = 128
"""What etcd takes in one transaction (its ``--max-txn-ops``)."""

_LOST = (
    "make it again with `ostraca fabric rebuild --etcd`, or restore etcd from a backup while no agent runs "
    "(docs/howto/rebuild-a-fabric.md)"
)


@dataclass(frozen=True, slots=True)
class Read:
    """What lay there at one revision."""

    entries: Mapping[bytes, Entry]
    revision: int

    def value(self, key: bytes) -> bytes | None:
        """Return what lies at a key."""
        entry = self.entries.get(key)
        return None if entry is None else entry.value

    def modified(self, key: bytes) -> int:
        """Return the revision in which a key was last written, 0 when there is none."""
        entry = self.entries.get(key)
        return 0 if entry is None else entry.modified

    def below(self, prefix: bytes) -> list[Entry]:
        """Return what lay below a prefix that was read."""
        return [entry for key, entry in self.entries.items() if key.startswith(prefix)]


class EtcdStore:
    """One fabric's keys. Every method raises MembershipError when etcd can't be asked, or is another
    fabric's.
    """

    def __init__(
        self,
        client: EtcdClient,
        keys: Keys,
        fabric: FabricId,
        key_check: str = "",
        *,
        has_joined: bool = False,
    ) -> None:
        """Work on the fabric *fabric*, which lies at *keys*; *key_check* tells its key, empty when the caller
        has none. *has_joined*: who asks was in that fabric before this process.
        """
        self._client = client
        self._keys = keys
        self._fabric = fabric
        self._key_check = key_check

        self._has_joined = has_joined
        self._was_there = False
        """Whether this process has seen the fabric there."""

    async def begin(self) -> None:
        """Begin the fabric where nothing lies, and under no other's prefix, unless it lies there already:
        what others left would be its map otherwise.
        """
        meta, prefix = self._keys.meta(), self._keys.prefix
        if not (await self._client.range(meta)).kvs:
            await self._begin(meta, prefix)
        await self.read()

    async def _begin(self, meta: bytes, prefix: bytes) -> None:
        value = encode_meta(self._fabric, self._key_check)
        above = await none_above(self._client, self._keys)
        is_free = [is_empty(prefix, range_end(prefix)), *map(is_absent, above)]
        done = await self._client.txn(is_free, [put(meta, value)], [get_all(prefix, range_end(prefix))])
        if done.succeeded:
            return
        there = {kv.key: kv.value for kv in done.responses[0].response_range.kvs}
        if meta in there:
            return
        await none_above(self._client, self._keys)
        check_none_below(there, self._keys)
        raise WrongStoreError(
            f"there is no fabric under {self._keys.text} of etcd at {self._client.endpoint}, and other "
            "keys are, as a rebuild leaves them that did not end: repeat that, or take another prefix"
        )

    def check(self, meta: bytes | None) -> None:
        """Raise WrongStoreError unless this is the record of the fabric that is meant."""
        where = f"under {self._keys.text} of etcd at {self._client.endpoint}"
        if meta is None:
            if self._was_there:
                message = f"etcd answers, and has lost fabric {self._fabric.hex()} {where}: {_LOST}"
                raise WrongStoreError(message)
            if self._has_joined:
                raise WrongStoreError(
                    f"fabric {self._fabric.hex()} is no longer {where}: check the endpoints and the prefix; "
                    f"if they are as they were, etcd has lost it: {_LOST}"
                )
            raise WrongStoreError(
                f"there is no fabric {where}: check the endpoints and the prefix, or begin the fabric there"
            )
        try:
            fabric, known = decode_meta(meta), decode_key_check(meta)
        except MembershipError as error:
            raise not_for_us(self._keys, self._client.endpoint, error) from error
        if fabric != self._fabric:
            raise OtherFabricError(
                f"the fabric {where} is {fabric.hex()}, and not {self._fabric.hex()}: check the endpoints, "
                "the prefix and the fabric's id",
                fabric,
            )
        if self._key_check and known and known != self._key_check:
            raise WrongStoreError(
                f"the fabric {where} has another fabric key than this one: take the key file that it was "
                "begun with, or no block is found"
            )
        self._was_there = True

    async def read(self, *keys: bytes, prefixes: Sequence[bytes] = ()) -> Read:
        """Return what lies at *keys* and below *prefixes*, as it stands now."""
        wanted = [get(self._keys.meta()), *map(get, keys)]
        wanted += [get_all(prefix, range_end(prefix)) for prefix in prefixes]
        answer = await self._client.txn([], wanted)
        entries = [entry_of(kv) for each in answer.responses for kv in each.response_range.kvs]
        read = Read({entry.key: entry for entry in entries}, answer.header.revision)
        self.check(read.value(self._keys.meta()))
        return read

    async def write(
        self,
        read: Read,
        operations: Iterable[rpc.RequestOp],
        *,
        unchanged: Iterable[bytes],
        unchanged_below: Iterable[bytes] = (),
    ) -> int | None:
        """Do *operations* in one step if the keys *unchanged* are as they were read, and no key below the
        prefixes *unchanged_below* was written since. Return the revision that made, None when they are not.

        None does not say that nothing was done: an earlier try may have been. Read again.
        """
        compared = [is_unchanged(key, read.modified(key)) for key in (self._keys.meta(), *unchanged)]
        compared += [none_written(each, range_end(each), since=read.revision) for each in unchanged_below]
        done = list(operations)
        if max(len(compared), len(done)) > OPERATIONS_MAX:
            raise MembershipError(
                f"a change of {max(len(compared), len(done))} records: etcd takes {OPERATIONS_MAX} at once, "
                "make it in several steps"
            )
        answer = await self._client.txn(compared, done)
        return int(answer.header.revision) if answer.succeeded else None

    def tries(self, what: str) -> Tries:
        """Return what counts the tries of one change; *what* says in an error what was not done."""
        return Tries(what, self._client)


class Tries:
    """The tries of one change that others may be faster with."""

    def __init__(self, what: str, client: EtcdClient) -> None:
        """Begin with the first."""
        self._what = what
        self._backoff = client.backoff()
        self._until_s = asyncio.get_running_loop().time() + client.settings.operation_timeout_s

    async def again(self) -> None:
        """Wait before the next try. Raises MembershipError when ``operation_timeout_s`` is over."""
        if asyncio.get_running_loop().time() >= self._until_s:
            message = f"others changed the same records of etcd all the time, while this was to {self._what}"
            raise MembershipError(message)
        await asyncio.sleep(self._backoff.next_s())
