"""Results of operations: an outcome per block, in the order of the request.

Outcomes are kept as the received bytes, so a result of thousands of blocks costs nothing until a caller reads
it.
"""

from __future__ import annotations

import _thread
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ostraca_fabric.model.outcome import BlockState, PutState, Reason
from ostraca_fabric.telemetry.requests import tally_text

_HIT = bytes([BlockState.HIT])
_KNOWN_REASONS = frozenset(Reason)

_SIGNALS_S = 0.05
"""Longest sleep of a waiter, in case another waiter was interrupted by a signal handler."""


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


class LateWrite:
    """Rows that a drive or an agent may still write after the end of their get.

    A single thread calls ``end``, once. All other methods are for any thread.
    """

    def __init__(self, positions: Sequence[int]) -> None:
        self.positions = tuple(positions)
        """Positions of the blocks in their get."""

        self.is_ended = False
        self._ended = _thread.allocate_lock()
        self._ended.acquire()

    def end(self) -> None:
        """Note that no byte lands in the rows any more."""
        self.is_ended = True
        self._ended.release()

    def wait(self, until_s: float) -> bool:
        """Wait for the end until *until_s* on the monotonic clock; return whether the writes have ended."""
        while not self.is_ended and (left_s := until_s - time.monotonic()) > 0:
            if self._ended.acquire(timeout=min(left_s, _SIGNALS_S)):
                self._ended.release()  # for other waiters
        return self.is_ended


class WithheldRows:
    """Rows of a region that a drive or an agent may still write, though their get has ended.

    Only gets into regions registered with ``may_withhold`` have any, when a drive or an agent is late. None
    of these blocks is a HIT. Until the end of the write, such a row changes at any moment, operations refuse
    the row, and its region can't be unregistered. Afterwards the row is free, with undefined bytes. After a
    lost connection, the end is known once the client has connected again. After the end of the client, rows
    may stay withheld for good. The length is the number of rows withheld now. All methods are for any thread.
    """

    def __init__(self, writes: Sequence[LateWrite] = ()) -> None:
        """Present late writes to users; for the client's own modules."""
        self._writes = tuple(writes)

    @property
    def positions(self) -> tuple[int, ...]:
        """Positions in the get of the blocks with rows withheld now."""
        return tuple(
            sorted(position for write in self._writes if not write.is_ended for position in write.positions)
        )

    def __len__(self) -> int:
        """Count the rows withheld now."""
        return len(self.positions)

    def __repr__(self) -> str:
        """Count the rows."""
        return f"<WithheldRows: {len(self)} now>"

    def wait(self, timeout_s: float = math.inf) -> bool:
        """Wait until no row is withheld, at most *timeout_s*; return whether that is so.

        In asyncio, await ``asyncio.to_thread(withheld.wait)``.
        """
        until_s = time.monotonic() + timeout_s
        return all(write.wait(until_s) for write in self._writes)


@dataclass(frozen=True, slots=True, repr=False)
class GetResult(BlockOutcomes):
    """Result of a get. A block is a HIT if its bytes were verified and handed over."""

    withheld: WithheldRows = field(default=WithheldRows(), compare=False)
    """Rows not to be used yet; empty unless the region was registered with ``may_withhold``."""


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
