"""Some histories of a whole fabric; ``make soak-sim`` plays many. A seed tells all of one."""

from __future__ import annotations

import pytest
from tests.simulation.fabric.history import play

BATCH = 5
BATCHES = 6


@pytest.mark.parametrize("batch", range(BATCHES))
def test_no_history_of_a_fabric_shows_what_must_never_be(batch: int) -> None:
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        print(f"python -m tests.simulation.fabric --histories 1 --jobs 1 --seed {seed}")
        play(seed)


def test_a_seed_tells_all_of_a_fabrics_history() -> None:
    assert play(7) == play(7)
    assert play(7) != play(8)
