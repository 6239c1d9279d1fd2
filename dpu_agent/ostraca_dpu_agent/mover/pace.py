"""How fast loads have been lately, to say early when one will take too long. Pure."""

from __future__ import annotations

_HALF_LIFE_BYTES = 256 << 20


class Pace:
    """Bytes per second over the time in which anything was loading, the last few hundred MiB weighing
    most.
    """

    def __init__(self) -> None:
        """Begin knowing nothing: estimates are 0 until something has been loaded."""
        self.pending_bytes = 0
        self._bytes = 0.0
        self._seconds = 0.0
        self._since_s = 0.0

    def begin(self, now_s: float, load_bytes: int) -> None:
        """Count a load that starts now."""
        self._account(now_s, 0)
        self.pending_bytes += load_bytes

    def end(self, now_s: float, load_bytes: int) -> None:
        """Count the same load's end, however it ended."""
        self._account(now_s, load_bytes)
        self.pending_bytes -= load_bytes

    def estimate_s(self, load_bytes: int) -> float:
        """Return how long a load would take if it began behind all that is pending."""
        if not self._bytes:
            return 0.0
        return (self.pending_bytes + load_bytes) * self._seconds / self._bytes

    def _account(self, now_s: float, ended_bytes: int) -> None:
        if self.pending_bytes:
            self._seconds += max(0.0, now_s - self._since_s)
        self._since_s = now_s
        self._bytes += ended_bytes
        if self._bytes > _HALF_LIFE_BYTES:
            self._bytes /= 2
            self._seconds /= 2
