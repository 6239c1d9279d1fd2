"""The arena's memory: it outlives its client while anything may still land in it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tests.sdk.conftest import SETTINGS

from ostraca.arena import Arena


def is_mapped(address: int) -> bool:
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
    return any(begin <= address < end for begin, end in ranges)


def test_a_closed_arena_stays_mapped_while_a_transfer_may_still_reach_it() -> None:
    arena = Arena(SETTINGS)
    address = arena.array.ctypes.data
    slots = arena.take_up_to(1, 4096)
    assert slots is not None
    with arena.changed:
        arena.ledger.sent(1, slots, agent="agent-1", start_id=bytes(16))
        arena.ledger.left(1)
    arena.close()
    assert is_mapped(address)


def test_a_closed_arena_that_nothing_can_reach_is_unmapped() -> None:
    arena = Arena(SETTINGS)
    memory = arena._memory
    slots = arena.take_up_to(1, 4096)
    assert slots is not None
    with arena.changed:
        arena.ledger.sent(1, slots, agent="agent-1", start_id=bytes(16))
        arena.ledger.left(1)
        arena.ledger.answered(1, np.empty(0, np.uint32))
    arena.close()
    assert not hasattr(memory, "_map"), "closed, not leaked"
