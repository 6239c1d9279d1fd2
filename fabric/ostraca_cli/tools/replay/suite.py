"""Replays of a trace through all policies and capacities of a plan.

A replay requests every block of a trace from a store, in trace time. A store is the shard owner's real code
(``shard_store``), perhaps with other settings, or a cache of the literature (``research``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ostraca_cli.tools.replay.outcome import FlashRating, ReplayOutcome, WriteCounts
from ostraca_cli.tools.replay.plan import OURS, BudgetSpec, ReplayPlan
from ostraca_cli.tools.replay.research.belady import Belady
from ostraca_cli.tools.replay.research.policy import Lru, Policy
from ostraca_cli.tools.replay.research.s3_fifo import S3Fifo
from ostraca_cli.tools.replay.research.sieve import Sieve
from ostraca_cli.tools.replay.shard_store import ShardPlan, ShardStore
from ostraca_cli.tools.replay.trace import Trace
from ostraca_dpu_agent.settings import OwnerSettings
from ostraca_fabric.errors import UsageError, shown
from ostraca_fabric.wire.codec import KEY_BYTES

OnProgress = Callable[[str, float], None]

_BURST_SHARE = 0.1
"""Savings of the budget as a share of the trace. An agent saves hours of budget; a trace is often no longer,
so such savings would outlast the trace."""

_PROGRESS_EVERY = 128
_NUMBER_MAX = 1e12
_SET_BY_REPLAY = frozenset({"rated_dwpd", "rated_years", "budget_share", "burst_s"})


class Store(Protocol):
    """Blocks on flash."""

    written: WriteCounts

    def request(self, now_s: float, chain: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return whether each block of a prompt is present; then put the missing blocks."""
        ...


class PolicyStore:
    """Cache of the literature; writes admitted blocks and nothing else."""

    def __init__(self, policy: Policy, block_bytes: int) -> None:
        self.written = WriteCounts()
        self._policy = policy
        self._block_bytes = block_bytes

    def request(self, now_s: float, chain: NDArray[np.int64]) -> NDArray[np.bool_]:  # noqa: ARG002 (the time is irrelevant)
        """Read all blocks, then insert the missing blocks."""
        policy, blocks = self._policy, chain.tolist()
        found = [policy.read(block) for block in blocks]
        missing = dict.fromkeys(
            block for block, is_present in zip(blocks, found, strict=True) if not is_present
        )
        for block in missing:
            policy.insert(block)
        count = len(missing) - policy.end_request()
        self.written.blocks += count
        self.written.block_bytes += count * self._block_bytes
        return np.array(found, np.bool_)


class ReplayAnswer(NamedTuple):
    """Result of a request."""

    now_s: float
    chain: NDArray[np.int64]
    found: NDArray[np.bool_]
    """Whether each block of the chain was present."""

    prefix: int
    """Number of present blocks before the first hole."""


@dataclass(slots=True)
class HitCounts:
    """Hits of a replay."""

    hits: int = 0
    prefix_hits: int = 0

    def add(self, answer: ReplayAnswer) -> None:
        """Count a request."""
        self.hits += int(answer.found.sum())
        self.prefix_hits += answer.prefix


def replay(
    trace: Trace, store: Store, on_progress: Callable[[float], None] = lambda _part: None
) -> Iterator[ReplayAnswer]:
    """Request every block and put missing blocks, in trace time.

    *on_progress* receives the completed part, 0 to 1.
    """
    for request, now_s in enumerate(trace.times_s.tolist()):
        if request % _PROGRESS_EVERY == 0:
            on_progress(request / len(trace))
        chain = trace.chain(request)
        found = store.request(now_s, chain)
        yield ReplayAnswer(now_s, chain, found, len(found) if found.all() else int(found.argmin()))
    on_progress(1.0)


def replay_hits(
    trace: Trace, store: Store, on_progress: Callable[[float], None] = lambda _part: None
) -> HitCounts:
    """Replay a trace and count the hits."""
    counts = HitCounts()
    for answer in replay(trace, store, on_progress):
        counts.add(answer)
    return counts


@dataclass(frozen=True, slots=True)
class Variant:
    """Settings of an owner, with a name."""

    text: str = ""
    settings: OwnerSettings = field(default_factory=OwnerSettings)


def parse_variant(text: str) -> Variant:
    """Parse ``free_segments=2,ghost_bytes=65536`` into settings.

    Names are fields of ``OwnerSettings`` and of its ``endurance``. Raises UsageError with the valid names.
    """
    usual = OwnerSettings()
    known = _numbers(usual) | _numbers(usual.endurance)
    given: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in known:
            raise UsageError(f"{name!r} is no setting of an owner: take any of {', '.join(sorted(known))}")
        try:
            given[name] = type(known[name])(value)
        except ValueError as error:
            raise UsageError(f"{name}={shown(value)}: write a number, as in {name}={known[name]}") from error
        if not -_NUMBER_MAX <= given[name] <= _NUMBER_MAX:
            raise UsageError(f"{name}={shown(value)} is out of bounds: write a number up to {_NUMBER_MAX:g}")
    of_endurance = {name: value for name, value in given.items() if hasattr(usual.endurance, name)}
    of_owner = {name: value for name, value in given.items() if name not in of_endurance}
    endurance = replace(usual.endurance, **of_endurance)
    return Variant(text, replace(usual, endurance=endurance, **of_owner))


@dataclass(frozen=True, slots=True)
class ReplayCase:
    """Policy at a capacity."""

    name: str
    shard: ShardPlan
    flash: FlashRating


def outcomes(trace: Trace, plan: ReplayPlan, on_progress: OnProgress) -> Iterator[ReplayOutcome]:
    """Run all replays in order; *on_progress* receives the replay and its completed part.

    Raises UsageError if a capacity is too small.
    """
    variants = (Variant(), *map(parse_variant, plan.variants))
    shards = [shard_of(trace, plan, number) for number in range(len(plan.capacities))]
    keys = keys_of(trace, plan.seed)
    for capacity, shard in zip(plan.capacities, shards, strict=True):
        for policy in plan.policies:
            title = f"{policy} at {capacity.text}"
            case = ReplayCase(policy, shard, _flash(plan, shard))
            if policy != OURS:
                made = PolicyStore(_policy(policy, shard.capacity_blocks, trace), plan.block_bytes)
                yield _outcome(trace, case, made, title, on_progress)
                continue
            for variant in variants:
                yield from _replay_own_store(
                    trace, plan, replace(case, name=_name(variant)), keys, variant, on_progress
                )


def shard_of(trace: Trace, plan: ReplayPlan, number: int) -> ShardPlan:
    """Return the geometry of the owner's shard at a capacity of the plan."""
    return ShardPlan.for_capacity(
        capacity_blocks=plan.capacities[number].blocks(trace, plan.block_bytes),
        block_bytes=plan.block_bytes,
        blocks_per_segment=plan.blocks_per_segment,
    )


def keys_of(trace: Trace, seed: int) -> NDArray[np.uint8]:
    """Return a key for each unique block: random bytes, like keyed hashes."""
    return np.random.default_rng(seed).integers(0, 256, (trace.unique_blocks, KEY_BYTES), np.uint8)


def _replay_own_store(
    trace: Trace,
    plan: ReplayPlan,
    case: ReplayCase,
    keys: NDArray[np.uint8],
    variant: Variant,
    on_progress: OnProgress,
) -> Iterator[ReplayOutcome]:
    """Replay the owner's code, first without a budget."""

    def run(case: ReplayCase, settings: OwnerSettings) -> ReplayOutcome:
        title = f"{case.name} at {case.shard.capacity_blocks:,} blocks"
        return _outcome(trace, case, ShardStore(case.shard, keys, settings), title, on_progress)

    unlimited = run(case, variant.settings)
    yield unlimited
    for budget in plan.budgets:
        limited = replace(case, name=f"{case.name}, budget {budget.text}")
        yield run(limited, _budget_settings(plan, trace, case.shard, budget, unlimited, variant.settings))


def _name(variant: Variant) -> str:
    return f"{OURS}, {variant.text}" if variant.text else OURS


def _budget_settings(
    plan: ReplayPlan,
    trace: Trace,
    shard: ShardPlan,
    budget: BudgetSpec,
    unlimited: ReplayOutcome,
    usual: OwnerSettings,
) -> OwnerSettings:
    """Return the owner's settings under a budget.

    *unlimited* is the outcome of full admission.
    """
    of_drive = budget.drive_writes_per_day * unlimited.flash.drive_bytes
    bytes_per_day = budget.share * unlimited.bytes_per_day if budget.share else of_drive
    burst_s = plan.burst_s or max(1.0, trace.span_s * _BURST_SHARE)
    rated_dwpd = shard.dwpd_of(bytes_per_day)
    return replace(usual, endurance=replace(usual.endurance, rated_dwpd=rated_dwpd, burst_s=burst_s))


def _policy(name: str, capacity_blocks: int, trace: Trace) -> Policy:
    policies: dict[str, type[Policy]] = {"lru": Lru, "s3-fifo": S3Fifo, "sieve": Sieve}
    return Belady(capacity_blocks, trace) if name == "belady" else policies[name](capacity_blocks)


def _flash(plan: ReplayPlan, shard: ShardPlan) -> FlashRating:
    drive_bytes = plan.drive_bytes or shard.capacity_blocks * plan.block_bytes
    return FlashRating(drive_bytes, plan.rated_dwpd, plan.rated_years)


def _outcome(
    trace: Trace, case: ReplayCase, store: Store, title: str, on_progress: OnProgress
) -> ReplayOutcome:
    began_s = time.perf_counter()
    counts = replay_hits(trace, store, lambda part: on_progress(title, part))
    return ReplayOutcome(
        policy=case.name,
        capacity_blocks=case.shard.capacity_blocks,
        capacity_bytes=case.shard.capacity_blocks * case.shard.block_bytes,
        requests=len(trace),
        blocks_requested=len(trace.blocks),
        hits=counts.hits,
        prefix_hits=counts.prefix_hits,
        span_s=trace.span_s,
        written=store.written,
        flash=case.flash,
        seconds=time.perf_counter() - began_s,
    )


def _numbers(settings: Any) -> dict[str, float]:  # noqa: ANN401 (any dataclass of settings)
    """Return the numeric settings, apart from those controlled by the replay."""
    found = {each.name: getattr(settings, each.name) for each in fields(settings)}
    return {
        name: value
        for name, value in found.items()
        if isinstance(value, (int, float)) and name not in _SET_BY_REPLAY
    }
