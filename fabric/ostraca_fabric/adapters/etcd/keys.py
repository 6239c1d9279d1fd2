"""Where things lie in etcd: one function per key. Nobody else puts keys together.

A fabric is everything under one prefix. That ends with a slash, so that ``/pod-1/`` is not taken for a part
of ``/pod/``; ``/pod/live/`` is one, and so no fabric is begun there beside ``/pod/`` (``nesting``). Names are
checked where they are given (``ids.checked_name``), and hold no slash of their own; a shard's has two. So
each kind of key has a number of words, by which it is told from those of a fabric further down that was begun
there by an earlier release. Where records beside the map lie says ``ostraca_fabric.record_keys``.
"""

from __future__ import annotations

import re
from enum import Enum

from ostraca_fabric import record_keys
from ostraca_fabric.errors import UsageError, shown
from ostraca_fabric.ids import AgentId, EnclosureId, PlacementEpoch, ShardId, TenantId

PREFIX_DEFAULT = "/ostraca/default/"

_PREFIX = re.compile(r"(/[a-z0-9][a-z0-9._-]{0,62}){1,8}/?\Z")


class Kind(Enum):
    """What lies under a prefix: the first word behind it."""

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
    AUDIT = "audit"
    TENANT = "tenants"
    SWITCH = "switches"
    LIVE = "live"
    RULED = "ruled"
    REBUILD = "rebuild"


_WORDS = {
    **dict.fromkeys(Kind, 2),
    **dict.fromkeys((Kind.META, Kind.PLACEMENT, Kind.LIVE, Kind.RULED, Kind.REBUILD), 1),
    **dict.fromkeys((Kind.VOLUME, Kind.SWITCH), 3),
    **dict.fromkeys((Kind.CLAIM, Kind.GRANTS), 4),
}
"""How many words a key of each kind has, between slashes."""


class Keys:
    """The keys of one fabric."""

    def __init__(self, prefix: str = PREFIX_DEFAULT) -> None:
        """Lie under *prefix*: names between slashes, as ``/ostraca/pod-7/``. The last slash may be left out.

        Raises UsageError.
        """
        if not _PREFIX.match(prefix):
            message = (
                f"{shown(prefix)} is not a usable prefix: take names of a-z, 0-9, '.', '_' and '-' between "
                f"slashes, as in {PREFIX_DEFAULT}"
            )
            raise UsageError(message)
        self.text = prefix.rstrip("/") + "/"
        self.prefix = self.text.encode()

    def meta(self) -> bytes:
        """Which fabric this is, and the version of its records."""
        return self._under(Kind.META)

    def agent(self, agent: AgentId) -> bytes:
        """An agent that is in the fabric. Bound to its lease."""
        return self._under(Kind.AGENT, agent)

    def enclosure(self, enclosure: EnclosureId) -> bytes:
        """An enclosure with its drives and shards."""
        return self._under(Kind.ENCLOSURE, enclosure)

    def enclosures(self) -> bytes:
        """What the keys of all enclosures begin with."""
        return self._under(Kind.ENCLOSURE, "")

    def placement(self) -> bytes:
        """The current placement epoch."""
        return self._under(Kind.PLACEMENT)

    def earlier_placement(self, epoch: PlacementEpoch) -> bytes:
        """The weights of an earlier placement epoch that is still asked."""
        return self._under(Kind.EARLIER_PLACEMENT, str(epoch))

    def earlier_placements(self) -> bytes:
        """What the keys of all earlier placements begin with."""
        return self._under(Kind.EARLIER_PLACEMENT, "")

    def claim(self, shard: ShardId) -> bytes:
        """Who owns a shard. Bound to the lease of that agent's record."""
        return self._under(Kind.CLAIM, shard)

    def grants(self, shard: ShardId) -> bytes:
        """The highest epoch of a shard, and which segments each owner epoch may write. Bound to nothing."""
        return self._under(Kind.GRANTS, shard)

    def volume(self, tenant: TenantId, name: str) -> bytes:
        """A volume."""
        return self._under(Kind.VOLUME, tenant, name)

    def volumes(self) -> bytes:
        """What the keys of all volumes begin with."""
        return self._under(Kind.VOLUME, "")

    def report(self, enclosure: EnclosureId) -> bytes:
        """What an enclosure's daemon says of it: drives, health and wear. Bound to that daemon's lease."""
        return self.record(record_keys.report(enclosure))

    def ruled(self) -> bytes:
        """Written with every ruling and erasure: its revision is that of the last one."""
        return self.record(record_keys.ruled())

    def rebuild(self) -> bytes:
        """Of which fabric a rebuild has not ended: until then there is no `meta`, and nobody else writes."""
        return self._under(Kind.REBUILD)

    def record(self, key: str) -> bytes:
        """A record beside the map: ``ostraca_fabric.record_keys``."""
        return self.prefix + key.encode()

    def kind(self, key: bytes) -> Kind | None:
        """Return what lies at a key under this prefix, None for what this release does not know."""
        words = key[len(self.prefix) :].decode("ascii", "replace").split("/")
        return next((kind for kind in Kind if kind.value == words[0] and _WORDS[kind] == len(words)), None)

    def above(self) -> list[Keys]:
        """Return the keys of each fabric whose prefix would begin this one."""
        names = self.text.strip("/").split("/")
        return [Keys("/" + "/".join(names[:count])) for count in range(1, len(names))]

    def below(self, key: bytes) -> str | None:
        """Return the prefix of the fabric further down that *key*, under this prefix, would be the record or
        the rebuild of; None where it would be neither.
        """
        *names, word = key[len(self.prefix) :].decode("ascii", "replace").split("/")
        is_one = bool(names) and word in {Kind.META.value, Kind.REBUILD.value}
        return f"{self.text}{'/'.join(names)}/" if is_one else None

    def _under(self, kind: Kind, *names: str) -> bytes:
        return self.prefix + "/".join((kind.value, *names)).encode()
