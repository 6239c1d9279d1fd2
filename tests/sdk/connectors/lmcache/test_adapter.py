"""Adapter class under LMCache's own storage manager, controllers and benchmark, on a real fabric."""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.fabric.fabric_host import FabricProcess, FabricThread

from ostraca.connectors.lmcache.settings import LmcacheSettings
from ostraca_cli.testing import small_plan
from ostraca_fabric.errors import UsageError

pytestmark = [
    pytest.mark.lmcache,
    pytest.mark.skipif(
        importlib.util.find_spec("lmcache") is None,
        reason="LMCache is not installed here; make test-lmcache makes an environment that has it",
    ),
    # LMCache and numba warn at import, not about a plug-in.
    pytest.mark.filterwarnings("ignore"),
]

MIB = 1 << 20
PATIENCE_S = 20.0
SHAPE = (2, 4, 16, 2048)
"""KV, layers, tokens, heads: 512 KiB of bfloat16, in 8 blocks."""


def entry(address: str, **changes: object) -> dict[str, Any]:
    """Return an entry of LMCache's configuration."""
    params = {"agents": address, "arena_bytes": 32 * MIB, "transports": ["inline"], "block_bytes": 64 << 10}
    return {
        "type": "plugin",
        "module_path": "ostraca.connectors.lmcache",
        "class_name": "OstracaL2Adapter",
        "adapter_params": params | {"lookup_deadline_s": 2.0, "connect_retry_s": 0.05} | changes,
        "shared": True,
    }


def adapters_config(written: dict[str, Any]) -> Any:
    from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config

    return parse_args_to_l2_adapters_config(argparse.Namespace(l2_adapter=[json.dumps(written)]))


def keys(count: int) -> list[Any]:
    from lmcache.v1.distributed.api import ObjectKey

    rank = ObjectKey.ComputeKVRank(world_size=1, global_rank=0, local_world_size=1, local_rank=0)
    return [ObjectKey(number.to_bytes(16, "big"), "test/model", rank) for number in range(count)]


def layout(dtype: str = "bfloat16") -> Any:
    import torch
    from lmcache.v1.distributed.api import MemoryLayoutDesc

    return MemoryLayoutDesc(shapes=[torch.Size(SHAPE)], dtypes=[getattr(torch, dtype)])


def until(is_so: Callable[[], bool]) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < until_s, "it did not come to be"
        threading.Event().wait(0.005)


class CacheServer:
    """LMCache's storage manager with one L2 adapter."""

    def __init__(self, written: dict[str, Any]) -> None:
        from lmcache.v1.distributed.config import (
            EvictionConfig,
            L1ManagerConfig,
            L1MemoryManagerConfig,
            StorageManagerConfig,
        )
        from lmcache.v1.distributed.storage_manager import StorageManager

        memory = L1MemoryManagerConfig(64 * MIB, use_lazy=False, shm_name="")
        self.manager = StorageManager(
            StorageManagerConfig(L1ManagerConfig(memory), EvictionConfig("LRU"), adapters_config(written))
        )
        ((_, self.adapter),) = self.manager.l2_adapters()

    @property
    def counters(self) -> dict[str, int]:
        found: dict[str, int] = self.adapter.report_status()["counters"]
        return found

    def wait_for_the_fabric(self) -> None:
        until(lambda: not self.adapter.report_status()["refusal"])

    def write(self, of: list[Any], values: list[int]) -> None:
        """Write objects into L1, as LMCache does after a prefill; the store controller goes on."""
        reserved = self.manager.reserve_write(of, layout())
        for key, value in zip(of, values, strict=True):
            reserved[key].tensor.fill_(value)
        self.manager.finish_write(of)

    def prefetch(self, of: list[Any], dtype: str = "bfloat16") -> list[float | None]:
        """Prefetch into L1, as LMCache does for a request; return the value of each object found."""
        from lmcache.v1.distributed.api import GroupedObjectKeys, PrefetchTaskSpec

        group = GroupedObjectKeys(of, 0, layout(dtype))
        handle = self.manager.submit_prefetch_task(PrefetchTaskSpec([group], fetching_policy="full"))
        assert self.manager.wait_prefetch_status(handle, PATIENCE_S), "a prefetch is never over"
        result = self.manager.query_prefetch_status(handle)
        assert result is not None
        found = [key for n, key in enumerate(of) if result.hit_cells[0].test(n)]
        values: dict[Any, float] = {}
        with self.manager.read_prefetched_results(found) as objects:
            for key, each in zip(found, objects or [], strict=True):
                assert each.tensor.min() == each.tensor.max()
                values[key] = float(each.tensor.max())
        self.manager.finish_read_prefetched(found)
        return [values.get(key) for key in of]


@contextmanager
def cache_server(written: dict[str, Any]) -> Iterator[CacheServer]:
    server = CacheServer(written)
    try:
        yield server
    finally:
        server.manager.close()


@pytest.fixture
def fabric(tmp_path: Path) -> Iterator[FabricThread]:
    with FabricThread(small_plan(tmp_path / "fabric")) as started:
        yield started


def test_a_second_server_loads_what_the_first_has_computed(fabric: FabricThread) -> None:
    written = entry(fabric.addresses[0])
    with cache_server(written) as server:
        server.wait_for_the_fabric()
        server.write(keys(5), [1, 2, 3, 4, 5])
        until(lambda: server.adapter.get_usage().total_bytes_used == 5 * 512 << 10)
        server.adapter.delete(keys(1))
        assert server.adapter.get_usage().total_bytes_used == 4 * 512 << 10
    with cache_server(written) as server:
        server.wait_for_the_fabric()
        assert server.prefetch(keys(7)) == [1, 2, 3, 4, 5, None, None]
        assert server.counters["load_bytes"] == 5 * 512 << 10
        server.manager.clear()
        assert server.prefetch(keys(7)) == [1, 2, 3, 4, 5, None, None]
    with cache_server(written) as server:
        server.wait_for_the_fabric()
        assert server.prefetch(keys(7), "float16") == [None] * 7, "the type is another, the size is not"
        assert server.counters["lookup_chunks_not_found"] == 7 * 8


def test_a_server_without_a_fabric_serves_and_uses_a_later_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with cache_server(entry(f"unix://{tmp_path}/fabric/agent-0.sock")) as server:
        server.write(keys(3), [1, 2, 3])
        until(lambda: server.counters.get("store_chunks_no_fabric", 0) == 3 * 8)
        assert server.prefetch(keys(4)) == [1, 2, 3, None], "L1 answers alone"
        assert server.adapter.report_status()["is_healthy"]
        with FabricThread(small_plan(tmp_path / "fabric")):
            server.wait_for_the_fabric()
            later = keys(6)[3:]
            server.write(later, [4, 5, 6])
            until(lambda: server.adapter.get_usage().total_bytes_used == 3 * 512 << 10)
            server.manager.clear()
            until(lambda: server.prefetch(later) == [4, 5, 6])
    ours = [each for each in caplog.records if each.name == LmcacheSettings.LOGGER]
    assert sum(each.levelno >= logging.WARNING for each in ours) <= 1


def test_a_wrong_setting_ends_the_start_with_advice() -> None:
    from lmcache.v1.distributed.l2_adapters import create_l2_adapter

    (config,) = adapters_config(entry("unix:///nobody.sock", lookup_deadline=1)).adapters
    with pytest.raises(UsageError, match="did you mean lookup_deadline_s"):
        create_l2_adapter(config)


def test_memory_that_the_host_cannot_address_fails_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    from lmcache.v1.distributed.l2_adapters import create_l2_adapter

    class DeviceObject:
        @property
        def byte_array(self) -> bytes:
            raise NotImplementedError("no bytes here")

        def get_size(self) -> int:
            return 4096

    (config,) = adapters_config(entry("unix:///nobody.sock")).adapters
    adapter = create_l2_adapter(config)
    descriptors = {
        adapter.get_store_event_fd(),
        adapter.get_lookup_and_lock_event_fd(),
        adapter.get_load_event_fd(),
    }
    assert len(descriptors) == 3
    number = adapter.submit_store_task(keys(2), [DeviceObject(), DeviceObject()])
    assert select.select([adapter.get_store_event_fd()], [], [], PATIENCE_S)[0]
    results = adapter.pop_completed_store_tasks()
    assert [(each, result.is_successful()) for each, result in results.items()] == [(number, False)]
    number = adapter.submit_load_task(keys(1), [DeviceObject()])
    bitmap = adapter.query_load_result(number)
    assert bitmap is not None
    assert not bitmap.test(0)
    assert adapter.query_load_result(number) is None
    adapter.submit_unlock(keys(1))
    adapter.close()
    assert caplog.text.count("objects of DeviceObject are neither stored nor loaded: no bytes here") == 1


@pytest.mark.slow
def test_lmcaches_benchmark_verifies_every_byte(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    shape = ("--drives", "2", "--capacity", "520MiB", "--dram", "0", "--transport", "inline")
    with FabricProcess(tmp_path / "fabric", *shape) as host:
        done = subprocess.run(
            [
                *(sys.executable, "-c", "from lmcache.cli.main import main; main()", "bench", "l2"),
                *("--l2-adapter", json.dumps(entry(host.address, block_bytes=MIB, start_wait_s=20))),
                *("--num-keys", "8", "--in-flight", "2", "--data-size-kb", "2560", "--rounds", "2"),
                *("--lookup-max-hit-rate", "0.5", "--no-skip-verify"),
                *("--format", "json", "--output", str(report), "--quiet"),
            ],
            env={**os.environ, "LMCACHE_TRACK_USAGE": "false", "DO_NOT_TRACK": "1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=200,
        )
        host.check_log()
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = json.loads(report.read_text())["metrics"]
    found = {each["operation"]: SimpleNamespace(**each) for name, each in metrics.items() if name != "config"}
    assert {name: each.rounds_timed_out for name, each in found.items()} == {
        "Store": 0,
        "Lookup": 0,
        "Load": 0,
    }
    assert found["Store"].total_success == found["Load"].total_success == found["Load"].total_keys == 32
    assert found["Lookup"].total_success == 16
