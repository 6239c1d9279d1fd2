"""Adapter: the class loaded by the multi-process server of LMCache 0.5.6.

LMCache's controllers call the methods from two threads. No method waits. A missing fabric raises no error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface

from ostraca.connectors.lmcache.memory_objects import ObjectReader, layout_of
from ostraca.connectors.lmcache.objects import ObjectName
from ostraca.connectors.lmcache.settings import LmcacheSettings
from ostraca.connectors.lmcache.tasks import L2Tasks, TaskKind


class OstracaL2Adapter(L2AdapterInterface):
    """L2 adapter of LMCache's multi-process server."""

    def __init__(self, params: Mapping[str, object], l1_memory_desc: object = None) -> None:
        """Read ``adapter_params``, and connect in the background. Raises UsageError for wrong settings."""
        del l1_memory_desc
        super().__init__()
        self._tasks = L2Tasks(LmcacheSettings.of(params))
        self._storing: dict[int, tuple[Sequence[Any], list[int]]] = {}
        """Keys and sizes of stores under way, for LMCache's events."""
        self._reader = ObjectReader()

    def get_store_event_fd(self) -> int:
        """Return the descriptor signalled by ended stores."""
        return self._tasks.descriptors[TaskKind.STORE]

    def get_lookup_and_lock_event_fd(self) -> int:
        """Return the descriptor signalled by ended lookups."""
        return self._tasks.descriptors[TaskKind.LOOKUP]

    def get_load_event_fd(self) -> int:
        """Return the descriptor signalled by ended loads."""
        return self._tasks.descriptors[TaskKind.LOAD]

    def submit_store_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        """Start to store objects."""
        number = self._tasks.store(
            [_name(key) for key in keys], [self._reader.read(each) for each in objects]
        )
        self._storing[number] = keys, [each.get_size() for each in objects]
        return number

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """Return the ended stores; a store succeeds if all its objects are stored."""
        results = {}
        for number, outcome in self._tasks.take_all(TaskKind.STORE).items():
            keys, sizes = self._storing.pop(number)
            stored = [n for n, is_good in enumerate(outcome) if is_good]
            stored_sizes = [sizes[n] for n in stored]
            if stored:
                self._notify_keys_stored([keys[n] for n in stored], stored_sizes)
            results[number] = L2StoreResult(all(outcome), sum(stored_sizes))
        return results

    def submit_lookup_and_lock_task(self, keys: Sequence[Any], group_layout_descs: Mapping[int, Any]) -> int:
        """Start to look objects up. The fabric keeps found objects for ``pin_s``."""
        layouts = {
            group: layout_of(description.shapes, description.dtypes)
            for group, description in group_layout_descs.items()
            if description.shapes
        }
        return self._tasks.look_up([_name(key) for key in keys], layouts)

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """Return the found objects, once; None if not ended."""
        return _bitmap(self._tasks.take(TaskKind.LOOKUP, task_id))

    def submit_unlock(self, keys: Sequence[Any]) -> None:
        """Do nothing: locks are pins, and end by themselves."""

    def submit_load_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        """Start to fill objects."""
        return self._tasks.load([_name(key) for key in keys], [self._reader.read(each) for each in objects])

    def query_load_result(self, task_id: int) -> Bitmap | None:
        """Return the loaded and verified objects, once; None if not ended."""
        return _bitmap(self._tasks.take(TaskKind.LOAD, task_id))

    def delete(self, keys: Sequence[Any]) -> None:
        """Mark objects as not worth keeping; a lookup may find an object until its blocks are evicted."""
        sizes = self._tasks.delete([_name(key) for key in keys])
        self._notify_keys_deleted(list(keys), sizes)

    def report_status(self) -> dict[str, Any]:
        """Return counts and state. A missing fabric is no ill health of LMCache's server."""
        counters = self._tasks.counters.by_name()
        return {"is_healthy": True, "refusal": self._tasks.read_refusal, "counters": counters}

    def close(self) -> None:
        """End the connection, and close the descriptors."""
        self._tasks.close()


def _name(key: Any) -> ObjectName:  # noqa: ANN401
    return ObjectName(key.chunk_hash, key.model_name, key.kv_rank, key.object_group_id, key.cache_salt)


def _bitmap(outcome: Sequence[bool] | None) -> Bitmap | None:
    if outcome is None:
        return None
    bitmap = Bitmap(len(outcome))
    bitmap.batched_set([n for n, is_good in enumerate(outcome) if is_good])
    return bitmap
