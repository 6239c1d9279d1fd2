"""LMCache's own objects and keys with the L2 adapter's class, under the conformance kit."""

from __future__ import annotations

import hashlib
import os
import select
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.memory_management import MemoryObjMetadata, TensorMemoryObj
from tests.sdk.connectors.conformance.options import deadlines
from tests.sdk.connectors.lmcache.server_steps import PATIENCE_S

from ostraca.connectors.conformance import Connector, EngineOptions, LoadedPages, Pages
from ostraca.connectors.lmcache import OstracaL2Adapter
from ostraca.connectors.lmcache.settings import LmcacheSettings

BLOCK_BYTES = 64 << 10
SHAPES = {"": (2, 4, 16, 528), "other": (2, 8, 8, 528), "earlier": (2, 2, 32, 528)}
"""KV, layers, tokens, heads of each layout; equal sizes."""


class LmcacheClasses:
    """Adapter with LMCache's objects, called as by LMCache's controllers."""

    page_bytes = 2 * 4 * 16 * 528 * 2
    block_bytes = BLOCK_BYTES

    def __init__(self, options: EngineOptions) -> None:
        params: dict[str, object] = {
            "agents": options.address,
            "arena_bytes": 32 << 20,
            "transports": ["inline"],
            "block_bytes": BLOCK_BYTES,
            "connect_retry_s": 0.5,
            "backoff_s": 0.1,
            "backoff_max_s": 0.2,
        }
        self._adapter = OstracaL2Adapter(params | deadlines(options))
        self._shape = torch.Size(SHAPES[options.layout])
        self._rank = ObjectKey.ComputeKVRank(world_size=1, global_rank=0, local_world_size=1, local_rank=0)

    def _keys(self, prompt: str, count: int) -> list[Any]:
        hashes = [hashlib.sha256(f"{prompt} {number}".encode()).digest() for number in range(count)]
        return [ObjectKey(each, "test/model", self._rank) for each in hashes]

    def _objects(self, pages: Pages) -> list[Any]:
        """Return LMCache's objects over this memory."""
        return [
            TensorMemoryObj(
                torch.from_numpy(page),
                MemoryObjMetadata(
                    self._shape,
                    torch.bfloat16,
                    0,
                    self.page_bytes,
                    1,
                    shapes=[self._shape],
                    dtypes=[torch.bfloat16],
                ),
                None,
            )
            for page in pages
        ]

    @staticmethod
    def _wait(descriptor: int) -> None:
        assert select.select([descriptor], [], [], PATIENCE_S)[0], "a task is never over"
        os.eventfd_read(descriptor)

    def store(self, prompt: str, pages: Pages) -> Sequence[bool]:
        memory = pages.copy()  # LMCache's objects do not keep their memory: keep it until the end of the task
        number = self._adapter.submit_store_task(self._keys(prompt, len(pages)), self._objects(memory))
        self._wait(self._adapter.get_store_event_fd())
        ended = self._adapter.pop_completed_store_tasks()
        return [ended[number].is_successful()] * len(pages)

    def lookup(self, prompt: str, count: int) -> Sequence[bool]:
        layout = MemoryLayoutDesc(shapes=[self._shape], dtypes=[torch.bfloat16])
        number = self._adapter.submit_lookup_and_lock_task(self._keys(prompt, count), {0: layout})
        self._wait(self._adapter.get_lookup_and_lock_event_fd())
        found = self._adapter.query_lookup_and_lock_result(number)
        assert found is not None
        return [found.test(page) for page in range(count)]

    def load(self, prompt: str, count: int) -> LoadedPages:
        memory = np.zeros((count, self.page_bytes), np.uint8)
        number = self._adapter.submit_load_task(self._keys(prompt, count), self._objects(memory))
        self._wait(self._adapter.get_load_event_fd())
        loaded = self._adapter.query_load_result(number)
        assert loaded is not None
        return LoadedPages([loaded.test(page) for page in range(count)], memory)

    def close(self) -> None:
        self._adapter.close()


CONNECTOR = Connector("LMCache 0.5.6", LmcacheSettings.LOGGER, LmcacheClasses)
