"""A tier that hands over noise: the control that tells whether wrong KV would show in the tokens at all."""

from __future__ import annotations

from typing import Any

import numpy as np

from ostraca.connectors.vllm import OstracaTier


class LyingTier(OstracaTier):
    """Says that loads succeeded, and writes noise over what they brought."""

    def __init__(self, *args: Any, **config: Any) -> None:
        super().__init__(*args, **config)
        self._loading: dict[int, list[int]] = {}

    def submit_load(self, job_metadata: Any) -> None:
        self._loading[job_metadata.job_id] = [int(row) for row in job_metadata.chunk_ids]
        super().submit_load(job_metadata)

    def get_finished_jobs(self) -> list[Any]:
        finished = super().get_finished_jobs()
        dice = np.random.default_rng(0)
        rows = np.asarray(self._primary_kv_view).view(np.uint8)
        for result in finished:
            for row in self._loading.pop(result.job_id, []):
                rows[row] = dice.integers(0, 256, rows.shape[1], np.uint8)
        return finished
