"""Settings of an agent, with their reasons.

Each value is a limit or an interval; none changes a guarantee. Only the command line reads environment and
files.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ostraca_fabric.connection import ConnectionSettings
from ostraca_fabric.drives.drive_health import HealthSettings
from ostraca_fabric.drives.io_engine import FlashIoSettings
from ostraca_fabric.errors import UsageError, shown
from ostraca_fabric.flash.index import BLOCKS_MAX
from ostraca_fabric.model.extent import rounded_up
from ostraca_fabric.model.limits import check_above_zero, check_one_at_least
from ostraca_fabric.model.target import check_nqn
from ostraca_fabric.policies.endurance import EnduranceSettings
from ostraca_fabric.telemetry.http.app import HttpSettings
from ostraca_fabric.wire.address import TcpAddress, parse_address

MIB = 1 << 20
KERNEL, USERSPACE = "kernel", "userspace"
"""Values of ``nvme.initiator``."""

_EVENTS_MAX = 1 << 30
"""Longest memory of events, 63 GB: numpy refuses sizes beyond 64 bits with errors of its own."""

_TURN_LEAST_S = 0.01
BLOCKS_PER_SHARD_LEAST = 1024
"""An index keeps several segments of blocks, and one request may bring 4096: a smaller one would evict what
it just took in."""


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """Registered memory of the agent: staging for blocks in transfer, and the DRAM cache."""

    staging_bytes: int = 512 * MIB
    """Limit of memory for blocks in transfer. Memory beyond the reserve is borrowed from the cache, which
    evicts its least recently used blocks. Raise the limit when gets are DECLINED(OVERLOADED) while drives are
    idle."""

    reserve_bytes: int = 64 * MIB
    """Memory that the cache never takes, so that a few concurrent gets evict nothing."""

    cache_bytes: int = 512 * MIB
    """Memory for blocks kept after transfer. 0 turns the DRAM cache off."""

    cache_protected_share: float = 0.3
    """Share of the cache for blocks used more than once. 0.3 was best on a public trace of conversations,
    with caches of 1, 5 and 10 % of all blocks. Raise the share where few prefixes serve nearly all
    requests."""

    chunk_bytes: int = 32 * MIB
    """Unit of memory allocation. No block spans two chunks, so choose at least the largest block. """

    huge_pages: bool = False
    """Whether this memory is on huge pages reserved with ``vm.nr_hugepages`` or, in a pod, with
    ``hugepages-2Mi``. The agent does not start if too few are free. False: transparent huge pages."""

    put_share: float = 0.5
    """Share of staging for puts, so that gets never wait behind writes."""

    quarantine_share: float = 0.5
    """Share of staging for transfers not known to have ended, cached blocks included. Above, new transfers
    are declined."""

    worker_share: float = 0.25
    """Share of staging for one worker, cached blocks in transfer included, so that a stopped worker leaves
    memory to others."""

    drive_share: float = 0.125
    """Share of staging for blocks in transfer from and to one drive, unless a wave is alone there. Half of
    ``worker_share``; 64 MiB keep a drive of 7 GB/s busy for 9 ms."""

    @property
    def mapped_bytes(self) -> int:
        """Bytes mapped and prefaulted at start, shared by staging and cache."""
        return rounded_up(max(self.staging_bytes, self.cache_bytes + self.reserve_bytes), self.chunk_bytes)


@dataclass(frozen=True, slots=True)
class FlowSettings:
    """Sizes and limits of requests' work."""

    wave_bytes: int = 8 * MIB
    """Approximate size of a wave, the unit of transfer: large enough for little overhead, small enough that
    transfer and verification overlap."""

    get_part_bytes: int = 64 * MIB
    """Blocks of a get that hold staging and are read from a drive together; half as many if other requests of
    the worker hold staging. Each part costs the event loop a few turns. At most an eighth of staging, apart
    from a single wave."""

    put_group_bytes: int = 32 * MIB
    """Blocks of a put that hold staging and are committed together. Each group costs the shard owner an
    answer and a summary write."""

    write_behind_s: float = 0.05
    """Wait of staged blocks for others to share a flash write and a commit. Larger values cost less processor
    time per small put; staged blocks hold staging for longer. 0: no wait."""

    waves_ahead: int = 8
    """Concurrent waves of one request from the cache, or groups of a put."""

    reads_ahead: int = 16
    """Waves of one request to read from flash at once. Its drives share them evenly, with at least one part
    for each drive."""

    exists_within_s: float = 0.05
    """Wait of a put, while earlier placement epochs are live, for answers whether blocks exist there. If an
    agent does not answer in time, blocks stored there are written again."""

    requests_max: int = 256
    """Concurrent requests in the agent; more are DECLINED(OVERLOADED). Half of the slots are divided equally
    between connected tenants."""

    space_retry_s: float = 0.05
    """Retry interval of a put that waits for space. Lower the interval where shards have few segments and put
    latency matters; each retry costs a shard owner about 100 microseconds."""

    waiting_puts_max: int = 64
    """Puts in the agent that may wait for space; blocks of more are DECLINED(BUSY). A quarter of
    ``requests_max``, so that gets find a slot when flash is full; tenants have equal parts. 0: no put
    waits."""

    answer_margin_s: float = 0.002
    """Answers are sent this long before the caller's deadline."""

    deadline_max_s: float = 600.0
    """Longest deadline; longer deadlines are cut."""

    def __post_init__(self) -> None:
        """Refuse limits without any capacity."""
        check_one_at_least(
            self,
            "wave_bytes",
            "get_part_bytes",
            "put_group_bytes",
            "waves_ahead",
            "reads_ahead",
            "requests_max",
        )
        check_above_zero(self, "space_retry_s")
        if self.waiting_puts_max < 0:
            raise UsageError(f"waiting_puts_max is {self.waiting_puts_max}: set it to 0 or more")
        if not self.deadline_max_s > self.answer_margin_s:
            raise UsageError(
                f"deadline_max_s is {self.deadline_max_s}: set it above answer_margin_s ("
                f"{self.answer_margin_s}), or every request is answered late"
            )


@dataclass(frozen=True, slots=True)
class ScrubSettings:
    """Background reads of flash that find corrupted blocks."""

    bytes_s: float = 20e6
    """Read rate of a shard's scrub while the drive is idle; 0 turns scrubbing off. The default reads a full
    shard of 1 TB in 14 hours, with 1 % of a drive of 2 GB/s."""

    idle_s: float = 1.0
    """Idle time of the drive before a scrub read: gets never queue behind more than one."""

    chunk_bytes: int = 1 << 20
    """Approximate size of one scrub read; a longer block is read alone."""

    pause_s: float = 60.0
    """Pause after a pass, or without sealed segments."""

    def __post_init__(self) -> None:
        """Refuse a negative rate and an empty chunk."""
        check_above_zero(self, "pause_s")
        if self.bytes_s < 0 or self.chunk_bytes <= 0:
            raise UsageError("scrub.bytes_s must be 0 (no scrub) or above, and scrub.chunk_bytes above 0")


@dataclass(frozen=True, slots=True)
class OwnerSettings:
    """Timing and limits of a shard owner.

    A setting marked "same at all agents" must be equal in a fabric, because a successor waits by its own.
    """

    group_commit_s: float = 0.002
    """Wait of a commit for others to share its summary page."""

    hold_s: float = 30.0
    """Lifetime of a reservation, longer than any write takes. Afterwards the space of a dead writer returns.
    Same at all agents."""

    recovery_wait_s: float = 0.25
    """Wait of a put for a shard in recovery. Meanwhile its blocks hold staging memory."""

    opening_wait_s: float = 0.25
    """Wait of a put for a segment being opened, which takes a write of one page."""

    pause_max_s: float = 60.0
    """Age at which a write not yet submitted is dropped, because its agent was stopped. Less than
    ``late_write_s``, whose rest covers the path's time-outs."""

    pin_max_s: float = 10.0
    """Longest lifetime of a pin, and so the longest wait before a segment is reused. Same at all agents."""

    grant_s: float = 5.0
    """Time that a shard owner grants space and lists blocks after the membership store last confirmed its
    claims. Puts continue for as long when the store is down. Must not exceed ``etcd.lease_ttl_s``: then
    another agent may own the shards. Same at all agents."""

    late_write_s: float = 120.0
    """Longest time after a write's end, as its agent saw the end, until the write reaches the drive: delayed
    by a path, or by a stop of the agent (``pause_max_s`` of the time). No segment is reused sooner. Raise the
    limit where ``fast_io_fail_tmo`` of paths exceeds a minute. Same at all agents: a successor with a shorter
    wait writes where its predecessor still may."""

    adopt_every_s: float = 10.0
    """Interval between reads of summaries in which an earlier owner may still list blocks."""

    blocks_per_shard_max: int = 1 << 20
    """Limit of blocks in one shard's index, at most 48 bytes each. At the limit the oldest segment is
    evicted, even if flash has space. Raise the limit if shards stay there; docs/howto/plan-memory.md has the
    memory needed."""

    free_segments: int = 4
    """Segments emptied ahead of need, so that puts wait neither for eviction nor for readers of evicted
    blocks. At most a sixteenth of a shard's segments, or one of a few."""

    reinsertion_share: float = 0.12
    """Bytes that eviction may reinsert for each byte committed, from blocks read recently. Flash wears
    accordingly. 0 turns reinsertion off."""

    endurance: EnduranceSettings = field(default_factory=EnduranceSettings)
    """How much is written to flash, and which blocks first when not all may be. Set ``rated_dwpd`` wherever
    drives have to last."""

    scrub: ScrubSettings = field(default_factory=ScrubSettings)
    """How flash is read again while drives are idle."""

    def __post_init__(self) -> None:
        """Refuse an unusable index, and times that break guarantees."""
        check_above_zero(self, "hold_s", "pause_max_s", "pin_max_s", "grant_s", "adopt_every_s")
        check_one_at_least(self, "free_segments")
        if not self.late_write_s > self.pause_max_s:
            raise UsageError(
                f"late_write_s is {self.late_write_s} and pause_max_s {self.pause_max_s}: set late_write_s "
                "above pause_max_s, since a suspended agent and then its path may delay a write"
            )
        if not BLOCKS_PER_SHARD_LEAST <= self.blocks_per_shard_max <= BLOCKS_MAX:
            raise UsageError(
                f"owner.blocks_per_shard_max is {self.blocks_per_shard_max}: set it to "
                f"{BLOCKS_PER_SHARD_LEAST} to {BLOCKS_MAX} blocks, of 48 bytes each"
            )


@dataclass(frozen=True, slots=True)
class RequestSettings:
    """Limits of one connection, announced in the handshake."""

    frame_bytes_max: int = 4 * MIB
    """Longest message. A request of ``blocks_max`` blocks with 32-byte hashes takes about 0.4 MB."""

    blocks_max: int = 4096
    """Blocks in one request."""

    inflight_max: int = 64
    """Concurrent requests on one connection."""

    volumes_max: int = 1024
    """Open volumes on one connection."""

    def __post_init__(self) -> None:
        """Refuse limits without any capacity."""
        check_one_at_least(self, "frame_bytes_max", "blocks_max", "inflight_max", "volumes_max")


@dataclass(frozen=True, slots=True)
class NvmeSettings:
    """How this host reaches enclosures."""

    initiator: str = KERNEL
    """Host side of NVMe-oF: ``kernel``, or ``userspace`` for NVMe/TCP inside the agent. The latter needs no
    modules and no privileges, is slow, and knows neither secrets, RDMA nor reservations: for trials."""

    host_nqn: str = ""
    """NQN of this host, listed by enclosures among the admitted hosts; empty: derived from the agent's
    name."""

    secrets_dir: str = "/etc/ostraca/nvme-secrets"
    """Directory of DH-HMAC-CHAP secrets, one file for each enclosure, named as registered. Other users must
    have no access."""

    turn_s: float = 2.0
    """Interval between looks at the paths to each enclosure. The kernel restores lost paths; a drive that
    appears elsewhere is opened there after this time."""

    paths_wait_s: float = 20.0
    """Wait of a starting agent for its paths before serving without the rest."""

    io_queues: int = 2
    """Queues to each controller. Every queue is a connection at both ends: 288 hosts with two to each of 36
    enclosures make 31 thousand. Raise the number in small pods limited by one queue's processor."""

    keep_alive_s: int = 5
    """Interval of NVMe keep-alives to an enclosure, in whole seconds."""

    reconnect_delay_s: int = 2
    """Retry interval of a lost path, in whole seconds."""

    io_timeout_s: float = 15.0
    """Time that a command of the user-space initiator waits for its answer. Then the command fails, and its
    connection ends. The kernel has ``nvme_core.io_timeout`` instead."""

    fast_io_fail_s: int = 15
    """Time that I/O waits for a lost path without an alternative, in whole seconds. Gets are misses by then;
    longer waits only delay writes. Paths too late for ``owner.late_write_s`` are not connected."""

    reservations: bool = False
    """Whether agents reserve drives, where enclosures support reservations, so that agents that left can't
    write any more (ADR 0029). Set the same at all agents. Off because never run on a kernel with support."""

    hold_s: float = 300.0
    """Time that an enclosure outside the map stays connected after a check."""

    def __post_init__(self) -> None:
        """Refuse unusable combinations of values."""
        if self.initiator not in (KERNEL, USERSPACE):
            raise UsageError(f"nvme.initiator is {shown(self.initiator)}: set it to {KERNEL} or {USERSPACE}")
        if self.initiator == USERSPACE and self.reservations:
            raise UsageError(
                "nvme.reservations needs the kernel's initiator: set one of reservations and initiator back"
            )
        if self.host_nqn:
            check_nqn(self.host_nqn)
        if min(self.turn_s, self.paths_wait_s, self.hold_s, self.io_timeout_s) <= 0:
            raise UsageError("set turn_s, paths_wait_s, hold_s and io_timeout_s of nvme above 0")
        if min(self.io_queues, self.keep_alive_s, self.reconnect_delay_s, self.fast_io_fail_s) < 1:
            raise UsageError(
                "set io_queues, keep_alive_s, reconnect_delay_s and fast_io_fail_s of nvme to 1 or more"
            )


@dataclass(frozen=True, slots=True)
class RouterFeedSettings:
    """Feed of a shared cache for Dynamo's router."""

    volume: str = ""
    """Volume of the feed, as TENANT/NAME; empty: no agent keeps names. Same at all agents."""

    bind: str = ""
    """Address at which this agent announces pages, ``tcp://HOST:PORT``; empty at all agents but one."""

    key_prefix: str = "ostraca"
    """Prefix of pages' names, as in the workers' declaration."""

    router_tenant: str = "default"
    """Tenant of the pages at the router, as in the workers' declaration."""

    names_max: int = 65_536
    """Names kept by each agent until the feed has them, about 100 bytes each."""

    pages_max: int = 200_000
    """Known pages, about 500 bytes each; the oldest are withdrawn. The router forgets everything above a
    million."""

    round_s: float = 1.0
    """Time between two lookups of a page ..."""

    pages_per_s: int = 20_000
    """... unless more pages than this limit are known."""

    repeat_s: float = 30.0
    """Time after which pages are announced again: a router that has missed a message forgets all pages."""

    def __post_init__(self) -> None:
        """Refuse limits without any capacity, and a feed without a volume."""
        check_one_at_least(self, "names_max", "pages_max", "pages_per_s")
        check_above_zero(self, "round_s", "repeat_s")
        if self.volume.count("/") != bool(self.volume) or (self.bind and not self.volume):
            raise UsageError(
                f"router_feed.volume is {shown(self.volume)}: give TENANT/NAME, or neither volume nor bind"
            )
        if self.bind and not isinstance(parse_address(self.bind), TcpAddress):
            raise UsageError(f"router_feed.bind is {shown(self.bind)}: give tcp://HOST:PORT")


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """Settings of one agent."""

    memory: MemorySettings = field(default_factory=MemorySettings)
    flow: FlowSettings = field(default_factory=FlowSettings)
    owner: OwnerSettings = field(default_factory=OwnerSettings)
    requests: RequestSettings = field(default_factory=RequestSettings)
    connections: ConnectionSettings = field(default_factory=ConnectionSettings)
    health: HealthSettings = field(default_factory=HealthSettings)
    """Health limits of each drive."""

    flash_io: FlashIoSettings = field(default_factory=FlashIoSettings)
    http: HttpSettings = field(default_factory=HttpSettings)
    nvme: NvmeSettings = field(default_factory=NvmeSettings)
    router_feed: RouterFeedSettings = field(default_factory=RouterFeedSettings)

    events_max: int = 65_536
    """Events kept for `ostraca explain`, 59 bytes each: 3.9 MB. Each block looked up, got, put or evicted is
    an event. Raise the limit for longer explanations."""

    unhit_volumes_max: int = 1024
    """Volumes watched for puts without any hit, about 300 bytes each; beyond the limit the least recently
    used are forgotten."""

    secrets_check_s: float = 5.0
    """Interval between looks at files of secrets. Removed tokens are then refused, and their sessions
    closed."""

    turn_s: float = 1.0
    """Interval between turns of the controller when nothing has changed."""

    reopen_backoff_s: float = 30.0
    """Backoff after a shard could not be opened or a part of the shard has crashed."""

    placement_ttl_s: float = 7 * 86_400.0
    """Longest life of an earlier placement epoch for look-ups. Most end sooner, once flash was written over.
    Lower the limit if another change of enclosures waits for the end."""

    placement_turn_s: float = 60.0
    """Interval at which the agent that ends earlier placement epochs asks shard owners for their ring
    progress."""

    drain_s: float = 10.0
    """Time limit of a graceful shutdown: puts acknowledged as STAGED, handover of shards, workers' move to
    other agents. Keep above the longest deadline in use."""

    def __post_init__(self) -> None:
        """Refuse unusable combinations of values."""
        memory = self.memory
        _check_late_writes(self.owner, self.nvme)
        check_above_zero(self, "secrets_check_s", "reopen_backoff_s", "placement_ttl_s", "placement_turn_s")
        if self.turn_s < _TURN_LEAST_S:
            raise UsageError(
                f"turn_s is {self.turn_s}: set it to {_TURN_LEAST_S} or more, so that the controller "
                "leaves time for requests"
            )
        if not 1 <= self.events_max <= _EVENTS_MAX:
            raise UsageError(f"events_max is {self.events_max}: keep 1 to {_EVENTS_MAX}")
        check_one_at_least(self, "unhit_volumes_max")
        if memory.chunk_bytes % (2 * MIB) or memory.chunk_bytes <= 0:
            raise UsageError(f"memory.chunk_bytes is {memory.chunk_bytes}: set it to a multiple of {2 * MIB}")
        if memory.staging_bytes < 2 * memory.chunk_bytes:
            raise UsageError(
                f"memory.staging_bytes is {memory.staging_bytes}: set it to at least two chunks of "
                f"{memory.chunk_bytes} bytes, for gets and for puts"
            )
        if not all(
            0 < part <= 1
            for part in (
                memory.put_share,
                memory.quarantine_share,
                memory.worker_share,
                memory.drive_share,
            )
        ):
            raise UsageError(
                "set memory.put_share, memory.quarantine_share, memory.worker_share and memory.drive_share "
                "above 0, up to 1"
            )
        if not 0 <= memory.cache_protected_share <= 1:
            raise UsageError(
                f"memory.cache_protected_share is {memory.cache_protected_share}: set it to a share of the "
                "cache, 0 to 1"
            )


def _check_late_writes(owner: OwnerSettings, nvme: NvmeSettings) -> None:
    """Raise UsageError if the user-space initiator could deliver a write after ``late_write_s``.

    A write waits for its answer; then the enclosure drops its data within twice the keep-alive time.
    """
    delay_s, allowed_s = nvme.io_timeout_s + 2 * nvme.keep_alive_s, owner.late_write_s - owner.pause_max_s
    if nvme.initiator == USERSPACE and delay_s > allowed_s:
        raise UsageError(
            f"a write may arrive {delay_s:g} s late, by nvme.io_timeout_s and twice nvme.keep_alive_s: lower "
            f"them, or raise owner.late_write_s, which minus owner.pause_max_s is {allowed_s:g} s"
        )
