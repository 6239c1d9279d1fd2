"""Volumes as served by an agent: newest record, tag identity and secrets.

Secrets never leave the agent. Erasing a volume raises its incarnation and so changes its secret and keys:
no earlier block is found again. An agent learns of an erasure as of every override. From then on the agent
serves the new incarnation, also to connections with the volume already open. Requests under the previous
incarnation may finish; after their end the agent has *purged* the erasure.

An agent cut off from the store may have missed an erasure. The agent therefore serves erasable volumes
only for ``key_ttl_s`` after its last answered query, and only if all erasures up to then were delivered.
This time starts before the query, on the agent's own clock.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.errors import (
    BlocksTooLargeError,
    LayoutMismatchError,
    MembershipError,
    RefusedError,
    StoreAwayError,
    UnknownVolumeError,
    UsageError,
    WrongStoreError,
)
from ostraca_fabric.model.chain import Span
from ostraca_fabric.model.direct_reads import second_tenant_refusal
from ostraca_fabric.model.extent import PAGE_BYTES, rounded_up
from ostraca_fabric.model.fabric_map import check_blocks_fit
from ostraca_fabric.model.ids import TenantId, checked_name
from ostraca_fabric.model.volume import VolumeIdentity, VolumeRecord
from ostraca_fabric.ports.membership import Membership
from ostraca_fabric.runtime.tasks import set_within
from ostraca_fabric.tables.digests import placement_secret, volume_secret
from ostraca_fabric.telemetry.log_lines import LogDedup
from ostraca_fabric.wire.messages import OpenVolume

_Incarnation = tuple[TenantId, str, int]


log = logging.getLogger(__name__)

_QUERIES_PER_TTL = 4
"""Several queries per period, so that a few failed answers in a row stop no service."""

_QUERY_INTERVAL_MAX_S = 60.0

_RETRY_S = 1.0


class Incarnations:
    """The newest known record of each volume. ``run`` beside the controller."""

    def __init__(
        self,
        membership: Membership,
        clock: Callable[[], float],
        on_overrides: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin without records.

        *clock* is monotonic, in seconds. *on_overrides* is called after possible changes of overrides.
        """
        self._on_overrides = on_overrides
        self._membership = membership
        self._clock = clock
        self._newest: dict[tuple[TenantId, str], VolumeRecord] = {}
        self._in_use: Counter[_Incarnation] = Counter()
        self._confirmed_s = -math.inf
        self._changed = asyncio.Event()
        self._revision = 0
        self._purged = 0
        self._trouble = LogDedup(log, clock)

    async def run(self) -> None:
        """Follow erasures and query the store, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow())
            group.create_task(self._query())

    async def refresh(self) -> None:
        """Query the store for erasures. Raises MembershipError."""
        asked_s = self._clock()
        await self._membership.refresh_overrides()
        await self._read_records()
        self._confirmed_s = max(self._confirmed_s, asked_s)

    def newest(self, record: VolumeRecord) -> VolumeRecord:
        """Return the newest known record of a volume, or *record* itself."""
        known = self._newest.get((record.tenant, record.name), record)
        return known if known.incarnation > record.incarnation else record

    def is_served(self, record: VolumeRecord) -> bool:
        """Return whether a volume's blocks may be served now.

        An erasable volume is served for ``key_ttl_s`` after the last query.
        """
        key_ttl_s = self._membership.overrides.live.key_ttl_s
        return not record.is_erasable or self._clock() <= self._confirmed_s + key_ttl_s

    def begin_use(self, record: VolumeRecord) -> None:
        """Count a request of this incarnation, until ``end_use``."""
        self._in_use[record.tenant, record.name, record.incarnation] += 1

    def end_use(self, record: VolumeRecord) -> None:
        """Stop counting a request."""
        incarnation = record.tenant, record.name, record.incarnation
        self._in_use[incarnation] -= 1
        if not self._in_use[incarnation]:
            del self._in_use[incarnation]

    @property
    def purged(self) -> int:
        """Newest revision of overrides whose erasures are complete here."""
        newest = self._newest
        if all(
            (tenant, name) not in newest or newest[tenant, name].incarnation <= incarnation
            for tenant, name, incarnation in self._in_use
        ):
            self._purged = self._revision
        return self._purged

    async def _follow(self) -> None:
        while True:
            try:
                async with aclosing(self._membership.override_changes()) as changes:  # type: ignore[type-var]  # a generator
                    async for _ in changes:
                        await self._read_records()
                        self._changed.set()
                        self._on_overrides()
            except MembershipError as error:
                log.warning("Erasures can't be followed now: %s", error)
            await asyncio.sleep(_RETRY_S)

    async def _query(self) -> None:
        while True:
            self._changed.clear()
            key_ttl_s = self._membership.overrides.live.key_ttl_s
            wait_s = min(key_ttl_s / _QUERIES_PER_TTL, _QUERY_INTERVAL_MAX_S)
            try:
                await self.refresh()
            except (StoreAwayError, WrongStoreError) as error:  # ``Standing`` reports the error
                log.debug("The membership store does not report erasures: %s", error)
                wait_s = min(wait_s, _RETRY_S)
            except MembershipError as error:
                self._trouble.report("The membership store does not report erasures: %s", error)
                wait_s = min(wait_s, _RETRY_S)
            else:
                self._trouble.resolve("The membership store reports erasures again")
            await set_within(self._changed, wait_s)  # the interval may have changed

    async def _read_records(self) -> None:
        revision = self._membership.overrides.revision  # the volumes below are as new, or newer
        async with aclosing(self._membership.volume_changes()) as volumes:  # type: ignore[type-var]  # a generator
            records = await anext(volumes)
            self._newest = {(record.tenant, record.name): record for record in records}
        self._revision = max(self._revision, revision)


@dataclass(frozen=True, slots=True)
class ServedVolume:
    """A volume of the connection's tenant, open on a connection."""

    record: VolumeRecord
    identity: VolumeIdentity
    secret: bytes
    placement_secret: bytes
    break_even_tokens: int = 0
    """Shortest chain to put: this worker computes shorter chains faster than loading them."""

    pool: int = 0
    """Pool of the volume's blocks; 0 is shared by all tenants without a quota."""

    def check_spans(self, spans: Sequence[Span], *, blocks_max: int) -> None:
        """Check the number of blocks and the form of hashes. Raises UsageError.

        The limit is *blocks_max* per request, and hashes must fit the volume.
        """
        blocks = sum(map(len, spans))
        if max(blocks, len(spans)) > blocks_max:
            raise UsageError(
                f"{blocks} blocks in {len(spans)} spans in one request: send at most {blocks_max} at once"
            )
        wanted = self.record.layout.hash_bytes
        if any(span.hash_bytes != wanted for span in spans):
            raise UsageError(f"engine hashes of volume {self.record.name!r} have {wanted} bytes")

    def check_single_block(self, spans: Sequence[Span]) -> None:
        """Check that a query names one block. Raises UsageError."""
        blocks = sum(map(len, spans))
        if blocks != 1:
            raise UsageError(f"{blocks} blocks in one query: name one")
        self.check_spans(spans, blocks_max=1)

    def check_sizes(self, shortest_bytes: int, longest_bytes: int, slot_bytes: int) -> None:
        """Check sizes of blocks and slots. Raises UsageError."""
        record = self.record
        longest_slot_bytes = rounded_up(record.block_bytes)
        if not 0 < slot_bytes <= longest_slot_bytes or slot_bytes % PAGE_BYTES:
            raise UsageError(
                f"slots of {slot_bytes} bytes: slots of volume {record.name!r} are multiples of {PAGE_BYTES} "
                f"bytes, at most {longest_slot_bytes}"
            )
        for length in (shortest_bytes, longest_bytes):
            if not 0 < length <= min(record.block_bytes, slot_bytes):
                raise UsageError(
                    f"a block of {length} bytes in a slot of {slot_bytes}: blocks of volume {record.name!r} "
                    f"have 1 to {record.block_bytes} bytes and fit their slots"
                )

    def are_too_short(self, spans: Sequence[Span]) -> NDArray[np.bool_]:
        """Return whether each block's whole chain is below break-even.

        The chain's length as known to the writer counts, not the block's depth: a long chain is loaded at
        once, including its first blocks. Blocks without a chain are never too short.
        """
        page_tokens = self.record.layout.page_tokens
        short = [0 < span.chain_blocks * page_tokens < self.break_even_tokens for span in spans]
        return np.array(short, np.bool_).repeat([len(span) for span in spans])


class Volumes:
    """Open and create volumes."""

    def __init__(
        self, membership: Membership, fabric_key: bytes, incarnations: Incarnations | None = None
    ) -> None:
        """Use the fabric key, the source of every volume's secret.

        *incarnations* reports erasures; without it, no volume is ever erased.
        """
        self._membership = membership
        self._fabric_key = fabric_key
        self._incarnations = incarnations

    async def open(self, tenant: TenantId, request: OpenVolume) -> ServedVolume:
        """Return the volume; create it if the request says so.

        Raises UsageError for a bad name or size, and for a largest block that does not fit some shard.
        Raises UnknownVolumeError, LayoutMismatchError when the volume exists with another layout or
        largest block. Raises RefusedError when the membership store fails, and instead of a volume of a
        second tenant under direct reads.
        """
        name = checked_name("volume", request.name)
        if request.break_even_tokens < 0:
            raise UsageError(f"break_even_tokens is {request.break_even_tokens}: set it to 0 or more")
        wanted = VolumeRecord(tenant, name, request.layout, request.block_bytes)
        try:
            found = await self._find_or_create(wanted, create=request.create)
            check_blocks_fit([found], self._membership.map.enclosures.values())
        except BlocksTooLargeError as error:
            raise UsageError(str(error)) from error
        except MembershipError as error:
            raise RefusedError("membership", f"volume {name!r} can't be opened now: {error}") from error
        _check_same(wanted, found)
        return replace(self._serve(found), break_even_tokens=request.break_even_tokens)

    async def find(self, tenant: TenantId, name: str) -> ServedVolume:
        """Return an existing volume. Raises UnknownVolumeError, RefusedError.

        The store is not asked for a name that no volume can have, such as a text of megabytes.
        """
        try:
            found = await self._membership.volume(tenant, checked_name("volume", name))
        except UsageError as error:
            raise UnknownVolumeError("unknown_volume", str(error)) from error
        except MembershipError as error:
            raise RefusedError("membership", f"volume {name!r} can't be read now: {error}") from error
        if found is None:
            raise UnknownVolumeError("unknown_volume", f"there is no volume {name!r} of tenant {tenant!r}")
        return self._serve(found)

    def newest(self, volume: ServedVolume) -> ServedVolume:
        """Return the current state of an open volume.

        Since its opening the volume may have been erased, or its tenant given a quota.
        """
        if self._incarnations is None:
            return volume
        record = self._incarnations.newest(volume.record)
        if record is volume.record and volume.pool == self._pool_of(record.tenant):
            return volume
        return replace(self._serve(record), break_even_tokens=volume.break_even_tokens)

    def _serve(self, found: VolumeRecord) -> ServedVolume:
        identity = VolumeIdentity(found.tenant, found.name, found.layout.digest())
        secret = volume_secret(
            self._fabric_key, tenant=found.tenant, name=found.name, incarnation=found.incarnation
        )
        return ServedVolume(
            found, identity, secret, placement_secret(secret), pool=self._pool_of(found.tenant)
        )

    def _pool_of(self, tenant: TenantId) -> int:
        return self._membership.overrides.tenant(tenant).pool

    async def _find_or_create(self, wanted: VolumeRecord, *, create: bool) -> VolumeRecord:
        found = await self._membership.volume(wanted.tenant, wanted.name)
        if found is not None:
            return found
        if create:
            await self._membership.refresh_overrides()
            overrides = self._membership.overrides
            tenant = overrides.tenant(wanted.tenant)
            if refusal := second_tenant_refusal(overrides.live.direct_reads_tenant, wanted.tenant):
                raise RefusedError("direct_reads", refusal)
            return await self._membership.create_volume(replace(wanted, is_erasable=tenant.is_erasable))
        raise UnknownVolumeError(
            "unknown_volume",
            f"there is no volume {wanted.name!r} of tenant {wanted.tenant!r}: open it with create=True",
        )


def _check_same(wanted: VolumeRecord, found: VolumeRecord) -> None:
    if wanted.layout != found.layout:
        differing = [
            f"{field} is {getattr(found.layout, field)!r}, not {getattr(wanted.layout, field)!r}"
            for field in found.layout.__dataclass_fields__
            if getattr(found.layout, field) != getattr(wanted.layout, field)
        ]
        raise LayoutMismatchError(
            "layout_mismatch",
            f"volume {found.name!r} has another layout: {'; '.join(differing)}. Open the volume with its "
            "own layout, or create a volume with another name",
        )
    if wanted.block_bytes != found.block_bytes:
        raise LayoutMismatchError(
            "layout_mismatch",
            f"volume {found.name!r} has blocks of up to {found.block_bytes} bytes, not {wanted.block_bytes}: "
            "open the volume with its own block_bytes, or create a volume with another name",
        )
