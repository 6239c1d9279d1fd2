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

_TYPES: dict[Kind, type[Any]] = {
    Kind.TENANT: TenantRuling,
    Kind.SWITCH: VolumeRuling,
    Kind.LIVE: LiveSettings,
}

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
        """Know what was written or deleted. What can't be read changes nothing."""
        if kind is Kind.RULED:
            self._revision = change.modified if isinstance(change, Entry) else 0
            return
        ruling = read(change, partial(decode, kind=_TYPES[kind]))
        if ruling is None and isinstance(change, Entry):
            return
        match kind:
            case Kind.TENANT:
                _keep(self._tenants, change.key, ruling)
            case Kind.SWITCH:
                _keep(self._switches, change.key, ruling)
            case _:
                self._live = ruling or LiveSettings()

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
