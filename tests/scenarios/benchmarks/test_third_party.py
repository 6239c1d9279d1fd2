"""Stores that stand for a fabric in other projects' benchmarks."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from benchmarks.third_party import comparison, mlperf_kv_cache, mooncake_storage
from benchmarks.third_party.lmcache_l2 import ObjectRates
from benchmarks.third_party.mlperf_kv_cache import EntryStore, Judge, VerifyingStore
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


@dataclass
class IOTiming:
    """The judge's class of this name."""

    total: float
    device: float
    host: float


def test_entries_of_many_blocks_are_compared_at_each_read_and_every_loss_is_told(tmp_path: Path) -> None:
    with FabricThread(small_plan(tmp_path / "fabric")) as fabric, fabric.connect() as client:
        entries = EntryStore(client, IOTiming, base_path="unused")
        store = VerifyingStore(entries)
        data = np.random.default_rng(0).integers(0, 1 << 16, (3, 2, 300_000), np.uint16).view(np.float16)
        assert store.write("a", data).total > 0
        store.write("b", data[:1])
        for key, written in (("a", data), ("b", data[:1])):
            read, timing = store.read(key)
            assert read.tobytes() == written.tobytes()
            assert (read.shape, read.dtype, timing.total > 0) == (written.shape, written.dtype, True)
        assert (store.reads, store.failures) == (2, [])

        whole = entries._entries["a"]
        entries._entries["a"] = dataclasses.replace(whole, names=[*whole.names[:-1], bytes(32)])
        with pytest.raises(OSError, match=r"blocks are lost: .* 1 HIT; prefix 1"):
            store.read("a")
        entries._entries["a"] = dataclasses.replace(whole, names=[bytes([n] * 32) for n in range(2)])
        with pytest.raises(OSError, match=r"the whole prompt is lost: .* 2 MISS"):
            store.read("a")
        store._digests["b"] = bytes(16)
        with pytest.raises(ValueError, match="wrong bytes"):
            store.read("b")
        store.delete("b")
        with pytest.raises(KeyError):
            store.read("b")
        store.end()
        with pytest.raises(InterruptedError):
            store.read("a")
        assert [each.split(":")[0] for each in store.failures] == [
            *["read of a"] * 2,
            "read of b",
            "eviction of b",
            "read of b",
        ]


def test_memory_of_a_dropped_entry_serves_again_without_its_bytes() -> None:
    memory = mlperf_kv_cache.ReadMemory()
    entry = memory.take((3, 1 << 20), np.dtype(np.uint16))
    entry[:] = 7
    part, place = entry[2], entry.ctypes.data
    del entry
    assert memory.take((3, 1 << 20), np.dtype(np.uint16)).ctypes.data != place, "a view keeps the memory"
    assert (part == 7).all()
    del part
    again = [memory.take((3, 1 << 20), np.dtype(np.uint16)) for _ in range(2)]
    (reused,) = (each for each in again if each.ctypes.data == place)
    assert (reused != 7).any(axis=1).all()


def test_a_lost_object_and_a_timeout_fail_lmcaches_benchmark() -> None:
    good = {"rounds_timed_out": 0, "total_keys": 8, "throughput_avg_mbps": 5.0, "duration_avg_ms": 2.0}
    store = {**good, "operation": "Store", "total_success": 8}
    lookup = {**good, "operation": "Lookup", "total_success": 4}
    load = {**good, "operation": "Load", "total_success": 8}
    rates = ObjectRates.of({"config": {}, "op_0": store, "op_1": lookup, "op_2": load})
    assert rates == ObjectRates(store_mb_s=5.0, load_mb_s=5.0, lookup_ms=2.0)
    for wrong in ({"total_success": 7}, {"rounds_timed_out": 1}):
        with pytest.raises(AssertionError, match="'Load'"):
            ObjectRates.of({"op_0": store, "op_1": lookup, "op_2": load | wrong})


def test_a_folder_without_the_judge_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=mooncake_storage.COMMIT):
        load_judge(tmp_path)
    with pytest.raises(UsageError, match=mlperf_kv_cache.COMMIT):
        Judge(tmp_path)


def test_scores_are_medians_and_ratios_of_pairs() -> None:
    file, fabric = Score(100.0, 10.0, 1.0, 2.0, 0.5), Score(50.0, 20.0, 1.0, 4.0, 0.5)
    other = dataclasses.replace(fabric, requests_s=25.0)
    text = comparison.table({"file": [file] * 3, "other": [other] * 3, "fabric": [fabric, fabric, other]})
    assert [line.split()[-5:] for line in text.splitlines()[-2:]] == [
        ["0.50", "2.00", "1.00", "2.00", "1.00"],
        ["2.00", "1.00", "1.00", "1.00", "1.00"],
    ]
