"""Records in memory, for users in a single process. Holds never expire."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from ostraca_fabric.ports.records import ABSENT, Record, RecordChange, RecordLock

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence


class MemoryRecords:
    """Implementation of ``ports.records.Records``."""

    def __init__(self) -> None:
        """Begin empty."""
        self._records: dict[str, Record] = {}
        self._revision = 0
        self._log: list[tuple[int, Record | str]] = []
        self._changed = asyncio.Event()

    async def get(self, key: str) -> Record | None:
        """As in the port."""
        return self._records.get(key)

    async def get_many(self, keys: Sequence[str]) -> Mapping[str, Record]:
        """As in the port."""
        return {key: self._records[key] for key in keys if key in self._records}

    async def below(self, prefix: str, *, after: str = "", limit: int = 0) -> tuple[Record, ...]:
        """As in the port."""
        found = [
            self._records[key] for key in sorted(self._records) if key.startswith(prefix) and key > after
        ]
        return tuple(found[:limit] if limit else found)

    async def write(self, changes: Sequence[RecordChange], *, unchanged: Mapping[str, int]) -> int | None:
        """As in the port."""
        for key, revision in unchanged.items():
            known = self._records.get(key)
            if (ABSENT if known is None else known.revision) != revision:
                return None
        self._revision += 1
        for change in changes:
            self._put(change.key, change.value)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        return self._revision

    async def hold(self, key: str, value: bytes) -> RecordLock | None:
        """As in the port."""
        revision = await self.write([RecordChange(key, value)], unchanged={key: ABSENT})
        return None if revision is None else RecordLock(key, revision)

    async def let_go(self, hold: RecordLock) -> None:
        """As in the port."""
        await self.write([RecordChange(hold.key, None)], unchanged={hold.key: hold.revision})

    def stands(self, hold: RecordLock) -> bool:
        """Tell whether a hold has neither ended nor been taken over."""
        known = self._records.get(hold.key)
        return known is not None and known.revision == hold.revision

    async def changes(self, prefix: str) -> AsyncIterator[tuple[Record | str, ...]]:
        """As in the port."""
        at = len(self._log)
        yield tuple(record for key, record in sorted(self._records.items()) if key.startswith(prefix))
        while True:
            changed = self._changed
            told = tuple(each for _, each in self._log[at:] if _key(each).startswith(prefix))
            at = len(self._log)
            if told:
                yield told
            else:
                await changed.wait()

    def _put(self, key: str, value: bytes | None) -> None:
        if value is not None:
            self._records[key] = Record(key, value, self._revision)
            self._log.append((self._revision, self._records[key]))
        elif self._records.pop(key, None) is not None:
            self._log.append((self._revision, key))


def _key(told: Record | str) -> str:
    return told if isinstance(told, str) else told.key
