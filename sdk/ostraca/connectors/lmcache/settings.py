"""Settings of the plug-ins: keys of LMCache's configuration.

The L2 adapter has the keys in ``adapter_params``, the storage plug-in in ``extra_config`` after a prefix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar, Self

from ostraca.connectors.kv_identity.identity import GroupIdentity, KvIdentity
from ostraca.connectors.lmcache.objects import HASH_BYTES
from ostraca.connectors.transfers.settings import ConnectorSettings
from ostraca.settings import MIB
from ostraca_fabric.errors import UsageError
from ostraca_fabric.model.volume import BLOCK_BYTES_MAX, Layout

_PREFIX = "ostraca."
_PLUGINS = "storage_plugin."


@dataclass(frozen=True, slots=True)
class LmcacheSettings(ConnectorSettings):
    """Settings of one plug-in, with every limit of the plug-in."""

    LOGGER: ClassVar[str] = "lmcache.ostraca"
    WHERE: ClassVar[str] = "the Ostraca plug-in of LMCache"

    MAY_BE_ZERO: ClassVar[frozenset[str]] = ConnectorSettings.MAY_BE_ZERO | {"start_wait_s"}

    volume: str = "lmcache"
    """First part of the volume's name; the rest is derived from revision and block size."""

    block_bytes: int = 4 * MIB
    """Largest block; larger objects are cut into blocks. Servers share objects only with an equal value."""

    start_wait_s: float = 0.0
    """Longest wait of the start for the fabric. LMCache's benchmark stores at once, and needs a wait."""

    lookups_inflight_max: int = 64
    """Lookups under way at once; the objects of further lookups are misses."""

    layouts_max: int = 16384
    """Remembered layouts of objects, one for each model, rank and group."""

    @classmethod
    def of_extra_config(cls, config: Mapping[str, object] | None) -> Self:
        """Read the settings from keys such as ``ostraca.agents``.

        Raises UsageError with the wrong key and a remedy.
        """
        given = config or {}
        for name in given:
            cls._check_place(name, given)
        return cls.of(
            {name.removeprefix(_PREFIX): value for name, value in given.items() if name.startswith(_PREFIX)}
        )

    @classmethod
    def _check_place(cls, name: str, given: Mapping[str, object]) -> None:
        """Refuse a setting that is nested, or among the keys by which LMCache finds the plug-in."""
        if name == _PREFIX.removesuffix("."):
            raise UsageError(f"extra_config has a key {name!r}: write each setting as {_PREFIX}NAME")
        plugin, _, setting = name.rpartition(".")
        is_ours = str(given.get(f"{plugin}.module_path", "")).startswith(_PREFIX)
        if plugin.startswith(_PLUGINS) and is_ours and setting in {field.name for field in fields(cls)}:
            raise UsageError(f"{name} of extra_config has no effect: write {_PREFIX}{setting}")

    def __post_init__(self) -> None:
        """Refuse invalid values. Raises UsageError."""
        if not 0 < self.block_bytes <= BLOCK_BYTES_MAX:
            raise UsageError(f"block_bytes is {self.block_bytes}: give a value from 1 to {BLOCK_BYTES_MAX}")
        for name in ("break_even_tokens", "prefill_tokens_per_s"):
            if getattr(self, name):
                raise UsageError(f"{name} has no effect: LMCache tells no token counts, so leave it out")
        ConnectorSettings.__post_init__(self)  # super() fails in dataclasses with slots

    def layout(self) -> Layout:
        """Return the layout of the volume; the hashes of blocks commit to model and layout of an object.

        Raises UsageError if ``weights_file`` can't be read.
        """
        identity = KvIdentity(
            model="objects",
            dtype="bytes",
            weights=self.weights(),
            groups=(GroupIdentity(0, 1, ("object",)),),
            block_bytes=self.block_bytes,
            packing={"engine": "lmcache"},
            hash_bytes=HASH_BYTES,
            is_chained=False,
        )
        return identity.layout()
