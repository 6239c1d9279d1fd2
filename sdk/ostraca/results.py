"""What operations return: values, one outcome per block, in the order the blocks were named.

Outcomes are kept as the bytes they travelled as, so a result of thousands of blocks costs nothing until
someone looks at it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ostraca_fabric.outcome import BlockState, PutState, Reason
from ostraca_fabric.tallies import tally_text

_HIT = bytes([BlockState.HIT])
_KNOWN_REASONS = frozenset(Reason)


def _reason(code: int) -> Reason:
    """Read a reason; one that only a newer agent knows reads as NONE."""
    return Reason(code) if code in _KNOWN_REASONS else Reason.NONE


@dataclass(frozen=True, slots=True, repr=False)
class BlockOutcomes:
    """One BlockState and one Reason per block."""

    state_codes: bytes
    reason_codes: bytes
    note: str = ""
    """What the agent said when it refused a request as a whole, else empty."""

    def __len__(self) -> int:
        """Count the blocks."""
        return len(self.state_codes)

    def __repr__(self) -> str:
        """Count the outcomes."""
        note = f"; {self.note}" if self.note else ""
        tally = tally_text(self.state_codes, self.reason_codes, BlockState)
        return f"<{type(self).__name__}: {tally}; prefix {self.prefix}{note}>"

    @property
    def states(self) -> tuple[BlockState, ...]:
        """The state of each block."""
        return tuple(map(BlockState, self.state_codes))

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Why each block is not a HIT; ``Reason.NONE`` where it is."""
        return tuple(map(_reason, self.reason_codes))

    @property
    def hits(self) -> int:
        """How many blocks are HITs."""
        return self.state_codes.count(_HIT)

    @property
    def prefix(self) -> int:
        """How many blocks from the first on are HITs without a gap."""
        return len(self.state_codes) - len(self.state_codes.lstrip(_HIT))

    @property
    def holes(self) -> tuple[int, ...]:
        """Positions of the blocks that are not HITs: recompute these."""
        return tuple(np.flatnonzero(np.frombuffer(self.state_codes, np.uint8) != BlockState.HIT).tolist())


class GetResult(BlockOutcomes):
    """What a get brought. A block is a HIT exactly when its bytes were verified and handed over."""

    __slots__ = ()


class PrefetchResult(BlockOutcomes):
    """What a prefetch did. A block is a HIT when it lies in the agent's memory now."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, repr=False)
class LookupResult:
    """What could be got now, for each chain that was asked about."""

    chains: tuple[BlockOutcomes, ...]

    def __repr__(self) -> str:
        """Show the common prefix and each chain."""
        return f"<LookupResult: prefix {self.prefix} of {len(self.chains)} chains {list(self.chains)}>"

    @property
    def states(self) -> tuple[BlockState, ...]:
        """The state of each block, chain after chain."""
        return tuple(state for chain in self.chains for state in chain.states)

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Why each block is not a HIT, chain after chain."""
        return tuple(reason for chain in self.chains for reason in chain.reasons)

    @property
    def prefix(self) -> int:
        """How many blocks from the first on are HITs in *every* chain: what all ranks can load."""
        return min((chain.prefix for chain in self.chains), default=0)

    @property
    def holes(self) -> tuple[int, ...]:
        """Positions that are not a HIT in at least one of the chains that reach so far."""
        return tuple(sorted({hole for chain in self.chains for hole in chain.holes}))

    @property
    def hits(self) -> int:
        """How many blocks are HITs, over all chains."""
        return sum(chain.hits for chain in self.chains)


@dataclass(frozen=True, slots=True, repr=False)
class PutResult:
    """What became of each block that was put."""

    state_codes: bytes
    reason_codes: bytes
    note: str = ""
    """What the agent said when it refused a request as a whole, else empty."""

    def __len__(self) -> int:
        """Count the blocks."""
        return len(self.state_codes)

    def __repr__(self) -> str:
        """Count the outcomes."""
        note = f"; {self.note}" if self.note else ""
        return f"<PutResult: {tally_text(self.state_codes, self.reason_codes, PutState)}{note}>"

    @property
    def states(self) -> tuple[PutState, ...]:
        """The state of each block."""
        return tuple(map(PutState, self.state_codes))

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Why each block was not stored; ``Reason.NONE`` where it was."""
        return tuple(map(_reason, self.reason_codes))

    @property
    def accepted(self) -> int:
        """How many blocks the fabric has or is about to have: STAGED, COMMITTED or EXISTS."""
        taken = (PutState.STAGED, PutState.COMMITTED, PutState.EXISTS)
        return sum(self.state_codes.count(bytes([state])) for state in taken)

    @property
    def holes(self) -> tuple[int, ...]:
        """Positions of the blocks that were declined or came too late."""
        codes = np.frombuffer(self.state_codes, np.uint8)
        return tuple(np.flatnonzero((codes == PutState.DECLINED) | (codes == PutState.LATE)).tolist())
