"""The owner's decisions about one shard."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from ostraca_dpu_agent.owner.core.answers import (
        CommitAnswer,
        CommitsDone,
        Reservations,
        Resolution,
        ShardCounts,
        SummaryWrite,
    )
    from ostraca_dpu_agent.owner.core.settings import ShardSettings
    from ostraca_fabric.flash.recovery import RecoveredShard
    from ostraca_fabric.flash.superblock import Superblock
    from ostraca_fabric.ids import OwnerEpoch


class ShardCore:
    """One shard under one owner epoch.

    After every call that takes the time, look at ``has_writes_due``; take the writes with ``writes_due``, do
    the I/O, and report each with ``written``. One call at a time; nothing here blocks.
    """

    def __init__(
        self,
        superblock: Superblock,
        recovered: RecoveredShard,
        *,
        epoch: OwnerEpoch,
        settings: ShardSettings,
        now_s: float,
    ) -> None:
        """Own the shard that ``flash.recovery.recover(superblock, summary_areas)`` found.

        Raises UsageError when *epoch* is below ``recovered.highest_epoch``: claim with ``epoch_at_least``
        above that. The first summary writes are due at once; space is handed out when they are written.
        """
        raise NotImplementedError

    def resolve(self, now_s: float, keys: NDArray[np.uint8], *, pin_s: float) -> Resolution:
        """Find blocks and keep their segments from being reused for *pin_s* (at most ``pin_max_s``; 0 pins
        nothing).

        *keys*: shape (n, 16). Counts as a read of every block found.
        """
        raise NotImplementedError

    def reserve(
        self, now_s: float, keys: NDArray[np.uint8], lengths: NDArray[np.uint32], *, hold_s: float
    ) -> Reservations:
        """Hand out space, in the order asked and adjacent where one segment holds it, for *hold_s* at most.

        The holder writes within the reservation, then commits or releases it.
        """
        raise NotImplementedError

    def commit(
        self, now_s: float, reservations: NDArray[np.uint64], tags: NDArray[np.uint8], *, epoch: OwnerEpoch
    ) -> CommitAnswer:
        """Take blocks whose bytes are on flash into the next summary write. *tags*: shape (n, 16)."""
        raise NotImplementedError

    @property
    def has_writes_due(self) -> bool:
        """Whether ``writes_due`` would return anything."""
        raise NotImplementedError

    def writes_due(self) -> list[SummaryWrite]:
        """Take the summary writes to do now: commits gathered so far, and openings of segments.

        A segment has at most one write under way; what is committed meanwhile waits for the next. Every write
        taken must be reported to ``written``.
        """
        raise NotImplementedError

    def written(self, now_s: float, write: SummaryWrite, *, is_ok: bool) -> CommitsDone:
        """Say how a summary write ended: *is_ok* only when every piece is durable.

        Blocks of a good write are in the index from here on. A failed one declines its blocks, and those
        gathered behind it, and seals the segment.
        """
        raise NotImplementedError

    def release(self, now_s: float, pins: Sequence[int], reservations: NDArray[np.uint64]) -> None:
        """End pins and reservations early; unknown or ended ones are ignored.

        A released reservation's extent is not handed out again in this generation. The holder says with it
        that no write of its own is under way there any more; one that can't tell lets the reservation run out
        instead.
        """
        raise NotImplementedError

    def expire(self, now_s: float) -> None:
        """End what has run out, and evict and open segments ahead of need. Call about once a second at
        least."""
        raise NotImplementedError

    def is_current(self, key: bytes, *, offset: int, generation: int, tag: bytes) -> bool:
        """Say whether this extent is what the index lists for *key*: a damage report of anything else is
        ignored.

        The caller of a current one reads the extent again itself before it calls ``drop``.
        """
        raise NotImplementedError

    def drop(self, key: bytes, *, offset: int, generation: int, tag: bytes) -> bool:
        """Take a damaged block out of the index, if it is still current; say whether it was."""
        raise NotImplementedError

    def counts(self) -> ShardCounts:
        """Return what the shard holds and has done."""
        raise NotImplementedError

    def check(self) -> None:
        """Assert every invariant of this state. For tests: looks at every block."""
        raise NotImplementedError
