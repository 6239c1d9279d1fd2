"""Fit of agents' memory: lowered sizes, refusals and messages."""

from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.huge_pages import HugePages

from ostraca_cli.composition.memory_fit import (
    ADDRESSES_BYTES,
    OWN_BYTES,
    check_beside_huge_pages,
    fit_memory,
    fit_to_limits,
    memory_for_blocks,
)
from ostraca_dpu_agent.settings import AgentSettings, MemorySettings
from ostraca_fabric.errors import ResourceError
from ostraca_fabric.runtime.memory import Room

MIB = 1 << 20
CACHE, STAGING = "memory.cache_bytes", "memory.staging_bytes"


def room(free_mib: int, *, is_address_space: bool = False) -> Room:
    return Room("memory.max", 2000 * MIB, free_mib * MIB, is_address_space)


def test_the_smallest_room_counts_and_addresses_count_with_what_is_only_mapped() -> None:
    assert memory_for_blocks([]) is None
    available = memory_for_blocks([room(900), room(500), room(1900)])
    assert available is not None
    assert available.for_blocks_bytes == 500 * MIB - OWN_BYTES
    addresses = memory_for_blocks([room(1400, is_address_space=True), room(500)])
    assert addresses is not None
    assert addresses.for_blocks_bytes == 1400 * MIB - OWN_BYTES - ADDRESSES_BYTES


def test_what_fits_and_what_no_limit_is_known_for_stays_as_it_is() -> None:
    memory = MemorySettings()
    assert fit_memory(memory, 1, None) is memory
    assert fit_memory(memory, 2, memory_for_blocks([room(2 * 576 + 128)]), ()) is memory


def test_what_was_asked_for_is_refused_with_both_numbers_and_the_settings() -> None:
    with pytest.raises(ResourceError) as caught:
        fit_memory(MemorySettings(), 1, memory_for_blocks([room(470)]))
    assert str(caught.value) == (
        "an agent wants 704.0 MiB of memory (128.0 MiB beside blocks), and 470.0 MiB are free: memory.max is "
        "2.0 GiB. Raise that limit, or lower memory.cache_bytes (512.0 MiB), memory.staging_bytes (512.0 "
        "MiB), memory.reserve_bytes (64.0 MiB)"
    )
    with pytest.raises(ResourceError, match=r"^2 agents want 1\.2 GiB of memory"):
        fit_memory(MemorySettings(), 2, memory_for_blocks([room(470)]), (CACHE, STAGING))


def test_too_few_huge_pages_are_refused_with_both_numbers() -> None:
    pool = Room("the pool", 300 * 2 * MIB, 235 * 2 * MIB, is_of_huge_pages=True)
    available = memory_for_blocks([pool])
    assert available is not None
    assert available.for_blocks_bytes == 235 * 2 * MIB, "an agent's own memory is elsewhere"
    with pytest.raises(ResourceError) as caught:
        fit_memory(MemorySettings(huge_pages=True), 1, available)
    assert str(caught.value) == (
        "an agent wants 288 huge pages of 2 MiB, and 235 are free: the pool has 300. Raise that number, turn "
        "memory.huge_pages off, or lower memory.cache_bytes (512.0 MiB), memory.staging_bytes (512.0 MiB), "
        "memory.reserve_bytes (64.0 MiB)"
    )


def test_memory_beside_huge_pages_is_checked() -> None:
    check_beside_huge_pages([room(128), room(2000, is_address_space=True)])
    with pytest.raises(ResourceError) as caught:
        check_beside_huge_pages([room(128), room(127)])
    assert str(caught.value) == (
        "an agent wants 128.0 MiB of memory beside huge pages, and 127.0 MiB are free: memory.max is "
        "2.0 GiB. Raise that limit"
    )


def test_reserved_pages_replace_other_memory_as_the_limit(huge_pages: HugePages) -> None:
    huge_pages.reserve(96)
    fit_to_limits(MemorySettings(96 * MIB, 64 * MIB, 128 * MIB, huge_pages=True))
    with pytest.raises(ResourceError, match=r"wants 112 huge pages of 2 MiB, and 96 are free: the pool of"):
        fit_to_limits(MemorySettings(96 * MIB, 64 * MIB, 160 * MIB, huge_pages=True))


def test_sizes_that_were_not_asked_for_are_lowered() -> None:
    available = memory_for_blocks([room(470)])
    lower = fit_memory(MemorySettings(), 1, available, ())
    assert (lower.cache_bytes, lower.staging_bytes, lower.mapped_bytes) == (256 * MIB, 320 * MIB, 320 * MIB)
    asked = MemorySettings(cache_bytes=32 * MIB)
    assert fit_memory(asked, 1, available, (CACHE,)) == MemorySettings(
        cache_bytes=32 * MIB, staging_bytes=320 * MIB
    )


def test_too_little_for_any_use_is_refused_though_nothing_was_asked_for() -> None:
    with pytest.raises(ResourceError, match=r"an agent wants 704\.0 MiB of memory"):
        fit_memory(MemorySettings(), 1, memory_for_blocks([room(128 + 127)]), ())


@given(
    free_mib=st.integers(0, 4096),
    agents=st.integers(1, 4),
    sizes=st.tuples(*3 * [st.integers(64, 2048)]),
    chunk_mib=st.sampled_from([2, 8, 32, 100]),
    asked=st.sets(st.sampled_from([CACHE, STAGING])),
)
def test_what_is_returned_fits_is_no_larger_and_can_run(
    free_mib: int, agents: int, sizes: tuple[int, int, int], chunk_mib: int, asked: Collection[str]
) -> None:
    staging, reserve, cache = (max(size, 2 * chunk_mib) * MIB for size in sizes)
    memory = MemorySettings(
        staging_bytes=staging, reserve_bytes=reserve, cache_bytes=cache, chunk_bytes=chunk_mib * MIB
    )
    available = memory_for_blocks([room(free_mib)])
    assert available is not None
    try:
        lower = fit_memory(memory, agents, available, asked)
    except ResourceError:
        assert agents * memory.mapped_bytes > available.for_blocks_bytes
        return
    assert agents * lower.mapped_bytes <= available.for_blocks_bytes
    assert lower.cache_bytes <= memory.cache_bytes
    assert lower.staging_bytes <= memory.staging_bytes
    assert CACHE not in asked or lower.cache_bytes == memory.cache_bytes
    assert STAGING not in asked or lower.staging_bytes == memory.staging_bytes
    AgentSettings(memory=lower)
