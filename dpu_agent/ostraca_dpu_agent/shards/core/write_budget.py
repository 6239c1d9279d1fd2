"""Write budget of a shard: bytes that may be written, bytes written, and admission of blocks."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ostraca_dpu_agent.shards.core.ring.pool_limits import COMMON
from ostraca_fabric.model.outcome import Reason
from ostraca_fabric.policies.endurance import EnduranceSettings, WriteMeter, years_left
from ostraca_fabric.policies.flash_admission import FlashAdmission, GhostFilter
from ostraca_fabric.policies.write_budget import SharedBudget, WriteBudget
from ostraca_fabric.wire.codec import filled


class ShardWriteBudget:
    """Bytes that a shard may write, and has written since its owner began.

    Every write is reported to ``spend``: space reserved by writers, used or not, summary pages, and all other
    writes of the owner. Without a rating in the settings nothing is limited, and no ghost filter exists.
    """

    def __init__(self, settings: EnduranceSettings, size_bytes: int) -> None:
        """Account for *size_bytes* of flash, from ``begin`` on."""
        self._settings = settings
        self._size_bytes = size_bytes
        self._meter = WriteMeter(0.0)
        self._budget: SharedBudget | None = None
        self._shares: Mapping[int, float] = {}
        self._admission: FlashAdmission | None = None
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
            self._admission = FlashAdmission(
                self._budget,
                GhostFilter(settings.ghost_bytes, retry_s=settings.retry_s),
                first_touch_reserve=settings.first_touch_reserve,
                half_way_blocks=settings.half_way_blocks,
            )

    def share_out(self, shares: Mapping[int, float]) -> None:
        """Reserve a part of the budget for each of these pools, 0 to 1 in total."""
        self._shares = dict(shares)
        if self._budget is not None:
            self._budget.share_out(shares, self._now_s)

    def advance(self, now_s: float) -> None:
        """Set the time, about once a second."""
        self._now_s = now_s
        self._meter.advance(now_s)

    def spend(self, written_bytes: int, pool: int = COMMON) -> None:
        """Count a write for a pool, at any level of the budget."""
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
        """Return a Reason for each block of a pool, as ``FlashAdmission.decide``."""
        if self._admission is None or self._budget is None:
            return filled(len(keys), Reason.NONE)
        return self._admission.decide(now_s, keys, stored_bytes, depths, budget=self._budget.part_of(pool))

    @property
    def level_bytes(self) -> float:
        """Bytes that may be written now: below zero after overspending, infinite without a budget.

        Optional writes check the level first.
        """
        return math.inf if self._budget is None else self._budget.level_at(self._now_s)

    def level_of(self, pool: int) -> float:
        """Return the bytes that may be written for a pool now; infinite without a budget."""
        return math.inf if self._budget is None else self._budget.part_of(pool).level_at(self._now_s)

    @property
    def written_bytes(self) -> int:
        """Bytes written since the owner began."""
        return self._meter.bytes

    @property
    def bytes_per_day(self) -> float:
        """Write rate over the last day."""
        return self._meter.bytes_per_day

    @property
    def budget_bytes_per_day(self) -> float:
        """Rate of the budget; 0 without a budget."""
        return self._settings.budget_bytes_per_day(self._size_bytes)

    @property
    def years_left(self) -> float | None:
        """Remaining life of the flash at this rate; None without a rating."""
        if not self._settings.has_budget:
            return None
        rated_bytes = self._settings.rated_bytes(self._size_bytes)
        return years_left(rated_bytes, self.written_bytes, self.bytes_per_day)
