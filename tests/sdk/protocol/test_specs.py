"""Cutting batches into requests, and judging arguments."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostraca._protocol.operations import blocks_per_request, window_blocks, windows
from ostraca._protocol.specs import check_batch, checked_chains, checked_seconds
from ostraca_fabric.errors import UsageError
from ostraca_fabric.model.chain import Chain
from ostraca_fabric.model.outcome import Ack
from ostraca_fabric.wire.frames import encode
from ostraca_fabric.wire.messages import ConnectionLimits, Put


def chain(blocks: int, *, is_chained: bool = True) -> Chain:
    return Chain.of(
        [bytes([number % 256]) * 32 for number in range(blocks)], hash_bytes=32, is_chained=is_chained
    )


@given(st.lists(st.integers(0, 40), max_size=5), st.integers(1, 50))
def test_windows_cover_every_block_once_and_in_order(lengths: list[int], blocks_max: int) -> None:
    chains = [chain(length) for length in lengths]
    cut = list(windows(chains, blocks_max))
    assert b"".join(part.span().hashes for window in cut for part in window) == b"".join(
        each.span().hashes for each in chains
    )
    assert all(sum(map(len, window)) <= blocks_max for window in cut)


@pytest.mark.parametrize("is_chained", [True, False])
@pytest.mark.parametrize("frame_bytes_max", [4096, 100_000])
def test_a_request_of_the_most_blocks_fits_its_frame(frame_bytes_max: int, is_chained: bool) -> None:
    limits = ConnectionLimits(frame_bytes_max=frame_bytes_max, blocks_max=10_000, inflight_max=4)
    blocks = blocks_per_request(limits, 32)
    span = chain(blocks, is_chained=is_chained).span()
    message = Put(
        1 << 63,
        1 << 31,
        0.123456789,
        Ack.COMMITTED,
        (span,),
        bytes(4 * blocks),
        bytes(16 * blocks),
        bytes(8 * blocks),
        1 << 24,
    )
    assert len(encode(message)) <= frame_bytes_max
    assert blocks_per_request(ConnectionLimits(1 << 30, 17, 4), 32) == 17
    assert blocks_per_request(ConnectionLimits(64, 17, 4), 32) == 1


def test_a_batch_that_fits_the_arena_is_one_window_and_a_larger_one_is_cut_into_shares() -> None:
    assert window_blocks(left=64, blocks_max=1024, arena_slots=64, windows_inflight=4) == 64
    assert window_blocks(left=65, blocks_max=1024, arena_slots=64, windows_inflight=4) == 16
    assert window_blocks(left=65, blocks_max=8, arena_slots=64, windows_inflight=4) == 8
    assert window_blocks(left=2, blocks_max=8, arena_slots=1, windows_inflight=4) == 1


def test_the_first_of_many_windows_is_short_so_that_the_prefix_comes_early() -> None:
    assert window_blocks(left=64, blocks_max=1024, arena_slots=64, windows_inflight=4, is_first=True) == 64
    many = window_blocks(left=9999, blocks_max=1024, arena_slots=1024, windows_inflight=4, is_first=True)
    assert many == 8
    assert window_blocks(left=65, blocks_max=1024, arena_slots=64, windows_inflight=4, is_first=True) == 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e9, "1", None, True])
def test_a_time_that_cannot_be_kept_to_is_refused(value: object) -> None:
    with pytest.raises(UsageError, match="deadline_s"):
        checked_seconds("deadline_s", value, longest_s=3600.0)


@pytest.mark.parametrize("value", [0, -1.0, 0.5, 3600])
def test_times_that_can_be_kept_to_pass_also_when_they_are_over(value: float) -> None:
    assert checked_seconds("deadline_s", value, longest_s=3600.0) == value


def test_chains_of_another_layout_and_things_that_are_no_chains_are_refused() -> None:
    assert checked_chains(chain(2), hash_bytes=32) == (chain(2),)
    assert checked_chains([chain(2), chain(3)], hash_bytes=32) == (chain(2), chain(3))
    with pytest.raises(UsageError, match="hashes of 32 bytes and the volume's layout says 16"):
        checked_chains(chain(2), hash_bytes=16)
    with pytest.raises(UsageError, match=r"build a chain with volume\.chain"):
        checked_chains([b"hash"], hash_bytes=32)


def test_a_batch_over_the_limit_is_refused_with_what_to_do() -> None:
    check_batch(512, blocks_max=512)
    with pytest.raises(UsageError, match="slice the chain"):
        check_batch(513, blocks_max=512)
