"""Asks agents what long work needs of them: all of them to look, one of them to format and to measure."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ostraca_fabric.errors import ConnectError, OstracaError, RefusedError
from ostraca_fabric.wire.flash_work import BUSY, Content, Format, Formatted, Look, Looked, Probe, Probed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ostraca_fabric.admin.hands import Hands
    from ostraca_fabric.admin.model import ChosenDrive, EnclosureSpec
    from ostraca_fabric.ids import AgentId
    from ostraca_fabric.ports.membership import Membership
    from ostraca_fabric.status import AgentStatus
    from ostraca_fabric.wire.flash_work import FlashAnswer, FlashAsk

_SOMETHING_ELSE = "the agent answered something else: is it of an older release?"


@dataclass(frozen=True, slots=True)
class AskSettings:
    """How long agents have."""

    look_s: float = 105.0
    """To connect to an enclosure, and look at its drives. Longer than an agent's host may take to be refused
    there (``PathSettings.connect_s``, and the questions to its kernel): or a wrong secret would be told as an
    agent that does not answer."""

    format_s: float = 60.0
    """To format a drive."""

    probe_s: float = 1.5
    """How long a drive is measured."""


class BusyError(OstracaError):
    """A drive is being worked on, for an admin that is gone or for another one."""


class Asking:
    """The agents of the newest map."""

    def __init__(self, membership: Membership, hands: Hands, settings: AskSettings | None = None) -> None:
        """Ask by *hands*."""
        self._membership = membership
        self._hands = hands
        self._settings = settings or AskSettings()

    async def looked(self, spec: EnclosureSpec) -> Mapping[AgentId, Looked | OstracaError]:
        """Have every agent look at an enclosure."""
        agents = sorted(self._membership.map.agents)
        asked = (self._look(agent, Look(spec.target_text())) for agent in agents)
        return dict(zip(agents, await asyncio.gather(*asked), strict=True))

    async def format(self, spec: EnclosureSpec, drive: ChosenDrive, *, wipe: bool) -> Formatted:
        """Have a drive formatted, whatever it holds if *wipe*."""
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
        return answer if isinstance(answer, Formatted) else Formatted(trouble=_SOMETHING_ELSE)

    async def probe(self, spec: EnclosureSpec, drive: ChosenDrive, *, writes: bool) -> Probed:
        """Have a drive measured."""
        ask = Probe(spec.target_text(), drive.nguid, self._settings.probe_s, writes)
        answer = await self._any(ask, self._settings.look_s + self._settings.probe_s)
        return answer if isinstance(answer, Probed) else Probed(trouble=_SOMETHING_ELSE)

    async def statuses(self) -> list[AgentStatus]:
        """Ask every agent how it is; those that do not answer are left out."""
        asked = (self._hands.status(agent) for agent in sorted(self._membership.map.agents))
        answers = await asyncio.gather(*asked, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, OstracaError | TimeoutError):
                raise answer
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    async def _look(self, agent: AgentId, look: Look) -> Looked | OstracaError:
        try:
            answer = await self._hands.ask(agent, look, self._settings.look_s)
        except TimeoutError:
            return OstracaError(f"nothing was heard of it for {self._settings.look_s:.0f} s")
        except OstracaError as error:
            return error
        return answer if isinstance(answer, Looked) else OstracaError(_SOMETHING_ELSE)

    async def _any(self, ask: FlashAsk, deadline_s: float) -> FlashAnswer:
        """Ask the first agent that answers. What another one may be doing meanwhile is the same.

        Raises BusyError when it is being done, and ConnectError when no agent answers.
        """
        agents = sorted(self._membership.map.agents)
        why = "no agent is in the fabric, and only agents reach enclosures: start one"
        for agent in agents:
            try:
                return await self._hands.ask(agent, ask, deadline_s)
            except TimeoutError:
                why = f"nothing was heard of {agent} for {deadline_s:.0f} s"
            except ConnectError as error:
                why = str(error)
            except RefusedError as error:
                if error.code == BUSY:
                    raise BusyError(str(error)) from error
                raise
        raise ConnectError(f"{why}, and ask again")
