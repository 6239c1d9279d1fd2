"""What keeps two owners of one shard apart, looked at from outside where it is decided, and on flash.

An owner counts on its claim no longer than ``grant_s`` after the store has seen it stand, and gives no space
after that. What it has open is in the grant that the store has recorded for its epoch, or in one of the whole
shard, and it opens nothing that is in an earlier one. Nobody decides on a write under a reservation that has
ended, and no owner lists what is committed after that. No segment is opened anew under a pin that its owner
has given and that has not ended. Once one is, or an earlier grant of it retired, no write that was decided on
before lands there.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from tests.simulation.shard.model import ViolationError
from tests.support.simulated.virtual_hosts import running_host

from ostraca_dpu_agent.shards.core.ring.pools import SegmentState
from ostraca_fabric.model.outcome import PutState
from ostraca_fabric.wire.codec import Outcomes

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    from numpy.typing import NDArray
    from tests.simulation.fabric.world.process import AgentProcess
    from tests.simulation.fabric.world.world import World

    from ostraca_dpu_agent.shards.core import Allocations, Resolution, ShardCore
    from ostraca_dpu_agent.shards.core.ring.ring import Ring
    from ostraca_dpu_agent.shards.shard import OwnedShard
    from ostraca_fabric.model.extent import Pieces
    from ostraca_fabric.model.fabric_map import FabricMap
    from ostraca_fabric.model.ids import AgentId, DriveId, ShardId, StartId

_EXACTLY_S = 1e-6


class Margins:
    """One world's."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._stood_s: dict[tuple[ShardId, StartId], float] = {}
        """When the store last said that a claim stands, or that its agent's record does."""

        self._held_until_s: dict[tuple[DriveId, int], float] = {}
        """By where it begins: until when space was handed out last."""

        self._pinned: WeakKeyDictionary[Ring, dict[int, tuple[float, frozenset[int]]]] = WeakKeyDictionary()
        """By number of the pin: until when, and which segments."""

    # ------------------------------------------------------------------------------------- what is heard

    def stands(self, fabric_map: FabricMap, agent: AgentId, start: StartId) -> None:
        """Note the store's answer that an agent's record stands, and its claims with it."""
        for shard, claim in fabric_map.claims.items():
            if (claim.agent, claim.start) == (agent, start):
                self._stood_s[shard, start] = self._world.loop.now_s

    def reserved(self, core: ShardCore, made: Allocations) -> None:
        """Note that an owner has granted space."""
        host, table = running_host(), core.reservations
        assert host is not None, "owners are in processes"
        is_given = made.states == PutState.STAGED
        if is_given.any():
            self._check_stands(core)
        slots = table.slots_of(made.reservations[is_given])
        for offset, end_s in zip(made.offsets[is_given].tolist(), table.ends_s[slots].tolist(), strict=True):
            self._held_until_s[core.superblock.drive, offset] = host.loop_time(end_s)

    def _check_stands(self, core: ShardCore) -> None:
        """Check a grant of space: the claim must have stood within the last ``grant_s``."""
        for process, owned in self._owned():
            if owned.core is core:
                stood_s = self._stood_s.get((owned.record.id, process.agent.start_id), -math.inf)
                grant_s = self._world.outside.settings.owner.grant_s
                late_s = self._world.loop.now_s - stood_s - grant_s
                if late_s > self._drift_of(grant_s):
                    raise ViolationError(
                        f"{process.name} gives space of {owned.record.id} {late_s:.3f} s after its fence"
                    )

    def taken(self, core: ShardCore, numbers: NDArray[np.uint64], answer: Outcomes) -> None:
        """Note that an owner is told of blocks on flash, and is to list some."""
        slots = core.reservations.slots_of(numbers[answer.states == PutState.STAGED])
        for offset in core.reservations.offsets[slots[slots >= 0]].tolist():
            late_s = self._world.loop.now_s - self._held_until_s[core.superblock.drive, offset]
            if late_s > _EXACTLY_S:
                raise ViolationError(
                    f"a commit to {core.superblock.shard} counts {late_s:.3f} s after its reservation's end"
                )

    def pinned(self, core: ShardCore, now_s: float, pin_s: float, where: Resolution) -> None:
        """Note an owner's answer to a look-up, with or without a pin."""
        if where.pin:
            host = running_host()
            assert host is not None, "owners are in processes"
            until_s = host.loop_time(now_s + min(pin_s, core.settings.pin_max_s))
            segments = core.geometry.segment_of(where.offsets[where.found]).tolist()
            self._pinned.setdefault(core.ring, {})[where.pin] = until_s, frozenset(segments)

    def released(self, core: ShardCore, pins: Iterable[int]) -> None:
        """Readers have given pins back."""
        for pin in pins:
            self._pinned.get(core.ring, {}).pop(pin, None)

    def writes(self, drive: DriveId, pieces: Pieces) -> None:
        """Note that a process has decided on a write."""
        hold_s, now_s = self._world.outside.settings.owner.hold_s, self._world.loop.now_s
        for offset in pieces.drive_offsets.tolist():
            until_s = self._held_until_s.get((drive, offset))
            if until_s is not None and now_s > until_s + self._drift_of(hold_s):
                raise ViolationError(
                    f"{drive} is written at {offset} {now_s - until_s:.3f} s after that was to be held"
                )

    def opened(self, ring: Ring, segment: int) -> None:
        """Note that a segment enters its next generation."""
        host = running_host()
        assert host is not None, "owners are in processes"
        now_s = host.loop_time(host.clock())
        for until_s, segments in self._pinned.get(ring, {}).values():
            if segment in segments and now_s < until_s - _EXACTLY_S:
                raise ViolationError(
                    f"segment {segment} is opened anew {until_s - now_s:.3f} s before a pin on it ends"
                )
        for _, owned in self._owned():
            if owned.core.ring is ring:
                self._check_withheld(owned, segment)
                self._fence(owned.core, [segment])

    def _check_withheld(self, owned: OwnedShard, segment: int) -> None:
        """Check an opened segment: the store must know no earlier grant of it."""
        known = self._world.outside.store.memory.grants.get(owned.record.id)
        for grant in () if known is None else known.unretired:
            if grant.epoch < owned.epoch and segment in grant.segments:
                raise ViolationError(
                    f"epoch {owned.epoch} of {owned.record.id} opens segment {segment}, "
                    f"which epoch {grant.epoch} may write"
                )

    def retired(self, core: ShardCore, segments: Iterable[int]) -> None:
        """Segments of earlier grants are used like any other."""
        self._fence(core, segments)

    def _fence(self, core: ShardCore, segments: Iterable[int]) -> None:
        flash, geometry = self._world.drives.flashes[core.superblock.drive], core.geometry
        for segment in segments:
            begin = geometry.summary_offset(segment)
            flash.fence(begin, begin + geometry.segment_bytes)

    # ------------------------------------------------------------------------------------- what is looked at

    def check(self) -> None:
        """Look at all owners that are sure of their shards."""
        for process, owned in self._owned():
            if process.is_alive and not owned.core.is_recovering:
                self._check_fence(process, owned)
                if owned.is_exclusive:
                    self._check_grant(process, owned)

    def _check_fence(self, process: AgentProcess, owned: OwnedShard) -> None:
        stood_s = self._stood_s.get((owned.record.id, process.agent.start_id))
        grant_s = self._world.outside.settings.owner.grant_s
        until_s = process.host.loop_time(owned.core.grants.until_s)
        if until_s > 0 and (stood_s is None or until_s > stood_s + grant_s + self._drift_of(grant_s)):
            raise ViolationError(
                f"{process.name} is sure of {owned.record.id} until {until_s:.6f}, "
                f"and its claim stood at {stood_s}"
            )

    def _check_grant(self, process: AgentProcess, owned: OwnedShard) -> None:
        known = self._world.outside.store.memory.grants.get(owned.record.id)
        if known is None and owned.record.id not in {shard.id for shard in self._world.map.shards()}:
            return  # the store has lost the shard, which nobody can claim
        if known is not None and any(grant.is_whole for grant in known.unretired):
            return  # it has lost what was granted, and whoever comes next waits for all of the shard
        recorded = None if known is None else known.of(owned.epoch)
        granted = frozenset(() if recorded is None else recorded.segments)
        is_open = (SegmentState.OPENING, SegmentState.OPEN)
        opened = {each.number for each in owned.core.ring.segments if each.state in is_open}
        if not opened <= granted:
            raise ViolationError(
                f"{process.name} has segments {sorted(opened)} of {owned.record.id} open, "
                f"and the store knows of {sorted(granted)} under epoch {owned.epoch}"
            )

    def _owned(self) -> list[tuple[AgentProcess, OwnedShard]]:
        processes = self._world.agents.values()
        return [(process, owned) for process in processes for owned in process.shards.values()]

    def _drift_of(self, seconds: float) -> float:
        """How much two clocks may differ over so long."""
        return 2 * self._world.setup.drift * seconds + _EXACTLY_S
