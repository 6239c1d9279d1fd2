"""Regions registered with a NIXL agent: once each, as long as they live, and not where another was."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator

import numpy as np
import pytest

from ostraca._memory import offered_regions
from ostraca._memory.offered_regions import OfferedRegions
from ostraca._memory.regions import RegionMemory
from ostraca_fabric.errors import ClosedError, TransportError
from ostraca_fabric.nixl import runtime
from ostraca_fabric.nixl.runtime import RegisteredMemory, unique_name, unsealed
from ostraca_fabric.runtime.memory import HugeMemory

pytestmark = [
    pytest.mark.nixl,
    pytest.mark.skipif(runtime.package() is None, reason="NIXL is not installed"),
]

BYTES = 1 << 16


@pytest.fixture(scope="module")
def arena() -> Iterator[HugeMemory]:
    memory = HugeMemory(1 << 21, prefault=False)
    yield memory
    memory.close()


@pytest.fixture
def registered(arena: HugeMemory) -> Iterator[RegisteredMemory]:
    made = RegisteredMemory(unique_name("regions"), arena.address, arena.size_bytes)
    yield made
    made.close()


def region(memory: np.ndarray[tuple[int], np.dtype[np.uint8]] | None = None) -> RegionMemory:
    return RegionMemory(np.zeros(BYTES, np.uint8) if memory is None else memory, 4096, may_withhold=True)


def places(registered: RegisteredMemory) -> int:
    """Return the number of regions registered now."""
    registered.progress()
    return len(registered._extensions)


def test_a_region_is_registered_once_and_later_metadata_has_earlier_regions(
    registered: RegisteredMemory,
) -> None:
    offered, first, second = OfferedRegions(registered), region(), region()
    metadata = offered.offer(first).result(10)
    assert offered.offer(first).result(10) == metadata
    both = offered.offer(second).result(10)
    assert len(unsealed(registered.metadata)) < len(unsealed(metadata)) < len(unsealed(both))
    assert places(registered) == 2


@pytest.mark.parametrize("how", ["ended", "dropped"])
def test_a_region_is_deregistered_soon_after_its_end(registered: RegisteredMemory, how: str) -> None:
    offered, first = OfferedRegions(registered), region()
    offered.offer(first).result(10)
    if how == "ended":
        first.end()
        first.end()
    else:
        del first
        gc.collect()
    assert places(registered) == 0


def test_a_region_that_ends_during_its_registration_is_deregistered_afterwards(
    registered: RegisteredMemory,
) -> None:
    offered, first = OfferedRegions(registered), region()
    with registered._lock:  # held while NIXL registers
        offer = offered.offer(first)
        first.end()
    registered.progress()
    offer.result(10)
    assert places(registered) == 0


def test_the_place_of_a_region_that_left_is_not_offered_again(
    registered: RegisteredMemory, caplog: pytest.LogCaptureFixture
) -> None:
    offered, memory = OfferedRegions(registered), np.zeros(BYTES, np.uint8)
    first = region(memory[: BYTES // 2])
    offered.offer(first).result(10)
    first.end()
    beside, across = region(memory[BYTES // 2 :]), region(memory)
    assert offered.offer(beside).result(10)
    with pytest.raises(TransportError, match="the place of a region that left"):
        offered.offer(across).result(10)
    assert places(registered) == 1
    assert [record.getMessage() for record in caplog.records] == [
        "Blocks of a region are copied through the arena: the place of a region that left"
    ]


def test_no_more_regions_are_offered_than_an_agent_takes(
    registered: RegisteredMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offered_regions, "REGION_OFFERS_MAX", 2)
    offered, some = OfferedRegions(registered), [region() for _ in range(3)]
    for each in some[:2]:
        assert offered.offer(each).result(10)
    with pytest.raises(TransportError, match="2 regions were offered before"):
        offered.offer(some[2]).result(10)
    assert offered.offer(some[0]).result(10)


def test_memory_that_nixl_does_not_register_is_told_of_once(
    registered: RegisteredMemory, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(address: int, size_bytes: int) -> None:
        raise TransportError(f"NIXL could not register memory: {address + size_bytes}")

    assert registered._agent is not None
    monkeypatch.setattr(registered._agent, "register", refuse)
    offered, first = OfferedRegions(registered), region()
    with caplog.at_level(logging.WARNING, "ostraca"):
        for _ in range(2):
            with pytest.raises(TransportError):
                offered.offer(first).result(10)
    assert [record.getMessage() for record in caplog.records] == [
        (
            "Blocks of a region are copied through the arena: NIXL could not register memory: "
            f"{first.address + BYTES}"
        )
    ]


def test_a_closed_agent_takes_no_region_and_nobody_is_told(
    registered: RegisteredMemory, caplog: pytest.LogCaptureFixture
) -> None:
    registered.close()
    with pytest.raises(ClosedError):
        OfferedRegions(registered).offer(region()).result(10)
    assert not caplog.records
