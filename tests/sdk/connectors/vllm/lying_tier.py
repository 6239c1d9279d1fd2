"""Tier with mixed-up chunks: the control test for wrong KV in the tokens."""

from __future__ import annotations

from typing import Any

import numpy as np

from ostraca.connectors.vllm import OstracaTier


class LyingTier(OstracaTier):
    """Tier with successful loads of each chunk into the place of the next."""

    def __init__(self, *args: Any, **config: Any) -> None:
        super().__init__(*args, **config)
        self._loading: dict[int, list[int]] = {}

    def submit_load(self, job_metadata: Any) -> None:
        self._loading[job_metadata.job_id] = [int(row) for row in job_metadata.chunk_ids]
        super().submit_load(job_metadata)

    def get_finished_jobs(self) -> list[Any]:
        finished = super().get_finished_jobs()
        rows = np.asarray(self._primary_kv_view)
        for result in finished:
            loaded = self._loading.pop(result.job_id, [])
            rows[loaded] = rows[loaded[1:] + loaded[:1]]
        return finished
