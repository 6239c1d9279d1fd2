"""What a daemon believes: an agent, as ``ostraca status`` shows it and ``StatusDone`` carries it, and an
enclosure's.
"""

from __future__ import annotations

import msgspec

from ostraca_fabric.conditions import Condition
from ostraca_fabric.inventory import DriveReport
from ostraca_fabric.tallies import OperationTally
from ostraca_fabric.unserved import Unserved


class OwnershipStatus(msgspec.Struct, frozen=True):
    """What the owner of a shard may write, and what earlier owners may: see docs/explanation/ownership.md."""

    may_write_for_s: float | None = None
    """How long space is handed out and summaries are written, unless the membership store says before that
    the claim still stands. None where no other agent can own the shard."""

    why_fenced: str = ""
    """Why nothing may be written, as a clause; empty when it may, or is recovering."""

    is_superseded: bool = False
    """Whether another owner has a higher epoch: then nothing is ever written again under this one."""

    granted_segments: int = 0
    granted_ahead_segments: int = 0
    """Of these, how many are next in line to be opened."""

    withheld_segments: int = 0
    """Under grants of earlier owners: got from, and not written to."""

    retires_in_s: float | None = None
    """How long until the last of those grants may be retired; None when there is none."""

    adopted_blocks: int = 0
    """Listed by an earlier owner after this one had begun, and found."""

    why_no_space: str = ""
    """Why it has no space to hand out though it may write, as a clause; empty while it has some."""

    space_in_s: float | None = None
    """How long until it has some again, at most; None where it has, or nobody can say."""

    @property
    def is_fenced(self) -> bool:
        """Whether nothing may be written though the shard is recovered."""
        return bool(self.why_fenced)


class ShardStatus(msgspec.Struct, frozen=True):
    """One shard, as its owner sees it."""

    shard: str
    owner_epoch: int
    blocks: int
    used_bytes: int
    """Bytes of the blocks that can be got."""

    size_bytes: int
    """Bytes of the data areas of all segments."""

    evicted_blocks: int
    is_failing: bool
    """Whether its drive failed an operation since the shard was opened, or a crash ended its writing."""

    recovered: float = 1.0
    """The share of its segments whose summaries have been read; below 1 it stores nothing yet."""

    carried_blocks: int = 0
    """Copied forward out of segments that were to be evicted, since this agent began to own it."""

    written_bytes: int = 0
    """Handed out to writers, and written as summaries, since this agent began to own it."""

    written_bytes_per_day: float = 0.0
    """At the rate of the last day; before a day has passed, of the time since then, at least an hour."""

    budget_bytes_per_day: float = 0.0
    """What it may be written; 0 where nothing limits it."""

    budget_level_bytes: float = 0.0
    """What may be written now; below zero when too much was. 0 where nothing limits it."""

    years_left: float | None = None
    """How long the flash lasts at this rate, up to 1000 years; None where its rating is not known. What was
    written before this agent began to own it is not known, and not counted."""

    scrubbed_bytes: int = 0
    """Read again while its drive was idle, since this agent began to own it."""

    scrub_passes: int = 0
    """How often all of its sealed segments were."""

    scrubbed_ago_s: float | None = None
    """How long ago the last pass ended; None before the first."""

    blocks_max: int = 0
    """The limit of its index. At it the oldest blocks are evicted, though there is flash left."""

    index_bytes: int = 0
    """Memory that its index takes when it is at its limit."""

    beyond_limit_blocks: int = 0
    """Blocks that were on flash when this agent began to own it, and that its index was not allowed to list:
    misses, the oldest of all."""

    unreadable_segments: int = 0
    """Segments of whose summaries something could not be read when this agent began to own it, and that were
    not written anew since: the blocks that it listed are misses."""

    volumes_recorded: int = 0
    """Volumes in the copy beside its superblock, from which a lost fabric is rebuilt."""

    volumes_left_out: int = 0
    """Volumes that found no room in it."""

    ownership: OwnershipStatus = OwnershipStatus()
    pools: tuple[tuple[int, int], ...] = ()
    """Of each pool that has any: (pool, bytes handed out in its segments). Segments that were recovered count
    whole."""


class DriveStatus(msgspec.Struct, frozen=True):
    """One drive, as one agent sees it: see ``drive_health``. Counts since the agent started."""

    drive: str
    condition: str = "good"
    """``good``, ``suspect`` or ``failed``."""

    why: str = ""
    """What is wrong, as the predicate of a sentence about the drive; empty when nothing is."""

    reads_held_off: bool = False
    """Whether its breaker is open: reads fail at once, and are tried now and then."""

    writes_held_off: bool = False
    faults: int = 0
    """Held against it now."""

    failed_reads: int = 0
    failed_writes: int = 0
    """Flushes as well."""

    silences: int = 0
    """How often it had work and ended nothing for too long."""

    damaged_blocks: int = 0
    """Found damaged by this agent as their owner."""

    refused: int = 0
    """Operations that were not begun because it was held off, or had failed."""

    queued_blocks: int = 0
    """Submitted and not ended."""

    hits: int = 0
    """Blocks that gets of this agent's workers found there."""


class PathStatus(msgspec.Struct, frozen=True):
    """One controller of an enclosure, as one agent's host reaches it."""

    controller: str
    is_live: bool
    detail: str = ""


class EnclosurePathStatus(msgspec.Struct, frozen=True):
    """An enclosure of the map, as one agent's host reaches it."""

    enclosure: str
    drives: int
    """Those that can be opened."""

    paths: tuple[PathStatus, ...] = ()
    trouble: str = ""
    """Why nothing of it can be reached, as a clause; empty while something can."""

    reservations: str = ""
    """How far this host is with NVMe reservations of its drives, as in ``held``; empty where it asks for
    none."""


class AskCounters(msgspec.Struct):
    """How requests to another agent ended. Those that their askers gave up are in none of the counts."""

    answered: int = 0
    refused: int = 0
    """It said that it failed, as when it has too much to do; or too much waited to be sent to it."""

    late: int = 0
    """Not answered within their deadline."""

    unreachable: int = 0
    """There was no connection, it was lost, or the agent was held off."""


class PeerStatus(msgspec.Struct, frozen=True):
    """Another agent, as one agent's connection to it sees it. Counts since the agent started."""

    agent: str
    is_connected: bool = False
    is_held_off: bool = False
    """Whether its breaker is open: what it is asked for are misses at once, and it is tried now and then."""

    held_off: int = 0
    """How often its breaker has opened."""

    failures: int = 0
    """Deadlines it missed, and attempts to reach it that failed."""

    inflight: int = 0
    """Requests that wait for its answer."""

    waiting: int = 0
    """Requests that wait to be sent, because it takes no more at once."""

    why: str = ""
    """What failed last; empty while all is well."""

    asks: AskCounters = msgspec.field(default_factory=AskCounters)
    is_refused: bool = False
    """Whether it did not let this agent in when that was tried last: by its token, or its certificate."""


class MembershipStatus(msgspec.Struct, frozen=True):
    """Whether one agent can go by the membership store, and by its map."""

    silent_s: float = 0.0
    """How long it has not answered; 0 while it does, be it that it refuses or can't be believed."""

    trouble: str = ""
    """Why it did not say, when it was asked last, whether the agent's claims stand; empty when it did."""

    map_trouble: str = ""
    """Why the map may lack something, or be old; empty while it is known to be whole and new."""

    has_map: bool = True
    """Whether the agent has read the map since it started."""


class ClaimCounters(msgspec.Struct):
    """What became of an agent's claims of shards, since it started."""

    made: int = 0
    """Claims that stood when their shard was recovered, those made again after the lease ran out included."""

    lost: int = 0
    """Claims that ended with the lease, or were another agent's all at once."""

    handed_over: int = 0
    """Shards left in order, with nothing under way any more."""


class PrefetchCounters(msgspec.Struct):
    """What became of the blocks that prefetches brought into the DRAM cache. Those in neither of the other
    counts are in the cache still, unread.
    """

    blocks: int = 0
    bytes: int = 0
    useful_blocks: int = 0
    """Got from the cache later."""

    useful_bytes: int = 0
    useless_blocks: int = 0
    """Dropped from the cache before anybody got them."""

    useless_bytes: int = 0


class EstimateCounters(msgspec.Struct):
    """Loads from flash that were estimated because their callers said how long recomputing takes, were let in
    and were not cut short.
    """

    loads: int = 0
    estimated_s: float = 0.0
    took_s: float = 0.0
    error_s: float = 0.0
    """Differences between the two, all counted as positive."""


class AgentCounters(msgspec.Struct, frozen=True):
    """The counts most asked for, since the agent started. Blocks unless a name says bytes."""

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
    """Blocks read from flash that failed their tag."""

    found_earlier: int = 0
    """Blocks that look-ups, gets and prefetches found only where an earlier placement epoch put them."""

    prefetched: PrefetchCounters = msgspec.field(default_factory=PrefetchCounters)
    estimates: EstimateCounters = msgspec.field(default_factory=EstimateCounters)


class RulingsStatus(msgspec.Struct, frozen=True):
    """What operators have decided while the fabric runs, as far as one agent has heard."""

    revision: int = 0
    """Of the last decision that it has heard of."""

    settings: dict[str, bool | int | float | str] = {}
    """Live settings in force, by name; others are as the agent's own settings say."""

    switched: dict[str, str] = {}
    """Volumes that are not on, as tenant/name, and what their switches say."""


TENANTS_MAX = 64
"""How many entries an agent's status has for tenants: if there are more, the last sums up OTHER_TENANTS."""

OTHER_TENANTS = "(others)"
"""No tenant's name: it has brackets."""


class TenantStatus(msgspec.Struct, frozen=True):
    """What one tenant uses of one agent."""

    tenant: str
    connections: int = 0
    """Of its workers."""

    requests: int = 0
    """Under way, those for workers of other agents as well."""

    staging_bytes: int = 0
    cache_bytes: int = 0


class AgentStatus(msgspec.Struct, frozen=True):
    """One agent's view of itself and its shards."""

    agent: str
    start_id: str
    version: str
    uptime_s: float
    transports: tuple[str, ...]
    sentence: str
    """What the steward last decided, and why."""

    workers: int
    staging_bytes: int
    staging_used_bytes: int
    quarantined_bytes: int
    cache_bytes: int
    cache_used_bytes: int
    counters: AgentCounters
    shards: tuple[ShardStatus, ...]
    agents: tuple[tuple[str, str], ...]
    """Every agent of the fabric: (id, first address)."""

    operations: tuple[OperationTally, ...] = ()
    """What lookups, gets, puts and prefetches have come to, in full. A put's blocks are counted when their
    fate is known, which may be long after the put was answered."""

    quarantined_cached_blocks: int = 0
    """Blocks of the DRAM cache under transfers not known to have ended, counted for each transfer."""

    quarantined_cached_bytes: int = 0
    drives: tuple[DriveStatus, ...] = ()
    """Every drive that it has a path to."""

    conditions: tuple[Condition, ...] = ()
    """Whether it can serve gets (``ready``), and what else an operator should know."""

    peers: tuple[PeerStatus, ...] = ()
    """Every agent elsewhere that it has asked for something."""

    membership: MembershipStatus = MembershipStatus()
    claims: ClaimCounters = msgspec.field(default_factory=ClaimCounters)
    paths: tuple[EnclosurePathStatus, ...] = ()
    """Every enclosure that is reached by NVMe-oF, or as files with a target."""

    tenants: tuple[TenantStatus, ...] = ()
    """Those that are connected, or have requests under way or blocks in the DRAM cache."""

    purged: int = 0
    """The revision of rulings up to which nothing that was erased is served any more."""
    rulings: RulingsStatus = RulingsStatus()
    unserved: Unserved = Unserved()
    owners: tuple[tuple[str, int], ...] = ()
    """Of each agent that owns any shards in this agent's map: (agent, how many)."""


class EnclosureStatus(msgspec.Struct, frozen=True):
    """What an enclosure's daemon believes of it."""

    enclosure: str
    start_id: str
    version: str
    nqn: str
    controllers: tuple[str, ...]
    hosts: tuple[str, ...]
    """NQNs of the hosts that it lets in; empty: every one."""

    drives: tuple[DriveReport, ...]
    sentence: str
    """What its last turn decided, and why."""

    uptime_s: float
    turns: int
    steps_failed: int
    conditions: tuple[Condition, ...] = ()
    """Whether hosts find drives here (``ready``), and what else an operator should know."""
