"""What an agent believes of its fabric: map, volumes and rulings, made of what a watch tells. Pure.

A record that can't be read is left out, and told; the rest of the map stays good. While the fabric's own
record is not there, or another fabric's, the map and the volumes stay as they were: an etcd that has lost its
data, or was replaced, takes no fabric along. Grants are not kept: only who claims a shard asks for them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, assert_never

from ostraca_fabric.adapters.etcd.keys import Keys, Kind
from ostraca_fabric.adapters.etcd.records import (
    decode_agent,
    decode_claim,
    decode_earlier_placement,
    decode_enclosure,
    decode_meta,
    decode_placement,
    decode_volume,
)
from ostraca_fabric.adapters.etcd.ruled_records import RULINGS, RuledRecords
from ostraca_fabric.adapters.etcd.told import Changed, Deleted, Entry, Listed
from ostraca_fabric.errors import MembershipError
from ostraca_fabric.fabric_map import FabricMap
from ostraca_fabric.ids import PlacementEpoch
from ostraca_fabric.rulings import Rulings

if TYPE_CHECKING:
    from collections.abc import Callable

    from ostraca_fabric.fabric_map import AgentRecord, Claim, EnclosureRecord, PlacementRecord
    from ostraca_fabric.ids import FabricId, ShardId
    from ostraca_fabric.volume import VolumeRecord

_IN_THE_MAP: frozenset[Kind | None] = frozenset(
    {
        Kind.META,
        Kind.AGENT,
        Kind.ENCLOSURE,
        Kind.PLACEMENT,
        Kind.EARLIER_PLACEMENT,
        Kind.CLAIM,
        Kind.VOLUME,
        *RULINGS,
    }
)

FIRST_PLACEMENT = PlacementEpoch(1)
"""Before any enclosure was put."""


@dataclass(slots=True)
class _Records:
    """What was read, by key."""

    meta: bytes | None = None
    placement: PlacementEpoch = FIRST_PLACEMENT
    agents: dict[bytes, AgentRecord] = field(default_factory=dict)
    enclosures: dict[bytes, EnclosureRecord] = field(default_factory=dict)
    earlier: dict[bytes, PlacementRecord] = field(default_factory=dict)
    claims: dict[bytes, tuple[ShardId, Claim]] = field(default_factory=dict)
    volumes: dict[bytes, tuple[int, VolumeRecord]] = field(default_factory=dict)
    """With the revision in which it came to be."""


class View:
    """The newest state told."""

    def __init__(self, fabric: FabricId, keys: Keys) -> None:
        """Know nothing yet of the fabric that lies at *keys*."""
        self._keys = keys
        self._records = _Records()
        self._map = FabricMap(fabric, revision=0, placement_epoch=FIRST_PLACEMENT)
        self._volumes: tuple[VolumeRecord, ...] = ()
        self._ruled = RuledRecords()
        self._rulings = Rulings()
        self.revision = 0
        """All that happened in etcd up to it was told."""

        self.unreadable: dict[bytes, str] = {}
        """Keys whose records are left out, and why."""

        self._touched: set[Kind | None] = set(Kind)
        """What has changed since map and volumes were made."""

    @property
    def map(self) -> FabricMap:
        """The newest map: another one only if something in it changed. It is made when it is asked for, and
        not with each of the changes that come in a row.
        """
        self._make()
        return self._map

    @property
    def volumes(self) -> tuple[VolumeRecord, ...]:
        """All volumes, the oldest first: another tuple only if something in it changed."""
        self._make()
        return self._volumes

    @property
    def rulings(self) -> Rulings:
        """What operators have decided: another object only if something in it changed."""
        self._make()
        return self._rulings

    @property
    def meta(self) -> bytes | None:
        """The fabric's own record."""
        return self._records.meta

    def take(self, told: Listed | Changed) -> None:
        """Know what was told."""
        match told:
            case Listed(entries):
                self._make()  # the fabric may not be there any more
                self._records, self._ruled, self.unreadable = _Records(), RuledRecords(), {}
                self._touched = set(Kind)
                for entry in entries:
                    self._take(entry)
            case Changed(changes):
                if any(change.key == self._keys.meta() for change in changes):
                    self._make()
                self._touched |= {self._take(change) for change in changes} & _IN_THE_MAP
            case _:
                assert_never(told)
        self.revision = told.revision

    def _is_ours(self) -> bool:
        try:
            return self.meta is not None and decode_meta(self.meta) == self._map.fabric
        except MembershipError:
            return False

    def _take(self, change: Entry | Deleted) -> Kind | None:
        kind = self._keys.kind(change.key)
        records = self._records
        self.unreadable.pop(change.key, None)
        match kind:
            case Kind.META:
                records.meta = change.value if isinstance(change, Entry) else None
            case Kind.PLACEMENT:
                placement = self._read(change, decode_placement)
                records.placement = FIRST_PLACEMENT if placement is None else placement
            case Kind.AGENT:
                _keep(records.agents, change.key, self._read(change, decode_agent))
            case Kind.ENCLOSURE:
                _keep(records.enclosures, change.key, self._read(change, decode_enclosure))
            case Kind.EARLIER_PLACEMENT:
                _keep(records.earlier, change.key, self._read(change, decode_earlier_placement))
            case Kind.CLAIM:
                _keep(records.claims, change.key, self._read(change, decode_claim))
            case Kind.VOLUME:
                volume = self._read(change, decode_volume)
                created = change.created if isinstance(change, Entry) else 0
                _keep(records.volumes, change.key, None if volume is None else (created, volume))
            case Kind.TENANT | Kind.SWITCH | Kind.LIVE | Kind.RULED:
                self._ruled.take(kind, change, self._read)
            case _:  # for those who ask for them
                pass
        return kind

    def _read(self, change: Entry | Deleted, decode: Callable[[bytes], Any]) -> Any:  # noqa: ANN401
        """Return what *decode* gives, None where there is nothing, or nothing that can be read."""
        if isinstance(change, Deleted):
            return None
        try:
            return decode(change.value)
        except MembershipError as error:
            self.unreadable[change.key] = str(error)
        except Exception as error:  # noqa: BLE001 (one bad record takes nothing else along)
            self.unreadable[change.key] = f"reading it failed, which is a bug in Ostraca: {error!r}"
        return None

    def _make(self) -> None:
        if not self._touched or not self._is_ours():
            return
        touched, self._touched = self._touched, set()
        records, before, made = self._records, self._map, dict[str, Any]()
        if Kind.VOLUME in touched:
            in_order = sorted(records.volumes.items(), key=lambda item: (item[1][0], item[0]))
            volumes = tuple(volume for _, (_, volume) in in_order)
            self._volumes = self._volumes if volumes == self._volumes else volumes
        if touched & RULINGS:
            self._rulings = self._ruled.made()
        if Kind.AGENT in touched:
            made["agents"] = {each.id: each for each in records.agents.values()}
        if Kind.ENCLOSURE in touched:
            made["enclosures"] = {each.id: each for each in records.enclosures.values()}
        if Kind.CLAIM in touched:
            made["claims"] = dict(records.claims.values())
        if Kind.EARLIER_PLACEMENT in touched:
            newest_first = sorted(records.earlier.values(), key=lambda each: each.epoch, reverse=True)
            made["earlier_placements"] = tuple(newest_first)
        after = replace(before, placement_epoch=records.placement, **made)
        if after != before or before.revision == 0:
            self._map = replace(after, revision=self.revision)


def _keep(records: dict[bytes, Any], key: bytes, record: object) -> None:
    if record is None:
        records.pop(key, None)
    else:
        records[key] = record
