"""Agents in this process, as far as the admin service has to do with them.

Looking at drives, measuring and formatting them is done as agents do it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from ostraca_dpu_agent.adapters.nvme_of.file_paths import FilePaths
from ostraca_dpu_agent.paths.flash_work import FlashWorker
from ostraca_dpu_agent.paths.manager import PathManager
from ostraca_dpu_agent.volumes import Incarnations
from ostraca_fabric.drives.device_opener import DeviceOpener
from ostraca_fabric.errors import ConnectError, OlderAgentError, OstracaError, RefusedError
from ostraca_fabric.model.chain import Span
from ostraca_fabric.model.fabric_map import FabricMap
from ostraca_fabric.model.ids import ID_BYTES, AgentId
from ostraca_fabric.model.target import NQN_PREFIX
from ostraca_fabric.model.volume import VolumeRecord
from ostraca_fabric.telemetry.explain import BlockPlacements, EpochPlacement
from ostraca_fabric.telemetry.status import AgentCounters, AgentStatus, DriveStatus, ShardStatus
from ostraca_fabric.wire.flash_work import FlashAnswer, FlashRequest, read_answer
from ostraca_fabric.wire.messages import PrefetchDone


@dataclass
class Agent:
    """An agent of the fabric, as far as the admin service has to do with it."""

    id: AgentId
    path_manager: PathManager
    flash: FlashWorker
    shards: tuple[ShardStatus, ...] = ()
    """What it says of the shards that it owns."""

    drives: tuple[DriveStatus, ...] = ()
    is_silent: bool = False
    """Whether it can't be reached."""

    is_older: bool = False
    """Whether it is of a release that knows nothing of placing."""

    asked: list[FlashRequest] = field(default_factory=list)
    incarnations: Incarnations | None = None
    """What it serves of each volume, where a test erases some."""
    prefetched: list[tuple[VolumeRecord, tuple[Span, ...], float]] = field(default_factory=list)
    places: tuple[EpochPlacement, ...] = (
        EpochPlacement(2, "shelf-1", "shelf-1/d0/0", "agent-0", 7),
        EpochPlacement(1),
    )
    """Where it says that every block belongs."""

    refuses: RefusedError | None = None
    """What it answers to whoever asks it about blocks."""

    def status(self) -> AgentStatus:
        """Return what it believes."""
        return AgentStatus(
            agent=self.id,
            start_id="00" * ID_BYTES,
            version="0",
            uptime_s=1.0,
            transports=("inline",),
            sentence="nothing to do.",
            workers=0,
            staging_bytes=0,
            staging_used_bytes=0,
            quarantined_bytes=0,
            cache_bytes=0,
            cache_used_bytes=0,
            counters=AgentCounters(),
            shards=self.shards,
            agents=(),
            drives=self.drives,
            paths=self.path_manager.status({}),
            purged=0 if self.incarnations is None else self.incarnations.purged,
        )


class AgentsHere:
    """The agents of this process: implements ``admin.hands.Hands``.

    What is asked and answered crosses as it does on the wire.
    """

    def __init__(self, agents: Mapping[AgentId, Agent]) -> None:
        self._agents = agents

    async def ask(self, agent: AgentId, ask: FlashRequest, deadline_s: float) -> FlashAnswer:
        """As in the port."""
        asked = self._reached(agent)
        asked.asked.append(ask)
        try:
            answer = await asked.flash.answer(msgspec.msgpack.encode(ask), deadline_s)
        except RefusedError:
            raise
        except OstracaError as error:  # as a connection answers for it
            raise RefusedError("usage", str(error)) from error
        return read_answer(msgspec.msgpack.encode(answer))

    async def status(self, agent: AgentId) -> AgentStatus:
        """As in the port."""
        return self._reached(agent).status()

    async def place(self, agent: AgentId, volume: VolumeRecord, span: Span) -> BlockPlacements:
        """As in the port."""
        asked = self._asked_of_blocks(agent)
        assert len(span) == 1
        assert span.hash_bytes == volume.layout.hash_bytes
        return BlockPlacements(agent, 17, asked.places)

    async def prefetch(
        self, agent: AgentId, volume: VolumeRecord, spans: Sequence[Span], deadline_s: float
    ) -> PrefetchDone:
        """As in the port: every other block is there."""
        asked = self._asked_of_blocks(agent)
        asked.prefetched.append((volume, tuple(spans), deadline_s))
        states = [number % 2 for number in range(sum(map(len, spans)))]
        return PrefetchDone(1, bytes(states), bytes(1 - state for state in states))

    def _asked_of_blocks(self, agent: AgentId) -> Agent:
        asked = self._reached(agent)
        if asked.is_older:
            raise OlderAgentError(f"agent {agent} lacks placing: upgrade the agent")
        if asked.refuses is not None:
            raise asked.refuses
        return asked

    def _reached(self, agent: AgentId) -> Agent:
        if self._agents[agent].is_silent:
            raise ConnectError(f"can't reach an agent at {agent}: nobody listens there")
        return self._agents[agent]


def made_agent(name: AgentId, newest_map: Callable[[], FabricMap]) -> Agent:
    """Return an agent of its own host, whose NQN ends with its name. Call it on the loop that it works on."""
    path_manager = PathManager(
        FilePaths(f"{NQN_PREFIX}{name}"),
        DeviceOpener(),
        secret_of=lambda secret: secret,
        is_open=lambda _: False,
        clock=time.monotonic,
        turn_s=0.1,
        hold_s=5.0,
    )
    return Agent(name, path_manager, FlashWorker(path_manager, newest_map))
