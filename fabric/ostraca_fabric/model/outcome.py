"""Outcomes of one block in a request.

Outcomes are values: a miss never raises. Each outcome travels as one byte per block, so the numbers are part
of the wire protocol and are never reused.
"""

from __future__ import annotations

from enum import IntEnum


class BlockState(IntEnum):
    """Result of a get, lookup or prefetch for one block."""

    MISS = 0
    """Absent or unverified block: recompute the block."""

    HIT = 1
    """Present; after a get also verified and delivered."""

    LATE = 2
    """The deadline came first."""

    DECLINED = 3
    """The fabric declined the block; see the reason."""


class PutState(IntEnum):
    """Result of a put for one block."""

    DECLINED = 0
    """Not stored; see the reason."""

    STAGED = 1
    """The agent has the bytes, and promises nothing. Only gets at this agent find the block."""

    COMMITTED = 2
    """Listed in a summary on flash, then in the index: the loss of an agent does not lose the block."""

    EXISTS = 3
    """An earlier put of the block completed; this put cost no flash write."""

    LATE = 4
    """The deadline came first. A commit may or may not follow."""


class Ack(IntEnum):
    """State at which a put is acknowledged."""

    STAGED = 1
    COMMITTED = 2


class Reason(IntEnum):
    """Reason for a block that is not a HIT, or was not stored."""

    NONE = 0
    NOT_FOUND = 1
    """No owner lists the block."""
    DAMAGED = 2
    """The bytes read or landed do not match the tag."""
    WRONG_LENGTH = 3
    """The stored block has another length than requested."""
    DRIVE_ERROR = 4
    """The drive failed the read or the write."""
    TRANSFER_FAILED = 5
    """The bytes did not reach the other end's memory."""
    DEADLINE = 6
    """The deadline passed."""
    OVERLOADED = 7
    """A queue was at its limit."""
    IN_FLIGHT = 8
    """Another put of the same block is in progress."""
    NO_SPACE = 9
    """The shard is full: no segment can be emptied within the put's time. For a prefetch: the DRAM cache has
    no room, or is off."""
    NO_OWNER = 10
    """No agent owns the shard, or the owner is unreachable."""
    QUARANTINED = 11
    """Transfers not known to have ended hold too much memory, or leave no contiguous room for blocks of this
    size."""
    TOO_SLOW = 12
    """Loading would have taken longer than recomputing."""
    DISCONNECTED = 13
    """The agent disconnected before the answer."""
    CANCELLED = 14
    """The caller cancelled the request."""
    ADMISSION = 15
    """The write budget goes to better blocks: this block was seen for the first time, and lies too deep in
    its chain, or in none."""
    EXPIRED = 16
    """The reservation ended before the commit."""
    BAD_LENGTH = 17
    """No segment of the shard can hold a block of this length."""
    NO_AGENT = 18
    """The agent named by a prefetch is not in the fabric, is unreachable, or failed."""
    UNKNOWN_VOLUME = 19
    """The agent named by a prefetch does not know the volume, or knows another incarnation."""
    RECOVERING = 20
    """The shard owner is still in recovery: a block not found yet may be on flash, and no block is stored
    before the end of recovery."""
    BUDGET = 21
    """The write budget is spent, even for blocks seen before."""
    TOO_SHORT = 22
    """The chain is shorter than the volume's break-even length: recomputing is faster than loading."""
    DRIVE_SUSPECT = 24
    """The drive failed or was silent recently, and is not used for a while."""
    INDEX_FULL = 25
    """The shard's index is at its limit, and the oldest blocks can't be evicted now: readers hold pins, or
    writes are in progress. More flash would not help; a higher limit would."""
    FENCED = 26
    """The shard owner has no recent confirmation of ownership, and writes nothing until confirmed. Causes:
    etcd is unreachable, another agent owns the shard, or the owner's process was stopped for a while."""
    STALE_MAP = 27
    """The agent placed the block by a fabric map replaced more than once since: few readers would find the
    block."""
    SWITCHED_OFF = 28
    """An operator has switched the volume off: no lookups, loads or stores."""
    SHADOWED = 29
    """The volume is in shadow mode: the block was loaded, verified and counted, but not delivered."""
    STALE_VOLUME = 30
    """The volume is erasable, and its agent has been without news of erasures for too long."""
    QUOTA = 31
    """The tenant is at its rate limit."""
    BUSY = 32
    """The shard's segments are being written, read or emptied, and none came free within the put's time; or
    too many puts already wait for room. Retry the put later."""
