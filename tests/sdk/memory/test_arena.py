"""The arena's memory: it outlives its client while anything may still land in it."""

from __future__ import annotations

import importlib
import time
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest
from tests.sdk.conftest import MIB, SETTINGS

from ostraca._connection.credentials import Credentials
from ostraca._connection.dial import ClientIdentity
from ostraca._memory.arena import Arena, ArenaRegistration
from ostraca_fabric.errors import ConnectError, TransportError
from ostraca_fabric.nixl import runtime
from ostraca_fabric.ports.transport import ArenaEnd
from ostraca_fabric.runtime.memory import Room
from ostraca_fabric.wire.address import UnixAddress


def is_mapped(address: int) -> bool:
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
    return any(begin <= address < end for begin, end in ranges)


def test_a_closed_arena_stays_mapped_while_a_transfer_may_still_reach_it() -> None:
    arena = Arena(SETTINGS)
    address = arena.array.ctypes.data
    slots = arena.ledger.take_up_to(1, 4096)
    assert slots is not None
    with arena.changed:
        arena.ledger.add(1, slots, agent="agent-1", start_id=bytes(16))
        arena.ledger.leave(1)
    arena.close()
    assert is_mapped(address)


def test_a_closed_arena_that_nothing_can_reach_is_unmapped() -> None:
    arena = Arena(SETTINGS)
    memory = arena._memory
    slots = arena.ledger.take_up_to(1, 4096)
    assert slots is not None
    with arena.changed:
        arena.ledger.add(1, slots, agent="agent-1", start_id=bytes(16))
        arena.ledger.leave(1)
        arena.ledger.answer(1, np.empty(0, np.uint32))
    arena.close()
    assert not hasattr(memory, "_map"), "closed, not leaked"


def test_an_end_that_can_not_be_made_again_is_left_out_until_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nixl_cu12", reason="NIXL is not installed")
    arena = Arena(replace(SETTINGS, transports=("nixl", "inline")))
    caller = ClientIdentity("default", Credentials(), arena.ends)

    def offered() -> list[str]:
        return [offer.transport for offer in caller.hello("", UnixAddress("/a")).arenas]

    assert (offered(), arena.must_renew) == (["nixl", "inline"], False)
    with monkeypatch.context() as without_nixl:
        without_nixl.setattr(runtime, "PACKAGES", ("no_nixl",))
        arena.renew()
        assert (offered(), arena.must_renew) == (["inline"], True)
        arena.renew()
        assert offered() == ["inline"]
    arena.renew()
    assert (offered(), arena.must_renew) == (["nixl", "inline"], False)
    arena.close()


def test_an_end_that_is_not_known_to_be_cut_off_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something could still land through it, so slots must not come back."""
    pytest.importorskip("nixl_cu12", reason="NIXL is not installed")

    def refuse(*_: object) -> None:
        raise RuntimeError("busy")

    arena = Arena(replace(SETTINGS, transports=("nixl", "inline")))
    api = importlib.import_module(f"{runtime.package()}._api")
    with monkeypatch.context() as stuck:
        stuck.setattr(api.nixl_agent, "deregister_memory", refuse)
        with pytest.raises(TransportError, match="could not deregister memory"):
            arena.renew()
    arena.close()


def test_without_any_end_to_offer_renewing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nixl_cu12", reason="NIXL is not installed")
    arena = Arena(replace(SETTINGS, transports=("nixl",)))
    monkeypatch.setattr(runtime, "PACKAGES", ("no_nixl",))
    for _ in range(2):
        with pytest.raises(TransportError, match="not installed"):
            arena.renew()
    arena.close()


def test_a_new_connection_cancels_the_preparation_for_the_previous_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepared: SimpleQueue[ArenaEnd] = SimpleQueue()
    monkeypatch.setattr("ostraca._memory.arena._prepare", prepared.put)
    arena = Arena(SETTINGS)
    registration = ArenaRegistration(arena)
    registration.prepare("inline", 0.05)
    registration.note_offer()
    time.sleep(0.1)
    assert prepared.empty()
    registration.prepare("inline", 0.0)
    assert prepared.get(timeout=5.0) is arena.ends["inline"]
    registration.close()
    arena.close()


def test_an_arena_beyond_the_smallest_limit_is_refused_with_both_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit = Room("/sys/fs/cgroup/memory.max", 64 << 20, 3 << 20)
    monkeypatch.setattr(
        "ostraca._memory.arena.rooms", lambda: [Room("the memory of this machine", 1 << 40, 1 << 39), limit]
    )
    said = rf"{4 * MIB} bytes does not fit: {limit.name} is {64 * MIB} bytes, of which {3 * MIB} are free"
    with pytest.raises(ConnectError, match=said):
        Arena(SETTINGS)
