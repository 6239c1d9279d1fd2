"""The batches there are: lookups and prefetches, gets and puts.

Tags. A put's tags are made from the caller's bytes, *before* they are copied, so that a bad copy is noticed
(``ostraca.device_blocks`` says why those of a device are not).
A get hashes the slot, and copies only what agrees with the tag that the block's writer made, seeded here with
who the block must be. Either is one call into C for all blocks that are there to be done, or for a share of
them, in several threads (``ostraca.crew``).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ostraca.batch import Batch
from ostraca.core.events import Verified
from ostraca.core.operations import (
    GetOperation,
    LookupOperation,
    PrefetchOperation,
    PutOperation,
    get_message,
    put_message,
)
from ostraca.core.plan import blocks_per_request, window_blocks, windows
from ostraca.device_blocks import FAILED
from ostraca.verify import checked_until, no_verdicts, tags_made, verdicts_of
from ostraca_fabric.errors import TransportError
from ostraca_fabric.outcome import PutState, Reason
from ostraca_fabric.tags import tag_seeds
from ostraca_fabric.wire import columns
from ostraca_fabric.wire.messages import Lookup, Prefetch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ostraca.batch import Target, Under
    from ostraca.core.events import Verify
    from ostraca.device_blocks import CallerBlocks
    from ostraca_fabric.chain import Chain
    from ostraca_fabric.outcome import Ack


class AskBatch(Batch):
    """A lookup or prefetch: no bytes cross."""

    def __init__(
        self, target: Target, chains: Sequence[Chain], *, until_s: float, pin_s: float | None, at: str = ""
    ) -> None:
        """A lookup with this pin, or a prefetch at that agent when *pin_s* is None."""
        super().__init__(target, sum(map(len, chains)), until_s=until_s)
        self._pin_s = pin_s
        self._at = at
        blocks_max = blocks_per_request(self._session.limits, target.record.layout.hash_bytes)
        self._windows = {window.first: window for window in windows(chains, blocks_max)}

    def _begin(self, request: int, first: int) -> int:
        window = self._windows[first]
        spans = tuple(chain.span() for chain in window.chains)
        left_s = self._until_s - time.monotonic()
        if self._pin_s is None:
            asked = Prefetch(request, self._target.handle, left_s, spans, self._at)
            self._submit(PrefetchOperation(asked, until_s=self._until_s), first)
        else:
            question = Lookup(request, self._target.handle, left_s, spans, self._pin_s)
            self._submit(LookupOperation(question, until_s=self._until_s), first)
        return window.blocks


class _SlotBatch(Batch):
    """What batches have in common whose blocks cross in slots."""

    def __init__(self, target: Target, chain: Chain, lengths: NDArray[np.uint32], *, until_s: float) -> None:
        super().__init__(target, len(chain), until_s=until_s)
        self._chain = chain
        self._lengths = lengths
        self._slot_bytes = target.record.slot_bytes
        self._blocks_max = blocks_per_request(self._session.limits, target.record.layout.hash_bytes)
        self._seeds_by_first: dict[int, NDArray[np.uint64]] = {}

    def _why_not_begin(self) -> tuple[int, Reason] | None:
        with self._target.arena.changed:
            if not self._target.arena.ledger.is_open:
                return self._declined, Reason.QUARANTINED
        return super()._why_not_begin()

    def _seeds(self, first: int, blocks: int) -> NDArray[np.uint64]:
        """Seeds of the tags of a window: who each block must be."""
        last = first + blocks
        return tag_seeds(self._target.identity, [self._chain[first:last].span()], self._lengths[first:last])


@dataclass(frozen=True, slots=True)
class _Landed:
    """Blocks that landed in slots and are yet to be verified: one of each per block."""

    blocks: NDArray[np.int64]
    """Which ones of the batch."""

    offsets: NDArray[np.int64]
    seeds: NDArray[np.uint64]
    tags: NDArray[np.uint8]


class GetBatch(_SlotBatch):
    """A get. ``_check`` verifies what landed and hands over what is good."""

    def __init__(
        self, target: Target, chain: Chain, lengths: NDArray[np.uint32], *, until_s: float, recompute_s: float
    ) -> None:
        super().__init__(target, chain, lengths, until_s=until_s)
        self._recompute_s = recompute_s

    def _check(self, landed: _Landed) -> NDArray[np.uint8]:
        """Verify blocks, hand over those that are good, and return a ``Verdict`` for each."""
        raise NotImplementedError

    def _begin(self, request: int, first: int) -> int:
        arena = self._target.arena
        wanted = window_blocks(
            left=self._blocks - first,
            blocks_max=self._blocks_max,
            arena_slots=arena.slots_of(self._slot_bytes),
            windows_inflight=self._target.settings.windows_inflight,
        )
        slots = arena.take_up_to(wanted, self._slot_bytes)
        if slots is None:
            return 0
        last = first + len(slots)
        # What is under way is queued before this request, and would have to be recomputed before its blocks.
        coming = len(slots) + sum(under.operation.blocks for under in self._under.values())
        message = get_message(
            request=request,
            handle=self._target.handle,
            deadline_s=self._until_s - time.monotonic(),
            spans=(self._chain[first:last].span(),),
            lengths=self._lengths[first:last],
            slots=slots,
            slot_bytes=self._slot_bytes,
            recompute_s=self._recompute_s * coming / self._blocks,
        )
        self._submit(GetOperation(message, until_s=self._until_s), first, slots)
        # Made while the agent works, and needed when the first block has landed.
        self._seeds_by_first[first] = self._seeds(first, len(slots))
        return len(slots)

    def _verify(self, under: Under, wanted: Verify) -> Verified:
        assert under.slots is not None
        positions = columns.positions(wanted.positions, under.operation.blocks)
        verdicts = self._check(
            _Landed(
                blocks=under.first + positions.astype(np.int64),
                offsets=under.slots[positions],
                seeds=self._seeds_by_first[under.first][positions],
                tags=columns.rows16(wanted.tags, len(positions)),
            )
        )
        return Verified(wanted.positions, verdicts.tobytes())


class GetIntoBatch(GetBatch):
    """A get that copies blocks to where the caller wants them."""

    def __init__(
        self, target: Target, chain: Chain, into: CallerBlocks, *, until_s: float, recompute_s: float
    ) -> None:
        super().__init__(target, chain, into.lengths, until_s=until_s, recompute_s=recompute_s)
        self._into = into
        self._has_lost_copies = False

    def advance(self) -> None:
        """Go on; raises TransportError when blocks that are called HITs may not have arrived."""
        if self._has_lost_copies:
            raise TransportError(FAILED)
        super().advance()

    def _begin(self, request: int, first: int) -> int:
        self._into.prepare(self._target.arena.array)
        return super()._begin(request, first)

    def _drop(self, request: int) -> None:
        if self._into.wait():
            super()._drop(request)
        else:  # its slots are never given back: something may still read them
            self._has_lost_copies = True
            del self._under[request]
            self._session.forget(request)

    def _check(self, landed: _Landed) -> NDArray[np.uint8]:
        return self._into.scatter(
            self._target.arena.array,
            landed.offsets,
            landed.seeds,
            landed.tags,
            which=landed.blocks,
            until_s=self._until_s,
            crew=self._target.crew,
        )


class GetViewsBatch(GetBatch):
    """A get that leaves blocks in their slots: those that are ``good``, at ``offsets`` of ``memory``.

    The requests in ``held`` must be left when nobody looks at these slots any more.
    """

    def __init__(
        self, target: Target, chain: Chain, lengths: NDArray[np.uint32], *, until_s: float, recompute_s: float
    ) -> None:
        super().__init__(target, chain, lengths, until_s=until_s, recompute_s=recompute_s)
        self.memory = target.arena.array
        self.good = np.zeros(len(chain), np.bool_)
        self.offsets = np.zeros(len(chain), np.int64)
        self.held: list[int] = []

    def close(self) -> None:
        """Let go of everything; of the views too when the batch is not over."""
        is_over = self.is_over
        super().close()
        if not is_over:
            self.let_go()

    def let_go(self) -> None:
        """Give the slots back. Nobody may look at them any more."""
        for request in self.held:
            self._session.leave(request)
        self.held.clear()

    def _check(self, landed: _Landed) -> NDArray[np.uint8]:
        verdicts = no_verdicts(len(landed.blocks))
        for some, good in checked_until(
            self.memory,
            landed.offsets,
            self._lengths[landed.blocks],
            landed.seeds,
            landed.tags,
            until_s=self._until_s,
            crew=self._target.crew,
        ):
            handed_over = landed.blocks[some][good]
            self.offsets[handed_over] = landed.offsets[some][good]
            self.good[handed_over] = True
            verdicts[some] = verdicts_of(good)
        return verdicts

    def _drop(self, request: int) -> None:
        del self._under[request]
        self._session.forget(request)
        self.held.append(request)


class PutBatch(_SlotBatch):
    """A put.

    Windows of about ``put_window_bytes``, so that the agent fetches one while the next is gathered.
    """

    _late = PutState.LATE
    _declined = PutState.DECLINED

    def __init__(
        self,
        target: Target,
        chain: Chain,
        lengths: NDArray[np.uint32],
        *,
        until_s: float,
        ack: Ack,
        ttl_s: float,
    ) -> None:
        super().__init__(target, chain, lengths, until_s=until_s)
        self._ack = ack
        self._ttl_s = ttl_s
        self._window_blocks = max(1, target.settings.put_window_bytes // self._slot_bytes)

    def _fill(self, first: int, wanted: int) -> tuple[NDArray[np.int64], bytes] | None:
        """Return slots filled with up to *wanted* blocks from *first* on, and their tags.

        None when no slot is free.
        """
        raise NotImplementedError

    def _begin(self, request: int, first: int) -> int:
        filled = self._fill(first, min(self._blocks - first, self._window_blocks, self._blocks_max))
        if filled is None:
            return 0
        slots, tags = filled
        last = first + len(slots)
        message = put_message(
            request=request,
            handle=self._target.handle,
            deadline_s=self._until_s - time.monotonic(),
            ack=self._ack,
            spans=(self._chain[first:last].span(),),
            lengths=self._lengths[first:last],
            tags=tags,
            slots=slots,
            slot_bytes=self._slot_bytes,
            ttl_s=self._ttl_s,
        )
        operation = PutOperation(message, until_s=self._until_s)
        self._submit(operation, first, slots)
        return len(slots)


class PutFromBatch(PutBatch):
    """A put from caller memory."""

    def __init__(
        self,
        target: Target,
        chain: Chain,
        source: CallerBlocks,
        *,
        until_s: float,
        ack: Ack,
        ttl_s: float,
    ) -> None:
        super().__init__(target, chain, source.lengths, until_s=until_s, ack=ack, ttl_s=ttl_s)
        self._source = source

    def _fill(self, first: int, wanted: int) -> tuple[NDArray[np.int64], bytes] | None:
        arena = self._target.arena
        slots = arena.take_up_to(wanted, self._slot_bytes)
        if slots is None:
            return None
        try:
            seeds = self._seeds(first, len(slots))
            tags = self._source.gather(arena.array, slots, seeds, first=first, crew=self._target.crew)
        except BaseException:
            if self._source.wait():  # else something may still write to them
                arena.give(slots)
            raise
        return slots, tags.tobytes()


class PutSlotsBatch(PutBatch):
    """A put of blocks that lie in slots already.

    The slots are this batch's: what it does not send, it gives back.
    """

    def __init__(
        self,
        target: Target,
        chain: Chain,
        slots: NDArray[np.int64],
        lengths: NDArray[np.uint32],
        *,
        until_s: float,
        ack: Ack,
        ttl_s: float,
    ) -> None:
        super().__init__(target, chain, lengths, until_s=until_s, ack=ack, ttl_s=ttl_s)
        self._slots = slots
        self._begun = 0

    def close(self) -> None:
        """Let go of everything, the slots that were never sent too."""
        super().close()
        self._target.arena.give(self._slots[self._begun :])

    def _fill(self, first: int, wanted: int) -> tuple[NDArray[np.int64], bytes]:
        slots = self._slots[first : first + wanted]
        lengths = self._lengths[first : first + len(slots)]
        seeds = self._seeds(first, len(slots))
        tags = tags_made(self._target.arena.array, slots, lengths, seeds, crew=self._target.crew)
        self._begun = first + len(slots)
        return slots, tags.tobytes()
