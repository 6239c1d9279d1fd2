"""Names, and the ids made of them."""

from __future__ import annotations

from typing import Any

import pytest

from ostraca_fabric.errors import UsageError
from ostraca_fabric.model.ids import EnclosureId, checked_name, drive_id, drive_of, enclosure_of, shard_id


@pytest.mark.parametrize("name", ["a", "0", "llama-70b", "a.b_c-d", "x" * 63, "enclosure-07"])
def test_a_good_name_is_returned_as_it_is(name: str) -> None:
    assert checked_name("volume", name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "x" * 64,
        "A",
        "-a",
        ".",
        "..",
        "_a",
        "a/b",
        "a b",
        "a\n",
        "\n",
        "a\0",
        "ä",
        "a:b",
        "٣",
        None,
        7,
        b"a",
    ],
)
def test_a_bad_name_is_refused_with_what_a_good_one_is(name: Any) -> None:
    with pytest.raises(UsageError, match=r"volume .* is not a usable name: take 1 to 63") as refusal:
        checked_name("volume", name)
    assert ascii(name) in str(refusal.value)


def test_a_shards_id_names_its_drive_and_enclosure() -> None:
    drive = drive_id(EnclosureId("e07"), "nvme0n1")
    shard = shard_id(drive, 3)
    assert shard == "e07/nvme0n1/3"
    assert (drive_of(shard), enclosure_of(shard)) == (drive, "e07")


def test_a_drives_name_is_checked() -> None:
    with pytest.raises(UsageError, match="drive 'nvme/0'"):
        drive_id(EnclosureId("e07"), "nvme/0")
