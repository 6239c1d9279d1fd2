"""The short forms of ``make soak-flash``, and that it can fail: drives that lie are found out."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.scenarios.soak_flash.content import PAGE
from tests.scenarios.soak_flash.disk import MODES, why_no_power_cut
from tests.scenarios.soak_flash.flash import newest_summary
from tests.scenarios.soak_flash.ledger import Ledger
from tests.scenarios.soak_flash.run import Options, Soak
from tests.support.fabric.fabric_host import MIB, overwrite

pytestmark = pytest.mark.slow

CAPACITY_BYTES = 2 * 33 * MIB
"""Eight segments of 4 MiB in each of two drives."""


def soaked(options: Options) -> Ledger:
    with Soak(options) as soak:
        soak.run()
    print(soak.summary())  # for who reads about a failure
    return soak.ledger


@pytest.fixture
def cuttable(tmp_path: Path) -> Path:
    why_not = why_no_power_cut(tmp_path)
    if why_not is not None:
        pytest.skip(f"no power can be cut on this machine: {why_not}")
    return tmp_path


def test_a_fabric_that_is_killed_again_and_again_loses_no_committed_block(tmp_path: Path) -> None:
    ledger = soaked(Options(tmp_path, kills=3, seed=1, capacity_bytes=CAPACITY_BYTES, life_s=0.5))
    assert ledger.violations == []
    assert ledger.counts["committed"]


@pytest.mark.parametrize("mode", MODES)
def test_a_fabric_that_flushes_loses_no_committed_block_at_a_power_cut(cuttable: Path, mode: str) -> None:
    options = Options(
        cuttable, kills=2, seed=2, capacity_bytes=CAPACITY_BYTES, life_s=0.5, power_cut=mode, flushes=True
    )
    assert soaked(options).violations == []


def test_a_fabric_that_does_not_flush_starts_after_a_power_cut_and_serves_no_wrong_byte(
    cuttable: Path,
) -> None:
    options = Options(
        cuttable,
        kills=2,
        seed=3,
        capacity_bytes=CAPACITY_BYTES,
        life_s=0.5,
        power_cut="ordered",
        flushes=False,
        is_strict=False,
    )
    assert soaked(options).violations == []


def test_blocks_that_a_power_cut_took_are_noticed(cuttable: Path) -> None:
    options = Options(
        cuttable,
        kills=8,
        seed=4,
        capacity_bytes=CAPACITY_BYTES,
        life_s=0.5,
        power_cut="journal",
        flushes=False,
    )
    assert soaked(options).violations[0].startswith("LOST: block")


def test_a_drive_that_drops_its_last_acknowledged_summary_write_is_found_out(tmp_path: Path) -> None:
    options = Options(
        tmp_path, kills=8, seed=5, capacity_bytes=CAPACITY_BYTES, life_s=0.5, tamper=drop_newest_summary
    )
    assert soaked(options).violations[0].startswith("LOST: block")


def drop_newest_summary(directory: Path) -> None:
    """Leave the flash as a drive does that said it had written a page, and had not."""
    found = newest_summary(directory)
    if found is not None:
        path, offset = found
        overwrite(path, offset, bytes(PAGE))
