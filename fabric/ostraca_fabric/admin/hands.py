"""What the admin service can do by itself nowhere, and has agents do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ostraca_fabric.chain import Span
    from ostraca_fabric.ids import AgentId
    from ostraca_fabric.status import AgentStatus
    from ostraca_fabric.volume import VolumeRecord
    from ostraca_fabric.wire.flash_work import FlashAnswer, FlashAsk
    from ostraca_fabric.wire.messages import PrefetchDone
    from ostraca_fabric.wire.placing import Places


class Hands(Protocol):
    """The agents of the fabric, asked as an operator asks."""

    async def ask(self, agent: AgentId, ask: FlashAsk, deadline_s: float) -> FlashAnswer:
        """Have an agent do something with drives. Raises ConnectError or TimeoutError when it does not
        answer, and RefusedError when it does not do it.
        """

    async def status(self, agent: AgentId) -> AgentStatus:
        """Return what an agent believes. Raises ConnectError or TimeoutError."""


class BlockHands(Hands, Protocol):
    """Agents that are asked about blocks as well, by whoever knows their engine hashes."""

    async def place(self, agent: AgentId, volume: VolumeRecord, span: Span) -> Places:
        """Ask an agent where a block belongs. Raises ConnectError or TimeoutError, OlderAgentError, and
        RefusedError where it does not know the volume.
        """

    async def prefetch(
        self, agent: AgentId, volume: VolumeRecord, spans: Sequence[Span], deadline_s: float
    ) -> PrefetchDone:
        """Have an agent bring blocks into its DRAM cache. Raises as ``place``."""
