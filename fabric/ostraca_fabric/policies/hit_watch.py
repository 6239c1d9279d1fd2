"""Detection of volumes without hits. Pure.

Engines with different hashes never share blocks: each put is new, each lookup a miss, and no error occurs.
The watch of a volume counts blocks put, and later requests for blocks that no owner lists. The first hit ends
the watch for good. A put of an existing block ends it too, because two writers then agree on the hash.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator

from ostraca_fabric.model.outcome import BlockState, PutState, Reason

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
        if self.has_hit:
            return
        if operation == "put":
            self.has_hit = _EXISTS in states
            self.put_blocks += sum(map(states.count, _STORED))
        else:
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
        self._watches: OrderedDict[Hashable, HitWatch] = OrderedDict()

    def count(self, volume: Hashable, operation: str, states: bytes, reasons: bytes) -> HitWatch:
        """Count as ``HitWatch.count``, and return the volume's watch."""
        watch = self._watches.get(volume)
        if watch is None:
            watch = self._watches[volume] = HitWatch()
            if len(self._watches) > self._most:
                self._watches.popitem(last=False)
        self._watches.move_to_end(volume)
        watch.count(operation, states, reasons)
        return watch

    def unhit(self) -> Iterator[tuple[Hashable, HitWatch]]:
        """Yield the volumes without a hit, the most recently used first."""
        return ((volume, watch) for volume, watch in reversed(self._watches.items()) if watch.is_unhit)


def unhit_sentence(volume: str, *, put_blocks: int, asked_blocks: int) -> str:
    """Return the message for a volume without a hit, with possible causes."""
    return (
        f"volume {volume}: {put_blocks} blocks were put and {asked_blocks} requested since, without a hit. "
        "Engines need the same hash seed (PYTHONHASHSEED), hash algorithm and numbering of ranks to share "
        "blocks. Prompts without repetition have the same effect."
    )
