"""Table of all metrics, and samples from an agent's status and a client's tallies.

``docs/reference/metrics.md`` shows a sample line of each. Pure: ``ostraca_fabric.telemetry.openmetrics``
renders the samples as text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ostraca_fabric.telemetry.enclosure_metrics import ENCLOSURE_METRICS
from ostraca_fabric.telemetry.metric import Metric, MetricKind, Sample
from ostraca_fabric.telemetry.requests import OperationTally
from ostraca_fabric.telemetry.status import AgentStatus, DriveStatus, PeerStatus, ShardStatus
from ostraca_fabric.telemetry.tenant_metrics import TENANT_METRICS, tenant_samples

_C, _G, _H, _I = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM, MetricKind.INFO
_OUTCOME = ("operation", "state", "reason")

AGENT_INFO = Metric("ostraca_agent", _I, "", ("agent", "start_id", "version"), "Identity of the agent.")
AGENT_UPTIME = Metric("ostraca_agent_uptime_seconds", _G, "seconds", (), "Time since the agent's start.")
AGENT_CONDITION = Metric(
    "ostraca_agent_condition",
    _G,
    "",
    ("condition",),
    "1 while the condition is true, 0 while untrue; only ready tells whether gets are served.",
)
AGENT_WORKERS = Metric("ostraca_agent_workers", _G, "", (), "Connections with an arena offer.")
AGENT_BLOCKS = Metric(
    "ostraca_agent_blocks",
    _C,
    "blocks",
    _OUTCOME,
    "Blocks by outcome. Puts count once final, prefetches at another agent at both agents. shadow_lookup "
    "and shadow_get: hypothetical outcomes.",
)
AGENT_BYTES = Metric(
    "ostraca_agent_bytes",
    _C,
    "bytes",
    ("operation",),
    "Bytes of blocks moved to workers (get), committed (put), brought into the DRAM cache (prefetch), or "
    "hypothetically moved (shadow_get).",
)
AGENT_SECONDS = Metric(
    "ostraca_agent_request_seconds",
    _H,
    "seconds",
    ("operation",),
    "Time from a request's start until its answer is ready, also for shadow requests.",
)
AGENT_CACHE_HITS = Metric(
    "ostraca_agent_cache_hit_blocks", _C, "blocks", (), "Blocks of gets served from the DRAM cache."
)
AGENT_DAMAGED = Metric(
    "ostraca_agent_damaged_blocks", _C, "blocks", (), "Blocks from flash whose tag did not match."
)
AGENT_STAGING = Metric(
    "ostraca_agent_staging_bytes", _G, "bytes", (), "Limit of memory for blocks in transfer."
)
AGENT_STAGING_USED = Metric(
    "ostraca_agent_staging_used_bytes", _G, "bytes", (), "Memory of blocks in transfer, quarantine included."
)
AGENT_QUARANTINED = Metric(
    "ostraca_agent_quarantined_bytes",
    _G,
    "bytes",
    (),
    "Staging under transfers or I/O not known to have ended.",
)
AGENT_INDEX = Metric(
    "ostraca_agent_index_bytes",
    _G,
    "bytes",
    (),
    "Memory of all its shards' indexes at their limits.",
)
AGENT_CACHE = Metric("ostraca_agent_cache_bytes", _G, "bytes", (), "Limit of the DRAM cache; 0 while off.")
AGENT_CACHE_USED = Metric("ostraca_agent_cache_used_bytes", _G, "bytes", (), "Bytes in the DRAM cache.")
AGENT_QUARANTINED_CACHE = Metric(
    "ostraca_agent_quarantined_cache_bytes",
    _G,
    "bytes",
    (),
    "Cached bytes under transfers not known to have ended, counted for each transfer.",
)
AGENT_QUARANTINED_CACHED = Metric(
    "ostraca_agent_quarantined_cache_blocks",
    _G,
    "blocks",
    (),
    "Cached blocks under transfers not known to have ended.",
)
AGENT_PREFETCHED = Metric(
    "ostraca_agent_prefetched_blocks",
    _C,
    "blocks",
    ("fate",),
    "Blocks that prefetches brought into the DRAM cache (brought), later served from there (useful), or "
    "evicted unread (useless).",
)
AGENT_PREFETCHED_BYTES = Metric(
    "ostraca_agent_prefetched_bytes", _C, "bytes", ("fate",), "Bytes of prefetched blocks, by the same fates."
)
AGENT_ESTIMATED = Metric(
    "ostraca_agent_estimated_load_seconds",
    _C,
    "seconds",
    ("what",),
    "Admitted loads from flash with a known recompute time: estimated duration (expected), real duration "
    "(took), and absolute differences (error).",
)
AGENT_FOUND_EARLIER = Metric(
    "ostraca_agent_found_earlier_blocks",
    _C,
    "blocks",
    (),
    "Blocks of look-ups, gets and prefetches found only under an earlier placement epoch.",
)
AGENT_MEMBERSHIP_SILENT = Metric(
    "ostraca_agent_membership_silent_seconds",
    _G,
    "seconds",
    (),
    "Time since the membership store's last answer; 0 while the store answers.",
)
AGENT_UNOWNED = Metric(
    "ostraca_agent_unowned_shards",
    _G,
    "shards",
    (),
    "Shards of the fabric without an owner. Equal at all agents: do not add up.",
)
AGENT_LOST_LOG = Metric(
    "ostraca_agent_lost_log_lines",
    _C,
    "lines",
    (),
    "Log lines dropped because of a slow reader or a failed write.",
)
AGENT_UNUSED_DRIVES = Metric(
    "ostraca_agent_unused_drives",
    _G,
    "drives",
    (),
    "Drives of the fabric without a path, or refused; their blocks are misses.",
)
AGENT_UNHIT = Metric(
    "ostraca_agent_unhit_volumes",
    _G,
    "volumes",
    (),
    "Volumes with at least 32 blocks put and 32 asked for since, without a hit.",
)
AGENT_CLAIMS = Metric(
    "ostraca_agent_claims",
    _C,
    "claims",
    ("fate",),
    "Claims by fate: made: still valid after recovery of the shard. lost: ended with the lease, or taken by "
    "another agent. handed_over: released in a handover.",
)
AGENT_PEER_BREAKER_OPEN = Metric(
    "ostraca_agent_peer_breaker_open",
    _G,
    "",
    ("peer",),
    "1 while the circuit breaker of the peer is open.",
)
AGENT_PEER_OPENED = Metric(
    "ostraca_agent_peer_breaker_opened", _C, "", ("peer",), "Openings of the circuit breaker of the peer."
)
AGENT_PEER_REQUESTS = Metric(
    "ostraca_agent_peer_requests",
    _C,
    "requests",
    ("peer", "outcome"),
    "Requests to the peer by outcome: answered, refused, late, or unreachable (open breakers included).",
)
DRIVE_CONDITION = Metric(
    "ostraca_drive_condition",
    _G,
    "",
    ("drive",),
    "0: good. 1: suspect, no new blocks. 2: failed, unused until the agent's next start.",
)
DRIVE_BREAKER_OPEN = Metric(
    "ostraca_drive_breaker_open",
    _G,
    "",
    ("drive", "operation"),
    "1 while the drive's circuit breaker for reads or writes is open.",
)
DRIVE_FAULTS = Metric(
    "ostraca_drive_faults",
    _G,
    "",
    ("drive",),
    "Faults of the last half hour that count against the drive.",
)
DRIVE_ERRORS = Metric(
    "ostraca_drive_errors",
    _C,
    "",
    ("drive", "kind"),
    "Failed reads and writes, silences, damaged blocks, and operations refused by the drive's open "
    "breaker (refused).",
)
DRIVE_QUEUED = Metric("ostraca_drive_queued_blocks", _G, "blocks", ("drive",), "Blocks queued at the drive.")
DRIVE_HITS = Metric(
    "ostraca_drive_hit_blocks",
    _C,
    "blocks",
    ("drive",),
    "Blocks that gets of this agent's workers found on the drive.",
)
ENCLOSURE_PATHS = Metric(
    "ostraca_agent_enclosure_paths",
    _G,
    "paths",
    ("enclosure", "state"),
    "Paths from the agent's host to the enclosure, live or lost.",
)
SHARD_BLOCKS = Metric("ostraca_shard_blocks", _G, "blocks", ("shard",), "Blocks available to gets.")
SHARD_LIMIT = Metric(
    "ostraca_shard_limit_blocks",
    _G,
    "blocks",
    ("shard",),
    "Limit of the index, where the oldest blocks are evicted.",
)
SHARD_BEYOND = Metric(
    "ostraca_shard_beyond_limit_blocks",
    _G,
    "blocks",
    ("shard",),
    "Blocks on flash not listed at the start of ownership for lack of index space.",
)
SHARD_UNREADABLE = Metric(
    "ostraca_shard_unreadable_segments",
    _G,
    "segments",
    ("shard",),
    "Segments with unreadable summaries at the start of ownership, until overwritten.",
)
SHARD_INDEX = Metric(
    "ostraca_shard_index_bytes", _G, "bytes", ("shard",), "Memory of the index at its limit."
)
SHARD_USED = Metric("ostraca_shard_used_bytes", _G, "bytes", ("shard",), "Bytes of blocks available to gets.")
SHARD_SIZE = Metric(
    "ostraca_shard_size_bytes", _G, "bytes", ("shard",), "Capacity for blocks in all segments."
)
SHARD_EVICTED = Metric(
    "ostraca_shard_evicted_blocks",
    _C,
    "blocks",
    ("shard",),
    "Blocks evicted with their segment.",
)
SHARD_REINSERTED = Metric(
    "ostraca_shard_reinserted_blocks",
    _C,
    "blocks",
    ("shard",),
    "Recently read blocks reinserted into a newer segment before eviction.",
)
SHARD_WRITTEN = Metric(
    "ostraca_shard_written_bytes",
    _C,
    "bytes",
    ("shard",),
    "Flash granted to writers, and summaries written, since the start of ownership.",
)
SHARD_BUDGET = Metric(
    "ostraca_shard_write_budget_bytes",
    _G,
    "bytes",
    ("shard",),
    "Current write budget; below zero after overspending. Requires a rating.",
)
SHARD_YEARS_LEFT = Metric(
    "ostraca_shard_endurance_left_years",
    _G,
    "years",
    ("shard",),
    "Remaining life at the last day's rate, up to 1000, from this agent's writes. Requires a rating.",
)
SHARD_SCRUBBED = Metric(
    "ostraca_shard_scrubbed_bytes",
    _C,
    "bytes",
    ("shard",),
    "Bytes read by scrubbing.",
)
SHARD_SCRUBS = Metric("ostraca_shard_scrub_passes", _C, "passes", ("shard",), "Complete scrub passes.")
SHARD_EPOCH = Metric(
    "ostraca_shard_owner_epoch", _G, "", ("shard",), "Owner epoch, rising with each owner; 0 during recovery."
)
SHARD_FENCED = Metric(
    "ostraca_shard_fenced",
    _G,
    "",
    ("shard",),
    "1 while the agent owns the recovered shard without permission to write.",
)
SHARD_NO_SPACE = Metric(
    "ostraca_shard_out_of_space",
    _G,
    "",
    ("shard",),
    "1 while the writable shard has no space to grant.",
)
SHARD_GRANTED = Metric(
    "ostraca_shard_granted_segments",
    _G,
    "segments",
    ("shard",),
    "Segments granted to this owner for writing.",
)
SHARD_WITHHELD = Metric(
    "ostraca_shard_withheld_segments",
    _G,
    "segments",
    ("shard",),
    "Segments not written because an earlier owner's writes may still land there.",
)
SHARD_ADOPTED = Metric(
    "ostraca_shard_adopted_blocks",
    _C,
    "blocks",
    ("shard",),
    "Blocks listed by an earlier owner after the start of ownership, and found.",
)
SHARD_FAILING = Metric(
    "ostraca_shard_failing",
    _G,
    "",
    ("shard",),
    "1 after the drive failed an operation of this shard.",
)

CLIENT_INFO = Metric(
    "ostraca_client",
    _I,
    "",
    ("worker", "agent", "transport"),
    "Identity of the client, its agent and transport.",
)
CLIENT_BLOCKS = Metric(
    "ostraca_client_blocks", _C, "blocks", _OUTCOME, "Blocks by outcome as returned to the caller."
)
CLIENT_BYTES = Metric(
    "ostraca_client_bytes",
    _C,
    "bytes",
    ("operation",),
    "Bytes of blocks returned to the caller (get) or accepted by the fabric (put).",
)
CLIENT_SECONDS = Metric(
    "ostraca_client_operation_seconds",
    _H,
    "seconds",
    ("operation",),
    "Time from the caller's call until the result is ready, waits included.",
)
CLIENT_TOKENS = Metric(
    "ostraca_client_hit_tokens",
    _C,
    "tokens",
    (),
    "Tokens whose KV reached the caller: hit blocks of gets times the layout's page_tokens. Each rank and"
    " KV group counts separately.",
)
CLIENT_SAVED = Metric(
    "ostraca_client_declared_saved_seconds",
    _G,
    "seconds",
    (),
    "Saved recomputing: for each get with recompute_s, that time multiplied by the share of hit blocks, "
    "minus the get's duration. May fall.",
)
CLIENT_ARENA = Metric("ostraca_client_arena_bytes", _G, "bytes", (), "Memory for transfers of blocks.")
CLIENT_QUARANTINED = Metric(
    "ostraca_client_quarantined_bytes",
    _G,
    "bytes",
    (),
    "Arena memory under transfers not known to have ended.",
)

METRICS: tuple[Metric, ...] = (
    *(each for each in globals().values() if isinstance(each, Metric)),
    *TENANT_METRICS,
    *ENCLOSURE_METRICS,
)
"""All metrics, the agent's first."""


def agent_samples(status: AgentStatus) -> Iterator[Sample]:
    """Yield the samples of an agent's status."""
    yield Sample(AGENT_INFO, (status.agent, status.start_id, status.version), 1)
    for condition in status.conditions:
        yield Sample(AGENT_CONDITION, (condition.name,), condition.is_true)
    counters = status.counters
    for metric, value in (
        (AGENT_UPTIME, status.uptime_s),
        (AGENT_WORKERS, status.workers),
        (AGENT_CACHE_HITS, counters.get_hits_from_cache),
        (AGENT_DAMAGED, counters.damaged),
        (AGENT_STAGING, status.staging_bytes),
        (AGENT_STAGING_USED, status.staging_used_bytes),
        (AGENT_QUARANTINED, status.quarantined_bytes),
        (AGENT_INDEX, sum(shard.index_bytes for shard in status.shards)),
        (AGENT_CACHE, status.cache_bytes),
        (AGENT_CACHE_USED, status.cache_used_bytes),
        (AGENT_QUARANTINED_CACHE, status.quarantined_cached_bytes),
        (AGENT_QUARANTINED_CACHED, status.quarantined_cached_blocks),
        (AGENT_FOUND_EARLIER, counters.found_earlier),
        (AGENT_MEMBERSHIP_SILENT, status.membership.silent_s),
        (AGENT_UNOWNED, status.unserved.shard_count),
        (AGENT_LOST_LOG, status.lost_log_lines),
        (AGENT_UNUSED_DRIVES, status.unserved.drive_count),
        (AGENT_UNHIT, status.unhit.count),
    ):
        yield Sample(metric, (), value)
    for fate in ("made", "lost", "handed_over"):
        yield Sample(AGENT_CLAIMS, (fate,), getattr(status.claims, fate))
    prefetched = counters.prefetched
    for fate, blocks, size_bytes in (
        ("brought", prefetched.blocks, prefetched.bytes),
        ("useful", prefetched.useful_blocks, prefetched.useful_bytes),
        ("useless", prefetched.useless_blocks, prefetched.useless_bytes),
    ):
        yield Sample(AGENT_PREFETCHED, (fate,), blocks)
        yield Sample(AGENT_PREFETCHED_BYTES, (fate,), size_bytes)
    estimates = counters.estimates
    for what, seconds in (
        ("expected", estimates.estimated_s),
        ("took", estimates.took_s),
        ("error", estimates.error_s),
    ):
        yield Sample(AGENT_ESTIMATED, (what,), seconds)
    yield from operation_samples(status.operations, AGENT_BLOCKS, AGENT_BYTES, AGENT_SECONDS)
    yield from tenant_samples(status.tenants)
    for peer in status.peers:
        yield from _peer_samples(peer)
    for drive in status.drives:
        yield from _drive_samples(drive)
    for enclosure in status.paths:
        live = sum(path.is_live for path in enclosure.paths)
        yield Sample(ENCLOSURE_PATHS, (enclosure.enclosure, "live"), live)
        yield Sample(ENCLOSURE_PATHS, (enclosure.enclosure, "lost"), len(enclosure.paths) - live)
    for shard in status.shards:
        yield from _shard_samples(shard)


def _peer_samples(peer: PeerStatus) -> Iterator[Sample]:
    yield Sample(AGENT_PEER_BREAKER_OPEN, (peer.agent,), peer.is_held_off)
    yield Sample(AGENT_PEER_OPENED, (peer.agent,), peer.held_off)
    for outcome in ("answered", "refused", "late", "unreachable"):
        yield Sample(AGENT_PEER_REQUESTS, (peer.agent, outcome), getattr(peer.asks, outcome))


_CONDITIONS = {"good": 0, "suspect": 1, "failed": 2}


def _drive_samples(drive: DriveStatus) -> Iterator[Sample]:
    yield Sample(DRIVE_CONDITION, (drive.drive,), _CONDITIONS[drive.condition])
    yield Sample(DRIVE_BREAKER_OPEN, (drive.drive, "read"), drive.reads_held_off)
    yield Sample(DRIVE_BREAKER_OPEN, (drive.drive, "write"), drive.writes_held_off)
    yield Sample(DRIVE_FAULTS, (drive.drive,), drive.faults)
    for what, count in (
        ("read", drive.failed_reads),
        ("write", drive.failed_writes),
        ("silence", drive.silences),
        ("damage", drive.damaged_blocks),
        ("refused", drive.refused),
    ):
        yield Sample(DRIVE_ERRORS, (drive.drive, what), count)
    yield Sample(DRIVE_QUEUED, (drive.drive,), drive.queued_blocks)
    yield Sample(DRIVE_HITS, (drive.drive,), drive.hits)


def _shard_samples(shard: ShardStatus) -> Iterator[Sample]:
    ownership = shard.ownership
    for metric, value in (
        (SHARD_BLOCKS, shard.blocks),
        (SHARD_LIMIT, shard.blocks_max),
        (SHARD_BEYOND, shard.beyond_limit_blocks),
        (SHARD_UNREADABLE, shard.unreadable_segments),
        (SHARD_INDEX, shard.index_bytes),
        (SHARD_USED, shard.used_bytes),
        (SHARD_SIZE, shard.size_bytes),
        (SHARD_EVICTED, shard.evicted_blocks),
        (SHARD_REINSERTED, shard.reinserted_blocks),
        (SHARD_WRITTEN, shard.written_bytes),
        (SHARD_SCRUBBED, shard.scrubbed_bytes),
        (SHARD_SCRUBS, shard.scrub_passes),
        (SHARD_EPOCH, shard.owner_epoch),
        (SHARD_FENCED, ownership.is_fenced),
        (SHARD_NO_SPACE, bool(ownership.why_no_space)),
        (SHARD_GRANTED, ownership.granted_segments),
        (SHARD_WITHHELD, ownership.withheld_segments),
        (SHARD_ADOPTED, ownership.adopted_blocks),
        (SHARD_FAILING, shard.is_failing),
    ):
        yield Sample(metric, (shard.shard,), value)
    if shard.years_left is not None:
        yield Sample(SHARD_BUDGET, (shard.shard,), shard.budget_level_bytes)
        yield Sample(SHARD_YEARS_LEFT, (shard.shard,), shard.years_left)


def operation_samples(
    operations: Iterable[OperationTally], blocks: Metric, moved: Metric, seconds: Metric
) -> Iterator[Sample]:
    """Yield the samples of tallies for these three metrics.

    A lookup has no sample of moved bytes.
    """
    for tally in operations:
        for count in tally.blocks:
            yield Sample(blocks, (tally.operation, count.state, count.reason), count.blocks)
        if not tally.operation.endswith("lookup"):
            yield Sample(moved, (tally.operation,), tally.bytes)
        yield Sample(seconds, (tally.operation,), tally)
