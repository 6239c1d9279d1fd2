"""A volume with puts and no hit is noticed, once, and the first hit ends that for good."""

from __future__ import annotations

import pytest

from ostraca_fabric.model.outcome import BlockState, PutState, Reason
from ostraca_fabric.telemetry.requests import (
    NOTICE_BLOCKS,
    UNHIT_BLOCKS,
    HitWatch,
    HitWatches,
    unhit_sentence,
)


def put(watch: HitWatch, blocks: int, state: PutState = PutState.STAGED) -> None:
    watch.count("put", bytes([state] * blocks), bytes(blocks))


def asked(
    watch: HitWatch, blocks: int, reason: Reason = Reason.NOT_FOUND, state: BlockState = BlockState.MISS
) -> None:
    watch.count("lookup", bytes([state] * blocks), bytes([reason] * blocks))


def test_a_volume_with_puts_and_no_hit_is_noticed_once() -> None:
    watch = HitWatch()
    put(watch, UNHIT_BLOCKS)
    asked(watch, UNHIT_BLOCKS - 1)
    said = [watch.is_unhit]
    asked(watch, 1)
    said += [watch.is_unhit, watch.take_notice()]
    assert said == [False, True, False]
    put(watch, NOTICE_BLOCKS, PutState.COMMITTED)
    asked(watch, NOTICE_BLOCKS)
    assert [watch.take_notice() for _ in range(3)] == [True, False, False]
    assert watch.put_blocks == watch.asked_blocks == UNHIT_BLOCKS + NOTICE_BLOCKS


def test_what_is_asked_for_before_anything_was_put_says_nothing() -> None:
    watch = HitWatch()
    asked(watch, NOTICE_BLOCKS)
    put(watch, NOTICE_BLOCKS)
    assert not watch.is_unhit


@pytest.mark.parametrize("reason", sorted(set(Reason) - {Reason.NOT_FOUND, Reason.NONE}))
def test_misses_that_have_another_reason_say_nothing(reason: Reason) -> None:
    watch = HitWatch()
    put(watch, NOTICE_BLOCKS)
    asked(watch, NOTICE_BLOCKS, reason)
    assert not watch.is_unhit


@pytest.mark.parametrize("by_put", [True, False])
def test_the_first_hit_ends_it_for_good(*, by_put: bool) -> None:
    watch = HitWatch()
    put(watch, NOTICE_BLOCKS)
    asked(watch, NOTICE_BLOCKS)
    if by_put:  # two writers have hashed alike
        put(watch, 1, PutState.EXISTS)
    else:
        asked(watch, 1, Reason.NONE, BlockState.HIT)
    put(watch, NOTICE_BLOCKS)
    asked(watch, NOTICE_BLOCKS)
    assert not watch.is_unhit
    assert not watch.take_notice()


def test_blocks_that_were_declined_were_not_put() -> None:
    watch = HitWatch()
    put(watch, NOTICE_BLOCKS, PutState.DECLINED)
    asked(watch, NOTICE_BLOCKS)
    assert not watch.is_unhit


def test_of_too_many_volumes_that_used_longest_ago_is_forgotten() -> None:
    watches = HitWatches(2)
    for volume in ("a", "b", "a", "c"):
        for operation, state in (("put", PutState.STAGED), ("lookup", BlockState.MISS)):
            reasons = bytes([Reason.NOT_FOUND] * UNHIT_BLOCKS)
            watches.count(volume, operation, bytes([state] * UNHIT_BLOCKS), reasons)
    assert [volume for volume, _ in watches.unhit()] == ["c", "a"]


def test_the_sentence_says_what_to_look_at() -> None:
    sentence = unhit_sentence("chat/kv", put_blocks=48, asked_blocks=32)
    for words in ("chat/kv", "48 blocks were put", "32 requested since", "PYTHONHASHSEED"):
        assert words in sentence
