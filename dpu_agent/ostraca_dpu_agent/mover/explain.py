"""What this agent and the owner know of one block, for ``ostraca explain``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ostraca_fabric.errors import ConnectError
from ostraca_fabric.explain import BlockExplanation, OwnerView
from ostraca_fabric.ids import enclosure_of
from ostraca_fabric.keys import derive_keys
from ostraca_fabric.wire.messages import Explained, Inspect, Inspected

if TYPE_CHECKING:
    from ostraca_dpu_agent.events import EventRing
    from ostraca_dpu_agent.mover.mover import Mover
    from ostraca_dpu_agent.volumes import ServedVolume
    from ostraca_fabric.ids import AgentId, ShardId
    from ostraca_fabric.wire.messages import Explain


async def explain(mover: Mover, events: EventRing, volume: ServedVolume, request: Explain) -> Explained:
    """Answer about the one block that the request names."""
    keys = derive_keys(volume.secret, request.spans)
    key = keys.tobytes()
    routes = mover.routes()
    shard = routes.shard(volume.placement_secret, request.spans)
    owner = None if shard is None else routes.map.owner(shard)
    until_s = mover.clock() + min(mover.deadline_max_s, request.deadline_s)
    view = None
    if shard is not None and owner is not None:
        view = await _inspected(mover, owner, shard, key, until_s)
    if view is None or not (view.is_listed or view.is_being_written):
        for other in routes.earlier_shards(volume.placement_secret, request.spans):
            holder = routes.map.owner(other)
            found = None if holder is None else await _inspected(mover, holder, other, key, until_s)
            if found is not None and found.is_listed:
                shard, owner, view = other, holder, found
                break
    own = events.of(key)
    reaches = [events.reaches_back_s]
    if view is not None and view.agent != events.agent:
        own = tuple(sorted((*own, *view.events), key=lambda event: -event.age_s))
        reaches.append(view.events_reach_s)
    drive = None if shard is None else mover.drives.get(routes.place(shard)[0])
    explanation = BlockExplanation(
        agent=events.agent,
        enclosure="" if shard is None else enclosure_of(shard),
        shard=shard or "",
        owner=owner or "",
        is_cached=bool(mover.staging.cache.contains(keys)[0]),
        owner_view=view,
        events=own,
        events_reach_s=min(reaches),
        is_held_off=drive is not None and drive.refuses_reads,
        switch=mover.switch(volume).value,
    )
    return Explained(request.request, msgspec.msgpack.encode(explanation))


async def _inspected(
    mover: Mover, owner: AgentId, shard: ShardId, key: bytes, until_s: float
) -> OwnerView | None:
    """Ask the owner; None when it does not answer, or not in words known here."""
    try:
        answer = await mover.owners.ask(owner, Inspect(0, until_s - mover.clock(), shard, key))
        return msgspec.msgpack.decode(answer.body, type=OwnerView) if isinstance(answer, Inspected) else None
    except (TimeoutError, ConnectError, msgspec.DecodeError):
        return None
