"""A status and tallies that have something to say in every metric."""

from __future__ import annotations

import numpy as np

from ostraca.client_metrics import ClientMetrics, DirectCounters
from ostraca_fabric.model.inventory import DriveReport, DriveWear
from ostraca_fabric.model.outcome import BlockState, PutState, Reason
from ostraca_fabric.telemetry.conditions import Condition
from ostraca_fabric.telemetry.requests import OperationTally, Tally
from ostraca_fabric.telemetry.status import (
    AgentCounters,
    AgentStatus,
    AskCounters,
    ClaimCounters,
    DriveStatus,
    EnclosureDaemonStatus,
    EnclosurePathStatus,
    EstimateCounters,
    MembershipStatus,
    OwnershipStatus,
    PathStatus,
    PeerStatus,
    PrefetchCounters,
    ShardStatus,
    TenantStatus,
    Unhit,
    UnhitVolume,
)
from ostraca_fabric.telemetry.unavailable import Unavailable


def tally(operation: str, *outcomes: tuple[BlockState | PutState, Reason, int]) -> OperationTally:
    running = Tally(operation)
    for state, reason, blocks in outcomes:
        running.count(np.full(blocks, state, np.uint8), np.full(blocks, reason, np.uint8))
    running.bytes = 4 << 20
    for seconds in (0.0004, 0.003, 0.004):
        running.timed(seconds)
    return running.snapshot()


GET = tally("get", (BlockState.HIT, Reason.NONE, 4), (BlockState.MISS, Reason.NOT_FOUND, 2))
PUT = tally("put", (PutState.COMMITTED, Reason.NONE, 4))

PREFETCHED = PrefetchCounters(8, 8 << 20, useful_blocks=5, useful_bytes=5 << 20)
ESTIMATES = EstimateCounters(4, estimated_s=1.5, took_s=1.25, error_s=0.25)

STATUS = AgentStatus(
    flash_io="io_uring",
    agent="agent-0",
    start_id="0f" * 16,
    version="0.1.0",
    uptime_s=184.5,
    transports=("nixl", "inline"),
    sentence="serving 1 of 1 shard; no changes",
    workers=3,
    staging_bytes=256 << 20,
    staging_used_bytes=64 << 20,
    quarantined_bytes=0,
    cache_bytes=512 << 20,
    cache_used_bytes=128 << 20,
    conditions=(Condition("drives_good", False, 184.5, "1 drives are in trouble."),),
    counters=AgentCounters(
        get_hits=4,
        get_hits_from_cache=3,
        damaged=1,
        found_earlier=6,
        prefetched=PREFETCHED,
        estimates=ESTIMATES,
        get_hits_from_staging=2,
        get_hits_direct=5,
    ),
    shards=(
        ShardStatus(
            "enclosure-0/drive-0/0",
            4,
            1234,
            1 << 30,
            2 << 30,
            evicted_blocks=5,
            reinserted_blocks=3,
            is_failing=False,
            blocks_max=1 << 20,
            index_bytes=48 << 20,
            beyond_limit_blocks=7,
            unreadable_segments=6,
            written_bytes=3 << 30,
            scrubbed_bytes=4 << 30,
            scrub_passes=2,
            budget_level_bytes=float(1 << 28),
            years_left=7.25,
            ownership=OwnershipStatus(
                may_write_for_s=3.5, granted_segments=12, granted_ahead_segments=10, adopted_blocks=9
            ),
        ),
    ),
    agents=(("agent-0", "unix:///a"), ("agent-1", "tcp://b:1")),
    unserved=Unavailable(drive_count=1),
    unhit=Unhit(1, (UnhitVolume("chat/kv", 48, 32),)),
    lost_log_lines=17,
    peers=(PeerStatus("agent-1", is_connected=True, held_off=2, asks=AskCounters(88, 3, 4, 21)),),
    tenants=(
        TenantStatus("chat", 2, 3, 48 << 20, 96 << 20),
        TenantStatus("search", 1, 1, 16 << 20, 32 << 20),
    ),
    membership=MembershipStatus(),
    claims=ClaimCounters(made=5, lost=1, handed_over=3),
    operations=(GET, PUT),
    quarantined_cached_blocks=2,
    quarantined_cached_bytes=2 << 20,
    drives=(
        DriveStatus(
            "enclosure-0/drive-0",
            condition="suspect",
            why="is suspect: 8 faults within 1800 s, lately a read failed",
            writes_held_off=True,
            faults=8,
            failed_reads=7,
            failed_writes=3,
            silences=1,
            damaged_blocks=2,
            refused=40,
            queued_blocks=32,
            hits=5,
        ),
    ),
    paths=(
        EnclosurePathStatus(
            "shelf-1",
            2,
            (PathStatus("rdma://a:4420", True), PathStatus("tcp://b:4420", False, "connecting")),
            initiator="kernel",
        ),
    ),
)

ENCLOSURE = EnclosureDaemonStatus(
    enclosure="shelf-1",
    start_id="0e" * 16,
    version="0.1.0",
    nqn="nqn.2025-01.io.ostraca:shelf-1",
    controllers=("rdma://10.0.8.1:4420",),
    hosts=("nqn.2025-01.io.ostraca:host-1",),
    target="nvmet",
    drives=(
        DriveReport(
            "nvme0n1",
            "36344630528001050025384100000001",
            3_840_755_982_336,
            4096,
            is_exported=True,
            wear=DriveWear(
                percentage_used=3,
                available_spare=100,
                spare_threshold=10,
                media_errors=0,
                temperature_c=35,
                bytes_written=460_800_000_000_000,
            ),
        ),
        DriveReport("drive-0", "11111111111111111111111111111111", 1 << 30, 4096),
    ),
    sentence="1 of 2 drives exported",
    uptime_s=61.5,
    turns=12,
    steps_failed=2,
    lost_log_lines=17,
    conditions=(Condition("drives_fit", True, 61.5, "every drive that is exported is fit"),),
)

CLIENT = ClientMetrics(
    worker="5eed1234",
    agent="agent-0",
    transport="nixl",
    operations=(GET, PUT),
    hit_tokens=64,
    declared_saved_s=2.875,
    arena_bytes=256 << 20,
    quarantined_bytes=0,
    direct=DirectCounters(blocks_read=7, blocks_failed=1),
)
