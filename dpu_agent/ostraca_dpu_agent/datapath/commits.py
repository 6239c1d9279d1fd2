"""Commits of blocks on flash: all that begin in one turn of the loop are one message to each owner."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from ostraca_dpu_agent.datapath.location.routing import BlockSource
from ostraca_fabric.errors import ConnectError, MalformedError
from ostraca_fabric.model.fabric_map import FabricMap
from ostraca_fabric.model.ids import AgentId
from ostraca_fabric.model.outcome import PutState, Reason
from ostraca_fabric.ports.owners import Owners
from ostraca_fabric.runtime.tasks import Tasks
from ostraca_fabric.wire.codec import Outcomes
from ostraca_fabric.wire.messages import AnswerToAgent, Commit, Committed, ShardCommit, ShardCommitted

_BLOCKS_MAX = 16384
"""Blocks that a message may have before more of the same turn begin another: 32 bytes each."""


@dataclass(frozen=True, slots=True)
class ReservedShard(BlockSource):
    """A shard with space for some of a put's blocks."""

    owner_epoch: int

    until_s: float
    """End of the reservations, counted from before the request."""

    def stands(self, fabric_map: FabricMap, now_s: float) -> bool:
        """Return whether the owner grants this space to no other put now, as far as the map tells."""
        claim = fabric_map.claims.get(self.shard)
        is_owner = claim is not None and (claim.agent, claim.epoch) == (self.owner, self.owner_epoch)
        return is_owner and now_s < self.until_s


@dataclass(frozen=True, slots=True)
class _ShardPart:
    """Blocks of one put in one shard."""

    target: ReservedShard
    numbers: NDArray[np.uint64]
    tags: NDArray[np.uint8]
    seeds: NDArray[np.uint64]
    answer: asyncio.Future[Outcomes]


class Commits:
    """Commits of all puts. Use on the event loop's thread only."""

    def __init__(self, owners: Owners, tasks: Tasks, clock: Callable[[], float]) -> None:
        """Ask *owners*, in *tasks*."""
        self._owners = owners
        self._tasks = tasks
        self._clock = clock
        self._begun: list[_ShardPart] = []

    def submit(
        self,
        target: ReservedShard,
        numbers: NDArray[np.uint64],
        tags: NDArray[np.uint8],
        seeds: NDArray[np.uint64],
    ) -> asyncio.Future[Outcomes]:
        """Commit reserved blocks of a shard: a row per block, *tags* of shape (n, 16).

        Without the owner's answer, blocks are LATE: the owner may have listed them, or may later.
        """
        loop = asyncio.get_running_loop()
        part = _ShardPart(target, numbers, tags, seeds, loop.create_future())
        if not self._begun:
            loop.call_soon(self._send)
        self._begun.append(part)
        return part.answer

    def _send(self) -> None:
        begun, self._begun = self._begun, []
        messages: defaultdict[tuple[AgentId, int], list[_ShardPart]] = defaultdict(list)
        blocks: Counter[AgentId] = Counter()
        for part in begun:
            owner = part.target.owner
            messages[owner, blocks[owner] // _BLOCKS_MAX].append(part)
            blocks[owner] += len(part.numbers)
        for (owner, _), parts in messages.items():
            self._tasks.spawn(self._commit_at(owner, parts))

    async def _commit_at(self, owner: AgentId, parts: Sequence[_ShardPart]) -> None:
        by_shard: dict[tuple[str, int], list[_ShardPart]] = {}
        for part in parts:
            by_shard.setdefault((part.target.shard, part.target.owner_epoch), []).append(part)
        commits = tuple(
            ShardCommit(
                shard,
                epoch,
                b"".join(each.numbers.tobytes() for each in its),
                b"".join(each.tags.tobytes() for each in its),
                b"".join(each.seeds.tobytes() for each in its),
            )
            for (shard, epoch), its in by_shard.items()
        )
        left_s = max(part.target.until_s for part in parts) - self._clock()
        answer: AnswerToAgent | None = None
        try:
            with suppress(TimeoutError, ConnectError):
                answer = await self._owners.ask(owner, Commit(0, left_s, commits))
        finally:
            shards = answer.shards if isinstance(answer, Committed) else ()
            for its, committed in zip_longest(by_shard.values(), shards[: len(by_shard)]):
                _share_out(its, committed)


def _share_out(parts: Sequence[_ShardPart], committed: ShardCommitted | None) -> None:
    """Hand each part its rows of a shard's answer."""
    count, at = sum(len(part.numbers) for part in parts), 0
    outcomes = Outcomes.filled(count, PutState.LATE, Reason.NO_OWNER)
    if committed is not None:
        with suppress(MalformedError):
            outcomes = Outcomes.read(committed.states, committed.reasons, count)
    for part in parts:
        rows = slice(at, at := at + len(part.numbers))
        part.answer.set_result(Outcomes(outcomes.states[rows], outcomes.reasons[rows]))
