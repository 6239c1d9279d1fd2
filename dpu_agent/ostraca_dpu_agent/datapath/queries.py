"""Queries without access to flash: lookups of blocks, places in memory, and explanations of a block's state.

Blocks in the DRAM cache need no shard owner, unless the caller requests a pin. Only shard owners grant
pins. With a pin, a block without a pin is a miss, even if the block is cached. Staged blocks are hits in both
cases: they come to the newest segment, which is evicted last.
"""

from __future__ import annotations

import msgspec
import numpy as np

from ostraca_dpu_agent.datapath.requests.blocks import RequestBlocks
from ostraca_dpu_agent.datapath.requests.context import Deadline, RequestContext
from ostraca_dpu_agent.datapath.requests.worker import WorkerConnection
from ostraca_dpu_agent.volumes import ServedVolume
from ostraca_fabric.errors import ConnectError, RefusedError
from ostraca_fabric.model.ids import AgentId, ShardId
from ostraca_fabric.model.outcome import BlockState, Reason
from ostraca_fabric.model.overrides import Switch
from ostraca_fabric.tables.digests import derive_keys
from ostraca_fabric.telemetry.explain import BlockExplanation, EpochPlacement, OwnerView
from ostraca_fabric.wire import codec
from ostraca_fabric.wire.messages import (
    Explain,
    Explained,
    Get,
    GetDone,
    Inspect,
    Inspected,
    Lookup,
    LookupDone,
)

_HIT, _NONE = int(BlockState.HIT), int(Reason.NONE)  # numpy takes three times as long with enum members


async def look_up(
    context: RequestContext, volume: ServedVolume, request: Lookup, deadline: Deadline, *, counted_as: str
) -> LookupDone:
    """Query staging, the DRAM cache and the shard owners."""
    keys, within_s = derive_keys(volume.secret, request.spans), deadline.left_s
    if within_s <= 0:
        outcomes = codec.Outcomes.filled(len(keys), BlockState.LATE, Reason.DEADLINE)
    else:
        is_here = context.staged.contains(keys)
        if request.pin_s <= 0:
            is_here |= context.staging.cache.contains(keys)
        is_found, reasons = await context.locator.exist(
            context.routes(),
            volume,
            request.spans,
            keys,
            wanted=~is_here,
            within_s=within_s,
            pin_s=request.pin_s,
            is_counted=request.is_counted,
        )
        is_hit = is_here | is_found
        outcomes = codec.Outcomes(codec.filled(len(keys), BlockState.MISS), reasons)
        outcomes.states[is_hit], outcomes.reasons[is_hit] = _HIT, _NONE
    context.record(counted_as, keys, outcomes)
    return LookupDone(request.request, *outcomes.encode())


async def get_in_memory(
    context: RequestContext, worker: WorkerConnection, volume: ServedVolume, request: Get, _: Deadline
) -> GetDone:
    """Tell a worker where all blocks lie in this agent's memory. Nothing is held for it.

    Raises RefusedError unless all blocks are there, and MalformedError for mismatched columns.
    """
    blocks = RequestBlocks.of(volume, request.spans, request.lengths)
    waves, is_here = context.find_in_memory(blocks.keys, blocks.lengths)
    is_whole = np.count_nonzero(is_here) == len(blocks)  # faster than ``all``
    if request.is_again or not (worker.reads_memory and is_whole):
        raise RefusedError("not_in_memory", "some blocks are not in this agent's memory: use an arena")
    places = [context.places(request.request, wave) for wave in waves]
    outcomes = codec.Outcomes.filled(len(blocks), BlockState.HIT, Reason.NONE)
    context.record("get", blocks.keys, outcomes, blocks.total_bytes(np.arange(len(blocks))))
    return GetDone(
        request.request,
        *outcomes.encode(),
        b"",
        b"".join(each.positions for each in places),
        b"".join(each.tags for each in places),
        b"".join(each.places for each in places),
    )


async def explain(
    context: RequestContext, volume: ServedVolume, request: Explain, switch: Switch
) -> Explained:
    """Explain the single block named by the request; *switch* is the volume's."""
    keys, events = derive_keys(volume.secret, request.spans), context.events
    key, routes = keys.tobytes(), context.routes()
    until_s = context.clock() + min(context.deadline_max_s, request.deadline_s)
    place, *earlier = routes.places(volume.placement_secret, request.spans)
    view = await _inspect(context, place, key, until_s)
    if view is None or not (view.is_listed or view.is_being_written):
        for other in {each.shard: each for each in earlier if each.shard != place.shard}.values():
            found = await _inspect(context, other, key, until_s)
            if found is not None and found.is_listed:
                place, view = other, found
                break
    own = events.of(key)
    reaches = [events.reaches_back_s]
    if view is not None and view.agent != events.agent:
        own = tuple(sorted((*own, *view.events), key=lambda event: -event.age_s))
        reaches.append(view.events_reach_s)
    drive = context.drives.get(routes.place(ShardId(place.shard))[0]) if place.shard else None
    explanation = BlockExplanation(
        agent=events.agent,
        enclosure=place.enclosure,
        shard=place.shard,
        owner=place.owner,
        is_cached=bool(context.staging.cache.contains(keys)[0]),
        owner_view=view,
        events=own,
        events_reach_s=min(reaches),
        is_held_off=drive is not None and drive.refuses_reads,
        switch=switch.value,
        is_staged=bool(context.staged.contains(keys)[0]),
    )
    return Explained(request.request, msgspec.msgpack.encode(explanation))


async def _inspect(
    context: RequestContext, place: EpochPlacement, key: bytes, until_s: float
) -> OwnerView | None:
    """Ask the shard owner, if any; return None without an intelligible answer."""
    if not place.owner:
        return None
    try:
        query = Inspect(0, until_s - context.clock(), place.shard, key)
        answer = await context.owners.ask(AgentId(place.owner), query)
        return msgspec.msgpack.decode(answer.body, type=OwnerView) if isinstance(answer, Inspected) else None
    except (TimeoutError, ConnectError, msgspec.DecodeError):
        return None
