"""What makes a drive fit, and what is said of one that is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ostraca_enclosure.drives import Fitness, FitSettings, FoundDrive, Traits, fitness, rated_dwpd
from ostraca_fabric.errors import UsageError
from ostraca_fabric.model.inventory import DriveWear

TB = 10**12
WEAR = DriveWear(
    percentage_used=4,
    available_spare=100,
    spare_threshold=10,
    media_errors=0,
    temperature_c=40,
    bytes_written=300 * TB,
)
TRAITS = Traits((1, 4), False, False, 0, (512, 4096))
GOOD = FoundDrive(
    "nvme0n1", "/dev/nvme0n1", "1" * 32, 3_840 * 10**9, 4096, "M", "S", "F", wear=WEAR, traits=TRAITS
)
ASKED = FitSettings()


def with_wear(**changed: int) -> FoundDrive:
    return replace(GOOD, wear=replace(WEAR, **changed))


def with_traits(**changed: Any) -> FoundDrive:
    return replace(GOOD, traits=replace(TRAITS, **changed))


def test_a_drive_for_servers_is_fit() -> None:
    assert fitness(GOOD, ASKED) == Fitness()


@pytest.mark.parametrize(
    ("drive", "said"),
    [
        (replace(GOOD, size_bytes=1 << 30), "use a larger drive, or lower fit.size_bytes_min"),
        (replace(GOOD, lba_bytes=520), "logical blocks have 520 bytes"),
        (
            replace(GOOD, health_error="nvme is missing: install nvme-cli", wear=None),
            "health is unknown",
        ),
        (with_traits(version=(1, 3)), "NVMe version is 1.3, and at least 1.4 is required"),
        (with_traits(has_volatile_cache=True), "use a drive with power-loss protection"),
        (with_traits(wants_host_memory=True), "uses host memory"),
        (with_traits(metadata_bytes=8), "8 bytes of metadata"),
        (with_wear(critical_warning=1), "spare capacity is below the threshold"),
        (with_wear(critical_warning=2), "temperature is beyond"),
        (with_wear(critical_warning=4), "degraded by errors"),
        (with_wear(critical_warning=8), "media are read-only"),
        (with_wear(critical_warning=16), "power-loss protection has failed"),
        (with_wear(critical_warning=32), "persistent memory"),
        (with_wear(critical_warning=64), "0x40"),
        (with_wear(available_spare=9), "spare capacity is 9 %"),
        (with_wear(percentage_used=81, bytes_written=20_000 * TB), "81 % of the rated endurance is used"),
        (with_wear(media_errors=1), "1 media errors"),
        (with_wear(bytes_written=60 * TB), "is 0.21 drive writes a day over 5 years"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_each_doubt_has_a_remedy(drive: FoundDrive, said: str) -> None:
    (doubt,) = fitness(drive, ASKED).doubts
    assert said in doubt
    assert ": " in doubt
    assert not fitness(drive, ASKED).is_fit


def test_low_wear_gives_no_endurance_estimate() -> None:
    assert rated_dwpd(GOOD, replace(WEAR, percentage_used=2)) is None
    assert rated_dwpd(GOOD, WEAR) == pytest.approx(1.07, abs=0.01)
    assert fitness(with_wear(percentage_used=2, bytes_written=TB), ASKED).is_fit


def test_blocks_of_512_bytes_are_fit_with_advice() -> None:
    small = replace(GOOD, lba_bytes=512)
    assert fitness(small, ASKED).is_fit
    assert "`nvme format`" in fitness(small, ASKED).advice[0]
    only = replace(small, traits=replace(TRAITS, lba_sizes=(512,)))
    assert "`nvme format`" not in fitness(only, ASKED).advice[0]


def test_files_have_no_requirements() -> None:
    assert fitness(FoundDrive("drive-0", "/d/drive-0.img", "1" * 32, 4096, 4096, is_file=True), ASKED).is_fit


def test_limits_can_be_lowered_within_range() -> None:
    assert fitness(replace(GOOD, size_bytes=1 << 30), FitSettings(size_bytes_min=1, dwpd_min=0)).is_fit
    with pytest.raises(UsageError, match="used_percent_max is 1 to 100"):
        FitSettings(used_percent_max=0)
