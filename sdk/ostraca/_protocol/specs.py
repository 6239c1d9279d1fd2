"""Specs: the checked arguments of operations, shared by all front ends, jobs and batches.

A new parameter of an operation is a field here, beside its check and its place in the message. All front ends
(blocking, ticket, asyncio) build the same spec. Creation raises UsageError for invalid arguments, before any
message is sent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ostraca.settings import ClientSettings
from ostraca_fabric.errors import UsageError
from ostraca_fabric.model.chain import Chain, Span
from ostraca_fabric.model.ids import checked_name
from ostraca_fabric.model.limits import described, flag, number
from ostraca_fabric.model.outcome import Ack, BlockState, PutState
from ostraca_fabric.model.volume import VolumeIdentity, VolumeRecord
from ostraca_fabric.wire import codec
from ostraca_fabric.wire.messages import Get, Lookup, OpenVolume, Prefetch, Put

VolumeKey = tuple[str, bytes, int, int]
"""Name, layout digest, block bytes and break-even tokens: identifies an open volume in a session."""


class VolumeSpec:
    """Description of an opened volume, and the limits of its operations."""

    def __init__(
        self, record: VolumeRecord, settings: ClientSettings, *, create: bool, break_even_tokens: int
    ) -> None:
        self.record = record
        self.settings = settings
        self.create = create
        """Whether to create the volume again if a later connection's agent does not know it."""

        self.break_even_tokens = break_even_tokens
        """Chains shorter than this are not stored."""

        self.hash_bytes = record.layout.hash_bytes
        self.slot_bytes = record.slot_bytes
        self.identity = VolumeIdentity(record.tenant, record.name, record.layout.digest())
        self.key: VolumeKey = (
            record.name,
            self.identity.layout_digest,
            record.block_bytes,
            break_even_tokens,
        )

    def message(self, request: int, *, may_create: bool = True) -> OpenVolume:
        """Build the message to open the volume, and to create it if the caller wants that."""
        record, creates = self.record, self.create and may_create
        return OpenVolume(
            request, record.name, record.layout, record.block_bytes, creates, self.break_even_tokens
        )

    def lengths(self, lengths: int | Sequence[int], count: int) -> NDArray[np.uint32]:
        """Return a length for each of *count* blocks. Raises UsageError."""
        try:
            listed = np.asarray(lengths)
        except Exception as error:
            raise UsageError(f"lengths can't be read as numbers: {error}") from error
        if not listed.ndim:
            listed = np.full(count, listed)
        if listed.shape != (count,):
            found = len(listed) if listed.ndim == 1 else f"an array of shape {listed.shape} as"
            raise UsageError(
                f"{found} lengths for {count} blocks: pass a length for each block, or a single number"
            )
        if count and listed.dtype.kind not in "iu":
            raise UsageError(f"lengths are {described(lengths)}: pass whole numbers")
        largest = self.record.block_bytes
        if count and not 1 <= listed.min() <= listed.max() <= largest:
            raise UsageError(f"blocks of this volume have 1 to {largest} bytes: pass numbers in that range")
        return listed.astype(np.uint32)


@dataclass(kw_only=True, eq=False)
class OperationSpec:
    """Base of all specs: blocks of a volume, and the time limit."""

    volume: VolumeSpec
    deadline_s: float

    parts: tuple[Chain, ...] = field(init=False)
    """Chains of all blocks, in order."""

    operation: ClassVar[str]
    """``lookup``, ``get``, ``put`` or ``prefetch``."""

    states: ClassVar[type[BlockState | PutState]] = BlockState

    def __post_init__(self) -> None:
        """Check the limits."""
        check_batch(self.blocks, blocks_max=self.volume.settings.batch_blocks_max)
        self.deadline_s = self._seconds("deadline_s", self.deadline_s)

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return sum(map(len, self.parts))

    def _seconds(self, name: str, value: object) -> float:
        return checked_seconds(name, value, longest_s=self.volume.settings.deadline_s_max)


@dataclass(kw_only=True, eq=False)
class LookupSpec(OperationSpec):
    """Lookup of the blocks available now."""

    operation = "lookup"

    chains: Chain | Sequence[Chain]
    pin_s: float = 0.0
    is_counted: bool = True

    def __post_init__(self) -> None:
        """Check all arguments."""
        self.is_counted = flag("is_counted", self.is_counted)
        self.parts = checked_chains(self.chains, hash_bytes=self.volume.hash_bytes)
        super().__post_init__()
        self.pin_s = self._seconds("pin_s", self.pin_s)
        if self.pin_s < 0:
            raise UsageError(
                f"pin_s is {self.pin_s}: pass 0 for no pin, or how long hits should stay gettable"
            )

    def message(self, request: int, handle: int, left_s: float, spans: tuple[Span, ...]) -> Lookup:
        """Build the message for some of the blocks."""
        return Lookup(request, handle, left_s, spans, self.pin_s, self.is_counted)


@dataclass(kw_only=True, eq=False)
class ChainSpec(OperationSpec):
    """Base of specs of a single chain."""

    chain: Chain

    def __post_init__(self) -> None:
        """Check all arguments."""
        self.parts = (checked_chain(self.chain, hash_bytes=self.volume.hash_bytes),)
        super().__post_init__()


@dataclass(kw_only=True, eq=False)
class PrefetchSpec(ChainSpec):
    """Load of blocks into an agent's memory."""

    operation = "prefetch"

    at: str | None = None
    """Id of the agent to use, None for the connected agent."""

    def __post_init__(self) -> None:
        """Check all arguments."""
        super().__post_init__()
        if self.at is None:
            return
        try:
            self.at = checked_name("at", self.at)
        except UsageError as error:
            raise UsageError(
                f"at is {described(self.at)}: pass the id of an agent (Client.agent, or agents in "
                "Client.status()), or None for the connected agent"
            ) from error

    def message(self, request: int, handle: int, left_s: float, spans: tuple[Span, ...]) -> Prefetch:
        """Build the message for some of the blocks."""
        return Prefetch(request, handle, left_s, spans, self.at or "")


@dataclass(kw_only=True, eq=False)
class GetSpec(ChainSpec):
    """Load of blocks into slots, with verification."""

    operation = "get"

    recompute_s: float | None = None
    """Time for recomputing all blocks; None or 0 if unknown."""

    def __post_init__(self) -> None:
        """Check all arguments."""
        super().__post_init__()
        if self.recompute_s is None:
            return
        self.recompute_s = self._seconds("recompute_s", self.recompute_s)
        if self.recompute_s < 0:
            raise UsageError(f"recompute_s is {self.recompute_s}: pass None if unknown")

    def message(  # noqa: PLR0913 (the columns of the message)
        self,
        request: int,
        handle: int,
        left_s: float,
        spans: tuple[Span, ...],
        *,
        lengths: NDArray[np.uint32],
        slots: NDArray[np.int64],
        queued: int,
        is_again: bool = False,
        addresses: bytes = b"",
        in_memory: bool = False,
    ) -> Get:
        """Build the message for some of the blocks, with *slots* or *addresses* as their destinations.

        *queued* blocks, these included, would be recomputed first. *is_again*: this worker has failed to read
        the blocks itself. *in_memory*: as in ``Get``.
        """
        return Get(
            request,
            handle,
            left_s,
            spans,
            lengths.astype(codec.U32).tobytes(),
            slots.astype(codec.U64).tobytes(),
            self.volume.slot_bytes,
            (self.recompute_s or 0.0) * queued / len(self.chain),
            is_again,
            addresses,
            in_memory,
        )


@dataclass(kw_only=True, eq=False)
class PutSpec(ChainSpec):
    """Store of blocks from slots."""

    operation = "put"
    states = PutState

    ack: Ack = Ack.STAGED
    ttl_s: float | None = None
    """Time for which the blocks are worth keeping, None if unknown."""

    def __post_init__(self) -> None:
        """Check all arguments."""
        super().__post_init__()
        given: object = self.ack
        try:
            self.ack = Ack(None if isinstance(given, bool) else given)  # type: ignore[arg-type]  # checked here
        except Exception as error:
            raise UsageError(f"ack is {described(self.ack)}: pass Ack.STAGED or Ack.COMMITTED") from error
        if self.ttl_s is None:
            return
        self.ttl_s = number("ttl_s", self.ttl_s)
        if not 0 < self.ttl_s < math.inf:
            raise UsageError(
                f"ttl_s is {self.ttl_s}: pass for how many seconds the blocks are worth keeping, above 0, or "
                "None if unknown"
            )

    def message(
        self,
        request: int,
        handle: int,
        left_s: float,
        spans: tuple[Span, ...],
        *,
        lengths: NDArray[np.uint32],
        slots: NDArray[np.int64],
        tags: bytes,
        addresses: bytes = b"",
    ) -> Put:
        """Build the message for some of the blocks, with *slots* or *addresses* as their sources."""
        return Put(
            request,
            handle,
            left_s,
            int(self.ack),
            spans,
            lengths.astype(codec.U32).tobytes(),
            tags,
            slots.astype(codec.U64).tobytes(),
            self.volume.slot_bytes,
            self.ttl_s or 0.0,
            addresses,
        )


def checked_seconds(name: str, value: object, *, longest_s: float) -> float:
    """Return a finite time span of at most *longest_s*.

    Zero and negative values are allowed: the deadline has passed already. Raises UsageError otherwise.
    """
    seconds = value if type(value) is float else number(name, value)
    if not math.isfinite(seconds):
        raise UsageError(f"{name} is {seconds}: pass a finite number of seconds")
    if seconds > longest_s:
        raise UsageError(
            f"{name} is {seconds:g} s and the longest allowed is {longest_s:g} s (deadline_s_max in the "
            "settings): pass seconds, not milliseconds"
        )
    return seconds


def checked_chain(chain: object, *, hash_bytes: int) -> Chain:
    """Return a chain with hashes of the volume's length. Raises UsageError."""
    if not isinstance(chain, Chain):
        raise UsageError(
            f"a {type(chain).__name__} was passed as chain: build a chain with volume.chain(engine_hashes)"
        )
    if chain.hash_bytes != hash_bytes:
        raise UsageError(
            f"the chain has hashes of {chain.hash_bytes} bytes and the volume's layout says {hash_bytes}: "
            "build the chain with the volume's own chain()"
        )
    return chain


def checked_chains(chains: object, *, hash_bytes: int) -> tuple[Chain, ...]:
    """Return a chain, or a list of chains, as a tuple. Raises UsageError."""
    listed: Sequence[object] = chains if isinstance(chains, (list, tuple)) else (chains,)
    return tuple(checked_chain(chain, hash_bytes=hash_bytes) for chain in listed)


def check_batch(blocks: int, *, blocks_max: int) -> None:
    """Check that a batch is within the limit. Raises UsageError."""
    if blocks > blocks_max:
        raise UsageError(
            f"a batch of {blocks} blocks, and batch_blocks_max in the client's settings is {blocks_max}: "
            "slice the chain, chain[first:last], and make several calls"
        )


def check_sizes(argument: str, lengths: NDArray[np.int64] | NDArray[np.uint32], block_bytes: int) -> None:
    """Check that no block is larger than the volume's limit. Raises UsageError."""
    if len(lengths) and lengths[worst := int(lengths.argmax())] > block_bytes:
        raise UsageError(
            f"{argument}[{worst}] has {lengths[worst]} bytes, and blocks of this volume at most "
            f"{block_bytes}: split the block, or open a volume with a larger block_bytes"
        )


def check_count(found: int, count: int) -> None:
    """Check for a block per engine hash of the chain. Raises UsageError."""
    if found != count:
        raise UsageError(f"has {found} blocks and the chain {count}: pass one block per engine hash")
