"""Whole fabric in a single process, for ``ostraca up``.

The agents share the process's transports, its drives and a membership store; everything else equals a pod.
Agents call shard owners through the same port as owners on other hosts. This module is the composition root:
the only module that knows every component.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ostraca_cli.composition.open_drives import OpenDrives
from ostraca_cli.composition.state import FabricShape, FabricState
from ostraca_cli.composition.transports import create_transports
from ostraca_dpu_agent.adapters.peers.loopback_owners import LoopbackOwners
from ostraca_dpu_agent.agent import Agent
from ostraca_dpu_agent.settings import AgentSettings
from ostraca_enclosure.files import NOTHING_RECORDED, FileEnclosure
from ostraca_fabric.drives.device_opener import DeviceOpener
from ostraca_fabric.errors import DriveError, MembershipError, UsageError
from ostraca_fabric.membership.memory_membership import MemoryMembership
from ostraca_fabric.model.direct_reads import foreign_trace
from ostraca_fabric.model.fabric_map import DriveRecord, EnclosureRecord
from ostraca_fabric.model.ids import AgentId, EnclosureId, ShardId, TenantId
from ostraca_fabric.model.overrides import LiveSettings, Overrides
from ostraca_fabric.ports.drive import Drive
from ostraca_fabric.ports.transport import Transport
from ostraca_fabric.runtime.sentences import counted
from ostraca_fabric.telemetry.status import AgentStatus
from ostraca_fabric.wire.handshake import Access

MIB = 1 << 20
_TENANT = "default"

_SERVED_WITHIN_S = 3.0
"""Longest wait of a start until every shard has an owner."""

_LOOK_EVERY_S = 0.01


@dataclass(frozen=True, slots=True)
class FabricPlan:
    """Parts of a fabric in a single process."""

    directory: Path
    """Directory of drives, sockets and state."""

    agents: int = 1
    enclosures: int = 1
    drives: int = 2
    """Drives of each enclosure."""

    capacity_bytes: int = 4 << 30
    """Flash of all drives together."""

    dram_bytes: int = 512 * MIB
    """DRAM caches of all agents together."""

    staging_bytes: int = 512 * MIB
    """Limit of staging in each agent, mostly borrowed from the agent's cache."""

    transports: tuple[str, ...] = ("nixl", "inline")
    """Preferred first; transports missing on this machine are skipped, unless no other is listed."""

    addresses: tuple[str, ...] = ()
    """Further addresses of the first agent, beside its unix socket. Workers there present the fabric's token
    and belong to tenant ``default``."""

    flushes: bool = False
    """Whether to flush drives around each summary, so that committed blocks survive a power cut of the
    machine, not only the end of the process. Off by default: a flush may take milliseconds, and each group
    commit waits for two."""

    direct_reads_tenant: str = ""
    """Tenant whose workers may read drives themselves, the only one then; empty: none."""

    settings: AgentSettings = field(default_factory=AgentSettings)
    """Settings of each agent, except for the fields above: caches and staging."""

    def __post_init__(self) -> None:
        """Raise UsageError for counts below one, a bad name of a tenant and unusable settings."""
        if min(self.agents, self.enclosures, self.drives) < 1:
            raise UsageError(
                "the fabric's plan is incomplete: give at least 1 agent, 1 enclosure and 1 drive"
            )
        self.agent_settings()
        self.live_settings()

    def live_settings(self) -> LiveSettings:
        """Return the live settings of all agents; raises UsageError if unusable."""
        return LiveSettings(direct_reads_tenant=self.direct_reads_tenant)

    def agent_settings(self) -> AgentSettings:
        """Return the settings of each agent; raises UsageError if unusable."""
        cache_bytes = self.dram_bytes // self.agents
        memory = replace(self.settings.memory, staging_bytes=self.staging_bytes, cache_bytes=cache_bytes)
        return replace(self.settings, memory=memory)

    @property
    def drive_bytes(self) -> int:
        """Return the size of each drive, in whole MiB."""
        return self.capacity_bytes // (self.enclosures * self.drives) // MIB * MIB


class EmbeddedFabric:
    """Fabric on the running event loop: call ``start``, then ``stop``; single use."""

    def __init__(
        self,
        plan: FabricPlan,
        *,
        wrap: Callable[[Transport], Transport] | None = None,
        wrap_drive: Callable[[Drive], Drive] | None = None,
    ) -> None:
        """Store the plan; everything else waits for ``start``.

        Tests use *wrap* and *wrap_drive* to wrap each transport and each drive, for observation or fault
        injection.
        """
        self._plan = plan
        self._wrap = wrap
        self._wrap_drive = wrap_drive
        self._state: FabricState | None = None
        self._transports: dict[str, Transport] = {}
        self._opener = DeviceOpener(plan.agent_settings().flash_io)
        self._drives = OpenDrives(self._open_drive)
        self._agents: list[Agent] = []

    @property
    def addresses(self) -> tuple[str, ...]:
        """Return the addresses for workers: each agent's addresses in turn."""
        return tuple(address for agent in self._agents for address in agent.addresses)

    def status(self) -> tuple[AgentStatus, ...]:
        """Return the status of each agent."""
        return tuple(agent.status() for agent in self._agents)

    @property
    def status_functions(self) -> Mapping[str, Callable[[], AgentStatus]]:
        """Return a status function for each agent, to be called on this loop."""
        return {agent.id: agent.status for agent in self._agents}

    def readmit(self) -> None:
        """Read the workers' token again; close connections made with another token.

        Raises MembershipError and FormatError; then everything stays unchanged.
        """
        assert self._state is not None, "start comes first"
        access = self._access(self._state)
        for agent in self._agents:
            agent.readmit(access)

    async def start(self) -> None:
        """Lock the directory, create or find the drives, start the agents.

        Raises an OstracaError with advice: the directory is in use, holds a fabric of another shape or lacks
        space; an address is unavailable; no transport works. The method then stops all started parts.
        """
        plan = self._plan
        self._state = FabricState(plan.directory, FabricShape(plan.enclosures, plan.drives, plan.drive_bytes))
        try:
            await self._start(self._state)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> bool:
        """Stop the agents in order, close drives and transports, unlock the directory.

        Returns whether every transfer and I/O has ended. If not, the process should end without unmapping
        memory, as a plain exit does.
        """
        # Agents commit to each other's shards: no agent leaves before all have drained.
        drained = await asyncio.gather(*(agent.drain() for agent in self._agents))
        left = await asyncio.gather(*(agent.leave() for agent in self._agents))
        has_ended = await self._drives.are_idle() and all(drained) and all(left)
        if has_ended:
            self._drives.close_all()
            self._opener.close()
        for transport in self._transports.values():
            await transport.close()
        self._transports.clear()
        for agent in self._agents if has_ended else ():
            agent.unmap()
        self._agents.clear()
        if self._state is not None:
            self._state.close()
            self._state = None
        return has_ended

    async def _start(self, state: FabricState) -> None:
        plan = self._plan
        membership = MemoryMembership(state.fabric, volumes=state.volumes, keep=state.store_volumes)
        if plan.direct_reads_tenant:
            _check_only_tenant(plan.direct_reads_tenant, state)
            membership.rule(Overrides(live=plan.live_settings()))
        enclosures = [
            FileEnclosure(
                EnclosureId(f"enclosure-{number}"),
                plan.directory / f"enclosure-{number}",
                fabric=state.fabric,
                drives=plan.drives,
                drive_bytes=plan.drive_bytes,
            )
            for number in range(plan.enclosures)
        ]
        await membership.put_enclosures(_prepare_enclosures(enclosures, state))
        self._transports = create_transports(plan.transports)
        if self._wrap is not None:
            self._transports = {name: self._wrap(each) for name, each in self._transports.items()}
        access = self._access(state)
        owners = LoopbackOwners()
        settings = plan.agent_settings()
        for number in range(plan.agents):
            addresses = (f"unix://{plan.directory.resolve()}/agent-{number}.sock",)
            agent = Agent(
                AgentId(f"agent-{number}"),
                settings,
                addresses=addresses if number else (*addresses, *plan.addresses),
                access=access,
                fabric_key=state.key,
                membership=membership,
                owners=owners,
                transports=self._transports,
                open_drive=self._drives.open,
                close_drive=self._drives.close,
                flash_io=lambda: self._opener.flash_io,
                clock=time.monotonic,
            )
            self._agents.append(agent)
        for agent in self._agents:
            await agent.join()
        for agent in self._agents:
            await agent.start()
        await self._wait_until_served({shard.id for shard in membership.map.shards()})

    async def _wait_until_served(self, shards: set[ShardId]) -> None:
        """Wait until each shard has an owner, because earlier puts would be declined.

        Skips shards with a known obstacle.
        """
        until_s = time.monotonic() + _SERVED_WITHIN_S
        while time.monotonic() < until_s:
            told = self.status()
            served = {shard.shard for agent in told for shard in agent.shards}
            failed = {ShardId(shard.shard) for agent in told for shard in agent.unserved.shards if shard.why}
            if shards <= served | failed:
                return
            await asyncio.sleep(_LOOK_EVERY_S)

    def _access(self, state: FabricState) -> Access:
        tokens = {TenantId(_TENANT): (state.worker_token(),)} if self._plan.addresses else {}
        return Access(own_uid=os.getuid(), tenant_tokens=tokens)

    def _open_drive(self, record: DriveRecord) -> Drive:
        drive: Drive = self._opener.open(record.id, record.path, flushes=self._plan.flushes)
        return drive if self._wrap_drive is None else self._wrap_drive(drive)


def _check_only_tenant(tenant: str, state: FabricState) -> None:
    """Raise MembershipError if a volume of another tenant exists."""
    if trace := foreign_trace(tenant, (), state.volumes):
        raise MembershipError(
            f"--direct-reads {tenant} needs a fabric of one tenant, and this fabric has {trace}: start "
            "without --direct-reads, or take another --dir"
        )


def _prepare_enclosures(enclosures: Sequence[FileEnclosure], state: FabricState) -> list[EnclosureRecord]:
    """Return the enclosures with the content of their drives.

    Only the first start creates missing drives. Raises an OstracaError with advice, also if no drive is
    usable.
    """
    records = [
        each.prepare(dict.fromkeys(each.drives) if state.are_drives_created else NOTHING_RECORDED)
        for each in enclosures
    ]
    state.record_drives_created()
    unusable = [why for each in enclosures for why in each.unusable.values()]
    drives = sum(len(record.drives) for record in records)
    if len(unusable) == drives:
        raise DriveError(
            f"none of {counted(drives, 'drive')} can be used; `ostraca doctor` on the folder explains "
            f"how to replace a drive: {'; '.join(unusable)}"
        )
    for enclosure, record in zip(enclosures, records, strict=True):
        for drive in record.drives:
            if drive.id not in enclosure.unusable:
                state.hold_drive(Path(drive.path))
    return records
