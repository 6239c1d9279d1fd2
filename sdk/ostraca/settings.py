"""What a worker may set, and why it might.

Settings are read once, when the client connects. Below that they are arguments: nothing else in the SDK looks
at the environment.
"""

from __future__ import annotations

from dataclasses import dataclass

from ostraca_fabric.errors import UsageError
from ostraca_fabric.extent import PAGE_BYTES

MIB = 1 << 20
_TRANSPORTS = ("nixl", "inline")


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """Settings of one client. Every limit of the SDK is one of these."""

    arena_bytes: int = 256 * MIB
    """Memory that blocks cross in. It bounds the bytes on their way at one time, not a batch: a batch that
    does not fit is moved in parts. Raise it when several threads load at once; it is rounded up to whole
    chunks."""

    chunk_bytes: int = 32 * MIB
    """No slot lies in two chunks of the arena, and no block may be larger than one. Lower it for a small
    arena."""

    prefault: bool = False
    """Whether the arena's pages are made present at connect (about 0.1 s for 256 MiB) rather than at first
    use.
    """

    transports: tuple[str, ...] = _TRANSPORTS
    """What to offer the agent for moving bytes, best first. One that can't be set up here is left out;
    ``("inline",)`` keeps NIXL out of the process."""

    tls_ca: str = ""
    """A file of certificates, in PEM, that sign those of agents, for addresses that begin with ``tls://``.
    Empty: what OSTRACA_TLS_CA names."""

    tls_cert: str = ""
    """A file with this worker's own certificate, in PEM, where agents ask workers for one
    (``tls.workers_show_certificates``). It does not stand for the token. Empty: what OSTRACA_TLS_CERT
    names."""

    tls_key: str = ""
    """The file of its private key, not encrypted. Empty: what OSTRACA_TLS_KEY names."""

    quarantine_bytes_max: int = 128 * MIB
    """Operations are declined while more of the arena than this is under transfers that are not known to have
    ended. Half of the default arena: beyond it the other half would be too small to be of use."""

    batch_blocks_max: int = 65536
    """A get, put, lookup or prefetch of more blocks is a UsageError. It bounds the memory that one call's
    bookkeeping takes.
    """

    put_window_bytes: int = 32 * MIB
    """A put is sent in requests of about this size, so that the agent fetches one while the next is
    gathered.
    """

    windows_inflight: int = 4
    """How many requests one get or put may have under way at once."""

    copy_threads: int | None = None
    """How many threads may check and copy one wave: the caller's, or the driver's, and this many less one
    that the client keeps. None: 1 where this process may use up to three CPUs, else a quarter of them, at
    least 2 and at most 4 (``ostraca.crew`` says why). Set it where a container's CPU quota allows less than
    the CPUs that are seen; 1 makes no threads."""

    submitted_max: int = 4096
    """Operations submitted and not yet taken. More are declined at once as OVERLOADED, so that a caller that
    never takes what is done does not fill memory."""

    deadline_s_max: float = 3600.0
    """A longer deadline is a UsageError: it is a mistake in units."""

    handshake_s_max: float = 5.0
    """How long one reconnecting dial may take. The operation that needs the connection still ends by its own
    deadline.
    """

    redial_s: float = 0.5
    """After a failed dial, operations end at once as DISCONNECTED for this long, so that a dead agent costs
    one operation its deadline, not all of them."""

    redial_max_s: float = 5.0
    """An address that does not answer is tried in the background, and operations end at once meanwhile. The
    pauses between these attempts begin with ``redial_s`` and double up to this: what an agent that comes
    back may go unnoticed for, where there is no other."""

    return_after_s: float = 10.0
    """A client with several addresses prefers the first, then the second: most often that is the agent of its
    own host. After so long with a later one it looks whether one before answers, and goes back there, losing
    nothing that is under way; again after each pause of as long. An agent that does not stay is gone back to
    after twice as long, up to 32 times as long. ``math.inf`` to stay until that connection is lost."""

    silent_misses_max: int = 2
    """After so many operations in a row that ended at their deadline with nothing heard from the agent, it is
    sent a Ping. It stands for what an agent that has stopped costs: so many deadlines, and
    ``silent_ping_s``. Raise it only where Pings are too many."""

    silent_ping_s: float = 0.5
    """An agent that says nothing for so long after that Ping, not even its answer, has fallen silent: its
    connection is given up as if it had been lost, and the next address is tried. An agent answers Pings
    whatever else it does, in well under a millisecond, but one that shares two cores with much else was
    seen to take 0.2 s. Lower it where agents have cores of their own; raise it, to ``deadline_s_max`` say, to
    wait for stopped agents."""

    silent_deadline_least_s: float = 0.05
    """Missing a deadline shorter than this says nothing of the agent."""

    spare_after_s: float = 1.0
    """How long after connecting a client that knows several addresses makes ready what it offers to the next
    agent, where blocks cross by NIXL: it then falls over in half the time. That takes 25 ms of a core, in a
    thread that ends with it, 5 MB and ten file descriptors, and registers the arena once more. Not at once,
    as the first operations after connecting want the cores; raise it where any of that is scarce."""

    progress_s: float = 0.0005
    """How often the transport is polled while a caller waits, for transports whose passive side must take
    part.
    """

    progress_idle_s: float = 0.01
    """The same while nobody waits and only memory in quarantine is still due."""

    def __post_init__(self) -> None:
        """Refuse what can't work, saying what would."""
        if not 0 < self.chunk_bytes <= self.arena_bytes or self.chunk_bytes % PAGE_BYTES:
            raise UsageError(
                f"chunk_bytes is {self.chunk_bytes}: take a multiple of {PAGE_BYTES} up to arena_bytes "
                f"({self.arena_bytes})"
            )
        if not self.transports or any(name not in _TRANSPORTS for name in self.transports):
            raise UsageError(
                f"transports is {self.transports!r}: name one or more of {', '.join(_TRANSPORTS)}"
            )
        positive = {
            "quarantine_bytes_max": self.quarantine_bytes_max,
            "batch_blocks_max": self.batch_blocks_max,
            "put_window_bytes": self.put_window_bytes,
            "windows_inflight": self.windows_inflight,
            "submitted_max": self.submitted_max,
            "copy_threads": 1 if self.copy_threads is None else self.copy_threads,
            "deadline_s_max": self.deadline_s_max,
            "handshake_s_max": self.handshake_s_max,
            "redial_s": self.redial_s,
            "redial_max_s": self.redial_max_s,
            "return_after_s": self.return_after_s,
            "silent_misses_max": self.silent_misses_max,
            "silent_ping_s": self.silent_ping_s,
            "silent_deadline_least_s": self.silent_deadline_least_s,
            "spare_after_s": self.spare_after_s,
            "progress_s": self.progress_s,
            "progress_idle_s": self.progress_idle_s,
        }
        for name, value in positive.items():
            if not value > 0:
                raise UsageError(f"{name} is {value}: it must be above zero")

    @property
    def arena_bytes_whole(self) -> int:
        """The arena's size in whole chunks."""
        return -(-self.arena_bytes // self.chunk_bytes) * self.chunk_bytes
