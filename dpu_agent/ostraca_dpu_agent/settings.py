"""Everything an operator may set of an agent, with its reason.

Each value is a limit or a rhythm; none changes what is promised. Environment and files are read by the
command line alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ostraca_dpu_agent.owner.core.scrubbing import ScrubSettings
from ostraca_fabric.adapters.http.settings import HttpSettings
from ostraca_fabric.connection import ConnectionSettings
from ostraca_fabric.drive_health import HealthSettings
from ostraca_fabric.errors import UsageError
from ostraca_fabric.flash.index import BLOCKS_MAX
from ostraca_fabric.limits import check_above_zero, check_one_at_least
from ostraca_fabric.policies.endurance import EnduranceSettings
from ostraca_fabric.target import check_nqn

MIB = 1 << 20
_TURN_LEAST_S = 0.01
BLOCKS_PER_SHARD_LEAST = 1024
"""An index keeps several segments of blocks, and one request may bring 4096: a smaller one would evict what
it just took in."""


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """The agent's registered memory: staging for what is on its way, and the DRAM cache."""

    staging_bytes: int = 512 * MIB
    """The most that blocks on their way may take. What the reserve does not hold is borrowed from the cache,
    whose least recently used blocks give way. Raise it when gets are DECLINED(OVERLOADED) while drives are
    idle."""

    reserve_bytes: int = 64 * MIB
    """Memory that the cache never takes, so that a few gets at a time cost it nothing."""

    cache_bytes: int = 512 * MIB
    """Room for blocks kept after they passed through. 0 turns the DRAM cache off."""

    cache_protected_share: float = 0.3
    """The part of the cache that blocks used more than once may keep while others pass through once. Best at
    this on a public trace of conversations, for caches of 1, 5 and 10 % of all blocks; more of it leaves too
    little for what will be used again soon. Raise it where few prefixes serve nearly all requests."""

    chunk_bytes: int = 32 * MIB
    """No block lies in two chunks, so take at least the largest block; what is left at the end of each is for
    smaller ones. A chunk is filled with slots of one size where there are chunks enough."""

    put_share: float = 0.5
    """The part of staging that puts may hold, so that gets never wait behind writes."""

    quarantine_share: float = 0.5
    """The part of staging that transfers not known to have ended may hold, blocks of the cache counted as
    well, before new ones are declined."""

    worker_share: float = 0.25
    """The part of staging that one worker may hold, so that one that has stopped leaves the others theirs.
    Blocks of the cache count while its transfers read them."""

    drive_share: float = 0.125
    """The part of staging that blocks on their way from and to one drive may hold, but for a wave that is
    alone there: what a drive that hangs keeps for as long as it does. Half of a worker's share, so that a
    worker has room for other drives. 64 MiB keep a drive of 7 GB/s busy for 9 ms."""


@dataclass(frozen=True, slots=True)
class FlowSettings:
    """How work is cut up and bounded."""

    wave_bytes: int = 8 * MIB
    """Blocks cross in waves of about this size: large enough to cost little each, small enough that one is
    verified while the next one moves."""

    put_group_bytes: int = 32 * MIB
    """Blocks of a put that hold staging, and are committed, together. Each of their waves is written as soon
    as it is checked. Large: every group costs its owner an answer and a summary write."""

    waves_ahead: int = 8
    """Waves of one request that may be on their way from the cache, or groups of a put, at once."""

    reads_ahead: int = 16
    """Waves of one request that may be on their way from flash at once, shared evenly between its drives;
    each drive has one at least."""

    exists_within_s: float = 0.05
    """How long a put waits, while earlier placement epochs are live, for word that blocks exist where those
    placed them: a few round trips of a busy network. An agent that does not answer holds it up for so long,
    and what that one has is written once more."""

    requests_max: int = 256
    """Requests under way in the whole agent; more are DECLINED(OVERLOADED). Half of them are for the tenants
    that are connected, in equal parts."""

    answer_margin_s: float = 0.002
    """Answers leave this long before the caller's deadline, so that they arrive before it."""

    deadline_max_s: float = 600.0
    """The longest deadline taken at its word; longer ones are cut to it, so that nothing is held for ever."""

    def __post_init__(self) -> None:
        """Refuse limits that let nothing pass."""
        check_one_at_least(
            self, "wave_bytes", "put_group_bytes", "waves_ahead", "reads_ahead", "requests_max"
        )
        if not self.deadline_max_s > self.answer_margin_s:
            message = (
                f"deadline_max_s is {self.deadline_max_s}: make it more than answer_margin_s, which is "
                f"{self.answer_margin_s}, or every request is answered late"
            )
            raise UsageError(message)


@dataclass(frozen=True, slots=True)
class OwnerSettings:
    """How an owner keeps its shards."""

    group_commit_s: float = 0.002
    """How long a commit waits for others to share its summary page."""

    hold_s: float = 30.0
    """How long a reservation lasts. Longer than any write takes; a dead writer's space comes back after
    it. The same at all agents of a fabric: a successor waits by its own."""

    recovery_wait_s: float = 0.25
    """How long a put waits for a shard that is being recovered. Its blocks are held in staging memory
    meanwhile, which puts to other shards want too; small shards are recovered sooner."""

    opening_wait_s: float = 0.25
    """How long a put waits for a segment that is being opened: a write of one page. Blocks that go to other
    drives wait with it, so a drive that hangs must not be waited for."""

    pause_max_s: float = 60.0
    """A write that was begun so long ago and is not submitted yet is dropped: this agent was stopped. Half of
    the two minutes after which a successor counts on it that no write lands any more; the path's own
    time-outs have the rest. Less than ``late_write_s``."""

    pin_max_s: float = 10.0
    """The longest promise not to reuse an extent. An owner waits at most this long before it reuses a
    segment. The same at all agents of a fabric: a successor waits by its own."""

    grant_s: float = 5.0
    """How long an owner hands out space and lists blocks after it last asked the membership store, and was
    told that its claims stand: so long do puts go on when the store is down. A successor waits as long before
    it counts on the one before to have stopped, by its own: take the same at all agents of a fabric. As long
    as a lease of the store lasts (``etcd.lease_ttl_s``), and no longer: by then another agent may own the
    shards."""

    late_write_s: float = 120.0
    """How long after its end a write may still reach a drive: through a path that holds it back, or because
    its agent was stopped meanwhile (``pause_max_s`` of it). No segment is used again sooner. Raise it where
    ``fast_io_fail_tmo`` of the paths is longer than a minute. The same at all agents of a fabric: a successor
    waits by its own, and one that waits for less writes where the one before still may."""

    adopt_every_s: float = 10.0
    """How often the summaries of segments are read again that an owner before this one may still be
    listing blocks in."""

    blocks_per_shard_max: int = 1 << 20
    """Limit of one shard's index, and so of its memory: at most 48 bytes each. At the limit the oldest
    segment is evicted, though there is flash left. Raise it where a shard's ``blocks`` stay at it while
    flash is not full; docs/howto/plan-memory.md says what it takes."""

    free_segments: int = 4
    """Segments emptied ahead of need, so that a put does not wait for eviction, or for readers of what was
    evicted. A shard keeps at most one in sixteen of its segments empty for it, or one of a few."""

    carry_share: float = 0.12
    """Bytes that eviction may copy forward for each byte committed, of blocks that were read of late. Flash
    wears by as much more. 0 copies nothing. Whatever this is, segments of which much was read may stay where
    they are for another round, which writes nothing."""

    endurance: EnduranceSettings = field(default_factory=EnduranceSettings)
    """How much is written to flash, and which blocks first when not all may be. Set ``rated_dwpd`` wherever
    drives have to last."""

    scrub: ScrubSettings = field(default_factory=ScrubSettings)
    """How flash is read again while drives are idle."""

    def __post_init__(self) -> None:
        """Refuse an index that is of no use, or that can't be made, and times that keep no promise."""
        check_above_zero(self, "hold_s", "pause_max_s", "pin_max_s", "grant_s", "adopt_every_s")
        check_one_at_least(self, "free_segments")
        if not self.late_write_s > self.pause_max_s:
            message = (
                f"late_write_s is {self.late_write_s} and pause_max_s {self.pause_max_s}: make the first "
                "more than the second, for an agent that was stopped for so long may still write, and its "
                "path takes time as well"
            )
            raise UsageError(message)
        if not BLOCKS_PER_SHARD_LEAST <= self.blocks_per_shard_max <= BLOCKS_MAX:
            message = (
                f"owner.blocks_per_shard_max is {self.blocks_per_shard_max}: let a shard's index hold "
                f"{BLOCKS_PER_SHARD_LEAST} to {BLOCKS_MAX} blocks, of 48 bytes each"
            )
            raise UsageError(message)


@dataclass(frozen=True, slots=True)
class RequestSettings:
    """What one connection may ask for. Said in the handshake."""

    frame_bytes_max: int = 4 * MIB
    """Longest message. A request of ``blocks_max`` blocks with 32-byte hashes takes about 0.4 MB."""

    blocks_max: int = 4096
    """Blocks in one request."""

    inflight_max: int = 64
    """Requests under way on one connection."""

    volumes_max: int = 1024
    """Volumes open on one connection."""

    def __post_init__(self) -> None:
        """Refuse limits that let nothing pass."""
        check_one_at_least(self, "frame_bytes_max", "blocks_max", "inflight_max", "volumes_max")


@dataclass(frozen=True, slots=True)
class NvmeSettings:
    """How this host reaches enclosures."""

    host_nqn: str = ""
    """The NQN by which enclosures know this host; empty: one made of the agent's name. Enclosures list it
    among the hosts that they let in."""

    secrets_dir: str = "/etc/ostraca/nvme-secrets"
    """Where DH-HMAC-CHAP secrets lie, a file each, by the name that an enclosure was registered with. Nobody
    else may read them."""

    turn_s: float = 2.0
    """How often the paths to each enclosure are looked at. A path that was lost is the kernel's to bring
    back; a drive that turns up elsewhere is opened there after so long."""

    found_within_s: float = 20.0
    """How long an agent that starts waits for its paths before it serves what it has."""

    io_queues: int = 2
    """Queues to each controller. Every one is a connection at both ends: 288 hosts with two to each of 36
    enclosures are 31 thousand. Raise it in small pods whose agents are held up by one queue's processor."""

    keep_alive_s: int = 5
    """How often this host says to an enclosure that it lives, in whole seconds."""

    reconnect_delay_s: int = 2
    """How long after a path was lost it is tried again, in whole seconds."""

    fast_io_fail_s: int = 15
    """How long I/O waits for a lost path when there is no other, in whole seconds. Gets are misses by then; a
    longer wait helps only writes, and makes them later: paths for which that is too late for
    ``owner.late_write_s`` are not connected."""

    reservations: bool = False
    """Whether drives are reserved for the agents of the fabric, where their enclosures can: those that are
    gone write no more then, however late (ADR 0029). Turn it on at all agents. It is off because it was never
    run on a kernel that can."""

    hold_s: float = 300.0
    """How long an enclosure that was looked at, and is not in the map, stays connected."""

    def __post_init__(self) -> None:
        """Refuse what can't work."""
        if self.host_nqn:
            check_nqn(self.host_nqn)
        if min(self.turn_s, self.found_within_s, self.hold_s) <= 0:
            message = "turn_s, found_within_s and hold_s are times above 0"
            raise UsageError(message)
        if min(self.io_queues, self.keep_alive_s, self.reconnect_delay_s, self.fast_io_fail_s) < 1:
            message = "io_queues, keep_alive_s, reconnect_delay_s and fast_io_fail_s are 1 or more"
            raise UsageError(message)


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """Settings of one agent."""

    memory: MemorySettings = field(default_factory=MemorySettings)
    flow: FlowSettings = field(default_factory=FlowSettings)
    owner: OwnerSettings = field(default_factory=OwnerSettings)
    requests: RequestSettings = field(default_factory=RequestSettings)
    connections: ConnectionSettings = field(default_factory=ConnectionSettings)
    health: HealthSettings = field(default_factory=HealthSettings)
    """Of each drive."""

    http: HttpSettings = field(default_factory=HttpSettings)
    nvme: NvmeSettings = field(default_factory=NvmeSettings)

    events_max: int = 65_536
    """Events that `ostraca explain` can tell of, 59 bytes each: 3.9 MB. An event is one block looked up, got,
    put or evicted; raise it where explanations do not reach back far enough."""

    secrets_look_s: float = 5.0
    """How often files of secrets are looked at. A token that was taken out lets nobody in after that, and who
    came in by it is put out."""

    turn_s: float = 1.0
    """How often the steward looks again when nothing has changed."""

    open_again_s: float = 30.0
    """How long a shard is left alone that could not be opened, or of which a part has crashed. Each try may
    read all of its summaries."""

    placement_ttl_s: float = 7 * 86_400.0
    """How long blocks are looked up where an earlier placement epoch placed them, at most. Most often it ends
    before, when flash has been written over once since. Lower it where that takes long and another change of
    enclosures waits for it."""

    placement_turn_s: float = 60.0
    """How often the one agent that ends earlier placement epochs asks owners how far round they have gone. It
    is a matter of hours and days."""

    drain_s: float = 10.0
    """How long an orderly stop waits: for puts already acknowledged as staged, for others to take the shards
    and, meanwhile, for workers to have gone to other agents. Keep it above the longest deadline in use: what
    such a worker has begun before is lost only where it takes longer."""

    def __post_init__(self) -> None:
        """Refuse what can't work."""
        memory = self.memory
        check_above_zero(self, "secrets_look_s", "open_again_s", "placement_ttl_s", "placement_turn_s")
        if self.turn_s < _TURN_LEAST_S:
            message = (
                f"turn_s is {self.turn_s}: make it {_TURN_LEAST_S} or more, or the agent does nothing else "
                "than look"
            )
            raise UsageError(message)
        if self.events_max < 1:
            message = f"events_max is {self.events_max}: keep at least one event"
            raise UsageError(message)
        if memory.chunk_bytes % (2 * MIB) or memory.chunk_bytes <= 0:
            message = f"memory.chunk_bytes is {memory.chunk_bytes}: make it a multiple of {2 * MIB}"
            raise UsageError(message)
        if memory.staging_bytes < 2 * memory.chunk_bytes:
            message = (
                f"memory.staging_bytes is {memory.staging_bytes}: it must hold at least two chunks of "
                f"{memory.chunk_bytes} bytes, one for gets and one for puts"
            )
            raise UsageError(message)
        if not all(
            0 < part <= 1
            for part in (
                memory.put_share,
                memory.quarantine_share,
                memory.worker_share,
                memory.drive_share,
            )
        ):
            message = (
                "memory.put_share, memory.quarantine_share, memory.worker_share and memory.drive_share are "
                "parts of staging: above 0, up to 1"
            )
            raise UsageError(message)
        if not 0 <= memory.cache_protected_share <= 1:
            message = (
                f"memory.cache_protected_share is {memory.cache_protected_share}: it is a part of the cache, "
                "0 to 1"
            )
            raise UsageError(message)
