"""The stream of events: told once, and ended rather than silent."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from tests.admin.service import TOKENS, AdminService
from tests.support.simulated.memory_records import MemoryRecords

from ostraca_admin.api.routes.history import KEEP_ALIVE_S, event_stream
from ostraca_admin.model import VERSION, AuditEntry, Operation, OperationKind, Step, encode
from ostraca_fabric.errors import MembershipError
from ostraca_fabric.model import record_keys
from ostraca_fabric.ports.records import Record, RecordChange

WITHIN_S = 10.0


def written(number: int) -> RecordChange:
    """Return the recorded changes."""
    entry = AuditEntry(VERSION, f"{number:012x}-00000000", 0.0, "alice", "admin", "PUT /v1", f"t{number}", "")
    return RecordChange(record_keys.AUDIT + entry.id, encode(entry))


async def told(events: AsyncIterator[str], count: int) -> list[str]:
    """Return of so many events what they are about."""
    async with asyncio.timeout(WITHIN_S):
        texts = [await anext(events) for _ in range(count)]
    return [text.split('"subject":"')[1].split('"')[0] for text in texts]


async def rest(events: AsyncIterator[str]) -> list[str]:
    async with asyncio.timeout(WITHIN_S):
        return [text async for text in events]


class Relisted(MemoryRecords):
    """It tells all that it has once more with each change, as a store that has lost what was between."""

    def __init__(self) -> None:
        super().__init__()
        self.was_listed = asyncio.Event()
        """Whether somebody has taken what there is of changes, and waits for more."""

    async def changes(self, prefix: str) -> AsyncIterator[tuple[Record | str, ...]]:
        async for _ in super().changes(prefix):
            yield await self.below(prefix)
            if prefix == record_keys.AUDIT:
                self.was_listed.set()


class Away(MemoryRecords):
    """It tells what it has, and then that it is away."""

    async def changes(self, prefix: str) -> AsyncIterator[tuple[Record | str, ...]]:
        yield await self.below(prefix)
        raise MembershipError("etcd is away")


async def test_changes_are_told_from_when_it_begins_and_none_twice_though_all_are_listed_again() -> None:
    records, closing = Relisted(), asyncio.Event()
    await records.write([written(1)], unchanged={})
    events = event_stream(records, closing)
    first = asyncio.ensure_future(told(events, 1))
    await records.was_listed.wait()
    await records.write([written(2)], unchanged={})
    assert await first == ["t2"]
    await records.write([written(3), written(4)], unchanged={})
    assert await told(events, 2) == ["t3", "t4"]
    closing.set()
    assert await rest(events) == [], "the service ends"


async def test_a_stream_ends_where_the_store_no_longer_tells_what_changes() -> None:
    assert await rest(event_stream(Away(), asyncio.Event())) == []


def test_a_stream_ends_with_the_token_that_opened_it(service: AdminService) -> None:
    running = Operation(1, "1", OperationKind.ERASE, "", "alice", 0.0, (Step("purged"),))
    assert service.do(service.records.hold(record_keys.work("1"), b"another admin"))
    service.do(
        service.records.write([RecordChange(record_keys.operation("1"), encode(running))], unchanged={})
    )
    with contextlib.closing(service.connection()) as connection:
        connection.request("GET", "/v1/events", headers={"Authorization": f"Bearer {TOKENS['viewer']}"})
        stream = connection.getresponse()
        assert [stream.readline()[:6] for _ in range(3)] == [b"event:", b"data: ", b"\n"]
        del service.tokens["viewer"]
        assert service.ask("PUT", "/v1/tenants/acme", {}).status == 201
        assert stream.read() == b""


async def test_where_nothing_happens_a_comment_says_that_it_goes_on() -> None:
    closing = asyncio.Event()
    assert KEEP_ALIVE_S < 45.0
    telling_often = event_stream(MemoryRecords(), closing, keep_alive_s=0.01)
    async with asyncio.timeout(WITHIN_S):
        assert [await anext(telling_often) for _ in range(3)] == [": keep-alive\n\n"] * 3
    closing.set()
    assert await rest(telling_often) == []
