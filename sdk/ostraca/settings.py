"""Settings of a client.

The client reads the settings once, on connecting. Only the outermost functions of the SDK read the
environment; all others get arguments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path

from ostraca_fabric.errors import UsageError
from ostraca_fabric.model.extent import PAGE_BYTES
from ostraca_fabric.model.limits import described, flag, number, text, whole

MIB = 1 << 20
_TRANSPORTS = ("nixl", "inline")

SECONDS_MAX = 1e9
"""Longest time in a setting: some thirty years, countable by every clock and lock."""

COUNT_MAX = 1 << 46
"""Largest count or size: the most that a process can map."""

_ENDLESS = ("failback_after_s", "spare_after_s")
"""Times that may be ``math.inf``."""

_PATH_MAX = 4096


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """Settings of one client, with every limit of the SDK."""

    arena_bytes: int = 256 * MIB
    """Memory for block transfers. The size bounds the bytes under way at once, not a batch: a larger batch
    moves in parts. Raise it if several threads load at once; the size is rounded up to whole chunks.
    """

    chunk_bytes: int = 32 * MIB
    """Unit of the arena: no slot crosses a chunk's end, and no block may be larger than a chunk. Lower it for
    a small arena.
    """

    prefault: bool = False
    """Whether to fault the arena's pages in on connecting (about 0.1 s for 256 MiB) instead of at first use.
    """

    transports: tuple[str, ...] = _TRANSPORTS
    """Transports to offer the agent, best first. A transport that can't be set up in this process is left
    out. ``("inline",)`` keeps NIXL out of the process.
    """

    direct_drives: tuple[str, ...] = ()
    """Drives that this worker may read itself: absolute paths, or glob patterns of paths, of files and block
    devices. Links are refused. The worker reads only drives of the agent's fabric, and never writes. Paths
    never come from an agent. Reading a drive requires permission to read all blocks of all its tenants.
    """

    direct_memory: bool = True
    """Whether this worker copies blocks out of the memory of an agent on its host, and the agent blocks of
    puts out of this worker's. Requires a unix socket, the agent's user or root, and the kernel's permission
    to trace the other process. Otherwise the agent moves blocks to and from the arena.
    """

    direct_silent_s: float = 2.0
    """Time without any end of a read after which a drive counts as silent. Its blocks under way are misses
    then, and the agent reads later ones. Memory under reads of a silent drive stays in use until their end.
    """

    direct_retry_s: float = 30.0
    """Time for which a drive that failed or was silent is not read directly."""

    token_file: str = ""
    """File with the agents' token and nothing else. Each dial reads the file, so the token may be replaced
    during the client's life. ``credentials`` of ``connect`` take precedence. If empty, OSTRACA_TOKEN_FILE may
    name the file.
    """

    tls_ca: str = ""
    """PEM file of CA certificates for agents, for addresses that begin with ``tls://``. If empty,
    OSTRACA_TLS_CA names the file.
    """

    tls_cert: str = ""
    """PEM file of this worker's own certificate, if agents request a certificate from workers
    (``tls.workers_show_certificates``). The certificate does not replace the token. If empty,
    OSTRACA_TLS_CERT names the file.
    """

    tls_key: str = ""
    """File of the certificate's private key, not encrypted. If empty, OSTRACA_TLS_KEY names the file."""

    quarantine_bytes_max: int = 128 * MIB
    """Limit of arena bytes under transfers not known to have ended; beyond it, operations are declined. The
    default is half of the default arena, because less than half would be too small for use.
    """

    batch_blocks_max: int = 65536
    """Limit of blocks in a get, put, lookup or prefetch; more are a UsageError. Bounds the memory for a
    call's bookkeeping.
    """

    put_window_bytes: int = 32 * MIB
    """Approximate size of a put's requests: the agent fetches one request while the next is gathered."""

    windows_inflight: int = 4
    """Requests of one get or put under way at once."""

    copy_threads: int | None = None
    """Threads that verify and copy a wave: the client's driver, and a pool of the others. None chooses 1 for
    up to three usable CPUs, else a quarter of them, at least 2 and at most 4 (``ostraca._memory.copy_pool``
    gives the reason). Set the number if a container's CPU quota is below the number of visible CPUs; 1
    creates no threads.
    """

    gpu_tags: bool = False
    """Whether GPUs, not the host, compute the tags of blocks in CUDA tensors. Copies between host and GPU are
    then verified, too. Needs ``ostraca[gpu]`` and some tens of MiB of free memory on each GPU. The first
    operation on a GPU compiles kernels, which takes seconds. Never run on a GPU.
    """

    gpu_reads: bool = False
    """Whether drives are read into GPU memory, for gets into CUDA tensors: needs ``gpu_tags``, kvikio, and
    drives that may be read directly. Takes as much memory of the GPU as such a get has in the arena. Where
    this can't work, blocks take their way through the arena. Never run on a GPU.
    """

    caller_connections: bool = True
    """Whether callers' threads do brief blocking operations themselves, on up to four further connections.
    The first opens after a few such operations. Otherwise the client's own thread does all.
    """

    submitted_max: int = 4096
    """Operations submitted and not yet taken. Further operations are declined at once as OVERLOADED, so that
    memory stays bounded if a caller never takes results.
    """

    deadline_s_max: float = 3600.0
    """Longest deadline; a longer one is a mistake in units and a UsageError."""

    handshake_s_max: float = 5.0
    """Longest reconnecting dial. The operation in need of the connection still ends by its own deadline."""

    redial_s: float = 0.5
    """Time after a failed dial during which operations end at once as DISCONNECTED. A dead agent then costs
    only one operation its deadline.
    """

    redial_max_s: float = 5.0
    """Longest pause between background probes of a silent address. Pauses begin with ``redial_s`` and double;
    operations end at once meanwhile. Without a second agent, a recovered agent may go unnoticed for this
    long.
    """

    failback_after_s: float = 10.0
    """Time with a less preferred agent before an attempt at failback, and between attempts. Addresses are
    in order of preference, usually with the own host's agent first. Failback loses no operation under way.
    After a return that did not last, the pause doubles, at most to 32 times ``failback_after_s``.
    ``math.inf`` stays with an agent until the connection is lost.
    """

    silent_misses_max: int = 2
    """Operations in a row that end at their deadline, without any bytes from the agent, before the client
    sends a Ping. A stopped agent therefore costs this number of deadlines, plus ``silent_ping_s``. Raise it
    only if Pings are too many.
    """

    silent_ping_s: float = 0.5
    """Time without any bytes after the Ping until the agent counts as silent. The client then gives the
    connection up as lost and tries the next address. A busy agent answers in well under a millisecond; an
    agent on two crowded cores took up to 0.2 s. Lower it for agents with cores of their own. Raise it, for
    example to ``deadline_s_max``, to wait for stopped agents.
    """

    silent_deadline_min_s: float = 0.05
    """Missed deadlines shorter than this don't count against the agent."""

    spare_after_s: float = 1.0
    """Time after a connect at which a client with several addresses prepares the next arena offer, with NIXL.
    Failover then takes half the time. The preparation takes 25 ms of a core in a thread of its own, 5 MB, ten
    file descriptors, and a further registration of the arena. The delay leaves the cores to the first
    operations after the connect. Raise it if any of these resources is scarce.
    """

    progress_s: float = 0.0005
    """Poll interval of the transport while a caller waits, for transports with an active part on the passive
    side.
    """

    progress_idle_s: float = 0.01
    """Poll interval while no caller waits and only memory in quarantine is due."""

    def __post_init__(self) -> None:
        """Refuse invalid values, with a remedy. Raises UsageError."""
        for field in fields(self):
            object.__setattr__(
                self, field.name, _checked(field.name, getattr(self, field.name), field.default)
            )
        if self.chunk_bytes > self.arena_bytes or self.chunk_bytes % PAGE_BYTES:
            raise UsageError(
                f"chunk_bytes is {self.chunk_bytes}: take a multiple of {PAGE_BYTES} up to arena_bytes "
                f"({self.arena_bytes})"
            )
        if self.gpu_reads and not self.gpu_tags:
            raise UsageError(
                "gpu_reads is True without gpu_tags: set both, as the GPU must check such blocks"
            )

    @property
    def arena_bytes_whole(self) -> int:
        """Size of the arena in whole chunks."""
        return -(-self.arena_bytes // self.chunk_bytes) * self.chunk_bytes


def _checked(name: str, value: object, default: object) -> object:
    """Return a setting, converted to the type of its default.

    Raises UsageError.
    """
    if isinstance(default, tuple):
        return _checked_transports(value) if name == "transports" else _checked_patterns(name, value)
    if name == "copy_threads" and value is None:
        return None
    if isinstance(default, bool):
        return flag(name, value)
    if isinstance(default, str):
        return text(name, str(value) if isinstance(value, Path) else value, characters_max=_PATH_MAX)
    if isinstance(default, float):
        seconds = number(name, value)
        if not (0 < seconds <= SECONDS_MAX or (seconds == math.inf and name in _ENDLESS)):
            raise UsageError(f"{name} is {seconds}: pass a number above zero, at most {SECONDS_MAX:.0e} s")
        return seconds
    return whole(name, value, least=1, most=COUNT_MAX)


def _checked_transports(value: object) -> tuple[str, ...]:
    if (
        not isinstance(value, (list, tuple))
        or not value
        or not all(isinstance(each, str) and each in _TRANSPORTS for each in value)
    ):
        raise UsageError(
            f"transports is {described(value)}: name at least one of {', '.join(_TRANSPORTS)}, in a list"
        )
    return tuple(str.__str__(each) for each in value)


def _checked_patterns(name: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)):
        raise UsageError(
            f"{name} is {described(value)}: pass absolute paths or patterns of paths, in a tuple"
        )
    patterns = tuple(text(name, each, characters_max=_PATH_MAX) for each in value)
    for each in patterns:
        if not each.startswith("/") or "\0" in each:
            raise UsageError(f"{name} names {described(each)}: pass an absolute path, such as /dev/nvme*n1")
    return patterns
