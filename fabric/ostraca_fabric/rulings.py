"""Rulings: what operators have decided for tenants, volumes and all agents, while the fabric runs. Pure.

The admin service writes them, agents obey them. They are no part of the map: none of them says where a block
lies or who owns it. An agent that can't be told of a new one goes on with those that it knows.

In the store each is JSON that ``etcdctl get`` shows. Whoever writes one writes ``ruled`` with it, whose
revision is that of all rulings together: an agent that has seen it obeys all that was decided up to then.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from hashlib import blake2b
from typing import TypeVar

import msgspec

from ostraca_fabric.errors import MembershipError, UsageError
from ostraca_fabric.ids import TenantId, checked_name

VERSION = 1
"""The newest version of rulings that this release reads, and the one it writes."""

RULED = b'{"version":1}'
"""What is written as ``ruled``: only its revision says something."""

COMMON_POOL = 0
"""The pool of everybody who has no quota of flash."""

_POOL_BYTES = 4


class Switch(Enum):
    """What becomes of requests for a volume."""

    OFF = "off"
    """Every block is declined: nothing is looked up, loaded or stored."""

    SHADOW = "shadow"
    """Gets load and verify, and hand nothing over; puts go on. For trying out whether blocks would come."""

    ON = "on"


class TenantRuling(msgspec.Struct, frozen=True):
    """A tenant that was made, and what it may use."""

    version: int
    name: str
    flash_bytes: int = 0
    """What its blocks may take on flash, in the whole fabric; 0: what others leave."""

    agent_bytes_per_s: int = 0
    """What it may get and put in a second at each agent, both together; 0: no limit."""

    is_erasable: bool = False
    """Whether volumes that it makes can be erased: agents serve those only while they hear of the store."""

    def __post_init__(self) -> None:
        """Refuse what can't be meant."""
        checked_name("tenant", self.name)
        if min(self.flash_bytes, self.agent_bytes_per_s) < 0:
            raise UsageError("quotas are 0, for none, or more")

    @property
    def pool(self) -> int:
        """The number by which owners know the tenant's part of a shard; ``COMMON_POOL`` without a quota.

        32 bits of BLAKE2b over its name, never 0: two tenants of one number would share their parts.
        """
        if not self.flash_bytes:
            return COMMON_POOL
        digest = blake2b(self.name.encode(), digest_size=_POOL_BYTES, person=b"ostraca-pool").digest()
        return int.from_bytes(digest, "little") or 1


class VolumeRuling(msgspec.Struct, frozen=True):
    """What is to become of requests for a volume."""

    version: int
    tenant: str
    name: str
    switch: Switch


class LogLevel(Enum):
    """The least that is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LiveSettings(msgspec.Struct, frozen=True):
    """Settings of all agents that change while they run. None: as each agent's own settings say."""

    version: int = VERSION
    key_ttl_s: float = 900.0
    """How long an agent that can't ask the store goes on serving erasable volumes. An erasure is complete
    after so long at the latest."""

    key_ttl_longest_s: float = 900.0
    """The longest that it ever was, which nobody sets: an agent that is cut off may go by that."""

    log_level: LogLevel | None = None
    requests_max: int | None = None
    """In place of ``flow.requests_max``."""

    deadline_max_s: float | None = None
    """In place of ``flow.deadline_max_s``."""

    placement_ttl_s: float | None = None
    """In place of the agent's own. It counts at the one agent that ends earlier placement epochs."""

    scrub: bool | None = None
    """False: no shard is scrubbed. Nothing is scrubbed where ``owner.scrub`` turns that off, whatever this
    is."""

    def __post_init__(self) -> None:
        """Refuse what can't be meant."""
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

    def after(self, before: LiveSettings | None) -> LiveSettings:
        """Return these as they are written after others: what was the longest stays so."""
        earlier_s = LiveSettings().key_ttl_longest_s if before is None else before.key_ttl_longest_s
        longest_s = max(earlier_s, self.key_ttl_s)
        return msgspec.structs.replace(self, key_ttl_longest_s=longest_s)

    def in_force(self) -> dict[str, bool | int | float | str]:
        """Return those that somebody has set, by name."""
        said: dict[str, bool | int | float | str] = msgspec.to_builtins(self)
        unset = msgspec.to_builtins(LiveSettings(self.version))
        return {
            name: value
            for name, value in said.items()
            if value != unset[name] and name != "key_ttl_longest_s"
        }


@dataclass(frozen=True, slots=True)
class Rulings:
    """All of one fabric, as somebody has seen them."""

    tenants: Mapping[TenantId, TenantRuling] = field(default_factory=dict)
    switches: Mapping[tuple[TenantId, str], Switch] = field(default_factory=dict)
    """By tenant and volume; a volume that is not named is on."""

    live: LiveSettings = field(default_factory=LiveSettings)
    revision: int = 0
    """In which the last was made: all that was made up to it is among these."""

    def tenant(self, tenant: TenantId) -> TenantRuling:
        """Return what a tenant may; one that nobody made has no quota."""
        return self.tenants.get(tenant) or _unmade(tenant)

    def switch(self, tenant: TenantId, volume: str) -> Switch:
        """Return what is to become of requests for a volume."""
        return self.switches.get((tenant, volume), Switch.ON)


@lru_cache(maxsize=1024)
def _unmade(tenant: TenantId) -> TenantRuling:
    return TenantRuling(VERSION, tenant)


Ruling = TenantRuling | VolumeRuling | LiveSettings
_Ruling = TypeVar("_Ruling", TenantRuling, VolumeRuling, LiveSettings)


class _Versioned(msgspec.Struct, frozen=True):
    version: int


def encode(ruling: Ruling) -> bytes:
    """Write a ruling."""
    return msgspec.json.encode(ruling)


def decode(data: bytes, kind: type[_Ruling]) -> _Ruling:
    """Read a ruling. Raises MembershipError that says what to do."""
    try:
        version = msgspec.json.decode(data, type=_Versioned).version
        if version <= VERSION:
            return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UsageError, RecursionError) as error:
        raise MembershipError(f"a ruling can't be read: {error}") from error
    raise MembershipError(
        f"a ruling has version {version}, and this release reads {VERSION} and older: start a release of "
        "Ostraca as new as the fabric's"
    )
