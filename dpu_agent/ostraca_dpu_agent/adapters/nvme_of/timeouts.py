"""Longest delay of a write in Linux's NVMe-oF host, and its bounds. Pure.

``late_write_s`` bounds the time between an operation's end and its last write on a drive. ``pause_max_s``
of this time is for a suspended agent, and the rest for the path. A path delays a write in three phases, in
sequence:

- *sent, and not answered*: the command and its connection are given up after ``nvme_core.io_timeout``;
- *loss not yet detected*: a keep-alive is sent every ``keep_alive_tmo`` and awaited for as long again;
  an enclosure keeps data from a vanished host for about as long;
- *waiting for reconnection*: commands wait for a path known to be lost, and are sent after its return.
  ``fast_io_fail_tmo`` ends this phase. Without it, which is the default, ``ctrl_loss_tmo`` does: ten
  minutes by default, or never.
"""

from __future__ import annotations

from dataclasses import dataclass

IO_TIMEOUT_DEFAULT_S = 30.0
"""``nvme_core.io_timeout`` of Linux."""

KEEP_ALIVE_DEFAULT_S = 5.0
"""``keep_alive_tmo`` of Linux."""

ADMIN_TIMEOUT_DEFAULT_S = 60.0
"""``nvme_core.admin_timeout`` of Linux."""

RETRIES_DEFAULT = 5
"""``nvme_core.max_retries`` of Linux."""

ASK_S = 15.0
"""``PathSettings.ask_s``."""


@dataclass(frozen=True, slots=True)
class PathSettings:
    """Parameters of NVMe-oF paths, and time limits of the host."""

    late_write_s: float = 120.0
    """Setting ``late_write_s`` of the agent."""

    pause_max_s: float = 60.0
    """Setting ``pause_max_s`` of the agent."""

    io_queues: int = 2
    """I/O queues to each controller. Every queue is a connection, and memory, at both ends: 288 hosts with
    two queues and the admin queue to each of 36 enclosures have 31 thousand. Raise the number in small
    installations where one queue's processor is the bottleneck."""

    keep_alive_s: int = 5
    """Interval of keep-alives. Raise the interval if enclosures with many hosts lose paths without a
    cause."""

    reconnect_delay_s: int = 2
    """Interval of attempts to reconnect a lost path."""

    fast_io_fail_s: int = 15
    """Time that I/O waits for the only path after its loss. Gets are misses by then; a longer wait helps only
    writes, and delays them."""

    connect_s: float = ADMIN_TIMEOUT_DEFAULT_S + 15.0
    """Time limit for the connection of a controller. An absent controller takes about three seconds over TCP.
    Linux may learn of a refused secret only after its ``nvme_core.admin_timeout``, over RDMA after six of
    these timeouts. The error for an abandoned attempt depends on its progress: whether the other end accepted
    the connection."""

    ask_s: float = ASK_S
    """Time limit of a query to this host's kernel, with the start of the querying process: seconds on an
    overloaded host."""

    attach_s: float = 5.0
    """Wait for the names of drives after the connection of a controller."""

    remove_s: float = 30.0
    """Time limit for the removal of a path."""

    resolve_s: float = 5.0
    """Time limit for the resolution of a controller's name."""


def latest_s(*, io_timeout_s: float, keep_alive_s: float, fast_io_fail_s: float) -> float:
    """Return the longest time until a path has delivered or dropped a write."""
    return io_timeout_s + 2 * keep_alive_s + fast_io_fail_s


def excessive_delay(
    settings: PathSettings, *, io_timeout_s: float, keep_alive_s: float, fast_io_fail_s: float | None
) -> str:
    """Return why a path exceeds ``late_write_s``; empty if the path does not.

    *fast_io_fail_s* is None where it is off.
    """
    allowed_s = settings.late_write_s - settings.pause_max_s
    if fast_io_fail_s is None:
        return "fast_io_fail_tmo is off, so writes wait as long as the path is lost"
    delay_s = latest_s(io_timeout_s=io_timeout_s, keep_alive_s=keep_alive_s, fast_io_fail_s=fast_io_fail_s)
    if delay_s <= allowed_s:
        return ""
    return (
        f"a write may arrive {delay_s:g} s late (io_timeout {io_timeout_s:g} s, twice the keep-alive of "
        f"{keep_alive_s:g} s, fast_io_fail_tmo {fast_io_fail_s:g} s), and late_write_s minus pause_max_s "
        f"allows {allowed_s:g} s"
    )
