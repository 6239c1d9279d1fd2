"""What the admin service can do by itself nowhere, and has agents do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ostraca_fabric.ids import AgentId
    from ostraca_fabric.status import AgentStatus
    from ostraca_fabric.wire.flash_work import FlashAnswer, FlashAsk


class Hands(Protocol):
    """The agents of the fabric, asked as an operator asks."""

    async def ask(self, agent: AgentId, ask: FlashAsk, deadline_s: float) -> FlashAnswer:
        """Have an agent do something with drives. Raises ConnectError or TimeoutError when it does not
        answer, and RefusedError when it does not do it.
        """

    async def status(self, agent: AgentId) -> AgentStatus:
        """Return what an agent believes. Raises ConnectError or TimeoutError."""
