"""Reads at one revision, and writes that depend on unchanged reads.

Every change of a fabric reads, decides and writes, and starts again if another writer was first. Each step
also reads and compares the fabric's own record (``meta``). So an agent with a wrong etcd or prefix, or with a
release too old for the fabric, changes nothing.

A fabric's prefix must not begin the prefix of another fabric. Such fabrics would watch each other's keys, and
deleting one prefix would delete both fabrics. Therefore ``begin`` and rebuild refuse such a prefix.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from ostraca_fabric.errors import MembershipError, NotAllowedError, OtherFabricError, WrongStoreError
from ostraca_fabric.membership.etcd.client import rpc_pb2 as rpc
from ostraca_fabric.membership.etcd.client.client import (
    EtcdClient,
    get,
    get_all,
    is_absent,
    is_empty,
    is_unchanged,
    none_written,
    put,
    range_end,
)
from ostraca_fabric.membership.etcd.client.settings import EtcdSettings
from ostraca_fabric.membership.etcd.client.watch import entry_of
from ostraca_fabric.membership.etcd.client.watch_events import Entry
from ostraca_fabric.membership.etcd.schema.keys import EtcdKeys
from ostraca_fabric.membership.etcd.schema.records import (
    decode_key_check,
    decode_meta,
    decode_rebuild,
    encode_meta,
)
from ostraca_fabric.model.ids import FabricId
from ostraca_fabric.policies.backoff import Dice

_Result = TypeVar("_Result")
Decision: TypeAlias = tuple[_Result, Sequence[rpc.RequestOp]]
"""Result of a change for the caller, and the operations to apply; none if the wanted state is there."""

OPERATIONS_MAX = 128
"""Limit of etcd per transaction (``--max-txn-ops``)."""

_LOST = (
    "rebuild the fabric with `ostraca fabric rebuild --etcd`, or restore etcd from a backup without "
    "running agents (docs/howto/rebuild-a-fabric.md)"
)


@dataclass(frozen=True, slots=True)
class Read:
    """Content at one revision."""

    entries: Mapping[bytes, Entry]
    revision: int

    def value(self, key: bytes) -> bytes | None:
        """Return the value at a key, or None."""
        entry = self.entries.get(key)
        return None if entry is None else entry.value

    def modified(self, key: bytes) -> int:
        """Return the revision of a key's last write, or 0 if absent."""
        entry = self.entries.get(key)
        return 0 if entry is None else entry.modified

    def below(self, prefix: bytes) -> list[Entry]:
        """Return the entries below a prefix that was read."""
        return [entry for key, entry in self.entries.items() if key.startswith(prefix)]


class EtcdStore:
    """Keys of one fabric.

    Every method raises MembershipError if etcd cannot be asked, or has another fabric.
    """

    def __init__(
        self,
        client: EtcdClient,
        keys: EtcdKeys,
        fabric: FabricId,
        key_check: str = "",
        *,
        has_joined: bool = False,
    ) -> None:
        """Work on *fabric*, stored at *keys*.

        *key_check* identifies the fabric key; empty if unknown to the caller. *has_joined* tells that the
        caller was in the fabric before this process started.
        """
        self._client = client
        self._keys = keys
        self._fabric = fabric
        self._key_check = key_check

        self._has_joined = has_joined
        self._was_there = False
        """Whether this process has already seen the fabric."""

    async def begin(self) -> None:
        """Create the fabric under an empty prefix, unless the fabric already exists.

        Leftover keys would become the fabric's map. No other fabric may lie above or below the prefix.
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
            f"there is no fabric under {self._keys.text} of etcd at {self._client.endpoint}, but other keys, "
            "perhaps of an unfinished rebuild: repeat the rebuild, or take another prefix"
        )

    def check(self, meta: bytes | None) -> None:
        """Raise WrongStoreError unless *meta* is the record of the expected fabric."""
        where = f"under {self._keys.text} of etcd at {self._client.endpoint}"
        if meta is None:
            if self._was_there:
                raise WrongStoreError(
                    f"etcd answers, and has lost fabric {self._fabric.hex()} {where}: {_LOST}"
                )
            if self._has_joined:
                raise WrongStoreError(
                    f"fabric {self._fabric.hex()} is no longer {where}: check the endpoints and the prefix; "
                    f"if both are unchanged, etcd has lost the fabric: {_LOST}"
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
                f"the fabric {where} has another fabric key: use the key file of the fabric's creation, or "
                "no block is found"
            )
        self._was_there = True

    async def read(self, *keys: bytes, prefixes: Sequence[bytes] = ()) -> Read:
        """Return the current entries at *keys* and below *prefixes*."""
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
        """Apply *operations* in one step if no compared key was written since *read*.

        Compares the keys *unchanged* and all keys below the prefixes *unchanged_below*. Return the new
        revision, or None after a failed comparison. None does not exclude that an earlier attempt succeeded:
        read again.
        """
        compared = [is_unchanged(key, read.modified(key)) for key in (self._keys.meta(), *unchanged)]
        compared += [none_written(each, range_end(each), since=read.revision) for each in unchanged_below]
        done = list(operations)
        if max(len(compared), len(done)) > OPERATIONS_MAX:
            raise MembershipError(
                f"a change of {max(len(compared), len(done))} records: etcd accepts {OPERATIONS_MAX} at "
                "once; use several steps"
            )
        answer = await self._client.txn(compared, done)
        return int(answer.header.revision) if answer.succeeded else None

    async def change(
        self,
        what: str,
        decide: Callable[[Read], Decision[_Result]],
        *keys: bytes,
        prefixes: Sequence[bytes] = (),
    ) -> tuple[_Result, int]:
        """Read, decide and write, again after each write of a competitor.

        Compares all keys read, and all keys below the prefixes read. Return the result of *decide*, with the
        revision of the change; without a change, with the newest revision of the entries read.
        """
        tries = self.tries(what)
        while True:
            read = await self.read(*keys, prefixes=prefixes)
            result, operations = decide(read)
            if not operations:
                return result, max(entry.modified for entry in read.entries.values())
            done = await self.write(read, operations, unchanged=keys, unchanged_below=prefixes)
            if done is not None:
                return result, done
            await tries.again()

    def tries(self, what: str) -> Tries:
        """Return the counter of attempts for one change, named *what* in errors."""
        return Tries(what, self._client)


class Tries:
    """Attempts at one change in competition with other writers."""

    def __init__(self, what: str, client: EtcdClient) -> None:
        """Start the time limit with the first attempt."""
        self._what = what
        self._backoff = client.backoff()
        self._until_s = asyncio.get_running_loop().time() + client.settings.operation_timeout_s

    async def again(self) -> None:
        """Wait before the next attempt. Raises MembershipError after ``operation_timeout_s``."""
        if asyncio.get_running_loop().time() >= self._until_s:
            raise MembershipError(
                f"other writers kept changing the same records of etcd: could not {self._what}"
            )
        await asyncio.sleep(self._backoff.next_s())


_ADVICE = "the prefix of a fabric must not begin the prefix of another fabric. Take another prefix"


async def none_above(client: EtcdClient, keys: EtcdKeys) -> list[bytes]:
    """Return the keys of possible fabrics above this prefix, all absent.

    A later transaction must require their absence. Keys unreadable for our etcd user are left out. Raises
    WrongStoreError if a fabric exists at one of them.
    """
    absent = []
    for above in keys.above():
        for key in (above.meta(), above.rebuild()):
            try:
                there = (await client.range(key)).kvs
            except NotAllowedError:  # an administrator who granted only our prefix is responsible for others
                continue
            if there:
                raise WrongStoreError(
                    f"a fabric lies under {above.text} of etcd at {client.endpoint}, above {keys.text}: "
                    f"{_ADVICE}"
                )
            absent.append(key)
    return absent


def check_none_below(values: Mapping[bytes, bytes], keys: EtcdKeys) -> None:
    """Raise WrongStoreError if another fabric lies below the prefix. Pure.

    *values* has all keys below the prefix.
    """
    for key, value in sorted(values.items()):
        if (below := keys.below(key)) is not None and (keys.kind(key) is None or _is_of_a_fabric(value)):
            raise WrongStoreError(
                f"another fabric lies under {below}, below {keys.text}: {_ADVICE}, and delete nothing under "
                f"{keys.text}"
            )


def _is_of_a_fabric(value: bytes) -> bool:
    """Tell a fabric's own record from a namesake, such as a volume's record."""
    for decode in (decode_meta, decode_rebuild):
        try:
            decode(value)
        except MembershipError:
            continue
        return True
    return False


async def fabric_at(keys: EtcdKeys, settings: EtcdSettings, *, dice: Dice) -> FabricId | None:
    """Return the id of the fabric at *keys*, or None without a fabric.

    Raises StoreAwayError if etcd is unreachable, and MembershipError if etcd refuses. Raises WrongStoreError
    for an unreadable record, such as a newer release's.
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


def not_for_us(keys: EtcdKeys, endpoint: str, why: MembershipError) -> WrongStoreError:
    """Return the error for a fabric's unreadable record; *why* names the remedy."""
    return WrongStoreError(f"{keys.meta().decode()} of etcd at {endpoint} is not for this release: {why}")
