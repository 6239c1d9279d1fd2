"""Reads and writes that a wave has begun, until each has ended or its drive is given up.

Whoever waits for a drive that has fallen silent would wait as long as the drive does. So a wave goes on
without what was given up; its memory stays leased until that has ended too.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(slots=True, eq=False)
class Begun:
    """One read or write."""

    rows: NDArray[np.intp]
    """Which blocks of the wave it moves."""

    ends: asyncio.Future[NDArray[np.bool_]]
    given_up: asyncio.Future[None] | None
    """As the drive said when it began."""

    is_given_up: bool = False
    """Whether the wave has gone on without it. It is still under way then, or was."""

    async def ended_or_given_up(self) -> None:
        """Wait until it has ended, or its drive has given it up."""
        if self.given_up is None:
            await asyncio.wait((self.ends,))
        else:
            await asyncio.wait((self.ends, self.given_up), return_when=asyncio.FIRST_COMPLETED)
            self.is_given_up = not self.ends.done()


@dataclass(frozen=True, slots=True)
class WaveIO:
    """What one wave has begun. Wait for ``ended_or_given_up``, or if something is raised for ``ended``."""

    begun: list[Begun] = field(default_factory=list)

    def add(
        self,
        rows: NDArray[np.intp],
        ends: asyncio.Future[NDArray[np.bool_]],
        given_up: asyncio.Future[None] | None,
    ) -> Begun:
        """Add what was submitted to a drive just now; *given_up*: when it gives up what is of that kind."""
        self.begun.append(Begun(rows, ends, given_up))
        return self.begun[-1]

    @property
    def given_up(self) -> list[Begun]:
        """What the wave goes on without."""
        return [each for each in self.begun if each.is_given_up]

    async def ended_or_given_up(self) -> None:
        """Wait for each until it has ended, or its drive has given it up."""
        for each in self.begun:
            await each.ended_or_given_up()

    async def ended(self) -> None:
        """Wait until all of it has ended: from then on nothing touches its memory."""
        if self.begun:
            await asyncio.wait([each.ends for each in self.begun])
