"""Volumes: what one does with blocks.

Every operation takes ``deadline_s``, the time it may take, and ends by it. It never raises for what the
fabric does or fails to do: each block has a state and a reason. It raises UsageError for arguments that can't
be meant, ClosedError after close or fork, and RefusedError when the agent says that the volume is gone or has
another layout.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from ostraca.batches import AskBatch, GetIntoBatch, GetViewsBatch, PutFromBatch, PutSlotsBatch
from ostraca.core.checks import check_batch, checked_chain, checked_chains, checked_seconds
from ostraca.parts import as_blocks
from ostraca.results import BlockOutcomes, GetResult, LookupResult, PrefetchResult, PutResult
from ostraca.views import BlockViews, SlotLease
from ostraca_fabric.chain import Chain
from ostraca_fabric.errors import UsageError
from ostraca_fabric.outcome import Ack, BlockState, PutState, Reason
from ostraca_fabric.volume import VolumeIdentity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from ostraca.batch import Batch, Target
    from ostraca.client import Client
    from ostraca_fabric.layout import Layout
    from ostraca_fabric.volume import VolumeRecord

    BeginBatch = Callable[[Target], Batch]


class Volume:
    """A namespace of blocks.

    ``Client.volume`` makes it; it is usable from any thread and through reconnects.
    """

    def __init__(self, client: Client, record: VolumeRecord, *, create: bool) -> None:
        self.record = record
        self.create = create
        """Whether to make the volume again when a later connection's agent does not know it."""
        self.identity = VolumeIdentity(record.tenant, record.name, record.layout.digest())
        self._client = client

    @property
    def name(self) -> str:
        """Its name."""
        return self.record.name

    @property
    def layout(self) -> Layout:
        """What its blocks' bytes mean."""
        return self.record.layout

    @property
    def block_bytes(self) -> int:
        """The largest block."""
        return self.record.block_bytes

    def __repr__(self) -> str:
        """Name it."""
        whose = f"{self.record.tenant}/{self.name}"
        return f"<Volume {whose}: {self.layout.model}, blocks up to {self.block_bytes} bytes>"

    def chain(
        self, engine_hashes: Iterable[bytes], *, rank: int = 0, group: int = 0, is_chained: bool = True
    ) -> Chain:
        """Make a chain of engine hashes, from the prefix's root on; slice it to name some of its blocks.

        With *is_chained* False the blocks have no order, and each is placed by itself.
        """
        return Chain.of(
            engine_hashes, hash_bytes=self.layout.hash_bytes, rank=rank, group=group, is_chained=is_chained
        )

    def lookup(
        self, chains: Chain | Sequence[Chain], *, deadline_s: float, pin_s: float = 0.0
    ) -> LookupResult:
        """Ask which blocks could be got now.

        With *pin_s*, hits stay gettable that long (the agent bounds it).
        """
        listed = checked_chains(chains, hash_bytes=self.layout.hash_bytes)
        until_s = self._until_s(deadline_s)
        if self._seconds("pin_s", pin_s) < 0:
            raise UsageError(f"pin_s is {pin_s}: pass 0 for no pin, or how long hits should stay gettable")
        blocks = sum(map(len, listed))
        check_batch(blocks, blocks_max=self._client.settings.batch_blocks_max)
        states, reasons, note = self._run(
            blocks, until_s, lambda target: AskBatch(target, listed, until_s=until_s, pin_s=float(pin_s))
        )
        found, first = [], 0
        for chain in listed:
            last = first + len(chain)
            found.append(BlockOutcomes(states[first:last], reasons[first:last], note))
            first = last
        return LookupResult(tuple(found))

    def prefetch(self, chain: Chain, *, deadline_s: float) -> PrefetchResult:
        """Ask the agent to bring blocks into its memory, so that a later get of them is faster."""
        checked = checked_chain(chain, hash_bytes=self.layout.hash_bytes)
        until_s = self._until_s(deadline_s)
        check_batch(len(checked), blocks_max=self._client.settings.batch_blocks_max)
        return PrefetchResult(
            *self._run(
                len(checked), until_s, lambda target: AskBatch(target, [checked], until_s=until_s, pin_s=None)
            )
        )

    def get(
        self, chain: Chain, *, into: object, deadline_s: float, recompute_s: float | None = None
    ) -> GetResult:
        """Bring blocks into caller memory, one block of *into* per block of the chain.

        *into* is what ``ostraca.parts`` describes.

        A block's memory is written if and only if the block is a HIT: its bytes were verified first.
        *recompute_s* is how long recomputing all of it would take; a fabric that expects to be slower
        declines, early. A batch that the arena or the agent can't take at once is moved in parts within the
        same deadline.
        """
        checked = checked_chain(chain, hash_bytes=self.layout.hash_bytes)
        until_s, recompute = self._until_s(deadline_s), self._recompute_s(recompute_s)
        check_batch(len(checked), blocks_max=self._client.settings.batch_blocks_max)
        blocks = as_blocks(
            into, what="into", count=len(checked), block_bytes=self.block_bytes, is_written=True
        )
        return GetResult(
            *self._run(
                len(checked),
                until_s,
                lambda target: GetIntoBatch(target, checked, blocks, until_s=until_s, recompute_s=recompute),
            )
        )

    def get_views(
        self,
        chain: Chain,
        *,
        lengths: int | Sequence[int],
        deadline_s: float,
        recompute_s: float | None = None,
    ) -> BlockViews:
        """Bring blocks into the arena and lend them where they landed, verified, without a copy.

        *lengths* is the bytes of each block, or one number for all. The blocks must fit the arena together;
        slots are held until the result is released.
        """
        checked = checked_chain(chain, hash_bytes=self.layout.hash_bytes)
        until_s, recompute = self._until_s(deadline_s), self._recompute_s(recompute_s)
        self._check_arena(len(checked))
        sizes = self._lengths(lengths, len(checked))
        held: list[GetViewsBatch] = []

        def begin(target: Target) -> GetViewsBatch:
            held.append(GetViewsBatch(target, checked, sizes, until_s=until_s, recompute_s=recompute))
            return held[-1]

        result = GetResult(*self._run(len(checked), until_s, begin))
        if not held:
            return BlockViews(result, [None] * len(checked), lambda: None)
        return BlockViews(result, held[0].views, held[0].let_go)

    def put(self, chain: Chain, *, source: object, deadline_s: float, ack: Ack = Ack.STAGED) -> PutResult:
        """Store blocks from caller memory, which is the caller's again when this returns.

        Returns when every block is staged, or committed with ``Ack.COMMITTED``, or declined. Blocks that are
        there already cost no write and are EXISTS.
        """
        checked = checked_chain(chain, hash_bytes=self.layout.hash_bytes)
        until_s, wanted = self._until_s(deadline_s), _checked_ack(ack)
        check_batch(len(checked), blocks_max=self._client.settings.batch_blocks_max)
        blocks = as_blocks(
            source, what="source", count=len(checked), block_bytes=self.block_bytes, is_written=False
        )
        return self._put(
            len(checked),
            until_s,
            lambda target: PutFromBatch(target, checked, blocks, until_s=until_s, ack=wanted),
        )

    def slots(self, count: int, *, lengths: int | Sequence[int]) -> SlotLease:
        """Lend *count* slots of the arena to write blocks of these *lengths* into, for ``put_slots``.

        Raises UsageError when the arena is too small for so many, or too full now.
        """
        self._check_arena(count)
        sizes = self._lengths(lengths, count)
        arena = self._client.arena
        with self._client.running(), arena.changed:
            offsets = arena.ledger.take(count, self.record.slot_bytes)
        if offsets is None:
            raise UsageError(f"{count} slots are not free now: release views or leases, or raise arena_bytes")
        views = [
            arena.lend(offset, length, is_written=True)
            for offset, length in zip(offsets.tolist(), sizes.tolist(), strict=True)
        ]
        return SlotLease(views, offsets, lambda: arena.give(offsets))

    def put_slots(
        self, chain: Chain, lease: SlotLease, *, deadline_s: float, ack: Ack = Ack.STAGED
    ) -> PutResult:
        """Store blocks that were written into leased slots.

        The lease is over when this is called, whatever comes of the put.
        """
        checked = checked_chain(chain, hash_bytes=self.layout.hash_bytes)
        until_s, wanted = self._until_s(deadline_s), _checked_ack(ack)
        if len(lease) != len(checked):
            raise UsageError(
                f"the lease has {len(lease)} slots and the chain {len(checked)} blocks: lease as many"
            )
        begun: list[PutSlotsBatch] = []
        with self._client.running():
            offsets, sizes = lease.taken_over()

            def begin(target: Target) -> PutSlotsBatch:
                begun.append(PutSlotsBatch(target, checked, offsets, sizes, until_s=until_s, ack=wanted))
                return begun[-1]

            try:
                return self._put(len(checked), until_s, begin)
            finally:
                if not begun:
                    self._client.arena.give(offsets)

    def _put(self, blocks: int, until_s: float, begin: BeginBatch) -> PutResult:
        states, reasons, note = self._run(
            blocks, until_s, begin, late=PutState.LATE, declined=PutState.DECLINED
        )
        return PutResult(states, reasons, note)

    def _run(
        self,
        blocks: int,
        until_s: float,
        begin: BeginBatch,
        *,
        late: int = BlockState.LATE,
        declined: int = BlockState.DECLINED,
    ) -> tuple[bytes, bytes, str]:
        """Run one batch; return a state and a reason per block, and the agent's note."""
        with self._client.running():
            if not blocks:
                return b"", b"", ""
            if time.monotonic() >= until_s:
                return bytes([late]) * blocks, bytes([Reason.DEADLINE]) * blocks, ""
            target = self._client.target(self, until_s)
            if target is None:
                is_late = time.monotonic() >= until_s
                state, reason = (late, Reason.DEADLINE) if is_late else (declined, Reason.DISCONNECTED)
                return bytes([state]) * blocks, bytes([reason]) * blocks, self._client.unreachable_because
            batch = begin(target)
            batch.run()
            return batch.states, batch.reasons, batch.note

    def _until_s(self, deadline_s: float) -> float:
        return time.monotonic() + self._seconds("deadline_s", deadline_s)

    def _seconds(self, name: str, value: float) -> float:
        return checked_seconds(name, value, longest_s=self._client.settings.deadline_s_max)

    def _recompute_s(self, recompute_s: float | None) -> float:
        found = 0.0 if recompute_s is None else self._seconds("recompute_s", recompute_s)
        if found < 0:
            raise UsageError(f"recompute_s is {recompute_s}: pass None when it is not known")
        return found

    def _check_arena(self, blocks: int) -> None:
        """Refuse what the arena can't hold at one time."""
        fitting = self._client.arena.slots_of(self.record.slot_bytes)
        if not 0 <= blocks <= fitting:
            raise UsageError(
                f"{blocks} blocks at one time, and the arena holds {fitting} of {self.record.slot_bytes} "
                "bytes: take fewer, or raise "
                "arena_bytes in the settings"
            )

    def _lengths(self, lengths: int | Sequence[int], count: int) -> NDArray[np.uint32]:
        listed = [lengths] * count if isinstance(lengths, int) else list(lengths)
        if len(listed) != count:
            raise UsageError(
                f"{len(listed)} lengths for {count} blocks: pass one for each, or one number for all"
            )
        if any(not 1 <= length <= self.block_bytes for length in listed):
            raise UsageError(
                f"blocks of this volume have 1 to {self.block_bytes} bytes: pass lengths in that range"
            )
        return np.array(listed, np.uint32)


def _checked_ack(ack: object) -> Ack:
    try:
        return Ack(ack)  # type: ignore[arg-type]  # whether it is one is what is asked
    except ValueError as error:
        raise UsageError(f"ack is {ack!r}: pass Ack.STAGED or Ack.COMMITTED") from error
