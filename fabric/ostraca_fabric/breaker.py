"""A circuit breaker: whether to ask something again that has been failing. Pure.

It is *shut* while all is well, and everything passes. It *opens* after failures in a row, or when it is told
to; then nothing passes for a while, which doubles each time that a *trial* fails. When the while is over, one
trial at a time may pass; one that ends well shuts the breaker. Time is an argument, in seconds.

A trial that never ends keeps the breaker open, and no other is begun: what is tried may hold memory for as
long as it takes.
"""

from __future__ import annotations

from dataclasses import dataclass

from ostraca_fabric.limits import check_above_zero, check_one_at_least


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """When a breaker opens, and for how long."""

    failures_max: int = 3
    """Failures in a row that open it. One bad sector fails whatever reads it again and again, and reads of
    other places in between end well; three in a row with nothing good between them are more than a sector."""

    open_s: float = 1.0
    """How long it stays open at first. What was a hiccup costs a second of misses."""

    open_max_s: float = 30.0
    """How long it stays open at most between two trials. A drive that comes back waits no longer than this;
    each trial of one that does not may hold a thread of it."""

    def __post_init__(self) -> None:
        """Refuse a breaker that opens for nothing, or for no time."""
        check_one_at_least(self, "failures_max")
        check_above_zero(self, "open_s", "open_max_s")


class Breaker:
    """One breaker. Ask ``is_shut`` before each operation, and tell how it ended."""

    def __init__(self, settings: BreakerSettings) -> None:
        """Begin shut."""
        self._settings = settings
        self.is_shut = True
        self.has_trial = False
        """Whether a trial is under way."""

        self.opened = 0
        """How often it has opened."""

        self._failures = 0
        self._until_s = 0.0
        self._pause_s = settings.open_s

    def is_trial_due(self, now_s: float) -> bool:
        """Whether one operation may pass now to see how things are."""
        return not self.is_shut and not self.has_trial and now_s >= self._until_s

    def begin_trial(self) -> None:
        """Let one operation pass although the breaker is open; report it to ``end_trial``."""
        assert not self.is_shut, "a shut breaker needs no trial"
        assert not self.has_trial, "there is one trial at a time"
        self.has_trial = True

    def end_trial(self, now_s: float, *, is_good: bool) -> None:
        """Say how the trial ended."""
        assert self.has_trial, "a trial that ends has begun"
        self.has_trial = False
        if is_good:
            self.is_shut, self._failures = True, 0
        else:
            self._wait_longer(now_s)

    def withdraw_trial(self) -> None:
        """Say that the trial was not begun after all."""
        assert self.has_trial, "a trial that is withdrawn was announced"
        self.has_trial = False

    def delay(self, now_s: float) -> None:
        """Say that the trial is overdue. It is still under way, and its end still counts."""
        assert self.has_trial, "a trial that is overdue has begun"
        self._wait_longer(now_s)

    def succeed(self, now_s: float) -> None:
        """Say that an operation ended well. One begun before the breaker opened makes a trial due now."""
        self._failures = 0
        if not self.is_shut:
            self._until_s = min(self._until_s, now_s)

    def fail(self, now_s: float) -> bool:
        """Say that an operation failed; returns whether that opened the breaker."""
        self._failures += 1
        if not self.is_shut or self._failures < self._settings.failures_max:
            return False
        self.open(now_s)
        return True

    def open(self, now_s: float) -> None:
        """Open it, if it is shut."""
        if self.is_shut:
            self.is_shut = False
            self.opened += 1
            self._pause_s = self._settings.open_s
            self._until_s = now_s + self._pause_s

    def _wait_longer(self, now_s: float) -> None:
        self._pause_s = min(2 * self._pause_s, self._settings.open_max_s)
        self._until_s = now_s + self._pause_s
