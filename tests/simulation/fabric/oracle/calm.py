"""Calm: nothing goes wrong but that the store is down, or that agents end in order.

Then every get of what was committed is a HIT.

Calm begins when the fabric has come to rest and all was found, and ends with the first thing that goes wrong
elsewhere. Then a look-up finds what was committed, too; what it has found can be got right behind it, and
what it has found with a pin at any time within that, whatever is put meanwhile. A store that is down does not
end calm (invariant 8): gets go on under the last map for as long as that takes, and puts for no longer than
an owner may write without having asked whether its claim stands. Nor does an agent that ends in order, where
another one takes its shards, for workers at other agents, and for those at it that take its word.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from tests.simulation.fabric.oracle.resting import excuse, restlessness
from tests.simulation.fabric.world.process import REQUESTS_MAX
from tests.simulation.fabric.world.worker import Ended
from tests.simulation.shard.model import ViolationError

from ostraca_fabric.model.ids import drive_of
from ostraca_fabric.model.outcome import BlockState, Reason

if TYPE_CHECKING:
    from tests.simulation.fabric.world.world import World

_COMMITS_FOR_S = 2.0
"""What may pass between an owner's last look at its grant and the word that a block is committed: a stall of
its drive, and the group commit."""

_LATE_STATES = (BlockState.LATE, BlockState.DECLINED)
_IN_TIME_S = 0.5
"""A get with so much time is not late, where neither drives nor transfers stall."""


@dataclass(frozen=True)
class Asked:
    """What must be found, as it was when a get began."""

    departures: dict[int, tuple[int, int]]
    """By number: how often an owner had let go of it, as it was old, and as it was damaged."""

    was_down: bool
    was_ending: bool
    """Whether the store was down, and whether some agent was about to end in order."""

    was_linked: bool
    """Whether its worker had an agent: to find one, with the volume, takes a time of its own."""

    is_told: bool
    """Whether its worker takes an agent's word that it ends."""

    is_pinned: bool = False
    """Whether owners have promised the blocks: then none is evicted."""

    def is_gone(self, number: int, departures: tuple[int, int]) -> bool:
        """Say whether a block need not be found, of which owners have let go so often by now."""
        before = self.departures.get(number)
        if before is None:
            return True
        return before[1] != departures[1] if self.is_pinned else before != departures


def _own_read_excuse(number: int, state: int, reason: int, end: Ended) -> str:
    """Say why a get may not have a block that its worker was to read."""
    if number in end.unread and reason == Reason.DRIVE_SUSPECT:
        return "its worker's read is lost"
    is_late = state in _LATE_STATES and end.was_slow and number in end.own
    return "its worker's reads were slow" if is_late else ""


class Calm:
    """Whether a world is calm, and what must be so then."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._is_calm = False
        self._down_since_s: float | None = None

    def begin(self) -> None:
        """All was found.

        It is not calm yet where an agent leaves a drive or another agent alone, nor where a worker
        or an agent keeps to an agent that has started anew since, and is told so when it asks, nor
        where a lease was not kept alive of late.
        """
        processes = self._world.agents.values()
        agents = [process.agent for process in processes]
        living = set(self._world.drives.living)
        has_drives = not any(
            drive.refuses_reads for agent in agents for drive in agent._drives.values() if drive.id in living
        )
        has_peers = not any(peer.is_held_off for agent in agents for peer in agent._owners.peers())
        starts = {(process.id, process.agent.start_id) for process in processes}
        store = self._world.outside.store
        has_leases = all(store.lease_left_s(*start) > store.lease_ttl_s / 2 for start in starts)
        links = [process.worker.linked_to for process in self._world.workers.values()]
        has_links = all(link is None or link in starts for link in links)
        has_links &= all(link in starts for process in processes for link in process.linked_to)
        is_judged = self._world.setup.expects_all
        self._is_calm = is_judged and has_drives and has_peers and has_links and has_leases

    def end(self) -> None:
        """Something goes wrong, other than that the store is down."""
        self._is_calm = False

    def store_went_down(self) -> None:
        self._down_since_s = self._world.loop.now_s
        if restlessness(self._world):  # a shard may be between two owners
            self.end()

    def agent_ends(self, *, have_others: bool) -> None:
        """Note that an agent ends in order; blocks that nobody can take over may be missed."""
        reach = self._world.setup.reach
        is_heard = self._down_since_s is None and not (
            reach.lost_requests or reach.lost_answers or reach.late_requests
        )
        if not (have_others and is_heard):
            self.end()

    def store_went_up(self) -> None:
        self._down_since_s = None

    def asked(self, name: str, numbers: list[int]) -> Asked | None:
        """Note that a worker's get begins; return the blocks it must find."""
        if not self._is_calm:
            return None
        oracle = self._world.oracle
        return self._asked(name, [number for number in numbers if oracle.places(number)])

    def asked_behind(self, name: str, found: dict[int, tuple[int, int]], *, is_pinned: bool) -> Asked:
        """Note that a get follows a look-up, at once or, *is_pinned*, within its pin.

        *found* holds the departures from before the look-up.
        """
        return replace(self._asked(name, []), departures=found, is_pinned=is_pinned)

    def _asked(self, name: str, numbers: list[int]) -> Asked:
        departures = {number: self._world.oracle.departures(number) for number in numbers}
        worker = self._world.workers[name].worker
        return Asked(
            departures,
            was_down=self._down_since_s is not None,
            was_ending=any(process.is_ending for process in self._world.agents.values()),
            was_linked=worker.linked_to is not None,
            is_told=worker.is_told,
        )

    def answered(
        self, asked: Asked | None, numbers: list[int], end: Ended, deadline_s: float, what: str = "get"
    ) -> None:
        """Check the end of a get."""
        if asked is None or not self._is_calm:
            return
        oracle, happened = self._world.oracle, self._world.story.happened
        kind = "calm HITs" if what == "get" else f"calm HITs of a {what}"
        kind += ", the store down" * asked.was_down + ", an agent ending" * asked.was_ending
        for number, state, reason in zip(numbers, end.states, end.reasons, strict=True):
            if asked.is_gone(number, oracle.departures(number)):
                continue
            if state == BlockState.HIT:
                happened[kind] += 1
                continue
            has_time = asked.was_linked and deadline_s >= _IN_TIME_S
            why = self._excuse(number, state, reason, has_time=has_time, is_told=asked.is_told)
            why = why or _own_read_excuse(number, state, reason, end)
            if not why:
                said = "nothing" if state < 0 else f"{BlockState(state).name}({Reason(reason).name})"
                where = "the store alone is down" if asked.was_down else "nothing is wrong"
                raise ViolationError(f"block {number} was committed, {where}, and a {what} of it says {said}")
            happened[f"calm, and {why}"] += 1

    def _excuse(self, number: int, state: int, reason: int, *, has_time: bool, is_told: bool) -> str:
        """Say why a get may have found nothing though all is calm."""
        world, setup = self._world, self._world.setup
        is_late = state in _LATE_STATES
        faults = {
            "its worker has no agent, or no slot": state < 0,
            "its agent has ended, of which it takes no word": reason == Reason.DISCONNECTED and not is_told,
            "too late": is_late and (self._stalls or not has_time),
            "an agent has as much to do as it may": reason == Reason.OVERLOADED
            and setup.requests_max < REQUESTS_MAX,
            "a transfer failed": reason == Reason.TRANSFER_FAILED and setup.transfer_faults.failures > 0,
            "a drive was silent": reason == Reason.DRIVE_SUSPECT and setup.drive_faults.stalls > 0,
            "its next owner can't open it, as the drive is silent": reason == Reason.NO_OWNER
            and self._is_left_alone(number),
            "its next owner has not adopted it yet": reason == Reason.NOT_FOUND
            and self._may_be_adopted(number),
            "a lie": reason == Reason.DAMAGED and setup.lies > 0,
            "it may lie beside what can't be read": reason == Reason.DRIVE_ERROR
            and world.drives.have_unreadable(world.oracle.places(number)),
        }
        return next((why for why, is_so in faults.items() if is_so), "") or excuse(world, number)

    def _is_left_alone(self, number: int) -> bool:
        """Whether an agent leaves the drive of a block alone now."""
        drives = {drive_of(shard) for shard in self._world.oracle.places(number)}
        agents = [process.agent for process in self._world.agents.values()]
        return any(
            drive.refuses_reads for agent in agents for drive in agent._drives.values() if drive.id in drives
        )

    def _may_be_adopted(self, number: int) -> bool:
        """Say whether the owner of a block's shard may still adopt the block.

        The owner looks from time to time for listings of the previous owner. A get may find the block all the
        same, in the DRAM of the agent that took the put.
        """
        key = np.frombuffer(self._world.oracle.key_of(number), np.uint8).reshape(1, -1)
        shards = self._world.oracle.places(number)
        owners = (process.shards.get(shard) for process in self._world.agents.values() for shard in shards)
        return any(
            owned is not None and bool(owned.withheld) and owned.core.index.find(key)[0] < 0
            for owned in owners
        )

    @property
    def is_calm(self) -> bool:
        """Whether nothing goes wrong but what need not end a calm."""
        return self._is_calm

    @property
    def _stalls(self) -> bool:
        setup = self._world.setup
        return bool(setup.transfer_faults.stalls or setup.drive_faults.stalls)

    def committed(self, numbers: list[int]) -> None:
        """Note that an owner has committed blocks."""
        if not self._is_calm or self._down_since_s is None:
            return
        world = self._world
        down_s = world.loop.now_s - self._down_since_s
        if down_s > world.outside.settings.owner.grant_s * (1 + world.setup.drift) + _COMMITS_FOR_S:
            raise ViolationError(f"blocks {numbers} were committed {down_s:.1f} s after the store went down")
