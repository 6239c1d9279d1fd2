"""Blocks of a volume, named by whoever knows their engine hashes: where they belong, and bringing them near.

The service has no key by which blocks are known (ADR 0027), so an agent is asked.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from ostraca_fabric.admin.api.context import Context, Operator, Service, Viewer
from ostraca_fabric.admin.api.forms import NAME, Form, Name
from ostraca_fabric.admin.api.volumes import volume_of
from ostraca_fabric.admin.errors import ConflictError, NotFoundError, UnansweredError
from ostraca_fabric.chain import RANK_MAX, STRIPE_UNIT_BLOCKS, Chain, Span
from ostraca_fabric.errors import (
    ConnectError,
    MalformedError,
    OstracaError,
    ProtocolError,
    RefusedError,
    UsageError,
)
from ostraca_fabric.ids import AgentId
from ostraca_fabric.layout import HASH_BYTES_MAX, HASH_BYTES_MIN
from ostraca_fabric.outcome import BlockState, Reason
from ostraca_fabric.tallies import name_of
from ostraca_fabric.volume import VolumeRecord
from ostraca_fabric.wire import columns
from ostraca_fabric.wire.messages import PrefetchDone
from ostraca_fabric.wire.placing import Places

router = APIRouter(prefix="/v1", tags=["blocks"])

BLOCKS_MAX = 4096
CHAINS_MAX = 256
DEADLINE_MAX_S = 60.0
_HASH = rf"^([0-9a-fA-F]{{2}}){{{HASH_BYTES_MIN},{HASH_BYTES_MAX}}}$"
_DEPTH_MAX = 1 << 24
_BUSY = frozenset({"overloaded", "membership"})

HashText = Annotated[str, Field(pattern=_HASH)]
Rank = Annotated[int, Query(ge=0, le=RANK_MAX)]


class PlaceView(BaseModel):
    """Where one placement epoch places a block."""

    placement_epoch: int
    enclosure: str = Field(description="Empty where no shard takes blocks, or its shard is gone.")
    shard: str
    owner: str = Field(description="The agent that owns the shard; empty while none does.")
    owner_epoch: int


class PlacementView(BaseModel):
    """Where a block belongs: not whether it is there."""

    agent: str = Field(description="Who was asked.")
    map_revision: int = Field(description="Of the map by which it says so.")
    places: list[PlaceView] = Field(
        description="The current placement epoch first, then earlier ones that are still asked."
    )


class ChainForm(Form):
    """Blocks of one prefix, for one rank and KV group."""

    engine_hashes: list[HashText] = Field(min_length=1, max_length=BLOCKS_MAX, description="In order.")
    depth: int = Field(
        0,
        ge=0,
        le=_DEPTH_MAX,
        multiple_of=STRIPE_UNIT_BLOCKS,
        description="How many blocks of the prefix come before: whole stripe units.",
    )
    rank: int = Field(0, ge=0, le=RANK_MAX)
    group: int = Field(0, ge=0, le=RANK_MAX)


class PrefetchForm(Form):
    """Which blocks are to be brought where."""

    tenant: Name
    volume: Name
    agent: Name = Field(description="Whose DRAM cache is to have them.")
    chains: list[ChainForm] = Field(
        min_length=1, max_length=CHAINS_MAX, description=f"With {BLOCKS_MAX} blocks at most, all together."
    )
    deadline_s: Annotated[float, Field(gt=0, le=DEADLINE_MAX_S, allow_inf_nan=False)] = 5.0


class OutcomeView(BaseModel):
    """How many blocks ended so."""

    state: str
    reason: str
    blocks: int


class ChainView(BaseModel):
    """What became of each block of a chain."""

    states: list[str] = Field(description="HIT where it is in the agent's DRAM now.")
    reasons: list[str]


class PrefetchView(BaseModel):
    """What became of a prefetch."""

    agent: str
    counts: list[OutcomeView]
    chains: list[ChainView]


@router.get("/placement")
async def get_placement(
    service: Service,
    _: Viewer,
    tenant: Annotated[str, Query(pattern=NAME)],
    volume: Annotated[str, Query(pattern=NAME)],
    hash: Annotated[str, Query(pattern=_HASH, description="The block's engine hash.")],  # noqa: A002 (what it is called)
    root: Annotated[
        str | None,
        Query(pattern=_HASH, description="The first engine hash of its stripe unit; none: its own."),
    ] = None,
    rank: Rank = 0,
    group: Rank = 0,
) -> PlacementView:
    """Return where a block belongs, in every placement epoch that is asked; not whether it is there."""
    record = await volume_of(service, tenant, volume)
    own = _checked(record, hash)
    span = Span(own, len(own), _checked(record, root or hash), (1,), rank, group)
    return _placement(await _any(service, record, span))


@router.post("/prefetch")
async def prefetch(service: Service, _: Operator, form: PrefetchForm) -> PrefetchView:
    """Have an agent bring blocks into its DRAM cache, as far as it has room and time: for a router.

    It changes nothing that is kept, and is not in the audit log.
    """
    record = await volume_of(service, form.tenant, form.volume)
    agent = AgentId(form.agent)
    if agent not in service.membership.map.agents:
        raise NotFoundError(f"no agent {agent} is in the fabric")
    blocks = sum(len(chain.engine_hashes) for chain in form.chains)
    if blocks > BLOCKS_MAX:
        raise UsageError(f"{blocks} blocks in one prefetch: ask for at most {BLOCKS_MAX} at once")
    spans = [_span(record, chain) for chain in form.chains]
    try:
        done = await service.hands.prefetch(agent, record, spans, form.deadline_s)
    except (ConnectError, ProtocolError, TimeoutError) as error:
        raise UnansweredError(f"agent {agent} does not answer: {error}") from error
    except RefusedError as error:
        raise _refusal(error) from error
    return _prefetched(agent, spans, done)


async def _any(service: Context, volume: VolumeRecord, span: Span) -> Places:
    """Ask the first agent that can say it: all of them would say the same."""
    why = "no agent is in the fabric: start one"
    refused: RefusedError | None = None
    for agent in sorted(service.membership.map.agents):
        try:
            return await service.hands.place(agent, volume, span)
        except RefusedError as error:
            refused = error
        except (ConnectError, ProtocolError, TimeoutError) as error:
            why = f"agent {agent} does not answer: {error}"
    if refused is not None:
        raise _refusal(refused) from refused
    raise UnansweredError(f"{why}; ask again")


def _refusal(error: RefusedError) -> OstracaError:
    return (UnansweredError if error.code in _BUSY else ConflictError)(str(error))


def _checked(volume: VolumeRecord, text: str) -> bytes:
    engine_hash = bytes.fromhex(text)
    wanted = volume.layout.hash_bytes
    if len(engine_hash) != wanted:
        raise UsageError(f"engine hashes of volume {volume.name} have {wanted} bytes, not {len(engine_hash)}")
    return engine_hash


def _span(volume: VolumeRecord, form: ChainForm) -> Span:
    hashes = [_checked(volume, text) for text in form.engine_hashes]
    chain = Chain.of(hashes, hash_bytes=volume.layout.hash_bytes, rank=form.rank, group=form.group)
    return replace(chain, before=form.depth).span()


def _placement(found: Places) -> PlacementView:
    return PlacementView(
        agent=found.agent,
        map_revision=found.map_revision,
        places=[
            PlaceView(
                placement_epoch=each.placement_epoch,
                enclosure=each.enclosure,
                shard=each.shard,
                owner=each.owner,
                owner_epoch=each.owner_epoch,
            )
            for each in found.places
        ],
    )


def _prefetched(agent: AgentId, spans: list[Span], done: PrefetchDone) -> PrefetchView:
    blocks = sum(map(len, spans))
    try:
        codes = zip(columns.u8(done.states, blocks), columns.u8(done.reasons, blocks), strict=True)
    except MalformedError as error:
        raise UnansweredError(f"agent {agent} answered what makes no sense: {error}") from error
    told = [(name_of(BlockState, int(state)), name_of(Reason, int(why))) for state, why in codes]
    chains, begin = [], 0
    for span in spans:
        its = told[begin : begin + len(span)]
        chains.append(ChainView(states=[state for state, _ in its], reasons=[why for _, why in its]))
        begin += len(span)
    counts = [
        OutcomeView(state=state, reason=why, blocks=count)
        for (state, why), count in sorted(Counter(told).items())
    ]
    return PrefetchView(agent=agent, counts=counts, chains=chains)
