"""What to replay a trace through: policies, capacities, write budgets, and the flash they stand for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ostraca.cli.sizes import parse_size
from ostraca_fabric.errors import UsageError

if TYPE_CHECKING:
    from ostraca.cli.replay.trace import Trace

OURS = "ostraca"
POLICIES = (OURS, "lru", "s3-fifo", "sieve", "belady")

_KV_BYTES_PER_TOKEN = 2 * 80 * 8 * 128 * 2
"""Keys and values of a 70B model in BF16 (Llama 3: 80 layers, 8 KV heads of 128): 320 KiB."""

BLOCK_BYTES = 512 * _KV_BYTES_PER_TOKEN
"""160 MiB for a hash id of 512 tokens."""

BLOCKS_PER_SEGMENT = 16
"""Hash ids evicted together."""

STRIPE_UNITS = (1, 8, 32)

_PERCENT = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*%")


@dataclass(frozen=True, slots=True)
class Capacity:
    """How much flash: bytes, or a share of the trace's unique blocks."""

    text: str
    """As it was asked for."""

    size_bytes: int = 0
    share: float = 0.0

    def blocks(self, trace: Trace, block_bytes: int) -> int:
        """Return how many blocks fit."""
        return int(self.share * trace.unique_blocks) if self.share else self.size_bytes // block_bytes


@dataclass(frozen=True, slots=True)
class Budget:
    """How much may be written."""

    text: str
    drive_writes_per_day: float = 0.0
    share: float = 0.0
    """Of what is written where everything is admitted, instead."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything but the trace."""

    capacities: tuple[Capacity, ...]
    policies: tuple[str, ...] = POLICIES
    variants: tuple[str, ...] = ()
    """Settings of an owner to replay our own store with, beside its defaults; see ``variants``."""

    budgets: tuple[Budget, ...] = ()
    """Our own store is replayed without one first, then once for each, with all its settings."""

    block_bytes: int = BLOCK_BYTES
    blocks_per_segment: int = BLOCKS_PER_SEGMENT
    drive_bytes: int | None = None
    """Flash that the writes wear; None for what the capacity is."""

    rated_dwpd: float = 1.0
    rated_years: float = 5.0
    burst_s: float | None = None
    """How much budget can be saved up, as the time it comes in; None for a tenth of the trace."""

    enclosures: int = 0
    """Among which blocks are placed, to tell what dies with one of them; 0 to leave that out."""

    stripe_units: tuple[int, ...] = STRIPE_UNITS
    """How many hash ids are placed together."""

    seed: int = 1


def parse_capacity(text: str) -> Capacity:
    """Read ``10%`` or a size. Raises UsageError."""
    share = _share(text)
    if share is not None:
        return Capacity(text.strip(), share=share)
    return Capacity(text.strip(), size_bytes=parse_size(text))


def parse_budget(text: str) -> Budget:
    """Read drive writes per day as ``0.5``, or ``50%`` of what would be written. Raises UsageError."""
    share = _share(text)
    if share is not None:
        return Budget(text.strip(), share=share)
    try:
        writes = float(text)
    except ValueError:
        writes = 0.0
    if not 0 < writes < float("inf"):
        raise UsageError(
            f"{text!r} is no write budget: write drive writes per day above zero, as in 0.5, or 50% of what "
            "is written when everything is admitted"
        )
    return Budget(text.strip(), drive_writes_per_day=writes)


def _share(text: str) -> float | None:
    found = _PERCENT.fullmatch(text.strip())
    if found is None:
        return None
    share = float(found[1]) / 100
    if share <= 0:
        raise UsageError(f"{text!r} is nothing: write a share above zero, as in 10%")
    return share
