"""Copies out of a worker's memory that wait for a test."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from ostraca_dpu_agent.adapters.transports.worker_memory import SETTINGS
from ostraca_fabric.drives.loop_engine import LoopIoEngine
from ostraca_fabric.tables.digests import TAG_BYTES, TagCheck

if TYPE_CHECKING:
    from collections.abc import Callable


class HoldingEngine(LoopIoEngine):
    """Engine that can hold copies before their first block, as a worker's slow memory would."""

    def __init__(self) -> None:
        super().__init__(SETTINGS)
        self.is_held = False
        self.passing: set[bytes] = set()
        """Tags of blocks that begin copies which are not held."""

        self.begun: list[int] = []
        """Blocks of each copy of blocks."""

        self._held: list[Callable[[], bool]] = []

    def hold(self, *, passing: bytes = b"") -> None:
        """Hold later copies, but not of groups that begin with one of the tags *passing*."""
        self.is_held = True
        self.passing = {passing[at : at + TAG_BYTES] for at in range(0, len(passing), TAG_BYTES)}

    def submit(self, *what: Any, **how: Any) -> bool:  # noqa: ANN401 (as ``LoopIoEngine``)
        check = what[3]
        if check is not None:
            assert isinstance(check, TagCheck)
            self.begun.append(len(check.lengths))
        is_held = self.is_held and not (check and check.tags[0].tobytes() in self.passing)
        if not is_held:
            return super().submit(*what, **how)
        self._held.append(partial(super().submit, *what, **how))
        return True

    @property
    def held(self) -> int:
        """Number of copies that wait."""
        return len(self._held)

    def let_go(self) -> None:
        self.is_held = False
        while self._held:
            assert self._held.pop(0)()
