"""Lifecycle of an agent, and parts of its status.

A status is available from start to end. A daemon that waits for the membership store reports this state
before a fabric map exists to make the agent with. Usage by tenant is bounded: the smallest users are summed
up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from ostraca_dpu_agent.conditions import AgentPhase, observe
from ostraca_dpu_agent.datapath.staging.staging import Staging
from ostraca_dpu_agent.settings import AgentSettings
from ostraca_fabric.model.ids import AgentId, TenantId
from ostraca_fabric.runtime.version import VERSION
from ostraca_fabric.telemetry.conditions import Conditions
from ostraca_fabric.telemetry.log_lines import lost_lines
from ostraca_fabric.telemetry.status import (
    OTHER_TENANTS,
    TENANTS_MAX,
    AgentCounters,
    AgentStatus,
    MembershipStatus,
    TenantStatus,
)


class Lifecycle:
    """Lifecycle of one agent."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Begin now; *clock* is monotonic, in seconds."""
        self.phase = AgentPhase.STARTING
        self.activity = ""
        """Current activity or wait in the phase, as a sentence; empty if there is none."""

        self._store_trouble = ""
        self._silent_since_s = 0.0
        self._clock = clock
        self._began_s = clock()
        self._conditions = Conditions()

    @property
    def sentence(self) -> str:
        """Phase and current activity."""
        return f"{self.phase.value} {self.activity}".rstrip()

    @property
    def uptime_s(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._began_s

    def wait_for_store(self, trouble: str, *, asked_s: float) -> None:
        """Note that the membership store has not answered since *asked_s*.

        The agent can't continue without an answer. Call with an empty *trouble* once the store has
        answered.
        """
        self._store_trouble, self._silent_since_s = trouble, asked_s

    def with_conditions(self, status: AgentStatus) -> AgentStatus:
        """Return a status with conditions and lost log records added."""
        if self._store_trouble:
            silent_s = self._clock() - self._silent_since_s
            membership = msgspec.structs.replace(
                status.membership, silent_s=silent_s, trouble=self._store_trouble
            )
            status = msgspec.structs.replace(status, membership=membership)
        return msgspec.structs.replace(
            status,
            conditions=self._conditions.after(self._clock(), observe(status, self.phase, self.activity)),
            lost_log_lines=lost_lines(),
        )

    def initial_status(self, agent: AgentId, settings: AgentSettings) -> AgentStatus:
        """Return the empty status of an agent that is not made yet."""
        return self.with_conditions(
            AgentStatus(
                agent=agent,
                start_id="",
                version=VERSION,
                uptime_s=self.uptime_s,
                transports=(),
                sentence=self.sentence,
                workers=0,
                staging_bytes=settings.memory.staging_bytes,
                staging_used_bytes=0,
                quarantined_bytes=0,
                cache_bytes=settings.memory.cache_bytes,
                cache_used_bytes=0,
                counters=AgentCounters(),
                shards=(),
                agents=(),
                membership=MembershipStatus(has_map=False),
            )
        )


def tenant_statuses(staging: Staging) -> tuple[TenantStatus, ...]:
    """Return the tenants by name, and last the sum of those beyond the limit."""
    tenants, slots = staging.tenants, staging.slots_of
    cached = {TenantId(str(each)): size for each, size in staging.cache.bytes_of.items()}
    uses = [
        TenantStatus(
            each,
            connections=tenants.connections[each],
            requests=tenants.requests[each],
            staging_bytes=slots[each],
            cache_bytes=cached.get(each, 0),
        )
        for each in tenants.members | cached.keys()
    ]
    uses.sort(key=lambda use: (-use.connections, -use.cache_bytes, use.tenant))
    listed = TENANTS_MAX - 1 if len(uses) > TENANTS_MAX else len(uses)
    named = sorted(uses[:listed], key=lambda use: use.tenant)
    return (*named, *([_sum_up(uses[listed:])] if uses[listed:] else []))


def _sum_up(uses: Sequence[TenantStatus]) -> TenantStatus:
    return TenantStatus(
        OTHER_TENANTS,
        connections=sum(use.connections for use in uses),
        requests=sum(use.requests for use in uses),
        staging_bytes=sum(use.staging_bytes for use in uses),
        cache_bytes=sum(use.cache_bytes for use in uses),
    )
