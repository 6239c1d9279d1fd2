"""Explanation of a block's miss: agents' knowledge of the block, its events and its places. Pure.

``Explained`` carries a ``BlockExplanation`` as msgpack, ``Inspected`` an ``OwnerView``, ``PlacementAnswer``
``BlockPlacements``. Times are ages, so that clocks of two agents are never compared.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec

from ostraca_fabric.model.outcome import Reason

EVENTS_MAX = 256
"""Most events of one block in an agent's answer: the newest."""


class EventKind(IntEnum):
    """Kind of an event of a block."""

    LOOKED_UP = 1
    GOT = 2
    PUT = 3
    """The fate of a put is known, possibly after the put's answer."""
    PREFETCHED = 4
    RESERVED = 5
    """A put asked the shard owner for space."""
    COMMITTED = 6
    """The shard owner tried to list the block."""
    EVICTED = 7
    """The block left the index with its segment."""
    DROPPED = 8
    """The shard owner found the block damaged and removed the entry."""
    CACHE_EVICTED = 9
    """The block left an agent's DRAM cache."""
    SHADOWED = 10
    """Would-be outcome for a volume in shadow mode."""


class BlockEvent(msgspec.Struct, frozen=True):
    """Event of a block at an agent."""

    agent: str
    age_s: float
    label: str
    """Label of the request; empty without a request of this tenant as the cause."""

    kind: str
    state: str
    """Outcome for the block; empty where the event has none."""

    reason: str


class OwnerView(msgspec.Struct, frozen=True):
    """Knowledge of a block at the owner of its shard."""

    agent: str
    is_owner: bool
    """False if the queried agent does not own the shard; then only events are returned."""

    events: tuple[BlockEvent, ...]
    events_reach_s: float
    """Time span covered by the agent's events."""

    owner_epoch: int = 0
    is_listed: bool = False
    """Whether the block is in the index, and so can be got. If not, the location fields are zero."""

    offset: int = 0
    """Bytes from the beginning of the shard."""

    length: int = 0
    generation: int = 0
    is_pinned: bool = False
    """Whether a reader's pin keeps the segment from reuse."""

    is_being_written: bool = False
    is_withheld: bool = False
    """Whether the segment is under an earlier owner's grant, so that the earlier owner may still write
    there."""


class BlockExplanation(msgspec.Struct, frozen=True):
    """Knowledge of a block at the queried agent and at the shard owner."""

    agent: str
    """The queried agent."""

    enclosure: str
    shard: str
    """Shard of the block; empty when no shard takes blocks."""

    owner: str
    """The shard's owner; empty without an owner."""

    is_cached: bool
    """Whether the block is in the DRAM cache of the queried agent."""

    owner_view: OwnerView | None
    """None without an owner, or without an answer from the owner."""

    events: tuple[BlockEvent, ...]
    """Events from the queried agent and from the owner, oldest first."""

    events_reach_s: float
    """Time span covered by all of these events."""

    is_held_off: bool = False
    """Whether the queried agent avoids the drive for now, after failures or silence."""

    switch: str = ""
    """Switch of the block's volume, as known at the queried agent."""

    is_staged: bool = False
    """Whether the queried agent holds the block for a put and delivers it, before flash has it."""


_SWITCHED = {
    "off": "its volume is switched off",
    "shadow": "its volume is in shadow mode, and delivers nothing",
}

_FATES = {
    EventKind.EVICTED.name: "it was evicted with its segment {ago} ago, to make room",
    EventKind.DROPPED.name: "it was found damaged on flash and dropped {ago} ago",
    EventKind.COMMITTED.name: "its commit {ago} ago ended {state}{why}",
    EventKind.PUT.name: "a put of it {ago} ago ended {state}{why}",
    EventKind.RESERVED.name: "a put asked for space {ago} ago ({state}{why}), and nothing was committed",
}


def verdict(explanation: BlockExplanation) -> str:
    """Return one sentence: whether the block can be got now, or why not."""
    if explanation.switch in _SWITCHED:
        return f"It can't be got: {_SWITCHED[explanation.switch]}."
    return _verdict_if_on(explanation)


def _verdict_if_on(explanation: BlockExplanation) -> str:
    view = explanation.owner_view
    if explanation.is_cached or explanation.is_staged:
        only = "" if explanation.is_cached else ", by its workers alone: a put of it is on the way to flash"
        return f"It can be got now, from the DRAM of {explanation.agent}{only}."
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
    Reason.FENCED.name: "the owner had lost its claim, or could not confirm the claim",
    Reason.SWITCHED_OFF.name: "an operator had switched the volume off",
    Reason.STALE_MAP.name: "the writing agent had missed two changes of placement",
    Reason.STALE_VOLUME.name: "the volume may have been erased, and the agent could not ask",
    Reason.QUOTA.name: "the tenant had reached its rate limit",
}
"""Plain words for reasons from ownership and tenancy."""

_OF_OWNERS = (
    EventKind.RESERVED.name,
    EventKind.COMMITTED.name,
    EventKind.EVICTED.name,
    EventKind.DROPPED.name,
)
"""Events recorded only by a shard owner."""


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
        f"shard {explanation.shard} does not list it, and no put is known; events reach back "
        f"{age_text(explanation.events_reach_s)}"
    )


def _owner_then(events: tuple[BlockEvent, ...]) -> str:
    """Return the shard owner at the last of these events; empty if unknown.

    Events of one request have the same label at the data path and at the owner.
    """
    last = events[-1]
    told = (
        event.agent
        for event in reversed(events)
        if event.kind in _OF_OWNERS and (event is last or (event.label and event.label == last.label))
    )
    return next(told, "")


def age_text(age_s: float) -> str:
    """Format an age for people: ``12.3 s``, ``17 min``, ``5.2 h``."""
    for unit_s, name in ((3600.0, "h"), (60.0, "min")):
        if age_s >= 2 * unit_s:
            return f"{age_s / unit_s:.1f} {name}"
    return f"{age_s:.3g} s"


class EpochPlacement(msgspec.Struct, frozen=True):
    """Place of a block in one placement epoch.

    Empty if no shard takes blocks, or if the shard is gone.
    """

    placement_epoch: int
    enclosure: str = ""
    shard: str = ""
    owner: str = ""
    """Empty while the shard has no owner."""

    owner_epoch: int = 0


class BlockPlacements(msgspec.Struct, frozen=True):
    """Answer to ``PlacementQuery``: the current placement epoch first, then from newest to oldest.

    The shard owner is not asked, so the block's presence stays unknown.
    """

    agent: str
    map_revision: int
    places: tuple[EpochPlacement, ...]
