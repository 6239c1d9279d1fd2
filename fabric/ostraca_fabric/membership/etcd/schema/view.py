"""View of a fabric: map, volumes and overrides built from a watch. Pure.

An unreadable record is left out and reported; the rest of the map stays valid. While the fabric's own record
is absent or another fabric's, map and volumes stay unchanged. So an etcd that was replaced or lost its data
does not end a fabric. Grants are not kept: only a claimer reads grants.

``RollbackDetection``: an etcd that went back to an older state, with no rebuild since. A backup restored
under running agents lacks all later grants, so two owners may write the same segments. Only an operator can
repair this state. A rebuild lacks the grants as well, but marks every shard, so new owners wait and no manual
step is necessary.

A rebuild leaves its time in ``meta``. The time distinguishes a new rebuild from a rebuild restored by a
backup, whose time is already known, or older than a known time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any, assert_never

from ostraca_fabric.errors import MembershipError
from ostraca_fabric.membership.etcd.client.watch_events import DeletedEntry, Entry, EntryChanges, EntryList
from ostraca_fabric.membership.etcd.schema.keys import EtcdKeys, RecordKind
from ostraca_fabric.membership.etcd.schema.records import (
    decode_agent,
    decode_claim,
    decode_earlier_placement,
    decode_enclosure,
    decode_meta,
    decode_placement,
    decode_rebuilt,
    decode_volume,
)
from ostraca_fabric.model.fabric_map import FabricMap
from ostraca_fabric.model.ids import FabricId, PlacementEpoch, TenantId
from ostraca_fabric.model.overrides import LiveSettings, Overrides, TenantOverride, VolumeOverride, decode
from ostraca_fabric.model.volume import VolumeRecord

FIRST_PLACEMENT = PlacementEpoch(1)
"""Placement epoch before the first enclosure."""

_OVERRIDE_DECODERS: dict[RecordKind, Callable[[bytes], Any]] = {
    RecordKind.TENANT: partial(decode, kind=TenantOverride),
    RecordKind.SWITCH: partial(decode, kind=VolumeOverride),
    RecordKind.LIVE: partial(decode, kind=LiveSettings),
}
_DECODERS: dict[RecordKind, Callable[[bytes], Any]] = {
    RecordKind.AGENT: decode_agent,
    RecordKind.ENCLOSURE: decode_enclosure,
    RecordKind.PLACEMENT: decode_placement,
    RecordKind.EARLIER_PLACEMENT: decode_earlier_placement,
    RecordKind.CLAIM: decode_claim,
    RecordKind.VOLUME: decode_volume,
    **_OVERRIDE_DECODERS,
}
"""Decoders of the records in the view; other records are read on demand."""


def _by_id(records: Iterable[Any]) -> dict[Any, Any]:
    return {each.id: each for each in records}


_MAP_FIELDS: dict[RecordKind, tuple[str, Callable[[Iterable[Any]], Any]]] = {
    RecordKind.PLACEMENT: ("placement_epoch", lambda epochs: next(iter(epochs), FIRST_PLACEMENT)),
    RecordKind.AGENT: ("agents", _by_id),
    RecordKind.ENCLOSURE: ("enclosures", _by_id),
    RecordKind.CLAIM: ("claims", dict),
    RecordKind.EARLIER_PLACEMENT: (
        "earlier_placements",
        lambda records: tuple(sorted(records, key=lambda each: each.epoch, reverse=True)),
    ),
}
"""Fields of the map, each built from all records of a kind."""

_IN_VIEW = frozenset((RecordKind.META, RecordKind.OVERRIDES_MARKER, *_DECODERS))
_OVERRIDE_KINDS = frozenset((RecordKind.OVERRIDES_MARKER, *_OVERRIDE_DECODERS))


class View:
    """Newest known state."""

    def __init__(self, fabric: FabricId, keys: EtcdKeys) -> None:
        """Begin without knowledge of the fabric at *keys*."""
        self.map = FabricMap(fabric, revision=0, placement_epoch=FIRST_PLACEMENT)
        """Newest map: a new object only after a change."""

        self.volumes: tuple[VolumeRecord, ...] = ()
        """All volumes, the oldest first: a new tuple only after a change."""

        self.overrides = Overrides()
        """Overrides of operators: a new object only after a change."""

        self.meta: bytes | None = None
        """The fabric's own record."""

        self.revision = 0
        """Revision up to which all changes in etcd are included."""

        self.unreadable: dict[bytes, str] = {}
        """Keys of records left out, with the reason."""

        self._keys = keys
        self._overrides_revision = 0
        self._records: dict[RecordKind, dict[bytes, tuple[int, Any]]] = {kind: {} for kind in _DECODERS}
        """Revision of creation and decoded record, by kind and key."""

        self._touched = set(_IN_VIEW)
        """Kinds of records changed since the last build of map, volumes and overrides."""

    def take(self, event: EntryList | EntryChanges) -> None:
        """Apply an event of the watch."""
        match event:
            case EntryList(entries):
                self.meta, self._overrides_revision, self.unreadable = None, 0, {}
                self._records = {kind: {} for kind in _DECODERS}
                self._touched = set(_IN_VIEW)
                for entry in entries:
                    self._apply(entry)
            case EntryChanges(changes):
                touched = {self._apply(change) for change in changes}
                self._touched |= _IN_VIEW & touched
            case _:
                assert_never(event)
        self.revision = event.revision
        if self._touched and self._is_ours():
            touched_kinds, self._touched = self._touched, set()
            self._build(touched_kinds)

    def _is_ours(self) -> bool:
        try:
            return self.meta is not None and decode_meta(self.meta) == self.map.fabric
        except MembershipError:
            return False

    def _apply(self, change: Entry | DeletedEntry) -> RecordKind | None:
        """Store a change, and return the kind of its record."""
        kind = self._keys.kind(change.key)
        self.unreadable.pop(change.key, None)
        if kind is RecordKind.META:
            self.meta = change.value if isinstance(change, Entry) else None
        elif kind is RecordKind.OVERRIDES_MARKER:
            self._overrides_revision = change.modified if isinstance(change, Entry) else 0
        elif kind in _DECODERS:
            known = self._records[kind]
            record = self._decoded(change, _DECODERS[kind]) if isinstance(change, Entry) else None
            if isinstance(change, Entry) and record is not None:
                known[change.key] = change.created, record
            elif isinstance(change, DeletedEntry) or kind not in _OVERRIDE_DECODERS:
                known.pop(change.key, None)  # an unreadable override changes nothing
        return kind

    def _decoded(self, entry: Entry, decoder: Callable[[bytes], Any]) -> Any:  # noqa: ANN401
        """Return the record of an entry, or None if unreadable."""
        try:
            return decoder(entry.value)
        except MembershipError as error:
            self.unreadable[entry.key] = str(error)
        except Exception as error:  # noqa: BLE001 (a bad record must not affect other records)
            self.unreadable[entry.key] = f"decoding failed: a bug in Ostraca: {error!r}"
        return None

    def _all(self, kind: RecordKind) -> Iterable[Any]:
        return map(itemgetter(1), self._records[kind].values())

    def _build(self, touched: set[RecordKind]) -> None:
        """Build map, volumes and overrides, as far as their records were touched."""
        before = self.map
        if RecordKind.VOLUME in touched:
            in_order = sorted(
                self._records[RecordKind.VOLUME].items(), key=lambda item: (item[1][0], item[0])
            )
            volumes = tuple(volume for _, (_, volume) in in_order)
            self.volumes = self.volumes if volumes == self.volumes else volumes
        if touched & _OVERRIDE_KINDS:
            self.overrides = Overrides(
                {TenantId(each.name): each for each in self._all(RecordKind.TENANT)},
                {(TenantId(each.tenant), each.name): each.switch for each in self._all(RecordKind.SWITCH)},
                next(iter(self._all(RecordKind.LIVE)), LiveSettings()),
                self._overrides_revision,
            )
        made = {
            field: make(self._all(kind)) for kind, (field, make) in _MAP_FIELDS.items() if kind in touched
        }
        after = replace(before, **made)
        if after != before or before.revision == 0:
            self.map = replace(after, revision=self.revision)


class RollbackDetection:
    """Knowledge of this process about earlier states of etcd."""

    def __init__(self) -> None:
        """Begin without knowledge."""
        self._went_back = ""
        self._rebuilt_unix_s = 0.0
        """Time of the newest rebuild seen; 0: none."""

    def note_went_back(self, why: str) -> None:
        """Record that etcd has lost reported changes; *why* has the evidence."""
        self._went_back = why

    def take(self, meta: bytes) -> None:
        """Apply the readable ``meta`` record of the expected fabric."""
        rebuilt_unix_s = decode_rebuilt(meta)
        if rebuilt_unix_s > self._rebuilt_unix_s:
            self._went_back, self._rebuilt_unix_s = "", rebuilt_unix_s

    @property
    def trouble(self) -> str:
        """Cause and remedy, or empty."""
        if not self._went_back:
            return ""
        return (
            f"etcd has gone back to an older state, or lost its data ({self._went_back}), and may lack later "
            "grants: stop all agents for late_write_s (default 120 s), then start all agents"
        )
