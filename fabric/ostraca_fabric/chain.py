"""Chains: the engine hashes of one prompt prefix, from the root on, and the stripe units they are placed by.

A *stripe unit* is up to 32 consecutive blocks of a chain, counted from its root; all of them are placed
together, by the unit's first engine hash. A prefix reader stops at its first hole, so blocks that are read
together are lost together. A slice of a chain keeps its root: a block's placement never depends on how much
of the chain a request names. Nor does its *depth*, how many blocks of the chain come before it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from ostraca_fabric.errors import UsageError
from ostraca_fabric.layout import HASH_BYTES_MAX, HASH_BYTES_MIN

if TYPE_CHECKING:
    from collections.abc import Iterable

STRIPE_UNIT_BLOCKS = 32
RANK_MAX = (1 << 32) - 1
DEPTH_UNKNOWN = (1 << 32) - 1
"""The depth of a block of which nobody knows what comes before it."""


class Span(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Some blocks of one chain, as a request names them; it travels as it is.

    ``hashes`` holds the engine hashes one after another; ``units`` holds one placement hash for each stripe
    unit touched and ``unit_blocks`` how many of the blocks, in order, each unit covers. Columns that
    contradict each other raise UsageError, which msgspec turns into a ValidationError where the span came off
    the wire.

    ``depth`` is the first block's, each further one lies one deeper; and ``chain_blocks`` is how long the
    chain is from its root, as far as the writer knows. Blocks without order have DEPTH_UNKNOWN and 0.
    """

    hashes: bytes
    hash_bytes: int
    units: bytes
    unit_blocks: tuple[int, ...]
    rank: int
    group: int
    depth: int = DEPTH_UNKNOWN
    chain_blocks: int = 0

    def __post_init__(self) -> None:
        """Refuse columns that contradict each other: nobody later meets a block left over."""
        blocks, rest = divmod(len(self.hashes), _checked_hash_bytes(self.hash_bytes))
        units = len(self.unit_blocks)
        if rest or len(self.units) != units * self.hash_bytes or sum(self.unit_blocks) != blocks:
            message = (
                f"a span of {len(self.hashes)} bytes of hashes and {len(self.units)} of units, "
                f"{self.hash_bytes} each, whose {units} units cover {sum(self.unit_blocks)} blocks"
            )
            raise UsageError(message)
        if units and not 1 <= min(self.unit_blocks) <= max(self.unit_blocks) <= STRIPE_UNIT_BLOCKS:
            message = f"a stripe unit has 1 to {STRIPE_UNIT_BLOCKS} blocks"
            raise UsageError(message)
        _check_rank_and_group(self.rank, self.group)
        end = self.depth + blocks if self.depth != DEPTH_UNKNOWN else 0
        if not (0 <= self.depth <= DEPTH_UNKNOWN and end <= self.chain_blocks <= DEPTH_UNKNOWN):
            message = f"{blocks} blocks from depth {self.depth} on of a chain of {self.chain_blocks}"
            raise UsageError(message)

    def __len__(self) -> int:
        """Count the blocks."""
        return len(self.hashes) // self.hash_bytes


@dataclass(frozen=True, slots=True)
class Chain:
    """Blocks ``start`` to ``stop`` of one prefix, for one rank and KV group. Slice it: ``chain[8:40]``."""

    hashes: bytes
    """All engine hashes from the root, joined; or from the stripe unit that ``before`` tells."""

    hash_bytes: int
    rank: int = 0
    group: int = 0
    start: int = 0
    stop: int = 0
    is_chained: bool = True
    """False when the blocks have no order: each is then placed by its own hash."""

    before: int = 0
    """Blocks of the prefix that come before ``hashes``, whose own hashes are not known here: whole stripe
    units."""

    @classmethod
    def of(
        cls,
        engine_hashes: Iterable[bytes],
        *,
        hash_bytes: int,
        rank: int = 0,
        group: int = 0,
        is_chained: bool = True,
    ) -> Chain:
        """Make a chain of engine hashes, from the root on.

        Raises UsageError when a hash is not bytes or has another length than the volume's layout says, or
        when rank or group is out of range.
        """
        _checked_hash_bytes(hash_bytes)
        _check_rank_and_group(rank, group)
        try:
            # By way of memoryview, because bytes(32) is 32 zeros: integer hashes must not become one block.
            listed = [bytes(memoryview(engine_hash)) for engine_hash in engine_hashes]
        except TypeError as error:
            message = f"engine hashes are bytes: {error}"
            raise UsageError(message) from error
        for position, engine_hash in enumerate(listed):
            if len(engine_hash) != hash_bytes:
                message = (
                    f"engine hash {position} has {len(engine_hash)} bytes, and the volume's layout "
                    f"says {hash_bytes}: pass the whole block hash, or open the volume with another layout"
                )
                raise UsageError(message)
        return cls(b"".join(listed), hash_bytes, rank, group, 0, len(listed), is_chained)

    def __len__(self) -> int:
        """Count the blocks of this slice."""
        return self.stop - self.start

    def __getitem__(self, part: slice) -> Chain:
        """Return consecutive blocks of this slice; placement stays that of the whole chain."""
        if not isinstance(part, slice) or part.step not in (None, 1):  # type: ignore[redundant-expr]  # untyped callers
            message = "slice a chain as chain[first:last], without a step"
            raise UsageError(message)
        first, last, _ = part.indices(len(self))
        last = max(first, last)
        if last - first == len(self):
            return self
        return replace(self, start=self.start + first, stop=self.start + last)

    def span(self) -> Span:
        """Return what a request says about these blocks."""
        width = self.hash_bytes
        own = self.hashes[self.start * width : self.stop * width]
        if not self.is_chained:
            return Span(own, width, own, (1,) * len(self), self.rank, self.group)
        roots = range(self.start - self.start % STRIPE_UNIT_BLOCKS, self.stop, STRIPE_UNIT_BLOCKS)
        if not len(self):
            roots = range(0)
        units = b"".join([self.hashes[root * width : (root + 1) * width] for root in roots])
        counts = [STRIPE_UNIT_BLOCKS] * len(roots)
        if counts:
            counts[0] -= self.start - roots[0]
            counts[-1] -= roots[-1] + STRIPE_UNIT_BLOCKS - self.stop
        depth, chain_blocks = self.before + self.start, self.before + len(self.hashes) // width
        return Span(own, width, units, tuple(counts), self.rank, self.group, depth, chain_blocks)


def _checked_hash_bytes(hash_bytes: int) -> int:
    if not HASH_BYTES_MIN <= hash_bytes <= HASH_BYTES_MAX:
        message = f"hash_bytes is {hash_bytes}: engine hashes have {HASH_BYTES_MIN} to {HASH_BYTES_MAX} bytes"
        raise UsageError(message)
    return hash_bytes


def _check_rank_and_group(rank: int, group: int) -> None:
    if not (0 <= rank <= RANK_MAX and 0 <= group <= RANK_MAX):
        message = f"rank {rank} or group {group} is not in 0 to {RANK_MAX}"
        raise UsageError(message)
