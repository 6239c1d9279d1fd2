"""What every store of records must do. An adapter's test inherits this and gives the store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from ostraca_fabric.ports.records import ABSENT, Record, RecordChange, Records


async def put(records: Records, key: str, value: bytes = b"v") -> int:
    made = await records.write([RecordChange(key, value)], unchanged={})
    assert made is not None
    return made


class RecordsContract:
    @pytest.fixture
    def records(self) -> Records:
        raise NotImplementedError

    async def test_a_record_comes_back_with_the_revision_it_was_written_in(self, records: Records) -> None:
        assert await records.get("specs/a") is None
        made = await put(records, "specs/a", b"first")
        assert await records.get("specs/a") == Record("specs/a", b"first", made)
        again = await put(records, "specs/a", b"second")
        assert again > made
        assert await records.get("specs/a") == Record("specs/a", b"second", again)

    async def test_changes_are_made_together_or_not_at_all(self, records: Records) -> None:
        made = await put(records, "a")
        both = [RecordChange("a", None), RecordChange("b", b"b")]
        assert await records.write(both, unchanged={"a": made, "b": made}) is None
        assert await records.write(both, unchanged={"a": ABSENT}) is None
        assert set(await records.get_many(["a", "b"])) == {"a"}
        assert await records.write(both, unchanged={"a": made, "b": ABSENT}) is not None
        assert set(await records.get_many(["a", "b"])) == {"b"}

    async def test_of_two_that_decide_on_the_same_one_is_told_no(self, records: Records) -> None:
        writes = (
            records.write([RecordChange("a", value)], unchanged={"a": ABSENT}) for value in (b"1", b"2")
        )
        made = await asyncio.gather(*writes)
        assert sorted(each is None for each in made) == [False, True]

    async def test_records_are_listed_in_order_and_in_pages(self, records: Records) -> None:
        for name in ("b", "a", "d", "c"):
            await put(records, f"audit/{name}")
        await put(records, "auditor/x")
        listed = await records.below("audit/")
        assert [record.key for record in listed] == ["audit/a", "audit/b", "audit/c", "audit/d"]
        first = await records.below("audit/", limit=3)
        rest = await records.below("audit/", after=first[-1].key, limit=3)
        assert [record.key for record in (*first, *rest)] == [record.key for record in listed]

    async def test_a_hold_is_one_process_s_until_it_lets_go(self, records: Records) -> None:
        held = await records.hold("holds/a", b"me")
        assert held is not None
        assert await records.hold("holds/a", b"other") is None
        await records.let_go(held)
        again = await records.hold("holds/a", b"other")
        assert again is not None
        await records.let_go(held)  # not its own any more
        assert await records.get("holds/a") is not None

    async def test_who_writes_under_a_hold_that_has_passed_on_is_refused(self, records: Records) -> None:
        held = await records.hold("holds/a", b"me")
        assert held is not None
        assert await records.write([RecordChange("x", b"1")], unchanged={held.key: held.revision}) is not None
        await records.let_go(held)
        assert await records.write([RecordChange("x", b"2")], unchanged={held.key: held.revision}) is None
        assert await records.hold("holds/a", b"other") is not None
        assert await records.write([RecordChange("x", b"2")], unchanged={held.key: held.revision}) is None

    async def test_changes_are_told_behind_what_there_is(self, records: Records) -> None:
        await put(records, "operations/a", b"1")
        changes = records.changes("operations/")
        assert [_key(each) for each in await _next(changes)] == ["operations/a"]
        await put(records, "specs/b")
        await put(records, "operations/b", b"2")
        await records.write([RecordChange("operations/a", None)], unchanged={})
        seen = list[str]()
        while len(seen) < 2:
            seen += [_key(each) for each in await _next(changes)]
        assert seen == ["operations/b", "operations/a"]


def _key(told: Record | str) -> str:
    return told if isinstance(told, str) else told.key


async def _next(changes: AsyncIterator[tuple[Record | str, ...]]) -> tuple[Record | str, ...]:
    async with asyncio.timeout(5):
        return await anext(changes)
