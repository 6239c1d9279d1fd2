"""Adapter: the class loaded by SGLang 0.5, the only module that knows SGLang.

SGLang's threads for queries, loads and stores wait in the calls. Wrong settings and a missing fabric raise no
error: the backend logs the reason once, and all pages are misses.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import ClassVar

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolTransferResult
from sglang.srt.observability.metrics_collector import StorageMetrics

from ostraca.connectors.sglang.host_pools import Foreign, HostPool, further_pool, main_pool
from ostraca.connectors.sglang.page_store import PageStore, Prefix
from ostraca.connectors.sglang.pages import HASH_BYTES, leading, trailing_ends
from ostraca.connectors.sglang.settings import SglangSettings
from ostraca.connectors.transfers.rows import Blocks
from ostraca_fabric.errors import UsageError

log = logging.getLogger(SglangSettings.LOGGER)

_MAIN = "kv"


class OstracaHiCache(HiCacheStorage):
    """Storage backend of HiCache for one rank."""

    _clears: ClassVar[int] = 0
    """Calls of ``clear`` in this process, equal on all ranks."""

    _generation: ClassVar[bytes] = b""
    """Generation since the last ``clear``, for backends attached afterwards."""

    def __init__(self, storage_config: Foreign, kwargs: Mapping[str, object] | None = None) -> None:
        """Read the settings. The connection begins once SGLang registers the main pool."""
        del kwargs
        self._config = storage_config
        self._settings: SglangSettings | None = None
        self._is_flat = not (storage_config.extra_config or {}).get("interface_v1")
        self._store: PageStore | None = None
        self._pools: dict[str, HostPool] = {}
        self._logged: set[str] = set()
        self._measuring = threading.Lock()
        self._metrics = StorageMetrics()
        try:
            self._settings = _settings(storage_config.extra_config or {})
        except UsageError as error:
            self._log_once(f"no pages are stored or loaded: {error}")

    def register_mem_pool_host(self, mem_pool_host: Foreign) -> None:
        """Take the main pool, and connect in the background."""
        super().register_mem_pool_host(mem_pool_host)
        settings = self._settings
        if settings is None or self._store is not None:
            return
        try:
            self._pools[_MAIN], identity = main_pool(
                mem_pool_host,
                self._config,
                block_bytes=settings.block_bytes,
                kv_cache_dtype=settings.kv_cache_dtype or _reported_dtype(),
                is_flat=self._is_flat,
            )
            self._store = PageStore(
                settings,
                identity,
                block_bytes=self._pools[_MAIN].form.block_bytes,
                generation=OstracaHiCache._generation,
            )
            self._register(self._pools[_MAIN])
        except Exception as error:  # noqa: BLE001 (SGLang would not start)
            self._log_once(f"no pages are stored or loaded: {error}")

    def register_mem_host_pool_v2(self, host_pool: Foreign, host_pool_name: Foreign) -> None:
        """Take a further pool of a model with several kinds of state."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = str(host_pool_name)
        if self._store is None or name == _MAIN:
            return
        try:
            self._pools[name] = further_pool(host_pool, self._config, name, self._pools[_MAIN].form)
            self._register(self._pools[name])
        except Exception as error:  # noqa: BLE001 (SGLang would not start)
            self._log_once(f"pages of the pool {name} are neither stored nor loaded: {error}")

    def batch_exists(self, keys: Sequence[str], extra_info: Foreign = None) -> int:
        """Count the pages from the first on that the fabric has."""
        return leading(self._look_up(_MAIN, keys, _prefix(extra_info)))

    def exists(self, key: str) -> bool:
        """Tell whether the fabric has a page."""
        return bool(self.batch_exists([key]))

    def batch_get_v1(
        self, keys: Sequence[str], host_indices: Foreign, extra_info: Foreign = None
    ) -> list[bool]:
        """Fill pages of the main pool; return the success of each."""
        return self._move(
            _MAIN, keys, lambda pool: pool.blocks(host_indices), _prefix(extra_info), is_load=True
        )

    def batch_set_v1(
        self, keys: Sequence[str], host_indices: Foreign, extra_info: Foreign = None
    ) -> list[bool]:
        """Store pages of the main pool; return the success of each."""
        return self._move(
            _MAIN, keys, lambda pool: pool.blocks(host_indices), _prefix(extra_info), is_load=False
        )

    def batch_exists_v2(
        self,
        keys: Sequence[str],
        pool_transfers: Sequence[Foreign] | None = None,
        extra_info: Foreign = None,
    ) -> PoolTransferResult:
        """Return the longest prefix that all pools can serve, and the boundary of each pool."""
        prefix = _prefix(extra_info)
        pages = leading(self._look_up(_MAIN, keys, prefix))
        boundaries = {_MAIN: pages} if pages else {}
        restorable = list(range(1, pages + 1))
        for transfer in pool_transfers or ():
            if not restorable or transfer.hit_policy not in _LIMITING:
                continue
            are_there = self._look_up(str(transfer.name), keys[:pages], prefix)
            ends = list(range(1, leading(are_there) + 1))
            if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                ends = trailing_ends(are_there, max(1, len(transfer.keys or ())))
            if ends:
                boundaries[transfer.name] = ends[-1]
            restorable = sorted(set(restorable).intersection(ends))
        return PoolTransferResult(restorable[-1] if restorable else 0, boundaries, restorable)

    def batch_get_v2(self, transfers: Sequence[Foreign], extra_info: Foreign = None) -> dict[str, list[bool]]:
        """Fill pages of several pools; return the success of each page by pool."""
        return self._move_all(transfers, _prefix(extra_info), is_load=True)

    def batch_set_v2(self, transfers: Sequence[Foreign], extra_info: Foreign = None) -> dict[str, list[bool]]:
        """Store pages of several pools; return the success of each page by pool."""
        return self._move_all(transfers, _prefix(extra_info), is_load=False)

    def get(self, key: str, target_location: Foreign = None, target_sizes: Foreign = None) -> Foreign | None:
        """Fill a flat page, and return the page; None for a miss. SGLang calls ``batch_get`` alone."""
        return self.batch_get([key], [target_location], target_sizes)[0]

    def batch_get(
        self,
        keys: Sequence[str],
        target_locations: Sequence[Foreign] | None = None,
        target_sizes: Foreign = None,
    ) -> list[Foreign | None]:
        """Fill flat pages; return each, or None for a miss.

        Without ``interface_v1``, SGLang passes new tensors as *target_locations*, and copies the filled ones
        into the main pool. SGLang passes no *target_sizes* and no keys before the pages.
        """
        del target_sizes
        pages = target_locations or ()
        are_good = self._move_flat(keys, pages, is_load=True)
        return [pages[number] if is_good else None for number, is_good in enumerate(are_good)]

    def set(
        self,
        key: str,
        value: Foreign = None,
        target_location: Foreign = None,
        target_sizes: Foreign = None,
    ) -> bool:
        """Store a flat page; return the success. SGLang calls ``batch_set`` alone."""
        return self.batch_set([key], [value], target_location, target_sizes)

    def batch_set(
        self,
        keys: Sequence[str],
        values: Sequence[Foreign] | None = None,
        target_locations: Foreign = None,
        target_sizes: Foreign = None,
    ) -> bool:
        """Store flat pages; tell whether all are stored.

        Without ``interface_v1``, SGLang passes copies of pages of the main pool as *values*, and neither
        *target_locations* nor *target_sizes*.
        """
        del target_locations, target_sizes
        return all(self._move_flat(keys, values or (), is_load=False))

    def clear(self) -> bool:
        """Hide all earlier pages from this engine.

        SGLang calls ``clear`` on all ranks for ``POST /hicache/storage-backend/clear``, never for
        ``/flush_cache``, and ignores the result. SGLang's other backends delete the pages of all engines.
        Here other engines keep their pages, because only eviction deletes blocks: this engine takes new names
        for its pages. So it shares pages with no other engine until its restart, unless ``weights_file`` has
        changed.
        """
        OstracaHiCache._clears += 1
        if self._store is not None:
            self._store.hide_pages(_common_generation(OstracaHiCache._clears))
            OstracaHiCache._generation = self._store.generation
            if self._store.generation:
                log.warning("Ostraca: earlier pages are hidden, and other engines share none until a restart")
        return True

    def get_stats(self) -> StorageMetrics:
        """Return pages and GB/s of each call since the last ``get_stats``."""
        with self._measuring:
            metrics, self._metrics = self._metrics, StorageMetrics()
        return metrics

    def report_status(self) -> dict[str, int]:
        """Return the counts since the start, and 1 in ``is_usable`` while the fabric answers."""
        if self._store is None:
            return {"is_usable": 0}
        return {**self._store.counters.by_name(), "is_usable": int(not self._store.health.read_refusal)}

    def close(self) -> None:
        """End the connection."""
        if self._store is not None:
            self._store.close()

    def _register(self, pool: HostPool) -> None:
        if self._store is not None and pool.rows is not None:
            self._store.register(pool.rows)

    def _look_up(self, name: str, keys: Sequence[str], prefix: Prefix) -> list[bool]:
        if self._store is None or name not in self._pools:
            return [False] * len(keys)
        form = self._pools[name].form
        if not form.part_bytes:  # such a pool only counts pages
            return [not self._store.health.read_refusal] * len(keys)
        return self._store.look_up(form, keys, prefix)

    def _move_all(
        self, transfers: Sequence[Foreign], prefix: Prefix, *, is_load: bool
    ) -> dict[str, list[bool]]:
        def move(each: Foreign) -> list[bool]:
            return self._move(
                str(each.name),
                each.keys or (),
                lambda pool: pool.blocks(each.host_indices),
                prefix,
                is_load=is_load,
            )

        return {each.name: move(each) for each in transfers}

    def _move_flat(self, keys: Sequence[str], pages: Sequence[Foreign], *, is_load: bool) -> list[bool]:
        return self._move(_MAIN, keys, lambda pool: pool.flat_blocks(pages), None, is_load=is_load)

    def _move(
        self,
        name: str,
        keys: Sequence[str],
        blocks_of: Callable[[HostPool], Blocks],
        prefix: Prefix,
        *,
        is_load: bool,
    ) -> list[bool]:
        """Move pages between host memory and the fabric; return the success of each."""
        if self._store is None or name not in self._pools:
            return [False] * len(keys)
        pool, began_s = self._pools[name], time.monotonic()
        if not pool.form.part_bytes:
            return [True] * len(keys)
        move = self._store.load if is_load else self._store.store
        try:
            are_good = move(pool.form, keys, prefix, blocks_of(pool))
        except Exception as error:  # noqa: BLE001 (SGLang's thread goes on)
            self._log_once(f"pages of the pool {name} are neither stored nor loaded: {error}")
            return [False] * len(keys)
        if moved := sum(are_good):
            speed = moved * pool.form.page_bytes / 1e9 / (time.monotonic() - began_s)
            with self._measuring:
                metrics = self._metrics
                (metrics.prefetch_pgs if is_load else metrics.backup_pgs).append(moved)
                (metrics.prefetch_bandwidth if is_load else metrics.backup_bandwidth).append(speed)
        return are_good

    def _log_once(self, words: str) -> None:
        if words not in self._logged:
            self._logged.add(words)
            log.error("Ostraca: %s", words)


_LIMITING = (PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES)
"""Policies of pools that limit the prefix."""


def _settings(extra_config: Mapping[str, Foreign]) -> SglangSettings:
    """Read the settings from SGLang's extra configuration. Raises UsageError."""
    misplaced = extra_config.keys() & {field.name for field in fields(SglangSettings)}
    if misplaced:
        raise UsageError(f'{min(misplaced)} belongs into "ostraca" of the extra configuration')
    entry = extra_config.get("ostraca", {})
    if not isinstance(entry, Mapping):
        raise UsageError('"ostraca" of the extra configuration must be an object')
    settings = SglangSettings.of(entry)
    if settings.prefix_keys and not extra_config.get("interface_v1"):
        raise UsageError('prefix_keys needs "interface_v1": 1 in the extra configuration')
    return settings


def _prefix(extra_info: Foreign) -> Prefix:
    return extra_info.prefix_keys if extra_info is not None else None


def _common_generation(number: int) -> bytes:
    """Return a random generation for the clear of this *number*, common to all ranks of the engine."""
    proposed = secrets.token_hex(HASH_BYTES)
    try:
        from torch.distributed.distributed_c10d import _get_default_store  # noqa: PLC0415

        found: bytes = _get_default_store().compare_set(f"ostraca/generation/{number}", "", proposed)
    except Exception as error:  # noqa: BLE001 (no process group, or another release)
        log.debug("Ostraca: ranks agree on no generation, and find only their own pages: %s", error)
        found = proposed.encode()
    return bytes.fromhex(found.decode())


def _reported_dtype() -> str:
    """Return the type of the KV cache by SGLang's server; empty if unknown."""
    try:
        from sglang.srt.runtime_context import get_server_args  # noqa: PLC0415 (newer releases only)

        return str(get_server_args().kv_cache_dtype)
    except Exception:  # noqa: BLE001 (no server, or another release)
        return ""
