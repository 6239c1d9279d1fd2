"""Why was this block a miss? What agents know of one block, and what has happened to it. Pure.

``Explained`` carries a ``BlockExplanation`` as msgpack, and ``Inspected`` an ``OwnerView``. Times are ages:
no two agents' clocks are ever compared.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec

from ostraca_fabric.outcome import Reason

EVENTS_MAX = 256
"""The most events of one block that an agent tells; the newest."""


class EventKind(IntEnum):
    """What happened to a block."""

    LOOKED_UP = 1
    GOT = 2
    PUT = 3
    """The fate of a put is known, which may be after it was answered."""
    PREFETCHED = 4
    RESERVED = 5
    """The owner was asked for space."""
    COMMITTED = 6
    """The owner was asked to list it, and has tried."""
    EVICTED = 7
    """It left the index with its segment."""
    DROPPED = 8
    """The owner found it damaged, and dropped it."""
    CACHE_EVICTED = 9
    """It left an agent's DRAM."""
    SHADOWED = 10
    """Its volume is being tried out: what would have become of it."""


class BlockEvent(msgspec.Struct, frozen=True):
    """One thing that happened to a block."""

    agent: str
    age_s: float
    label: str
    """Of the request; empty when none of this tenant's was the cause."""

    kind: str
    state: str
    """What became of the block in it; empty where that is no question."""

    reason: str


class OwnerView(msgspec.Struct, frozen=True):
    """What the owner of a block's shard knows of it."""

    agent: str
    is_owner: bool
    """False when the agent asked does not own the shard; then it only tells events."""

    events: tuple[BlockEvent, ...]
    events_reach_s: float
    """How far back the agent's events reach."""

    owner_epoch: int = 0
    is_listed: bool = False
    """Whether it is in the index, and so can be got. Where it lies is zero when not."""

    offset: int = 0
    """In the shard, in bytes."""

    length: int = 0
    generation: int = 0
    is_pinned: bool = False
    """Whether some reader keeps its segment from being reused."""

    is_being_written: bool = False
    is_withheld: bool = False
    """Whether its segment lies under an earlier owner's grant, so that this one may still write there."""


class BlockExplanation(msgspec.Struct, frozen=True):
    """What the agent that was asked, and the owner, know of a block."""

    agent: str
    """Who was asked."""

    enclosure: str
    shard: str
    """Where the block belongs; empty when no shard takes blocks."""

    owner: str
    """The shard's owner; empty when there is none."""

    is_cached: bool
    """Whether it is in the DRAM of the agent that was asked."""

    owner_view: OwnerView | None
    """None when there is no owner, or it did not answer."""

    events: tuple[BlockEvent, ...]
    """What the agent that was asked and the owner remember, oldest first."""

    events_reach_s: float
    """How far back all of these events reach."""

    is_held_off: bool = False
    """Whether the agent that was asked leaves the drive alone now, because it failed or kept silent."""

    switch: str = ""
    """What the switch of the block's volume says, as the agent that was asked knows it."""


_SWITCHED = {
    "off": "its volume is switched off",
    "shadow": "its volume is only being tried out (switch: shadow), and hands nothing over",
}

_FATES = {
    EventKind.EVICTED.name: "it was evicted with its segment {ago} ago, to make room",
    EventKind.DROPPED.name: "it was found damaged on flash and dropped {ago} ago",
    EventKind.COMMITTED.name: "its commit {ago} ago ended {state}{why}",
    EventKind.PUT.name: "a put of it {ago} ago ended {state}{why}",
    EventKind.RESERVED.name: "a put asked for space {ago} ago ({state}{why}), and nothing was committed",
}


def verdict(explanation: BlockExplanation) -> str:
    """Say in one sentence whether the block can be got now, and if not, why."""
    if explanation.switch in _SWITCHED:
        return f"It can't be got: {_SWITCHED[explanation.switch]}."
    return _verdict_if_on(explanation)


def _verdict_if_on(explanation: BlockExplanation) -> str:
    view = explanation.owner_view
    if explanation.is_cached:
        return f"It can be got now, from the DRAM of {explanation.agent}."
    if not explanation.shard:
        return "It can't be got: no shard of the fabric takes blocks."
    if view is None or not view.is_owner:
        who = f"{explanation.owner} does not answer for" if explanation.owner else "no agent owns"
        return f"It can't be got now: {who} shard {explanation.shard}."
    if view.is_listed:
        return _listed(explanation)
    if view.is_being_written:
        return "It can't be got yet: it is being written, and not committed."
    return f"It can't be got: {_fate(explanation)}."


_MEANINGS = {
    Reason.FENCED.name: "the owner could not tell whether its claim still stood, or had lost it",
    Reason.SWITCHED_OFF.name: "an operator had switched the volume off",
    Reason.STALE_MAP.name: "the agent that put it had not heard of two changes of the placement",
    Reason.UNHEARD.name: "the volume may have been erased, and the agent could not ask",
    Reason.QUOTA.name: "the tenant had used what it may get and put in a second",
}
"""Reasons that say nothing to who has not read of ownership, or of tenants."""

_OF_OWNERS = (
    EventKind.RESERVED.name,
    EventKind.COMMITTED.name,
    EventKind.EVICTED.name,
    EventKind.DROPPED.name,
)
"""What only an owner has happen to a block."""


def _listed(explanation: BlockExplanation) -> str:
    view = explanation.owner_view
    if explanation.is_held_off:
        return (
            f"It can't be got now: shard {explanation.shard} lists it, and {explanation.agent} leaves its "
            "drive alone for a while, because it failed or kept silent."
        )
    if view is not None and view.is_withheld:
        return (
            f"It can be got now, from flash: shard {explanation.shard} lists it, in a segment that its "
            "earlier owner may still use for other blocks; then it is a miss."
        )
    return f"It can be got now, from flash: shard {explanation.shard} lists it."


def _fate(explanation: BlockExplanation) -> str:
    for number, event in reversed(list(enumerate(explanation.events))):
        words = _FATES.get(event.kind)
        if words is not None:
            why = f" for {event.reason}" if event.reason else ""
            told = words.format(ago=age_text(event.age_s), state=event.state, why=why)
            meaning = _MEANINGS.get(event.reason)
            told += f": {meaning}" if meaning else ""
            owner = _owner_then(explanation.events[: number + 1])
            return f"{told}; {owner} owned the shard then" if owner not in ("", explanation.owner) else told
    return (
        f"shard {explanation.shard} does not list it, and nobody remembers a put of it; memory reaches back "
        f"{age_text(explanation.events_reach_s)}"
    )


def _owner_then(events: tuple[BlockEvent, ...]) -> str:
    """Return the agent that owned the shard at the last of these events; empty where none of them says so.

    A request's events at its mover and at an owner bear one label.
    """
    last = events[-1]
    told = (
        event.agent
        for event in reversed(events)
        if event.kind in _OF_OWNERS and (event is last or (event.label and event.label == last.label))
    )
    return next(told, "")


def age_text(age_s: float) -> str:
    """Write an age for people: ``12.3 s``, ``17 min``, ``5.2 h``."""
    for unit_s, name in ((3600.0, "h"), (60.0, "min")):
        if age_s >= 2 * unit_s:
            return f"{age_s / unit_s:.1f} {name}"
    return f"{age_s:.3g} s"
