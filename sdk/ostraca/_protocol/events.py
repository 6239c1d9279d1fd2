"""Events for operations, and effects of operations."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

from ostraca_fabric.wire.messages import (
    Explained,
    Failure,
    GetDone,
    GetProgress,
    LookupDone,
    PrefetchDone,
    PutDone,
    StatusDone,
    VolumeOpened,
)

if TYPE_CHECKING:
    from ostraca_fabric.errors import OstracaError
    from ostraca_fabric.wire.codec import Outcomes
    from ostraca_fabric.wire.messages import Message


class BlockVerdict(IntEnum):
    """Verification result of a landed block.

    Several threads verify a wave, so unseen blocks are not always the last ones.
    """

    UNSEEN = 0
    """Not verified before the deadline: not handed over."""

    DAMAGED = 1
    """Bytes differ from the tag: not handed over."""

    GOOD = 2
    """Bytes match the tag, and were handed over."""


@dataclass(frozen=True, slots=True)
class Verified:
    """Completion of a ``Verify``.

    ``positions`` is a u32 column, ``verdicts`` has a ``BlockVerdict`` of one byte for each position.
    """

    positions: bytes
    verdicts: bytes


@dataclass(frozen=True, slots=True)
class Ticked:
    """Passage of time, without any other event."""


@dataclass(frozen=True, slots=True)
class Disconnected:
    """Loss of the connection: no more messages about this request will come."""


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Cancellation by the caller."""


Answer = (
    VolumeOpened
    | LookupDone
    | GetProgress
    | GetDone
    | PutDone
    | PrefetchDone
    | StatusDone
    | Explained
    | Failure
)
Event = Answer | Verified | Ticked | Disconnected | Cancelled


@dataclass(frozen=True, slots=True)
class Send:
    """Send this message to the agent."""

    message: Message


@dataclass(frozen=True, slots=True)
class Verify:
    """Verify these slots, hand over the good blocks, and return ``Verified``.

    ``positions`` is a u32 column, ``tags`` has 16 bytes for each position.
    """

    positions: bytes
    tags: bytes


@dataclass(frozen=True, slots=True)
class Finish:
    """End the operation for its caller, with a state and a reason per block."""

    outcomes: Outcomes


@dataclass(frozen=True, slots=True)
class Reply:
    """End the question for its caller, with the agent's answer."""

    answer: Answer


@dataclass(frozen=True, slots=True)
class Reject:
    """End the operation with an error to raise: impossible as requested."""

    error: OstracaError


Effect = Send | Verify | Finish | Reply | Reject
