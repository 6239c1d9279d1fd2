"""The oracle: what was put and committed, and what answers may say of it.

Invariants, by their numbers in the architecture:

1. What a get hands over is exactly the bytes of one put of that block, in that volume of that tenant, which
   its agent has checked, and holds with the owner's reservation, or of which an owner was told that all are
   on flash.
2. No answer tells of a block that only another tenant, or another volume, has put: neither its state nor its
   reason; and no owner lists one under another one's key.
3. Every operation ends by its deadline, give or take 100 ms.
4. Nothing lands in a slot of an arena that is another operation's by then (the worker watches that).
5. Of puts of one block, one is committed under an owner epoch, until it leaves the index.
6. What an owner has committed is found, once the fabric is at rest: unless an owner let it go knowingly, or
   its drive is gone.
8. With the store down, what was found before is found.

And a look-up finds what some agent has, and nothing else, and the prefix that it tells of ends with the first
block that some rank's chain lacks; what EXISTS is listed; a put is COMMITTED once its
owner has listed it on flash, and not STAGED where more was asked for.

What owners do knowingly is observed in process, by their events. Where writes may land later than
``late_write_s`` nothing is said of 6.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from tests.simulation.fabric.world.worker import Ended
from tests.simulation.shard.model import ViolationError

from ostraca.results import BlockOutcomes, LookupResult
from ostraca_fabric.model.outcome import Ack, BlockState, PutState, Reason
from ostraca_fabric.telemetry.explain import EventKind

if TYPE_CHECKING:
    from tests.simulation.fabric.world.blocks import Blocks, Version

    from ostraca_fabric.model.ids import ShardId

OVERRUN_S = 0.1
_TELLING = frozenset({Reason.DAMAGED, Reason.WRONG_LENGTH})
"""Reasons that a block has only where some put of it was listed."""

_NO_KEY = bytes(16)


@dataclass
class Place:
    """A shard where a block was committed, and should be."""

    mishaps: int
    """What had befallen the shard's drive before."""

    is_current: bool
    """Whether the placement epoch placed it there then: an agent that is behind may write elsewhere."""

    epochs: Counter[int] = field(default_factory=Counter)
    """By owner epoch: how often it was committed since it last left that owner's index."""


@dataclass
class _Known:
    """What is known of one block."""

    puts: dict[bytes, Version] = field(default_factory=dict)
    """By tag: those that workers have sent."""

    offered: set[bytes] = field(default_factory=set)
    """Of these puts, by tag, those that agents hold staged, or asked owners to list."""

    stagings: int = 0
    """How often an agent has made it readable before it was on flash."""

    listed: set[bytes] = field(default_factory=set)
    """And those of which owners have said that they did."""

    places: dict[ShardId, Place] = field(default_factory=dict)
    """Where owners have committed it, and not let go of it since."""

    departures: Counter[EventKind] = field(default_factory=Counter)
    """How often an owner has let go of it: as it was old, or damaged."""

    leavings: Counter[ShardId] = field(default_factory=Counter)
    """How often its owner has let go of it and a shard did not list it then, by shard."""

    arrivals: int = 0
    """How often an owner has committed it."""


class Oracle:
    """One history's."""

    def __init__(self, blocks: Blocks, *, is_lied_to: bool) -> None:
        self.is_lied_to = is_lied_to
        """Whether transfers may scribble over an agent's cache, which is not looked at again."""

        self.excused: Counter[str] = Counter()
        self._blocks = blocks
        self._numbers = blocks.keys()
        self._keys = {number: key for key, number in self._numbers.items()}
        self._known: defaultdict[int, _Known] = defaultdict(_Known)
        self._versions = 0

    def new_version(self, number: int) -> Version:
        self._versions += 1
        made = self._blocks.version(number, self._versions)
        self._known[number].puts[made.tag] = made
        return made

    @property
    def listed(self) -> list[int]:
        """Blocks that must be found when everything is at rest."""
        return [number for number, known in self._known.items() if known.places]

    def places(self, number: int) -> dict[ShardId, Place]:
        """Return where a block was committed, and should be."""
        return self._known[number].places

    def departures(self, number: int) -> tuple[int, int]:
        """Count how often an owner has let go of a block as it was old, and as it found it damaged."""
        counted = self._known[number].departures
        return counted[EventKind.EVICTED], counted[EventKind.DROPPED]

    def leavings(self, number: int, shard: ShardId) -> int:
        """Count how often a block has left a shard, whichever owner of it let it go."""
        return self._known[number].leavings[shard]

    def arrivals(self, number: int) -> int:
        """Count how often owners have committed a block."""
        return self._known[number].arrivals

    def stagings(self, number: int) -> int:
        """Count how often agents have made a block readable before it was on flash."""
        return self._known[number].stagings

    def key_of(self, number: int) -> bytes:
        return self._keys[number]

    # ---------------------------------------------------------------------------------- what workers see

    def ended(self, what: str, late_s: float) -> None:
        if late_s > OVERRUN_S:
            raise ViolationError(f"a {what} ended {late_s:.3f} s after its deadline")

    def got(self, numbers: list[int], end: Ended) -> None:
        for number, state, reason in zip(numbers, end.states, end.reasons, strict=True):
            if reason in _TELLING:
                self._tells(number, Reason(reason).name)
            if state != BlockState.HIT:
                if number in end.handed:
                    raise ViolationError(f"block {number} was handed over, and is no HIT")
                continue
            data = end.handed.get(number)
            if data is None:
                raise ViolationError(f"block {number} is a HIT, and nothing was handed over")
            self._handed(number, data)

    def put(self, versions: list[Version], end: Ended, ack: Ack, known: set[int]) -> None:
        """*known*: what some agent has listed since it was asked, or may have: nothing else EXISTS."""
        for version, state, reason in zip(versions, end.states, end.reasons, strict=True):
            number = version.number
            if reason == Reason.IN_FLIGHT and len(self._known[number].puts) == 1:
                raise ViolationError(f"{self._named(number)} is IN_FLIGHT, and nobody else has ever put it")
            if state == PutState.EXISTS:
                self._tells(number, "EXISTS")
            if state == PutState.COMMITTED and version.tag not in self._known[number].listed:
                raise ViolationError(
                    f"block {number} is called COMMITTED, and no owner has listed this put of it"
                )
            if state == PutState.STAGED and ack is Ack.COMMITTED:
                raise ViolationError(
                    f"a put of block {number} was to be COMMITTED, and is answered as STAGED"
                )
            if state == PutState.EXISTS and number not in known:
                raise ViolationError(f"block {number} EXISTS, and no agent lists it")

    def looked_up(self, numbers: list[int], end: Ended, known: set[int]) -> None:
        """*known*: what some agent has had meanwhile, or may have: nothing else may be found."""
        for number, state, reason in zip(numbers, end.states, end.reasons, strict=True):
            if reason in _TELLING:
                self._tells(number, Reason(reason).name)
            if state != BlockState.HIT:
                continue
            self._tells(number, "found")
            if number not in known:
                raise ViolationError(f"block {number} is found, and no agent has it")

    def found_prefix(self, numbers: list[int], end: Ended) -> int:
        """Hear of a look-up as its caller does: how much of all of its chains is there. Return that."""
        chains: list[tuple[list[int], list[int]]] = []
        first = 0
        for span in self._blocks.spans(numbers):
            last = first + len(span)
            chains.append((numbers[first:last], end.states[first:last]))
            first = last
        said = LookupResult(tuple(BlockOutcomes(bytes(s), bytes(len(s))) for _, s in chains)).prefix
        for chain, states in chains:
            for number, state in zip(chain[:said], states, strict=False):
                if state != BlockState.HIT:
                    raise ViolationError(f"a prefix of {said} blocks has a hole: {self._named(number)}")
        if all(states[said : said + 1] == [BlockState.HIT] for _, states in chains):
            raise ViolationError(f"a prefix of {said} blocks of {numbers} goes on")
        return said

    def _handed(self, number: int, data: bytes) -> None:
        if not self._is_put_of(number, data):
            others = [twin for twin in self._blocks.twins(number) if self._is_put_of(twin, data)]
            whose = "".join(f": those of {self._named(twin)}" for twin in others)
            raise ViolationError(f"WRONG BYTES of {self._named(number)} were handed over{whose}")

    def _is_put_of(self, number: int, data: bytes) -> bool:
        known = self._known[number]
        return any(data == known.puts[tag].data.tobytes() for tag in known.offered)

    def _tells(self, number: int, what: str) -> None:
        """Hear of an answer that only a block has of which an owner was asked to list some put."""
        if self._known[number].offered:
            return
        twins = [self._named(twin) for twin in self._blocks.twins(number) if self._known[twin].offered]
        whose = f"; of those with its hash, {' and '.join(twins)} were" if twins else ""
        raise ViolationError(f"{self._named(number)} is {what}, and nobody was ever asked to list it{whose}")

    def _named(self, number: int) -> str:
        return f"block {number} of {self._blocks.volume_of(number)}"

    def must_be_found(self, number: int, state: int, reason: int, excuse: str) -> None:
        """Check a get at rest; *excuse* says why the block may be gone, empty if it may not."""
        if state == BlockState.HIT or not self._known[number].places:
            return
        if self.is_lied_to and reason == Reason.DAMAGED:
            self.excused["what a lie left in an agent's memory"] += 1
        elif excuse:
            self.excused[excuse] += 1
            self._known[number].places.clear()
        else:
            said = "nothing" if state < 0 else f"{BlockState(state).name}({Reason(reason).name})"
            raise ViolationError(f"block {number} was committed, and a get of it says {said}")

    # ----------------------------------------------------------------------------------- what owners do

    def numbers_of(self, keys: NDArray[np.uint8]) -> list[int]:
        rows = np.ascontiguousarray(keys, np.uint8).reshape(-1, 16)
        return [self._numbers[row.tobytes()] for row in rows if row.tobytes() in self._numbers]

    def staged(self, keys: NDArray[np.uint8], tags: NDArray[np.uint8]) -> None:
        """Note that an agent holds checked blocks of puts: from now on a get there may find them."""
        self.offered(keys, tags)
        for number in self.numbers_of(keys):
            self._known[number].stagings += 1

    def offered(self, keys: NDArray[np.uint8], tags: NDArray[np.uint8]) -> None:
        """Note that an owner is asked to list puts: from now on a get may find them."""
        for number, tag in self._puts(keys, tags):
            if tag not in self._known[number].puts:
                raise ViolationError(f"block {number} is to be listed under a tag that no worker has made")
            self._known[number].offered.add(tag)

    def answered(self, keys: NDArray[np.uint8], tags: NDArray[np.uint8]) -> None:
        """Note an owner's answer that it has listed puts."""
        for number, tag in self._puts(keys, tags):
            self._known[number].listed.add(tag)

    def _puts(self, keys: NDArray[np.uint8], tags: NDArray[np.uint8]) -> list[tuple[int, bytes]]:
        """Return numbers and tags; without those whose reservation has ended, as their keys are unknown."""
        pairs = ((key.tobytes(), tag.tobytes()) for key, tag in zip(keys, tags, strict=False))
        known = [(key, tag) for key, tag in pairs if key != _NO_KEY]
        if not all(key in self._numbers for key, _ in known):
            raise ViolationError("a put is listed under the key of no block of any volume")
        return [(self._numbers[key], tag) for key, tag in known]

    def committed(self, shard: ShardId, epoch: int, number: int, *, mishaps: int, is_current: bool) -> None:
        """Note that an owner has a block in its index."""
        self._known[number].arrivals += 1
        places = self._known[number].places
        place = places.setdefault(shard, Place(mishaps, is_current))
        place.epochs[epoch] += 1
        if place.epochs[epoch] > 1:
            raise ViolationError(f"block {number} was committed twice under epoch {epoch} of {shard}")

    def gone(self, kind: EventKind, shards: dict[int, set[ShardId]]) -> None:
        """Note that an owner removed blocks from its index, as old or as damaged.

        *shards*: of each block, where that owner does not list it now.
        """
        for number, left in shards.items():
            known = self._known[number]
            known.departures[kind] += 1
            known.places = {shard: place for shard, place in known.places.items() if shard not in left}
            known.leavings.update(left)
            self.excused[kind.name] += 1
