"""LMCache's engine with the storage plug-in, as in an engine's process, on pages in place of a GPU."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from lmcache.v1 import token_database
from lmcache.v1.cache_engine import LMCacheEngine
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
from lmcache.v1.metadata import LMCacheMetadata
from tests.sdk.connectors.lmcache.server_steps import (
    BLOCK_BYTES,
    CHUNK_TOKENS,
    LAYERS,
    OBJECT_BYTES,
    PATIENCE_S,
)

WIDTH = 528
PAGES = 256
GIB = 1 << 30


class PagedKv(GPUConnectorInterface):
    """KV of prompts, one page for each chunk; *first* is the page of a prompt's first chunk."""

    def __init__(self) -> None:
        self.memory = np.zeros((PAGES, OBJECT_BYTES), np.uint8)
        self.first = 0

    def to_gpu(self, memory_obj: Any, start: int, end: int, **_: object) -> None:
        self._page(start, end)[:] = np.frombuffer(memory_obj.byte_array, np.uint8)

    def from_gpu(self, memory_obj: Any, start: int, end: int, **_: object) -> None:
        np.frombuffer(memory_obj.byte_array, np.uint8)[:] = self._page(start, end)

    def batched_to_gpu(
        self, memory_objs: Sequence[Any], starts: Sequence[int], ends: Sequence[int], **_: object
    ) -> None:
        for each in zip(memory_objs, starts, ends, strict=True):
            self.to_gpu(*each)

    def batched_from_gpu(
        self, memory_objs: Sequence[Any], starts: Sequence[int], ends: Sequence[int], **_: object
    ) -> None:
        for each in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(*each)

    def get_shape(self, num_tokens: int) -> torch.Size:
        return torch.Size([2, LAYERS, num_tokens, WIDTH])

    def _page(self, start: int, end: int) -> Any:
        page_bytes = OBJECT_BYTES * (end - start) // CHUNK_TOKENS
        return self.memory[self.first + start // CHUNK_TOKENS, :page_bytes]


class CpuEngine:
    """Engine with LMCache's own classes in its process; use as a context manager."""

    def __init__(
        self,
        address: str,
        *,
        layers: int = LAYERS,
        dtype: str = "bfloat16",
        host_pages: int = 64,
        hash_root: int = 0,
        async_server: object = None,
        lmcache: dict[str, object] | None = None,
        **settings: object,
    ) -> None:
        """Start an engine, with settings of the plug-in, and further settings of LMCache.

        *hash_root* is the beginning of all hashes, which vLLM makes from the hash seed.
        """
        plain: dict[str, object] = {
            "agents": address,
            "arena_bytes": 32 << 20,
            "transports": ["inline"],
            "block_bytes": BLOCK_BYTES,
            "lookup_deadline_s": 2.0,
            "connect_retry_s": 0.05,
            "backoff_s": 0.1,
            "backoff_max_s": 0.2,
        }
        extra = {
            "storage_plugin.ostraca.module_path": "ostraca.connectors.lmcache",
            "storage_plugin.ostraca.class_name": "OstracaStorageBackend",
        } | {f"ostraca.{name}": value for name, value in (plain | settings).items()}
        config = LMCacheEngineConfig.from_defaults(
            **{
                "chunk_size": CHUNK_TOKENS,
                "local_cpu": False,
                "max_local_cpu_size": host_pages * OBJECT_BYTES / GIB,
                "storage_plugins": ["ostraca"],
                "extra_config": extra,
                **(lmcache or {}),
            }
        )
        width = WIDTH * LAYERS // layers
        metadata = LMCacheMetadata(
            model_name="test/model",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=getattr(torch, dtype),
            kv_shape=(layers, 2, CHUNK_TOKENS, 1, width),
            role="worker",
            chunk_size=CHUNK_TOKENS,
        )
        self.pages = PagedKv()
        self.engine = LMCacheEngine(
            config,
            metadata,
            token_database.ChunkedTokenDatabase(config, metadata),
            self.pages,
            lambda *_: None,
            lambda *_: None,
        )
        token_database.NONE_HASH = hash_root
        self.engine.post_init(async_lookup_server=async_server)
        self._requests = itertools.count()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.engine.close()
        self.manager.loop.close()  # LMCache leaves the loop to the garbage collector

    @property
    def manager(self) -> Any:
        return self.engine.storage_manager

    @property
    def plugin(self) -> Any:
        """The plug-in; None if LMCache has none."""
        return self.manager.storage_backends.get("ostraca")

    @property
    def host_memory(self) -> Any:
        return self.manager.storage_backends["LocalCPUBackend"]

    @property
    def counters(self) -> dict[str, int]:
        found: dict[str, int] = self.plugin._tasks.counters.by_name()
        return found

    def wait_for_the_fabric(self) -> Self:
        until(lambda: not self.plugin._tasks.read_refusal)
        return self

    def wait_for_stores(self) -> None:
        """Wait until no store keeps memory. Without LMCache's own cache, all memory is then free."""
        until(lambda: not self.host_memory.memory_allocator.pin_allocator.num_active_allocations)

    def store(self, tokens: list[int], **request: object) -> None:
        self.engine.store(tokens, **request)
        self.wait_for_stores()

    def look_up(self, tokens: list[int], **request: object) -> int:
        """Return the number of tokens found from the first on."""
        lookup = f"lookup {next(self._requests)}"
        found: int = self.engine.lookup(tokens, lookup_id=lookup, pin=True, **request)
        self.engine.lookup_unpin(lookup)
        return found

    def load(self, tokens: list[int], **request: object) -> list[bool]:
        """Load as after a lookup that has found all chunks; return the success of each chunk."""
        name = f"load {next(self._requests)}"
        keys = [key for _, _, key in self.engine.token_database.process_tokens(tokens=tokens, **request)]
        self.engine.lookup_pins[name]["ostraca"] = keys
        mask = self.engine.retrieve(tokens, req_id=name, **request)
        self.engine.lookup_unpin(name)
        return [bool(mask[n : n + CHUNK_TOKENS].all()) for n in range(0, len(tokens), CHUNK_TOKENS)]

    def store_and_find(self, tokens: list[int], **request: object) -> None:
        whole = len(tokens) - len(tokens) % CHUNK_TOKENS

        def is_found() -> bool:
            self.store(tokens, **request)
            return self.look_up(tokens, **request) == whole

        until(is_found)


def until(is_so: Callable[[], bool]) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < until_s, "it did not come to be"
        threading.Event().wait(0.005)
