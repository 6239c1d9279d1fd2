"""Chains: engine hashes of one prompt prefix from the root on, and their stripe units.

A *stripe unit* is up to 32 consecutive blocks of a chain, counted from its root. All blocks of a unit are
placed together, by the unit's first engine hash: a prefix reader stops at the first hole, so blocks read
together should be lost together. A slice of a chain keeps its root, so a block's placement never depends on
the length of the chain in a request. Neither does the *depth*, the number of earlier blocks in the chain.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from ostraca_fabric.errors import UsageError
from ostraca_fabric.model.limits import described, flag, whole
from ostraca_fabric.model.volume import HASH_BYTES_MAX, HASH_BYTES_MIN

STRIPE_UNIT_BLOCKS = 32
RANK_MAX = (1 << 32) - 1
DEPTH_UNKNOWN = (1 << 32) - 1
"""Depth of a block with unknown predecessors."""


_set = object.__setattr__  # converts numpy numbers to ints in a frozen dataclass


class Span(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Blocks of one chain in a request, in wire form.

    ``hashes`` holds the engine hashes, concatenated. ``units`` holds one placement hash for each stripe unit
    touched; ``unit_blocks`` holds the number of consecutive blocks in each unit. Contradictory columns raise
    UsageError, which msgspec turns into a ValidationError for a span from the wire.

    ``depth`` is the depth of the first block; each further block is one deeper. ``chain_blocks`` is the
    length of the chain from its root, as far as the writer knows. Blocks without order have DEPTH_UNKNOWN and
    0.
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
        """Refuse contradictory columns, so that later code never meets a leftover block."""
        if not HASH_BYTES_MIN <= self.hash_bytes <= HASH_BYTES_MAX:
            raise UsageError(
                f"engine hashes of {self.hash_bytes} bytes: {HASH_BYTES_MIN} to {HASH_BYTES_MAX}"
            )
        blocks, rest = divmod(len(self.hashes), self.hash_bytes)
        units = len(self.unit_blocks)
        if rest or len(self.units) != units * self.hash_bytes or sum(self.unit_blocks) != blocks:
            raise UsageError(
                f"a span of {len(self.hashes)} bytes of hashes and {len(self.units)} of units, "
                f"{self.hash_bytes} each, whose {units} units cover {sum(self.unit_blocks)} blocks"
            )
        if units and not 1 <= min(self.unit_blocks) <= max(self.unit_blocks) <= STRIPE_UNIT_BLOCKS:
            raise UsageError(f"a stripe unit has 1 to {STRIPE_UNIT_BLOCKS} blocks")
        if not (0 <= self.rank <= RANK_MAX and 0 <= self.group <= RANK_MAX):
            raise UsageError(f"rank {self.rank} or group {self.group} is not in 0 to {RANK_MAX}")
        end = self.depth + blocks if self.depth != DEPTH_UNKNOWN else 0
        if not (0 <= self.depth <= DEPTH_UNKNOWN and end <= self.chain_blocks <= DEPTH_UNKNOWN):
            raise UsageError(f"{blocks} blocks from depth {self.depth} on of a chain of {self.chain_blocks}")

    def __len__(self) -> int:
        """Count the blocks."""
        return len(self.hashes) // self.hash_bytes


@dataclass(frozen=True, slots=True)
class Chain:
    """Blocks ``start`` to ``stop`` of one prefix, for one rank and KV group.

    Slice a chain with ``chain[8:40]``.
    """

    hashes: bytes
    """All engine hashes, joined, from the root or from the stripe unit given by ``before``."""

    hash_bytes: int
    rank: int = 0
    group: int = 0
    start: int = 0
    stop: int = 0
    is_chained: bool = True
    """False for blocks without order: each block is then placed by its own hash."""

    before: int = 0
    """Blocks of the prefix before ``hashes``, with unknown hashes: whole stripe units."""

    def __post_init__(self) -> None:
        """Refuse chains that an agent would refuse. Raises UsageError."""
        hash_bytes = _checked_hash_bytes(self.hash_bytes)
        hashes: object = self.hashes
        if not isinstance(hashes, bytes) or len(hashes) % hash_bytes:
            raise UsageError(
                "hashes of a chain are whole engine hashes, joined: make it with volume.chain(...)"
            )
        _set(self, "hash_bytes", hash_bytes)
        _set(self, "rank", whole("rank", self.rank, least=0, most=RANK_MAX))
        _set(self, "group", whole("group", self.group, least=0, most=RANK_MAX))
        count = len(hashes) // hash_bytes
        stop = whole("stop", self.stop, least=0, most=count)
        _set(self, "stop", stop)
        _set(self, "start", whole("start", self.start, least=0, most=stop))
        _set(self, "is_chained", flag("is_chained", self.is_chained))
        _set(
            self,
            "before",
            whole("before", self.before, least=0, most=DEPTH_UNKNOWN - count),
        )

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
        """Build a chain from engine hashes, from the root on.

        Raises UsageError for a hash that is not bytes, or has another length than in the volume's layout.
        Raises UsageError as well for a rank or group out of range.
        """
        hash_bytes = _checked_hash_bytes(hash_bytes)
        try:
            # memoryview refuses integers: bytes(32) would silently turn an integer hash into 32 zeros.
            listed = [bytes(memoryview(engine_hash)) for engine_hash in engine_hashes]
        except (TypeError, BufferError, ValueError) as error:
            raise UsageError(
                f"engine hashes are bytes: pass a list of bytes, not {described(engine_hashes)}"
            ) from error
        for position, engine_hash in enumerate(listed):
            if len(engine_hash) != hash_bytes:
                raise UsageError(
                    f"engine hash {position} has {len(engine_hash)} bytes, and the volume's layout "
                    f"says {hash_bytes}: pass the whole block hash, or open the volume with another layout"
                )
        return cls(b"".join(listed), hash_bytes, rank, group, 0, len(listed), is_chained)

    def __len__(self) -> int:
        """Count the blocks of this slice."""
        return self.stop - self.start

    def __getitem__(self, part: slice) -> Chain:
        """Return consecutive blocks of this slice; placement remains the whole chain's."""
        if not isinstance(part, slice) or part.step not in (None, 1):  # type: ignore[redundant-expr]  # untyped callers
            raise UsageError("slice a chain as chain[first:last], without a step")
        try:
            first, last, _ = part.indices(len(self))
        except TypeError as error:
            raise UsageError(f"slice a chain by whole numbers, chain[first:last]: {error}") from error
        last = max(first, last)
        if last - first == len(self):
            return self
        slice_of = object.__new__(Chain)  # with fields that are checked already
        for name in self.__slots__:
            _set(slice_of, name, getattr(self, name))
        _set(slice_of, "start", self.start + first)
        _set(slice_of, "stop", self.start + last)
        return slice_of

    def span(self) -> Span:
        """Return the wire form of these blocks."""
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
    return whole("hash_bytes", hash_bytes, least=HASH_BYTES_MIN, most=HASH_BYTES_MAX)
