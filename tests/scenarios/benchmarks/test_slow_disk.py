"""Measurements on a disk that stalls for seconds."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.support.write_throttle import throttled_writers, unavailable_reason

from ostraca_cli.tools.bench import suite
from ostraca_cli.tools.bench.series import Pacing
from ostraca_fabric.model.outcome import Ack

pytestmark = pytest.mark.slow

MIB = 1 << 20
BYTES_S = 2 * MIB
"""A write of a wave of 8 MiB takes four seconds, longer than drives that are files may be silent."""


@pytest.mark.skipif(bool(unavailable_reason()), reason="the disk can't be held back here")
def test_puts_to_a_slow_disk_are_measured(tmp_path: Path) -> None:
    plan = suite.BenchPlan(blocks=8, block_bytes=MIB, pace=Pacing(warm_ups=0, rounds_min=1, seconds=0.0))
    with (
        throttled_writers(tmp_path) as writers,
        suite.own_workload(plan, tmp_path, dram_bytes=0) as work,
        writers.throttled(BYTES_S),
    ):
        staged = work.put(Ack.STAGED)
        committed = work.put(Ack.COMMITTED)
    assert committed < 8 * MIB / 3e9 < staged, "the second took at least three seconds"
