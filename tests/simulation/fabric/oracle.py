"""The oracle: what was put and committed, and what answers may say of it.

Invariants, by their numbers in the architecture:

1. What a get hands over is exactly the bytes of one put of that block.
3. Every operation ends by its deadline, give or take 100 ms.
4. Nothing lands in a slot of an arena that is another operation's by then (the worker watches that).
5. Of puts of one block, one is committed under an owner epoch, until it leaves the index.
6. What an owner has committed is found, once the fabric is at rest: unless an owner let it go knowingly, or
   its drive is gone.
8. With the store down, what was found before is found.

What owners do knowingly is observed in process, by their events. Where writes may land later than
``late_write_s`` nothing is said of 6.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from tests.simulation.fabric import blocks
from tests.simulation.fabric.blocks import Version
from tests.simulation.fabric.worker import Ended
from tests.simulation.model import ViolationError

from ostraca_fabric.explain import EventKind
from ostraca_fabric.outcome import BlockState, PutState, Reason

OVERRUN_S = 0.1


@dataclass
class _Known:
    """What is known of one block."""

    puts: dict[int, Version] = field(default_factory=dict)
    """Those that may have been listed, by version."""

    is_listed: bool = False
    """Whether some owner has committed it, and none has let go of it since."""

    lasts: Counter[tuple[str, int]] = field(default_factory=Counter)
    """By shard and owner epoch: how often it was committed since it last left that owner's index."""


class Oracle:
    """One history's."""

    def __init__(self, numbers: int, *, is_lied_to: bool) -> None:
        self.is_lied_to = is_lied_to
        """Whether transfers may scribble over an agent's cache, which is not looked at again."""

        self.excused: Counter[str] = Counter()
        self._numbers = blocks.keys_of(list(range(numbers)))
        self._known: defaultdict[int, _Known] = defaultdict(_Known)
        self._versions = 0

    def new_version(self, number: int) -> Version:
        self._versions += 1
        made = Version(number, self._versions)
        self._known[number].puts[self._versions] = made
        return made

    @property
    def listed(self) -> list[int]:
        """Blocks that must be found when everything is at rest."""
        return [number for number, known in self._known.items() if known.is_listed]

    # ---------------------------------------------------------------------------------- what workers see

    def ended(self, what: str, late_s: float) -> None:
        if late_s > OVERRUN_S:
            raise ViolationError(f"a {what} ended {late_s:.3f} s after its deadline")

    def got(self, numbers: list[int], end: Ended) -> None:
        for number, state in zip(numbers, end.states, strict=True):
            if state != BlockState.HIT:
                continue
            data = end.handed.get(number)
            if data is None:
                raise ViolationError(f"block {number} is a HIT, and nothing was handed over")
            self._handed(number, data)

    def put(self, versions: list[Version], end: Ended) -> None:
        for version, state in zip(versions, end.states, strict=True):
            known = self._known[version.number]
            if state == PutState.EXISTS and len(known.puts) == 1:
                raise ViolationError(f"block {version.number} EXISTS, and nobody has put it before")

    def _handed(self, number: int, data: bytes) -> None:
        puts = self._known[number].puts.values()
        if not any(data == put.data.tobytes() for put in puts):
            raise ViolationError(f"WRONG BYTES of block {number} were handed over")

    def must_be_found(self, number: int, state: int, reason: int) -> None:
        """A get of a block when everything is at rest."""
        if self.is_lied_to and reason == Reason.DAMAGED:
            self.excused["what a lie left in an agent's memory"] += 1
        elif state != BlockState.HIT and self._known[number].is_listed:
            said = "nothing" if state < 0 else f"{BlockState(state).name}({Reason(reason).name})"
            raise ViolationError(f"block {number} was committed, and a get of it says {said}")

    # ----------------------------------------------------------------------------------- what owners do

    def numbers_of(self, keys: NDArray[np.uint8]) -> list[int]:
        rows = np.ascontiguousarray(keys, np.uint8).reshape(-1, 16)
        return [self._numbers[row.tobytes()] for row in rows if row.tobytes() in self._numbers]

    def committed(self, shard: str, epoch: int, numbers: list[int]) -> None:
        """An owner has listed blocks; they are in its index."""
        for number in numbers:
            known = self._known[number]
            known.is_listed = True
            known.lasts[shard, epoch] += 1
            if known.lasts[shard, epoch] > 1:
                raise ViolationError(f"block {number} was committed twice under epoch {epoch} of {shard}")

    def gone(self, kind: EventKind, numbers: list[int]) -> None:
        """An owner took blocks out of its index: as they were old, or as it found them damaged itself."""
        if kind is EventKind.DROPPED and not self.is_lied_to:
            raise ViolationError(f"blocks {numbers} were dropped, and nothing damaged them")
        for number in numbers:
            self._known[number].is_listed = False
            self._known[number].lasts.clear()
            self.excused[kind.name] += 1

    def lost(self, numbers: list[int], why: str) -> None:
        """Where these blocks were is no more."""
        for number in numbers:
            self._known[number].is_listed = False
            self._known[number].lasts.clear()
            self.excused[why] += 1
