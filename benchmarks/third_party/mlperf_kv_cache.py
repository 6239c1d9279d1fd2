"""MLPerf Storage's KV-cache benchmark: simulated users over one tier of storage.

``python -m benchmarks.third_party.mlperf_kv_cache --source STORAGE`` runs the benchmark with its own storage,
a file per entry, and with a fabric in the place of the files, several times in turns. An entry is the KV of a
whole prompt, up to hundreds of MiB. Here the judge has no other tiers, and simulates no time for tokens.

The judge never looks at the bytes of its reads, and ignores failures. So both storages are wrapped: each read
is compared with the digest of its write, and a lost or wrong entry ends the command.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import io
import itertools
import math
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, TypeAlias

import numpy as np
import xxhash

import ostraca
from benchmarks.third_party import comparison
from ostraca_cli.terminal.units import parse_size
from ostraca_cli.tools.bench.fabric import running_fabric
from ostraca_fabric.errors import UsageError

COMMIT = "ee70bf3fc10ba9a79f850130fb1e98d234c2f2a0"
"""Commit of the recorded figures."""

_URL = "https://github.com/mlcommons/storage"
_JUDGE = "kv_cache_benchmark"
_SEAM = "NVMeBackend"
"""Name of the judge's storage."""

Entry: TypeAlias = np.ndarray[Any, Any]

_MODEL = "tiny-1b"
_BLOCK_BYTES = 2 << 20
_DEADLINE_S = 60.0
_END_S = 120.0
_CAPACITY_SHARE = 0.7
"""Part of the fabric's flash that the judge may fill. Then the judge evicts, which ends the command."""


@dataclass(frozen=True, slots=True)
class Throughput:
    """Result of one run."""

    tokens_s: float
    requests_s: float
    read_mb_s: float
    write_mb_s: float
    request_p50_ms: float
    read_p50_ms: float
    write_p50_ms: float

    @classmethod
    def of(cls, told: dict[str, Any]) -> Throughput:
        """Read the judge's summary; rates are over the whole run."""
        cache = told["cache_stats"]
        return cls(
            told["avg_throughput_tokens_per_sec"],
            told["requests_per_second"],
            1024 * cache["tier_storage_read_bandwidth_gbps"],
            1024 * cache["tier_storage_write_bandwidth_gbps"],
            told["end_to_end_latency_ms"]["p50"],
            cache["storage_read_p50_ms"],
            cache["storage_write_p50_ms"],
        )


class Timing(Protocol):
    """Judge's ``IOTiming``."""

    total: float


class Storage(Protocol):
    """Judge's ``StorageBackend``."""

    def write(self, key: str, data: Entry) -> Timing:
        """Write an entry."""

    def read(self, key: str) -> tuple[Entry, Timing]:
        """Read an entry."""

    def delete(self, key: str) -> None:
        """Delete an entry."""

    def clear(self) -> None:
        """Delete all entries."""


@dataclass(frozen=True, slots=True)
class _StoredEntry:
    names: list[bytes]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class ReadMemory:
    """Memory for entries that are read, like an engine's pool: dropped pieces serve again."""

    def __init__(self) -> None:
        self._choosing = threading.Lock()
        self._free: list[Entry] = []

    def take(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Entry:
        """Return an array with any content."""
        size_bytes = math.prod(shape) * dtype.itemsize
        with self._choosing:
            large = [number for number, each in enumerate(self._free) if len(each) >= size_bytes]
            piece = self._free.pop(large[0]) if large else np.empty(1 << size_bytes.bit_length(), np.uint8)
        taken = np.asarray(_Lent(piece, size_bytes, self._free))
        taken[::_BLOCK_BYTES] ^= 0xFF  # what an earlier read of this entry left is no right block
        return taken.view(dtype).reshape(shape)


class _Lent:
    """Owner of a read entry's bytes, for as long as any array shows them."""

    def __init__(self, piece: Entry, size_bytes: int, free: list[Entry]) -> None:
        self._piece, self._free = piece, free
        self.__array_interface__ = piece[:size_bytes].__array_interface__

    def __del__(self) -> None:
        self._free.append(self._piece)


class EntryStore:
    """Storage of the judge's entries in a fabric: its ``StorageBackend``, made as its ``NVMeBackend``."""

    def __init__(self, client: ostraca.Client, timing: Callable[..., Timing], **_: object) -> None:
        """Open a volume; *timing* is the judge's ``IOTiming``."""
        layout = ostraca.Layout(model="mlperf-kv-cache", dtype="fp16", page_tokens=1)
        self._volume = client.volume("mlperf-kv-cache", layout, block_bytes=_BLOCK_BYTES, create=True)
        self._timing = timing
        self._memory = ReadMemory()
        self._numbers = itertools.count()
        self._entries: dict[str, _StoredEntry] = {}

    def write(self, key: str, data: Entry) -> Timing:
        """Put an entry, and return the time for it. Raises OSError if any block is declined."""
        began_s = time.perf_counter()
        number = next(self._numbers)
        blocks = self._blocks(data)
        names = [hashlib.sha256(b"%d/%d" % (number, index)).digest() for index in range(len(blocks))]
        put = self._volume.put(self._volume.chain(names), source=blocks, deadline_s=_DEADLINE_S)
        if put.holes:
            raise OSError(f"blocks were not stored: {put}")
        self._entries[key] = _StoredEntry(names, data.shape, data.dtype)
        return self._told(began_s)

    def read(self, key: str) -> tuple[Entry, Timing]:
        """Get an entry, and the time for it. Raises OSError if any block is lost."""
        began_s = time.perf_counter()
        entry = self._entries[key]
        data = self._memory.take(entry.shape, entry.dtype)
        chain = self._volume.chain(entry.names)
        got = self._volume.get(chain, into=self._blocks(data), deadline_s=_DEADLINE_S)
        if got.holes:
            raise OSError(f"{'the whole prompt is' if not got.hits else 'blocks are'} lost: {got}")
        return data, self._told(began_s)

    def delete(self, key: str) -> None:
        """Forget an entry."""
        self._entries.pop(key, None)

    def clear(self) -> None:
        """Forget all entries."""
        self._entries.clear()

    @staticmethod
    def _blocks(data: Entry) -> list[Entry]:
        flat = data.reshape(-1).view(np.uint8)
        return [flat[start : start + _BLOCK_BYTES] for start in range(0, len(flat), _BLOCK_BYTES)]

    def _told(self, began_s: float) -> Timing:
        took_s = time.perf_counter() - began_s
        return self._timing(total=took_s, device=took_s, host=took_s)


class VerifyingStore:
    """Storage that compares each read with the digest of its write, and records all failures."""

    def __init__(self, storage: Storage) -> None:
        """Wrap *storage*, a ``StorageBackend`` of the judge."""
        self._storage = storage
        self._digests: dict[str, bytes] = {}
        self._has_ended = False
        self.failures: list[str] = []
        self.reads = 0
        """Reads with the right bytes."""

    def write(self, key: str, data: Entry) -> Timing:
        """Write an entry and keep its digest."""
        with self._recorded("write", key):
            self._digests[key] = self._digest(data)
            return self._storage.write(key, data)

    def read(self, key: str) -> tuple[Entry, Timing]:
        """Read and compare an entry."""
        with self._recorded("read", key):
            data, timing = self._storage.read(key)
            if self._digest(data) != self._digests[key]:
                raise ValueError("wrong bytes")
            self.reads += 1
            return data, timing

    def delete(self, key: str) -> None:
        """Record a failure: an eviction spoils the comparison."""
        self.failures.append(f"eviction of {key}: raise --capacity or lower --seconds")
        self._storage.delete(key)

    def clear(self) -> None:
        """Delete all entries."""
        self._storage.clear()

    def end(self) -> None:
        """Refuse further work, so that requests under way end soon."""
        self._has_ended = True

    @contextlib.contextmanager
    def _recorded(self, operation: str, key: str) -> Iterator[None]:
        if self._has_ended:
            raise InterruptedError("the measurement is over")
        try:
            yield
        except Exception as error:
            self.failures.append(f"{operation} of {key}: {error!r}")
            raise

    @staticmethod
    def _digest(data: Entry) -> bytes:
        return xxhash.xxh3_128_digest(data.reshape(-1).view(np.uint8).data)


class Judge:
    """The imported benchmark, with its own storage or another."""

    def __init__(self, source: Path) -> None:
        """Import the benchmark from a checkout. Raises UsageError for another folder."""
        comparison.check_source(source, f"{_JUDGE}/kv_cache/benchmark.py", url=_URL, commit=COMMIT)
        sys.path.insert(0, str(source / _JUDGE))
        self._benchmark = importlib.import_module("kv_cache.benchmark")
        self._models = importlib.import_module("kv_cache.models")
        self._cache: ModuleType = importlib.import_module("kv_cache.cache")
        self.file_store = getattr(self._cache, _SEAM)
        self.timing = self._cache.StorageBackend.IOTiming

    def run(
        self, store: Callable[..., Storage], options: argparse.Namespace, folder: Path, seed: int
    ) -> Throughput:
        """Run the benchmark once. Raises AssertionError for each failed read or write."""
        made: list[VerifyingStore] = []

        def verifying(base_path: str | None = None) -> VerifyingStore:
            made.append(VerifyingStore(store(base_path=base_path)))
            return made[-1]

        before = set(threading.enumerate())
        self._cache.__dict__[_SEAM] = verifying
        random.seed(seed)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                told = self._benchmark.IntegratedBenchmark(
                    self._models.MODEL_CONFIGS[_MODEL],
                    num_users=options.users,
                    gpu_memory_gb=0,
                    cpu_memory_gb=0,
                    duration_seconds=options.seconds,
                    cache_dir=str(folder),
                    seed=seed,
                    storage_capacity_gb=_CAPACITY_SHARE * parse_size(options.capacity) / 2**30,
                ).run()
        finally:
            self._cache.__dict__[_SEAM] = self.file_store
            for each in made:
                each.end()
            for thread in set(threading.enumerate()) - before:
                if not thread.name.startswith("ostraca"):  # the client's threads stay
                    thread.join(_END_S)
        (storage,) = made
        assert not storage.failures, "\n".join(storage.failures)
        assert storage.reads, "the judge has read nothing: raise --seconds"
        return Throughput.of(told["summary"])


def compare(judge: Judge, options: argparse.Namespace) -> dict[str, list[Throughput]]:
    """Run the benchmark with both storages in turns, each time an empty one."""

    def with_files(folder: Path, run: int) -> Throughput:
        return judge.run(judge.file_store, options, folder / "entries", run)

    def with_fabric(folder: Path, run: int) -> Throughput:
        shape = ("--capacity", options.capacity, "--dram", options.dram)
        with running_fabric(folder, *shape) as fabric, ostraca.connect(fabric.address) as client:
            return judge.run(partial(EntryStore, client, judge.timing), options, folder / "entries", run)

    return comparison.compare({"file per entry": with_files, "fabric": with_fabric}, options)


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="mlperf_kv_cache", description=__doc__)
    parser.add_argument("--source", type=Path, required=True, help="checkout of MLPerf Storage")
    parser.add_argument("--users", type=int, default=4, help="at once (default: %(default)s)")
    parser.add_argument("--seconds", type=int, default=30, help="of a run (default: %(default)s)")
    comparison.add_options(parser, runs=3, capacity="8GiB")
    options = parser.parse_args()
    try:
        judge = Judge(options.source)
    except UsageError as error:
        parser.error(str(error))
    comparison.report(compare(judge, options), options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
