"""Volumes as one agent serves them: the record, what tags commit to, and the secrets, which never leave the
agent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ostraca_fabric.errors import (
    BlocksTooLargeError,
    LayoutMismatchError,
    MembershipError,
    RefusedError,
    UnknownVolumeError,
    UsageError,
)
from ostraca_fabric.fabric_map import check_blocks_fit
from ostraca_fabric.ids import checked_name
from ostraca_fabric.keys import placement_secret, volume_secret
from ostraca_fabric.volume import VolumeIdentity, VolumeRecord

if TYPE_CHECKING:
    from ostraca_dpu_agent.incarnations import Incarnations
    from ostraca_fabric.ids import TenantId
    from ostraca_fabric.ports.membership import Membership
    from ostraca_fabric.wire.messages import OpenVolume


@dataclass(frozen=True, slots=True)
class ServedVolume:
    """A volume of the connection's tenant, open on one connection."""

    record: VolumeRecord
    identity: VolumeIdentity
    secret: bytes
    placement_secret: bytes
    break_even_tokens: int = 0
    """Chains shorter than this are not put: this worker computes them faster than it loads them."""


class Volumes:
    """Opens and creates volumes."""

    def __init__(
        self, membership: Membership, fabric_key: bytes, incarnations: Incarnations | None = None
    ) -> None:
        """Take the fabric key, from which every volume's secret is derived, and who knows what was erased;
        without that nothing ever is.
        """
        self._membership = membership
        self._fabric_key = fabric_key
        self._incarnations = incarnations

    async def open(self, tenant: TenantId, request: OpenVolume) -> ServedVolume:
        """Return the volume, made if it was asked to be.

        Raises UsageError for a bad name or size, and for a volume whose largest block some shard can't hold;
        UnknownVolumeError; LayoutMismatchError when the volume exists with another layout or
        largest block; RefusedError when the membership store fails.
        """
        name = checked_name("volume", request.name)
        if request.break_even_tokens < 0:
            raise UsageError(f"break_even_tokens is {request.break_even_tokens}: it is 0 or more")
        wanted = VolumeRecord(tenant, name, request.layout, request.block_bytes)
        try:
            found = await self._found(wanted, create=request.create)
            check_blocks_fit([found], self._membership.map.enclosures.values())
        except BlocksTooLargeError as error:
            raise UsageError(str(error)) from error
        except MembershipError as error:
            raise RefusedError("membership", f"volume {name!r} can't be opened now: {error}") from error
        _check_same(wanted, found)
        return replace(self._served(found), break_even_tokens=request.break_even_tokens)

    async def named(self, tenant: TenantId, name: str) -> ServedVolume:
        """Return a volume that exists. Raises UnknownVolumeError and RefusedError."""
        try:
            found = await self._membership.volume(tenant, name)
        except MembershipError as error:
            raise RefusedError("membership", f"volume {name!r} can't be looked at now: {error}") from error
        if found is None:
            raise UnknownVolumeError("unknown_volume", f"there is no volume {name!r} of tenant {tenant!r}")
        return self._served(found)

    def newest(self, volume: ServedVolume) -> ServedVolume:
        """Return an open volume as it is served now: it may have been erased since it was opened."""
        if self._incarnations is None:
            return volume
        record = self._incarnations.newest(volume.record)
        if record is volume.record:
            return volume
        return replace(self._served(record), break_even_tokens=volume.break_even_tokens)

    def _served(self, found: VolumeRecord) -> ServedVolume:
        identity = VolumeIdentity(found.tenant, found.name, found.layout.digest())
        secret = volume_secret(
            self._fabric_key, tenant=found.tenant, name=found.name, incarnation=found.incarnation
        )
        return ServedVolume(found, identity, secret, placement_secret(secret))

    async def _found(self, wanted: VolumeRecord, *, create: bool) -> VolumeRecord:
        found = await self._membership.volume(wanted.tenant, wanted.name)
        if found is not None:
            return found
        if create:
            await self._membership.hear_rulings()
            tenant = self._membership.rulings.tenant(wanted.tenant)
            return await self._membership.create_volume(replace(wanted, is_erasable=tenant.is_erasable))
        message = (
            f"there is no volume {wanted.name!r} of tenant {wanted.tenant!r}: open it with create=True to "
            "make it"
        )
        raise UnknownVolumeError("unknown_volume", message)


def _check_same(wanted: VolumeRecord, found: VolumeRecord) -> None:
    if wanted.layout != found.layout:
        differing = [
            f"{field} is {getattr(found.layout, field)!r} and not {getattr(wanted.layout, field)!r}"
            for field in found.layout.__dataclass_fields__
            if getattr(found.layout, field) != getattr(wanted.layout, field)
        ]
        message = (
            f"volume {found.name!r} has another layout: {'; '.join(differing)}. Its blocks would mean "
            "something else: open it with its own layout, or make a volume of another name"
        )
        raise LayoutMismatchError("layout_mismatch", message)
    if wanted.block_bytes != found.block_bytes:
        message = (
            f"volume {found.name!r} has blocks of up to {found.block_bytes} bytes, not {wanted.block_bytes}: "
            "open it with its own block_bytes, or make a volume of another name"
        )
        raise LayoutMismatchError("layout_mismatch", message)
