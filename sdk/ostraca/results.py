"""Results of operations: an outcome per block, in the order of the request.

Outcomes are kept as the received bytes, so a result of thousands of blocks costs nothing until a caller reads
it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ostraca_fabric.model.outcome import BlockState, PutState, Reason
from ostraca_fabric.telemetry.requests import tally_text

_HIT = bytes([BlockState.HIT])
_KNOWN_REASONS = frozenset(Reason)


@dataclass(frozen=True, slots=True, repr=False)
class _CodedResult:
    """Base of results with a state and a reason per block, kept as received."""

    state_codes: bytes
    reason_codes: bytes
    note: str = ""
    """The agent's message after refusal of a request as a whole, else empty."""

    def __len__(self) -> int:
        """Count the blocks."""
        return len(self.state_codes)

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Reason of each block without success; ``Reason.NONE`` for other blocks."""
        # A reason known only to newer agents reads as NONE.
        return tuple(Reason(code) if code in _KNOWN_REASONS else Reason.NONE for code in self.reason_codes)


@dataclass(frozen=True, slots=True, repr=False)
class BlockOutcomes(_CodedResult):
    """A BlockState and a Reason per block."""

    def __repr__(self) -> str:
        """Count the outcomes."""
        note = f"; {self.note}" if self.note else ""
        tally = tally_text(self.state_codes, self.reason_codes, BlockState)
        return f"<{type(self).__name__}: {tally}; prefix {self.prefix}{note}>"

    @property
    def states(self) -> tuple[BlockState, ...]:
        """State of each block."""
        return tuple(map(BlockState, self.state_codes))

    @property
    def hits(self) -> int:
        """Number of HITs."""
        return self.state_codes.count(_HIT)

    @property
    def prefix(self) -> int:
        """Number of HITs from the first block on without a gap."""
        return len(self.state_codes) - len(self.state_codes.lstrip(_HIT))

    @property
    def holes(self) -> tuple[int, ...]:
        """Positions of the blocks without a HIT: recompute these."""
        return tuple(np.flatnonzero(np.frombuffer(self.state_codes, np.uint8) != BlockState.HIT).tolist())


class GetResult(BlockOutcomes):
    """Result of a get. A block is a HIT if its bytes were verified and handed over."""

    __slots__ = ()


class PrefetchResult(BlockOutcomes):
    """Result of a prefetch. A block is a HIT if the agent's memory holds it now."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, repr=False)
class LookupResult:
    """Blocks available now, for each chain of the lookup."""

    chains: tuple[BlockOutcomes, ...]

    def __repr__(self) -> str:
        """Show the common prefix and each chain."""
        return f"<LookupResult: prefix {self.prefix} of {len(self.chains)} chains {list(self.chains)}>"

    @property
    def states(self) -> tuple[BlockState, ...]:
        """State of each block, chain after chain."""
        return tuple(state for chain in self.chains for state in chain.states)

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Reason of each block without a HIT, chain after chain."""
        return tuple(reason for chain in self.chains for reason in chain.reasons)

    @property
    def prefix(self) -> int:
        """Number of HITs from the first block on in *every* chain: loadable by all ranks."""
        return min((chain.prefix for chain in self.chains), default=0)

    @property
    def holes(self) -> tuple[int, ...]:
        """Positions without a HIT in at least one of the chains of such length."""
        return tuple(sorted({hole for chain in self.chains for hole in chain.holes}))

    @property
    def hits(self) -> int:
        """Number of HITs over all chains."""
        return sum(chain.hits for chain in self.chains)


@dataclass(frozen=True, slots=True, repr=False)
class PutResult(_CodedResult):
    """Outcome of each block of a put."""

    def __repr__(self) -> str:
        """Count the outcomes."""
        note = f"; {self.note}" if self.note else ""
        return f"<PutResult: {tally_text(self.state_codes, self.reason_codes, PutState)}{note}>"

    @property
    def states(self) -> tuple[PutState, ...]:
        """State of each block."""
        return tuple(map(PutState, self.state_codes))

    @property
    def accepted(self) -> int:
        """Number of blocks the fabric has or is about to have: STAGED, COMMITTED or EXISTS."""
        taken = (PutState.STAGED, PutState.COMMITTED, PutState.EXISTS)
        return sum(self.state_codes.count(bytes([state])) for state in taken)

    @property
    def holes(self) -> tuple[int, ...]:
        """Positions of the blocks that were declined or too late."""
        codes = np.frombuffer(self.state_codes, np.uint8)
        return tuple(np.flatnonzero((codes == PutState.DECLINED) | (codes == PutState.LATE)).tolist())
