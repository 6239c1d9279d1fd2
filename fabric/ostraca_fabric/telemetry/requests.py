"""Telemetry of requests: labels, counters of outcomes, recent events, and volumes without hits.

A label is ``<worker>/<request>``, to find all log lines of one request from SDK to drive. The worker's part
is the beginning of ``Hello.client``, so both ends use the same label. An agent sets the label on receipt of a
request; tasks started from there inherit the label. For work on another thread, pass on ``current_label()``.
``log_lines.LabelFilter`` adds the label to log records.

``Tally`` counts outcomes, bytes and latencies by kind of operation: a request costs a few numpy calls,
regardless of the number of blocks. ``OperationTally`` is a snapshot for status and metrics.

``EventRing`` records events of blocks in flat arrays, and overwrites the oldest. Events are found by block
key. A key is derived under the volume's secret, so a query finds only events of the caller's own tenant. An
event possibly caused by another tenant's request, such as an eviction, carries no label.

``HitWatch`` detects volumes without hits. Engines with different hashes never share blocks: each put is new,
each lookup a miss, and no error occurs. The watch of a volume counts blocks put, and later requests for
blocks that no owner lists. The first hit ends the watch for good. A put of an existing block ends it too,
because two writers then agree on the hash.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar, Token
from enum import IntEnum

import msgspec
import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.model.outcome import BlockState, PutState, Reason
from ostraca_fabric.telemetry.explain import EVENTS_MAX, BlockEvent, EventKind

LABEL_CHARS_MAX = 32
"""Longest label; a longer label from the wire is truncated."""

_WORKER_BYTES = 4

_current: ContextVar[str] = ContextVar("ostraca_label", default="")


def worker_name(client: bytes) -> str:
    """Return a worker's name for logs: the beginning of ``Hello.client`` in hex."""
    return client[:_WORKER_BYTES].hex() or "unnamed"


def label_of(worker: str, request: int) -> str:
    """Return the label of a worker's request."""
    return f"{worker}/{request}"


def current_label() -> str:
    """Return the label of the current request; empty outside of requests."""
    return _current.get()


class labelled:  # noqa: N801 (used like the functions of contextlib, in half of their time)
    """Context with a request label: ``with labelled(label): ...``."""

    __slots__ = ("_label", "_token")

    def __init__(self, label: str) -> None:
        self._label = label

    def __enter__(self) -> None:
        """Set the label."""
        self._token: Token[str] = _current.set(self._label[:LABEL_CHARS_MAX])

    def __exit__(self, *_: object) -> None:
        """Restore the previous label."""
        _current.reset(self._token)


LATENCY_BOUNDS_S: tuple[float, ...] = tuple(
    float(f"{digit}e{exponent}") for exponent in range(-5, 2) for digit in (1, 2, 5)
)[2:]
"""Upper bounds of the latency buckets: 50 µs to 50 s in steps of 1, 2, 5. Slower requests have one more
bucket."""

STATES: dict[str, type[BlockState | PutState]] = {
    "lookup": BlockState,
    "get": BlockState,
    "prefetch": BlockState,
    "put": PutState,
}
"""All operations and the possible states of a block after each."""

OTHER_STATES: dict[str, type[BlockState | PutState]] = {
    "recheck": BlockState,
    "shadow_lookup": BlockState,
    "shadow_get": BlockState,
}
"""Operations of some agents only: lookups that do not count as reads, and operations in shadow mode, counted
by would-be states of blocks."""

_STATE_BITS = 3
_CODES = 256 << _STATE_BITS


class BlockCount(msgspec.Struct, frozen=True):
    """Number of blocks with the same state and reason."""

    state: str
    reason: str
    """Name of a Reason, or NONE. A reason unknown to this release is a number."""

    blocks: int


class OperationTally(msgspec.Struct, frozen=True):
    """Counts of an operation since the process began to count."""

    operation: str
    blocks: tuple[BlockCount, ...] = ()
    """Outcomes with at least one block."""

    bytes: int = 0
    """Bytes of the blocks delivered or stored."""

    requests: int = 0
    seconds: float = 0.0
    """Total duration of all requests."""

    buckets: tuple[int, ...] = ()
    """Requests by duration: a count for each of ``LATENCY_BOUNDS_S``, and a count for the rest."""

    def of(self, state: IntEnum, reason: Reason | None = None) -> int:
        """Return the number of blocks with this state, and this reason if given."""
        return sum(
            count.blocks
            for count in self.blocks
            if count.state == state.name and (reason is None or count.reason == reason.name)
        )

    def latency_s(self, share: float) -> float:
        """Return the bucket bound below which *share* of the requests ended; 0 without any.

        Requests beyond the last bound count as infinitely long.
        """
        due = share * self.requests
        for bound_s, ended in zip((*LATENCY_BOUNDS_S, float("inf")), np.cumsum(self.buckets), strict=False):
            if 0 < due <= ended:
                return bound_s
        return 0.0


class Tally:
    """Running counts of an operation. Not thread-safe."""

    def __init__(self, operation: str) -> None:
        """Start at zero; *operation* is a key of ``STATES`` or ``OTHER_STATES``."""
        self._operation = operation
        self._states = (STATES | OTHER_STATES)[operation]
        self._counts = np.zeros(_CODES, np.int64)
        self._buckets = [0] * (len(LATENCY_BOUNDS_S) + 1)
        self._seconds = 0.0
        self.bytes = 0

    def count(self, states: NDArray[np.uint8], reasons: NDArray[np.uint8]) -> None:
        """Count an outcome for each block; states are below 8."""
        found = np.bincount((reasons.astype(np.intp) << _STATE_BITS) | states)
        self._counts[: len(found)] += found

    def timed(self, seconds: float) -> None:
        """Count a request and its duration."""
        self._buckets[bisect_left(LATENCY_BOUNDS_S, seconds)] += 1
        self._seconds += seconds

    def of(self, state: IntEnum, reason: Reason | None = None) -> int:
        """Return the number of blocks with this state, and this reason if given."""
        by_reason = self._counts.reshape(-1, 1 << _STATE_BITS)[:, state]
        return int(by_reason.sum() if reason is None else by_reason[reason])

    def snapshot(self) -> OperationTally:
        """Return the present counts."""
        codes = np.flatnonzero(self._counts).tolist()
        return OperationTally(
            operation=self._operation,
            blocks=tuple(self._block_count(code) for code in codes),
            bytes=self.bytes,
            requests=sum(self._buckets),
            seconds=self._seconds,
            buckets=tuple(self._buckets),
        )

    def _block_count(self, code: int) -> BlockCount:
        state = name_of(self._states, code & ((1 << _STATE_BITS) - 1))
        return BlockCount(state, name_of(Reason, code >> _STATE_BITS), int(self._counts[code]))


def tally_text(states: bytes, reasons: bytes, known: type[BlockState | PutState]) -> str:
    """Format outcomes for people: ``510 HIT, 2 MISS (1 NOT_FOUND, 1 DAMAGED)``.

    *states* and *reasons* have a byte per block each.
    """
    pairs = np.frombuffer(states, np.uint8).astype(np.uint16) << 8 | np.frombuffer(reasons, np.uint8)
    codes, counts = np.unique(pairs, return_counts=True)
    return outcome_text(
        BlockCount(name_of(known, code >> 8), name_of(Reason, code & 255), blocks)
        for code, blocks in zip(codes.tolist(), counts.tolist(), strict=True)
    )


def outcome_text(counts: Iterable[BlockCount]) -> str:
    """Format outcomes for people like ``tally_text``, most frequent first."""
    by_state: dict[str, list[BlockCount]] = {}
    for count in sorted(counts, key=lambda each: -each.blocks):
        by_state.setdefault(count.state, []).append(count)
    totals = {state: sum(each.blocks for each in same) for state, same in by_state.items()}
    words = []
    for state in sorted(totals, key=lambda each: -totals[each]):
        why = ", ".join(
            f"{each.blocks} {each.reason}" for each in by_state[state] if each.reason != Reason.NONE.name
        )
        words.append(f"{totals[state]} {state}" + (f" ({why})" if why else ""))
    return ", ".join(words) or "no blocks"


def name_of(kind: type[IntEnum], code: int) -> str:
    """Return the name of an outcome, or the number if unknown to this release."""
    try:
        return kind(code).name
    except ValueError:  # a newer release's outcome
        return str(code)


UNHIT_BLOCKS = 32
"""Blocks put, and requested since, before a volume is reported: a stripe unit. A first prompt causes
fewer."""

NOTICE_BLOCKS = 1024
"""Blocks put, and requested since, before one log line. Requests without common prefixes also reach this
number."""

_HIT = bytes([BlockState.HIT])
_EXISTS = bytes([PutState.EXISTS])
_STORED = (bytes([PutState.STAGED]), bytes([PutState.COMMITTED]))
_NOT_FOUND = bytes([Reason.NOT_FOUND])


class HitWatch:
    """Counts of one volume until its first hit."""

    __slots__ = ("_is_told", "asked_blocks", "has_hit", "put_blocks")

    def __init__(self) -> None:
        """Begin without puts."""
        self.put_blocks = 0
        self.asked_blocks = 0
        """Blocks not found, among requests after the first put."""
        self.has_hit = False
        self._is_told = False

    def count(self, operation: str, states: bytes, reasons: bytes) -> None:
        """Count the outcomes of a request's blocks, one byte each."""
        if operation == "put" and not self.has_hit:
            self.has_hit = _EXISTS in states
            self.put_blocks += sum(map(states.count, _STORED))
        elif not self.has_hit:
            self.has_hit = _HIT in states
            self.asked_blocks += reasons.count(_NOT_FOUND) if self.put_blocks else 0

    @property
    def is_unhit(self) -> bool:
        """Whether blocks were put and requested without any hit."""
        return self._has(UNHIT_BLOCKS)

    def take_notice(self) -> bool:
        """Tell whether to log a line now: once at most."""
        if self._is_told or not self._has(NOTICE_BLOCKS):
            return False
        self._is_told = True
        return True

    def _has(self, blocks: int) -> bool:
        return not self.has_hit and min(self.put_blocks, self.asked_blocks) >= blocks


class HitWatches:
    """Watches of many volumes. Beyond the limit, the least recently used is forgotten."""

    def __init__(self, most: int) -> None:
        """Watch at most *most* volumes."""
        self._most = most
        self._watches: OrderedDict[str, HitWatch] = OrderedDict()

    def count(self, volume: str, operation: str, states: bytes, reasons: bytes) -> str | None:
        """Count as ``HitWatch.count``; return a message to log once, or None."""
        watch = self._watches.get(volume)
        if watch is None:
            watch = self._watches[volume] = HitWatch()
            if len(self._watches) > self._most:
                self._watches.popitem(last=False)
        self._watches.move_to_end(volume)
        watch.count(operation, states, reasons)
        if not watch.take_notice():
            return None
        return unhit_sentence(volume, put_blocks=watch.put_blocks, asked_blocks=watch.asked_blocks)

    def unhit(self) -> Iterator[tuple[str, HitWatch]]:
        """Yield the volumes without a hit, the most recently used first."""
        return ((volume, watch) for volume, watch in reversed(self._watches.items()) if watch.is_unhit)


def unhit_sentence(volume: str, *, put_blocks: int, asked_blocks: int) -> str:
    """Return the message for a volume without a hit, with possible causes."""
    return (
        f"volume {volume}: {put_blocks} blocks were put and {asked_blocks} requested since, without a hit. "
        "Engines need the same hash seed (PYTHONHASHSEED), hash algorithm and numbering of ranks to share "
        "blocks. Prompts without repetition have the same effect."
    )


_NO_STATE = 255
_STATES = {
    EventKind.LOOKED_UP: BlockState,
    EventKind.GOT: BlockState,
    EventKind.PREFETCHED: BlockState,
    EventKind.SHADOWED: BlockState,
    EventKind.PUT: PutState,
    EventKind.RESERVED: PutState,
    EventKind.COMMITTED: PutState,
}


def _column(values: NDArray[np.uint8] | int, count: int) -> bytes:
    return bytes((values,)) * count if isinstance(values, int) else values.tobytes()


_PendingEvents = tuple[float, bytes, int, bytes, bytes, bytes]
"""Time, label and kind of a request's events; keys, states and reasons of its blocks."""

_PENDING_MAX = 64


class EventRing:
    """The newest events of one agent. Use on the event loop's thread only."""

    def __init__(self, agent: str, rows: int, clock: Callable[[], float]) -> None:
        """Keep *rows* events of 59 bytes each."""
        assert rows > 0, "a ring has room for an event"
        self.agent = agent
        self._clock = clock
        self._since_s = clock()
        self._keys = np.zeros((rows, 2), np.uint64)
        self._at_s = np.zeros(rows, np.float64)
        self._labels = np.zeros(rows, np.dtype(f"S{LABEL_CHARS_MAX}"))
        self._kinds = np.zeros(rows, np.uint8)
        self._states = np.zeros(rows, np.uint8)
        self._reasons = np.zeros(rows, np.uint8)
        self._written = 0
        self._pending: list[_PendingEvents] = []

    def record(
        self,
        kind: EventKind,
        keys: NDArray[np.uint8],
        states: NDArray[np.uint8] | int = _NO_STATE,
        reasons: NDArray[np.uint8] | int = Reason.NONE,
        *,
        label: str | None = None,
    ) -> None:
        """Record an event of blocks, now. *keys*: shape (n, 16).

        *label* defaults to the label of the current request.
        """
        named = (current_label() if label is None else label).encode("ascii", "replace")
        columns = keys.tobytes(), _column(states, len(keys)), _column(reasons, len(keys))
        self._pending.append((self._clock(), named, int(kind), *columns))
        if len(self._pending) >= _PENDING_MAX:
            self._write()

    def _write(self) -> None:
        """Write pending events into the ring, which takes no longer than the write of a single event."""
        if not self._pending:
            return
        at_s, labels, kinds, keys, states, reasons = zip(*self._pending, strict=True)
        self._pending.clear()
        counts = [len(each) for each in states]
        rows = len(self._kinds)
        newest = slice(-rows, None)
        where = (np.arange(self._written, self._written + sum(counts)) % rows)[newest]
        self._keys[where] = np.frombuffer(b"".join(keys), np.uint64).reshape(-1, 2)[newest]
        self._states[where] = np.frombuffer(b"".join(states), np.uint8)[newest]
        self._reasons[where] = np.frombuffer(b"".join(reasons), np.uint8)[newest]
        for column, values in ((self._at_s, at_s), (self._labels, labels), (self._kinds, kinds)):
            column[where] = np.repeat(np.array(values, column.dtype), counts)[newest]
        self._written += sum(counts)

    @property
    def reaches_back_s(self) -> float:
        """Age of the oldest kept event, or of the ring if nothing was overwritten."""
        self._write()
        rows = len(self._kinds)
        oldest_s = self._since_s if self._written <= rows else float(self._at_s[self._written % rows])
        return self._clock() - oldest_s

    def of(self, key: bytes) -> tuple[BlockEvent, ...]:
        """Return the newest ``EVENTS_MAX`` events of a block, oldest first."""
        self._write()
        first, second = np.frombuffer(key, np.uint64).tolist()
        is_its = (self._keys[:, 0] == first) & (self._keys[:, 1] == second) & (self._kinds > 0)
        found = np.flatnonzero(is_its)
        in_order = found[np.argsort((found - self._written) % len(self._kinds))]
        now_s = self._clock()
        return tuple(self._event(row, now_s) for row in in_order[-EVENTS_MAX:].tolist())

    def _event(self, row: int, now_s: float) -> BlockEvent:
        kind, state = EventKind(int(self._kinds[row])), int(self._states[row])
        reason = int(self._reasons[row])  # of a newer release's owner, perhaps
        return BlockEvent(
            agent=self.agent,
            age_s=now_s - float(self._at_s[row]),
            label=self._labels[row].decode(),
            kind=kind.name,
            state="" if state == _NO_STATE else name_of(_STATES[kind], state),
            reason=name_of(Reason, reason) if reason else "",
        )
