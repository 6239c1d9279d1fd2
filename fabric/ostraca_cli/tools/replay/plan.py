"""Plan of a replay: policies, capacities, write budgets and the modelled flash."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ostraca_cli.terminal.units import parse_size
from ostraca_fabric.errors import UsageError, shown

if TYPE_CHECKING:
    from ostraca_cli.tools.replay.trace import Trace

OURS = "ostraca"
POLICIES = (OURS, "lru", "s3-fifo", "sieve", "belady")

_KV_BYTES_PER_TOKEN = 2 * 80 * 8 * 128 * 2
"""Keys and values of a 70B model in BF16 (Llama 3: 80 layers, 8 KV heads of 128): 320 KiB."""

BLOCK_BYTES = 512 * _KV_BYTES_PER_TOKEN
"""160 MiB for a hash id of 512 tokens."""

BLOCKS_PER_SEGMENT = 16
"""Hash ids evicted together."""

STRIPE_UNITS = (1, 8, 32)

NUMBER_MAX = 1e6
"""Maximum of ratings, budgets and similar numbers; larger values are typing errors."""

_SHARE_MAX = 1e4

_PERCENT = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*%")


@dataclass(frozen=True, slots=True)
class CapacitySpec:
    """Amount of flash: bytes, or a share of the trace's unique blocks."""

    text: str
    """Text given by the user."""

    size_bytes: int = 0
    share: float = 0.0

    def blocks(self, trace: Trace, block_bytes: int) -> int:
        """Return the number of blocks in this capacity."""
        return int(self.share * trace.unique_blocks) if self.share else self.size_bytes // block_bytes


@dataclass(frozen=True, slots=True)
class BudgetSpec:
    """Limit of writes."""

    text: str
    drive_writes_per_day: float = 0.0
    share: float = 0.0
    """Share of the writes under full admission; 0 for a limit in drive writes."""


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """Parameters of a replay, apart from the trace."""

    capacities: tuple[CapacitySpec, ...]
    policies: tuple[str, ...] = POLICIES
    variants: tuple[str, ...] = ()
    """Settings of additional replays of the owner's store; see ``suite.parse_variant``."""

    budgets: tuple[BudgetSpec, ...] = ()
    """Budgets of the owner's store, each replayed with all settings after a replay without a budget."""

    block_bytes: int = BLOCK_BYTES
    blocks_per_segment: int = BLOCKS_PER_SEGMENT
    drive_bytes: int | None = None
    """Flash under wear; None for the capacity."""

    rated_dwpd: float = 1.0
    rated_years: float = 5.0
    burst_s: float | None = None
    """Savings limit of the budget, as time of accrual; None for a tenth of the trace."""

    enclosures: int = 0
    """Number of enclosures for the loss by a failure; 0 to skip the loss."""

    stripe_units: tuple[int, ...] = STRIPE_UNITS
    """Numbers of hash ids in a stripe unit."""

    seed: int = 1


def parse_capacity(text: str) -> CapacitySpec:
    """Parse ``10%`` or a size; raises UsageError."""
    share = _share(text)
    if share is not None:
        return CapacitySpec(text.strip(), share=share)
    return CapacitySpec(text.strip(), size_bytes=parse_size(text))


def parse_budget(text: str) -> BudgetSpec:
    """Parse a budget: drive writes per day as ``0.5``, or ``50%`` of all writes.

    Raises UsageError.
    """
    share = _share(text)
    if share is not None:
        return BudgetSpec(text.strip(), share=share)
    try:
        writes = float(text)
    except ValueError:
        writes = 0.0
    if not 0 < writes <= NUMBER_MAX:
        raise UsageError(
            f"{shown(text)} is no write budget: write drive writes per day above zero, as in 0.5, or a "
            f"share of the writes under full admission, as in 50%; {NUMBER_MAX:g} at most"
        )
    return BudgetSpec(text.strip(), drive_writes_per_day=writes)


def _share(text: str) -> float | None:
    found = _PERCENT.fullmatch(text.strip())
    if found is None:
        return None
    share = float(found[1]) / 100
    if share <= 0:
        raise UsageError(f"{text!r} is no share: write a share above zero, as in 10%")
    if share > _SHARE_MAX:
        raise UsageError(f"{shown(text)} is too much: write a share up to {100 * _SHARE_MAX:.0f}%")
    return share
