"""Circuit breaker: stops operations on a failing drive or peer. Pure.

A *shut* breaker passes all operations. The breaker *opens* after consecutive failures, or on request; then no
operation passes for a period that doubles with each failed *trial*. After the period, one trial at a time may
pass; a successful trial shuts the breaker. Time is an argument, in seconds.

A trial that never ends keeps the breaker open, without another trial: each trial may hold memory without
limit of time.
"""

from __future__ import annotations

from dataclasses import dataclass

from ostraca_fabric.model.limits import check_above_zero, check_one_at_least
from ostraca_fabric.policies.backoff import Backoff


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """Thresholds of a circuit breaker."""

    failures_max: int = 3
    """Consecutive failures that open the breaker. A bad sector alone does not, as other reads succeed in
    between."""

    open_s: float = 1.0
    """First open period. A hiccup costs a second of misses."""

    open_max_s: float = 30.0
    """Longest open period between two trials. A recovered drive waits no longer; each trial of a dead drive
    may hold a thread."""

    def __post_init__(self) -> None:
        """Refuse a breaker that opens without a failure, or for no time."""
        check_one_at_least(self, "failures_max")
        check_above_zero(self, "open_s", "open_max_s")


class Breaker:
    """Circuit breaker. Check ``is_shut`` before each operation, and report the result."""

    def __init__(self, settings: BreakerSettings) -> None:
        """Begin shut."""
        self._settings = settings
        self.is_shut = True
        self.has_trial = False
        """Whether a trial is in progress."""

        self.opened = 0
        """Number of openings."""

        self.failures = 0
        """Consecutive failures."""

        self._until_s = 0.0
        self._backoff = Backoff(settings.open_s, settings.open_max_s)

    def is_trial_due(self, now_s: float) -> bool:
        """Whether one operation may pass now as a trial."""
        return not self.is_shut and not self.has_trial and now_s >= self._until_s

    def begin_trial(self) -> None:
        """Let one operation pass the open breaker; report its end to ``end_trial``."""
        assert not self.is_shut, "a shut breaker needs no trial"
        assert not self.has_trial, "there is one trial at a time"
        self.has_trial = True

    def end_trial(self, now_s: float, *, is_good: bool) -> None:
        """Record the end of the trial."""
        assert self.has_trial, "a trial that ends has begun"
        self.has_trial = False
        if is_good:
            self.is_shut, self.failures = True, 0
        else:
            self._until_s = now_s + self._backoff.next_s()

    def withdraw_trial(self) -> None:
        """Withdraw a trial that never began."""
        assert self.has_trial, "a trial that is withdrawn was announced"
        self.has_trial = False

    def delay(self, now_s: float) -> None:
        """Record an overdue trial. The trial is still in progress, and its end still counts."""
        assert self.has_trial, "a trial that is overdue has begun"
        self._until_s = now_s + self._backoff.next_s()

    def succeed(self, now_s: float) -> None:
        """Record a success. A success begun before the opening makes a trial due now.

        Has no effect on a shut breaker without ``failures``.
        """
        self.failures = 0
        if not self.is_shut:
            self._until_s = min(self._until_s, now_s)

    def fail(self, now_s: float) -> bool:
        """Record a failure; return whether the failure opened the breaker."""
        self.failures += 1
        if not self.is_shut or self.failures < self._settings.failures_max:
            return False
        self.open(now_s)
        return True

    def open(self, now_s: float) -> None:
        """Open the breaker, if shut."""
        if self.is_shut:
            self.is_shut = False
            self.opened += 1
            self._backoff.reset()
            self._until_s = now_s + self._backoff.next_s()
