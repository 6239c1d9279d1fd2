"""Invariants 1 and 2 against an index that lies: summaries are rewritten on flash, with checksums that fit.

Agents believe such an index, so what is left to keep wrong bytes out is the tag, which commits to who asks
for what.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from tests.support.fabric.fabric_host import (
    FabricThread,
    content,
    drive_files,
    empty,
    hashes,
    overwrite,
    volume_of,
)

import ostraca
from ostraca import Ack, BlockState, PutState, Reason
from ostraca_cli.composition.state import FabricShape, FabricState
from ostraca_cli.testing import small_plan
from ostraca_fabric.flash.summary import ENTRY, PAGE, Entries, PageState, page_checksum, page_states
from ostraca_fabric.flash.superblock import Superblock, decode_superblock
from ostraca_fabric.model.extent import PAGE_BYTES, SUPERBLOCK_COPIES
from ostraca_fabric.model.ids import TenantId
from ostraca_fabric.tables.digests import derive_keys, volume_secret

BLOCKS = 4


def rewrite_entries(host: FabricThread, change: Callable[[Entries], None]) -> int:
    """Change every listed entry of every drive, as one array per page; return how many pages were changed."""
    changed = 0
    for path in drive_files(host.plan):
        superblock = decode_superblock(path.read_bytes()[: SUPERBLOCK_COPIES * PAGE_BYTES])
        for segment in range(superblock.geometry.segments):
            changed += rewrite_segment(path, superblock, segment, change)
    return changed


def rewrite_segment(
    path: Path, superblock: Superblock, segment: int, change: Callable[[Entries], None]
) -> int:
    geometry, identity = superblock.geometry, superblock.identity
    start, changed = geometry.summary_offset(segment), 0
    with path.open("rb") as file:
        file.seek(start)
        area = file.read(geometry.summary_bytes)
    for place in range(0, len(area), PAGE_BYTES):
        raw = area[place : place + PAGE_BYTES]
        page = np.frombuffer(raw, PAGE).copy()
        count = int(page["count"][0])
        if not any(raw) or not count:
            continue
        entries = page["entries"][0][:count]
        assert entries.dtype == ENTRY
        change(entries)
        page["checksum"][0] = page_checksum(memoryview(page.tobytes()), identity.seed)
        overwrite(path, start + place, page.tobytes())
        changed += 1
    with path.open("rb") as file:
        file.seek(start)
        pages = np.frombuffer(file.read(geometry.summary_bytes), PAGE).reshape(1, -1)
    states = page_states(identity, np.array([segment]), pages)
    assert set(states.ravel().tolist()) <= {PageState.NONE, PageState.GOOD}
    assert np.count_nonzero(states == PageState.GOOD) >= changed
    return changed


def put(client: ostraca.Client, seed: int = 0) -> None:
    volume = volume_of(client)
    result = volume.put(
        volume.chain(hashes(BLOCKS, seed)), source=content(BLOCKS, seed), deadline_s=10, ack=Ack.COMMITTED
    )
    assert set(result.states) == {PutState.COMMITTED}


def assert_only_damage(client: ostraca.Client, seed: int = 0) -> None:
    volume = volume_of(client)
    chain = volume.chain(hashes(BLOCKS, seed))
    assert volume.lookup(chain, deadline_s=5).hits == BLOCKS, "the index was believed"
    into = empty(BLOCKS)
    result = volume.get(chain, into=into, deadline_s=10)
    assert set(result.states) == {BlockState.MISS}, result
    assert set(result.reasons) == {Reason.DAMAGED}
    assert np.array_equal(into, empty(BLOCKS))


def test_entries_whose_extents_were_swapped_give_misses(tmp_path: Path) -> None:
    host = FabricThread(small_plan(tmp_path / "fabric"))
    with host, host.connect() as client:
        put(client)

    def rotate_extents(entries: Entries) -> None:
        entries["first_page"] = np.roll(entries["first_page"], 1)

    assert rewrite_entries(host, rotate_extents)
    with host, host.connect() as client:
        assert_only_damage(client)


def test_entries_whose_keys_were_swapped_give_misses(tmp_path: Path) -> None:
    host = FabricThread(small_plan(tmp_path / "fabric"))
    with host, host.connect() as client:
        put(client)

    def rotate_keys(entries: Entries) -> None:
        entries["key"] = np.roll(entries["key"], 1, axis=0)

    assert rewrite_entries(host, rotate_keys)
    with host, host.connect() as client:
        assert_only_damage(client)


def test_blocks_stored_under_a_transform_of_a_later_release_are_not_found(tmp_path: Path) -> None:
    host = FabricThread(small_plan(tmp_path / "fabric"))
    with host, host.connect() as client:
        put(client)

    def transform_some(entries: Entries) -> None:
        entries["transform"][::2] = 7

    assert rewrite_entries(host, transform_some)
    with host, host.connect() as client:
        volume = volume_of(client)
        result = volume.get(volume.chain(hashes(BLOCKS)), into=empty(BLOCKS), deadline_s=10)
        assert 0 < result.hits < BLOCKS
        assert set(result.reasons) == {Reason.NONE, Reason.NOT_FOUND}
        put(client, seed=1)


def test_a_block_listed_under_another_tenants_key_is_not_handed_over(tmp_path: Path) -> None:
    """The same volume name, engine hashes, rank and length: only the tenant differs."""
    host = FabricThread(replace(small_plan(tmp_path / "fabric"), drives=1))
    with host:
        with host.connect(tenant="victim") as client:
            put(client)
            spans = [volume_of(client).chain(hashes(BLOCKS)).span()]
        with host.connect(tenant="thief") as client:
            volume_of(client)
    state = FabricState(host.plan.directory, shape_of(host))
    keys = {
        tenant: derive_keys(volume_secret(state.key, tenant=TenantId(tenant), name="v", incarnation=1), spans)
        for tenant in ("victim", "thief")
    }
    state.close()
    stolen = {victim.tobytes(): thief for victim, thief in zip(keys["victim"], keys["thief"], strict=True)}

    def claim(entries: Entries) -> None:
        for entry in entries:
            entry["key"] = stolen[entry["key"].tobytes()]

    assert rewrite_entries(host, claim)
    with host, host.connect(tenant="thief") as client:
        assert_only_damage(client)


def shape_of(host: FabricThread) -> FabricShape:
    plan = host.plan
    return FabricShape(plan.enclosures, plan.drives, plan.drive_bytes)
