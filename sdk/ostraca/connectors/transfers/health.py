"""Health of the fabric as seen by one connector: whether requests make sense now."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ostraca.connectors.transfers.settings import ConnectorSettings
from ostraca_fabric.model.outcome import Reason
from ostraca_fabric.policies.backoff import Backoff

_LATE = frozenset({Reason.DEADLINE})
"""A request with only this reason had no answer in time."""

_READS_FAIL = _LATE | {Reason.DISCONNECTED}
"""A read with only these reasons, and not only late blocks, reached no agent."""

_WRITES_FAIL = _READS_FAIL | {
    Reason.OVERLOADED,
    Reason.NO_SPACE,
    Reason.BUSY,
    Reason.INDEX_FULL,
    Reason.NO_OWNER,
    Reason.FENCED,
    Reason.SWITCHED_OFF,
    Reason.QUARANTINED,
    Reason.STALE_VOLUME,
    Reason.QUOTA,
}
"""A store with only these reasons, and not only late blocks, would fail again."""


class RequestBackoff:
    """Backoff of requests in one direction, to a fabric without answers.

    During a backoff, chunks are misses at once, so a dead fabric costs a deadline only now and then, not on
    every request. A single late answer proves nothing, several in a row do; a lost connection does at once.
    Each further backoff without a success in between is twice as long.
    """

    def __init__(self, *, first_s: float, longest_s: float, late_requests_max: int) -> None:
        """Begin without a backoff; *late_requests_max* late requests in a row start a backoff."""
        self._backoff = Backoff(first_s, longest_s)
        self._late_requests_max = late_requests_max
        self._late_requests = 0
        self._until_s = float("-inf")

    def is_active(self, now_s: float) -> bool:
        """Tell whether requests are to wait."""
        return now_s < self._until_s

    def record_late(self, now_s: float) -> None:
        """Note a request without an answer in time."""
        self._late_requests += 1
        if self._late_requests >= self._late_requests_max:
            self.record_failure(now_s)

    def record_failure(self, now_s: float) -> None:
        """Note a failed request; requests from before a backoff don't lengthen the backoff."""
        if not self.is_active(now_s):
            self._until_s = now_s + self._backoff.next_s()

    def record_success(self) -> None:
        """Note an answer."""
        self._until_s = float("-inf")
        self._backoff.reset()
        self._late_requests = 0


class FabricHealth:
    """Backoff of reads and of writes. Thread-safe."""

    def __init__(
        self, settings: ConnectorSettings, *, is_linked: Callable[[], bool], clock_s: Callable[[], float]
    ) -> None:
        def backoff() -> RequestBackoff:
            return RequestBackoff(
                first_s=settings.backoff_s,
                longest_s=settings.backoff_max_s,
                late_requests_max=settings.late_requests_max,
            )

        self._reads, self._writes = backoff(), backoff()
        self._is_linked = is_linked
        self._clock_s = clock_s
        self._recording = threading.Lock()

    @property
    def read_refusal(self) -> str:
        """Reason against lookups and loads now; empty if allowed."""
        return self._refusal(self._reads)

    @property
    def write_refusal(self) -> str:
        """Reason against stores now; empty if allowed."""
        return self._refusal(self._writes)

    def record_read(self, reasons: bytes) -> None:
        """Note the reasons of a lookup's or load's blocks."""
        self._record(self._reads, reasons, _READS_FAIL)

    def record_write(self, reasons: bytes) -> None:
        """Note the reasons of a store's blocks."""
        self._record(self._writes, reasons, _WRITES_FAIL)

    def _record(self, backoff: RequestBackoff, reasons: bytes, bad: frozenset[Reason]) -> None:
        """Report a request to a backoff: failed if all reasons are in *bad*."""
        with self._recording:
            if reasons and _LATE.issuperset(reasons):
                backoff.record_late(self._clock_s())
            elif reasons and bad.issuperset(reasons):
                backoff.record_failure(self._clock_s())
            else:
                backoff.record_success()

    def _refusal(self, backoff: RequestBackoff) -> str:
        if not self._is_linked():
            return "no_fabric"
        return "backoff" if backoff.is_active(self._clock_s()) else ""
