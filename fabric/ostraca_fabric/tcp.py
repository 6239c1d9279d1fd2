"""What is asked of a TCP connection, whichever end of it asks."""

from __future__ import annotations

import contextlib
import socket

TCP_RTO_MAX_MS = 44
"""Of ``linux/tcp.h``, since Linux 6.15; Python's ``socket`` does not name it."""

_SENT_AGAIN_MS = 1000
"""The least that Linux takes."""

_MS_PER_S = 1000


def be_watchful(sock: socket.socket, *, idle_s: int, every_s: int, asked_max: int, lost_after_s: int) -> None:
    """Have a connection send at once, and end when the other host is gone.

    After *idle_s* of silence it asks for a sign of life, up to *asked_max* times, *every_s* apart. It asks
    nothing while something is on its way, and would send that again for a quarter of an hour: where that
    lacks an answer for *lost_after_s*, the connection ends, also where the other host lives, and its process
    takes nothing while there is no more room on the way to it.

    Until then what lacks an answer is sent again every second at least, where the kernel is new enough:
    else after pauses that double, so that a network that has been away for ten seconds is found to be back
    ten seconds late.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, asked_max)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, lost_after_s * _MS_PER_S)
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS, _SENT_AGAIN_MS)
