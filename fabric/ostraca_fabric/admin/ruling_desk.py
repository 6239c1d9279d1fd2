"""Takes rulings on tenants, volumes and settings: each is written with its audit entry, and with what tells
agents that there is a newer one.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from ostraca_fabric import record_keys
from ostraca_fabric.admin.errors import ConflictError
from ostraca_fabric.admin.rules import check_match
from ostraca_fabric.ports.records import ABSENT, Written
from ostraca_fabric.rulings import RULED, LiveSettings, TenantRuling, VolumeRuling, decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from ostraca_fabric.admin.audit import Audit, Caller
    from ostraca_fabric.ports.records import Records

_Ruling = TypeVar("_Ruling", TenantRuling, VolumeRuling, LiveSettings)

_TRIES = 8

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ruled(Generic[_Ruling]):
    """A ruling as it is kept."""

    ruling: _Ruling
    revision: int


class RulingDesk:
    """One admin's."""

    def __init__(self, records: Records, audit: Audit) -> None:
        """Keep rulings in *records*, where agents see them."""
        self._records = records
        self._audit = audit

    async def ruled(self, key: str, kind: type[_Ruling]) -> Ruled[_Ruling] | None:
        """Return a ruling, None where nothing was ruled."""
        record = await self._records.get(key)
        return None if record is None else Ruled(decode(record.value, kind), record.revision)

    async def below(
        self, prefix: str, kind: type[_Ruling], *, after: str = "", limit: int
    ) -> list[Ruled[_Ruling]]:
        """Return rulings in order of their keys: those behind *after*, which is below the prefix."""
        behind = f"{prefix}{after}" if after else ""
        listed = await self._records.below(prefix, after=behind, limit=limit)
        return [Ruled(decode(record.value, kind), record.revision) for record in listed]

    async def rule(
        self,
        key: str,
        ruling: _Ruling,
        caller: Caller,
        subject: str,
        *,
        if_match: int | None = None,
        after: Callable[[_Ruling | None, _Ruling], _Ruling] = lambda _, ruling: ruling,
    ) -> tuple[Ruled[_Ruling], bool]:
        """Write a ruling; the same again changes nothing. Return what is kept, and whether it is new.

        *after* is told what was ruled before, and returns how the ruling is written after it, or raises what
        refuses it. Raises PreconditionError, and ConflictError where others change it all the time.
        """
        asked = ruling
        for _ in range(_TRIES):
            known = await self.ruled(key, type(ruling))
            check_match(if_match, None if known is None else known.revision)
            ruling = after(None if known is None else known.ruling, asked)
            if known is not None and known.ruling == ruling:
                return known, False
            changes = [
                Written(key, encode(ruling)),
                Written(record_keys.ruled(), RULED),
                self._audit.entry(caller, subject, encode(ruling).decode()),
            ]
            before = ABSENT if known is None else known.revision
            made = await self._records.write(changes, unchanged={key: before})
            if made is not None:
                log.info("%s (%s) ruled on %s: %s", caller.name, caller.role, subject, caller.action)
                return Ruled(ruling, made), known is None
        raise ConflictError(f"others change {subject} all the time: ask again")

    async def take_back(self, key: str, caller: Caller, subject: str, *, if_match: int | None = None) -> bool:
        """Delete a ruling; say whether there was one. Raises as ``rule``."""
        for _ in range(_TRIES):
            record = await self._records.get(key)
            check_match(if_match, None if record is None else record.revision)
            if record is None:
                return False
            changes = [
                Written(key, None),
                Written(record_keys.ruled(), RULED),
                self._audit.entry(caller, subject, "taken back"),
            ]
            if await self._records.write(changes, unchanged={key: record.revision}) is not None:
                return True
        raise ConflictError(f"others change {subject} all the time: ask again")
