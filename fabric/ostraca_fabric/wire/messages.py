"""Everything that is said between a worker and its agent, and between agents.

Messages are msgspec structs, encoded as msgpack arrays ``[tag, field, ...]``. A later version may add fields
with defaults at the end and new messages with new tags; nothing else. Columns (one value per block) travel
as the little-endian bytes of a numpy array, so a batch costs no Python object per block;
``ostraca_fabric.wire.columns`` packs and checks them.

All of them stand on this one page, long as it is: a tag is given once, and who reads one side of a
conversation wants the other beside it.

A request carries an id chosen by whoever asks, unique among the requests it has under way on that
connection. Deadlines travel as the time that remains, in seconds, so no two clocks are ever compared.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from ostraca_fabric.chain import Span
from ostraca_fabric.layout import Layout

WIRE_VERSION = 1
"""What this release speaks by preference. It also speaks the one before it (none before the first)."""

WIRE_VERSION_OLDEST = 1

SPANS_MAX = 16384
"""Spans in one request. Each is checked by itself as it is decoded: without a limit, one frame of empty ones
would keep an agent from everybody else for a third of a second."""


Spans = Annotated[tuple[Span, ...], msgspec.Meta(max_length=SPANS_MAX)]


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False, tag_field="t"):
    """Anything that travels as one msgpack frame."""


# --- handshake
# -------------------------------------------------------------------------------------------------------


class ArenaOffer(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The memory a worker opens to its agent, and over which transport.

    ``base`` is its address in the worker, ``metadata`` is the transport's own and opaque here. Slots of
    ``s`` bytes lie in chunks: the slot at ``offset`` is number ``offset // chunk_bytes * (chunk_bytes // s)
    + offset % chunk_bytes // s``.
    """

    transport: str
    arena_bytes: int
    chunk_bytes: int
    base: int = 0
    metadata: bytes = b""


class ConnectionLimits(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the agent accepts on this connection. Beyond it, a frame is refused."""

    frame_bytes_max: int
    blocks_max: int
    inflight_max: int


class Hello(Message, frozen=True, tag=1):
    """First frame of a connection: who asks, and what it can do. A connection belongs to one tenant."""

    version_oldest: int
    version_newest: int
    role: str
    """``worker``, ``agent`` or ``operator``."""
    tenant: str
    token: str
    """Empty on a unix socket where peer credentials suffice."""
    name: str
    """For people: program and process id."""
    features: tuple[str, ...] = ()
    arenas: tuple[ArenaOffer, ...] = ()
    """In order of preference. None: the connection moves no blocks."""
    client: bytes = b""
    """Of a worker: chosen at random once, and said on every connection that offers the same arena."""


class Welcome(Message, frozen=True, tag=2):
    """The agent accepts: the version and features to use from here on, and which arena offer it took."""

    version: int
    agent: str
    start_id: bytes
    features: tuple[str, ...]
    limits: ConnectionLimits
    transport: str
    """Empty when no arena was offered."""


class Refused(Message, frozen=True, tag=3):
    """The agent does not accept the connection, or no longer, and closes it.

    Codes: version, authentication, transport, limit, protocol, malformed, frame_too_long, internal.
    """

    code: str
    message: str


class Failed(Message, frozen=True, tag=4):
    """The request can't be served as asked; the connection goes on. Codes: docs/reference/wire.md."""

    request: int
    code: str
    message: str


# --- worker to agent
# -------------------------------------------------------------------------------------------------


class OpenVolume(Message, frozen=True, tag=10):
    """Find a volume of the connection's tenant, or make it.

    Through the handle that is answered, chains of fewer than ``break_even_tokens`` are not put: this worker
    computes them faster than it loads them.
    """

    request: int
    name: str
    layout: Layout
    block_bytes: int
    create: bool
    break_even_tokens: int = 0


class VolumeOpened(Message, frozen=True, tag=11):
    """The volume; ``handle`` names it on this connection only."""

    request: int
    handle: int
    incarnation: int


class Lookup(Message, frozen=True, tag=12):
    """Which blocks could be got now? With ``pin_s``, hits stay gettable that long."""

    request: int
    handle: int
    deadline_s: float
    spans: Spans
    pin_s: float = 0.0


class LookupDone(Message, frozen=True, tag=13):
    """``states``: one BlockState byte per block, spans in order; ``reasons``: one Reason byte per block."""

    request: int
    states: bytes
    reasons: bytes


class Get(Message, frozen=True, tag=14):
    """Bring blocks into arena slots. ``lengths``: u32 bytes expected per block; ``slots``: u64 arena offset
    per block.
    """

    request: int
    handle: int
    deadline_s: float
    spans: Spans
    lengths: bytes
    slots: bytes
    slot_bytes: int
    recompute_s: float = 0.0
    """How long recomputing all of these blocks would take, each its part; 0 when not known."""


class GetProgress(Message, frozen=True, tag=15):
    """These blocks (``positions``: u32 in the request) have landed and may be verified; more may follow.

    ``tags``: 16 bytes each, as their writers' SDKs made them. A block is a HIT in ``GetDone`` only if it was
    named here.
    """

    request: int
    positions: bytes
    tags: bytes


class GetDone(Message, frozen=True, tag=16):
    """The get is over. ``states`` and ``reasons``: a byte per block.

    ``unsettled``: u32 positions whose slot is under a transfer not known to have ended; ``Settled`` follows
    when it is. ``positions`` and ``tags``: blocks that landed last and are named here instead of in a
    ``GetProgress`` of their own, so that a small get is one message.
    """

    request: int
    states: bytes
    reasons: bytes
    unsettled: bytes = b""
    positions: bytes = b""
    tags: bytes = b""


class Put(Message, frozen=True, tag=17):
    """Take blocks from arena slots. ``tags``: 16 bytes per block, made by the SDK from the caller's bytes."""

    request: int
    handle: int
    deadline_s: float
    ack: int
    spans: Spans
    lengths: bytes
    tags: bytes
    slots: bytes
    slot_bytes: int
    ttl_s: float = 0.0
    """After so long the blocks are not worth carrying forward when their segment is evicted; 0 when nobody
    knows."""


class PutDone(Message, frozen=True, tag=18):
    """The put is acknowledged. ``states``: a PutState byte per block. ``unsettled`` as in GetDone.

    Slots not listed there are the worker's again.
    """

    request: int
    states: bytes
    reasons: bytes
    unsettled: bytes = b""


class Prefetch(Message, frozen=True, tag=19):
    """Bring blocks into the agent's DRAM, as far as it has room and time."""

    request: int
    handle: int
    deadline_s: float
    spans: Spans
    at: str = ""
    """The agent that is to have them; empty for the one that is asked."""


class PrefetchDone(Message, frozen=True, tag=20):
    """``states``: HIT where the block is in that agent's DRAM now. Also the answer to ``PrefetchFor``."""

    request: int
    states: bytes
    reasons: bytes


class Cancel(Message, frozen=True, tag=21):
    """The caller no longer wants the answer. The request still gets its final message, soon."""

    request: int


class Settled(Message, frozen=True, tag=22):
    """Every transfer of this request is now known to have ended; its slots are the worker's again."""

    request: int


class Ping(Message, frozen=True, tag=23):
    """Answer at once."""

    request: int


class Pong(Message, frozen=True, tag=24):
    """An answer to Ping."""

    request: int


class Status(Message, frozen=True, tag=25):
    """What does the agent believe?"""

    request: int


class StatusDone(Message, frozen=True, tag=26):
    """``body``: an ``AgentStatus`` as msgpack (``ostraca_fabric.status``)."""

    request: int
    body: bytes


class Fetch(Message, frozen=True, tag=27):
    """Inline transport only, agent to worker: send these arena bytes as bulk frames of ``transfer``, in this
    order.
    """

    transfer: int
    slots: bytes
    lengths: bytes


class SettlePast(Message, frozen=True, tag=28):
    """Worker to agent: earlier connections of this client (``Hello.client``) are to end, and this is answered
    when every transfer that they asked for is known to have ended.
    """

    request: int


class PastSettled(Message, frozen=True, tag=29):
    """No transfer is under way that earlier connections of this client asked for; none will begin."""

    request: int


class Explain(Message, frozen=True, tag=30):
    """What do agents know of this block, and what has happened to it? ``spans`` name exactly one block.

    ``volume`` is one of the connection's tenant, by its name: it need not be open.
    """

    request: int
    deadline_s: float
    volume: str
    spans: Spans


class Explained(Message, frozen=True, tag=31):
    """``body``: a ``BlockExplanation`` as msgpack (``ostraca_fabric.explain``)."""

    request: int
    body: bytes


class Leaving(Message, frozen=True, tag=33):
    """The agent ends in order, and the worker is to go to another one.

    What is asked all the same is served until the connection closes, in bounded time. The worker closes it
    itself once it waits for nothing more. Sent once, to workers that have the feature ``leaving``.
    """


class EndSession(Message, frozen=True, tag=32):
    """Whoever used these blocks will not come back for them. A hint, not answered: blocks read before are not
    carried forward for it when their segment is evicted.
    """

    handle: int
    spans: Spans


# --- mover to owner
# --------------------------------------------------------------------------------------------------


class ShardKeys(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Some keys of one shard: 16 bytes each.

    ``placement_epoch``: the newest in which the asker finds them placed there; 0 says nothing. Looking up
    what an earlier epoch than the current one placed is no read of it.
    """

    shard: str
    keys: bytes
    placement_epoch: int = 0


class Resolve(Message, frozen=True, tag=40):
    """Where do these blocks lie? Extents found stay readable for ``pin_s``, or until released.

    With ``promises`` they can also be found again for ``pin_s``; what the owner can't promise is not found.
    With ``is_brief`` the question is only which of them it has: its answer says ``found``, and not where.
    ``label``, here as in ``Reserve`` and ``Commit``: of the worker's request that this is for.
    """

    request: int
    deadline_s: float
    pin_s: float
    shards: tuple[ShardKeys, ...]
    label: str = ""
    promises: bool = False
    is_brief: bool = False


class ShardExtents(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What an owner knows of one shard's keys, one value per key asked for.

    ``found``: u8; ``offsets``: u64 in the shard; ``lengths``: u32; ``generations``: u64; ``tags``: 16 bytes.
    Values of keys not found are zero; to a brief question, all columns but ``found`` are empty. ``pin``: to
    release early; 0 when nothing was found.
    ``is_recovering``: the owner does not know yet of all it holds; keys not found may be there.
    ``known_owner`` and ``known_epoch``: who owns the shard, as far as an agent knows that does not; empty and
    0 where it knows of nobody.
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


class Resolved(Message, frozen=True, tag=41):
    """Answer to Resolve, shards in the order asked."""

    request: int
    shards: tuple[ShardExtents, ...]


class ShardWants(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Blocks someone wants to write to one shard. ``lengths``: u32; ``depths`` in their chains: u32, or empty
    where none is known.
    """

    shard: str
    keys: bytes
    lengths: bytes
    depths: bytes = b""


class Reserve(Message, frozen=True, tag=42):
    """Hand out space for these blocks, for ``hold_s``."""

    request: int
    deadline_s: float
    hold_s: float
    shards: tuple[ShardWants, ...]
    label: str = ""
    ttl_s: float = 0.0
    """As in ``Put``, of all these blocks."""

    placement_epoch: int = 0
    """In which the asker finds the blocks placed in these shards; 0 says nothing. More than one change older
    than what the owner knows of, it is declined: STALE_MAP."""

    pool: int = 0
    """Whose share of the shards these blocks take, below 2**64; 0, and a pool without a share, is everybody's
    together."""


class ShardReservations(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """``states``: u8, a PutState (STAGED stands for "reserved", EXISTS, DECLINED); ``reasons``: u8;
    ``reservations``, ``offsets``: u64 in the shard, zero where not reserved. ``known_owner``, ``known_epoch``
    as in ``ShardExtents``.
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


class Reserved(Message, frozen=True, tag=43):
    """Answer to Reserve, shards in the order asked."""

    request: int
    shards: tuple[ShardReservations, ...]


class ShardCommit(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Blocks written: ``reservations`` u64; ``tags`` 16 bytes each; ``seeds`` u64, each its tag's."""

    shard: str
    owner_epoch: int
    reservations: bytes
    tags: bytes
    seeds: bytes


class Commit(Message, frozen=True, tag=44):
    """List these blocks. Answered when they are in a summary on flash."""

    request: int
    deadline_s: float
    shards: tuple[ShardCommit, ...]
    label: str = ""


class ShardCommitted(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """``states``: u8, a PutState (COMMITTED, EXISTS or DECLINED); ``reasons``: u8. ``known_owner``,
    ``known_epoch`` as in ``ShardExtents``; reservations are the owner's that gave them, and no other's.
    """

    shard: str
    states: bytes
    reasons: bytes
    known_owner: str = ""
    known_epoch: int = 0


class Committed(Message, frozen=True, tag=45):
    """Answer to Commit, shards in the order asked."""

    request: int
    shards: tuple[ShardCommitted, ...]


class ShardRelease(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Pins and reservations of one shard that are no longer needed. ``reservations``: u64.

    ``may_land``: a write under them has failed, and a path may deliver it yet.
    """

    shard: str
    pins: tuple[int, ...] = ()
    reservations: bytes = b""
    may_land: bool = False


class Release(Message, frozen=True, tag=46):
    """Give back early what would run out by itself. Not answered."""

    shards: tuple[ShardRelease, ...]


class Damage(Message, frozen=True, tag=47):
    """A block read from this extent failed its tag, which was made with this seed. Not answered.

    The owner ignores it unless the extent is current, and reads again itself before it drops anything.
    """

    shard: str
    key: bytes
    offset: int
    length: int
    generation: int
    tag: bytes
    seed: int


class Inspect(Message, frozen=True, tag=48):
    """What does the owner know of this key of 16 bytes? That counts as no read of it."""

    request: int
    deadline_s: float
    shard: str
    key: bytes
    label: str = ""


class Inspected(Message, frozen=True, tag=49):
    """``body``: an ``OwnerView`` as msgpack (``ostraca_fabric.explain``)."""

    request: int
    body: bytes


class SessionEnded(Message, frozen=True, tag=51):
    """What ``EndSession`` says, of these keys. Not answered."""

    shards: tuple[ShardKeys, ...]


class PassedOver(Message, frozen=True, tag=52):
    """Which of your shards have gone round since which placement epoch began?"""

    request: int
    deadline_s: float
    label: str = ""


class ShardPassed(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One shard: its ring has gone round since ``placement_epoch`` began, and holds nothing older; 0 where
    the owner knows of no such epoch.
    """

    shard: str
    placement_epoch: int


class ShardsPassed(Message, frozen=True, tag=53):
    """Answer to PassedOver: every shard that the agent owns and has recovered."""

    request: int
    shards: tuple[ShardPassed, ...]


# --- agent to agent
# --------------------------------------------------------------------------------------------------


class PrefetchFor(Message, frozen=True, tag=50):
    """Bring blocks of this tenant's volume into your DRAM, as far as there is room and time.

    Failed with ``unknown_volume`` where the volume is not known, or known as another incarnation.
    """

    request: int
    deadline_s: float
    tenant: str
    volume: str
    incarnation: int
    spans: Spans
    label: str = ""


# --- operator to agent
# --------------------------------------------------------------------------------------------------


class FlashWork(Message, frozen=True, tag=54):
    """Do something with drives that are not in the map yet. ``body``: a ``FlashAsk`` as msgpack
    (``ostraca_fabric.wire.flash_work``).
    """

    request: int
    deadline_s: float
    body: bytes


class FlashWorked(Message, frozen=True, tag=55):
    """``body``: a ``FlashAnswer`` as msgpack."""

    request: int
    body: bytes


class Place(Message, frozen=True, tag=56):
    """Where does this block of a tenant's volume belong? ``spans`` name exactly one."""

    request: int
    tenant: str
    volume: str
    spans: Spans


class Placed(Message, frozen=True, tag=57):
    """``body``: ``Places`` as msgpack (``ostraca_fabric.wire.placing``)."""

    request: int
    body: bytes


WorkerRequest = OpenVolume | Lookup | Get | Put | Prefetch | SettlePast | Ping | Status | Explain
WorkerNotice = EndSession
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
    | Failed
)
OwnerRequest = Resolve | Reserve | Commit | Inspect | PassedOver
OwnerAnswer = Resolved | Reserved | Committed | Inspected | ShardsPassed | Failed
OwnerNotice = Release | Damage | SessionEnded
AgentRequest = OwnerRequest | PrefetchFor
AnswerToAgent = OwnerAnswer | PrefetchDone
OperatorRequest = Ping | Status | FlashWork | Place | PrefetchFor
AnswerToOperator = Pong | StatusDone | FlashWorked | Placed | PrefetchDone | Failed

AnyMessage = (
    Hello
    | Welcome
    | Refused
    | WorkerRequest
    | WorkerNotice
    | AgentAnswer
    | GetProgress
    | Cancel
    | Settled
    | Fetch
    | Leaving
    | AgentRequest
    | OwnerAnswer
    | OwnerNotice
    | FlashWork
    | FlashWorked
    | Place
    | Placed
)
