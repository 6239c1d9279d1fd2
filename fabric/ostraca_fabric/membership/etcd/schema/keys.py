"""Keys in etcd: a function per key. No other module builds keys.

A fabric has all keys under its prefix. The prefix ends with a slash, so ``/pod-1/`` is not part of ``/pod/``.
``/pod/live/`` is, so no fabric may begin there beside ``/pod/`` (``prefix_check``).

Names are checked at their origin (``ids.checked_name``) and contain no slash; a shard's name has two. So each
kind of key has a fixed number of words, unlike keys of a fabric further down from an earlier release.
``ostraca_fabric.model.record_keys`` defines the keys of records beside the map.
"""

from __future__ import annotations

import re
from enum import Enum

from ostraca_fabric.errors import UsageError, shown
from ostraca_fabric.model import record_keys
from ostraca_fabric.model.ids import AgentId, EnclosureId, PlacementEpoch, ShardId, TenantId

PREFIX_DEFAULT = "/ostraca/default/"

_PREFIX = re.compile(r"(/[a-z0-9][a-z0-9._-]{0,62}){1,8}/?\Z")


class RecordKind(Enum):
    """Kind of record: the first word after the prefix."""

    META = "meta"
    AGENT = "agents"
    ENCLOSURE = "enclosures"
    PLACEMENT = "placement"
    EARLIER_PLACEMENT = "placements"
    CLAIM = "claims"
    GRANTS = "grants"
    VOLUME = "volumes"
    REPORT = "reports"
    SPEC = "specs"
    STATUS = "statuses"
    OPERATION = "operations"
    WORK = "work"
    NGUID = "nguids"
    RETIRED = "retired"
    AUDIT = "audit"
    TENANT = "tenants"
    SWITCH = "switches"
    LIVE = "live"
    OVERRIDES_MARKER = "ruled"
    REBUILD = "rebuild"


_WORDS = {
    **dict.fromkeys(RecordKind, 2),
    **dict.fromkeys(
        (
            RecordKind.META,
            RecordKind.PLACEMENT,
            RecordKind.LIVE,
            RecordKind.OVERRIDES_MARKER,
            RecordKind.REBUILD,
        ),
        1,
    ),
    **dict.fromkeys((RecordKind.VOLUME, RecordKind.SWITCH), 3),
    **dict.fromkeys((RecordKind.CLAIM, RecordKind.GRANTS), 4),
}
"""Number of words between slashes, for each kind of key."""


class EtcdKeys:
    """Keys of one fabric."""

    def __init__(self, prefix: str = PREFIX_DEFAULT) -> None:
        """Use *prefix*: names between slashes, such as ``/ostraca/pod-7/``.

        The last slash is optional. Raises UsageError for an invalid prefix.
        """
        if not _PREFIX.match(prefix):
            raise UsageError(
                f"{shown(prefix)} is not a usable prefix: take names of a-z, 0-9, '.', '_' and '-' between "
                f"slashes, as in {PREFIX_DEFAULT}"
            )
        self.text = prefix.rstrip("/") + "/"
        self.prefix = self.text.encode()

    def meta(self) -> bytes:
        """Id of the fabric, and version of its records."""
        return self._under(RecordKind.META)

    def agent(self, agent: AgentId) -> bytes:
        """Agent in the fabric. Bound to its lease."""
        return self._under(RecordKind.AGENT, agent)

    def enclosure(self, enclosure: EnclosureId) -> bytes:
        """Enclosure with its drives and shards."""
        return self._under(RecordKind.ENCLOSURE, enclosure)

    def enclosures(self) -> bytes:
        """Prefix of the keys of all enclosures."""
        return self._under(RecordKind.ENCLOSURE, "")

    def placement(self) -> bytes:
        """Epoch of the current placement."""
        return self._under(RecordKind.PLACEMENT)

    def earlier_placement(self, epoch: PlacementEpoch) -> bytes:
        """Weights of an earlier placement epoch still asked."""
        return self._under(RecordKind.EARLIER_PLACEMENT, str(epoch))

    def earlier_placements(self) -> bytes:
        """Prefix of the keys of all earlier placements."""
        return self._under(RecordKind.EARLIER_PLACEMENT, "")

    def claim(self, shard: ShardId) -> bytes:
        """Owner of a shard. Bound to the lease of the owner's agent record."""
        return self._under(RecordKind.CLAIM, shard)

    def grants(self, shard: ShardId) -> bytes:
        """Highest epoch of a shard, and segments that each owner epoch may write. Bound to no lease."""
        return self._under(RecordKind.GRANTS, shard)

    def volume(self, tenant: TenantId, name: str) -> bytes:
        """Volume."""
        return self._under(RecordKind.VOLUME, tenant, name)

    def volumes(self) -> bytes:
        """Prefix of the keys of all volumes."""
        return self._under(RecordKind.VOLUME, "")

    def report(self, enclosure: EnclosureId) -> bytes:
        """Report of an enclosure's daemon: drives, health and wear. Bound to the daemon's lease."""
        return self.record(record_keys.report(enclosure))

    def overrides_marker(self) -> bytes:
        """Written with every override and erasure: its revision is that of the latest."""
        return self.record(record_keys.overrides_marker())

    def rebuild(self) -> bytes:
        """Fabric and attempt of an unfinished rebuild.

        Until its end no `meta` exists, and only the rebuild writes.
        """
        return self._under(RecordKind.REBUILD)

    def record(self, key: str) -> bytes:
        """Key of a record beside the map: ``ostraca_fabric.model.record_keys``."""
        return self.prefix + key.encode()

    def kind(self, key: bytes) -> RecordKind | None:
        """Return the kind of a key under this prefix, or None if unknown to this release."""
        words = key[len(self.prefix) :].decode("ascii", "replace").split("/")
        return next(
            (kind for kind in RecordKind if kind.value == words[0] and _WORDS[kind] == len(words)), None
        )

    def above(self) -> list[EtcdKeys]:
        """Return the keys of each possible fabric whose prefix begins this prefix."""
        names = self.text.strip("/").split("/")
        return [EtcdKeys("/" + "/".join(names[:count])) for count in range(1, len(names))]

    def below(self, key: bytes) -> str | None:
        """Return the prefix of a fabric further down with *key* as its own record.

        None if *key*, under this prefix, would be neither the ``meta`` nor the ``rebuild`` of such a fabric.
        """
        *names, word = key[len(self.prefix) :].decode("ascii", "replace").split("/")
        is_one = bool(names) and word in {RecordKind.META.value, RecordKind.REBUILD.value}
        return f"{self.text}{'/'.join(names)}/" if is_one else None

    def _under(self, kind: RecordKind, *names: str) -> bytes:
        return self.prefix + "/".join((kind.value, *names)).encode()
