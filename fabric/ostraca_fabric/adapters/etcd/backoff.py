"""How long to wait before something is tried again: random, doubling, bounded. Pure but for the dice it is
given.
"""

from __future__ import annotations

from typing import Protocol


class Dice(Protocol):
    """What rolls: ``random.Random``, seeded where a run has to be the same again."""

    def uniform(self, a: float, b: float) -> float:
        """Return a number from *a* to *b*."""


class Backoff:
    """The waits of one thing that is tried until it succeeds."""

    def __init__(self, least_s: float, most_s: float, dice: Dice) -> None:
        """Wait at most *least_s* before the first repetition, and never more than *most_s*."""
        self._least_s = least_s
        self._most_s = most_s
        self._dice = dice
        self._next_s = least_s

    def next_s(self) -> float:
        """Return how long to wait now: from half of the present bound up to it, then double the bound."""
        wait_s = self._dice.uniform(self._next_s / 2, self._next_s)
        self._next_s = min(self._next_s * 2, self._most_s)
        return wait_s

    def reset(self) -> None:
        """Begin anew: it succeeded."""
        self._next_s = self._least_s
