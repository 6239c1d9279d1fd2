"""Metrics of an agent, as a table: a row has the definition, and the values in an agent's status. Pure.

``docs/reference/metrics.md`` shows a sample line of each. ``enclosure_metrics`` has the metrics of an
enclosure's daemon, ``ostraca.client_metrics`` those of a client.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import msgspec

from ostraca_fabric.telemetry.openmetrics import (
    OUTCOME_LABELS,
    Metric,
    MetricKind,
    Values,
    blocks_by_outcome,
    bytes_by_operation,
    tallies_by_operation,
)
from ostraca_fabric.telemetry.status import AgentStatus, DriveStatus, ShardStatus, TenantStatus

_Values: TypeAlias = Callable[[AgentStatus], Values]

_C, _G, _H, _I = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM, MetricKind.INFO
_CONDITIONS = {"good": 0, "suspect": 1, "failed": 2}


def _shard(value: Callable[[ShardStatus], float | None]) -> _Values:
    """Return the values of each shard, without shards for which *value* is None."""
    return lambda status: {
        (shard.shard,): found for shard in status.shards if (found := value(shard)) is not None
    }


def _drive(value: Callable[[DriveStatus], float]) -> _Values:
    return lambda status: {(drive.drive,): value(drive) for drive in status.drives}


def _tenant(value: Callable[[TenantStatus], float]) -> _Values:
    """Return the values of each tenant. Labels are bounded like ``AgentStatus.tenants``."""
    return lambda status: {(tenant.tenant,): value(tenant) for tenant in status.tenants}


AGENT_METRICS: tuple[Metric[AgentStatus], ...] = (
    Metric(
        "ostraca_agent",
        _I,
        "",
        ("agent", "start_id", "version"),
        "Identity of the agent.",
        lambda status: {(status.agent, status.start_id, status.version): 1},
    ),
    Metric(
        "ostraca_agent_uptime_seconds",
        _G,
        "seconds",
        (),
        "Time since the agent's start.",
        lambda status: status.uptime_s,
    ),
    Metric(
        "ostraca_agent_condition",
        _G,
        "",
        ("condition",),
        "1 while the condition is true, 0 while untrue; only ready tells whether gets are served.",
        lambda status: {(each.name,): each.is_true for each in status.conditions},
    ),
    Metric(
        "ostraca_agent_workers", _G, "", (), "Connections with an arena offer.", lambda status: status.workers
    ),
    Metric(
        "ostraca_agent_blocks",
        _C,
        "blocks",
        OUTCOME_LABELS,
        "Blocks by outcome. Puts count once final, prefetches at another agent at both agents. shadow_lookup "
        "and shadow_get: hypothetical outcomes.",
        blocks_by_outcome,
    ),
    Metric(
        "ostraca_agent_bytes",
        _C,
        "bytes",
        ("operation",),
        "Bytes of blocks moved to workers (get), committed (put), brought into the DRAM cache (prefetch), or "
        "hypothetically moved (shadow_get).",
        bytes_by_operation,
    ),
    Metric(
        "ostraca_agent_request_seconds",
        _H,
        "seconds",
        ("operation",),
        "Time from a request's start until its answer is ready, also for shadow requests.",
        tallies_by_operation,
    ),
    Metric(
        "ostraca_agent_cache_hit_blocks",
        _C,
        "blocks",
        (),
        "Blocks of gets served from the DRAM cache.",
        lambda status: status.counters.get_hits_from_cache,
    ),
    Metric(
        "ostraca_agent_staging_hit_blocks",
        _C,
        "blocks",
        (),
        "Blocks of gets served from puts on their way to flash.",
        lambda status: status.counters.get_hits_from_staging,
    ),
    Metric(
        "ostraca_agent_direct_hit_blocks",
        _C,
        "blocks",
        (),
        "Blocks of gets that workers read themselves, from drives or from the agent's memory.",
        lambda status: status.counters.get_hits_direct,
    ),
    Metric(
        "ostraca_agent_damaged_blocks",
        _C,
        "blocks",
        (),
        "Blocks from flash whose tag did not match.",
        lambda status: status.counters.damaged,
    ),
    Metric(
        "ostraca_agent_staging_bytes",
        _G,
        "bytes",
        (),
        "Limit of memory for blocks in transfer.",
        lambda status: status.staging_bytes,
    ),
    Metric(
        "ostraca_agent_staging_used_bytes",
        _G,
        "bytes",
        (),
        "Memory of blocks in transfer, quarantine included.",
        lambda status: status.staging_used_bytes,
    ),
    Metric(
        "ostraca_agent_quarantined_bytes",
        _G,
        "bytes",
        (),
        "Staging under transfers or I/O not known to have ended.",
        lambda status: status.quarantined_bytes,
    ),
    Metric(
        "ostraca_agent_index_bytes",
        _G,
        "bytes",
        (),
        "Memory of all its shards' indexes at their limits.",
        lambda status: sum(shard.index_bytes for shard in status.shards),
    ),
    Metric(
        "ostraca_agent_cache_bytes",
        _G,
        "bytes",
        (),
        "Limit of the DRAM cache; 0 while off.",
        lambda status: status.cache_bytes,
    ),
    Metric(
        "ostraca_agent_cache_used_bytes",
        _G,
        "bytes",
        (),
        "Bytes in the DRAM cache.",
        lambda status: status.cache_used_bytes,
    ),
    Metric(
        "ostraca_agent_quarantined_cache_bytes",
        _G,
        "bytes",
        (),
        "Cached bytes under transfers not known to have ended, counted for each transfer.",
        lambda status: status.quarantined_cached_bytes,
    ),
    Metric(
        "ostraca_agent_quarantined_cache_blocks",
        _G,
        "blocks",
        (),
        "Cached blocks under transfers not known to have ended.",
        lambda status: status.quarantined_cached_blocks,
    ),
    Metric(
        "ostraca_agent_prefetched_blocks",
        _C,
        "blocks",
        ("fate",),
        "Blocks that prefetches brought into the DRAM cache (brought), later served from there (useful), or "
        "evicted unread (useless).",
        lambda status: {
            ("brought",): status.counters.prefetched.blocks,
            ("useful",): status.counters.prefetched.useful_blocks,
            ("useless",): status.counters.prefetched.useless_blocks,
        },
    ),
    Metric(
        "ostraca_agent_prefetched_bytes",
        _C,
        "bytes",
        ("fate",),
        "Bytes of prefetched blocks, by the same fates.",
        lambda status: {
            ("brought",): status.counters.prefetched.bytes,
            ("useful",): status.counters.prefetched.useful_bytes,
            ("useless",): status.counters.prefetched.useless_bytes,
        },
    ),
    Metric(
        "ostraca_agent_estimated_load_seconds",
        _C,
        "seconds",
        ("what",),
        "Admitted loads from flash with a known recompute time: estimated duration (expected), real duration "
        "(took), and absolute differences (error).",
        lambda status: {
            ("expected",): status.counters.estimates.estimated_s,
            ("took",): status.counters.estimates.took_s,
            ("error",): status.counters.estimates.error_s,
        },
    ),
    Metric(
        "ostraca_agent_found_earlier_blocks",
        _C,
        "blocks",
        (),
        "Blocks of look-ups, gets and prefetches found only under an earlier placement epoch.",
        lambda status: status.counters.found_earlier,
    ),
    Metric(
        "ostraca_agent_membership_silent_seconds",
        _G,
        "seconds",
        (),
        "Time since the membership store's last answer; 0 while the store answers.",
        lambda status: status.membership.silent_s,
    ),
    Metric(
        "ostraca_agent_unowned_shards",
        _G,
        "shards",
        (),
        "Shards of the fabric without an owner. Equal at all agents: do not add up.",
        lambda status: status.unserved.shard_count,
    ),
    Metric(
        "ostraca_agent_lost_log_lines",
        _C,
        "lines",
        (),
        "Log lines dropped because of a slow reader or a failed write.",
        lambda status: status.lost_log_lines,
    ),
    Metric(
        "ostraca_agent_unused_drives",
        _G,
        "drives",
        (),
        "Drives of the fabric without a path, or refused; their blocks are misses.",
        lambda status: status.unserved.drive_count,
    ),
    Metric(
        "ostraca_agent_unhit_volumes",
        _G,
        "volumes",
        (),
        "Volumes with at least 32 blocks put and 32 asked for since, without a hit.",
        lambda status: status.unhit.count,
    ),
    Metric(
        "ostraca_agent_claims",
        _C,
        "claims",
        ("fate",),
        "Claims by fate: made: still valid after recovery of the shard. lost: ended with the lease, or taken "
        "by another agent. handed_over: released in a handover.",
        lambda status: {
            ("made",): status.claims.made,
            ("lost",): status.claims.lost,
            ("handed_over",): status.claims.handed_over,
        },
    ),
    Metric(
        "ostraca_agent_peer_breaker_open",
        _G,
        "",
        ("peer",),
        "1 while the circuit breaker of the peer is open.",
        lambda status: {(peer.agent,): peer.is_held_off for peer in status.peers},
    ),
    Metric(
        "ostraca_agent_peer_breaker_opened",
        _C,
        "",
        ("peer",),
        "Openings of the circuit breaker of the peer.",
        lambda status: {(peer.agent,): peer.held_off for peer in status.peers},
    ),
    Metric(
        "ostraca_agent_peer_requests",
        _C,
        "requests",
        ("peer", "outcome"),
        "Requests to the peer by outcome: answered, refused, late, or unreachable (open breakers included).",
        lambda status: {
            (peer.agent, outcome): count
            for peer in status.peers
            for outcome, count in msgspec.structs.asdict(peer.asks).items()
        },
    ),
    Metric(
        "ostraca_drive_condition",
        _G,
        "",
        ("drive",),
        "0: good. 1: suspect, no new blocks. 2: failed, unused until the agent's next start.",
        _drive(lambda drive: _CONDITIONS[drive.condition]),
    ),
    Metric(
        "ostraca_drive_breaker_open",
        _G,
        "",
        ("drive", "operation"),
        "1 while the drive's circuit breaker for reads or writes is open.",
        lambda status: {
            (drive.drive, kind): is_open
            for drive in status.drives
            for kind, is_open in (("read", drive.reads_held_off), ("write", drive.writes_held_off))
        },
    ),
    Metric(
        "ostraca_drive_faults",
        _G,
        "",
        ("drive",),
        "Faults of the last half hour that count against the drive.",
        _drive(lambda drive: drive.faults),
    ),
    Metric(
        "ostraca_drive_errors",
        _C,
        "",
        ("drive", "kind"),
        "Failed reads and writes, silences, damaged blocks, and operations refused by the drive's open "
        "breaker (refused).",
        lambda status: {
            (drive.drive, kind): count
            for drive in status.drives
            for kind, count in (
                ("read", drive.failed_reads),
                ("write", drive.failed_writes),
                ("silence", drive.silences),
                ("damage", drive.damaged_blocks),
                ("refused", drive.refused),
            )
        },
    ),
    Metric(
        "ostraca_drive_queued_blocks",
        _G,
        "blocks",
        ("drive",),
        "Blocks queued at the drive.",
        _drive(lambda drive: drive.queued_blocks),
    ),
    Metric(
        "ostraca_drive_hit_blocks",
        _C,
        "blocks",
        ("drive",),
        "Blocks that gets of this agent's workers found on the drive.",
        _drive(lambda drive: drive.hits),
    ),
    Metric(
        "ostraca_agent_enclosure_paths",
        _G,
        "paths",
        ("enclosure", "state"),
        "Paths from the agent's host to the enclosure, live or lost.",
        lambda status: {
            (each.enclosure, state): sum(path.is_live == is_live for path in each.paths)
            for each in status.paths
            for state, is_live in (("live", True), ("lost", False))
        },
    ),
    Metric(
        "ostraca_agent_flash_io",
        _G,
        "",
        ("mode",),
        "1 for the way of flash I/O: io_uring or threads.",
        lambda status: {(status.flash_io,): 1} if status.flash_io else {},
    ),
    Metric(
        "ostraca_agent_enclosure_initiator",
        _G,
        "",
        ("enclosure", "initiator"),
        "1 for the host side of the enclosure's paths: kernel, userspace or files.",
        lambda status: {(each.enclosure, each.initiator): 1 for each in status.paths},
    ),
    Metric(
        "ostraca_shard_blocks",
        _G,
        "blocks",
        ("shard",),
        "Blocks available to gets.",
        _shard(lambda shard: shard.blocks),
    ),
    Metric(
        "ostraca_shard_limit_blocks",
        _G,
        "blocks",
        ("shard",),
        "Limit of the index, where the oldest blocks are evicted.",
        _shard(lambda shard: shard.blocks_max),
    ),
    Metric(
        "ostraca_shard_beyond_limit_blocks",
        _G,
        "blocks",
        ("shard",),
        "Blocks on flash not listed at the start of ownership for lack of index space.",
        _shard(lambda shard: shard.beyond_limit_blocks),
    ),
    Metric(
        "ostraca_shard_unreadable_segments",
        _G,
        "segments",
        ("shard",),
        "Segments with unreadable summaries at the start of ownership, until overwritten.",
        _shard(lambda shard: shard.unreadable_segments),
    ),
    Metric(
        "ostraca_shard_index_bytes",
        _G,
        "bytes",
        ("shard",),
        "Memory of the index at its limit.",
        _shard(lambda shard: shard.index_bytes),
    ),
    Metric(
        "ostraca_shard_used_bytes",
        _G,
        "bytes",
        ("shard",),
        "Bytes of blocks available to gets.",
        _shard(lambda shard: shard.used_bytes),
    ),
    Metric(
        "ostraca_shard_size_bytes",
        _G,
        "bytes",
        ("shard",),
        "Capacity for blocks in all segments.",
        _shard(lambda shard: shard.size_bytes),
    ),
    Metric(
        "ostraca_shard_evicted_blocks",
        _C,
        "blocks",
        ("shard",),
        "Blocks evicted with their segment.",
        _shard(lambda shard: shard.evicted_blocks),
    ),
    Metric(
        "ostraca_shard_reinserted_blocks",
        _C,
        "blocks",
        ("shard",),
        "Recently read blocks reinserted into a newer segment before eviction.",
        _shard(lambda shard: shard.reinserted_blocks),
    ),
    Metric(
        "ostraca_shard_written_bytes",
        _C,
        "bytes",
        ("shard",),
        "Flash granted to writers, and summaries written, since the start of ownership.",
        _shard(lambda shard: shard.written_bytes),
    ),
    Metric(
        "ostraca_shard_write_budget_bytes",
        _G,
        "bytes",
        ("shard",),
        "Current write budget; below zero after overspending. Requires a rating.",
        _shard(lambda shard: None if shard.years_left is None else shard.budget_level_bytes),
    ),
    Metric(
        "ostraca_shard_endurance_left_years",
        _G,
        "years",
        ("shard",),
        "Remaining life at the last day's rate, up to 1000, from this agent's writes. Requires a rating.",
        _shard(lambda shard: shard.years_left),
    ),
    Metric(
        "ostraca_shard_scrubbed_bytes",
        _C,
        "bytes",
        ("shard",),
        "Bytes read by scrubbing.",
        _shard(lambda shard: shard.scrubbed_bytes),
    ),
    Metric(
        "ostraca_shard_scrub_passes",
        _C,
        "passes",
        ("shard",),
        "Complete scrub passes.",
        _shard(lambda shard: shard.scrub_passes),
    ),
    Metric(
        "ostraca_shard_owner_epoch",
        _G,
        "",
        ("shard",),
        "Owner epoch, rising with each owner; 0 during recovery.",
        _shard(lambda shard: shard.owner_epoch),
    ),
    Metric(
        "ostraca_shard_fenced",
        _G,
        "",
        ("shard",),
        "1 while the agent owns the recovered shard without permission to write.",
        _shard(lambda shard: shard.ownership.is_fenced),
    ),
    Metric(
        "ostraca_shard_out_of_space",
        _G,
        "",
        ("shard",),
        "1 while the writable shard has no space to grant.",
        _shard(lambda shard: bool(shard.ownership.why_no_space)),
    ),
    Metric(
        "ostraca_shard_granted_segments",
        _G,
        "segments",
        ("shard",),
        "Segments granted to this owner for writing.",
        _shard(lambda shard: shard.ownership.granted_segments),
    ),
    Metric(
        "ostraca_shard_withheld_segments",
        _G,
        "segments",
        ("shard",),
        "Segments not written because an earlier owner's writes may still land there.",
        _shard(lambda shard: shard.ownership.withheld_segments),
    ),
    Metric(
        "ostraca_shard_adopted_blocks",
        _C,
        "blocks",
        ("shard",),
        "Blocks listed by an earlier owner after the start of ownership, and found.",
        _shard(lambda shard: shard.ownership.adopted_blocks),
    ),
    Metric(
        "ostraca_shard_failing",
        _G,
        "",
        ("shard",),
        "1 after the drive failed an operation of this shard.",
        _shard(lambda shard: shard.is_failing),
    ),
    Metric(
        "ostraca_agent_tenant_connections",
        _G,
        "",
        ("tenant",),
        "Connections of the tenant's workers.",
        _tenant(lambda tenant: tenant.connections),
    ),
    Metric(
        "ostraca_agent_tenant_requests",
        _G,
        "requests",
        ("tenant",),
        "The tenant's requests in progress, also for workers of other agents.",
        _tenant(lambda tenant: tenant.requests),
    ),
    Metric(
        "ostraca_agent_tenant_staging_bytes",
        _G,
        "bytes",
        ("tenant",),
        "Memory of the tenant's blocks in transfer, quarantine included.",
        _tenant(lambda tenant: tenant.staging_bytes),
    ),
    Metric(
        "ostraca_agent_tenant_cache_bytes",
        _G,
        "bytes",
        ("tenant",),
        "Bytes of the tenant in the DRAM cache.",
        _tenant(lambda tenant: tenant.cache_bytes),
    ),
)
