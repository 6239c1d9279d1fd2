"""Which incarnation of each volume this agent serves.

Erasing a volume raises its incarnation, and with it come another secret and other keys: nothing that was put
before is found again. An agent learns of it as it learns of every ruling, and then serves the next
incarnation, to connections that have the volume open, too. What was begun under the one before may end; the
agent has *purged* an erasure when that is over.

An agent that does not hear of the store may have missed an erasure. So it goes on serving erasable volumes
only for ``key_ttl_s`` after it asked the store last and was answered, and was told all that was erased by
then. It counts from before it asked, on its own clock.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING

from ostraca_dpu_agent.counted import Counted
from ostraca_fabric.errors import MembershipError, StoreAwayError, WrongStoreError
from ostraca_fabric.spells import Spell

if TYPE_CHECKING:
    from collections.abc import Callable

    from ostraca_fabric.ids import TenantId
    from ostraca_fabric.ports.membership import Membership
    from ostraca_fabric.volume import VolumeRecord

    _Incarnation = tuple[TenantId, str, int]

log = logging.getLogger(__name__)

_ASKED_PER_TTL = 4
"""So that a store that fails to answer a few times in a row stops nothing."""

_ASKED_EVERY_MAX_S = 60.0
_AGAIN_S = 1.0


class Incarnations:
    """The newest record of each volume that this agent has heard of. ``run`` it beside the steward."""

    def __init__(
        self,
        membership: Membership,
        clock: Callable[[], float],
        on_ruled: Callable[[], None] = lambda: None,
    ) -> None:
        """Have heard nothing yet; *clock* is monotonic, in seconds. *on_ruled* is called when something may
        have been ruled.
        """
        self._on_ruled = on_ruled
        self._membership = membership
        self._clock = clock
        self._newest: dict[tuple[TenantId, str], VolumeRecord] = {}
        self._in_use: Counter[_Incarnation] = Counter()
        self._heard_s = -math.inf
        self._ruled = asyncio.Event()
        self._revision = 0
        self._purged = 0
        self._unsaid = Spell(log, clock)

    async def run(self) -> None:
        """Follow what is erased, and ask, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow())
            group.create_task(self._ask())

    async def hear(self) -> None:
        """Ask the store what was erased. Raises MembershipError."""
        asked_s = self._clock()
        await self._membership.hear_rulings()
        await self._take()
        self._heard_s = max(self._heard_s, asked_s)

    def newest(self, record: VolumeRecord) -> VolumeRecord:
        """Return a volume's newest record, where *record* is an earlier one; else that itself."""
        known = self._newest.get((record.tenant, record.name), record)
        return known if known.incarnation > record.incarnation else record

    def is_served(self, record: VolumeRecord) -> bool:
        """Whether a volume's blocks may be handed out now: it can't have been erased for long."""
        key_ttl_s = self._membership.rulings.live.key_ttl_s
        return not record.is_erasable or self._clock() <= self._heard_s + key_ttl_s

    def using(self, record: VolumeRecord) -> Counted[_Incarnation]:
        """Count a request that works on this incarnation, as long as it does."""
        return Counted(self._in_use, (record.tenant, record.name, record.incarnation))

    @property
    def purged(self) -> int:
        """The revision of rulings up to which nothing that was erased is served here any more."""
        newest = self._newest
        if all(
            (tenant, name) not in newest or newest[tenant, name].incarnation <= incarnation
            for tenant, name, incarnation in self._in_use
        ):
            self._purged = self._revision
        return self._purged

    async def _follow(self) -> None:
        while True:
            try:
                async with aclosing(self._membership.ruling_changes()) as changes:  # type: ignore[type-var]  # a generator
                    async for _ in changes:
                        await self._take()
                        self._ruled.set()
                        self._on_ruled()
            except MembershipError as error:
                log.warning("What is erased can't be followed now: %s", error)
            await asyncio.sleep(_AGAIN_S)

    async def _ask(self) -> None:
        while True:
            self._ruled.clear()
            key_ttl_s = self._membership.rulings.live.key_ttl_s
            wait_s = min(key_ttl_s / _ASKED_PER_TTL, _ASKED_EVERY_MAX_S)
            try:
                await self.hear()
            except (StoreAwayError, WrongStoreError) as error:  # ``Standing`` says it
                log.debug("The store does not say what was erased: %s", error)
                wait_s = min(wait_s, _AGAIN_S)
            except MembershipError as error:
                self._unsaid.goes_on("The store does not say what was erased: %s", error)
                wait_s = min(wait_s, _AGAIN_S)
            else:
                self._unsaid.over("The store says again what was erased")
            with suppress(TimeoutError):  # how often it is asked may have changed
                async with asyncio.timeout(wait_s):
                    await self._ruled.wait()

    async def _take(self) -> None:
        revision = self._membership.rulings.revision  # the volumes below are as new, or newer
        async with aclosing(self._membership.volume_changes()) as volumes:  # type: ignore[type-var]  # a generator
            async for records in volumes:
                self._newest = {(record.tenant, record.name): record for record in records}
                break
        self._revision = max(self._revision, revision)
