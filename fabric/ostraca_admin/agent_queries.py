"""Interface to agents, and the queries of long operations: all agents look, one formats or measures."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ostraca_admin.model import ChosenDrive, EnclosureSpec
from ostraca_fabric.errors import ConnectError, OstracaError, RefusedError
from ostraca_fabric.model.chain import Span
from ostraca_fabric.model.ids import AgentId
from ostraca_fabric.model.volume import VolumeRecord
from ostraca_fabric.ports.membership import Membership
from ostraca_fabric.telemetry.explain import BlockPlacements
from ostraca_fabric.telemetry.status import AgentStatus
from ostraca_fabric.wire.flash_work import (
    BUSY,
    Content,
    DiscoverDrives,
    DiscoveredDrives,
    FlashAnswer,
    FlashRequest,
    Format,
    FormatResult,
    Probe,
    ProbeResult,
)
from ostraca_fabric.wire.messages import PrefetchDone

_WRONG_TYPE = "unexpected type of answer: check the agent's release"


@dataclass(frozen=True, slots=True)
class QuerySettings:
    """Time limits for agents."""

    look_s: float = 105.0
    """For connecting to an enclosure and looking at the drives. Must exceed the time until a host sees a
    refusal (``PathSettings.connect_s`` and kernel calls); otherwise, a wrong secret would look like a
    silent agent."""

    format_s: float = 60.0
    """For formatting a drive."""

    probe_s: float = 1.5
    """Duration of a drive's measurement."""


class BusyError(OstracaError):
    """Work on the drive is in progress, for another admin or a crashed admin."""


class AgentQueries:
    """Requests to the agents of the newest map."""

    def __init__(
        self, membership: Membership, agents: AgentClient, settings: QuerySettings | None = None
    ) -> None:
        """Send requests by *agents*."""
        self._membership = membership
        self._agents = agents
        self._settings = settings or QuerySettings()

    async def look(self, spec: EnclosureSpec) -> Mapping[AgentId, DiscoveredDrives | OstracaError]:
        """Return every agent's view of an enclosure."""
        agents = sorted(self._membership.map.agents)
        looks = (self._look(agent, DiscoverDrives(spec.target_text())) for agent in agents)
        return dict(zip(agents, await asyncio.gather(*looks), strict=True))

    async def format(self, spec: EnclosureSpec, drive: ChosenDrive, *, wipe: bool) -> FormatResult:
        """Format a drive through an agent, regardless of contents if *wipe*."""
        replaces = (Content.BLANK, *((Content.OURS, Content.OTHER, Content.FOREIGN) if wipe else ()))
        ask = Format(
            spec.target_text(),
            drive.nguid,
            spec.name,
            drive.name,
            drive.format_id,
            replaces,
            spec.segment_bytes,
        )
        answer = await self._any(ask, self._settings.format_s)
        return answer if isinstance(answer, FormatResult) else FormatResult(trouble=_WRONG_TYPE)

    async def probe(self, spec: EnclosureSpec, drive: ChosenDrive, *, writes: bool) -> ProbeResult:
        """Measure a drive through an agent."""
        ask = Probe(spec.target_text(), drive.nguid, self._settings.probe_s, writes)
        answer = await self._any(ask, self._settings.look_s + self._settings.probe_s)
        return answer if isinstance(answer, ProbeResult) else ProbeResult(trouble=_WRONG_TYPE)

    async def statuses(self) -> list[AgentStatus]:
        """Return the status of all agents that answer."""
        answers = await statuses(self._agents, self._membership.map.agents)
        return [each for each in answers.values() if isinstance(each, AgentStatus)]

    async def _look(self, agent: AgentId, look: DiscoverDrives) -> DiscoveredDrives | OstracaError:
        try:
            answer = await self._agents.ask(agent, look, self._settings.look_s)
        except TimeoutError:
            return OstracaError(f"no answer for {self._settings.look_s:.0f} s")
        except OstracaError as error:
            return error
        return answer if isinstance(answer, DiscoveredDrives) else OstracaError(_WRONG_TYPE)

    async def _any(self, ask: FlashRequest, deadline_s: float) -> FlashAnswer:
        """Return the answer of the first agent that responds.

        Concurrent work by another agent is the same work, and harmless. Raises BusyError if the work is in
        progress, ConnectError without any answer.
        """
        agents = sorted(self._membership.map.agents)
        why = "the fabric has no agent, and only agents connect to enclosures: start an agent"
        for agent in agents:
            try:
                return await self._agents.ask(agent, ask, deadline_s)
            except TimeoutError:
                why = f"no answer from {agent} for {deadline_s:.0f} s"
            except ConnectError as error:
                why = str(error)
            except RefusedError as error:
                if error.code == BUSY:
                    raise BusyError(str(error)) from error
                raise
        raise ConnectError(f"{why}; then retry")


async def statuses(agents: AgentClient, names: Iterable[AgentId]) -> dict[AgentId, AgentStatus | str]:
    """Return the status of agents by name, or the reason why there is no answer."""

    async def one(agent: AgentId) -> AgentStatus | str:
        try:
            return await agents.status(agent)
        except TimeoutError:
            return "no answer in time"
        except OstracaError as error:
            return str(error)

    ordered = sorted(names)
    return dict(zip(ordered, await asyncio.gather(*map(one, ordered)), strict=True))


class AgentClient(Protocol):
    """Client of the fabric's agents, in the role of an operator."""

    async def ask(self, agent: AgentId, ask: FlashRequest, deadline_s: float) -> FlashAnswer:
        """Request work on drives from an agent.

        Raises ConnectError or TimeoutError without an answer, and RefusedError on a refusal.
        """

    async def status(self, agent: AgentId) -> AgentStatus:
        """Return an agent's status. Raises ConnectError or TimeoutError."""


class BlockAgentClient(AgentClient, Protocol):
    """Client with queries about blocks as well, by engine hashes."""

    async def place(self, agent: AgentId, volume: VolumeRecord, span: Span) -> BlockPlacements:
        """Return the place of a block.

        Raises ConnectError, TimeoutError or OlderAgentError, and RefusedError for an unknown volume.
        """

    async def prefetch(
        self, agent: AgentId, volume: VolumeRecord, spans: Sequence[Span], deadline_s: float
    ) -> PrefetchDone:
        """Request a prefetch into an agent's DRAM cache. Raises like ``place``."""
