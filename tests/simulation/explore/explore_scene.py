"""One moment of a small fabric, to be explored: everything that may happen next, and what must hold.

Two owner epochs share three segments of one drive: the real pure core of a *predecessor*, and that of a
*successor* which claims the shard at any time. Two movers put blocks, each to whichever owner it believes in.
Time has ticks: ``grant_s``, ``hold_s`` and ``late_write_s`` take one each. A write, of data or of a summary,
lands at any time up to its deadline, whether or not whoever began it still lives; beyond it never, which is
what ``late_write_s`` is for. An owner that is paused or dead is one to which nothing happens any more. The
owner that etcd knows hears at once that its claim stands: less would only let it do less. It asks at once for
the grants it wants. Where the scope has these apart, etcd records them at any time after, unless the shard is
claimed before, and the owner hears of that at any time after, even when it is succeeded; and a write of data
is submitted at any time until its reservation's end. Otherwise both are done at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
from tests.simulation.copying import copy_of
from tests.simulation.explore.explore_core import core_digest, listed, rehouse
from tests.simulation.explore.explore_scope import (
    FILLERS,
    GEOMETRY,
    GRANT,
    HOLD,
    LATE,
    PREDECESSOR,
    SEGMENTS,
    SUCCESSOR,
    SUPERBLOCK,
    Action,
    Put,
    Scope,
    WrongError,
)
from tests.support.agent.shard_invariants import check_core

from ostraca_dpu_agent.shards.core import ShardCore, ShardSettings, SummaryWrite
from ostraca_fabric.flash.recovery import RecoveredAreas, recover
from ostraca_fabric.model.extent import PAGE_BYTES, generation_parts
from ostraca_fabric.model.ids import OwnerEpoch
from ostraca_fabric.model.outcome import PutState


@dataclass
class Scene:
    """A state. ``actions`` says what may happen, ``do`` lets it happen and raises ``WrongError``."""

    scope: Scope
    now: int = 0
    cores: dict[int, ShardCore] = field(default_factory=dict)
    grants: dict[int, frozenset[int]] = field(default_factory=dict)
    """As etcd has them."""

    asked: dict[int, frozenset[int]] = field(default_factory=dict)
    """What owners have asked etcd to grant them, and it has not recorded yet."""

    told: dict[int, frozenset[int]] = field(default_factory=dict)
    """What it has recorded, and they have not heard yet."""

    fences: dict[int, int] = field(default_factory=dict)
    pages: dict[int, bytes] = field(default_factory=dict)
    data: dict[int, int] = field(default_factory=dict)
    writes: list[tuple[int, SummaryWrite, int]] = field(default_factory=list)
    movers: list[Put | None] = field(default_factory=lambda: [None, None])
    puts_left: int = 0
    tags: int = 0
    listed: dict[int, dict[int, tuple[int, int]]] = field(default_factory=dict)
    """By epoch and key: tag and offset."""

    committing: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    must: dict[int, int] = field(default_factory=dict)
    """The keys of committed blocks that nobody has evicted, by tag."""

    own: dict[int, set[int]] = field(default_factory=lambda: {PREDECESSOR: set(), SUCCESSOR: set()})
    """Tags that were put to each epoch."""

    claimed: int = -1
    adopted: int = 0
    """The state of flash at the last adoption, and when that was."""

    adopted_at: int = -1

    # -------------------------------------------------------------------------------------------- begin

    @classmethod
    def begun(cls, scope: Scope) -> Scene:
        """Begin with a predecessor that has opened its first segments."""
        scene = cls(scope)
        scene._begin(PREDECESSOR)
        scene._settle(PREDECESSOR)
        for key in range(FILLERS, FILLERS + 2 * scope.blocks_per_segment) if scope.is_full else ():
            scene._put(0, PREDECESSOR, key)
            scene._land(0)
            scene._commit(0)
            scene._settle(PREDECESSOR)
            scene._look()
        scene.puts_left = scope.puts
        return scene

    def _begin(self, epoch: int) -> None:
        settings = ShardSettings(
            blocks_max=16,
            free_segments=1,
            reinsertion_share=0.0,
            hold_max_s=HOLD,
            late_write_s=self.scope.late_write_s,
            reservations_max=4,
            retry_s=1.0,
        )
        core = ShardCore(SUPERBLOCK, settings=settings)
        core.take_in(self._read())
        withheld = frozenset().union(*self.grants.values())
        core.begin(self.now, epoch=OwnerEpoch(epoch), withheld=withheld)
        self.cores[epoch], self.listed[epoch], self.grants[epoch] = core, {}, frozenset()
        self._confirm(epoch)
        self._look()

    def _settle(self, epoch: int) -> None:
        self._grant(epoch)
        core = self.cores[epoch]
        while core.has_writes_due:
            self._write(epoch)
            while self.writes:
                self._summary(0)
            self._grant(epoch)

    # ------------------------------------------------------------------------------------------ actions

    def actions(self) -> list[Action]:
        """Return what may happen."""
        landing = [("summary", position, 0, 0) for position in range(len(self.writes))]
        taking = [
            ("write", epoch, 0, 0)
            for epoch, core in self.cores.items()
            if core.commits.is_due and core.grants.may_write(self.now)
        ]
        granting = [("record", epoch, 0, 0) for epoch in self.asked]
        granting += [("apply", epoch, 0, 0) for epoch in self.told]
        return [*landing, *self._of_movers(), *taking, *granting, *self._of_successor_and_time()]

    def _of_movers(self) -> Iterator[Action]:
        for mover, put in enumerate(self.movers):
            if put is not None:
                yield self._next_of(put), mover, 0, 0
            elif self.puts_left and (mover == 0 or self.movers[0] is not None):  # they are alike
                for epoch, key in product(self.cores, range(self.scope.keys)):
                    yield "put", mover, epoch, key

    def _next_of(self, put: Put) -> str:
        """Return what becomes of a block on its way; nothing where its mover gives it up."""
        if put.is_written:
            return "commit"
        if put.is_submitted or not self.scope.is_apart:
            return "land"
        return "submit" if self.now < put.until else ""

    def _of_successor_and_time(self) -> Iterator[Action]:
        may_retire = False
        if self.claimed < 0 and self.now <= self.scope.claim_until:
            yield "claim", 0, 0, 0
        elif self.claimed >= 0 and self.cores[SUCCESSOR].grants.withheld:
            may_retire = self.now >= self.claimed + self.scope.retires_after
            if may_retire:
                yield "retire", 0, 0, 0
            elif self.adopted_at < self.now and self.adopted != self._flash():
                yield "adopt", 0, 0, 0
        if self.now < self.scope.ticks and not may_retire:
            yield "tick", 0, 0, 0

    def do(self, action: Action) -> None:
        """Let something happen, and look at what came of it."""
        what, first, second, third = action
        match what:
            case "put":
                self._put(first, second, third)
            case "claim" | "adopt" | "retire" | "tick":
                {"claim": self._claim, "adopt": self._adopt, "retire": self._retire, "tick": self._tick}[
                    what
                ]()
            case _:
                {
                    "summary": self._summary,
                    "submit": self._submit,
                    "land": self._land,
                    "commit": self._commit,
                    "write": self._write,
                    "record": self._record,
                    "apply": self._apply,
                }[what](first)
        if self.scope.is_apart:
            self._ask(max(self.cores))
        else:
            self._grant(max(self.cores))
        self._look()

    def _claim(self) -> None:
        self.claimed = self.now
        self.asked.clear()
        self._begin(SUCCESSOR)
        self._has_all()

    def _retire(self) -> None:
        self._adopt()
        self.cores[SUCCESSOR].retire(self.now, self.cores[SUCCESSOR].grants.withheld)
        del self.grants[PREDECESSOR]

    def _ask(self, epoch: int) -> None:
        """Let an owner ask for a grant as soon as it wants one; what comes of it takes its time."""
        if epoch not in self.asked and epoch not in self.told:
            wanted = self.cores[epoch].wanted_grant(self.now)
            if wanted is not None:
                self.asked[epoch] = frozenset(wanted)
                if self.scope.uses_what_it_asks:
                    self.cores[epoch].apply_grant(self.now, wanted)

    def _record(self, epoch: int) -> None:
        self.grants[epoch] = segments = self.asked.pop(epoch)
        if not self.scope.uses_what_it_asks:
            self.told[epoch] = segments

    def _apply(self, epoch: int) -> None:
        self.cores[epoch].apply_grant(self.now, self.told.pop(epoch))

    def _tick(self) -> None:
        self.now += 1
        for mover, put in enumerate(self.movers):
            if put is not None and self.now > put.until + LATE:
                self.movers[mover] = None
            elif put is not None and not put.is_written and not self._next_of(put):
                self.movers[mover] = None  # it was too late to submit it
        for late in [each for each in self.writes if self.now > each[2] + LATE]:
            self.writes.remove(late)
            epoch, write, _ = late
            self._answered(epoch, self.cores[epoch].written(self.now, write, is_ok=False))
        for core in self.cores.values():
            core.expire(self.now)
        self._confirm(max(self.cores))

    def _confirm(self, epoch: int) -> None:
        self.fences[epoch] = self.now + GRANT
        self.cores[epoch].confirm(self.fences[epoch])
        self.cores[epoch].expire(self.now)

    def _grant(self, epoch: int) -> None:
        wanted = self.cores[epoch].wanted_grant(self.now)
        if wanted is not None:
            self.grants[epoch] = frozenset(wanted)
            self.cores[epoch].apply_grant(self.now, wanted)

    def _put(self, mover: int, epoch: int, key: int) -> None:
        data_bytes = GEOMETRY.data_bytes // self.scope.blocks_per_segment // PAGE_BYTES * PAGE_BYTES
        core = self.cores[epoch]
        made = core.reserve(self.now, keys_of(key), np.array([data_bytes], np.uint32), hold_s=HOLD)
        if made.states[0] == PutState.EXISTS and key not in self.listed[epoch]:
            raise WrongError(f"block {key} is said to exist, and is not listed")
        if made.states[0] != PutState.STAGED:
            return
        if self.now >= self.fences[epoch]:
            raise WrongError(f"epoch {epoch} hands out space after its fence")
        self.puts_left -= 1
        self.tags += 1
        self.own[epoch].add(self.tags)
        offset = int(made.offsets[0])
        segment = int(core.geometry.segment_of(made.offsets)[0])
        if segment not in self.grants[epoch]:
            raise WrongError(f"epoch {epoch} hands out space of segment {segment}, which is not granted")
        generation, until = core.ring.segments[segment].generation, self.now + HOLD
        self.movers[mover] = Put(epoch, key, self.tags, int(made.reservations[0]), offset, generation, until)

    def _submit(self, mover: int) -> None:
        put = self.movers[mover]
        assert put is not None
        put.is_submitted = True

    def _land(self, mover: int) -> None:
        put = self.movers[mover]
        assert put is not None
        self._lands(put.epoch, put.offset, put.generation)
        self.data[put.offset] = put.tag
        put.is_written = True

    def _commit(self, mover: int) -> None:
        """Deliver the message, however late; it was sent in time."""
        put = self.movers[mover]
        assert put is not None
        self.movers[mover] = None
        answer = self.cores[put.epoch].commit(
            self.now,
            np.array([put.number], np.uint64),
            keys_of(put.tag),
            np.zeros(1, np.uint64),
            epoch=OwnerEpoch(put.epoch),
        )
        if answer.states[0] == PutState.STAGED:
            if self.now >= put.until:
                raise WrongError(f"a commit of block {put.key} is taken after its reservation's end")
            self.committing[put.epoch, put.number] = put.key, put.tag

    def _write(self, epoch: int) -> None:
        for write in self.cores[epoch].writes_due(self.now):
            if self.now >= self.fences[epoch]:
                raise WrongError(f"epoch {epoch} writes a summary after its fence")
            self.writes.append((epoch, write, self.now))

    def _summary(self, position: int) -> None:
        epoch, write, _ = self.writes.pop(position)
        for offset, pages in write.pieces:
            self._lands(epoch, offset, write.generation)
            for begin in range(0, len(pages), PAGE_BYTES):
                self.pages[offset + begin] = pages[begin : begin + PAGE_BYTES]
        self._answered(epoch, self.cores[epoch].written(self.now, write, is_ok=True))

    def _adopt(self) -> None:
        self.cores[SUCCESSOR].adopt(self.now, self._read())
        self.adopted, self.adopted_at = self._flash(), self.now
        self._look()
        self._has_all()

    # -------------------------------------------------------------------------------------------- looks

    def _answered(self, epoch: int, done: object) -> None:
        numbers, states = done.reservations.tolist(), done.states.tolist()  # type: ignore[attr-defined]
        for number, state in zip(numbers, states, strict=True):
            key, tag = self.committing.pop((epoch, number))
            if state == PutState.COMMITTED:
                self.must[tag] = key

    def _lands(self, epoch: int, offset: int, generation: int) -> None:
        segment = (offset - GEOMETRY.first_segment_offset) // GEOMETRY.segment_bytes
        for other, core in self.cores.items():
            opened = int(core.ring.generations[segment])
            if other > epoch and generation_parts(core.ring.segments[segment].generation)[0] == other:
                raise WrongError(f"a write of epoch {epoch} lands in segment {segment}, opened by {other}")
            if other == epoch and opened > generation:
                raise WrongError(f"a write of epoch {epoch} lands in segment {segment}, opened anew since")

    def _look(self) -> None:
        """Compare what each owner lists with what it listed before, and with flash."""
        for epoch, core in self.cores.items():
            for done in core.commits.take_declined():
                self._answered(epoch, done)
            evicted = {int(key[0]) for keys in core.catalog.take_evicted() for key in keys}
            before, now = self.listed[epoch], listed(core)
            for key, (tag, _) in before.items():
                self._stays(epoch, key, tag, now, evicted)
            self.listed[epoch] = now
        newest = max(self.cores)
        for key, (tag, offset) in self.listed[newest].items():
            segment = (offset - GEOMETRY.first_segment_offset) // GEOMETRY.segment_bytes
            if not self.cores[newest].grants.is_withheld[segment] and self.data.get(offset) != tag:
                raise WrongError(f"block {key} is listed where its bytes are not")

    def _stays(
        self, epoch: int, key: int, tag: int, now: dict[int, tuple[int, int]], evicted: set[int]
    ) -> None:
        if key not in now:
            if key not in evicted:
                raise WrongError(f"block {key} left the index of epoch {epoch} without a word")
            self.must.pop(tag, None)
        elif now[key][0] != tag and key not in evicted:
            if tag in self.own[epoch]:
                raise WrongError(f"another put took the place of block {key} in epoch {epoch}")
            self.must.pop(tag, None)

    def _has_all(self) -> None:
        """All that was committed and not evicted is listed by the successor, or another put of it is."""
        listed = self.listed[SUCCESSOR]
        for tag, key in self.must.items():
            if key not in listed:
                raise WrongError(f"block {key} was committed as {tag}, and is lost")
        self.must = {tag: key for tag, key in self.must.items() if listed[key][0] == tag}

    def _flash(self) -> int:
        return hash(frozenset(self.pages.items()))

    def _read(self) -> RecoveredAreas:
        begins = [GEOMETRY.summary_offset(segment) for segment in range(SEGMENTS)]
        blank = bytes(PAGE_BYTES)
        return _recovered(
            b"".join(
                self.pages.get(begin + at, blank)
                for begin in begins
                for at in range(0, GEOMETRY.summary_bytes, PAGE_BYTES)
            )
        )

    # ------------------------------------------------------------------------------------------- states

    def digest(self) -> int:
        """Return a number that equal states share; unequal ones, but for one chance in 2**64."""
        puts = tuple(put and put.digest() for put in self.movers)
        writes = tuple((epoch, write.segment, write.generation, begun) for epoch, write, begun in self.writes)
        fabric = (
            self.now,
            self.claimed,
            self.puts_left,
            tuple(tuple(sorted(each.items())) for each in (self.grants, self.asked, self.told)),
            tuple(max(self.now, fence) for fence in self.fences.values()),
            self._flash(),
            self.adopted if self.claimed >= 0 else 0,
            max(self.adopted_at, self.now - 1),
            tuple(sorted(self.data.items())),
            tuple(sorted(self.must.items())),
        )
        cores = tuple(core_digest(core, self.now, LATE) for core in self.cores.values())
        return hash((puts, writes, fabric, cores))

    def after(self, action: Action) -> Scene:
        """Return what comes of an event here. What it does not touch is shared. Raises ``WrongError``."""
        memo: dict[int, Any] = {}
        touched = self._touched(action)
        for epoch, core in self.cores.items():
            if epoch in touched:  # what has no part in any decision here is shared all the same
                for part in (core.budget, core.catalog.lifetimes, core.pins, core.catalog.promises):
                    memo[id(part)] = part
            else:
                memo[id(core)] = core
        scene: Scene = copy_of(self, memo)
        for epoch in touched & scene.cores.keys():
            rehouse(scene.cores[epoch])
        scene.do(action)
        return scene

    def _touched(self, action: Action) -> set[int]:
        """Return the epochs whose owner an event concerns."""
        what, first, second, _ = action
        match what:
            case "summary":
                return {self.writes[first][0]}
            case "commit":
                put = self.movers[first]
                return {put.epoch} if put is not None else set()
            case "put" | "write":
                return {second if what == "put" else first}
            case "apply":
                return {first}
            case "land" | "claim" | "submit" | "record":
                return set()
        return {SUCCESSOR} if what in ("adopt", "retire") else {PREDECESSOR, SUCCESSOR}

    def check(self) -> None:
        """Assert what each owner says must hold of itself."""
        for core in self.cores.values():
            check_core(core)


def keys_of(number: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    return np.frombuffer(number.to_bytes(16, "little"), np.uint8).reshape(1, 16)


@lru_cache(maxsize=4096)
def _recovered(areas: bytes) -> RecoveredAreas:
    rows = np.frombuffer(areas, np.uint8).reshape(SEGMENTS, -1)
    return recover(SUPERBLOCK, np.arange(SEGMENTS), rows)
