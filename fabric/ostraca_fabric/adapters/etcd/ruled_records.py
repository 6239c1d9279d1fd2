"""The rulings among what a watch tells. Pure."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from ostraca_fabric.adapters.etcd.keys import Kind
from ostraca_fabric.adapters.etcd.told import Deleted, Entry
from ostraca_fabric.ids import TenantId
from ostraca_fabric.rulings import LiveSettings, Rulings, TenantRuling, VolumeRuling, decode

if TYPE_CHECKING:
    from collections.abc import Callable

    Read = Callable[[Entry | Deleted, Callable[[bytes], Any]], Any]
    """Decodes what was written; None for what is gone, or can't be read."""

RULINGS: frozenset[Kind | None] = frozenset({Kind.TENANT, Kind.SWITCH, Kind.LIVE, Kind.RULED})


class RuledRecords:
    """What was read of rulings, by key."""

    def __init__(self) -> None:
        """Know of none."""
        self._tenants: dict[bytes, TenantRuling] = {}
        self._switches: dict[bytes, VolumeRuling] = {}
        self._live = LiveSettings()
        self._revision = 0

    def take(self, kind: Kind, change: Entry | Deleted, read: Read) -> None:
        """Know what was written or deleted."""
        match kind:
            case Kind.TENANT:
                _keep(self._tenants, change.key, read(change, partial(decode, kind=TenantRuling)))
            case Kind.SWITCH:
                _keep(self._switches, change.key, read(change, partial(decode, kind=VolumeRuling)))
            case Kind.LIVE:
                self._live = read(change, partial(decode, kind=LiveSettings)) or LiveSettings()
            case _:
                self._revision = change.modified if isinstance(change, Entry) else 0

    def made(self) -> Rulings:
        """Return them together."""
        return Rulings(
            {TenantId(each.name): each for each in self._tenants.values()},
            {(TenantId(each.tenant), each.name): each.switch for each in self._switches.values()},
            self._live,
            self._revision,
        )


def _keep(records: dict[bytes, Any], key: bytes, record: object) -> None:
    if record is None:
        records.pop(key, None)
    else:
        records[key] = record
