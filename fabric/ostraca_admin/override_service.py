"""Service for operators' overrides of tenants, volumes and settings.

An override is written together with the audit entry and with the notice to agents.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ostraca_admin.audit import Audit, Requester
from ostraca_admin.errors import ConflictError
from ostraca_admin.rules import check_match
from ostraca_fabric.errors import MembershipError
from ostraca_fabric.model import record_keys
from ostraca_fabric.model.overrides import (
    OVERRIDES_MARKER,
    LiveSettings,
    TenantOverride,
    VolumeOverride,
    decode,
    encode,
)
from ostraca_fabric.ports.records import ABSENT, Record, RecordChange, Records

_Override = TypeVar("_Override", TenantOverride, VolumeOverride, LiveSettings)

_TRIES = 8

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredOverride(Generic[_Override]):
    """Override with the revision of its record."""

    override: _Override
    revision: int


class OverrideService:
    """Override service of an admin."""

    def __init__(self, records: Records, audit: Audit) -> None:
        """Store overrides in *records*, visible to agents."""
        self._records = records
        self._audit = audit

    async def get(self, key: str, kind: type[_Override]) -> StoredOverride[_Override] | None:
        """Return an override, or None."""
        record = await self._records.get(key)
        return None if record is None else StoredOverride(_read(record, kind), record.revision)

    async def page(
        self, prefix: str, kind: type[_Override], *, after: str = "", limit: int
    ) -> list[StoredOverride[_Override]]:
        """Return overrides by key, starting behind *after*, a key below the prefix."""
        listed = await self._records.below(prefix, after=f"{prefix}{after}" if after else "", limit=limit)
        return [StoredOverride(_read(record, kind), record.revision) for record in listed]

    async def put(
        self,
        key: str,
        override: _Override,
        requester: Requester,
        subject: str,
        *,
        if_match: int | None = None,
        merge: Callable[[_Override | None, _Override], Awaitable[_Override]] | None = None,
        depends_on: Sequence[str] = (),
    ) -> tuple[StoredOverride[_Override], bool]:
        """Write an override; return the stored override and whether new.

        Repeating the call changes nothing. *merge* receives the previous and the requested override, and
        returns the override to write, or raises. A change of a record in *depends_on* since the call of
        *merge* calls it again. Raises PreconditionError, and ConflictError after constant changes by others.
        """
        for _ in range(_TRIES):
            read = await self._records.get_many([key, *depends_on])
            known = None
            if key in read:
                known = StoredOverride(_read(read[key], type(override)), read[key].revision)
            check_match(if_match, None if known is None else known.revision)
            merged = override
            if merge is not None:
                merged = await merge(None if known is None else known.override, override)
            if known is not None and known.override == merged:
                return known, False
            changes = [
                RecordChange(key, encode(merged)),
                RecordChange(record_keys.overrides_marker(), OVERRIDES_MARKER),
                self._audit.entry(requester, subject, encode(merged).decode()),
            ]
            unchanged = {each: read[each].revision if each in read else ABSENT for each in (key, *depends_on)}
            revision = await self._records.write(changes, unchanged=unchanged)
            if revision is not None:
                log.info(
                    "%s (%s) changed the override of %s: %s",
                    requester.name,
                    requester.role,
                    subject,
                    requester.action,
                )
                return StoredOverride(merged, revision), known is None
        raise ConflictError(f"{subject} changes constantly: retry")

    async def delete(
        self, key: str, requester: Requester, subject: str, *, if_match: int | None = None
    ) -> bool:
        """Delete an override; return whether there was any. Raises like ``put``."""
        for _ in range(_TRIES):
            record = await self._records.get(key)
            check_match(if_match, None if record is None else record.revision)
            if record is None:
                return False
            changes = [
                RecordChange(key, None),
                RecordChange(record_keys.overrides_marker(), OVERRIDES_MARKER),
                self._audit.entry(requester, subject, "deleted"),
            ]
            if await self._records.write(changes, unchanged={key: record.revision}) is not None:
                return True
        raise ConflictError(f"{subject} changes constantly: retry")


def _read(record: Record, kind: type[_Override]) -> _Override:
    """Decode an override. Raises MembershipError with the key."""
    try:
        return decode(record.value, kind)
    except MembershipError as error:
        raise MembershipError(f"{record.key}: {error}") from error
