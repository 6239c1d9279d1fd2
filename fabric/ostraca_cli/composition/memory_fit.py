"""Fit of an agent's memory into the limits of this process.

Agents fault in all memory at the start. Under a lower limit, the kernel would kill the process then or later,
without a message; callers therefore check before mapping any memory. Reserved huge pages have limits of their
own; memory beside blocks never counts there.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from ostraca_cli.terminal.units import size_text
from ostraca_dpu_agent.settings import MemorySettings
from ostraca_fabric.errors import ResourceError
from ostraca_fabric.model.extent import rounded_up
from ostraca_fabric.runtime.memory import HUGE_PAGE_BYTES, Room, huge_page_rooms, rooms

log = logging.getLogger(__name__)

MIB = 1 << 20

OWN_BYTES = 128 * MIB
"""Memory of an agent's process without blocks: code, connections and some indexes. 110 MB were measured with
NIXL and 2 agents."""

ADDRESSES_BYTES = 1 << 30
"""Mapped but untouched memory: libraries, thread stacks, malloc arenas. 1.1 GB were measured with NIXL."""

_CHUNKS_LEAST = 4
"""Minimum number of chunks for blocks unless a user asks for less."""

_NAMES = ("memory.cache_bytes", "memory.staging_bytes", "memory.reserve_bytes")


@dataclass(frozen=True, slots=True)
class BlockMemory:
    """Memory left for blocks by the smallest limit."""

    room: Room
    for_blocks_bytes: int


def memory_for_blocks(limits: Sequence[Room]) -> BlockMemory | None:
    """Return the memory available for blocks, or None without a known limit. Pure."""
    available = [BlockMemory(each, max(0, each.free_bytes - _own_bytes(each))) for each in limits]
    return min(available, key=lambda each: each.for_blocks_bytes, default=None)


def fit_memory(
    memory: MemorySettings, agents: int, available: BlockMemory | None, explicit: Collection[str] = _NAMES
) -> MemorySettings:
    """Return sizes for *agents* agents that fit into *available*. Pure.

    Lowers only settings outside *explicit*. Raises ResourceError with the wanted and available memory if
    nothing fits.
    """
    if available is None or agents * memory.mapped_bytes <= available.for_blocks_bytes:
        return memory
    each_bytes = available.for_blocks_bytes // agents // memory.chunk_bytes * memory.chunk_bytes
    lower = memory
    if each_bytes >= max(_CHUNKS_LEAST * memory.chunk_bytes, memory.reserve_bytes):
        if "memory.cache_bytes" not in explicit:
            cache_bytes = max(0, min(memory.cache_bytes, each_bytes - memory.reserve_bytes))
            lower = replace(lower, cache_bytes=cache_bytes)
        if "memory.staging_bytes" not in explicit:
            lower = replace(lower, staging_bytes=min(memory.staging_bytes, each_bytes))
    if agents * lower.mapped_bytes > available.for_blocks_bytes:
        raise ResourceError(_refusal(memory, agents, available))
    return lower


def check_beside_huge_pages(limits: Sequence[Room]) -> None:
    """Raise ResourceError if a limit leaves too little beside blocks on reserved huge pages. Pure."""
    for room in limits:
        if room.free_bytes < OWN_BYTES:
            raise ResourceError(
                f"an agent wants {size_text(OWN_BYTES)} of memory beside huge pages, and "
                f"{size_text(room.free_bytes)} are free: {room.name} is {size_text(room.limit_bytes)}. Raise "
                "that limit"
            )


def fit_to_limits(
    memory: MemorySettings, agents: int = 1, explicit: Collection[str] = _NAMES
) -> MemorySettings:
    """Fit the memory into the present limits; logs lowered sizes with the reason.

    Raises as ``fit_memory`` does.
    """
    limits = rooms()
    if memory.huge_pages:
        check_beside_huge_pages(limits)
        limits = [*huge_page_rooms(), *(each for each in limits if each.is_address_space)]
    available = memory_for_blocks(limits)
    lower = fit_memory(memory, agents, available, explicit)
    if lower != memory and available is not None:
        log.warning(
            "By default agents want %s for blocks, and %s (%s) leaves %s: memory.cache_bytes is %s now, and "
            "memory.staging_bytes %s.",
            size_text(agents * memory.mapped_bytes),
            available.room.name,
            size_text(available.room.limit_bytes),
            size_text(available.for_blocks_bytes),
            size_text(lower.cache_bytes),
            size_text(lower.staging_bytes),
        )
    return lower


def _own_bytes(room: Room) -> int:
    if room.is_of_huge_pages:
        return 0
    return OWN_BYTES + ADDRESSES_BYTES if room.is_address_space else OWN_BYTES


def _refusal(memory: MemorySettings, agents: int, available: BlockMemory) -> str:
    own_bytes, room = _own_bytes(available.room), available.room
    lower = f"lower {', '.join(f'{name} ({size_text(_value(memory, name))})' for name in _NAMES)}"
    who = "an agent wants" if agents == 1 else f"{agents} agents want"
    if room.is_of_huge_pages:
        pages = agents * rounded_up(memory.mapped_bytes, HUGE_PAGE_BYTES) // HUGE_PAGE_BYTES
        free, limit = room.free_bytes // HUGE_PAGE_BYTES, room.limit_bytes // HUGE_PAGE_BYTES
        return (
            f"{who} {pages} huge pages of 2 MiB, and {free} are free: {room.name} has {limit}. Raise that "
            f"number, turn memory.huge_pages off, or {lower}"
        )
    wanted = size_text(own_bytes + agents * memory.mapped_bytes)
    return (
        f"{who} {wanted} of memory ({size_text(own_bytes)} beside blocks), and {size_text(room.free_bytes)} "
        f"are free: {room.name} is {size_text(room.limit_bytes)}. Raise that limit, or {lower}"
    )


def _value(memory: MemorySettings, name: str) -> int:
    value: int = getattr(memory, name.partition(".")[2])
    return value
