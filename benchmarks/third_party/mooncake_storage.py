"""Mooncake's ``storage_benchmark_v1``: replay of a trace against one page store.

``python -m benchmarks.third_party.mooncake_storage --source MOONCAKE`` runs the benchmark with its own store,
a plain file, and with a fabric in the place of the store, several times in turns. The judge reads each page
that exists and writes the others, one page at a time.

The judge never looks at bytes. The fabric's store does: each page carries its number, and every read is
compared, beside the tag checks of the SDK. The file's pages are not compared.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import io
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

import ostraca
from benchmarks.third_party import comparison
from ostraca_cli.tools.bench.fabric import running_fabric
from ostraca_fabric.errors import UsageError

COMMIT = "3b5a594133958449a1feaf1c9e0fc1b553e34a28"
"""Commit of the recorded figures."""

_URL = "https://github.com/kvcache-ai/Mooncake"

_JUDGE = "benchmarks/storage_benchmark_v1"
_TRACE = "FAST25-release/traces/conversation_trace.jsonl"
_SEAM = "DiskHashTable"
"""Name of the judge's store."""

_MODEL = "kimi-k2.6"
_DEADLINE_S = 10.0


@dataclass(frozen=True, slots=True)
class Score:
    """Result of one replay."""

    requests_s: float
    read_mb_s: float
    write_mb_s: float
    request_p50_ms: float
    hit_rate: float

    @classmethod
    def of(cls, told: dict[str, Any]) -> Score:
        """Read the judge's result."""
        read, write = told["storage"]["read"], told["storage"]["write"]
        return cls(
            told["requests_per_second"],
            read["mb"] / max(read["time_s"], 1e-9),
            write["mb"] / max(write["time_s"], 1e-9),
            told["request_wall_latency"]["p50_ms"],
            told["page_hit_rate"],
        )


class FabricStore:
    """Store of the judge's pages in a fabric: the judge's ``Storage``, made as its ``DiskHashTable``."""

    def __init__(
        self,
        client: ostraca.Client,
        summarize: Callable[[list[float]], dict[str, float]],
        *,
        page_size: int,
        max_pages: int,
        **_: object,
    ) -> None:
        """Open a volume of pages of *page_size* bytes; *summarize* is the judge's."""
        layout = ostraca.Layout(model=f"mooncake-{page_size}", dtype="bf16", page_tokens=1)
        self._volume = client.volume(f"mooncake-{page_size}", layout, block_bytes=page_size, create=True)
        self._summarize = summarize
        self._max_pages = max_pages
        self._source = np.random.default_rng(0).integers(0, 256, page_size, np.uint8)
        self._into = np.zeros(page_size, np.uint8)
        self._reads_ms: list[float] = []
        self._writes_ms: list[float] = []
        self.lost_pages = 0
        """Reads of pages that a look-up had found, and a get did not."""

    def exists(self, page_id: int) -> bool:
        """Look a page up."""
        return self._volume.lookup(self._chain(page_id), deadline_s=_DEADLINE_S).hits == 1

    def read(self, page_id: int, offset_in_page: int = 0, length: int | None = None) -> float:
        """Read and compare a page; return milliseconds, without the comparison."""
        self._check_whole(offset_in_page, length)
        began_s = time.perf_counter()
        got = self._volume.get(self._chain(page_id), into=[self._into], deadline_s=_DEADLINE_S)
        took_ms = 1e3 * (time.perf_counter() - began_s)
        self._reads_ms.append(took_ms)
        if got.hits:
            self._number(self._source, page_id)
            assert np.array_equal(self._into, self._source), f"page {page_id} has wrong bytes"
        else:
            self.lost_pages += 1
        return took_ms

    def write(self, page_id: int, offset_in_page: int = 0, length: int | None = None) -> float:
        """Write a page; return the milliseconds until the agent has the page."""
        self._check_whole(offset_in_page, length)
        self._number(self._source, page_id)
        began_s = time.perf_counter()
        put = self._volume.put(self._chain(page_id), source=[self._source], deadline_s=_DEADLINE_S)
        took_ms = 1e3 * (time.perf_counter() - began_s)
        assert put.states[0] is not ostraca.PutState.DECLINED, f"page {page_id} was declined: {put}"
        self._writes_ms.append(took_ms)
        return took_ms

    def get_stats(self) -> dict[str, Any]:
        """Return statistics in the judge's form."""
        return {
            "read": self._operations(self._reads_ms),
            "write": self._operations(self._writes_ms),
            "sync_count": 0,
            "max_pages": self._max_pages,
            "written_pages": len(self._writes_ms),
            "page_hits": len(self._reads_ms),
            "page_misses": len(self._writes_ms),
        }

    def close(self, **_: object) -> None:
        """Do nothing: the fabric stays. Raises AssertionError for a lost page."""
        assert not self.lost_pages, f"{self.lost_pages} pages were found and not read"

    def _operations(self, each_ms: list[float]) -> dict[str, float]:
        mb = len(each_ms) * len(self._into) / 2**20
        return {"count": len(each_ms), "mb": mb, "time_s": sum(each_ms) / 1e3, **self._summarize(each_ms)}

    def _chain(self, page_id: int) -> ostraca.Chain:
        name = hashlib.sha256(page_id.to_bytes(8, "little")).digest()
        return self._volume.chain([name], is_chained=False)

    def _check_whole(self, offset_in_page: int, length: int | None) -> None:
        assert (offset_in_page, length) in ((0, None), (0, len(self._into))), "the judge moves whole pages"

    @staticmethod
    def _number(page: np.ndarray[Any, np.dtype[np.uint8]], page_id: int) -> None:
        page[:8] = np.frombuffer(page_id.to_bytes(8, "little"), np.uint8)


def load_judge(source: Path) -> ModuleType:
    """Import the judge from a checkout. Raises UsageError for another folder."""
    comparison.check_source(source, f"{_JUDGE}/benchmark.py", url=_URL, commit=COMMIT)
    sys.path.insert(0, str(source / _JUDGE))
    return importlib.import_module("benchmark")


def replay(judge: ModuleType, options: argparse.Namespace, directory: Path) -> Score:
    """Run the judge once, with its present store."""
    with contextlib.redirect_stdout(io.StringIO()):
        told = judge.run_benchmark(
            str(options.source / _TRACE),
            str(directory),
            judge.get_model_config(_MODEL),
            max_requests=options.requests,
            page_size_tokens=options.page_tokens,
            progress_interval=0,
        )
    return Score.of(told)


def compare(judge: ModuleType, options: argparse.Namespace) -> dict[str, list[Score]]:
    """Replay with both stores in turns, each time an empty one."""
    own_store = getattr(judge, _SEAM)

    def with_file(folder: Path, _: int) -> Score:
        return replay(judge, options, folder / "file")

    def with_fabric(folder: Path, _: int) -> Score:
        shape = ("--capacity", options.capacity, "--dram", options.dram)
        with running_fabric(folder, *shape) as fabric, ostraca.connect(fabric.address) as client:
            judge.__dict__[_SEAM] = partial(FabricStore, client, judge.latency_stats)
            try:
                return replay(judge, options, folder)
            finally:
                judge.__dict__[_SEAM] = own_store

    return comparison.compare({"plain file": with_file, "fabric": with_fabric}, options)


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="mooncake_storage", description=__doc__)
    parser.add_argument("--source", type=Path, required=True, help="checkout of Mooncake")
    parser.add_argument("--requests", type=int, default=60, help="of the trace (default: %(default)s)")
    parser.add_argument(
        "--page-tokens", type=int, default=16, help="tokens of a page; 16: 1.1 MB (default: %(default)s)"
    )
    comparison.add_options(parser, runs=3, capacity="6GiB")
    options = parser.parse_args()
    try:
        judge = load_judge(options.source)
    except UsageError as error:
        parser.error(str(error))
    comparison.report(compare(judge, options), options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
