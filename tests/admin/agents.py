"""Agents in this process, as far as the admin service has to do with them: looking at drives, measuring and
formatting them is done as agents do it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from ostraca_dpu_agent.incarnations import Incarnations
from ostraca_dpu_agent.paths.flash_work import FlashWorker
from ostraca_dpu_agent.paths.keeper import PathKeeper
from ostraca_fabric.adapters.file_paths import FilePaths
from ostraca_fabric.errors import ConnectError, OstracaError, RefusedError
from ostraca_fabric.fabric_map import FabricMap
from ostraca_fabric.ids import ID_BYTES, AgentId
from ostraca_fabric.status import AgentCounters, AgentStatus, DriveStatus, ShardStatus
from ostraca_fabric.target import NQN_PREFIX
from ostraca_fabric.wire.flash_work import FlashAnswer, FlashAsk, read_answer


@dataclass
class Agent:
    """An agent of the fabric, as far as the admin service has to do with it."""

    id: AgentId
    keeper: PathKeeper
    flash: FlashWorker
    shards: tuple[ShardStatus, ...] = ()
    """What it says of the shards that it owns."""

    drives: tuple[DriveStatus, ...] = ()
    is_silent: bool = False
    """Whether it can't be reached."""

    asked: list[FlashAsk] = field(default_factory=list)
    incarnations: Incarnations | None = None
    """What it serves of each volume, where a test erases some."""

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
            paths=self.keeper.status({}),
            purged=0 if self.incarnations is None else self.incarnations.purged,
        )


class AgentsHere:
    """The agents of this process: implements ``admin.hands.Hands``. What is asked and answered crosses as
    it does on the wire.
    """

    def __init__(self, agents: Mapping[AgentId, Agent]) -> None:
        self._agents = agents

    async def ask(self, agent: AgentId, ask: FlashAsk, deadline_s: float) -> FlashAnswer:
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

    def _reached(self, agent: AgentId) -> Agent:
        if self._agents[agent].is_silent:
            raise ConnectError(f"can't reach an agent at {agent}: nobody listens there")
        return self._agents[agent]


def made_agent(name: AgentId, newest_map: Callable[[], FabricMap]) -> Agent:
    """Return an agent of its own host, whose NQN ends with its name. Call it on the loop that it works on."""
    keeper = PathKeeper(
        FilePaths(f"{NQN_PREFIX}{name}"),
        secret_of=lambda secret: secret,
        is_open=lambda _: False,
        clock=time.monotonic,
        turn_s=0.1,
        hold_s=5.0,
    )
    return Agent(name, keeper, FlashWorker(keeper, newest_map))
