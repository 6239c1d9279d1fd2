"""A whole fabric in one process: what ``ostraca up`` runs.

The agents share the process's transports, its drives and one membership store; everything else is as in a
pod. Owners are reached through the port that owners on other hosts will be reached through. This is the
composition root: the one place that knows every component.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ostraca.cli.idle_drives import are_idle
from ostraca.cli.state import FabricShape, FabricState
from ostraca.cli.transports import made_transports
from ostraca_dpu_agent.agent import Agent
from ostraca_dpu_agent.settings import AgentSettings
from ostraca_enclosure.files import FileEnclosure
from ostraca_fabric.adapters.file_drive import DriveSettings, FileDrive
from ostraca_fabric.adapters.loopback_owners import LoopbackOwners
from ostraca_fabric.adapters.memory_membership import MemoryMembership
from ostraca_fabric.errors import UsageError
from ostraca_fabric.ids import AgentId, EnclosureId, ShardId, TenantId
from ostraca_fabric.policies.endurance import EnduranceSettings
from ostraca_fabric.wire.handshake import Access

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from ostraca_fabric.fabric_map import DriveRecord
    from ostraca_fabric.ids import DriveId
    from ostraca_fabric.ports.drive import Drive
    from ostraca_fabric.ports.transport import Transport
    from ostraca_fabric.status import AgentStatus

MIB = 1 << 20
_TENANT = "default"

_SERVED_WITHIN_S = 3.0
"""How long a start waits for every shard to be served by an agent."""

_LOOK_EVERY_S = 0.01


@dataclass(frozen=True, slots=True)
class FabricPlan:
    """What a fabric in one process is made of."""

    directory: Path
    """Where drives, sockets and state lie."""

    agents: int = 1
    enclosures: int = 1
    drives: int = 2
    """Of each enclosure."""

    capacity_bytes: int = 4 << 30
    """Flash of all drives together."""

    dram_bytes: int = 512 * MIB
    """DRAM caches of all agents together."""

    staging_bytes: int = 512 * MIB
    """The most that blocks on their way may take in each agent, most of it borrowed from its cache."""

    transports: tuple[str, ...] = ("nixl", "inline")
    """In order of preference; one that this machine lacks is left out, unless it is the only one."""

    addresses: tuple[str, ...] = ()
    """Where else the first agent listens, beside its unix socket; workers there show the fabric's token, and
    are of tenant ``default``."""

    endurance: EnduranceSettings = field(default_factory=EnduranceSettings)
    """What the drives are rated for. Nothing, by default: a laptop's drive is not used up by trying this out,
    and whoever tries it out wants to see blocks come back."""

    blocks_per_shard_max: int = 1 << 20
    """The most blocks that a shard's index lists: 48 bytes of memory each."""

    flushes: bool = False
    """Whether drives are flushed around each summary, so that a committed block outlives a power cut of the
    machine, and not the process alone. Files are not flushed by default: a disk may take milliseconds for it,
    and each group commit waits for two."""

    settings: AgentSettings = field(default_factory=AgentSettings)
    """Of each agent, but for what is said above: caches, staging, endurance and blocks of a shard."""

    def __post_init__(self) -> None:
        """Refuse counts that make no fabric, and settings that are of no use."""
        if min(self.agents, self.enclosures, self.drives) < 1:
            message = "a fabric needs at least one agent, one enclosure and one drive"
            raise UsageError(message)
        self.agent_settings()

    def agent_settings(self) -> AgentSettings:
        """Return the settings of each agent. Raises UsageError for what is of no use."""
        given = self.settings
        return replace(
            given,
            memory=replace(
                given.memory, staging_bytes=self.staging_bytes, cache_bytes=self.dram_bytes // self.agents
            ),
            owner=replace(
                given.owner, endurance=self.endurance, blocks_per_shard_max=self.blocks_per_shard_max
            ),
        )

    @property
    def drive_bytes(self) -> int:
        """The size of each drive, in whole MiB."""
        return self.capacity_bytes // (self.enclosures * self.drives) // MIB * MIB


class EmbeddedFabric:
    """A fabric on the running event loop. ``start`` it, then ``stop`` it; it is used once."""

    def __init__(
        self,
        plan: FabricPlan,
        *,
        wrap: Callable[[Transport], Transport] | None = None,
        wrap_drive: Callable[[Drive], Drive] | None = None,
    ) -> None:
        """Take the plan; nothing happens before ``start``.

        *wrap* puts something around each transport, and *wrap_drive* around each drive: tests that watch it,
        or make it do wrong.
        """
        self._plan = plan
        self._wrap = wrap
        self._wrap_drive = wrap_drive
        self._state: FabricState | None = None
        self._transports: dict[str, Transport] = {}
        self._drives: dict[DriveId, Drive] = {}
        self._agents: list[Agent] = []

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where workers reach the fabric: each agent's addresses in turn."""
        return tuple(address for agent in self._agents for address in agent.addresses)

    def status(self) -> tuple[AgentStatus, ...]:
        """What each agent believes."""
        return tuple(agent.status() for agent in self._agents)

    @property
    def looks(self) -> Mapping[str, Callable[[], AgentStatus]]:
        """What to call, on this loop, for what each agent believes."""
        return {agent.id: agent.status for agent in self._agents}

    def readmit(self) -> None:
        """Read the workers' token again, and refuse connections that were made with another one.

        Raises MembershipError and FormatError, and then all stays as it was.
        """
        assert self._state is not None, "start comes first"
        access = self._access(self._state)
        for agent in self._agents:
            agent.readmit(access)

    async def start(self) -> None:
        """Lock the directory, make or find the drives, start the agents.

        Raises an OstracaError that says what to do: the directory is in use, or holds a fabric of another
        shape, or has too little room; an address can't be had; no transport works. What was started by then
        is stopped again.
        """
        plan = self._plan
        shape = FabricShape(plan.enclosures, plan.drives, plan.drive_bytes)
        self._state = FabricState(plan.directory, shape)
        try:
            await self._start(self._state)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> bool:
        """Stop the agents in order, close drives and transports, unlock the directory.

        Returns whether every transfer and I/O has ended. If not, the process should end without unmapping
        memory, as it does when it simply exits.
        """
        # Agents commit to each other's shards: none leaves before all have drained.
        drained = await asyncio.gather(*(agent.drain() for agent in self._agents))
        left = await asyncio.gather(*(agent.leave() for agent in self._agents))
        has_ended = await are_idle(self._drives.values()) and all(drained) and all(left)
        if has_ended:  # closing a drive waits for its I/O, and what has not ended by now may never
            for drive in self._drives.values():
                drive.close()
        self._drives.clear()
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
        membership = MemoryMembership(state.fabric, volumes=state.volumes, keep=state.keep_volumes)
        enclosures = (
            FileEnclosure(
                EnclosureId(f"enclosure-{number}"),
                plan.directory / f"enclosure-{number}",
                fabric=state.fabric,
                drives=plan.drives,
                drive_bytes=plan.drive_bytes,
            )
            for number in range(plan.enclosures)
        )
        await membership.put_enclosures([enclosure.prepare() for enclosure in enclosures])
        self._transports = made_transports(plan.transports)
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
                open_drive=self._open_drive,
                clock=time.monotonic,
            )
            self._agents.append(agent)
        for agent in self._agents:
            await agent.join()
        for agent in self._agents:
            await agent.start()
        await self._all_served({shard.id for shard in membership.map.shards()})

    async def _all_served(self, shards: set[ShardId]) -> None:
        """Wait until agents have shared the shards out among them: what is put before is declined. One that
        nobody can serve is not waited for.
        """
        until_s = time.monotonic() + _SERVED_WITHIN_S
        while time.monotonic() < until_s:
            told = self.status()
            served = {shard.shard for agent in told for shard in agent.shards}
            in_vain = {ShardId(shard.shard) for agent in told for shard in agent.unserved.shards if shard.why}
            if shards <= served | in_vain:
                return
            await asyncio.sleep(_LOOK_EVERY_S)

    def _access(self, state: FabricState) -> Access:
        tokens = {TenantId(_TENANT): (state.worker_token(),)} if self._plan.addresses else {}
        return Access(own_uid=os.getuid(), tenant_tokens=tokens)

    def _open_drive(self, record: DriveRecord) -> Drive:
        """Open a drive once for all agents of this process."""
        if record.id not in self._drives:
            settings = DriveSettings(has_volatile_cache=True if self._plan.flushes else None)
            drive: Drive = FileDrive.open(record.id, record.path, settings)
            self._drives[record.id] = drive if self._wrap_drive is None else self._wrap_drive(drive)
        return self._drives[record.id]
