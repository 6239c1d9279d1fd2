"""Loss of hits by the failure of an enclosure in the middle of a trace.

The loss has two measures. The *immediate* loss counts the hits in the second half of the trace that need the
failed enclosure, for each possible enclosure. This measure never puts lost blocks again. The *final* loss is
the loss in a replay with a failure half-way: lost blocks are put again, in other enclosures, at their next
use.

A single shard represents all enclosures, with each block assigned to an enclosure by placement. No enclosure
fills up before another; a separate figure shows the imbalance of placement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ostraca_cli.tools.replay.plan import ReplayPlan
from ostraca_cli.tools.replay.shard_store import ShardPlan, ShardStore
from ostraca_cli.tools.replay.suite import HitCounts, OnProgress, ReplayAnswer, keys_of, replay
from ostraca_cli.tools.replay.trace import Trace
from ostraca_dpu_agent.settings import OwnerSettings
from ostraca_fabric.model.chain import Span
from ostraca_fabric.model.fabric_map import EnclosureRecord, ShardRecord
from ostraca_fabric.model.ids import DriveId, EnclosureId, PlacementEpoch, ShardId
from ostraca_fabric.policies.placement import Placement
from ostraca_fabric.tables.digests import KEY_BYTES, SECRET_BYTES


@dataclass(frozen=True, slots=True)
class LostShare:
    """Share of hits lost."""

    prefix: float
    """For readers of the unbroken prefix."""

    tolerant: float
    """For readers of all blocks, also behind a hole."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Loss by the failure of an enclosure, for a size of stripe units."""

    enclosures: int
    unit_blocks: int
    capacity_blocks: int
    load_max_over_mean: float
    """Blocks found in, or put to, the fullest enclosure, over the mean."""

    immediate_mean: LostShare
    """Mean over all enclosures."""

    immediate_worst: LostShare
    final: LostShare
    """Failure of the enclosure with the median loss at once."""


@dataclass(frozen=True, slots=True, eq=False)
class EnclosureMap:
    """Enclosure of a stripe unit, for every possible first block.

    A stripe unit is a number of consecutive blocks of a prompt, counted from its beginning. The hash of the
    first block places the whole unit, by the fabric's own code.
    """

    of_first_block: NDArray[np.intp]
    unit_blocks: int

    def of(self, chain: NDArray[np.int64]) -> NDArray[np.intp]:
        """Return the enclosure of each block of a prompt."""
        places = np.arange(len(chain))
        homes: NDArray[np.intp] = self.of_first_block[chain[places - places % self.unit_blocks]]
        return homes


def place_blocks(
    hashes: NDArray[np.uint8], enclosures: Sequence[int], *, unit_blocks: int, seed: int
) -> EnclosureMap:
    """Place blocks among enclosures of equal size; *hashes* has the shape (blocks, 16)."""
    records = [
        EnclosureRecord(
            EnclosureId(f"enclosure-{number}"),
            (),
            (ShardRecord(ShardId(f"enclosure-{number}/0/0"), DriveId(f"enclosure-{number}/0"), 0, 1, 1),),
        )
        for number in enclosures
    ]
    placement = Placement.among(PlacementEpoch(1), records)
    secret = np.random.default_rng(seed).bytes(SECRET_BYTES)
    raw = hashes.tobytes()
    found = placement.shards(secret, [Span(raw, KEY_BYTES, raw, (1,) * len(hashes), 0, 0)])
    number_of = np.array([int(shard.split("/")[0].split("-")[1]) for shard in placement.shard_ids], np.intp)
    return EnclosureMap(number_of[found], unit_blocks)


def losses(trace: Trace, plan: ReplayPlan, on_progress: OnProgress) -> Iterator[Loss]:
    """Yield the loss for each size of stripe units, at the largest capacity.

    Replays the trace once, and once more for each size. Raises UsageError if the capacity is too small.
    """
    shard = ShardPlan.for_capacity(
        capacity_blocks=max(capacity.blocks(trace, plan.block_bytes) for capacity in plan.capacities),
        block_bytes=plan.block_bytes,
        blocks_per_segment=plan.blocks_per_segment,
    )
    hashes = keys_of(trace, plan.seed)
    everybody = range(plan.enclosures)
    placed = [place_blocks(hashes, everybody, unit_blocks=unit, seed=plan.seed) for unit in plan.stripe_units]
    lost = [_Lost(*np.zeros((3, plan.enclosures), np.int64)) for _ in placed]

    title, whole = f"loss of 1 of {plan.enclosures} enclosures", HitCounts()
    store = ShardStore(shard, hashes, OwnerSettings())
    for answer in _second_half(trace, store, partial(on_progress, title)):
        whole.add(answer)
        for homes, counted in zip(placed, lost, strict=True):
            counted.add(answer, homes.of(answer.chain))
    hits, prefix_hits = max(1, whole.hits), max(1, whole.prefix_hits)
    for homes, counted in zip(placed, lost, strict=True):
        victim = int(np.argsort(counted.prefix_hits, kind="stable")[plan.enclosures // 2])
        title, after = f"failure of an enclosure, stripe units of {homes.unit_blocks}", HitCounts()
        failing = _FailingStore(shard, hashes, homes, victim, fails_at_s=trace.span_s / 2)
        for answer in _second_half(trace, failing, partial(on_progress, title)):
            after.add(answer)
        yield Loss(
            enclosures=plan.enclosures,
            unit_blocks=homes.unit_blocks,
            capacity_blocks=shard.capacity_blocks,
            load_max_over_mean=float(counted.load.max() / max(1.0, counted.load.mean())),
            immediate_mean=LostShare(counted.prefix_hits.mean() / prefix_hits, counted.hits.mean() / hits),
            immediate_worst=LostShare(counted.prefix_hits.max() / prefix_hits, counted.hits.max() / hits),
            final=LostShare(1 - after.prefix_hits / prefix_hits, 1 - after.hits / hits),
        )


@dataclass(slots=True, eq=False)
class _Lost:
    """Hits of the second half that depend on each enclosure."""

    hits: NDArray[np.int64]
    prefix_hits: NDArray[np.int64]
    load: NDArray[np.int64]

    def add(self, answer: ReplayAnswer, homes: NDArray[np.intp]) -> None:
        """Count a request."""
        enclosures = len(self.hits)
        self.load += np.bincount(homes, minlength=enclosures)
        self.hits += np.bincount(homes[answer.found], minlength=enclosures)
        needed, first = np.unique(homes[: answer.prefix], return_index=True)
        self.prefix_hits[needed] += answer.prefix - first


def _second_half(
    trace: Trace, store: ShardStore, on_progress: Callable[[float], None]
) -> Iterator[ReplayAnswer]:
    """Replay a trace and yield the results of its second half."""
    return (answer for answer in replay(trace, store, on_progress) if answer.now_s >= trace.span_s / 2)


class _FailingStore(ShardStore):
    """Store that loses the blocks of an enclosure at a time."""

    def __init__(
        self,
        plan: ShardPlan,
        keys: NDArray[np.uint8],
        homes: EnclosureMap,
        victim: int,
        *,
        fails_at_s: float,
    ) -> None:
        """Lose the enclosure *victim* at *fails_at_s* of the trace."""
        self._live_keys = keys.copy()
        super().__init__(plan, self._live_keys, OwnerSettings())
        self._new_keys = np.random.default_rng(victim).integers(0, 256, keys.shape, np.uint8)
        self._is_lost = np.zeros(len(keys), np.bool_)
        self._homes, self._victim, self._fails_at_s = homes, victim, fails_at_s

    def request(self, now_s: float, chain: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Serve a request as ``ShardStore`` does, without the lost blocks."""
        if now_s >= self._fails_at_s:
            # A new key hides a lost block; the next put stores the block under the new key.
            lost = chain[self._homes.of(chain) == self._victim]
            lost = lost[~self._is_lost[lost]]
            self._live_keys[lost], self._is_lost[lost] = self._new_keys[lost], True
        return super().request(now_s, chain)
