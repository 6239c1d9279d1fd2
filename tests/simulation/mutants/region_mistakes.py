"""Mistakes made on purpose, for ``make mutants``: around blocks that lie in rows of a worker's own memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from tests.simulation.fabric.world import regions
from tests.simulation.mutants.mistakes import _change

from ostraca._memory.inline_arena import InlineArenaEnd, RequestRows
from ostraca_fabric.sockets.stream import Outbox
from ostraca_fabric.wire.frames import FrameReader


def a_frame_lands_in_rows_to_its_end() -> None:
    """Let nothing be noticed but the bytes."""
    _change(FrameReader, "divert", lambda _self, _memory: None)
    _change(regions.LentRows, "check_unused", lambda _self: None)


def rows_are_read_until_they_are_sent() -> None:
    _change(Outbox, "blank", lambda _self, _memory: None)


def slots_name_rows_for_good() -> None:
    unbind = InlineArenaEnd.unbind

    def forgetful(self: InlineArenaEnd, request: int) -> RequestRows | None:
        names: NDArray[np.int64] = self._request_of.copy()
        rows = unbind(self, request)
        self._request_of[:] = names
        return rows

    _change(InlineArenaEnd, "unbind", forgetful)


def rows_take_blocks_in_any_order() -> None:
    bind = InlineArenaEnd.bind

    def mixed_up(self: InlineArenaEnd, request: int, slots: NDArray[np.int64], rows: Any) -> None:
        bind(self, request, slots[::-1], rows)

    _change(InlineArenaEnd, "bind", mixed_up)
