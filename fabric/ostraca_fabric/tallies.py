"""Tallies: how often which outcome, how many bytes, how long, for one kind of operation. Pure.

``Tally`` runs: an answered request costs it a few numpy calls, however many blocks it has. ``OperationTally``
is a snapshot, as status and metrics carry it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from enum import IntEnum

import msgspec
import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.outcome import BlockState, PutState, Reason

LATENCY_BOUNDS_S: tuple[float, ...] = tuple(
    float(f"{digit}e{exponent}") for exponent in range(-5, 2) for digit in (1, 2, 5)
)[2:]
"""Upper bounds of the latency histograms' buckets: 50 µs to 50 s in steps of 1, 2, 5. What took longer is in
one more bucket."""

STATES: dict[str, type[BlockState | PutState]] = {
    "lookup": BlockState,
    "get": BlockState,
    "prefetch": BlockState,
    "put": PutState,
}
"""The operations there are, and what can become of a block in them."""

SHADOWS: dict[str, type[BlockState | PutState]] = {"shadow_lookup": BlockState, "shadow_get": BlockState}
"""What an agent tries out, for volumes whose switch says ``shadow``: what would have become of a block."""

_STATE_BITS = 3
_CODES = 256 << _STATE_BITS


class BlockCount(msgspec.Struct, frozen=True):
    """Blocks that ended in one state for one reason."""

    state: str
    reason: str
    """A Reason's name; NONE where there was none. One unknown to this release is its number."""

    blocks: int


class OperationTally(msgspec.Struct, frozen=True):
    """What one kind of operation has done since its process began to count."""

    operation: str
    blocks: tuple[BlockCount, ...] = ()
    """Outcomes that occurred."""

    bytes: int = 0
    """Bytes of the blocks that were handed over, or stored."""

    requests: int = 0
    seconds: float = 0.0
    """How long all requests together took."""

    buckets: tuple[int, ...] = ()
    """Requests by how long they took: one count for each of ``LATENCY_BOUNDS_S`` and one for the rest."""

    def of(self, state: IntEnum, reason: Reason | None = None) -> int:
        """Count the blocks of one state, or of one state and reason."""
        return sum(
            count.blocks
            for count in self.blocks
            if count.state == state.name and (reason is None or count.reason == reason.name)
        )

    def latency_s(self, share: float) -> float:
        """Return the bound of the bucket below which *share* of the requests ended; 0 without any.

        Requests beyond the last bound read as infinitely long.
        """
        due = share * self.requests
        for bound_s, ended in zip((*LATENCY_BOUNDS_S, float("inf")), np.cumsum(self.buckets), strict=False):
            if 0 < due <= ended:
                return bound_s
        return 0.0


class Tally:
    """Running counts of one kind of operation. Not thread-safe."""

    def __init__(self, operation: str) -> None:
        """Begin with nothing counted; *operation* is one of ``STATES``, or of ``SHADOWS``."""
        self._operation = operation
        self._states = (STATES | SHADOWS)[operation]
        self._counts = np.zeros(_CODES, np.int64)
        self._buckets = [0] * (len(LATENCY_BOUNDS_S) + 1)
        self._seconds = 0.0
        self.bytes = 0

    def count(self, states: NDArray[np.uint8], reasons: NDArray[np.uint8]) -> None:
        """Count one outcome for each block; states are below 8."""
        found = np.bincount((reasons.astype(np.intp) << _STATE_BITS) | states)
        self._counts[: len(found)] += found

    def timed(self, seconds: float) -> None:
        """Count one request and how long it took."""
        self._buckets[bisect_left(LATENCY_BOUNDS_S, seconds)] += 1
        self._seconds += seconds

    def of(self, state: IntEnum, reason: Reason | None = None) -> int:
        """Count the blocks of one state, or of one state and reason."""
        by_reason = self._counts.reshape(-1, 1 << _STATE_BITS)[:, state]
        return int(by_reason.sum() if reason is None else by_reason[reason])

    def snapshot(self) -> OperationTally:
        """Return the counts as they are now."""
        codes = np.flatnonzero(self._counts).tolist()
        return OperationTally(
            operation=self._operation,
            blocks=tuple(self._block_count(code) for code in codes),
            bytes=self.bytes,
            requests=sum(self._buckets),
            seconds=self._seconds,
            buckets=tuple(self._buckets),
        )

    def _block_count(self, code: int) -> BlockCount:
        state = name_of(self._states, code & ((1 << _STATE_BITS) - 1))
        return BlockCount(state, name_of(Reason, code >> _STATE_BITS), int(self._counts[code]))


def tally_text(states: bytes, reasons: bytes, known: type[BlockState | PutState]) -> str:
    """Count outcomes for people, a byte per block each: ``510 HIT, 2 MISS (1 NOT_FOUND, 1 DAMAGED)``."""
    pairs = np.frombuffer(states, np.uint8).astype(np.uint16) << 8 | np.frombuffer(reasons, np.uint8)
    codes, counts = np.unique(pairs, return_counts=True)
    return outcome_text(
        BlockCount(name_of(known, code >> 8), name_of(Reason, code & 255), blocks)
        for code, blocks in zip(codes.tolist(), counts.tolist(), strict=True)
    )


def outcome_text(counts: Iterable[BlockCount]) -> str:
    """Write outcomes for people, as ``tally_text`` does; the most frequent first."""
    by_state: dict[str, list[BlockCount]] = {}
    for count in sorted(counts, key=lambda each: -each.blocks):
        by_state.setdefault(count.state, []).append(count)
    totals = {state: sum(each.blocks for each in same) for state, same in by_state.items()}
    words = []
    for state in sorted(totals, key=lambda each: -totals[each]):
        why = ", ".join(
            f"{each.blocks} {each.reason}" for each in by_state[state] if each.reason != Reason.NONE.name
        )
        words.append(f"{totals[state]} {state}" + (f" ({why})" if why else ""))
    return ", ".join(words) or "no blocks"


def name_of(kind: type[IntEnum], code: int) -> str:
    """Return the name of an outcome; its number where only a newer release has a name for it."""
    try:
        return kind(code).name
    except ValueError:  # of a newer release
        return str(code)
