"""What can become of one block in a request.

Outcomes are values: a miss never raises. They travel as one byte per block, so the numbers are part of the
wire and are never reused.
"""

from __future__ import annotations

from enum import IntEnum


class BlockState(IntEnum):
    """What a get, lookup or prefetch says about one block."""

    MISS = 0
    """Not there, or it did not verify: recompute it."""

    HIT = 1
    """There, and for a get: verified and handed over."""

    LATE = 2
    """The deadline came first."""

    DECLINED = 3
    """The fabric chose not to try; the reason says why."""


class PutState(IntEnum):
    """What a put says about one block."""

    DECLINED = 0
    """Not stored; the reason says why."""

    STAGED = 1
    """The agent has the bytes. Nothing is promised, and nobody can get the block yet."""

    COMMITTED = 2
    """Listed in a summary on flash, and only then in the index: losing an agent does not lose it."""

    EXISTS = 3
    """An earlier put of the block completed; this one cost no flash write."""

    LATE = 4
    """The deadline came first. The block may yet be committed, or not at all."""


class Ack(IntEnum):
    """The state at which a put is to be acknowledged."""

    STAGED = 1
    COMMITTED = 2


class Reason(IntEnum):
    """Why a block is not a HIT, or was not stored."""

    NONE = 0
    NOT_FOUND = 1
    """No owner lists the block."""
    DAMAGED = 2
    """What was read or landed failed its tag."""
    WRONG_LENGTH = 3
    """The stored block has another length than the caller asked for."""
    DRIVE_ERROR = 4
    """The drive failed the read or the write."""
    TRANSFER_FAILED = 5
    """The bytes did not reach the other end's memory."""
    DEADLINE = 6
    """Time ran out."""
    OVERLOADED = 7
    """A queue was at its limit."""
    IN_FLIGHT = 8
    """Another put of the same block is under way."""
    NO_SPACE = 9
    """The shard has no segment free to write now; of a prefetch: the DRAM cache has no room, or is off."""
    NO_OWNER = 10
    """No agent owns the shard, or its owner can't be reached."""
    QUARANTINED = 11
    """Too much memory is held by transfers not known to have ended, or what they hold leaves no place for
    blocks of this size."""
    TOO_SLOW = 12
    """Loading would have taken longer than recomputing."""
    DISCONNECTED = 13
    """The agent went away before it answered."""
    CANCELLED = 14
    """The caller took the request back."""
    ADMISSION = 15
    """The write budget is spent on better blocks: this one was wanted for the first time, and lies too deep
    in its chain, or in none."""
    EXPIRED = 16
    """The reservation ended before the commit."""
    BAD_LENGTH = 17
    """No segment of the shard can hold a block of this length."""
    NO_AGENT = 18
    """The agent that a prefetch names is not in the fabric, can't be reached, or failed."""
    UNKNOWN_VOLUME = 19
    """The agent that a prefetch names does not know the volume, or knows another incarnation of it."""
    RECOVERING = 20
    """The shard's owner is still reading from flash what it holds: a block not found yet may be there, and
    nothing is stored before all is known."""
    BUDGET = 21
    """The write budget is spent: not even a block that was wanted before is written now."""
    TOO_SHORT = 22
    """The chain is shorter than the volume's break-even length: computing it again is faster than loading."""
    DRIVE_SUSPECT = 24
    """The drive has failed or kept silent lately, and is left alone for a while."""
    INDEX_FULL = 25
    """The shard's index holds as many blocks as it may, and the oldest can't be evicted now: readers were
    promised them, or they are being written. More flash would not help; a higher limit would."""
    FENCED = 26
    """The shard's owner has not heard lately that it still is, and writes nothing until it has: etcd can't be
    reached, another agent owns the shard now, or the owner was stopped for a while."""
    STALE_MAP = 27
    """The agent placed the block by a fabric map that others have replaced more than once: hardly anybody
    would look for it there."""
    SWITCHED_OFF = 28
    """An operator has switched the volume off: nothing is looked up, loaded or stored."""
    SHADOWED = 29
    """An operator tries the volume out: whether the block would have come is found out and counted, and it is
    not handed over."""
    UNHEARD = 30
    """The volume can be erased, and its agent has not heard for so long whether it was."""
    QUOTA = 31
    """The tenant has used what it may get and put in a second."""
