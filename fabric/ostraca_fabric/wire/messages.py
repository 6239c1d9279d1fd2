"""Messages between workers, agents and operator tools.

Messages are msgspec structs, encoded as msgpack arrays ``[tag, field, ...]``. A later version may add fields
with defaults at the end and messages with new tags; all else is fixed. Columns (one value per block) travel
as the little-endian bytes of a numpy array, so a batch costs no Python object per block.
``ostraca_fabric.wire.codec`` packs and checks columns.

All messages are in this module, despite its length: each tag is unique, and request and answer stand side by
side.

A request carries an id chosen by the caller, unique among the caller's open requests on the connection.
Deadlines travel as remaining time in seconds, so that clocks are never compared.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from ostraca_fabric.model.chain import Span
from ostraca_fabric.model.volume import Layout

WIRE_VERSION = 1
"""Preferred version of this release. The previous version, if any, is spoken as well."""

WIRE_VERSION_OLDEST = 1

SPANS_MAX = 16384
"""Most spans in a request.

Each span is checked separately while decoding: without a limit, a frame of empty spans would block an agent
for a third of a second.
"""


DRIVES_MAX = 4096
"""Most drives in ``DirectDrives``."""

REGION_OFFERS_MAX = 256
"""Most offers of regions on a connection."""

REGIONS_BYTES_MAX = 64 << 10
"""Most bytes of metadata in an offer of regions: over InfiniBand a region takes some 100."""

Spans = Annotated[tuple[Span, ...], msgspec.Meta(max_length=SPANS_MAX)]


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False, tag_field="t"):
    """Message in a msgpack frame of its own."""


class RequestMessage(Message, frozen=True):
    """Request, or message about a request."""

    request: int


class BlocksAnswer(RequestMessage, frozen=True):
    """Answer with a state and a reason for each block."""

    states: bytes
    reasons: bytes


# --- handshake
# -------------------------------------------------------------------------------------------------------


class ArenaOffer(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Memory opened by a worker to the agent, with the transport.

    ``base`` is the address in the worker; ``metadata`` belongs to the transport and is opaque here. Slots of
    ``s`` bytes lie in chunks: the slot at ``offset`` is number ``offset // chunk_bytes * (chunk_bytes // s) +
    offset % chunk_bytes // s``.
    """

    transport: str
    arena_bytes: int
    chunk_bytes: int
    base: int = 0
    metadata: bytes = b""


class ConnectionLimits(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Limits of the agent for a connection. A frame beyond the limits is refused."""

    frame_bytes_max: int
    blocks_max: int
    inflight_max: int


class WorkerMemory(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Offer of a worker's whole memory, for puts, to an agent of its host with the kernel's permission."""

    proof_address: int
    proof: bytes
    """As in ``AgentMemory``."""


class Hello(Message, frozen=True, tag=1):
    """First frame of a connection: caller and capabilities, for one tenant."""

    version_oldest: int
    version_newest: int
    role: str
    """``worker``, ``agent`` or ``operator``."""
    tenant: str
    token: str
    """Empty on a unix socket with sufficient peer credentials."""
    name: str
    """For people: program and process id."""
    features: tuple[str, ...] = ()
    arenas: tuple[ArenaOffer, ...] = ()
    """In order of preference. Empty for a connection without blocks."""
    client: bytes = b""
    """Worker's random id, the same on every connection with the same arena."""
    memory: WorkerMemory | None = None
    """On a unix socket, by workers that may be read by the agent."""


class AgentMemory(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Memory of the agent's process, for workers of this host with the kernel's permission to read it."""

    address: int
    size_bytes: int
    proof_address: int
    proof: bytes
    """Bytes at ``proof_address``: a reader of another process does not find them there."""


class Welcome(Message, frozen=True, tag=2):
    """Acceptance by the agent: version, features and transport for the connection."""

    version: int
    agent: str
    start_id: bytes
    features: tuple[str, ...]
    limits: ConnectionLimits
    transport: str
    """Empty without an arena offer."""

    memory: AgentMemory | None = None
    """For workers on a unix socket that may be able to read the agent's memory."""

    reads_worker: bool = False
    """Whether the agent reads this worker's memory, so that a ``Put`` may name addresses there."""


class Refused(Message, frozen=True, tag=3):
    """Refusal or end of the connection by the agent, which then closes the connection.

    Codes: version, authentication, transport, regions, limit, protocol, malformed, frame_too_long, internal.
    """

    code: str
    message: str


class Failure(RequestMessage, frozen=True, tag=4):
    """Failure of a request; the connection stays open.

    Codes: docs/reference/formats/wire.md.
    """

    code: str
    message: str


# --- worker to agent
# -------------------------------------------------------------------------------------------------


class OpenVolume(RequestMessage, frozen=True, tag=10):
    """Request to find a volume of the connection's tenant, or to create the volume.

    Chains shorter than ``break_even_tokens`` are not put through the returned handle: this worker recomputes
    such chains faster than loading.
    """

    name: str
    layout: Layout
    block_bytes: int
    create: bool
    break_even_tokens: int = 0


class VolumeOpened(RequestMessage, frozen=True, tag=11):
    """Answer to OpenVolume; ``handle`` is valid on this connection only."""

    handle: int
    incarnation: int


class Lookup(RequestMessage, frozen=True, tag=12):
    """Query for the blocks available to gets. With ``pin_s``, hits stay available that long."""

    handle: int
    deadline_s: float
    spans: Spans
    pin_s: float = 0.0
    is_counted: bool = True
    """Whether the query counts as a read of the blocks found, and among events and statistics of lookups."""


class LookupDone(BlocksAnswer, frozen=True, tag=13):
    """Answer to Lookup, a byte per block, spans in order.

    ``states``: BlockState; ``reasons``: Reason.
    """


class Get(RequestMessage, frozen=True, tag=14):
    """Request to load blocks into arena slots.

    ``lengths``: u32 expected bytes per block; ``slots``: u64 arena offset per block.
    """

    handle: int
    deadline_s: float
    spans: Spans
    lengths: bytes
    slots: bytes
    slot_bytes: int
    recompute_s: float = 0.0
    """Time to recompute all of these blocks, spread evenly; 0 if unknown."""

    is_again: bool = False
    """Whether the worker has failed to read these blocks itself: the agent must deliver them."""

    addresses: bytes = b""
    """u64 per block: addresses in offered regions of the worker to write to instead of the slots."""

    in_memory: bool = False
    """Whether the worker wants ``places`` of all blocks at once, and needs no arena: slots are 0. Otherwise
    the request fails as ``not_in_memory``."""


class GetProgress(RequestMessage, frozen=True, tag=15):
    """Notice of landed blocks, ready for verification; more may follow.

    ``positions``: u32 in the request; ``tags``: 16 bytes each, made by the writers' SDKs. A block is a HIT
    only if named here, or in ``GetDone.positions``.

    ``places``, if any: these blocks have not landed, and the worker copies them out of the agent's memory.
    u64 offsets there, which may hold other blocks meanwhile. Only for workers that read memory.
    """

    positions: bytes
    tags: bytes
    places: bytes = b""


class GetDone(BlocksAnswer, frozen=True, tag=16):
    """End of a get. ``states`` and ``reasons``: a byte per block.

    - ``unsettled``: u32 positions with the slot under a transfer not known to have ended. ``Settled`` follows
      after the end.
    - ``positions``, ``tags``, ``places``: the last landed blocks, instead of a separate ``GetProgress``, so
      that a small get has one message.
    """

    unsettled: bytes = b""
    positions: bytes = b""
    tags: bytes = b""
    places: bytes = b""


class Put(RequestMessage, frozen=True, tag=17):
    """Request to store blocks from arena slots.

    ``tags``: 16 bytes per block, made by the SDK from the caller's bytes.
    """

    handle: int
    deadline_s: float
    ack: int
    spans: Spans
    lengths: bytes
    tags: bytes
    slots: bytes
    slot_bytes: int
    ttl_s: float = 0.0
    """Time after which the blocks are not worth reinsertion at their segment's eviction; 0 if unknown."""

    addresses: bytes = b""
    """u64 per block: addresses to read instead of the slots, anywhere in the worker's memory with
    ``reads_worker``, else in offered regions."""


class PutDone(BlocksAnswer, frozen=True, tag=18):
    """Acknowledgement of a put. ``states``: a PutState byte per block.

    ``unsettled`` as in GetDone; all other slots are free for the worker.
    """

    unsettled: bytes = b""


class Prefetch(RequestMessage, frozen=True, tag=19):
    """Request to load blocks into an agent's DRAM cache, as room and time allow."""

    handle: int
    deadline_s: float
    spans: Spans
    at: str = ""
    """The agent with the DRAM cache; empty for the receiver of the message."""


class PrefetchDone(BlocksAnswer, frozen=True, tag=20):
    """Answer to Prefetch and PrefetchFor.

    ``states``: HIT for blocks now in that agent's DRAM cache.
    """


class Cancel(RequestMessage, frozen=True, tag=21):
    """Notice to give up a request. The request still gets a final message, soon."""


class Settled(RequestMessage, frozen=True, tag=22):
    """Notice of the end of all transfers of a request; all slots are free for the worker."""


class Ping(RequestMessage, frozen=True, tag=23):
    """Request for an immediate answer."""


class Pong(RequestMessage, frozen=True, tag=24):
    """Answer to Ping."""


class StatusRequest(RequestMessage, frozen=True, tag=25):
    """Request for the agent's status."""


class StatusDone(RequestMessage, frozen=True, tag=26):
    """Answer to StatusRequest.

    ``body``: an ``AgentStatus`` as msgpack (``ostraca_fabric.telemetry.status``).
    """

    body: bytes


class Fetch(Message, frozen=True, tag=27):
    """Request to a worker for arena bytes, inline transport only.

    The worker sends the bytes as bulk frames of ``transfer``, in this order.
    """

    transfer: int
    slots: bytes
    lengths: bytes


class SettlePast(RequestMessage, frozen=True, tag=28):
    """Request to end earlier connections of this client (``Hello.client``).

    The answer follows when all transfers of the earlier connections are known to have ended.
    """


class PastSettled(RequestMessage, frozen=True, tag=29):
    """Answer to SettlePast: transfers of earlier connections have ended, and none will begin."""


class Explain(RequestMessage, frozen=True, tag=30):
    """Query for agents' knowledge of a block and its events.

    ``spans`` name exactly one block. ``volume`` is a name within the connection's tenant, and need not be
    open.
    """

    deadline_s: float
    volume: str
    spans: Spans


class Explained(RequestMessage, frozen=True, tag=31):
    """Answer to Explain.

    ``body``: a ``BlockExplanation`` as msgpack (``ostraca_fabric.telemetry.explain``).
    """

    body: bytes


class Leaving(Message, frozen=True, tag=33):
    """Notice of graceful shutdown: the worker moves to another agent.

    Requests sent nevertheless are served until the connection closes, in bounded time. The worker closes the
    connection once no answer is pending. Sent once, to workers with the feature ``leaving``.
    """


class AnnouncedDrive(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Drive that a worker has opened itself."""

    fabric: bytes
    drive: str
    """Empty while the worker does not read the drive."""


class DirectDrives(Message, frozen=True, tag=34):
    """Notice of the drives that this worker reads itself, in place of an earlier list. Not answered.

    Sent to agents with the feature ``direct`` or ``memory``. A drive's number is its position in the list.
    """

    drives: Annotated[tuple[AnnouncedDrive, ...], msgspec.Meta(max_length=DRIVES_MAX)]
    reads_memory: bool = False
    """Whether the worker copies blocks out of the agent's memory."""


class RegionsOffer(Message, frozen=True, tag=37):
    """Notice of further memory opened by the worker to the agent, in addresses of requests. Not answered.

    Sent to agents with the feature ``regions``, at most ``REGION_OFFERS_MAX`` times. ``metadata``: as in
    ``ArenaOffer``, with the regions.
    """

    metadata: Annotated[bytes, msgspec.Meta(max_length=REGIONS_BYTES_MAX)]


class GetExtents(RequestMessage, frozen=True, tag=35):
    """Request to the worker to read blocks of a get itself, into the slots of the get.

    Columns: ``positions`` in the request, u32; ``drives``, numbers of ``DirectDrives``, u32; ``offsets`` on
    the drive, u64; ``tags``, 16 bytes each. The worker reads whole pages of the lengths in ``Get``. Sent once
    per get at most, and before ``GetDone``, which says nothing about these blocks. ``ExtentsRead`` follows.
    """

    positions: bytes
    drives: bytes
    offsets: bytes
    tags: bytes


class ExtentsRead(RequestMessage, frozen=True, tag=36):
    """Notice of the end of the reads of ``GetExtents``: no pin is needed any more. Not answered.

    ``verified``: u32 positions of blocks read and verified. ``failed``: u32 positions of blocks that a get
    with ``is_again`` will name. Reads of all others have not ended.
    """

    verified: bytes
    failed: bytes


class EndSession(Message, frozen=True, tag=32):
    """Hint: the user of these blocks will not return. Not answered.

    Earlier reads no longer cause reinsertion of the blocks at their segment's eviction.
    """

    handle: int
    spans: Spans


# --- data path to shard owner
# --------------------------------------------------------------------------------------------------


class ShardKeys(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Keys of a shard, 16 bytes each.

    ``placement_epoch`` is the newest epoch with the keys placed there, according to the caller; 0 if
    unspecified. A lookup under an epoch before the current one does not count as a read.
    """

    shard: str
    keys: bytes
    placement_epoch: int = 0


class Resolve(RequestMessage, frozen=True, tag=40):
    """Query for the location of blocks. Extents found stay readable for ``pin_s``, or until released.

    - ``promises``: blocks found can be found again for ``pin_s``. A block without such a promise is reported
      as not found.
    - ``is_brief``: the answer has only ``found``, without locations.
    - ``is_counted``: the query counts as a read of the blocks found.
    - ``label``, here as in ``Reserve`` and ``Commit``: label of the worker's request behind the query.
    """

    deadline_s: float
    pin_s: float
    shards: tuple[ShardKeys, ...]
    label: str = ""
    promises: bool = False
    is_brief: bool = False
    is_counted: bool = True


class ShardExtents(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Shard owner's answer for the keys of a shard, one value per key.

    - ``found``: u8; ``offsets``: u64 in the shard; ``lengths``: u32; ``generations``: u64; ``tags``: 16
      bytes. Values of keys not found are zero. For a brief query, all columns but ``found`` are empty.
    - ``pin``: for an early release; 0 if no key was found, or with promises.
    - ``is_recovering``: the index is incomplete; keys not found may exist.
    - ``known_owner``, ``known_epoch``: the shard owner according to an agent without the shard; empty and 0
      if unknown.
    """

    shard: str
    is_owner: bool
    owner_epoch: int
    found: bytes = b""
    offsets: bytes = b""
    lengths: bytes = b""
    generations: bytes = b""
    tags: bytes = b""
    pin: int = 0
    is_recovering: bool = False
    known_owner: str = ""
    known_epoch: int = 0


class Resolved(RequestMessage, frozen=True, tag=41):
    """Answer to Resolve, shards in the order of the request."""

    shards: tuple[ShardExtents, ...]


class ShardWants(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Blocks to write to a shard.

    ``lengths``: u32; ``depths`` in the chains: u32, or empty if unknown.
    """

    shard: str
    keys: bytes
    lengths: bytes
    depths: bytes = b""


class Reserve(RequestMessage, frozen=True, tag=42):
    """Request for space for blocks, reserved for ``hold_s``."""

    deadline_s: float
    hold_s: float
    shards: tuple[ShardWants, ...]
    label: str = ""
    ttl_s: float = 0.0
    """As in ``Put``, for all of these blocks."""

    placement_epoch: int = 0
    """Epoch with the blocks placed in these shards, according to the caller; 0 if unspecified. The owner
    declines with STALE_MAP if the epoch is more than one change behind the owner's."""

    pool: int = 0
    """Pool with the flash share for these blocks, below 2**64. Pool 0, and any pool without a share, is
    common to all."""

    waits: bool = False
    """Whether the caller repeats the request for blocks declined as BUSY. Otherwise, the reason is
    NO_SPACE."""

    is_again: bool = False
    """Whether the owner admitted these blocks before, for the same put, but had no room: the write budget
    is not charged a second time."""


class ShardReservations(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Shard owner's answer to Reserve for a shard.

    - ``states``: u8, a PutState (STAGED stands for "reserved", EXISTS, DECLINED); ``reasons``: u8
    - ``reservations``, ``offsets``: u64 in the shard, zero if not reserved
    - ``known_owner``, ``known_epoch``: as in ``ShardExtents``
    """

    shard: str
    is_owner: bool
    owner_epoch: int
    states: bytes = b""
    reasons: bytes = b""
    reservations: bytes = b""
    offsets: bytes = b""
    known_owner: str = ""
    known_epoch: int = 0


class Reserved(RequestMessage, frozen=True, tag=43):
    """Answer to Reserve, shards in the order of the request."""

    shards: tuple[ShardReservations, ...]


class ShardCommit(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Written blocks of a shard.

    ``reservations``: u64; ``tags``: 16 bytes each; ``seeds``: u64, each the seed of the tag.
    """

    shard: str
    owner_epoch: int
    reservations: bytes
    tags: bytes
    seeds: bytes


class Commit(RequestMessage, frozen=True, tag=44):
    """Request to list blocks. The answer follows when the blocks are in a summary on flash."""

    deadline_s: float
    shards: tuple[ShardCommit, ...]
    label: str = ""


class ShardCommitted(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Shard owner's answer to Commit for a shard.

    ``states``: u8, a PutState (COMMITTED, EXISTS or DECLINED); ``reasons``: u8. ``known_owner``,
    ``known_epoch`` as in ``ShardExtents``. A reservation is valid only at the owner that granted the
    reservation.
    """

    shard: str
    states: bytes
    reasons: bytes
    known_owner: str = ""
    known_epoch: int = 0


class Committed(RequestMessage, frozen=True, tag=45):
    """Answer to Commit, shards in the order of the request."""

    shards: tuple[ShardCommitted, ...]


class ShardRelease(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Pins and reservations of a shard to release. ``reservations``: u64.

    ``may_land``: a write under the reservations failed, and a path may still deliver the data.
    """

    shard: str
    pins: tuple[int, ...] = ()
    reservations: bytes = b""
    may_land: bool = False


class Release(Message, frozen=True, tag=46):
    """Notice to release pins and reservations before they expire. Not answered."""

    shards: tuple[ShardRelease, ...]


class Damage(Message, frozen=True, tag=47):
    """Notice of a failed tag check for a block read from this extent. Not answered.

    ``seed`` is the seed of the tag. The owner ignores the notice unless the extent is current, and reads the
    block again before dropping the entry.
    """

    shard: str
    key: bytes
    offset: int
    length: int
    generation: int
    tag: bytes
    seed: int


class Inspect(RequestMessage, frozen=True, tag=48):
    """Query for a shard owner's knowledge of a 16-byte key. Does not count as a read."""

    deadline_s: float
    shard: str
    key: bytes
    label: str = ""


class Inspected(RequestMessage, frozen=True, tag=49):
    """Answer to Inspect.

    ``body``: an ``OwnerView`` as msgpack (``ostraca_fabric.telemetry.explain``).
    """

    body: bytes


class SessionEnded(Message, frozen=True, tag=51):
    """Hint of ``EndSession`` for these keys. Not answered."""

    shards: tuple[ShardKeys, ...]


class RingProgressQuery(RequestMessage, frozen=True, tag=52):
    """Query for ring progress: full rounds of the receiver's shards by placement epoch."""

    deadline_s: float
    label: str = ""


class ShardRingProgress(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Ring progress of a shard.

    The ring has completed a round since the start of ``placement_epoch``, so no older block is left; 0 if the
    owner knows of no such epoch.
    """

    shard: str
    placement_epoch: int


class RingProgressAnswer(RequestMessage, frozen=True, tag=53):
    """Answer to RingProgressQuery: all owned and recovered shards of the agent."""

    shards: tuple[ShardRingProgress, ...]


# --- agent to agent
# --------------------------------------------------------------------------------------------------


class PrefetchFor(RequestMessage, frozen=True, tag=50):
    """Request to load blocks of a tenant's volume into the receiver's DRAM cache.

    The receiver loads as room and time allow. Failed with ``unknown_volume`` if the volume is unknown, or
    known under another incarnation.
    """

    deadline_s: float
    tenant: str
    volume: str
    incarnation: int
    spans: Spans
    label: str = ""


class NamesQuery(RequestMessage, frozen=True, tag=58):
    """Query for names of blocks of a volume, ``TENANT/NAME``, that passed the receiver lately.

    ``first``: number of the first wanted span; 0 for all.
    """

    deadline_s: float
    volume: str
    first: int
    label: str = ""


class NamesAnswer(RequestMessage, frozen=True, tag=59):
    """Answer to NamesQuery: the oldest spans, and the number after the last."""

    next: int
    spans: Spans


# --- operator to agent
# --------------------------------------------------------------------------------------------------


class FlashWork(RequestMessage, frozen=True, tag=54):
    """Request for work on drives outside of the map.

    ``body``: a ``FlashRequest`` as msgpack (``ostraca_fabric.wire.flash_work``).
    """

    deadline_s: float
    body: bytes


class FlashWorkResult(RequestMessage, frozen=True, tag=55):
    """Answer to FlashWork.

    ``body``: a ``FlashAnswer`` as msgpack.
    """

    body: bytes


class PlacementQuery(RequestMessage, frozen=True, tag=56):
    """Query for the place of a block of a tenant's volume. ``spans`` name exactly one block."""

    tenant: str
    volume: str
    spans: Spans


class PlacementAnswer(RequestMessage, frozen=True, tag=57):
    """Answer to PlacementQuery.

    ``body``: ``BlockPlacements`` as msgpack (``ostraca_fabric.telemetry.explain``).
    """

    body: bytes


WorkerRequest = OpenVolume | Lookup | Get | Put | Prefetch | SettlePast | Ping | StatusRequest | Explain
WorkerNotice = EndSession | DirectDrives | RegionsOffer | ExtentsRead | Cancel
AgentAnswer = (
    VolumeOpened
    | LookupDone
    | GetDone
    | PutDone
    | PrefetchDone
    | PastSettled
    | Pong
    | StatusDone
    | Explained
    | Failure
)
OwnerRequest = Resolve | Reserve | Commit | Inspect | RingProgressQuery
OwnerAnswer = Resolved | Reserved | Committed | Inspected | RingProgressAnswer | Failure
OwnerNotice = Release | Damage | SessionEnded
AgentRequest = OwnerRequest | PrefetchFor | NamesQuery
AnswerToAgent = OwnerAnswer | PrefetchDone | NamesAnswer
OperatorRequest = Ping | StatusRequest | FlashWork | PlacementQuery | PrefetchFor
AnswerToOperator = Pong | StatusDone | FlashWorkResult | PlacementAnswer | PrefetchDone | Failure

Request = WorkerRequest | AgentRequest | OperatorRequest
Notice = WorkerNotice | OwnerNotice
Answer = AgentAnswer | AnswerToAgent | AnswerToOperator

AnyMessage = (
    Hello
    | Welcome
    | Refused
    | WorkerRequest
    | WorkerNotice
    | AgentAnswer
    | GetProgress
    | GetExtents
    | Settled
    | Fetch
    | Leaving
    | AgentRequest
    | OwnerAnswer
    | NamesAnswer
    | OwnerNotice
    | FlashWork
    | FlashWorkResult
    | PlacementQuery
    | PlacementAnswer
)
