"""The bounded form of ``make explore``, and that it sees what it is for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.simulation.explore.explore import BOUNDED, Explored, explore
from tests.simulation.explore.explore_scope import GRANT, HOLD, Scope

from ostraca_dpu_agent.shards.core import Allocations, ShardCore
from ostraca_dpu_agent.shards.core.allocator import SpaceAllocator
from ostraca_dpu_agent.shards.core.grants import Grants
from ostraca_dpu_agent.shards.core.recovery import Adoption
from ostraca_dpu_agent.shards.core.reservations import ReservationTable
from ostraca_fabric.flash.index import BlockIndex
from ostraca_fabric.flash.recovery import RecoveredAreas, RecoveredSegment
from ostraca_fabric.flash.summary import Entries
from ostraca_fabric.model.ids import OwnerEpoch

STATES_MAX = 6000
"""Faults are found sooner."""

SMALL = Scope(puts=2, keys=1, ticks=3, claim_until=0, is_full=True)
APART = replace(SMALL, is_apart=True)
AT_ONCE = Scope(puts=2, keys=1, ticks=0, claim_until=0)


def found(scope: Scope) -> str:
    """Return what is wrong, without what owners would find themselves."""
    return explore(scope, states_max=STATES_MAX, checks_every=1 << 30).wrong


@pytest.mark.parametrize("scope", BOUNDED)
def test_no_order_of_events_around_a_change_of_owner_breaks_what_must_hold(scope: Scope) -> None:
    explored = explore(scope)
    assert not explored.wrong, str(explored)
    assert explored.states > 500, "it went far"
    assert {"claim", "adopt", "put", "land", "commit", "write", "summary"} < explored.events.keys()
    assert scope.is_apart == ({"record", "apply", "submit"} < explored.events.keys())


def test_a_wrong_end_tells_how_it_came_about() -> None:
    explored = Explored(3, wrong="lost", path=(("put", 0, 1, 2), ("tick", 0, 0, 0)))
    assert str(explored) == "after 3 states: lost\n  put 0 1 2\n  tick 0 0 0"


def test_a_successor_that_opens_inside_an_unretired_grant_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = ShardCore.begin

    def greedy(self: ShardCore, now_s: float, *, epoch: OwnerEpoch, withheld: frozenset[int]) -> None:
        begin(self, now_s, epoch=epoch)

    monkeypatch.setattr(ShardCore, "begin", greedy)
    assert found(SMALL)


def test_an_owner_that_uses_what_etcd_has_not_recorded_is_seen() -> None:
    assert "which is not granted" in found(replace(APART, uses_what_it_asks=True))


def test_a_successor_that_adopts_nothing_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def blind(self: ShardCore, now_s: float, areas: RecoveredAreas) -> int:
        return 0

    monkeypatch.setattr(ShardCore, "adopt", blind)
    assert "is lost" in found(SMALL)


def test_an_own_entry_that_does_not_win_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def always(self: Adoption, found: RecoveredSegment, entries: Entries) -> NDArray[np.bool_]:
        return np.zeros(len(entries), np.bool_)

    monkeypatch.setattr(Adoption, "_are_outranked", always)
    assert "took the place of" in found(AT_ONCE)


def test_a_grant_that_is_retired_before_late_writes_have_landed_is_seen() -> None:
    assert "opened by 2" in found(replace(SMALL, retires_after=GRANT + HOLD))


def test_space_that_is_used_again_before_late_writes_have_landed_is_seen() -> None:
    assert "opened anew since" in found(
        Scope(puts=3, keys=2, claim_until=-1, ticks=2, is_full=True, late_write_s=0)
    )


def test_a_commit_after_its_reservation_that_is_taken_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(self: ReservationTable, now_s: float) -> NDArray[np.intp]:
        return np.zeros(0, np.intp)

    monkeypatch.setattr(ReservationTable, "take_expired", never)
    assert "after its reservation's end" in found(SMALL)


def test_an_owner_that_does_not_stop_at_its_fence_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def bold(self: Grants, now_s: float) -> bool:
        return True

    monkeypatch.setattr(Grants, "may_write", bold)
    assert "after its fence" in found(SMALL)


def test_a_second_put_that_takes_the_first_ones_place_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner takes what it lists for unknown, and lists the latest."""
    find, insert = BlockIndex.find, BlockIndex.insert

    def forgetful(
        self: SpaceAllocator, now_s: float, keys: NDArray[np.uint8], *others: Any, **named: Any
    ) -> tuple[Allocations, NDArray[np.intp]]:
        with monkeypatch.context() as patch:
            patch.setattr(BlockIndex, "find", lambda self, keys: np.full(len(keys), -1, np.intp))
            return admit(self, now_s, keys, *others, **named)

    def latest(self: BlockIndex, keys: NDArray[np.uint8], *others: Any, **named: Any) -> NDArray[np.uint8]:
        rows = find(self, keys)
        self.remove(rows[rows >= 0])
        return insert(self, keys, *others, **named)

    admit = SpaceAllocator._admit
    monkeypatch.setattr(SpaceAllocator, "_admit", forgetful)
    monkeypatch.setattr(BlockIndex, "insert", latest)
    assert "took the place of" in found(SMALL)
