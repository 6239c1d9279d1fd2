"""Losses by the failure of an enclosure."""

from __future__ import annotations

import numpy as np
import pytest
from tests.cli.tools.replay.small_traces import trace_of

from ostraca_cli.tools.replay.loss import EnclosureMap, losses, place_blocks
from ostraca_cli.tools.replay.plan import ReplayPlan, parse_capacity

HASHES = np.random.default_rng(5).integers(0, 256, (4000, 16), np.uint8)


def plan(enclosures: int, *stripe_units: int) -> ReplayPlan:
    return ReplayPlan(
        capacities=(parse_capacity("300%"),),
        blocks_per_segment=2,
        enclosures=enclosures,
        stripe_units=stripe_units,
    )


def test_blocks_of_a_stripe_unit_lie_together_and_others_do_not() -> None:
    homes = EnclosureMap(np.array([3, 1, 2, 0, 4, 5]), 2)
    assert homes.of(np.array([0, 1, 2, 3, 4])).tolist() == [3, 3, 2, 2, 4]


def test_enclosures_get_even_shares_and_when_one_goes_only_its_own_blocks_move() -> None:
    before = place_blocks(HASHES, range(8), unit_blocks=1, seed=1).of_first_block
    after = place_blocks(HASHES, [0, 1, 2, 3, 4, 6, 7], unit_blocks=1, seed=1).of_first_block
    assert np.bincount(before, minlength=8) == pytest.approx(500, rel=0.2)
    assert (before == after).tolist() == (before != 5).tolist()


def test_a_prompt_of_one_unit_is_lost_whole_or_not_at_all() -> None:
    trace = trace_of(*[[1, 2, 3, 4, 5, 6, 7, 8]] * 40)
    (lost,) = losses(trace, plan(2, 8), lambda _title, _part: None)
    assert (lost.immediate_mean.prefix, lost.immediate_worst.prefix) == (0.5, 1.0)
    assert (lost.immediate_mean.tolerant, lost.immediate_worst.tolerant) == (0.5, 1.0)
    assert lost.load_max_over_mean == 2.0
    # Of 20 requests after the death, the first misses everything, and puts it elsewhere.
    assert lost.final.prefix == lost.final.tolerant == pytest.approx(1 / 20)


def test_what_died_is_put_again_so_that_less_is_lost_in_the_end_than_at_once() -> None:
    prompts = [[number * 10 + place for place in range(6)] for number in range(30)]
    trace = trace_of(*prompts * 12)
    found = list(losses(trace, plan(6, 1, 6), lambda _title, _part: None))
    assert [loss.unit_blocks for loss in found] == [1, 6]
    for loss in found:
        assert 0 < loss.final.prefix < loss.immediate_worst.prefix
        assert loss.immediate_mean.tolerant == pytest.approx(1 / 6)
        assert loss.immediate_mean.tolerant <= loss.immediate_mean.prefix <= loss.immediate_worst.prefix
    by_block, by_prompt = found
    assert by_prompt.immediate_mean.prefix == pytest.approx(1 / 6)
    assert by_block.immediate_mean.prefix > 2 / 6


def test_progress_is_told_from_nothing_to_everything() -> None:
    told: list[tuple[str, float]] = []
    trace = trace_of(*[[1, 2, 3, 4, 5, 6, 7, 8]] * 4)
    list(losses(trace, plan(2, 1), lambda title, part: told.append((title, part))))
    assert [part for _, part in told] == [0.0, 1.0, 0.0, 1.0]
    assert told[0][0] == "loss of 1 of 2 enclosures"
