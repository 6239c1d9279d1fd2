"""Limits of a daemon's pages over HTTP."""

from __future__ import annotations

from dataclasses import dataclass

from ostraca_fabric.errors import UsageError


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """What the pages over HTTP may cost."""

    connections_max: int = 16
    """Connections at once; one more is cut without a word. Two scrapers and a few people need no more."""

    head_bytes_max: int = 16 << 10
    """Longest head of a request. No request needs a body, and none is read beyond 64 KiB."""

    connection_s: float = 10.0
    """How long a connection may live, so that one that says nothing holds no place. Whoever asks now and then
    connects again; raise it for scrapers that read slowly."""

    fresh_s: float = 1.0
    """How old an answer may be. Whoever asks more often is told the same again, so that the pages cost the
    data path no more than once in this time, however often they are asked for."""

    answer_s: float = 2.0
    """How long the daemon may take to say how it is, before it is called unhealthy. A loop that is blocked
    for this long serves no gets either."""

    def __post_init__(self) -> None:
        """Refuse what can't work."""
        if min(self.connections_max, self.head_bytes_max, self.connection_s, self.answer_s) <= 0:
            message = "connections_max, head_bytes_max, connection_s and answer_s are above 0"
            raise UsageError(message)
