"""Every metric there is, in one table, and what an agent's status and a client's tallies say in its terms.

``docs/reference/metrics.md`` shows a sample line of each. Pure: who serves or prints metrics does it with
``ostraca_fabric.openmetrics``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ostraca_fabric.enclosure_metrics import ENCLOSURE_METRICS
from ostraca_fabric.metric import Kind, Metric, Sample
from ostraca_fabric.status import AgentStatus, DriveStatus, PeerStatus, ShardStatus
from ostraca_fabric.tallies import OperationTally
from ostraca_fabric.tenant_metrics import TENANT_METRICS, tenant_samples

_C, _G, _H, _I = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM, Kind.INFO
_OUTCOME = ("operation", "state", "reason")

AGENT_INFO = Metric("ostraca_agent", _I, "", ("agent", "start_id", "version"), "Which agent this is.")
AGENT_UPTIME = Metric(
    "ostraca_agent_uptime_seconds", _G, "seconds", (), "How long the agent has been running."
)
AGENT_CONDITION = Metric(
    "ostraca_agent_condition",
    _G,
    "",
    ("condition",),
    "1 while a condition is as it should be, 0 while it is not; only ready says whether gets are served.",
)
AGENT_WORKERS = Metric("ostraca_agent_workers", _G, "", (), "Connections that offer an arena.")
AGENT_BLOCKS = Metric(
    "ostraca_agent_blocks",
    _C,
    "blocks",
    _OUTCOME,
    "Blocks by what became of them, and why. Those of a put are counted when their fate is known, those of a "
    "prefetch at another agent by both. Of a volume whose switch says shadow: what would have become of them "
    "(shadow_lookup, shadow_get).",
)
AGENT_BYTES = Metric(
    "ostraca_agent_bytes",
    _C,
    "bytes",
    ("operation",),
    "Bytes of blocks moved to workers (get), committed (put) or brought into the DRAM cache (prefetch), and "
    "of those that would have been moved (shadow_get).",
)
AGENT_SECONDS = Metric(
    "ostraca_agent_request_seconds",
    _H,
    "seconds",
    ("operation",),
    "From when a request was taken up until its answer was ready; of what was tried out, until it would have "
    "been.",
)
AGENT_CACHE_HITS = Metric(
    "ostraca_agent_cache_hit_blocks", _C, "blocks", (), "Blocks of gets that came from the DRAM cache."
)
AGENT_DAMAGED = Metric(
    "ostraca_agent_damaged_blocks", _C, "blocks", (), "Blocks read from flash that failed their tag."
)
AGENT_STAGING = Metric(
    "ostraca_agent_staging_bytes", _G, "bytes", (), "The most that blocks on their way may take."
)
AGENT_STAGING_USED = Metric(
    "ostraca_agent_staging_used_bytes", _G, "bytes", (), "What blocks on their way take, quarantine included."
)
AGENT_QUARANTINED = Metric(
    "ostraca_agent_quarantined_bytes",
    _G,
    "bytes",
    (),
    "Staging under transfers or I/O that is not known to have ended, though its request has.",
)
AGENT_INDEX = Metric(
    "ostraca_agent_index_bytes",
    _G,
    "bytes",
    (),
    "Memory that the indexes of all its shards take at their limits.",
)
AGENT_CACHE = Metric(
    "ostraca_agent_cache_bytes", _G, "bytes", (), "The DRAM cache's limit; 0 when it is off."
)
AGENT_CACHE_USED = Metric("ostraca_agent_cache_used_bytes", _G, "bytes", (), "What the DRAM cache holds.")
AGENT_QUARANTINED_CACHE = Metric(
    "ostraca_agent_quarantined_cache_bytes",
    _G,
    "bytes",
    (),
    "What of the DRAM cache is under transfers that are not known to have ended, counted for each of them.",
)
AGENT_QUARANTINED_CACHED = Metric(
    "ostraca_agent_quarantined_cache_blocks", _G, "blocks", (), "The number of these blocks."
)
AGENT_PREFETCHED = Metric(
    "ostraca_agent_prefetched_blocks",
    _C,
    "blocks",
    ("fate",),
    "Blocks that prefetches brought into the DRAM cache (brought), that were got from there later (useful), "
    "and that were dropped unread (useless).",
)
AGENT_PREFETCHED_BYTES = Metric(
    "ostraca_agent_prefetched_bytes", _C, "bytes", ("fate",), "Bytes of the same blocks."
)
AGENT_ESTIMATED = Metric(
    "ostraca_agent_estimated_load_seconds",
    _C,
    "seconds",
    ("what",),
    "Loads from flash whose callers said how long recomputing takes and that were let in: how long they were "
    "expected to take (expected), how long they took (took), and by how much each differed (error).",
)
AGENT_FOUND_EARLIER = Metric(
    "ostraca_agent_found_earlier_blocks",
    _C,
    "blocks",
    (),
    "Blocks that look-ups, gets and prefetches found only where an earlier placement epoch put them.",
)
AGENT_MEMBERSHIP_SILENT = Metric(
    "ostraca_agent_membership_silent_seconds",
    _G,
    "seconds",
    (),
    "How long the membership store has not answered; 0 while it does.",
)
AGENT_UNOWNED = Metric(
    "ostraca_agent_unowned_shards",
    _G,
    "shards",
    (),
    "Shards of the fabric that nobody owns, in the map that the agent has: all agents say the same, so do "
    "not add them up.",
)
AGENT_UNUSED_DRIVES = Metric(
    "ostraca_agent_unused_drives",
    _G,
    "drives",
    (),
    "Drives of the fabric that the agent has no path to, or was refused: what lies there are misses for its "
    "workers.",
)
AGENT_CLAIMS = Metric(
    "ostraca_agent_claims",
    _C,
    "claims",
    ("fate",),
    "Claims of shards that stood when their shard was recovered (made), that ended with the lease or were "
    "another agent's all at once (lost), and shards left in order (handed_over).",
)
AGENT_PEER_HELD_OFF = Metric(
    "ostraca_agent_peer_held_off",
    _G,
    "",
    ("peer",),
    "1 while another agent is asked for nothing because it failed to answer, else 0.",
)
AGENT_PEER_OPENED = Metric(
    "ostraca_agent_peer_breaker_opened", _C, "", ("peer",), "How often another agent began to be held off."
)
AGENT_PEER_REQUESTS = Metric(
    "ostraca_agent_peer_requests",
    _C,
    "requests",
    ("peer", "outcome"),
    "Requests to another agent by how they ended: answered, refused, late, or unreachable where it was held "
    "off as well.",
)
DRIVE_CONDITION = Metric(
    "ostraca_drive_condition",
    _G,
    "",
    ("drive",),
    "0 when the agent trusts the drive, 1 when it is suspect and takes no new blocks, 2 when it has failed "
    "and is left alone until the agent starts anew.",
)
DRIVE_HELD_OFF = Metric(
    "ostraca_drive_held_off",
    _G,
    "",
    ("drive", "operation"),
    "1 while reads or writes of the drive are not begun because they failed or it kept silent, else 0.",
)
DRIVE_FAULTS = Metric(
    "ostraca_drive_faults",
    _G,
    "",
    ("drive",),
    "Faults of the last half hour that are held against the drive.",
)
DRIVE_TROUBLE = Metric(
    "ostraca_drive_trouble",
    _C,
    "",
    ("drive", "what"),
    "Reads and writes of the drive that failed, silences, blocks found damaged, and operations that were not "
    "begun because it was held off (refused).",
)
DRIVE_QUEUED = Metric(
    "ostraca_drive_queued_blocks", _G, "blocks", ("drive",), "Blocks that the drive has been asked for."
)
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
    "Paths from the agent's host to an enclosure: those that are live, and those that are lost.",
)
SHARD_BLOCKS = Metric("ostraca_shard_blocks", _G, "blocks", ("shard",), "Blocks that can be got.")
SHARD_LIMIT = Metric(
    "ostraca_shard_limit_blocks",
    _G,
    "blocks",
    ("shard",),
    "How many blocks the index may hold; at it the oldest are evicted, though there is flash left.",
)
SHARD_BEYOND = Metric(
    "ostraca_shard_beyond_limit_blocks",
    _G,
    "blocks",
    ("shard",),
    "Blocks that were on flash when the agent began to own the shard and that the index was not allowed to "
    "list.",
)
SHARD_UNREADABLE = Metric(
    "ostraca_shard_unreadable_segments",
    _G,
    "segments",
    ("shard",),
    "Segments of whose summaries something could not be read when the agent began to own the shard, until "
    "they are written anew.",
)
SHARD_INDEX = Metric(
    "ostraca_shard_index_bytes", _G, "bytes", ("shard",), "Memory that the index takes at its limit."
)
SHARD_USED = Metric(
    "ostraca_shard_used_bytes", _G, "bytes", ("shard",), "Bytes of the blocks that can be got."
)
SHARD_SIZE = Metric("ostraca_shard_size_bytes", _G, "bytes", ("shard",), "Room for blocks, in all segments.")
SHARD_EVICTED = Metric(
    "ostraca_shard_evicted_blocks",
    _C,
    "blocks",
    ("shard",),
    "Blocks that went with their segment to make room.",
)
SHARD_CARRIED = Metric(
    "ostraca_shard_carried_blocks",
    _C,
    "blocks",
    ("shard",),
    "Blocks read of late that were copied to a newer segment before theirs was evicted.",
)
SHARD_WRITTEN = Metric(
    "ostraca_shard_written_bytes",
    _C,
    "bytes",
    ("shard",),
    "Flash handed out to writers, and summaries written, since this agent began to own the shard.",
)
SHARD_BUDGET = Metric(
    "ostraca_shard_write_budget_bytes",
    _G,
    "bytes",
    ("shard",),
    "What the write budget has left now; below zero when more was written than it allows. Only where the "
    "drives' rating is set.",
)
SHARD_YEARS_LEFT = Metric(
    "ostraca_shard_endurance_left_years",
    _G,
    "years",
    ("shard",),
    "How long the flash lasts at the last day's rate, up to 1000, as far as this agent wrote it. Only where "
    "the drives' rating is set.",
)
SHARD_SCRUBBED = Metric(
    "ostraca_shard_scrubbed_bytes",
    _C,
    "bytes",
    ("shard",),
    "Read again while the drive was idle, to find what has rotted.",
)
SHARD_SCRUBS = Metric(
    "ostraca_shard_scrub_passes", _C, "passes", ("shard",), "How often all that lies there was read again."
)
SHARD_EPOCH = Metric(
    "ostraca_shard_owner_epoch", _G, "", ("shard",), "Rises with each owner; 0 while the shard is recovered."
)
SHARD_FENCED = Metric(
    "ostraca_shard_fenced",
    _G,
    "",
    ("shard",),
    "1 while the agent owns the shard, has recovered it and may not write to it, else 0.",
)
SHARD_NO_SPACE = Metric(
    "ostraca_shard_out_of_space",
    _G,
    "",
    ("shard",),
    "1 while the agent may write to the shard and has no space there to hand out, so that every put of a new "
    "block is declined, else 0.",
)
SHARD_GRANTED = Metric(
    "ostraca_shard_granted_segments", _G, "segments", ("shard",), "Segments that this owner may write."
)
SHARD_WITHHELD = Metric(
    "ostraca_shard_withheld_segments",
    _G,
    "segments",
    ("shard",),
    "Segments that are not written to because writes of an earlier owner may still land there.",
)
SHARD_ADOPTED = Metric(
    "ostraca_shard_adopted_blocks",
    _C,
    "blocks",
    ("shard",),
    "Blocks that an earlier owner listed after this one had begun, and that were found.",
)
SHARD_FAILING = Metric(
    "ostraca_shard_failing",
    _G,
    "",
    ("shard",),
    "1 when the drive has failed an operation of this shard, else 0.",
)

CLIENT_INFO = Metric(
    "ostraca_client", _I, "", ("worker", "agent", "transport"), "Which client this is, and where."
)
CLIENT_BLOCKS = Metric(
    "ostraca_client_blocks", _C, "blocks", _OUTCOME, "Blocks by what the caller was told of them, and why."
)
CLIENT_BYTES = Metric(
    "ostraca_client_bytes",
    _C,
    "bytes",
    ("operation",),
    "Bytes of blocks handed to the caller (get) or taken by the fabric (put).",
)
CLIENT_SECONDS = Metric(
    "ostraca_client_operation_seconds",
    _H,
    "seconds",
    ("operation",),
    "From the caller's call until its result was ready, waiting for others included.",
)
CLIENT_TOKENS = Metric(
    "ostraca_client_hit_tokens",
    _C,
    "tokens",
    (),
    "Tokens whose KV the caller was handed: blocks of gets that hit, times the layout's page_tokens. Each "
    "rank and KV group counts its own.",
)
CLIENT_SAVED = Metric(
    "ostraca_client_declared_saved_seconds",
    _G,
    "seconds",
    (),
    "Recomputing saved, as callers declared it: over all gets with recompute_s, that time the share of "
    "blocks that hit, less what the get took. It falls with each get that was not worth it.",
)
CLIENT_ARENA = Metric("ostraca_client_arena_bytes", _G, "bytes", (), "Memory that blocks cross in.")
CLIENT_QUARANTINED = Metric(
    "ostraca_client_quarantined_bytes",
    _G,
    "bytes",
    (),
    "The part of the arena under transfers that are not known to have ended.",
)

METRICS: tuple[Metric, ...] = (
    *(each for each in globals().values() if isinstance(each, Metric)),
    *TENANT_METRICS,
    *ENCLOSURE_METRICS,
)
"""All of them, an agent's first."""


def agent_samples(status: AgentStatus) -> Iterator[Sample]:
    """Say what an agent's status says."""
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
        (AGENT_UNUSED_DRIVES, status.unserved.drive_count),
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
    yield Sample(AGENT_PEER_HELD_OFF, (peer.agent,), peer.is_held_off)
    yield Sample(AGENT_PEER_OPENED, (peer.agent,), peer.held_off)
    for outcome in ("answered", "refused", "late", "unreachable"):
        yield Sample(AGENT_PEER_REQUESTS, (peer.agent, outcome), getattr(peer.asks, outcome))


_CONDITIONS = {"good": 0, "suspect": 1, "failed": 2}


def _drive_samples(drive: DriveStatus) -> Iterator[Sample]:
    yield Sample(DRIVE_CONDITION, (drive.drive,), _CONDITIONS[drive.condition])
    yield Sample(DRIVE_HELD_OFF, (drive.drive, "read"), drive.reads_held_off)
    yield Sample(DRIVE_HELD_OFF, (drive.drive, "write"), drive.writes_held_off)
    yield Sample(DRIVE_FAULTS, (drive.drive,), drive.faults)
    for what, count in (
        ("read", drive.failed_reads),
        ("write", drive.failed_writes),
        ("silence", drive.silences),
        ("damage", drive.damaged_blocks),
        ("refused", drive.refused),
    ):
        yield Sample(DRIVE_TROUBLE, (drive.drive, what), count)
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
        (SHARD_CARRIED, shard.carried_blocks),
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
    """Say what tallies say, as these three metrics. A lookup moves no bytes."""
    for tally in operations:
        for count in tally.blocks:
            yield Sample(blocks, (tally.operation, count.state, count.reason), count.blocks)
        if not tally.operation.endswith("lookup"):
            yield Sample(moved, (tally.operation,), tally.bytes)
        yield Sample(seconds, (tally.operation,), tally)
