"""Copies out of a worker's memory that wait for a test."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ostraca_dpu_agent.adapters.transports.worker_memory import SETTINGS
from ostraca_fabric.drives.file_drive import LoopIoEngine
from ostraca_fabric.tables.digests import TAG_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from ostraca_fabric.drives.io_engine import IoEnd, IoOperation
    from ostraca_fabric.model.extent import Pieces
    from ostraca_fabric.tables.digests import TagCheck


class HoldingEngine(LoopIoEngine):
    """Engine that can hold copies before their first block, as a worker's slow memory would."""

    def __init__(self) -> None:
        super().__init__(SETTINGS)
        self.begun: list[int] = []
        """Number of blocks of each copy, held ones included."""

        self.ended: list[int] = []
        """The same of copies that have ended."""

        self.detached = 0
        """Workers whose memory is not read any more."""

        self._is_held = False
        self._passing: set[bytes] = set()
        self._held: list[Callable[[], bool]] = []

    def hold(self, *, passing: bytes = b"") -> None:
        """Hold later copies, but not of groups that begin with one of the tags *passing*."""
        self._is_held = True
        self._passing = {passing[at : at + TAG_BYTES] for at in range(0, len(passing), TAG_BYTES)}

    def submit(
        self,
        drive: int,
        operation: IoOperation,
        pieces: Pieces | None,
        check: TagCheck | None,
        end: Callable[[IoEnd], None],
        *,
        states: NDArray[np.uint8] | None = None,
    ) -> bool:
        blocks = 0 if check is None else len(check.lengths)

        def ending(result: IoEnd) -> None:
            end(result)
            self.ended.append(blocks)

        submit = partial(super().submit, drive, operation, pieces, check, ending, states=states)
        self.begun.append(blocks)
        if self._is_held and (check is None or check.tags[0].tobytes() not in self._passing):
            self._held.append(submit)
            return True
        return submit()

    def detach(self, drive: int) -> None:  # type: ignore[override]  # that of the class counts nothing
        self.detached += 1
        super().detach(drive)

    @property
    def held(self) -> int:
        """Number of copies that wait."""
        return len(self._held)

    def let_go(self) -> None:
        """Hold no copy any more, and begin those that waited."""
        self._is_held = False
        while self._held:
            assert self._held.pop(0)()
