"""Admission: which of the blocks that somebody wants to write are worth the flash's life.

A block that is wanted for the second time has shown that it is used again: it is admitted as long as there is
any budget. A block wanted for the first time is admitted by its *depth*, how many blocks of its chain come
before it, up to a limit that falls with the budget's level. So what is declined when flash is scarce is the
ends of long prompts. Those are what is used again least, and a reader of a prefix loses nothing before them;
of blocks left out at random it would lose all that come after.

The limit is the same for everything decided at once, and much the same on all shards that a chain is spread
over, because placement gives each the same load for its size. A block of no chain, or of unknown depth,
counts as infinitely deep.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from ostraca_fabric.chain import DEPTH_UNKNOWN
from ostraca_fabric.outcome import Reason

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ostraca_fabric.policies.ghost_filter import GhostFilter

__all__ = ["DEPTH_ANY", "DEPTH_UNKNOWN", "Admission"]

DEPTH_ANY = 1 << 32
"""A limit that holds no block back."""

_PLENTY_SHARE = 0.9
"""Part of the burst from which on everything is admitted. Below 1, because a full bucket is no longer full
after the first write."""


class Budget(Protocol):
    """What pays for writes."""

    @property
    def burst_bytes(self) -> float:
        """What can be saved up."""
        ...

    def level_at(self, now_s: float) -> float:
        """Return what may be written now."""
        ...


class Admission:
    """Decides about batches of blocks for one shard."""

    def __init__(
        self,
        budget: Budget,
        ghost: GhostFilter,
        *,
        first_touch_reserve: float,
        half_way_blocks: int,
    ) -> None:
        """Decide by *budget* and *ghost*; the rest is as in ``EnduranceSettings``."""
        self._budget = budget
        self._ghost = ghost
        self._reserve_share = first_touch_reserve
        self._plenty_share = max(_PLENTY_SHARE, (1 + first_touch_reserve) / 2)
        self._half_way_blocks = half_way_blocks

    def decide(
        self,
        now_s: float,
        keys: NDArray[np.uint8],
        stored_bytes: NDArray[np.int64],
        depths: NDArray[np.uint32],
        *,
        budget: Budget | None = None,
    ) -> NDArray[np.uint8]:
        """Return a Reason for each block: NONE where it is admitted, else BUDGET or ADMISSION.

        *keys*, shape (n, 16), all different; *stored_bytes* is what each takes on flash; *budget*: another
        one that pays for them. Nothing is spent here: spend what is then written.
        """
        budget = budget or self._budget
        level_bytes, burst_bytes = budget.level_at(now_s), budget.burst_bytes
        is_second = self._ghost.touch(now_s, keys)
        reasons = np.full(len(keys), Reason.ADMISSION, np.uint8)
        second = np.flatnonzero(is_second)
        is_paid = _before(stored_bytes[second]) < level_bytes
        reasons[second] = np.where(is_paid, Reason.NONE, Reason.BUDGET)
        level_bytes -= float(stored_bytes[second[is_paid]].sum())
        near = np.flatnonzero(~is_second & (depths < self.depth_limit(level_bytes, burst_bytes)))
        near = near[np.argsort(depths[near], kind="stable")]
        is_paid = _before(stored_bytes[near]) < level_bytes - self._reserve_share * burst_bytes
        reasons[near[is_paid]] = Reason.NONE
        return reasons

    def depth_limit(self, level_bytes: float, burst_bytes: float | None = None) -> int:
        """Return how many blocks of a chain, from its root, are admitted when seen for the first time.

        *burst_bytes*: what another budget, whose level this is, saves up.
        """
        burst_bytes = self._budget.burst_bytes if burst_bytes is None else burst_bytes
        reserve_bytes, plenty_bytes = self._reserve_share * burst_bytes, self._plenty_share * burst_bytes
        plenty = (level_bytes - reserve_bytes) / (plenty_bytes - reserve_bytes)
        if plenty <= 0:
            return 0
        if plenty >= 1:
            return DEPTH_ANY
        # Squared, so that the limit passes through all lengths that prompts have while the level moves by a
        # few tenths, whatever number of tokens a block holds.
        return min(DEPTH_ANY, int(self._half_way_blocks * (plenty / (1 - plenty)) ** 2))


def _before(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the sum of those before each."""
    return np.cumsum(sizes) - sizes
