"""Backoff of requests to a fabric without answers.

During a backoff, chunks are misses at once, so a dead fabric costs a deadline only now and then, not on every
request. A single late answer proves nothing, several in a row do; a lost connection does at once. Each
further backoff without a success in between is twice as long.
"""

from __future__ import annotations

from ostraca_fabric.policies.backoff import Backoff


class RequestBackoff:
    """Backoff of one direction."""

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
