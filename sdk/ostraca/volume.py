"""Volumes: what one does with blocks.

Every operation takes ``deadline_s``, the time it may take, and ends by it. It never raises for what the
fabric does or fails to do: each block has a state and a reason. It raises UsageError for arguments that can't
be meant, ClosedError after close or fork, and RefusedError when the agent says that the volume is gone or has
another layout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ostraca.core.checks import checked_lengths
from ostraca.hints import tell_session_ended
from ostraca.jobs import get_job, get_views_job, lookup_job, prefetch_job, put_job, put_slots_job
from ostraca.questions import ask_explanation
from ostraca.views import BlockViews, Lent, SlotLease
from ostraca_fabric.chain import Chain
from ostraca_fabric.errors import UsageError
from ostraca_fabric.outcome import Ack
from ostraca_fabric.volume import VolumeIdentity

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ostraca.arena import Arena
    from ostraca.client import Client
    from ostraca.devices import Devices
    from ostraca.meter import Meter
    from ostraca.results import GetResult, LookupResult, PrefetchResult, PutResult
    from ostraca.settings import ClientSettings
    from ostraca.shells.done import Ticket
    from ostraca_fabric.explain import BlockExplanation
    from ostraca_fabric.layout import Layout
    from ostraca_fabric.volume import VolumeRecord


class Volume:
    """A namespace of blocks.

    ``Client.volume`` makes it; it is usable from any thread and through reconnects.
    """

    def __init__(self, client: Client, record: VolumeRecord, *, create: bool, break_even_tokens: int) -> None:
        self.record = record
        self.break_even_tokens = break_even_tokens
        """Chains shorter than this are not put."""
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

        With *pin_s*, hits stay gettable that long, up to 10 s where the agent's settings say nothing else:
        none is evicted meanwhile. What can't be promised is a MISS then, even when it could be got now.
        """
        return self._client.run(lookup_job(self, chains, deadline_s=deadline_s, pin_s=pin_s))

    def prefetch(self, chain: Chain, *, deadline_s: float, at: str | None = None) -> PrefetchResult:
        """Ask the agent to bring blocks into its memory, so that a later get of them is faster.

        *at* is the id of the agent that is to have them: that of the host where they will be wanted. Without
        it, it is this client's own. One that is not there, has no DRAM cache or does not answer in time
        leaves the blocks DECLINED or LATE.
        """
        return self._client.run(prefetch_job(self, chain, deadline_s=deadline_s, at=at))

    def get(
        self, chain: Chain, *, into: object, deadline_s: float, recompute_s: float | None = None
    ) -> GetResult:
        """Bring blocks into caller memory, one block of *into* per block of the chain.

        *into* is what ``ostraca.parts`` describes, or CUDA tensors (``ostraca.device_blocks``).

        A block's memory is written if and only if the block is a HIT: its bytes were verified first.
        *recompute_s* is how long recomputing all of it would take, each block its part. What a fabric expects
        to be slower with, by the queues and speeds it has measured lately, it declines at once (TOO_SLOW). A
        batch that the arena or the agent can't take at once is moved in parts within the same deadline.
        """
        return self._client.run(
            get_job(self, chain, into=into, deadline_s=deadline_s, recompute_s=recompute_s)
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
        return self._client.run(
            get_views_job(self, chain, lengths=lengths, deadline_s=deadline_s, recompute_s=recompute_s)
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
        """Store blocks from caller memory, which is the caller's again when this returns.

        Returns when every block is staged, or committed with ``Ack.COMMITTED``, or declined. Blocks that are
        there already cost no write and are EXISTS.

        *ttl_s* is for how long blocks are worth keeping: after that, or up to an eighth later, they are not
        carried forward when their part of flash is used again, however often they are read. Until then they
        can be got; nothing is removed early. It holds for blocks that this put stores, not for those that
        EXIST, and is forgotten when their owner starts anew.
        """
        return self._client.run(
            put_job(self, chain, source=source, deadline_s=deadline_s, ack=ack, ttl_s=ttl_s)
        )

    def end_session(self, chains: Chain | Sequence[Chain]) -> None:
        """Say that whoever used these blocks will not come back for them.

        That they were read before is no longer a reason to keep them; they can be got until their part of
        flash is used again. A read from now on counts anew, whoever reads, so that beginnings which others
        share stay. Name only what is the session's own, as in ``chain[shared:]``, where others read the
        beginning seldom.

        A hint: it is sent and not answered, never waits, and is lost when no agent is in reach. All shells
        call it as it is. Raises UsageError, and ClosedError after close.
        """
        tell_session_ended(self._client, self, chains)

    def put_slots(
        self,
        chain: Chain,
        lease: SlotLease,
        *,
        deadline_s: float,
        ack: Ack = Ack.STAGED,
        ttl_s: float | None = None,
    ) -> PutResult:
        """Store blocks that were written into leased slots.

        The lease is over when this is called, whatever comes of the put.
        """
        with self._client.running():
            return self._client.run(
                put_slots_job(self, chain, lease, deadline_s=deadline_s, ack=ack, ttl_s=ttl_s)
            )

    def slots(self, count: int, *, lengths: int | Sequence[int]) -> SlotLease:
        """Lend *count* slots of the arena to write blocks of these *lengths* into, for ``put_slots``.

        Raises UsageError when the arena is too small for so many, or too full now.
        """
        self.check_arena(count)
        sizes = checked_lengths(lengths, count=count, block_bytes=self.block_bytes)
        arena = self.arena
        with self._client.running():
            memory = arena.array
            with arena.changed:
                offsets = arena.ledger.take(count, self.record.slot_bytes)
        if offsets is None:
            raise UsageError(f"{count} slots are not free now: release views or leases, or raise arena_bytes")
        return SlotLease(
            Lent(memory, offsets, sizes, np.ones(count, np.bool_), is_written=True),
            lambda: arena.give(offsets),
        )

    def explain(self, chain: Chain, *, timeout_s: float = 5.0) -> BlockExplanation:
        """Ask what agents know of one block, and what has happened to it: why was it a miss?

        *chain* names one block, as ``chain[4:5]``; ``ostraca_fabric.explain.verdict`` puts the answer into
        one sentence. For people, not for the data path. Raises RefusedError, and ConnectError when no agent
        answers in time.
        """
        return ask_explanation(self._client, self, chain, timeout_s=timeout_s)

    # Without waiting. What becomes of a ticket, ``Client.take_done`` tells.

    def submit_lookup(
        self, chains: Chain | Sequence[Chain], *, deadline_s: float, pin_s: float = 0.0
    ) -> Ticket:
        """Begin a ``lookup``."""
        return self._client.submit(lookup_job(self, chains, deadline_s=deadline_s, pin_s=pin_s))

    def submit_prefetch(self, chain: Chain, *, deadline_s: float, at: str | None = None) -> Ticket:
        """Begin a ``prefetch``."""
        return self._client.submit(prefetch_job(self, chain, deadline_s=deadline_s, at=at))

    def submit_get(
        self, chain: Chain, *, into: object, deadline_s: float, recompute_s: float | None = None
    ) -> Ticket:
        """Begin a ``get``. *into* is the fabric's to write until the ticket is done."""
        return self._client.submit(
            get_job(self, chain, into=into, deadline_s=deadline_s, recompute_s=recompute_s)
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
        """Begin a ``put``. *source* must not change until the ticket is done."""
        return self._client.submit(
            put_job(self, chain, source=source, deadline_s=deadline_s, ack=ack, ttl_s=ttl_s)
        )

    def submit_get_views(
        self,
        chain: Chain,
        *,
        lengths: int | Sequence[int],
        deadline_s: float,
        recompute_s: float | None = None,
    ) -> Ticket:
        """Begin a ``get_views``. Whoever takes what is done releases the views."""
        return self._client.submit(
            get_views_job(self, chain, lengths=lengths, deadline_s=deadline_s, recompute_s=recompute_s)
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
        """Begin a ``put_slots``. The lease is over."""
        with self._client.running():
            job = put_slots_job(self, chain, lease, deadline_s=deadline_s, ack=ack, ttl_s=ttl_s)
        return self._client.submit(job)

    # For the SDK's own modules.

    @property
    def key(self) -> tuple[str, bytes, int, int]:
        """What a session knows it by."""
        return self.name, self.identity.layout_digest, self.block_bytes, self.break_even_tokens

    @property
    def settings(self) -> ClientSettings:
        """The client's settings."""
        return self._client.settings

    @property
    def meter(self) -> Meter:
        """The client's meter."""
        return self._client.meter

    @property
    def devices(self) -> Devices:
        """The client's devices."""
        return self._client.devices

    @property
    def arena(self) -> Arena:
        """The client's arena."""
        return self._client.arena

    def check_arena(self, blocks: int) -> None:
        """Refuse what the arena can't hold at one time. Raises UsageError."""
        fitting = self.arena.slots_of(self.record.slot_bytes)
        if not 0 <= blocks <= fitting:
            raise UsageError(
                f"{blocks} blocks at one time, and the arena holds {fitting} of {self.record.slot_bytes} "
                "bytes: take fewer, or raise "
                "arena_bytes in the settings"
            )
