"""What is lost when an enclosure dies in the middle of a trace.

Told twice. *At once*: of the hits of the trace's second half, those that need a block of one enclosure, for
each enclosure that may die, as if nothing that is lost were ever put again. *In the end*: one enclosure dies
half-way, and the trace goes on without it; what it held is put again, elsewhere, when somebody asks for it.

One shard stands for all enclosures: placement says what of it lies where. So no enclosure fills up before
another; how uneven placement would fill them is told beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ostraca.cli.replay.homes import Homes, homes_of
from ostraca.cli.replay.plan import Plan
from ostraca.cli.replay.shard_store import ShardPlan, ShardStore
from ostraca.cli.replay.suite import OnProgress, keys_of
from ostraca.cli.replay.trace import Trace
from ostraca_dpu_agent.settings import OwnerSettings

_SAY_EVERY = 128


@dataclass(frozen=True, slots=True)
class Share:
    """Of hits lost."""

    prefix: float
    """By readers who stop at the first hole."""

    tolerant: float
    """By readers who use what is behind it."""


@dataclass(frozen=True, slots=True)
class Loss:
    """What dies with one of several enclosures, for one size of stripe units."""

    enclosures: int
    unit_blocks: int
    capacity_blocks: int
    load_max_over_mean: float
    """Blocks found in, or put to, the enclosure with most of them, against the mean."""

    at_once_mean: Share
    """Over all enclosures that may die."""

    at_once_worst: Share
    in_the_end: Share
    """When that one dies whose loss at once is the middle one of all."""


@dataclass(slots=True, eq=False)
class _Lost:
    """By enclosure, what is lost of the second half's hits when it dies."""

    hits: NDArray[np.int64]
    prefix_hits: NDArray[np.int64]
    load: NDArray[np.int64]

    def count(self, found: NDArray[np.bool_], homes: NDArray[np.intp], prefix: int) -> None:
        """Count one request."""
        enclosures = len(self.hits)
        self.load += np.bincount(homes, minlength=enclosures)
        self.hits += np.bincount(homes[found], minlength=enclosures)
        needed, first = np.unique(homes[:prefix], return_index=True)
        self.prefix_hits[needed] += prefix - first


@dataclass(slots=True)
class _Half:
    """What is found in the second half of a trace."""

    hits: int = 0
    prefix_hits: int = 0


def losses(trace: Trace, plan: Plan, on_progress: OnProgress) -> Iterator[Loss]:
    """Tell for each size of stripe units, at the largest capacity, replaying the trace once more for each.

    Raises UsageError where the capacity is too small.
    """
    shard = ShardPlan.planned(
        capacity_blocks=max(capacity.blocks(trace, plan.block_bytes) for capacity in plan.capacities),
        block_bytes=plan.block_bytes,
        blocks_per_segment=plan.blocks_per_segment,
    )
    hashes = keys_of(trace, plan.seed)
    everybody = range(plan.enclosures)
    placed = [homes_of(hashes, everybody, unit_blocks=unit, seed=plan.seed) for unit in plan.stripe_units]
    lost = [_Lost(*np.zeros((3, plan.enclosures), np.int64)) for _ in placed]

    def count(chain: NDArray[np.int64], found: NDArray[np.bool_], prefix: int) -> None:
        for homes, counted in zip(placed, lost, strict=True):
            counted.count(found, homes.of(chain), prefix)

    title = f"loss of 1 of {plan.enclosures} enclosures"
    whole = _second_half(
        trace, ShardStore(shard, hashes, OwnerSettings()), count, partial(on_progress, title)
    )
    hits, prefix_hits = max(1, whole.hits), max(1, whole.prefix_hits)
    for homes, counted in zip(placed, lost, strict=True):
        victim = int(np.argsort(counted.prefix_hits, kind="stable")[plan.enclosures // 2])
        title = f"death of an enclosure, stripe units of {homes.unit_blocks}"
        after = _after_death(trace, shard, hashes, homes, victim, partial(on_progress, title))
        yield Loss(
            enclosures=plan.enclosures,
            unit_blocks=homes.unit_blocks,
            capacity_blocks=shard.capacity_blocks,
            load_max_over_mean=float(counted.load.max() / max(1.0, counted.load.mean())),
            at_once_mean=Share(counted.prefix_hits.mean() / prefix_hits, counted.hits.mean() / hits),
            at_once_worst=Share(counted.prefix_hits.max() / prefix_hits, counted.hits.max() / hits),
            in_the_end=Share(1 - after.prefix_hits / prefix_hits, 1 - after.hits / hits),
        )


def _after_death(
    trace: Trace,
    shard: ShardPlan,
    hashes: NDArray[np.uint8],
    homes: Homes,
    victim: int,
    on_progress: Callable[[float], None],
) -> _Half:
    """Replay a trace in which one enclosure dies half-way."""
    keys = hashes.copy()
    store = ShardStore(shard, keys, OwnerSettings())
    anew = np.random.default_rng(victim).integers(0, 256, hashes.shape, np.uint8)
    is_forgotten = np.zeros(len(hashes), np.bool_)

    def forget(chain: NDArray[np.int64]) -> None:
        # What was on the dead enclosure is never found again under its key; under another it is put anew.
        dead = chain[homes.of(chain) == victim]
        dead = dead[~is_forgotten[dead]]
        keys[dead], is_forgotten[dead] = anew[dead], True

    return _second_half(trace, store, lambda _chain, _found, _prefix: None, on_progress, forget)


def _second_half(
    trace: Trace,
    store: ShardStore,
    count: Callable[[NDArray[np.int64], NDArray[np.bool_], int], None],
    on_progress: Callable[[float], None],
    before: Callable[[NDArray[np.int64]], None] = lambda _chain: None,
) -> _Half:
    """Replay a trace, and count from its middle on; *before* each request of that half is called."""
    half = _Half()
    for request, now_s in enumerate(trace.times_s.tolist()):
        if request % _SAY_EVERY == 0:
            on_progress(request / len(trace))
        chain = trace.chain(request)
        if now_s < trace.span_s / 2:
            store.request(now_s, chain)
            continue
        before(chain)
        found = store.request(now_s, chain)
        prefix = len(found) if found.all() else int(found.argmin())
        half.hits += int(found.sum())
        half.prefix_hits += prefix
        count(chain, found, prefix)
    on_progress(1.0)
    return half
