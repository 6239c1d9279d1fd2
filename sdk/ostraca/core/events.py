"""What operations are told and what they want done."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

from ostraca_fabric.wire.messages import (
    Explained,
    Failed,
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
    from ostraca_fabric.wire.messages import Message


class Verdict(IntEnum):
    """What became of a block that landed.

    Several threads look at a wave, so those that nobody looked at are not always the last ones.
    """

    UNSEEN = 0
    """The deadline came before anybody looked at it: it was not handed over."""

    DAMAGED = 1
    """Its bytes are not those of its tag: it was not handed over."""

    GOOD = 2
    """Its bytes are those of its tag, and were handed over."""


@dataclass(frozen=True, slots=True)
class Verified:
    """A ``Verify`` was done: its ``positions``, a u32 column, and a ``Verdict`` of one byte for each."""

    positions: bytes
    verdicts: bytes


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time has passed; nothing else happened."""


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The connection is gone: nothing more will be said about this request."""


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The caller wants no more of it."""


Answer = (
    VolumeOpened
    | LookupDone
    | GetProgress
    | GetDone
    | PutDone
    | PrefetchDone
    | StatusDone
    | Explained
    | Failed
)
Event = Answer | Verified | Ticked | Disconnected | Cancelled


@dataclass(frozen=True, slots=True)
class Send:
    """Send this to the agent."""

    message: Message


@dataclass(frozen=True, slots=True)
class Verify:
    """Check these slots, hand over what agrees, and say ``Verified``.

    ``positions`` is a u32 column, ``tags`` has 16 bytes for each.
    """

    positions: bytes
    tags: bytes


@dataclass(frozen=True, slots=True)
class Finished:
    """The operation has ended for its caller, with a state and a reason (one byte each) per block."""

    states: bytes
    reasons: bytes
    note: str = ""


@dataclass(frozen=True, slots=True)
class Replied:
    """A question has its answer."""

    answer: Answer


@dataclass(frozen=True, slots=True)
class Rejected:
    """The operation has ended with an error to raise: it can't be done as asked."""

    error: OstracaError


Effect = Send | Verify | Finished | Replied | Rejected
End = Finished | Replied | Rejected
