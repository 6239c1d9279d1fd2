"""Limits of connections that are not agreed in the handshake."""

from __future__ import annotations

from dataclasses import dataclass

from ostraca_fabric.limits import check_above_zero, check_one_at_least


@dataclass(frozen=True, slots=True)
class ConnectionSettings:
    """Limits of one end's connections."""

    connections_max: int = 1024
    """Connections a server holds at once; one more is refused.

    Raise it, with twice as much the limit of open files, for agents with more workers and peers than this.
    Each holds 64 KiB and what its requests hold.
    """

    refusing_max: int = 64
    """Connections beyond ``connections_max`` that are told so; further ones are cut without a word."""

    handshake_s: float = 5.0
    """How long it may take from connecting to the Welcome, seen from either end. Raise it for slow links."""

    handshake_bytes_max: int = 256 << 10
    """Longest frame before the Welcome. An arena offer's metadata takes a few KiB."""

    unread_bytes_max: int = 64 << 20
    """Bytes waiting to be sent on top of which a message closes the connection: the other end is stuck."""

    send_buffer_bytes: int = 1 << 20
    """Bytes that a unix socket holds for an end that has not read them yet, as far as ``net.core.wmem_max``
    allows. The more they are, the less often both ends sleep and wake. The kernel keeps as much again for its
    books.
    """

    close_s: float = 2.0
    """How long the last words of a connection may take to leave before it is cut."""

    drain_s: float = 10.0
    """How long a closing server waits for requests under way. Set it above the longest deadline in use."""

    keepalive_s: int = 10
    """Silence after which TCP asks whether the other end is still there, and between three questions. What
    was sent may lack an answer for three times as long. Then the connection is lost."""

    def __post_init__(self) -> None:
        """Refuse limits that let nobody in."""
        check_above_zero(self, "handshake_s")
        check_one_at_least(
            self,
            "connections_max",
            "handshake_bytes_max",
            "unread_bytes_max",
            "send_buffer_bytes",
            "keepalive_s",
        )
