"""Stores that stand for a fabric in other projects' benchmarks."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.third_party import mooncake_storage
from benchmarks.third_party.mooncake_storage import FabricStore, Score, load_judge
from tests.support.fabric.fabric_host import FabricThread

from ostraca_cli.testing import small_plan
from ostraca_fabric.errors import UsageError

PAGE_BYTES = 64 << 10


def test_pages_are_found_once_written_and_compared_at_each_read(tmp_path: Path) -> None:
    with FabricThread(small_plan(tmp_path / "fabric")) as fabric, fabric.connect() as client:
        store = FabricStore(client, lambda _: {}, page_size=PAGE_BYTES, max_pages=10)
        assert not store.exists(3)
        store.write(3, offset_in_page=0, length=PAGE_BYTES)
        store.write(4)
        assert store.exists(3)
        assert store.read(3) > 0
        told = store.get_stats()
        assert (told["read"]["count"], told["write"]["count"]) == (1, 2)
        store.close(force_sync=True)

        store.read(5)
        with pytest.raises(AssertionError, match="1 pages were found and not read"):
            store.close()
        with pytest.raises(AssertionError, match="whole pages"):
            store.read(3, offset_in_page=1)
        store._source[8] ^= 1
        with pytest.raises(AssertionError, match="page 3 has wrong bytes"):
            store.read(3)


def test_a_folder_without_the_judge_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=mooncake_storage.COMMIT):
        load_judge(tmp_path)


def test_scores_are_medians_and_ratios_of_pairs() -> None:
    file, fabric = Score(100.0, 10.0, 1.0, 2.0, 0.5), Score(50.0, 20.0, 1.0, 4.0, 0.5)
    text = mooncake_storage.table({"plain file": [file, file, file], "fabric": [fabric, fabric, fabric]})
    assert text.splitlines()[-1].split() == ["ratio", "0.50", "2.00", "1.00", "2.00", "1.00"]
