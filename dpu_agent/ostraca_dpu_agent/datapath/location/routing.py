"""Routes to the owner of each key, and locations of a request's blocks. Pure.

Routes are rebuilt for each fabric map and immutable: a request keeps its first routes. Placements are
expensive, so they are made on first use and reused by later routes while their weights are equal. Claims
and agents change often, weights seldom.

A block is stored where the current placement epoch says. The block may also lie where an earlier epoch
said: epochs named by the map are *live*, and lookups ask them too.

After an ordered handover, the previous owner answers lookups for a while. Until the next claim, no other
agent can answer. During recovery, the previous owner knows blocks not yet read by the next owner. A dead
owner has left the fabric and is not asked.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.model.chain import Span
from ostraca_fabric.model.fabric_map import FabricMap, PlacementRecord, ShardRecord, weights_of
from ostraca_fabric.model.ids import AgentId, DriveId, EnclosureId, PlacementEpoch, ShardId, enclosure_of
from ostraca_fabric.model.outcome import Reason
from ostraca_fabric.policies.placement import NOWHERE, Placement, blocks_of_units
from ostraca_fabric.telemetry.explain import EpochPlacement
from ostraca_fabric.wire import codec
from ostraca_fabric.wire.messages import ShardRelease

PartsByOwner = dict[AgentId, list["ShardPart"]]

GroupedBlocks = tuple[PartsByOwner, NDArray[np.intp]]
"""Blocks of a request by owner, and the positions of blocks without an owner or a shard."""

NO_POSITIONS = np.empty(0, np.intp)

_Place = TypeVar("_Place", bound=Hashable)


@dataclass(frozen=True, slots=True)
class ShardPart:
    """Blocks of a request placed on a shard: their positions in the request."""

    shard: ShardId
    positions: NDArray[np.intp]
    age: int
    """0 for the current placement epoch, 1 for the previous epoch, and so on."""

    epoch: PlacementEpoch
    """Epoch of this placement."""

    is_previous_owner: bool = False
    """Whether the previous owner is asked, beside the current owner."""


@dataclass(frozen=True, slots=True, eq=False)
class _Live:
    """A live placement epoch under a map."""

    record: PlacementRecord
    placement: Placement
    numbers: NDArray[np.intp]
    """Map's shard number per placement index; NOWHERE for a removed shard, and at the end."""


class Routes:
    """Placement of blocks under a fabric map."""

    def __init__(
        self,
        fabric_map: FabricMap,
        before: Routes | None = None,
        previous_owners: Mapping[ShardId, AgentId] | None = None,
    ) -> None:
        """Route by this map, and reuse placements of *before*, as far as valid.

        Agents in *previous_owners* were owners until lately. They are asked after the owner, or instead of a
        missing owner.
        """
        self.map = fabric_map
        self.previous_owners = previous_owners or {}
        same = before if before is not None and before.map.enclosures is fabric_map.enclosures else None
        self.shards: tuple[ShardRecord, ...] = fabric_map.shards() if same is None else same.shards
        self.numbers: dict[ShardId, int] = (
            {shard.id: number for number, shard in enumerate(self.shards)} if same is None else same.numbers
        )
        self.weights: dict[EnclosureId, dict[ShardId, int]] = (
            weights_of(fabric_map.enclosures.values()) if same is None else same.weights
        )
        current = PlacementRecord(fabric_map.placement_epoch, self.weights)
        self.records = (current, *fabric_map.earlier_placements)
        self.live: dict[PlacementEpoch, _Live] = {}
        """Live epochs whose placement is made."""

        made = {} if before is None else before.live
        for record in self.records:
            live = made.get(record.epoch)
            if live is not None and live.record.weights == record.weights:
                self.live[record.epoch] = self._map_numbers(record, live.placement) if same is None else live

    @property
    def has_earlier(self) -> bool:
        """Whether agents other than the current owners may know blocks."""
        return len(self.records) > 1 or bool(self.previous_owners)

    def unit_numbers(self, age: int, secret: bytes, spans: Sequence[Span]) -> NDArray[np.intp]:
        """Return the shard number of each stripe unit under an epoch; NOWHERE if none."""
        record = self.records[age]
        live = self.live.get(record.epoch)
        if live is None:
            live = self.live[record.epoch] = self._map_numbers(record, Placement.recorded(record))
        return live.numbers[live.placement.unit_shards(secret, spans)]

    def shard_numbers(self, age: int, secret: bytes, spans: Sequence[Span]) -> NDArray[np.intp]:
        """Return the shard number of each block under an epoch; NOWHERE if none."""
        return self.unit_numbers(age, secret, spans).repeat(blocks_of_units(spans))

    def _map_numbers(self, record: PlacementRecord, placement: Placement) -> _Live:
        numbers = [self.numbers.get(shard, NOWHERE) for shard in placement.shard_ids]
        return _Live(record, placement, np.array([*numbers, NOWHERE], np.intp))

    def by_owner(self, secret: bytes, spans: Sequence[Span]) -> GroupedBlocks:
        """Group blocks by owner and shard, under the current placement epoch.

        Also returns the positions without an owner or a shard. *secret* is the volume's placement secret.
        """
        parts: PartsByOwner = {}
        return parts, self._group(self.shard_numbers(0, secret, spans), 0, parts)

    def runs(self, secret: bytes, spans: Sequence[Span]) -> tuple[list[ShardId | None], list[int]]:
        """Return the shard of each run of neighbours under the current placement epoch, and its blocks.

        None stands for blocks without a shard.
        """
        shards: list[ShardId | None] = []
        counts: list[int] = []
        last = None
        numbers = self.unit_numbers(0, secret, spans).tolist()
        for number, count in zip(numbers, blocks_of_units(spans), strict=True):
            if number == last:
                counts[-1] += count
            else:
                shards.append(None if number == NOWHERE else self.shards[number].id)
                counts.append(count)
                last = number
        return shards, counts

    def by_owner_of_all(self, secret: bytes, spans: Sequence[Span]) -> GroupedBlocks:
        """Group blocks as every live epoch places them, current epoch first.

        A block placed on the same shard by several epochs appears once, under the newest. Removed shards of
        earlier epochs are left out. The returned positions are those without an owner under any epoch.
        """
        ages = range(len(self.records))
        chosen = [self.shard_numbers(age, secret, spans) for age in ages]
        parts: PartsByOwner = {}
        unowned = [self._group(chosen[0], 0, parts)]
        for age in ages[1:]:
            is_new = np.logical_and.reduce([chosen[age] != newer for newer in chosen[:age]])
            placed = np.where(is_new, chosen[age], NOWHERE)
            without = self._group(placed, age, parts)
            unowned.append(without[placed[without] != NOWHERE])
        for part in list(itertools.chain.from_iterable(parts.values())):
            agent = self.previous_owners.get(part.shard)
            if agent is not None and self.map.owner(part.shard) is not None:
                other = replace(part, age=len(ages) + part.age, is_previous_owner=True)
                parts.setdefault(agent, []).append(other)
        return parts, np.concatenate(unowned)

    def _group(self, chosen: NDArray[np.intp], age: int, parts: PartsByOwner) -> NDArray[np.intp]:
        """Add an epoch's placements to *parts*; return positions without owner."""
        unowned = [NO_POSITIONS]
        in_order = chosen.argsort(kind="stable")  # fast, as neighbours usually share a place
        numbers = chosen[in_order]
        ends = ((numbers[1:] != numbers[:-1]).nonzero()[0] + 1).tolist()
        for begin, end in itertools.pairwise((0, *ends, len(numbers)) if len(numbers) else ()):
            positions, number = in_order[begin:end], int(numbers[begin])
            shard = None if number == NOWHERE else self.shards[number].id
            owner = None if shard is None else self.map.owner(shard) or self.previous_owners.get(shard)
            if shard is None or owner is None:
                unowned.append(positions)
            else:
                part = ShardPart(shard, positions, age, self.records[age].epoch)
                parts.setdefault(owner, []).append(part)
        return np.concatenate(unowned)

    def places(self, secret: bytes, spans: Sequence[Span]) -> tuple[EpochPlacement, ...]:
        """Return the first block's place under each live epoch, current first."""
        return tuple(
            self._then(record, int(self.unit_numbers(age, secret, spans)[0]))
            for age, record in enumerate(self.records)
        )

    def _then(self, record: PlacementRecord, number: int) -> EpochPlacement:
        if number == NOWHERE:
            return EpochPlacement(record.epoch)
        shard = self.shards[number].id
        owner = self.map.owner(shard)
        epoch = 0 if owner is None else self.map.claims[shard].epoch
        return EpochPlacement(record.epoch, enclosure_of(shard), shard, owner or "", epoch)

    def place(self, shard: ShardId) -> tuple[DriveId, int]:
        """Return a shard's drive, and its first byte there."""
        record = self.shards[self.numbers[shard]]
        return record.drive, record.offset


class PreviousOwners:
    """Previous owners, from the sequence of fabric maps.

    This agent counts as alive whatever the map says. Without etcd, this agent may learn of its expired lease,
    but not of the next owners. This agent then continues with its shards.
    """

    def __init__(self, own: AgentId, clock: Callable[[], float], *, lasts_s: float) -> None:
        """Keep a previous owner for *lasts_s* after the next claim; *own* is this agent."""
        self._own = own
        self._clock = clock
        self._lasts_s = lasts_s
        self._before: dict[ShardId, tuple[AgentId, float]] = {}

    def on_map(self, before: FabricMap, after: FabricMap) -> None:
        """Note the changes between two maps."""
        for shard in before.claims:
            owner = before.owner(shard)
            if owner is not None and after.owner(shard) != owner:
                self._before[shard] = owner, math.inf
        for shard, (owner, ends_s) in self._before.items():
            if ends_s == math.inf and after.owner(shard) is not None:  # the time begins with the next claim
                self._before[shard] = owner, self._clock() + self._lasts_s
        self._before = {
            shard: (owner, ends_s)
            for shard, (owner, ends_s) in self._before.items()
            if (owner == self._own or owner in after.agents) and after.owner(shard) != owner
        }

    @property
    def owners(self) -> dict[ShardId, AgentId]:
        """Previous owners still worth asking."""
        now_s = self._clock()
        return {shard: owner for shard, (owner, ends_s) in self._before.items() if now_s < ends_s}


class RouteTable:
    """Routes under the newest map."""

    def __init__(self, fabric_map: FabricMap, previous_owners: PreviousOwners) -> None:
        """Begin with a map, and without previous owners."""
        self._previous_owners = previous_owners
        self._routes = Routes(fabric_map)

    def on_map(self, fabric_map: FabricMap) -> None:
        """Route by this map from now on."""
        before = self._routes
        if fabric_map.revision != before.map.revision:
            self._previous_owners.on_map(before.map, fabric_map)
            self._routes = Routes(fabric_map, before, self._previous_owners.owners)

    def newest(self) -> Routes:
        """Return the routes for a request, without previous owners no longer worth asking."""
        before = self._routes
        if before.previous_owners and before.previous_owners != self._previous_owners.owners:
            self._routes = Routes(before.map, before, self._previous_owners.owners)
        return self._routes


@dataclass(frozen=True, slots=True)
class BlockSource:
    """A shard with some of a request's blocks."""

    owner: AgentId
    shard: ShardId
    drive: DriveId
    base: int
    """The shard's first byte on the drive."""


Pins = list[tuple[AgentId, ShardRelease]]
"""Pins to release, with the owners that gave them."""


@dataclass(slots=True)
class BlockLocations:
    """Locations of a request's blocks: a row per block."""

    is_found: NDArray[np.bool_]
    reasons: NDArray[np.uint8]
    """Reason for an absent block."""

    sources: list[BlockSource]
    source: NDArray[np.intp]
    """Index of a block's shard in ``sources``."""

    offsets: NDArray[np.uint64]
    """Bytes, within the shard."""

    lengths: NDArray[np.uint32]
    generations: NDArray[np.uint64]
    tags: NDArray[np.uint8]
    """Shape (n, 16)."""

    pins: Pins = field(default_factory=list)

    def take_pins(self, drives: Collection[DriveId]) -> Pins:
        """Take the pins of blocks on *drives* out."""
        shards = {source.shard for source in self.sources if source.drive in drives}
        taken = [pin for pin in self.pins if pin[1].shard in shards]
        self.pins = [pin for pin in self.pins if pin[1].shard not in shards]
        return taken

    def by_drive(self, positions: NDArray[np.intp]) -> list[tuple[DriveId, NDArray[np.intp]]]:
        """Group found blocks by drive, in order."""
        return by_place([source.drive for source in self.sources], self.source, positions)

    def drive_offsets(self) -> NDArray[np.int64]:
        """Return the first byte of each block on its drive."""
        offsets = self.offsets.astype(np.int64)
        bases = np.array([source.base for source in self.sources], np.int64)
        return bases[self.source] + offsets if len(bases) else offsets

    def bytes_by_drive(self, positions: NDArray[np.intp]) -> dict[DriveId, int]:
        """Sum the lengths of found blocks per drive."""
        return {drive: int(self.lengths[its].sum()) for drive, its in self.by_drive(positions)}

    @classmethod
    def empty(cls, blocks: int) -> BlockLocations:
        """Begin with no block found."""
        return cls(
            is_found=np.zeros(blocks, np.bool_),
            reasons=codec.filled(blocks, Reason.NOT_FOUND),
            sources=[],
            source=np.zeros(blocks, np.intp),
            offsets=np.zeros(blocks, np.uint64),
            lengths=np.zeros(blocks, np.uint32),
            generations=np.zeros(blocks, np.uint64),
            tags=np.zeros((blocks, codec.TAG_BYTES), np.uint8),
        )


def by_place(
    places: Sequence[_Place], source: NDArray[np.intp], positions: NDArray[np.intp]
) -> list[tuple[_Place, NDArray[np.intp]]]:
    """Group blocks by place, in order; *source* has the index of each block's place in *places*."""
    if not len(positions):
        return []
    numbers = {place: number for number, place in enumerate(dict.fromkeys(places))}
    if len(numbers) == 1:
        return [(places[0], positions)]
    found = np.array([numbers[place] for place in places], np.intp)[source[positions]]
    groups = [(place, positions[found == number]) for place, number in numbers.items()]
    return [(place, its) for place, its in groups if len(its)]


def restrict(parts: PartsByOwner, wanted: NDArray[np.bool_]) -> PartsByOwner:
    """Drop unwanted blocks, and shards and owners left without blocks."""
    if np.count_nonzero(wanted) == len(wanted):  # faster than ``all``
        return parts
    some = {
        owner: [replace(part, positions=part.positions[wanted[part.positions]]) for part in its]
        for owner, its in parts.items()
    }
    some = {owner: [part for part in its if len(part.positions)] for owner, its in some.items()}
    return {owner: its for owner, its in some.items() if its}
