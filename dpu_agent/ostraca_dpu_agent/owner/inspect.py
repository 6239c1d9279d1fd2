"""What an owner knows of one key, without counting as a read of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ostraca_fabric.explain import OwnerView

if TYPE_CHECKING:
    from ostraca_dpu_agent.events import EventRing
    from ostraca_dpu_agent.owner.shard import OwnedShard


def inspect(owned: OwnedShard | None, key: bytes, events: EventRing) -> OwnerView:
    """Look a key of 16 bytes up; *owned* is None when the shard is not this agent's."""
    seen = events.of(key)
    if owned is None:
        return OwnerView(events.agent, is_owner=False, events=seen, events_reach_s=events.reaches_back_s)
    core, wanted = owned.core, np.frombuffer(key, np.uint8).reshape(1, -1)
    row = core.index.find(wanted)
    is_listed = bool(row[0] >= 0)
    offsets = core.index.offsets(row[row >= 0])
    segments = core.ring.segment_of(offsets)
    return OwnerView(
        events.agent,
        is_owner=True,
        events=seen,
        events_reach_s=events.reaches_back_s,
        owner_epoch=owned.epoch,
        is_listed=is_listed,
        offset=int(offsets[0]) if is_listed else 0,
        length=int(core.index.lengths(row)[0]) if is_listed else 0,
        generation=int(core.ring.generations[segments[0]]) if is_listed else 0,
        is_pinned=is_listed and bool(core.pins.on_segment[segments[0]] > 0),
        is_withheld=is_listed and bool(core.grants.is_withheld[segments[0]]),
        is_being_written=bool(core.reservations.in_flight.find(wanted)[0] >= 0),
    )
