"""The owner's core against a model: any order of calls, torn summary writes, late writes, restarts."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.support.agent.owned_shard import OwnedShard, key, keys_of, rows16, seeds_of, tag_of
from tests.support.agent.shard_invariants import check_core

from ostraca_dpu_agent.shards.core import ReinsertionBatch, ShardSettings, SummaryWrite
from ostraca_fabric.model.extent import PAGE_BYTES, rounded_up
from ostraca_fabric.model.ids import OwnerEpoch
from ostraca_fabric.model.outcome import PutState, Reason
from ostraca_fabric.policies.endurance import EnduranceSettings

BLOCKS = 25
SETTINGS = ShardSettings(
    blocks_max=24,
    reinsertion_share=4.0,
    pin_max_s=8.0,
    hold_max_s=8.0,
    late_write_s=5.0,
    pins_max=6,
    reservations_max=12,
)

SCARCE = EnduranceSettings(rated_dwpd=3000.0, burst_s=20.0, retry_s=2.0)
"""Less than the puts of a history want."""


@dataclass(frozen=True)
class Hold:
    """A reservation, as its holder knows it."""

    reservation: int
    number: int
    offset: int
    length: int
    version: int
    end_s: float


@dataclass(frozen=True)
class Pin:
    """A pin, and what must stay where it is while it lasts."""

    number: int
    end_s: float
    bytes_at: dict[int, bytes]


POOLS = (0, 5, 6)
SHARES = st.dictionaries(st.sampled_from(POOLS[1:]), st.sampled_from([0.2, 0.4, 0.9]))

WANTED = st.lists(st.tuples(st.integers(0, BLOCKS - 1), st.integers(1, 400_000)), max_size=6)


class OwnerMachine(RuleBasedStateMachine):
    """A block is its own tag, again and again: so flash itself says what lies where."""

    def __init__(self) -> None:
        super().__init__()
        self.holds: list[Hold] = []
        self.abandoned: list[Hold] = []
        self.pins: list[Pin] = []
        self.promised: dict[int, float] = {}
        """Until when each block was promised."""

        self.under_way: list[SummaryWrite] = []
        self.batch: ReinsertionBatch | None = None
        self.committing: dict[int, Hold] = {}
        self.committed: set[tuple[int, bytes]] = set()
        self.tried: set[tuple[int, bytes]] = set()
        self.version = 0
        self.began_s = 0.0
        self.admitted_bytes = 0
        """Handed out since the owner began."""

    @initialize(
        segments=st.sampled_from([2, 3, 4, 5, 6, 9]),
        block_bytes=st.sampled_from([4096, 65536]),
        is_scarce=st.booleans(),
        shares=SHARES,
    )
    def begin(self, segments: int, block_bytes: int, is_scarce: bool, shares: dict[int, float]) -> None:
        self.endurance = SCARCE if is_scarce else SETTINGS.endurance
        settings = replace(SETTINGS, endurance=self.endurance)
        self.shard = OwnedShard(segments=segments, block_bytes=block_bytes, settings=settings, shares=shares)
        self.began_s = self.now_s

    @property
    def now_s(self) -> float:
        return self.shard.now_s

    @rule(
        wanted=WANTED,
        hold_s=st.floats(0.5, 10.0),
        ttl_s=st.sampled_from([math.inf, math.inf, 1.0, 3.0, 20.0]),
        pool=st.sampled_from(POOLS),
    )
    def begin_puts(self, wanted: list[tuple[int, int]], hold_s: float, ttl_s: float, pool: int) -> None:
        self.reserve(wanted, hold_s, ttl_s, pool)

    @rule(shares=SHARES)
    def share_out(self, shares: dict[int, float]) -> None:
        could_be_got = self.listed()
        self.shard.share_out(shares)
        assert self.listed() == could_be_got, "nothing goes by it"
        self.shard.core.expire(self.now_s)  # what is above its share may go from here on

    def reserve(
        self, wanted: list[tuple[int, int]], hold_s: float, ttl_s: float = math.inf, pool: int = 0
    ) -> None:
        numbers, lengths = [number for number, _ in wanted], [length for _, length in wanted]
        can_be_got = {number for number, _ in self.listed()}
        answer = self.shard.core.reserve(
            self.now_s,
            keys_of(numbers),
            np.array(lengths, np.uint32),
            hold_s=hold_s,
            depths=np.arange(len(numbers), dtype=np.uint32),
            ttl_s=ttl_s,
            pool=pool,
        )
        if not self.endurance.has_budget:
            assert not {Reason.ADMISSION, Reason.BUDGET} & set(answer.reasons.tolist())
        for position, number in enumerate(numbers):
            assert (answer.states[position] == PutState.EXISTS) == (number in can_be_got)
            if answer.states[position] != PutState.STAGED:
                assert answer.reservations[position] == answer.offsets[position] == 0
                continue
            self.version += 1
            hold = Hold(
                int(answer.reservations[position]),
                number,
                int(answer.offsets[position]),
                lengths[position],
                self.version,
                self.now_s + min(hold_s, SETTINGS.hold_max_s),
            )
            self.write_block(hold)
            self.holds.append(hold)
            self.admitted_bytes += rounded_up(hold.length)

    @precondition(lambda self: self.batch is None and self.shard.core.reinsertion.is_due)
    @rule()
    def begin_reinsertion(self) -> None:
        self.batch = self.shard.core.reinsertion.take()

    @precondition(lambda self: self.batch is not None)
    @rule(data=st.data(), hold_s=st.floats(0.5, 10.0))
    def copy(self, data: st.DataObject, hold_s: float) -> None:
        """Write and commit copies, before or after their segment is gone, some with others."""
        batch = self.batch
        assert batch is not None
        rows = data.draw(st.lists(st.integers(0, len(batch) - 1), unique=True, min_size=1))
        keys, lengths = batch.keys[rows], batch.lengths[rows]
        answer = self.shard.core.reserve_copies(self.now_s, keys, lengths, hold_s=hold_s)
        for at, row in enumerate(rows):
            if answer.states[at] == PutState.STAGED:
                tag = batch.tags[row].tobytes()
                version = int.from_bytes(tag[8:], "big")
                number, offset = int.from_bytes(tag[:8], "little"), int(answer.offsets[at])
                end_s = self.now_s + min(hold_s, SETTINGS.hold_max_s)
                hold = Hold(int(answer.reservations[at]), number, offset, int(lengths[at]), version, end_s)
                self.write_block(hold)
                self.holds.append(hold)

    @precondition(lambda self: self.batch is not None)
    @rule()
    def end_reinsertion(self) -> None:
        assert self.batch is not None
        self.shard.core.end_reinsertion(self.now_s)
        self.batch = None

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        self.commit_held(data.draw(st.lists(st.sampled_from(self.holds), unique=True, min_size=1)))

    @rule(wanted=WANTED, pool=st.sampled_from(POOLS))
    def put(self, wanted: list[tuple[int, int]], pool: int) -> None:
        """Whole puts, so that the ring goes round within one example."""
        for block in wanted:
            earlier = set(self.holds)
            self.reserve([block], 5.0, pool=pool)
            self.commit_held([hold for hold in self.holds if hold not in earlier])
            self.settle()

    @rule(
        first=st.integers(0, BLOCKS - 1),
        length=st.sampled_from([4096, 150_000]),
        pool=st.sampled_from(POOLS),
    )
    def fill(self, first: int, length: int, pool: int) -> None:
        """Many puts in a row, until a segment is to be reinserted."""
        for number in range(first, first + BLOCKS):
            if self.batch is None and self.shard.core.reinsertion.is_due:
                self.begin_reinsertion()
                break
            self.put([(number % BLOCKS, length)], pool)

    @precondition(lambda self: self.batch is not None)
    @rule(data=st.data())
    def reinsert(self, data: st.DataObject) -> None:
        """Copy a block from start to end."""
        earlier = set(self.holds)
        self.copy(data, 5.0)
        self.commit_held([hold for hold in self.holds if hold not in earlier])
        self.settle()
        self.end_reinsertion()

    def commit_held(self, chosen: list[Hold]) -> None:
        answer = self.shard.core.commit(
            self.now_s,
            np.array([hold.reservation for hold in chosen], np.uint64),
            rows16([tag_of(hold.number, hold.version) for hold in chosen]),
            seeds_of([hold.number for hold in chosen]),
            epoch=OwnerEpoch(self.shard.epoch),
        )
        for hold, state in zip(chosen, answer.states, strict=True):
            assert state == PutState.DECLINED or self.now_s < hold.end_s
            self.holds.remove(hold)
            if state == PutState.STAGED:
                self.committing[hold.reservation] = hold
                self.tried.add((hold.number, tag_of(hold.number, hold.version)))

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        hold = data.draw(st.sampled_from(self.holds))
        self.shard.core.release(self.now_s, [], np.array([hold.reservation], np.uint64))
        self.holds.remove(hold)

    @precondition(lambda self: self.abandoned)
    @rule(data=st.data())
    def write_late(self, data: st.DataObject) -> None:
        """Write for a holder that abandoned its reservation, as late as allowed."""
        self.write_block(data.draw(st.sampled_from(self.abandoned)))

    @rule()
    def begin_writes(self) -> None:
        self.under_way += self.shard.core.writes_due(self.now_s)

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), is_ok=st.sampled_from([True, True, True, False]), seed=st.integers(0, 1 << 30))
    def end_write(self, data: st.DataObject, is_ok: bool, seed: int) -> None:
        write = self.under_way.pop(data.draw(st.integers(0, len(self.under_way) - 1)))
        if is_ok:
            self.shard.write_pieces(write)
        else:
            self.tear(write, seed)
        self.end(write, is_ok=is_ok)

    @rule()
    def settle(self) -> None:
        """All writes end well."""
        while self.under_way or self.shard.core.has_writes_due:
            for write in self.under_way + self.shard.core.writes_due(self.now_s):
                self.shard.write_pieces(write)
                self.end(write, is_ok=True)
            self.under_way.clear()

    def end(self, write: SummaryWrite, *, is_ok: bool) -> None:
        done = self.shard.core.written(self.now_s, write, is_ok=is_ok)
        for reservation, state in zip(done.reservations.tolist(), done.states.tolist(), strict=True):
            hold = self.committing.pop(reservation)
            assert state == (PutState.COMMITTED if is_ok else PutState.DECLINED)
            if is_ok:
                self.committed.add((hold.number, tag_of(hold.number, hold.version)))

    @rule(
        numbers=st.lists(st.integers(0, BLOCKS - 1), max_size=8),
        pin_s=st.floats(0.1, 10.0),
        promises=st.booleans(),
    )
    def resolve(self, numbers: list[int], pin_s: float, promises: bool) -> None:
        answer = self.shard.core.resolve(self.now_s, keys_of(numbers), pin_s=pin_s, promises=promises)
        bytes_at = {}
        for position in np.flatnonzero(answer.found).tolist():
            tag, offset = answer.tags[position].tobytes(), int(answer.offsets[position])
            assert (numbers[position], tag) in self.committed
            bytes_at[offset] = tag
        assert bool(answer.pin) == (bool(bytes_at) and not promises)
        if bytes_at:
            end_s = self.now_s + min(pin_s, SETTINGS.pin_max_s)
            self.pins.append(Pin(answer.pin, end_s, bytes_at))
            for position in np.flatnonzero(answer.found).tolist() if promises else ():
                number = numbers[position]
                self.promised[number] = max(end_s, self.promised.get(number, 0.0))

    @rule(numbers=st.lists(st.integers(0, BLOCKS - 1), max_size=8))
    def end_session(self, numbers: list[int]) -> None:
        could_be_got = self.listed()
        self.shard.core.catalog.end_session(keys_of(numbers))
        assert self.listed() == could_be_got

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def release_pin(self, data: st.DataObject) -> None:
        pin = data.draw(st.sampled_from(self.pins))
        self.pins.remove(pin)
        self.shard.core.release(self.now_s, [pin.number], np.zeros(0, np.uint64))

    @rule(number=st.integers(0, BLOCKS - 1))
    def drop(self, number: int) -> None:
        found = self.shard.core.resolve(self.now_s, keys_of([number]), pin_s=0.0)
        if found.found[0]:
            assert self.shard.core.drop(
                key(number),
                offset=int(found.offsets[0]),
                generation=int(found.generations[0]),
                tag=found.tags[0].tobytes(),
            )
            self.promised.pop(number, None)
        assert number not in {listed for listed, _ in self.listed()}

    @rule(seconds=st.floats(0.1, 6.0))
    def pass_time(self, seconds: float) -> None:
        self.shard.now_s += seconds
        self.pins = [pin for pin in self.pins if self.now_s < pin.end_s]
        self.promised = {number: end_s for number, end_s in self.promised.items() if self.now_s < end_s}
        self.abandoned += [hold for hold in self.holds if hold.end_s <= self.now_s]
        self.holds = [hold for hold in self.holds if self.now_s < hold.end_s]
        may_write_until = SETTINGS.late_write_s
        self.abandoned = [hold for hold in self.abandoned if self.now_s < hold.end_s + may_write_until]
        self.shard.core.expire(self.now_s)

    @rule(seed=st.integers(0, 1 << 30))
    def restart(self, seed: int) -> None:
        """Kill the owner with all its work; its successor has only the flash."""
        could_be_got = self.listed()
        for position, write in enumerate(self.under_way):
            self.tear(write, seed + position)
        on_flash = {
            (int.from_bytes(entry["key"].tobytes(), "little"), entry["tag"].tobytes())
            for found in self.shard.recovered().segments
            for entry in found.entries
        }
        assert could_be_got <= on_flash <= self.tried
        # Also what was declined because its write failed, and is there all the same.
        self.committed |= on_flash
        self.under_way.clear()
        self.batch = None
        self.committing.clear()
        self.holds.clear()
        self.abandoned.clear()
        ends_s = [*(pin.end_s for pin in self.pins), *self.promised.values()]
        self.shard.restart(earlier_pins_end_s=max(ends_s, default=0.0))
        self.began_s, self.admitted_bytes = self.now_s, 0
        if self.shard.core.counts().blocks_beyond_limit:
            # Evicted blocks still on flash come back, and the oldest find no room in the index.
            could_be_got = self.listed()
            self.promised = {
                number: end_s
                for number, end_s in self.promised.items()
                if number in {each for each, _ in could_be_got}
            }

    @invariant()
    def holds_true(self) -> None:
        if not hasattr(self, "shard"):
            return
        check_core(self.shard.core)
        for pin in self.pins:
            for offset, tag in pin.bytes_at.items():
                assert self.shard.flash[offset : offset + 16] == tag
        listed = self.listed()
        for number, tag in listed:
            assert (number, tag) in self.committed
        assert self.promised.keys() <= {number for number, _ in listed}, "what was promised can be found"
        if self.endurance.has_budget:
            rate = self.endurance.budget_bytes_per_day(self.shard.geometry.shard_bytes) / 86_400
            paid_s = self.now_s - self.began_s + SCARCE.first_touch_reserve * SCARCE.burst_s
            # For each pool it may be one block more, and what others lend is counted a second late.
            blocks, late_s = len(list(self.shard.core.ring.pools)), 1.0
            most = rate * (paid_s + late_s) + blocks * (400_000 + PAGE_BYTES)
            assert self.admitted_bytes <= most, "no more than the budget"

    def listed(self) -> set[tuple[int, bytes]]:
        """Return what can be got, after comparing it with what lies on flash."""
        numbers = list(range(BLOCKS))
        answer = self.shard.core.resolve(self.now_s, keys_of(numbers), pin_s=0.0)
        listed = set()
        for number in np.flatnonzero(answer.found).tolist():
            offset, tag = int(answer.offsets[number]), answer.tags[number].tobytes()
            assert self.shard.flash[offset : offset + 16] == tag
            listed.add((number, tag))
        return listed

    def write_block(self, hold: Hold) -> None:
        stored = rounded_up(hold.length)
        self.shard.flash[hold.offset : hold.offset + stored] = tag_of(hold.number, hold.version) * (
            stored // 16
        )

    def tear(self, write: SummaryWrite, seed: int) -> None:
        """Leave each page of a write as it was, as it should be, as something between, or as garbage."""
        roll = random.Random(seed)
        for offset, pages in write.pieces:
            for at in range(0, len(pages), PAGE_BYTES):
                new, torn = pages[at : at + PAGE_BYTES], roll.randrange(PAGE_BYTES)
                old = bytes(self.shard.flash[offset + at : offset + at + PAGE_BYTES])
                page = roll.choice([old, new, new[:torn] + old[torn:], roll.randbytes(PAGE_BYTES)])
                self.shard.flash[offset + at : offset + at + PAGE_BYTES] = page


TestOwnerAgainstAModel = OwnerMachine.TestCase
TestOwnerAgainstAModel.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
