"""What may happen beside processes that die or stop, links and the store's reach.

Agents that end in order, drives, enclosures, and harsh outages.

Each class is a part of ``History``; the names of its strikes are beside it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from tests.simulation.fabric.world.drives import FABRIC, ILLS
from tests.simulation.shard.model import ViolationError

from ostraca_fabric.errors import PlacementBusyError
from ostraca_fabric.flash.rebuild import rebuilt
from ostraca_fabric.model.fabric_map import EnclosureState

if TYPE_CHECKING:
    from tests.simulation.fabric.world.world import World

    from ostraca_fabric.model.fabric_map import EnclosureRecord
    from ostraca_fabric.model.ids import DriveId, EnclosureId

_ILL_FOR_S = 20.0
_STARTS_AGAIN_S = 30.0
_SWITCHED_FOR_S = 20.0
_ENCLOSURES_MORE = 2
_FORCED = 0.3

BAD_DRIVES = (
    "drive_is_ill",
    "drive_is_ill",
    "drive_is_slow",
    "drive_rots",
    "drive_rots",
    "drive_loses_power",
    "drive_dies",
)
ENCLOSURES = (
    "enclosure_is_added",
    "enclosure_is_added",
    "enclosure_is_drained",
    "enclosure_is_used_again",
    "enclosure_is_lost",
)
DIRECT = ("direct_reads_are_switched",)
NARROW = ("link_is_narrow",)
HARSH = ("leases_are_lost", "leases_are_lost", "store_is_emptied")


class Playing(Protocol):
    """What a strike needs of its history."""

    world: World
    dice: random.Random

    def tell(self, who: str, what: str) -> None:
        """Put into the story what goes wrong, and count it."""

    def store_goes_up(self) -> None:
        """Let the store answer."""

    def later(self, at_most_s: float, act: Callable[..., object], *arguments: object) -> None:
        """Do something in a while."""

    def restart(self, name: str) -> None:
        """Start an agent where it does not live."""


class OrderlyEnds(Playing):
    """Agents that end in order, as for an upgrade."""

    def agent_ends(self) -> None:
        """End an agent in order: others take its shards, and it starts again after a while."""
        world = self.world
        running = [
            name
            for name, process in sorted(world.agents.items())
            if process.is_alive and process.has_started and not process.is_ending
        ]
        if running:
            name = self.dice.choice(running)
            world.calm.agent_ends(have_others=len(running) > 1)
            self.tell(name, "is to end")
            world.end_agent(name, partial(self.later, _STARTS_AGAIN_S, self.restart, name))


class NarrowLinks(Playing):
    """Links between workers and agents that take long for blocks: operations end in mid frame."""

    def link_is_narrow(self) -> None:
        """Let few bytes pass between a worker and the agent that it keeps to."""
        world = self.world
        name = self.dice.choice(sorted(world.workers))
        bytes_per_s = self.dice.choice([1e5, 1e6])
        linked_to = world.workers[name].worker.linked_to
        if linked_to is not None:
            self.tell(name, "has a narrow link")
            world.outside.network.narrow(name, linked_to[0], bytes_per_s=bytes_per_s)


class DirectReadSwitches(Playing):
    """An operator who lets workers read drives themselves, and changes their mind."""

    def direct_reads_are_switched(self) -> None:
        """Let workers read no drives for a while."""
        self.tell("-", "workers may read no drives")
        self.world.let_read_directly(is_on=False)
        self.later(_SWITCHED_FOR_S, partial(self.world.let_read_directly, is_on=True))


class BadDrives(Playing):
    """Drives that fail, are silent, rot, lose power, or die."""

    def _drive(self) -> DriveId:
        return self.dice.choice(self.world.drives.living)

    def drive_is_ill(self) -> None:
        """Let some I/Os of a drive fail, maybe with a partial effect."""
        dice, drive = self.dice, self._drive()
        ills = {kind: dice.choice([0.02, 0.1, 0.5]) for kind in dice.sample(ILLS, dice.choice([1, 1, 2, 3]))}
        for kind in ills:
            self.tell(drive, f"is ill: {kind}")
        self.world.drives.befall(drive, **ills, late_failures=dice.choice([0.0, 0.5]))
        self.later(_ILL_FOR_S, self.world.drives.well, drive)

    def drive_is_slow(self) -> None:
        """Delay some or all I/Os of a drive."""
        drive, stall_s = self._drive(), self.dice.choice([0.3, 3.0, 30.0])
        self.tell(drive, "is slow")
        self.world.drives.befall(drive, stalls=self.dice.choice([0.1, 1.0]), stall_s=stall_s)
        self.later(_ILL_FOR_S, self.world.drives.well, drive)

    def drive_rots(self) -> None:
        """Bits of a drive change."""
        drive = self._drive()
        self.tell(drive, "rots")
        self.world.drives.flashes[drive].decay(self.dice.choice([1, 4, 16]))

    def drive_loses_power(self) -> None:
        """Let writes under way to a drive land in part."""
        drive = self._drive()
        self.tell(drive, "loses power")
        self.world.drives.flashes[drive].power_cut()

    def drive_dies(self) -> None:
        """Let a drive fail for good, unless it is the last."""
        drive = self._drive()
        if len(self.world.drives.living) > 1:
            self.tell(drive, "fails for good")
            self.world.drives.die(drive)


class Enclosures(Playing):
    """Enclosures that are added, drained, taken back into use, and lost: each a new placement epoch."""

    def _placed(self, what: str, record: EnclosureRecord) -> bool:
        """Change the map as an operator would; say whether the store did."""
        world, force = self.world, self.dice.random() < _FORCED
        store = world.outside.store
        if not store.is_up:
            return False
        before = world.map.earlier_placements
        try:
            store.transact(lambda store: store.memory.put_enclosures([record], force=force))
        except PlacementBusyError:
            self.tell(record.id, "can't be changed now: too many placements are asked")
            return False
        self.tell(record.id, what)
        kept = {placement.epoch for placement in world.map.earlier_placements}
        world.has_forgotten_placements |= any(placement.epoch not in kept for placement in before)
        return True

    def _writable(self) -> list[EnclosureRecord]:
        return [
            each for each in self.world.map.enclosures.values() if any(shard.weight for shard in each.shards)
        ]

    def enclosure_is_added(self) -> None:
        """There is one more enclosure."""
        world = self.world
        has_room = len(world.map.enclosures) < world.setup.enclosures + _ENCLOSURES_MORE
        if has_room and world.outside.store.is_up:
            self._placed("is added", world.drives.made_enclosure(world.setup.drives))

    def enclosure_is_drained(self) -> None:
        """Drain an enclosure, unless it is the last one in use."""
        writable = self._writable()
        if len(writable) > 1:
            record = self.dice.choice(writable)
            shards = tuple(replace(shard, weight=0) for shard in record.shards)
            drained = replace(record, shards=shards, state=EnclosureState.DRAINING)
            if self._placed("is drained", drained):
                self.world.drained.add(record.id)

    def enclosure_is_used_again(self) -> None:
        """Let a drained enclosure take blocks again."""
        drained = [
            each for each in self.world.map.enclosures.values() if not any(s.weight for s in each.shards)
        ]
        if drained:
            record = self.dice.choice(drained)
            shards = tuple(
                replace(shard, weight=self.world.drives.weight_of(shard.id)) for shard in record.shards
            )
            self._placed("is used again", replace(record, shards=shards, state=EnclosureState.READY))

    def enclosure_is_lost(self) -> None:
        """All drives of an enclosure fail for good, unless no drive would be left."""
        world = self.world
        enclosure: EnclosureId = self.dice.choice(sorted(world.map.enclosures))
        drives = [drive.id for drive in world.map.enclosures[enclosure].drives]
        if set(world.drives.living) - set(drives):
            self.tell(enclosure, "is lost")
            for drive in drives:
                world.drives.die(drive)


class HarshOutages(Playing):
    """The store comes back with less than it had."""

    def leases_are_lost(self) -> None:
        """All leases have run out while nobody could keep them alive."""
        store = self.world.outside.store
        if store.is_up:
            self.tell("-", "the store loses all leases")
            store.lose_leases()

    async def store_is_emptied(self) -> None:
        """Empty the store, and rebuild its records from the drives while agents run."""
        world = self.world
        self.tell("-", "the store is empty")
        self.store_goes_up()
        said = rebuilt(world.drives.found_shards(), FABRIC)
        if said.contradictions:
            raise ViolationError(f"drives of one fabric contradict each other: {said.contradictions}")
        given = world.outside.store.memory._grants
        world.forgotten_epochs |= {shard: each.epoch for shard, each in given.items() if each.epoch}
        world.outside.store.begin_anew(said.enclosures, said.volumes)
        world.story.tell(
            "-", f"the store knows {len(said.enclosures)} enclosures, {len(said.volumes)} volumes"
        )
        world.has_forgotten_placements = world.has_forgotten_owners = True
