"""Adapter class under SGLang's own factory, host pools and HiCache controller, on a real fabric."""

from __future__ import annotations

import hashlib
import importlib
import importlib.machinery
import importlib.util
import json
import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from tests.support.fabric.fabric_host import FabricThread

from ostraca.connectors.sglang.settings import SglangSettings
from ostraca_cli.testing import small_plan

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(
        importlib.util.find_spec("sglang") is None,
        reason="SGLang is not installed here; make test-sglang makes an environment that has it",
    ),
    # SGLang and torch warn at import, not about a backend.
    pytest.mark.filterwarnings("ignore"),
]

PAGE_TOKENS = 16
PATIENCE_S = 30.0
PAGE = (Path(__file__).parents[4] / "docs" / "howto" / "engines" / "sglang.md").read_text()
_TORCHVISION = ("", ".transforms", ".transforms.functional", ".io", ".utils", ".ops")


@pytest.fixture(scope="module", autouse=True)
def sglang_imports() -> None:
    """Import SGLang without torchvision, whose builds need CUDA; the cache does not use it."""
    # This module looks for torchvision, and is not to find the stand-in.
    importlib.import_module("transformers.models.auto.processing_auto")
    for name in (*_TORCHVISION, ".transforms.v2", ".transforms.v2.functional"):
        module = MagicMock()
        module.__spec__, module.__path__ = importlib.machinery.ModuleSpec(f"torchvision{name}", None), []
        sys.modules.setdefault(f"torchvision{name}", module)


@pytest.fixture
def fabric(tmp_path: Path) -> Iterator[FabricThread]:
    with FabricThread(small_plan(tmp_path / "fabric")) as started:
        yield started


def extra_config(address: str, **changes: object) -> dict[str, Any]:
    """Return the page's configuration, for a small fabric."""
    (block,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    written: dict[str, Any] = json.loads(block)
    del written["hicache_storage_pass_prefix_keys"]  # SGLang's cache takes this key for itself
    small = {"arena_bytes": 32 << 20, "transports": ["inline"], "connect_retry_s": 0.05}
    del written["ostraca"]["token_file"]
    written["ostraca"] |= small | {"agents": address, "lookup_deadline_s": 2.0} | changes
    return written


def page_hashes(tokens: Any, prior: str | None = None, page_size: int | None = None) -> list[str]:
    """Name pages as SGLang does; its own function needs a C++ compiler."""
    found = []
    for begin in range(0, len(tokens), page_size or 1):
        named = (prior or "").encode() + bytes(str(list(tokens[begin : begin + (page_size or 1)])), "ascii")
        found.append(prior := hashlib.sha256(named).hexdigest())
    return found


def until(is_so: Callable[[], bool]) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < until_s, "it did not come to be"
        threading.Event().wait(0.005)


def host_pool(layout: str, *, is_mla: bool = False) -> tuple[Any, Any]:
    """Return SGLang's device pool, here in host memory, and its host pool of 33 pages."""
    import torch
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    common = {"size": 256, "page_size": PAGE_TOKENS, "dtype": torch.bfloat16, "layer_num": 3}
    common |= {"device": "cpu", "enable_memory_saver": False}
    host = {"host_to_device_ratio": 2.0, "host_size": 0, "page_size": PAGE_TOKENS, "layout": layout}
    host |= {"pin_memory": False, "device_capacity_tokens": 256, "start_layer": 0, "end_layer": 3}
    if is_mla:
        device = MLATokenToKVPool(**common, kv_lora_rank=128, qk_rope_head_dim=64)
        return device, MLATokenToKVPoolHost(device._mla_buffer_info(), **host, target_layer_num=3)
    device = MHATokenToKVPool(**common, head_num=2, head_dim=64)
    return device, MHATokenToKVPoolHost(device._mha_buffer_info(), **host)


def fill(pool: Any, seed: int) -> Any:
    """Fill a host pool with numbers that differ everywhere; return a copy."""
    import torch

    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape, generator=torch.Generator().manual_seed(seed)))
    return pool.kv_buffer.clone()


@contextmanager
def controller(config: dict[str, Any], layout: str = "page_first", *, is_mla: bool = False) -> Iterator[Any]:
    """Return SGLang's controller with the backend attached as by its server."""
    import torch
    from sglang.srt.managers import cache_controller
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
    from sglang.srt.runtime_context import get_parallel

    cache_controller.get_storage_hash_str = page_hashes
    device, host = host_pool(layout, is_mla=is_mla)
    allocator = PagedTokenToKVPoolAllocator(256, PAGE_TOKENS, torch.bfloat16, "cpu", device, need_sort=False)
    started = cache_controller.HiCacheController(
        allocator, host, PAGE_TOKENS, None, threading.Event(), io_backend="direct"
    )
    ranks = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_dcp_size": 1, "attn_dcp_rank": 0}
    with get_parallel().override(**ranks):
        started.attach_storage_backend("dynamic", PAGE_TOKENS, "test/model", config)
        try:
            yield started
        finally:
            started.detach_storage_backend()


def ready(started: Any) -> Any:
    backend = started.storage_backend
    until(lambda: getattr(backend, "_backend", backend).report_status()["is_usable"])
    return started


def back_up(started: Any, tokens: list[int], indices: Any) -> int:
    """Store pages as after a prefill; return the stored tokens."""
    keys = page_hashes(tokens, None, PAGE_TOKENS)
    started.write_storage(indices, tokens, keys, prefix_keys=[])
    stored: int = started.ack_backup_queue.get(timeout=PATIENCE_S).completed_tokens
    return stored


def prefetch(started: Any, tokens: list[int], indices: Any) -> tuple[int, int]:
    """Query and load pages as for a request; return the found and the loaded tokens."""
    operation = started.prefetch("request", tokens, prefix_keys=[])
    assert started.prefetch_hit_queue.get(timeout=PATIENCE_S) is operation
    found = operation.storage_hit_count
    operation.host_indices = indices[:found]
    started.prefetch_buffer.put(operation)
    loaded = 0
    while not (ack := started.ack_prefetch_queue.get(timeout=PATIENCE_S)).completed_req:
        loaded = ack.completed_tokens or loaded
    return found, loaded


TOKENS = list(range(8 * PAGE_TOKENS))


@pytest.mark.parametrize(
    ("layout", "is_mla"),
    [("page_first", False), ("page_first_direct", False), ("layer_first", False), ("page_first", True)],
)
def test_a_second_engine_loads_what_the_first_has_stored(
    fabric: FabricThread, layout: str, is_mla: bool
) -> None:
    import torch

    config = extra_config(fabric.addresses[0])
    with controller(config, layout, is_mla=is_mla) as writer:
        pool = ready(writer).mem_pool_host
        content = fill(pool, 1)
        indices = pool.alloc(len(TOKENS))
        assert back_up(writer, TOKENS, indices) == len(TOKENS)
        stats = writer.storage_backend.get_stats()
        assert stats.backup_pgs == [8]
        assert stats.backup_bandwidth[0] > 0
        assert not writer.storage_backend.get_stats().backup_pgs
    with controller(config, layout, is_mla=is_mla) as reader:
        pool = ready(reader).mem_pool_host
        empty = torch.zeros_like(pool.kv_buffer)
        pool.kv_buffer.copy_(empty)
        longer = [*TOKENS, *range(1000, 1000 + PAGE_TOKENS)]
        assert prefetch(reader, longer, pool.alloc(len(TOKENS))) == (len(TOKENS), len(TOKENS))
        (addresses, sizes), begin = pool.get_page_buffer_meta(indices), pool.kv_buffer.data_ptr()
        expected = empty.view(torch.uint8).flatten()
        for address, size in zip(addresses, sizes, strict=True):
            part = slice(address - begin, address - begin + size)
            expected[part] = content.view(torch.uint8).flatten()[part]
        assert torch.equal(pool.kv_buffer.view(torch.uint8).flatten(), expected), (
            "only these pages are written"
        )
        other = [token + 1 for token in TOKENS]
        assert prefetch(reader, other, indices) == (0, 0)


@pytest.mark.parametrize(
    ("layout", "is_mla"),
    [("page_first", False), ("page_first_direct", False), ("layer_first", False), ("layer_first", True)],
)
def test_engines_without_interface_v1_share_pages_with_each_other_alone(
    fabric: FabricThread, layout: str, is_mla: bool
) -> None:
    import torch

    old = extra_config(fabric.addresses[0], prefix_keys=False)
    del old["interface_v1"]
    with controller(old, layout, is_mla=is_mla) as writer:
        assert writer.page_set_func == writer._generic_page_set
        pool = ready(writer).mem_pool_host
        fill(pool, 1)
        indices = pool.alloc(len(TOKENS))
        stored = [pool.get_data_page(index).clone() for index in indices[::PAGE_TOKENS]]
        assert back_up(writer, TOKENS, indices) == len(TOKENS)
        assert writer.storage_backend.get_stats().backup_pgs == [8]
    with controller(old, layout, is_mla=is_mla) as reader:
        pool = ready(reader).mem_pool_host
        pool.kv_buffer.zero_()
        indices = pool.alloc(len(TOKENS))
        assert prefetch(reader, TOKENS, indices) == (len(TOKENS), len(TOKENS))
        for index, page in zip(indices[::PAGE_TOKENS], stored, strict=True):
            assert torch.equal(pool.get_data_page(index), page)
        (key,) = page_hashes(TOKENS[:PAGE_TOKENS], None, PAGE_TOKENS)
        filled = reader.storage_backend.get(key, pool.get_dummy_flat_data_page())
        assert torch.equal(filled, stored[0])
        assert reader.storage_backend.get("unknown", pool.get_dummy_flat_data_page()) is None
        assert reader.storage_backend.set("one", stored[0])
        assert reader.storage_backend.exists("one")
    with controller(old | {"interface_v1": 1}, layout, is_mla=is_mla) as other:
        pool = ready(other).mem_pool_host
        assert prefetch(other, TOKENS, pool.alloc(len(TOKENS))) == (0, 0)


def test_after_a_clear_an_engine_finds_only_pages_stored_afterwards(
    fabric: FabricThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ostraca.connectors.sglang.adapter import OstracaHiCache

    monkeypatch.setattr(OstracaHiCache, "_generation", b"")
    config = extra_config(fabric.addresses[0])
    with controller(config) as started:
        pool = ready(started).mem_pool_host
        indices = pool.alloc(len(TOKENS))
        assert back_up(started, TOKENS, indices) == len(TOKENS)
        started.reset()
        assert prefetch(started, TOKENS, indices) == (len(TOKENS), len(TOKENS)), "as after /flush_cache"
        assert started.storage_backend.clear()
        assert prefetch(started, TOKENS, indices) == (0, 0)
        assert back_up(started, TOKENS[: 4 * PAGE_TOKENS], indices[: 4 * PAGE_TOKENS]) == 4 * PAGE_TOKENS
        assert prefetch(started, TOKENS, indices) == (4 * PAGE_TOKENS, 4 * PAGE_TOKENS)
    with controller(config) as again:
        indices = ready(again).mem_pool_host.alloc(len(TOKENS))
        assert prefetch(again, TOKENS, indices) == (4 * PAGE_TOKENS, 4 * PAGE_TOKENS), "attached again"
    monkeypatch.setattr(OstracaHiCache, "_generation", b"")
    with controller(config) as other:
        indices = ready(other).mem_pool_host.alloc(len(TOKENS))
        assert prefetch(other, TOKENS, indices) == (len(TOKENS), len(TOKENS)), "another engine"


def test_ranks_of_a_process_group_agree_on_each_generation(tmp_path: Path) -> None:
    import torch.distributed

    from ostraca.connectors.sglang.adapter import _common_generation

    assert _common_generation(1) != _common_generation(1), "ranks without a process group are alone"
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        first, second = (_common_generation(number) for number in (1, 2))
        assert [_common_generation(number) for number in (1, 2)] == [first, second]
        assert len({first, second}) == 2
    finally:
        torch.distributed.destroy_process_group()


def test_injected_failures_and_delays_cost_pages_and_never_bring_wrong_bytes(
    fabric: FabricThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.4")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.01")
    with controller(extra_config(fabric.addresses[0])) as started:
        assert type(started.storage_backend).__name__ == "HiCacheStorageFailureInjector"
        pool = ready(started).mem_pool_host
        content = fill(pool, 1)
        indices = pool.alloc(len(TOKENS))
        stored = [back_up(started, TOKENS, indices) for _ in range(20)]
        assert set(stored) == {0, len(TOKENS)}, "some are injected to fail, and some are not"
        outcomes = set()
        for _ in range(40):
            pool.kv_buffer.zero_()
            found, loaded = prefetch(started, TOKENS, indices)
            outcomes.add((found, loaded))
            assert (
                torch.equal(pool.kv_buffer[:, :loaded], content[:, :loaded])
                if loaded
                else not pool.kv_buffer.any()
            )
        assert outcomes == {(0, 0), (len(TOKENS), 0), (len(TOKENS), len(TOKENS))}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lookup_deadline": 1}, "has no setting 'lookup_deadline'; did you mean lookup_deadline_s"),
        ({"weights_file": "/nothing"}, "weights_file /nothing can't be read"),
        ({"agents": "http://host"}, "http://host"),
        ({}, "no agent could be reached"),
        ({"transports": ["nixl"]}, "no fabric yet"),
        ({"top": {"agents": "unix:///x.sock"}}, 'agents belongs into "ostraca"'),
        ({"top": {"ostraca": None}}, '"ostraca" of the extra configuration must be an object'),
        ({"top": {"ostraca": "unix:///x.sock"}}, '"ostraca" of the extra configuration must be an object'),
        ({"top": {"interface_v1": 0}}, 'prefix_keys needs "interface_v1": 1'),
    ],
)
def test_a_wrong_configuration_yields_one_line_and_misses(
    caplog: pytest.LogCaptureFixture, changes: dict[str, Any], words: str
) -> None:
    top = changes.pop("top", {})
    with controller(extra_config("unix:///nobody.sock", **changes) | top) as started:
        indices = started.mem_pool_host.alloc(len(TOKENS))
        assert back_up(started, TOKENS, indices) == 0
        assert prefetch(started, TOKENS, indices) == (0, 0)
        until(lambda: words in caplog.text)
    ours = [each for each in caplog.records if each.name == SglangSettings.LOGGER]
    assert [words in each.getMessage() for each in ours if each.levelno >= logging.WARNING] == [True]


def test_the_longest_prefix_of_several_pools_is_found(fabric: FabricThread) -> None:
    import torch
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

    with controller(extra_config(fabric.addresses[0])) as started:
        pool, backend = ready(started).mem_pool_host, started.storage_backend
        _, further = host_pool("page_first", is_mla=True)
        backend.register_mem_host_pool_v2(further, PoolName.SWA)
        content = fill(further, 2)
        indices, keys = pool.alloc(len(TOKENS)), page_hashes(TOKENS, None, PAGE_TOKENS)
        assert backend.batch_set_v1(keys, indices) == [True] * 8

        def window(first: int, end: int) -> PoolTransfer:
            tokens = torch.arange(first * PAGE_TOKENS, end * PAGE_TOKENS)
            return PoolTransfer(PoolName.SWA, tokens, keys=keys[first:end])

        from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo

        after = HiCacheStorageExtraInfo(prefix_keys=keys[:3])
        assert backend.batch_set_v2([window(3, 5)], after) == {"swa": [True, True]}
        trailing = PoolTransfer(PoolName.SWA, keys=["", ""], hit_policy=PoolHitPolicy.TRAILING_PAGES)
        found = backend.batch_exists_v2(keys, [trailing])
        assert (found.kv_hit_pages, found.restorable_prefix_pages) == (5, [5])
        assert found.extra_pool_hit_pages == {"kv": 8, "swa": 5}
        found = backend.batch_exists_v2(keys, [PoolTransfer(PoolName.SWA)])
        assert (found.kv_hit_pages, found.restorable_prefix_pages) == (0, [])
        further.kv_buffer.zero_()
        assert backend.batch_get_v2([window(3, 5)], after) == {"swa": [True, True]}
        assert torch.equal(further.kv_buffer[48:80], content[48:80])
        flat = [pool.get_dummy_flat_data_page() for _ in keys]
        assert backend.batch_get(keys, flat) == [None] * 8, "the pool's pages have parts"
