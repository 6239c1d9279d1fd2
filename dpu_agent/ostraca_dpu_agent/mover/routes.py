"""Routes: which shard each key belongs to, and which owner to ask.

Built anew when the fabric map changes, and never changed: a request works from the routes it began with. What
is dear to make, the placements themselves, is made when it is first asked for, and used again by later routes
as long as its weights are the same: claims and agents change often, weights seldom.

A block is put where the current placement epoch says. It may lie where an earlier one said, too: those that
the map names are *live*, and look-ups ask them as well.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ostraca_fabric.fabric_map import PlacementRecord, weights_of
from ostraca_fabric.ids import enclosure_of
from ostraca_fabric.placement import NOWHERE, Placement
from ostraca_fabric.wire.placing import PlaceThen

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from ostraca_fabric.chain import Span
    from ostraca_fabric.fabric_map import EnclosureRecord, FabricMap, ShardRecord
    from ostraca_fabric.ids import AgentId, DriveId, EnclosureId, PlacementEpoch, ShardId

    PartsByOwner = dict[AgentId, list["ShardPart"]]

_NO_POSITIONS = np.empty(0, np.intp)


@dataclass(frozen=True, slots=True)
class ShardPart:
    """The blocks of a request that one shard holds, or would: their positions in the request."""

    shard: ShardId
    positions: NDArray[np.intp]
    age: int
    """0 where the current placement epoch places them here, 1 for the one before it, and so on."""

    epoch: PlacementEpoch
    """The one that does."""

    is_of_before: bool = False
    """Whether it is asked of the agent that had the shard before its owner, who is asked as well."""


@dataclass(frozen=True, slots=True, eq=False)
class _Live:
    """A live placement epoch under one map."""

    record: PlacementRecord
    placement: Placement
    numbers: NDArray[np.intp]
    """Of the map's shards, for each index of the placement; NOWHERE for one that is gone, and at the end."""

    has_same_numbers: bool
    """Most often the placement's indexes are the map's numbers, which need not be looked up then."""


class Made:
    """What was made for one map's routes: those of the next map go on with it as far as it still holds."""

    def __init__(self, fabric_map: FabricMap, before: Made | None) -> None:
        self.enclosures: Mapping[EnclosureId, EnclosureRecord] = fabric_map.enclosures
        self.shards: tuple[ShardRecord, ...]
        self.numbers: dict[ShardId, int]
        self.weights: dict[EnclosureId, dict[ShardId, int]]
        is_as_before = before is not None and before.enclosures is fabric_map.enclosures
        if before is not None and is_as_before:
            self.shards, self.numbers, self.weights = before.shards, before.numbers, before.weights
        else:
            self.shards = fabric_map.shards()
            self.numbers = {shard.id: number for number, shard in enumerate(self.shards)}
            self.weights = weights_of(fabric_map.enclosures.values())
        current = PlacementRecord(fabric_map.placement_epoch, self.weights)
        self.records = (current, *fabric_map.earlier_placements)
        self._live: dict[PlacementEpoch, _Live] = {}
        for record in self.records:
            live = before.live(record.epoch) if before is not None else None
            if live is not None and live.record.weights == record.weights:
                self._live[record.epoch] = live if is_as_before else self._numbered(record, live.placement)

    def live(self, epoch: PlacementEpoch) -> _Live | None:
        """Return a live epoch, if it was made."""
        return self._live.get(epoch)

    def chosen(self, age: int, secret: bytes, spans: Sequence[Span]) -> NDArray[np.intp]:
        """Return for each block the number of the shard where an epoch places it; NOWHERE for none."""
        record = self.records[age]
        live = self._live.get(record.epoch)
        if live is None:
            live = self._live[record.epoch] = self._numbered(record, Placement.recorded(record))
        indexes = live.placement.shards(secret, spans)
        return indexes if live.has_same_numbers else live.numbers[indexes]

    def _numbered(self, record: PlacementRecord, placement: Placement) -> _Live:
        numbers = [self.numbers.get(shard, NOWHERE) for shard in placement.shard_ids]
        has_same = numbers == list(range(len(numbers)))
        return _Live(record, placement, np.array([*numbers, NOWHERE], np.intp), has_same)


class Routes:
    """Where blocks are, under one fabric map."""

    def __init__(
        self,
        fabric_map: FabricMap,
        before: Routes | None = None,
        handed_over: Mapping[ShardId, AgentId] | None = None,
    ) -> None:
        """Route by this map, and go on with what was made for the one *before*.

        Agents that have *handed_over* shards lately are asked for what is there, after the owner; where there
        is none, in its place.
        """
        self.map = fabric_map
        self.handed_over = handed_over or {}
        self.made: Made = Made(fabric_map, None if before is None else before.made)

    @property
    def has_earlier(self) -> bool:
        """Whether others may know of blocks beside the owners that the current placement epoch names."""
        return len(self.made.records) > 1 or bool(self.handed_over)

    def by_owner(self, secret: bytes, spans: Sequence[Span]) -> tuple[PartsByOwner, NDArray[np.intp]]:
        """Group the blocks of a request by owner and shard, as the current placement epoch places them.

        Also returns the positions whose shard has no owner now, or that no shard takes. *secret* is the
        volume's placement secret.
        """
        parts: PartsByOwner = {}
        unowned = self._group(self.made.chosen(0, secret, spans), 0, parts)
        return parts, unowned

    def by_owner_of_all(self, secret: bytes, spans: Sequence[Span]) -> tuple[PartsByOwner, NDArray[np.intp]]:
        """Group them as every live epoch places them, each owner's parts of the current epoch first.

        A block that several epochs place in one shard is there once, under the newest of them. Shards of
        earlier epochs that are gone, or that nobody owns, are left out; the positions returned are those of
        ``by_owner``.
        """
        parts: PartsByOwner = {}
        chosen = [self.made.chosen(age, secret, spans) for age in range(len(self.made.records))]
        unowned = self._group(chosen[0], 0, parts)
        for age in range(1, len(chosen)):
            is_new = np.logical_and.reduce([chosen[age] != newer for newer in chosen[:age]])
            self._group(np.where(is_new, chosen[age], NOWHERE), age, parts)
        if self.handed_over:
            self._ask_those_before(parts, age=len(chosen))
        return parts, unowned

    def shard(self, secret: bytes, spans: Sequence[Span]) -> ShardId | None:
        """Return the shard that the first block belongs to; None when no shard takes blocks."""
        number = int(self.made.chosen(0, secret, spans)[0])
        return None if number < 0 else self.made.shards[number].id

    def earlier_shards(self, secret: bytes, spans: Sequence[Span]) -> list[ShardId]:
        """Return the other shards where the first block may lie, those of the newest epoch first."""
        ages = range(len(self.made.records))
        numbers = [int(self.made.chosen(age, secret, spans)[0]) for age in ages]
        others = dict.fromkeys(number for number in numbers[1:] if number not in (NOWHERE, numbers[0]))
        return [self.made.shards[number].id for number in others]

    def places(self, secret: bytes, spans: Sequence[Span]) -> tuple[PlaceThen, ...]:
        """Return where each live epoch places the first block, the current one first."""
        numbers = [int(self.made.chosen(age, secret, spans)[0]) for age in range(len(self.made.records))]
        return tuple(self._then(*each) for each in zip(self.made.records, numbers, strict=True))

    def _then(self, record: PlacementRecord, number: int) -> PlaceThen:
        if number == NOWHERE:
            return PlaceThen(record.epoch)
        shard = self.made.shards[number].id
        claim = self.map.claims.get(shard)
        owner, epoch = (self.map.owner(shard) or "", 0 if claim is None else claim.epoch)
        return PlaceThen(record.epoch, enclosure_of(shard), shard, owner, epoch if owner else 0)

    def place(self, shard: ShardId) -> tuple[DriveId, int]:
        """Return the drive a shard lies on, and its first byte there."""
        record = self.made.shards[self.made.numbers[shard]]
        return record.drive, record.offset

    def _group(self, chosen: NDArray[np.intp], age: int, parts: PartsByOwner) -> NDArray[np.intp]:
        """Add what one epoch says to *parts*; return the positions it says nothing of."""
        epoch = self.made.records[age].epoch
        unowned: list[NDArray[np.intp]] = []
        in_order = np.argsort(chosen, kind="stable")  # quick, as neighbours are most often placed together
        numbers = chosen[in_order]
        ends = ((numbers[1:] != numbers[:-1]).nonzero()[0] + 1).tolist()
        for begin, end in itertools.pairwise((0, *ends, len(numbers)) if len(numbers) else ()):
            positions, number = in_order[begin:end], int(numbers[begin])
            shard = None if number == NOWHERE else self.made.shards[number].id
            owner = None if shard is None else self.map.owner(shard) or self.handed_over.get(shard)
            if shard is None or owner is None:
                unowned.append(positions)
            else:
                parts.setdefault(owner, []).append(ShardPart(shard, positions, age, epoch))
        return np.concatenate(unowned) if unowned else _NO_POSITIONS

    def _ask_those_before(self, parts: PartsByOwner, age: int) -> None:
        """Ask for each shard that has changed hands lately the agent that had it, too."""
        for asked in list(itertools.chain.from_iterable(parts.values())):
            agent = self.handed_over.get(asked.shard)
            if agent is not None and self.map.owner(asked.shard) is not None:
                parts.setdefault(agent, []).append(
                    ShardPart(asked.shard, asked.positions, age + asked.age, asked.epoch, is_of_before=True)
                )


def narrowed(parts: PartsByOwner, wanted: NDArray[np.bool_]) -> PartsByOwner:
    """Leave out what is not wanted, shards of which nothing is, and owners of none."""
    if np.count_nonzero(wanted) == len(wanted):  # quicker than ``all``
        return parts
    some = {owner: [_only(part, wanted) for part in its] for owner, its in parts.items()}
    some = {owner: [part for part in its if len(part.positions)] for owner, its in some.items()}
    return {owner: its for owner, its in some.items() if its}


def _only(part: ShardPart, wanted: NDArray[np.bool_]) -> ShardPart:
    return replace(part, positions=part.positions[wanted[part.positions]])
