"""Exponential backoff: waits between attempts that double up to a limit. Pure except for the dice."""

from __future__ import annotations

from typing import Protocol


class Dice(Protocol):
    """Source of random numbers: ``random.Random``, seeded for repeatable runs."""

    def uniform(self, a: float, b: float) -> float:
        """Return a number from *a* to *b*."""


class Backoff:
    """Waits between the attempts at an action. Not thread-safe."""

    def __init__(self, first_s: float, longest_s: float, dice: Dice | None = None) -> None:
        """Begin with *first_s*; each later wait is twice as long, up to *longest_s*.

        With *dice*, each wait is shortened at random by up to half, so that callers do not return in step.
        """
        self._first_s = first_s
        self._longest_s = longest_s
        self._dice = dice
        self.bound_s = first_s
        """Longest next wait."""

    def next_s(self) -> float:
        """Return the next wait, and double the bound."""
        wait_s = self.bound_s if self._dice is None else self._dice.uniform(self.bound_s / 2, self.bound_s)
        self.bound_s = min(2 * self.bound_s, self._longest_s)
        return wait_s

    def reset(self) -> None:
        """Start again after a success."""
        self.bound_s = self._first_s
