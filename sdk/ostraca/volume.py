"""Volumes: operations on blocks.

Every operation takes ``deadline_s``, its time limit, and ends by then. Failures of the fabric never raise:
each block has a state and a reason. Errors are UsageError for invalid arguments, and ClosedError after
``close`` or a fork. RefusedError means: the agent reports the volume as gone, or with another layout.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import numpy as np

from ostraca._memory.views import BlockViews, SlotLease, SlotLoan
from ostraca._operations.completions import Ticket
from ostraca._operations.get import GetIntoJob, GetViewsJob
from ostraca._operations.lookup import LookupJob, PrefetchJob
from ostraca._operations.put import PutFromJob, PutSlotsJob
from ostraca._operations.runner import JobRunner, query_explanation, send_session_end
from ostraca._protocol.specs import GetSpec, LookupSpec, PrefetchSpec, PutSpec, VolumeSpec
from ostraca.results import GetResult, LookupResult, PrefetchResult, PutResult
from ostraca_fabric.errors import UsageError
from ostraca_fabric.model.chain import Chain
from ostraca_fabric.model.ids import TenantId
from ostraca_fabric.model.limits import whole
from ostraca_fabric.model.outcome import Ack
from ostraca_fabric.model.volume import Layout
from ostraca_fabric.telemetry.explain import BlockExplanation


class Volume:
    """Namespace of blocks.

    ``Client.volume`` opens a volume. Usable from any thread, and across reconnects.
    """

    def __init__(self, runner: JobRunner, spec: VolumeSpec) -> None:
        """Present the volume to users; for ``Client.volume``."""
        self._runner = runner
        self._runtime = runner.runtime
        self._spec = spec

    @property
    def name(self) -> str:
        """Name of the volume."""
        return self._spec.record.name

    @property
    def layout(self) -> Layout:
        """Meaning of the blocks' bytes."""
        return self._spec.record.layout

    @property
    def block_bytes(self) -> int:
        """Size of the largest block."""
        return self._spec.record.block_bytes

    @property
    def tenant(self) -> TenantId:
        """Owner of the volume."""
        return self._spec.record.tenant

    @property
    def break_even_tokens(self) -> int:
        """Length below which chains are not stored."""
        return self._spec.break_even_tokens

    def __repr__(self) -> str:
        """Show tenant, name, model and block size."""
        name = f"{self.tenant}/{self.name}"
        return f"<Volume {name}: {self.layout.model}, blocks up to {self.block_bytes} bytes>"

    def chain(
        self, engine_hashes: Iterable[bytes], *, rank: int = 0, group: int = 0, is_chained: bool = True
    ) -> Chain:
        """Build a chain of engine hashes, from the prefix's root on.

        Slice the chain to name some of its blocks. With *is_chained* False the blocks have no order, and each
        block is placed by itself. Raises UsageError for a hash of another length than the layout's, and for a
        rank or KV group outside of the layout.
        """
        chain = Chain.of(
            engine_hashes, hash_bytes=self.layout.hash_bytes, rank=rank, group=group, is_chained=is_chained
        )
        self.layout.check_part(rank=chain.rank, group=chain.group)
        return chain

    def lookup(
        self,
        chains: Chain | Sequence[Chain],
        *,
        deadline_s: float,
        pin_s: float = 0.0,
        is_counted: bool = True,
    ) -> LookupResult:
        """Ask for the blocks available now.

        With *pin_s*, hits stay available for *pin_s* seconds: no hit is evicted meanwhile. The agent's
        settings limit *pin_s*, by default to 10 s. A block without such a promise is then a MISS, even if
        available now.

        With *is_counted* False, the lookup is no read of the blocks found, and part of no statistics: for
        programs that watch blocks.
        """
        return self._runner.run_brief(
            LookupJob(
                self._runtime,
                LookupSpec(
                    volume=self._spec,
                    chains=chains,
                    deadline_s=deadline_s,
                    pin_s=pin_s,
                    is_counted=is_counted,
                ),
            )
        )

    def prefetch(self, chain: Chain, *, deadline_s: float, at: str | None = None) -> PrefetchResult:
        """Ask an agent to load blocks into its memory, for faster gets later.

        *at* is the id of the agent on the host of the later gets; without *at*, this client's own agent loads
        the blocks. If the agent is missing, has no DRAM cache or does not answer in time, the blocks are
        DECLINED or LATE.
        """
        return self._runner.run(
            PrefetchJob(
                self._runtime, PrefetchSpec(volume=self._spec, chain=chain, deadline_s=deadline_s, at=at)
            )
        )

    def get(
        self, chain: Chain, *, into: object, deadline_s: float, recompute_s: float | None = None
    ) -> GetResult:
        """Load blocks into caller memory, one block of *into* per chain block.

        ``ostraca._memory.host_blocks`` describes *into*; CUDA tensors (``ostraca._memory.device_blocks``) are
        accepted too.

        A block's memory is written if and only if the block is a HIT, after verification of the bytes. In
        rows of a region (``Client.register``), blocks are verified in place: other rows are then undefined.
        By consent of the caller, some of those may be withheld for a while (``GetResult.withheld``).

        *recompute_s* is the time for recomputing the whole chain, in equal parts per block. The fabric
        estimates the get's time from recently measured queues and speeds, and declines slower blocks at once
        (TOO_SLOW). Blocks that this process copies or reads itself (``direct_memory`` and ``direct_drives``
        of the settings) are not declined. None and 0 stand for an unknown time. A batch beyond the capacity
        of the arena or the agent moves in parts within the same deadline.
        """
        return self._runner.run_brief(
            GetIntoJob(
                self._runtime,
                GetSpec(volume=self._spec, chain=chain, deadline_s=deadline_s, recompute_s=recompute_s),
                into,
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
        """Load blocks into the arena, and lend the verified bytes without a copy.

        *lengths* is the bytes of each block, or a single number for all. The blocks must fit the arena
        together; slots are held until the result is released.
        """
        return self._runner.run(
            GetViewsJob(
                self._runtime,
                GetSpec(volume=self._spec, chain=chain, deadline_s=deadline_s, recompute_s=recompute_s),
                lengths,
            )
        )

    def put(
        self,
        chain: Chain,
        *,
        source: object,
        deadline_s: float,
        ack: Ack = Ack.STAGED,
        ttl_s: float | None = None,
    ) -> PutResult:
        """Store blocks from caller memory.

        The caller may reuse the memory after the return. The call returns when every block is declined or
        staged (committed, with ``Ack.COMMITTED``). Blocks already stored cost no write and are EXISTS.

        On full flash, a put waits for space until *deadline_s*; blocks without space by then are DECLINED
        (BUSY). A fabric unable to free space by then declines at once (NO_SPACE).

        *ttl_s* is the time for which the blocks are worth keeping. After *ttl_s*, or up to an eighth later,
        the blocks are no longer reinserted when their segment is evicted, however often they are read. Until
        the eviction the blocks stay available: no block is removed early. *ttl_s* applies to blocks stored by
        this put, not to blocks that EXIST, and is forgotten when the shard owner restarts.
        """
        return self._runner.run_brief(
            PutFromJob(
                self._runtime,
                PutSpec(volume=self._spec, chain=chain, deadline_s=deadline_s, ack=ack, ttl_s=ttl_s),
                source,
            )
        )

    def end_session(self, chains: Chain | Sequence[Chain]) -> None:
        """Tell the agent about the end of the session that used these blocks.

        Earlier reads are no longer a reason to keep the blocks; the blocks stay available until their segment
        is evicted. Later reads count anew, from any reader, so shared prefixes stay. If other sessions seldom
        read the prefix, name only the session's own blocks, as in ``chain[shared:]``.

        The call is a hint: it never waits, has no answer, and is lost if no agent is connected. All front
        ends call this method as it is. Raises UsageError, and ClosedError after ``close``.
        """
        send_session_end(self._runner, self._spec, chains)

    def put_slots(
        self,
        chain: Chain,
        lease: SlotLease,
        *,
        deadline_s: float,
        ack: Ack = Ack.STAGED,
        ttl_s: float | None = None,
    ) -> PutResult:
        """Store blocks written into slots that this client has leased for blocks of this size.

        The call ends the lease, whatever the outcome of the put.
        """
        return self._runner.run(
            PutSlotsJob(
                self._runtime,
                PutSpec(volume=self._spec, chain=chain, deadline_s=deadline_s, ack=ack, ttl_s=ttl_s),
                lease,
            )
        )

    def slots(self, count: int, *, lengths: int | Sequence[int]) -> SlotLease:
        """Lend *count* arena slots for blocks of these *lengths*.

        The caller writes the blocks and calls ``put_slots``. Raises UsageError if the arena is too small, or
        too full now.
        """
        count = whole("count", count, least=0, most=sys.maxsize)
        slot_bytes = self._spec.slot_bytes
        self._runtime.check_room(count, slot_bytes)
        sizes = self._spec.lengths(lengths, count)
        arena, holds = self._runtime.arena, self._runtime.holds

        def take() -> SlotLease:
            with arena.changed:
                offsets = arena.ledger.take(count, slot_bytes)
            if offsets is None:
                raise UsageError(
                    f"{count} slots are not free now: release views or leases, or raise arena_bytes"
                )
            hold = holds.new(lambda: arena.give(offsets))
            loan = SlotLoan(arena.array, offsets, sizes, np.ones(count, np.bool_), hold, is_written=True)
            return SlotLease(loan, arena, slot_bytes)

        return self._runner.do(take)

    def explain(self, chain: Chain, *, timeout_s: float = 5.0) -> BlockExplanation:
        """Ask agents for the state and history of one block, as after a miss.

        *chain* names one block, as in ``chain[4:5]``. ``ostraca_fabric.telemetry.explain.verdict`` condenses
        the answer into one sentence. For people, not for the data path. Raises RefusedError, and ConnectError
        if no agent answers in time.
        """
        return query_explanation(self._runner, self._spec, chain, timeout_s=timeout_s)

    # Without waiting: ``Client.take_completions`` returns the results of tickets.

    def submit_lookup(
        self,
        chains: Chain | Sequence[Chain],
        *,
        deadline_s: float,
        pin_s: float = 0.0,
        is_counted: bool = True,
    ) -> Ticket:
        """Start a ``lookup``."""
        return self._runner.submit(
            LookupJob(
                self._runtime,
                LookupSpec(
                    volume=self._spec,
                    chains=chains,
                    deadline_s=deadline_s,
                    pin_s=pin_s,
                    is_counted=is_counted,
                ),
            )
        )

    def submit_prefetch(self, chain: Chain, *, deadline_s: float, at: str | None = None) -> Ticket:
        """Start a ``prefetch``."""
        return self._runner.submit(
            PrefetchJob(
                self._runtime, PrefetchSpec(volume=self._spec, chain=chain, deadline_s=deadline_s, at=at)
            )
        )

    def submit_get(
        self, chain: Chain, *, into: object, deadline_s: float, recompute_s: float | None = None
    ) -> Ticket:
        """Start a ``get``; the fabric may write *into* until the ticket is done."""
        return self._runner.submit(
            GetIntoJob(
                self._runtime,
                GetSpec(volume=self._spec, chain=chain, deadline_s=deadline_s, recompute_s=recompute_s),
                into,
            )
        )

    def submit_put(
        self,
        chain: Chain,
        *,
        source: object,
        deadline_s: float,
        ack: Ack = Ack.STAGED,
        ttl_s: float | None = None,
    ) -> Ticket:
        """Start a ``put``; *source* must not change until the ticket is done."""
        return self._runner.submit(
            PutFromJob(
                self._runtime,
                PutSpec(volume=self._spec, chain=chain, deadline_s=deadline_s, ack=ack, ttl_s=ttl_s),
                source,
            )
        )

    def submit_get_views(
        self,
        chain: Chain,
        *,
        lengths: int | Sequence[int],
        deadline_s: float,
        recompute_s: float | None = None,
    ) -> Ticket:
        """Start a ``get_views``; the receiver of the result releases the views."""
        return self._runner.submit(
            GetViewsJob(
                self._runtime,
                GetSpec(volume=self._spec, chain=chain, deadline_s=deadline_s, recompute_s=recompute_s),
                lengths,
            )
        )

    def submit_put_slots(
        self,
        chain: Chain,
        lease: SlotLease,
        *,
        deadline_s: float,
        ack: Ack = Ack.STAGED,
        ttl_s: float | None = None,
    ) -> Ticket:
        """Start a ``put_slots``; the lease is over."""
        return self._runner.submit(
            PutSlotsJob(
                self._runtime,
                PutSpec(volume=self._spec, chain=chain, deadline_s=deadline_s, ack=ack, ttl_s=ttl_s),
                lease,
            )
        )
