"""Mistakes made on purpose, for ``make mutants``: around blocks that lie in rows of a worker's own memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tests.simulation.fabric.world import regions
from tests.simulation.mutants.mistakes import _change

from ostraca._memory.inline_arena import InlineArenaEnd, RequestRows
from ostraca._memory.row_writes import RowWrites
from ostraca._protocol.ledger import Ledger
from ostraca_dpu_agent.adapters.transports.submitted_stream import SubmittedStream
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


def rows_are_free_at_the_end_of_their_get() -> None:
    _change(Ledger, "when_settled", lambda _self, _request, _act: False)


def rows_of_an_answered_get_are_free() -> None:
    def answered(self: Ledger, request: int, offsets: NDArray[np.int64]) -> NDArray[np.bool_]:
        entry = self._entries.get(request)
        return np.full(len(offsets), entry is None or entry.is_answered)

    _change(Ledger, "are_settled", answered)


def an_answer_names_no_moving_blocks() -> None:
    stop = SubmittedStream.stop

    def nothing_left(self: SubmittedStream) -> NDArray[np.intp]:
        return stop(self)[:0]

    _change(SubmittedStream, "stop", nothing_left)


def withheld_rows_never_come_back() -> None:
    end = RowWrites.end

    def never(self: RowWrites, _: Callable[[int, Callable[[], None]], None]) -> Any:
        return end(self, lambda _request, _act: None)

    _change(RowWrites, "end", never)
