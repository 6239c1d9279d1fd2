"""Jobs: operations on a volume whose arguments have been checked, ready for any shell.

Whatever can't be meant is found here, in the caller's thread, before anything is sent: UsageError. A job says
how to begin on a live session and what its result is; the shells differ only in who waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from ostraca.batches import AskBatch, GetIntoBatch, GetViewsBatch, PutFromBatch, PutSlotsBatch
from ostraca.core.checks import (
    check_batch,
    checked_ack,
    checked_agent,
    checked_chain,
    checked_chains,
    checked_lengths,
    checked_seconds,
    checked_ttl_s,
)
from ostraca.device_blocks import caller_blocks
from ostraca.results import BlockOutcomes, GetResult, LookupResult, PrefetchResult, PutResult
from ostraca.views import BlockViews, Lent
from ostraca_fabric.errors import UsageError
from ostraca_fabric.outcome import BlockState, PutState, Reason

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from ostraca.batch import Batch, Target
    from ostraca.device_blocks import CallerBlocks
    from ostraca.views import SlotLease
    from ostraca.volume import Volume
    from ostraca_fabric.chain import Chain
    from ostraca_fabric.outcome import Ack

_Result_co = TypeVar("_Result_co", covariant=True)


class Outcome(NamedTuple):
    """What became of a job's blocks: a state and a reason each, and what the agent said of all."""

    states: bytes
    reasons: bytes
    note: str = ""


def _nothing() -> None:
    """Nothing is held by a job that was never begun."""


@dataclass(frozen=True, slots=True)
class Job(Generic[_Result_co]):
    """One operation of one caller."""

    operation: str
    """``lookup``, ``get``, ``put`` or ``prefetch``."""

    volume: Volume
    blocks: int
    until_s: float
    """On the monotonic clock, as is ``begun_s``."""

    begin: Callable[[Target], Batch]
    result: Callable[[Outcome, Batch | None], _Result_co]
    """Makes what the caller gets; the batch is None when the job was never begun. Shells call ``end``."""

    never_begun: Callable[[], None] = _nothing
    """Call it instead of ``begin``."""

    late: int = BlockState.LATE
    declined: int = BlockState.DECLINED
    lengths: NDArray[np.uint32] | None = None
    """Bytes of each block, where blocks move."""

    recompute_s: float = 0.0
    begun_s: float = field(default_factory=time.monotonic)

    def ended(self, state: int, reason: Reason, note: str = "") -> Outcome:
        """The same outcome for every block."""
        return Outcome(bytes([state]) * self.blocks, bytes([reason]) * self.blocks, note)

    def at_once(self) -> Outcome | None:
        """Return the outcome of a job that needs no agent: an empty one, or one that is late already."""
        if not self.blocks:
            return Outcome(b"", b"")
        if time.monotonic() >= self.until_s:
            return self.ended(self.late, Reason.DEADLINE)
        return None

    def unreachable(self, why: str) -> Outcome:
        """Return the outcome of a job for which no agent was found by now."""
        if time.monotonic() >= self.until_s:
            return self.ended(self.late, Reason.DEADLINE, why)
        return self.ended(self.declined, Reason.DISCONNECTED, why)

    def end(self, outcome: Outcome, batch: Batch | None) -> _Result_co:
        """Count the job as ended so, and return its result."""
        self.volume.meter.count(self, outcome, took_s=time.monotonic() - self.begun_s)
        return self.result(outcome, batch)

    def skipped(self, outcome: Outcome) -> _Result_co:
        """Return the result of a job that was never begun."""
        self.never_begun()
        return self.end(outcome, None)


def lookup_job(
    volume: Volume, chains: Chain | Sequence[Chain], *, deadline_s: float, pin_s: float
) -> Job[LookupResult]:
    """Which blocks could be got now."""
    listed = checked_chains(chains, hash_bytes=volume.layout.hash_bytes)
    until_s = _until_s(volume, deadline_s)
    if _seconds(volume, "pin_s", pin_s) < 0:
        raise UsageError(f"pin_s is {pin_s}: pass 0 for no pin, or how long hits should stay gettable")
    blocks = sum(map(len, listed))
    check_batch(blocks, blocks_max=volume.settings.batch_blocks_max)

    def result(outcome: Outcome, _: Batch | None) -> LookupResult:
        found, first = [], 0
        for chain in listed:
            last = first + len(chain)
            found.append(BlockOutcomes(outcome.states[first:last], outcome.reasons[first:last], outcome.note))
            first = last
        return LookupResult(tuple(found))

    return Job(
        "lookup",
        volume,
        blocks,
        until_s,
        lambda target: AskBatch(target, listed, until_s=until_s, pin_s=float(pin_s)),
        result,
    )


def prefetch_job(volume: Volume, chain: Chain, *, deadline_s: float, at: str | None) -> Job[PrefetchResult]:
    """Blocks into an agent's memory."""
    checked = _chain(volume, chain)
    until_s, where = _until_s(volume, deadline_s), checked_agent(at)
    return Job(
        "prefetch",
        volume,
        len(checked),
        until_s,
        lambda target: AskBatch(target, [checked], until_s=until_s, pin_s=None, at=where),
        lambda outcome, _: PrefetchResult(*outcome),
    )


def get_job(
    volume: Volume, chain: Chain, *, into: object, deadline_s: float, recompute_s: float | None
) -> Job[GetResult]:
    """Blocks into caller memory."""
    checked = _chain(volume, chain)
    until_s, recompute = _until_s(volume, deadline_s), _recompute_s(volume, recompute_s)
    blocks = _blocks(volume, into, what="into", count=len(checked), is_written=True)
    return Job(
        "get",
        volume,
        len(checked),
        until_s,
        lambda target: GetIntoBatch(target, checked, blocks, until_s=until_s, recompute_s=recompute),
        lambda outcome, _: GetResult(*outcome),
        lengths=blocks.lengths,
        recompute_s=recompute,
    )


def get_views_job(
    volume: Volume,
    chain: Chain,
    *,
    lengths: int | Sequence[int],
    deadline_s: float,
    recompute_s: float | None,
) -> Job[BlockViews]:
    """Blocks into slots that are lent to the caller."""
    checked = _chain(volume, chain)
    until_s, recompute = _until_s(volume, deadline_s), _recompute_s(volume, recompute_s)
    volume.check_arena(len(checked))
    sizes = checked_lengths(lengths, count=len(checked), block_bytes=volume.block_bytes)

    def result(outcome: Outcome, batch: Batch | None) -> BlockViews:
        found = GetResult(*outcome)
        if not isinstance(batch, GetViewsBatch):
            return BlockViews(found, Lent.nothing(len(checked)), lambda: None)
        lent = Lent(batch.memory, batch.offsets, sizes, batch.good, is_written=False)
        return BlockViews(found, lent, batch.let_go)

    return Job(
        "get",
        volume,
        len(checked),
        until_s,
        lambda target: GetViewsBatch(target, checked, sizes, until_s=until_s, recompute_s=recompute),
        result,
        lengths=sizes,
        recompute_s=recompute,
    )


def put_job(
    volume: Volume, chain: Chain, *, source: object, deadline_s: float, ack: Ack, ttl_s: float | None
) -> Job[PutResult]:
    """Blocks from caller memory."""
    checked = _chain(volume, chain)
    until_s, wanted, kept_s = _until_s(volume, deadline_s), checked_ack(ack), checked_ttl_s(ttl_s)
    blocks = _blocks(volume, source, what="source", count=len(checked), is_written=False)
    return Job(
        "put",
        volume,
        len(checked),
        until_s,
        lambda target: PutFromBatch(target, checked, blocks, until_s=until_s, ack=wanted, ttl_s=kept_s),
        lambda outcome, _: PutResult(*outcome),
        lengths=blocks.lengths,
        late=PutState.LATE,
        declined=PutState.DECLINED,
    )


def put_slots_job(
    volume: Volume,
    chain: Chain,
    lease: SlotLease,
    *,
    deadline_s: float,
    ack: Ack,
    ttl_s: float | None,
) -> Job[PutResult]:
    """Blocks from leased slots. The lease is over, whatever comes of the job."""
    checked = _chain(volume, chain)
    until_s, wanted, kept_s = _until_s(volume, deadline_s), checked_ack(ack), checked_ttl_s(ttl_s)
    if len(lease) != len(checked):
        raise UsageError(
            f"the lease has {len(lease)} slots and the chain {len(checked)} blocks: lease as many"
        )
    offsets, sizes = lease.taken_over()
    return Job(
        "put",
        volume,
        len(checked),
        until_s,
        lambda target: PutSlotsBatch(
            target, checked, offsets, sizes, until_s=until_s, ack=wanted, ttl_s=kept_s
        ),
        lambda outcome, _: PutResult(*outcome),
        never_begun=lambda: volume.arena.give(offsets),
        lengths=sizes,
        late=PutState.LATE,
        declined=PutState.DECLINED,
    )


def _chain(volume: Volume, chain: Chain) -> Chain:
    checked = checked_chain(chain, hash_bytes=volume.layout.hash_bytes)
    check_batch(len(checked), blocks_max=volume.settings.batch_blocks_max)
    return checked


def _blocks(volume: Volume, value: object, *, what: str, count: int, is_written: bool) -> CallerBlocks:
    return caller_blocks(
        value,
        volume.devices,
        what=what,
        count=count,
        block_bytes=volume.block_bytes,
        is_written=is_written,
    )


def _seconds(volume: Volume, name: str, value: float) -> float:
    return checked_seconds(name, value, longest_s=volume.settings.deadline_s_max)


def _until_s(volume: Volume, deadline_s: float) -> float:
    return time.monotonic() + _seconds(volume, "deadline_s", deadline_s)


def _recompute_s(volume: Volume, recompute_s: float | None) -> float:
    found = 0.0 if recompute_s is None else _seconds(volume, "recompute_s", recompute_s)
    if found < 0:
        raise UsageError(f"recompute_s is {recompute_s}: pass None when it is not known")
    return found
