"""How late a write may land through Linux's NVMe-oF host, and the settings that bound it. Pure.

``late_write_s`` promises that no write reaches a drive later than that after its operation's end;
``pause_max_s`` of it is for an agent that was stopped, and the path has the rest. A path holds a write back
in three places, one after the other:

- *sent, and not answered*: a command is given up after ``nvme_core.io_timeout``, and its connection with it;
- *not known to be lost*: a keep-alive goes out every ``keep_alive_tmo``, and is waited for as long again;
  about as long an enclosure keeps what it has received of a host that is gone;
- *waiting for the path to come back*: once a path is known to be lost, commands wait for it, and are sent
  when it is back. ``fast_io_fail_tmo`` ends that. It is off unless set, and then they wait for
  ``ctrl_loss_tmo``, which is ten minutes unless set, or for ever.
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
    """What is asked of each NVMe-oF path, and how long the host may take over it."""

    late_write_s: float = 120.0
    """The agent's own."""

    pause_max_s: float = 60.0
    """The agent's own."""

    io_queues: int = 2
    """Queues to each controller, beside the admin queue. Every queue is a connection, and memory, at both
    ends: 288 hosts with two to each of 36 enclosures are 31 thousand. Raise it in small installations whose
    agents are held up by one queue's processor."""

    keep_alive_s: int = 5
    """How often a host says that it lives. Raise it where enclosures with many hosts lose paths for no
    reason."""

    reconnect_delay_s: int = 2
    """How long after a path was lost, or could not be had again, it is tried again."""

    fast_io_fail_s: int = 15
    """How long I/O waits for a lost path when there is no other. Gets are misses by then; a longer wait helps
    only writes, and makes them later."""

    connect_s: float = ADMIN_TIMEOUT_DEFAULT_S + 15.0
    """How long one controller may take to connect. Controllers that are not there take about three seconds
    over TCP. Of a secret that is refused, Linux's host may learn only when its ``nvme_core.admin_timeout`` is
    over, and over RDMA when six of them are. One that is given up before is told by how far it came: did the
    other end take the connection?"""

    ask_s: float = ASK_S
    """How long a question to this host's kernel may take, with the start of the process that asks: seconds,
    on a host that has far more to do than it can."""

    attach_s: float = 5.0
    """How long to wait for the drives of a controller that has just connected to be named."""

    remove_s: float = 30.0
    """How long a path may take to be ended."""

    resolve_s: float = 5.0
    """How long a controller's name may take to be resolved."""


def latest_s(*, io_timeout_s: float, keep_alive_s: float, fast_io_fail_s: float) -> float:
    """Return after how long, at most, no path delivers a write any more that it was given before."""
    return io_timeout_s + 2 * keep_alive_s + fast_io_fail_s


def too_late(
    settings: PathSettings, *, io_timeout_s: float, keep_alive_s: float, fast_io_fail_s: float | None
) -> str:
    """Say why such a path delivers writes later than ``late_write_s`` assumes; empty where it does not.

    *fast_io_fail_s* is None where it is off.
    """
    allowed_s = settings.late_write_s - settings.pause_max_s
    if fast_io_fail_s is None:
        return "its fast_io_fail_tmo is off, so it holds writes back for as long as it is lost"
    late_s = latest_s(io_timeout_s=io_timeout_s, keep_alive_s=keep_alive_s, fast_io_fail_s=fast_io_fail_s)
    if late_s <= allowed_s:
        return ""
    return (
        f"it may deliver a write {late_s:g} s late (io_timeout {io_timeout_s:g} s, twice its keep-alive of "
        f"{keep_alive_s:g} s, fast_io_fail_tmo {fast_io_fail_s:g} s), and late_write_s less pause_max_s "
        f"allows {allowed_s:g} s"
    )
