"""Eviction: what is carried forward out of a segment that goes, and what that may cost."""

from __future__ import annotations

import numpy as np
import pytest
from tests.agent.owned_shard import OwnedShard, key, keys_of, seeds_of, tag_of

from ostraca_dpu_agent.owner.core import Carry, ShardSettings
from ostraca_fabric.ids import OwnerEpoch
from ostraca_fabric.outcome import PutState

COMMITTED = PutState.COMMITTED
PER_SEGMENT = 15
BLOCK_BYTES = 64 << 10


def shard_of(segments: int = 8, carry_share: float = 1.0) -> OwnedShard:
    return OwnedShard(segments=segments, settings=ShardSettings(carry_share=carry_share))


def numbers_of(carry: Carry) -> list[int]:
    return [int.from_bytes(each.tobytes(), "little") for each in carry.keys]


def until_carry(shard: OwnedShard, first: int, length: int = BLOCK_BYTES) -> tuple[Carry, int]:
    """Put blocks until a segment is to be carried; returns it, and the number of the block to put next."""
    for number in range(first, first + 1000):
        assert shard.put([number], length) == [COMMITTED]
        carry = shard.core.eviction.take_carry()
        if carry is not None:
            return carry, number + 1
    raise AssertionError("nothing was ever to be carried")


def copy(shard: OwnedShard, carry: Carry, *, ends: bool = True) -> list[int]:
    """Copy as the shell does, but for the bytes; returns the blocks that found space."""
    made = shard.core.reserve_carried(shard.now_s, carry.keys, carry.lengths, hold_s=5.0)
    rows = np.flatnonzero(made.states == PutState.STAGED)
    numbers = [numbers_of(carry)[row] for row in rows.tolist()]
    shard.core.commit(
        shard.now_s,
        made.reservations[rows],
        carry.tags[rows],
        seeds_of(numbers),
        epoch=OwnerEpoch(shard.epoch),
    )
    shard.core.check()
    shard.settle()
    if ends:
        shard.core.eviction.end_carry(shard.now_s, carry)
        shard.core.check()
    return numbers


def test_blocks_read_since_they_were_written_outlive_their_segment_and_others_go() -> None:
    shard = shard_of()
    shard.put(list(range(PER_SEGMENT)))
    read = [0, 3, 7]
    before = shard.core.resolve(shard.now_s, keys_of(read), pin_s=0.0)
    carry, _ = until_carry(shard, 100)
    assert numbers_of(carry) == read
    assert shard.found(read) == read, "they can be got meanwhile"
    assert copy(shard, carry) == read
    assert shard.found(list(range(PER_SEGMENT))) == read
    after = shard.core.resolve(shard.now_s, keys_of(read), pin_s=0.0)
    assert (after.generations > before.generations).all()
    assert (after.offsets != before.offsets).all()
    counts = shard.core.counts()
    assert (counts.blocks_carried, counts.bytes_carried) == (3, 3 * BLOCK_BYTES)
    assert counts.blocks_evicted == PER_SEGMENT - 3


def test_a_copy_has_to_be_read_again_to_be_carried_again() -> None:
    shard = shard_of()
    shard.put(list(range(PER_SEGMENT)))
    shard.found([0, 3])
    carry, number = until_carry(shard, 100)
    copy(shard, carry)
    shard.core.resolve(shard.now_s, keys_of([3]), pin_s=0.0)
    carry, _ = until_carry(shard, number)
    assert numbers_of(carry) == [3]
    copy(shard, carry)
    assert shard.found([0, 3]) == [3]


def test_a_copy_is_found_again_after_a_restart() -> None:
    shard = shard_of()
    shard.put(list(range(PER_SEGMENT)))
    shard.found([5])
    carry, number = until_carry(shard, 100)
    copy(shard, carry)
    shard.put([number])
    shard.restart()
    assert shard.found([5]) == [5]


@pytest.mark.parametrize("carry_share", [0.0, 0.1, 0.25])
def test_what_is_carried_is_at_most_a_share_of_what_is_committed(carry_share: float) -> None:
    shard = shard_of(carry_share=carry_share)
    for number in range(400):
        shard.put([number])
        shard.found([number])
        carry = shard.core.eviction.take_carry()
        if carry is not None:
            copy(shard, carry)
    counts = shard.core.counts()
    assert counts.bytes_carried <= carry_share * counts.bytes_committed
    assert counts.bytes_carried >= 0.6 * carry_share * counts.bytes_committed, "the share is made use of"


def test_writers_who_need_the_space_are_not_held_up_by_copies() -> None:
    shard = shard_of()
    shard.put(list(range(PER_SEGMENT)))
    shard.found(list(range(PER_SEGMENT)))
    carry, number = until_carry(shard, 100)
    for number in range(number, number + 3 * PER_SEGMENT):  # noqa: B020 (it goes on from there)
        assert shard.put([number]) == [COMMITTED], "whoever copies has stopped, and nobody waits"
    assert not shard.core.eviction.is_wanted(carry)
    assert shard.found(list(range(PER_SEGMENT))) == []
    assert copy(shard, carry) == [], "what has gone is not brought back"


def test_copies_that_were_under_way_when_their_segment_went_are_found_in_the_end() -> None:
    shard = shard_of()
    shard.put(list(range(PER_SEGMENT)))
    shard.found([1, 2])
    carry, number = until_carry(shard, 100)
    made = shard.core.reserve_carried(shard.now_s, carry.keys, carry.lengths, hold_s=5.0)
    while shard.core.eviction.is_wanted(carry):
        shard.put([number])
        number += 1
    assert shard.found([1, 2]) == []
    assert shard.reserve([1]).states[0] == PutState.DECLINED, "somebody is writing it"
    shard.commit(made.reservations, [1, 2])
    shard.settle()
    assert shard.found([1, 2]) == [1, 2]


def test_a_segment_that_a_look_up_was_promised_meanwhile_stays_until_then() -> None:
    shard = shard_of()
    shard.put(list(range(PER_SEGMENT)))
    shard.found([4])
    carry, number = until_carry(shard, 100)
    assert shard.core.resolve(shard.now_s, keys_of([9, 4]), pin_s=3.0, promises=True).found.all()
    copy(shard, carry)
    for number in range(number, number + 200):  # noqa: B020 (it goes on from there)
        assert shard.put([number]) == [COMMITTED]
    assert shard.found([9, 4]) == [9, 4], "also the one that lies elsewhere now"
    shard.pass_time(3.0)
    for number in range(number + 1, number + 200):  # noqa: B020 (it goes on from there)
        assert shard.put([number]) == [COMMITTED]
    assert 9 not in shard.found([9, 4])


def test_a_block_found_damaged_while_it_waits_for_its_copy_is_not_copied() -> None:
    shard = shard_of()
    shard.put(list(range(PER_SEGMENT)))
    shard.found([1, 2])
    carry, _ = until_carry(shard, 100)
    place = shard.core.resolve(shard.now_s, keys_of([1]), pin_s=0.0)
    assert shard.core.drop(
        key(1), offset=int(place.offsets[0]), generation=int(place.generations[0]), tag=tag_of(1)
    )
    assert copy(shard, carry) == [2]
    assert shard.found([1, 2]) == [2]


def test_a_shard_of_two_segments_carries_nothing_and_takes_every_put() -> None:
    shard = shard_of(segments=2)
    for number in range(100):
        assert shard.put([number]) == [COMMITTED]
        shard.found([number])
        assert shard.core.eviction.take_carry() is None


def test_a_copy_whose_summary_can_not_be_written_leaves_the_block_where_it_was() -> None:
    shard = shard_of(segments=32)  # so many that two are kept free
    shard.put([1])
    shard.found([1])
    carry, _ = until_carry(shard, 100, length=900_000)
    made = shard.core.reserve_carried(shard.now_s, carry.keys, carry.lengths, hold_s=5.0)
    shard.commit(made.reservations, [1])
    (write,) = (write for write in shard.core.writes_due() if write.segment != carry.segment)
    shard.core.written(shard.now_s, write, is_ok=False)
    shard.core.check()
    assert shard.core.eviction.is_wanted(carry)
    assert shard.found([1]) == [1]
    shard.core.eviction.end_carry(shard.now_s, carry)
    shard.core.check()
    assert shard.found([1]) == []
