"""Overrides: decisions of operators for tenants, volumes and all agents. Pure.

The admin service writes overrides, agents apply them at run time. Overrides are no part of the fabric map:
they do not affect placement or ownership. An agent without news continues with the overrides it knows.

In the store each override is JSON, readable with ``etcdctl get``. Each write also writes ``ruled``, whose
revision is the common revision of all overrides. An agent at this revision applies all earlier decisions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, lru_cache
from hashlib import blake2b
from typing import TypeVar

import msgspec

from ostraca_fabric.errors import MembershipError, UsageError
from ostraca_fabric.model.ids import TenantId, checked_name

VERSION = 1
"""Newest version of overrides that this release reads; also the version of writes."""

OVERRIDES_MARKER = b'{"version":1}'
"""Value of ``ruled``: only the revision matters."""

COMMON_POOL = 0
"""Pool of all tenants without a quota of flash."""

_POOL_BYTES = 4


class Switch(Enum):
    """Treatment of requests for a volume."""

    OFF = "off"
    """Every block is declined: no lookups, loads or stores."""

    SHADOW = "shadow"
    """Gets load and verify, but deliver nothing; puts continue. For trials of the hit rate."""

    ON = "on"


class TenantOverride(msgspec.Struct, frozen=True, dict=True):
    """Created tenant, with its quotas."""

    version: int
    name: str
    flash_bytes: int = 0
    """Quota of flash in the whole fabric; 0: the space that others leave."""

    agent_bytes_per_s: int = 0
    """Rate limit of gets and puts together at each agent; 0: no limit."""

    is_erasable: bool = False
    """Whether the tenant's new volumes are erasable: agents serve such volumes only with recent news of the
    store."""

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        checked_name("tenant", self.name)
        if min(self.flash_bytes, self.agent_bytes_per_s) < 0:
            raise UsageError("quotas are 0, for none, or more")

    @cached_property
    def pool(self) -> int:
        """Pool number of the tenant at shard owners; ``COMMON_POOL`` without a quota.

        32 bits of BLAKE2b over the name, never 0. Two tenants with the same number would share their quotas.
        """
        if not self.flash_bytes:
            return COMMON_POOL
        digest = blake2b(self.name.encode(), digest_size=_POOL_BYTES, person=b"ostraca-pool").digest()
        return int.from_bytes(digest, "little") or 1


class VolumeOverride(msgspec.Struct, frozen=True):
    """Switch of a volume."""

    version: int
    tenant: str
    name: str
    switch: Switch


class LogLevel(Enum):
    """Lowest level that is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LiveSettings(msgspec.Struct, frozen=True):
    """Settings of all agents, changeable at run time. None: each agent's own setting."""

    version: int = VERSION
    key_ttl_s: float = 900.0
    """Time for which an agent without the store continues to serve erasable volumes. An erasure is complete
    after this time at the latest."""

    key_ttl_longest_s: float = 900.0
    """Highest ``key_ttl_s`` ever, maintained automatically: a disconnected agent may still use that value."""

    log_level: LogLevel | None = None
    requests_max: int | None = None
    """Replaces ``flow.requests_max``."""

    deadline_max_s: float | None = None
    """Replaces ``flow.deadline_max_s``."""

    placement_ttl_s: float | None = None
    """Replaces the agent's own setting. Only the agent that ends earlier placement epochs uses the value."""

    scrub: bool | None = None
    """False: no scrub of any shard. ``owner.scrub`` off at an agent disables the scrub there in any case."""

    direct_reads_tenant: str = ""
    """Tenant whose workers may read drives themselves (``direct_reads``); empty: none."""

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        for name in ("key_ttl_s", "deadline_max_s", "placement_ttl_s"):
            seconds = getattr(self, name)
            if seconds is not None and not 0 < seconds < math.inf:
                raise UsageError(f"{name} is {seconds}: it is a time above 0")
        if self.key_ttl_s > self.key_ttl_longest_s:
            raise UsageError(
                f"key_ttl_s is {self.key_ttl_s}, and was at most {self.key_ttl_longest_s} ever: write both"
            )
        if self.requests_max is not None and self.requests_max < 1:
            raise UsageError(f"requests_max is {self.requests_max}: it is 1 or more")
        if self.direct_reads_tenant:
            checked_name("tenant", self.direct_reads_tenant)

    def after(self, before: LiveSettings | None) -> LiveSettings:
        """Return these settings as successors of *before*; the longest TTL never falls."""
        earlier_s = LiveSettings().key_ttl_longest_s if before is None else before.key_ttl_longest_s
        longest_s = max(earlier_s, self.key_ttl_s)
        return msgspec.structs.replace(self, key_ttl_longest_s=longest_s)

    def in_force(self) -> dict[str, bool | int | float | str]:
        """Return the settings that differ from the defaults, by name."""
        said: dict[str, bool | int | float | str] = msgspec.to_builtins(self)
        unset = msgspec.to_builtins(LiveSettings(self.version))
        return {
            name: value
            for name, value in said.items()
            if value != unset[name] and name != "key_ttl_longest_s"
        }


@dataclass(frozen=True)
class Overrides:
    """All overrides of one fabric, at one revision."""

    tenants: Mapping[TenantId, TenantOverride] = field(default_factory=dict)
    switches: Mapping[tuple[TenantId, str], Switch] = field(default_factory=dict)
    """By tenant and volume; volumes without an entry are on."""

    live: LiveSettings = field(default_factory=LiveSettings)
    revision: int = 0
    """Revision of the last override: all overrides up to this revision are included."""

    @cached_property
    def tenant(self) -> Callable[[TenantId], TenantOverride]:
        """Function from a tenant to its override; a tenant never created has no quota."""
        return lru_cache(maxsize=1024)(
            lambda tenant: self.tenants.get(tenant) or TenantOverride(VERSION, tenant)
        )


Override = TenantOverride | VolumeOverride | LiveSettings
_Override = TypeVar("_Override", TenantOverride, VolumeOverride, LiveSettings)


class _Versioned(msgspec.Struct, frozen=True):
    version: int


def encode(override: Override) -> bytes:
    """Encode an override."""
    return msgspec.json.encode(override)


def decode(data: bytes, kind: type[_Override]) -> _Override:
    """Decode an override. Raises MembershipError with the remedy."""
    try:
        version = msgspec.json.decode(data, type=_Versioned).version
        if version <= VERSION:
            return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UsageError, RecursionError) as error:
        raise MembershipError(f"an override can't be read: {error}") from error
    raise MembershipError(
        f"an override has version {version}, and this release reads {VERSION} and older: start a release of "
        "Ostraca as new as the fabric's"
    )
