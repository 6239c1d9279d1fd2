"""How far an agent has come between its start and its end, and what it says of itself before it is made.

Whoever runs an agent has a status to tell from the first moment to the last: that a daemon waits for the
membership store is said before there is a map to make the agent with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ostraca_dpu_agent.conditions import Phase, observe
from ostraca_fabric.conditions import Conditions
from ostraca_fabric.status import AgentCounters, AgentStatus, MembershipStatus
from ostraca_fabric.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable

    from ostraca_dpu_agent.settings import AgentSettings
    from ostraca_fabric.ids import AgentId


class Life:
    """One agent's."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Begin now; *clock* is monotonic, in seconds."""
        self.phase = Phase.STARTING
        self.doing = ""
        """What it does or waits for in its phase, as a sentence; empty where there is nothing to add."""

        self._store_trouble = ""
        self._silent_since_s = 0.0
        self._clock = clock
        self._began_s = clock()
        self._conditions = Conditions()

    @property
    def sentence(self) -> str:
        """The phase, and what is done in it."""
        return f"{self.phase.value} {self.doing}".rstrip()

    @property
    def uptime_s(self) -> float:
        """For how long it has been going on."""
        return self._clock() - self._began_s

    def wait_for_store(self, trouble: str, *, asked_s: float) -> None:
        """Note that the membership store does not answer what it was first asked at *asked_s*, without which
        the agent can't go on; or that it has, where *trouble* is empty.
        """
        self._store_trouble, self._silent_since_s = trouble, asked_s

    def judged(self, status: AgentStatus) -> AgentStatus:
        """Return a status with the conditions that it shows the agent to be in."""
        if self._store_trouble:
            silent_s = self._clock() - self._silent_since_s
            membership = msgspec.structs.replace(
                status.membership, silent_s=silent_s, trouble=self._store_trouble
            )
            status = msgspec.structs.replace(status, membership=membership)
        observed = observe(status, self.phase, self.doing)
        return msgspec.structs.replace(status, conditions=self._conditions.after(self._clock(), observed))

    def unmade(self, agent: AgentId, settings: AgentSettings) -> AgentStatus:
        """Return the status of an agent that is not made yet: it has nothing."""
        return self.judged(
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
