"""Which blocks a shard takes, and what it has spent of its flash's life."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from ostraca_dpu_agent.owner.core.evicting import room_of
from ostraca_dpu_agent.owner.core.shares import COMMON
from ostraca_fabric.chain import DEPTH_UNKNOWN
from ostraca_fabric.outcome import PutState, Reason
from ostraca_fabric.policies.admission import Admission
from ostraca_fabric.policies.endurance import EnduranceSettings, WriteMeter, years_left
from ostraca_fabric.policies.ghost_filter import GhostFilter
from ostraca_fabric.policies.shared_budget import SharedBudget
from ostraca_fabric.policies.write_budget import WriteBudget

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from ostraca_dpu_agent.owner.core.pools import Pool
    from ostraca_dpu_agent.owner.core.shard import ShardCore


class Spending:
    """What a shard may write, and has written since its owner began.

    Everything written is told to ``spend``: space handed out to writers (whether or not they use it), summary
    pages, and whatever else its owner writes. With no rating in the settings nothing is limited, and the
    ghost filter's memory is not taken.
    """

    def __init__(self, settings: EnduranceSettings, size_bytes: int) -> None:
        """Account for so many bytes of flash, from ``begin`` on."""
        self._settings = settings
        self._size_bytes = size_bytes
        self._meter = WriteMeter(0.0)
        self._budget: SharedBudget | None = None
        self._shares: Mapping[int, float] = {}
        self._admission: Admission | None = None
        self._now_s = 0.0

    def begin(self, now_s: float) -> None:
        """Begin to count."""
        self._now_s = now_s
        self._meter = WriteMeter(now_s)
        settings = self._settings
        if settings.has_budget:
            whole = WriteBudget.of_shard(settings, size_bytes=self._size_bytes, now_s=now_s)
            self._budget = SharedBudget(whole, now_s)
            self._budget.share_out(self._shares, now_s)
            self._admission = Admission(
                self._budget,
                GhostFilter(settings.ghost_bytes, retry_s=settings.retry_s),
                first_touch_reserve=settings.first_touch_reserve,
                half_way_blocks=settings.half_way_blocks,
            )

    def share_out(self, shares: Mapping[int, float]) -> None:
        """Give each of these pools a part of the budget for itself, 0 to 1 in all."""
        self._shares = dict(shares)
        if self._budget is not None:
            self._budget.share_out(shares, self._now_s)

    def advance(self, now_s: float) -> None:
        """Say what time it is, about once a second."""
        self._now_s = now_s
        self._meter.advance(now_s)

    def spend(self, written_bytes: int, pool: int = COMMON) -> None:
        """Count a write for a pool, whether or not the budget allows it."""
        self._meter.add(written_bytes)
        if self._budget is not None:
            self._budget.spend(written_bytes, pool)

    def decide(
        self,
        now_s: float,
        keys: NDArray[np.uint8],
        stored_bytes: NDArray[np.int64],
        depths: NDArray[np.uint32],
        *,
        pool: int = COMMON,
    ) -> NDArray[np.uint8]:
        """Return a Reason for each block of a pool, as ``Admission.decide``."""
        if self._admission is None or self._budget is None:
            return np.full(len(keys), Reason.NONE, np.uint8)
        part = self._budget.part_of(pool)
        return self._admission.decide(now_s, keys, stored_bytes, depths, budget=part)

    @property
    def level_bytes(self) -> float:
        """What may be written now, below zero when too much was; infinite without a budget.

        Who writes because it is useful, and not because somebody waits, looks here first.
        """
        return math.inf if self._budget is None else self._budget.level_at(self._now_s)

    def level_of(self, pool: int) -> float:
        """Return what may be written now for a pool; infinite without a budget."""
        return math.inf if self._budget is None else self._budget.part_of(pool).level_at(self._now_s)

    @property
    def written_bytes(self) -> int:
        """What was written since the owner began."""
        return self._meter.bytes

    @property
    def bytes_per_day(self) -> float:
        """How fast, over the last day."""
        return self._meter.bytes_per_day

    @property
    def budget_bytes_per_day(self) -> float:
        """How fast it may be written; 0 where nothing limits it."""
        return self._settings.budget_bytes_per_day(self._size_bytes)

    @property
    def years_left(self) -> float | None:
        """How long the flash lasts at this rate; None where its rating is not known."""
        if not self._settings.has_budget:
            return None
        rated_bytes = self._settings.rated_bytes(self._size_bytes)
        return years_left(rated_bytes, self.written_bytes, self.bytes_per_day)


def admitted(
    core: ShardCore,
    now_s: float,
    keys: NDArray[np.uint8],
    sizes: NDArray[np.int64],
    depths: NDArray[np.uint32] | None,
    states: NDArray[np.uint8],
    reasons: NDArray[np.uint8],
    *,
    pool: Pool,
) -> NDArray[np.intp]:
    """Return which blocks of a pool are to have space, as far as there is any; answer for the others.

    What is there, or under way, costs nothing and is said first; then what is not worth writing; then what
    has no room. *sizes*: on flash, in bytes. *states*, DECLINED so far, and *reasons*, all NONE, are filled
    in.
    """
    is_bad = (sizes == 0) | (sizes > core.geometry.data_bytes)
    reasons[is_bad] = Reason.BAD_LENGTH
    exists = core.index.find(keys) >= 0
    states[exists], reasons[exists] = PutState.EXISTS, Reason.NONE
    wanted = np.flatnonzero(~is_bad & ~exists)
    closed = _closed(core, now_s)
    if closed is not Reason.NONE:
        reasons[wanted] = closed
        return wanted[:0]
    wanted = core.reservations.not_in_flight(keys, wanted, reasons)
    if depths is None:
        depths = np.full(len(keys), DEPTH_UNKNOWN, np.uint32)
    reasons[wanted] = core.spending.decide(
        now_s, keys[wanted], sizes[wanted], depths[wanted], pool=pool.number
    )
    wanted = wanted[reasons[wanted] == Reason.NONE]
    reasons[wanted[core.reservations.room :]] = Reason.OVERLOADED
    wanted = wanted[: core.reservations.room]
    if len(wanted):
        core.eviction.ask(now_s, pool)
    room = room_of(core, pool)
    reasons[wanted[room:]] = Reason.INDEX_FULL
    within: NDArray[np.intp] = wanted[:room]
    return within


def _closed(core: ShardCore, now_s: float) -> Reason:
    """Return why the shard takes nothing now; NONE where it does."""
    if not core.is_writable:
        return Reason.DRIVE_ERROR
    if core.is_recovering:
        return Reason.RECOVERING
    return Reason.NONE if core.grants.may_write(now_s) else Reason.FENCED
