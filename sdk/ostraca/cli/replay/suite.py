"""Runs a trace through everything that a plan names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ostraca.cli.replay.outcome import Flash, Outcome
from ostraca.cli.replay.plan import OURS, Budget, Plan
from ostraca.cli.replay.policies.belady import Belady
from ostraca.cli.replay.policies.lru import Lru
from ostraca.cli.replay.policies.policy import Policy
from ostraca.cli.replay.policies.s3_fifo import S3Fifo
from ostraca.cli.replay.policies.sieve import Sieve
from ostraca.cli.replay.run import replay
from ostraca.cli.replay.shard_store import ShardPlan, ShardStore
from ostraca.cli.replay.store import PolicyStore, Store
from ostraca.cli.replay.trace import Trace
from ostraca.cli.replay.variants import Variant, parse_variant
from ostraca_dpu_agent.settings import OwnerSettings
from ostraca_fabric.wire.columns import KEY_BYTES

OnProgress = Callable[[str, float], None]

_BURST_SHARE = 0.1
"""An agent saves up budget for hours. A trace is often no longer than that, and would end before the budget
ever counted."""


@dataclass(frozen=True, slots=True)
class Case:
    """One policy at one capacity."""

    name: str
    shard: ShardPlan
    flash: Flash


def outcomes(trace: Trace, plan: Plan, on_progress: OnProgress) -> Iterator[Outcome]:
    """Replay everything, one after the other. *on_progress* gets what is replayed and the part done.

    Raises UsageError where a capacity is too small.
    """
    variants = (Variant(), *map(parse_variant, plan.variants))
    shards = [shard_of(trace, plan, number) for number in range(len(plan.capacities))]
    keys = keys_of(trace, plan.seed)
    for capacity, shard in zip(plan.capacities, shards, strict=True):
        for policy in plan.policies:
            title = f"{policy} at {capacity.text}"
            case = Case(policy, shard, _flash(plan, shard))
            if policy != OURS:
                made = PolicyStore(_policy(policy, shard.capacity_blocks, trace), plan.block_bytes)
                yield _outcome(trace, case, made, title, on_progress)
                continue
            for variant in variants:
                yield from _ours(trace, plan, replace(case, name=_name(variant)), keys, variant, on_progress)


def shard_of(trace: Trace, plan: Plan, number: int) -> ShardPlan:
    """Return the measures of our shard at one of the plan's capacities."""
    return ShardPlan.planned(
        capacity_blocks=plan.capacities[number].blocks(trace, plan.block_bytes),
        block_bytes=plan.block_bytes,
        blocks_per_segment=plan.blocks_per_segment,
    )


def keys_of(trace: Trace, seed: int) -> NDArray[np.uint8]:
    """Return a key for each unique block: random bytes, as keyed hashes are."""
    return np.random.default_rng(seed).integers(0, 256, (trace.unique_blocks, KEY_BYTES), np.uint8)


def _ours(
    trace: Trace,
    plan: Plan,
    case: Case,
    keys: NDArray[np.uint8],
    variant: Variant,
    on_progress: OnProgress,
) -> Iterator[Outcome]:
    """Replay the owner's code, first without a budget."""

    def run(case: Case, settings: OwnerSettings) -> Outcome:
        title = f"{case.name} at {case.shard.capacity_blocks:,} blocks"
        return _outcome(trace, case, ShardStore(case.shard, keys, settings), title, on_progress)

    everything = run(case, variant.settings)
    yield everything
    for budget in plan.budgets:
        limited = replace(case, name=f"{case.name}, budget {budget.text}")
        yield run(limited, _limited(plan, trace, case.shard, budget, everything, variant.settings))


def _name(variant: Variant) -> str:
    return f"{OURS}, {variant.text}" if variant.text else OURS


def _limited(
    plan: Plan, trace: Trace, shard: ShardPlan, budget: Budget, everything: Outcome, usual: OwnerSettings
) -> OwnerSettings:
    """Return what an owner runs with under a budget. *everything*: what came of admitting all."""
    bytes_per_day = budget.share * everything.bytes_per_day
    if not budget.share:
        bytes_per_day = budget.drive_writes_per_day * everything.flash.drive_bytes
    burst_s = plan.burst_s or max(1.0, trace.span_s * _BURST_SHARE)
    rated_dwpd = shard.dwpd_of(bytes_per_day)
    return replace(usual, endurance=replace(usual.endurance, rated_dwpd=rated_dwpd, burst_s=burst_s))


def _policy(name: str, capacity_blocks: int, trace: Trace) -> Policy:
    match name:
        case "lru":
            return Lru(capacity_blocks)
        case "s3-fifo":
            return S3Fifo(capacity_blocks)
        case "sieve":
            return Sieve(capacity_blocks)
    assert name == "belady", f"no policy is called {name}"
    return Belady(capacity_blocks, trace)


def _flash(plan: Plan, shard: ShardPlan) -> Flash:
    drive_bytes = plan.drive_bytes or shard.capacity_blocks * plan.block_bytes
    return Flash(drive_bytes, plan.rated_dwpd, plan.rated_years)


def _outcome(trace: Trace, case: Case, store: Store, title: str, on_progress: OnProgress) -> Outcome:
    counted = replay(trace, store, lambda part: on_progress(title, part))
    return Outcome(
        policy=case.name,
        capacity_blocks=case.shard.capacity_blocks,
        capacity_bytes=case.shard.capacity_blocks * case.shard.block_bytes,
        requests=len(trace),
        blocks_asked=len(trace.blocks),
        hits=counted.hits,
        prefix_hits=counted.prefix_hits,
        span_s=trace.span_s,
        written=store.written,
        flash=case.flash,
        seconds=counted.seconds,
    )
