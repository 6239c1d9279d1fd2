"""Status of daemons: an agent's and an enclosure's.

``ostraca status`` shows an ``AgentStatus``; ``StatusDone`` carries one as msgpack.
"""

from __future__ import annotations

import msgspec

from ostraca_fabric.model.inventory import DriveReport
from ostraca_fabric.telemetry.conditions import Condition
from ostraca_fabric.telemetry.requests import OperationTally
from ostraca_fabric.telemetry.unavailable import Unavailable


class OwnershipStatus(msgspec.Struct, frozen=True):
    """Write permission of a shard's owner and of earlier owners.

    See docs/explanation/ownership.md.
    """

    may_write_for_s: float | None = None
    """Remaining time for allocating space and writing summaries, unless the membership store confirms the
    claim earlier. None if no other agent can own the shard."""

    why_fenced: str = ""
    """Why writing is forbidden, as a clause; empty if allowed, or during recovery."""

    is_superseded: bool = False
    """Whether another owner has a higher epoch, so that this owner never writes again."""

    granted_segments: int = 0
    granted_ahead_segments: int = 0
    """Granted segments next in line to be opened."""

    withheld_segments: int = 0
    """Segments under grants of earlier owners: readable, but not written."""

    retires_in_s: float | None = None
    """Time until the last of the earlier grants may be retired; None without such a grant."""

    adopted_blocks: int = 0
    """Blocks listed by an earlier owner after this owner's start, and found since."""

    why_no_space: str = ""
    """Why no space is available despite permission to write, as a clause; empty while there is space."""

    space_in_s: float | None = None
    """Longest time until space is available; None if available now, or if unknown."""

    @property
    def is_fenced(self) -> bool:
        """Whether writing is forbidden although the shard is recovered."""
        return bool(self.why_fenced)


class ShardStatus(msgspec.Struct, frozen=True):
    """Shard, as known to its owner."""

    shard: str
    owner_epoch: int
    blocks: int
    used_bytes: int
    """Bytes of the blocks available to gets."""

    size_bytes: int
    """Bytes of the data areas of all segments."""

    evicted_blocks: int
    is_failing: bool
    """Whether the drive failed an operation since the shard was opened, or a crash ended writing."""

    recovered: float = 1.0
    """Share of segments with summaries already read; below 1, the shard stores no new blocks."""

    reinserted_blocks: int = 0
    """Blocks reinserted before the eviction of their segment, since this agent owns the shard."""

    written_bytes: int = 0
    """Bytes allocated to writers or written as summaries, since this agent owns the shard."""

    written_bytes_per_day: float = 0.0
    """At the rate of the last day; in the first day, at the rate since the beginning, taken over at least
    an hour."""

    budget_bytes_per_day: float = 0.0
    """Write budget of the shard; 0 means no limit."""

    budget_level_bytes: float = 0.0
    """Bytes allowed now; negative after too many writes. 0 if there is no limit."""

    years_left: float | None = None
    """Remaining life of the flash at this rate, at most 1000 years; None without a known rating. Writes
    before this agent owned the shard are unknown and not counted."""

    scrubbed_bytes: int = 0
    """Bytes read again while the drive was idle, since this agent owns the shard."""

    scrub_passes: int = 0
    """Number of complete passes over all sealed segments."""

    scrubbed_ago_s: float | None = None
    """Time since the end of the last pass; None before the first."""

    blocks_max: int = 0
    """Limit of the index. At the limit, the oldest blocks are evicted even with free flash."""

    index_bytes: int = 0
    """Memory of the index at its limit."""

    beyond_limit_blocks: int = 0
    """Blocks on flash beyond the index limit when this agent became owner: misses, the oldest of all."""

    unreadable_segments: int = 0
    """Segments with an unreadable part of a summary when this agent became owner, and not rewritten since.
    Blocks listed in the unreadable parts are misses."""

    volumes_recorded: int = 0
    """Volumes in the copy beside the superblock, for rebuilding a lost fabric."""

    volumes_left_out: int = 0
    """Volumes without room in the copy."""

    ownership: OwnershipStatus = OwnershipStatus()
    pools: tuple[tuple[int, int], ...] = ()
    """For each pool in use: (pool, bytes allocated in its segments). A recovered segment counts as full."""

    is_index_full: bool = False
    """Whether blocks were last evicted for room in the index, with room on flash."""


class DriveStatus(msgspec.Struct, frozen=True):
    """Drive, as seen by one agent. Counts since the agent's start.

    See ``drive_health``.
    """

    drive: str
    condition: str = "good"
    """``good``, ``suspect`` or ``failed``."""

    why: str = ""
    """Problem, as the predicate of a sentence about the drive; empty without a problem."""

    reads_held_off: bool = False
    """Whether the circuit breaker is open: reads fail at once, except for occasional trials."""

    writes_held_off: bool = False
    faults: int = 0
    """Faults counted against the drive at present."""

    failed_reads: int = 0
    failed_writes: int = 0
    """Failed writes and flushes."""

    silences: int = 0
    """Number of times the drive completed no operation for too long despite pending work."""

    damaged_blocks: int = 0
    """Blocks found damaged by this agent as shard owner."""

    refused: int = 0
    """Operations not started because of an open circuit breaker or a failed drive."""

    queued_blocks: int = 0
    """Blocks submitted and not yet completed."""

    hits: int = 0
    """Blocks found on the drive by gets of this agent's workers."""


class PathStatus(msgspec.Struct, frozen=True):
    """Path from an agent's host to a controller of an enclosure."""

    controller: str
    is_live: bool
    detail: str = ""


class EnclosurePathStatus(msgspec.Struct, frozen=True):
    """Paths from one agent's host to an enclosure of the map."""

    enclosure: str
    drives: int
    """Number of drives the agent can open."""

    paths: tuple[PathStatus, ...] = ()
    trouble: str = ""
    """Why the whole enclosure is unreachable, as a clause; empty if partly reachable."""

    reservations: str = ""
    """State of this host's NVMe reservations, as in ``held``; empty without reservations in use."""

    initiator: str = ""
    """Host side of the paths: ``kernel``, ``userspace``, or ``files``."""


class AskCounters(msgspec.Struct):
    """Outcomes of requests to another agent. Abandoned requests are not counted."""

    answered: int = 0
    refused: int = 0
    """The agent answered with a failure, such as overload, or too many requests waited to be sent."""

    late: int = 0
    """Not answered within the deadline."""

    unreachable: int = 0
    """No connection, a lost connection, or an open circuit breaker."""


class PeerStatus(msgspec.Struct, frozen=True):
    """Another agent, as seen over one agent's connection. Counts since the agent's start."""

    agent: str
    is_connected: bool = False
    is_held_off: bool = False
    """Whether the circuit breaker is open: requests are misses at once, except for occasional trials."""

    held_off: int = 0
    """Number of times the circuit breaker opened."""

    failures: int = 0
    """Missed deadlines and failed connection attempts."""

    inflight: int = 0
    """Requests waiting for the peer's answer."""

    waiting: int = 0
    """Requests waiting to be sent, because of the peer's limit of concurrent requests."""

    why: str = ""
    """Last failure; empty while all is well."""

    asks: AskCounters = msgspec.field(default_factory=AskCounters)
    is_refused: bool = False
    """Whether the peer refused this agent's token or certificate at the last attempt."""


class MembershipStatus(msgspec.Struct, frozen=True):
    """State of one agent's access to the membership store, and of the agent's map."""

    silent_s: float = 0.0
    """Time without an answer; 0 while answers arrive, refusals and incredible answers included."""

    trouble: str = ""
    """Why the last request left the validity of the agent's claims unconfirmed; empty if confirmed."""

    map_trouble: str = ""
    """Why the map may be incomplete or old; empty while known to be complete and current."""

    has_map: bool = True
    """Whether the agent has read the map since its start."""


class ClaimCounters(msgspec.Struct):
    """Outcomes of an agent's shard claims since the agent's start."""

    made: int = 0
    """Claims still valid after recovery of their shard; renewed claims after a lease's end included."""

    lost: int = 0
    """Claims ended with the lease, or suddenly held by another agent."""

    handed_over: int = 0
    """Shards handed over in order, without any operation in progress."""


class PrefetchCounters(msgspec.Struct):
    """Outcomes of blocks prefetched into the DRAM cache.

    Blocks in neither of the other counts are still in the cache, unread.
    """

    blocks: int = 0
    bytes: int = 0
    useful_blocks: int = 0
    """Got from the cache later."""

    useful_bytes: int = 0
    useless_blocks: int = 0
    """Dropped from the cache before any get."""

    useless_bytes: int = 0


class EstimateCounters(msgspec.Struct):
    """Estimated and real durations of loads from flash.

    Only loads with a recompute time from the caller, admitted and not cut short, are counted.
    """

    loads: int = 0
    estimated_s: float = 0.0
    took_s: float = 0.0
    error_s: float = 0.0
    """Sum of the absolute differences between estimate and duration."""


class AgentCounters(msgspec.Struct, frozen=True):
    """Most requested counts since the agent's start, in blocks unless named bytes."""

    get_hits: int = 0
    get_hits_from_cache: int = 0
    get_misses: int = 0
    get_late: int = 0
    get_declined: int = 0
    get_bytes: int = 0
    put_committed: int = 0
    put_exists: int = 0
    put_declined: int = 0
    put_bytes: int = 0
    damaged: int = 0
    """Blocks read from flash with a failed tag check."""

    found_earlier: int = 0
    """Blocks found by lookups, gets and prefetches only at their place in an earlier placement epoch."""

    prefetched: PrefetchCounters = msgspec.field(default_factory=PrefetchCounters)
    estimates: EstimateCounters = msgspec.field(default_factory=EstimateCounters)
    get_hits_from_staging: int = 0
    """Blocks of puts delivered before their commit."""

    get_hits_direct: int = 0
    """Blocks that workers read from drives themselves."""


class OverridesStatus(msgspec.Struct, frozen=True):
    """Operators' overrides at run time, as known to one agent."""

    revision: int = 0
    """Revision of the last known override."""

    settings: dict[str, bool | int | float | str] = {}
    """Live settings in force, by name; all others have the value of the agent's own settings."""

    switched: dict[str, str] = {}
    """Volumes switched to another state than on: tenant/name to the switch's value."""


TENANTS_MAX = 64
"""Most entries for tenants in an agent's status. With more tenants, the last entry is the sum
OTHER_TENANTS."""

OTHER_TENANTS = "(others)"
"""Not a possible tenant name, because of the brackets."""


class TenantStatus(msgspec.Struct, frozen=True):
    """Use of one agent by one tenant."""

    tenant: str
    connections: int = 0
    """Connections of the tenant's workers."""

    requests: int = 0
    """Requests in progress, including requests for workers of other agents."""

    staging_bytes: int = 0
    cache_bytes: int = 0


class UnhitVolume(msgspec.Struct, frozen=True):
    """Volume without any hit since the agent began to count."""

    volume: str
    """Tenant and name."""

    put_blocks: int
    asked_blocks: int
    """Blocks requested since the first put, and not found."""


class Unhit(msgspec.Struct, frozen=True):
    """Volumes with puts and lookups but no hit."""

    count: int = 0
    volumes: tuple[UnhitVolume, ...] = ()
    """The most recently used of the volumes."""


class AgentStatus(msgspec.Struct, frozen=True):
    """An agent's view of itself and its shards."""

    agent: str
    start_id: str
    version: str
    uptime_s: float
    transports: tuple[str, ...]
    sentence: str
    """The controller's last decision and the reason."""

    workers: int
    staging_bytes: int
    staging_used_bytes: int
    quarantined_bytes: int
    cache_bytes: int
    cache_used_bytes: int
    counters: AgentCounters
    shards: tuple[ShardStatus, ...]
    agents: tuple[tuple[str, str], ...]
    """All agents of the fabric: (id, first address)."""

    operations: tuple[OperationTally, ...] = ()
    """Outcomes of lookups, gets, puts and prefetches. Blocks of a put are counted once their fate is
    known, possibly long after the put's answer."""

    quarantined_cached_blocks: int = 0
    """Blocks of the DRAM cache in quarantine, counted once for each transfer not known to have ended."""

    quarantined_cached_bytes: int = 0
    drives: tuple[DriveStatus, ...] = ()
    """All drives with a path from this agent."""

    conditions: tuple[Condition, ...] = ()
    """Readiness for gets (``ready``), and other conditions for the operator."""

    peers: tuple[PeerStatus, ...] = ()
    """All other agents with earlier requests from this agent."""

    membership: MembershipStatus = MembershipStatus()
    claims: ClaimCounters = msgspec.field(default_factory=ClaimCounters)
    paths: tuple[EnclosurePathStatus, ...] = ()
    """All enclosures reached by NVMe-oF, or as files with a target."""

    tenants: tuple[TenantStatus, ...] = ()
    """Tenants with connections, requests in progress, or blocks in the DRAM cache."""

    purged: int = 0
    """Revision of overrides up to which no erased block is served any more."""
    overrides: OverridesStatus = OverridesStatus()
    unserved: Unavailable = Unavailable()
    owners: tuple[tuple[str, int], ...] = ()
    """For each agent with shards in this agent's map: (agent, number of shards)."""

    unhit: Unhit = Unhit()
    lost_log_lines: int = 0
    """Log lines dropped because of a slow reader or a failed write."""

    flash_io: str = ""
    """Way of flash I/O: ``io_uring`` or ``threads``; empty before the first drive."""


def for_worker(status: AgentStatus, tenant: str) -> AgentStatus:
    """Return an agent's status for workers of a tenant, without names, volumes and use of other tenants."""
    its, replace = f"{tenant}/", msgspec.structs.replace
    unhit = tuple(each for each in status.unhit.volumes if each.volume.startswith(its))
    switched = {name: state for name, state in status.overrides.switched.items() if name.startswith(its)}
    return replace(
        status,
        tenants=tuple(each for each in status.tenants if each.tenant == tenant),
        unhit=Unhit(len(unhit), unhit),
        overrides=replace(status.overrides, switched=switched),
        shards=tuple(replace(shard, pools=()) for shard in status.shards),
    )


class EnclosureDaemonStatus(msgspec.Struct, frozen=True):
    """Status of an enclosure, from the enclosure's daemon."""

    enclosure: str
    start_id: str
    version: str
    nqn: str
    controllers: tuple[str, ...]
    hosts: tuple[str, ...]
    """NQNs of the admitted hosts; empty means all hosts."""

    drives: tuple[DriveReport, ...]
    sentence: str
    """The last turn's decision and the reason."""

    uptime_s: float
    turns: int
    steps_failed: int
    conditions: tuple[Condition, ...] = ()
    """Whether hosts find drives here (``ready``), and other conditions for the operator."""

    lost_log_lines: int = 0
    """Log lines dropped because of a slow reader or a failed write."""

    target: str = ""
    """Target side of the exports: ``nvmet``, ``userspace``, or ``files``."""
