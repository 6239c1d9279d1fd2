"""What owners do to blocks, told to the oracle as it happens, with what excuses it and what undoes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ostraca_fabric.telemetry.explain import EventKind

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from tests.simulation.fabric.world.process import AgentProcess
    from tests.simulation.fabric.world.world import World

    from ostraca_dpu_agent.shards.shard import OwnedShard
    from ostraca_fabric.model.ids import ShardId


@dataclass(frozen=True, slots=True)
class Asked:
    """What was so when an owner was asked to list blocks. It may stand still until it says that it did."""

    mishaps: int
    """What had befallen the shard's drive."""

    leavings: dict[int, int]
    """How often each block had left the shard."""


class Heard:
    """One world's."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._dropped: int | None = None
        """What was dropped last, until it is said where the damage is."""

    def observe(self, agent: str, kind: EventKind, keys: NDArray[np.uint8]) -> None:
        """Hear of what an agent did to blocks."""
        world = self._world
        process = world.agents.get(agent)
        if process is None or not process.is_alive:
            return
        if kind in (EventKind.EVICTED, EventKind.DROPPED):
            numbers = world.oracle.numbers_of(keys)
            world.story.tell(agent, f"{kind.name} {numbers}")
            is_drop = kind is EventKind.DROPPED
            if is_drop:
                (self._dropped,) = numbers
            left = {number: self._let_go_by(process, number, is_drop=is_drop) for number in numbers}
            world.oracle.gone(kind, left)

    def asked(self, owned: OwnedShard, keys: NDArray[np.uint8]) -> Asked:
        """Note that an owner is asked to list blocks."""
        world = self._world
        shard, numbers = owned.record.id, world.oracle.numbers_of(keys)
        leavings = {number: world.oracle.leavings(number, shard) for number in numbers}
        return Asked(world.drives.mishaps(shard), leavings)

    def committed(
        self,
        agent: str,
        owned: OwnedShard,
        keys: NDArray[np.uint8],
        tags: NDArray[np.uint8],
        asked: Asked,
    ) -> None:
        """Hear of blocks that an owner has committed; those that have left its index since are none.

        It may have stopped owning the shard meanwhile, and holds to what it says even so.

        Where it stands still between its write and its word, what it has written may be damaged by then, and
        its successor may have found it, and let it go.
        """
        world = self._world
        process, shard = world.agents.get(agent), owned.record.id
        if process is None or not process.is_alive:
            return
        is_there = owned.core.index.find(keys) >= 0
        numbers = world.oracle.numbers_of(keys[is_there])
        if world.setup.expects_all:
            world.drives.check_listed(shard, np.hstack([keys, tags])[is_there])
        world.story.tell(agent, f"COMMITTED {numbers} in {shard}, epoch {owned.epoch}")
        world.calm.committed(numbers)
        is_last = world.is_last_owner(owned)
        for number in numbers:
            if not is_last and world.oracle.leavings(number, shard) > asked.leavings[number]:
                world.oracle.excused["let go by the next owner before it was called committed"] += 1
                continue
            earlier = world.oracle.places(number).get(shard)
            if (
                earlier
                and world.has_forgotten_owners
                and world.drives.may_hide_owners(shard, earlier.mishaps)
            ):
                earlier.epochs.clear()
            is_current = world.placed.shards(world.map, number)[:1] == [shard]
            world.oracle.committed(shard, owned.epoch, number, mishaps=asked.mishaps, is_current=is_current)

    def found_damaged(self, owned: OwnedShard, offset: int) -> None:
        """Hear of damage that an owner has found: of the block it has just dropped, or of a summary."""
        world = self._world
        length = world.blocks.length(self._dropped) if self._dropped is not None else 0
        self._dropped = None
        if world.setup.expects_all and not world.setup.lies and world.is_last_owner(owned):
            world.drives.check_damage(owned, offset, length)

    def _let_go_by(self, process: AgentProcess, number: int, *, is_drop: bool) -> set[ShardId]:
        """Return the shards in which an agent that has just let a block go lists it no more.

        What an agent drops that has a successor, that one may list.
        """
        world = self._world
        key = np.frombuffer(world.oracle.key_of(number), np.uint8).reshape(1, -1)
        return {
            shard
            for shard, owned in process.shards.items()
            if not owned.core.is_recovering
            and (not is_drop or world.is_last_owner(owned))
            and owned.core.index.find(key)[0] < 0
        }
