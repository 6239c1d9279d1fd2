"""Placement and prefetch of blocks, named by engine hashes.

The service has no secret for keys of blocks (ADR 0027), so an agent answers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import Field

from ostraca_admin.api.context import Context, Operator, Service, Viewer
from ostraca_admin.api.forms import NAME, Form, Name
from ostraca_admin.api.routes.volumes import volume_of
from ostraca_admin.api.views import (
    ChainView,
    OutcomeView,
    PlacementView,
    PlaceView,
    PrefetchView,
    view_of,
)
from ostraca_admin.errors import ConflictError, NotFoundError, UnansweredError
from ostraca_fabric.errors import (
    ConnectError,
    MalformedError,
    OstracaError,
    ProtocolError,
    RefusedError,
    UsageError,
)
from ostraca_fabric.model.chain import RANK_MAX, STRIPE_UNIT_BLOCKS, Chain, Span
from ostraca_fabric.model.ids import AgentId
from ostraca_fabric.model.outcome import BlockState, Reason
from ostraca_fabric.model.volume import HASH_BYTES_MAX, HASH_BYTES_MIN, VolumeRecord
from ostraca_fabric.telemetry.explain import BlockPlacements
from ostraca_fabric.telemetry.requests import name_of
from ostraca_fabric.wire import codec
from ostraca_fabric.wire.messages import PrefetchDone

router = APIRouter(prefix="/v1", tags=["blocks"])

BLOCKS_MAX = 4096
CHAINS_MAX = 256
DEADLINE_MAX_S = 60.0
_HASH = rf"^([0-9a-fA-F]{{2}}){{{HASH_BYTES_MIN},{HASH_BYTES_MAX}}}$"
_DEPTH_MAX = 1 << 24
_BUSY = frozenset({"overloaded", "membership"})

HashText = Annotated[str, Field(pattern=_HASH)]
Rank = Annotated[int, Query(ge=0, le=RANK_MAX)]


class ChainForm(Form):
    """Blocks of a prefix, for a rank and KV group."""

    engine_hashes: list[HashText] = Field(
        min_length=1, max_length=BLOCKS_MAX, description="Engine hashes in order."
    )
    depth: int = Field(
        0,
        ge=0,
        le=_DEPTH_MAX,
        multiple_of=STRIPE_UNIT_BLOCKS,
        description="Number of earlier blocks of the prefix, in whole stripe units.",
    )
    rank: int = Field(0, ge=0, le=RANK_MAX)
    group: int = Field(0, ge=0, le=RANK_MAX)


class PrefetchForm(Form):
    """Blocks to prefetch, and the agent."""

    tenant: Name
    volume: Name
    agent: Name = Field(description="Agent with the DRAM cache to fill.")
    chains: list[ChainForm] = Field(
        min_length=1, max_length=CHAINS_MAX, description=f"At most {BLOCKS_MAX} blocks in total."
    )
    deadline_s: Annotated[float, Field(gt=0, le=DEADLINE_MAX_S, allow_inf_nan=False)] = 5.0


@router.get("/placement")
async def get_placement(
    service: Service,
    _: Viewer,
    tenant: Annotated[str, Query(pattern=NAME)],
    volume: Annotated[str, Query(pattern=NAME)],
    hash: Annotated[str, Query(pattern=_HASH, description="Engine hash of the block.")],  # noqa: A002 (name of the parameter)
    root: Annotated[
        str | None,
        Query(pattern=_HASH, description="First engine hash of the block's stripe unit; default: `hash`."),
    ] = None,
    rank: Rank = 0,
    group: Rank = 0,
) -> PlacementView:
    """Return the place of a block in every placement epoch still searched, not its presence."""
    record = await volume_of(service, tenant, volume)
    own = _checked(record, hash)
    span = Span(own, len(own), _checked(record, root or hash), (1,), rank, group)
    found = await _any(service, record, span)
    return view_of(PlacementView, found, places=tuple(view_of(PlaceView, each) for each in found.places))


@router.post("/prefetch")
async def prefetch(service: Service, _: Operator, form: PrefetchForm) -> PrefetchView:
    """Have an agent prefetch blocks into its DRAM cache, as room and time allow: for a router.

    No stored data changes, and the audit log has no entry.
    """
    record = await volume_of(service, form.tenant, form.volume)
    agent = AgentId(form.agent)
    if agent not in service.membership.map.agents:
        raise NotFoundError(
            f"agent {agent} is not in the fabric: list agents by `ostraca fabric agents`, or at /v1/agents"
        )
    blocks = sum(len(chain.engine_hashes) for chain in form.chains)
    if blocks > BLOCKS_MAX:
        raise UsageError(f"{blocks} blocks in a prefetch exceed the limit: send at most {BLOCKS_MAX}")
    spans = [_span(record, chain) for chain in form.chains]
    try:
        done = await service.agents.prefetch(agent, record, spans, form.deadline_s)
    except (ConnectError, ProtocolError, TimeoutError) as error:
        raise UnansweredError(f"agent {agent} does not answer: {error}") from error
    except RefusedError as error:
        raise _refusal(error) from error
    return _prefetched(agent, spans, done)


async def _any(service: Context, volume: VolumeRecord, span: Span) -> BlockPlacements:
    """Return the answer of the first agent able to answer: all answers are the same."""
    why = "the fabric has no agent: start an agent"
    refused: RefusedError | None = None
    for agent in sorted(service.membership.map.agents):
        try:
            return await service.agents.place(agent, volume, span)
        except RefusedError as error:
            refused = error
        except (ConnectError, ProtocolError, TimeoutError) as error:
            why = f"agent {agent} does not answer: {error}"
    if refused is not None:
        raise _refusal(refused) from refused
    raise UnansweredError(f"{why}; retry")


def _refusal(error: RefusedError) -> OstracaError:
    return (UnansweredError if error.code in _BUSY else ConflictError)(str(error))


def _checked(volume: VolumeRecord, text: str) -> bytes:
    engine_hash = bytes.fromhex(text)
    wanted = volume.layout.hash_bytes
    if len(engine_hash) != wanted:
        raise UsageError(
            f"an engine hash of volume {volume.name} must have {wanted} bytes, not {len(engine_hash)}"
        )
    return engine_hash


def _span(volume: VolumeRecord, form: ChainForm) -> Span:
    hashes = [_checked(volume, text) for text in form.engine_hashes]
    chain = Chain.of(hashes, hash_bytes=volume.layout.hash_bytes, rank=form.rank, group=form.group)
    return replace(chain, before=form.depth).span()


def _prefetched(agent: AgentId, spans: list[Span], done: PrefetchDone) -> PrefetchView:
    blocks = sum(map(len, spans))
    try:
        codes = zip(codec.u8(done.states, blocks), codec.u8(done.reasons, blocks), strict=True)
    except MalformedError as error:
        raise UnansweredError(f"agent {agent} sent an invalid answer: {error}") from error
    outcomes = [(name_of(BlockState, int(state)), name_of(Reason, int(why))) for state, why in codes]
    chains, begin = [], 0
    for span in spans:
        of_span = outcomes[begin : begin + len(span)]
        chains.append(ChainView(*(tuple(each[place] for each in of_span) for place in (0, 1))))
        begin += len(span)
    counts = tuple(OutcomeView(*outcome, count) for outcome, count in sorted(Counter(outcomes).items()))
    return PrefetchView(agent, counts, tuple(chains))
