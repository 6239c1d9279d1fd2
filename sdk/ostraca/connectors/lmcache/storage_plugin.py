"""Storage plug-in: the class loaded by LMCache 0.5.6 in an engine's process, without LMCache's server.

The engine's threads wait in lookups and loads, each at most for the deadline of its setting. A store keeps
LMCache's memory until the store ends, and the limit of stores under way drops further stores.

Keys of this mode and of LMCache's server never meet: LMCache hashes the same tokens differently. So names of
this mode have a group number that the server never gives.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, TypeAlias

from lmcache.v1 import token_database
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.storage_backend.abstract_backend import StoragePluginInterface

from ostraca.connectors.lmcache.memory_objects import ObjectReader, layout_of
from ostraca.connectors.lmcache.objects import L2Object, ObjectName
from ostraca.connectors.lmcache.settings import LmcacheSettings
from ostraca.connectors.lmcache.tasks import L2Tasks, TaskKind
from ostraca_fabric.errors import UsageError

log = logging.getLogger(LmcacheSettings.LOGGER)

Foreign: TypeAlias = Any
"""Objects of LMCache's classes, which have no types here."""

_GROUP = -1
_MEMORY_POLL_S = 0.02


class OstracaStorageBackend(StoragePluginInterface):
    """Storage backend of LMCache in an engine's process. Thread-safe."""

    def __init__(
        self,
        config: Foreign,
        metadata: Foreign,
        local_cpu_backend: Foreign,
        loop: asyncio.AbstractEventLoop | None = None,
        dst_device: str = "cpu",
    ) -> None:
        """Read ``extra_config``, and connect in the background.

        Raises UsageError for a wrong configuration: LMCache logs the reason, and the engine serves without
        the plug-in.
        """
        super().__init__(dst_device, config, metadata, local_cpu_backend, loop)
        settings = LmcacheSettings.of_extra_config(config.extra_config)
        for name in ("use_layerwise", "enable_blending"):
            if getattr(config, name):
                raise UsageError(f"Ostraca does not work with LMCache's {name}: set it to false")
        if local_cpu_backend is None and metadata.role != "scheduler":
            raise UsageError("Ostraca fills LMCache's host memory: set max_local_cpu_size above zero")
        self._load_deadline_s = settings.load_deadline_s
        self._format = MemoryFormat.KV_MLA_FMT if metadata.use_mla else MemoryFormat.KV_2LTD
        self._reader = ObjectReader()
        self._has_logged_layout = False
        # LMCache's hashes begin with this number, which depends on the hash algorithm and its seed.
        self._tasks = L2Tasks(settings, hash_seed=str(token_database.NONE_HASH))
        if local_cpu_backend is not None:
            self._close_before(local_cpu_backend)

    def batched_contains(self, keys: list[Foreign], pin: bool = False) -> int:  # noqa: FBT001, FBT002
        """Count the chunks from the first on that the fabric has, and pin these chunks for ``pin_s``."""
        del pin
        layouts = {_GROUP: layout_of(*self._shapes_and_types())}
        return self._leading(TaskKind.LOOKUP, self._tasks.look_up([_name(key) for key in keys], layouts))

    def contains(self, key: Foreign, pin: bool = False) -> bool:  # noqa: FBT001, FBT002
        """Tell whether the fabric has a chunk."""
        return bool(self.batched_contains([key], pin))

    async def batched_async_contains(self, _id: str, keys: list[Foreign], *pin: bool) -> int:
        """Count the chunks from the first on that the fabric has."""
        return await asyncio.to_thread(self.batched_contains, keys, *pin)

    def batched_get_blocking(self, keys: list[Foreign]) -> list[Foreign]:
        """Load chunks into LMCache's memory; None from the first failed chunk on.

        An engine has no use for chunks behind a missing chunk.
        """
        objects = self._allocate(len(keys))
        names = [_name(key) for key in keys[: len(objects)]]
        memory = [self._reader.read(each) for each in objects]
        loaded = self._leading(TaskKind.LOAD, self._tasks.load(names, memory))
        _release(objects[loaded:])
        return [*objects[:loaded], *[None] * (len(keys) - loaded)]

    def get_blocking(self, key: Foreign) -> Foreign:
        """Load a chunk; None after a failure."""
        return self.batched_get_blocking([key])[0]

    async def batched_get_non_blocking(self, _id: str, keys: list[Foreign], *_: object) -> list[Foreign]:
        """Load chunks; return the chunks before the first failed chunk."""
        return [each for each in await asyncio.to_thread(self.batched_get_blocking, keys) if each is not None]

    def batched_submit_put_task(
        self, keys: Sequence[Foreign], objs: list[Foreign], *_: object, **__: object
    ) -> None:
        """Start to store chunks. LMCache 0.5.6 gives no callback."""
        objects = list(objs)
        chunks = [self._whole_chunk(each) for each in objects]
        for each in objects:
            each.ref_count_up()
        number = self._tasks.store([_name(key) for key in keys], chunks)
        self._tasks.call_at_end(TaskKind.STORE, number, lambda _: _release(objects))

    def exists_in_put_tasks(self, _: Foreign) -> bool:
        """Return False: the fabric declines a second store of a chunk at once."""
        return False

    def pin(self, key: Foreign) -> bool:
        """Pin a chunk for ``pin_s``; False if the fabric does not have the chunk."""
        return self.contains(key)

    def unpin(self, _: Foreign) -> bool:
        """Do nothing: pins end by themselves."""
        return True

    def remove(self, key: Foreign, force: bool = True) -> bool:  # noqa: FBT001, FBT002
        """Mark a chunk as not worth keeping. Return False: a lookup may find the chunk until its eviction."""
        del force
        self._tasks.delete([_name(key)])
        return False

    def get_allocator_backend(self) -> Foreign:
        """Return LMCache's host memory."""
        return self.local_cpu_backend

    def close(self) -> None:
        """End stores under way within ``close_deadline_s``, then the connection. Calls under way fail."""
        self._tasks.close()

    def _close_before(self, memory: Foreign) -> None:
        """Close before LMCache's host memory: LMCache frees the memory first, even during stores."""
        free = memory.close

        def close() -> None:
            self.close()
            free()

        memory.close = close

    def _leading(self, kind: TaskKind, number: int) -> int:
        """Wait for a task, which ends by its deadline; count the successes from the first on."""
        ended: Future[list[bool]] = Future()
        self._tasks.call_at_end(kind, number, ended.set_result)
        return next((n for n, is_good in enumerate(ended.result()) if not is_good), len(ended.result()))

    def _shapes_and_types(self) -> tuple[list[Foreign], list[Foreign]]:
        """Return shapes and types of a whole chunk. Until the engine registers its KV, LMCache estimates."""
        return self.metadata.get_shapes(self.config.chunk_size), self.metadata.get_dtypes()

    def _allocate(self, count: int) -> list[Foreign]:
        """Allocate memory for chunks, as far as LMCache has memory until the deadline of loads."""
        objects: list[Foreign] = []
        until_s = time.monotonic() + self._load_deadline_s
        while len(objects) < count and self.local_cpu_backend is not None:
            # LMCache's own wait for memory has no end.
            each = self.local_cpu_backend.allocate(*self._shapes_and_types(), self._format, busy_loop=False)
            if each is not None:
                objects.append(each)
            elif time.monotonic() < until_s:
                time.sleep(_MEMORY_POLL_S)
            else:
                break
        return objects

    def _whole_chunk(self, each: Foreign) -> L2Object | None:
        """Return the memory of a chunk; None if not whole, as lookups would not find the chunk."""
        chunk, whole = self._reader.read(each), layout_of(*self._shapes_and_types())
        if chunk is None or chunk.layout == whole:
            return chunk
        if not self._has_logged_layout:
            self._has_logged_layout = True
            log.info("Ostraca: chunks of %s are not stored, only of %s", chunk.layout.form, whole.form)
        return None


def _name(key: Foreign) -> ObjectName:
    """Return a name with all facts of LMCache's key but the type, a fact of the layout."""
    rank, tags = key.world_size << 32 | key.worker_id, repr(key.tags or "")
    return ObjectName(str(key.chunk_hash).encode(), key.model_name, rank, _GROUP, tags)


def _release(objects: Sequence[Foreign]) -> None:
    for each in objects:
        each.ref_count_down()
