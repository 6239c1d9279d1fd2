"""vLLM's tiering spec with a worker for copies between pools in host memory.

vLLM's own worker refuses to run without a GPU. With this worker, all other parts run on a CPU: the scheduler,
the primary tier, and the tier under test. vLLM loads the spec by ``spec_module_path``.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CopyWorker(OffloadingWorker):
    """Worker for copies of whole chunks in the calling thread. An engine block is a chunk."""

    def __init__(self, kv_caches: Any, region: Any) -> None:
        self._kv_caches = kv_caches
        self._region = region
        self._views = [region.create_next_worker_view(each.page_size_bytes) for each in kv_caches.tensors]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, is_store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        return self._copy(job_id, dst_spec, src_spec, is_store=False)

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Return at once: no copy is ever under way."""

    def shutdown(self) -> None:
        """Release the host memory, and remove its file."""
        self._views.clear()
        self._region.cleanup()

    def _copy(self, job_id: int, engine: Any, host: Any, *, is_store: bool) -> bool:
        begun_s = time.monotonic()
        copied, blocks, rows = 0, iter(engine.block_ids), iter(host.block_ids)
        for group, size in enumerate(engine.group_sizes):
            for _ in range(size):
                copied += self._copy_block(group, int(next(blocks)), int(next(rows)), is_store=is_store)
        self._finished.append(TransferResult(job_id, True, copied, time.monotonic() - begun_s))
        return True

    def _copy_block(self, group: int, block: int, row: int, *, is_store: bool) -> int:
        copied = 0
        for ref in self._kv_caches.group_data_refs[group]:
            view = self._views[ref.tensor_idx]
            page = self._kv_caches.tensors[ref.tensor_idx].tensor[block].reshape(-1).view(view.dtype)
            ours, theirs = page[: ref.page_size_bytes], view[row][: ref.page_size_bytes]
            (theirs if is_store else ours).copy_(ours if is_store else theirs)
            copied += ref.page_size_bytes
        return copied


class CpuTieringSpec(TieringOffloadingSpec):
    """Tiering spec with the CPU worker."""

    _worker: OffloadingWorker | None

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if self._worker is None:
            region = SharedOffloadRegion(
                self._engine_id,
                # What a chunk of host memory was called up to vLLM 0.29.
                self.num_chunks if hasattr(self, "num_chunks") else self.num_blocks,
                self.config.parallel.rank,
                self.kv_bytes_per_chunk,
                self.cpu_page_size_per_worker,
            )
            assert self.blocks_per_chunk == 1, "one engine block is one chunk here"
            self._worker = CopyWorker(kv_caches, region)
        return self._worker
