"""Requests between agents, mostly to shard owners.

The other agent is in the same process or on another host.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Generator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.model.extent import Extents
from ostraca_fabric.model.ids import AgentId, PlacementEpoch, ShardId
from ostraca_fabric.telemetry.status import PeerStatus
from ostraca_fabric.wire.messages import AgentRequest, AnswerToAgent, OwnerNotice, Reserve, Resolve


@dataclass(frozen=True, slots=True, eq=False)
class ShardAnswer:
    """Answer to a look-up in a shard, as ``wire.messages.ShardExtents``."""

    is_owner: bool
    owner_epoch: int = 0
    is_found: NDArray[np.bool_] | None = None
    """Per key; None from an agent without the shard, and for a malformed answer."""

    extents: Extents | None = None
    """None for a brief query."""

    pin: int = 0
    is_recovering: bool = False
    known_owner: str = ""
    known_epoch: int = 0


class WantedSpace(NamedTuple):
    """Blocks that need space in a shard: a row per block."""

    shard: ShardId
    keys: NDArray[np.uint8]
    """Shape (n, 16)."""

    lengths: NDArray[np.uint32]
    depths: NDArray[np.uint32]
    """Positions in chains, or DEPTH_UNKNOWN."""


_NO_CODES, _NO_NUMBERS = np.empty(0, np.uint8), np.empty(0, np.uint64)


class GivenSpace(NamedTuple):
    """Answer to a request for space in a shard, as ``wire.messages.ShardReservations``."""

    is_owner: bool
    owner_epoch: int = 0
    states: NDArray[np.uint8] = _NO_CODES
    reasons: NDArray[np.uint8] = _NO_CODES
    reservations: NDArray[np.uint64] = _NO_NUMBERS
    offsets: NDArray[np.uint64] = _NO_NUMBERS
    known_owner: str = ""
    known_epoch: int = 0


class SentRequest(Protocol):
    """Sent request. Await it exactly once: resources on both sides are held until then."""

    @property
    def answered(self) -> asyncio.Future[Any]:
        """Future that resolves once awaiting the request takes no more time."""

    def __await__(self) -> Generator[Any, None, AnswerToAgent]:
        """Wait for the agent's answer."""


PendingAnswer = SentRequest | Coroutine[Any, Any, "AnswerToAgent"]
"""Result of ``ask``: a request under way, or a coroutine that sends the request when awaited."""


class Owners(Protocol):
    """Agents of the fabric, mostly as shard owners."""

    def ask(self, agent: AgentId, request: AgentRequest) -> PendingAnswer:
        """Ask an agent; await the result for the answer.

        Awaiting raises TimeoutError without an answer within the request's ``deadline_s``, and ConnectError
        if the agent is unreachable. The caller must treat both as misses of the agent's blocks.
        """

    def tell(self, agent: AgentId, notice: OwnerNotice) -> None:
        """Send a notice without an answer; lost if the agent is unreachable."""


class AgentService(Protocol):
    """Service of an agent for data paths, its own and those of other agents."""

    def answer(self, request: AgentRequest) -> AnswerToAgent | Awaitable[AnswerToAgent]:
        """Answer a request: at once, or with an awaitable."""

    def notice(self, notice: OwnerNotice) -> None:
        """Accept a notice."""


class LocalShards(Protocol):
    """Shards of this agent: the data path asks them without a message."""

    def resolve(
        self, shard: ShardId, placement_epoch: PlacementEpoch, keys: NDArray[np.uint8], terms: Resolve
    ) -> ShardAnswer:
        """Look up blocks of a shard, on the terms of a request for any shards. *keys*: shape (n, 16)."""

    def is_whole(self, shard: ShardId) -> bool:
        """Return whether this agent owns a shard and knows all of its blocks."""

    def has(
        self,
        runs: Sequence[tuple[ShardId | None, int]],
        placement_epoch: PlacementEpoch,
        keys: NDArray[np.uint8],
        terms: Resolve,
    ) -> NDArray[np.bool_]:
        """Return which blocks exist in whole shards, on the terms of a brief request without a pin.

        A run is a shard with the number of its blocks, the next of *keys*, shape (n, 16). Blocks without a
        shard do not exist.
        """

    def reserve(
        self, wanted: Sequence[WantedSpace], terms: Reserve
    ) -> list[GivenSpace] | Awaitable[list[GivenSpace]]:
        """Reserve space in shards, on the terms of a request without shards.

        The answers come in the same order: at once, or before the deadline of the terms.
        """


class AgentNetwork(Owners, Protocol):
    """Connections among the agents of this process and to other processes."""

    def register(self, agent: AgentId, service: AgentService) -> None:
        """Make an agent of this process reachable within the process."""

    def unregister(self, agent: AgentId) -> None:
        """Make an agent unreachable, as after a crash; answers under way still arrive."""

    def peers(self) -> tuple[PeerStatus, ...]:
        """Return the status of each remote agent asked so far and still in the fabric."""
